"""Gradient accumulation: one optimizer step from several micro-batches, and checks that anyone can run on their loop.

Memory is short, so the sequences of one step go through the model in `accumulation` parts and their gradients add up.
Nothing else may change: same data, any accumulation, same loss, same gradient.

    def step(accumulation):  # from the same weights and the same data every time
        model.zero_grad()
        loss = my_loop(model, data, accumulation)
        return loss, [p.grad for p in model.parameters()]

    check_gradient_accumulation(step)
    check_initial_loss(step(4)[0], vocab=65536)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language_model import IGNORED

Gradients = Iterable[Tensor | None] | float
"""The gradient of every parameter in a fixed order, None where there is none; or their norm alone, as a number."""
StepFunction = Callable[[int], tuple[float | Tensor, Gradients]]
"""step(accumulation) -> the loss that the loop reports and the gradients that the optimizer gets."""


def micro_batches(tokens: Tensor, targets: Tensor, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """tokens and targets [size, T] in `accumulation` parts of equal size."""
    if not isinstance(accumulation, int) or accumulation < 1 or len(tokens) % accumulation:
        raise ValueError(f"accumulation: expected a divisor of the {len(tokens)} sequences, got {accumulation!r}")
    return list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True))


class Alone:
    """One process. `distributed.Ranks` answers the same of several, each of which has its rows of a step."""

    size = 1

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        return x

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """Of each rank's part of the loss the sum, and the norm of the whole gradient: the same numbers everywhere."""
        return loss.item(), norm.item()

    def sends(self, model: nn.Module, now: bool) -> AbstractContextManager:
        """Around a part's passes. now: whether gradients meet after them, as they do after the last part."""
        return nullcontext()


ALONE = Alone()


def accumulate(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    accumulation: int = 1,
    *,
    autocast: torch.dtype | None = None,
    ranks: Alone = ALONE,
) -> Tensor:
    """The plain loop: adds the gradients of one step's mean loss to the parameters and returns that loss.

    model: tokens [B, T] to logits [B, T, vocab]; targets [size, T], `IGNORED` where nothing is asked. Every part is
    divided by the number of targets in the *whole* step: parts may hold different numbers of them.
    autocast: the dtype of matrix products and operators. ranks: over several, tokens and targets are this rank's rows,
    the whole step is that of all ranks, and what is returned is this rank's share of its loss.
    """
    parts = micro_batches(tokens, targets, accumulation)
    asked = ranks.total((targets != IGNORED).sum())
    if not asked:
        raise ValueError(f"targets: expected at least one that is not {IGNORED}, which asks nothing, got none")
    whole = torch.zeros((), device=targets.device)
    for n, (x, y) in enumerate(parts, 1):
        with ranks.sends(model, n == accumulation):
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                logits = model(x)
            logits = logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum") / asked
            (loss * ranks.size).backward()  # gradients meet in their mean
        whole += loss.detach()
    return whole


class Accumulated(NamedTuple):
    """One accumulation against the reference. rest: what is left of the gradient, relative to the reference's norm,
    after the best multiple of the reference is taken away; NaN where only norms are known."""

    accumulation: int
    loss: float
    grad_norm: float
    loss_factor: float
    grad_factor: float
    rest: float


def measure_accumulation(
    step: StepFunction,
    accumulations: Sequence[int] = (1, 2, 4, 8),
    *,
    reference: tuple[float | Tensor, Gradients] | None = None,
) -> list[Accumulated]:
    """Loss and gradient of one step for every accumulation, and by which factors they differ from the reference.

    reference: what `step` would return if it were right, from a loop you trust; default: step(accumulations[0]).
    """
    if len(accumulations) < 1 + (reference is None):
        raise ValueError(f"accumulations: expected at least two, or one and a reference, got {list(accumulations)}")
    known = None if reference is None else _result(reference, "reference")
    rows = []
    for accumulation in accumulations:
        loss, gradient, norm = _result(step(accumulation), f"step({accumulation})")
        if known is None:
            known = loss, gradient, norm
        loss_1, gradient_1, norm_1 = known
        if (gradient is None) != (gradient_1 is None) or (gradient is not None and gradient.shape != gradient_1.shape):
            raise ValueError(f"step({accumulation}): expected gradients like the reference's, got others")
        factor, rest = norm / norm_1, math.nan
        if gradient is not None:
            factor = (gradient @ gradient_1 / norm_1**2).item()
            rest = (gradient - factor * gradient_1).norm().item() / norm_1
        rows.append(Accumulated(accumulation, loss, norm, loss / loss_1, factor, rest))
    return rows


def _result(result: tuple[float | Tensor, Gradients], name: str) -> tuple[float, Tensor | None, float]:
    """The loss, all gradients in one float64 vector, and their norm."""
    try:
        loss, gradients = result
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a pair (loss, gradients), got {type(result).__name__}") from None
    if isinstance(gradients, (int, float)) or (isinstance(gradients, Tensor) and gradients.ndim == 0):
        vector, norm = None, float(gradients)
    else:
        # Copied at once: a loop may give the same tensors, filled anew, every time.
        parts = [g.detach().double().flatten().cpu() for g in gradients if g is not None]
        if not parts:
            raise ValueError(f"{name}: expected the gradient of at least one parameter, got none")
        vector = torch.cat(parts)
        norm = vector.norm().item()
    if not norm:
        raise ValueError(f"{name}: expected gradients, got zeros alone")
    return float(loss), vector, norm


def check_gradient_accumulation(
    step: StepFunction,
    accumulations: Sequence[int] = (1, 2, 4, 8),
    *,
    reference: tuple[float | Tensor, Gradients] | None = None,
    tolerance: float = 1e-3,
) -> list[Accumulated]:
    """The invariant "same data, any accumulation, same loss and gradient": returns what was measured if it holds.

    step, accumulations, reference: as `measure_accumulation` takes them. step must start from the same weights and the
    same data each time, without dropout. tolerance: relative; rounding alone is about 1e-6 in float32.
    Raises AssertionError naming the factor that was found, and what makes such a factor.
    """
    rows = measure_accumulation(step, accumulations, reference=reference)
    wrong = [(row, told) for row in rows if (told := _told(row, tolerance))]
    if wrong:
        of = f"accumulation {accumulations[0]}" if reference is None else "the reference"
        lines = [f"  accumulation {row.accumulation}: {told}" for row, told in wrong]
        raise AssertionError("\n".join([f"same data, but not the same loss and gradient as {of}:", *lines]))
    return rows


def _told(row: Accumulated, tolerance: float) -> str:
    """What is wrong with a row, in words; empty if nothing is."""

    def near(x: float, y: float) -> bool:
        return abs(x / y - 1) <= tolerance

    n, loss, grad = row.accumulation, row.loss_factor, row.grad_factor
    if not (math.isfinite(loss) and math.isfinite(grad)):
        return f"loss {row.loss:.4g}, gradient norm {row.grad_norm:.4g}"
    told = [f"{name} {x:.4g} times" for name, x in (("loss", loss), ("gradient", grad)) if not near(x, 1)]
    why = []
    if near(grad, n) and n > 1:
        why.append("nobody divides by the accumulation steps")
    elif near(grad, 1 / n) and n > 1:
        why.append("two divide by the accumulation steps")
    elif near(grad, 1) and near(loss, n) and n > 1:
        why.append("only what is reported is not divided")
    if row.rest > tolerance:
        told.append(f"gradient {row.rest:.2g} off any multiple")
        why.append("parts of different sizes weighed alike, other data, or dropout")
    return ", ".join(told) + (f" ({'; '.join(why)})" if why else "") if told else ""


def check_initial_loss(loss: float | Tensor, vocab: int, *, tolerance: float = 0.1) -> float:
    """An untrained model knows nothing, so its loss is about ln(vocab): returns loss / ln(vocab) if that is so.

    loss: the mean over the targets, in nats, as the loop reports it at its first step. tolerance: relative.
    Raises AssertionError saying how far off it is, and by which factor if that is near a whole number.
    """
    if not isinstance(vocab, int) or vocab < 2:
        raise ValueError(f"vocab: expected a whole number of at least 2, got {vocab!r}")
    factor = float(loss) / math.log(vocab)
    if abs(factor - 1) <= tolerance:
        return factor
    said = f"initial loss {float(loss):.4g}: expected about ln({vocab}) = {math.log(vocab):.4g}"
    if math.isfinite(factor) and factor > 1.5 and abs(factor / round(factor) - 1) <= tolerance:
        said += f", got {round(factor)} times that: a sum, not a mean?"
    elif factor < 1:
        said += ": does the model see its targets, or is the loss divided twice?"
    raise AssertionError(said)
