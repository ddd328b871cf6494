"""Record a model's decays through hooks, and watch their headroom while it trains.

    with recorded(model) as w:
        model(tokens)
    flakit.headroom(w)                                   # {"blocks.0.time": [B, T, H, K], …}

    watching = flakit.watch(model, every=100)            # before the training loop; watching.close() ends it

`flakit.watch` passes `flakit.headroom` as the measure; this module itself handles only hooks and warnings.
"""

import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .gsa import GSA
from .layers import whole
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

OWN = {RWKV6: ("rwkv6", 3), RWKV7: ("rwkv7", 1), GSA: ("gsa", 4)}
"""Mixers of this package whose operator takes decays: the operator's name, and the index of its decay argument."""

Decays = Callable[[str, nn.Module, Any], Tensor | None]
"""decays(name, module, output) -> natural-log decays [B, T, H, K] that the module just computed, or None."""


class WatchWarning(UserWarning):
    """Warns that a watch or recording saw no decays; the text says why."""


class HeadroomWarning(UserWarning):
    """Warns that decays approach the limit of a kernel, or are -inf, where a gate w = -exp(x) has no gradient."""


class Recording(dict):
    """Natural-log decays by layer name: detached copies [B, T, H, K]. op: the operator they belong to, None if
    unknown."""

    op: str | None = None


@contextmanager
def recorded(model: nn.Module, decays: Decays | None = None) -> Iterator[Recording]:
    """Yield a `Recording` that every layer's decays of the last forward pass inside the block fill.

    decays: for models other than those of `flakit.models`: called after every module's forward with its name, the
        module and its output; its result is recorded under that name. Default: the decays that mixers of this package
        pass to their operator.

    A block without any decay ends with a `WatchWarning` that names a likely reason. Raises TypeError if decays is no
    function; without it, ValueError for a model that has no layers of `flakit.models` with decays, or of two operators.

    >>> def decays(name, module, output):  # an RWKV6 whose w_proj makes x of w = -exp(x), heads of 64
    ...     return log_decay(output.float()).unflatten(-1, (-1, 64)) if name.endswith("w_proj") else None
    """
    recorder = _Recorder()
    recorder.attach(_uncompiled(model), decays)
    recorder.now = True
    try:
        yield recorder.recording
    finally:
        recorder.detach()
    if not recorder.recording:
        _warn(WatchWarning, f"nothing was recorded: no forward pass ran in the block, or {recorder.blind()}")


# --- hooks ------------------------------------------------------------------------------------------------------------

_RECORDERS: WeakValueDictionary[int, "_Recorder"] = WeakValueDictionary()
_KEYS = itertools.count()


class _Recorder:
    """Fills a recording through hooks while `now` is true and the module `during`, if not None, is in training mode.

    torch.compile guards on both conditions: a compiled model gets one program that records and one that does not, which
    costs nothing. A compiled program cannot call Python, so a custom operator records; it looks this object up by its
    key. The operator declares that it mutates `touched`: the compiler would drop one without effects."""

    def __init__(self, during: nn.Module | None = None, on_pass: Callable[[bool, bool], None] | None = None):
        self.recording, self.now, self.during, self.on_pass = Recording(), False, during, on_pass
        self.touched = torch.zeros((), device="cpu")
        self.key = next(_KEYS)
        _RECORDERS[self.key] = self
        self._handles, self._wrappers, self._decays = [], {}, None

    def attach(self, model: nn.Module, decays: Decays | None) -> None:
        modules = [(name.replace("_orig_mod.", ""), module) for name, module in model.named_modules()]
        if decays is not None:
            if not callable(decays):
                raise TypeError(f"decays: expected a function of name, module and output, got {type(decays).__name__}")
            self._decays = decays
            for name, module in modules:
                self._handles.append(module.register_forward_hook(_Hook(partial(self.ask, name))))
        else:
            mixers = [
                (name, module, next(map(OWN.get, filter(OWN.get, type(module).__mro__)), None))
                for name, module in modules
            ]
            mixers = [mixer for mixer in mixers if mixer[2] is not None]
            operators = {op for _, _, (op, _) in mixers}
            if not mixers:
                raise ValueError(
                    f"decays: expected a function, since {type(model).__name__} has no layer of flakit.models with "
                    f"decays ({', '.join(x.__name__ for x in OWN)}); "
                    f"decays(name, module, output) -> [B, T, H, K] or None"
                )
            if len(operators) > 1:
                raise ValueError(
                    f"model: expected layers of one operator, got {' and '.join(sorted(operators))}; "
                    f"give the part of the model that has one"
                )
            (self.recording.op,) = operators
            self._wrappers = {module: _Wrapper(self, name, arg, module.operator) for name, module, (_, arg) in mixers}
            self.wrap()
            self._handles.append(model.register_forward_pre_hook(_Hook(self.before), prepend=True))
        if self.on_pass is not None:
            self._handles.append(model.register_forward_hook(_Hook(self.after)))

    def wrap(self) -> None:
        """Wrap every mixer's operator, including one that was assigned after the last call."""
        for module, wrapper in self._wrappers.items():
            operator = module.operator
            while operator is not wrapper and isinstance(operator, _Wrapper):  # of another watch
                operator = operator.operator
            if operator is not wrapper:
                wrapper.operator = module.operator
                module.operator = wrapper

    def detach(self) -> None:
        self.now = False
        for handle in self._handles:
            handle.remove()
        for module, wrapper in self._wrappers.items():
            wrapper.detached = True  # another watch may have wrapped it
            while isinstance(module.operator, _Wrapper) and module.operator.detached:
                module.operator = module.operator.operator
        self._handles, self._wrappers = [], {}

    def active(self) -> bool:
        return self.now and (self.during is None or self.during.training)

    def blind(self) -> str:
        """Return why the recording may be empty although a forward pass ran."""
        return (
            "no layer called its operator"
            if self._decays is None
            else "decays(name, module, output) returned None for every module, or the model was compiled before: then "
            "call torch.compiler.reset() after this watch is on the model"
        )

    def see(self, name: str, w: Tensor) -> None:
        see = torch.ops.flakit.see_decays if torch.compiler.is_compiling() else _see
        see(self.touched, self.key, name, w.detach())

    # --- called by hooks

    def before(self, *_) -> None:
        """Wrap the operators before the watched model's forward pass, unless it is being compiled."""
        if not torch.compiler.is_compiling():
            self.wrap()

    def after(self, module: nn.Module, *_) -> None:
        """Report the watched model's forward pass to `on_pass` after it has run."""
        see = torch.ops.flakit.see_pass if torch.compiler.is_compiling() else _see_pass
        see(self.touched, self.key, module.training, torch.is_grad_enabled())

    def ask(self, name: str, module: nn.Module, _, output: Any) -> None:
        """Record what the user's function returns for a module, after its forward pass. Raise TypeError unless it is a
        tensor or None."""
        if self.active():
            w = self._decays(name, module, output)
            if w is not None:
                if not isinstance(w, Tensor):
                    raise TypeError(f"decays: expected a tensor or None for {name!r}, got {type(w).__name__}")
                self.see(name, w)


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps, or the model itself: calls of either run its forward."""
    return getattr(model, "_orig_mod", model)


def _recomputing() -> bool:
    """Return whether this is a backward pass, in which activation checkpointing repeats a forward pass."""
    return torch._C._current_graph_task_id() != -1


def _see(touched: Tensor, key: int, name: str, w: Tensor) -> None:
    recorder = _RECORDERS.get(key)
    if recorder is not None and not _recomputing():
        recorder.recording[name] = w.clone()


def _see_pass(touched: Tensor, key: int, training: bool, builds: bool) -> None:
    recorder = _RECORDERS.get(key)
    if recorder is not None and not _recomputing():
        recorder.on_pass(training, builds)


for _name, _run, _arguments in (
    ("see_decays", _see, "str name, Tensor w"),
    ("see_pass", _see_pass, "bool training, bool builds"),
):
    torch.library.custom_op(
        f"flakit::{_name}", _run, mutates_args=("touched",), schema=f"(Tensor(a!) touched, int key, {_arguments}) -> ()"
    ).register_fake(lambda *_: None)


def _nothing(*_) -> None:
    """Replaces a hook in a copied or pickled model, which is not watched."""


def _identity(x: Any) -> Any:
    return x


class _Hook:
    """A hook that calls a method of a recorder. A copied or pickled model has one that does nothing."""

    def __init__(self, run: Callable):
        self.run = run

    def __call__(self, *args) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple:
        return _identity, (_nothing,)


class _Wrapper:
    """A mixer's operator during a watch: records its decays and calls it. A copied or pickled model has the operator.

    It replaces the operator because torch.compile guards on that object, and not on hooks."""

    def __init__(self, recorder: _Recorder, name: str, arg: int, operator: Callable):
        self.recorder, self.name, self.arg, self.operator, self.detached = recorder, name, arg, operator, False

    def __call__(self, *x: Tensor, **options):
        if not self.detached and self.recorder.active():
            self.recorder.see(self.name, x[self.arg])
        return self.operator(*x, **options)

    def __reduce__(self) -> tuple:
        return _identity, (self.operator,)


_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def _warn(category: type[Warning], text: str) -> None:
    """Issue a warning at the nearest caller outside flakit and PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and _inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(category(text), stacklevel=2 if frame is None else level)


def _inside(file: str) -> bool:
    compiled = file.startswith("<eval_with_key>") or "torchinductor_" in file
    return compiled or file.startswith(_LIBRARIES) or file == contextmanager.__code__.co_filename


# --- a watch ----------------------------------------------------------------------------------------------------------


class Forecast(NamedTuple):
    """One warning, given at `step`. exponent, limit: the largest exponent there and the kernel's limit, natural log.
    used_up: the step at which the headroom runs out at the current pace; `step` itself if it has run out."""

    step: int
    layer: str
    kernel: str
    dtype: torch.dtype
    exponent: float
    limit: float
    pace: float
    """The growth of the exponent in natural-log units per step."""
    used_up: float

    def line(self, steps: Sequence[int]) -> list[float]:
        """Return the exponents that it predicts at these steps, on a straight line; NaN before its own step."""
        return [self.exponent + self.pace * (n - self.step) if n >= self.step else math.nan for n in steps]

    def __str__(self) -> str:
        where = f"step {self.step}, {self.layer}: with the kernel {self.kernel!r} the largest exponent"
        if self.exponent > self.limit:
            return f"{where} is {self.exponent:.4g}, above {self.limit:.2f}: its headroom is used up, it makes NaN"
        return (
            f"{where} is {self.exponent:.4g} of {self.limit:.2f} and grows by {self.pace:.2g} a step: "
            f"at this pace its headroom is used up at step {self.used_up:.0f}"
        )


class Alarm:
    """Forecasts when one kernel runs out of headroom, from its largest exponent at each measured step.

    `flakit.watch` keeps one per layer and kernel. It can also be used alone, on the log of a finished training.

    Args:
        limit: the largest exponent that the kernel survives, natural log: 88.72 for float32.
        ahead: how many steps before the end to warn.
        over: number of most recent measurements to fit the line to, at least 2.
        layer, kernel, dtype: labels of the forecast.
    """

    def __init__(
        self,
        limit: float,
        *,
        ahead: int,
        over: int = 5,
        layer: str = "",
        kernel: str = "",
        dtype: torch.dtype = torch.float32,
    ):
        whole("ahead", ahead, 0)
        whole("over", over, 2)
        self.limit, self.ahead, self.over, self.names = limit, ahead, over, (layer, kernel, dtype)
        self.steps, self.exponents = [], []
        self._due = -1  # the step that the last forecast named: no other forecast until then

    def hear(self, step: int, exponent: float) -> Forecast | None:
        """Add the largest exponent at a step, and return a forecast if one is due, else None. Raises ValueError unless
        steps increase."""
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step: expected one after {self.steps[-1]}, got {step}")
        self.steps.append(step)
        self.exponents.append(exponent)
        breaks = exponent > self.limit
        waits = step < self._due and not breaks or self._due == math.inf
        if len(self.steps) < 2 or self.exponents[0] > self.limit or waits:
            return None  # a kernel without headroom from the start cannot lose it
        pace, used_up = _line(self.steps[-self.over :], self.exponents[-self.over :], self.limit)
        used_up = step if breaks else max(used_up, step + 1)
        if not breaks and (len(self.steps) == 2 or used_up - step > self.ahead):
            return None
        self._due = math.inf if breaks else used_up
        return Forecast(step, *self.names, exponent, self.limit, pace, used_up)


class Watch:
    """The result of `flakit.watch`. headrooms: measurements by step. warned: every `Forecast` so far. recording: the
    decays of the last measurement, by layer, as `flakit.headroom` takes them."""

    def __init__(self, model: nn.Module, every: int, *, measure, decays, ahead, over, tell, dtype, **options):
        """Attach hooks to the model; the arguments are those of `watch`."""
        for name, number, least in (("every", every, 1), ("ahead", ahead, 0), ("over", over, 2)):
            whole(name, number, least)
        self.every, self.ahead, self.over, self.dtype, self.tell = every, ahead, over, dtype, tell
        self.step, self.headrooms, self.warned, self.recording = -1, {}, [], Recording()
        self._measure, self._options, self._alarms = measure, options, {}
        self._evaluated, self._blind, self._warned_infinite = 0, False, False
        model = _uncompiled(model)
        self._recorder = _Recorder(during=model, on_pass=self._on_pass)
        self._recorder.attach(model, decays)
        self.recording.op = self._recorder.recording.op
        self._recorder.now = True

    def _on_pass(self, training: bool, builds: bool) -> None:
        """After a forward pass in training mode, count a step, and measure if one is due.

        In evaluation mode, warn when `every` passes with gradients enabled (`builds`) have run since the last step."""
        if not training:
            self._evaluated += builds
            if self._evaluated == self.every:
                self._warn_blind(
                    f"{self.every} forward passes with gradients ran in evaluation mode, and a step is one in training "
                    f"mode: if these were steps, call model.train()"
                )
            return
        self._evaluated = 0
        self.step += 1
        if self.step % self.every == 0:
            latest = self._recorder.recording
            self.recording.clear()
            self.recording.update(latest)
            latest.clear()
            self._check_infinite()
            nan = [name for name, w in self.recording.items() if w.isnan().any()]
            if not self.recording:
                self._warn_blind(self._recorder.blind())
            elif nan:  # from weights that are NaN
                self._warn_blind(f"the decays of {nan[0] or 'the model'} are NaN, so that they have no headroom")
            else:
                self.headrooms[self.step] = headroom = self._measure(self.recording, **self._options)
                for layer in self.recording:
                    for kernel in {m.kernel for m in headroom.layers[layer]}:
                        self._forecast(layer, kernel)
        self._recorder.now = (self.step + 1) % self.every == 0  # set before the next pass: compiled code guards on it

    def _check_infinite(self) -> None:
        """Warn once of decays of -inf. They fit every kernel, but the gate that computed them may have no gradient."""
        layer = next((name for name, w in self.recording.items() if w.isneginf().any()), None)
        if layer is not None and not self._warned_infinite:
            self._warned_infinite = True
            where = f"step {self.step}, {layer}" if layer else f"step {self.step}"
            _warn(
                HeadroomWarning,
                f"{where}: decays are -inf. A gate w = -exp(x) has no gradient there, dx = 0 * inf = NaN, unless it is "
                f"flakit.log_decay(x): the same w, and dx = 0",
            )

    def _warn_blind(self, why: str) -> None:
        if not self._blind:  # once
            self._blind = True
            _warn(WatchWarning, f"nothing was measured at step {max(self.step, 0)}: {why}")

    def pace(self, layer: str, kernel: str) -> tuple[list[int], list[float]]:
        """Return the steps measured so far, and the largest exponent of a kernel at each, in natural log."""
        margins = {n: h.margin(kernel, self.dtype, layer) for n, h in self.headrooms.items() if layer in h.layers}
        return list(margins), [m.exponent for m in margins.values()]

    def _forecast(self, layer: str, kernel: str) -> None:
        margin = self.headrooms[self.step].margin(kernel, self.dtype, layer)
        if (layer, kernel) not in self._alarms:
            labels = {"layer": layer, "kernel": kernel, "dtype": self.dtype}
            self._alarms[layer, kernel] = Alarm(margin.limit, ahead=self.ahead, over=self.over, **labels)
        forecast = self._alarms[layer, kernel].hear(self.step, margin.exponent)
        if forecast is not None:
            self.warned.append(forecast)
            if self.tell is None:
                _warn(HeadroomWarning, str(forecast))
            else:
                self.tell(forecast)

    def close(self) -> None:
        """Remove the hooks from the model and keep the measurements. Gives a `WatchWarning` if no step ran."""
        self._recorder.detach()
        if self.step < 0:
            self._warn_blind(
                "no forward pass in training mode went through the model; one of a compiled function that ran before "
                "is not seen until torch.compiler.reset()"
            )

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        self._blind |= error is not None  # the error itself says enough
        self.close()

    def __str__(self) -> str:
        if not self.headrooms:
            return "No step was measured yet."
        step, headroom = next(reversed(self.headrooms.items()))
        lines = [f"Headroom at step {step}, the factor that all decays may grow by:"]
        for layer, margins in headroom.layers.items():
            lines += [f"  {layer}: {m.kernel}: {m.factor:.3g}" for m in margins if m.dtype == self.dtype]
        return "\n".join(lines)


def _line(steps: Sequence[int], exponents: Sequence[float], limit: float) -> tuple[float, float]:
    """Fit a least-squares line; return its slope and the step where it reaches the limit, inf if it does not rise."""
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
    **options,
) -> Watch:
    """Measure the headroom of every layer while a model trains, and warn long before it runs out.

    A step is a forward pass of the whole model in training mode; the recomputation of activation checkpointing does not
    count. Every `every` steps the watch records the decays and compares the largest exponent of each kernel with the
    kernel's limit. A line through the last measurements predicts when the headroom runs out. A `HeadroomWarning`
    appears once that is within `ahead` steps, again if that step passes without it, and finally when it happens.
    A kernel that fails from the first measurement on gives no warning; `print(flakit.headroom(watching.recording))`
    shows it. Decays of -inf, where a gate w = -exp(x) has no gradient, give one `HeadroomWarning`. A watch that sees no
    decays gives one `WatchWarning`.

    The model may be compiled before or after; its next step is then compiled again. A copied or pickled model is not
    watched.

    Args:
        model: one of `flakit.models`, or any model with `decays`.
        every: steps between measurements.
        measure: the measure, `headroom` of `flakit.cases`; `flakit.watch` passes it.
        decays: as in `recorded`.
        ahead: how many steps before the end to warn, default 10 * every.
        over: number of most recent measurements to fit the line to.
        dtype: storage dtype of the kernels' operands: torch.float32, bfloat16 or float16.
        tell: called with each `Forecast` instead of a Python warning.
        options: op, chunk, block and only (the kernels to watch), as in `flakit.headroom`.

    Returns:
        Watch: `headrooms` by step, `warned`, `recording`, `close()`; also a context manager that closes it.
    """
    options |= {"measure": measure, "decays": decays, "over": over, "tell": tell, "dtype": dtype}
    return Watch(model, every, ahead=10 * every if ahead is None else ahead, **options)
