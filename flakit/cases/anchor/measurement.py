"""An operator computed with an anchor scheme: its tensors, the exponents it takes, and the decay at which it fails."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.evaluate import cotangents
from ...ops.common.chunks import split_chunks
from ...ops.common.decay import dyadic_levels
from ...ops.common.dispatch import choose_backend
from ..laws import search
from .law import limits
from .operators import TENSORS, find_operator, scale
from .schemes import Products, Scheme, find_scheme


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
    arriving: Tensor | None = None,
    backend: str = "torch",
    products: Callable[..., Products] = Products,
) -> Run:
    """An operator forward and backward in chunks, with the decay inside a chunk anchored by `scheme`.

    inputs: as `flakit.inputs(op, ...)` makes them; scale and initial_state may be among them. GSA: HQ = H. With a
        `length`, a tensor, only so many rows are tokens and the others have to be zeros: so an exported run takes any.
    op: "rwkv6", "rwkv7" or "gsa".
    chunk: tokens a chunk; block: rows a block inside it, both powers of two.
    row: the anchor row of scheme "middle", inside the block; default block // 2.
    mask: how the future is kept out, one of `MASKS`; default the right one. In an exact tile the gradient goes through
        the exponential as automatic differentiation sends it: 0 * inf where the mask came too late.
    dtype: what the two operands of each product are stored in; exponentials and sums are float32.
    The gradient that arrives at o is that of `numerics.evaluate`, so that `truth(op, inputs)` is the truth.
    arriving: another gradient at o.
    backend: "torch", or "triton" for the kernel of the tiles left of the diagonal, where bug A and its first repair
        were; on a GPU or interpreted, float32 only, for the schemes in `KERNEL_ANCHORS`.
    products: another way to form them, as `Products`; cases of other anchors use it.
    Returns `TENSORS[op]`, and the gradient of the initial states where there are any.
    """
    scheme, of = find_scheme(scheme), find_operator(op)
    how = {"chunk": chunk, "block": block, "row": row, "mask": mask, "dtype": dtype}
    if choose_backend(backend, inputs["k"]) == "triton":
        if scheme.name not in KERNEL_ANCHORS or dtype != torch.float32:
            raise ValueError(f"scheme: expected one of {', '.join(KERNEL_ANCHORS)} in float32 with backend 'triton'")
        products = _Kernel
    chunked = of(inputs, lambda w, inclusive: products(w, scheme, inclusive=inclusive, **how), chunk)
    do = cotangents(op, inputs, grad_seed=grad_seed)[0] if arriving is None else arriving
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
        from .tiles_triton import scores

        own = super().scores(query, key, [tile for tile in self.tiles if tile.anchor is None])
        return own + scores(query, key, self.seen, self.gi, **self._layout())

    def read(self, A: Tensor, key: Tensor) -> Tensor:
        from .tiles_triton import read

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
    of, scheme = find_operator(op), find_scheme(scheme)
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

    decay = find_operator(op).decay

    def finite(factor: float) -> dict[str, bool]:
        found = run({**inputs, decay: inputs[decay].detach() * factor}, scheme, op=op, **knobs).finite
        return {name: found[name] for name in TENSORS[op]}

    if near is None:
        settings = {name: knob for name, knob in knobs.items() if name != "backend"}
        near = limits(scheme, inputs, op=op, **settings).values()
    return search(finite, near=set(near), tolerance=tolerance, highest=highest)
