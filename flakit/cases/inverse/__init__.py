"""The inverse of RWKV7's chunk form: three ways that are equal in algebra, and only in algebra.

Inside a chunk of C tokens what a_i reads depends on the reads before it: v2 = (I - L)^-1 (...), with L = A_ab strictly
lower triangular, L_ij = a_i . (b_j e^{sum of w between j and i}). L is nilpotent, L^C = 0, so squarings suffice:

    product       (I - L)^-1 = (I + L)(I + L^2)(I + L^4) ... (I + L^{C/2}) = sum of all powers of L

The product form has matrix products only, which suits tensor cores, and is exact to rounding if keys differ or decay is
strong. With repeated tokens, and the model's a = -k, b = alpha k (|k| = 1), L is about -alpha everywhere below the
diagonal. Its n-th power has elements (-alpha)^n times a binomial coefficient, up to alpha^8 * 3432 at C = 16, while no
element of the inverse exceeds max(1, alpha). The powers have alternating signs and cancel, and their rounding remains:

    error of the product = u * (largest |L^n|) / |(I - L)^-1|         u half a unit in the last place, norms Frobenius

to within a factor of 10 over twenty orders of magnitude. A format of small range overflows earlier: in float16 L^8 is
infinite above alpha = (65504 / 3432)^{1/8} = 1.446 (C = 16, no decay), and the next product makes it NaN.

    blocks        the inverse of [[P, 0], [-Q, R]] is [[P', 0], [R' Q P', R']], from 1 x 1 up
    substitution  row i of the inverse = e_i + sum_{j<i} L_ij row j

These two multiply only parts of the inverse and of L: no intermediate is much larger. flakit uses blocks, in float32.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.chunks import split_chunks
from ...ops.common.decay import level_blocks
from ..anchor.operators import RWKV7, TENSORS
from ..anchor.schemes import Products
from ..decay_gradient import ROUNDINGS, round_to
from ..knobs import DECAY, Range
from ..laws import Measured, Row, search

FORMS = {
    "product": "(I + L)(I + L²)(I + L⁴)…",
    "blocks": "2 x 2 blocks, recursively",
    "substitution": "forward substitution, row by row",
}

LARGEST = {"float16": torch.finfo(torch.float16).max, "bfloat16": torch.finfo(torch.bfloat16).max}
LARGEST |= {"tf32": torch.finfo(torch.float32).max, "float32": torch.finfo(torch.float32).max}
"""The largest number of each format that operands may be rounded to."""


def keys(C: int = 16, spread: float = 0.0, *, K: int = 64, seed: int = 0) -> Tensor:
    """Return C unit keys, [C, K] float64: a common direction, plus a random one of length `spread` for each. spread: 0
    repeats one token C times; 1 gives about 60 degrees between two tokens. Raises ValueError below 0."""
    if not spread >= 0:
        raise ValueError(f"spread: expected 0 or more, got {spread!r}")
    generator = torch.Generator().manual_seed(seed)
    common, own = (F.normalize(torch.randn(n, K, generator=generator, dtype=torch.float64), dim=-1) for n in (1, C))
    return F.normalize(common + spread * own, dim=-1)


def matrix(alpha: float = 0.9, w: float = -1e-3, spread: float = 0.0, *, C: int = 16, seed: int = 0) -> Tensor:
    """Return the matrix L that `invert` takes, [C, C] float64, of C tokens with a = -k, b = alpha k and a uniform log
    decay w <= 0.

    alpha: 0 … 1 in the model (a sigmoid), up to 2 with negative eigenvalues. C: a power of two. Else ValueError.
    """
    if not 0 <= alpha <= 2:
        raise ValueError(f"alpha: expected 0 … 2, got {alpha!r}")
    if not w <= 0:
        raise ValueError(f"w: expected a natural-log decay <= 0, got {w!r}")
    if type(C) is not int or C < 2 or C & (C - 1):
        raise ValueError(f"C: expected a power of two from 2, got {C!r}")
    k, t = keys(C, spread, seed=seed), torch.arange(C)
    between = (t[:, None] - t[None, :] - 1).clamp(min=0).double()
    decay = torch.where(between > 0, (between * w).exp(), 1.0)  # 0 * -inf is NaN: no token lies between
    return -(alpha * (k @ k.mT) * decay).tril(-1)


def invert(L: Tensor, form: str = "product", rounding: str = "float32") -> Tensor:
    """Return (I - L)^-1 for strictly lower triangular L [..., C, C], C a power of two, in float32 or L's wider dtype.

    form: one of `FORMS`. rounding: one of `ROUNDINGS`, to which both operands of every product are rounded; sums are in
        the result's dtype. Raises ValueError for an unknown form or rounding.
    """
    one_of("form", form, FORMS)
    L = L.to(torch.promote_types(L.dtype, torch.float32))
    C = L.shape[-1]
    identity = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return round_to(a, rounding) @ round_to(b, rounding)

    if form == "product":
        inverse, power, n = identity + L, L, 2
        while n < C:
            power = dot(power, power)
            inverse = inverse + dot(inverse, power)
            n *= 2
        return inverse
    inverse = identity.contiguous()
    if form == "substitution":
        for i in range(1, C):
            inverse[..., i : i + 1, :] += dot(L[..., i : i + 1, :i], inverse[..., :i, :])
        return inverse
    s = 1
    while s < C:
        left, right = level_blocks(inverse, s, 0, 0), level_blocks(inverse, s, 1, 1)
        level_blocks(inverse, s).copy_(dot(dot(right, level_blocks(L, s)), left))
        s *= 2
    return inverse


def powers(L: Tensor) -> Tensor:
    """Return L, L^2, … L^{C-1} in float64, [C - 1, ..., C, C], for L [..., C, C]."""
    L = L.double()
    stack = [L]
    for _ in range(L.shape[-1] - 2):
        stack.append(stack[-1] @ L)
    return torch.stack(stack)


def law(L: Tensor, rounding: str = "float32") -> float | Tensor:
    """Predict the relative L2 error of the "product" form of `invert`: u * (largest power's norm) / (inverse's norm), u
    = 2^-digits of the rounding; inf if a power that it multiplies overflows.

    Returns a number for one matrix L [C, C], a tensor [...] for a batch [..., C, C].
    """
    exact, summed = invert(L.double(), "blocks", "float64"), powers(L)
    error = 2.0 ** -ROUNDINGS[rounding] * _size(summed).amax(0) / _size(exact)
    return _one_or_all(torch.where(_multiplied(summed) > LARGEST[rounding], torch.inf, error))


def _multiplied(summed: Tensor) -> Tensor:
    """Return the largest |element| of the powers L, L^2, L^4, … L^{C/2}, [...]; summed: those of `powers`."""
    used = [2**m - 1 for m in range(len(summed).bit_length())]
    return summed[used].abs().flatten(-2).amax(-1).amax(0)


def _size(x: Tensor) -> Tensor:
    return x.flatten(-2).norm(dim=-1)


def _one_or_all(x: Tensor) -> float | Tensor:
    return x if x.ndim else x.item()


def law_of_range(C: int = 16, w: float = 0.0, rounding: str = "float16") -> float:
    """Predict the largest alpha for which no power in `invert`'s "product" form overflows, for C equal tokens, log
    decay w.

    (-L)^n has elements alpha^n binomial(d - 1, n - 1) e^{(d - n) w} at distance d; n = 1, 2, 4, … C/2 are multiplied.

    >>> round(law_of_range(), 3), round(law_of_range(32), 3), round(law_of_range(64), 3)
    (1.446, 0.615, 0.268)
    """
    ends = []
    for n in (1 << m for m in range(C.bit_length() - 1)):
        largest = max(math.log(math.comb(d - 1, n - 1)) + (d - n) * w for d in range(n, C))
        ends.append(math.exp((math.log(LARGEST[rounding]) - largest) / n))
    return min(ends)


def onset(C: int = 16, w: float = 0.0, rounding: str = "float16", *, tolerance: float = 1e-3) -> float:
    """Measure what `law_of_range` predicts: the alpha from which the "product" form is not finite; inf if above 2."""

    def finite(alpha: float) -> dict[str, bool]:
        return {"product": bool(invert(matrix(alpha, w, C=C).float(), "product", rounding).isfinite().all())}

    return search(finite, near=[law_of_range(C, w, rounding)], tolerance=tolerance, highest=2.0)["product"]


def errors(L: Tensor, rounding: str = "float32") -> dict[str, float | Tensor]:
    """Return each form's relative L2 error against float64, from the float32 L [..., C, C]; inf if non-finite."""
    exact, by_form = invert(L.double(), "blocks", "float64"), {}
    for form in FORMS:
        error = _size(invert(L.float(), form, rounding).double() - exact) / _size(exact)
        by_form[form] = _one_or_all(error.nan_to_num(math.inf, math.inf))
    return by_form


def inputs(
    alpha: float = 0.9, w: float = -1e-3, spread: float = 0.0, *, T: int = 64, K: int = 32, seed: int = 0
) -> dict[str, Tensor]:
    """Draw RWKV7 inputs of T tokens, one head, keys nearly repeated: a = -k, b = alpha k, k from `keys`; w <= 0."""
    x = make_inputs("rwkv7", T=T, H=1, K=K, decay=float(w), seed=seed)
    direction = keys(T, spread, K=K, seed=seed).float()[None, :, None]
    return x | {"a": -direction, "b": alpha * direction}


def run(
    inputs: Mapping[str, Tensor], form: str = "product", rounding: str = "float32", *, chunk: int = 16
) -> dict[str, Tensor]:
    """Run RWKV7 forward and backward in chunks with one form of the inverse, everything else in float32. inputs: as
    from `flakit.inputs("rwkv7", ...)`. Returns `TENSORS["rwkv7"]`; compare with `truth("rwkv7", inputs)`."""

    class WithInverse(RWKV7):
        inverse = staticmethod(lambda A: invert(A, form, rounding))

    chunked = WithInverse(inputs, lambda w, inclusive: Products(w, "pairwise", inclusive=inclusive, chunk=chunk), chunk)
    do, _ = cotangents("rwkv7", inputs)
    tensors = chunked.outputs | chunked.backward(split_chunks(do, chunk, torch.float32))
    return {name: tensors[name] for name in TENSORS["rwkv7"]}


RECORDED = {
    "float32": {"product": 4e-5, "blocks": 8e-8},
    "tf32": {"product": 7e-2, "blocks": 5e-4},
    "float16": {"product": 7e-2, "blocks": 5e-4},
    "bfloat16": {"product": 0.8, "blocks": 4e-3},
}
"""Relative errors at 16 equal tokens, alpha = 0.9, w = -1e-3."""


def _in_words(error: float) -> float | str:
    return error if math.isfinite(error) else "not finite"


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the inverse of one chunk by each form, the terms L, L^2, … of the element that
    has the largest, and errors against alpha."""

    element: tuple[int, int]
    terms: Tensor
    """The values of `element` in L, L^2, … L^{C-1}, [C - 1] float64."""
    exact: Tensor
    """The inverse in float64, [C, C]."""
    made: Mapping[str, Tensor]
    """The inverse by form, as computed."""
    errors: Mapping[str, float]
    """The relative L2 error by form; inf if the inverse is not finite."""
    law: float
    """The predicted error of the product form."""
    cancels: float
    """The largest power's norm divided by the inverse's."""
    multiplied: float
    """The largest element of a power that the product form multiplies."""
    rounding: str
    alpha: float
    alphas: Tensor
    over: Mapping[str, Tensor]
    """Errors at each of `alphas` by form, and by "law"."""


def show(
    *,
    alpha: Annotated[float, Range(0, 2, 0.05)] = 0.9,
    w: Annotated[float, DECAY] = -1e-3,
    spread: Annotated[float, Range(0, 5, 0.05)] = 0.0,
    C: Annotated[int, (2, 4, 8, 16, 32, 64)] = 16,
    rounding: Annotated[str, LARGEST] = "float32",
) -> Shown:
    """Invert I - L by each form, with L from `matrix`. Return the errors, that of the product beside the prediction of
    `law`, and the alpha from which the product overflows. w: natural-log decay <= 0. alpha, spread: as in `matrix`."""
    L = matrix(alpha, w, spread, C=C)
    measured, predicted, nan = errors(L, rounding), law(L, rounding), math.nan
    rows = [
        Row(f"{rounding}: product off by", nan, _in_words(predicted), _in_words(measured["product"]), FACTOR),
        Row(f"{rounding}: blocks", nan, nan, measured["blocks"]),
        Row(f"{rounding}: substitution", nan, nan, measured["substitution"]),
        _end(f"{rounding}, equal keys: alpha at which the product ends", C, w, rounding),
    ]
    summed, exact = powers(L), invert(L.double(), "blocks", "float64")
    i, j = divmod(int(summed.abs().amax(0).argmax()), C)
    alphas, over = _over_alpha(w, spread, C, rounding)
    return Shown(
        rows, element=(i, j), terms=summed[:, i, j], exact=exact,
        made={form: invert(L.float(), form, rounding) for form in FORMS}, errors=measured,
        law=predicted, cancels=float(_size(summed).max() / _size(exact)), multiplied=float(_multiplied(summed)),
        rounding=rounding, alpha=alpha, alphas=alphas, over=over,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _over_alpha(w: float, spread: float, C: int, rounding: str) -> tuple[Tensor, dict[str, Tensor]]:
    alphas = torch.linspace(0.05, 2.0, 40, dtype=torch.float64)
    L = alphas[:, None, None] * matrix(1.0, w, spread, C=C)
    return alphas, errors(L, rounding) | {"law": law(L, rounding)}


FACTOR = 9
"""The law holds to a factor of 10; so does the operands' rounding as an estimate of the blocks' error."""


def _end(what: str, C: int = 16, w: float = 0.0, rounding: str = "float16") -> Row:
    limit = law_of_range(C, w, rounding)
    # Not measured beyond 2, where the state grows.
    return Row(what, math.nan, limit if limit <= 2 else math.inf, onset(C, w, rounding), within=3e-3)


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured errors by rounding: of the product form, predicted by `law`, and of the
    blocks, whose prediction is the rounding of one operand."""
    L, rows = matrix(), []
    for rounding, recorded in RECORDED.items():
        error, unit = errors(L, rounding), 2.0 ** -ROUNDINGS[rounding]
        rows.append(Row(f"{rounding}: product", recorded["product"], law(L, rounding), error["product"], FACTOR))
        rows.append(Row(f"{rounding}: blocks", recorded["blocks"], unit, error["blocks"], FACTOR))
    rows.append(Row("alpha = 1.9, float16: product", math.inf, math.inf, errors(matrix(1.9), "float16")["product"]))
    rows.append(_end("float16: alpha at which it ends"))
    return rows
