"""The probe of a sequence over ranks: its faults are found by it alone, and no process outlives an audit."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flakit
from flakit.cases import rounded_chain
from flakit.instruments import checks, pair, probe_settings
from flakit.instruments.examiner import Examiner
from flakit.instruments.finding import Finding, findings
from flakit.instruments.learn import ranks_refusal
from flakit.instruments.probes import PROBES
from flakit.instruments.runner import Runner
from flakit.instruments.subject import Subject
from flakit.numerics import operators
from tests.instruments import kernels, over_ranks
from tests.instruments.over_ranks import FIRST_RANKS_D, HEAD_0S_GATE, RWKV6, RWKV7, Failing

FAULTY = {"rwkv6": [RWKV6(HEAD_0S_GATE), RWKV6(FIRST_RANKS_D)], "rwkv7": [RWKV7("TF32")]}
EACH = [pytest.param(op, kernel, id=f"{op}-{kernel}") for op, all_ in FAULTY.items() for kernel in all_]


def ranks(kernel, op, **how):
    return flakit.audit(kernel, op, only="ranks", shrink=False, seconds=None, **how)["ranks"]


@pytest.mark.full
@pytest.mark.parametrize("op, kernel", EACH)
def test_no_other_probe_finds_a_fault_of_ranks(op, kernel):
    found = flakit.audit(kernel, op, only=[name for name in PROBES if name != "ranks"], shrink=False, seconds=None)
    assert found.passed, found


@pytest.mark.full
@pytest.mark.parametrize("op, kernel", [("rwkv6", RWKV6()), ("rwkv7", RWKV7())], ids=["rwkv6", "rwkv7"])
def test_the_same_operators_without_a_fault_pass(op, kernel):
    found = ranks(kernel, op)
    assert (found.verdict, found.tried) == ("pass", found.settings), found.words


@pytest.mark.full
def test_a_chain_is_off_by_its_law():
    x = Examiner(Subject(RWKV7("TF32"), "rwkv7"))
    (setting,) = map(x.resolved, probe_settings.chain(x))
    judged = findings(x.op, x.run(setting), x.truth(setting), setting)
    off = {found.tensor: found.figure for found in judged}["final_state"]
    x.close()
    assert off == pytest.approx(rounded_chain.law(setting.slices[0] // rounded_chain.CHUNK), rel=0.1)


@pytest.fixture(scope="module")
def shrunk():
    """Found by name, and shrunk."""
    return flakit.audit(f"{over_ranks.__name__}:fading_as_head_0", "rwkv6", only="ranks", seconds=None)["ranks"]


def test_a_gate_of_head_0_is_found_at_two_tokens_and_two_heads(shrunk):
    assert (shrunk.verdict, shrunk.case) == ("fail", "over_ranks"), shrunk.words
    assert (shrunk.setting["T"], shrunk.setting["H"], shrunk.setting["slices"]) == (2, 2, (1, 1))
    assert "flakit" not in shrunk.repro and not multiprocessing.active_children()


@pytest.mark.full
def test_its_script_runs_by_torchrun(shrunk, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(shrunk.repro)
    done = torchrun(script)
    assert done.returncode == 1 and "is off by" in done.stderr, done.stderr


def torchrun(script: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return subprocess.run(command, capture_output=True, text=True, env=env)


SAYS = {
    "dies": "the process of rank 1 of 2 ended, exit code 7",
    "hangs": "no answer of rank 0 and 1 of 2 in 3 s",
    "raises": "on rank 1 of 2, it raised IndexError: slices of unlike lengths",
}


@pytest.mark.parametrize("how", ["dies", *(pytest.param(how, marks=pytest.mark.full) for how in ("hangs", "raises"))])
def test_a_process_that_fails_is_a_finding_and_none_is_left(how, monkeypatch):
    monkeypatch.setattr(pair, "PATIENCE", 3.0)
    monkeypatch.setattr(pair, "GRACE", 0.5)
    x = Examiner(Subject(Failing(how=how), "rwkv6"))
    found = PROBES["ranks"].ask(x, probe_settings.ranks(x)[0])
    assert (found.kind, found.words) == ("raises", SAYS[how])
    assert not multiprocessing.active_children()


@pytest.mark.full
def test_one_that_dies_again_and_again_ends_the_audit_and_is_its_failure():
    found = ranks(Failing(how="dies"), "rwkv6")
    assert (found.verdict, found.words, found.repro) == ("fail", SAYS["dies"], None)


@pytest.mark.full
def test_a_rank_that_refuses_is_not_supported(monkeypatch):
    monkeypatch.setattr(pair, "GRACE", 0.5)
    found = ranks(Failing(how="refuses"), "rwkv6")
    assert (found.verdict, found.words) == ("not supported", "ValueError: slices of unlike lengths")


def test_what_cannot_be_called_over_ranks_says_why_and_starts_nothing(monkeypatch):
    def local(r, k, v, w, u, scale=None, group=None):
        return kernels.only_o(r, k, v, w, u, scale)

    def of_a_notebook(r, k, v, w, u, scale=None, group=None):
        return kernels.only_o(r, k, v, w, u, scale)

    of_a_notebook.__module__ = "__main__"
    monkeypatch.setattr(pair.Pair, "_start", lambda self: pytest.fail("processes were started"))
    for kernel, why in (
        (kernels.only_o, "its signature does not name group"),
        (local, "its two processes cannot import it: "),
        (of_a_notebook, "cannot import it from the script or notebook that runs"),
    ):
        found = ranks(kernel, "rwkv6")
        assert found.verdict == "not supported" and why in found.words, found.words


def on_a_gpu(r, k, v, w, u, scale=None, group=None):
    raise ValueError("expected tensors on a GPU")


def test_beside_one_gpu_ranks_are_on_the_cpu_where_the_subject_runs_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pair.ranks_device("cuda") == "cpu"
    x = Examiner(Subject(RWKV6(), "rwkv6"))
    x.device = "cuda"
    assert ranks_refusal(Runner(x.subject, "cuda"), x.plain) is None
    monkeypatch.setattr(checks, "through_states", lambda x, setting: Finding(setting, "fine", "o", 0.1, 1.0, "o"))
    assert checks.over_ranks(x, x.plain).words == "o; on the CPU, since ranks on GPUs need two"
    assert ranks_refusal(Runner(Subject(on_a_gpu, "rwkv6"), "cuda"), x.plain) == (
        "ranks on GPUs need two of them, and on the CPU it does not run: ValueError: expected tensors on a GPU"
    )


def summed(q, k, v, scale=None, initial_state=None, output_final_state=False, group=None):
    """Linear attention; nobody looks at the group."""
    S = (k[..., None] * v[..., None, :]).cumsum(1) + (0 if initial_state is None else initial_state[:, None])
    return q.shape[-1] ** -0.5 * torch.einsum("bthk,bthkv->bthv", q, S), S[:, -1]


@pytest.mark.full
def test_an_operator_of_ones_own_that_ignores_its_group_is_found(monkeypatch):
    monkeypatch.setattr(operators, "DESCRIBED", {})
    op = flakit.describe("summed", summed, {"q k": "B T H K", "v": "B T H V"})
    found = flakit.audit(summed, op, only="ranks", seconds=None)["ranks"]
    assert (found.verdict, found.cause, found.setting["slices"]) == ("fail", "", (1, 1)), found.words
    assert "dist.init_process_group" in found.repro


@pytest.mark.gpu
def test_our_operator_passes_beside_a_gpu_or_on_two():
    found = ranks("chunk_rwkv6", "rwkv6", device="cuda")
    assert (found.verdict, found.tried) == ("pass", found.settings), found.words


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_no_process(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import flakit\nfrom tests.instruments.over_ranks import Failing\n"
        'flakit.audit(Failing(how="hangs"), "rwkv6", only="ranks", shrink=False)\n'
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.PIPE, start_new_session=True)
    own = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    begun = time.monotonic()
    while len(children := own.read_text().split()) < 2 and time.monotonic() - begun < 60:
        time.sleep(0.1)
    time.sleep(5)
    os.killpg(running.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in running.communicate(timeout=20)[1]
    begun = time.monotonic()
    while (left := [pid for pid in children if runs(pid)]) and time.monotonic() - begun < 10:
        time.sleep(0.1)
    assert len(children) >= 2 and not left
