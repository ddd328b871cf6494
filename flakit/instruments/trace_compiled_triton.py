"""Watches compiled kernels for `flakit.trace`: each launch also runs a rewritten kernel that reports bad values.

The rewriting, by `trace_rewrite_triton`, is different code: a compiler may reorder its sums, or compile it wrongly. So
the program gets the result of the original kernel; the rewritten one works on copies, and its report counts only if it
computes the same. If it does not, the kernel is rewritten with subsets of the checks, smaller and smaller until each
computes the same, and their reports are merged. A check in no such subset is not measured, and a note says so.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from triton.runtime.jit import JITFunction

from .trace_record import How, Site, Tile, Trace
from .trace_rewrite_triton import NONE, ROW, Check, Part, Rewritten, rewritten

_DTYPES = {16: "float16", 17: "bfloat16", 32: "float32", 64: "float64"}


def read(
    trace: Trace, kernel: Rewritten, seen: Tensor, grid: tuple[int, ...], args: dict, memory: dict[int, list[Site]]
) -> None:
    """Add the report of a launch to a trace. seen: the buffer that the rewritten kernel filled. args: the kernel's
    arguments by name. memory: as in `_relate`."""
    count = len(kernel.checks)
    numbers = seen.cpu().numpy()
    if not numbers[: count * ROW].any():
        return
    rows, programs = numbers[: count * ROW].reshape(count, ROW), numbers[count * ROW :].reshape(-1, count + 1)
    grid3 = (*grid, 1, 1)[:3]
    bad = np.flatnonzero(rows[:, 0]).tolist()
    lowest = {i: int(np.flatnonzero(programs[:, i + 1])[0]) for i in bad}
    order = sorted(bad, key=lambda i: (lowest[i], programs[lowest[i], 0] != i + 1, i))
    sites = {i: _site(kernel.checks[i], rows[i], programs[:, i + 1], lowest[i], grid3) for i in bad}
    for i in order:
        trace.add(sites[i])
    for i in order:
        _relate(i, kernel, sites, args, memory)


def _site(check: Check, row: np.ndarray, first: np.ndarray, lowest: int, grid: tuple[int, ...]) -> Site:
    rank, bits = divmod(int(row[3]), 128)
    shape = tuple(int(n) for n in row[4 : 4 + rank])
    packed = int(first[lowest])
    lane, nan, inf = packed % 2**21, packed >> 21 & (2**21 - 1), packed >> 42
    index = tuple(int(i) for i in np.unravel_index(lane, shape)) if shape else ()
    program = tuple(int(i) for i in np.unravel_index(lowest, grid))
    tile = Tile(program, shape, _DTYPES.get(bits, "float8"), index, nan, inf)
    site = Site(
        check.place, check.operation, How.BORN, tile, check.into, tiles=int(row[0]), nan=int(row[1]), inf=int(row[2])
    )
    site.programs = {tuple(int(i) for i in np.unravel_index(p, grid)) for p in np.flatnonzero(first)[:4096]}
    return site


def _relate(i: int, kernel: Rewritten, sites: dict[int, Site], args: dict, memory: dict[int, list[Site]]) -> None:
    """Set the parents of site i, those that its bad values come from, and how its first bad tile arose. memory: the
    sites that wrote to each storage, by its address. A store or an atomic adds its own site."""
    site, check = sites[i], kernel.checks[i]
    for name in check.reads:
        for j in _definers(name, check.function, i, kernel, sites):
            site.descends_from(sites[j])
    for helper in check.calls:
        for j in sites:
            if kernel.checks[j].function == helper and kernel.checks[j].target == "return":
                site.descends_from(sites[j])
    argument = args.get(check.into)
    storage = argument.untyped_storage().data_ptr() if isinstance(argument, Tensor) else 0
    if check.operation == "load":
        site.how = How.READ
        for parent in memory.get(storage, ()) if storage else ():
            site.descends_from(parent)
    elif check.operation in ("store", "atomic"):
        site.how = How.STORED
        if storage:
            memory[storage] = [*memory.get(storage, ()), site]
    elif site.parents:
        only_inf = site.first.nan and not any(parent.nan for parent in site.parents)
        site.how = How.BECAME_NAN if only_inf else How.CARRIED


def _definers(name: str, function: str, before: int, kernel: Rewritten, sites: dict[int, Site]) -> list[int]:
    """Return the numbers of bad checks that define `name`: the last before check `before`, or in a loop the last."""
    own = [j for j in sites if kernel.checks[j].function == function and kernel.checks[j].target == name]
    earlier = [j for j in own if j < before]
    if earlier or own:
        return [max(earlier or own)]
    definers = []
    for caller, helper, passed in kernel.passed:
        if helper == function and name in passed:
            for outer in passed[name]:
                definers += _definers(outer, caller, len(kernel.checks), kernel, sites)
    return definers


def bound(kernel: JITFunction, args: Sequence, kwargs: dict, grid) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the arguments of a launch by name, without its options, and its grid."""
    signature = inspect.signature(kernel.fn)
    own = signature.bind(*args, **{name: x for name, x in kwargs.items() if name in signature.parameters})
    own.apply_defaults()
    return own.arguments, tuple(int(n) for n in (grid(own.arguments) if callable(grid) else grid))


class Copies:
    """Copies of a launch's `tensors` at one moment, on the CPU if `on_host`; tensors that share memory share a copy."""

    def __init__(self, on_host: bool = False):
        self.on_host = on_host
        self.tensors: list[Tensor] = []
        self._stored: dict[int, UntypedStorage] = {}

    def of(self, x: Any) -> Any:
        """Return the copy of x or, for a tuple, of its elements; an argument without memory is returned itself."""
        if isinstance(x, Tensor):
            self.tensors.append(x)
            copy = torch.empty(0, dtype=x.dtype, device="cpu" if self.on_host else x.device)
            return copy.set_(self.storage(x), x.storage_offset(), x.shape, x.stride())
        if isinstance(x, tuple):
            parts = map(self.of, x)
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        if is_descriptor(x):
            return replace(x, base=self.of(x.base))
        return x

    def storage(self, x: Tensor) -> UntypedStorage:
        """Return the copy of a tensor's storage."""
        stored = x.untyped_storage()
        if stored.data_ptr() not in self._stored:
            moves = self.on_host and stored.device.type != "cpu"
            self._stored[stored.data_ptr()] = stored.cpu() if moves else stored.clone()
        return self._stored[stored.data_ptr()]


def is_descriptor(x: Any) -> bool:
    """Whether x is a tensor descriptor, with the tensor as its `base`."""
    return is_dataclass(x) and isinstance(getattr(x, "base", None), Tensor)


MOST_APART = 2**-6
"""The error of sums in another order in 16 bits, as a share of a tensor's largest number."""


def alike(x: Any, y: Any) -> bool:
    """Whether two arguments hold equal tensors, up to rounding: at most `MOST_APART` of the largest number apart."""
    if type(x) is tuple:
        return all(map(alike, x, y))
    if not isinstance(x, Tensor):
        return not is_dataclass(x) or not hasattr(x, "base") or alike(x.base, y.base)
    if not x.is_floating_point():
        return torch.equal(x, y)
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not torch.equal(x.isnan(), y.isnan()):
        return False
    x, y = x.where(finite, 0.0).float(), y.where(finite, 0.0).float()
    return not x.numel() or bool((x - y).abs().max() <= MOST_APART * x.abs().max())


def watch_parts(
    kernel: Rewritten,
    parts: list[Part],
    run_part: Callable[[Part], tuple[Tensor, list[str]]],
    compile_part: Callable[[Part], None],
) -> tuple[dict[Part, Tensor], dict[Part, list[str]]]:
    """Watch a launch in parts of the checks, each small enough that its rewriting computes the same as the kernel.

    run_part: launches a part's rewriting, and returns its report and the arguments in which it differs. compile_part:
    only compiles it. Returns the report of each part, and, for each part that differs and cannot be split, in what.
    """
    settled: dict[Part, Tensor] = {}
    not_measured: dict[Part, list[str]] = {}
    wrong_without: bool | None = None  # whether the rewriting differs without any check; None: not yet known
    while parts:
        if len(parts) > 1:
            # Found here, since two threads that look at the same time for a function's key may find half of it.
            for part in parts:
                getattr(kernel.with_part(part).kernel, "cache_key", None)
            with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="flakit-compile") as pool:
                wait([pool.submit(compile_part, part) for part in parts])  # the launch raises the error again
        further: list[Part] = []
        for part in parts:
            seen, other = run_part(part)
            finer = kernel.smaller(part) if other else []
            if finer and wrong_without is None:
                wrong_without = bool(run_part(NONE)[1])
            if not other:
                settled[part] = seen
            elif finer and not wrong_without:  # otherwise no part can be right
                further += finer
            else:
                not_measured[part] = other
        parts = further
    return settled, not_measured


@contextmanager
def watch_compiled(trace: Trace, memory: dict[int, list[Site]], instead: str) -> Iterator[Callable[[], bool]]:
    """In the `with` block, also run each compiled kernel in its rewritten form, and add its report to the trace.

    Yields a function that says whether this is going on now: PyTorch's operations are then those of the trace. Without
    a GPU, a launch raises RuntimeError, whose message says what to do `instead`.
    """
    original = JITFunction.run
    ours: list = []
    running: list = []

    def run(kernel, *args, grid, warmup, **kwargs):
        if warmup or any(kernel is own for own in ours):
            return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        if not torch.cuda.is_available():
            raise RuntimeError(f"trace: kernel {kernel.__name__} is compiled in this process: {instead}")
        running.append(kernel)
        try:
            return launch(kernel, args, grid, kwargs)
        finally:
            running.pop()

    def launch(kernel, args, grid, kwargs):
        rewriting = rewritten(kernel)
        if not any(rewriting.kernel is own for own in ours):
            ours.append(rewriting.kernel)
        arguments, shape = bound(kernel, args, kwargs, grid)
        device = next((x.device for x in arguments.values() if isinstance(x, Tensor)), torch.device("cuda"))
        before = Copies()
        copied, named = [before.of(x) for x in args], {name: before.of(x) for name, x in kwargs.items()}
        out = original(kernel, *args, grid=shape, warmup=False, **kwargs)
        trace.grids[kernel.__name__] = (*shape, 1, 1)[:3]

        def run_part(part: Part) -> tuple[Tensor, list[str]]:
            """Return the report of a part of the checks, and the arguments in which its rewriting differs."""
            seen, apart = rewriting.buffer(shape, device), Copies()
            own = {name: apart.of(x) for name, x in named.items()}
            original(rewriting.with_part(part).kernel, seen, *map(apart.of, copied), grid=shape, warmup=False, **own)
            other = [name for name, x in arguments.items() if not alike(x, apart.of(before.of(x)))]
            return seen, other

        def compile_part(part: Part) -> None:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # which is a thread's own
                seen = rewriting.buffer(shape, device)
                original(rewriting.with_part(part).kernel, seen, *copied, grid=shape, warmup=True, **named)

        kind = tuple(x.dtype for x in arguments.values() if isinstance(x, Tensor))
        settled, not_measured = watch_parts(
            rewriting, rewriting.settled.get(kind, rewriting.parts), run_part, compile_part
        )
        rewriting.settled[kind] = [*settled, *not_measured]
        if settled:
            read(trace, rewriting, rewriting.merged(list(settled.values())), shape, arguments, memory)
        if not_measured and rewriting.checks:
            places = {check.place for i, check in enumerate(rewriting.checks) for j, n in not_measured if i % n == j}
            lines = ", ".join(dict.fromkeys(place.short for place in sorted(places, key=lambda x: (x.file, x.line))))
            other = ", ".join(dict.fromkeys(name for names in not_measured.values() for name in names))
            trace.note(
                f"{kernel.__name__}: rewritten, so that it reports on itself, it computes something else ({other}) "
                f"with checks of some lines, which are not measured: {lines}"
            )
        return out

    vars(run)["rewrites"] = True  # see `runs_gluon`
    with patch.object(JITFunction, "run", run):
        yield lambda: bool(running)
