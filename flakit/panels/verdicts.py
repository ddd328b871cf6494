"""The rows of a case, one lane each: what the law says, what was measured, and whether the two agree."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ..cases.laws import Row
from ..figures import style
from ..figures.canvas import Canvas
from ..numerics.words import number

_LANE, _TOP, _BOTTOM = 0.29, 0.68, 0.34  # inches
_LEFT, _RIGHT = 0.4, 0.7  # the lanes; words stand on both sides
_LAW, _MEASURED, _VERDICT = 0.715, 0.813, 0.918
_ZERO, _FINITE, _INF = 0.025, (0.13, 0.85), 0.955  # across a lane: 0, the logarithmic part, infinity
_WIDEST = 52  # letters of a row's name in one line

_VERDICTS = {
    True: ("✓ agree", style.GREEN),
    False: ("✗ differ", style.VERMILLION),
    None: ("no law", style.GREY),
}


class VerdictFigure:
    """Persistent: `update` redraws in place. rows: how many there is room for; more come closer to each other."""

    def __init__(self, rows: int):
        height = _TOP + _LANE * rows + _BOTTOM
        self.canvas = Canvas(9.0, height)
        self._room, self._shown, self._texts = rows, None, []
        self._decades = (0, 2)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 1 - 0.08 / height, "", va="top", fontsize=10.5, fontweight="bold")
            ax = self._ax = figure.add_axes((_LEFT, _BOTTOM / height, _RIGHT - _LEFT, _LANE * rows / height))
            ax.set(xlim=(0, 1), yticks=[])
            ax.spines[["top", "right", "left"]].set_visible(False)
            ax.tick_params(axis="x", length=3)
            for between in ((_ZERO + _FINITE[0]) / 2, (_INF + _FINITE[1]) / 2):
                ax.axvline(between, color=style.EMPTY, linewidth=0.8, zorder=0)
            self._rules = ax.add_collection(LineCollection([], colors=style.EMPTY, linewidths=0.8, zorder=0))
            self._hatched = [
                ax.add_patch(PathPatch(_boxes([]), linewidth=0, **kind)) for kind in (style.NAN, style.INF)
            ]
            self._within = ax.add_collection(LineCollection([], colors="#BDBDBD", linewidths=6, zorder=2))
            look = {"linestyle": "none", "zorder": 4}
            (self._law,) = ax.plot([], [], "D", ms=8, mfc="none", mec=style.BLACK, mew=1.4, label="law", **look)
            (self._measured,) = ax.plot([], [], "o", ms=4.6, color=style.BLUE, label="measured", **look)
            (self._recorded,) = ax.plot(
                [], [], "v", ms=8, mfc="none", mec=style.ORANGE, mew=1.6, label="on record", **look
            )
            handles = [self._law, self._measured, self._recorded, self._within]
            words = ["law", "measured", "on record", "so near is agreement"]
            figure.legend(
                handles, words, loc="lower left", bbox_to_anchor=(0.004, 1 - (_TOP - 0.02) / height), ncols=4,
                columnspacing=1.4, handletextpad=0.3, borderaxespad=0,
            )  # fmt: skip
            for x, text in ((_LAW, "law"), (_MEASURED, "measured")):
                figure.text(x, 1 - (_TOP - 0.08) / height, text, fontsize=8.5, color=style.GREY)
        self.canvas.moving(*self._hatched, self._within, self._law, self._measured, self._recorded)
        self.canvas.labels(self._title)

    def update(self, title: str, rows: Sequence[Row]) -> None:
        """title: beside what all rows have in common; rows: of a case's `at` or `reproduce`."""
        shared = _shared([row.what for row in rows])
        self._title.set_text(f"{title}: {shared.rstrip(',: ')}" if shared else title)
        self._lay_out(rows)
        for texts, row in zip(self._texts, rows, strict=False):
            verdict, colour = _VERDICTS[row.agrees]
            said = row.what.removeprefix(shared)
            law = "" if row.agrees is None else number(row.law)
            words = ("\n".join(textwrap.wrap(said, _WIDEST)), law, number(row.measured), verdict)
            for text, new in zip(texts, words, strict=True):
                if text.get_text() != new:
                    text.set_text(new)
            texts[-1].set_color(colour)

        lanes = range(len(rows))
        for line, name in ((self._law, "law"), (self._measured, "measured"), (self._recorded, "recorded")):
            at = [(x, y) for y in lanes if (x := self._across(getattr(rows[y], name))) is not None]
            line.set_data(*(np.array(at).T if at else ([], [])))
        spans = [(y, row.law, 1 + row.within) for y, row in enumerate(rows) if _positive(row.law) and row.within > 0]
        self._within.set_segments([[(self._at(law / by), y), (self._at(law * by), y)] for y, law, by in spans])
        for patch, boxes in zip(self._hatched, self._non_finite(rows), strict=True):
            patch.set_path(_boxes(boxes))
            patch.set_visible(bool(boxes))

    def _lay_out(self, rows: Sequence[Row]) -> None:
        """Room for so many rows, and decades for their numbers."""
        logs = [math.log10(x) for row in rows for x in (row.law, row.measured, row.recorded) if _positive(x)]
        low = math.floor(min(logs, default=0))
        decades = (low, max(math.ceil(max(logs, default=0)), low + 2))
        shown = (decades, bool(logs), len(rows))
        if shown == self._shown:
            return
        self._decades, self._shown = decades, shown
        room = max(self._room, len(rows))
        self._ax.set_ylim(room - 0.5, -0.5)
        step = -(-(decades[1] - decades[0]) // 5)
        ticks = range(decades[0], decades[1] + 1, step) if logs else ()
        at = [_ZERO, *(self._at(10.0**tick) for tick in ticks), _INF]
        self._ax.set_xticks(at, ["0", *(f"$10^{{{tick}}}$" for tick in ticks), "inf"])
        self._rules.set_segments([[(0, y), (1, y)] for y in range(len(rows))])
        while len(self._texts) < len(rows):
            self._texts.append(self._row_of_texts())
        for y, texts in enumerate(self._texts):
            for text in texts:
                text.set_visible(y < len(rows))
                text.set_y(y)
        self.canvas.stale()

    def _row_of_texts(self) -> list:
        across = self._ax.get_yaxis_transform()
        with style.context():
            made = [
                self._ax.text(
                    (x - _LEFT) / (_RIGHT - _LEFT), 0, "", transform=across, va="center_baseline", fontsize=size
                )
                for x, size in ((0.012, 8.5), (_LAW, 8.5), (_MEASURED, 8.5), (_VERDICT, 9))
            ]
        for text in made:
            text.set_clip_on(False)
            text.set_linespacing(0.95)
        return list(self.canvas.labels(*made))

    def _at(self, value: float) -> float:
        low, high = self._decades
        share = (math.log10(value) - low) / (high - low)
        return _FINITE[0] + (_FINITE[1] - _FINITE[0]) * min(1.03, max(-0.03, share))

    def _across(self, value: object) -> float | None:
        """Where a number stands across its lane; None for words and for numbers a logarithm has no place for."""
        if isinstance(value, (bool, str)) or not value >= 0:
            return None
        return _ZERO if value == 0 else _INF if value == math.inf else self._at(value)

    def _non_finite(self, rows: Sequence[Row]) -> tuple[list, list]:
        nan = [(0, y, 1) for y, row in enumerate(rows) if row.measured != row.measured]
        return nan, [(_INF - 0.04, y, _INF + 0.04) for y, row in enumerate(rows) if row.measured == math.inf]


def _positive(value: object) -> bool:
    return not isinstance(value, (bool, str)) and 0 < value < math.inf


def _shared(names: Sequence[str]) -> str:
    """What the rows' names begin with, up to a comma or a colon."""
    first, last = min(names), max(names)
    n = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    ends = [first[:n].rfind(mark) + len(mark) for mark in (", ", ": ") if mark in first[:n]]
    return first[: max(ends, default=0)]


def _boxes(boxes: Sequence[tuple[float, float, float]]) -> Path:
    """Boxes (left, lane, right) as one path."""
    half = 0.36
    corners = [
        [(left, y - half), (right, y - half), (right, y + half), (left, y + half), (left, y - half)]
        for left, y, right in boxes
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(np.array(corners).reshape(-1, 2), codes or None)
