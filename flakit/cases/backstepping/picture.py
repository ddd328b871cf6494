"""The picture of `backstepping`: each rebuilt state row's error, by token and against the log decay undone, n |w|."""

import numpy as np

from ...figures import Canvas, Cell, Drawing, Map, Maps, powers, style
from ...language import Words, say
from ...numerics.words import error
from . import READ, ROUNDED, STRONGEST, Shown, grown

WORDS = Words() | {
    "knobs": {"w": "strongest w", "chunk": "tokens C", "op": "operator", "rebuilt": "states"},
    "alt": "A map of how far each row of the rebuilt state is off, a column for each token and a row for each channel; "
    "below, the same errors over the decay that was walked back, with the law, what bfloat16 rounds and the strongest "
    "decay of RWKV7's gate",
    "off": "how far each row of the state before token t is off, by the size of the row",
    "nothing": "plain grey: 0",
    "over": "error of a row",
    "walked": "decay walked back, n |w|",
    "rounded": "bfloat16 rounds",
    "gate": "the most that RWKV7's gate gives {n} tokens",
    "right": "{n} tokens are walked back from the right state behind each chunk. The fastest channel's rounding grows "
    "to {off:.2g} of its size, less than bfloat16's rounding, {rounded:.2g}. {grads}",
    "beyond": "{n} tokens are walked back from the right state behind each chunk. The fastest channel's rounding grows "
    "to {off:.2g} of its size, and bfloat16 would round by {rounded:.2g}. Nothing is NaN. {grads}",
    "lost": "{n} tokens are walked back from the right state behind each chunk. On the way the fastest channel's "
    "rounding outgrows the state itself, {off:.2g} times its size: not one digit is right. {grads}",
    "infinite": "{n} tokens are walked back from the right state behind each chunk. The fastest channel's rounding "
    "leaves float32 on the way. {grads}",
    "grads": {
        2: "{first} is off by {one}, {second} by {two}; o and the others are right.",
        3: "{first} is off by {one}, {second} by {two}, {third} by {three}; o and the others are right.",
    },
    "not finite": {
        2: "{first} and {second} are not finite; o and the others are right.",
        3: "{first}, {second} and {third} are not finite; o and the others are right.",
    },
    "again": "The backward pass runs forward again from the state before each chunk. Its states are those of the "
    "forward pass, to the bit.",
    "cell": "token {t}, channel {c}: {n} tokens walked back from the state behind token {end}, each divided by "
    "e^{w:.3g} = {d:.3g}: off by {off:.2g}, by the law {law:.2g}",
    "cell again": "token {t}, channel {c}: computed forward from the state before token {begin}, the state that the "
    "forward pass had",
}
ON_VIEW = ("w", "chunk", "rebuilt")
LINE = "a row off by"
PRESETS = {
    "RWKV7's bound": {"w": -0.6065, "chunk": 16, "op": "rwkv7", "rebuilt": "by division"},
    "wrong": {"w": -1.0, "chunk": 16, "op": "rwkv7", "rebuilt": "by division"},
    "infinite": {"w": -7.0, "chunk": 16, "op": "rwkv7", "rebuilt": "by division"},
    "repaired": {"w": -1.0, "chunk": 16, "op": "rwkv7", "rebuilt": "forward again"},
}

_SCALE = powers(-8, 0)
_FAR = 30.0
"""The right end of the curve: e^30 roundings are a million."""


class Picture(Drawing):
    def __init__(self, width: float):
        left, top, below = 0.68, 0.3, 0.82
        high, plot = (1.25, 1.45) if width > 8 else (1.0, 1.3)
        self.canvas = Canvas(width, top + high + below + plot + 0.45)
        self._maps = Maps(
            self.canvas,
            {"off": Map(WORDS["off"], _SCALE, across=True, lost=("wrong", say("wrong")))},
            left=left, top=top, size=(width - left - 0.75, high), rows=say("channel"), columns=say("token t"),
        )  # fmt: skip
        self._maps.bar("off")
        handles = style.swatch(style.BROKEN, say("wrong")), *style.non_finite_handles()
        self.canvas.legend(*handles, loc="upper right", at=(width - 0.75, top + high + 0.47), borderaxespad=0)
        self.canvas.text(left, top + high + 0.47, WORDS["nothing"], fontsize=8.5, va="top")
        self._draw_curve(self.canvas.axes(left, top + high + below, width - left - 0.75, plot))

    def _draw_curve(self, ax) -> None:
        ax.set(yscale="log", xlim=(0, _FAR), ylim=(1e-8, 1e6), xlabel=WORDS["walked"], ylabel=WORDS["over"])
        ax.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6])
        ax.minorticks_off()
        ax.axhline(ROUNDED, color=style.GREY, linewidth=1.2, linestyle=(0, (1, 1.2)), zorder=1)
        ax.text(_FAR, ROUNDED, WORDS["rounded"], color=style.GREY, ha="right", va="bottom", fontsize=9)
        self._measured = self.canvas.line(ax, ".", color=style.BLUE, markersize=6, label=say("measured"), zorder=3)
        self._law = self.canvas.line(ax, **style.LAW, label=say("law"), zorder=4)
        self._gate = ax.axvline(0, color=style.GREY, linewidth=1.2, zorder=1)
        self._named = ax.text(0, 2e-8, "", color=style.GREY, fontsize=9, va="bottom", zorder=5)
        self._named.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5})
        ax.legend(loc="upper left", borderaxespad=0.1, labelspacing=0.2, handlelength=2.2)
        self.canvas.moving(self._gate, self._named)

    def update(self, shown: Shown) -> None:
        self._maps.update(shown)
        n = np.arange(1, shown.chunk + 1)
        walked, off = n[:, None] * -shown.w.numpy(), shown.by_steps.double().numpy()
        there = np.isfinite(off) & (off > 0)
        self._measured.set_data(walked[there], off[there])
        w, divided = float(shown.w[-1]), shown.rebuilt == "by division"
        self._law.set_data(n * -w, [grown(w, int(steps), shown.op) if divided else np.nan for steps in n])
        end = shown.chunk * STRONGEST
        self._gate.set_xdata([end, end])
        for artist in (self._gate, self._named):
            artist.set_visible(end < _FAR)
        self._named.set(position=(end, 2e-8), ha="left" if end < _FAR / 2 else "right")
        self._named.set_text(f" {WORDS.say('gate', n=shown.chunk)} ")

    def say(self, shown: Shown) -> str:
        if shown.rebuilt == "forward again":
            return WORDS["again"]
        off = float(shown.by_steps[-1, -1])
        names = READ[shown.op]
        values = dict(zip(("first", "second", "third"), names, strict=False))
        values |= {
            which: error(shown.errors[name]) for which, name in zip(("one", "two", "three"), names, strict=False)
        }
        finite = all(np.isfinite(shown.errors[name]) for name in names)
        kind = "right" if off <= ROUNDED else "beyond" if off < 1 else "lost" if np.isfinite(off) else "infinite"
        return WORDS.say(
            kind, n=shown.chunk, off=off, rounded=ROUNDED,
            grads=WORDS.say("grads" if finite else "not finite", len(names), **values),
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t, c, C = cell.column, cell.row, shown.chunk
        begin = t - t % C
        if shown.rebuilt == "forward again":
            return WORDS.say("cell again", t=t, c=c, begin=begin)
        w, n = float(shown.w[c]), begin + C - t
        return WORDS.say(
            "cell", t=t, c=c, n=n, end=begin + C - 1, w=w, d=np.exp(w), off=shown.off[t, c], law=grown(w, n, shown.op)
        )
