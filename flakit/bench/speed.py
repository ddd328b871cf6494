"""How long an operator takes and how much memory, with its error in the same run: `flakit bench`.

Medians of CUDA-event times after warm-up, and what 20% and 80% of the calls stay below, the competitors in turn on the
same inputs; "both" is the forward and the gradients of all inputs by `torch.autograd.grad`. A decode is one token with
its states, replayed from a CUDA graph. Host times are what it takes to issue a call. Extra memory is the peak above the
inputs. First calls are timed in a fresh process with an empty kernel cache, so that compiling and any autotuning count,
and in another one that finds the first one's kernels in the cache.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..numerics.evaluate import cotangents, truth
from ..numerics.gradients import measures
from ..numerics.inputs import inputs
from ..numerics.operators import Operator, operator
from .meter import Meter, Times

DRAWN = 512
"""Tokens of a sequence that are drawn; a longer one has them over and over. To draw a number takes a thread of the host
longer than the GPU needs for all that is timed with it."""


@dataclass(frozen=True)
class Case:
    """One line of the table: what runs on which inputs. decode: one token with its states, forward only."""

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
    decode: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={getattr(self, axis)}" for axis in "BTHKVM" if getattr(self, axis))
        return f"{self.op} {'decode' if self.decode else self.form} {self.dtype} {sizes} decay={self.decay}"

    @property
    def operator(self) -> Operator:
        return operator(self.op)

    def inputs(self, device: str = "cuda", **smaller) -> dict:
        sizes = {n: x for n, x in asdict(self).items() if n not in ("op", "form", "decode")} | smaller
        sizes |= {"dtype": getattr(torch, self.dtype), "T": min(T := sizes["T"], DRAWN)}
        trained = {"requires_grad": not self.decode}
        drawn = _DRAWN_DECAYS.get(self.decay)
        sizes |= {"decay": "model"} if drawn else {}
        made = inputs(self.op, **sizes, **trained, initial_state=self.decode, device=device)
        if drawn:
            rows = made[self.operator.decay].detach()
            rows.copy_(torch.from_numpy(drawn(rows.double().cpu().numpy(), np.random.default_rng(0))))
        for name in self.operator.sequences:
            again = made[name].detach().repeat(1, -(-T // DRAWN), 1, 1)
            made[name] = again[:, :T].contiguous().requires_grad_(**trained)
        return made


def _trained(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """-exp(x - 3), x normal: as a wide, trained gate gives them, one in a million below -6."""
    return -np.exp(rng.standard_normal(rows.shape) - 3)


def _steep(share: float) -> Callable:
    def drawn(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A fresh model's, with -20 in one channel of one token in that share of the runs of 16 tokens of each head."""
        B, T, H, K = rows.shape
        b, chunk, h = np.nonzero(rng.random((B, -(-T // 16), H)) < share)
        t = np.minimum(chunk * 16 + rng.integers(16, size=len(b)), T - 1)
        rows[b, t, h, rng.integers(K, size=len(b))] = -20.0
        return rows

    return drawn


TRAINED = "trained"
SHARES = {"0.1% steep": 0.001, "1% steep": 0.01, "5% steep": 0.05}
_DRAWN_DECAYS: dict[str | float, Callable] = {TRAINED: _trained} | {x: _steep(share) for x, share in SHARES.items()}
"""Decays that are for timing alone, by the word that stands in a case: of (a fresh model's rows, a generator)."""


def _decodes(op: str, **sizes) -> list[Case]:
    return [Case(op, "recurrent", B, 1, decode=True, **sizes) for B in (1, 16, 256)]


CASES = [
    *(
        Case("rwkv6", "chunk", 8, 4096, 32, 64, 64, decay)
        for decay in (TRAINED, "rwkv6-init", "logsigmoid", *SHARES, -5.0, -8.0, -20.0, -math.inf)
    ),
    Case("rwkv6", "chunk", 1, 32768, 32, 64, 64, "rwkv6-init"),
    Case("rwkv6", "chunk", 8, 4096, 32, 64, 64, "rwkv6-init", "float32"),
    Case("rwkv6", "recurrent", 8, 4096, 32, 64, 64, "rwkv6-init"),
    *_decodes("rwkv6", H=32, K=64, V=64, decay="rwkv6-init"),
    *(
        Case("rwkv7", "chunk", 8, 4096, 32, 64, 64, decay)
        for decay in (TRAINED, "rwkv7", *SHARES, -5.0, -8.0, -20.0, -math.inf)
    ),
    Case("rwkv7", "chunk", 1, 32768, 32, 64, 64, "rwkv7"),
    Case("rwkv7", "chunk", 8, 4096, 32, 64, 64, "rwkv7", "float32"),
    Case("rwkv7", "recurrent", 8, 4096, 32, 64, 64, "rwkv7"),
    *_decodes("rwkv7", H=32, K=64, V=64, decay="rwkv7"),
    *(Case("gsa", "chunk", 8, 4096, 16, 128, 128, decay, M=64) for decay in (TRAINED, "gsa", *SHARES, -5.0)),
    Case("gsa", "chunk", 1, 32768, 16, 128, 128, "gsa", M=64),
    Case("gsa", "chunk", 8, 4096, 4, 512, 512, "gsa", M=64),
    Case("gsa", "chunk", 8, 4096, 16, 128, 128, "gsa", "float32", M=64),
    Case("gsa", "recurrent", 8, 4096, 16, 128, 128, "gsa", M=64),
    *_decodes("gsa", H=16, K=128, V=128, decay="gsa", M=64),
]


def of_gates(values: Tensor, name: str) -> list[Case]:
    """Of each operator the chunks of eight sequences in bfloat16, with natural-log decays drawn from these values.

    name: what their cases say in the place of a decay's name.
    """
    if not len(values := values.detach().flatten().double().cpu().numpy()):
        raise ValueError("values: expected decays, got none")
    if not (values <= 0).all():
        raise ValueError(f"values: expected natural-log decays <= 0, got {values[~(values <= 0)][0]:g}")
    _DRAWN_DECAYS[name] = lambda rows, rng: values[rng.integers(len(values), size=rows.shape)]
    return [replace(case, decay=name) for case in CASES if case.decay == TRAINED]


def chosen(only: str = "", cases: list[Case] = CASES) -> list[Case]:
    """The cases whose description holds every word of `only`; ValueError where none does."""

    def holds(case: Case, word: str) -> bool:
        return word in (str(case).split() if "=" in word else str(case))  # B=1 is not B=16

    found = [case for case in cases if all(holds(case, word) for word in only.split())]
    if not found:
        raise ValueError(f"only: expected words of a case such as {str(cases[0])!r}, got {only!r}")
    return found


# --- who is timed ---------------------------------------------------------------------------------------------------


OURS = "flakit"


@dataclass(frozen=True)
class Competitor:
    """An implementation of an operator.

    call: takes the operator's tensors in their order, and a state and output_final_state by name.
    takes: what it wants in place of the natural-log decay, if it does; means: the decay that this stands for.
    """

    call: Callable
    takes: Callable[[Tensor], Tensor] | None = None
    means: Callable[[Tensor], Tensor] | None = None

    def leaves(self, op: Operator, made: dict) -> list[Tensor]:
        """The tensors as it wants them, computed beforehand and so not timed."""
        given = dict(made)
        if self.takes is not None:
            rows = made[op.decay]
            given[op.decay] = self.takes(rows.detach().float()).to(rows.dtype).requires_grad_(rows.requires_grad)
        return [given[name] for name in op.tensors]


def peer_version() -> dict[str, str]:
    """{"fla": its version} where flash-linear-attention is installed, else nothing: for a recording's meta."""
    return {"fla": importlib.metadata.version("fla-core")} if importlib.util.find_spec("fla") else {}


def competitors(case: Case, peers: bool = True, say: Callable[[str], None] = lambda text: None) -> dict:
    """{name: Competitor}: ours, and of those that are installed all that compute such a case.

    say: told of each that could and is not there, or cannot run.
    """
    form = case.operator.forms[case.form]
    found = {OURS: Competitor(form)}
    for name, find in PEERS.items() if peers else ():
        try:
            peer = find(case)
        except Exception as error:  # whatever keeps somebody else's code from loading: ours is timed all the same
            say(f"{name} is not timed: {_in_words(error)}")
            continue
        if peer is not None:
            found[name] = peer
    return found


def _installed(module: str, project: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{project} is not installed here")


def _fla(case: Case) -> Competitor | None:
    _installed("fla", "flash-linear-attention")
    peer = getattr(importlib.import_module(f"fla.ops.{case.op}"), case.operator.forms[case.form].__name__, None)
    # The scale is said aloud: the peer's two forms differ in their default.
    scale = case.K**case.operator.scale_exponent
    return peer and Competitor(lambda *args, **named: peer(*args, scale=scale, **named))


def _wind(case: Case) -> Competitor | None:
    """RWKV7's chunks in CUDA: https://github.com/johanwind/wind_rwkv. Its decay is e^{-e^w}."""
    square = case.K == case.V and case.T % 16 == 0 and case.dtype == "bfloat16"
    if case.op != "rwkv7" or case.form != "chunk" or not square:
        return None
    _installed("wind_rwkv", "wind_rwkv")
    module = importlib.import_module("wind_rwkv.rwkv7")
    module.load_chunked_cuda(case.K)  # compiles for some seconds, where that was not done before
    return Competitor(module.attn_chunked_cuda, takes=lambda w: (-w).log(), means=lambda x: -x.exp())


PEERS = {"fla": _fla, "wind": _wind}


# --- what is timed --------------------------------------------------------------------------------------------------


def calls(rival: Competitor, case: Case, made: dict) -> dict[str, Callable]:
    """What is timed by name: "forward" and, but for a decode, "both"."""
    op, leaves = case.operator, rival.leaves(case.operator, made)
    state = {"initial_state": made["initial_state"], "output_final_state": True} if case.decode else {}

    def forward():
        with torch.no_grad():
            return rival.call(*leaves, **state)[0]

    if case.decode:
        return {"forward": forward}
    do, _ = cotangents(op, made)

    def both():
        return torch.autograd.grad(rival.call(*leaves)[0], leaves, do)

    return {"forward": forward, "both": both}


def error(rival: Competitor, case: Case, device: str = "cuda") -> float:
    """Worst relative L2 error over o and every gradient, on short sequences of the same kind, as many as are timed (at
    most 16), since kernels may depend on that; of a decode over o and the final state."""
    op, made = case.operator, case.inputs(device, B=min(case.B, 16), T=min(case.T, 512))
    leaves, w = rival.leaves(op, made), op.tensors.index(op.decay)
    if rival.means is not None:
        made[op.decay] = rival.means(leaves[w].detach().float())
    if case.decode:
        o, state = rival.call(*leaves, initial_state=made["initial_state"], output_final_state=True)[:2]
        named = dict(zip(op.outputs, (o, *op.parts(state)), strict=True))
    else:
        o, *_ = rival.call(*leaves)
        grads = list(torch.autograd.grad(o, leaves, cotangents(op, made)[0]))
        if rival.means is not None:  # d means(x) / dx takes a gradient of the decay to one of x
            x = leaves[w].detach().float().requires_grad_()
            (slope,) = torch.autograd.grad(rival.means(x).sum(), x)
            grads[w] = grads[w].float() / slope
        named = {"o": o} | {f"d{name}": grad for name, grad in zip(op.tensors, grads, strict=True)}
    true = truth(op, made)
    return max(measures(x.detach(), true[name])["l2"] for name, x in named.items())


FIRST_CALLS = "first_forward_s", "first_backward_s", "warm_forward_s", "warm_backward_s"


def first_calls_of(case: Case, who: str) -> dict[str, float]:
    """Seconds of the first forward and of the first training step, in a fresh process with an empty kernel cache and in
    one that finds the kernels of that one."""
    found: list[float] = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            run = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps(asdict(case)), who],
                env=os.environ | {"TRITON_CACHE_DIR": cache, "TORCH_EXTENSIONS_DIR": cache},
                capture_output=True,
                text=True,
            )
            if run.returncode:
                raise RuntimeError(f"{who}: the first call failed\n{run.stderr}")
            found += map(float, run.stdout.split()[-2:])
    return dict(zip(FIRST_CALLS, found, strict=True))


def _time_first_call(case: Case, who: str) -> None:
    made = case.inputs(T=max(64, case.T // 8))
    do, _ = cotangents(case.operator, made)
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    rival = PEERS[who](case) if who in PEERS else competitors(case, peers=False)[who]  # some compile when they load
    leaves = rival.leaves(case.operator, made)
    with torch.no_grad():
        rival.call(*leaves)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    # As a training step does it. `torch.autograd.grad` with a gradient for o would import sympy first: two seconds of
    # PyTorch's own, and not of any operator.
    (rival.call(*leaves)[0] * do).sum().backward()
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    print(*(end - start for start, end in zip(times, times[1:], strict=False)))


def rows(
    cases: list[Case] | None = None,
    *,
    peers: bool = True,
    first_calls: bool = True,
    meter: Meter | None = None,
    progress: Callable[[str], None] = lambda what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict]:
    """One row per case and competitor, columns as in data/README.md; needs a GPU. A peer that tunes itself takes
    minutes per shape.

    progress: told what is being timed; say: told of peers that are not there. meter: what times.
    """
    meter = meter or _meter()
    for case in CASES if cases is None else cases:
        made = case.inputs(meter.device)
        rivals = competitors(case, peers, say)
        what = {who: calls(rival, case, made) for who, rival in rivals.items()}
        timed: dict[tuple[str, str], list[Times]] = {}
        timer = meter.replayed if case.decode else meter.times
        for turn in ("first", "second"):  # A B A B: a clock that drifts drifts for both
            for who in list(rivals):
                progress(f"{case}: {who}, {turn} round")
                with _failing(who, case, rivals, say):
                    for name, call in what[who].items():
                        timed.setdefault((who, name), []).append(timer(call))
        for who, rival in list(rivals.items()):
            progress(f"{case}: {who}, memory, host and error")
            with _failing(who, case, rivals, say):
                row = _row(case, who, timed, what[who], meter)
                timed_first = first_calls and not case.decode
                row |= first_calls_of(case, who) if timed_first else dict.fromkeys(FIRST_CALLS)
                row |= {"error": error(rival, case, meter.device)}
            if who in rivals:
                yield row


@contextmanager
def _failing(who: str, case: Case, rivals: dict[str, Competitor], say: Callable[[str], None]) -> Iterator[None]:
    """What fails inside is told and no rival from then on; where it is ours that fails, nothing goes on."""
    try:
        yield
    except Exception as error:
        if who == OURS:
            raise
        del rivals[who]
        say(f"{who} failed on {case}: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _row(case: Case, who: str, timed: dict, what: dict[str, Callable], meter: Meter) -> dict:
    row = asdict(case) | {"who": who}
    for name in ("forward", "both"):
        rounds = sorted(timed.get((who, name), []), key=lambda times: times.median)
        best = rounds[0] if rounds else Times(None, None, None)
        row |= {f"{name}_ms": best.median, f"{name}_ms_20": best.low, f"{name}_ms_80": best.high}
        if name == "both":
            row["both_ms_other_round"] = rounds[-1].median if rounds else None
    row["host_forward_ms"] = meter.host_ms(what["forward"])
    row["host_both_ms"] = meter.host_ms(what["both"]) if "both" in what else None
    return row | {"extra_gib": meter.extra_gib(what.get("both", what["forward"]))}


def profile(
    cases: list[Case] | None = None,
    *,
    peers: bool = True,
    meter: Meter | None = None,
    progress: Callable[[str], None] = lambda what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict]:
    """One row per case, competitor, what is called ("forward", "both") and kernel: calls, ms and share of all kernels.

    Arguments as of `rows`.
    """
    meter = meter or _meter()
    for case in CASES if cases is None else cases:
        made = case.inputs(meter.device)
        rivals = competitors(case, peers, say)
        for who, rival in list(rivals.items()):
            found = []
            with _failing(who, case, rivals, say):
                for what, call in calls(rival, case, made).items():
                    progress(f"{case}: {who}, {what}")
                    found += [{"who": who, "what": what, **kernel._asdict()} for kernel in meter.kernels(call)]
            yield from (asdict(case) | row for row in found)


def _meter() -> Meter:
    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA GPU, found none")
    return Meter()


if __name__ == "__main__":
    _time_first_call(Case(**json.loads(sys.argv[1])), sys.argv[2])
