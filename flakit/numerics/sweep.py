"""Run something over a grid of settings and keep what can be drawn: where it is finite, and how far it is from truth.

sweep("rwkv6", over={"decay": [-0.1, -1.0, -10.0], "T": [16, 64, 256]}, K=32)
sweep(lambda decay, T: run(inputs(decay=-decay, T=T)).tensors, over={"decay": [1.0, 1.5], "T": [32, 64]})
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from .arguments import function, listed, one_of, plain, shown
from .errors import Errors, compare
from .evaluate import evaluate, truth
from .inputs import inputs
from .operators import Operator, operator


@dataclass(frozen=True)
class Sweep:
    """Measurements over a grid. Every grid has the shape of the axes, in their order; NaN where nothing was measured.

    grids: for a tensor x, "x.finite" (the share of its values that are finite) and, with a truth, "x.l2", "x.worst" and
        "x.worst_row" (see `numerics.errors`); a plain number keeps its own name.
    first: for a tensor x, the index of its first non-finite value, None where there is none.
    complete: False when the sweep was cancelled.
    """

    axes: Mapping[str, tuple]
    grids: Mapping[str, np.ndarray]
    first: Mapping[str, np.ndarray]
    complete: bool

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.grids:
            raise KeyError(f"expected one of {', '.join(self.grids)}, got {name!r}")
        return self.grids[name]

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self.first)

    def onset(self, axis: str, tensor: str | None = None) -> np.ndarray:
        """The first value along `axis` at which a tensor (default: any) is not finite, over the remaining axes.

        Values are taken in the order of the axis; NaN (None for values that are not numbers) where all is finite.
        """
        one_of("axis", axis, self.axes)
        chosen = self.tensors if tensor is None else (one_of("tensor", tensor, self.first),)
        shares = [self.grids[f"{name}.finite"] for name in chosen]
        bad = np.moveaxis(np.any([share < 1 for share in shares], axis=0), list(self.axes).index(axis), -1)
        values = self.axes[axis]
        numbers = all(isinstance(x, (int, float)) for x in values)
        found = np.full(bad.shape[:-1], np.nan if numbers else None, dtype=float if numbers else object)
        for at in np.ndindex(found.shape):
            if bad[at].any():
                found[at] = values[int(bad[at].argmax())]
        return found

    def rows(self) -> list[dict]:
        """One dict a setting, axes first, then every measurement: what `numerics.recorded.write` takes."""
        return [
            {name: _plain(values[i]) for (name, values), i in zip(self.axes.items(), at, strict=True)}
            | {name: float(grid[at]) for name, grid in self.grids.items()}
            for at in np.ndindex(*(len(values) for values in self.axes.values()))
        ]

    def to_dict(self) -> dict:
        """Plain lists and numbers: {"axes": …, "grids": …, "first": …, "complete": …}."""
        return {
            "axes": {name: [_plain(x) for x in values] for name, values in self.axes.items()},
            "grids": {name: grid.tolist() for name, grid in self.grids.items()},
            "first": {name: grid.tolist() for name, grid in self.first.items()},
            "complete": self.complete,
        }


def sweep(
    subject: str | Operator | Callable[..., Mapping],
    over: Mapping[str, object],
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **fixed,
) -> Sweep:
    """Measure `subject` at every combination of the settings in `over`.

    subject: an operator's name: each setting goes to `inputs` (decay, T, K, dtype, …) or to `evaluate` (form, backend,
        chunk_size, …), and every output and gradient is compared with `truth`. Or a function of the settings that
        returns a dict: a tensor, a pair (tensor, truth), an `Errors` or a number under each name.
    over: the values of each axis, first axis slowest: a list, an array, or a single value, an axis of one.
    fixed: settings that stay.
    progress: called with (settings done, settings in all) after each; cancelled: asked before each, True stops there.
    What a setting raises is raised again with the setting named.
    """
    measure = _operator(operator(subject)) if isinstance(subject, (str, Operator)) else subject
    if not callable(measure):
        raise TypeError(f"subject: expected an operator's name or a function, got {type(subject).__name__}")
    function("progress", progress), function("cancelled", cancelled)
    if not isinstance(over, Mapping) or not over or not all(isinstance(name, str) for name in over):
        raise ValueError(f"over: expected a dict of axis names and their values, got {shown(over)}")
    axes = {name: _values(f"over[{name!r}]", values) for name, values in over.items()}
    for name in fixed:
        if name in axes:
            raise ValueError(f"{name}: expected it in `over` or as a setting that stays, got both")
    _check_names(measure, {**axes, **fixed})

    shape = tuple(len(values) for values in axes.values())
    total, done = math.prod(shape), 0
    grids: dict[str, np.ndarray] = {}
    first: dict[str, np.ndarray] = {}
    for at, setting in zip(np.ndindex(*shape), itertools.product(*axes.values()), strict=True):
        if cancelled is not None and cancelled():
            break
        named = dict(zip(axes, setting, strict=True))
        try:
            found = measure(**fixed, **named)
            if not isinstance(found, Mapping):
                raise TypeError(f"subject: expected a function that returns a dict, got {shown(found)} from it")
            measured = {name: _measurements(name, x) for name, x in found.items()}
        except Exception as error:
            where = ", ".join(f"{name}={shown(value)}" for name, value in named.items())
            raise RuntimeError(f"sweep at {where}: {error}") from error
        for name, (numbers, index) in measured.items():
            for key, number in numbers.items():
                grids.setdefault(key, np.full(shape, np.nan))[at] = number
            if f"{name}.finite" in numbers:
                first.setdefault(name, np.full(shape, None, dtype=object))[at] = index
        done += 1
        if progress is not None:
            progress(done, total)
    return Sweep(axes, grids, first, done == total)


def _operator(op: Operator) -> Callable[..., Mapping]:
    evaluation = {p.name for p in inspect.signature(evaluate).parameters.values() if p.kind is p.KEYWORD_ONLY}

    def measure(**setting):
        x = inputs(op, **{name: value for name, value in setting.items() if name not in evaluation})
        how = {name: value for name, value in setting.items() if name in evaluation}
        exact = truth(op, x, **{name: how[name] for name in ("grad_seed", "dfinal_state", "arriving") if name in how})
        return {name: (got, exact[name]) for name, got in evaluate(op, x, **how).items()}

    makes = [p for p in inspect.signature(inputs).parameters.values() if p.kind is p.KEYWORD_ONLY]
    takes = [p for p in inspect.signature(evaluate).parameters.values() if p.kind is p.KEYWORD_ONLY]
    measure.__signature__ = inspect.Signature(makes + takes)
    return measure


def _check_names(measure: Callable, settings: Mapping) -> None:
    """Say at once, not at the first setting, that a name is unknown."""
    try:
        parameters = inspect.signature(measure).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in settings if name not in parameters]
    if unknown:
        raise ValueError(f"over: expected settings among {', '.join(parameters)}, got {', '.join(unknown)}")


def _measurements(name: str, x) -> tuple[dict[str, float], tuple[int, ...] | None]:
    if isinstance(x, tuple) and len(x) == 2:
        x = compare(*x)
    if isinstance(x, Errors):
        found = {"finite": 1 - x.share, "l2": x.l2, "worst": x.worst, "worst_row": x.worst_row}
        return {f"{name}.{key}": number for key, number in found.items()}, None if x.finite else x.worst_index
    if isinstance(x, Tensor):
        finite = x.detach().isfinite()
        share = finite.double().mean().item() if x.numel() else 1.0
        index = tuple(int(i) for i in torch.unravel_index(finite.double().argmin(), x.shape)) if share < 1 else None
        return {f"{name}.finite": share}, index
    if not isinstance(plain(x), Real):
        expected = "a tensor, a pair (tensor, truth), an Errors or a number"
        raise TypeError(f"subject: expected {expected} as {name}, got {shown(x)}")
    return {name: float(x)}, None


def _values(name: str, values: object) -> tuple:
    found = () if isinstance(values, (Mapping, Set)) else listed(values)
    if not found:
        raise ValueError(f"{name}: expected a list of at least one value, got {shown(values)}")
    return found


def _plain(x):
    return x if isinstance(x, (int, float, str, bool, type(None))) else str(x).removeprefix("torch.")
