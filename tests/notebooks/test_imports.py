"""Every name that a notebook imports from flakit exists."""

import ast
import importlib

import pytest

from docs.lessons import LESSONS, SOLUTIONS, TRANSLATIONS, code_cells, name, read

pytestmark = pytest.mark.notebook


def imported(source):
    """The modules of flakit that a cell imports, each with a name from it or None."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Import):
            pairs = [(each.name, None) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            pairs = [(node.module, each.name) for each in node.names]
        else:
            continue
        yield from (pair for pair in pairs if pair[0].split(".")[0] == "flakit")


def exists(module, member):
    """Whether a module exists and, unless None, its member: an attribute or a module of its own."""
    try:
        package = importlib.import_module(module)
        return member is None or hasattr(package, member) or bool(importlib.import_module(f"{module}.{member}"))
    except ImportError:
        return False


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS + TRANSLATIONS, ids=name)
def test_imports_exist(path):
    pairs = [pair for cell in code_cells(read(path)) for pair in imported(cell.source)]
    assert [pair for pair in pairs if not exists(*pair)] == []


def test_a_name_that_is_gone_does_not_exist():
    pairs = list(imported("from flakit import inputs, gone\nfrom flakit.panels import sketches\nimport flakit.gone"))
    assert [pair for pair in pairs if not exists(*pair)] == [("flakit", "gone"), ("flakit.gone", None)]
