"""The picture of `shared_store`: one gradient by token, as it should be and as stored."""

from ...figures import Canvas, Cell, Drawing, Map, Maps, signed
from ...language import Words, percent, say
from . import Shown

WORDS = Words() | {
    "knobs": {"V": "columns V", "block": "block of V", "tensor": "gradient", "summed": "add shares"},
    "alt": "A gradient as it is and as it is stored, a column for each token and a row for each channel",
    "true": "as it is: the shares of all blocks added",
    "stored": "as it is stored",
    "colours": "green negative, purple positive",
    "one": "All {V} columns are one block: one program has the whole sum, and what it stores is right.",
    "lost": "{blocks} programs store their shares at one place, and the last one's is what remains: dr, dk and dw are "
    "off by {dr}, {dk} and {dw}. o and dv are right, and everything is finite.",
    "added": "{blocks} programs store their shares apart, and they are added: the whole sum.",
    "cell": "token {t}, channel {c}: stored {stored}, true {true}; the other shares, {missing}, are gone",
    "cell right": "token {t}, channel {c}: {true}",
}
ON_VIEW = ("V", "block", "summed")
LINE = "error of"
PRESETS = {
    "one block": {"V": 32, "block": 32, "tensor": "dk", "summed": False},
    "two blocks": {"V": 64, "block": 32, "tensor": "dk", "summed": False},
    "eight blocks": {"V": 128, "block": 16, "tensor": "dk", "summed": False},
    "repaired": {"V": 64, "block": 32, "tensor": "dk", "summed": True},
}

_LEFT, _HIGH, _GAP = 0.55, 0.85, 0.34


class Picture(Drawing):
    def __init__(self, width: float):
        top, bottom = 0.3, 0.75
        self.canvas = Canvas(width, top + 2 * _HIGH + _GAP + bottom)
        maps = {name: Map(WORDS[name], signed(), across=True) for name in ("true", "stored")}
        self._maps = Maps(
            self.canvas, maps, left=_LEFT, top=top, size=(width - _LEFT - 0.12, _HIGH), gap=_GAP,
            rows=say("channel"), columns=say("token t"), stacked=True,
        )  # fmt: skip
        self.canvas.figure.text(_LEFT / width, 0.015, WORDS["colours"], fontsize=8.5, va="bottom")

    def update(self, shown: Shown) -> None:
        size = 3 * shown.true.square().mean().sqrt()
        self._maps.update({"true": shown.true / size, "stored": shown.stored / size})

    def say(self, shown: Shown) -> str:
        if shown.blocks == 1:
            return WORDS.say("one", V=shown.V)
        if shown.summed:
            return WORDS.say("added", blocks=shown.blocks)
        off = {name: percent(shown.errors[name]) for name in ("dr", "dk", "dw")}
        return WORDS.say("lost", blocks=shown.blocks, **off)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t, c = cell.column, cell.row
        stored, true = shown.stored[t, c].item(), shown.true[t, c].item()
        if stored == true:
            return WORDS.say("cell right", t=t, c=c, true=true)
        return WORDS.say("cell", t=t, c=c, stored=stored, true=true, missing=true - stored)
