"""One time step of a recurrence as matrices: what it reads, what survives, what it writes, and its place in time.

A `Scene` says what to draw for an operator.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..language import Words, say
from . import Canvas, Cell, HeatMap, style
from .canvas import WIDE
from .scenes import Row, Scene

Frame = Mapping[str, np.ndarray]
"""The arrays of one time step by name: matrices [rows, columns], vectors [rows] or [columns]."""


def frames(scene: Scene, steps: Iterable, **constants) -> dict[str, list[Frame]]:
    """Return the arrays of every step of the first batch entry and head: {"forward": […], "backward": […]}, over t.

    steps: what `reference.steps` yields. constants: arrays shared by all steps, by name; vectors are [H, …]. A backward
    frame holds the forward arrays of its t as well; without a backward pass its list is empty."""
    shared = {name: np.asarray(x[0] if np.ndim(x) else x) for name, x in constants.items()}
    passes = {"forward": {}, "backward": {}}
    for step in steps:
        seen = step.t in passes["forward"]
        which = "backward" if seen else "forward"
        frame = dict(passes["forward"][step.t] if seen else shared)
        frame |= {name: np.asarray(x[0, 0]) for name, x in step._asdict().items() if name != "t"}
        with np.errstate(all="ignore"):  # a state may overflow
            scene.complete(frame)
            frame |= {name: derive(frame) for name, derive in scene.derived.items() if seen}
        passes[which][step.t] = frame
    return {which: [by_t[t] for t in sorted(by_t)] for which, by_t in passes.items()}


WORDS = Words() | {
    "survives": {True: "What survives a step, {decay}\n(blue 0, yellow 1 or more)", False: "What survives, {decay}"},
    "t": "t",
    "size": "log10 of RMS",
}

DECAYS = "decays over time"
"""The map of what survives each step: a row per entry of the decay, a column per token."""

_STRIP, _GAP = 0.13, 0.04
# Inches. matrix: width and height; rows: their upper edges; decay, size: left, bottom, width and height of the map of
# decays over time and of the plot of sizes.
_WIDE = SimpleNamespace(
    height=4.28, left=0.44, slot=2.14, matrix=(1.46, 1.17), rows=(4.27, 2.3), decay=(7.3, 2.82, 2.0, 1.02),
    size=(7.3, 0.82, 2.0, 1.0), legend=(7.3, 0.02),
)  # fmt: skip
_NARROW = SimpleNamespace(
    height=3.88, left=0.42, slot=1.87, matrix=(1.3, 0.82), rows=(3.87, 2.27), decay=(3.6, 0.22, 2.2, 0.27),
    size=None, legend=(4.81, 0.51),
)  # fmt: skip


class Stepper:
    """The picture of one pass, "forward" or "backward", of a scene: `load` a run, then `show(t)` and `canvas.png()`.

    Cells can be pointed at in the map of every matrix and vector, by its name, with a number where it is drawn again.
    Raises ValueError for another pass."""

    def __init__(self, scene: Scene, which: str, width: float = 9.4):
        if which not in ("forward", "backward"):
            raise ValueError(f"which: expected 'forward' or 'backward', got {which!r}")
        self.scene, self.which = scene, which
        self.wide = width >= WIDE
        self._places, self._width = _WIDE if self.wide else _NARROW, width
        self.canvas = Canvas(width, self._places.height)
        self.run, self.magnitude = (), False
        self._matrices: dict[str, list[HeatMap]] = {}
        self._vectors: dict[str, list[tuple[HeatMap, bool]]] = {}
        self._times: dict[str, int] = {}
        self._borders: dict[str, Line2D] = {}
        with style.context():
            for row, top in zip(getattr(scene, which), self._places.rows, strict=True):
                self._draw_row(row, top)
            self._ends = {label: self._draw_scale(n, label) for n, label in enumerate(self._groups())}
            self._draw_timeline()

    # Drawn once.

    def _axes(self, left: float, bottom: float, width: float, height: float):
        top = self._places.height - bottom - height
        return self.canvas.axes(left, top, width, height, xticks=[], yticks=[])

    def _text(self, x: float, y: float, text: str, **kwargs):
        place = {"ha": "center", "va": "center", "fontsize": 9.5 if self.wide else 9}
        return self.canvas.figure.text(x / self._width, y / self._places.height, text, **(place | kwargs))

    def _called(self, name: str) -> str:
        self._times[name] = self._times.get(name, 0) + 1
        return name if self._times[name] == 1 else f"{name} {self._times[name]}"

    def _draw_row(self, row: Row, top: float) -> None:
        at, (width, height) = self._places, self._places.matrix
        right = at.left + 2 * at.slot + width + _GAP + _STRIP
        self._text(0.08, top - 0.11, say(row.words), weight="bold", ha="left", fontsize=10 if self.wide else 9.5)
        self._text(right, top - 0.11, say(row.equation), ha="right", fontsize=10.5 if self.wide else 9)
        for n, block in enumerate(row.blocks):
            left, bottom = at.left + n * at.slot, top - 0.6 - height
            heat = HeatMap(
                self.canvas, self._axes(left, bottom, width, height), cmap=style.SIGNED, name=self._called(block.matrix)
            )
            self._matrices.setdefault(block.matrix, []).append(heat)
            if block.border:
                self._borders[block.border] = heat.ax.axvline(0, color=style.BLACK, linewidth=1.5, zorder=4)
                self.canvas.moving(self._borders[block.border])
            middle = left + width / 2
            self._text(middle if self.wide else middle - 0.04, top - 0.32, say(block.title))
            self._text(left - 0.4, bottom + height / 2, block.sign, fontsize=15)
            far = _GAP
            if block.left:
                self._draw_vector(block.left, left - _GAP - _STRIP, bottom, column=True, free=not block.bottom)
            if block.top:
                self._draw_vector(block.top, left, bottom + height + far, column=False)
            if block.right:
                self._draw_vector(block.right, left + width + far, bottom, column=True, out=True)
            if block.bottom:
                self._draw_vector(block.bottom, left, bottom - _GAP - _STRIP, column=False, out=True)

    def _draw_vector(self, name, left, bottom, *, column: bool, out: bool = False, free: bool = False) -> None:
        """Draw the cells and the label of a vector, in inches; column: upright. out: it is a result, labelled at its
        far end. free: whether there is room to the right of the label below a column."""
        width, height = self._places.matrix
        axes = self._axes(left, bottom, *((_STRIP, height) if column else (width, _STRIP)))
        cmap = style.MAGNITUDE if name == self.scene.decay else style.SIGNED
        heat = HeatMap(self.canvas, axes, cmap=cmap, name=self._called(name))
        self._vectors.setdefault(name, []).append((heat, column))
        label = self.scene.label(name)
        if not out:
            x, y = (left + (not free) * _STRIP, bottom - 0.1) if column else (left - 0.04, bottom + 0.07)
            self._text(x, y, label, ha="left" if free else "right", color=style.letter(name))
            return
        # Results lie on the other side.
        x, y = (left, bottom + height + 0.1) if column else (left + width + 0.03, bottom + 0.06)
        self._text(
            x, y, label if column else rf"$\rightarrow\,${label}", ha="left", color=style.letter(name), weight="bold"
        )

    def _groups(self) -> dict[str, list[str]]:
        shown = {
            label: [name for name in names if name in self._matrices] for label, names in self.scene.groups.items()
        }
        return {label: names for label, names in shown.items() if names}

    def _draw_scale(self, n: int, label: str):
        """Draw a colour bar; the numbers at its ends are moving artists, so that new limits need no full redraw."""
        at = self._places
        if self.wide:
            left, bottom, width, words = at.left + n * at.slot, 0.06, 0.8, (at.left + n * at.slot, 0.27)
        else:
            left, bottom, width, words = 2.0, 0.5 - 0.19 * n, 0.5, (1.94, 0.545 - 0.19 * n)
        bar = self._matrices[self._groups()[label][0]][0].colorbar(
            self._axes(left, bottom, width, 0.09), "", orientation="horizontal"
        )
        bar.set_ticks([])
        self._text(*words, say(label), fontsize=8.5, ha="left" if self.wide else "right")
        ends = self._text(left + width + 0.05, bottom + 0.045, "", fontsize=8.5, ha="left")
        self.canvas.moving(ends)
        return ends

    def _draw_timeline(self) -> None:
        at = self._places
        ax = self._axes(*at.decay)
        ax.set_title(WORDS.say("survives", self.wide, decay=self.scene.label(self.scene.decay)), fontsize=9, pad=3)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
        if self.wide:
            ax.set_ylabel(say(self.scene.decays))
        else:
            ax.set_yticks([])
        ax.tick_params(pad=2)
        self._decay = HeatMap(self.canvas, ax, name=DECAYS)
        self._sizes = self._axes(*at.size) if at.size else None
        if self._sizes:
            self._draw_sizes(self._sizes)
        self._cursors = [
            axes.axvline(0, color=style.BLACK, linestyle=(0, (2, 1)), linewidth=1.6, zorder=4)
            for axes in filter(None, (ax, self._sizes))
        ]
        self.canvas.moving(*self._cursors)
        self.canvas.legend(
            *style.non_finite_handles(), loc="lower left", at=(at.legend[0], at.height - at.legend[1]), borderaxespad=0,
            borderpad=0.2, handlelength=1.5, handletextpad=0.4, columnspacing=1,
        )  # fmt: skip

    def _draw_sizes(self, ax) -> None:
        ax.spines[:].set_visible(True)
        ax.set_title(say(self.scene.followed[self.which][1]), fontsize=9, pad=3)
        ax.set(xlabel=WORDS["t"], ylabel=WORDS["size"])
        ax.xaxis.labelpad = 1
        ax.yaxis.set_label_coords(-50 / ax.bbox.width, 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        self._gone = {
            kind: ax.add_patch(Rectangle((0, 0), 0, 1, transform=ax.get_xaxis_transform(), linewidth=0, **look))
            for kind, look in (("inf", style.INF), ("nan", style.NAN))
        }
        self._line = self.canvas.line(ax, **style.LINES[0], marker="o", markersize=2.5, zorder=3)
        self._here = self.canvas.line(ax, "o", **style.HERE, markersize=7, zorder=5)
        self.canvas.labels(ax.yaxis)
        self.canvas.moving(*self._gone.values())

    # Redrawn for every run and every step.

    def load(self, run: Sequence[Frame], *, magnitude: bool = False) -> None:
        """Load a run of this pass, a frame per time step, and set the colour limits for all of it.

        magnitude: colour by log10 of the absolute value instead of the signed value."""
        if (magnitude, len(run)) != (self.magnitude, len(self.run)):
            self.canvas.stale()
        self.run, self.magnitude = run, magnitude
        for name, line in self._borders.items():
            line.set_xdata([run[0][name].shape[1] - 0.5] * 2)
        for label, names in self._groups().items():
            limits = self._set_colours([heat for name in names for heat in self._matrices[name]], names)
            self._ends[label].set_text(
                "$10^{{{:.1f}}}$ … $10^{{{:.1f}}}$".format(*limits) if magnitude else f"±{limits[1]:.2g}"
            )
        for name, heats in self._vectors.items():
            if name != self.scene.decay:
                self._set_colours([heat for heat, _ in heats], [name])

        self._decay.update(np.stack([frame[self.scene.decay] for frame in run], 1))
        if self._sizes:
            self._load_sizes(run)

    def _load_sizes(self, run: Sequence[Frame]) -> None:
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
        self._sizes.set(xlim=(-0.5, len(run) - 0.5), ylim=(np.floor(low - 0.2), np.ceil(high + 0.2)))

    def show(self, t: int) -> None:
        """Draw time step t of the loaded run."""
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
        if self._sizes:
            self._here.set_data([t], [self._size[t]])

    # Cells to point at.

    def entry(self, cell: Cell) -> tuple[str, tuple[int, ...]]:
        """Return the name of a cell's array and the index in it; for a cell of `DECAYS` only the row."""
        if cell.map == DECAYS:
            return self.scene.decay, (cell.row,)
        name, *_ = cell.map.split()
        if name in self._matrices:
            return name, (cell.row, cell.column)
        (column,) = [column for heat, column in self._vectors[name] if heat.name == cell.map]
        return name, (cell.row if column else cell.column,)

    def beside(self, cell: Cell, t: int) -> list[tuple[str, int | None, int | None]]:
        """Return the places to highlight with a cell: its row and column in every map with these axes, token t in
        `DECAYS`."""
        name, place = self.entry(cell)
        here = dict(zip(self.scene.axes[name], place, strict=True))
        places = []
        for name, heats in self._matrices.items():
            rows, columns = (here.get(axis) for axis in self.scene.axes[name])
            places += [(heat.name, rows, columns) for heat in heats]
        for name, heats in self._vectors.items():
            at = here.get(self.scene.axes[name])
            places += [(heat.name, at, None) if column else (heat.name, None, at) for heat, column in heats]
        places.append((DECAYS, here.get(self.scene.axes[self.scene.decay]), t))
        return [each for each in places if each[0] != cell.map and each[1:] != (None, None)]

    def _set_colours(self, heats: Iterable[HeatMap], names: Iterable[str]) -> tuple[float, float]:
        smallest, largest = _range(self.run, names)
        limits = (np.log10(smallest), np.log10(largest)) if self.magnitude else (-largest, largest)
        for heat in heats:
            heat.colours.set_cmap(style.MAGNITUDE if self.magnitude else style.SIGNED)
            heat.colours.set_clim(*limits)
        return limits

    def _shown(self, x: np.ndarray) -> np.ndarray:
        x = np.float64(x)
        if not self.magnitude:
            return x
        x = np.abs(x)
        return np.log10(np.where(x == 0, np.finfo(np.float64).tiny, x))  # -inf would be hatched as not finite


def _range(run: Sequence[Frame], names: Iterable[str]) -> tuple[float, float]:
    """Return the smallest and largest magnitude to colour of these arrays over a run, at least a factor of 100 apart.

    One percent is cut off at each end: otherwise a single large cell would leave the others pale."""
    x = np.abs(np.concatenate([np.ravel(frame[name]) for frame in run for name in names]), dtype=np.float64)
    x = x[np.isfinite(x) & (x > 0)]
    if not x.size:
        return 1e-2, 1.0
    smallest, largest = np.quantile(x, (0.01, 0.99))
    return min(smallest, largest / 100), largest


def _log_rms(x: np.ndarray) -> float:
    """Return log10 of the root mean square; NaN, which leaves a gap in a line, where that is not finite."""
    with np.errstate(all="ignore"):
        size = np.log10(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    return size if np.isfinite(size) else np.nan
