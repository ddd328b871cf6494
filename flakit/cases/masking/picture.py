"""The picture of `masking`: a chunk's exponents, exponentials, weights after the mask, and exponents' gradient."""

import torch

from ...figures import Canvas, Cell, Drawing, Map, Maps, powers, signed, style
from ...language import Words, say
from ..laws import LN_MAX
from . import Shown

WORDS = Words() | {
    "knobs": {"w": "decay w", "chunk": "chunk C", "exclusive": "read before decay"},
    "alt": "Four maps of the pairs of one chunk, a row for each output and a column for each key: exponents, their "
    "exponentials, the weights after the mask, and the gradient of the exponents",
    "exponents": {False: "1 exponents\n$gi_i - gi_j$", True: "1 exponents\n$ge_i - gi_j$"},
    "made": "2 after exp:\n$e^{exponent}$",
    "kept": "3 after the mask:\nthe weights",
    "gradient": "4 gradient of\nthe exponents",
    "colours": "1: green negative, purple positive\n2, 3, 4: blue tiny, yellow huge, plain grey 0",
    "fine": "All is finite: the largest exponent of a pair from the future is {largest}, and exp ends at {end:.2f}.",
    "infinite": {
        1: "One pair from the future has an exponent above {end:.2f}: exp makes it infinite.",
        2: "{count} pairs from the future have exponents above {end:.2f}: exp makes them infinite.",
    },
    "hidden": "The mask replaces what is infinite, so every weight is right. On the way back the gradient of exp is "
    "exp itself: the mask's 0 times inf is NaN, and dw is lost.",
    "seen": "The mask multiplies by 0, and 0 times inf is NaN: the output is lost, and every gradient.",
    "unmasked": "Nothing keeps that out of the sums: the output is lost, and every gradient.",
    "future": "No mask: all is finite here, but every output sees the future.",
    "before": "The mask comes first: a pair from the future has the exponent -inf, its weight is e^-inf = 0, and its "
    "gradient is 0 times 0.",
    "arithmetic": "output {i}, key {j}: e^{exponent} = {made}{masked}; back: {arriving} · {made} = {gradient}{true}",
    "first": "-inf (instead of {exponent})",
    "masked": ", masked {kept}",
    "true": " (true: 0)",
}
ON_VIEW = ("w", "mask")
LINE = "dw ends at |w|"
PRESETS = {
    "fine": {"w": -2.77, "mask": "where", "chunk": 32, "exclusive": True},
    "first NaN": {"w": -2.78, "mask": "where", "chunk": 32, "exclusive": True},
    "repaired": {"w": -2.78, "mask": "before", "chunk": 32, "exclusive": True},
}

_END = LN_MAX[torch.float32]


class Picture(Drawing):
    def __init__(self, width: float):
        left, gap, top, bottom = 0.55, 0.12, 0.47, 0.88
        side = (width - left - 0.1 - 3 * gap) / 4
        self.canvas = Canvas(width, top + side + bottom)
        scales = {"exponents": signed(_END)} | dict.fromkeys(("made", "kept", "gradient"), powers(-9, 9))
        titles = {**WORDS, "exponents": WORDS["exponents"][True]}
        self._maps = Maps(
            self.canvas, {name: Map(titles[name], scale) for name, scale in scales.items()},
            left=left, top=top, size=(side, side), gap=gap, rows=say("output i"), columns=say("key j"),
        )  # fmt: skip
        self.canvas.figure.text(left / width, 0.01, WORDS["colours"], fontsize=8.5, va="bottom")
        self.canvas.legend(*style.non_finite_handles(), borderpad=0, bbox_to_anchor=(1, 0.01), borderaxespad=0.5)

    def update(self, shown: Shown) -> None:
        self._maps.entitle("exponents", WORDS["exponents"][shown.exclusive])
        self._maps.update(shown)

    def say(self, shown: Shown) -> str:
        count, largest = shown.made.isinf().sum(), shown.exponents.triu(1).max()
        if not count:
            kind = "future" if shown.kept.triu(1).any() else "before" if largest > _END else "fine"
            return WORDS.say(kind, largest=largest, end=_END)
        lost = "hidden" if shown.finite["o"] else "seen" if shown.kept.isnan().any() else "unmasked"
        return f"{WORDS.say('infinite', count=count, end=_END)} {WORDS[lost]}"

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        made, kept, exponent = shown.made[i, j], shown.kept[i, j], shown.exponents[i, j]
        return WORDS.say(
            "arithmetic", i=i, j=j,
            exponent=WORDS.say("first", exponent=exponent) if made == 0 and exponent > -1 else exponent, made=made,
            masked="" if made == kept else WORDS.say("masked", kept=kept), arriving=shown.arriving[i, j],
            gradient=shown.gradient[i, j], true=WORDS["true"] if j > i and shown.gradient[i, j] != 0 else "",
        )  # fmt: skip
