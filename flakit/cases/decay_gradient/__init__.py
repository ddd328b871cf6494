"""The gradient of the decay as a difference of two running sums, and as a sum that does not cancel.

As reported: chunk and recurrent kernels give different dw because small differences are amplified along the sequence.
As measured: with equal scale and inputs, one formula is the cause. RWKV6's decay gradient needs no state in the form

    dw_t = sum_{s>t} r_s dr_s - sum_{s>=t} k_s dk_s            (the identity, bonus terms left out)

and kernels use it because dr and dk are already available. Most of the two sums cancels: the result is smaller by a
factor that grows like e^|w|, but the rounding errors of all rows after t remain. With dr and dk rounded to bfloat16 the
relative error of dw is 4.0e-2, 7.9e-2, 1.6e-1 at T = 256, 1024, 4096 (logsigmoid decay), as `law_for` predicts. In
float32 throughout it is 1e-5 there, but exceeds 1 from a constant decay of about -14, and from -5.5 if dr and dk come
from TF32 dots. The direct form, with D_t the gradient of the state S_t,

    dw_t = sum_v e^{w_t} S_{t-1} * D_t,

has the decay in every term, subtracts nothing, and its error stays at rounding level for every T and w.

At mild decay the identity remains usable. The error is the *difference* of two roundings: if both sums come from the
same rounded operands, each product that one sum adds the other subtracts, and the error grows neither with T nor with
|w| (`in_chunks`; flakit's kernels do this where a chunk decays little).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, evaluate, truth
from ...numerics.inputs import DECAYS
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.decay import sum_after, sum_before
from ...ops.rwkv6 import chunk_rwkv6
from ...ops.rwkv6.chunk_torch import carry_states, join_chunks, split_chunks
from ..knobs import Range
from ..laws import Measured, Row, gradient_variances, rounded, state_variances
from ..published import published_rwkv6

FORMULAS = {
    "direct": "a sum over everything that passes through the decay; nothing is subtracted",
    "identity": "running sums of r dr - k dk in float32",
    "identity-rounded": "running sums of r dr - k dk, dr and dk first rounded as a kernel stores them",
    "identity-same-operands": "the same inside each chunk, both sums from the same rounded operands; mild decays only",
}

ROUNDINGS = {"bfloat16": 8, "float16": 11, "tf32": 11, "float32": 24, "float64": 53}
"""Significand digits, including the leading 1, of the formats that dr and dk may be rounded to."""

PUBLISHED = {"chunk": {-8.0: 1.1, -20.0: 2e5, -50.0: 1.7e18}, "recurrent": {-8.0: 4e-3, -20.0: 550.0, -50.0: 6.6e15}}
"""Relative error of dw at a constant log decay in flash-linear-attention 0.6.0, float32 inputs, T = 256, measured
against float64 on an H200. Its chunk kernels multiply in TF32, its recurrent ones in float32."""


def round_to(x: Tensor, rounding: str) -> Tensor:
    """Round x to a format of `ROUNDINGS` (to nearest, ties to even) and back to its dtype; tf32 as a TF32 dot reads it.
    Raises ValueError for an unknown format."""
    one_of("rounding", rounding, ROUNDINGS)
    if rounding != "tf32":
        return x.to(getattr(torch, rounding)).to(x.dtype)
    return rounded(x, ROUNDINGS["tf32"])


def identity(r: Tensor, k: Tensor, dr: Tensor, dk: Tensor, at_end: Tensor | None = None) -> Tensor:
    """Return dw [B, T, H, K] as sum_{s>t} r dr - sum_{s>=t} k dk, in the dtype of dr.

    dr, dk: gradients without the bonus term, which passes through no decay.
    at_end: sum_v S_T * dS_T, [B, H, K]; required if the final state has a gradient.
    """
    read, written = (x.to(dr.dtype) * dx for x, dx in ((r, dr), (k, dk)))
    dw = (read - written).flip(1).cumsum(1).flip(1) - read
    return dw if at_end is None else dw + at_end[:, None]


def dw_by_formula(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, do: Tensor, *, rounding: str = "bfloat16", **options
) -> dict[str, Tensor]:
    """Return dw [B, T, H, K] by each of the first three `FORMULAS`, all from the same dr and dk.

    r, k, w: [B, T, H, K], w natural log <= 0; v, do: [B, T, H, V]. The bonus u does not contribute to dw. Arithmetic is
        float32 (float64 for float64 inputs). rounding: the format of `ROUNDINGS` for "identity-rounded". options:
        initial_state and dfinal_state, [B, H, K, V] each.
    """
    dr, dk, direct, at_end = _gradients(r, k, v, w, do, **options)
    return {
        "direct": direct,
        "identity": identity(r, k, dr, dk, at_end),
        "identity-rounded": identity(r, k, round_to(dr, rounding), round_to(dk, rounding), at_end),
    }


def _gradients(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, do: Tensor, *, initial_state=None, dfinal_state=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dr, dk, dw ("direct") and sum_v S_T * dS_T, without a bonus; shapes and options as in `dw_by_formula`."""
    dtype = torch.promote_types(r.dtype, torch.float32)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (r, k, v, w)]
    no_bonus = r.new_zeros(r.shape[2:], dtype=dtype)
    o, final_state = chunk_rwkv6(*leaves, no_bonus, initial_state=initial_state, output_final_state=True)
    dfinal_state = torch.zeros_like(final_state) if dfinal_state is None else dfinal_state.to(final_state.dtype)
    dr, dk, _, direct = torch.autograd.grad((o, final_state), leaves, (do.to(o.dtype), dfinal_state))
    return dr, dk, direct, (final_state.detach() * dfinal_state).sum(-1)


def in_chunks(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, do: Tensor, *, rounding: str, same: bool = True, chunk: int = 64
) -> Tensor:
    """Return dw [B, T, H, K] by the running sums of `identity` in each chunk, from rounded operands; shapes as in
    `dw_by_formula`.

    q* and k* are the reads and keys times their decay from and to the chunk's middle, rounded; dA is the gradient of
    the scores. A chunk's pairs contribute sum_{s>t} q_s (dA k*)_s - sum_{s>=t} k_s (dA^T q*)_s.
    same: use q* and k* for the factors q_s and k_s too, so that both sums contain the same products. False: use the
        unrounded ones, so that the sums differ by the rounding of every row.
    Contributions across chunks are summed directly. Finite while no chunk decays by more than about 170.
    """
    T, dtype = r.shape[1], torch.promote_types(r.dtype, torch.float32)
    r, k, v, w, do = (split_chunks(x, chunk, dtype) for x in (r, k, v, w, do))

    def rounded(x: Tensor) -> Tensor:
        return round_to(x, rounding)

    q, before, after, total = r * r.shape[-1] ** -0.5, sum_before(w).exp(), sum_after(w).exp(), w.sum(-2).exp()
    S, _ = carry_states(total, rounded(k * after).mT @ rounded(v), None)
    D, _ = carry_states(total, rounded(q * before).mT @ rounded(do), None, reverse=True)
    dq, dk = (rounded(do) @ rounded(S).mT) * before, (rounded(v) @ rounded(D).mT) * after
    dw = (total * (S * D).sum(-1))[..., None, :] + sum_after(q * dq) + sum_before(k * dk)

    middle = sum_before(w)[..., chunk // 2, None, :]
    read, key = q * (sum_before(w) - middle).exp(), k * (middle - w.cumsum(-2)).exp()
    dA = rounded((rounded(do) @ rounded(v).mT).tril(-1))
    reads, keys = dA @ rounded(key), dA.mT @ rounded(read)
    reads, keys = (rounded(read) * reads, rounded(key) * keys) if same else (read * reads, key * keys)
    return join_chunks(dw + sum_after(reads - keys) - keys, T)


def running_sums(inputs: Mapping[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """Return {"dw": …} as from a kernel that sums r dr - k dk, with dr and dk stored in the inputs' dtype; dw in w's
    dtype.

    inputs: r, k, v, w and optionally initial_state, as from `flakit.inputs`; do: the gradient of o, [B, T, H, V].
    """
    r, k, v, w = (inputs[name] for name in ("r", "k", "v", "w"))
    rounding = str(r.dtype).removeprefix("torch.")
    by_formula = dw_by_formula(r, k, v, w, do, initial_state=inputs.get("initial_state"), rounding=rounding)
    return {"dw": by_formula["identity-rounded"].to(w.dtype)}


def published(device: str = "cuda") -> tuple[str, dict[str, dict[float, float]]]:
    """Return (label, flash-linear-attention's relative errors of dw by form and constant log decay): measured if it is
    installed and there is a GPU, otherwise `PUBLISHED`. The label says which."""
    here = published_rwkv6()
    if here is None:
        return "recorded on an H200, flash-linear-attention 0.6.0", PUBLISHED
    version, theirs = here
    errors = {}
    for form, recorded in PUBLISHED.items():
        errors[form] = {}
        for w in recorded:
            x = make_inputs("rwkv6", T=256, H=2, K=64, decay=w, device=device) | {"scale": 64**-0.5}
            errors[form][w] = relative_l2(evaluate(theirs, x, form=form)["dw"], truth("rwkv6", x)["dw"])
    return f"measured here, flash-linear-attention {version}", errors


def law(w: float, T: int, rounding: str = "bfloat16") -> float:
    """Predict the relative L2 error of dw by `identity` with rounded dr and dk, for constant log decay w < 0 and random
    inputs.

    Every row of r dr and k dk has its format's rounding error, 2^-digits / sqrt(6) (root mean square, for values
    uniform over a binade). dw_t accumulates it from all rows after t, T on average over both sums, hence sqrt(T). The
    ratio of the size of r dr to that of dw is sqrt(e^{2|w|} - 1), from summing e^{2w} over pairs of tokens. The
    rounding of the running sums is neglected: it is small beside bfloat16's and tf32's, and about as large again in
    float32. Raises ValueError unless w < 0.
    """
    if not w < 0:
        raise ValueError(f"w: expected a natural-log decay < 0, got {w}")
    # In log space: e^{2|w|} alone may overflow.
    log_ratio = 0.5 * math.log(-math.expm1(2 * w)) - w
    amplification = torch.tensor(log_ratio, dtype=torch.float64).exp().item()  # inf where math.exp would raise
    return 2.0 ** -ROUNDINGS[rounding] * math.sqrt(T / 6) * amplification


def law_for(w: Tensor, rounding: str = "bfloat16") -> float:
    """Predict the same error as `law` for any log decays w [B, T, H, K], neglecting the transient of the first tokens.

    With c and d the variances of a row of S_{t-1} and of D_t (`laws.state_variances`, `gradient_variances`), r dr has
    variance c, k dk variance d, and dw_t variance e^{2w} c d, all times scale^2 V.
    """
    noise, true = _noise_and_size(w, rounding)
    return (noise.sum() / true.sum()).sqrt().item()


def _noise_and_size(w: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Predict the variances of "identity-rounded" dw's error and of dw, divided by scale^2 V, [B, T, H, K]."""
    c, d = state_variances(w), gradient_variances(w, 0.0, 1.0)
    later = (c + d).flip(1).cumsum(1).flip(1) - c
    return 4.0 ** -ROUNDINGS[rounding] / 6 * later, (2 * w.double()).exp() * c * d


def errors(
    *, T: int = 256, decay: str | float = "logsigmoid", rounding: str = "bfloat16", seed: int = 0
) -> dict[str, float]:
    """Return the relative L2 error of dw by each of `FORMULAS`, against float64 from the same rounded inputs.

    decay: a profile of `flakit.inputs`, or one natural-log decay. rounding: the storage format of inputs, dr, dk and
        dw; with tf32, which only dots read, dw is float32. "identity-same-operands": inf if 64 tokens decay too much.
    """
    *_, exact, by_formula = _run(T, decay, rounding, seed)
    return {name: relative_l2(dw, exact) for name, dw in by_formula.items()}


@functools.lru_cache(maxsize=1)
def _run(T: int, decay: str | float, rounding: str, seed: int) -> tuple:
    """Return r, k, w, rounded dr and dk, float64 dw, and dw by each of `FORMULAS` as stored, [B, T, H, K] each."""
    x = make_inputs("rwkv6", T=T, H=2, K=64, decay=decay, seed=seed)
    r, k, v, do = (round_to(y, rounding) for y in (x["r"], x["k"], x["v"], cotangents("rwkv6", x)[0]))
    w = x["w"]
    exact = dw_by_formula(*(x.double() for x in (r, k, v, w, do)))["direct"]
    dr, dk, direct, _ = _gradients(r, k, v, w, do)
    rounded = round_to(dr, rounding), round_to(dk, rounding)
    by_formula = {
        "direct": direct,
        "identity": identity(r, k, dr, dk),
        "identity-rounded": identity(r, k, *rounded),
        "identity-same-operands": in_chunks(r, k, v, w, do, rounding=rounding),
    }
    stored = "float32" if rounding == "tf32" else rounding
    return r, k, w, *rounded, exact, {name: round_to(dw, stored) for name, dw in by_formula.items()}


LAWS = {"direct": 1.08, "identity-rounded": 1.35}
"""The formulas with a law, and the factor up to which measurement and law differ for random inputs."""


def predictions(*, T: int, decay: str | float, rounding: str, seed: int) -> dict[str, float]:
    """Predict `errors` for the formulas of `LAWS`; {} for float32, whose running sums round as well, and float64."""
    if rounding in ("float32", "float64"):
        return {}
    w = make_inputs("rwkv6", T=T, H=2, K=64, decay=decay, seed=seed)["w"]
    exact = rounding == "tf32" or not w.exp().any()  # not rounded when stored, or zero
    stored = 0.0 if exact else 2.0 ** -ROUNDINGS[rounding] / math.sqrt(6)
    return {"direct": stored, "identity-rounded": math.hypot(stored, law_for(w, rounding))}


def _rows(recorded: Mapping[str, float], setting: dict) -> list[Row]:
    measured, law = errors(**setting), predictions(**setting)
    rounding, decay, T = (setting[name] for name in ("rounding", "decay", "T"))
    rows = []
    for name, error in measured.items():
        if not (name == "direct" and rounding == "tf32"):
            what = f"{rounding}, {decay}, T = {T}: {name}"
            rows.append(Row(what, recorded.get(name, math.nan), law.get(name, math.nan), error, LAWS.get(name, 1) - 1))
    return rows


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, terms of dw for one channel by token, [T], errors, and `predictions` (laws)."""

    rounding: str
    read: Tensor
    """The sum of r dr over all later tokens, dr rounded."""
    written: Tensor
    """The sum of k dk over this and all later tokens, dk rounded."""
    true: Tensor
    """dw in float64."""
    rounded: Tensor
    """dw as the difference of the two sums."""
    direct: Tensor
    """dw by the direct form, without subtraction."""
    noise: Tensor
    """The root-mean-square error of `rounded` by the law, [T]; NaN if there is no law."""
    errors: Mapping[str, float]
    """Relative L2 error of dw by each of `FORMULAS`."""
    laws: Mapping[str, float]


def show(
    *,
    decay: Annotated[str | float, DECAYS, Range(-80, 0)] = "logsigmoid",
    T: Annotated[int, Range(64, 2048, 64)] = 256,
    rounding: Annotated[str, ROUNDINGS] = "bfloat16",
    seed: int = 0,
) -> Shown:
    """Compute dw by each of `FORMULAS` at one decay (a profile of `flakit.inputs`, or a natural log < 0). Return each
    formula's error beside the prediction of `predictions`, and its terms. rounding: the storage format."""
    setting = {"T": T, "decay": decay, "rounding": rounding, "seed": seed}
    (r, k, w, dr, dk, exact, dw), laws = _run(T, decay, rounding, seed), predictions(**setting)
    first = (0, slice(None), 0, 0)
    read, written = (r * dr)[first], (k * dk)[first]
    later = [x.flip(0).cumsum(0).flip(0) for x in (read, written)]
    K = V = w.shape[-1]
    noise = (_noise_and_size(w, rounding)[0][first] * V / K).sqrt()
    return Shown(
        _rows({}, setting), rounding, read=later[0] - read, written=later[1], true=exact[first],
        rounded=dw["identity-rounded"][first], direct=dw["direct"][first],
        noise=noise if laws else torch.full_like(noise, math.nan), errors=errors(**setting), laws=laws,
    )  # fmt: skip


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured errors of dw by formula, format and length, and by constant decay."""
    rows, (_, theirs) = [], published()
    reported = {"bfloat16": {256: 3.5e-2, 1024: 7.7e-2, 4096: 1.6e-1}, "float16": {256: None, 1024: None}}
    for rounding, lengths in (reported | {"float32": reported["float16"]}).items():
        for T, error in lengths.items():
            recorded = {"identity-rounded": error, "direct": 1.7e-3} if error else {}
            setting = {"T": T, "decay": "logsigmoid", "rounding": rounding, "seed": 0}
            rows += [row for row in _rows(recorded, setting) if not row.what.endswith("same-operands")]
    for kernel, rounding, factor in (("recurrent", "float32", 4), ("chunk", "tf32", 1.35)):
        for w, error in theirs[kernel].items():
            measured = errors(decay=w, rounding=rounding)["identity-rounded"]
            what = f"float32, decay {w:g}, T = 256: dr, dk in {rounding}"
            rows.append(Row(what, error, law(w, 256, rounding), measured, factor - 1))
    return rows
