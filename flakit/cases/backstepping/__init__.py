"""States rebuilt backwards by dividing by the decay: every token walked back costs |w| / ln 2 of float32's bits.

The backward pass needs every state S_{t-1}. Some kernels store one state in C tokens and undo the updates before it:

    S_{t-1} = (S_t - k_t v_t^T - b_t (a_t^T S_{t-1})) / e^{w_t}      a_t^T S_{t-1} was stored by the forward pass

That is right in algebra. But S_t is rounded, and its rounding error is divided as well: after n tokens it has grown by
e^{n |w|}, while the state has not. With d = e^w, u = 0.196 * 2^-23, the root mean square of float32's rounding, and m
sums in an update (1 in RWKV6's, 2 in RWKV7's),

    error of a row, n tokens back = u e^{n |w|} sqrt((2 m + 1) d^2 + 1) sqrt((1 - d^{2n}) / (1 - d^2))

relative to the row, within a factor of two, or of four if it is below 1e-5. dr, dw and da read these states and inherit
the error; o, dk, dv and db do not. Everything is finite until the error itself overflows float32, or e^w is 0.

As reported (flash-linear-attention #105): wind_rwkv's kernels "backstep" over the states to avoid recomputation, and a
user asks how precise that is. RWKV-LM's CUDA kernels for RWKV7 do the same, over 16 tokens between stored states
(RWKV-v7/train_temp/cuda/rwkv7_clampw.cu). As measured: at C = 16 the error reaches bfloat16's rounding, 2^-8, at w =
-0.72. RWKV7's gate is bounded at -0.6065, where a row of its state has an error of 6e-4: this bound makes such a kernel
accurate, but does not allow C = 32, which would need -0.35. At w = -1 a row's error is a third of its norm, at w = -1.5
it is 800 times its norm. Recomputing forward from the state before the chunk gives bit-identical states.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, truth
from ...numerics.inputs import inputs as make_inputs
from ...numerics.operators import operator
from ..knobs import FINITE_DECAY
from ..laws import Measured, Row, search

STRONGEST = math.exp(-0.5)
"""The largest |w| of RWKV7's gate, 0.6065."""
ROUNDED = 2.0**-8
"""The largest rounding error of bfloat16: a rebuilt row with a larger error counts as wrong."""
LARGE = 1e30
"""Errors above this are not compared: float32 overflows, at different elements at different times."""
REBUILT = ("by division", "forward again")
"""How states are rebuilt: backwards from the state after a chunk, or (right) forward from the state before it."""
SUMS = {"rwkv6": 1, "rwkv7": 2}
"""Number of sums in an update of the state, by operator."""
READ = {"rwkv6": ("dr", "dw"), "rwkv7": ("dr", "dw", "da")}
"""By operator, the gradients that are computed from rebuilt states."""
CHUNKS, H, K, V = 3, 4, 8, 16


def grown(w: float, n: int, op: str = "rwkv7") -> float:
    """Predict the relative L2 error of a state row rebuilt n tokens back, with natural-log decay w <= 0 at each.

    >>> f"{grown(-0.6065, 16):.0e}", f"{grown(-1.0, 16):.1f}"
    ('7e-04', '0.3')
    """
    d2 = math.exp(2 * w)
    terms = n if d2 == 1 else (1 - d2**n) / (1 - d2)
    size = 0.196 * 2**-23 * math.sqrt(((2 * SUMS[op] + 1) * d2 + 1) * terms)
    return size * math.exp(-n * w) if -n * w < 700 else math.inf


def law(chunk: int = 16, op: str = "rwkv7", rebuilt: str = "by division") -> float:
    """Return the largest |w| per token at which a row rebuilt `chunk` tokens back is within bfloat16's rounding, 2^-8.

    >>> round(law(16), 2), round(law(32), 2), law(rebuilt="forward again")
    (0.72, 0.35, inf)
    """
    if one_of("rebuilt", rebuilt, REBUILT) == "forward again":
        return math.inf
    low, high = 0.0, 100.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if grown(-middle, chunk, op) <= ROUNDED else (low, middle)
    return low


def states(x: Mapping[str, Tensor], forward: Sequence, op: str, chunk: int, rebuilt: str) -> tuple[Tensor, Tensor]:
    """Return S_t and S_{t-1} of every token, [B, T, H, K, V] each, as the backward pass rebuilds them.

    x: as from `flakit.inputs`. forward: the `ForwardStep` of every token from the operator's reference; of their states
        only those at the ends of chunks are used. rebuilt: one of `REBUILT`; raises ValueError for another.
    """
    again, of = one_of("rebuilt", rebuilt, REBUILT) == "forward again", operator(op)
    after, before = [], []
    for begin in reversed(range(0, len(forward), chunk)):
        part = forward[begin : begin + chunk]
        if again:
            rows = {name: x[name][:, begin : begin + chunk] if name in of.sequences else x[name] for name in of.tensors}
            part = list(of.reference.steps(**rows, initial_state=part[0].state_before))
        S = part[-1].state
        for f in reversed(part):
            after.append(f.state if again else S)
            if not again:
                S = S - f.kv if op == "rwkv6" else S - f.kv - f.edit
                S = S / f.decay[..., None]
            before.append(f.state_before if again else S)
    return torch.stack(after[::-1], 1), torch.stack(before[::-1], 1)


def run(
    x: Mapping[str, Tensor],
    op: str = "rwkv7",
    *,
    chunk: int = 16,
    rebuilt: str = "by division",
    arriving: tuple[Tensor, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Run RWKV6 or RWKV7 token by token in float32, gradients from rebuilt states; returns what `evaluate` does. x: as
    from `flakit.inputs(op, …)`. arriving: the gradients of o and the final state; default: `cotangents`."""
    of = operator(op)
    do, dlast = cotangents(op, x) if arriving is None else arriving
    scale = of.scale(x)
    rows = {name: x[name] for name in (*of.tensors, *of.states) if x.get(name) is not None}
    steps = list(of.reference.steps(**rows, scale=scale, do=do, dfinal_state=dlast))
    forward, backward = steps[: len(steps) // 2], steps[: len(steps) // 2 - 1 : -1]
    results = {"o": torch.stack([f.o for f in forward], 1), "final_state": forward[-1].state}
    results |= {f"d{name}": torch.stack([getattr(b, f"d{name}") for b in backward], 1) for name in of.sequences}
    results["dinitial_state"] = backward[0].dstate_before
    if op == "rwkv6":
        results["du"] = torch.stack([b.du for b in backward]).sum((0, 1))

    after, before = states(rows, forward, op, chunk, rebuilt)
    D, decay = torch.stack([b.dstate for b in backward], 1), torch.stack([f.decay for f in forward], 1)
    if op == "rwkv6":
        read = before + x["u"][..., None] * torch.stack([f.kv for f in forward], 1)
    else:
        read, to_a = after, (D * x["b"].to(D)[..., None]).sum(-2)
        results["da"] = (before * to_a[..., None, :]).sum(-1)
    results["dr"] = scale * (read * do.to(D)[..., None, :]).sum(-1)
    results["dw"] = decay * (before * D).sum(-1)
    return results


def inputs(w: float, chunk: int = 16, op: str = "rwkv7", seed: int = 0) -> dict[str, Tensor]:
    """Draw inputs of three chunks with an initial state; the K channels have the log decays w / K, 2 w / K, … w."""
    x = make_inputs(op, T=CHUNKS * chunk, H=H, K=K, V=V, decay=-1.0, initial_state=True, seed=seed)
    return x | {"w": (w * torch.arange(1, K + 1) / K).expand_as(x["w"]).contiguous()}


def _off(x: Mapping[str, Tensor], forward: Sequence, op: str, chunk: int, rebuilt: str) -> Tensor:
    """Return the error of each row of the rebuilt S_{t-1}, [T, H, K], relative to the RMS over tokens and heads of the
    row's norm. Arguments as in `states`."""
    _, before = states(x, forward, op, chunk, rebuilt)
    true = torch.stack([f.state_before for f in forward], 1).double()
    size = true.square().sum(-1).mean((0, 1, 2)).sqrt()
    return (before.double() - true).norm(dim=-1)[0] / size


def _by_steps(off: Tensor, chunk: int) -> Tensor:
    """Return the RMS over chunks and heads of `_off`'s errors, [chunk, K], after one token back, after two, …"""
    return off.unflatten(0, (-1, chunk)).square().mean((0, 2)).sqrt().flip(0)


@functools.lru_cache(maxsize=64)
def onset(chunk: int = 16, op: str = "rwkv7", rebuilt: str = "by division", seed: int = 0) -> float:
    """Measure what `law` predicts: the largest |w| within bfloat16's rounding, in the channel that decays most."""

    def near(size: float) -> dict[str, bool]:
        x = inputs(-size, chunk, op, seed)
        off = _off(x, list(operator(op).reference.steps(**x)), op, chunk, rebuilt)
        return {"states": bool(_by_steps(off, chunk)[-1, -1] <= ROUNDED)}

    return search(near, near=[law(chunk, op)], tolerance=1e-3, highest=100.0)["states"]


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the errors of the rebuilt states of one head by token and of all heads by tokens
    walked back, and the error of each output and gradient."""

    w: Tensor
    """Log decays of the channels, [K]."""
    off: Tensor
    """The relative error of each row of S_{t-1}, for every token, [T, K]; inf or NaN if it is not finite."""
    wrong: Tensor
    """Whether that error is finite and above bfloat16's rounding, [T, K]."""
    by_steps: Tensor
    """The RMS of the rows' errors over heads and chunks, [chunk, K], after one token back, after two, …"""
    errors: Mapping[str, float]
    """Relative L2 error of o and every gradient against float64."""
    chunk: int
    op: str
    rebuilt: str


def show(
    *,
    w: Annotated[float, FINITE_DECAY] = -1.0,
    chunk: Annotated[int, (4, 8, 16, 32, 64)] = 16,
    op: Annotated[str, SUMS] = "rwkv7",
    rebuilt: Annotated[str, REBUILT] = "by division",
    seed: int = 0,
) -> Shown:
    """Rebuild the states of random inputs with natural-log decays down to w <= 0. Return the error of the row with the
    strongest decay beside `grown`, the |w| from which it is wrong beside `law`, and the gradients' errors."""
    x = inputs(w, chunk, op, seed)
    off = _off(x, list(operator(op).reference.steps(**x)), op, chunk, rebuilt)
    results, exact = run(x, op, chunk=chunk, rebuilt=rebuilt), truth(op, x, recurrence=True)
    errors = {name: relative_l2(results[name], exact[name]) for name in exact if not name.endswith("_state")}
    by_steps = _by_steps(off, chunk)
    expected = grown(w, chunk, op) if rebuilt == "by division" else 0.0
    what, within = f"{op}, C = {chunk}, {rebuilt}", 1.0 if expected > 1e-5 else 3.0
    measured = float(by_steps[-1, -1])
    others = [error for name, error in errors.items() if name not in READ[op]]
    rows = [
        Row(f"{what}: states wrong from |w|", math.nan, law(chunk, op, rebuilt), onset(chunk, op, rebuilt, seed), 0.05),
        Row(f"{what}, w = {w:g}: a row off by", math.nan, _in_words(expected), _in_words(measured), within),
        Row(f"{what}, w = {w:g}: other tensors right", math.nan, True, max(others) < 1e-5),
        *(Row(f"{what}, w = {w:g}: {name} off by", math.nan, math.nan, errors[name]) for name in READ[op]),
    ]
    return Shown(
        rows, w=x["w"][0, 0, 0], off=off[:, 0], wrong=off[:, 0].isfinite() & (off[:, 0] > ROUNDED), by_steps=by_steps,
        errors=errors, chunk=chunk, op=op, rebuilt=rebuilt,
    )  # fmt: skip


def _in_words(error: float) -> float | str:
    return error if error < LARGE else "beyond 1e30"


def reproduce() -> list[Row]:
    """Return predicted and measured errors at three decays and limits by chunk length, and both for "forward again"."""
    rows = [show(w=w).rows[1] for w in (-STRONGEST, -1.0, -1.5)]
    rows += [show(w=-STRONGEST, chunk=chunk, op=op).rows[0] for op in SUMS for chunk in (4, 8, 16, 32, 64)]
    return rows + show(rebuilt="forward again").rows
