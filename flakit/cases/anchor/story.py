"""The numbers of the case `anchor`: `show` for one setting, `reproduce` for all recorded numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.inputs import inputs as make_inputs
from ...ops.common.chunks import split_chunks
from ..knobs import FINITE_DECAY, Range
from ..laws import Measured, Row, kernel_place
from .law import law, limits
from .measurement import exponents, onset, run
from .operators import OPERATORS, TENSORS, find_operator
from .schemes import SCHEMES, Products

CLAMP = -12.0
"""The report's workaround, |w| < 12: it bounds a single token, so cures bug A, but not exponents over eight tokens."""


def spike(at: int, w: float = -1.0, *, op: str = "rwkv6", T: int = 64, K: int = 64) -> dict[str, Tensor]:
    """Draw inputs of one head in which only token `at` has a decay, w (log). Raises ValueError unless 0 <= at < T."""
    if not 0 <= at < T:
        raise ValueError(f"row: expected a token 0 … {T - 1}, got {at!r}")
    x = make_inputs(op, T=T, H=1, K=K, decay=0.0)
    x[find_operator(op).decay][:, at] = w
    return x


WITHIN = dict.fromkeys(("none", "block-start", "middle"), 0.03)
"""Relative tolerance of the law in `show` for schemes that sum many large products; other schemes agree to 0.2%."""


class Anchored(NamedTuple):
    """A tile's rows, the row of its anchor in the chunk (-1: before the chunk), and n, the log decay's sum there."""

    rows: range
    row: int
    n: float


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for the channel and chunk with the largest exponent, the cumulative decays,
    the exponents and weights of all pairs [outputs i, keys j], and how much of each tensor is finite."""

    scheme: str
    inclusive: bool
    """Whether reads come after their own token's decay, so use gi; otherwise ge."""
    first: int
    """The chunk's first token."""
    sums: Tensor
    """gi, the inclusive cumulative log decay, [C]."""
    seen: Tensor
    """The cumulative decay of the reads: gi or, exclusive, ge; [C]."""
    as_read: list[Anchored]
    """The anchored tiles of the scores with the anchor that the scheme takes."""
    as_meant: list[Anchored]
    """The tiles of `as_read` with the intended anchor, the row before the block."""
    alone: Tensor
    """The exponent of each row's read factor in its leftmost tile, [C], even if it meets no key there."""
    read: Tensor
    key: Tensor
    """The exponents of the two factors of every pair, [C, C]; NaN for pairs that are not formed."""
    weights: Tensor
    """The product of the two factors, as computed in float32, [C, C]."""
    true: Tensor
    """The weight computed in float64, [C, C]; 0 for masked keys."""
    nan: Mapping[str, Tensor]
    inf: Mapping[str, Tensor]
    """The fraction of each token's values that are NaN or inf, by tensor, [C]."""
    finite: Mapping[str, bool]


def show(
    *,
    w: Annotated[float, FINITE_DECAY] = -88.8,
    row: Annotated[int | None, Range(0, 127)] = 16,
    scheme: Annotated[str, SCHEMES] = "first-row",
    op: Annotated[str, OPERATORS] = "rwkv6",
    T: Annotated[int, Range(1, 256)] = 128,
    chunk: Annotated[int, (16, 32, 64, 128)] = 64,
    block: Annotated[int, (4, 8, 16, 32, 64)] = 16,
) -> Shown:
    """Run one scheme at one natural-log decay w, of the token `row` alone or of all (None). Return rows on which
    tensors are finite and from which |w| on each is not, beside the predictions of `limits`, and the picture's arrays.
    Raises ValueError for a w that is positive or infinite, or a row >= T."""
    if not -math.inf < w <= 0:
        raise ValueError(f"w: expected a finite natural-log decay <= 0, got {w!r}")
    of, options = OPERATORS[op], {"op": op, "chunk": chunk, "block": block}
    x = make_inputs(op, T=T, H=1, K=64, decay=-1.0) if row is None else spike(row, op=op, T=T)
    result = run({**x, of.decay: x[of.decay] * -w}, scheme, **options)
    predicted, measured, numbers = limits(scheme, x, **options), onset(x, scheme, **options), []
    for name in TENSORS[op]:
        numbers.append(Row(f"{name} finite at w = {w:g}", math.nan, -w < predicted[name], result.finite[name]))
        within = WITHIN.get(scheme, 2e-3)
        numbers.append(Row(f"{name} ends at |w|", math.nan, predicted[name], measured[name], within))
    one = {of.decay: x[of.decay][..., :1] * -w}
    query = min(of.reads, key=of.reads.get)  # an exclusive read if there is one
    decays = split_chunks(one[of.decay], chunk, torch.float32)
    products = Products(decays, scheme, inclusive=of.reads[query], chunk=chunk, block=block)
    alone = _alone(products)
    pairs = [exponents(one, scheme, query=query, index=n, channel=0, **options) for n in range(decays.shape[2])]
    parts = [(*pair, own) for pair, own in zip(pairs, alone, strict=True)]
    largest = [max(float(part.nan_to_num(-math.inf).max()) for part in each) for each in parts]
    index = max(range(len(pairs)), key=largest.__getitem__)
    if largest[index] <= 0 and row is not None:
        index = row // chunk
    gi, seen = (sums[0, 0, index, :, 0] for sums in (products.gi, products.seen))
    before = float(products.gi[0, 0, index - 1, -1, 0]) if index else 0.0
    as_read, as_meant = [], []
    for tile in products.tiles:
        if tile.anchor is not None:
            at_start = before if products.scheme.across else 0.0
            rows, keys = (range(part.start, part.stop) for part in (tile.rows, tile.keys))
            as_read.append(Anchored(rows, tile.anchor, float(gi[tile.anchor]) if tile.anchor >= 0 else at_start))
            if rows != keys and not products.scheme.dyadic:
                p = rows.start - 1
                as_meant.append(Anchored(rows, p, float(gi[p]) if p >= 0 else 0.0))
    read, key = pairs[index]
    exact = seen.double()[:, None] - gi.double()[None, :]
    first, last = index * chunk, min((index + 1) * chunk, T)
    shares = {name: y[0, first:last, 0] for name, y in result.tensors.items() if y.ndim == 4 and name not in of.finals}
    return Shown(
        numbers, scheme=scheme, inclusive=of.reads[query], first=first, sums=gi, seen=seen, as_read=as_read,
        as_meant=as_meant, alone=alone[index], read=read, key=key, weights=read.exp() * key.exp(),
        true=torch.where(products.low, exact.exp(), 0.0),
        nan={name: y.isnan().double().mean(-1) for name, y in shares.items()},
        inf={name: y.isinf().double().mean(-1) for name, y in shares.items()}, finite=result.finite,
    )  # fmt: skip


def _alone(products: Products) -> Tensor:
    """Return each row's largest exponent of the read factor in anchored tiles, [N, C]; NaN if it has none."""
    exponents = torch.full(products.seen.shape[2:4], torch.nan)
    for tile in products.tiles:
        if tile.anchor is not None:
            exponent = products.exponents(tile)[0][0, 0, ..., 0]
            exponents[:, tile.rows] = torch.fmax(exponents[:, tile.rows], exponent)
    return exponents


def _kernel_rows() -> list[Row]:
    """Return rows on bug A (the anchor one row too late) and its first repair in the Triton kernel; [] without it."""
    device, backend = kernel_place()
    if backend != "triton":
        return []
    rows = []
    for what, scheme, x, tensor in (
        ("bug A, w[16] alone: o", "first-row", spike(16, K=16), "o"),
        ("bad repair, T=128: dr", "previous-row-across", make_inputs("rwkv6", T=128, H=1, K=16, decay=-1.0), "dr"),
    ):
        x = {name: y.to(device) for name, y in x.items()}
        limit = law(scheme, x, tensor=tensor)
        near = ({**x, "w": x["w"] * limit * side} for side in (1 - 1e-3, 1 + 1e-3))
        finite = ", ".join("yes" if run(y, scheme, backend="triton").finite[tensor] else "no" for y in near)
        what = f"the kernel, {what} finite just below the law, lost just above"
        rows.append(Row(what, "yes, no", "yes, no", finite))
    return rows


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured onsets of NaN: factors on the decay, or |w| per token."""

    def row(what: str, recorded: float, scheme: str, tensor: str, x: Mapping[str, Tensor], **knobs) -> Row:
        return Row(what, recorded, law(scheme, x, tensor=tensor, **knobs), onset(x, scheme, **knobs)[tensor])

    uniform = {T: make_inputs("rwkv6", T=T, H=2, K=64, decay=-1.0) for T in (64, 128)}
    rows = [row("bug A, w[16] alone: o", 88.72, "first-row", "o", spike(16))]
    rows += [row("RWKV7, bug A, w[16] alone: o", 88.72, "first-row", "o", spike(16, op="rwkv7"), op="rwkv7")]
    rows += [row("GSA, bug A, g[16] alone: o", math.inf, "first-row", "o", spike(16, op="gsa"), op="gsa")]
    rows += [row(f"bug A, w[{at}] alone: o", math.inf, "first-row", "o", spike(at, T=128)) for at in (0, 15, 17, 64)]
    rows += [
        row(f"{what}: {tensor}", recorded, scheme, tensor, uniform[T], **knobs)
        for what, scheme, T, knobs, recorded_of in (
            ("bad repair, T=128", "previous-row-across", 128, {}, {"dr": 1.386, "o": math.inf}),
            ("anchored at the start", "none", 64, {}, {"dr": 1.377, "dk": 1.386, "o": 1.394}),
            ("diagonal from its first row", "block-start", 64, {}, {"dk": 5.915}),
            ("middle, row 8", "middle", 64, {"row": 8}, {"dk": 9.72, "dr": 9.86}),
            ("the row before", "previous-row", 128, {}, {"o": math.inf, "dw": math.inf}),
            ("pairwise", "pairwise", 64, {}, {"dw": math.inf}),
            ("dyadic", "dyadic", 64, {}, {"dw": math.inf}),
        )
        for tensor, recorded in recorded_of.items()
    ]
    clamped = run(spike(16, max(-500.0, CLAMP)), "first-row").finite["o"]
    rows.append(Row("bug A, w[16] = -500 clamped at -12: o finite", True, -CLAMP < rows[0].law, clamped))
    x = uniform[64]
    rows.append(row("middle, row 8, scale 1: o", 10.97, "middle", "o", {**x, "scale": 1.0}, row=8))
    unit = {name: x[name].sign() for name in "rkvw"} | {"u": x["u"]}
    rows.append(row("float16 factors, operands ±1: dr", 0.74, "block-start", "dr", unit, dtype=torch.float16))
    return rows + _kernel_rows()
