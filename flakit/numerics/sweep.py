"""Run something over a grid of settings and keep what can be drawn: where it is finite, and how far it is from truth.

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
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arguments import function, listed, named_function, one_of, plain, shown, whole_number
from .errors import Errors, compare
from .evaluate import cotangents, evaluate, truth
from .inputs import inputs
from .operators import OPERATORS, Operator, operator
from .sweep_workers import Measured, Raised, Store, fingerprint, here, in_processes, in_words, on_ray


@dataclass(frozen=True)
class Sweep:
    """Measurements over a grid. Every grid has the shape of the axes, in their order; NaN where nothing was measured.

    grids: for a tensor x, "x.finite" (the share of its values that are finite) and, with a truth, "x.l2", "x.worst" and
        "x.worst_row" (see `numerics.errors`); a plain number keeps its own name.
    first: for a tensor x, the index of its first non-finite value, None where there is none.
    complete: False when the sweep was cancelled.
    raised: what the subject raised at a setting, in words, None where it raised nothing.
    """

    axes: Mapping[str, tuple]
    grids: Mapping[str, np.ndarray]
    first: Mapping[str, np.ndarray]
    complete: bool
    raised: np.ndarray

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
        """One dict a setting, axes first, then every measurement: what `numerics.recorded.write` takes.

        Where any setting raised something, "raised" says what, and "" where nothing was raised.
        """
        some = any(self.raised.flat)
        return [
            {name: in_words(values[i]) for (name, values), i in zip(self.axes.items(), at, strict=True)}
            | {name: float(grid[at]) for name, grid in self.grids.items()}
            | ({"raised": self.raised[at] or ""} if some else {})
            for at in np.ndindex(*(len(values) for values in self.axes.values()))
        ]

    def to_csv(self, path: str | os.PathLike) -> Path:
        """Write `rows` as a table with a line of names; returns the path."""
        path, rows = Path(path), self.rows()
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        return path

    def to_parquet(self, path: str | os.PathLike) -> Path:
        """Write `rows` as a Parquet file, which needs pyarrow; returns the path."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError("to_parquet: it needs pyarrow (pip install pyarrow); to_csv needs nothing") from error
        parquet.write_table(pyarrow.Table.from_pylist(self.rows()), path)
        return Path(path)

    def to_dict(self) -> dict:
        """Plain lists and numbers: {"axes": …, "grids": …, "first": …, "raised": …, "complete": …}."""
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
        returns a dict: a tensor, a pair (tensor, truth), an `Errors` or a number under each name. Or, with `like`, a
        kernel of your own. A function may be named: "module:function" or "file.py:function".
    like: the operator whose arguments the kernel takes, by their names or in that order, and whose truth it is compared
        with: "rwkv6", "kda", …, a described one, or "file.py:naive", which describes itself. It may return o, a tuple
        that begins with o and the final state, or a result with these names; an input that gets no gradient has none
        here. A setting that `inputs` does not know goes to the kernel.
    over: the values of each axis, first axis slowest: a list, an array, or a single value, an axis of one.
    fixed: settings that stay.
    workers: processes beside this one; the subject then has to be a name or a function that they can import. Each takes
        one thread, and a GPU of its own in turn. One that dies is replaced, its setting measured again.
    engine: "processes", of this machine, or "ray": an existing Ray cluster (RAY_ADDRESS, or one that is connected to),
        else a local one of `workers` cores; it needs flakit[ray].
    store: a file (or a folder) that keeps every measurement when it is made. A sweep that finds its own measures only
        what is missing: one that was killed goes on, and its axes may have more values than before. ValueError for a
        store of another subject, of another version of it or with other settings that stay.
    progress: called with (settings done, settings in all) after each; True: a bar. cancelled: asked before each, True
        stops there.

    A setting that raises an error is a cell without measurements, and `Sweep.raised` says why; a store does not keep
    it, so that it is measured again. RuntimeError, which names the first setting, where every setting raises.
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
    grid = Grid(axes, shape, {}, {}, np.full(shape, None, dtype=object))
    settings = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    places = list(zip(np.ndindex(*shape), settings, strict=True))
    with _kept(store, measure, like, fixed) as kept, _told(progress, len(places)) as tell:
        missing, done = [], 0
        for at, setting in places:
            known = kept.get(setting) if kept is not None else None
            if known is None:
                missing.append((at, setting))
            else:
                grid.put(at, known)
                done += 1
        if done:
            tell(done, len(places))
        if cancelled is not None and missing and cancelled():
            return grid.sweep(complete=False)
        settings = [setting for _, setting in missing]
        if engine == "ray" and missing:
            found = on_ray(_make, (_portable(subject), like, fixed), settings, workers)
        elif workers > 1:
            found = in_processes(_make, (_portable(subject), like, fixed), settings, min(workers, len(settings) or 1))
        else:
            found = here(partial(_setting, measure, fixed), settings)
        for i, measured in found:
            at, setting = missing[i]
            if isinstance(measured, Raised):
                grid.raised[at] = measured.words
            else:
                grid.put(at, measured)
                if kept is not None:
                    kept.put(setting, measured)
            done += 1
            tell(done, len(places))
            if cancelled is not None and done < len(places) and cancelled():
                found.close()
                break
    if all(grid.raised.flat):
        at, setting = places[0]
        raise RuntimeError(f"sweep at {_named(setting)}: {grid.raised[at]}")
    return grid.sweep(complete=done == len(places))


@dataclass
class Grid:
    """Measurements as they come in."""

    axes: Mapping[str, tuple]
    shape: tuple[int, ...]
    grids: dict[str, np.ndarray]
    first: dict[str, np.ndarray]
    raised: np.ndarray

    def sweep(self, complete: bool) -> Sweep:
        return Sweep(self.axes, self.grids, self.first, complete, self.raised)

    def put(self, at: tuple[int, ...], measured: Measured) -> None:
        for name, (numbers, index) in measured.items():
            for key, number in numbers.items():
                self.grids.setdefault(key, np.full(self.shape, np.nan))[at] = number
            if f"{name}.finite" in numbers:
                self.first.setdefault(name, np.full(self.shape, None, dtype=object))[at] = index


def _setting(measure: Callable, fixed: Mapping[str, object], setting: Mapping[str, object]) -> Measured | Raised:
    """One setting measured, or what went wrong there."""
    try:
        found = measure(**fixed, **setting)
        if not isinstance(found, Mapping):
            raise TypeError(f"subject: expected a function that returns a dict, got {shown(found)} from it")
        return {name: _measurements(name, x) for name, x in found.items()}
    except Exception as error:
        return Raised(str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}")


def _named(setting: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in setting.items())


def _make(subject, like: str | None, fixed: Mapping[str, object]) -> Callable[[Mapping], Measured | Raised]:
    """In a worker: what measures a setting."""
    return partial(_setting, _subject(subject, like), fixed)


@contextmanager
def _kept(store, measure, like, fixed) -> Iterator[Store | None]:
    if store is None:
        yield None
        return
    like = like.name if isinstance(like, Operator) else like
    kept = Store(store, fingerprint(getattr(measure, "subject", measure), like, fixed))
    try:
        yield kept
    finally:
        kept.close()


@contextmanager
def _told(progress: Callable | bool | None, total: int) -> Iterator[Callable[[int, int], None]]:
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


# --- subjects -------------------------------------------------------------------------------------------------------


def _subject(subject: str | Operator | Callable, like: str | Operator | None) -> Callable[..., Mapping]:
    """A function of the settings, a `_Measure` unless it is somebody's own."""
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
    """What another process gets: an operator by its name, a file by its whole path, anything else as it is."""
    if isinstance(subject, str) and ".py:" in subject:
        return str(Path(subject).resolve())
    return subject.name if isinstance(subject, Operator) and OPERATORS.get(subject.name) is subject else subject


class _Measure:
    """A function of the settings that says which it takes; subject: what a store is kept for."""

    def __init__(self, run: Callable[..., Mapping], subject: Operator | Callable, signature: inspect.Signature):
        self.run, self.subject, self.__signature__ = run, subject, signature

    def __call__(self, **setting) -> Mapping:
        return self.run(**setting)


def _operator(op: Operator) -> _Measure:
    evaluation = {p.name for p in inspect.signature(evaluate).parameters.values() if p.kind is p.KEYWORD_ONLY}

    def run(**setting):
        x = inputs(op, **{name: value for name, value in setting.items() if name not in evaluation})
        how = {name: value for name, value in setting.items() if name in evaluation}
        exact = truth(op, x, **{name: how[name] for name in ("grad_seed", "dfinal_state", "arriving") if name in how})
        return {name: (got, exact[name]) for name, got in evaluate(op, x, **how).items()}

    makes = [p for p in inspect.signature(inputs).parameters.values() if p.kind is p.KEYWORD_ONLY]
    takes = [p for p in inspect.signature(evaluate).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return _Measure(run, op, inspect.Signature(makes + takes))


def _kernel(kernel: Callable, op: Operator) -> _Measure:
    """A kernel of somebody's own, measured as `_operator` does an operator."""
    try:
        parameters = dict(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):  # some callables have none
        parameters = {}
    makes = [p for p in inspect.signature(inputs).parameters.values() if p.kind is p.KEYWORD_ONLY]
    made = {p.name for p in makes} | {"grad_seed"}
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values() if p.name not in made | set(op.tensors)
           and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]  # fmt: skip

    def run(grad_seed: int = 1, **setting):
        x = inputs(op, **{name: value for name, value in setting.items() if name in made})
        leaves = {name: y.detach().requires_grad_() for name, y in op.leaves(x).items()}
        given = op.arguments(leaves, x)
        tensors = [given.pop(name) for name in op.tensors]
        if "scale" in parameters:
            given.setdefault("scale", op.scale(x))
        if "output_final_state" in parameters:
            given["output_final_state"] = True
        given |= {name: value for name, value in setting.items() if name not in made}
        given |= {name: x for name, x in op.constants.items() if name in parameters and name not in given}
        if set(op.tensors) <= set(parameters):
            out = kernel(**dict(zip(op.tensors, tensors, strict=True)), **given)
        else:
            out = kernel(*tensors, **given)
        o, state = _outputs(out)
        found = {"o": o.detach()} | {
            name: part.detach() for name, part in zip(op.outputs[1:], op.parts(state), strict=False)
        }
        if o.requires_grad:
            do, _ = cotangents(op, x, grad_seed=grad_seed)
            grads = torch.autograd.grad(o, tuple(leaves.values()), do, allow_unused=True)
            found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        exact = truth(op, x, grad_seed=grad_seed)
        return {name: (got, exact[name]) for name, got in found.items()}

    seed = inspect.Parameter("grad_seed", inspect.Parameter.KEYWORD_ONLY, default=1)
    return _Measure(run, kernel, inspect.Signature([*makes, seed, *own]))


def _outputs(out: Any) -> tuple[Tensor, Any]:
    """o and, where there is one, the final state, of whatever a kernel returns."""
    if isinstance(out, Tensor):
        return out, None
    if hasattr(out, "o"):
        return out.o, getattr(out, "final_state", None)
    if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
        return out[0], out[1] if len(out) > 1 else None
    raise TypeError(f"subject: expected o, a tuple that begins with o, or a result with o, got {shown(out)}")


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
