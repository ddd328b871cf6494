"""Benchmark operators: time, memory and error in one run, `flakit bench`.

Times are medians of CUDA-event times after a warm-up, with the 20% and 80% quantiles; competitors alternate on the same
inputs. "both" is the forward and the gradients of all inputs by `torch.autograd.grad`. A decode is one token with its
states, replayed from a CUDA graph. Host times are the time to issue a call. Extra memory is the peak above the inputs.
First calls are timed in a fresh process with an empty kernel cache, which includes compilation and autotuning, and in
another process with the first one's cache.
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
"""The number of random tokens per sequence; longer sequences repeat them, except the decays of `_DRAWN_DECAYS`. To draw
all tensors in full on the host would take longer than the benchmark itself."""


@dataclass(frozen=True)
class Case:
    """One benchmark: operator, form, sizes, natural-log decay or its profile, dtype. M: slots. decode: one token with
    its states, forward only."""

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

    def inputs(self, device: str = "cuda", **overrides) -> dict:
        """Draw the operator's tensors by name, and initial_state for a decode. overrides: sizes such as T or B."""
        sizes = {n: x for n, x in asdict(self).items() if n not in ("op", "form", "decode")} | overrides
        sizes |= {"dtype": getattr(torch, self.dtype), "T": min(T := sizes["T"], DRAWN)}
        grad = {"requires_grad": not self.decode}
        draw = _DRAWN_DECAYS.get(self.decay)
        sizes |= {"decay": "model"} if draw else {}
        tensors = inputs(self.op, **sizes, **grad, initial_state=self.decode, device=device)
        for name in self.operator.sequences:
            repeated = tensors[name].detach().repeat(1, -(-T // DRAWN), 1, 1)
            tensors[name] = repeated[:, :T].contiguous().requires_grad_(**grad)
        if draw:  # for every token: how many heads hold a rare steep gate depends on how many are drawn
            rows = tensors[self.operator.decay].detach()
            rows.copy_(torch.from_numpy(draw(rows.double().cpu().numpy(), np.random.default_rng(0))))
        return tensors


def _trained(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw decays -exp(x - 3), x normal, like the gates of a wide trained model: one in a million is below -6."""
    return -np.exp(rng.standard_normal(rows.shape) - 3)


def _steep(share: float) -> Callable:
    def draw(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Set -20 in one channel of one token in a fraction `share` of each head's chunks of 16 tokens."""
        B, T, H, K = rows.shape
        b, chunk, h = np.nonzero(rng.random((B, -(-T // 16), H)) < share)
        t = np.minimum(chunk * 16 + rng.integers(16, size=len(b)), T - 1)
        rows[b, t, h, rng.integers(K, size=len(b))] = -20.0
        return rows

    return draw


TRAINED = "trained"
SHARES = {"0.1% steep": 0.001, "1% steep": 0.01, "5% steep": 0.05}
_DRAWN_DECAYS: dict[str | float, Callable] = {TRAINED: _trained} | {x: _steep(share) for x, share in SHARES.items()}
"""Decays for benchmarks only, by their name in a case: functions of (the decays of a new model, a generator)."""


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
    """Return each operator's chunked case with eight sequences in bfloat16, its decays drawn from these values.

    values: natural-log decays <= 0, any shape. name: the name of these decays in the cases. Raises ValueError for no
    values, NaN or positive ones."""
    if not len(values := values.detach().flatten().double().cpu().numpy()):
        raise ValueError("values: expected decays, got none")
    if not (values <= 0).all():
        raise ValueError(f"values: expected natural-log decays <= 0, got {values[~(values <= 0)][0]:g}")
    _DRAWN_DECAYS[name] = lambda rows, rng: values[rng.integers(len(values), size=rows.shape)]
    return [replace(case, decay=name) for case in CASES if case.decay == TRAINED]


def chosen(only: str = "", cases: list[Case] = CASES) -> list[Case]:
    """Return the cases whose description contains every word of `only`. Raise ValueError if there are none."""

    def holds(case: Case, word: str) -> bool:
        return word in (str(case).split() if "=" in word else str(case))  # B=1 is not B=16

    selected = [case for case in cases if all(holds(case, word) for word in only.split())]
    if not selected:
        raise ValueError(f"only: expected words of a case such as {str(cases[0])!r}, got {only!r}")
    return selected


# --- competitors ----------------------------------------------------------------------------------------------------


OURS = "flakit"


@dataclass(frozen=True)
class Competitor:
    """An implementation of an operator.

    call: takes the operator's tensors in order, and initial_state and output_final_state by name. takes: converts the
    natural-log decay to its own parameter, None if it takes the decay; means: the inverse."""

    call: Callable
    takes: Callable[[Tensor], Tensor] | None = None
    means: Callable[[Tensor], Tensor] | None = None

    def leaves(self, op: Operator, tensors: dict) -> list[Tensor]:
        """Return the implementation's input tensors, with the decay converted. Call this outside the timed region."""
        converted = dict(tensors)
        if self.takes is not None:
            rows = tensors[op.decay]
            converted[op.decay] = self.takes(rows.detach().float()).to(rows.dtype).requires_grad_(rows.requires_grad)
        return [converted[name] for name in op.tensors]


def peer_version() -> dict[str, str]:
    """Return {"fla": version} if flash-linear-attention is installed, else {}: for a recording's metadata."""
    return {"fla": importlib.metadata.version("fla-core")} if importlib.util.find_spec("fla") else {}


def competitors(case: Case, peers: bool = True, say: Callable[[str], None] = lambda text: None) -> dict:
    """Return {name: Competitor}: ours, and with `peers` all installed ones that support the case. say: called with a
    message for each peer that is not installed or fails to load."""
    form = case.operator.forms[case.form]
    available = {OURS: Competitor(form)}
    for name, find in PEERS.items() if peers else ():
        try:
            peer = find(case)
        except Exception as error:  # ours is timed even if a peer's code fails to load for any reason
            say(f"{name} is not timed: {_in_words(error)}")
            continue
        if peer is not None:
            available[name] = peer
    return available


def _installed(module: str, project: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{project} is not installed here")


def _fla(case: Case) -> Competitor | None:
    _installed("fla", "flash-linear-attention")
    peer = getattr(importlib.import_module(f"fla.ops.{case.op}"), case.operator.forms[case.form].__name__, None)
    # Pass the scale explicitly: the peer's two forms have different defaults.
    scale = case.K**case.operator.scale_exponent
    return peer and Competitor(lambda *args, **named: peer(*args, scale=scale, **named))


def _wind(case: Case) -> Competitor | None:
    """Return wind_rwkv's chunked CUDA kernels of RWKV7 (https://github.com/johanwind/wind_rwkv), whose w means a decay
    factor e^{-e^w}; None for a case that they do not support. Raise ModuleNotFoundError if they are not installed."""
    square = case.K == case.V and case.T % 16 == 0 and case.dtype == "bfloat16"
    if case.op != "rwkv7" or case.form != "chunk" or not square:
        return None
    _installed("wind_rwkv", "wind_rwkv")
    module = importlib.import_module("wind_rwkv.rwkv7")
    module.load_chunked_cuda(case.K)  # compiles for some seconds on first use
    return Competitor(module.attn_chunked_cuda, takes=lambda w: (-w).log(), means=lambda x: -x.exp())


PEERS = {"fla": _fla, "wind": _wind}


# --- measurements ---------------------------------------------------------------------------------------------------


def calls(rival: Competitor, case: Case, tensors: dict) -> dict[str, Callable]:
    """Return the functions to time, by name: "forward" and, except for a decode, "both"."""
    op, leaves = case.operator, rival.leaves(case.operator, tensors)
    state = {"initial_state": tensors["initial_state"], "output_final_state": True} if case.decode else {}

    def forward():
        with torch.no_grad():
            return rival.call(*leaves, **state)[0]

    if case.decode:
        return {"forward": forward}
    do, _ = cotangents(op, tensors)

    def both():
        return torch.autograd.grad(rival.call(*leaves)[0], leaves, do)

    return {"forward": forward, "both": both}


def error(rival: Competitor, case: Case, device: str = "cuda") -> float:
    """Return the largest relative L2 error over o and every gradient; for a decode, over o and the final state.

    The case is cut to at most 512 tokens and 16 sequences. The number of sequences is otherwise kept, since kernels may
    depend on it."""
    op, tensors = case.operator, case.inputs(device, B=min(case.B, 16), T=min(case.T, 512))
    leaves, w = rival.leaves(op, tensors), op.tensors.index(op.decay)
    if rival.means is not None:
        tensors[op.decay] = rival.means(leaves[w].detach().float())
    if case.decode:
        o, state = rival.call(*leaves, initial_state=tensors["initial_state"], output_final_state=True)[:2]
        results = dict(zip(op.outputs, (o, *op.parts(state)), strict=True))
    else:
        o, *_ = rival.call(*leaves)
        grads = list(torch.autograd.grad(o, leaves, cotangents(op, tensors)[0]))
        if rival.means is not None:  # chain rule, for w = means(x): dL/dw = (dL/dx) / (dw/dx)
            x = leaves[w].detach().float().requires_grad_()
            (slope,) = torch.autograd.grad(rival.means(x).sum(), x)
            grads[w] = grads[w].float() / slope
        results = {"o": o} | {f"d{name}": grad for name, grad in zip(op.tensors, grads, strict=True)}
    true = truth(op, tensors)
    return max(measures(x.detach(), true[name])["l2"] for name, x in results.items())


FIRST_CALLS = "first_forward_s", "first_backward_s", "warm_forward_s", "warm_backward_s"


def first_calls_of(case: Case, who: str) -> dict[str, float]:
    """Return the seconds of the first forward and the first training step, by the names in `FIRST_CALLS`: in a fresh
    process with an empty kernel cache, and in a second one with that cache. Raise RuntimeError if a process fails."""
    seconds: list[float] = []
    command = [sys.executable, "-m", __name__, json.dumps(asdict(case)), who]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_CACHE_DIR": cache, "TORCH_EXTENSIONS_DIR": cache}
        for _ in range(2):
            run = subprocess.run(command, env=env, capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"{who}: the first call failed\n{run.stderr}")
            seconds += map(float, run.stdout.split()[-2:])
    return dict(zip(FIRST_CALLS, seconds, strict=True))


def _time_first_call(case: Case, who: str) -> None:
    tensors = case.inputs(T=max(64, case.T // 8))
    do, _ = cotangents(case.operator, tensors)
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    rival = PEERS[who](case) if who in PEERS else competitors(case, peers=False)[who]  # some compile when they load
    leaves = rival.leaves(case.operator, tensors)
    with torch.no_grad():
        rival.call(*leaves)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    # backward(), as a training step calls it: `torch.autograd.grad` with a gradient for o would first import sympy, two
    # seconds that belong to no operator.
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
    """Time the cases on a GPU: yield a row per case and competitor, with the columns in data/README.md.

    cases: default `CASES`. peers: also time other implementations; one that autotunes takes minutes per shape.
    first_calls: also time first calls. meter: default the current GPU's; without a GPU RuntimeError is raised.
    progress: called with the step being timed. say: called with messages about missing or failing peers."""
    meter = meter or _meter()
    for case in CASES if cases is None else cases:
        tensors = case.inputs(meter.device)
        rivals = competitors(case, peers, say)
        calls_of = {who: calls(rival, case, tensors) for who, rival in rivals.items()}
        times: dict[tuple[str, str], list[Times]] = {}
        timer = meter.replayed if case.decode else meter.times
        for turn in ("first", "second"):  # A B A B: clock drift then affects both alike
            for who in list(rivals):
                progress(f"{case}: {who}, {turn} round")
                with _dropping_peer(who, case, rivals, say):
                    for name, call in calls_of[who].items():
                        times.setdefault((who, name), []).append(timer(call))
        for who, rival in list(rivals.items()):
            progress(f"{case}: {who}, memory, host and error")
            with _dropping_peer(who, case, rivals, say):
                row = _row(case, who, times, calls_of[who], meter)
                time_first = first_calls and not case.decode
                row |= first_calls_of(case, who) if time_first else dict.fromkeys(FIRST_CALLS)
                row |= {"error": error(rival, case, meter.device)}
            if who in rivals:
                yield row


@contextmanager
def _dropping_peer(who: str, case: Case, rivals: dict[str, Competitor], say: Callable[[str], None]) -> Iterator[None]:
    """Report a failing peer and drop it from `rivals`; a failure of our own operator is raised."""
    try:
        yield
    except Exception as error:
        if who == OURS:
            raise
        del rivals[who]
        say(f"{who} failed on {case}: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _row(case: Case, who: str, times: dict, calls: dict[str, Callable], meter: Meter) -> dict:
    row = asdict(case) | {"who": who}
    for name in ("forward", "both"):
        rounds = sorted(times.get((who, name), []), key=lambda round: round.median)
        best = rounds[0] if rounds else Times(None, None, None)
        row |= {f"{name}_ms": best.median, f"{name}_ms_20": best.low, f"{name}_ms_80": best.high}
        if name == "both":
            row["both_ms_other_round"] = rounds[-1].median if rounds else None
    row["host_forward_ms"] = meter.host_ms(calls["forward"])
    row["host_both_ms"] = meter.host_ms(calls["both"]) if "both" in calls else None
    return row | {"extra_gib": meter.extra_gib(calls.get("both", calls["forward"]))}


def profile(
    cases: list[Case] | None = None,
    *,
    peers: bool = True,
    meter: Meter | None = None,
    progress: Callable[[str], None] = lambda what: None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict]:
    """Profile the cases: yield a row per case, competitor, function ("forward", "both") and kernel.

    Columns: those of `Case`, who, what, and those of `KernelTime`. Arguments and errors: as in `rows`."""
    meter = meter or _meter()
    for case in CASES if cases is None else cases:
        tensors = case.inputs(meter.device)
        rivals = competitors(case, peers, say)
        for who, rival in list(rivals.items()):
            table = []
            with _dropping_peer(who, case, rivals, say):
                for what, call in calls(rival, case, tensors).items():
                    progress(f"{case}: {who}, {what}")
                    table += [{"who": who, "what": what, **kernel._asdict()} for kernel in meter.kernels(call)]
            yield from (asdict(case) | row for row in table)


def _meter() -> Meter:
    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA GPU, found none")
    return Meter()


if __name__ == "__main__":
    _time_first_call(Case(**json.loads(sys.argv[1])), sys.argv[2])
