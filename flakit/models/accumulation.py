"""Gradient accumulation: one optimizer step from several micro-batches, and checks for any training loop.

To save memory, the sequences of one step pass through the model in `accumulation` micro-batches, whose gradients are
summed. The invariant: the same data give the same loss and the same gradient for any accumulation.

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
from .layers import whole

Gradients = Iterable[Tensor | None] | float
"""The gradient of every parameter in a fixed order, None for a parameter without one; or only their norm, a number."""
StepFunction = Callable[[int], tuple[float | Tensor, Gradients]]
"""step(accumulation) -> the loss that the loop reports and the gradients that the optimizer gets."""


def micro_batches(tokens: Tensor, targets: Tensor, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """Split tokens and targets [size, T] into `accumulation` micro-batches of equal size, pairs of both. Raise
    ValueError unless `accumulation` divides `size`."""
    if not isinstance(accumulation, int) or accumulation < 1 or len(tokens) % accumulation:
        raise ValueError(f"accumulation: expected a divisor of the {len(tokens)} sequences, got {accumulation!r}")
    return list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True))


class Alone:
    """A single process, for code that also runs over ranks: `distributed.Ranks` has the same interface for several
    processes, each with its own rows of a step. size: the number of ranks."""

    size = 1

    def total(self, x: Tensor) -> Tensor:
        """Return x summed over all ranks; here x itself."""
        return x

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """Return the loss, summed over ranks, and the norm of the full gradient: the same numbers on every rank."""
        return loss.item(), norm.item()

    def sends(self, model: nn.Module, now: bool) -> AbstractContextManager:
        """Return a context for the passes of one micro-batch. now: whether its backward reduces gradients over ranks,
        as that of the last micro-batch does."""
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
    """Add the gradients of one step's mean loss to the parameters and return that loss, a detached scalar in nats.

    model: tokens [B, T] to logits [B, T, vocab]. targets: [size, T], `IGNORED` at positions without a target. The loss
    of each micro-batch is divided by the number of targets in the *whole* step, since micro-batches may hold different
    numbers of them. autocast: the dtype of matrix products and operators. ranks: with several, tokens and targets are
    this rank's rows, the step spans all ranks, and the returned loss is this rank's share.

    Raises ValueError for an accumulation that does not divide the sequences, and for a step without targets."""
    parts = micro_batches(tokens, targets, accumulation)
    n_targets = ranks.total((targets != IGNORED).sum())
    if not n_targets:
        raise ValueError(f"targets: expected at least one that is not {IGNORED}, which asks nothing, got none")
    total = torch.zeros((), device=targets.device)
    for n, (x, y) in enumerate(parts, 1):
        with ranks.sends(model, n == accumulation):
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                logits = model(x)
            logits = logits.flatten(0, 1).float()
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum") / n_targets
            (loss * ranks.size).backward()  # the reduction over ranks takes the mean
        total += loss.detach()
    return total


class Accumulated(NamedTuple):
    """The loss and gradient of one accumulation, compared with a reference.

    loss_factor, grad_factor: ratios to the reference. rest: norm of the gradient's residual after projection onto the
    reference, relative to the reference's norm; NaN if only norms are known."""

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
    """Measure the loss and gradient of one step for each accumulation, as factors of the reference.

    reference: the correct result of `step`, from a loop you trust; default: step(accumulations[0]). Raises ValueError
    for too few accumulations, and for gradients that are zero or do not match the reference's."""
    if len(accumulations) < 1 + (reference is None):
        raise ValueError(f"accumulations: expected at least two, or one and a reference, got {list(accumulations)}")
    baseline = None if reference is None else _result(reference, "reference")
    rows = []
    for accumulation in accumulations:
        loss, gradient, norm = _result(step(accumulation), f"step({accumulation})")
        if baseline is None:
            baseline = loss, gradient, norm
        loss_1, gradient_1, norm_1 = baseline
        if (gradient is None) != (gradient_1 is None) or (gradient is not None and gradient.shape != gradient_1.shape):
            raise ValueError(f"step({accumulation}): expected gradients like the reference's, got others")
        factor, rest = norm / norm_1, math.nan
        if gradient is not None:
            factor = (gradient @ gradient_1 / norm_1**2).item()
            rest = (gradient - factor * gradient_1).norm().item() / norm_1
        rows.append(Accumulated(accumulation, loss, norm, loss / loss_1, factor, rest))
    return rows


def _result(result: tuple[float | Tensor, Gradients], name: str) -> tuple[float, Tensor | None, float]:
    """Return the loss, all gradients as one float64 vector (None if only their norm is known), and their norm. Raise
    ValueError, with `name`, for anything but a pair, and for no or zero gradients."""
    try:
        loss, gradients = result
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a pair (loss, gradients), got {type(result).__name__}") from None
    if isinstance(gradients, (int, float)) or (isinstance(gradients, Tensor) and gradients.ndim == 0):
        vector, norm = None, float(gradients)
    else:
        # Copy at once: a loop may reuse the same gradient tensors for every step.
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
    """Check that accumulation changes neither the loss nor the gradient, and return the measurements.

    step, accumulations, reference: as in `measure_accumulation`. step must start from the same weights and the same
    data each time, without dropout. tolerance: relative; rounding alone is about 1e-6 in float32. Raises AssertionError
    with the factor by which loss or gradient differ and its likely cause."""
    rows = measure_accumulation(step, accumulations, reference=reference)
    failures = [(row, fault) for row in rows if (fault := _fault(row, tolerance))]
    if failures:
        of = f"accumulation {accumulations[0]}" if reference is None else "the reference"
        lines = [f"  accumulation {row.accumulation}: {fault}" for row, fault in failures]
        raise AssertionError("\n".join([f"same data, but not the same loss and gradient as {of}:", *lines]))
    return rows


def _fault(row: Accumulated, tolerance: float) -> str:
    """Return what is wrong with a measurement and the likely cause; "" if it agrees with the reference."""

    def near(x: float, y: float) -> bool:
        return abs(x / y - 1) <= tolerance

    n, loss, grad = row.accumulation, row.loss_factor, row.grad_factor
    if not (math.isfinite(loss) and math.isfinite(grad)):
        return f"loss {row.loss:.4g}, gradient norm {row.grad_norm:.4g}"
    faults = [f"{name} {x:.4g} times" for name, x in (("loss", loss), ("gradient", grad)) if not near(x, 1)]
    why = []
    if near(grad, n) and n > 1:
        why.append("nobody divides by the accumulation steps")
    elif near(grad, 1 / n) and n > 1:
        why.append("two divide by the accumulation steps")
    elif near(grad, 1) and near(loss, n) and n > 1:
        why.append("only what is reported is not divided")
    if row.rest > tolerance:
        faults.append(f"gradient {row.rest:.2g} off any multiple")
        why.append("parts of different sizes weighed alike, other data, or dropout")
    return ", ".join(faults) + (f" ({'; '.join(why)})" if why else "") if faults else ""


def check_initial_loss(loss: float | Tensor, vocab: int, *, tolerance: float = 0.1) -> float:
    """Check that an untrained model's loss is about ln(vocab), and return loss / ln(vocab).

    loss: the mean over the targets, in nats, as the loop reports it at its first step. tolerance: relative. Raises
    AssertionError with the expected loss, and with the factor if it is close to a whole number."""
    factor = float(loss) / math.log(whole("vocab", vocab, 2))
    if abs(factor - 1) <= tolerance:
        return factor
    message = f"initial loss {float(loss):.4g}: expected about ln({vocab}) = {math.log(vocab):.4g}"
    if math.isfinite(factor) and factor > 1.5 and abs(factor / round(factor) - 1) <= tolerance:
        message += f", got {round(factor)} times that: a sum, not a mean?"
    elif factor < 1:
        message += ": does the model see its targets, or is the loss divided twice?"
    raise AssertionError(message)
