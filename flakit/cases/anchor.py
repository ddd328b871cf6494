"""Where a chunk's decay is anchored: the choice that decides at which decay NaN begins.

Inside a chunk, the weight of key j in output i > j is exp(ge_i - gi_j), gi the inclusive and ge the exclusive
cumulative log decay. A matrix product needs it as two factors, exp(ge_i - n) * exp(n - gi_j), with some anchor n.
Algebra does not care which; floating point does: an exponent above ln(max) = 88.72 makes an infinity, and the other
factor, a zero, turns it into NaN.

As told (flash-linear-attention issue #77): exp(b_gq - b_gn) explodes because RWKV6's cumulative decay is exclusive.
As measured: the anchor was the block's *first* row p. There ge_p - gi_p = -w_p is one token's decay, not a cumulative
one, so a single w[16] = -88.8 suffices, in the forward pass too; -500 at any other row is harmless. With gi of the row
before (n = gi_{p-1}) both exponents are <= 0. A first repair read that row across the chunk boundary, where the
cumulative sum had just restarted, and failed at 88.72 / 64 per token instead.

`SCHEMES` holds the anchors of the field, from none to the dyadic form flakit's own operator uses; `run` computes RWKV6
with one of them, `limits` and `law` predict the decay it survives, `onset` measures it.

All but "dyadic" take dw from running sums of r dr - k dk, as published kernels do: finite where dr and dk are, but at
strong decay a difference of large numbers that leaves noise (see `decay_gradient`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics.evaluate import cotangents
from ..numerics.inputs import inputs as make_inputs
from ..ops.common.decay import dyadic_levels, sum_after, sum_before
from ..ops.rwkv6 import chunk_torch
from ..ops.rwkv6.chunk_torch import carry_states, join_chunks, split_chunks
from .decay_gradient import identity
from .laws import LN_MAX, Row, search
from .masking import mask_mode

TENSORS = ("o", "dr", "dk", "dv", "dw", "du", "final_state")


@dataclass(frozen=True)
class Scheme:
    """Which anchor each tile of the score matrix uses. Rows are counted from the block's first row."""

    name: str
    label: str
    whole: bool = False  # the chunk is one block
    left: int = -1  # anchor of the tiles left of the diagonal
    diagonal: int | str | None = None  # anchor of the diagonal tile; "middle"; None: exact differences, pair by pair
    across: bool = False  # the row before the chunk's first one is read, from the chunk before
    dyadic: bool = False

    @property
    def masks(self) -> tuple[str, ...]:
        """The mask modes that mean something here, the right one first."""
        if self.dyadic:
            return ()
        return ("before", "where", "multiply", "none") if self.diagonal is None else ("where", "multiply", "none")


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", "none: the chunk's start", whole=True, diagonal=-1),
        Scheme("first-row", "the block's first row (bug A)", left=0),
        Scheme("previous-row-across", "the row before, even across chunks (bad repair)", across=True),
        Scheme("previous-row", "the row before the block", left=-1),
        Scheme("block-start", "diagonal tile: its first row", diagonal=0),
        Scheme("middle", "diagonal tile: its middle row", diagonal="middle"),
        Scheme("pairwise", "exact differences, pair by pair", whole=True),
        Scheme("dyadic", "dyadic local products", dyadic=True),
    )
}


class Tile(NamedTuple):
    """A rectangle of the score matrix and its anchor: a row of gi, -1 for what precedes the chunk, None for exact."""

    rows: slice
    keys: slice
    anchor: int | None


def tiles(scheme: str | Scheme, chunk: int = 64, block: int = 16, row: int | None = None) -> list[Tile]:
    """The tiles of A, and of dr; together with what lies right of the diagonal they cover [chunk, chunk]."""
    scheme, block, inside = _geometry(scheme, chunk, block, row)
    found = []
    for p in range(0, chunk, block):
        if p or scheme.across:
            found.append(Tile(slice(p, p + block), slice(0, p), p + scheme.left))
        found.append(Tile(slice(p, p + block), slice(p, p + block), None if inside is None else p + inside))
    return found


def key_tiles(scheme: str | Scheme, chunk: int = 64, block: int = 16, row: int | None = None) -> list[Tile]:
    """The tiles of dk: below the diagonal they are anchored at the key block's last row, which is always safe."""
    scheme, block, inside = _geometry(scheme, chunk, block, row)
    found = []
    for p in range(0, chunk, block):
        end = p + block
        found.append(Tile(slice(p, end), slice(p, end), None if inside is None else p + inside))
        if end < chunk:
            found.append(Tile(slice(end, chunk), slice(p, end), end - 1))
    return found


def _geometry(scheme: str | Scheme, chunk: int, block: int, row: int | None):
    scheme = _scheme(scheme)
    for name, size in (("chunk", chunk), ("block", block)):
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"{name}: expected a power of two, got {size!r}")
    block = chunk if scheme.whole else min(block, chunk)
    if row is not None and (scheme.diagonal != "middle" or not 0 <= row < block):
        raise ValueError(f"row: expected 0 … {block - 1} with scheme 'middle', got {row!r} with {scheme.name!r}")
    inside = scheme.diagonal
    if inside == "middle":
        inside = block // 2 if row is None else row
    return scheme, block, inside


def _scheme(scheme: str | Scheme) -> Scheme:
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    return SCHEMES[scheme]


def _mask_mode(scheme: Scheme, mask: str | None) -> str | None:
    if mask is None:
        return scheme.masks[0] if scheme.masks else None
    mask_mode(mask)
    return mask_mode(mask, scheme.masks) if scheme.masks else None


@dataclass(frozen=True)
class Run:
    """What a scheme computed: its tensors, and the scores A [B, H, N, C, C] of each of the N chunks."""

    scheme: Scheme
    tensors: Mapping[str, Tensor]
    A: Tensor

    @property
    def non_finite(self) -> dict[str, Tensor]:
        """Boolean masks of the non-finite elements of every tensor."""
        return {name: ~x.isfinite() for name, x in self.tensors.items()}

    @property
    def finite(self) -> dict[str, bool]:
        """Which tensors are finite everywhere."""
        return {name: bool(x.isfinite().all()) for name, x in self.tensors.items()}


def run(
    inputs: Mapping[str, Tensor],
    scheme: str | Scheme = "first-row",
    *,
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
    grad_seed: int = 1,
) -> Run:
    """RWKV6 forward and backward in chunks, with the decay inside a chunk anchored by `scheme`.

    inputs: as `flakit.inputs("rwkv6", ...)` makes them; scale and initial_state may be among them.
    chunk: tokens a chunk; block: rows a block inside it, both powers of two.
    row: the anchor row of scheme "middle", inside the block; default block // 2.
    mask: how the future is kept out, one of `MASKS`; default the right one. In an exact tile the gradient goes through
        the exponential as automatic differentiation sends it: 0 * inf where the mask came too late.
    dtype: what the two operands of each product are stored in; exponentials and sums are float32.
    The gradient that arrives at o is that of `numerics.evaluate`, so that `truth("rwkv6", inputs)` is the truth.
    """
    scheme = _scheme(scheme)
    mask = _mask_mode(scheme, mask)
    r, k, v, w, u = (inputs[name].detach() for name in "rkvwu")
    T, K = r.shape[1], r.shape[-1]
    scale = K**-0.5 if inputs.get("scale") is None else inputs["scale"]
    state = inputs.get("initial_state")
    do, _ = cotangents("rwkv6", inputs, grad_seed=grad_seed)

    if scheme.dyadic:
        o, final_state = chunk_torch.forward(r, k, v, w, u, scale, state, chunk)
        grads = chunk_torch.backward(r, k, v, w, u, scale, state, do, None, chunk)
        split = [split_chunks(x, chunk, torch.float32) for x in (r, k, w)]
        A = chunk_torch.scores(split[0] * scale, *split[1:], u.float()[:, None, None])
        return _collect(scheme, A, o, final_state, grads, state)

    r, k, v, w, do = (split_chunks(x, chunk, torch.float32) for x in (r, k, v, w, do))
    u, q = u.float()[:, None, None], r * scale
    dA = scale * (do @ v.mT)
    diagonal = dA.diagonal(0, -2, -1)[..., None]

    inside = _Inside(w, chunk, mask, dtype, scheme.across)
    A, dr, dk = torch.diag_embed((q * u * k).sum(-1)), torch.zeros_like(r), torch.zeros_like(k)
    for tile in tiles(scheme, chunk, block, row):
        A[..., tile.rows, tile.keys] += inside.scores(tile, q, k)
        dr[..., tile.rows, :] += inside.dr(tile, dA, k)
    for tile in key_tiles(scheme, chunk, block, row):
        dk[..., tile.keys, :] += inside.dk(tile, dA, r)

    # Between chunks nothing is anchored: every exponent is a sum of decays.
    before, after, total = inside.ge.exp(), sum_after(w).exp(), w.sum(-2).exp()
    S, final_state = carry_states(total, (k * after).mT @ v, state)
    D, dinitial_state = carry_states(total, (q * before).mT @ do, None, reverse=True)
    o = A @ v + (q * before) @ S
    dv = A.mT @ do + (k * after) @ D
    dr = dr + scale * (do @ S.mT) * before
    dk = dk + (v @ D.mT) * after

    dw = identity(*(join_chunks(x, T) for x in (r, k, dr, dk)))
    dr, dk, du = dr + diagonal * u * k, dk + diagonal * u * r, (diagonal * r * k).sum((0, 2, 3))
    grads = (*(join_chunks(x, T) for x in (dr, dk, dv)), dw, du, dinitial_state)
    return _collect(scheme, A, join_chunks(o, T), final_state, grads, state)


def _collect(scheme, A, o, final_state, grads, state) -> Run:
    tensors = dict(zip(("dr", "dk", "dv", "dw", "du", "dinitial_state"), grads, strict=True))
    if state is None:
        del tensors["dinitial_state"]
    return Run(scheme, {"o": o, **tensors, "final_state": final_state}, A)


def _masked(x: Tensor, low: Tensor, mask: str) -> Tensor:
    if mask == "multiply":
        return x * low
    return x if mask == "none" else torch.where(low, x, 0.0)


class _Inside:
    """The decays inside every chunk, and what a tile makes of them. Tensors are [B, H, N, C, *]."""

    def __init__(self, w: Tensor, chunk: int, mask: str, dtype: torch.dtype, across: bool):
        self.gi, self.ge, self.low = w.cumsum(-2), sum_before(w), torch.ones(chunk, chunk, dtype=torch.bool).tril(-1)
        self.low = self.low.to(w.device)
        self.mask, self.dtype, self.across = mask, dtype, across
        self.weights = {}

    def exponents(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Of the query factor [..., rows, K] and of the key factor [..., keys, K]."""
        if tile.anchor >= 0:
            n = self.gi[..., tile.anchor : tile.anchor + 1, :]
        else:
            n = torch.zeros_like(self.gi[..., :1, :])
            if self.across:
                n[..., 1:, :, :] = self.gi[..., :-1, -1:, :]
        return self.ge[..., tile.rows, :] - n, n - self.gi[..., tile.keys, :]

    def pairs(self, tile: Tile) -> Tensor:
        """The one exponent of every pair of an exact tile, ge_i - gi_j: [..., rows, keys, K]."""
        return self.ge[..., tile.rows, None, :] - self.gi[..., None, tile.keys, :]

    def scores(self, tile: Tile, q: Tensor, k: Tensor) -> Tensor:
        q, k = q[..., tile.rows, :], k[..., tile.keys, :]
        if tile.anchor is None:
            found = ((self._weights(tile) * k[..., None, :, :]) @ q[..., None])[..., 0]
        else:
            query, key = self.exponents(tile)
            found = self._stored(q * query.exp()) @ self._stored(k * key.exp()).mT
        return self._masked(found, tile)

    def dr(self, tile: Tile, dA: Tensor, k: Tensor) -> Tensor:
        dA, k = self._masked(dA[..., tile.rows, tile.keys], tile), k[..., tile.keys, :]
        if tile.anchor is None:
            return (dA[..., None, :] @ (self._weights(tile) * k[..., None, :, :]))[..., 0, :]
        query, key = self.exponents(tile)
        return query.exp() * (dA @ self._stored(k * key.exp()))

    def dk(self, tile: Tile, dA: Tensor, r: Tensor) -> Tensor:
        dA, r = self._masked(dA[..., tile.rows, tile.keys], tile), r[..., tile.rows, :]
        if tile.anchor is None:
            return (dA[..., None] * self._weights(tile) * r[..., None, :]).sum(-3)
        query, key = self.exponents(tile)
        return key.exp() * (dA.mT @ self._stored(r * query.exp()))

    def _weights(self, tile: Tile) -> Tensor:
        # Exponentials of pairs are what an exact tile costs: take them once, not once a product.
        if tile.rows.start not in self.weights:
            exponents = self.pairs(tile)
            if self.mask == "before":
                exponents.masked_fill_(~self.low[tile.rows, tile.keys, None], -torch.inf)
            self.weights[tile.rows.start] = exponents.exp_()
        return self.weights[tile.rows.start]

    def _masked(self, x: Tensor, tile: Tile) -> Tensor:
        return _masked(x, self.low[tile.rows, tile.keys], self.mask)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()


def exponents(
    inputs: Mapping[str, Tensor],
    scheme: str | Scheme = "first-row",
    *,
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
    batch: int = 0,
    head: int = 0,
    index: int = 0,
    channel: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The two exponents every pair (i, j) of chunk `index` passes through, two pictures [C, C].

    The query factor is exp(first), the key factor exp(second); above `LN_MAX` a factor is an infinity. Both are the
    largest over the channels, or those of one `channel`. NaN marks pairs the scheme never computes. A pair of an exact
    tile has one exponent, in the first picture, and 0 in the second.
    """
    scheme = _scheme(scheme)
    w = split_chunks(inputs["w"].detach()[batch : batch + 1, :, head : head + 1], chunk, torch.float32)
    if not 0 <= index < w.shape[2]:
        raise ValueError(f"index: expected a chunk 0 … {w.shape[2] - 1}, got {index}")
    inside = _Inside(w, chunk, _mask_mode(scheme, mask), torch.float32, scheme.across)
    pick = (lambda x: x[0, 0, index].amax(-1)) if channel is None else (lambda x: x[0, 0, index, ..., channel])
    query, key = torch.full((2, chunk, chunk), torch.nan)
    if scheme.dyadic:
        for s, log_weight in dyadic_levels(w):
            log_weight = pick(log_weight)
            for p in range(0, chunk, 2 * s):
                left, right = slice(p, p + s), slice(p + s, p + 2 * s)
                query[right, left], key[right, left] = log_weight[right, None], log_weight[None, left]
        return query, key
    for tile in tiles(scheme, chunk, block, row):
        if tile.anchor is None:
            query[tile.rows, tile.keys], key[tile.rows, tile.keys] = pick(inside.pairs(tile)), 0.0
            if inside.mask == "before":
                for picture in (query, key):
                    picture[tile.rows, tile.keys].masked_fill_(~inside.low[tile.rows, tile.keys].cpu(), torch.nan)
        else:
            q, k = (pick(x) for x in inside.exponents(tile))
            query[tile.rows, tile.keys], key[tile.rows, tile.keys] = q[:, None], k[None, :]
    return query, key


def limits(
    scheme: str | Scheme,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
    grad_seed: int = 1,
    T: int | None = None,
) -> dict[str, float]:
    """The law: for each tensor, how far the decay may grow before its first non-finite value; inf means for ever.

    Without inputs: the largest |w| per token at uniform decay over T tokens (default: two chunks), operands of order 1.
    With inputs: the factor their log decays may be multiplied with, their own operands' sizes counted. At a uniform
    decay of -1 that is again the largest |w| per token.

    A factor exp(n |w|), n tokens in one exponent, multiplies an operand; it is finite up to
    |w| = (ln max - max(0, ln |operand|)) / n. Which n and which operand a tensor meets:
    o and dv  both factors of every pair their scores need;
    dr        its own query factor bare, and every key of the tile, masked ones too: a zero times inf is NaN in a sum;
              there a key that is used is multiplied by its score's gradient as well;
    dk        its own key factor bare, and every query of the tile likewise;
    dw        what dr and dk meet; du and the final state: nothing.
    No exponential is taken here and no sum is formed; a sum of several large terms can overflow within a percent
    sooner. Where the mask comes too late for it ("multiply", "none"), pairs of the future count with both factors
    multiplied, and the sums over them make the law good to a few percent only.
    """
    scheme = _scheme(scheme)
    mask = _mask_mode(scheme, mask)
    if dtype not in LN_MAX:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, LN_MAX))}, got {dtype}")
    found = dict.fromkeys(TENSORS, math.inf)
    if scheme.dyadic:
        return found
    if inputs is None:
        do = torch.ones(1, 2 * chunk if T is None else T, 1, 1)
        inputs, scale = {"r": do, "k": do, "v": do, "w": -do}, 1.0
    else:
        do, _ = cotangents("rwkv6", inputs, grad_seed=grad_seed)
        scale = inputs["r"].shape[-1] ** -0.5 if inputs.get("scale") is None else inputs["scale"]
    T = inputs["r"].shape[1]
    r, k, v, w = (split_chunks(inputs[name].detach(), chunk, torch.float64) for name in "rkvw")
    dA = scale * (split_chunks(do, chunk, torch.float64) @ v.mT).abs()
    r, k = r.abs(), k.abs()
    real = (torch.arange(w.shape[2] * chunk, device=w.device) < T).view(-1, chunk)  # [N, C]
    inside = _Inside(w, chunk, mask, dtype, scheme.across)

    def limit(exponent: Tensor, operand: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
        operand = torch.as_tensor(operand, dtype=torch.float64, device=w.device)
        room = (LN_MAX[dtype] - operand.log()).clamp(max=LN_MAX[torch.float32])
        # inf - inf is the NaN of an exponent that is a difference: nothing is left to grow.
        return torch.where(exponent.isnan(), 0.0, torch.where(exponent > 0, room / exponent, torch.inf))

    def multiplied(query: Tensor, key: Tensor, operands: Tensor) -> Tensor:
        # Both factors finite, their product not: here a small operand helps, whatever the exponentials are.
        exponent = query[..., :, None, :] + key[..., None, :, :]
        return torch.where(exponent > 0, (LN_MAX[torch.float32] - operands.log()) / exponent, torch.inf).amin(-1)

    def lower(name: str, limit: Tensor, used: Tensor) -> None:
        found[name] = min(found[name], torch.where(used, limit, torch.inf).amin().item() if used.any() else math.inf)

    for tile in tiles(scheme, chunk, block, row):
        low = inside.low[tile.rows, tile.keys]
        rows, keys = real[:, tile.rows], real[:, tile.keys]  # [N, rows], [N, keys]
        seen = low if mask in ("where", "before") else torch.ones_like(low)
        arriving = _masked(dA[..., tile.rows, tile.keys], low, mask)
        pairs = seen & rows[:, :, None]  # [N, rows, keys]: scores that o sums; dv sums over padded rows too
        both = seen & keys[:, None, :]
        if tile.anchor is None:
            exponent = inside.pairs(tile)
            taken = low if mask == "before" else torch.ones_like(low)  # pairs whose exponential is taken at all
            with_key = limit(exponent, k[..., None, tile.keys, :]).amin(-1)
            lower("o", with_key, pairs)
            lower("dv", with_key, both)
            lower("dr", with_key, taken & rows[:, :, None])
            lower("dk", limit(exponent, 0.0).amin(-1), taken & keys[:, None, :])
        else:
            query, key = inside.exponents(tile)
            q_tile, k_tile = scale * r[..., tile.rows, :], k[..., tile.keys, :]
            query_limit, key_limit = limit(query, q_tile, dtype).amin(-1), limit(key, k_tile, dtype).amin(-1)
            for name, needed in (("o", pairs), ("dv", both)):
                lower(name, query_limit, needed.any(-1))
                lower(name, key_limit, needed.any(-2))
                if mask in ("multiply", "none"):
                    operands = q_tile[..., :, None, :] * k_tile[..., None, :, :]
                    lower(name, multiplied(query, key, operands), needed)
            lower("dr", limit(query, 0.0).amin(-1), rows)
            summed = torch.minimum(key_limit, limit(key, k_tile * arriving.amax(-2)[..., None]).amin(-1))
            lower("dr", summed, rows.any(-1, keepdim=True).expand_as(keys))
            if mask == "none":
                operands = arriving[..., None] * k_tile[..., None, :, :]
                lower("dr", multiplied(query, key, operands), pairs)
    for tile in key_tiles(scheme, chunk, block, row):
        if tile.anchor is not None:
            rows, keys = real[:, tile.rows], real[:, tile.keys]
            query, key = inside.exponents(tile)
            r_tile = r[..., tile.rows, :]
            arriving = _masked(dA[..., tile.rows, tile.keys], inside.low[tile.rows, tile.keys], mask)
            pairs = (rows[:, :, None] & keys[:, None, :]).expand(arriving.shape)
            lower("dk", limit(key, 0.0).amin(-1), keys)
            used = r_tile * arriving.amax(-1)[..., None]
            summed = torch.minimum(limit(query, r_tile, dtype), limit(query, used)).amin(-1)
            lower("dk", summed, keys.any(-1, keepdim=True).expand_as(rows))
            if mask == "none":
                operands = arriving[..., None] * r_tile[..., :, None, :]
                lower("dk", multiplied(query, key, operands), pairs)
    found["dw"] = min(found["dr"], found["dk"])
    return found


def law(
    scheme: str | Scheme, inputs: Mapping[str, Tensor] | None = None, *, tensor: str | None = None, **knobs
) -> float:
    """The `limits` of one tensor, or of whichever fails first: ln(max) / n at uniform decay and operands of order 1.

    >>> round(law("none", tensor="dk"), 3), round(law("block-start", tensor="dk"), 3), law("dyadic")
    (1.386, 5.915, inf)
    """
    found = limits(scheme, inputs, **knobs)
    if tensor is None:
        return min(found.values())
    if tensor not in found:
        raise ValueError(f"tensor: expected one of {', '.join(found)}, got {tensor!r}")
    return found[tensor]


def onset(
    inputs: Mapping[str, Tensor],
    scheme: str | Scheme = "first-row",
    *,
    tolerance: float = 1e-3,
    highest: float = 1e3,
    **knobs,
) -> dict[str, float]:
    """The measured counterpart of `limits`: the factor on the inputs' log decays at which each tensor turns non-finite.

    Found by bisection to a relative `tolerance`, every `run` serving all tensors; inf where `highest` is still finite.
    """

    def finite(factor: float) -> dict[str, bool]:
        found = run({**inputs, "w": inputs["w"].detach() * factor}, scheme, **knobs).finite
        return {name: found[name] for name in TENSORS}

    near = set(limits(scheme, inputs, **knobs).values())
    return search(finite, near=near, tolerance=tolerance, highest=highest)


def reproduce() -> list[Row]:
    """The numbers of the story, predicted and measured: the factor, or the |w| per token, where NaN begins."""

    def row(what: str, recorded: float, scheme: str, tensor: str, x: Mapping[str, Tensor], **knobs) -> Row:
        return Row(what, recorded, law(scheme, x, tensor=tensor, **knobs), onset(x, scheme, **knobs)[tensor])

    def spike(T: int, at: int) -> dict[str, Tensor]:
        x = make_inputs("rwkv6", T=T, H=1, K=64, decay=0.0)
        x["w"][:, at] = -1.0
        return x

    uniform = {T: make_inputs("rwkv6", T=T, H=2, K=64, decay=-1.0) for T in (64, 128)}
    rows = [row("bug A, w[16] alone: o", 88.72, "first-row", "o", spike(64, 16))]
    rows += [row(f"bug A, w[{at}] alone: o", math.inf, "first-row", "o", spike(128, at)) for at in (0, 15, 17, 64)]
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
    x = uniform[64]
    rows.append(row("middle, row 8, scale 1: o", 10.97, "middle", "o", {**x, "scale": 1.0}, row=8))
    unit = {name: x[name].sign() for name in "rkvw"} | {"u": x["u"]}
    rows.append(row("float16 factors, operands ±1: dr", 0.74, "block-start", "dr", unit, dtype=torch.float16))
    return rows
