"""The picture of `gate_gradient`, by token: the gate's input x, the decays w, and the gradients dw and dx."""

import math

import torch

from ...figures import Canvas, Cell, Drawing, Map, Maps, powers, signed, style
from ...language import Words, say
from . import CHANNEL, DTYPES, TOKEN, Shown

WORDS = Words() | {
    "knobs": {"x": "one x"},
    "alt": "Four maps, a column for each token and a row for each channel: x, the log decays w made of it, the "
    "gradient dw that the kernel returns, and the gradient dx behind the gate; what is NaN or infinite is hatched",
    "x": "1 x, which a layer makes",
    "w": {
        "-exp": "2 the decay w = -exp(x)",
        "logsigmoid": "2 the decay w = logsigmoid(x)",
        "log_decay": "2 the decay w = log_decay(x)",
    },
    "dw": "3 dw, from the kernel",
    "dx": {
        "-exp": "4 dx = dw · w",
        "logsigmoid": "4 dx = dw · sigmoid(-x)",
        "log_decay": "4 dx = dw · w, and 0 where w = -inf",
    },
    "colours": "1: green negative, purple positive\n2, 3, 4: blue tiny, yellow huge, plain grey 0",
    "small": "x = {x} at token {t}: w = {w} and dw = {dw}, so that dx = {dx}, a number as it should be.",
    "forgets": "x = {x} at token {t}: w = {w} forgets everything, dw is 0, and dx = 0 · {w} = 0.",
    "lost": "x = {x} at token {t}: e^x is above {end:.3g}, where {dtype} ends, so w = -inf. It forgets everything, the "
    "output is right and dw = 0. But autograd multiplies: dx = 0 · inf = NaN. The right value is {true}.",
    "cured": "x = {x} at token {t}: w = -inf and dw = 0, as of -exp. The limit of dx is 0, and log_decay returns it.",
    "logsigmoid": "x = {x} at token {t}: logsigmoid(x) = {w} is finite for every number x, and its derivative lies "
    "between 0 and 1: dx = {dx}.",
    "cell": "token {t}, channel {c}: x = {x}, w = {w}, dw = {dw}, dx = {dx}{true}",
    "true": " (true: {true})",
}
ON_VIEW = ("x", "dtype", "gate")
LINE = "from which dx is NaN"
PRESETS = {
    "finite": {"x": 88.0, "dtype": "float32", "gate": "-exp"},
    "first NaN": {"x": 89.0, "dtype": "float32", "gate": "-exp"},
    "in float16": {"x": 11.2, "dtype": "float16", "gate": "-exp"},
    "repaired": {"x": 89.0, "dtype": "float32", "gate": "log_decay"},
}

_LEFT, _HIGH, _GAP = 0.55, 0.47, 0.29


class Picture(Drawing):
    def __init__(self, width: float):
        top, bottom = 0.27, 0.86
        self.canvas = Canvas(width, top + 4 * _HIGH + 3 * _GAP + bottom)
        scales = {"x": signed(4.0), "w": powers(-3, 3)} | dict.fromkeys(("dw", "dx"), powers(-6, 1))
        titles = {name: WORDS[name] if name in ("x", "dw") else WORDS[name]["-exp"] for name in scales}
        self._maps = Maps(
            self.canvas, {name: Map(titles[name], scale, across=True) for name, scale in scales.items()},
            left=_LEFT, top=top, size=(width - _LEFT - 0.12, _HIGH), gap=_GAP, rows=say("channel"),
            columns=say("token t"), stacked=True,
        )  # fmt: skip
        self.canvas.figure.text(_LEFT / width, 0.015, WORDS["colours"], fontsize=8.5, va="bottom")
        self.canvas.legend(*style.non_finite_handles(), borderpad=0, bbox_to_anchor=(1, 0.015), borderaxespad=0.5)

    def update(self, shown: Shown) -> None:
        for name in ("w", "dx"):
            self._maps.entitle(name, WORDS[name][shown.gate])
        self._maps.update({name: getattr(shown, name).double() for name in self._maps})

    def say(self, shown: Shown) -> str:
        x, w, dw, dx = (getattr(shown, name)[TOKEN, CHANNEL].item() + 0.0 for name in ("x", "w", "dw", "dx"))  # no -0
        kind = "small" if dw else "forgets"
        if shown.gate == "logsigmoid":
            kind = "logsigmoid"
        elif math.isinf(w):
            kind = "lost" if math.isnan(dx) else "cured"
        end, true = torch.finfo(DTYPES[shown.dtype]).max, abs(shown.true[TOKEN, CHANNEL].item())
        return WORDS.say(kind, t=TOKEN, x=x, w=w, dw=dw, dx=dx, end=end, dtype=shown.dtype, true=true)

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        t, c = cell.column, cell.row
        values = {name: getattr(shown, name)[t, c].item() + 0.0 for name in ("x", "w", "dw", "dx")}
        true = WORDS.say("true", true=shown.true[t, c].item() + 0.0) if math.isnan(values["dx"]) else ""
        return WORDS.say("cell", t=t, c=c, **values, true=true)
