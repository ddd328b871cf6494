"""A picture of planted losses of digits against the lines that the trace names."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.patches import Rectangle

from flakit.figures import style
from flakit.figures.plots import Picture


class Cell(NamedTuple):
    """A line of a kernel in `digits_matrix`: the digits that it lost, and whether the trace named it."""

    lost: float
    named: bool


def digits_matrix(cases: Mapping[str, tuple[Sequence[Cell], int]]) -> Picture:
    """Draw a row per planted loss of digits, and a cell per line of its kernel that computes something.

    cases: by name, the lines and the index of the one with the planted fault.
    """
    most = max(len(lines) for lines, _ in cases.values())
    named = [[n for n, line in enumerate(lines) if line.named] for lines, _ in cases.values()]
    agree = sum(lines == [planted] for lines, (_, planted) in zip(named, cases.values(), strict=True))
    alt = f"{len(cases)} planted losses of digits and the lines of each: in {agree} the planted line is the one named."
    height, width = 1.15 + 0.3 * len(cases), 3.0 + 0.62 * most
    picture = Picture(height, alt, width=max(width, 7.5))
    with style.context():
        ax = picture.axes(2.75, 0.5, 0.62 * most, 0.3 * len(cases))
        ax.set(xlim=(-0.5, most - 0.5), ylim=(len(cases) - 0.5, -0.5), title="digits that each line lost")
        ax.set_yticks(range(len(cases)), list(cases))
        ax.set_xticks(range(most), [f"{n + 1}" for n in range(most)])
        ax.set_xlabel("line of the kernel that computes something")
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        for row, (lines, planted) in enumerate(cases.values()):
            for n, line in enumerate(lines):
                face = style.FINITE if not line.named else style.GREEN if n == planted else style.BROKEN
                ax.add_patch(Rectangle((n - 0.47, row - 0.44), 0.94, 0.88, facecolor=face, linewidth=0))
                words = "all" if not math.isfinite(line.lost) else f"{line.lost:.1f}"
                look = {"color": "white", "fontweight": "bold"} if line.named else {"color": style.GREY}
                ax.text(n, row, words + (" ✓" if line.named and n == planted else ""), ha="center", va="center",
                        fontsize=8.5, **look)  # fmt: skip
            frame = Rectangle(
                (planted - 0.47, row - 0.44), 0.94, 0.88, fill=False, edgecolor=style.BLACK, linewidth=1.8
            )
            ax.add_patch(frame)
        words = "framed: the line in which the fault was planted; green: the line that the trace named"
        picture.figure.text(0.98, 0.06 / height, words, ha="right", fontsize=8.5, color=style.GREY)
    return picture
