"""A model's decays while it runs: recorded by hooks, and watched while it trains.

    with recorded(model) as w:
        model(tokens)
    flakit.headroom(w)                                   # {"blocks.0.time": [B, T, H, K], …}

    watching = flakit.watch(model, every=100)            # before the training loop; watching.close() ends it

`flakit.headroom` is the measure that `flakit.watch` brings along; this module knows only what a hook sees.
"""

import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""The mixers here whose operator takes decays: its name, and which of its arguments they are."""

Decays = Callable[[str, nn.Module, Any], Tensor | None]
"""decays(name, module, output) -> the natural-log decays [B, T, H, K] that a module has just made, or None."""


class WatchWarning(UserWarning):
    """A watch or a recording that sees nothing, and why."""


class HeadroomWarning(UserWarning):
    """Decays that drift towards the law of a kernel, or are -inf, where a gate w = -exp(x) has no gradient."""


class Recording(dict):
    """Decays by layer, detached; op: the operator they were for, None where nobody said."""

    op: str | None = None


@contextmanager
def recorded(model: nn.Module, decays: Decays | None = None) -> Iterator[Recording]:
    """Record the decays of every layer, of the last forward pass inside the block.

    decays: for models that are not of `flakit.models`: called after every module's forward with its name, itself and
        its output; what it returns is recorded under that name. Default: what mixers of this package hand their
        operator.

    A block that ends without a decay having been seen ends with a `WatchWarning` that says what may be the reason.

    >>> def decays(name, module, output):  # an RWKV6 whose w_proj makes x of w = -exp(x), heads of 64
    ...     return log_decay(output.float()).unflatten(-1, (-1, 64)) if name.endswith("w_proj") else None
    """
    sight = _Sight()
    sight.attach(_uncompiled(model), decays)
    sight.now = True
    try:
        yield sight.recording
    finally:
        sight.detach()
    if not sight.recording:
        _warn(WatchWarning, f"nothing was recorded: no forward pass ran in the block, or {sight.blind()}")


# --- what hooks see ---------------------------------------------------------------------------------------------------

_SIGHTS: WeakValueDictionary[int, "_Sight"] = WeakValueDictionary()
_KEYS = itertools.count()


class _Sight:
    """The recording that hooks fill, while `now` is true and, if there is one, `during` is in training mode.

    torch.compile guards on both: a compiled model has one program that looks and another that does not, and the second
    is as fast as if nobody watched. A program cannot call Python, so what looks is an operator, which finds this object
    by its key; it says that it changes `touched`, else the compiler would drop an operator without results.
    """

    def __init__(self, during: nn.Module | None = None, passed: Callable[[bool, bool], None] | None = None):
        self.recording, self.now, self.during, self.passed = Recording(), False, during, passed
        self.touched = torch.zeros((), device="cpu")
        self.key = next(_KEYS)
        _SIGHTS[self.key] = self
        self._handles, self._seen, self._decays = [], {}, None

    def attach(self, model: nn.Module, decays: Decays | None) -> None:
        modules = [(name.replace("_orig_mod.", ""), module) for name, module in model.named_modules()]
        if decays is not None:
            if not callable(decays):
                raise TypeError(f"decays: expected a function of name, module and output, got {type(decays).__name__}")
            self._decays = decays
            looks = [(module, _Look(self, name, decays)) for name, module in modules]
            self._handles += [module.register_forward_hook(look) for module, look in looks]
        else:
            own = [
                (name, module, next(map(OWN.get, filter(OWN.get, type(module).__mro__)), None))
                for name, module in modules
            ]
            own = [found for found in own if found[2] is not None]
            operators = {op for _, _, (op, _) in own}
            if not own:
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
            self._seen = {module: _Seen(self, name, at, module.operator) for name, module, (_, at) in own}
            self.put()
            self._handles.append(model.register_forward_pre_hook(_Before(self), prepend=True))
        if self.passed is not None:
            self._handles.append(model.register_forward_hook(_Passed(self)))

    def put(self) -> None:
        """Stand before every mixer's operator, also where the operator has been exchanged since."""
        for module, seen in self._seen.items():
            found = module.operator
            while found is not seen and isinstance(found, _Seen):  # of another watch
                found = found.operator
            if found is not seen:
                seen.operator = module.operator
                module.operator = seen

    def detach(self) -> None:
        self.now = False
        for handle in self._handles:
            handle.remove()
        for module, seen in self._seen.items():
            seen.gone = True  # another watch may stand before it
            while isinstance(module.operator, _Seen) and module.operator.gone:
                module.operator = module.operator.operator
        self._handles, self._seen = [], {}

    def looks(self) -> bool:
        return self.now and (self.during is None or self.during.training)

    def blind(self) -> str:
        """Why there may be nothing in the recording though a forward pass ran."""
        return (
            "no layer called its operator"
            if self._decays is None
            else "decays(name, module, output) returned None for every module, or the model was compiled before: then "
            "call torch.compiler.reset() after this watch is on the model"
        )

    def see(self, name: str, w: Tensor) -> None:
        if torch.compiler.is_compiling():
            torch.ops.flakit.see_decays(self.touched, self.key, name, w.detach())
        else:
            _see(self.touched, self.key, name, w.detach())

    def end(self, training: bool) -> None:
        if torch.compiler.is_compiling():
            torch.ops.flakit.see_pass(self.touched, self.key, training, torch.is_grad_enabled())
        else:
            _see_pass(self.touched, self.key, training, torch.is_grad_enabled())


def _uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile wraps: calls of either run through it."""
    return getattr(model, "_orig_mod", model)


def _again() -> bool:
    """Inside a backward pass, where activation checkpointing runs a forward pass once more."""
    return torch._C._current_graph_task_id() != -1


def _see(touched: Tensor, key: int, name: str, w: Tensor) -> None:
    sight = _SIGHTS.get(key)
    if sight is not None and not _again():
        sight.recording[name] = w.clone()


def _see_pass(touched: Tensor, key: int, training: bool, builds: bool) -> None:
    sight = _SIGHTS.get(key)
    if sight is not None and not _again():
        sight.passed(training, builds)


for _name, _run, _arguments in (
    ("see_decays", _see, "str name, Tensor w"),
    ("see_pass", _see_pass, "bool training, bool builds"),
):
    torch.library.custom_op(
        f"flakit::{_name}", _run, mutates_args=("touched",), schema=f"(Tensor(a!) touched, int key, {_arguments}) -> ()"
    ).register_fake(lambda *_: None)


def _nothing(*_) -> None:
    """What a hook is in a copy of a watched model, or in a file of it: nobody watches those."""


def _same(x: Any) -> Any:
    return x


class _Hook:
    def __init__(self, sight: _Sight):
        self.sight = sight

    def __reduce__(self) -> tuple:
        return _same, (_nothing,)


class _Before(_Hook):
    """At the beginning of the watched model's forward pass."""

    def __call__(self, *_) -> None:
        if not torch.compiler.is_compiling():
            self.sight.put()


class _Passed(_Hook):
    """At the end of the watched model's forward pass."""

    def __call__(self, module: nn.Module, *_) -> None:
        self.sight.end(module.training)


class _Look(_Hook):
    """At the end of any module's forward pass: asks the user's function for decays."""

    def __init__(self, sight: _Sight, name: str, decays: Decays):
        super().__init__(sight)
        self.name, self.decays = name, decays

    def __call__(self, module: nn.Module, _, output: Any) -> None:
        if self.sight.looks():
            w = self.decays(self.name, module, output)
            if w is not None:
                if not isinstance(w, Tensor):
                    raise TypeError(f"decays: expected a tensor or None for {self.name!r}, got {type(w).__name__}")
                self.sight.see(self.name, w)


class _Seen:
    """A mixer's operator for the time of a watch: the same, seen. In a copy or a file of the model it is the operator.

    That it is another object is what makes torch.compile notice: it does not guard on hooks.
    """

    def __init__(self, sight: _Sight, name: str, at: int, operator: Callable):
        self.sight, self.name, self.at, self.operator, self.gone = sight, name, at, operator, False

    def __call__(self, *x: Tensor, **how):
        if not self.gone and self.sight.looks():
            self.sight.see(self.name, x[self.at])
        return self.operator(*x, **how)

    def __reduce__(self) -> tuple:
        return _same, (self.operator,)


_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def _warn(category: type[Warning], text: str) -> None:
    """A warning at the line outside flakit and PyTorch that led here."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and _inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(category(text), stacklevel=2 if frame is None else level)


def _inside(file: str) -> bool:
    compiled = file.startswith("<eval_with_key>") or "torchinductor_" in file
    return compiled or file.startswith(_LIBRARIES) or file == contextmanager.__code__.co_filename


# --- a watch ----------------------------------------------------------------------------------------------------------


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

    def line(self, steps: Sequence[int]) -> list[float]:
        """The straight line that it goes by: the exponents that it expects at these steps, NaN before its own."""
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
    """Forecasts from a log: the largest exponent of one kernel, heard step by step.

    `flakit.watch` sets one for each layer and kernel. Alone it serves a log that was written during a training.

    Args:
        limit: the largest exponent that the kernel survives, natural log: 88.72 for float32.
        ahead: how many steps before the end to warn.
        over: how many of the last measurements the line is drawn through, at least 2.
        layer, kernel, dtype: what the forecast says of itself.
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
        self._due = -1  # the step that an earlier forecast named: nothing is said again until then

    def hear(self, step: int, exponent: float) -> Forecast | None:
        """The largest exponent at a step; steps only rise. The forecast, where there is one to be told.

        Raises ValueError for a step that is not after the last one.
        """
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step: expected one after {self.steps[-1]}, got {step}")
        self.steps.append(step)
        self.exponents.append(exponent)
        breaks = exponent > self.limit
        waits = step < self._due and not breaks or self._due == math.inf
        if len(self.steps) < 2 or self.exponents[0] > self.limit or waits:
            return None  # what never had headroom does not lose it
        pace, used_up = _line(self.steps[-self.over :], self.exponents[-self.over :], self.limit)
        used_up = step if breaks else max(used_up, step + 1)
        if not breaks and (len(self.steps) == 2 or used_up - step > self.ahead):
            return None
        self._due = math.inf if breaks else used_up
        return Forecast(step, *self.names, exponent, self.limit, pace, used_up)


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
            whole(name, number, least)
        self.every, self.ahead, self.over, self.dtype, self.tell = every, ahead, over, dtype, tell
        self.step, self.headrooms, self.warned, self.recording = -1, {}, [], Recording()
        self._measure, self._how, self._alarms = measure, how, {}
        self._evaluated, self._blind, self._told_infinite = 0, False, False
        model = _uncompiled(model)
        self._sight = _Sight(during=model, passed=self._passed)
        self._sight.attach(model, decays)
        self.recording.op = self._sight.recording.op
        self._sight.now = True

    def _passed(self, training: bool, builds: bool) -> None:
        """After a forward pass. builds: whether a graph for a backward pass is made, as in a step."""
        if not training:
            self._evaluated += builds
            if self._evaluated == self.every:
                self._say_blind(
                    f"{self.every} forward passes with gradients ran in evaluation mode, and a step is one in training "
                    f"mode: if these were steps, call model.train()"
                )
            return
        self._evaluated = 0
        self.step += 1
        if self.step % self.every == 0:
            seen = self._sight.recording
            self.recording.clear()
            self.recording.update(seen)
            seen.clear()
            self._look_for_infinite()
            lost = [name for name, w in self.recording.items() if w.isnan().any()]
            if not self.recording:
                self._say_blind(self._sight.blind())
            elif lost:  # lost weights have no decays
                self._say_blind(f"the decays of {lost[0] or 'the model'} are NaN, so that they have no headroom")
            else:
                self._judge_all()
        self._sight.now = (self.step + 1) % self.every == 0  # before the pass: a compiled one guards on it

    def _judge_all(self) -> None:
        self.headrooms[self.step] = self._measure(self.recording, **self._how)
        for layer in self.recording:
            for kernel in {m.kernel for m in self.headrooms[self.step].layers[layer]}:
                self._judge(layer, kernel)

    def _look_for_infinite(self) -> None:
        """Tell once of decays of -inf: what the gate that made them does there no kernel's law says."""
        layer = next((name for name, w in self.recording.items() if w.isneginf().any()), None)
        if layer is not None and not self._told_infinite:
            self._told_infinite = True
            where = f"step {self.step}, {layer}" if layer else f"step {self.step}"
            _warn(
                HeadroomWarning,
                f"{where}: decays are -inf. A gate w = -exp(x) has no gradient there, dx = 0 * inf = NaN, unless it is "
                f"flakit.log_decay(x): the same w, and dx = 0",
            )

    def _say_blind(self, why: str) -> None:
        if not self._blind:  # once
            self._blind = True
            _warn(WatchWarning, f"nothing was measured at step {max(self.step, 0)}: {why}")

    def pace(self, layer: str, kernel: str) -> tuple[list[int], list[float]]:
        """The steps measured so far, and the largest exponent of a kernel at each."""
        found = {n: h.margin(kernel, self.dtype, layer) for n, h in self.headrooms.items() if layer in h.layers}
        return list(found), [m.exponent for m in found.values()]

    def _judge(self, layer: str, kernel: str) -> None:
        margin = self.headrooms[self.step].margin(kernel, self.dtype, layer)
        if (layer, kernel) not in self._alarms:
            how = {"ahead": self.ahead, "over": self.over, "layer": layer, "kernel": kernel, "dtype": self.dtype}
            self._alarms[layer, kernel] = Alarm(margin.limit, **how)
        found = self._alarms[layer, kernel].hear(self.step, margin.exponent)
        if found is not None:
            self.warned.append(found)
            if self.tell is None:
                _warn(HeadroomWarning, str(found))
            else:
                self.tell(found)

    def close(self) -> None:
        """Take the hooks off the model; what was seen stays. A `WatchWarning` if no step was."""
        self._sight.detach()
        if self.step < 0:
            self._say_blind(
                "no forward pass in training mode went through the model; one of a compiled function that ran before "
                "is not seen until torch.compiler.reset()"
            )

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        self._blind |= error is not None  # which says enough
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

    A step is a forward pass of the whole model in training mode; that of activation checkpointing, which runs it once
    more in the backward pass, is none. Every `every` steps the decays are recorded and the largest exponent of each
    kernel is held against its law. A line through the last measurements says when it will be used up at the present
    pace: a `HeadroomWarning` once that is within `ahead` steps, another when that step has passed and it still lies
    ahead, and a last one when it has happened. What breaks from the first measurement on is not warned of:
    `print(flakit.headroom(watching.recording))` says what that is. Of decays that are -inf, where a gate w = -exp(x)
    has no gradient, a `HeadroomWarning` tells once. A watch that sees nothing says so once, in a `WatchWarning`.

    The model may be compiled, before or after; its next step is compiled again. A copy of a watched model, or a file of
    it, is not watched.

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
