"""Chunk and recurrent disagree: three causes that look alike, and a story that explains none of them.

As reported (flash-linear-attention issues #29 and #36, pull request #37): in bfloat16 most outputs of the two forms
differ, gradients by up to "3024 times"; the decay tensor was shared between the two calls, `w.clone()` cured it; and
small differences are amplified along the sequence.
As measured: three separate effects, which `switches` turns on one by one:
- the scale: the script called one form with its default K^-0.5 and the other with 1. That alone gives all six reported
  differences (`REPORTED`), clone or no clone; the two results then differ by one constant factor (`ratio`);
- aliasing, the reported cause: a kernel that overwrites w with its running sum spoils every later call with the same w.
  No published version did this to w, so `overwriting_chunk` is a constructed example;
- precision: dw from rounded dr and dk (see `decay_gradient`).
"0.0312", the state gradient's worst difference after the repair, is 2^-5: one step of bfloat16 between 4 and 8, where
the largest of these gradients lie (`repaired`). It means that two numbers round to neighbours, and no more. Nothing is
amplified along the sequence: a difference between two states is multiplied by e^w <= 1 at every token (`perturbed`);
only a positive w makes it grow, which is the fault in `log_space`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics import recorded
from ...numerics.errors import relative_l2
from ...numerics.evaluate import evaluate, recurrence, truth
from ...numerics.gradients import rounding_error
from ...numerics.inputs import inputs as make_inputs
from ...numerics.operators import Operator, operator
from ...ops.common.chunks import carry_states, split_chunks
from ...ops.common.decay import sum_before
from ...ops.rwkv6 import RWKV6Output, chunk_rwkv6, reference
from ..aliasing import overwrite
from ..decay_gradient import running_sums
from ..knobs import Range
from ..laws import Measured, Row
from ..published import published_rwkv6

REPORTED = {"o": 145.0, "dr": 202.0, "dk": 198.0, "dv": 57.25, "dw": 163.0, "du": 1392.0}
"""The largest absolute differences between the two forms in the report."""

REPAIRED = 0.0312
"""The reported largest difference of the state's gradient after the repair: 2^-5, printed with four decimals."""


def inputs(
    *, B: int = 4, T: int = 1024, H: int = 4, K: int = 100, V: int = 200, seed: int = 0, device: str = "cpu"
) -> dict[str, Tensor]:
    """Draw RWKV6 inputs as in the report: bfloat16, natural-log decays logsigmoid(randn), r [B, T, H, K]."""
    options = {"decay": "logsigmoid", "dtype": torch.bfloat16, "seed": seed, "device": device}
    return make_inputs("rwkv6", B=B, T=T, H=H, K=K, V=V, **options)


def run(
    inputs: Mapping[str, Tensor],
    *,
    form: str = "chunk",
    scale: float | None = None,
    seed: int = 0,
    op: str | Operator = "rwkv6",
) -> dict[str, Tensor]:
    """Return o, final state and all gradients of `inputs`, for a do uniform in [0, 1) from `seed`, as in the report.
    form: "chunk" or "recurrent". scale: None for the default, K^-0.5."""
    return evaluate(op, {**inputs, "scale": scale}, form=form, arriving=(_arriving(inputs, seed), None))


def _arriving(inputs: Mapping[str, Tensor], seed: int) -> Tensor:
    v = inputs["v"]
    return torch.rand(v.shape, generator=torch.Generator().manual_seed(seed)).to(v)


class Ratio(NamedTuple):
    """A least-squares fit got = factor * other, and the residual's norm relative to |got| (`unexplained`)."""

    factor: float
    unexplained: float


def ratio(got: Tensor, other: Tensor) -> Ratio:
    """Fit got = factor * other by least squares: the first thing to look at when two results disagree.

    unexplained near 0 with a factor other than 1: a scale is missing. Near 1: the results are uncorrelated. Raises
    ValueError for different shapes, or if one of them is all zeros.
    """
    if got.shape != other.shape:
        raise ValueError(f"got: expected {list(other.shape)} like other, got {list(got.shape)}")
    x, y = other.detach().double().flatten(), got.detach().double().flatten()
    if not (x.any() and y.any()):
        raise ValueError("got and other: expected values other than zero, got zeros in one of them")
    factor = (x @ y) / (x @ x)
    return Ratio(factor.item(), ((y - factor * x).norm() / y.norm()).item())


def overwriting_chunk(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, chunk: int = 64, **options
) -> RWKV6Output:
    """Run `chunk_rwkv6`, then overwrite w with its running sum by chunk: the constructed fault (see `aliasing`)."""
    result = chunk_rwkv6(r, k, v, w.clone(), u, **options)
    overwrite(w, chunk, backend="torch")
    return result


def perturbed(inputs: Mapping[str, Tensor], size: float = 1e-3, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Run RWKV6 twice in float64 from initial states that differ by `size` * randn: does the difference grow?

    inputs: r, k, v, w and u; w may be positive. Returns |S'_t - S_t| / |S'_0 - S_0| for t = 1 … T, measured and
        predicted, [T] each. The prediction multiplies row k of the difference by e^{w_k} at every token.
    """
    x = {name: inputs[name].detach().double() for name in ("r", "k", "v", "w", "u")}
    B, _, H, K = x["r"].shape
    generator = torch.Generator().manual_seed(seed)
    start, change = torch.randn(2, B, H, K, x["v"].shape[-1], generator=generator, dtype=torch.float64)
    change *= size
    runs = (reference.steps(**x, initial_state=S) for S in (start, start + change))
    measured = torch.stack([(b.state - a.state).norm() for a, b in zip(*runs, strict=True)]) / change.norm()
    left = x["w"].cumsum(1).movedim(1, 0).exp()  # [T, B, H, K]
    predicted = (left * change.norm(dim=-1)).flatten(1).norm(dim=1) / change.norm()
    return measured, predicted


def switches(
    inputs: Mapping[str, Tensor], *, scale: bool = False, aliasing: bool = False, precision: bool = False, seed: int = 0
) -> dict[str, Ratio]:
    """Fit the chunk form's tensors as multiples of the recurrent form's, with any of the three causes switched on.

    The recurrent form computes in float32 (`numerics.evaluate.recurrence`). Without a cause, every factor is 1 and only
    rounding remains unexplained.
    scale: the chunk form gets 1, the recurrent one its default. aliasing: the chunk form runs first and leaves its
        running sums in the w of the recurrent one. precision: the chunk form's dw is `running_sums`.
    """
    chunk, recurrent = _forms(inputs, scale, aliasing, precision, seed)
    return {name: ratio(chunk[name], recurrent[name]) for name in REPORTED}


def _forms(
    inputs: Mapping[str, Tensor], scale: bool, aliasing: bool, precision: bool, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of `REPORTED` from the chunk form and from the recurrent one; causes as in `switches`."""
    x = {**inputs, "w": inputs["w"].clone()}
    chunk = run(x, scale=1.0 if scale else None, seed=seed)
    if precision:
        sums = running_sums(x, _arriving(x, seed))["dw"]
        chunk |= {"dw": sums / default_scale(x) if scale else sums}
    if aliasing:
        overwrite(x["w"], backend="torch")
    recurrent = recurrence("rwkv6", x, arriving=(_arriving(x, seed), None))
    return tuple({name: tensors[name] for name in REPORTED} for tensors in (chunk, recurrent))


ANONYMOUS = {"A": {"precision": True}, "B": {"scale": True}, "C": {}, "D": {"aliasing": True}}
"""The causes behind four pairs of results that are labelled by letter only."""


def anonymous(*, seed: int = 0) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return results to be diagnosed by a learner: {letter: (chunk, recurrent)}, tensors as in `REPORTED`."""
    x = inputs(B=1, T=256, H=2, K=64, V=64, seed=seed)
    off = dict.fromkeys(("scale", "aliasing", "precision"), False)
    return {letter: _forms(x, **off | causes, seed=seed) for letter, causes in ANONYMOUS.items()}


def default_scale(inputs: Mapping[str, Tensor]) -> float:
    return inputs["r"].shape[-1] ** -0.5


def law(inputs: Mapping[str, Tensor], *, scale: bool = False) -> float:
    """Predict the factor by which the chunk form's o and gradients differ from the recurrent form's. scale: whether the
    chunk form has scale 1 and the recurrent one K^-0.5; all tensors are linear in the scale."""
    return 1 / default_scale(inputs) if scale else 1.0


def step_at(x: float, digits: int = 8) -> float:
    """Return the spacing of floating-point numbers around x for a significand of `digits` bits (bfloat16: 8).

    >>> step_at(4.5), step_at(3.9)
    (0.03125, 0.015625)
    """
    return 2.0 ** (math.floor(math.log2(abs(x))) + 1 - digits)


class Repaired(NamedTuple):
    """The initial state's gradient from bfloat16 products beside that of a float32 recurrence. worst: their largest
    difference, both rounded to bfloat16; step: bfloat16's spacing at that element; largest: the largest |gradient|."""

    worst: float
    step: float
    largest: float


def repaired(*, T: int = 128, seed: int = 3) -> Repaired:
    """Measure the error of the initial state's gradient from bfloat16 operands and float32 sums, the one difference
    reported after pull request #37 repaired the kernels. Sizes are the report's, the scale is 1.

    T: more tokens change nothing, since their gradients decay on the way to the start. seed: the largest gradient is
        near 4, where the bfloat16 step changes from 2^-6 to 2^-5; the seed decides which of them is measured.
    """
    x = {**inputs(T=T, seed=seed), "scale": 1.0}
    do = _arriving(x, seed)
    r, w, arriving = (split_chunks(y, 64, torch.float32) for y in (x["r"], x["w"], do))
    read = (r * sum_before(w).exp()).bfloat16().float()
    _, kernel = carry_states(w.sum(-2).exp(), read.mT @ arriving, None, reverse=True)
    x["initial_state"] = torch.zeros_like(kernel)
    right = recurrence("rwkv6", x, arriving=(do, None))["dinitial_state"]
    difference = (kernel.bfloat16().double() - right.bfloat16().double()).abs()
    at = difference.argmax()
    there = max(y.flatten()[at].abs().item() for y in (kernel, right))
    return Repaired(difference.max().item(), step_at(there), right.abs().max().item())


RECORDING = "h200_published_forms"
"""data/<this>.json: the results of `side_by_side` on a GPU, for the published kernels and for flakit's."""


def side_by_side(op: str | Operator, inputs: Mapping[str, Tensor], *, seed: int = 0) -> list[dict]:
    """Compare the two forms of an implementation of RWKV6: a row for each tensor of `REPORTED`.

    Keys as_reported_*: the chunk form with scale 1, the recurrent one with K^-0.5, as in the report. one_scale_*: both
    with K^-0.5. For each, the largest absolute difference, and chunk as a multiple of recurrent (`ratio`).
    chunk_error, recurrent_error: relative L2 error with K^-0.5 against float64 from the same inputs.
    """
    default = default_scale(inputs)
    mixed, chunk, recurrent = (
        run(inputs, form=form, scale=scale, seed=seed, op=op)
        for form, scale in (("chunk", 1.0), ("chunk", default), ("recurrent", default))
    )
    exact = truth("rwkv6", {**inputs, "scale": default}, arriving=(_arriving(inputs, seed), None))
    results = (("chunk", chunk), ("recurrent", recurrent))
    rows = []
    for name, reported in REPORTED.items():
        row = {"tensor": name, "reported": reported}
        for label, got in (("as_reported", mixed[name]), ("one_scale", chunk[name])):
            fit = ratio(got, recurrent[name])
            row[f"{label}_worst"] = (got.double() - recurrent[name].double()).abs().max().item()
            row |= {f"{label}_factor": fit.factor, f"{label}_unexplained": fit.unexplained}
        row |= {f"{form}_error": relative_l2(tensors[name], exact[name]) for form, tensors in results}
        rows.append(row)
    return rows


def published(device: str = "cuda") -> tuple[str, list[Mapping]]:
    """Compare flash-linear-attention's two forms and flakit's kernels on the report's inputs. Return (label, rows).

    Rows are those of `side_by_side` with the implementation's name as `who`: measured if flash-linear-attention and a
    GPU are present, otherwise recorded, or none without a recording. The label names the source.
    """
    here = published_rwkv6()
    if here is None:
        try:
            recording = recorded.read(RECORDING, needs=("who", "tensor"))
        except FileNotFoundError:
            return f"no recording data/{RECORDING}.json; on a GPU, `python data/record_published_forms.py` makes it", []
        return f"{recording.label}, flash-linear-attention {recording.meta['fla']}", list(recording.rows)
    version, theirs = here
    x = inputs(device=device)
    competitors = {"flash-linear-attention": theirs, "flakit": operator("rwkv6")}
    rows = [{"who": who, **row} for who, op in competitors.items() for row in side_by_side(op, x)]
    return f"measured here, flash-linear-attention {version}", rows


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the tensors of `REPORTED` from both forms, and for each tensor its fit."""

    chunk: Mapping[str, Tensor]
    recurrent: Mapping[str, Tensor]
    fits: Mapping[str, Ratio]
    law: float
    """The predicted factor between the two forms."""
    rest: float
    """The largest `unexplained` that rounding alone gives."""


def show(
    *,
    scale: bool = True,
    aliasing: bool = False,
    precision: bool = False,
    T: Annotated[int, Range(16, 512, 16)] = 128,
    K: Annotated[int, Range(4, 128, 4)] = 64,
    V: Annotated[int, Range(4, 128, 4)] = 64,
    seed: int = 0,
) -> Shown:
    """Fit each tensor of the chunk form as a multiple of the recurrent form's, with the causes of `switches` turned on.
    Return rows on factors and residuals, beside the prediction of `law` (for the scale alone), and the tensors."""
    x, rest, rows = inputs(B=1, T=T, H=2, K=K, V=V, seed=seed), 2 * rounding_error(torch.bfloat16), []
    chunk, recurrent = _forms(x, scale, aliasing, precision, seed)
    fits, predicted = {name: ratio(chunk[name], recurrent[name]) for name in REPORTED}, law(x, scale=scale)
    for name, fit in fits.items():
        spoiled = (aliasing and name != "du") or (precision and name == "dw")
        factor = math.nan if aliasing and spoiled else predicted
        rows.append(Row(f"{name}: factor", math.nan, factor, fit.factor, 0.05 if spoiled else 2e-3))
        rows.append(Row(f"{name}: one factor explains it", math.nan, not spoiled, fit.unexplained < rest))
    return Shown(rows, chunk, recurrent, fits, predicted, rest)


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured rows: the six reported differences, which the scale alone causes; the
    `Ratio` with each cause of `switches`; and the difference of `repaired`."""
    x = inputs()
    one, default = (run(x, scale=scale) for scale in (1.0, None))
    share = 1 - 1 / law(x, scale=True)
    rows = []
    for name, reported in REPORTED.items():
        worst = (one[name].double() - default[name].double()).abs().max().item()
        rows.append(Row(f"worst difference of {name}", reported, share * one[name].abs().max().item(), worst, 0.01))
    small = inputs(B=1, T=256, H=2)
    for words, on in (("scale", {"scale": True}), ("no cause", {})):
        fits = switches(small, **on).values()
        worst = max(fits, key=lambda fit: abs(math.log(fit.factor / law(small, **on))))
        rows.append(Row(f"{words}: chunk / recurrent, the worst tensor", math.nan, law(small, **on), worst.factor))
        rest = max(fit.unexplained for fit in fits)
        rows.append(Row(f"{words}: unexplained, the worst tensor", math.nan, math.nan, rest))
    for words, on, name in (("aliasing", {"aliasing": True}, "o"), ("precision", {"precision": True}, "dw")):
        rest = switches(small, **on)[name].unexplained
        rows.append(Row(f"{words}: unexplained in {name}", math.nan, math.nan, rest))
    result = repaired()
    rows.append(Row("repaired: worst difference of the state's gradient", REPAIRED, result.step, result.worst))
    return rows
