"""Which files have GPU tests, and what each of them depends on: as one hash, so that a result is known to be of today.

A test depends on flakit/ops and flakit/numerics, on the room of flakit that its folder is named after, on its own file,
its conftests, and on every module of flakit and of the tests that these import. Comments, texts of functions and blank
lines change no result and no hash; a file that is read, rows of the launch table or settings, counts with the module
or the package beside which it stands. `flakit/__init__.py` names the rooms that come when asked for: they count where
they are asked for.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.imports import names_imported

ROOT = Path(__file__).parents[2]
ALWAYS = "ops", "numerics"
PACKAGES = "flakit", "tests"


def test_files(root: Path = ROOT) -> list[str]:
    """The files with GPU tests: those that mark a test `gpu`, or import a module that marks its parameters so."""
    files = sorted((root / "tests").rglob("test_*.py"))
    marking = {path for path in (root / "tests").rglob("*.py") if _marks(path)}
    return [path.relative_to(root).as_posix() for path in files if marking & _reached(root, [path])]


def key(file: str, *versions: str, root: Path = ROOT) -> str:
    """A hash of all that a test file's results follow from. versions: of what is outside, and the card."""
    digest = hashlib.sha256("\n".join(versions).encode())
    for path in dependencies(file, root):
        digest.update(f"\n{path.relative_to(root).as_posix()}\n{_content(path, path.stat().st_mtime_ns)}".encode())
    return digest.hexdigest()[:16]


def dependencies(file: str, root: Path = ROOT) -> list[Path]:
    """Every file that the results of a test file depend on, itself among them."""
    path = root / file
    rooms = {*ALWAYS, *path.relative_to(root / "tests").parts[:-1][:1]}
    whole = {each for room in rooms for each in _files(root / "flakit" / room)}
    beside = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(root / "tests")]
    modules = {each for each in whole if each.suffix == ".py"}
    reached = _reached(root, [path, *(each for each in beside if each.is_file()), *modules])
    return sorted(whole | reached | {data for module in reached for data in _data(module)})


def code(source: str) -> str:
    """The lines of a module that make it what it does, the same on every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _files(folder: Path) -> Iterator[Path]:
    """What a package is made of."""
    yield from (x for x in folder.rglob("*") if x.is_file() and x.suffix not in (".pyc", ".md"))


def _data(module: Path) -> Iterator[Path]:
    """The files that go with a module: those in the folder of its name."""
    if module.name not in ("__init__.py", "conftest.py"):
        yield from (x for x in _files(module.with_suffix("")) if x.suffix != ".py")


def _reached(root: Path, paths: Iterable[Path]) -> set[Path]:
    """These modules and all that they import of flakit and of the tests."""
    reached, waiting = set(), list(paths)
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += _imported(root, path)
    return reached


def _marks(path: Path) -> bool:
    source = path.read_text(encoding="utf-8")
    return "mark.gpu" in source and "mark.gpu" in ast.unparse(ast.parse(source))


@cache
def _content(path: Path, _: int) -> str:
    content = path.read_text(encoding="utf-8")
    return code(content) if path.suffix == ".py" else content


def _imported(root: Path, path: Path) -> tuple[Path, ...]:
    return _imports(root, path, path.stat().st_mtime_ns)


@cache
def _imports(root: Path, path: Path, _: int) -> tuple[Path, ...]:
    """The files of what a module imports, of the packages around it too."""
    package = ".".join(path.relative_to(root).parts[:-1])
    names = [package, *names_imported(root, path, at_once=path == root / "flakit" / "__init__.py")]
    files = {file for name in names if name.split(".")[0] in PACKAGES for file in _of(root, name)}
    return tuple(sorted(files - {path}))


def _of(root: Path, name: str) -> Iterator[Path]:
    """The file of a module, and those of the packages that it is in."""
    path = root
    for part in name.split("."):
        path = path / part
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file
