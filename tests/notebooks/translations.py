"""Lessons in another language: what each cell was translated from, and whether it still is.

Every cell of `notebooks/zh/` has the id of the English one and, in its metadata, the hash of the text that it was made
from. When a cell of the English changes, a test names it. Translate it again, then say so:

    python -m tests.notebooks.translations 05_one_infinity 05-16 05-24    these cells are translated
    python -m tests.notebooks.translations 05_one_infinity                all are
"""

import ast
import hashlib
import sys

import nbformat

from docs.lessons import NOTEBOOKS, read

KEY = "translates"


def digest(cell):
    """Of what a reader sees of a cell, and what runs."""
    return hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]


def english(path):
    """The lesson that a translation is of."""
    return read(NOTEBOOKS / path.name)


def outdated(path):
    """The ids of cells to be translated anew: changed, new, gone or elsewhere."""
    translated = {cell.id: cell.metadata.get(KEY) for cell in read(path).cells}
    there = {cell.id: digest(cell) for cell in english(path).cells}
    if translated.keys() == there.keys() and list(translated) != list(there):
        return [one for one, other in zip(translated, there, strict=True) if one != other]
    return [name for name in {**there, **translated} if translated.get(name) != there.get(name)]


def skeleton(source):
    """Code without what a translation changes: comments, strings, the words of f-strings and the order in them.

    A translation says its language at the top, which does not count.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if ast.unparse(node) not in _SPEAKS]
    return ast.dump(_Mute().visit(tree))


class _Mute(ast.NodeTransformer):
    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node):
        filled = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        return ast.Tuple([ast.Constant(each) for each in sorted(map(ast.dump, filled))])


_SPEAKS = ("from flakit.language import use", "use('zh')")


def main(name, ids):
    path = NOTEBOOKS / "zh" / f"{name}.ipynb"
    notebook, there = read(path), {cell.id: digest(cell) for cell in english(path).cells}
    for cell in notebook.cells:
        if not ids or cell.id in ids:
            cell.metadata[KEY] = there[cell.id]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
