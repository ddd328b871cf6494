"""What goes with the package, notebooks and recordings, wherever it lies: in a checkout, or in an installed wheel.

A checkout has `notebooks/` and `data/` beside the package; a wheel carries them inside it (pyproject.toml says how).
"""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_INSIDE = PACKAGE / "_carried"

IN_CHECKOUT = not _INSIDE.is_dir()
"""Whether this flakit runs out of its repository, where there are a Makefile and a constraints.txt, too."""


def folder(name: str) -> Path:
    """The folder called "notebooks" or "data"."""
    return (PACKAGE.parent if IN_CHECKOUT else _INSIDE) / name
