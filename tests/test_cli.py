import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import flakit
from flakit import cli, doctor
from flakit.bench import speed, tune
from flakit.bench.meter import KernelTime
from flakit.cases import registry
from flakit.cases.laws import Row
from flakit.course import progress
from flakit.models import LanguageModel, convert, recorded
from flakit.numerics.recorded import data_folder, read, version_of
from flakit.numerics.work import work
from flakit.ops.common.launch import Chip, rows_for
from tests.bench.metering import FakeMeter


def run(*args):
    return CliRunner().invoke(cli.app, args)


def test_version():
    assert run("--version").output.strip() == flakit.__version__


def test_without_arguments_it_shows_the_commands():
    assert "doctor" in run().output


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
@pytest.mark.parametrize("level", [doctor.OK, doctor.WARNING, doctor.BROKEN])
def test_doctor_exits_with_1_only_if_something_is_broken(monkeypatch, level, as_json):
    diagnosis = doctor.Diagnosis((doctor.Finding("torch", level, "as it is"),))
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    done = run("doctor", *["--json"] * as_json)
    assert done.exit_code == (level == doctor.BROKEN)
    assert level in done.output


# --- flakit cases ---------------------------------------------------------------------------------------------------


def test_cases_lists_every_case():
    done = run("cases")
    assert done.exit_code == 0 and all(name in done.output for name in registry.CASES)
    listed = json.loads(run("cases", "--json").output)
    assert [entry["name"] for entry in listed] == list(registry.CASES)
    anchor = next(entry for entry in listed if entry["name"] == "anchor")
    expects = "a number from -1000 to 0, a natural-log decay"
    assert anchor["knobs"]["w"] == {"default": -88.8, "expects": expects} and anchor["title"] and anchor["threads"]


@pytest.mark.parametrize("words", [["--w", "-88.8", "--T", "64"], ["--w=-88.8", "--T=64"]], ids=["apart", "joined"])
def test_cases_runs_one_with_knobs(words):
    done = run("cases", "anchor", *words)
    assert done.exit_code == 0 and "o finite at w = -88.8" in done.output and "88.76" in done.output
    made = json.loads(run("cases", "anchor", *words, "--json").output)
    assert made["knobs"] == {"w": -88.8, "T": 64}
    rows = {row["what"]: row for row in made["cases"]["anchor"]}
    assert rows["o finite at w = -88.8"]["measured"] is False and rows["o finite at w = -88.8"]["agrees"] is True
    assert rows["du ends at |w|"]["law"] == "inf" and rows["du ends at |w|"]["recorded"] is None


def test_cases_without_knobs_tells_the_story():
    done = run("cases", "strides")
    assert done.exit_code == 0 and "reported" in done.output and "[2, 100, 4, 64]: misread" in done.output


def test_cases_all_fails_where_a_law_fails(monkeypatch):
    """Every story in turn, here with made-up rows: the real ones are the tests of the cases."""
    rows = {name: [Row(f"{name}'s number", math.nan, 2.0, 2.0)] for name in registry.CASES}
    monkeypatch.setattr(registry.Case, "reproduce", lambda case: rows[case.name])
    done = run("cases", "all")
    assert done.exit_code == 0 and all(f"{name}'s number" in done.output for name in rows)
    assert set(json.loads(run("cases", "all", "--json").output)["cases"]) == set(rows)
    rows["anchor"] = [Row("planted", math.nan, 2.0, 2.1)]
    done = run("cases", "all")
    assert done.exit_code == 1 and "1 not as predicted" in done.output and "NO" in done.output


def test_diagnose_prints_the_faults_that_fit():
    done = run("diagnose", "o=ok", "dr=nan", "du=ok")
    assert done.exit_code == 0 and "start anchor" in done.output and "scale" not in done.output
    found = json.loads(run("diagnose", "dw=wrong", "o=ok", "dk=ok", "dr=ok", "--json").output)
    assert [fit["fault"] for fit in found] == ["precision"] and found[0]["tensors"]["dw"]["kind"] == "wrong"
    none = run("diagnose", "o=ok", "du=inf")
    assert none.exit_code == 1 and "No fault of the casebook does that. Nearest:" in none.output


# --- flakit progress ------------------------------------------------------------------------------------------------


def test_progress_prints_what_was_right_and_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.delenv("FLAKIT_MINE", raising=False)
    monkeypatch.chdir(tmp_path)
    notebooks = tmp_path / "flakit-notebooks"
    notebooks.mkdir()
    assert "0 of" in run("progress").output
    lesson = progress().lessons[1]
    right = dict.fromkeys(lesson.checks, "2026-01-01")
    (notebooks / "mine.json").write_text(json.dumps({"right": right}))
    found = json.loads(run("progress", "--json").output)
    assert found["folder"] == str(notebooks.resolve()) and all(found["lessons"][lesson.name].values())
    assert found["next"]["lesson"].startswith("02") and list(found["faults"]) == ["scale"]
    assert found["faults"]["scale"]["final_state"]["kind"] == "ok" != found["faults"]["scale"]["o"]["kind"]
    printed = run("progress", "flakit-notebooks").output
    assert f"{len(right)} of" in printed and f"Next: {found['next']['check']}" in printed
    (scale,) = (line.split() for line in printed.splitlines() if line.split()[:1] == ["scale"])
    assert scale[1:] == ["01", *["wrong"] * 6, "ok", "wrong"]
    assert [line.split()[2:] for line in printed.splitlines() if line.split()[:2] == ["bug", "A"]] == [["06", *"·" * 8]]


# --- flakit headroom ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Decays of two layers: one that no kernel breaks on, one with a token that bug A breaks on."""
    calm = torch.full((1, 40, 1, 2), -0.01)
    wild = calm.clone()
    wild[0, 16, 0, 1] = -100.0
    torch.save({"calm": calm, "wild": wild}, tmp_path / "w.pt")
    torch.save(calm, tmp_path / "one.pt")
    return tmp_path / "w.pt"


def test_headroom_prints_a_table_and_exits_with_1_where_a_kernel_breaks(stored):
    done = run("headroom", str(stored), "--op", "rwkv6")
    assert done.exit_code == 1, done.output
    said = " ".join(done.output.split())
    assert "rwkv6, chunks of 64, blocks of 16" in said and "wild, token 16, head 0" in said and "0.887" in said
    assert "float32 bfloat16 float16" in said
    assert run("headroom", str(stored), "--layer", "calm").exit_code == 0
    assert run("headroom", str(stored.with_name("one.pt"))).exit_code == 0


def test_headroom_looks_at_the_kernels_and_formats_that_are_asked_for(stored):
    for op, breaks in (("rwkv6", True), ("gsa", False)):
        done = run("headroom", str(stored), "--op", op, "--only", "first-row", "--dtype", "bfloat16", "--json")
        found = json.loads(done.output)
        assert done.exit_code == breaks == found["breaks"] and found["op"] == op
        assert list(found["layers"]) == ["calm", "wild"]
        (margin,) = found["layers"]["wild"]
        assert (margin["kernel"], margin["dtype"], margin["breaks"]) == ("first-row", "bfloat16", breaks)
        assert (margin["token"], margin["channel"]) == ((16, 1) if breaks else (margin["token"], margin["channel"]))
    shown = run("headroom", str(stored), "--only", "first-row", "--dtype", "bfloat16").output
    assert "bfloat16" in shown and "float16 " not in shown.replace("bfloat16", "") and "dyadic" not in shown


def test_headroom_says_where_a_gate_has_no_gradient(stored):
    w = -torch.tensor([1.0, 12.0]).half().exp().view(1, 2, 1, 1)
    torch.save(w, stored.with_name("gate.pt"))
    done = run("headroom", str(stored.with_name("gate.pt")), "--only", "dyadic")
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "1 decay is -inf: a gate w = -exp(x) has no gradient there" in said
    assert "flakit.log_decay" in said
    done = run("headroom", str(stored.with_name("gate.pt")), "--only", "dyadic", "--json")
    (gate,) = json.loads(done.output)["gates"].values()
    margin = pytest.approx(math.log(65504) - 1, abs=1e-3)
    assert gate == {"dtype": "float16", "infinite": 1, "largest": 2.71875, "margin": margin}


def test_headroom_runs_a_checkpoint_and_measures_its_decays(tmp_path):
    model = LanguageModel(11, 16, 2, "rwkv6", head_size=8, gated=True, norm_eps=64e-5 / 8)
    with torch.no_grad():
        model.blocks[1].time.w.bias[3] = 3.0  # decays of e^3 a token
    torch.save(convert.weights_of(model, "rwkv-lm"), tmp_path / "x060.pth")
    tokens = torch.arange(40) % 11
    torch.save(tokens, tmp_path / "tokens.pt")
    np.save(tmp_path / "tokens.npy", tokens.numpy().astype(np.int32))
    with recorded(model) as w:
        model(tokens[None])
    expected = flakit.headroom(w, "rwkv6")
    for name in ("tokens.pt", "tokens.npy"):
        done = run("headroom", str(tmp_path / "x060.pth"), "--tokens", str(tmp_path / name), "--json")
        found = json.loads(done.output)
        assert done.exit_code == 1 and found["op"] == "rwkv6" and list(found["layers"]) == list(w)
        margins = {(m["kernel"], m["dtype"]): m for m in found["layers"]["blocks.1.time"]}
        wanted = expected.margin("none", torch.float32, "blocks.1.time")
        assert margins["none", "float32"]["exponent"] == pytest.approx(wanted.exponent, rel=1e-4)
    assert run("headroom", str(tmp_path / "x060.pth"), "--only", "dyadic").exit_code == 0  # on random tokens
    with pytest.raises(ValueError, match="w: expected decays, got the weights of RWKV-LM's RWKV6, whose decays depend"):
        flakit.headroom(tmp_path / "x060.pth")
    for words, says in (
        (["x060.pth", "--op", "gsa"], "--op: expected rwkv6, since x060.pth is a checkpoint of it, got 'gsa'"),
        (["x060.pth", "--tokens", "x060.pth"], "tokens: expected whole numbers [T] or [B, T] in 'x060.pth', got"),
        (["x060.pth", "--tokens", "a.txt"], "tokens: expected a file .pt, .pth or .npy, got 'a.txt'"),
        (
            ["tokens.pt", "--tokens", "tokens.pt"],
            "--tokens: expected none, since tokens.pt holds decays, no checkpoint",
        ),
    ):
        paths = [str(tmp_path / word) if "." in word else word for word in words]
        done = run("headroom", *paths)
        assert done.exit_code == 2 and says in " ".join(done.stderr.split()), done.stderr


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_prints_where_it_is_finite_and_writes_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    files = {name: tmp_path / f"found.{name}" for name in ("csv", "json", "png", "jsonl")}
    options = [f"--csv={files['csv']}", f"--json={files['json']}", f"--store={files['jsonl']}"]
    options += [f"--picture={files['png']}", "--law=flakit.cases.padding:law"]
    result = run("sweep", "rwkv6", "--over", "decay=-0.1..-10:3", "--over", "T=4,8", "--set", "K=4", *options)
    assert result.exit_code == 0, result.output
    assert [line.split()[1:5] for line in result.output.splitlines() if " dw " in line] == [["dw", "│", "6", "of"]]
    grid = json.loads(files["json"].read_text())
    errors = np.array(grid["grids"]["dw.l2"])
    i, j = np.unravel_index(errors.argmax(), errors.shape)
    where = f"decay={grid['axes']['decay'][i]:g}, T={grid['axes']['T'][j]}"
    row = next(line for line in result.output.splitlines() if " dw " in line)
    assert [cell.strip() for cell in row.split("│")[4:6]] == [f"{errors.max():.1e}", where]
    assert len(files["csv"].read_text().splitlines()) == 7
    assert json.loads(files["json"].read_text())["axes"]["decay"] == pytest.approx([-0.1, -1.0, -10.0])
    assert files["png"].read_bytes().startswith(b"\x89PNG") and len(files["jsonl"].read_text().splitlines()) == 7


def test_a_sweep_says_where_something_was_raised_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    table = tmp_path / "found.csv"
    result = run("sweep", "rwkv6", "--over", "chunk_size=16,17,32", "--set", "T=8", "--set", "K=4", "--csv", str(table))
    assert result.exit_code == 0, result.output
    assert "raised an error in 1 of 3, first at chunk_size=17: chunk_size: expected" in result.output, result.output
    assert ["chunk_size: expected" in line for line in table.read_text().splitlines()] == [False, False, True, False]


# --- speed ----------------------------------------------------------------------------------------------------------


def test_a_recording_is_shown_and_drawn_without_a_gpu(tmp_path):
    picture = tmp_path / "times.png"
    done = run("bench", "--recorded", str(data_folder() / "h200_speed.json"), "--picture", str(picture))
    assert done.exit_code == 0, done.output
    assert "recorded on NVIDIA H200" in done.output and "RWKV6 chunk B8 T4096" in done.output
    table = read("h200_speed")
    floor = work(first := table.rows[0]).floor_ms(*(table.meta[name] for name in ("copy_tb_s", "tflops")))
    shown = [f"{x:.3g}" for x in (first["forward_ms"], first["both_ms"], first["both_ms"] / floor)]
    lines = [words for words in map(str.split, done.output.splitlines()) if words[:3] == ["flakit", *shown[:2]]]
    assert lines and {shown[2], f"{first['extra_gib']:.3g}", f"{first['error']:.1e}"} <= set(lines[0])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def bench(monkeypatch):
    """`flakit bench` of two small cases on the CPU, with a meter that needs no GPU."""
    sizes = {"B": 1, "H": 2, "K": 16, "V": 16, "decay": "rwkv6-init", "dtype": "float32"}
    cases = [speed.Case("rwkv6", "chunk", T=32, **sizes), speed.Case("rwkv6", "recurrent", T=1, decode=True, **sizes)]
    monkeypatch.setattr(speed, "chosen", lambda only, cases=cases: cases)
    monkeypatch.setattr(speed, "PEERS", {"fla": lambda case: speed._installed("no_such_module", "that library")})
    monkeypatch.setattr("flakit.bench.meter.Meter", FakeMeter)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return lambda *options: run("bench", *options)


def test_bench_prints_writes_and_draws_what_it_times(bench, tmp_path):
    written, picture = tmp_path / "times.json", tmp_path / "times.png"
    done = bench("--json", str(written), "--picture", str(picture), "--only", "rwkv6")
    assert done.exit_code == 0, done.output
    assert "RWKV6 chunk B1 T32 float32" in done.output and "1.75–2.25" in done.output
    assert "fla is not timed: ModuleNotFoundError: that library is not installed here" in done.stderr
    table = read(written)
    assert table.meta["command"] == f'flakit bench --only "rwkv6" --json {written}'
    assert (table.meta["device"], table.meta["copy_tb_s"], table.meta["tflops"]) == ("a GPU", 4.0, 800.0)
    assert [(row["decode"], row["both_ms"]) for row in table.rows] == [(False, 2.0), (True, None)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = run("bench", "--recorded", str(written), "--picture", str(tmp_path / "again.png"))
    assert again.exit_code == 0 and "1.75–2.25" in again.output


def test_bench_profiles_kernels(bench, tmp_path):
    done = bench("--profile", "--json", str(tmp_path / "kernels.json"))
    assert done.exit_code == 0, done.output
    assert ["a_kernel", "2", "3", "75.0%"] in map(str.split, done.output.splitlines())
    rows = read(tmp_path / "kernels.json").rows
    assert [row["what"] for row in rows] == ["forward", "forward", "both", "both", "forward", "forward"]


class Profiling(FakeMeter):
    """Tells which kernels a call ran by the number of profiled calls before it; fails at those of `failing`."""

    profiled, failing = 0, ()

    def kernels(self, call, calls=10):
        call()
        Profiling.profiled += 1
        if Profiling.profiled in self.failing:
            raise RuntimeError("no profiler here")
        shares = {f"kernel_{Profiling.profiled}": 0.6, "void at::fill<float>(int, float)": 0.36, "a_fast_one": 0.04}
        return [KernelTime(name, 1.0, share, share) for name, share in shares.items()]


@pytest.fixture
def with_peer(bench, monkeypatch, tmp_path):
    """`flakit bench --json`, with a peer that is our own code: (failing, options) -> (what it did, the rows, meta).
    Per case four or two calls are profiled: ours and the peer's forward and, except for a decode, both."""
    peers = {"peer": lambda case: speed.Competitor(case.operator.forms[case.form])}
    monkeypatch.setattr(speed, "PEERS", peers)
    monkeypatch.setattr("flakit.bench.meter.Meter", Profiling)

    def made(failing=(), *options):
        monkeypatch.setattr(Profiling, "profiled", 0)
        monkeypatch.setattr(Profiling, "failing", failing)
        done = bench("--json", str(tmp_path / "times.json"), *options)
        assert done.exit_code == 0, done.output
        table = read(tmp_path / "times.json")
        return done, [(row["who"], row["kernels"]) for row in table.rows], table.meta

    return made


def test_bench_names_the_kernels_of_peers(with_peer, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "peer_version", lambda: {"fla": "0.6.0"})
    done, rows, meta = with_peer()
    both, decode = (["kernel_4", "void at::fill<float>(int, float)"], ["kernel_6", "void at::fill<float>(int, float)"])
    assert rows == [("flakit", None), ("peer", both), ("flakit", None), ("peer", decode)]
    assert meta["tilelang"] == (version_of("tilelang") or "none")
    again = run("bench", "--recorded", str(tmp_path / "times.json"))
    for output in (done.output, again.output):
        lines = [line.rstrip() for line in output.splitlines()]
        for line in ("    kernels: kernel_4, at::fill", "    kernels: kernel_6, at::fill"):
            assert lines[lines.index(line) - 1].split()[0] == "peer"


def test_bench_profiles_nothing_without_a_peer(with_peer, monkeypatch):
    _, rows, meta = with_peer((), "--no-peers")
    assert rows == [("flakit", None)] * 2 and Profiling.profiled == 0
    monkeypatch.setattr(speed, "PEERS", {"fla": lambda case: speed._installed("no_such_module", "that library")})
    done, rows, _ = with_peer()
    assert rows == [("flakit", None)] * 2 and Profiling.profiled == 0 and "kernels" not in done.output


@pytest.mark.parametrize(("failing", "says"), [(4, "peer failed on rwkv6"), (1, "rwkv6")], ids=["peer", "ours"])
def test_a_failing_profile_keeps_the_rows(with_peer, failing, says):
    done, rows, _ = with_peer([failing])
    assert [who for who, _ in rows] == ["flakit", "peer"] * 2
    assert rows[1] == ("peer", None) and rows[3][1]
    said = " ".join(done.stderr.split())
    assert f"kernels are not named: {says} chunk" in said and "RuntimeError: no profiler here" in said


def test_bench_draws_the_decays_of_a_file(bench, tmp_path, monkeypatch):
    small = replace(speed.CASES[0], B=1, T=32, H=2, K=16, V=16, dtype="float32")
    monkeypatch.setattr(speed, "CASES", [small])
    drawn, inputs = [], speed.Case.inputs
    monkeypatch.setattr(speed.Case, "inputs", lambda *args, **sizes: drawn.append(inputs(*args, **sizes)) or drawn[-1])
    values = [-0.5, -3.0, -math.inf]
    torch.save({"layer": torch.tensor(values).view(1, 3, 1, 1)}, tmp_path / "mine.pt")
    written = tmp_path / "times.json"
    done = bench("--gates", str(tmp_path / "mine.pt"), "--json", str(written))
    assert done.exit_code == 0, done.output
    assert "RWKV6 chunk B1 T32 float32 mine.pt" in done.output
    assert [row["decay"] for row in read(written).rows] == ["mine.pt"]
    assert {*drawn[0]["w"].unique().tolist()} == {*values}


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (torch.tensor([-1.0]), "--gates: expected decays [B, T, H, K], got [1]"),
        ({"a layer": torch.ones(1, 1, 1, 2)}, "--gates['a layer']: expected natural-log decays <= 0, got 1"),
        (torch.ones(1, 1, 1, 2).int(), "--gates: expected a tensor of floating-point decays, got"),
        ({}, "--gates: expected decays of at least one layer, got none"),
    ],
    ids=["shape", "positive", "integers", "empty"],
)
def test_bench_refuses_other_files(bench, tmp_path, saved, says):
    torch.save(saved, tmp_path / "mine.pt")
    done = bench("--gates", str(tmp_path / "mine.pt"))
    assert done.exit_code == 2 and f"flakit bench: {says}" in " ".join(done.stderr.split())


def test_a_recordings_numbers_are_whole_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("bench", "--recorded", str(data_folder() / "h200_speed.json")).output.splitlines()
    assert not [line for line in lines if "…" in line or len(line) > 80]
    rows = read("h200_speed").rows
    decode = next(row for row in rows if row["decode"])
    spread = "–".join(f"{decode[f'forward_ms_{part}']:.3g}" for part in (20, 80))
    assert any(spread in line.split() and "<0.01" in line.split() for line in lines)
    started = next(row for row in rows if row["first_forward_s"])
    first = f"{started['first_forward_s']:.1f} + {started['first_backward_s']:.1f}"
    assert any(line.rstrip().endswith(f" {first}") for line in lines)
    long = next(row for row in rows if len(row["who"]) > 20)
    below = lines[lines.index(f"  {long['who']}") + 1]
    assert below.split()[:2] == [f"{long[f'{what}_ms']:.3g}" for what in ("forward", "both")]


def test_tune_writes_its_rows_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_ROWS", str(tmp_path))

    def trial(key, row, anew):
        if key[0] == "scan" and key[1] == "float32":
            raise RuntimeError("an illegal memory access")
        return 1.0 if row.num_warps == 8 else 2.0

    monkeypatch.setattr(tune, "here", lambda: (Chip("NVIDIA RTX 4090", 89, 101376), trial))
    done = run("tune", "--only", "scan 16-bit")
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'sm_89.json'}, for GPUs of compute capability 8.9" in done.output
    assert rows_for(Chip("", 89, 0))["scan", "16-bit"].num_warps == 8
    done = run("tune", "--only", "scan")
    assert done.exit_code == 2 and "an illegal memory access" in done.stderr
    assert f"1 rows found before stand in {tmp_path / 'sm_89.json'}" in done.stderr


# --- what cannot run ------------------------------------------------------------------------------------------------

REFUSED = {
    "docter": "No such command 'docter'",
    "cases anchr": "there is none named 'anchr'; did you mean anchor?",
    "cases anchor --ww 1": "ww: anchor has no such knob",
    "cases anchor --w deep": "w: expected a number from -1000 to 0, a natural-log decay, got 'deep'",
    "cases anchor --w 1": "w: expected a number from -1000 to 0, a natural-log decay, got 1.0",
    "cases anchor --w": "w: expected a value, got none",
    "cases anchor --w --T 64": "w: expected a value, got none",
    "cases anchor deep": "expected knobs like --w -88.8, got 'deep'",
    "cases all --w 1": "w: expected the name of one case before its knobs",
    "cases transposed_mask --BK 12": "BK: expected 16 or 32 or 64 or 128, got 12",
    "diagnose dr": "expected what was seen as dr=nan",
    "diagnose dr=bad": "dr: expected one of ok",
    "progress nowhere": "folder: expected",
    "headroom nowhere.pt": "w: expected a file of decays, there is none at",
    "headroom w.csv": "w: expected a file .pt, .pth, .safetensors, .npy, got 'w.csv'",
    "headroom w.pt --op rwkv5": "op: expected one of rwkv6, rwkv7, gsa, linear_attn, ",
    "headroom w.pt --layer lost": "--layer: expected one of calm, wild, got 'lost'",
    "headroom one.pt --layer calm": "--layer: expected none, since one.pt holds one tensor without a name",
    "headroom w.pt --only gla": "only: expected kernels of rwkv6",
    "headroom w.pt --dtype float8": "--dtype: expected one of float32, bfloat16, float16, got 'float8'",
    "headroom w.pt --chunk 48": "chunk: expected a power of two, got 48",
    "sweep rwkv6 --over T": "--over: expected name=value,value or name=first..last:count, got 'T'",
    "sweep rwkv6 --over T=1..x": "--over: expected name=first..last:count, got 'T=1..x'",
    "sweep rwkv6 --over decay=-1..1:3": "expected two numbers of one sign",
    "sweep rwkv6 --over form=chonk": "form: expected one of chunk, recurrent, got 'chonk'",
    "sweep nowhere.py:f --over T=4": "subject: expected a file, nowhere.py does not exist",
    "sweep rwkv6 --over T=4 --over T=8": "--over: expected T once, got it twice",
    "sweep rwkv6 --over T=4 --set K=4 --set K=8": "--set: expected K once, got it twice",
    "sweep rwkv6 --over T=4 --store a.csv": "--store: expected a name ending in .jsonl, or a folder",
    "sweep rwkv6 --over T=4 --law foo": "--law: expected module:function or file.py:function, got 'foo'",
    "sweep rwkv6 --over T=4 --csv none/a.csv": "--csv: expected a folder that there is, got none",
    "sweep rwkv6 --over T=4 --picture /": "--picture: expected a file, / is a folder",
    "bench --only rwkv5": "flakit bench: --only: expected words of a case such as",
    "bench --gates w.csv": "flakit bench: --gates: expected a file .pt, .pth, .safetensors, .npy, got 'w.csv'",
    "bench --gates nowhere.pt": "flakit bench: --gates: expected a file of decays, there is none at",
    "bench --gates w.pt --first-calls": "--gates: expected without --first-calls",
    "bench --json times.csv": "--json: expected a name ending in .json, got times.csv",
    "bench --picture nowhere/a.png": "--picture: expected a folder that there is, got nowhere",
    "bench --profile --picture a.png": "--profile: expected without --picture",
    "bench --recorded no.json": "no recording no.json",
    "bench --recorded no.json --only gsa": "--recorded: expected alone or with --picture",
    "bench": "flakit bench: expected a CUDA GPU, found none",
    "tune": "flakit tune: expected a CUDA GPU to time kernels on, found none",
    "tune --only rwkv5": "flakit tune: --only: expected words such as 'rwkv6 16-bit'",
    "tune --out rows": "--out: expected a name ending in .json, got rows",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_that_cannot_run_says_why(line, stored, monkeypatch):
    monkeypatch.chdir(stored.parent)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a sweep would set it for the whole process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run(*line.split())
    assert done.exit_code == 2 and REFUSED[line] in " ".join(done.stderr.split())
