"""The learner's own file, `mine.py` beside the notebooks: a kernel that grows by one function a lesson.

A function is written in its cell, where its check, its hints and its picture are, and the cell that checks it ends with

    mine.add(step, check("the last state", S, expected))

When all verdicts are right, the text of `step` is put into mine.py, with the imports that it uses; another one of this
name that stood there moves to mine_old.py. So nothing has to be copied, saved or reloaded, and what is in the file has
been right once. It is a plain module, the learner's to edit, and what `flakit audit mine.py:chunk_rwkv6` reads.

    step = mine.take("step")            # from the file, or else from the solutions; says which
    r, D = mine.take("step", "step_back")
    mine.show()                         # all of it, as the last line of a cell; mine.show("step") shows one function

The solutions' notebooks add to a file of their own in the same way: solutions/mine.py.
"""

import ast
import builtins
import dis
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

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
    """Where the file is, or will be."""
    return folder() / FILE


def create(notebooks: Path | None = None) -> Path:
    """The file, made if there is none and otherwise left as it is.

    notebooks: their folder, where it is not that of the process.
    """
    place = folder(notebooks) / FILE
    if not place.exists():
        write(place, SOLVED if place.parent.name == SOLUTIONS else BEGINS)
    return place


def add(function: Callable, *verdicts) -> None:
    """Put a function into the file if all verdicts are right, and say what was done.

    It comes with the imports it uses and with those of the notebook's functions that it calls. A ValueError says which
    name the file would not know: a number or a tensor of the notebook has to become an argument.
    """
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
    kept = path().with_name(OLD)
    write(kept, (kept.read_text(encoding="utf-8") + "\n\n" if kept.exists() else "") + old + "\n")
    print(WORDS.say("replaced", file=FILE, name=name, old=OLD))


def take(*names: str):
    """The functions of these names, one or a tuple: the learner's, or where there is none that of the solutions.

    Says of each where it comes from. A ValueError where neither has one.
    """
    own = _module(path()) if path().exists() else None
    solved = _module(carried.folder("notebooks") / SOLUTIONS / FILE)
    found = []
    for name in names:
        source = next((module for module in (own, solved) if hasattr(module, name)), None)
        if source is None:
            raise ValueError(f"name: expected a function of {FILE}, got {name!r}")
        print(WORDS.say("yours" if source is own else "solved", name=name, file=FILE))
        found.append(getattr(source, name))
    return found[0] if len(found) == 1 else tuple(found)


def show(*names: str) -> "Shown":
    """The file, or these functions of it, as text in colours."""
    text = _read(path()) if path().exists() else ""
    functions = _functions(text)
    text = "\n\n\n".join(functions[name] for name in names if name in functions) if names else text
    return Shown(text if functions and text else "")


@dataclass(frozen=True)
class Shown:
    """Python to be read."""

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
    """The text of each function at the top of a module, decorators included."""
    return {node.name: _segment(text, node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def _segment(text: str, node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _known(text: str) -> set[str]:
    """The names that a module binds at its top."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        else:
            found |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def _with(function: Callable, text: str) -> str:
    """The module's text with the function in it, and with what the function needs."""
    plain = _plain(function)
    new = textwrap.dedent(inspect.getsource(plain)).rstrip()
    for name in sorted((_globals(plain.__code__) | _outside(new)) - {plain.__name__}):
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
    """The Python function in what decorators have made of it, such as triton.jit."""
    while hasattr(function, "fn") or hasattr(function, "__wrapped__"):
        function = getattr(function, "fn", None) or function.__wrapped__
    return function


def _globals(code: CodeType) -> set[str]:
    """The global names that a function reads, and those of the functions inside it."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals(const) for const in code.co_consts if isinstance(const, CodeType)))


def _outside(text: str) -> set[str]:
    """The names in a function's decorators, defaults and annotations, which the module needs when it is imported."""
    (node,) = ast.parse(text).body
    outside = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    return {each.id for part in outside for each in ast.walk(part) if isinstance(each, ast.Name)}


def _import(name: str, function: Callable) -> str | None:
    """The statement by which the function's module or notebook imported a name, None where it did not."""
    for source in _sources(function):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:  # a cell with a command of IPython's
            continue
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for each in node.names:
                    if (each.asname or each.name.partition(".")[0]) == name:
                        return ast.unparse(type(node)(**{**vars(node), "names": [each]}))
    return None


def _sources(function: Callable) -> Iterator[str]:
    """What was run: the cells of a notebook, the last one first, or the text of a module."""
    cells = function.__globals__.get("In")
    if isinstance(cells, list):
        yield from reversed(cells)
    else:
        yield Path(inspect.getsourcefile(function)).read_text(encoding="utf-8")


def _with_import(statement: str, text: str) -> str:
    """The statement behind the imports that are there, or behind the module's docstring."""
    lines = text.splitlines()
    body = ast.parse(text).body
    at = [node.end_lineno for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if at:
        return "\n".join([*lines[: at[-1]], statement, *lines[at[-1] :]]) + "\n"
    after = body[0].end_lineno if body and ast.get_docstring(ast.parse(text)) is not None else 0
    rest = "\n".join(lines[after:]).strip("\n")
    return "\n".join([*lines[:after], *([""] if after else []), statement, ""]) + (f"\n\n{rest}\n" if rest else "")


def _module(place: Path) -> ModuleType:
    """The file as it stands now, run as a module."""
    text = _read(place)
    module = ModuleType(place.stem)
    module.__file__ = str(place)
    linecache.checkcache(str(place))
    exec(compile(text, str(place), "exec"), vars(module))
    return module
