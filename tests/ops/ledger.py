"""The resources of compiled kernels, recorded in data/compiled.json, with rows of several Tritons.

Compiling is deterministic, so each kernel is compiled once. The key of a row is a hash of everything that its machine
code depends on. A launch without a row, of a changed kernel or another Triton, is compiled when a test needs it;
`python -m tests.ops.record_compiled` brings the file up to date. A row, with the names of its columns:

    triton        3.6.0
    row           gsa.steep_slot_grads 16-bit        of the launch table
    kernel        steep_slot_grads_kernel+PACKED+SCALED  with the switches that are on
    constants     H 2, G 2, M 20, C 32, …            and launch options
    chip          90                                 compute capability
    registers     255                                a thread
    spilled       64                                 bytes of local memory a thread
    shared        4096                               bytes a program
    twice         0.103                              fraction of tile elements computed in two layouts
    instructions  a520a42fdf9d5fa4                   hash of the PTX
    key           8d08163db39fcdfc                   hash of all that the machine code depends on
"""

import hashlib
import inspect
import io
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from unittest import mock

import triton
from triton.compiler.compiler import make_backend
from triton.language import constexpr
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction, get_cache_invalidating_env_vars

from flakit.bench.launches import Launch
from flakit.numerics import recorded
from tests.ops.compiling import Compiled, absent_gpu, compile_for, target

FILE = Path(__file__).parents[2] / "data" / "compiled.json"
COMMAND = "python -m tests.ops.record_compiled"
COLUMNS = tuple(field.name for field in fields(Compiled))


def needs(launch: Launch, capability: int) -> Compiled:
    """Return the resources and the code's hash of a launch on a GPU of a compute capability."""
    compiled = read().get(key(launch, capability))
    if compiled is None:
        warnings.warn(f"compiled, since data/compiled.json has no such code: {COMMAND}", stacklevel=2)
        compiled = compile_for(launch, capability)
    return compiled


def read() -> dict[str, Compiled]:
    """Return this Triton's rows by key."""
    return _read(FILE, FILE.stat().st_mtime_ns) if FILE.is_file() else {}


@cache
def _read(path: Path, _: int) -> dict[str, Compiled]:
    return {row["key"]: Compiled(*(row[name] for name in COLUMNS)) for row in recorded.read(path).rows if _ours(row)}


def of_other_tritons() -> list[dict]:
    """Return the rows of other Tritons: only the Triton that compiled a row can bring it up to date."""
    return [dict(row) for row in recorded.read(FILE).rows if not _ours(row)] if FILE.is_file() else []


def _ours(row: Mapping) -> bool:
    return row.get("triton", triton.__version__) == triton.__version__


def key(launch: Launch, capability: int) -> str:
    """Return a hash of what Triton would compile: code, types, options, chip and versions."""
    request = []

    def record(kernel, _, signature, device, constants, options, attributes, warmup):
        request.extend((signature, constants, options, attributes))  # returns no kernel, which ends the launch

    with mock.patch.object(JITFunction, "_do_compile", record), absent_gpu(capability, ("key", capability)):
        launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    signature, constants, options, attributes = request
    constants = {name: text(x) if isinstance(x, JITCallable) else x for name, x in constants.items()}
    attributes = {place: known for place, known in attributes.items() if known}
    parts = [
        triton.__version__,
        make_backend(target(capability)).hash(),  # the chip and the version of ptxas
        options.hash(),
        get_cache_invalidating_env_vars(),
        text(launch.kernel),
        *(sorted(x.items()) for x in (signature, constants, attributes)),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


@cache
def text(function: JITCallable) -> str:
    """Return a hash of the code of a kernel or a helper, of all helpers that it calls and of the constants in them."""
    finder = _CodeHasher(function)
    finder.visit(function.parse())
    return finder.ret


class _CodeHasher(DependenciesFinder):
    """Triton's own hash of a function and what it depends on, but without line numbers and comments, and with the
    constants of other modules."""

    def __init__(self, function: JITCallable):
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function.__name__, function.__globals__, nonlocals, _code(function.src))

    def _update_hash(self, function: JITCallable) -> None:
        self.hasher.update(f"{text(function)} {getattr(function, 'noinline', False)}".encode())

    def record_reference(self, value, where=None, name=None) -> None:
        super().record_reference(value, where, name)
        if isinstance(value, constexpr) or not (callable(value) or inspect.ismodule(value)):
            self.hasher.update(f"{name} {value!r}".encode())


def _code(source: str) -> str:
    """Return the tokens of a source, a line each, without comments, docstrings and blank lines."""
    ignored = tokenize.COMMENT, tokenize.NL
    line_starts = tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
    tokens, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and not (token.type == tokenize.STRING and before in line_starts):
            tokens.append(f"{tokenize.tok_name[token.type]} {token.string}")
        before = before if token.type in ignored else token.type
    return "\n".join(tokens)
