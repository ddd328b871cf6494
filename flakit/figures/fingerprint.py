"""The table of faults: a row per cause, a column per tensor, and in each cell the kind of damage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.patches import Patch

from ..language import Words
from . import Canvas, HeatMap, Marked, style

WORDS = Words() | {
    "lesson": "lesson",
    "ok": "ok",
    "wrong": "wrong",
    "some": {"inf": "some inf", "NaN": "some NaN"},
    "brackets": "( ): at some tokens",
    "unknown": "not known yet",
    "seen": "what you see",
}

ROW = 0.25
"""The height of a row in inches."""


@dataclass(frozen=True)
class Line:
    """A row: the cause's name, its lesson, and for each tensor its state (`kinds`): "ok", "wrong", "inf", "NaN" or None
    for unknown, whether that holds at every token (`everywhere`), and whether it contradicts what the reader saw
    (`against`; empty: nowhere)."""

    name: str
    lesson: str
    kinds: Sequence[str | None]
    everywhere: Sequence[bool]
    against: Sequence[bool] = ()


_WIDE = 8.0
"""The smallest width in inches at which "some NaN" fits into a cell."""


class Fingerprint:
    """A table of `rows` lines, as wide as its canvas. `update` redraws it in place.

    columns: names of the tensors. seen: whether a row above the others shows what the reader saw."""

    def __init__(self, canvas: Canvas, columns: Sequence[str], rows: int, *, seen: bool = False):
        self.canvas, self._columns, self._rows = canvas, tuple(columns), rows
        width, _ = canvas.figure.get_size_inches()
        left, right, gap = 1.75, 0.72, 0.14 if seen else 0.0
        self._brief = width < _WIDE
        top = 0.36
        with style.context():
            self._seen = self._axes(left, top, width - left - right, ROW, "seen", 1) if seen else None
            top += (ROW + gap) * seen
            self._map = self._axes(left, top, width - left - right, rows * ROW, "causes", rows)
            first = self._seen or self._map
            for heat in {id(x): x for x in (first, self._map)}.values():
                heat["ax"].set_xticks(range(len(columns)), columns if heat is first else [""] * len(columns))
                heat["ax"].xaxis.tick_top()
                heat["ax"].tick_params(length=0, pad=2)
            for text, name in zip(first["ax"].get_xticklabels(), columns, strict=True):
                text.set(color=style.letter(name.split("_")[0].strip("$")), fontsize=9.5, fontweight="bold")
            right = width - right + 0.08
            canvas.text(right, 0.2, WORDS["lesson"], fontsize=8.5, color=style.GREY, va="center")
            middles = [top + (row + 0.5) * ROW for row in range(rows)]
            self._lessons = [canvas.text(right, middle, fontsize=8.5, va="center") for middle in middles]
            if seen:
                self._seen["ax"].set_yticks([0], [WORDS["seen"]])
            if self._brief:
                canvas.text(0.08, 0.2, WORDS["brackets"], fontsize=8.5, color=style.GREY, va="center")
            canvas.legend(
                style.swatch(style.FINITE, WORDS["ok"]),
                Patch(linewidth=0, label=WORDS["wrong"], facecolor=style.BROKEN),
                *style.non_finite_handles(),
                style.swatch(style.EMPTY, WORDS["unknown"]),
                loc="lower left",
            )
        canvas.labels(self._map["ax"].yaxis, *self._lessons)

    def _axes(self, left: float, top: float, width: float, height: float, name: str, rows: int) -> dict:
        ax = self.canvas.axes(left, top, width, height)
        look = {"ha": "center", "va": "center", "fontsize": 8.5, "zorder": 6}
        heat = HeatMap(self.canvas, ax, name=name)
        words = [[ax.text(x, y, "", **look) for x in range(len(self._columns))] for y in range(rows)]
        for y in range(1, rows):
            self.canvas.moving(ax.axhline(y - 0.5, color="white", linewidth=1.5, zorder=4))
        for x in range(1, len(self._columns)):
            self.canvas.moving(ax.axvline(x - 0.5, color="white", linewidth=1.5, zorder=4))
        self.canvas.moving(*(text for row in words for text in row))
        return {"ax": ax, "heat": heat, "wrong": Marked(self.canvas, ax, **style.LOST), "words": words}

    def update(self, lines: Sequence[Line], seen: Sequence[str | None] | None = None) -> None:
        """Redraw. lines: at most `rows`; the rest stays empty. seen: each tensor's state as the reader saw it."""
        blank = Line("", "", [None] * len(self._columns), [True] * len(self._columns))
        lines = [*lines, *[blank] * (self._rows - len(lines))]
        self._draw(self._map, lines)
        self._map["ax"].set_yticks(range(self._rows), [line.name for line in lines])
        for text, line in zip(self._lessons, lines, strict=True):
            text.set_text(line.lesson)
        if self._seen is not None:
            self._draw(self._seen, [Line("", "", seen or blank.kinds, blank.everywhere)])

    def _draw(self, part: dict, lines: Sequence[Line]) -> None:
        kinds = np.array([[kind or "" for kind in line.kinds] for line in lines])
        values = np.select([kinds == "NaN", kinds == "inf"], [np.nan, np.inf], 0.0)
        part["heat"].update(values, empty=kinds == "", finite=(kinds == "ok") | (kinds == "wrong"))
        part["wrong"].update(kinds == "wrong")
        for line, row in zip(lines, part["words"], strict=True):
            against = line.against or [False] * len(row)
            for kind, everywhere, other, text in zip(line.kinds, line.everywhere, against, row, strict=True):
                words = "" if kind is None else WORDS[kind] if kind in ("ok", "wrong") else kind
                if not everywhere and kind in ("inf", "NaN"):
                    words = f"({kind})" if self._brief else WORDS["some"][kind]
                text.set_text(words)
                text.set(color="white" if kind == "wrong" else style.BLACK, fontweight="bold" if other else "normal")
                behind = kind in ("NaN", "inf")
                text.set_bbox(
                    {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6} if behind else None
                )
