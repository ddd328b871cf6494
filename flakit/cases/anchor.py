"""Where a chunk's decay is anchored: the choice that decides at which decay NaN begins.

Inside a chunk, the weight of key j in output i is exp(g_i - gi_j): gi the inclusive cumulative log decay, and g_i what
the read has decayed by: ge, the exclusive one, in RWKV6 and for RWKV7's a; gi itself for RWKV7's r and in GSA. A matrix
product needs it as two factors, exp(g_i - n) * exp(n - gi_j), with some anchor n. Algebra does not care which;
floating point does: an exponent above ln(max) = 88.72 makes an infinity, and the other factor, a zero, turns it into
NaN.

As told (flash-linear-attention issue #77): exp(b_gq - b_gn) explodes because RWKV6's cumulative decay is exclusive.
As measured: the anchor was the block's *first* row p. There ge_p - gi_p = -w_p is one token's decay, not a cumulative
one, so a single w[16] = -88.8 suffices, in the forward pass too; -500 at any other row is harmless. With gi of the row
before (n = gi_{p-1}) both exponents are <= 0. A first repair read that row across the chunk boundary, where the
cumulative sum had just restarted, and failed at 88.72 / 64 per token instead. An inclusive read has gi_p - gi_p = 0
there: GSA is immune to the first fault (not to the repair's), RWKV7 is not, because of its a.

`SCHEMES` holds the anchors of the field, from none to the dyadic form flakit's own operators use; `run` computes an
operator with one of them, `limits` and `law` predict the decay it survives, `onset` measures it. A decay with a bound
never gets there: RWKV7's w > -0.6065 leaves the middle of a block of 16 (or of 64) far from any limit in float32; only
factors stored in float16 overflow, after 18 tokens.

All but "dyadic" take the decay's gradient from running sums, as published kernels do: finite where the others are, but
at strong decay a difference of large numbers that leaves noise (see `decay_gradient`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..numerics.evaluate import cotangents
from ..numerics.inputs import inputs as make_inputs
from ..ops.common.chunks import split_chunks
from ..ops.common.decay import dyadic_levels
from ..ops.common.dispatch import choose_backend
from .anchor_operators import OPERATORS, TENSORS, Meeting, Reach, scale
from .anchor_schemes import SCHEMES, Products, Scheme, Tile, find_mask, find_scheme, key_tiles, masked, tiles
from .knobs import FINITE_DECAY, Range
from .laws import LN_MAX, Row, kernel_place, search

__all__ = [
    "LN_MAX", "SCHEMES", "TENSORS", "Run", "Scheme", "Tile",
    "exponents", "key_tiles", "law", "limits", "onset", "reproduce", "run", "tiles",
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a scheme computed: its tensors, and the scores A [B, H, N, C, C] of each of the N chunks.

    A of RWKV6 and RWKV7 is what meets v (r with k), of GSA that of the second pass (p with s).
    """

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


def _of(op: str):
    if op not in OPERATORS:
        raise ValueError(f"op: expected one of {', '.join(OPERATORS)}, got {op!r}")
    return OPERATORS[op]


def run(
    inputs: Mapping[str, Tensor],
    scheme: str | Scheme = "first-row",
    *,
    op: str = "rwkv6",
    chunk: int = 64,
    block: int = 16,
    row: int | None = None,
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
    grad_seed: int = 1,
    backend: str = "torch",
    products: Callable[..., Products] = Products,
) -> Run:
    """An operator forward and backward in chunks, with the decay inside a chunk anchored by `scheme`.

    inputs: as `flakit.inputs(op, ...)` makes them; scale and initial_state may be among them. GSA: HQ = H.
    op: "rwkv6", "rwkv7" or "gsa".
    chunk: tokens a chunk; block: rows a block inside it, both powers of two.
    row: the anchor row of scheme "middle", inside the block; default block // 2.
    mask: how the future is kept out, one of `MASKS`; default the right one. In an exact tile the gradient goes through
        the exponential as automatic differentiation sends it: 0 * inf where the mask came too late.
    dtype: what the two operands of each product are stored in; exponentials and sums are float32.
    The gradient that arrives at o is that of `numerics.evaluate`, so that `truth(op, inputs)` is the truth.
    backend: "torch", or "triton" for the kernel of the tiles left of the diagonal, where bug A and its first repair
        were; on a GPU or interpreted, float32 only, for the schemes in `KERNEL_ANCHORS`.
    products: another way to form them, as `Products`; cases of other anchors use it.
    Returns `TENSORS[op]`, and the gradient of the initial states where there are any.
    """
    scheme, of = find_scheme(scheme), _of(op)
    how = {"chunk": chunk, "block": block, "row": row, "mask": mask, "dtype": dtype}
    if choose_backend(backend, inputs["k"]) == "triton":
        if scheme.name not in KERNEL_ANCHORS or dtype != torch.float32:
            raise ValueError(f"scheme: expected one of {', '.join(KERNEL_ANCHORS)} in float32 with backend 'triton'")
        products = _Kernel
    chunked = of(inputs, lambda w, inclusive: products(w, scheme, inclusive=inclusive, **how), chunk)
    do, _ = cotangents(op, inputs, grad_seed=grad_seed)
    if scheme.dyadic:
        tensors = _own_form(of, inputs, do, chunk)
    else:
        tensors = chunked.made | chunked.backward(split_chunks(do, chunk, torch.float32))
    order = TENSORS[op] + tuple(f"dinitial{name.removeprefix('final')}" for name in of.finals if _starts(inputs))
    return Run(scheme, {name: tensors[name] for name in order}, chunked.A)


KERNEL_ANCHORS = {"first-row": 0, "previous-row": -1, "previous-row-across": -1}
"""The schemes that have a kernel: the anchor's row, counted from the block's first."""


class _Kernel(Products):
    """`Products` whose tiles left of the diagonal are a kernel's."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        from .anchor_triton import scores

        own = super().scores(query, key, [tile for tile in self.tiles if tile.anchor is None])
        return own + scores(query, key, self.seen, self.gi, **self._layout())

    def read(self, A: Tensor, key: Tensor) -> Tensor:
        from .anchor_triton import read

        own = super().read(A, key, [tile for tile in self.tiles if tile.anchor is None])
        return own + read(A, key, self.seen, self.gi, **self._layout())

    def _layout(self) -> dict:
        at = KERNEL_ANCHORS[self.scheme.name]
        return {"block": self.tiles[0].rows.stop, "anchor": at, "across": self.scheme.across}


def _starts(inputs: Mapping[str, Tensor]) -> bool:
    return inputs.get("initial_state") is not None


def _own_form(of, inputs: Mapping[str, Tensor], do: Tensor, chunk: int) -> dict[str, Tensor]:
    """flakit's own chunked form, whose products are dyadic and whose decay gradient does not cancel."""
    x = [inputs[name].detach() for name in of.names]
    start = scale(of, inputs), inputs.get("initial_state")
    o, last = of.chunked.forward(*x, *start, chunk)
    *grads, first = of.chunked.backward(*x, *start, do, None, chunk)
    last, first = ((y,) if isinstance(y, Tensor) else y for y in (last, first))
    found = {"o": o} | {f"d{name}": grad for name, grad in zip(of.names, grads, strict=True)}
    for name, at_end, at_start in zip(of.finals, last, first, strict=True):
        found |= {name: at_end, f"dinitial{name.removeprefix('final')}": at_start}
    return found


def exponents(
    inputs: Mapping[str, Tensor],
    scheme: str | Scheme = "first-row",
    *,
    op: str = "rwkv6",
    query: str | None = None,
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
    query: what reads, where an operator has two: RWKV7's "r" (inclusive, the default) or "a" (exclusive).
    """
    of, scheme = _of(op), find_scheme(scheme)
    query = next(iter(of.reads)) if query is None else query
    if query not in of.reads:
        raise ValueError(f"query: expected one of {', '.join(of.reads)} for {op}, got {query!r}")
    w = split_chunks(inputs[of.decay].detach()[batch : batch + 1, :, head : head + 1], chunk, torch.float32)
    if not 0 <= index < w.shape[2]:
        raise ValueError(f"index: expected a chunk 0 … {w.shape[2] - 1}, got {index}")
    products = Products(w, scheme, inclusive=of.reads[query], chunk=chunk, block=block, row=row, mask=mask)
    pick = (lambda x: x[0, 0, index].amax(-1)) if channel is None else (lambda x: x[0, 0, index, ..., channel])
    on_query, on_key = torch.full((2, chunk, chunk), torch.nan)
    if scheme.dyadic:
        for s, log_weight in dyadic_levels(w):
            read = pick(log_weight + w if products.inclusive else log_weight)
            log_weight = pick(log_weight)
            for p in range(0, chunk, 2 * s):
                left, right = slice(p, p + s), slice(p + s, p + 2 * s)
                on_query[right, left], on_key[right, left] = read[right, None], log_weight[None, left]
        if products.inclusive:
            for picture in (on_query, on_key):
                picture.fill_diagonal_(0.0)
        return on_query, on_key
    for tile in products.tiles:
        if tile.anchor is None:
            on_query[tile.rows, tile.keys], on_key[tile.rows, tile.keys] = pick(products.pairs(tile)), 0.0
            if products.mask == "before":
                for picture in (on_query, on_key):
                    picture[tile.rows, tile.keys].masked_fill_(~products.low[tile.rows, tile.keys].cpu(), torch.nan)
        else:
            q, k = (pick(x) for x in products.exponents(tile))
            on_query[tile.rows, tile.keys], on_key[tile.rows, tile.keys] = q[:, None], k[None, :]
    return on_query, on_key


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
    """The law: for each tensor, how far the decay may grow before its first non-finite value; inf means for ever.

    Without inputs: the largest |w| per token at uniform decay over T tokens (default: two chunks), operands of order 1.
    With inputs: the factor their log decays may be multiplied with, their own operands' sizes counted. At a uniform
    decay of -1 that is again the largest |w| per token.

    A factor exp(n |w|), n tokens in one exponent, multiplies an operand; it is finite up to
    |w| = (ln max - max(0, ln |operand|)) / n. Which n and which operand a product meets:
    scores   both factors of every pair that is needed: o sums them row by row, dv column by column;
    read     its own query factor bare, and every key of the tile, masked ones too: a zero times inf is NaN in a sum;
             there a key that is used is multiplied by its matrix element as well (RWKV6: dr; GSA: the slots' scores);
    written  its own key factor bare, and every query of the tile likewise (RWKV6: dk).
    What an operator makes of them, and which tensor each reaches, is in `anchor_operators`; the decay's gradient meets
    all that the others do, du and a state that no product reaches nothing.
    No exponential is taken here and no sum is formed; a sum of several large terms can overflow a percent or two
    sooner (`WITHIN`). Where the mask comes too late for it ("multiply", "none"), pairs of the future count with both
    factors multiplied, and the sums over them make the law good to a few percent only. Operands that depend on the
    decay themselves (RWKV7's a finds, GSA's p) are taken at strong decay.
    """
    scheme, of = find_scheme(scheme), _of(op)
    mask = find_mask(scheme, mask)
    if dtype not in LN_MAX:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, LN_MAX))}, got {dtype}")
    found = dict.fromkeys(TENSORS[op], math.inf)
    if scheme.dyadic:
        return found
    if inputs is None:
        T = 2 * chunk if T is None else T
        w = -torch.ones(1, T, 1, 1)
        one = split_chunks(-w, chunk, torch.float64)
        meetings = [Meeting(one, one, one, one @ one.mT)] * len(of.meets)
    else:
        w = inputs[of.decay].detach()
        T = w.shape[1]
        do, _ = cotangents(op, inputs, grad_seed=grad_seed)
        meetings = [
            Meeting(*(x.abs() for x in m)) for m in of.meetings(inputs, split_chunks(do, chunk, torch.float64), chunk)
        ]
    w = split_chunks(w, chunk, torch.float64)
    real = (torch.arange(w.shape[2] * chunk, device=w.device) < T).view(-1, chunk)  # [N, C]
    how = {"chunk": chunk, "block": block, "row": row, "mask": mask, "dtype": dtype}
    formed = {inclusive: products(w, scheme, inclusive=inclusive, **how) for inclusive in set(of.meets)}
    reach = [_reach(formed[inclusive], m, real) for inclusive, m in zip(of.meets, meetings, strict=True)]
    return found | of.reached(reach)


def _reach(products: Products, meeting: Meeting, real: Tensor) -> Reach:
    """The limits of one meeting's products. real: which rows are tokens and which padding, [N, C]."""
    mask, dtype = products.mask, products.dtype
    q, bare, k, dA = meeting
    found = dict.fromkeys(Reach._fields, math.inf)

    def limit(exponent: Tensor, operand: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
        operand = torch.as_tensor(operand, dtype=torch.float64, device=exponent.device)
        room = (LN_MAX[dtype] - operand.log()).clamp(max=LN_MAX[torch.float32])
        # inf - inf is the NaN of an exponent that is a difference: nothing is left to grow.
        return torch.where(exponent.isnan(), 0.0, torch.where(exponent > 0, room / exponent, torch.inf))

    def multiplied(query: Tensor, key: Tensor, operands: Tensor) -> Tensor:
        # Both factors finite, their product not: here a small operand helps, whatever the exponentials are.
        exponent = query[..., :, None, :] + key[..., None, :, :]
        return torch.where(exponent > 0, (LN_MAX[torch.float32] - operands.log()) / exponent, torch.inf).amin(-1)

    def lower(name: str, limit: Tensor, used: Tensor) -> None:
        found[name] = min(found[name], torch.where(used, limit, torch.inf).amin().item() if used.any() else math.inf)

    for tile in products.tiles:
        low = products.low[tile.rows, tile.keys]
        rows, keys = real[:, tile.rows], real[:, tile.keys]  # [N, rows], [N, keys]
        seen = low if mask in ("where", "before") else torch.ones_like(low)
        arriving = masked(dA[..., tile.rows, tile.keys], low, mask)
        pairs = seen & rows[:, :, None]  # [N, rows, keys]: scores that rows sum; columns sum over padded rows too
        both = seen & keys[:, None, :]
        if tile.anchor is None:
            exponent = products.pairs(tile)
            taken = low if mask == "before" else torch.ones_like(low)  # pairs whose exponential is taken at all
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
    return Reach(**found)


def law(
    scheme: str | Scheme, inputs: Mapping[str, Tensor] | None = None, *, tensor: str | None = None, **knobs
) -> float:
    """The `limits` of one tensor, or of whichever fails first: ln(max) / n at uniform decay and operands of order 1.

    knobs: as `limits` takes them, `op` among them.

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
    op: str = "rwkv6",
    near: Iterable[float] | None = None,
    tolerance: float = 1e-3,
    highest: float = 1e3,
    **knobs,
) -> dict[str, float]:
    """The measured counterpart of `limits`: the factor on the inputs' log decays at which each tensor turns non-finite.

    Found by bisection to a relative `tolerance`, every `run` serving all tensors; inf where `highest` is still finite.
    near: where to look first, by default at the `limits`.
    """

    decay = _of(op).decay

    def finite(factor: float) -> dict[str, bool]:
        found = run({**inputs, decay: inputs[decay].detach() * factor}, scheme, op=op, **knobs).finite
        return {name: found[name] for name in TENSORS[op]}

    if near is None:
        settings = {name: knob for name, knob in knobs.items() if name != "backend"}
        near = limits(scheme, inputs, op=op, **settings).values()
    return search(finite, near=set(near), tolerance=tolerance, highest=highest)


CLAMP = -12.0
"""The stop-gap of the thread, |w| < 12: it bounds one token, and so bug A, but no exponent that holds eight."""


def spike(at: int, w: float = -1.0, *, op: str = "rwkv6", T: int = 64, K: int = 64) -> dict[str, Tensor]:
    """Inputs of one head in which nothing decays but the token `at`, by w (natural log)."""
    if not 0 <= at < T:
        raise ValueError(f"row: expected a token 0 … {T - 1}, got {at!r}")
    x = make_inputs(op, T=T, H=1, K=K, decay=0.0)
    x[_of(op).decay][:, at] = w
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
