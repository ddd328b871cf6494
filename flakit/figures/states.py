"""A recurrence's states over time, side by side in one colour scale."""

from collections.abc import Sequence

import numpy as np

from ..language import say
from . import Map, Maps, name_rows, signed, style
from .plots import WIDTH, Picture

# The layout, in inches.
_LEFT, _RIGHT, _GAP, _TOP, _BOTTOM = 0.75, 0.75, 0.12, 0.55, 0.3


def filmstrip(states: Sequence, titles: Sequence[str], rows: Sequence[str], *, title: str) -> Picture:
    """Draw states [K, V] from left to right, non-finite cells hatched.

    titles: one per state; rows: the name of each of the K rows; title: of the picture. Raises ValueError for another
    number of titles or rows."""
    states = [np.asarray(state, dtype=np.float64) for state in states]
    if len(titles) != len(states):
        raise ValueError(f"titles: expected {len(states)}, one a state, got {len(titles)}")
    if len(rows) != len(states[0]):
        raise ValueError(f"rows: expected {len(states[0])} names, one a row of a state, got {len(rows)}")
    sizes = np.abs(np.stack(states))
    largest = sizes[np.isfinite(sizes)].max(initial=0.0) or 1.0

    size = (WIDTH - _LEFT - _RIGHT + _GAP) / len(states) - _GAP
    height = _TOP + size + _BOTTOM
    picture = Picture(
        height, say("{title}: heat maps of the state, {names}").format(title=title, names=", ".join(titles))
    )

    with style.context():
        maps = Maps(
            picture, {str(n): Map(name, signed(largest)) for n, name in enumerate(titles)},
            left=_LEFT, top=_TOP, size=(size, size), gap=_GAP,
        )  # fmt: skip
        maps.update({str(n): state for n, state in enumerate(states)})
        for heat in maps.values():
            heat.ax.set(xticks=[], yticks=[])
        name_rows(maps["0"].ax, rows)
        maps.bar("0", gap=0.12, width=0.1).set_yticks(
            [-largest, 0, largest], [f"{-largest:.2g}", "0", f"{largest:.2g}"]
        )
        picture.figure.text(0.008, 1 - 0.12 / height, title, va="center", fontsize=10, fontweight="bold")
        middle = (_LEFT + WIDTH - _RIGHT) / 2 / WIDTH
        picture.figure.text(middle, 0.13 / height, say("columns: the values"), ha="center", va="center", fontsize=8.5)
    return picture
