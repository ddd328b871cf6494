"""A model's decays while it runs: recorded by hooks, and watched while it trains.

    with recorded(model) as w:
        model(tokens)
    flakit.headroom(w)                                   # {"blocks.0.time": [B, T, H, K], …}

    watching = flakit.watch(model, every=100)            # before the training loop; watching.close() ends it

`flakit.headroom` is the measure that `flakit.watch` brings along; this module knows only what a hook sees.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .gsa import GSA
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

OWN = {RWKV6: ("rwkv6", 3), RWKV7: ("rwkv7", 1), GSA: ("gsa", 4)}
"""The mixers here whose operator takes decays: its name, and which of its arguments they are."""

Decays = Callable[[str, nn.Module, Any], Tensor | None]
"""decays(name, module, output) -> the natural-log decays [B, T, H, K] that a module has just made, or None."""


class Recording(dict):
    """Decays by layer, detached; op: the operator they were for, None where nobody said."""

    op: str | None = None


@contextmanager
def recorded(model: nn.Module, decays: Decays | None = None) -> Iterator[Recording]:
    """Record the decays of every layer, of the last forward pass inside the block.

    decays: for models that are not of `flakit.models`: called after every module's forward with its name, itself and
        its output; what it returns is recorded under that name. Default: what mixers of this package hand their
        operator.

    >>> def decays(name, module, output):  # an RWKV6 whose w_proj makes x of w = -exp(x), heads of 64
    ...     return -output.float().exp().unflatten(-1, (-1, 64)) if name.endswith("w_proj") else None
    """
    recording = Recording()
    handles = _hooks(model, decays, recording, lambda: True)
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _hooks(model: nn.Module, decays: Decays | None, recording: Recording, now: Callable[[], bool]) -> list:
    """Hooks that fill the recording at the forward passes for which `now()` is true."""
    if decays is not None:
        if not callable(decays):
            raise TypeError(f"decays: expected a function of name, module and output, got {type(decays).__name__}")

        def look(name: str) -> Callable:
            def hook(module: nn.Module, _, output: Any) -> None:
                if now():
                    w = decays(name, module, output)
                    if w is not None:
                        recording[name] = w.detach().clone()

            return hook

        return [module.register_forward_hook(look(name)) for name, module in model.named_modules()]

    handles = []
    for name, module in model.named_modules():
        if type(module) in OWN:
            recording.op, at = OWN[type(module)]
            handles += _around(name, module, at, recording, now)
    if not handles:
        raise ValueError(
            f"decays: expected a function, since {type(model).__name__} has no layer of flakit.models with decays "
            f"({', '.join(own.__name__ for own in OWN)}); decays(name, module, output) -> [B, T, H, K] or None"
        )
    return handles


def _around(name: str, module: nn.Module, at: int, recording: Recording, now: Callable[[], bool]) -> list:
    """The module's operator is another one for the length of a forward pass, whatever it is then."""
    originals = []

    def before(*_) -> None:
        if not now():
            return
        operator = module.operator
        originals.append(operator)

        def seen(*x: Tensor, **how):
            recording[name] = x[at].detach().clone()
            return operator(*x, **how)

        module.operator = seen

    def after(*_) -> None:
        if originals:
            module.operator = originals.pop()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


class HeadroomWarning(UserWarning):
    """Decays that drift towards the law of a kernel."""


class Forecast(NamedTuple):
    """One warning. used_up: the step at which the headroom is gone at the present pace; `step` itself if it is now."""

    step: int
    layer: str
    kernel: str
    dtype: torch.dtype
    exponent: float
    limit: float
    pace: float
    """Of the exponent, natural-log units a step."""
    used_up: float

    def __str__(self) -> str:
        where = f"step {self.step}, {self.layer}: with the kernel {self.kernel!r} the largest exponent"
        if self.exponent > self.limit:
            return f"{where} is {self.exponent:.4g}, above {self.limit:.2f}: its headroom is used up, it makes NaN"
        return (
            f"{where} is {self.exponent:.4g} of {self.limit:.2f} and grows by {self.pace:.2g} a step: "
            f"at this pace its headroom is used up at step {self.used_up:.0f}"
        )


class Watch:
    """What `flakit.watch` sees. headrooms: the measurements by step; warned: every `Forecast` so far.

    recording: the decays of the last measurement, by layer; `flakit.headroom(watching.recording)` has all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        measure: Callable,
        *,
        every: int,
        decays: Decays | None,
        ahead: int,
        over: int,
        tell: Callable[[Forecast], None] | None,
        dtype: torch.dtype,
        **how,
    ):
        for name, number, least in (("every", every, 1), ("ahead", ahead, 0), ("over", over, 2)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name}: expected a whole number of at least {least}, got {number!r}")
        self.every, self.ahead, self.over, self.dtype, self.tell = every, ahead, over, dtype, tell
        self.step, self.headrooms, self.warned = -1, {}, []
        self._measure, self._how, self._due = measure, how, {}
        self.recording, self._now = Recording(), False
        first = model.register_forward_pre_hook(self._begin, prepend=True)
        try:
            self._handles = [first, *_hooks(model, decays, self.recording, lambda: self._now)]
        except Exception:
            first.remove()
            raise
        self._handles.append(model.register_forward_hook(self._end))

    def _begin(self, model: nn.Module, _) -> None:
        self.step += model.training
        self._now = model.training and self.step % self.every == 0

    def _end(self, *_) -> None:
        if not self._now:
            return
        self._now = False
        if self.recording and not any(w.isnan().any() for w in self.recording.values()):  # lost weights have no decays
            self.headrooms[self.step] = self._measure(self.recording, **self._how)
            for layer in self.recording:
                for kernel in {m.kernel for m in self.headrooms[self.step].layers[layer]}:
                    self._judge(layer, kernel)

    def pace(self, layer: str, kernel: str) -> tuple[list[int], list[float]]:
        """The steps measured so far, and the largest exponent of a kernel at each."""
        found = {n: h.margin(kernel, self.dtype, layer) for n, h in self.headrooms.items() if layer in h.layers}
        return list(found), [m.exponent for m in found.values()]

    def _judge(self, layer: str, kernel: str) -> None:
        steps, exponents = self.pace(layer, kernel)
        margin = self.headrooms[self.step].margin(kernel, self.dtype, layer)
        due = self._due.get((layer, kernel), -1)  # an earlier forecast's step: until then nothing is said again
        if len(steps) < 2 or exponents[0] > margin.limit or self.step < due and not margin.breaks or due == math.inf:
            return  # what never had headroom does not lose it
        pace, used_up = _line(steps[-self.over :], exponents[-self.over :], margin.limit)
        used_up = self.step if margin.breaks else max(used_up, self.step + 1)
        if margin.breaks or len(steps) > 2 and used_up - self.step <= self.ahead:
            found = Forecast(self.step, layer, kernel, self.dtype, margin.exponent, margin.limit, pace, used_up)
            self._due[layer, kernel] = math.inf if margin.breaks else used_up
            self.warned.append(found)
            if self.tell is None:
                warnings.warn(HeadroomWarning(str(found)), stacklevel=2)
            else:
                self.tell(found)

    def close(self) -> None:
        """Take the hooks off the model; what was seen stays."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __str__(self) -> str:
        if not self.headrooms:
            return "No step was measured yet."
        step, found = next(reversed(self.headrooms.items()))
        lines = [f"Headroom at step {step}, the factor that all decays may grow by:"]
        for layer, margins in found.layers.items():
            lines += [f"  {layer}: {m.kernel}: {m.factor:.3g}" for m in margins if m.dtype == self.dtype]
        return "\n".join(lines)


def _line(steps: Sequence[int], exponents: Sequence[float], limit: float) -> tuple[float, float]:
    """Least squares: the slope, and where the line from the last point on reaches the limit; inf where it falls."""
    t, e = sum(steps) / len(steps), sum(exponents) / len(exponents)
    slope = sum((n - t) * (x - e) for n, x in zip(steps, exponents, strict=True)) / sum((n - t) ** 2 for n in steps)
    return slope, t + (limit - e) / slope if slope > 0 else math.inf


def watch(
    model: nn.Module,
    every: int = 100,
    *,
    measure: Callable,
    decays: Decays | None = None,
    ahead: int | None = None,
    over: int = 5,
    dtype: torch.dtype = torch.float32,
    tell: Callable[[Forecast], None] | None = None,
    **how,
) -> Watch:
    """Measure the headroom of every layer while a model trains, and warn long before it is used up.

    Every `every` steps, a step being a forward pass in training mode, the decays are recorded and the largest exponent
    of each kernel is held against its law. A line through the last measurements says when it will be used up at the
    present pace: a `HeadroomWarning` once that is within `ahead` steps, another when that step has passed and it still
    lies ahead, and a last one when it has happened. What breaks from the first measurement on is not warned of:
    `print(flakit.headroom(watching.recording))` says what that is.

    Args:
        model: of `flakit.models`, or any with `decays`.
        every: steps between two measurements.
        measure: `headroom` of `flakit.cases`, which `flakit.watch` gives.
        decays: as `recorded` takes it.
        ahead: how many steps before the end to warn, default 10 * every.
        over: how many measurements the line is drawn through.
        dtype: what the kernels' operands are stored in: torch.float32, bfloat16 or float16.
        tell: called with each `Forecast` in place of a Python warning.
        how: op, chunk, block and only (the kernels to watch), as `flakit.headroom` takes them.

    Returns:
        Watch: `headrooms` by step, `warned`, `recording`, `close()`; a context manager that closes.
    """
    ahead = 10 * every if ahead is None else ahead
    return Watch(model, measure, every=every, decays=decays, ahead=ahead, over=over, tell=tell, dtype=dtype, **how)
