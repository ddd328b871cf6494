"""Locations of the notebooks and recordings that ship with the package, in a checkout and in an installed wheel.

A checkout has `notebooks/` and `data/` beside the package; a wheel contains them (see pyproject.toml).
"""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_INSIDE = PACKAGE / "_carried"

IN_CHECKOUT = not _INSIDE.is_dir()
"""Whether flakit runs from its repository, which also has a Makefile and a constraints.txt."""


def folder(name: str) -> Path:
    """Return the path of the folder "notebooks" or "data", in the checkout or in the installed package."""
    return (PACKAGE.parent if IN_CHECKOUT else _INSIDE) / name
