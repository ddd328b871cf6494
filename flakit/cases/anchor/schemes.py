"""The anchor schemes in use, and the products of a chunk with their decay anchored by one of them.

`SCHEMES` lists the schemes, `tiles` and `key_tiles` return the anchor of each rectangle of the score matrix, and
`Products` computes with them. `operators.py` builds RWKV6, RWKV7 and GSA on these products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...ops.common.chunks import pair_scores, read_sums
from ...ops.common.decay import decays, sum_before
from ..masking import MASKS


@dataclass(frozen=True)
class Scheme:
    """How a scheme anchors each tile of a chunk's score matrix. Anchor rows are counted from the block's first row.
    Anchor row p means n = gi_p = ge_{p+1}, the cumulative decay after that row; that before it is anchor row p - 1.

    whole: the chunk is one block. left: anchor row of the tiles left of the diagonal; diagonal: that of the diagonal
    tile, "middle", or None for exact differences of pairs. across: the first block reads its anchor in the chunk
    before. dyadic: halves of halves, flakit's own form."""

    name: str
    label: str
    whole: bool = False
    left: int = -1
    diagonal: int | str | None = None
    across: bool = False
    dyadic: bool = False

    @property
    def masks(self) -> tuple[str, ...]:
        """The names of the mask modes that this scheme allows (see `flakit.cases.masking`), the right one first."""
        if self.dyadic:
            return ()
        return ("before", "where", "multiply", "none") if self.diagonal is None else ("where", "multiply", "none")


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", "none: the chunk's start", whole=True, diagonal=-1),
        Scheme("first-row", "first-row: before the block's token 1 (bug A)", left=0),
        Scheme("previous-row-across", "previous-row-across: across chunks (bad repair)", across=True),
        Scheme("previous-row", "previous-row: before the block's token 0", left=-1),
        Scheme("block-start", "block-start: in a block, before its token 1", diagonal=0),
        Scheme("middle", "middle: in a block, past its middle token", diagonal="middle"),
        Scheme("pairwise", "pairwise: exact differences, pair by pair", whole=True),
        Scheme("dyadic", "dyadic: halves of halves", dyadic=True),
    )
}


class Tile(NamedTuple):
    """A rectangle of the score matrix, rows by keys of the chunk, and its anchor: a row of gi, -1 for the chunk's
    start, or None for exact differences, an exponential for every pair."""

    rows: slice
    keys: slice
    anchor: int | None


def tiles(scheme: str | Scheme, chunk: int = 64, block: int = 16, row: int | None = None) -> list[Tile]:
    """Return the tiles of the scores A and of dr, which cover the lower triangle of [chunk, chunk]. row: as in `run`.
    Raises ValueError for an unknown scheme, a chunk or block that is no power of two, or a row outside the block."""
    scheme, block, inside = _geometry(scheme, chunk, block, row)
    result = []
    for p in range(0, chunk, block):
        if p or scheme.across:
            result.append(Tile(slice(p, p + block), slice(0, p), p + scheme.left))
        result.append(Tile(slice(p, p + block), slice(p, p + block), None if inside is None else p + inside))
    return result


def key_tiles(scheme: str | Scheme, chunk: int = 64, block: int = 16, row: int | None = None) -> list[Tile]:
    """Return the tiles of dk. Those below the diagonal are anchored at the key block's last row, so both exponents are
    <= 0. Raises ValueError as `tiles` does."""
    scheme, block, inside = _geometry(scheme, chunk, block, row)
    result = []
    for p in range(0, chunk, block):
        end = p + block
        result.append(Tile(slice(p, end), slice(p, end), None if inside is None else p + inside))
        if end < chunk:
            result.append(Tile(slice(end, chunk), slice(p, end), end - 1))
    return result


def _geometry(scheme: str | Scheme, chunk: int, block: int, row: int | None):
    scheme = find_scheme(scheme)
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


def find_scheme(scheme: str | Scheme) -> Scheme:
    """Return the scheme of that name, or a `Scheme` unchanged. Raises ValueError for an unknown name."""
    if isinstance(scheme, Scheme):
        return scheme
    return SCHEMES[one_of("scheme", scheme, SCHEMES)]


def find_mask(scheme: Scheme, mask: str | None) -> str | None:
    """Return a scheme's mask mode: `mask`, by default the right one of `scheme.masks`; None if the scheme needs none.
    Raises ValueError for a mode that is unknown or does not apply."""
    if mask is None:
        return scheme.masks[0] if scheme.masks else None
    one_of("mask", mask, MASKS)
    return one_of("mask", mask, scheme.masks) if scheme.masks else None


def masked(x: Tensor, low: Tensor, mask: str) -> Tensor:
    """Zero x where `low` is False. mask: "multiply" does so by a product (inf gives NaN), "none" not at all."""
    if mask == "multiply":
        return x * low
    return x if mask == "none" else torch.where(low, x, 0.0)


class Products:
    """The three products of a chunk that involve decay, computed tile by tile as a scheme prescribes.

    W_ij = exp(sum of w over the tokens after j and before i, with `inclusive` also over i) is the weight per channel, 0
    for masked keys:

        scores(query, key)_ij  = sum_channel query_i W_ij key_j
        read(A, key)_i         = sum_j A_ij W_ij key_j          the query's gradient, if A is the scores' gradient
        written(A, query)_j    = sum_i A_ij W_ij query_i        the key's gradient, likewise

    All tensors are [..., N chunks, C, *]; w [B, H, N, C, K] is the natural-log decay. dtype: storage dtype of the two
    operands of each product; exponentials and sums are in w's dtype. scheme, chunk, block, row, mask: as in `run`.
    Raises ValueError as `tiles` and `find_mask` do."""

    def __init__(
        self,
        w: Tensor,
        scheme: str | Scheme,
        *,
        inclusive: bool,
        chunk: int = 64,
        block: int = 16,
        row: int | None = None,
        mask: str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.scheme, self.w, self.inclusive, self.dtype = find_scheme(scheme), w, inclusive, dtype
        self.mask = find_mask(self.scheme, mask)
        self.tiles = tiles(self.scheme, chunk, block, row)
        self.key_tiles = key_tiles(self.scheme, chunk, block, row)
        self.gi = w.cumsum(-2)
        self.seen = self.gi if inclusive else sum_before(w)  # the decay up to each read
        self.low = torch.ones(chunk, chunk, dtype=torch.bool, device=w.device).tril(0 if inclusive else -1)
        self._levels = decays(w).levels if self.scheme.dyadic else []
        self._weights = {}

    def scores(self, query: Tensor, key: Tensor, among: Sequence[Tile] | None = None) -> Tensor:
        """Return the scores [..., N, C, C] of query, key [..., N, C, K]. among: tiles to compute, default all."""
        if self.scheme.dyadic:
            query = query.expand(torch.broadcast_shapes(query.shape, key.shape))
            if not self.inclusive:
                return pair_scores(query, key, self._levels)
            return pair_scores(query * self.w.exp(), key, self._levels) + torch.diag_embed((query * key).sum(-1))
        C = len(self.low)
        A = query.new_zeros(*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), C, C)
        for tile in self.tiles if among is None else among:
            q, k = query[..., tile.rows, :], key[..., tile.keys, :]
            if tile.anchor is None:
                product = ((self.weights(tile) * k[..., None, :, :]) @ q[..., None])[..., 0]
            else:
                on_query, on_key = self.exponents(tile)
                product = self._stored(q * on_query.exp()) @ self._stored(k * on_key.exp()).mT
            A[..., tile.rows, tile.keys] += self._masked(product, tile)
        return A

    def read(self, A: Tensor, key: Tensor, among: Sequence[Tile] | None = None) -> Tensor:
        """Return the weighted sums over keys [..., N, C, K] for A [..., N, C, C]. among: as in `scores`."""
        if self.scheme.dyadic:
            earlier = read_sums(A, key, self._levels)
            return earlier * self.w.exp() + A.diagonal(0, -2, -1)[..., None] * key if self.inclusive else earlier
        out = key.new_zeros(*torch.broadcast_shapes(A.shape[:-2], key.shape[:-2]), *key.shape[-2:])
        for tile in self.tiles if among is None else among:
            a, k = self._masked(A[..., tile.rows, tile.keys], tile), key[..., tile.keys, :]
            if tile.anchor is None:
                out[..., tile.rows, :] += (a[..., None, :] @ (self.weights(tile) * k[..., None, :, :]))[..., 0, :]
            else:
                on_query, on_key = self.exponents(tile)
                out[..., tile.rows, :] += on_query.exp() * (a @ self._stored(k * on_key.exp()))
        return out

    def written(self, A: Tensor, query: Tensor, among: Sequence[Tile] | None = None) -> Tensor:
        """Return weighted sums over queries [..., N, C, K] for A [..., N, C, C]. among: of `key_tiles`, default all."""
        out = query.new_zeros(*torch.broadcast_shapes(A.shape[:-2], query.shape[:-2]), *query.shape[-2:])
        for tile in self.key_tiles if among is None else among:
            a, q = self._masked(A[..., tile.rows, tile.keys], tile), query[..., tile.rows, :]
            if tile.anchor is None:
                out[..., tile.keys, :] += (a[..., None] * self.weights(tile) * q[..., None, :]).sum(-3)
            else:
                on_query, on_key = self.exponents(tile)
                out[..., tile.keys, :] += on_key.exp() * (a.mT @ self._stored(q * on_query.exp()))
        return out

    def exponents(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return an anchored tile's exponents of query and key factor, [..., rows, K] and [..., keys, K]."""
        if tile.anchor >= 0:
            n = self.gi[..., tile.anchor : tile.anchor + 1, :]
        else:
            n = torch.zeros_like(self.gi[..., :1, :])
            if self.scheme.across:
                n[..., 1:, :, :] = self.gi[..., :-1, -1:, :]
        return self.seen[..., tile.rows, :] - n, n - self.gi[..., tile.keys, :]

    def pairs(self, tile: Tile) -> Tensor:
        """Return the exponent of every pair of a tile without an anchor: the exact difference, [..., rows, keys, K]."""
        return self.seen[..., tile.rows, None, :] - self.gi[..., None, tile.keys, :]

    def weights(self, tile: Tile) -> Tensor:
        """Return exp of `pairs`, [..., rows, keys, K], cached: it dominates the cost of an exact tile."""
        if tile.rows.start not in self._weights:
            exponents = self.pairs(tile)
            if self.mask == "before":
                exponents.masked_fill_(~self.low[tile.rows, tile.keys, None], -torch.inf)
            self._weights[tile.rows.start] = exponents.exp_()
        return self._weights[tile.rows.start]

    def _masked(self, x: Tensor, tile: Tile) -> Tensor:
        return masked(x, self.low[tile.rows, tile.keys], self.mask)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.w.dtype)
