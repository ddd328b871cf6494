"""The picture of `unwritten_rows`: dk by row of the batch; below, the right weight gradient and the actual one."""

from ...figures import Canvas, Cell, Drawing, Map, Maps, signed
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"times": "its size ×", "zeroed": "write zeros"},
    "alt": "The gradient of the keys, a column for each row of the batch, the padding at the right; below, the "
    "gradient of the weight as it should be and as it is",
    "dk": "dk as it comes back: the sequences, then the padding",
    "true": "dW of the sequences",
    "computed": "dW of all rows",
    "colours": "green negative, purple positive,\nhatched: not written, and not 0",
    "right": "Behind token {last} all rows are 0, and the weight's gradient is that of the sequences.",
    "finite": "{padding} rows belong to no sequence and hold an earlier tensor. Everything is finite, and the weight's "
    "gradient is off by {error:.2g} of its size.",
    "lost": "{padding} rows belong to no sequence, and the memory held NaN. The gradient of the weight sums over all "
    "rows: every number of it is NaN.",
    "cell": "row {t}, channel {c}: dk = {value}; {whose}",
    "sequence": "a sequence's row, right",
    "nobody": "nobody wrote it",
    "weight": "dW[{i}, {c}] = {found}; of the sequences alone {true}",
}
ON_VIEW = ("padding", "memory", "times", "zeroed")
LINE = "error of dW"
_SIZES = {"tokens": 100, "padding": 28, "times": 1.0}
PRESETS = {
    "no padding": _SIZES | {"padding": 0, "memory": "NaN", "zeroed": False},
    "earlier tensor": _SIZES | {"memory": "an earlier tensor", "zeroed": False},
    "NaN": _SIZES | {"memory": "NaN", "zeroed": False},
    "repaired": _SIZES | {"memory": "NaN", "zeroed": True},
}

_LEFT, _SIDE = 0.55, 1.5


class Picture(Drawing):
    def __init__(self, width: float):
        self.canvas = Canvas(width, 3.85)
        rows = {"dk": Map(WORDS["dk"], signed(), "scaled", across=True, lost=("lost", "dk"), hatched=True)}
        self._rows = Maps(
            self.canvas, rows, left=_LEFT, top=0.35, size=(width - _LEFT - 0.12, 0.95), rows=say("channel"),
            columns=say("row t"),
        )  # fmt: skip
        maps = {name: Map(WORDS[name], signed()) for name in ("true", "computed")}
        self._weights = Maps(
            self.canvas, maps, left=_LEFT, top=1.85, size=(_SIDE, _SIDE), rows=say("input"),
            columns=say("channel"),
        )  # fmt: skip
        at = self._weights.right + 0.25
        self.canvas.figure.text(at / width, 0.3, WORDS["colours"], fontsize=8.5, va="bottom")

    def update(self, shown: Shown) -> None:
        size, weight = 3 * shown.dk[: shown.tokens].square().mean().sqrt(), 3 * shown.true.square().mean().sqrt()
        self._rows.update({"scaled": shown.dk / size, "lost": shown.lost})
        self._weights.update({"true": shown.true / weight, "computed": shown.computed / weight})

    def say(self, shown: Shown) -> str:
        padding = len(shown.dk) - shown.tokens
        if not shown.lost.any():
            return WORDS.say("right", last=shown.tokens - 1)
        if shown.dk.isnan().any():
            return WORDS.say("lost", padding=padding)
        return WORDS.say("finite", padding=padding, error=shown.error)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        if cell.map == "dk":
            t, c = cell.column, cell.row
            whose = WORDS["sequence"] if t < shown.tokens else WORDS["nobody"]
            return WORDS.say("cell", t=t, c=c, value=shown.dk[t, c], whose=whose)
        i, c = cell.row, cell.column
        return WORDS.say("weight", i=i, c=c, found=shown.computed[i, c], true=shown.true[i, c])
