"""What a module imports, read from its source."""

import ast
from pathlib import Path


def names_imported(root: Path, path: Path, at_once: bool = False) -> list[str]:
    """The absolute name of everything that a module imports. at_once: not of what its functions import."""
    names, package = [], path.relative_to(root).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names
