"""The law of an anchor scheme: the factor on the decay up to which each tensor of an operator is finite, predicted from
the exponents that the scheme forms, without running the operator."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.evaluate import cotangents
from ...ops.common.chunks import split_chunks
from ..laws import LN_MAX
from .operators import TENSORS, Meeting, Reach, find_operator
from .schemes import Products, Scheme, find_mask, find_scheme, masked


def limits(
    scheme: str | Scheme,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    op: str = "rwkv6",
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
    grad_seed: int = 1,
    T: int | None = None,
    products: Callable[..., Products] = Products,
) -> dict[str, float]:
    """Return for each tensor of an operator how far the decay may grow before it has a non-finite value; inf if it
    never has.

    Without inputs: the largest |w| per token at uniform decay over T tokens (default: two chunks), operands of order 1.
    With inputs: the largest factor on their log decays, with their own operands' sizes; operands of order 1 if the
    inputs have only decays. At a uniform decay of -1 that factor is again the largest |w| per token.

    A factor exp(n |w|), with n tokens in its exponent, multiplies an operand; it is finite up to |w| = (ln max - max(0,
    ln |operand|)) / n. The n and operands of the three products (`Products`) are
    scores   both factors of every pair that is needed: o sums scores by row, dv by column;
    read     its own query factor alone, and every key of the tile, also masked ones: zero times inf is NaN in a sum.
             A key that is used is also multiplied by its matrix element (RWKV6: dr; GSA: the slots' scores);
    written  its own key factor alone, and every query of the tile likewise (RWKV6: dk).
    `Chunks.meets` lists the products of each operator, `reached` the tensors they reach. The decay's gradient depends
    on all of them; du, and a state that no product reaches, on none.
    A sum of several large terms may overflow a percent or two earlier (`WITHIN`). If the mask comes too late
    ("multiply", "none"), future pairs count with the product of both factors, and their sums make the law accurate to a
    few percent only. Operands that depend on the decay (RWKV7's reads by a, GSA's p) are taken at strong decay.
    Other arguments are those of `run`. Raises ValueError for an unknown scheme, operator, mask or dtype.
    """
    scheme, of = find_scheme(scheme), find_operator(op)
    mask = find_mask(scheme, mask)
    if dtype not in LN_MAX:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, LN_MAX))}, got {dtype}")
    unlimited = dict.fromkeys(TENSORS[op], math.inf)
    if scheme.dyadic:
        return unlimited
    if inputs is None:
        T = 2 * chunk if T is None else T
        inputs = {of.decay: -torch.ones(1, T, 1, 1)}
    w = inputs[of.decay].detach()
    T = w.shape[1]
    if set(inputs) == {of.decay}:
        one = split_chunks(torch.ones_like(w), chunk, torch.float64)
        meetings = [Meeting(one, one, one, one[..., :1] @ one[..., :1].mT)] * len(of.meets)
    else:
        do, _ = cotangents(op, inputs, grad_seed=grad_seed)
        meetings = [
            Meeting(*(x.abs() for x in m)) for m in of.meetings(inputs, split_chunks(do, chunk, torch.float64), chunk)
        ]
    w = split_chunks(w, chunk, torch.float64)
    real = (torch.arange(w.shape[2] * chunk, device=w.device) < T).view(-1, chunk)  # [N, C]
    options = {"chunk": chunk, "block": block, "row": row, "mask": mask, "dtype": dtype}
    formed = {inclusive: products(w, scheme, inclusive=inclusive, **options) for inclusive in set(of.meets)}
    reach = [_reach(formed[inclusive], m, real) for inclusive, m in zip(of.meets, meetings, strict=True)]
    return unlimited | of.reached(reach)


def _reach(products: Products, meeting: Meeting, real: Tensor) -> Reach:
    """Return, by product of a `Meeting`, up to which factor on the decay it is finite. real: tokens, bool [N, C]."""
    mask, dtype = products.mask, products.dtype
    q, bare, k, dA = meeting
    reach = dict.fromkeys(Reach._fields, math.inf)

    def limit(exponent: Tensor, operand: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
        operand = torch.as_tensor(operand, dtype=torch.float64, device=exponent.device)
        room = (LN_MAX[dtype] - operand.log()).clamp(max=LN_MAX[torch.float32])
        # A NaN exponent is inf - inf: the decay cannot grow at all.
        return torch.where(exponent.isnan(), 0.0, torch.where(exponent > 0, room / exponent, torch.inf))

    def multiplied(query: Tensor, key: Tensor, operands: Tensor) -> Tensor:
        # Both factors are finite, their product is not: here a small operand raises the limit.
        exponent = query[..., :, None, :] + key[..., None, :, :]
        return torch.where(exponent > 0, (LN_MAX[torch.float32] - operands.log()) / exponent, torch.inf).amin(-1)

    def lower(name: str, limit: Tensor, used: Tensor) -> None:
        reach[name] = min(reach[name], torch.where(used, limit, torch.inf).amin().item() if used.any() else math.inf)

    for tile in products.tiles:
        low = products.low[tile.rows, tile.keys]
        rows, keys = real[:, tile.rows], real[:, tile.keys]  # [N, rows], [N, keys]
        seen = low if mask in ("where", "before") else torch.ones_like(low)
        arriving = masked(dA[..., tile.rows, tile.keys], low, mask)
        pairs = seen & rows[:, :, None]  # [N, rows, keys]: scores that rows sum; columns sum over padded rows too
        both = seen & keys[:, None, :]
        if tile.anchor is None:
            exponent = products.pairs(tile)
            taken = low if mask == "before" else torch.ones_like(low)  # pairs with an exponential
            with_key = limit(exponent, k[..., None, tile.keys, :]).amin(-1)
            lower("rows", with_key, pairs)
            lower("columns", with_key, both)
            lower("read", with_key, taken & rows[:, :, None])
            lower("written", limit(exponent, 0.0).amin(-1), taken & keys[:, None, :])
        else:
            query, key = products.exponents(tile)
            q_tile, k_tile = q[..., tile.rows, :], k[..., tile.keys, :]
            query_limit, key_limit = limit(query, q_tile, dtype).amin(-1), limit(key, k_tile, dtype).amin(-1)
            for name, needed in (("rows", pairs), ("columns", both)):
                lower(name, query_limit, needed.any(-1))
                lower(name, key_limit, needed.any(-2))
                if mask in ("multiply", "none"):
                    operands = q_tile[..., :, None, :] * k_tile[..., None, :, :]
                    lower(name, multiplied(query, key, operands), needed)
            lower("read", limit(query, 0.0).amin(-1), rows)
            summed = torch.minimum(key_limit, limit(key, k_tile * arriving.amax(-2)[..., None]).amin(-1))
            lower("read", summed, rows.any(-1, keepdim=True).expand_as(keys))
            if mask == "none":
                operands = arriving[..., None] * k_tile[..., None, :, :]
                lower("read", multiplied(query, key, operands), pairs)
    for tile in products.key_tiles:
        if tile.anchor is not None:
            rows, keys = real[:, tile.rows], real[:, tile.keys]
            query, key = products.exponents(tile)
            q_tile = bare[..., tile.rows, :]
            arriving = masked(dA[..., tile.rows, tile.keys], products.low[tile.rows, tile.keys], mask)
            pairs = (rows[:, :, None] & keys[:, None, :]).expand(arriving.shape)
            lower("written", limit(key, 0.0).amin(-1), keys)
            used = q_tile * arriving.amax(-1)[..., None]
            summed = torch.minimum(limit(query, q_tile, dtype), limit(query, used)).amin(-1)
            lower("written", summed, keys.any(-1, keepdim=True).expand_as(rows))
            if mask == "none":
                operands = arriving[..., None] * q_tile[..., :, None, :]
                lower("written", multiplied(query, key, operands), pairs)
    return Reach(**reach)


def law(
    scheme: str | Scheme, inputs: Mapping[str, Tensor] | None = None, *, tensor: str | None = None, **knobs
) -> float:
    """Return the limit of one tensor, default the smallest: ln(max) / n at uniform decay and operands of order 1.

    knobs: keyword arguments of `limits`, such as op. Raises ValueError for an unknown tensor, and as `limits` does.

    >>> round(law("none", tensor="dk"), 3), round(law("block-start", tensor="dk"), 3), law("dyadic")
    (1.386, 5.915, inf)
    """
    by_tensor = limits(scheme, inputs, **knobs)
    if tensor is None:
        return min(by_tensor.values())
    return by_tensor[one_of("tensor", tensor, by_tensor)]


class Worst(NamedTuple):
    """The largest exponent that a scheme forms from some decays, and the token, head and channel where it forms it."""

    exponent: float
    """Natural log; inf if decays of -inf make it undefined."""
    stored: bool
    """Whether the factor is stored with its operand, so that the operand's dtype limits it; otherwise float32 does."""
    batch: int
    token: int
    head: int
    channel: int


_AT_ONCE = 1 << 22
"""Number of decays processed at once: 32 MiB per tensor."""


def worst(
    w: Tensor,
    scheme: str | Scheme,
    *,
    op: str = "rwkv6",
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
) -> list[Worst]:
    """Return the largest exponents of a scheme for natural-log decays w [B, T, H, K] <= 0, with their positions.

    At most two: the largest of the factors stored with an operand, and of the others, if positive. The smallest ln(max)
    / exponent equals the smallest of `limits` for operands of order 1: the largest factor on the decays.
    mask: the scheme's right one, or "where" for exact differences masked after the exponential. Raises ValueError for
        "multiply" and "none": with them future pairs count with both factors, and no single exponent decides.
    Sums are float64. Positions are tokens below T: padding has the exponents of the last token.
    """
    scheme, of = find_scheme(scheme), find_operator(op)
    mask = find_mask(scheme, mask)
    if mask in ("multiply", "none"):
        raise ValueError(f"mask: expected where or before, got {mask!r}")
    if scheme.dyadic or not w.numel():
        return []
    B, T, H, K = w.shape
    heads, worst_of = max(1, _AT_ONCE // (T * K)), {}
    for batch in range(B):
        for head in range(0, H, heads):
            part = split_chunks(w[batch : batch + 1, :, head : head + heads].detach(), chunk, torch.float64)
            for inclusive in set(of.meets):
                products = Products(
                    part, scheme, inclusive=inclusive, chunk=chunk, block=block, row=row, mask=mask, dtype=torch.float32
                )
                for stored, at in largest(products, T).items():
                    exponent, token, h, channel = at.tolist()
                    if exponent > 0 and (stored not in worst_of or exponent > worst_of[stored].exponent):
                        token = min(int(token), T - 1)
                        worst_of[stored] = Worst(exponent, stored, batch, token, head + int(h), int(channel))
    return list(worst_of.values())


def largest(products: Products, T: int | Tensor) -> dict[bool, Tensor]:
    """Return the largest exponent of factors stored with an operand (key True) and of others (key False), for one batch
    element.

    T: number of tokens; later rows, at the end of the last chunk, are padding. Each value is a tensor [4]: the
        exponent, its token (may be T or more), head and channel. A kind without factors is missing.
    """
    chunk, candidates = products.w.shape[-2], {}
    for stored, start, exponents in _formed(products, T):
        exponents = exponents.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)[0]  # [H, N, rows, K]
        h, n, t, channel = torch.unravel_index(exponents.argmax(), exponents.shape)
        place = torch.stack((n * chunk + start + t, h, channel)).double()
        candidates.setdefault(stored, []).append(torch.cat((exponents.max()[None], place)))
    tables = {stored: torch.stack(rows) for stored, rows in candidates.items()}
    return {stored: rows[rows[:, 0].argmax()] for stored, rows in tables.items()}


def _formed(products: Products, T: int | Tensor) -> Iterator[tuple[bool, int, Tensor]]:
    """Yield for each factor of a tile: whether it is stored with its operand, its first row in the chunk, and its
    exponents [1, H, N, rows, K]; T as in `largest`."""
    chunk = products.w.shape[-2]
    left = torch.as_tensor(T - (products.w.shape[2] - 1) * chunk, device=products.w.device)  # tokens in the last chunk

    def real(exponents: Tensor, first: int) -> Tensor:
        """Set the last chunk's exponents to -inf if its row `first` is padding: no such tile is needed."""
        exponents[:, :, -1:] = torch.where(first < left, exponents[:, :, -1:], -torch.inf)
        return exponents

    tiles = [*products.tiles, *(tile for tile in products.key_tiles if tile not in products.tiles)]
    for tile in tiles:
        seen, gi = products.seen[..., tile.rows, :], products.gi[..., tile.keys, :]
        if tile.anchor is not None:
            query, key = products.exponents(tile)
            empty = tile.keys.start == tile.keys.stop  # its reads meet no key
            first = tile.rows.start if empty else tile.keys.start
            formed = [(not empty, tile.rows.start, real(query, first)), (True, tile.keys.start, real(key, first))]
        elif products.mask == "before":
            # Never positive, but the difference of two infinities is undefined.
            lost = torch.where(gi.isneginf(), torch.inf, -torch.inf)
            lost = lost if products.inclusive else lost[..., :-1, :]
            formed = [(False, tile.keys.start, real(lost, tile.keys.start))]
        else:
            formed = [(False, tile.keys.start, real(seen.amax(-2, keepdim=True) - gi, tile.keys.start))]
        yield from (part for part in formed if part[-1].numel())
