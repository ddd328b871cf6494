"""How long an operator takes and how much memory, with its error in the same run: `flakit bench`.

Medians of CUDA-event times after warm-up, the competitors in turn on the same inputs; "both" is the forward and the
gradients of all inputs by `torch.autograd.grad`. Extra memory is the peak above the inputs. First calls are timed in a
fresh process with an empty kernel cache, so that compiling and any autotuning count.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from ..numerics.evaluate import cotangents, truth
from ..numerics.gradients import measures
from ..numerics.inputs import inputs
from ..numerics.operators import operator


@dataclass(frozen=True)
class Case:
    """One line of the table: what runs on which inputs."""

    op: str
    form: str
    B: int
    T: int
    H: int
    K: int
    V: int
    decay: str | float
    dtype: str = "bfloat16"
    M: int | None = None

    def inputs(self, **smaller) -> dict:
        made = {key: value for key, value in asdict(self).items() if key not in ("op", "form")} | smaller
        return inputs(self.op, **{**made, "dtype": getattr(torch, self.dtype)}, device="cuda", requires_grad=True)


CASES = [
    *(Case("rwkv6", "chunk", 8, 4096, 32, 64, 64, decay) for decay in ("rwkv6-init", "logsigmoid", -5.0, -20.0)),
    Case("rwkv6", "chunk", 1, 32768, 32, 64, 64, "rwkv6-init"),
    Case("rwkv6", "chunk", 8, 4096, 32, 64, 64, "rwkv6-init", "float32"),
    Case("rwkv6", "recurrent", 8, 4096, 32, 64, 64, "rwkv6-init"),
    *(Case("rwkv7", "chunk", 8, 4096, 32, 64, 64, decay) for decay in ("rwkv7", -5.0)),
    Case("rwkv7", "chunk", 1, 32768, 32, 64, 64, "rwkv7"),
    Case("rwkv7", "chunk", 8, 4096, 32, 64, 64, "rwkv7", "float32"),
    Case("rwkv7", "recurrent", 8, 4096, 32, 64, 64, "rwkv7"),
    *(Case("gsa", "chunk", 8, 4096, 16, 128, 128, decay, M=64) for decay in ("gsa", -5.0)),
    Case("gsa", "chunk", 1, 32768, 16, 128, 128, "gsa", M=64),
    Case("gsa", "chunk", 8, 4096, 16, 128, 128, "gsa", "float32", M=64),
    Case("gsa", "recurrent", 8, 4096, 16, 128, 128, "gsa", M=64),
]


def peer_version() -> dict[str, str]:
    """{"fla": its version} where flash-linear-attention is installed, else nothing: for a recording's meta."""
    return {"fla": importlib.metadata.version("fla-core")} if importlib.util.find_spec("fla") else {}


def competitors(case: Case, peers: bool = True) -> dict[str, Callable]:
    """The functions to time, by name: ours, and flash-linear-attention's where it is installed."""
    ours = operator(case.op).forms[case.form]
    found = {"flakit": ours}
    if peers and importlib.util.find_spec("fla"):
        peers = importlib.import_module(f"fla.ops.{case.op}")
        peer = getattr(peers, ours.__name__, None)
        if peer:
            scale = (
                case.K ** operator(case.op).scale_exponent
            )  # said aloud: the peer's two forms differ in their default
            found["fla"] = lambda *args, **named: peer(*args, scale=scale, **named)
    return found


def _calls(function: Callable, case: Case, made: dict) -> tuple[Callable, Callable]:
    op = operator(case.op)
    leaves = [made[name] for name in op.tensors]
    do, _ = cotangents(op, made)

    def forward():
        with torch.no_grad():
            return function(*leaves)[0]

    def both():
        return torch.autograd.grad(function(*leaves)[0], leaves, do)

    return forward, both


def _error(function: Callable, case: Case) -> float:
    """Worst relative L2 error over o and every gradient, on a short sequence of the same kind."""
    op, made = operator(case.op), case.inputs(B=1, T=512)
    leaves = [made[name] for name in op.tensors]
    o, *_ = function(*leaves)
    do, _ = cotangents(op, made)
    grads = torch.autograd.grad(o, leaves, do)
    true = truth(op, made)
    named = {"o": o} | {f"d{name}": grad for name, grad in zip(op.tensors, grads, strict=True)}
    return max(measures(x.detach(), true[name])["l2"] for name, x in named.items())


def first_call(case: Case, who: str) -> tuple[float, float]:
    """Seconds of the first forward and of the first backward, in a fresh process with an empty kernel cache."""
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(asdict(case)), who],
            env=os.environ | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if run.returncode:
        raise RuntimeError(f"{who}: the first call failed\n{run.stderr}")
    forward, backward = map(float, run.stdout.split()[-2:])
    return forward, backward


def _time_first_call(case: Case, who: str) -> None:
    made = case.inputs(B=1, T=max(64, case.T // 8))
    forward, both = _calls(competitors(case)[who], case, made)
    times = []
    for call in (forward, both):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(*times)


def rows(cases: list[Case] | None = None, *, peers: bool = True, first_calls: bool = True) -> Iterator[dict]:
    """One row per case and competitor; needs a GPU. A peer that tunes itself takes minutes per shape."""
    from triton.testing import do_bench

    if not torch.cuda.is_available():
        raise RuntimeError("flakit bench: expected a CUDA GPU, found none")
    for case in CASES if cases is None else cases:
        made = case.inputs()
        calls = {who: _calls(function, case, made) for who, function in competitors(case, peers).items()}
        timed: dict[tuple[str, str], list[float]] = {}
        for _ in range(2):  # A B A B: a clock that drifts drifts for both
            for who, pair in calls.items():
                for what, call in zip(("forward", "both"), pair, strict=True):
                    timed.setdefault((who, what), []).append(do_bench(call, warmup=50, rep=200, return_mode="median"))
        for who, (_, both) in calls.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            extra = (torch.cuda.max_memory_allocated() - before) / 2**30
            first = first_call(case, who) if first_calls else (None, None)
            yield asdict(case) | {
                "who": who,
                "forward_ms": min(timed[who, "forward"]),
                "both_ms": min(timed[who, "both"]),
                "both_ms_other_round": max(timed[who, "both"]),
                "extra_gib": extra,
                "first_forward_s": first[0],
                "first_backward_s": first[1],
                "error": _error(competitors(case)[who], case),
            }


if __name__ == "__main__":
    _time_first_call(Case(**json.loads(sys.argv[1])), sys.argv[2])
