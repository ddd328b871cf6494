"""The look every picture shares: colours that colour-blind readers can tell apart, never colour alone.

Lines pair an Okabe-Ito colour with a dash style, magnitudes use cividis, non-finite cells are hatched.
"""

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.font_manager import fontManager
from matplotlib.patches import Patch
from matplotlib.text import Text

from ..language import ENGLISH, current
from .fonts import FAMILY, FILE

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#6B6B6B"

LINES = (
    {"color": BLUE, "linestyle": "-"},
    {"color": VERMILLION, "linestyle": "--"},
    {"color": GREEN, "linestyle": "-."},
    {"color": PURPLE, "linestyle": (0, (1, 1.2))},
    {"color": ORANGE, "linestyle": (0, (5, 1.5, 1, 1.5, 1, 1.5))},
    {"color": BLACK, "linestyle": (0, (7, 3))},
    {"color": SKY, "linestyle": (0, (3, 1, 1, 1))},
)
"""Colour and dash of the first, second, … line of a plot: `ax.plot(x, y, **LINES[0])`."""

LAW = {"color": BLACK, "linestyle": (0, (4, 2)), "linewidth": 1.8}
"""A prediction drawn over a measurement."""

MAGNITUDE = "cividis"
SIGNED = "PuOr"

NAN = {"facecolor": "#F6D5C0", "hatch": "////", "edgecolor": VERMILLION}
INF = {"facecolor": "#F1DDE8", "hatch": "xxxx", "edgecolor": "#8F3A66"}
FINITE = "#DCEBF4"
"""Cells known to be finite and nothing else."""
EMPTY = "#DCDCDC"
"""Cells that hold nothing: above the diagonal, not yet computed."""

_RC = {
    "font.family": ["DejaVu Sans", FAMILY],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.8,
    "mathtext.default": "regular",
    "figure.facecolor": "white",
}


# By its path, whatever is installed. It has one weight, which also stands for the others.
fontManager.addfont(FILE)
fontManager.ttflist.append(dataclasses.replace(fontManager.ttflist[-1], weight=700))

_CHINESE = re.compile("[\u2e80-\ufaff\uff00-\uffef]")
_MIXED = {"mathtext.default": "rm"}
"""The letters of formulas from DejaVu Sans also where the words around them are from another font."""

_drawing = threading.RLock()


@contextmanager
def context() -> Iterator[None]:
    """Use around the making of a figure: `with style.context(): …`. One thread at a time; others wait.

    Matplotlib's settings are the process's: a thread that came in while another was here would find this look, and put
    it back for good when it leaves.
    """
    with _drawing, mpl.rc_context(_RC if current() == ENGLISH else _RC | _MIXED):
        yield


def readable(text: Text) -> None:
    """Chinese around a formula: beside one, matplotlib looks for no second font, so the first has to have it."""
    words = text.get_text()
    if "$" in words and _CHINESE.search(words):
        text.set_fontfamily(FAMILY)


def swatch(colour: str, label: str) -> Patch:
    """A legend's entry for cells of one colour."""
    return Patch(facecolor=colour, edgecolor=GREY, linewidth=0.6, label=label)


def non_finite_handles() -> list[Patch]:
    """Legend entries for the two kinds of hatched cells."""
    return [Patch(linewidth=0, label="NaN", **NAN), Patch(linewidth=0, label="inf", **INF)]
