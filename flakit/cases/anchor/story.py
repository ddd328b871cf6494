"""The story in numbers: one setting, and every number that the case file has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.inputs import inputs as make_inputs
from ...ops.common.chunks import split_chunks
from ..knobs import FINITE_DECAY, Range
from ..laws import Row, kernel_place
from .law import law, limits
from .measurement import Run, exponents, onset, run
from .operators import OPERATORS, TENSORS, find_operator
from .schemes import SCHEMES, Products

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
    row: Annotated[int | None, Range(0, 127)] = 16,
    scheme: Annotated[str, SCHEMES] = "first-row",
    op: Annotated[str, OPERATORS] = "rwkv6",
    T: Annotated[int, Range(1, 256)] = 128,
    chunk: Annotated[int, (16, 32, 64, 128)] = 64,
    block: Annotated[int, (4, 8, 16, 32, 64)] = 16,
) -> list[Row]:
    """One log decay w <= 0, at one token (row) or at all (none): which tensors are finite, the |w| where each ends."""
    if not -math.inf < w <= 0:
        raise ValueError(f"w: expected a finite natural-log decay <= 0, got {w!r}")
    how = {"op": op, "chunk": chunk, "block": block}
    x, found = _run(w, row, scheme, **how, T=T)
    predicted, measured, rows = limits(scheme, x, **how), onset(x, scheme, **how), []
    for name in TENSORS[op]:
        rows.append(Row(f"{name} finite at w = {w:g}", math.nan, -w < predicted[name], found.finite[name]))
        within = WITHIN.get(scheme, 2e-3)
        rows.append(Row(f"{name} ends at |w|", math.nan, predicted[name], measured[name], within))
    return rows


@lru_cache(maxsize=16)
def _run(
    w: float, row: int | None, scheme: str, *, op: str, T: int, chunk: int, block: int
) -> tuple[dict[str, Tensor], Run]:
    """The inputs with a log decay of -1, and what a scheme makes of w."""
    x = make_inputs(op, T=T, H=1, K=64, decay=-1.0) if row is None else spike(row, op=op, T=T)
    decay = OPERATORS[op].decay
    return x, run({**x, decay: x[decay] * -w}, scheme, op=op, chunk=chunk, block=block)


class Anchored(NamedTuple):
    """Rows of the chunk and the anchor of their tile, as a row of the chunk (-1: what precedes it) and its sum n."""

    rows: range
    keys: range
    row: int
    n: float


@dataclass(frozen=True)
class Shown:
    """One chunk, one channel; rows are outputs i, columns keys j. The chunk with the largest exponent."""

    scheme: str
    inclusive: bool
    """Whether the reads have decayed by their own token, so by gi; else by ge."""
    first: int
    """The chunk's first token."""
    sums: Tensor
    """gi, the inclusive cumulative log decay, [C]."""
    seen: Tensor
    """What the reads have decayed by: gi or, exclusive, the sum before; [C]."""
    as_read: list[Anchored]
    as_meant: list[Anchored]
    """The same tiles with the anchor that was meant: the row before the block."""
    alone: Tensor
    """The exponent of a row of the read factor in its leftmost tile, [C], whether or not it meets a key there."""
    read: Tensor
    key: Tensor
    """The exponents of the two factors of every pair, [C, C]; NaN where the pair is not formed."""
    weights: Tensor
    """Their product, as computed in float32."""
    true: Tensor
    """The weight itself in float64; 0 where the output must not see the key."""
    nan: Mapping[str, Tensor]
    inf: Mapping[str, Tensor]
    """The share of every token's values that is lost, by tensor, [C]."""
    finite: Mapping[str, bool]


def show(*, w: float, row: int | None, scheme: str, op: str, T: int, chunk: int, block: int) -> Shown:
    x, found = _run(w, row, scheme, op=op, T=T, chunk=chunk, block=block)
    of, how = OPERATORS[op], {"op": op, "chunk": chunk, "block": block}
    one = {of.decay: x[of.decay][..., :1] * -w}
    query = min(of.reads, key=of.reads.get)  # an exclusive read where there is one
    decays = split_chunks(one[of.decay], chunk, torch.float32)
    made = Products(decays, scheme, inclusive=of.reads[query], chunk=chunk, block=block)
    alone = _alone(made)
    pairs = [exponents(one, scheme, query=query, index=n, channel=0, **how) for n in range(decays.shape[2])]
    parts = [(*pair, own) for pair, own in zip(pairs, alone, strict=True)]
    largest = [max(float(part.nan_to_num(-math.inf).max()) for part in each) for each in parts]
    index = max(range(len(pairs)), key=largest.__getitem__)
    if largest[index] <= 0 and row is not None:
        index = row // chunk
    gi, seen = (sums[0, 0, index, :, 0] for sums in (made.gi, made.seen))
    before = float(made.gi[0, 0, index - 1, -1, 0]) if index else 0.0
    as_read, as_meant = [], []
    for tile in made.tiles:
        if tile.anchor is not None:
            at_start = before if made.scheme.across else 0.0
            rows, keys = (range(part.start, part.stop) for part in (tile.rows, tile.keys))
            as_read.append(Anchored(rows, keys, tile.anchor, float(gi[tile.anchor]) if tile.anchor >= 0 else at_start))
            if rows != keys and not made.scheme.dyadic:
                p = rows.start - 1
                as_meant.append(Anchored(rows, keys, p, float(gi[p]) if p >= 0 else 0.0))
    read, key = pairs[index]
    exact = seen.double()[:, None] - gi.double()[None, :]
    first, last = index * chunk, min((index + 1) * chunk, T)
    shares = {name: y[0, first:last, 0] for name, y in found.tensors.items() if y.ndim == 4 and name not in of.finals}
    return Shown(
        scheme=scheme,
        inclusive=of.reads[query],
        first=first,
        sums=gi,
        seen=seen,
        as_read=as_read,
        as_meant=as_meant,
        alone=alone[index],
        read=read,
        key=key,
        weights=read.exp() * key.exp(),
        true=torch.where(made.low, exact.exp(), 0.0),
        nan={name: y.isnan().double().mean(-1) for name, y in shares.items()},
        inf={name: y.isinf().double().mean(-1) for name, y in shares.items()},
        finite=found.finite,
    )


def _alone(made: Products) -> Tensor:
    """The exponents of the read factor in the tiles left of the blocks, [N, C]; NaN where a scheme has none."""
    found = torch.full(made.seen.shape[2:4], torch.nan)
    for tile in made.tiles:
        if tile.anchor is not None:
            exponent = made.exponents(tile)[0][0, 0, ..., 0]
            found[:, tile.rows] = torch.fmax(found[:, tile.rows], exponent)
    return found


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
            ("anchored at the start", "none", 64, {}, {"dr": 1.377, "dk": 1.386, "o": 1.394}),
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
