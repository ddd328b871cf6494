"""Training: seeded, with a progress bar, the loss curve as data, and every step accounted for that was not finite.

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
"""batch(size, T, generator) -> tokens and targets, each [size, T]: what tasks and corpora offer."""


@dataclass
class Run:
    """What a training was. losses, grad_norms: one a step, the norm before clipping; NaN and inf stay what they are."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def skipped(self) -> list[int]:
        """The steps whose loss or gradient was not finite: counted, and not taken."""
        both = zip(self.losses, self.grad_norms, strict=True)
        return [n for n, (a, b) in enumerate(both) if not (math.isfinite(a) and math.isfinite(b))]


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
    """Train a model in place with AdamW and return what happened.

    T: tokens a sequence, or a function from the step to it. lr: reached after a share `warmup` of the steps, then
    falling to zero along a cosine, or held without `cosine`. clip: largest gradient norm, None for none.
    autocast: the dtype of matrix products and operators, such as torch.bfloat16; parameters, their gradients and the
    loss stay float32. seconds: stop after the step that passes them, whatever `steps` says. seed: of the data.
    A step that is not finite leaves the model and the optimizer as they were; `Run.skipped` names it. A step
    whose decays are NaN, which operators refuse on a CPU, is such a step: its loss and norm count as NaN. Under
    `flakit.checked()` that error ends the training. The model is in training mode afterwards.
    skip: False takes such a step like any other, as a loop without a guard does: the weights are NaN from then on.
    optimizer: one of `adamw` to go on with, `weight_decay` being its own; default a new one.
    """
    whole("steps", steps, 0)
    device = next(model.parameters()).device
    optimizer = adamw(model, weight_decay=weight_decay) if optimizer is None else optimizer
    generator, run, start = Generator().manual_seed(seed), Run(), time.perf_counter()
    model.train()
    with bar(label, steps, shown=progress) as tell:
        for step in range(steps):
            tokens, targets = batch(size, T(step) if callable(T) else T, generator)
            rate = lr * share_of_lr(step, steps, warmup, cosine)
            how = {"lr": rate, "clip": clip, "autocast": autocast, "skip": skip}
            loss, norm = take(model, tokens.to(device), targets.to(device), optimizer, **how)
            run.losses.append(loss)
            run.grad_norms.append(norm)
            tell(f"loss {loss:.3f}")
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
    """One step: its loss, and the norm of its gradient before clipping. Over several ranks both are the whole step's.

    What is not finite is not taken, with `skip`; the gradients stay on the parameters. The rest as `accumulate` has it.
    """
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
    """The optimizer of `train`, which sets its learning rate at every step. weight_decay: of the matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # The usual 1e-8 is 0 in float16, where a gradient of 0 would make 0 / 0.
    eps = max(1e-8, *(torch.finfo(p.dtype).tiny for p in model.parameters()))
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=eps)


def share_of_lr(step: int, steps: int, warmup: float, cosine: bool) -> float:
    """The learning rate of a step, as a share of the largest."""
    rising = (step + 1) / max(1.0, warmup * steps)
    return min(rising, 0.5 * (1 + math.cos(math.pi * step / steps)) if cosine else 1.0)


@contextmanager
def bar(label: str, steps: int, *, done: int = 0, shown: bool = True, **how) -> Iterator[Callable[[str], None]]:
    """A progress bar, from step `done` on: each call of what it gives is a step, and says something of it.

    how: as rich's Progress takes it.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[said]}"), disable=not shown, **how) as made:
        task = made.add_task(label, total=steps, completed=done, said="")

        def tell(said: str) -> None:
            made.update(task, advance=1, said=said)

        yield tell
        made.refresh()  # a notebook's bar would stop at the last tenth of a second


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode; then each module is again in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def accuracy(model: nn.Module, batch: Batch, T: int, *, size: int = 64, seed: int = 1) -> Tensor:
    """Share of right answers at each position, [T]; NaN where nothing is asked."""
    tokens, targets = batch(size, T, Generator().manual_seed(seed))
    device = next(model.parameters()).device
    with evaluating(model):
        right = (model(tokens.to(device)).argmax(-1).cpu() == targets).double()
    asked = (targets != IGNORED).double()
    return (right * asked).sum(0) / asked.sum(0)


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
    """The loss on data that is not trained on, in nats: the mean over `batches` of `size` sequences each.

    batch: that data's, such as `Corpus.split()[1].batch`. autocast: as in `train`.
    """
    whole("batches", batches)
    generator, device = Generator().manual_seed(seed), next(model.parameters()).device
    found = []
    with evaluating(model):
        for _ in range(batches):
            tokens, targets = batch(size, T, generator)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                logits = model(tokens.to(device))
            found.append(loss(logits, targets.to(device)).item())
    return sum(found) / batches
