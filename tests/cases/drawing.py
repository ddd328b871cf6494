"""A case's picture at one setting, as its panel draws it."""

import importlib


def drawn(case, width=9.4, **setting):
    """Return the picture, drawn, and what it shows. case: a module, whose `show` takes the setting."""
    picture = importlib.import_module(f"{case.__name__}.picture").Picture(width)
    shown = case.show(**setting)
    picture.update(shown)
    return picture, shown
