"""A phase diagram: where on a grid of settings a computation is finite, how wrong it is there, and the law's border."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from ..numerics.arguments import one_of
from ..numerics.sweep import Sweep
from ..numerics.sweep_workers import in_words
from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_ERRORS = (-8, 0)  # powers of ten
_OUTLINE = [withStroke(linewidth=3.6, foreground="white")]


class Map(NamedTuple):
    """What was measured on a grid of rows (the last one on top) and columns, and what the law says of each row."""

    rows: Sequence
    """The values of the vertical axis."""
    decay: np.ndarray
    """|log decay| of the columns, evenly spaced in its logarithm."""
    share: np.ndarray
    """[rows, columns]: share of the tensor's values that are finite; NaN where nothing was measured."""
    error: np.ndarray | None
    """[rows, columns]: relative L2 error against float64; None where only finiteness was measured."""
    law: np.ndarray
    """[rows]: the largest |log decay| the law allows, inf where it allows all."""

    @property
    def broken(self) -> np.ndarray:
        """The cells that hold a non-finite value."""
        return self.share < 1

    @property
    def predicted(self) -> np.ndarray:
        """The cells in which the law expects one."""
        return self.decay > self.law[:, None]


class PhaseFigure:
    """The measurement as a map, the law as a line over it; `update` redraws in place."""

    def __init__(self):
        self.canvas = Canvas(9.2, 4.3)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.98, "", va="top", fontsize=11, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.92, "", va="top", fontsize=9.5, color=style.GREY)
            self.ax = ax = figure.add_axes((0.075, 0.125, 0.7, 0.715))
            self._map = HeatMap(self.canvas, ax, vmin=_ERRORS[0], vmax=_ERRORS[1])
            (self._law,) = ax.plot([], [], path_effects=_OUTLINE, zorder=3, **style.LAW)
            bar = self._map.colorbar(figure.add_axes((0.8, 0.125, 0.016, 0.43)), "relative error against float64")
            ticks = range(_ERRORS[0], _ERRORS[1] + 1, 2)
            bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])
            figure.legend(
                handles=[
                    Line2D([], [], label="law", **style.LAW),
                    Patch(linewidth=0, label="not finite", **style.NAN),
                    Patch(facecolor=style.FINITE, label="finite"),
                    Patch(facecolor=style.EMPTY, label="not measured"),
                ],
                loc="upper left", bbox_to_anchor=(0.795, 0.85), borderaxespad=0, handlelength=2.4, labelspacing=0.7,
            )  # fmt: skip
        self.canvas.labels(self._title, self._subtitle)
        self.canvas.moving(self._law)

    def update(self, *, title: str, subtitle: str, across: str, up: str, measured: Map) -> None:
        """across, up: what the two axes are, with units."""
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        rows, columns = measured.share.shape
        # Row 0 belongs at the bottom, as on any axis that grows upwards.
        values = np.full((rows, columns), np.nan) if measured.error is None else _log10(measured.error)
        known = ~np.isnan(measured.share)
        values = np.where(measured.broken, np.nan, values)
        finite = known & ~measured.broken & np.isnan(values)
        self._map.update(values[::-1], empty=~known[::-1], finite=finite[::-1])

        step = np.log(measured.decay[-1] / measured.decay[0]) / (columns - 1)
        place = lambda decay: np.log(np.asarray(decay) / measured.decay[0]) / step  # noqa: E731
        edges = np.arange(rows, -1, -1) - 0.5
        with np.errstate(invalid="ignore"):
            border = np.clip(place(measured.law), -1, columns)
        self._law.set_data(np.repeat(border, 2), np.repeat(edges, 2)[1:-1])
        self._ticks(place, measured, across, up)

    def _ticks(self, place, measured: Map, across: str, up: str) -> None:
        rows = len(measured.rows)
        asked = (across, up, tuple(measured.rows), tuple(measured.decay))
        if asked == getattr(self, "_asked", None):
            return
        self._asked = asked
        low, high = (np.log10(measured.decay[end]) for end in (0, -1))
        decades = np.arange(np.ceil(low), np.floor(high) + 1)
        self.ax.set_xticks(place(10**decades), [f"{10**decade:g}" for decade in decades])
        every = -(-rows // 24)
        self.ax.set_yticks(np.arange(rows - 1, -1, -1)[::every], [str(row) for row in measured.rows][::every])
        self.ax.set(xlabel=across, ylabel=up)
        self.canvas.stale()


def phase(
    found: Sweep,
    across: str = "decay",
    up: str | None = None,
    *,
    tensor: str | None = None,
    law: Callable[[object], float] | Sequence[float] | None = None,
) -> PhaseFigure:
    """A sweep over two axes as a phase diagram, the law over it; `.canvas` is the picture.

    across: the axis of (log) decays, of any sign, evenly spaced in the logarithm of their size; up: the other one.
    tensor: the one whose finiteness and error is drawn; default: whether any is non-finite, and the largest error.
    law: the largest |decay| that is finite, as a function of the other axis's value, or a number for each.
    """
    if len(found.axes) != 2:
        raise ValueError(f"found: expected a sweep over two axes, got {', '.join(found.axes)}")
    one_of("across", across, found.axes)
    up = next(name for name in found.axes if name != across) if up is None else one_of("up", up, found.axes)
    names = found.tensors if tensor is None else (one_of("tensor", tensor, found.tensors),)
    if not names:
        raise ValueError("found: expected a sweep of tensors, got none that says which of its values are finite")
    decay = np.abs(np.asarray(found.axes[across], dtype=float))
    order = np.argsort(decay)
    steps = np.diff(np.log(decay[order])) if (decay > 0).all() and len(decay) > 1 else np.array([np.nan])
    if not np.allclose(steps, steps[0], rtol=1e-3) or not steps[0] > 0:
        raise ValueError(f"across: expected decays evenly spaced in their logarithm, got {found.axes[across]}")
    rows = found.axes[up]
    turned = list(found.axes) != [up, across]
    share, error = (_worst(found, names, kind) for kind in _KINDS)
    share, error = (None if x is None else (x.T if turned else x)[:, order] for x in (share, error))
    limits = [np.inf] * len(rows) if law is None else [law(x) for x in rows] if callable(law) else list(law)
    figure = PhaseFigure()
    figure.update(
        title=f"{tensor or 'every tensor'}: finite, and how wrong", across=f"|{across}|", up=up,
        subtitle="" if law is None else "the line is the law: finite to its left",
        measured=Map([in_words(x) for x in rows], decay[order], share, error, np.asarray(limits, dtype=float)),
    )  # fmt: skip
    return figure


_KINDS = {"finite": np.min, "l2": np.max}


def _worst(found: Sweep, names: Sequence[str], kind: str) -> np.ndarray | None:
    """Over several tensors the least share of finite values, the largest error; None where none was measured."""
    grids = [found.grids[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in found.grids]
    return _KINDS[kind](grids, axis=0) if grids else None


def _log10(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log10(x), *_ERRORS)
