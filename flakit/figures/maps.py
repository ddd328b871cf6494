"""A row of matrices, each declared as a `Map`: its array, its colours, its empty cells and its wrong ones.

maps = Maps(canvas, {"exp": Map("after exp", powers(-9, 9)), "masked": Map("after the mask", powers(-9, 9))},
            left=0.5, top=0.4, size=(2, 2), rows="output i", columns="key j")
maps.update(shown)
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from . import style
from .canvas import Canvas
from .heatmap import HeatMap
from .marks import Marked, NonFiniteRings, Ring, whole_ticks


@dataclass(frozen=True)
class Scale:
    """A colour scale: the colour map and the values at its ends. log: colours show log10 of the absolute value."""

    cmap: str
    low: float
    high: float
    log: bool = False

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return the values to colour: x, or with log log10 |x|, at least `low`. Infinities and NaN stay non-finite."""
        if not self.log:
            return x
        sizes = np.abs(x)
        with np.errstate(divide="ignore"):
            return np.where(np.isfinite(sizes), np.maximum(np.log10(sizes), self.low), sizes)


def signed(end: float = 1.0) -> Scale:
    """Return the scale of signed numbers from -end to end."""
    return Scale(style.SIGNED, -end, end)


def sizes(low: float = 0.0, high: float = 1.0) -> Scale:
    """Return the scale of numbers of one sign from low to high."""
    return Scale(style.MAGNITUDE, low, high)


def powers(low: float, high: float) -> Scale:
    """Return the logarithmic scale of absolute values from 10^low to 10^high."""
    return Scale(style.MAGNITUDE, low, high, log=True)


FUTURE = "future"
"""Value of `Map.empty`: cells above the diagonal, where a token would read a later one."""
ITSELF = "itself"
"""Value of `Map.empty`: cells on the diagonal, too."""


@dataclass(frozen=True)
class Map:
    """One matrix of a row.

    array: the attribute of `shown` to draw, [rows, columns]; default: the map's own name.
    across: whether the array is [T, channels]; tokens then run from left to right.
    empty: FUTURE, ITSELF or an attribute, boolean [rows, columns]; None: no cell, or zeros on a logarithmic scale.
    lost: wrong cells, as an attribute, boolean [rows, columns], and a label for a ring around few of them. They are
    filled with the colour of broken values or, with hatched, hatched over the numbers. note: text at the upper
    right."""

    title: str
    scale: Scale = sizes()
    array: str | None = None
    across: bool = False
    empty: str | None = None
    lost: tuple[str, str] | None = None
    hatched: bool = False
    note: str = ""


class Maps(Mapping):
    """A row of matrices: a mapping from names to `HeatMap`s. `update` redraws it in place. Cells can be pointed at by
    these names.

    left, top: of the first map, and size: width and height of each, in inches. rows, columns: labels of the axes. Only
    the first map has ticks along its rows, and labels=False removes those, too. stacked: the maps lie one below the
    other instead, and only the last has ticks along its columns. NaN and infinities too few to be seen get a ring."""

    def __init__(
        self,
        canvas: Canvas,
        maps: Mapping[str, Map],
        *,
        left: float,
        top: float,
        size: tuple[float, float],
        rows: str = "",
        columns: str = "",
        gap: float = 0.12,
        labels: bool = True,
        stacked: bool = False,
    ):
        self._canvas, self._declared = canvas, dict(maps)
        self._maps, self._rings, self._lost, self._titles = {}, {}, {}, {}
        step = (0.0, size[1] + gap) if stacked else (size[0] + gap, 0.0)
        self.right = left + size[0] + (len(maps) - 1) * step[0]
        for n, (name, each) in enumerate(maps.items()):
            ax = whole_ticks(canvas.axes(left + n * step[0], top + n * step[1], *size))
            last = n == len(maps) - 1
            ax.set(xlabel=columns if last or not stacked else "", ylabel=rows if n == 0 or stacked else "")
            ax.tick_params(labelleft=labels and (n == 0 or stacked), labelbottom=last or not stacked)
            self._titles[name] = ax.set_title(each.title, fontsize=9.5 if len(maps) < 4 else 9)
            self._maps[name] = heat = HeatMap(
                canvas, ax, cmap=each.scale.cmap, vmin=each.scale.low, vmax=each.scale.high, name=name
            )
            self._rings[name] = NonFiniteRings(canvas, ax)
            if each.note:
                corner = {"ha": "right", "va": "top", "transform": ax.transAxes, "zorder": 3}
                canvas.moving(ax.text(0.96, 0.95, each.note, **corner))
            if each.lost:
                look = style.HATCHED if each.hatched else style.LOST
                self._lost[name] = Marked(canvas, heat.ax, **look), Ring(canvas, heat.ax)

    def __getitem__(self, name: str) -> HeatMap:
        return self._maps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def entitle(self, name: str, title: str) -> None:
        """Change the title of the map `name`."""
        if self._titles[name].get_text() != title:
            self._titles[name].set_text(title)
            self._canvas.stale()

    def update(self, shown: object) -> None:
        """Redraw with the arrays of `shown`: its items if it is a mapping, else its attributes."""
        take = shown.__getitem__ if isinstance(shown, Mapping) else functools.partial(getattr, shown)
        for name, each in self._declared.items():
            x = np.asarray(take(each.array or name))
            x = x.T if each.across else x
            if each.empty in (None, FUTURE, ITSELF):
                empty = _empty(each, x)
            else:
                empty = np.asarray(take(each.empty))
            self._maps[name].update(each.scale.of(x), empty=empty)
            self._rings[name].update(x if empty is None else np.where(empty, 0.0, x))
            if each.lost:
                mask, (marked, ring) = np.asarray(take(each.lost[0])), self._lost[name]
                mask = mask.T if each.across else mask
                marked.update(mask)
                ring.update(mask, each.lost[1])

    def bar(self, name: str, label: str = "", *, gap: float = 0.14, width: float = 0.12) -> Axes:
        """Add the colour bar of a map at the right of the row; return its axes. gap, width: inches. A logarithmic scale
        has powers of ten as ticks."""
        heat, declared = self._maps[name], self._declared[name].scale
        box, (across, _) = heat.ax.get_position(), self._canvas.figure.get_size_inches()
        cax = self._canvas.figure.add_axes(((self.right + gap) / across, box.y0, width / across, box.height))
        bar = heat.colorbar(cax, label)
        bar.locator = MaxNLocator(5, integer=declared.log)
        if declared.log:
            bar.formatter = lambda power, _: style.power(power)
        bar.update_ticks()
        return cax


def _empty(declared: Map, x: np.ndarray) -> np.ndarray | None:
    if declared.empty is not None:
        return ~np.tri(*x.shape, k=0 if declared.empty == FUTURE else -1, dtype=bool)
    return x == 0 if declared.scale.log else None
