"""The story in numbers: one setting, and every number that the case file has."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.inputs import inputs as make_inputs
from ..knobs import FINITE_DECAY, Range
from ..laws import Row, kernel_place
from .law import law, limits
from .measurement import onset, run
from .operators import OPERATORS, TENSORS, find_operator
from .schemes import SCHEMES

CLAMP = -12.0
"""The stop-gap of the thread, |w| < 12: it bounds one token, and so bug A, but no exponent that holds eight."""


def spike(at: int, w: float = -1.0, *, op: str = "rwkv6", T: int = 64, K: int = 64) -> dict[str, Tensor]:
    """Inputs of one head in which nothing decays but the token `at`, by w (natural log)."""
    if not 0 <= at < T:
        raise ValueError(f"row: expected a token 0 … {T - 1}, got {at!r}")
    x = make_inputs(op, T=T, H=1, K=K, decay=0.0)
    x[find_operator(op).decay][:, at] = w
    return x


WITHIN = dict.fromkeys(("none", "block-start", "middle"), 0.03)
"""How far law and measurement of `at` may be apart where many large products meet in a sum; else they hardly are."""


def at(
    *,
    w: Annotated[float, FINITE_DECAY] = -88.8,
    row: Annotated[int | None, Range(0, 1023)] = 16,
    scheme: Annotated[str, SCHEMES] = "first-row",
    op: Annotated[str, OPERATORS] = "rwkv6",
    T: Annotated[int, Range(1, 1024)] = 64,
    chunk: Annotated[int, (16, 32, 64, 128)] = 64,
    block: Annotated[int, (4, 8, 16, 32, 64)] = 16,
) -> list[Row]:
    """One log decay w < 0, at one token (row) or at all (none): which tensors are finite, the |w| where each ends."""
    if not -math.inf < w < 0:
        raise ValueError(f"w: expected a natural-log decay < 0, got {w!r}")
    how = {"op": op, "chunk": chunk, "block": block}
    x = make_inputs(op, T=T, H=1, K=64, decay=-1.0) if row is None else spike(row, op=op, T=T)
    found = run({**x, OPERATORS[op].decay: x[OPERATORS[op].decay] * -w}, scheme, **how)
    predicted, measured, rows = limits(scheme, x, **how), onset(x, scheme, **how), []
    for name in TENSORS[op]:
        rows.append(Row(f"{name} finite at w = {w:g}", math.nan, -w < predicted[name], found.finite[name]))
        within = WITHIN.get(scheme, 2e-3)
        rows.append(Row(f"{name} ends at |w|", math.nan, predicted[name], measured[name], within))
    return rows


def _kernel_rows() -> list[Row]:
    """Bug A and its first repair in the kernel itself, if this process can run it."""
    device, backend = kernel_place()
    if backend != "triton":
        return []
    rows = []
    for what, scheme, x, tensor, step in (
        ("bug A, w[16] alone: o", "first-row", spike(16, K=16), "o", 1e-3),
        (
            "bad repair, T=128: dr",
            "previous-row-across",
            make_inputs("rwkv6", T=128, H=1, K=16, decay=-1.0),
            "dr",
            1e-3,
        ),
    ):
        x = {name: y.to(device) for name, y in x.items()}
        limit = law(scheme, x, tensor=tensor)
        sides = [
            run({**x, "w": x["w"] * limit * side}, scheme, backend="triton").finite[tensor]
            for side in (1 - step, 1 + step)
        ]
        rows.append(
            Row(
                f"the kernel, {what} finite just below the law, lost just above",
                "yes, no",
                "yes, no",
                ", ".join("yes" if ok else "no" for ok in sides),
            )
        )
    return rows


def reproduce() -> list[Row]:
    """The numbers of the story, predicted and measured: the factor, or the |w| per token, where NaN begins."""

    def row(what: str, recorded: float, scheme: str, tensor: str, x: Mapping[str, Tensor], **knobs) -> Row:
        return Row(what, recorded, law(scheme, x, tensor=tensor, **knobs), onset(x, scheme, **knobs)[tensor])

    uniform = {T: make_inputs("rwkv6", T=T, H=2, K=64, decay=-1.0) for T in (64, 128)}
    rows = [row("bug A, w[16] alone: o", 88.72, "first-row", "o", spike(16))]
    rows += [row("RWKV7, bug A, w[16] alone: o", 88.72, "first-row", "o", spike(16, op="rwkv7"), op="rwkv7")]
    rows += [row("GSA, bug A, g[16] alone: o", math.inf, "first-row", "o", spike(16, op="gsa"), op="gsa")]
    rows += [row(f"bug A, w[{at}] alone: o", math.inf, "first-row", "o", spike(at, T=128)) for at in (0, 15, 17, 64)]
    rows += [
        row(f"{what}: {tensor}", recorded, scheme, tensor, uniform[T], **knobs)
        for what, scheme, T, knobs, found in (
            ("bad repair, T=128", "previous-row-across", 128, {}, {"dr": 1.386, "o": math.inf}),
            ("no anchor", "none", 64, {}, {"dr": 1.377, "dk": 1.386, "o": 1.394}),
            ("diagonal from its first row", "block-start", 64, {}, {"dk": 5.915}),
            ("middle, row 8", "middle", 64, {"row": 8}, {"dk": 9.72, "dr": 9.86}),
            ("the row before", "previous-row", 128, {}, {"o": math.inf, "dw": math.inf}),
            ("pairwise", "pairwise", 64, {}, {"dw": math.inf}),
            ("dyadic", "dyadic", 64, {}, {"dw": math.inf}),
        )
        for tensor, recorded in found.items()
    ]
    clamped = run(spike(16, max(-500.0, CLAMP)), "first-row").finite["o"]
    rows.append(Row("bug A, w[16] = -500 clamped at -12: o finite", True, -CLAMP < rows[0].law, clamped))
    x = uniform[64]
    rows.append(row("middle, row 8, scale 1: o", 10.97, "middle", "o", {**x, "scale": 1.0}, row=8))
    unit = {name: x[name].sign() for name in "rkvw"} | {"u": x["u"]}
    rows.append(row("float16 factors, operands ±1: dr", 0.74, "block-start", "dr", unit, dtype=torch.float16))
    return rows + _kernel_rows()
