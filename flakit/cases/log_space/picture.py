"""The picture of `log_space`: each row of the state over time, the format's limit, and the finite fractions."""

import math

import numpy as np
import torch
from matplotlib.patches import Rectangle

from ...figures import Canvas, Cell, CellGrid, Drawing, HeatMap, name_rows, style
from ...language import Words, percent
from . import GRADIENTS, Shown

WORDS = Words() | {
    "knobs": {"fed": "fed as w", "T": "length T", "K": "channels K"},
    "alt": "The size of the largest state over time, with the end of the number format; below it the size of every row "
    "of the state as a map of rows against tokens; beside them the share of each tensor that is finite",
    "size": r"$\log_{10}$ of the largest $|S_t|$",
    "measured": "measured",
    "law": r"law: $e^{\Sigma w}$",
    "lost": "not finite",
    "end": "{dtype} ends at $10^{{{top:.1f}}}$",
    "rows": "rows of $S$",
    "token": "token t",
    "finite": "finite values",
    "grows": "w lies between {low:.3g} and {high:.3g}: every token multiplies the rows of the state by {shrink:.3g} to "
    "{grow:.3g}.",
    "fades": "w lies between {low:.3g} and {high:.3g}: every token leaves between {shrink:.3g} and {grow:.3g} of the "
    "rows of the state, and what was written fades.",
    "overflow": "The state overflows at token {onset}. Only du, which never meets it, is finite as a whole.",
    "overflow, more": "The state overflows at token {onset}. Finite as a whole: {whole}.",
    "not yet": "Nothing has overflowed in {T} tokens: the largest number in the state is {size:.3g}.",
    "fine": "All is finite: the largest number in the state is {size:.3g}.",
    "row": "row {row} of {rows} (the quickest first), token {t}: e^(sum of w) = e^{sum} = {law}; the largest number in "
    "it: {size}{true}",
    "largest": "token {t}: e^(largest sum of w) = e^{sum} = {law}; the largest number in the state: {size}{true}",
    "true": " (above {end}, where {dtype} ends)",
    "share": "{name}: {finite} finite, {nan} NaN, {inf} infinite",
}
ON_VIEW = ("bias", "fed", "T")
LINE = "first t with a non-finite state"
PRESETS = {
    "not yet": {"fed": "sigmoid", "bias": 0.0, "T": 128, "dtype": "float32"},
    "overflow": {"fed": "sigmoid", "bias": 0.0, "T": 256, "dtype": "float32"},
    "float64": {"fed": "sigmoid", "bias": 0.0, "T": 256, "dtype": "float64"},
    "repaired": {"fed": "logsigmoid", "bias": 0.0, "T": 256, "dtype": "float32"},
}

_TENSORS = ("o", *GRADIENTS)
_HIGHEST, _LOWEST = 1.3, -0.3  # of the vertical axis, as shares of the format's largest exponent


class Picture(Drawing):
    def __init__(self, width: float):
        left, right = 0.62, 0.72
        bars = 0.24 * width
        size = width - left - right - bars - 0.5
        self.canvas = Canvas(width, 3.8)
        self._draw_size(self.canvas.axes(left, 0.32, size, 1.86, framed=True, ylabel=WORDS["size"]))
        ax = self.canvas.axes(left, 2.3, size, 1.02, xlabel=WORDS["token"], ylabel=WORDS["rows"], yticks=[])
        self._map = HeatMap(self.canvas, ax, name="rows")
        self._draw_shares(self.canvas.axes(left + size + 0.5, 0.32, bars, 3.0, framed=True, xlim=(0, 1)))

    def _draw_size(self, ax) -> None:
        self._ax = ax
        ax.tick_params(labelbottom=False)
        self._size_cells = CellGrid(self.canvas, ax, "size")
        self._lost = ax.add_patch(Rectangle((0, 0), 0, 1, transform=ax.get_xaxis_transform(), linewidth=0, **style.NAN))
        self._end = ax.axhline(0, color=style.GREY, linewidth=1)
        self._end_words = ax.text(
            0.015, 0, "", color=style.GREY, fontsize=8.5, va="bottom", transform=ax.get_yaxis_transform()
        )
        self._law = self.canvas.line(ax, **style.LAW, zorder=4)
        self._line = self.canvas.line(ax, **style.LINES[0], zorder=3)
        handles, words = [self._line, self._law, self._lost], [WORDS[name] for name in ("measured", "law", "lost")]
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1), "borderaxespad": 0.1}
        ax.legend(handles, words, **place, ncols=3, handlelength=1.6, columnspacing=1.2)
        self.canvas.moving(self._lost, *ax.spines.values())

    def _draw_shares(self, ax) -> None:
        rows = np.arange(len(_TENSORS))
        ax.set(ylim=(len(rows) - 0.4, -0.6), title=WORDS["finite"])
        name_rows(ax, _TENSORS)
        ax.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
        self._gone = ax.barh(rows, np.ones(len(rows)), height=0.62, linewidth=0, zorder=1, **style.NAN)
        self._finite = ax.barh(rows, np.ones(len(rows)), height=0.62, color=style.SKY, zorder=2)
        self._percents = [ax.text(1.04, row, "", va="center", fontsize=8.5) for row in rows]
        self.canvas.labels(*self._percents)
        self.canvas.moving(*self._gone, *self._finite, *ax.spines.values())
        self._shares_cells = CellGrid(self.canvas, ax, "shares")

    def update(self, shown: Shown) -> None:
        tokens, top = len(shown.sizes), math.log10(torch.finfo(shown.dtype).max)
        sizes = shown.sizes.double().log10().numpy()
        largest = sizes.max(1)
        self._line.set_data(range(tokens), np.where(np.isfinite(largest), largest, np.nan))
        self._law.set_data(range(tokens), shown.sums.amax(1) / math.log(10))
        self._lost.set_visible(shown.onset is not None)
        if shown.onset is not None:
            self._lost.set_bounds(shown.onset - 0.5, 0, tokens - shown.onset, 1)
        if self.changed(tokens, top):
            self._ax.set(xlim=(-0.5, tokens - 0.5), ylim=(_LOWEST * top, _HIGHEST * top))
            self._end.set_ydata([top, top])
            self._end_words.set_y(top)
            self._end_words.set_text(WORDS.say("end", dtype=shown.dtype, top=top))
        self._map.colours.set_clim(_LOWEST * top, top)
        self._map.update(sizes.T)
        for name, bar, gone, words in zip(_TENSORS, self._finite, self._gone, self._percents, strict=True):
            bar.set_width(shown.finite[name])
            gone.set_visible(shown.finite[name] < 1)
            words.set_text(percent(shown.finite[name]))
        self._size_cells.update(1, tokens)
        self._shares_cells.update(len(_TENSORS), 1)

    def say(self, shown: Shown) -> str:
        low, high = shown.decay
        values = {"low": low, "high": high, "shrink": math.exp(low), "grow": math.exp(high)}
        began = WORDS.say("grows" if high > 0 else "fades", **values)
        if shown.onset is None:
            ended = WORDS.say("not yet" if high > 0 else "fine", T=len(shown.sizes), size=shown.sizes[-1].max())
        else:
            whole = [name for name in _TENSORS if shown.finite[name] == 1]
            words = WORDS["overflow" if whole == ["du"] else "overflow, more"]
            ended = words.format(onset=shown.onset, whole=", ".join(whole))
        return f"{began} {ended}"

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "shares":
            name = _TENSORS[cell.row]
            finite, nan = shown.finite[name], shown.nan[name]
            shares = {"finite": percent(finite), "nan": percent(nan), "inf": percent(1 - finite - nan)}
            return WORDS.say("share", name=name, **shares)
        t, (sums, sizes) = cell.column, (shown.sums[cell.column], shown.sizes[cell.column])
        place = (sums[cell.row], sizes[cell.row]) if cell.map == "rows" else (sums.max(), sizes.max())
        total, size = (float(x) for x in place)
        end = torch.finfo(shown.dtype).max
        return WORDS.say(
            "row" if cell.map == "rows" else "largest", row=cell.row + 1, rows=sizes.numel(), t=t, sum=total,
            law=_power(total), size=size,
            true="" if math.isfinite(size) else WORDS.say("true", end=end, dtype=shown.dtype),
        )  # fmt: skip


def _power(exponent: float) -> str:
    """Format e^exponent, which may be beyond every number format, as "1.2e+345"."""
    tens = math.floor(exponent / math.log(10))
    return f"{math.exp(exponent - tens * math.log(10)):.1f}e{tens:+03d}"
