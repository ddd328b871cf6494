"""The picture of `inverse`: the powers of L that one element of (I - L)^-1 sums up, and the error of each form."""

import math

import numpy as np
from matplotlib.patches import Rectangle

from ...figures import ITSELF, Bars, Canvas, Cell, CellGrid, Drawing, Map, Maps, powers, style, whole_ticks
from ...language import Words, say
from ...numerics.words import error
from ..decay_gradient import ROUNDINGS
from . import FORMS, LARGEST, Shown

WORDS = Words() | {
    "knobs": {"w": "log decay w", "C": "tokens C", "rounding": "operands"},
    "alt": "A bar for every power of L, the size of the term that it adds to one element of the inverse, with lines "
    "for what the terms sum to, for what rounding leaves and for the end of the format; below, maps of the error of "
    "the inverse in three ways, and the three errors over alpha with the law of the product",
    "terms": "terms of element ({i}, {j}) of the inverse",
    "plus": "+",
    "minus": "−",
    "sum": "their sum",
    "left": "their rounding",
    "end": "{rounding} ends",
    "power": "power n of $L^n$",
    "product": "product",
    "blocks": "blocks",
    "substitution": "substitution",
    "off": "errors, from 1e-9 (blue) to 1000 (yellow)",
    "over": "error over alpha",
    "law": "law",
    "cancels": "The product sums powers of L with alternating signs, up to {largest:.2g} in size, {times:.2g} times "
    "the whole inverse: they cancel and their rounding remains, {product} of the result in {rounding}. Blocks form no "
    "power: {blocks}.",
    "cancels not": "No power of L is much larger than the inverse, so that nothing cancels: all three ways are right "
    "to the rounding of {rounding}, the product to {product}, the blocks to {blocks}.",
    "ends": "A power that the product multiplies holds numbers up to {largest:.2g}, and {rounding} ends at {end:.5g}: "
    "it is infinite there, and the next product makes it NaN. Blocks form no power: {blocks}.",
    "term": "L^{n}[{i}, {j}] = {term}: rounding alone is {left:.2g}, the sum of all terms {sum:.2g}{inf}",
    "inf": "; beyond {end:.5g}, where {rounding} ends",
    "element": "{form}, element ({i}, {j}): {made} (true: {true}), off by {off:.2g}",
    "upper": "element ({i}, {j}): as it is in I, 1 on the diagonal and 0 above it",
    "at alpha": "alpha = {alpha}: product {product}, by the law {law}; blocks {blocks}; substitution {substitution}",
}
ON_VIEW = ("alpha", "spread", "rounding")
LINE = "product off by"
PRESETS = {
    "tokens differ": {"alpha": 0.9, "spread": 3.0, "w": -0.001, "C": 16, "rounding": "bfloat16"},
    "digits lost": {"alpha": 0.9, "spread": 0.0, "w": -0.001, "C": 16, "rounding": "bfloat16"},
    "first NaN": {"alpha": 1.45, "spread": 0.0, "w": 0.0, "C": 16, "rounding": "float16"},
}

_ERRORS = powers(-9, 3)
_LOWEST, _HIGHEST = 1e-9, 1e12  # errors on the curves


class Picture(Drawing):
    def __init__(self, width: float):
        left, top, gap = 0.68, 2.36, 0.12
        side = 1.3 if width > 8 else 1.02
        self.canvas = Canvas(width, top + side + 0.46)
        self._draw_terms(self.canvas.axes(left, 0.32, width - left - 0.15, 1.2, xlabel=WORDS["power"]))
        _, height = self.canvas.figure.get_size_inches()
        self.canvas.figure.text(left / width, 1 - 2.13 / height, WORDS["off"], fontsize=9)
        self._maps = Maps(
            self.canvas, {form: Map(WORDS[form], _ERRORS, empty=ITSELF) for form in FORMS},
            left=left, top=top, size=(side, side), gap=gap, rows=say("token i"), columns=say("token j"),
        )  # fmt: skip
        at = left + 3 * side + 2 * gap + 0.62
        look = {"title": WORDS["over"], "size": 9, "pad": 3}
        self._draw_curves(self.canvas.axes(at, 2.2, width - at - 0.2, top + side - 2.2, **look))

    def _draw_terms(self, ax) -> None:
        self._terms = whole_ticks(ax)
        ax.xaxis.set_major_formatter(lambda at, _: f"{at + 1:.0f}")
        ax.yaxis.set_major_formatter(lambda power, _: f"$10^{{{power:.0f}}}$")
        self._title = ax.set_title("", fontsize=9, pad=3)
        self._bars = {
            "plus": Bars(self.canvas, ax, facecolor=style.POSITIVE),
            "minus": Bars(self.canvas, ax, facecolor=style.NEGATIVE),
            "infinite": Bars(self.canvas, ax, **style.INF),
        }
        self._lines, self._words = {}, {}
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        for name, colour in (("sum", style.BLACK), ("left", style.INDIGO), ("end", style.GREY)):
            self._lines[name] = ax.axhline(0, color=colour, linewidth=1.6, zorder=4)
            look = {"color": colour, "ha": "right", "va": "bottom", "fontsize": 9, "zorder": 5, "bbox": behind}
            self._words[name] = ax.text(1, 0, "", transform=ax.get_yaxis_transform(), **look)
        self._terms_cells = CellGrid(self.canvas, ax, "terms")
        handles = [self._bars["plus"].patch, self._bars["minus"].patch]
        ax.legend(
            handles, [WORDS["plus"], WORDS["minus"]], loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2,
            borderaxespad=0, handlelength=1.2, columnspacing=1.0,
        )  # fmt: skip
        self.canvas.labels(self._title, ax.yaxis)
        self.canvas.moving(*self._lines.values(), *self._words.values())

    def _draw_curves(self, ax) -> None:
        ax.set(yscale="log", xlim=(0, 2), ylim=(_LOWEST, _HIGHEST))
        ax.set(xticks=[0, 1, 2], yticks=[1e-8, 1e-4, 1, 1e4, 1e8, 1e12])
        ax.minorticks_off()
        looks = {"product": style.LINES[1], "blocks": style.LINES[0], "law": style.LAW}
        self._lost = ax.add_patch(Rectangle((2, 0), 0, 1, transform=ax.get_xaxis_transform(), linewidth=0, **style.NAN))
        self._now = ax.axvline(0, color=style.GREY, linewidth=1)
        self.canvas.moving(self._lost, self._now)
        self._curves = {name: self.canvas.line(ax, **look, label=WORDS[name]) for name, look in looks.items()}
        ax.legend(
            loc="upper left", borderaxespad=0.1, labelspacing=0.2, handlelength=2.2,
            frameon=True, framealpha=0.8, edgecolor="none",
        )  # fmt: skip
        self._curves_cells = CellGrid(self.canvas, ax, "over alpha")

    def update(self, shown: Shown) -> None:
        self._update_terms(shown)
        self._maps.update({form: (made.double() - shown.exact).abs() for form, made in shown.made.items()})
        for name, line in self._curves.items():
            errors = shown.over[name].numpy()
            line.set_data(shown.alphas, np.where(np.isfinite(errors), errors, np.nan))
        gone = shown.alphas[~shown.over["product"].isfinite()]
        ends = float(gone[0]) if len(gone) else 2.0
        self._lost.set_bounds(ends, 0, 2.0 - ends, 1)
        self._now.set_xdata([shown.alpha, shown.alpha])
        self._curves_cells.update(1, len(shown.alphas))

    def _update_terms(self, shown: Shown) -> None:
        end, sizes = LARGEST[shown.rounding], shown.terms.abs().numpy()
        left = 2.0 ** -ROUNDINGS[shown.rounding] * sizes.max()
        at = {"sum": abs(float(shown.exact[shown.element])), "left": left, "end": end}
        with np.errstate(divide="ignore"):
            tall, at = np.log10(sizes), {name: float(np.log10(value)) for name, value in at.items()}
        lines = [x for x in (at["sum"], at["left"], 0.0) if x > -math.inf]
        bottom, top = min(lines) - 1, max(*lines, tall.max()) + 1
        if at["end"] < top + 1:
            top = max(top, at["end"] + 1)
        signs = {"plus": shown.terms.numpy() > 0, "minus": shown.terms.numpy() < 0}
        masks = {name: mask & (sizes <= end) for name, mask in signs.items()} | {"infinite": sizes > end}
        for name, bars in self._bars.items():
            bars.update(np.where(masks[name] & (tall > bottom), tall, np.nan), bottom)
        for name, line in self._lines.items():
            there = bottom < at[name] < top
            for artist in (line, self._words[name]):
                artist.set_visible(there)
            if there:
                line.set_ydata([at[name]] * 2)
                self._words[name].set_y(at[name])
                self._words[name].set_text(WORDS.say(name, rounding=shown.rounding))
        self._terms.set_ylim(bottom, top)
        if self.changed(len(sizes)):
            self._terms.set_xlim(-0.6, len(sizes) - 0.4)
        i, j = shown.element
        self._title.set_text(WORDS.say("terms", i=i, j=j))
        self._terms_cells.update(1, len(sizes))

    def say(self, shown: Shown) -> str:
        ends = not math.isfinite(shown.errors["product"])
        largest = shown.multiplied if ends else float(shown.terms.abs().max())
        return WORDS.say(
            "ends" if ends else "cancels" if shown.cancels > 3 else "cancels not", largest=largest, times=shown.cancels,
            rounding=shown.rounding, end=LARGEST[shown.rounding], product=error(shown.errors["product"]),
            blocks=error(shown.errors["blocks"]),
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "over alpha":
            errors = {name: error(float(x[cell.column])) for name, x in shown.over.items()}
            return WORDS.say("at alpha", alpha=shown.alphas[cell.column], **errors)
        if cell.map == "terms":
            (i, j), term, end = shown.element, float(shown.terms[cell.column]), LARGEST[shown.rounding]
            left = 2.0 ** -ROUNDINGS[shown.rounding] * abs(term)
            return WORDS.say(
                "term", n=cell.column + 1, i=i, j=j, term=term, left=left, sum=shown.exact[i, j],
                inf=WORDS.say("inf", end=end, rounding=shown.rounding) if abs(term) > end else "",
            )  # fmt: skip
        i, j = cell.row, cell.column
        if j >= i:
            return WORDS.say("upper", i=i, j=j)
        made, true = float(shown.made[cell.map][i, j]), float(shown.exact[i, j])
        return WORDS.say("element", form=WORDS[cell.map], i=i, j=j, made=made, true=true, off=abs(made - true))
