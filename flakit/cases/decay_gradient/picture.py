"""The picture of `decay_gradient`: two running sums over one channel, their difference with its noise, and errors."""

import math

import numpy as np
from torch import Tensor

from ...figures import Bars, Canvas, Cell, CellGrid, Drawing, style, whole_ticks
from ...language import Words, number, percent, say
from . import FORMULAS, Shown

WORDS = Words() | {
    "knobs": {"T": "tokens T", "rounding": "stored as"},
    "alt": "Over the tokens of one channel: two running sums, their difference dw beside the true one, and the error "
    "of that difference with the noise that the law expects; beside it bars with the error of dw by each formula",
    "sums": "two running sums, up to ±{size:.2g}",
    "dw": "dw, up to ±{size:.2g}",
    "error": "error of dw, up to ±{size:.2g}",
    "read": "sum of r dr after t",
    "written": "sum of k dk from t on",
    "true": "true",
    "difference": "their difference",
    "direct": "direct sum",
    "noise": "law: noise of the difference",
    "errors": "all of dw off by",
    "formulas": {
        "direct": "direct sum",
        "identity": "difference",
        "identity-rounded": "… rounded",
        "identity-same-operands": "in chunks",
    },
    "inf": "infinite",
    "fine": "The sums reach {sums:.2g}, their difference {dw:.2g}. What {rounding} rounds off dr and dk stays in it, "
    "and still dw is right to {off}: this decay and length do not bring it out.",
    "noisy": "The sums reach {sums:.2g}, their difference only {dw:.2g}. What {rounding} rounds off dr and dk stays in "
    "it: dw is off by {off}. The direct sum subtracts nothing and is right to {direct}.",
    "noise "
    "only": "The sums reach {sums:.2g}, their difference only {dw:.2g}. What {rounding} rounds off dr and dk is more "
    "than that: dw is noise, off by {off} times its own size. The direct sum subtracts nothing and is right to "
    "{direct}.",
    "nothing": "Everything is forgotten at once and dw is 0. The two sums reach {sums:.2g} and should be equal: what "
    "is left of their difference is noise alone.",
    "token": "token {t}: {read:.6g} - {written:.6g} leaves {dw} (true: {true}); the direct sum {direct}",
    "off": "token {t}: the difference is off by {off:.3g}{noise}; the direct sum by {direct:.2g}",
    "expected": " where the law expects some {noise:.2g}",
    "formula": "{name}: {about}; off by {off:.3g}{law}",
    "by law": ", {law:.3g} by the law",
}
ON_VIEW = ("decay", "profile", "rounding")
LINE = "identity-rounded"
_SIZES = {"T": 256}
PRESETS = {
    "logsigmoid": {"profile": "logsigmoid", "rounding": "bfloat16"} | _SIZES,
    "stronger": {"profile": "constant", "decay": -2.5, "rounding": "bfloat16"} | _SIZES,
    "noise": {"profile": "constant", "decay": -6.0, "rounding": "bfloat16"} | _SIZES,
    "float32": {"profile": "constant", "decay": -6.0, "rounding": "float32"} | _SIZES,
}

_LINES = {
    "sums": {"read": {"color": style.R, "linestyle": "-"}, "written": {"color": style.K, "linestyle": "--"}},
    "dw": {
        "direct": {"color": style.W, "lw": 2.4},
        "true": {"color": style.BLACK, "lw": 1.0, "linestyle": (0, (2, 2))},
        "difference": {"color": style.INDIGO, "lw": 1.2},
    },
    "error": {"direct": {"color": style.W, "lw": 1.6}, "difference": {"color": style.INDIGO, "lw": 1.2}},
}
_FINE = 0.01
_LOW, _HIGH = -8, 2  # powers of ten of the bars


class Picture(Drawing):
    def __init__(self, width: float):
        wide = width > 8
        left, side, gap, title, down = 0.3, 0.24 * width, 0.2, 0.27, 0.84 if wide else 0.63
        room = width - left - gap - side - 0.12
        below = 3 * (title + down)
        self.canvas = Canvas(width, below + (0.66 if wide else 0.88))
        self._titles, self._lines, self._cells = {}, {}, {}
        for n, (name, looks) in enumerate(_LINES.items()):
            ax = whole_ticks(self.canvas.axes(left, title + n * (title + down), room, down, framed=True))
            ax.set(yticks=[0], ylim=(-1.12, 1.12))
            ax.tick_params(labelbottom=n == 2)
            self._titles[name] = ax.text(0, 1.06, "", transform=ax.transAxes, fontsize=9.5)
            self._lines[name] = {
                which: self.canvas.line(ax, **look, label=WORDS[which]) for which, look in looks.items()
            }
            self._cells[name] = CellGrid(self.canvas, ax, name)
        ax.set_xlabel(say("token t"), loc="right", labelpad=1)
        self._noise = ax.fill_between([], [], color="#D0D0D0", lw=0, zorder=1, label=WORDS["noise"])
        self.canvas.moving(self._noise)
        look = {"title": WORDS["errors"], "framed": True}
        self._draw_errors(self.canvas.axes(left + room + gap, title, side, below - title, **look))
        handles = [*self._lines["sums"].values(), *self._lines["dw"].values(), self._noise, self._law]
        look = {"columnspacing": 1.1, "handletextpad": 0.4, "handlelength": 1.6}
        self.canvas.legend(*handles, loc="lower left", ncols=len(handles) if wide else 4, **look)
        self.canvas.labels(*self._titles.values())

    def _draw_errors(self, ax) -> None:
        rows = len(FORMULAS)
        ax.set(xlim=(_LOW, _HIGH), ylim=(rows - 0.5, -0.5), yticks=[])
        powers = range(_LOW, _HIGH + 1, 4)
        ax.set_xticks(powers, [f"$10^{{{power}}}$" for power in powers])
        self._bars = Bars(self.canvas, ax, horizontal=True, thick=0.3, facecolor=style.BLUE)
        self._infinite = Bars(self.canvas, ax, horizontal=True, thick=0.3, **style.INF)
        self._law = self.canvas.line(ax, "d", color=style.BLACK, ms=6, zorder=4, label=say("law"), clip_on=False)
        self._words = [ax.text(_LOW + 0.25, row - 0.2, "", va="bottom", fontsize=8.5) for row in range(rows)]
        self.canvas.labels(*self._words)
        CellGrid(self.canvas, ax, "errors", rows, 1)

    def update(self, shown: Shown) -> None:
        t = np.arange(len(shown.true))
        lines = {
            "sums": {"read": shown.read, "written": shown.written},
            "dw": {"difference": shown.rounded, "direct": shown.direct, "true": shown.true},
            "error": {"difference": shown.rounded - shown.true, "direct": shown.direct - shown.true},
        }
        for name, ys in lines.items():
            largest = _largest(*ys.values(), *([shown.noise.nan_to_num()] if name == "error" else []))
            for which, y in ys.items():
                self._lines[name][which].set_data(t, y.double().numpy() / largest)
            self._cells[name].update(1, len(t))
            self._titles[name].set_text(WORDS.say(name, size=largest))
            self._lines[name][which].axes.set_xlim(-0.5, len(t) - 0.5)
        noise = shown.noise.nan_to_num().numpy() / largest
        self._noise.set_verts([np.stack((np.append(t, t[::-1]), np.append(noise, -noise[::-1])), -1)])
        self.changed(len(t))

        errors = [shown.errors[name] for name in FORMULAS]
        self._bars.update([math.nan if x == math.inf else _power(x) for x in errors], begin=_LOW)
        self._infinite.update([_HIGH if x == math.inf else math.nan for x in errors], begin=_LOW)
        there = [(_power(shown.laws[name]), row) for row, name in enumerate(FORMULAS) if name in shown.laws]
        self._law.set_data(*(zip(*there, strict=True) if there else ([], [])))
        for text, name in zip(self._words, FORMULAS, strict=True):
            words = f"{WORDS['formulas'][name]}: {number(shown.errors[name], 2)}"
            text.set_text(words)

    def say(self, shown: Shown) -> str:
        off, direct = shown.errors["identity-rounded"], shown.errors["direct"]
        which = "nothing" if not shown.true.any() else "noise only" if off >= 1 else "noisy" if off >= _FINE else "fine"
        return WORDS.say(
            which, sums=_largest(shown.read, shown.written), dw=_largest(shown.true), rounding=shown.rounding,
            off=number(off, 2) if off >= 1 else _share(off), direct=_share(direct),
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "errors":
            name = list(FORMULAS)[cell.row]
            law = WORDS.say("by law", law=shown.laws[name]) if name in shown.laws else ""
            return WORDS.say(
                "formula", name=WORDS["formulas"][name], about=say(FORMULAS[name]), off=shown.errors[name], law=law
            )
        t = cell.column
        read, written, true, dw, direct, noise = (
            float(x[t]) for x in (shown.read, shown.written, shown.true, shown.rounded, shown.direct, shown.noise)
        )
        if cell.map == "error":
            expected = "" if math.isnan(noise) else WORDS.say("expected", noise=noise)
            return WORDS.say("off", t=t, off=dw - true, noise=expected, direct=direct - true)
        return WORDS.say("token", t=t, read=read, written=written, dw=dw, true=true, direct=direct)


def _largest(*lines: Tensor) -> float:
    return max(float(x.abs().max()) for x in lines) or 1.0


def _power(error: float) -> float:
    """Return log10(error), clipped to the axis of the bars."""
    return min(max(math.log10(error), _LOW), _HIGH) if error > 0 else _LOW


def _share(x: float) -> str:
    return percent(x) if x >= 0.01 else number(x, 2)
