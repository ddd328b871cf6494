"""What compiled kernels need, kept in data/compiled.json: compiling says the same each time, so each code is compiled
once. Rows of several Tritons stand beside each other.

An entry is found by a hash of all that machine code follows from. What has none, a kernel that changed or one for
another Triton, is compiled where it is asked for; `python -m tests.ops.record_compiled` brings the file up to date.
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
    """What a launch needs on a GPU of a compute capability, and which code it is."""
    found = read().get(key(launch, capability))
    if found is None:
        warnings.warn(f"compiled, since data/compiled.json has no such code: {COMMAND}", stacklevel=2)
        found = compile_for(launch, capability)
    return found


def read() -> dict[str, Compiled]:
    """What the file has, by key."""
    return _read(FILE, FILE.stat().st_mtime_ns) if FILE.is_file() else {}


@cache
def _read(path: Path, _: int) -> dict[str, Compiled]:
    return {row["key"]: Compiled(*(row[name] for name in COLUMNS)) for row in recorded.read(path).rows if _ours(row)}


def of_other_tritons() -> list[dict]:
    """The rows that another Triton than the one here compiled, which it alone can bring up to date."""
    return [dict(row) for row in recorded.read(FILE).rows if not _ours(row)] if FILE.is_file() else []


def _ours(row: Mapping) -> bool:
    return row.get("triton", triton.__version__) == triton.__version__


def key(launch: Launch, capability: int) -> str:
    """A hash of what Triton would compile, with which options, for which chip and by which versions."""
    asked = []

    def listed(kernel, _, signature, device, constants, options, attributes, warmup):
        asked.extend((signature, constants, options, attributes))  # and, with no kernel, the launch ends

    with mock.patch.object(JITFunction, "_do_compile", listed), absent_gpu(capability, ("asked", capability)):
        launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    signature, constants, options, attributes = asked
    constants = {name: text(x) if isinstance(x, JITCallable) else x for name, x in constants.items()}
    attributes = {place: told for place, told in attributes.items() if told}  # an argument of which nothing is known
    said = [
        triton.__version__,
        make_backend(target(capability)).hash(),  # the chip and the version of ptxas
        options.hash(),
        get_cache_invalidating_env_vars(),
        text(launch.kernel),
        *(sorted(x.items()) for x in (signature, constants, attributes)),
    ]
    return hashlib.sha256("\n".join(map(str, said)).encode()).hexdigest()[:16]


@cache
def text(function: JITCallable) -> str:
    """A hash of the code of a kernel or a helper, of all helpers that it reaches and of the constants in them."""
    reached = _Reached(function)
    reached.visit(function.parse())
    return reached.ret


class _Reached(DependenciesFinder):
    """What code reaches, as Triton finds it for its own cache. That one also knows the line at which each function
    stands, and does not know the constants of other modules."""

    def __init__(self, function: JITCallable):
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function.__name__, function.__globals__, nonlocals, _words(function.src))

    def _update_hash(self, function: JITCallable) -> None:
        self.hasher.update(f"{text(function)} {getattr(function, 'noinline', False)}".encode())

    def record_reference(self, value, where=None, name=None) -> None:
        super().record_reference(value, where, name)
        if isinstance(value, constexpr) or not (callable(value) or inspect.ismodule(value)):
            self.hasher.update(f"{name} {value!r}".encode())


def _words(source: str) -> str:
    """What of it makes code: comments and texts of functions do not, nor do blank lines."""
    beside_code = tokenize.COMMENT, tokenize.NL
    between_lines = tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
    words, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in beside_code and not (token.type == tokenize.STRING and before in between_lines):
            words.append(f"{tokenize.tok_name[token.type]} {token.string}")
        before = before if token.type in beside_code else token.type
    return "\n".join(words)
