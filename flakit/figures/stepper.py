"""One time step of a recurrence as a picture: what is read, what is kept, what is written, and where in time this is.

A `Scene` says what to draw for an operator.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from . import style
from .canvas import Canvas
from .heatmap import HeatMap
from .scenes import Row, Scene

Frame = Mapping[str, np.ndarray]
"""The arrays of one time step by name: matrices [rows, columns], vectors [rows] or [columns]."""


def frames(scene: Scene, steps: Iterable, **constants) -> dict[str, list[Frame]]:
    """The arrays of every step of the first batch entry and head: {"forward": […], "backward": […]}, each over t.

    steps: what `reference.steps` yields. constants: what all steps share, by name: vectors are given per head [H, …].
    A backward frame holds the forward arrays of its t as well; without a backward pass its list is empty.
    """
    shared = {name: np.asarray(x[0] if np.ndim(x) else x) for name, x in constants.items()}
    passes = {"forward": {}, "backward": {}}
    for step in steps:
        seen = step.t in passes["forward"]
        which = "backward" if seen else "forward"
        frame = dict(passes["forward"][step.t] if seen else shared)
        frame |= {name: np.asarray(x[0, 0]) for name, x in step._asdict().items() if name != "t"}
        with np.errstate(all="ignore"):  # a state that overflows is something to show
            for name, derive in scene.derived[which].items():
                frame[name] = derive(frame)
        passes[which][step.t] = frame
    return {which: [found[t] for t in sorted(found)] for which, found in passes.items()}


# Where things are, in inches.
_WIDTH, _HEIGHT = 9.0, 5.9
_LEFT, _SLOT, _MATRIX, _STRIP, _GAP = 0.42, 2.08, 1.42, 0.14, 0.05
_ROW_TOPS = (5.85, 3.2)
_TIMELINE, _TIMELINE_WIDTH = 7.08, 1.78


class Stepper:
    """The persistent picture of one pass of a scene: `load` a run, then `show(t)` and `canvas.png()`."""

    def __init__(self, scene: Scene, which: str):
        if which not in ("forward", "backward"):
            raise ValueError(f"which: expected 'forward' or 'backward', got {which!r}")
        self.scene, self.which = scene, which
        self.canvas = Canvas(_WIDTH, _HEIGHT)
        self._magnitude = False
        self._matrices: dict[str, list[HeatMap]] = {}
        self._vectors: dict[str, list[tuple[HeatMap, bool]]] = {}
        with style.context():
            for row, top in zip(getattr(scene, which), _ROW_TOPS, strict=True):
                self._draw_row(row, top)
            self._ends = {label: self._draw_scale(n, label) for n, label in enumerate(self._groups())}
            self._draw_timeline()

    # Built once.

    def _axes(self, left: float, bottom: float, width: float, height: float):
        ax = self.canvas.figure.add_axes((left / _WIDTH, bottom / _HEIGHT, width / _WIDTH, height / _HEIGHT))
        ax.set(xticks=[], yticks=[])
        return ax

    def _text(self, x: float, y: float, text: str, **kwargs):
        place = {"ha": "center", "va": "center", "fontsize": 9.5}
        return self.canvas.figure.text(x / _WIDTH, y / _HEIGHT, text, **(place | kwargs))

    def _draw_row(self, row: Row, top: float) -> None:
        self._text(0.15, top - 0.12, row.words, weight="bold", ha="left", fontsize=10)
        self._text(_LEFT + 3 * _SLOT - 0.1, top - 0.12, row.equation, ha="right", fontsize=10.5)
        for n, block in enumerate(row.blocks):
            left, bottom = _LEFT + n * _SLOT, top - 0.75 - _MATRIX
            heat = HeatMap(self.canvas, self._axes(left, bottom, _MATRIX, _MATRIX), cmap=style.SIGNED)
            self._matrices.setdefault(block.matrix, []).append(heat)
            self._text(left + _MATRIX / 2, top - 0.4, block.title)
            self._text(left - 0.38, bottom + _MATRIX / 2, block.sign, fontsize=16)
            far = _MATRIX + _GAP
            if block.left:
                self._draw_vector(block.left, left - _GAP - _STRIP, bottom, column=True)
            if block.top:
                self._draw_vector(block.top, left, bottom + far, column=False)
            if block.right:
                place = "left" if block.bottom else "right"
                self._draw_vector(block.right, left + far, bottom, column=True, out=True, place=place)
            if block.bottom:
                self._draw_vector(block.bottom, left, bottom - _GAP - _STRIP, column=False, out=True)

    def _draw_vector(self, name, left, bottom, *, column: bool, out: bool = False, place: str = "center") -> None:
        axes = self._axes(left, bottom, *((_STRIP, _MATRIX) if column else (_MATRIX, _STRIP)))
        heat = HeatMap(self.canvas, axes, cmap=style.MAGNITUDE if name == self.scene.decay else style.SIGNED)
        self._vectors.setdefault(name, []).append((heat, column))
        label = self.scene.label(name)
        if not out:
            x, y = (left + _STRIP, bottom - 0.1) if column else (left - 0.04, bottom + 0.07)
            self._text(x, y, label, ha="right")
            return
        # The arrow finds the result for a reader who skips the equation.
        x = left + {"left": 0, "center": _MATRIX / 2, "right": _STRIP}[place]
        self._text(x, bottom - 0.12, rf"$\rightarrow$ {label}", ha=place, color=style.VERMILLION, fontsize=10.5)

    def _groups(self) -> dict[str, list[str]]:
        shown = {
            label: [name for name in names if name in self._matrices] for label, names in self.scene.groups.items()
        }
        return {label: names for label, names in shown.items() if names}

    def _draw_scale(self, n: int, label: str) -> list:
        """A colour scale; the numbers at its ends move, so that new limits do not cost a full redraw."""
        left, bottom = _LEFT + n * _SLOT, 0.34
        ax = self._axes(left, bottom, _MATRIX, 0.1)
        bar = self._matrices[self._groups()[label][0]][0].colorbar(ax, "", orientation="horizontal")
        bar.set_ticks([])
        self._text(left + _MATRIX / 2, bottom + 0.2, label, fontsize=8.5)
        ends = [self._text(left + part * _MATRIX, bottom - 0.13, "", fontsize=8.5) for part in (0, 0.5, 1)]
        self.canvas.moving(*ends)
        return ends

    def _draw_timeline(self) -> None:
        left, width = _TIMELINE, _TIMELINE_WIDTH
        ax = self._axes(left, 3.72, width, 1.5)
        ax.set_title(
            f"What survives a step, {self.scene.label(self.scene.decay)}\n(dark 0, bright 1 or more)", fontsize=9.5
        )
        ax.set(xlabel="t", ylabel=self.scene.decays)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
        self._decay = HeatMap(self.canvas, ax)

        self._line_ax = ax = self._axes(left, 1.3, width, 1.4)
        name, label = self.scene.followed[self.which]
        ax.set_title(label, fontsize=9.5)
        ax.set(xlabel="t", ylabel="log10 of RMS")
        ax.yaxis.set_label_coords(-46 / ax.bbox.width, 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        self._gone = {
            kind: ax.add_patch(Rectangle((0, 0), 0, 1, transform=ax.get_xaxis_transform(), linewidth=0, **look))
            for kind, look in (("inf", style.INF), ("nan", style.NAN))
        }
        (self._line,) = ax.plot([], [], **style.LINES[0], marker="o", markersize=2.5, zorder=3)
        (self._here,) = ax.plot([], [], "o", color=style.VERMILLION, markersize=6, zorder=5)
        self._cursors = [
            axes.axvline(0, color=style.BLACK, linestyle=(0, (2, 1)), linewidth=1.6, zorder=4)
            for axes in (self._decay.ax, ax)
        ]
        self.canvas.labels(ax.yaxis)
        self.canvas.moving(*self._gone.values(), self._line, *self._cursors, self._here)
        self.canvas.figure.legend(
            handles=style.non_finite_handles(), loc="lower left", bbox_to_anchor=(left / _WIDTH, 0.03), ncols=2
        )

    # Changed with every run and every step.

    def load(self, run: Sequence[Frame], *, magnitude: bool = False) -> None:
        """Take a run of this pass, a frame a time step; colours keep their limits for all of it.

        magnitude: colour by log10 of the absolute value instead of the signed value.
        """
        if (magnitude, len(run)) != (self._magnitude, len(getattr(self, "run", ()))):
            self.canvas.stale()
        self.run, self._magnitude = run, magnitude
        for label, names in self._groups().items():
            limits = self._set_colours([heat for name in names for heat in self._matrices[name]], names)
            for text, value in zip(self._ends[label], np.linspace(*limits, 3), strict=True):
                text.set_text(f"$10^{{{value:.1f}}}$" if magnitude else f"{value:.2g}")
        for name, heats in self._vectors.items():
            if name != self.scene.decay:
                self._set_colours([heat for heat, _ in heats], [name])

        self._decay.update(np.stack([frame[self.scene.decay] for frame in run], 1))
        name, _ = self.scene.followed[self.which]
        self._size = np.array([_log_rms(frame[name]) for frame in run])
        self._line.set_data(np.arange(len(run)), self._size)
        for kind, test in (("inf", np.isinf), ("nan", np.isnan)):
            bad = [t for t, frame in enumerate(run) if test(frame[name]).any()]
            self._gone[kind].set_visible(bool(bad))
            if bad:
                self._gone[kind].set_bounds(bad[0] - 0.5, 0, bad[-1] - bad[0] + 1, 1)
        seen = self._size[np.isfinite(self._size)]
        low, high = (seen.min(), seen.max()) if seen.size else (0.0, 0.0)
        self._line_ax.set(xlim=(-0.5, len(run) - 0.5), ylim=(np.floor(low - 0.2), np.ceil(high + 0.2)))

    def show(self, t: int) -> None:
        """Move to time step t of the loaded run."""
        frame = self.run[t]
        for name, heats in self._matrices.items():
            for heat in heats:
                heat.update(self._shown(frame[name]))
        for name, heats in self._vectors.items():
            values = np.float64(frame[name]) if name == self.scene.decay else self._shown(frame[name])
            for heat, column in heats:
                heat.update(values[:, None] if column else values[None])
        for cursor in self._cursors:
            cursor.set_xdata([t, t])
        self._here.set_data([t], [self._size[t]])

    def _set_colours(self, heats: Iterable[HeatMap], names: Iterable[str]) -> tuple[float, float]:
        smallest, largest = _range(self.run, names)
        limits = (np.log10(smallest), np.log10(largest)) if self._magnitude else (-largest, largest)
        for heat in heats:
            heat.colours.set_cmap(style.MAGNITUDE if self._magnitude else style.SIGNED)
            heat.colours.set_clim(*limits)
        return limits

    def _shown(self, x: np.ndarray) -> np.ndarray:
        x = np.float64(x)
        if not self._magnitude:
            return x
        x = np.abs(x)
        return np.log10(np.where(x == 0, np.finfo(np.float64).tiny, x))  # -inf would be hatched as non-finite


def _range(run: Sequence[Frame], names: Iterable[str]) -> tuple[float, float]:
    """What colours reach from and to: the magnitudes of these arrays over the run, at least two decades of them.

    The last percent at each end is left to the colour there, or a single large cell would leave the others pale.
    """
    x = np.abs(np.concatenate([np.ravel(frame[name]) for frame in run for name in names]), dtype=np.float64)
    x = x[np.isfinite(x) & (x > 0)]
    if not x.size:
        return 1e-2, 1.0
    smallest, largest = np.quantile(x, (0.01, 0.99))
    return min(smallest, largest / 100), largest


def _log_rms(x: np.ndarray) -> float:
    """log10 of the root mean square; NaN where that is no finite number, so that a line has a gap there."""
    with np.errstate(all="ignore"):
        size = np.log10(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    return size if np.isfinite(size) else np.nan
