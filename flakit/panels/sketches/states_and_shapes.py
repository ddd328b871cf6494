"""The sketch of lesson 12_states_and_shapes: a sequence cut in two, with and without the state between."""

import functools
from dataclasses import dataclass

import numpy as np

from ...figures import Canvas, Cell, CellGrid, style
from ...language import Words
from ...numerics.errors import relative_l2
from ...numerics.evaluate import evaluate, truth
from ...numerics.gradients import along_time
from ...numerics.inputs import inputs
from ...numerics.operators import OPERATORS
from ...numerics.pieces import HANDED, in_pieces
from ...numerics.words import error
from ..knobs import operator_choice, steps
from .sketch import Sketch, percent

_T, CUT = 96, 48

WORDS = Words() | {
    "pieces": {
        "alt": "Two lines over the tokens of a sequence that is cut in two, on a logarithmic scale: how far each "
        "output is off, and below it how far each token's gradient of v is off; the cut is marked",
        "o": "error of o",
        "dv": "error of dv",
        "token": "token t",
        "first": "first piece",
        "second": "second piece",
        "state": "{op}: the second piece begins with the state in which the first one ended. Outputs and gradients are "
        "those of the whole, to {worst}.",
        "detached": "{op}: the state is handed on, but no gradient comes back through it. The outputs are right, to "
        "{o}; dv of the first piece is off by {dv}.",
        "nothing": "{op}: the second piece begins with zeros. Its outputs are off by {o}; and dv of the first piece, "
        "of which they know nothing, is off by {dv}.",
        "arithmetic": "{name} of token {t} is off by {off:.2g} of the tensor's typical size (root mean square)",
    }
}

_LOW, _HIGH = 1e-9, 10.0
"""The ends of the axis of errors; smaller errors are drawn at the lower end."""


@dataclass(frozen=True)
class PiecesShown:
    """A sequence cut into two pieces before token `CUT`. op: the operator's label. handed: the second piece's initial
    state: the first's final "state", that state "detached" from autograd, or "nothing". o, dv: errors of each token
    [T], relative to the tensor's RMS. Relative L2 errors: o_second of the second piece's o, dv_first of the first
    piece's dv, worst the largest of any whole tensor."""

    op: str
    handed: str
    o: np.ndarray
    dv: np.ndarray
    o_second: float
    dv_first: float
    worst: float


class Pieces(Sketch, name="pieces", words=WORDS):
    """The errors of the outputs and of the values' gradient along a sequence computed in two pieces."""

    knobs = {
        "handed": lambda: steps("nothing", {each: each for each in HANDED}, "handed on"),
        "op": lambda: operator_choice("rwkv6"),
    }
    presets = {"the state": {"handed": "state"}, "detached": {"handed": "detached"}, "nothing": {"handed": "nothing"}}
    script = """import flakit
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.pieces import in_pieces

x = flakit.inputs({op}, T=96, H=2, K=16)
exact = truth({op}, x, recurrence=False)
results = evaluate(in_pieces({op}, [48], handed={handed}), x)
for name in exact:
    print(f"{{name:12}} off by {{relative_l2(results[name], exact[name]):.1e}}")
"""

    @staticmethod
    def compute(handed: str, op: str) -> PiecesShown:
        x, exact = _uncut(op)
        results = evaluate(in_pieces(op, [CUT], handed=handed), x)
        return PiecesShown(
            op=OPERATORS[op].label,
            handed=handed,
            **{name: along_time(results[name], exact[name]).numpy() for name in ("o", "dv")},
            o_second=relative_l2(results["o"][:, CUT:], exact["o"][:, CUT:]),
            dv_first=relative_l2(results["dv"][:, :CUT], exact["dv"][:, :CUT]),
            worst=max(relative_l2(results[name], exact[name]) for name in exact),
        )

    def __init__(self, width: float):
        height, left = 2.95, 0.85
        self.canvas, self._lines = Canvas(width, height), {}
        for n, name in enumerate(("o", "dv")):
            ax = self.canvas.axes(left, 0.28 + 1.14 * n, width - left - 0.15, 0.98)
            ax.set(xlim=(-0.5, _T - 0.5), yscale="log", ylim=(_LOW / 2, 2 * _HIGH), ylabel=self.words[name])
            ax.set_yticks([1e-8, 1e-4, 1], map(style.power, (-8, -4, 0)))
            ax.minorticks_off()
            ax.tick_params(labelbottom=name == "dv")
            self._lines[name] = self.canvas.line(ax, **style.LINES[n], drawstyle="steps-mid")
            ax.axvline(CUT - 0.5, color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
            CellGrid(self.canvas, ax, name, 1, _T)
            if name == "o":
                for part, x in (("first", CUT / 2), ("second", (CUT + _T) / 2)):
                    ax.text(x, 3 * _HIGH, self.words[part], ha="center", va="bottom", fontsize=10)
        ax.set_xlabel(self.words["token"])

    def update(self, shown: PiecesShown) -> None:
        for name, line in self._lines.items():
            line.set_data(range(_T), np.clip(getattr(shown, name), _LOW, _HIGH))

    def say(self, shown: PiecesShown) -> str:
        return self.words.say(
            shown.handed, op=shown.op, worst=error(shown.worst),
            o=error(shown.o_second) if shown.handed == "detached" else percent(shown.o_second),
            dv=percent(shown.dv_first),
        )  # fmt: skip

    def arithmetic(self, shown: PiecesShown, cell: Cell) -> str:
        return self.words.say("arithmetic", name=cell.map, t=cell.column, off=getattr(shown, cell.map)[cell.column])


@functools.cache
def _uncut(op: str) -> tuple[dict, dict]:
    """Return inputs by name, and the float64 truth of the uncut sequence: outputs and gradients by name."""
    x = inputs(op, T=_T, H=2, K=16)
    return x, truth(op, x, recurrence=False)
