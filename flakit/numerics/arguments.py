"""Checks of the instruments' plain arguments. Each error names the argument, the expected value and the actual one.

Numpy scalars, and tensors and arrays without axes, count as their numbers and truth values.
"""

import functools
import importlib
import importlib.util
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor


def plain(x: Any) -> Any:
    """Return a numpy scalar, or a tensor or array without axes, as a Python number or bool; anything else unchanged."""
    return x.item() if isinstance(x, (np.generic, np.ndarray, Tensor)) and x.ndim == 0 else x


def listed(x: Any) -> tuple:
    """Return the items of a list, array or other iterable, each through `plain`; a single value is a list of one."""
    single = isinstance(x, (str, bytes)) or not isinstance(x, Iterable) or getattr(x, "ndim", 1) == 0
    return tuple(plain(part) for part in ((x,) if single else x))


def whole_number(name: str, x: object, least: int = 1) -> int:
    """Return x as an int. Raises ValueError unless it is a whole number of at least `least`."""
    value = plain(x)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {shown(x)}")
    return int(value)


def flag(name: str, x: object, instead: str = "") -> bool:
    """Return x as a bool; raises TypeError for anything else. instead: advice to add to the error's message."""
    value = plain(x)
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False{instead}, got {shown(x)}")
    return value


def one_of(name: str, x: object, known: Iterable[str]) -> str:
    """Return x. Raises ValueError unless it is one of the known strings."""
    known = tuple(known)
    if not isinstance(x, str) or x not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {shown(x)}")
    return str(x)


def function(name: str, x: object, optional: bool = True) -> Callable | None:
    """Return x. Raises TypeError unless it is callable, or None and `optional`."""
    if not callable(x) and not (optional and x is None):
        raise TypeError(f"{name}: expected a function{' or None' if optional else ''}, got {shown(x)}")
    return x


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none for a callable without a signature, such as some builtins."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def real_tensor(name: str, x: object) -> Tensor:
    """Return x. Raises TypeError unless it is a tensor of real numbers: float64 would drop an imaginary part."""
    if not isinstance(x, Tensor) or x.is_complex():
        raise TypeError(f"{name}: expected a tensor of real numbers, got {shown(x)}")
    return x


def shown(x: object) -> str:
    """Describe a value in a few words for an error message: a tensor by shape and dtype, others by a short repr."""
    if isinstance(x, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(x, Tensor) else "an array"
        return f"{kind} {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
    try:
        return reprlib.repr(x)
    except ValueError:  # Python refuses to write an integer of thousands of digits
        return f"a value of type {type(x).__name__}"


def named_function(name: str, argument: str) -> Callable:
    """Import the function named by "package.module:attribute" or "file.py:attribute".

    A file is imported as scripts in its folder would import it, so that its objects belong to an importable module.
    Raises ValueError if there is no such function. argument: the name of the caller's argument, for its message.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _from_file(Path(place), argument) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ValueError(f"{argument}: expected a function {attribute} in {place}: {error}") from error
    try:
        value = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{argument}: expected a function {attribute} in {place}: {error}") from error
    if not callable(value):
        raise ValueError(f"{argument}: expected a function {attribute} in {place}, got {shown(value)}")
    return value


def _from_file(place: Path, argument: str) -> ModuleType:
    path = place.resolve()
    if not path.exists():
        raise ValueError(f"{argument}: expected a file, {place} does not exist")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem) if path.stem.isidentifier() else None
    if module is not None and Path(getattr(module, "__file__", None) or "").resolve() == path:
        return module
    spec = importlib.util.spec_from_file_location(f"named_{path.stem}", path)  # another module has its name
    if spec is None or spec.loader is None:
        raise ValueError(f"{argument}: expected a Python file, got {place}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
