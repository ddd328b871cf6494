"""The picture of `padding`: the last chunk's cumulative gates, e^(gi - n) of its rows by key block, key gradients."""

import math

import numpy as np
from matplotlib.patches import ConnectionPatch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from ...figures import Canvas, Cell, CellGrid, Drawing, HeatMap, style
from ...language import Words, number, say
from ..laws import LN_MAX
from . import KEY_GRADIENT, Shown, anchors, tokens

WORDS = Words() | {
    "knobs": {"T": "length T", "gate": "log gate", "form": "padding", "op": "operator", "uneven": "share of gates"},
    "alt": "The last chunk of a sequence over its rows, tokens first and empty rows behind the end: the running sum of "
    "the gates; the factor of every row for every block of keys; the gradient of the keys, what is lost hatched and "
    "linked to the empty rows by arrows; beside them the largest gate without a NaN for each number of rows",
    "sum": "1 sum of the gates $gi_i$; behind the end, empty rows",
    "factors": "2 factor $e^{gi_i-n}$ of each row, by block of keys",
    "gradient": "3 {name} of token t: a sum over all later rows",
    "channel": {"gsa": "slot", "rwkv6": "channel"},
    "jump": "$e^{{{exponent}}}$ = {factor:.2g}",
    "limits": "|gate| without a NaN",
    "rows": "tokens in the chunk",
    "full": "The last chunk is full: no row of it is empty, and nothing can be lost at any gate.",
    "forgets": "{count} empty rows behind the end forget everything: their factor is e^-inf = 0, and nothing is lost.",
    "unvisited": "No block of keys meets an empty row: nothing can be lost at any gate.",
    "fine": "{count} empty rows behind the end count as if nothing had been forgotten: seen from {tokens} tokens into "
    "the chunk their exponent is {exponent}. That is below {end}: 0 times a large number is 0, and nothing is lost.",
    "lost": "{count} empty rows behind the end count as if nothing had been forgotten: seen from {tokens} tokens into "
    "the chunk their exponent is {exponent}, above {end}. Their 0 times inf is NaN in the sum of {name} at tokens "
    "{rows}. Lost: {lost}; the output is finite.",
    "token sum": "token {t}: its gates sum to {sum} since the chunk began",
    "empty sum": "row {t}, behind the end: its sum is loaded as {sum} (true: it has none)",
    "no row": "row {t}, behind the end: not loaded",
    "factor": "token {t} for keys {keys}: e^(gi - n) = e^{exponent} = {factor}, times what arrives at the token",
    "empty factor": "row {t}, behind the end, for keys {keys}: 0 · e^{exponent} = 0 · {factor} = {product}{true}",
    "no factor": "row {t} is not later than keys {keys}, or holds no token: no product",
    "element": "{name} of token {t}, {channel} {k}: {value}{true}",
    "no element": "row {t}, behind the end: no key",
    "limit": "{R} tokens in the last chunk: finite up to |gate| = {law}",
    "true": " (true: {true})",
}
ON_VIEW = ("T", "gate", "form")
LINE = "at which it begins"
PRESETS = {
    "fine": {"T": 120, "gate": -1.84, "form": "chunk", "op": "gsa"},
    "first NaN": {"T": 120, "gate": -1.88, "form": "chunk", "op": "gsa"},
    "three blocks": {"T": 120, "gate": -5.6, "form": "chunk", "op": "gsa"},
    "repaired": {"T": 120, "gate": -5.6, "form": "right", "op": "gsa"},
}

_DECADES = (-4, 2)
_WEAKEST, _STRONGEST = 0.5, 200.0  # |gate| on the axis of limits
_END = LN_MAX[next(iter(LN_MAX))]


class Picture(Drawing):
    def __init__(self, width: float):
        left, right, gap, self._first = 0.72, 0.14, 0.62, 0
        side = 1.85 if width > 8 else 1.35
        main = width - left - gap - side - right
        self.canvas = Canvas(width, 3.9)
        self._arrows = []
        self._sum = self.canvas.axes(left, 0.3, main, 1.0, title=WORDS["sum"], size=9, pad=3, framed=True)
        self._draw_sum(self._sum)
        look = {"title": WORDS["factors"], "size": 9, "pad": 3, "ylabel": say("block")}
        factors, gradient = self.canvas.axes(left, 1.62, main, 0.6, **look), self.canvas.axes(left, 2.48, main, 0.92)
        self._factors = HeatMap(self.canvas, factors, vmin=-20.0, vmax=20.0, name="factors")
        self._gradient = HeatMap(self.canvas, gradient, vmin=_DECADES[0], vmax=_DECADES[1], name="gradient")
        for ax in (self._sum, factors, gradient):
            ax.xaxis.set_major_locator(MultipleLocator(16))
            ax.xaxis.set_major_formatter(lambda row, _: f"{row + self._first:.0f}")
            ax.tick_params(labelbottom=ax is gradient)
        for ax in (factors, gradient):
            ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        self._ends = [ax.axvline(0, color=style.BLACK, linewidth=2, zorder=4) for ax in (self._sum, factors, gradient)]
        self._draw_limits(self.canvas.axes(width - side - right, 0.3, side, 3.1))
        self._cells = [CellGrid(self.canvas, self._sum, "sums"), CellGrid(self.canvas, self._limits, "limits")]
        self.canvas.moving(*self._ends, *factors.spines.values(), *gradient.spines.values())

    def _draw_sum(self, ax) -> None:
        ax.yaxis.set_major_locator(MaxNLocator(4))
        self._gates = self.canvas.line(ax, **style.LINES[0], zorder=3, drawstyle="steps-mid")
        self._empty = self.canvas.line(ax, ".", color=style.BLACK, markersize=5, zorder=3)
        self._anchor = self.canvas.line(ax, "o", color=style.BLACK, markersize=6, zorder=5)
        self._level = self.canvas.line(ax, color=style.GREY, linewidth=1, linestyle=":", zorder=2)
        self._jump = ax.annotate(
            "", (0, 0), (0, 0), arrowprops={"arrowstyle": "-|>", "linewidth": 2, "shrinkA": 0, "shrinkB": 0}, zorder=6
        )
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        self._words = ax.text(0, 0, "", ha="right", va="center", fontsize=9, zorder=6, bbox=behind)
        self.canvas.labels(ax.yaxis)
        self.canvas.moving(self._jump, self._words)

    def _draw_limits(self, ax) -> None:
        self._limits = ax
        ax.set(yscale="log", ylim=(_WEAKEST, _STRONGEST), xlabel=WORDS["rows"])
        ax.set_title(WORDS["limits"], fontsize=9, pad=3)
        ax.set_yticks([1, 10, 100], map(style.power, range(3)))
        self._law = self.canvas.line(ax, color=style.BLACK, linewidth=1.4, zorder=3, label=say("law"))
        ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}
        self._measured = self.canvas.line(ax, "o", color=style.BLUE, **ring, zorder=4, label=say("measured"))
        self._now = self.canvas.line(ax, "D", **style.HERE, markersize=8, zorder=5, label=say("now"))
        ax.legend(loc="upper right", borderaxespad=0.1)

    def update(self, shown: Shown) -> None:
        chunk, real = len(shown.gates), shown.real
        if self.changed(shown.first, chunk, shown.op):
            self._first = shown.first
            self._limits.set_xlim(-1, chunk + 2)
            self._limits.xaxis.set_major_locator(MultipleLocator(chunk // 4))
            self._sum.set_xlim(-0.5, chunk - 0.5)
            words = WORDS.say("gradient", name=KEY_GRADIENT[shown.op])
            self._gradient.ax.set(xlabel=words, ylabel=WORDS["channel"][shown.op])
        for line in self._ends:
            line.set_xdata([real - 0.5] * 2)
        self._update_sum(shown)

        exponents = shown.exponents.numpy()
        self._factors.update(np.where(exponents > _END, np.inf, exponents), empty=~(exponents > -np.inf))
        gradient = np.full((len(shown.gradient), chunk), np.nan)
        gradient[:, :real] = shown.gradient.abs().log10().clamp(min=_DECADES[0])
        behind = np.broadcast_to(np.arange(chunk) >= real, gradient.shape)
        self._gradient.update(gradient, empty=behind)
        self._update_arrows(shown)

        self._law.set_data(range(1, chunk + 1), np.where(np.isfinite(shown.limits), shown.limits, np.nan))
        self._measured.set_data([real], [shown.onset if shown.onset < math.inf else np.nan])
        self._now.set_data([real], [min(max(-shown.gate, _WEAKEST * 1.1), _STRONGEST / 1.1)])
        for over in self._cells:
            over.update(1, chunk)

    def _update_sum(self, shown: Shown) -> None:
        gates, rows, real = shown.gates.numpy(), np.arange(len(shown.gates)), shown.real
        lowest = min(float(gates[:real].min()), -1.0)
        self._sum.set_ylim(1.25 * lowest, -0.3 * lowest)
        self._gates.set_data(rows[:real], gates[:real])
        loaded = np.isfinite(gates[real:])
        self._empty.set_data(rows[real:][loaded], gates[real:][loaded])
        met = _farthest(shown)
        for artist in (self._anchor, self._level, self._jump, self._words):
            artist.set_visible(met is not None)
        if met is not None:
            n, row = met.tokens - 1, int(np.flatnonzero(np.isfinite(gates) & (rows >= real)).max())
            exponent = -float(gates[n])
            lost = exponent > _END
            self._anchor.set_data([n], [-exponent])
            self._level.set_data([n, row], [-exponent, -exponent])
            self._jump.xy, self._jump.xyann = (row, 0), (row, -exponent)
            self._jump.arrow_patch.set_color(style.BROKEN if lost else style.GREY)
            factor = math.inf if lost else math.exp(exponent)
            self._words.set_text(WORDS.say("jump", exponent=f"{exponent:.1f}", factor=factor))
            self._words.set_color(style.BROKEN if lost else style.GREY)
            late = real > len(rows) // 2
            self._words.set_ha("right" if late else "left")
            self._words.set_position((real - 1.5 if late else real + 0.5, -0.5 * exponent))

    def _update_arrows(self, shown: Shown) -> None:
        """Draw an arrow from a key block's padding rows with an infinite factor to the tokens that sum them."""
        upper, lower = self._factors.ax, self._gradient.ax
        while len(self._arrows) < len(shown.exponents):
            look = {"arrowstyle": "-|>", "linewidth": 1.6, "color": style.BROKEN, "mutation_scale": 12}
            arrow = ConnectionPatch((0, 0), (0, 0), "data", "data", axesA=upper, axesB=lower, zorder=6, **look)
            self.canvas.figure.add_artist(arrow)
            self._arrows += self.canvas.moving(arrow)
        for block, arrow in enumerate(self._arrows):
            infinite = (shown.exponents[block] > _END).nonzero() if block < len(shown.exponents) else ()
            arrow.set_visible(len(infinite) > 0)
            if len(infinite):
                first = block * shown.block
                arrow.xy1 = float(infinite.float().mean()), block
                arrow.xy2 = (first + min(first + shown.block, shown.real) - 1) / 2, -0.5

    def say(self, shown: Shown) -> str:
        empty, met = shown.gates[shown.real :], _farthest(shown)
        if met is None:
            words = "full" if not len(empty) else "forgets" if shown.form == "right" else "unvisited"
            return WORDS.say(words, count=len(empty))
        gradient = ~shown.gradient.isfinite()
        exponent = -float(shown.gates[met.tokens - 1])
        return WORDS.say(
            "lost" if gradient.any() else "fine", count=int(empty.isfinite().sum()), tokens=met.tokens,
            exponent=exponent, end=f"{_END:.2f}", name=KEY_GRADIENT[shown.op],
            rows=tokens(gradient.T[None, :, None], shown.first),
            lost=", ".join(name for name, finite in shown.finite.items() if not finite),
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        row, t, name = cell.column, shown.first + cell.column, KEY_GRADIENT[shown.op]
        behind = row >= shown.real
        if cell.map == "limits":
            return WORDS.say("limit", R=row + 1, law=number(shown.limits[row], inf=say("any")))
        if cell.map == "sums":
            total = float(shown.gates[row])
            words = "no row" if math.isnan(total) else "empty sum" if behind else "token sum"
            return WORDS.say(words, t=t, sum=total)
        if cell.map == "gradient":
            if behind:
                return WORDS.say("no element", t=t)
            value, right = (float(x[cell.row, row]) for x in (shown.gradient, shown.right))
            true = "" if math.isfinite(value) else WORDS.say("true", true=right)
            channel = WORDS["channel"][shown.op]
            return WORDS.say("element", name=name, t=t, channel=channel, k=cell.row, value=value, true=true)
        exponent, first = float(shown.exponents[cell.row, row]), shown.first + cell.row * shown.block
        keys = f"{first} … {first + shown.block - 1}"
        if math.isnan(exponent):
            return WORDS.say("no factor", t=t, keys=keys)
        infinite = exponent > _END
        factor = math.inf if infinite else math.exp(exponent)
        true = WORDS.say("true", true=0) if infinite else ""
        product = "NaN" if infinite else "0"
        return WORDS.say(
            "empty factor" if behind else "factor", t=t, keys=keys, exponent=exponent, factor=factor, product=product,
            true=true,
        )  # fmt: skip


def _farthest(shown: Shown):
    """Return the `Anchor` of the last key block whose gradient sums padding rows; None without one."""
    T = shown.first + shown.real
    return next(iter(anchors(T, shown.form, chunk=len(shown.gates), block=shown.block)), None)
