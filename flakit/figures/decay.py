"""The onset of overflow in a chunk: both exponents of every pair, every tensor, and the decay at which each breaks."""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..language import Words, number, percent
from . import Canvas, CellGrid, HeatMap, name_rows, style

_DECADES = (-4, 2)
_WEAKEST, _STRONGEST = 0.05, 500.0  # ends of the overview of onsets, as |w|
_APART = 1.5  # the zoom holds onsets within this factor
_FEW = 0.1  # below this share of non-finite rows or columns, marks point at them

WORDS = Words() | {
    "token i": "token i of chunk",
    "token j": "token j of chunk",
    "token t": "token t",
    "onset": "where each tensor breaks",
    "law": "law",
    "measured": "measured",
    "now": "now",
    "never": "never",
    "magnitude": "magnitude",
    "fine": "fine",
    "lost": "{share} lost",
}


class Onset(NamedTuple):
    """The |log decay| above which a tensor is non-finite, predicted by exponents (`law`) and measured. None: never."""

    law: float | None
    measured: float | None


# Pixels, from the left and from the top.
# upper, side: top and side of the maps of pairs; pairs: left edges of the read's exponents and of the key's.
# overview: left, top and width of the strip over all decades; zoom: top and height of the chart under it.
# lower, tall, right: top, height and right end of the maps of tensors.
_WIDE = SimpleNamespace(
    width=940, height=482, upper=50, side=190, pairs=(52, 260), bar=458,
    overview=(606, 62, 206), zoom=(86, 140), lower=298, tall=144, right=872, gap=14,
)  # fmt: skip
_NARROW = SimpleNamespace(
    width=590, height=412, upper=44, side=124, pairs=(50, 186), bar=320,
    overview=(412, 56, 160), zoom=(80, 102), lower=268, tall=106, right=530, gap=11,
)  # fmt: skip


class DecayFigure:
    """Maps of one chunk's exponents at the top, of full tensors at the bottom. `update` redraws in place.

    tensors: by name, the label of its columns; the output first. still: tensors without a time axis, which have an
    onset but no map. Maps whose cells can be pointed at: "read" and "key" (exponents of the query's and the key's
    factor), one named after each tensor, and "onset", a row per tensor."""

    def __init__(self, tensors: Mapping[str, str], *, still: Collection[str] = (), width: float = 9.4):
        self.tensors = tuple(tensors)
        self.layout = layout = _WIDE if 100 * width >= _WIDE.width else _NARROW
        self.wide = layout is _WIDE
        self.canvas = Canvas(width, layout.height / 100)
        self._flags, self._onsets = {}, None
        with style.context():
            self._about, self._where = (self.canvas.text(0.04, 0.03, va="top", fontsize=9.5) for _ in "12")
            self.canvas.legend(
                *style.non_finite_handles(), loc="upper right", at=((layout.width - 4) / 100, -0.01), handlelength=1.6,
                columnspacing=1, borderaxespad=0, borderpad=0.2, handletextpad=0.5,
            )  # fmt: skip
            self._chunk()
            self._onset()
            self._tensors({name: columns for name, columns in tensors.items() if name not in still})
        self.canvas.labels(self._about, self._where)

    def _entitle(self, about: str, where: str) -> None:
        """Set the two parts of the title. Text is slow to draw, and `about` does not change while the knob moves."""
        if self._about.get_text() != about:
            self._about.set_text(about)
            right = self._about.get_window_extent(self.canvas.figure.canvas.get_renderer()).x1
            self._where.set_x(right / self.canvas.figure.bbox.width)
            self.canvas.stale()
        self._where.set_text(where)

    def _axes(self, left: float, top: float, width: float, height: float, **how) -> Axes:
        return self.canvas.axes(*(x / 100 for x in (left, top, width, height)), **how)

    def _chunk(self) -> None:
        layout = self.layout
        self._pairs, self._factors = {}, {}
        for name, left in zip(("read", "key"), layout.pairs, strict=True):
            ax = self._axes(left, layout.upper, layout.side, layout.side)
            self._pairs[name] = HeatMap(self.canvas, ax, name=name, cmap=style.SIGNED)
            self._factors[name] = ax.set_title("", fontsize=9.5, pad=8)
            ax.set_xlabel(WORDS["token j"], labelpad=2)
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 4, 5, 10]))
            ax.yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 4, 5, 10]))
            ax.tick_params(labelleft=name != "key")
            self._flag(name, ax)
        self._pairs["read"].ax.set_ylabel(WORDS["token i"], labelpad=2)
        self._exponent_bar = self._pairs["read"].colorbar(self._axes(layout.bar, layout.upper, 8, layout.side), "")

    def _flag(self, name: str, ax: Axes) -> None:
        """Add marks at a map's edge that point at rows (at columns for the key's exponents) too few to be seen."""
        look = {"linestyle": "", "color": style.BROKEN, "markersize": 4.5, "clip_on": False, "zorder": 6}
        if name == "key":
            mark, transform, length = "v", ax.get_xaxis_transform(), ax.bbox.height
        else:
            mark, transform, length = "<", ax.get_yaxis_transform(), ax.bbox.width
        self._flags[name] = self.canvas.line(ax, mark, transform=transform, **look), 1 + 4 / length

    def _onset(self) -> None:
        layout, rows = self.layout, np.arange(len(self.tensors))
        left, top, width = layout.overview
        self._overview = ax = self._axes(left, top, width, 9, framed=True)
        ax.set(xscale="log", xlim=(_WEAKEST, _STRONGEST), ylim=(0, 1), yticks=[])
        ax.minorticks_off()
        ax.set_xticks([0.1, 1, 10, 100], map(style.power, range(-1, 3)))
        ax.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False, length=3, pad=1)
        (self._all,) = ax.plot([], [], "|", color=style.BLACK, markersize=9, markeredgewidth=1.2, zorder=3)
        self._part = ax.axvspan(1, 2, facecolor=style.YELLOW, linewidth=0, zorder=1)
        (self._here,) = ax.plot([1, 1], [-0.25, 1.25], color=style.BLACK, clip_on=False, zorder=5)

        self._zoom = ax = self._axes(left, layout.zoom[0], width, layout.zoom[1], framed=True)
        ax.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
        name_rows(ax, self.tensors)
        ax.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3))
        self._broken = ax.barh(rows, 0 * rows, height=0.62, linewidth=0, zorder=1, **style.NAN)
        (self._law,) = ax.plot([], [], "|", color=style.BLACK, markersize=13, markeredgewidth=2, zorder=4)
        (self._measured,) = ax.plot([], [], "o", color=style.BLUE, markersize=5, zorder=3)
        self._now = ax.axvline(1, color=style.BLACK, zorder=5)
        self._aside = self.canvas.line(ax, linestyle="", color=style.BLACK, markersize=8, zorder=5, clip_on=False)
        self._funnel = [Line2D([0, 0], [0, 0], color=style.GREY, linewidth=0.8) for _ in range(2)]
        for line in self._funnel:
            self.canvas.figure.add_artist(line)
        self.canvas.moving(self._here, self._now)
        self._onset_words(rows)
        CellGrid(self.canvas, ax, "onset", len(rows), 1)

    def _onset_words(self, rows: np.ndarray) -> None:
        """Write the onset chart's title and legend, and in the wide layout its numbers at the right."""
        layout = self.layout
        left, top, width = layout.overview

        def text(x: float, y: float, label: str, **look) -> None:
            self.canvas.text(x / 100, y / 100, label, va="center", **look)

        law, measured, now = (
            (f"\u2503 {WORDS['law']}", style.BLACK),
            (f"\u25cf {WORDS['measured']}", style.BLUE),
            (f"\u2501 {WORDS['now']}", style.BLACK),
        )
        text(left - 24, layout.upper - 16, WORDS["onset"], size=9.5)
        if not self.wide:
            self._numbers = []
            for x, (label, colour) in zip((0, 48, 134), (law, measured, now), strict=True):
                text(left + x, sum(layout.zoom) + 45, label, color=colour, size=8.5)
            return
        numbers = left + width + 44, left + width + 124
        text(left + width + 10, top - 2, now[0], color=now[1], size=8.5)
        for x, (label, colour) in zip(numbers, (law, measured), strict=True):
            text(x, layout.zoom[0] - 9, label, color=colour, ha="right", size=8.5)
        ax = self._zoom
        self._numbers = [
            [
                ax.text((x - left) / width, row, "", transform=ax.get_yaxis_transform(), va="center", ha="right",
                        fontsize=8.5)
                for x in numbers
            ]
            for row in rows
        ]  # fmt: skip

    def _tensors(self, tensors: Mapping[str, str]) -> None:
        layout = self.layout
        left = layout.pairs[0]
        slot = (layout.right - left + layout.gap) / len(tensors)
        self._maps, self._titles = {}, {}
        for column, (name, columns) in enumerate(tensors.items()):
            ax = self._axes(left + slot * column, layout.lower, slot - layout.gap, layout.tall)
            self._maps[name] = HeatMap(self.canvas, ax, vmin=_DECADES[0], vmax=_DECADES[1], rows_vary=True, name=name)
            self._titles[name] = ax.set_title("", fontsize=9, pad=4, linespacing=1.1)
            ax.set_xlabel(columns if self.wide else columns.split()[0], labelpad=2)
            ax.xaxis.set_major_locator(MaxNLocator(3, integer=True, steps=[1, 2, 5, 10]))
            if column == 0:
                ax.set_ylabel(WORDS["token t"])
                ax.yaxis.set_label_coords(-34 / ax.bbox.width, 0.5)
            else:
                ax.yaxis.set_visible(False)
            self._flag(name, ax)
        self.canvas.labels(*self._titles.values())
        bar = self._maps["o"].colorbar(self._axes(layout.right + 8, layout.lower, 8, layout.tall), "")
        if self.wide:
            bar.set_label(WORDS["magnitude"], labelpad=0)
        ticks = range(_DECADES[0], _DECADES[1] + 1, 2)
        bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])

    def update(
        self,
        *,
        title: tuple[str, str],
        factors: tuple[str, str],
        exponents: tuple[np.ndarray, np.ndarray],
        formed: np.ndarray,
        infinite: tuple[np.ndarray, np.ndarray],
        limit: float,
        tensors: Mapping[str, np.ndarray],
        onsets: Mapping[str, Onset],
        knob: str,
        now: float,
    ) -> None:
        """Redraw the picture for one setting.

        title: the part that does not change while the knob moves, and the knob's value.
        factors: titles of the maps of the query's and the key's exponents. exponents: both, [C, C] each, inf where e^x
        overflows. formed: the pairs that the scheme computes, boolean [C, C]; others are left blank.
        infinite: the rows of the first and the columns of the second with an infinite factor, boolean [C]. limit: ln of
        the format's largest number, the end of the exponents' scale. tensors: [T, columns] by name. onsets: by tensor.
        knob: the label of the onset axis; now: its value, |log decay|."""
        self._entitle(*title)
        norm = self._pairs["read"].colours.norm
        if norm.vmax != limit:
            for name in ("read", "key"):
                self._pairs[name].colours.set_clim(-limit, limit)
            self._exponent_bar.set_ticks([-limit, 0, limit], labels=[f"\u2212{limit:.4g}", "0", f"{limit:.4g}"])
            self.canvas.stale()
        for name, exponent, words in zip(("read", "key"), exponents, factors, strict=True):
            self._pairs[name].update(exponent, empty=~formed)
            if self._factors[name].get_text() != words:
                self._factors[name].set_text(words)
                self.canvas.stale()
        self._point("read", infinite[0])
        self._point("key", infinite[1])
        for name, x in tensors.items():
            self._maps[name].update(_log10(x))
            good = np.isfinite(x)
            share = 1 - good.mean()
            label = WORDS["lost"].format(share=percent(share)) if share else WORDS["fine"]
            self._titles[name].set_text(f"{name}: {label}" if self.wide else f"{name}\n{label}")
            self._point(name, ~good.all(1))
        self._show_onsets(onsets, knob, now)

    def _point(self, name: str, bad: np.ndarray) -> None:
        """Mark the rows or columns that are not finite, if few; adjacent ones share a mark. bad: boolean, one each."""
        line, edge = self._flags[name]
        few = bool(bad.any()) and (bad.mean() < _FEW or bad.sum() == 1)
        line.set_visible(few)
        if few:
            (starts,), (ends,) = (np.nonzero(np.diff(np.pad(bad.astype(int), 1)) == by) for by in (1, -1))
            middle = (starts + ends - 1) / 2
            line.set_data(*((np.full_like(middle, edge), middle)[:: -1 if name == "key" else 1]))

    def _show_onsets(self, onsets: Mapping[str, Onset], knob: str, now: float) -> None:
        rows = [onsets[name] for name in self.tensors]
        window = zoomed([x for onset in rows for x in onset if x is not None], now)
        if (rows, window, knob) != self._onsets:
            self._onsets = rows, window, knob
            self._draw_onsets(rows, window, knob)
        low, high = window
        inside = low <= now <= high
        self._now.set_visible(inside)
        self._aside.set_visible(not inside)
        self._now.set_xdata([now, now])
        if not inside:
            self._aside.set_marker("<" if now < low else ">")
            self._aside.set_data([low if now < low else high], [(len(rows) - 1) / 2])
        at = min(max(now, _WEAKEST), _STRONGEST)
        self._here.set_xdata([at, at])

    def _draw_onsets(self, rows: list[Onset], window: tuple[float, float], knob: str) -> None:
        self.canvas.stale()
        self._law.set_data(*_points([onset.law for onset in rows]))
        self._measured.set_data(*_points([onset.measured for onset in rows]))
        laws = [onset.law for onset in rows if onset.law is not None]
        self._all.set_data(laws, [0.5] * len(laws))
        for row, onset in enumerate(rows):
            for text, value in zip(self._numbers[row] if self._numbers else (), onset, strict=False):
                text.set_text(WORDS["never"] if value is None else number(value))
                text.set_color(style.GREY if value is None else style.BLACK)
            bar = self._broken[row]
            bar.set_visible(onset.measured is not None)
            if onset.measured is not None:
                bar.set_x(onset.measured)
                bar.set_width(max(0.0, window[1] - onset.measured))
        self._zoom.set_xlim(window)
        self._zoom.set_xlabel(knob, labelpad=2)
        self._part.set(x=window[0], width=window[1] - window[0])
        over, size = self._overview, (self.layout.width, self.layout.height)
        _, below = over.bbox.get_points()[0] / size
        _, above = self._zoom.bbox.get_points()[1] / size
        shown = np.clip(window, _WEAKEST, _STRONGEST)
        for line, end, x in zip(self._funnel, shown, self._zoom.bbox.get_points()[:, 0] / size[0], strict=True):
            start = over.transData.transform((end, 0))[0] / size[0]
            line.set_data([start, x], [below, above])


def zoomed(onsets: list[float], now: float) -> tuple[float, float]:
    """Return the ends, in |log decay|, of the zoomed onset axis: 0 and 100 without onsets.

    It shows the group of onsets nearest to the decay `now` (neighbours in a group are at most a factor `_APART` apart),
    with a margin at both ends of 40% of the group's span, and at least 0.8% of its least onset."""
    if not onsets:
        return 0.0, 100.0
    groups = [[x] for x in sorted(onsets)[:1]]
    for x in sorted(onsets)[1:]:
        if x > _APART * groups[-1][-1]:
            groups.append([])
        groups[-1].append(x)
    near = np.log(min(max(now, _WEAKEST), _STRONGEST))
    group = min(groups, key=lambda each: abs(np.log(np.sqrt(each[0] * each[-1])) - near))
    room = 0.4 * max(group[-1] - group[0], 0.02 * group[0])
    return group[0] - room, group[-1] + room


def _points(values) -> tuple[list[float], list[int]]:
    rows = [row for row, value in enumerate(values) if value is not None]
    return [values[row] for row in rows], rows


def _log10(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logs = np.log10(np.abs(x))
    return np.where(x == 0, _DECADES[0], logs)
