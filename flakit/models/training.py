"""A seeded training loop with a progress bar. It returns the loss curve and records every non-finite step.

run = train(model, Permutations(items=3).batch, steps=200, size=64, T=32)
run.losses, run.grad_norms, run.skipped
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Generator, Tensor, nn

from ..ops.common.validation import nan_decays_pass
from .accumulation import ALONE, Alone, accumulate
from .language_model import IGNORED, loss
from .layers import whole

Batch = Callable[..., tuple[Tensor, Tensor]]
"""batch(size, T, generator) -> tokens and targets, each [size, T] int64; a method of every task and corpus."""


@dataclass
class Run:
    """The record of a training. losses, grad_norms: one per step, the norm before clipping; NaN and inf included."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def skipped(self) -> list[int]:
        """The indices of the steps whose loss or gradient norm was not finite; `train` skips their update by
        default."""
        steps = zip(self.losses, self.grad_norms, strict=True)
        return [n for n, (a, b) in enumerate(steps) if not (math.isfinite(a) and math.isfinite(b))]


def train(
    model: nn.Module,
    batch: Batch,
    *,
    steps: int,
    size: int = 64,
    T: int | Callable[[int], int] = 32,
    lr: float = 3e-3,
    warmup: float = 0.1,
    cosine: bool = True,
    weight_decay: float = 0.01,
    clip: float | None = 1.0,
    autocast: torch.dtype | None = None,
    skip: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: bool = True,
    label: str = "training",
) -> Run:
    """Train a model in place with AdamW and return the losses and gradient norms.

    T: tokens per sequence, or a function of the step. lr: the peak, reached after a fraction `warmup` of the steps; it
    then falls to zero along a cosine, or stays constant without `cosine`. clip: largest gradient norm, None for no
    clipping. autocast: the dtype of matrix products and operators, such as torch.bfloat16; parameters, gradients and
    the loss stay float32. seconds: a time limit; training stops after the step that exceeds it. seed: of the data.
    optimizer: a result of `adamw` to continue with (`weight_decay` is then unused); default a new one.

    A non-finite step changes neither the model nor the optimizer, and `Run.skipped` lists it. A step whose decays are
    NaN, which operators refuse on a CPU, counts as one, with NaN as its loss and norm; under `flakit.checked()` that
    error ends the training. skip: False applies non-finite steps too, as a loop without a guard does: the weights are
    NaN from then on. The model is in training mode afterwards.
    """
    whole("steps", steps, 0)
    device = next(model.parameters()).device
    optimizer = adamw(model, weight_decay=weight_decay) if optimizer is None else optimizer
    generator, run, start = Generator().manual_seed(seed), Run(), time.perf_counter()
    model.train()
    with bar(label, steps, shown=progress) as advance:
        for step in range(steps):
            tokens, targets = batch(size, T(step) if callable(T) else T, generator)
            rate = lr * share_of_lr(step, steps, warmup, cosine)
            options = {"lr": rate, "clip": clip, "autocast": autocast, "skip": skip}
            loss, norm = take(model, tokens.to(device), targets.to(device), optimizer, **options)
            run.losses.append(loss)
            run.grad_norms.append(norm)
            advance(f"loss {loss:.3f}")
            if seconds is not None and time.perf_counter() - start > seconds:
                break
    run.seconds = time.perf_counter() - start
    return run


def take(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    clip: float | None = 1.0,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    skip: bool = True,
    ranks: Alone = ALONE,
) -> tuple[float, float]:
    """Take one optimizer step. Return its loss and its gradient norm before clipping, both over all ranks.

    skip: do not apply a step whose loss or norm is not finite; its gradients stay on the parameters. lr, clip: as in
    `train`. The other arguments are those of `accumulate`, which also lists what it raises."""
    optimizer.zero_grad(set_to_none=True)
    with nan_decays_pass():
        loss = accumulate(model, tokens, targets, accumulation, autocast=autocast, ranks=ranks)
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
    loss, norm = ranks.agreed(loss, norm)
    if not skip or (math.isfinite(loss) and math.isfinite(norm)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return loss, norm


def adamw(model: nn.Module, *, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """Return the optimizer of `train`, which sets the learning rate at every step. weight_decay: for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # The default 1e-8 rounds to 0 in float16, where a zero gradient would then give 0 / 0.
    eps = max(1e-8, *(torch.finfo(p.dtype).tiny for p in model.parameters()))
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=eps)


def share_of_lr(step: int, steps: int, warmup: float, cosine: bool) -> float:
    """Return the learning rate of a step as a fraction of the peak; warmup, cosine: as in `train`."""
    ramp = (step + 1) / max(1.0, warmup * steps)
    return min(ramp, 0.5 * (1 + math.cos(math.pi * step / steps)) if cosine else 1.0)


@contextmanager
def bar(label: str, steps: int, *, done: int = 0, shown: bool = True, **options) -> Iterator[Callable[[str], None]]:
    """Show a progress bar that starts at step `done`; yield a function that advances it by one step with a message.
    options: keyword arguments of rich's Progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[message]}"), disable=not shown, **options) as progress:
        task = progress.add_task(label, total=steps, completed=done, message="")

        def advance(message: str) -> None:
            progress.update(task, advance=1, message=message)

        yield advance
        progress.refresh()  # otherwise a notebook's bar misses the updates of the last tenth of a second


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable gradients and put the model in evaluation mode; restore each module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def accuracy(model: nn.Module, batch: Batch, T: int, *, size: int = 64, seed: int = 1) -> Tensor:
    """Return the fraction of correct predictions at each position, float64 [T]; NaN at positions without targets."""
    tokens, targets = batch(size, T, Generator().manual_seed(seed))
    device = next(model.parameters()).device
    with evaluating(model):
        correct = (model(tokens.to(device)).argmax(-1).cpu() == targets).double()
    counted = (targets != IGNORED).double()
    return (correct * counted).sum(0) / counted.sum(0)


def mean_loss(
    model: nn.Module,
    batch: Batch,
    T: int,
    *,
    size: int = 16,
    batches: int = 8,
    seed: int = 1,
    autocast: torch.dtype | None = None,
) -> float:
    """Return the mean loss on held-out data, in nats, over `batches` batches of `size` sequences of T tokens.

    batch: of the held-out data, such as `Corpus.split()[1].batch`. autocast: as in `train`."""
    whole("batches", batches)
    generator, device = Generator().manual_seed(seed), next(model.parameters()).device
    losses = []
    with evaluating(model):
        for _ in range(batches):
            tokens, targets = batch(size, T, generator)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                logits = model(tokens.to(device))
            losses.append(loss(logits, targets.to(device)).item())
    return sum(losses) / batches
