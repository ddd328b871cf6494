"""The callable under test: how to load it, how to call it, what it refuses.

A subject is called as its operator is: the tensors by name if its signature has those names, else in the operator's
order. It gets `scale`, `initial_state`, `output_final_state`, `cu_seqlens` and `group` only if its signature names
them, or names nothing at all. An argument that it does not name, or refuses with one of `REFUSALS`, is not supported;
`Refused` says why. Any other error is a crash, and so is a refusal that the same call does not repeat: `Broken`.
"""

import ast
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..numerics.arguments import named_function, one_of, parameters_of, shown
from ..numerics.operators import Operator, known, operator
from ..ops.common.dispatch import interpreted_alone

REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError)
"""Errors with which a function refuses an argument; every other error is a crash."""

ONCE = "; a second call does not repeat it"
"""Ends the words of a failure that comes and goes."""

OPTIONS = ("scale", "initial_state", "output_final_state", "cu_seqlens", "group")


class Refused(Exception):
    """The subject does not take these arguments: it raised one of REFUSALS, or its signature lacks one of them."""


class Broken(Exception):
    """The subject crashed, or returned something other than its operator does."""


class Stopped(BaseException):
    """The caller has cancelled the audit. A BaseException, so that no probe catches it as a failure."""


class BackwardBroken(Broken):
    """The backward pass of the subject raised an error."""


class Subject:
    """A callable with the interface of an operator, under test.

    function: the callable. like: the operator, as `flakit.audit` takes it. adapter: called in its place, with the
        callable and the operator's arguments, to translate them.
    name: its name in reports. source, adapter_source: lines of Python that import both as `function` and `adapter`.
    patient: repeat a call that raises, to see whether it raises again; a rank must not, while others wait for it.

    Raises TypeError if `function` or `adapter` is not callable, ValueError if the operator is unknown.
    """

    def __init__(
        self,
        function: Callable,
        like: str | Operator | None = None,
        *,
        adapter: Callable | None = None,
        name: str | None = None,
        source: tuple[str, ...] | None = None,
        adapter_source: tuple[str, ...] | None = None,
    ):
        for argument, x in (("subject", function), ("adapter", adapter)):
            if not callable(x) and not (argument == "adapter" and x is None):
                raise TypeError(f"{argument}: expected a function, got {shown(x)}")
        inner = getattr(function, "func", None)  # of a partial
        self.name = name or str(getattr(function, "__name__", None) or getattr(inner, "__name__", "subject"))
        like = _guessed(self.name) if like is None else like
        if not isinstance(like, Operator) and not (isinstance(like, str) and ":" in like):
            one_of("like", like, known())
        self.op: Operator = operator(like)
        self.function = function if adapter is None else functools.partial(adapter, function)
        self.source = source or import_of(function, "function")
        if adapter is not None:
            self.source += adapter_source or import_of(adapter, "adapter")
        self.original, self.adapter, self.adapted = function, adapter, adapter is not None
        self.style, self.patient = "tuple", True
        parameters = parameters_of(self.function)
        self.by_name, self.named = self._signature(parameters)
        self.taken, decay = frozenset(parameters), parameters.get(self.op.decay)
        self.without_decay = decay is not None and decay.default is None

    def _signature(self, parameters: Mapping[str, inspect.Parameter]) -> tuple[bool, frozenset[str]]:
        """Return whether to pass the tensors by name, and which of `OPTIONS` a callable with these parameters takes."""
        if not parameters:  # nothing is known of it
            return False, frozenset(OPTIONS)
        if self.adapted:
            taken = {name for name, x in parameters.items() if x.kind is not x.POSITIONAL_ONLY}
            takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
            named = frozenset(OPTIONS) if takes_all and not taken & set(OPTIONS) else frozenset(taken & set(OPTIONS))
            return True, named
        names = {name for name, x in parameters.items() if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        kinds = {x.kind for x in parameters.values()}
        if not names and inspect.Parameter.VAR_KEYWORD in kinds:  # a wrapper that passes everything on
            return inspect.Parameter.VAR_POSITIONAL not in kinds, frozenset(OPTIONS)
        return set(self.op.tensors) <= names, frozenset(names & set(OPTIONS))

    @interpreted_alone()
    def __call__(self, inputs: Mapping[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call the subject; return o and the parts of the final state, () if it returns none.

        inputs: the arguments by the operator's names. Raises Refused if the subject does not take them; Broken if it
        crashes, if a second call takes what the first one refused, or if it returns no tensor o.
        """
        arguments = dict(inputs)
        options = {name: arguments.pop(name) for name in OPTIONS if arguments.get(name) is not None}
        arguments = {name: x for name, x in arguments.items() if x is not None}
        for name in options:
            if name not in self.named and name != "output_final_state":
                raise Refused(f"its signature does not name {name}")
        options = {name: x for name, x in options.items() if name in self.named}
        tensors = [arguments.pop(name, None) for name in self.op.tensors]
        options |= {name: x for name, x in self.op.constants.items() if name in self.taken}
        if self.by_name:
            arguments, tensors = dict(zip(self.op.tensors, tensors, strict=True)) | arguments, []
        call = functools.partial(self.function, *tensors, **arguments, **options)
        try:
            returned = _quietly(call)
        except (Exception, SystemExit) as error:
            if not self.patient:
                raise (
                    Refused(words_of(error)) if _refuses(error) else Broken(f"it raised {words_of(error)}")
                ) from error
            try:
                _quietly(call)
            except (Exception, SystemExit) as again:
                if _refuses(error) and _refuses(again):
                    raise Refused(words_of(error)) from error
                crash = again if _refuses(error) else error
                raise Broken(f"it raised {words_of(crash)}") from crash
            raise Broken(f"it raised {words_of(error)}{ONCE}") from error
        return self._outputs(returned)

    def made(self, inputs: Mapping[str, Any], do: Tensor) -> dict[str, Tensor]:
        """Run forward and backward; return outputs and gradients by name. do: the gradient that arrives at o.

        For `others` of `numerics.gradients.gradient_rows`. Raises as a call does, and BackwardBroken.
        """
        leaves = {name: x.detach().requires_grad_() for name, x in self.op.leaves(inputs).items()}
        o, parts = self(self.op.arguments(leaves, inputs) | {"output_final_state": True})
        values = {"o": o.detach()} | {name: x.detach() for name, x in zip(self.op.outputs[1:], parts, strict=False)}
        if not o.requires_grad:
            return values
        try:
            grads = torch.autograd.grad(o, tuple(leaves.values()), do.to(o.dtype), allow_unused=True)
        except (Exception, SystemExit) as error:
            raise BackwardBroken(f"its backward pass raised {words_of(error)}") from error
        return values | {f"d{name}": x for name, x in zip(leaves, grads, strict=True) if x is not None}

    def _outputs(self, returned: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        o, state, self.style = returned, None, "tensor"
        if isinstance(returned, Mapping):
            self.style = "mapping"
            o, state = _first(returned.get, "o", "out", "output"), _first(returned.get, "final_state", "state")
        elif isinstance(returned, (tuple, list)):
            o, *rest = returned or [None]
            several = len(self.op.states)
            flat = several > 1 and len(rest) >= several and all(isinstance(x, Tensor) for x in rest[:several])
            state = tuple(rest[:several]) if flat else rest[0] if rest else None
            self.style = "flat" if flat else "tuple"
        elif not isinstance(returned, Tensor):
            get, self.style = lambda name: getattr(returned, name, None), "attributes"
            o, state = _first(get, "o", "out", "output"), _first(get, "final_state", "state")
        if not isinstance(o, Tensor):
            raise Broken(f"expected a tensor o, a tuple (o, final state) or a result with an o, got {shown(returned)}")
        parts = (state,) if isinstance(state, Tensor) else tuple(state) if isinstance(state, (tuple, list)) else ()
        if any(not isinstance(part, Tensor) for part in parts) or len(parts) != len(self.op.states):
            parts = ()
        return o, parts


def load(
    subject: str | Callable | Subject, like: str | Operator | None = None, adapter: str | Callable | None = None
) -> Subject:
    """Return a `Subject` from a callable or a name: "chunk_rwkv6", "package.module:attribute" or "file.py:attribute".

    like: as in `Subject`. adapter: a function, or its name in the same notation; ignored if `subject` is a `Subject`.
    Raises ValueError if there is no such function.
    """
    if isinstance(subject, Subject):
        return subject
    translate, more = _find(adapter, "adapter") if isinstance(adapter, str) else (adapter, None)
    if isinstance(subject, str):
        function, source = _find(subject, "function")
        return Subject(function, like, adapter=translate, name=subject, source=source, adapter_source=more)
    return Subject(subject, like, adapter=translate, adapter_source=more)


def _quietly(call: Callable) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _refuses(error: BaseException) -> bool:
    """Whether an error refuses an argument, rather than being a crash. Triton wraps the assertions of its kernels."""
    asserted = isinstance(error.__cause__, AssertionError) or type(error).__name__ == "CompileTimeAssertionFailure"
    return isinstance(error, REFUSALS) or asserted


def _functions(path: Path) -> str:
    """Return the names of a file's public functions, separated by commas; parse the file without running it."""
    if not path.is_file():
        raise ValueError(f"subject: expected a file, {path} does not exist")
    try:
        names = [x.name for x in ast.parse(path.read_bytes()).body if isinstance(x, ast.FunctionDef)]
    except SyntaxError as error:
        raise ValueError(f"subject: expected Python in {path}: {error}") from error
    return ", ".join(name for name in names if not name.startswith("_")) or "none"


def _find(spec: str, called: str) -> tuple[Callable, tuple[str, ...]]:
    argument = {"function": "subject"}.get(called, called)
    if spec.endswith(".py"):
        raise ValueError(f"{argument}: expected {spec}:NAME, of the functions in it: {_functions(Path(spec))}")
    place, _, attribute = (spec if ":" in spec else f"flakit:{spec}").rpartition(":")
    try:
        function = named_function(f"{place}:{attribute}", argument)
    except SystemExit as left:
        raise ValueError(f"{argument}: {place} left Python when it was imported, by sys.exit({left.code!r})") from left
    if place.endswith(".py"):
        return function, _from_file(Path(place).resolve(), attribute, called)
    return function, (f"from {place} import {attribute} as {called}",)


def _from_file(path: Path, attribute: str, called: str) -> tuple[str, ...]:
    return (
        "import sys",
        f"sys.path.insert(0, {str(path.parent)!r})",
        f"from {path.stem} import {attribute} as {called}",
    )


def import_of(function: Callable, called: str) -> tuple[str, ...]:
    """Return the lines with which a script imports a function as `called`; a comment if it cannot be imported."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or "<" in name or not name:
        return (f"# {called} = ...  (your kernel: it has no name to import it by)",)
    file = getattr(sys.modules.get(module), "__file__", None)
    if "." not in module and file and file.endswith(".py"):
        return _from_file(Path(file).resolve(), name, called)
    return (f"from {module} import {name} as {called}",)


def _guessed(name: str) -> str:
    """Return the longest operator's name that occurs in a function's name. Raises ValueError for none or several."""
    matches = [like for like in known() if like in name.lower()]
    matches = [like for like in matches if not any(like in other and like != other for other in matches)]
    if len(matches) != 1:
        raise ValueError(f"like: expected one of {', '.join(known())}: the name {name!r} does not say which it is")
    return matches[0]


def _first(get: Callable, *names: str) -> object:
    return next((x for name in names if (x := get(name)) is not None), None)


def words_of(error: BaseException) -> str:
    """Return an error as one line: its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"
