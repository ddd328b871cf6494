"""Rewrites a Triton kernel's source so that it reports non-finite values, for traces of compiled kernels.

A check follows each assignment of a float tile and surrounds each store; it compiles to nothing if a value is no float
tile. Loads, exponentials and products inside a larger expression are assigned to names first, so that each has a check
of its own. The checks write to an int64 buffer, `seen`:

    sites x 8               tiles, NaN lanes, infinite lanes, rank and dtype, sizes (a tile has at most four axes here)
    programs x (1 + sites)  a program's first site + 1, then the first tile of each site: lane, NaN and infinite lanes

-inf does not count, for masks use it. The parents of a site follow from the names in the source.
"""

import ast
import inspect
import linecache
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from .trace_record import Place

SEEN = "flakit_seen"
ROW = 8
_HOISTED = ("load", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "dot", "sum", "cumsum")
Part = tuple[int, int]
"""A subset of a kernel's checks: (i, n) are those whose site is i modulo n."""
ALL, NONE = (0, 1), (1, 1)
MOST_CHECKS = 32
"""Checks in one kernel: scores of RWKV7 took 130 s to compile on one core with all 183, and 14 s with 23 of them."""


@triton.jit
def note(x, seen, SITE: tl.constexpr, SITES: tl.constexpr):
    """Report in the buffer `seen` where the float tile x is NaN or +inf; compiles to nothing for anything else."""
    if isinstance(x, tl.tensor):
        if x.dtype.is_floating():
            leave_note(x, seen, SITE, SITES)


@triton.jit
def note_store(pointers, x, mask, seen, SITE: tl.constexpr, SITES: tl.constexpr):
    """Report in `seen`, like `note`, where a stored value x is NaN or +inf in its memory's dtype and not masked."""
    if isinstance(x, tl.tensor):
        if x.dtype.is_floating():
            if pointers.dtype.is_ptr():
                if pointers.dtype.element_ty.is_floating():
                    x = x.to(pointers.dtype.element_ty)
            if isinstance(mask, tl.tensor):
                x = tl.where(mask, x, 0.0)
            leave_note(x, seen, SITE, SITES)


@triton.jit
def lanes(x):
    """Return the flat index of each element of a tile, in the tile's shape."""
    if len(x.shape) == 1:
        return tl.arange(0, x.shape[0])
    elif len(x.shape) == 2:
        return tl.arange(0, x.shape[0])[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    else:
        return tl.reshape(tl.arange(0, x.numel), x.shape)


@triton.jit
def leave_note(x, seen, SITE: tl.constexpr, SITES: tl.constexpr):
    wide = x
    if x.dtype.primitive_bitwidth < 32:
        wide = x.to(tl.float32)
    bad = (wide != wide) | (wide == float("inf"))
    if len(x.shape) > 0:
        lane = tl.min(tl.where(bad, lanes(x), x.numel))
    else:
        lane = tl.where(bad, 0, 1)
    if lane < x.numel:
        counted = tl.where(wide != wide, 1, 2097152).to(tl.int64)
        if len(x.shape) > 0:
            counted = tl.sum(tl.where(bad, counted, 0))
        row = seen + SITE * 8
        tl.atomic_add(row, 1)
        tl.atomic_add(row + 1, counted % 2097152)
        tl.atomic_add(row + 2, counted // 2097152)
        if x.dtype == tl.bfloat16:
            tl.store(row + 3, len(x.shape) * 128 + 17)
        else:
            tl.store(row + 3, len(x.shape) * 128 + x.dtype.primitive_bitwidth)
        for axis in tl.static_range(len(x.shape)):
            tl.store(row + 4 + axis, x.shape[axis])
        program = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2)
        own = seen + SITES * 8 + (program + tl.program_id(2)) * (SITES + 1)
        nothing = tl.full((), 0, tl.int64)
        tl.atomic_cas(own, nothing, tl.full((), SITE + 1, tl.int64))
        tl.atomic_cas(own + SITE + 1, nothing, lane.to(tl.int64) + counted * 2097152)


@dataclass(frozen=True)
class Check:
    """One check in the rewritten kernel: its place, the operation that it checks, and the names that this `reads`.

    function: the kernel or helper. target: the assigned name, "" for a store and a returned value. into: the kernel's
    argument of the load or store, "x or y" if a helper is called with both. calls: the helpers that it calls.
    """

    place: Place
    operation: str
    function: str
    target: str
    reads: tuple[str, ...]
    into: str = ""
    calls: tuple[str, ...] = ()


@dataclass
class Rewritten:
    """A kernel that reports on itself: `kernel` takes the buffer `seen` before the arguments of the original, `plain`.
    checks: all of the kernel, also if `kernel` contains only a part."""

    plain: object
    kernel: object
    checks: list[Check]
    passed: list[tuple[str, str, dict[str, tuple[str, ...]]]] = field(default_factory=list)
    """Calls of helpers: caller, helper, and the names in each of the helper's arguments."""
    settled: dict[tuple, list[Part]] = field(default_factory=dict)
    """The parts, together all checks, in which a launch with these dtypes was last watched."""

    def with_part(self, part: Part) -> "Rewritten":
        """Return the same kernel with a subset of the checks: part (i, n) has those numbered i, i + n, i + 2n, …"""
        return self if part == ALL else _rewritten(self.plain, part)

    @property
    def parts(self) -> list[Part]:
        """The subsets of the checks to start with: all in one kernel, or, if they are many, several. Compile time grows
        faster than a kernel, and parts compile in parallel."""
        n = 1
        while len(self.checks) > n * MOST_CHECKS:
            n = 4 if n == 1 else 2 * n
        return [(i, n) for i in range(n)]

    def smaller(self, part: Part) -> list[Part]:
        """Split a part: all checks into four, any other into two, a single check into none."""
        (i, n), sites = part, len(self.checks)
        finer = 4 if part == ALL else 2 * n
        return [(j, finer) for j in range(i, min(finer, sites), n)] if i + n < sites else []

    def merged(self, seen: list[Tensor]) -> Tensor:
        """Return the reports of rewritings with different checks as one report. seen: their buffers."""
        total = seen[0].clone()
        first = total[len(self.checks) * ROW :: len(self.checks) + 1]  # of each program, its first site + 1
        for other in seen[1:]:
            own, others = first.clone(), other[len(self.checks) * ROW :: len(self.checks) + 1]
            total += other  # a site's numbers are zeros in all but one
            first.copy_(torch.where((own == 0) | (others == 0), own + others, torch.minimum(own, others)))
        return total

    def buffer(self, grid: tuple[int, ...], device: torch.device) -> Tensor:
        """Allocate `seen`, zeroed, for the programs of a grid."""
        sites = len(self.checks)
        return torch.zeros(sites * ROW + math.prod(grid) * (sites + 1), dtype=torch.int64, device=device)


def _preceded(visit: Callable) -> Callable[["_Watch", Any], list[ast.stmt]]:
    """Decorate a visitor method: statements that assign subexpressions to names precede those that it returns."""

    def visit_with_names(self: "_Watch", node: ast.stmt) -> list[ast.stmt]:
        outer, self.before = self.before, []
        own = visit(self, node)
        statements, self.before = [*self.before, *own], outer
        return statements

    return visit_with_names


class _Watch(ast.NodeTransformer):
    """Adds the checks to the syntax tree of one function."""

    def __init__(self, kernel: str, function, space: dict, first: int, rewriting: "_Rewriting"):
        self.kernel, self.name, self.file = kernel, function.__name__, inspect.getsourcefile(function) or ""
        self.space, self.first, self.rewriting = space, first, rewriting
        self.is_helper = function.__name__ != kernel
        self.own = _not_constant(function)
        self.before: list[ast.stmt] = []
        self.conditional = 0
        self.defined: dict[str, ast.expr] = {}

    # what a name stands for, of those that are no local ones
    def resolve(self, node: ast.expr):
        if isinstance(node, ast.Name):
            return self.space.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None

    def check(self, node: ast.stmt, text: str, operation: str, target: str, reads, into=(), calls=()) -> int:
        """Add a `Check`, of the fields named like the arguments, and return its number. text: the source text of the
        checked expression. into: the function's parameters whose memory the statement `node` accesses."""
        place = Place(self.file, node.lineno + self.first - 1, text, self.kernel)
        check = Check(place, operation, self.name, target, tuple(dict.fromkeys(reads)), into, tuple(calls))
        self.rewriting.checks.append(check)
        return len(self.rewriting.checks) - 1

    def call(self, function: str, *arguments: str, site: int) -> ast.stmt:
        if site % self.rewriting.part[1] != self.rewriting.part[0]:
            return ast.Pass()
        return ast.parse(f"{function}({', '.join(arguments)}, {SEEN}, {site}, flakit_sites)").body[0]

    def visit_IfExp(self, node):
        self.conditional += 1
        node = self.generic_visit(node)
        self.conditional -= 1
        return node

    visit_BoolOp = visit_Lambda = visit_ListComp = visit_GeneratorExp = visit_IfExp

    def visit_Call(self, node):
        text = ast.unparse(node)
        function = self.resolve(node.func)
        self.generic_visit(node)
        if type(function).__name__ in ("JITFunction", "InterpretedFunction") and not _of_triton(function):
            self.rewriting.add(function)
            parameters = inspect.signature(function.fn).parameters
            passed = {name: _names(x) for name, x in zip(parameters, node.args, strict=False)}
            passed |= {x.arg: _names(x.value) for x in node.keywords if x.arg}
            self.rewriting.passed.append((self.name, function.fn.__name__, passed))
            self.space[_traced(function)] = None  # filled in when all are rewritten
            node.func = ast.Name(_traced(function), ast.Load())
            node.args.insert(0, ast.Name(SEEN, ast.Load()))
            return node
        operation = getattr(function, "__name__", "")
        if self.conditional or operation not in _HOISTED or not _of_triton(function):
            return node
        name = f"flakit_{len(self.rewriting.checks)}"
        into = self.base(node.args[0]) if operation == "load" and node.args else ()
        reads = _names(node) if operation != "load" else ()
        site = self.check(node, text, operation, name, reads, into)
        self.before += [
            ast.Assign([ast.Name(name, ast.Store())], node, lineno=node.lineno), self.call("note", name, site=site),
        ]  # fmt: skip
        return ast.Name(name, ast.Load())

    def base(self, pointers: ast.expr, depth: int = 8) -> tuple[str, ...]:
        """Return the parameters of this function into which `pointers` may point, several if `tl.where` selects one.
        depth: how many assignments to trace back."""
        for node in ast.walk(pointers):
            if isinstance(node, ast.Call) and len(node.args) == 3:
                chosen = self.resolve(node.func)
                if getattr(chosen, "__name__", "") == "where" and _of_triton(chosen):
                    return (*self.base(node.args[1], depth), *self.base(node.args[2], depth))
            if isinstance(node, ast.Name):
                if node.id in self.own:
                    return (node.id,)
                if depth and node.id in self.defined:
                    parameters = self.base(self.defined[node.id], depth - 1)
                    if parameters:
                        return parameters
        return ()

    @_preceded
    def visit_Assign(self, node):
        text, plain = ast.unparse(node.value), node.value
        node.value = self.visit(node.value)
        names = [x for target in node.targets for x in _targets(target)]
        for name in names:
            self.defined[name] = plain
        if isinstance(node.value, ast.Name) and node.value.id.startswith("flakit_"):
            # Nothing but a call that was checked by itself: the two names are one.
            self.rewriting.rename(node.value.id, names[0] if len(names) == 1 else node.value.id)
            return [node]
        return [node, *self.notes(node, text, names, _names(node.value), _calls(node.value))]

    @_preceded
    def visit_If(self, node):
        node.test = self.visit(node.test)
        node.body, node.orelse = self.each(node.body), self.each(node.orelse)
        return [node]

    @_preceded
    def visit_For(self, node):
        node.iter = self.visit(node.iter)
        node.body = self.each(node.body)
        return [node]

    def visit_While(self, node):
        self.conditional += 1  # evaluated again at each turn
        node.test = self.visit(node.test)
        self.conditional -= 1
        node.body = self.each(node.body)
        return node

    def each(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [x for statement in statements for x in _as_list(self.visit(statement))]

    def visit_AnnAssign(self, node):
        return node  # constants

    @_preceded
    def visit_AugAssign(self, node):
        text = ast.unparse(node)
        node.value = self.visit(node.value)
        names = _targets(node.target)
        return [node, *self.notes(node, text, names, (*names, *_names(node.value)), _calls(node.value))]

    def notes(self, node, text: str, names, reads, calls) -> list[ast.stmt]:
        operation = _operation(node.value)
        return [
            self.call("note", name, site=self.check(node, text, operation, name, reads, calls=calls)) for name in names
        ]

    @_preceded
    def visit_Return(self, node):
        if not self.is_helper or node.value is None or isinstance(node.value, (ast.Tuple, ast.Constant, ast.Name)):
            return [node]
        text, value = ast.unparse(node.value), self.visit(node.value)
        if isinstance(value, ast.Name):
            self.rewriting.rename(value.id, "return")
            return [ast.Return(value)]
        name = f"flakit_{len(self.rewriting.checks)}"
        site = self.check(node, text, _operation(value), "return", _names(value), calls=_calls(value))
        assigned = ast.Assign([ast.Name(name, ast.Store())], value, lineno=node.lineno)
        return [assigned, self.call("note", name, site=site), ast.Return(ast.Name(name, ast.Load()))]

    @_preceded
    def visit_Expr(self, node):
        call = node.value
        if not isinstance(call, ast.Call):
            return [node]
        function = self.resolve(call.func)
        name = getattr(function, "__name__", "")
        method = call.func.attr if function is None and isinstance(call.func, ast.Attribute) else ""
        if method == "store" and len(call.args) == 2:
            return self.through_descriptor(node, call)
        if name in ("store", "atomic_add") and _of_triton(function):
            return self.into_memory(node, call, name)
        return [node] if name.startswith(("static_", "device_")) else [ast.Expr(self.visit(call))]

    def into_memory(self, node: ast.Expr, call: ast.Call, name: str) -> list[ast.stmt]:
        """Return statements for a tl.store or tl.atomic_add, with names for its arguments and a check of its value."""
        text, parameters = ast.unparse(call), ("pointer", "val" if name == "atomic_add" else "value", "mask")
        passed: dict[Any, Any] = {**dict.fromkeys(parameters), **{x.arg: x.value for x in call.keywords}}
        passed |= zip(parameters, call.args, strict=False)
        pointers, value, mask = (passed[key] for key in parameters)
        if value is None or "boundary_check" in passed:
            return [ast.Expr(self.visit(call))]
        into, site, expression = self.base(pointers), len(self.rewriting.checks), ast.unparse(value)
        reads: tuple[str, ...] = ()
        for n, (key, x) in enumerate(zip(parameters, (pointers, value, mask), strict=True)):
            if x is None:
                continue
            named, target = self.visit(x), f"flakit_{key}_{site}"
            self.before.append(ast.Assign([ast.Name(target, ast.Store())], named, lineno=node.lineno))
            if x is value:
                reads = (*_names(named), *_calls(named))
                if not isinstance(named, (ast.Name, ast.Constant)):
                    own = self.check(node, expression, _operation(named), target, reads, calls=_calls(named))
                    self.before.append(self.call("note", target, site=own))
                    reads = (target,)
            if n < len(call.args):
                call.args[n] = ast.Name(target, ast.Load())
            else:
                next(y for y in call.keywords if y.arg == key).value = ast.Name(target, ast.Load())
        number = self.check(node, text, "store" if name == "store" else "atomic", "", reads, into)
        names = [f"flakit_{key}_{site}" for key in parameters[:2]] + [f"flakit_mask_{site}" if mask else "None"]
        return [self.call("note_store", *names, site=number), ast.Expr(call)]

    def through_descriptor(self, node: ast.Expr, call: ast.Call) -> list[ast.stmt]:
        assert isinstance(call.func, ast.Attribute)  # descriptor.store(offsets, value)
        text, name = ast.unparse(call), f"flakit_value_{len(self.rewriting.checks)}"
        named = self.visit(call.args[1])
        self.before.append(ast.Assign([ast.Name(name, ast.Store())], named, lineno=node.lineno))
        call.args[1] = ast.Name(name, ast.Load())
        site = self.check(node, text, "store", "", (*_names(named), *_calls(named)), self.base(call.func.value))
        return [self.call("note", name, site=site), ast.Expr(call)]


class _Rewriting:
    """Rewrites a kernel and the helpers that it calls, with the checks of one part; all parts number checks alike."""

    def __init__(self, kernel, part: Part):
        self.part = part
        self.checks: list[Check] = []
        self.passed: list = []
        self.parameters = _not_constant(kernel.fn)
        self.kernel = kernel
        self.functions: dict[str, Any] = {}
        self.spaces: list[dict] = []
        self.add(kernel)
        for i, check in enumerate(self.checks):
            names = (x for name in check.into for x in self.arguments_of(name, check.function))
            self.checks[i] = replace(check, into=" or ".join(dict.fromkeys(names)))
        for space in self.spaces:
            space["flakit_sites"] = tl.constexpr(len(self.checks))
            space.update({name: function for name, function in self.functions.items() if name in space})

    def arguments_of(self, name: str, function: str, depth: int = 8) -> list[str]:
        """Return the names of the kernel's arguments that reach a helper `function` as its parameter `name`."""
        if function == self.kernel.fn.__name__:
            return [name] if name in self.parameters else []
        calls = [passed.get(name, ()) for _, helper, passed in self.passed if helper == function]
        callers = [caller for caller, helper, _ in self.passed if helper == function]
        pairs = [(x, caller) for names, caller in zip(calls, callers, strict=True) for x in names]
        return [y for x, caller in pairs for y in (self.arguments_of(x, caller, depth - 1) if depth else ())]

    def rename(self, old: str, new: str) -> None:
        """Attribute a check of a generated name to the name to which it is assigned."""
        for i, check in enumerate(self.checks):
            if check.target == old:
                self.checks[i] = replace(check, target=new)

    def add(self, kernel) -> None:
        name = _traced(kernel)
        if name in self.functions:
            return
        self.functions[name] = None
        function = kernel.fn
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        (definition,) = tree.body
        assert isinstance(definition, ast.FunctionDef)
        space = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        watch = _Watch(self.kernel.fn.__name__, function, space, max(first, 1), self)
        definition.body = [y for x in definition.body for y in _as_list(watch.visit(x))]
        definition.name, definition.decorator_list = name, []
        definition.args.args.insert(0, ast.arg(SEEN))
        ast.fix_missing_locations(tree)
        text = ast.unparse(tree)
        file = f"<flakit trace of {function.__module__}.{name} {id(self)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        space |= {"note": note, "note_store": note_store, name: None}
        local: dict = {}
        exec(compile(text, file, "exec"), space, local)
        options = {}
        if isinstance(kernel, JITFunction):
            names = [p.name for p in kernel.params if p.do_not_specialize]
            aligned = [p.name for p in kernel.params if p.do_not_specialize_on_alignment]
            options = {"do_not_specialize": names, "do_not_specialize_on_alignment": aligned}
        self.functions[name] = triton.jit(**options)(local[name]) if options else triton.jit(local[name])
        self.spaces.append(space)


def rewritten(kernel) -> Rewritten:
    """Return a kernel rewritten to report on itself, with all checks; it takes `seen` before its other arguments."""
    return _rewritten(kernel, ALL)


@lru_cache(maxsize=1024)
def _rewritten(kernel, part: Part) -> Rewritten:
    rewriting = _Rewriting(kernel, part)
    return Rewritten(kernel, rewriting.functions[_traced(kernel)], rewriting.checks, rewriting.passed)


def _traced(kernel) -> str:
    return f"{kernel.fn.__name__}_traced"


def _of_triton(x: object) -> bool:
    module = getattr(getattr(x, "fn", x), "__module__", "") or ""
    return module == "triton" or module.startswith("triton.")


def _not_constant(function) -> frozenset[str]:
    """Return the parameters of a function that are not compile-time constants."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if "constexpr" not in str(p.annotation))


def _as_list(x) -> list:
    return x if isinstance(x, list) else [x]


def _targets(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    return [name for x in getattr(node, "elts", ()) for name in _targets(x)]


def _names(node: ast.AST) -> tuple[str, ...]:
    return tuple(x.id for x in ast.walk(node) if isinstance(x, ast.Name))


def _calls(node: ast.AST) -> tuple[str, ...]:
    """Return the names of the helpers that an expression calls."""
    called = (x.func.id for x in ast.walk(node) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name))
    return tuple(name.removesuffix("_traced") for name in called if name.endswith("_traced"))


def _operation(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        names = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
        return names.get(type(node.op), type(node.op).__name__.lower())
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2].removesuffix("_traced")
    return type(node).__name__.lower()
