"""A block that reaches beyond the sequence, and the NaN that its empty rows send back into it.

As reported (flash-linear-attention issue #77): GSA's gradients turn NaN as training goes on, rarely at first, output 3
of the backward pass before all others; re-initialising the forget gate's projection cures it, and the exclusive sums of
RWKV6 are to blame, GLA and GSA being inclusive and hence immune.
As measured: that is another bug (`anchor`), which GSA indeed cannot have. This one is in the *padding*. The gradient of
token j's key sums over later rows i of its chunk, sum_i A_ij (x_i e^{gi_i - n}) e^{n - gi_j}. A_ij is the gradient of
the pair's score, x_i row i's query, gi the cumulative gate, and n, the anchor, its value at the last row of j's block
of 16. Rows beyond the end T of the sequence are loaded as x_i = 0, A_ij = 0, and gi_i = 0, as without decay. Then

    x_i e^{gi_i - n} = 0 * e^{0 - n} = 0 * inf = NaN      as soon as n < -88.72,

and since the sum is over i, NaN reaches real rows. The forward pass has the same e^{0 - n} in the same rows, but there
they are outputs, and rows beyond T are not stored: it stays finite.

The law: with R = T mod 64 tokens in the last chunk, the farthest anchor with a later block is at min(R, 48) tokens, so
the limit of a uniform gate is |g| = 88.72 / min(R, 48); if R is 0 there is no padding and no limit. For R <= 16 the
limit is 5.5 or more, so a search up to there wrongly suggests that such lengths are immune (in the kernel itself,
fla-core 0.4.0 interpreted, T = 76 is finite at -7.3 and NaN at -7.5). In a loop that stops at the last block with
tokens ("blocks", as in the key gradients of GLA and RWKV6), R <= 16 and multiples of 16 are indeed immune, and other
lengths have 16 (ceil(R / 16) - 1) in place of R.

The cure is to let padded rows decay fully, e^{-inf - n} = 0, or to mask them. A clamp does not help: |f| < 20 bounds g
= logsigmoid(f) / 8 at -2.5, |w| < 12 bounds RWKV6's w at -12, and neither is above -88.72 / 48.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, truth
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.chunks import split_chunks
from ...ops.common.dispatch import choose_backend
from ..anchor.operators import OPERATORS, TENSORS
from ..anchor.schemes import Products
from ..knobs import FINITE_DECAY, Range
from ..laws import LN_MAX, Measured, Row, search

FORMS = {
    "chunk": "padding loaded as 0, every later block of the chunk visited: GSA",
    "blocks": "padding loaded as 0, blocks without a token skipped: GLA, RWKV6",
    "right": "padding forgets everything: e^-inf = 0",
}
"""How rows beyond the sequence enter a key's gradient: two faulty loops, and the right one."""

KEY_GRADIENT = {"gsa": "ds", "rwkv6": "dk"}
"""By operator, the tensor that is NaN first; the gate's gradient, computed from it, follows."""

SCHEME = "previous-row"
"""The anchor scheme of all forms: a correct one, so that only the padding can give NaN."""


class _Padded(Products):
    """`anchor.schemes.Products` with the values in the rows beyond token T that a kernel loads; w [B, H, N, C, K]."""

    def __init__(self, w: Tensor, *, inclusive: bool, T: int, form: str, backend: str, **options):
        super().__init__(w, SCHEME, inclusive=inclusive, **options)
        self.T, self.form, self.backend, self.block = T, form, backend, self.tiles[0].rows.stop
        N, C = w.shape[2], w.shape[3]
        tokens = torch.arange(N * C, device=w.device).view(N, C, 1)
        self.real = tokens < T
        self.visited = tokens // self.block * self.block < T if form == "blocks" else torch.ones_like(self.real)

    def exponents(self, tile):
        on_query, on_key = super().exponents(tile)
        n = self.gi[..., tile.anchor : tile.anchor + 1, :]
        empty = torch.where(self.visited[:, tile.rows] & (self.form != "right"), 0.0, -torch.inf)
        return torch.where(self.real[:, tile.rows], on_query, empty - n), on_key

    # A kernel does not store rows beyond T.

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(self.real, super().scores(query, key), 0.0)

    def read(self, A: Tensor, key: Tensor) -> Tensor:
        return torch.where(self.real, super().read(A, key), 0.0)

    def written(self, A: Tensor, query: Tensor) -> Tensor:
        if self.backend == "torch":
            return torch.where(self.real, super().written(A, query), 0.0)
        from .kernel_triton import key_grads

        own = super().written(A, query, [tile for tile in self.key_tiles if tile.anchor is None])
        later = key_grads(A, query, self.seen, self.gi, self.T, self.block, self.form)
        return torch.where(self.real, own, 0.0) + later


def _check(op: str, form: str) -> None:
    one_of("op", op, KEY_GRADIENT)
    one_of("form", form, FORMS)


def products(T: int, form: str = "chunk", **options) -> Callable[..., Products]:
    """Return a function of w [B, H, N, C, K] and inclusive= that builds the `anchor.schemes.Products` of T tokens with
    padding as `form` says, one of `FORMS`. options: backend, chunk and block as in `run`."""
    return partial(_Padded, T=T, form=form, **{"backend": "torch", **options})


def run(
    inputs: Mapping[str, Tensor],
    form: str = "chunk",
    *,
    op: str = "gsa",
    backend: str = "torch",
    chunk: int = 64,
    block: int = 16,
) -> dict[str, Tensor]:
    """Run GSA or RWKV6 forward and backward in float32, with the padding of the last chunk as `form` says, of `FORMS`.

    inputs: as from `flakit.inputs(op, ...)`. chunk: tokens per chunk. block: tokens of a chunk with one anchor.
    backend: "torch", or "triton" to compute what later blocks contribute to key gradients, where NaN arises, with
        `kernel_triton`, on a GPU or under TRITON_INTERPRET=1. Raises ValueError for an unknown op or form.
    Returns `TENSORS[op]` of the `anchor` case; compare with `truth(op, inputs)`. The gate's gradient is summed over the
    whole sequence here, so a NaN reaches back to the first token; published kernels sum within each chunk.
    """
    _check(op, form)
    of, backend = OPERATORS[op], choose_backend(backend, inputs["k"])
    formed = products(inputs["k"].shape[1], form, backend=backend, chunk=chunk, block=block)
    chunked = of(inputs, lambda w, inclusive: formed(w, inclusive=inclusive), chunk)
    do, _ = cotangents(op, inputs)
    tensors = chunked.outputs | chunked.backward(split_chunks(do, chunk, torch.float32))
    return {name: tensors[name] for name in TENSORS[op]}


class Anchor(NamedTuple):
    """A key block of the last chunk whose gradient sums padding rows: its tokens and the gates in its exponent."""

    rows: range
    """The tokens of the block, whose gradients become NaN."""
    tokens: int
    """Number of the chunk's gates that are summed up to the block's anchor, inclusive."""


def anchors(T: int, form: str = "chunk", *, chunk: int = 64, block: int = 16) -> list[Anchor]:
    """Return the key blocks of the last chunk whose gradient sums padding rows, first that whose exponent sums the most
    gates. Raises ValueError for T < 1 or an unknown form."""
    one_of("form", form, FORMS)
    if type(T) is not int or T < 1:
        raise ValueError(f"T: expected a whole number of at least 1, got {T!r}")
    R = T % chunk
    if R == 0 or form == "right":
        return []
    loaded = chunk if form == "chunk" else min(chunk, -(-R // block) * block)
    reached = []
    for p in range(0, min(R, loaded - block), block):
        tokens = min(p + block, R)
        if loaded > max(R, p + block):  # a later row is visited and holds no token
            reached.append(Anchor(range(T - R + p, T - R + tokens), tokens))
    return reached[::-1]


def law(T: int, form: str = "chunk", *, chunk: int = 64, block: int = 16, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest uniform |g| (natural log, per token) without NaN over T tokens: ln(dtype's max) / n, or inf.

    n = min(T mod chunk, chunk - block) with form "chunk": 88.72 / 48 at T = 3000. Raises ValueError for T < 1.

    >>> round(law(3000), 3), round(law(12000), 3), law(3072), law(24000, "right")
    (1.848, 2.773, inf, inf)
    """
    return min(
        (LN_MAX[dtype] / anchor.tokens for anchor in anchors(T, form, chunk=chunk, block=block)), default=math.inf
    )


def predicted(
    inputs: Mapping[str, Tensor], form: str = "chunk", *, op: str = "gsa", chunk: int = 64, block: int = 16
) -> Tensor:
    """Predict for any gates which elements of the key's gradient are NaN, boolean [B, T, H, K or M]. A channel is NaN
    in a block if its gates up to the block's anchor sum to less than -ln(max)."""
    _check(op, form)
    w = inputs[OPERATORS[op].decay].detach()
    T = w.shape[1]
    start = T - T % chunk
    lost = torch.zeros_like(w, dtype=torch.bool)
    for anchor in anchors(T, form, chunk=chunk, block=block):
        n = w[:, start : start + anchor.tokens].float().cumsum(1)[:, -1:]
        lost[:, anchor.rows.start : anchor.rows.stop] = -n > LN_MAX[torch.float32]
    return lost


def inputs(
    T: int, gate: float = -1.0, *, uneven: float = 1.0, op: str = "gsa", K: int = 16, M: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    """Draw one head of GSA (or of RWKV6, whose state has K rows) over T tokens with a uniform gate.

    gate: natural log, <= 0 and finite: differences of running sums are undefined at -inf. uneven: the fraction of the
        slots that have it, at least one slot; the others have -0.01. Raises ValueError for values outside these ranges.
    """
    if not 0 < uneven <= 1:
        raise ValueError(f"uneven: expected a share above 0 and up to 1, got {uneven!r}")
    if not -math.inf < gate <= 0:
        raise ValueError(f"gate: expected a finite natural-log decay <= 0, got {gate!r}; inf - inf is another fault")
    sizes = {"M": M} if op == "gsa" else {}
    x = make_inputs(op, T=T, H=1, K=K, **sizes, decay=float(gate), seed=seed)
    w = x[OPERATORS[op].decay]
    w[..., max(1, round(uneven * w.shape[-1])) :] = -0.01
    return x


@lru_cache(maxsize=512)
def onset(T: int, form: str = "chunk", *, op: str = "gsa", tolerance: float = 1e-3, **options) -> float:
    """Measure what `law` predicts: the uniform |g| from which the key's gradient is non-finite, ± tolerance; inf if
    none up to 10^4. options: backend, chunk and block as in `run`."""
    x = inputs(T, -1.0, op=op, K=4, M=4)
    decay, name = OPERATORS[op].decay, KEY_GRADIENT[op]

    def finite(size: float) -> dict[str, bool]:
        return {name: bool(run({**x, decay: x[decay] * size}, form, op=op, **options)[name].isfinite().all())}

    return search(finite, near=[law(T, form, **options)], tolerance=tolerance, highest=1e4)[name]


class Clamp(NamedTuple):
    """What a lower bound on the log decays does: the error of o, and whether the faulty kernel's gradient is finite."""

    bound: float
    kept: float
    """The fraction of a slot that remains after one token at the bound, e^bound; without the clamp it may be 0."""
    error: float
    """Relative L2 error of o, against float64 with unclamped gates."""
    finite: bool
    """Whether the key's gradient is finite with the clamp."""


CLAMPS = {"gsa": -20.0, "rwkv6": -12.0}
"""The clamps that the report proposes: |f| < 20 on GSA's projection (g = logsigmoid(f) / 8), |w| < 12 on RWKV6's w."""


def bound(op: str = "gsa") -> float:
    """Return the lowest log decay under the clamp that the report proposes (`CLAMPS`): -2.5 for GSA, -12 for RWKV6."""
    at = torch.tensor(CLAMPS[op], dtype=torch.float64)
    return (torch.nn.functional.logsigmoid(at) / 8).item() if op == "gsa" else at.item()


def clamped(inputs: Mapping[str, Tensor], at: float, form: str = "chunk", *, op: str = "gsa", **options) -> Clamp:
    """`run` with log decays clamped at `at` (<= 0). Return o's error and whether the key's gradient is finite."""
    decay = OPERATORS[op].decay
    results = run({**inputs, decay: inputs[decay].clamp(min=at)}, form, op=op, **options)
    exact = truth(op, inputs)["o"]
    finite = bool(results[KEY_GRADIENT[op]].isfinite().all())
    return Clamp(at, math.exp(at), relative_l2(results["o"], exact), finite)


RECORDED = {
    3000: {-1.84: "none", -1.86: "2976 … 2991", -2.8: "2960 … 2991", -5.6: "2944 … 2991"},
    64: {-50.0: "none"},
    128: {-50.0: "none"},
    3072: {-50.0: "none"},
    12000: {-2.76: "NaN", -2.78: "NaN"},
    24000: {-50.0: "NaN"},
}
"""Recorded NaN rows by length and gate; "NaN" for lengths that the report names without a gate.

24000 is a multiple of 64: this fault explains a run at "24K" only if its real length was not.
"""


def _lost(
    x: Mapping, results: Mapping, gate: float, recorded: str, form: str = "chunk", op: str = "gsa", **sizes
) -> Row:
    T, law = x["k"].shape[1], tokens(predicted(x, form, op=op, **sizes))
    measured = tokens(~results[KEY_GRADIENT[op]].isfinite())
    if not results["o"].isfinite().all():
        measured += ", and o"
    return Row(f"T = {T}, g = {gate:g}: tokens lost", recorded, law, measured)


def tokens(lost: Tensor, first: int = 0) -> str:
    """Name the tokens at which any element of a boolean tensor [B, T, H, *] is True: "96 … 111", or "none". first: the
    number of the tensor's first token."""
    at = first + lost.flatten(2).any(-1).any(0).nonzero()[:, 0].cpu().numpy()
    runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
    return ", ".join(f"{run[0]} … {run[-1]}" for run in runs if len(run)) or "none"


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, for the last chunk of a sequence, the gates as loaded, the exponents of each
    row and the key's gradient; and the |gate| at which NaN begins, by number of tokens."""

    op: str
    form: str
    first: int
    """The chunk's first token."""
    real: int
    """Number of rows that hold a token; the rest are padding."""
    gates: Tensor
    """The cumulative gate of the first channel at each row, as loaded, [chunk]; NaN for rows that are not loaded."""
    block: int
    exponents: Tensor
    """The largest exponent over channels, gi_i - n, of each row i at each key block's anchor, [blocks, chunk]: above
    `LN_MAX` if its exponential is infinite, -inf for a row that decays to zero, NaN where no product is formed (for
    rows not later than the block, and blocks without a token)."""
    gradient: Tensor
    """The key's gradient, [channels, real]; `right`: that of the right form."""
    right: Tensor
    finite: Mapping[str, bool]
    """By name, whether the output and every gradient are finite."""
    gate: float
    limits: list[float]
    """The |gate| of `law` if the last chunk has 1, 2, … `chunk` tokens."""
    onset: float
    """The measured |gate| from which the gradient is NaN over T tokens."""


def show(
    *,
    T: Annotated[int, Range(1, 320)] = 120,
    gate: Annotated[float, FINITE_DECAY] = -1.86,
    form: Annotated[str, FORMS] = "chunk",
    op: Annotated[str, KEY_GRADIENT] = "gsa",
    uneven: Annotated[float, Range(1 / 16, 1, 1 / 16)] = 1.0,
    chunk: Annotated[int, (32, 64, 128)] = 64,
    block: Annotated[int, (8, 16, 32)] = 16,
) -> Shown:
    """Run GSA or RWKV6 over T tokens with a uniform gate <= 0 (natural log). Return the tokens whose key gradient is
    NaN and the |gate| from which they are, beside the predictions. Arguments are as in `inputs` and `run`."""
    sizes = {"chunk": chunk, "block": block}
    x = inputs(T, gate, op=op, uneven=uneven)
    results, right = (run(x, each, op=op, **sizes) for each in (form, "right"))
    begins = onset(T, form, op=op, **sizes)
    rows = [
        _lost(x, results, gate, math.nan, form, op, **sizes),
        Row(f"T = {T}: |g| at which it begins", math.nan, law(T, form, **sizes), begins),
        *clamp_rows(T, form, op, **sizes),
    ]
    real, name = T % chunk or chunk, KEY_GRADIENT[op]
    last = slice(T - real, T)
    w, (inclusive,) = split_chunks(x[OPERATORS[op].decay], chunk, torch.float32), set(OPERATORS[op].reads.values())
    formed, exponents = (
        products(T, form, **sizes)(w, inclusive=inclusive),
        torch.full((chunk // block, chunk), math.nan),
    )
    for tile in formed.key_tiles:
        if tile.anchor is not None and formed.real[-1, tile.keys.start]:
            exponents[tile.keys.start // block, tile.rows] = formed.exponents(tile)[0][0, 0, -1].amax(-1)
    empty = torch.where(formed.visited[-1, :, 0], 0.0 if form != "right" else -math.inf, math.nan)
    return Shown(
        rows, op=op, form=form, first=T - real, real=real,
        gates=torch.where(formed.real[-1, :, 0], formed.gi[0, 0, -1, :, 0], empty), block=block,
        exponents=exponents, gradient=results[name][0, last, 0].T,
        right=right[name][0, last, 0].T, finite={name: bool(y.isfinite().all()) for name, y in results.items()},
        gate=gate, limits=[law(chunk + rows, form, **sizes) for rows in range(1, chunk + 1)],
        onset=begins,
    )  # fmt: skip


def clamp_rows(T: int = 3000, form: str = "chunk", op: str = "gsa", **sizes) -> list[Row]:
    """Return rows on the report's clamp (`bound`), applied to a gate of 4 times that: whether the key's gradient is
    finite, predicted and measured, and the error of o that the clamp causes. sizes: chunk and block as in `run`."""
    at, gate = bound(op), 4 * bound(op)
    result = clamped(inputs(T, gate, op=op, K=4, M=4), at, form, op=op, **sizes)
    named, finite = "|f| < 20" if op == "gsa" else "|w| < 12", -at < law(T, form, **sizes)
    return [
        Row(f"{op}, T = {T}, {named}, gates clamped at {at:.3g}: gradient finite", math.nan, finite, result.finite),
        Row(f"{op}, T = {T}, gates of {gate:.3g} clamped at {at:.3g}: o off by", math.nan, math.nan, result.error),
    ]


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured tokens with NaN key gradients, by length and gate; then `clamp_rows`."""
    rows = []
    for T, gates in RECORDED.items():
        for gate, recorded in gates.items():
            x = inputs(T, gate, K=4, M=4)
            rows.append(_lost(x, run(x), gate, recorded))
    return [*rows, *(row for op in CLAMPS for row in clamp_rows(op=op))]
