"""A training over several processes: what one process does, and the same again after it was killed."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import flakit
from flakit.models import MIXERS, LanguageModel
from flakit.models.distributed import about, checkpoints
from flakit.train import Settings, again, app, operations, steepest, train
from tests.ops.over_ranks import over_ranks

ROOT = Path(__file__).parents[2]
SMALL = Settings(
    out=Path("."), data=None, mixer="rwkv7", dim=16, layers=2, head_size=8, slots=4, steps=4, size=8, T=16,
    accumulation=1, lr=1e-2, warmup=0.1, weight_decay=0.01, clip=1.0, seed=0, dtype="float32", parallel="ddp",
    checkpointing=False, compile=False, save_every=2, keep=9, watch_every=2, not_finite="stop", tensorboard=False,
    device="cpu",
)  # fmt: skip
SHARDED = replace(SMALL, parallel="fsdp2", accumulation=2, checkpointing=True, watch_every=0)
WAYS = {"ddp": SMALL, "fsdp2": SHARDED}
MORE = {
    f"{mixer}, {parallel}, {dtype}": replace(
        SHARDED if parallel == "fsdp2" else replace(SMALL, accumulation=4),
        mixer=mixer,
        dtype=dtype,
        save_every=99,
        watch_every=99,
    )
    for mixer in MIXERS
    for parallel in ("ddp", "fsdp2")
    for dtype in ("float32", "bfloat16")
}
"""All mixers, which `make test-all` tries."""
LOST = replace(SMALL, lr=1e37, warmup=0.0, watch_every=0)
"""Its second step computes with weights that no product can take."""


def log(folder: Path, kind: str = "step") -> list[dict]:
    lines = (folder / "log.jsonl").read_text().split("\n")[:-1]  # what is killed leaves half a line
    return [x for x in map(json.loads, lines) if x["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [x["loss"] for x in log(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)["weights"]


def same(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert [x["step"] for x in log(other)] == list(range(SMALL.steps))
    for name in ("loss", "grad_norm", "losses"):
        assert [x[name] for x in log(one)] == [x[name] for x in log(other)], name
    found = weights(other)
    assert all(torch.equal(x, found[name]) for name, x in weights(one).items())


def near(one: Path, other: Path, dtype: str = "float32") -> None:
    """Within what the order of sums rounds, that steps carry on."""
    rounding = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    assert losses(other) == pytest.approx(losses(one), rel=rounding)
    norms = [[x["grad_norm"] for x in log(folder)] for folder in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=100 * rounding)


def each(rank: int, folder: Path, ways: dict[str, Settings], again: tuple[str, ...] = ()) -> list[int]:
    """Statuses of trainings, and of those that go on as if they had been killed behind their first checkpoint."""
    found = [train(replace(s, out=folder / name)) for name, s in ways.items()]
    for name in again:
        torn = folder / f"{name}, torn"
        if rank == 0:
            tear(folder / name, torn)
        torch.distributed.barrier()
        found.append(train(replace(ways[name], out=torn)))
    return found


def tear(folder: Path, torn: Path) -> None:
    """What is there when a training is killed in the middle of a line of its log and of its second checkpoint."""
    first, second, *_ = checkpoints(folder)
    shutil.copytree(first, torn / first.name)
    shutil.copytree(second, torn / f".{second.name}")
    next((torn / f".{second.name}").glob("*.distcp")).write_bytes(b"half")
    lines = (folder / "log.jsonl").read_text().splitlines()
    (torn / "log.jsonl").write_text("\n".join([*lines[: 2 * SMALL.steps // 2], '{"kind": "step", "st']))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The folder of what two processes have trained, beside "one", which this one has."""
    folder = tmp_path_factory.mktemp("trainings")
    train(replace(SMALL, out=folder / "one"))
    found = over_ranks(2, each, folder, WAYS | {"lost": LOST}, ("ddp", "fsdp2"))
    for x in found:
        if isinstance(x, Exception):
            raise x
    assert found == [[0] * len(WAYS) + [1, 0, 0]] * 2
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_does(two, way):
    near(two / "one", two / way)
    assert losses(two / way)[-1] < losses(two / way)[0] - 0.5


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_training_goes_on_bit_for_bit(two, way):
    same(two / way, two / f"{way}, torn")
    assert [x["step"] for x in log(two / f"{way}, torn", "begin")] == [0, SMALL.save_every]


def test_a_training_goes_on_with_other_ranks_and_in_another_way(two, tmp_path, capsys):
    tear(two / "fsdp2", tmp_path / "went on")
    assert train(replace(SMALL, out=tmp_path / "went on")) == 0
    near(two / "one", tmp_path / "went on")
    assert "within rounding, ranks 2 then, 1 now\n" in capsys.readouterr().err


def test_every_rank_is_watched(two):
    found = log(two / "ddp", "headroom")
    assert [x["step"] for x in found] == [0, 2]
    model, worst = found[0]["kernels"]["none"], log(two / "one", "headroom")[0]["kernels"]["none"]
    assert model["rank"] in (0, 1) and model["exponent"] == pytest.approx(worst["exponent"], rel=1e-5)
    assert all(len(x["losses"]) == 2 and x["grad_norms"][0] == x["grad_norms"][1] for x in log(two / "ddp"))
    assert all(sum(x["losses"]) / 2 == pytest.approx(x["loss"]) for x in log(two / "ddp"))


@pytest.mark.parametrize("decay", ["rwkv6-wide", "rwkv7", "inf-spikes", "-1e-2", "forget"])
def test_the_steepest_chunks_have_the_headroom_of_all(decay):
    w = flakit.inputs("rwkv6", T=300, B=3, H=4, K=8, decay=float(decay) if decay[0] == "-" else decay)["w"]
    whole, some = flakit.headroom(w), flakit.headroom(steepest(w))
    for m in whole.margins:
        assert some.margin(m.kernel, m.dtype).exponent == pytest.approx(m.exponent, rel=0.1, abs=1e-3), m.kernel


def test_the_weights_at_the_end_are_a_model(two):
    kept = torch.load(two / "fsdp2" / "model.pt", weights_only=True)
    model = LanguageModel(**kept["model"])
    model.load_state_dict(kept["weights"])
    assert kept["step"] == SMALL.steps and model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()


def test_what_is_not_finite_is_kept_and_the_trace_finds_it(two):
    (end,), (found,) = log(two / "lost", "end"), log(two / "lost", "not finite")
    assert (end["step"], end["why"], found["step"]) == (1, "not finite", 1)
    path = Path(found["file"])
    kept = torch.load(path, weights_only=True)
    assert kept["tokens"].shape == (SMALL.size, SMALL.T) and kept["parts"] == 2
    assert max(x.abs().max() for x in kept["weights"].values()) > 1e36
    with flakit.trace() as t:
        assert "step 1, part 1 of 2: loss nan, and the gradient of" in again(path, "cpu")
    assert not t.finite and "models/" in str(t.first)
    assert about(checkpoints(two / "lost")[-1])["step"] == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--out: expected a folder, got none"),
        ("--out=x --mixer=mamba", "--mixer: expected one of rwkv7, rwkv6, gsa, attention, got 'mamba'"),
        ("--out=x --dtype=float16", "--dtype: expected one of float32, bfloat16, got 'float16'"),
        ("--out=x --parallel=fsdp", "--parallel: expected one of ddp, fsdp2, got 'fsdp'"),
        ("--out=x --not-finite=ignore", "--not-finite: expected one of stop, skip, got 'ignore'"),
        ("--out=x --lr=nan", "--lr: expected a number of at least 0, got nan"),
        ("--out=x --device=tpu", "--device: expected cuda or cpu, got 'tpu'"),
        ("--out=x --size=6 --accumulation=4", "--size: expected a multiple of ranks times accumulation, 1 * 4, got 6"),
        ("--out=x --dim=30", "--dim: expected a multiple of head_size = 64, got 30"),
        ("--out=x --data=none.txt", "--data: expected a file, none.txt is none"),
        ("--out=x --data=empty.txt", "--data: expected a file with text in it, empty.txt is empty"),
        ("--out=x --data=short.txt", "--T: expected fewer tokens than the 9 bytes of the text, got 1024"),
        ("--out=short.txt", "--out: expected a folder that there is or can be made, got short.txt"),
        ("--replay=none.pt", "--replay: expected a file that a training has left, none.pt is none"),
        ("--replay=short.txt", "--replay: expected a file not-finite-….pt that a training has left, got short.txt"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    done = CliRunner().invoke(app, words.split() + ["--device=cpu"] * ("--device" not in words))
    assert done.exit_code == 2 and says in done.output
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("T", 20), ("dtype", "bfloat16"), ("clip", 0.0)])
def test_another_training_does_not_go_on_from_this_one(two, name, value):
    had = getattr(SMALL, name)
    with pytest.raises(
        ValueError, match=f"^{name}: expected {had} as .*step-00000004 has it, got {value}; another out"
    ):
        train(replace(SMALL, out=two / "one", **{name: value}))


def test_another_text_is_refused_and_a_training_that_is_done_says_so(two, tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"0123456789" * 100)
    with pytest.raises(ValueError, match=r"^data: expected \d+ bytes, \w+ as .* has it, got 1000 bytes, \w+; another"):
        train(replace(SMALL, out=two / "one", data=tmp_path / "text"))
    assert train(replace(SMALL, out=two / "one")) == 0
    assert "all 4 steps are taken; a larger --steps goes on" in capsys.readouterr().err


def test_any_file_is_a_text(tmp_path):
    (tmp_path / "text").write_bytes(b"0123456789" * 100)
    s = replace(SMALL, data=tmp_path / "text", out=tmp_path / "out", layers=1, steps=30, save_every=99, watch_every=0)
    assert train(s) == 0
    assert losses(s.out)[0] == pytest.approx(math.log(256), abs=0.5) and losses(s.out)[-1] < 1


def test_what_is_not_finite_can_be_skipped(tmp_path):
    s = replace(LOST, out=tmp_path, not_finite="skip", layers=1)
    assert train(s) == 0
    assert len(log(tmp_path)) == s.steps and [x["step"] for x in log(tmp_path, "not finite")] == [1, 2, 3]
    assert len(list(tmp_path.glob("not-finite-*.pt"))) == 3 and checkpoints(tmp_path)[-1].name == "step-00000004"


def test_tensorboard_has_the_numbers_of_the_log(tmp_path, monkeypatch):
    found = []

    class Writer:
        def __init__(self, folder, purge_step):
            found.append((folder, purge_step))

        def add_scalar(self, *x):
            found.append(x)

        def close(self):
            found.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    s = replace(SMALL, out=tmp_path, tensorboard=True, layers=1, steps=2, watch_every=0)
    assert train(s) == 0
    assert found[0] == (str(tmp_path / "tensorboard"), 0) and found[-1] == "closed"
    assert [x[1:] for x in found[1:-1] if x[0] == "loss"] == [(x["loss"], x["step"]) for x in log(tmp_path)]


@pytest.mark.parametrize("mixer", MIXERS)
def test_operations_are_those_of_the_products(mixer):
    """Counted by PyTorch where they are matrices, and of the recurrence by hand: two products with a state of
    [K, V], RWKV7's four, GSA's four with [K, M]; a multiplication and an addition each, and twice that backward."""
    s = replace(SMALL, mixer=mixer, T=32)
    model = LanguageModel(**s.model)
    along = {"rwkv6": 2 * 8, "rwkv7": 4 * 8, "gsa": 4 * 4, "attention": s.T}[mixer]
    for block in model.blocks:
        if mixer != "attention":
            block.time.operator = lambda *x: SimpleNamespace(
                o=x[2] + sum(y.sum(-1, keepdim=True) for y in x if y.ndim == 4)
            )
        else:
            block.time.forward = lambda x, first, stream, own=block.time: (
                own.output(own.query(x) + own.key(x) + own.value(x)), first
            )  # fmt: skip
    with FlopCounterMode(display=False) as counted:
        model(torch.zeros(1, s.T, dtype=torch.long)).sum().backward()
    expected = counted.get_total_flops() / s.T + s.layers * s.dim * 6 * along
    assert operations(model, s) == pytest.approx(expected, rel=0.02)  # nothing flows back into tokens


# --- whole processes -------------------------------------------------------------------------------------------------


def started(out: Path, s: Settings) -> subprocess.Popen:
    """By torchrun, on two ranks."""
    words = [f"--{name.replace('_', '-')}={x}" for name, x in s.plain.items() if not isinstance(x, bool | None)]
    words = [x for x in words if not x.startswith("--out=")] + [f"--{name}" for name, x in s.plain.items() if x is True]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flakit.train"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*start, *words, f"--out={out}"], cwd=ROOT, env=env, **pipes)


def ended(process: subprocess.Popen, status: int) -> str:
    said = process.communicate(timeout=300)[0]
    assert process.returncode == status, said
    return said


def until(process: subprocess.Popen, folder: Path, steps: int) -> None:
    path = folder / "log.jsonl"
    while not path.is_file() or path.read_text().count('{"kind": "step"') < steps:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


LONG = replace(SMALL, steps=40, save_every=7, watch_every=0)


def test_a_process_leaves_with_its_output_and_its_status():
    code = "from flakit.models.distributed import leave; print('done', end=''); leave(3)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (process.returncode, process.stdout) == (3, "done")


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_killed_and_stopped_in_the_middle_it_goes_on_bit_for_bit(tmp_path, parallel):
    s = replace(LONG, parallel=parallel)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ended(started(whole, s), 0)
    process = started(cut, s)
    until(process, cut, 18)
    process.kill()
    for pid in log(cut, "begin")[0]["processes"]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    process = started(cut, s)
    until(process, cut, 24)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in process.communicate(timeout=300)[0]
    begins, (end,) = [x["step"] for x in log(cut, "begin")], log(cut, "end")
    assert len(begins) == 2 and begins[1] >= 14 and begins[1] % 7 == 0
    assert end["why"] == "SIGTERM" and 24 <= end["step"] < LONG.steps and not (cut / "model.pt").exists()
    ended(started(cut, s), 0)
    assert log(cut, "begin")[-1]["step"] == end["step"]
    assert losses(cut) == losses(whole) and len(losses(whole)) == LONG.steps
    assert all(torch.equal(x, weights(cut)[name]) for name, x in weights(whole).items())


@pytest.mark.full
def test_every_mixer_trains_over_ranks_as_alone(tmp_path):
    found = over_ranks(2, each, tmp_path, MORE)
    assert found == [[0] * len(MORE)] * 2
    for name, s in MORE.items():
        train(replace(s, out=tmp_path / f"{name}, alone"))
        near(tmp_path / f"{name}, alone", tmp_path / name, s.dtype)


@pytest.mark.full
def test_the_command_that_is_printed_finds_where_it_begins(two):
    path = log(two / "lost", "not finite")[0]["file"]
    words = [sys.executable, "-m", "flakit.cli", "trace", "-m", "flakit.train", "--replay", path, "--device", "cpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "native_layer_norm" in done.stdout and "step 1, part 1 of 2: loss nan" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_and_go_on(tmp_path):
    sizes = {"device": "cuda", "dim": 64, "head_size": 32, "T": 100, "dtype": "bfloat16"}
    ways = {name: replace(s, **sizes) for name, s in WAYS.items()} | {"lost": replace(LOST, **sizes)}
    train(replace(ways["ddp"], out=tmp_path / "one"))
    found = over_ranks(2, each, tmp_path, ways, ("ddp", "fsdp2"), backend="nccl")
    assert found == [[0, 0, 1, 0, 0]] * 2, found
    for way in WAYS:
        near(tmp_path / "one", tmp_path / way, "bfloat16")
        same(tmp_path / way, tmp_path / f"{way}, torn")
    assert all(0 < x["matrix_share"] < 1 and x["memory_gib"] > 0 for x in log(tmp_path / "ddp"))
    path = Path(log(tmp_path / "lost", "not finite")[0]["file"])
    assert "step 1, part 1 of 2: loss nan" in again(path)
