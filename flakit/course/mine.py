"""The learner's own file, `mine.py` beside the notebooks: a kernel that grows by one function per lesson.

The learner writes a function in a notebook cell. The cell that checks it ends with

    mine.add(step, check("the last state", S, expected))

If all verdicts are right, the source of `step` and the imports that it uses are written to mine.py; an earlier function
of that name moves to mine_old.py. So there is nothing to copy, save or reload, and every function in the file has
passed its check once. It is a plain module that the learner may edit and `flakit audit mine.py:chunk_rwkv6` reads.

    step = mine.take("step")            # from the file, or else from the solutions; prints which
    r, D = mine.take("step", "step_back")
    mine.show()                         # all of it, as the last line of a cell; mine.show("step") shows one function

The solutions' notebooks write to solutions/mine.py in the same way.
"""

import ast
import builtins
import inspect
import linecache
import symtable
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..language import Words
from ..numerics import carried
from ..numerics.arguments import shown
from .record import SOLUTIONS, folder, write

FILE, OLD = "mine.py", "mine_old.py"
BEGINS = '"""Your kernel. The lessons add a function when its check is right; edit it as you like."""\n'
SOLVED = '"""The kernel that the lessons build, as the solutions write it."""\n'

WORDS = Words() | {
    "added": "{file}: {name} is in it",
    "same": "{file}: {name} is in it, as before",
    "replaced": "{file}: {name} is in it; the one before is in {old}",
    "waits": "{file}: {name} comes in when its check is right",
    "yours": "{name}: yours, from {file}",
    "solved": "{name}: from the solutions, for {file} has none yet",
    "unreadable": "{file} cannot be read, line {line}: {error}",
    "empty": "{file} is empty so far: a building exercise puts its function here when its check is right.",
}


def path() -> Path:
    """Return the path of the learner's file, which may not exist yet."""
    return folder() / FILE


def create(notebooks: Path | None = None) -> Path:
    """Create the learner's file unless it exists, and return its path. notebooks: its folder, default the process's."""
    place = folder(notebooks) / FILE
    if not place.exists():
        write(place, SOLVED if place.parent.name == SOLUTIONS else BEGINS)
    return place


def add(function: Callable, *verdicts) -> None:
    """Write a function to the file if all verdicts are right, and print what was done.

    The imports that it uses and the notebook's functions that it calls are written too. Raises TypeError for anything
    but a Python function, and ValueError, with the name, if it uses another global, such as a tensor of the notebook:
    pass that as an argument. verdicts: the results of `check`."""
    if not callable(function) or not hasattr(_plain(function), "__code__"):
        raise TypeError(f"function: expected one written in this notebook, got {shown(function)}")
    name = _plain(function).__name__
    if not verdicts or not all(verdicts):
        print(WORDS.say("waits", file=FILE, name=name))
        return
    before = _read(create())
    after = _with(function, before)
    write(path(), after)
    old = _functions(before).get(name)
    if old is None or old == _functions(after)[name]:
        print(WORDS.say("added" if old is None else "same", file=FILE, name=name))
        return
    archive = path().with_name(OLD)
    write(archive, (archive.read_text(encoding="utf-8") + "\n\n" if archive.exists() else "") + old + "\n")
    print(WORDS.say("replaced", file=FILE, name=name, old=OLD))


def take(*names: str):
    """Load functions by name, the learner's or else the solutions', and print which. Return one, or a tuple of several.

    Raises ValueError for a name that neither file has, and for a file that is no valid Python."""
    own = _module(path()) if path().exists() else None
    solved = _module(carried.folder("notebooks") / SOLUTIONS / FILE)
    functions = []
    for name in names:
        source = next((module for module in (own, solved) if hasattr(module, name)), None)
        if source is None:
            raise ValueError(f"name: expected a function of {FILE}, got {name!r}")
        print(WORDS.say("yours" if source is own else "solved", name=name, file=FILE))
        functions.append(getattr(source, name))
    return functions[0] if len(functions) == 1 else tuple(functions)


def show(*names: str) -> "Shown":
    """Return the file's source, or that of the named functions, to display with syntax highlighting."""
    text = _read(path()) if path().exists() else ""
    functions = _functions(text)
    text = "\n\n\n".join(functions[name] for name in names if name in functions) if names else text
    return Shown(text if functions and text else "")


@dataclass(frozen=True)
class Shown:
    """Python source that a notebook displays with syntax highlighting; "" shows a sentence instead."""

    text: str

    def __repr__(self) -> str:
        return self.text or WORDS.say("empty", file=FILE)

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text.strip()}\n```" if self.text else repr(self)


# --- the text of the file ------------------------------------------------------------------------------------------


def _read(place: Path) -> str:
    text = place.read_text(encoding="utf-8")
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(WORDS.say("unreadable", file=FILE, line=error.lineno, error=error.msg)) from None
    return text


def _functions(text: str) -> dict[str, str]:
    """Return the source, decorators included, of each top-level function of a module's source text, by name."""
    functions = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            functions[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return functions


def _known(text: str) -> set[str]:
    """Return the names that a module's source text binds at top level."""
    symbols = symtable.symtable(text, FILE, "exec").get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def _needed(text: str) -> set[str]:
    """Return the global names that a function's source text reads: in its body and the functions within it, and in
    decorators, defaults and annotations, which its module needs on import."""
    names, tables = set(), [symtable.symtable(text, FILE, "exec")]
    for table in tables:
        tables += table.get_children()
        names |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return names


def _with(function: Callable, text: str) -> str:
    """Return a module's source with a function added or replaced, and the imports and functions that it needs.

    Raise ValueError if it uses a global that is neither."""
    plain = _plain(function)
    new = textwrap.dedent(inspect.getsource(plain)).rstrip()
    for name in sorted(_needed(new) - {plain.__name__}):
        if name in _known(text) or hasattr(builtins, name):
            continue
        value = plain.__globals__.get(name)
        if statement := _import(name, plain):
            text = _with_import(statement, text)
        elif hasattr(_plain(value), "__code__"):
            text = _with(value, text)
        else:
            raise ValueError(
                f"{plain.__name__}: expected names that {FILE} knows, got {name!r}; give it as an argument, or write "
                "it into the function"
            )
    old = _functions(text).get(plain.__name__)
    return text.replace(old, new, 1) if old is not None else f"{text.rstrip()}\n\n\n{new}\n"


def _plain(function):
    """Return the Python function inside decorators such as triton.jit."""
    while hasattr(function, "fn") or hasattr(function, "__wrapped__"):
        function = getattr(function, "fn", None) or function.__wrapped__
    return function


def _import(name: str, function: Callable) -> str | None:
    """Return the import statement by which the function's module or notebook binds a name, None if there is none."""
    cells = function.__globals__.get("In")  # of a notebook, the latest first
    if not isinstance(cells, list):
        cells = [Path(inspect.getsourcefile(function)).read_text(encoding="utf-8")]
    for source in reversed(cells):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:  # a cell with an IPython command
            continue
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for each in node.names:
                    if (each.asname or each.name.partition(".")[0]) == name:
                        return ast.unparse(type(node)(**{**vars(node), "names": [each]}))
    return None


def _with_import(statement: str, text: str) -> str:
    """Return a module's source with an import after the existing ones, or else after the module's docstring."""
    lines = text.splitlines()
    body = ast.parse(text).body
    at = [node.end_lineno for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if at:
        return "\n".join([*lines[: at[-1]], statement, *lines[at[-1] :]]) + "\n"
    after = body[0].end_lineno if body and ast.get_docstring(ast.parse(text)) is not None else 0
    rest = "\n".join(lines[after:]).strip("\n")
    return "\n".join([*lines[:after], *([""] if after else []), statement, ""]) + (f"\n\n{rest}\n" if rest else "")


def _module(place: Path) -> ModuleType:
    """Execute the file in its present state as a new module, bypassing the import cache; return the module."""
    text = _read(place)
    module = ModuleType(place.stem)
    module.__file__ = str(place)
    linecache.checkcache(str(place))
    exec(compile(text, str(place), "exec"), vars(module))
    return module
