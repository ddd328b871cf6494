"""Run an operator with one of the anchor schemes of `schemes` (which row's cumulative decay the exponents of a chunk
are relative to), and measure these exponents and the decay from which each tensor is not finite."""

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
    """The results of `run`: the operator's tensors by name, and the scores A [B, H, N, C, C] of the N chunks that
    multiply v. In RWKV6 and RWKV7, A has the scores of r and k; in GSA those of the second pass, p and s."""

    scheme: Scheme
    tensors: Mapping[str, Tensor]
    A: Tensor

    @property
    def non_finite(self) -> dict[str, Tensor]:
        """Boolean masks of the non-finite elements, by tensor."""
        return {name: ~x.isfinite() for name, x in self.tensors.items()}

    @property
    def finite(self) -> dict[str, bool]:
        """Whether each tensor is finite everywhere."""
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
    """Run an operator forward and backward in chunks, with the decay inside a chunk anchored by `scheme`.

    inputs: as from `flakit.inputs(op, ...)`, optionally with scale and initial_state. GSA: HQ = H. With a tensor
        `length`, only that many rows are tokens, the others must be zeros: an exported run then takes any length.
    op: "rwkv6", "rwkv7" or "gsa". chunk: tokens per chunk; block: rows per block, both powers of two.
    row: the anchor row of scheme "middle" within the block; default block // 2.
    mask: how future keys are masked, one of `MASKS`; default the right one. In an exact tile the gradient passes
        through the exponential as in automatic differentiation: 0 * inf if the mask comes too late.
    dtype: storage dtype of the two operands of each product; exponentials and sums are float32.
    arriving: the gradient of o; default that of `numerics.evaluate`, so that `truth(op, inputs)` is comparable.
    backend: "torch", or "triton" for the kernels of the tiles left of the diagonal, where the faults of "first-row" and
        "previous-row-across" occurred; on a GPU or interpreted, float32 only, for the schemes in `KERNEL_ANCHORS`.
    products: a replacement for `Products`, for cases with other anchors.
    Returns `TENSORS[op]`, and the gradients of the initial states if there are any.
    Raises ValueError for an unknown scheme, operator, mask or size.
    """
    scheme, of = find_scheme(scheme), find_operator(op)
    options = {"chunk": chunk, "block": block, "row": row, "mask": mask, "dtype": dtype}
    if choose_backend(backend, inputs["k"]) == "triton":
        if scheme.name not in KERNEL_ANCHORS or dtype != torch.float32:
            raise ValueError(f"scheme: expected one of {', '.join(KERNEL_ANCHORS)} in float32 with backend 'triton'")
        products = _Kernel
    chunked = of(inputs, lambda w, inclusive: products(w, scheme, inclusive=inclusive, **options), chunk)
    do = cotangents(op, inputs, grad_seed=grad_seed)[0] if arriving is None else arriving
    if scheme.dyadic:
        tensors = _own_form(of, inputs, do, chunk)
    else:
        tensors = chunked.outputs | chunked.backward(split_chunks(do, chunk, torch.float32))
    order = TENSORS[op] + tuple(
        f"dinitial{name.removeprefix('final')}" for name in of.finals if inputs.get("initial_state") is not None
    )
    return Run(scheme, {name: tensors[name] for name in order}, chunked.A)


KERNEL_ANCHORS = {"first-row": 0, "previous-row": -1, "previous-row-across": -1}
"""The schemes with a kernel, and their anchor row, counted from the block's first."""


class _Kernel(Products):
    """`schemes.Products`, but Triton kernels compute the tiles left of the diagonal; schemes of `KERNEL_ANCHORS`."""

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


def _own_form(of, inputs: Mapping[str, Tensor], do: Tensor, chunk: int) -> dict[str, Tensor]:
    """Return o, final states and gradients of flakit's own chunked PyTorch form. of: a `Chunks`; do: o's gradient."""
    x = [inputs[name].detach() for name in of.names]
    start = scale(of, inputs), inputs.get("initial_state")
    o, last = of.chunked.forward(*x, *start, chunk)
    *grads, first = of.chunked.backward(*x, *start, do, None, chunk)
    last, first = ((y,) if isinstance(y, Tensor) else y for y in (last, first))
    tensors = {"o": o} | {f"d{name}": grad for name, grad in zip(of.names, grads, strict=True)}
    for name, at_end, at_start in zip(of.finals, last, first, strict=True):
        tensors |= {name: at_end, f"dinitial{name.removeprefix('final')}": at_start}
    return tensors


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
    """Return the exponents of the query and key factors of every pair (i, j) of chunk `index`: two float32 maps [C, C].

    A factor is exp of its exponent, infinite above `LN_MAX`. Both maps have the largest over channels, or those of one
    `channel`, NaN for pairs that the scheme never computes. A pair of an exact tile has one exponent, in the first map,
    and 0 in the second.
    query: the reading tensor, for operators with two: RWKV7's "r" (inclusive, the default) or "a" (exclusive).
    Raises ValueError for an unknown query or chunk, and as `run` does.
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
    """Measure what `limits` predicts: for each tensor, the factor on the log decays from which it is non-finite.

    Bisects to a relative `tolerance`; every `run` serves all tensors. inf if a tensor is finite at `highest`.
    near: factors to try first, default the `limits`. knobs: keyword arguments of `run`.
    """

    decay = find_operator(op).decay

    def finite(factor: float) -> dict[str, bool]:
        is_finite = run({**inputs, decay: inputs[decay].detach() * factor}, scheme, op=op, **knobs).finite
        return {name: is_finite[name] for name in TENSORS[op]}

    if near is None:
        settings = {name: knob for name, knob in knobs.items() if name != "backend"}
        near = limits(scheme, inputs, op=op, **settings).values()
    return search(finite, near=set(near), tolerance=tolerance, highest=highest)
