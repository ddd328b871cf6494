"""Runs a subject over a grid of settings and measures what can be drawn: where it is finite, and its error.

sweep("rwkv6", over={"decay": [-0.1, -1.0, -10.0], "T": [16, 64, 256]}, K=32)
sweep(lambda decay, T: run(inputs(decay=-decay, T=T)).tensors, over={"decay": [1.0, 1.5], "T": [32, 64]})
sweep("my_kernel.py:chunk", like="rwkv6", over={"decay": [-1.0, -10.0], "T": [64, 100]}, workers=4, store="found.jsonl")
"""

import csv
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .arguments import function, listed, named_function, one_of, parameters_of, plain, shown, whole_number
from .described import Called
from .errors import Errors, compare
from .evaluate import cotangents, evaluate, truth
from .inputs import inputs
from .operators import OPERATORS, Operator, operator
from .sweep_workers import Measured, Raised, Store, fingerprint, here, in_processes, in_words, on_ray


@dataclass(frozen=True)
class Sweep:
    """Measurements over a grid. Every grid has the shape of the axes, in their order; NaN where nothing was measured.

    axes: the values of each axis, by name.
    grids: for a tensor x, "x.finite" (the share of finite values) and, with a truth, "x.l2", "x.worst" and
        "x.worst_row" (see `numerics.errors`); a plain number has its own name.
    first: for a tensor x, the index of its first non-finite value, or None.
    complete: False if the sweep was cancelled.
    raised: the error message of the subject at a setting, or None.
    """

    axes: Mapping[str, tuple]
    grids: dict[str, np.ndarray]
    first: dict[str, np.ndarray]
    complete: bool
    raised: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.grids:
            raise KeyError(f"expected one of {', '.join(self.grids)}, got {name!r}")
        return self.grids[name]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the measured tensors."""
        return tuple(self.first)

    def _put(self, at: tuple[int, ...], measured: Measured) -> None:
        """Fill one cell of the grids with the measurements of its setting. at: its index along the axes."""
        for name, (numbers, index) in measured.items():
            for key, number in numbers.items():
                self.grids.setdefault(key, np.full(self.raised.shape, np.nan))[at] = number
            if f"{name}.finite" in numbers:
                self.first.setdefault(name, np.full(self.raised.shape, None, dtype=object))[at] = index

    def onset(self, axis: str, tensor: str | None = None) -> np.ndarray:
        """Return the first value along `axis` at which a tensor (default: any) is not finite, over the remaining axes.

        "First" means in the order of the axis; NaN (None for values that are not numbers) where all are finite.
        """
        one_of("axis", axis, self.axes)
        chosen = self.tensors if tensor is None else (one_of("tensor", tensor, self.first),)
        shares = [self.grids[f"{name}.finite"] for name in chosen]
        bad = np.moveaxis(np.any([share < 1 for share in shares], axis=0), list(self.axes).index(axis), -1)
        values = self.axes[axis]
        numbers = all(isinstance(x, (int, float)) for x in values)
        onsets = np.full(bad.shape[:-1], np.nan if numbers else None, dtype=float if numbers else object)
        for at in np.ndindex(onsets.shape):
            if bad[at].any():
                onsets[at] = values[int(bad[at].argmax())]
        return onsets

    def rows(self) -> list[dict]:
        """Return one dict a setting, axes first, then every measurement, for `numerics.recorded.write`.

        If any setting raised an error, the column "raised" has its message, or "".
        """
        some = any(self.raised.flat)
        return [
            {name: in_words(values[i]) for (name, values), i in zip(self.axes.items(), at, strict=True)}
            | {name: float(grid[at]) for name, grid in self.grids.items()}
            | ({"raised": self.raised[at] or ""} if some else {})
            for at in np.ndindex(*(len(values) for values in self.axes.values()))
        ]

    def to_csv(self, path: str | os.PathLike) -> Path:
        """Write `rows` with a header line; return the path."""
        path, rows = Path(path), self.rows()
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        return path

    def to_parquet(self, path: str | os.PathLike) -> Path:
        """Write `rows` as a Parquet file, which needs pyarrow; return the path."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError("to_parquet: it needs pyarrow (pip install pyarrow); to_csv needs nothing") from error
        parquet.write_table(pyarrow.Table.from_pylist(self.rows()), path)
        return Path(path)

    def to_dict(self) -> dict:
        """Return plain lists and numbers: {"axes": …, "grids": …, "first": …, "raised": …, "complete": …}."""
        return {
            "axes": {name: [in_words(x) for x in values] for name, values in self.axes.items()},
            "grids": {name: grid.tolist() for name, grid in self.grids.items()},
            "first": {name: grid.tolist() for name, grid in self.first.items()},
            "raised": self.raised.tolist(),
            "complete": self.complete,
        }


def sweep(
    subject: str | Operator | Callable,
    over: Mapping[str, object],
    *,
    like: str | Operator | None = None,
    workers: int = 1,
    engine: str = "processes",
    store: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    cancelled: Callable[[], bool] | None = None,
    **fixed,
) -> Sweep:
    """Measure `subject` at every combination of the settings in `over`.

    subject: an operator's name: each setting goes to `inputs` (decay, T, K, dtype, …) or to `evaluate` (form, backend,
        chunk_size, …), and every output and gradient is compared with `truth`. Or a function of the settings that
        returns a dict with a tensor, a pair (tensor, truth), an `Errors` or a number for each name. Or, with `like`, a
        kernel of your own. A function may be a string: "module:function" or "file.py:function".
    like: the operator whose arguments the kernel takes, by name or in that order, and with whose truth it is compared:
        "rwkv6", "kda", …, a described one, or "file.py:naive", which describes itself. The kernel may return o, a tuple
        that begins with o and the final state, or a result with these names; inputs without a gradient are left out.
        Settings that `inputs` does not take go to the kernel.
    over: the values of each axis, first axis slowest; a single value is an axis of one. fixed: constant settings.
    workers: processes beside this one; the subject must then be a name or a function that they can import. Each uses
        one thread and, in turn, one of the GPUs. One that dies is replaced, and its setting measured again.
    engine: "processes" on this machine, or "ray": an existing Ray cluster (RAY_ADDRESS, or a connected one), else a
        local one of `workers` cores; it needs flakit[ray].
    store: a file (or a folder) that receives every measurement at once. A sweep with an existing store measures only
        what is missing: a killed sweep resumes, and axes may gain values. ValueError for the store of another subject,
        of another version of it or with other constant settings.
    progress: called with (settings done, in all) after each; True: a bar. cancelled: before each; true stops the sweep.

    A setting that raises an error is a cell without measurements, with the message in `Sweep.raised`; it is not stored,
    so that it is measured again. RuntimeError, with the first setting, if every setting raises.
    """
    measure = _subject(subject, like)
    function("progress", None if isinstance(progress, bool) else progress), function("cancelled", cancelled)
    workers, engine = whole_number("workers", workers), one_of("engine", engine, ("processes", "ray"))
    if not isinstance(over, Mapping) or not over or not all(isinstance(name, str) for name in over):
        raise ValueError(f"over: expected a dict of axis names and their values, got {shown(over)}")
    axes = {name: _values(f"over[{name!r}]", values) for name, values in over.items()}
    for name in fixed:
        if name in axes:
            raise ValueError(f"{name}: expected it in `over` or as a setting that stays, got both")
    _check_names(measure, {**axes, **fixed})

    shape = tuple(len(values) for values in axes.values())
    result = Sweep(axes, {}, {}, True, np.full(shape, None, dtype=object))
    settings = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    places = list(zip(np.ndindex(*shape), settings, strict=True))
    with _opened(store, measure, like, fixed) as stored, _reported(progress, len(places)) as report:
        missing, done = [], 0
        for at, setting in places:
            earlier = stored.get(setting) if stored is not None else None
            if earlier is None:
                missing.append((at, setting))
            else:
                result._put(at, earlier)
                done += 1
        if done:
            report(done, len(places))
        if cancelled is not None and missing and cancelled():
            return replace(result, complete=False)
        settings = [setting for _, setting in missing]
        if engine == "ray" and missing:
            results = on_ray(_make, (_portable(subject), like, fixed), settings, workers)
        elif workers > 1:
            results = in_processes(_make, (_portable(subject), like, fixed), settings, min(workers, len(settings) or 1))
        else:
            results = here(partial(_setting, measure, fixed), settings)
        for i, measured in results:
            at, setting = missing[i]
            if isinstance(measured, Raised):
                result.raised[at] = measured.message
            else:
                result._put(at, measured)
                if stored is not None:
                    stored.put(setting, measured)
            done += 1
            report(done, len(places))
            if cancelled is not None and done < len(places) and cancelled():
                results.close()
                break
    if all(result.raised.flat):
        at, setting = places[0]
        named = ", ".join(f"{name}={shown(value)}" for name, value in setting.items())
        raise RuntimeError(f"sweep at {named}: {result.raised[at]}")
    return replace(result, complete=done == len(places))


def _setting(measure: Callable, fixed: Mapping[str, object], setting: Mapping[str, object]) -> Measured | Raised:
    """Measure one setting; return the measurements, or `Raised` with the error's message."""
    try:
        results = measure(**fixed, **setting)
        if not isinstance(results, Mapping):
            raise TypeError(f"subject: expected a function that returns a dict, got {shown(results)} from it")
        return {name: _measurements(name, x) for name, x in results.items()}
    except Exception as error:
        return Raised(str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}")


def _make(subject, like: str | None, fixed: Mapping[str, object]) -> Callable[[Mapping], Measured | Raised]:
    """Return the function that measures a setting, in a worker process."""
    return partial(_setting, _subject(subject, like), fixed)


@contextmanager
def _opened(store, measure, like, fixed) -> Iterator[Store | None]:
    if store is None:
        yield None
        return
    like = like.name if isinstance(like, Operator) else like
    opened = Store(store, fingerprint(getattr(measure, "subject", measure), like, fixed))
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def _reported(progress: Callable | bool | None, total: int) -> Iterator[Callable[[int, int], None]]:
    if not isinstance(progress, bool):
        yield progress or (lambda done, total: None)
        return
    if not progress:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total: bar.update(task, completed=done)


def _subject(subject: str | Operator | Callable, like: str | Operator | None) -> Callable[..., Mapping]:
    """Return the function that measures a subject at a setting: a `_Measure`, or the user's own function. Raises
    TypeError if the subject is no function."""
    if isinstance(subject, str) and ":" in subject:
        subject = named_function(subject, "subject")
    if like is not None:
        if not callable(subject):
            raise TypeError(f"subject: expected a kernel to compare with {like}, got {shown(subject)}")
        return _kernel(subject, operator(like))
    measure = _operator(operator(subject)) if isinstance(subject, (str, Operator)) else subject
    if not callable(measure):
        raise TypeError(f"subject: expected an operator's name or a function, got {type(subject).__name__}")
    return measure


def _portable(subject):
    """Return the subject in a form for other processes: operators by name, files by absolute path, else unchanged."""
    if isinstance(subject, str) and ".py:" in subject:
        return str(Path(subject).resolve())
    return subject.name if isinstance(subject, Operator) and OPERATORS.get(subject.name) is subject else subject


class _Measure:
    """A function that measures one setting, given as keyword arguments: the settings that its signature names. subject:
    the operator or kernel behind it, by whose source a store recognizes it."""

    def __init__(self, run: Callable[..., Mapping], subject: Operator | Callable, signature: inspect.Signature):
        self.run, self.subject, self.__signature__ = run, subject, signature

    def __call__(self, **setting) -> Mapping:
        return self.run(**setting)


def _keywords(function: Callable) -> list[inspect.Parameter]:
    """Return the keyword-only parameters of a function."""
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _operator(op: Operator) -> _Measure:
    makes, takes = _keywords(inputs), _keywords(evaluate)
    evaluation = {p.name for p in takes}

    def run(**setting):
        tensors = inputs(op, **{name: value for name, value in setting.items() if name not in evaluation})
        options = {name: value for name, value in setting.items() if name in evaluation}
        shared = {name: x for name, x in options.items() if name in ("grad_seed", "dfinal_state", "arriving")}
        exact = truth(op, tensors, **shared)
        return {name: (got, exact[name]) for name, got in evaluate(op, tensors, **options).items()}

    return _Measure(run, op, inspect.Signature(makes + takes))


def _kernel(kernel: Callable, op: Operator) -> _Measure:
    """Return a user's kernel as a `_Measure`, measured as `_operator` measures an operator."""
    called, makes = Called(kernel, op.tensors, op.states, op.axes, op.constants), _keywords(inputs)
    drawn = {p.name for p in makes}
    own = [
        p.replace(kind=p.KEYWORD_ONLY)
        for name, p in parameters_of(kernel).items()
        if name in called.named - drawn - {"grad_seed", *op.tensors}
    ]

    def run(grad_seed: int = 1, **setting):
        x = inputs(op, **{name: value for name, value in setting.items() if name in drawn})
        leaves = {name: y.detach().requires_grad_() for name, y in op.leaves(x).items()}
        options = op.arguments(leaves, x)
        tensors = {name: options.pop(name) for name in op.tensors}
        if "scale" in called.named:
            options.setdefault("scale", op.scale(x))
        if "output_final_state" in called.named:
            options["output_final_state"] = True
        options |= {name: value for name, value in setting.items() if name not in drawn}
        o, state = called.call(tensors, options)
        results = {"o": o.detach()}
        results |= {name: part.detach() for name, part in zip(op.outputs[1:], op.parts(state), strict=False)}
        if o.requires_grad:
            do, _ = cotangents(op, x, grad_seed=grad_seed)
            grads = torch.autograd.grad(o, tuple(leaves.values()), do, allow_unused=True)
            results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        exact = truth(op, x, grad_seed=grad_seed)
        return {name: (got, exact[name]) for name, got in results.items()}

    seed = inspect.Parameter("grad_seed", inspect.Parameter.KEYWORD_ONLY, default=1)
    return _Measure(run, kernel, inspect.Signature([*makes, seed, *own]))


def _check_names(measure: Callable, settings: Mapping) -> None:
    """Raise ValueError for a setting that `measure` does not take, before the first one is measured."""
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
        numbers = {"finite": 1 - x.share, "l2": x.l2, "worst": x.worst, "worst_row": x.worst_row}
        return {f"{name}.{key}": number for key, number in numbers.items()}, None if x.finite else x.worst_index
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
    items = () if isinstance(values, (Mapping, Set)) else listed(values)
    if not items:
        raise ValueError(f"{name}: expected a list of at least one value, got {shown(values)}")
    return items
