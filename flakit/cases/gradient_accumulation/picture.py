"""The picture of `gradient_accumulation`: each micro-batch's loss, the sum that the trainer reports,
and the factors on loss and gradient for other numbers of micro-batches."""

import math

import numpy as np

from ...figures import Bars, Canvas, Cell, CellGrid, Drawing, Strip, name_rows, style
from ...language import Words, say
from ...numerics.words import error, number
from . import PARTS, SEQUENCES, VOCAB, Shown

WORDS = Words() | {
    "knobs": {"accumulation": "in parts", "contract": "model"},
    "alt": "A box for every part of the step: the loss that the model returns for it and what the trainer adds up; "
    "below, a bar of the reported loss for every number of parts, with the law and the plain loop's loss, and this "
    "loop's gradient against the plain loop's, element by element",
    "parts": "{sequences} sequences in {n} parts",
    "part": "{sequences} sequences in one part",
    "returned": "model returns",
    "added": "trainer adds",
    "sum": "sum {sum}",
    "reported": "reported loss",
    "plain": "plain loop",
    "same": "the same",
    "gradient": "|gradient|, this loop",
    "plain gradient": "|gradient|, plain loop",
    "one": "In one part there is nothing to divide: the loop reports {loss}, as the plain loop does. An untrained "
    "model knows nothing, and that is ln({vocab}) = {known}.",
    "nobody": "The model takes **kwargs, so the trainer leaves the division by {n} to it; the model returns the mean "
    "of its part, and nobody divides. Reported: {loss} instead of {plain}. The gradient is {factor} times too large.",
    "trainer": "The model does not promise to divide, so the trainer divides each part by {n}. Reported: {loss}, as "
    "the plain loop does, in any number of parts.",
    "model": "The model divides the sum of each part by the {counted} labels that the trainer counted, of which it "
    "predicts {predicted}. Reported: {loss} instead of {plain}, in any number of parts.",
    "returns": "part {part}: the model returns {loss}, {what}",
    "mean": "the mean of its {size} sequences",
    "share": "the sum of its {size} sequences' losses over all {counted} labels",
    "adds": "part {part}: {loss} / {by} = {added} is added",
    "adds undivided": "part {part}: {loss} is added as it is",
    "bar": "in parts: {n}; reported {loss}, {factor} times the plain loop's {plain} (law: {law}); gradient {gradient} "
    "times, beside which {rest} of it is left",
}
ON_VIEW = ("accumulation", "contract")
LINE = "loss"
PRESETS = {
    "in one part": {"accumulation": 1, "contract": "takes **kwargs"},
    "nobody divides": {"accumulation": 4, "contract": "takes **kwargs"},
    "repaired": {"accumulation": 4, "contract": "accepts_loss_kwargs = False"},
    "15 of 16": {"accumulation": 4, "contract": "uses num_items_in_batch"},
}

_LOW, _HIGH = 1e-7, 1.0  # of a gradient's elements


class Picture(Drawing):
    def __init__(self, width: float):
        left, top, wide = 1.05, 0.34, width > 8
        self.canvas, self._digits = Canvas(width, 3.7), 3 if wide else 2
        self._draw_parts(self.canvas.axes(left, top, width - left - 1.0, 0.62, xticks=[]))
        room = width - 0.62 - 0.72 - 0.2
        self._draw_bars(self.canvas.axes(0.62, 1.4, 0.52 * room, 1.82))
        self._draw_gradients(self.canvas.axes(0.62 + 0.52 * room + 0.72, 1.4, 0.48 * room, 1.82))

    def _draw_parts(self, ax) -> None:
        self._title = ax.set_title("", fontsize=9, pad=4)
        name_rows(ax, [WORDS["returned"], WORDS["added"]])
        known = math.log(VOCAB)
        self._parts = Strip(self.canvas, ax, 2, PARTS[-1], vmin=-known, vmax=2 * known, name="parts")
        self._borders = self.canvas.line(ax, color="white", linewidth=4, zorder=4)
        self._sum = ax.text(1.02, 0.25, "", va="center", fontsize=9, transform=ax.transAxes)
        self.canvas.labels(self._title, self._sum)

    def _draw_bars(self, ax) -> None:
        self._ax = ax
        ax.set(xlim=(-0.6, len(PARTS) - 0.4), xlabel=style.logarithmic(say("in parts")), ylabel=WORDS["reported"])
        ax.set_xticks(range(len(PARTS)), PARTS)
        self._others = Bars(self.canvas, ax, facecolor=style.SKY)
        self._now = Bars(self.canvas, ax, facecolor=style.BLUE)
        self._values = [ax.text(x, 0, "", ha="center", va="bottom", fontsize=8.5, zorder=5) for x in range(len(PARTS))]
        for text in self._values:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
        self._plain = ax.axhline(0, color=style.GREY, linewidth=1.6, zorder=3, label=WORDS["plain"])
        self._law = self.canvas.line(
            ax, "_", color=style.BLACK, markersize=22, markeredgewidth=1.8, zorder=4, label=say("law")
        )
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.1}
        ax.legend(handles=[self._plain, self._law], **place, ncols=2, handlelength=1.6)
        CellGrid(self.canvas, ax, "in parts", 1, len(PARTS))
        self.canvas.labels(ax.yaxis)
        self.canvas.moving(self._plain, *self._values)

    def _draw_gradients(self, ax) -> None:
        ends = np.array([_LOW, _HIGH])
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ax.set(xlabel=WORDS["plain gradient"], ylabel=WORDS["gradient"])
        ax.set_xticks(ticks := [1e-6, 1e-4, 1e-2, 1])
        ax.set_yticks(ticks)
        ax.minorticks_off()
        ax.plot(ends, ends, color=style.GREY, linewidth=1, label=WORDS["same"])
        (self._slope,) = ax.plot(ends, ends, **style.LAW, label=say("law"), zorder=4)
        self._points = self.canvas.line(ax, "o", color=style.BLUE, markersize=3, alpha=0.6, linewidth=0)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.1}
        ax.legend(**place, ncols=2, handlelength=2)
        self.canvas.moving(self._slope)

    def update(self, shown: Shown) -> None:
        n = shown.accumulation
        digits = self._digits - (n > 8)

        def words(losses):
            return [f"{loss:.{digits}f}" for loss in losses]

        self._parts.update(np.array([shown.returned, shown.added]), [words(shown.returned), words(shown.added)])
        between = np.arange(n - 1) + 0.5
        self._borders.set_data(np.repeat(between, 3), np.tile([-0.5, 1.5, np.nan], n - 1))
        self._title.set_text(WORDS.say("part" if n == 1 else "parts", sequences=SEQUENCES, n=n))
        self._sum.set_text(WORDS.say("sum", sum=shown.cuts[n].loss))

        losses = np.array([shown.cuts[parts].loss for parts in PARTS])
        own, top = np.array(PARTS) == n, 1.15 * max(losses.max(), 1.5 * shown.plain)
        self._others.update(np.where(own, np.nan, losses))
        self._now.update(np.where(own, losses, np.nan))
        for text, loss in zip(self._values, losses, strict=True):
            text.set_text(number(loss))
            text.set_y(loss + 0.015 * top)
        self._plain.set_ydata([shown.plain] * 2)
        self._law.set_data(range(len(PARTS)), [shown.laws[parts] * shown.plain for parts in PARTS])
        self._ax.set_ylim(0, top)
        plain, ours = (np.abs(gradient.double().numpy()) for gradient in shown.gradients)
        self._points.set_data(plain, ours)
        self._slope.set_ydata(shown.laws[n] * np.array([_LOW, _HIGH]))

    def say(self, shown: Shown) -> str:
        n, now = shown.accumulation, shown.cuts[shown.accumulation]
        if n == 1 and abs(now.loss_factor - 1) < 1e-3:
            words = "one"
        elif not shown.accepts:
            words = "trainer"
        else:
            words = "nobody" if n > 1 and abs(now.loss_factor / n - 1) < 1e-3 else "model"
        return WORDS.say(
            words, n=n, loss=now.loss, plain=shown.plain, factor=now.grad_factor, vocab=VOCAB, known=math.log(VOCAB),
            counted=shown.counted, predicted=shown.predicted,
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        n = shown.accumulation
        if cell.map == "in parts":
            row = shown.cuts[PARTS[cell.column]]
            return WORDS.say(
                "bar", n=row.accumulation, loss=row.loss, factor=row.loss_factor, plain=shown.plain,
                law=shown.laws[row.accumulation], gradient=row.grad_factor, rest=error(row.rest),
            )  # fmt: skip
        loss, added, part = shown.returned[cell.column], shown.added[cell.column], cell.column + 1
        if cell.row == 1:
            return WORDS.say("adds undivided" if shown.accepts else "adds", part=part, loss=loss, by=n, added=added)
        what = "share" if shown.contract == "uses num_items_in_batch" else "mean"
        text = WORDS.say(what, size=SEQUENCES // n, counted=shown.counted)
        return WORDS.say("returns", part=part, loss=loss, what=text)
