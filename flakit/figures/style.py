"""The look that all pictures share: colours that colour-blind readers can tell apart, and never meaning by colour
alone.

A line pairs a colour with a dash style, sizes use cividis, signs green and purple, non-finite cells are hatched. Orange
means broken. docs/pictures.md describes this grammar.
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

from ..language import ENGLISH, current, say
from .fonts import FAMILY, FILE

BLACK = "#000000"
BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
PURPLE = "#CC79A7"
INDIGO = "#44318D"
OLIVE = "#8A7F00"
YELLOW = "#F0E442"
GREY = "#6B6B6B"

BROKEN = "#D55E00"
"""Orange: for broken values, NaN and wrong numbers, and for nothing else."""

POSITIVE, NEGATIVE = "#762A83", "#1B7837"
"""The colours of signs outside of maps: the ends of the palette `SIGNED`."""

R, K, V, W, STATE, GRADIENT = BLUE, GREEN, "#A8437E", OLIVE, BLACK, INDIGO
"""The colours of letters, in formulas and pictures alike: query, key, value, decay, state and its gradient."""
_LETTERS = {"r": R, "q": R, "k": K, "v": V, "w": W, "g": W, "S": STATE, "D": GRADIENT}

LINES = (
    {"color": BLUE, "linestyle": "-"},
    {"color": PURPLE, "linestyle": "--"},
    {"color": GREEN, "linestyle": "-."},
    {"color": INDIGO, "linestyle": (0, (1, 1.2))},
    {"color": OLIVE, "linestyle": (0, (5, 1.5, 1, 1.5, 1, 1.5))},
    {"color": BLACK, "linestyle": (0, (7, 3))},
    {"color": SKY, "linestyle": (0, (3, 1, 1, 1))},
)
"""Colour and dash of a plot's first, second, … line: `ax.plot(x, y, **LINES[0])`."""

LAW = {"color": BLACK, "linestyle": (0, (4, 2)), "linewidth": 1.8}
"""Look of a prediction drawn over a measurement."""

HERE = {"color": BLACK, "markeredgecolor": "white", "markeredgewidth": 1.2}
"""Look of a mark at the current setting of the knobs."""

MAGNITUDE = "cividis"
"""The palette of sizes: blue is small, yellow large."""
SIGNED = "PRGn_r"
"""The palette of signs: green is negative, white zero, purple positive."""

NAN = {"facecolor": "#F6D5C0", "hatch": "////", "edgecolor": BROKEN}
INF = {"facecolor": "#F1DDE8", "hatch": "xxxx", "edgecolor": "#8F3A66"}
LOST = {"facecolor": BROKEN, "edgecolor": BROKEN, "linewidth": 0.8}
HATCHED = {"facecolor": "none", "edgecolor": BROKEN, "hatch": "////"}
"""Looks of finite but wrong cells: filled, or hatched where the number below has to be seen."""
FINITE = "#DCEBF4"
"""Colour of cells of which only is shown that they are finite."""
EMPTY = "#DCDCDC"
"""Colour of cells without a value: above the diagonal, not computed yet."""

_RC = {
    "font.family": ["DejaVu Sans", FAMILY],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,  # a map has a frame all round, see `HeatMap`
    "axes.spines.right": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.8,
    "mathtext.default": "regular",
    "figure.facecolor": "white",
}


# By path, independent of installed fonts. Its one weight also serves as bold.
fontManager.addfont(FILE)
fontManager.ttflist.append(dataclasses.replace(fontManager.ttflist[-1], weight=700))

_CHINESE = re.compile("[\u2e80-\ufaff\uff00-\uffef]")
_MIXED = {"mathtext.default": "rm"}
"""Keep the letters of formulas in DejaVu Sans where the text around them is in another font."""

_drawing = threading.RLock()


@contextmanager
def context() -> Iterator[None]:
    """Apply the look while a figure is made: `with style.context(): …`. One thread at a time; others wait.

    Matplotlib's settings belong to the process: a second thread would take this look for the default, and restore it
    for good on leaving."""
    with _drawing, mpl.rc_context(_RC if current() == ENGLISH else _RC | _MIXED):
        yield


def readable(text: Text) -> None:
    """Set the font of a text with Chinese and a formula, beside which matplotlib would use only its first font."""
    words = text.get_text()
    if "$" in words and _CHINESE.search(words):
        text.set_fontfamily(FAMILY)


def power(exponent: float) -> str:
    """Return the tick label of 10^exponent; such labels mark an axis as logarithmic."""
    return {0: "1", 1: "10"}.get(round(exponent), f"$10^{{{exponent:.0f}}}$")


def logarithmic(words: str) -> str:
    """Return the label `words` with the note that an axis is logarithmic, for ticks that are not powers of ten."""
    return say("{label} (log scale)").format(label=words)


def letter(name: str) -> str:
    """Return the colour of a variable in formulas; a gradient such as dr has that of r. Black for a variable without
    one."""
    return _LETTERS.get(name, _LETTERS.get(name.removeprefix("d"), BLACK))


def swatch(colour: str, label: str) -> Patch:
    """Return a legend entry for cells of one colour."""
    return Patch(facecolor=colour, edgecolor=GREY, linewidth=0.6, label=label)


def non_finite_handles() -> list[Patch]:
    """Return the legend entries of hatched cells, NaN and inf."""
    return [Patch(linewidth=0, label="NaN", **NAN), Patch(linewidth=0, label="inf", **INF)]
