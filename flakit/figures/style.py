"""The look every picture shares: colours that colour-blind readers can tell apart, never colour alone.

Lines pair a colour with a dash style, sizes use cividis, signs green and purple, non-finite cells are hatched. Orange
is what is broken. docs/pictures.md is this grammar in words.
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
"""Orange: what is broken, NaN and wrong numbers and nothing else. No line, mark or colour map has it by chance."""

POSITIVE, NEGATIVE = "#762A83", "#1B7837"
"""Signs where there is no map: the ends of `SIGNED`."""

R, K, V, W, STATE, GRADIENT = BLUE, GREEN, "#A8437E", OLIVE, BLACK, INDIGO
"""What reads, what writes, its value, the decay, the state and what comes back: the same in formulas and pictures."""
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
"""Colour and dash of the first, second, … line of a plot: `ax.plot(x, y, **LINES[0])`."""

LAW = {"color": BLACK, "linestyle": (0, (4, 2)), "linewidth": 1.8}
"""A prediction drawn over a measurement."""

HERE = {"color": BLACK, "markeredgecolor": "white", "markeredgewidth": 1.2}
"""A mark for the setting that the knobs have now."""

MAGNITUDE = "cividis"
"""The one palette of sizes: blue is small, yellow large."""
SIGNED = "PRGn_r"
"""The one palette of signs: green is negative, white zero, purple positive."""

NAN = {"facecolor": "#F6D5C0", "hatch": "////", "edgecolor": BROKEN}
INF = {"facecolor": "#F1DDE8", "hatch": "xxxx", "edgecolor": "#8F3A66"}
LOST = {"facecolor": BROKEN, "edgecolor": BROKEN, "linewidth": 0.8}
HATCHED = {"facecolor": "none", "edgecolor": BROKEN, "hatch": "////"}
"""Finite but wrong: filled, or hatched where the number under it is to be seen."""
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


def power(exponent: float) -> str:
    """The label of a tick at a power of ten, which is how a logarithmic axis says that it is one."""
    return {0: "1", 1: "10"}.get(round(exponent), f"$10^{{{exponent:.0f}}}$")


def logarithmic(words: str) -> str:
    """The label of a logarithmic axis whose ticks are no powers of ten."""
    return say("{label} (log scale)").format(label=words)


def letter(name: str) -> str:
    """The colour of a letter: dr has that of r, D that of what comes back; black where a letter has none."""
    return _LETTERS.get(name, _LETTERS.get(name.removeprefix("d"), BLACK))


def swatch(colour: str, label: str) -> Patch:
    """A legend's entry for cells of one colour."""
    return Patch(facecolor=colour, edgecolor=GREY, linewidth=0.6, label=label)


def non_finite_handles() -> list[Patch]:
    """Legend entries for the two kinds of hatched cells."""
    return [Patch(linewidth=0, label="NaN", **NAN), Patch(linewidth=0, label="inf", **INF)]
