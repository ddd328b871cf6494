"""The sketches of lessons 12_states_and_shapes and 17_over_gpus: one sequence cut in two, with and without the state
between, and over several ranks, processes with a GPU each."""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ...figures import Canvas, Cell, CellGrid, Map, Maps, style
from ...figures.marks import LabelledBars
from ...language import Words
from ...numerics import recorded
from ...numerics.errors import relative_l2
from ...numerics.evaluate import evaluate, truth
from ...numerics.gradients import along_time
from ...numerics.inputs import inputs
from ...numerics.operators import OPERATORS
from ...numerics.pieces import HANDED, in_pieces
from ...numerics.words import error
from ..knobs import operator_choice, steps
from .sketch import Sketch, percent, size

_T, CUT = 96, 48  # of "pieces"
_TOKENS, _K, _DECAY = 64, 8, -0.05  # of the few tokens whose states are computed
_HEADS, _CHANNELS = 32, 64  # of the calls in data/h100_ranks.json, K = V; inputs in 16 bits, what is sent in float32
RANKS = [1, 2, 4, 8, 16]

BARS = "walks", "sends", "holds"
"""The quantities of a rank in the order of the bars: tokens it computes in sequence, bytes it sends, bytes it holds."""

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
    },
    "ranks": {
        "alt": "Left, a square with a row for the state that enters each rank and a column for the rank that wrote: "
        "how much of what it wrote is left; right, bars for the tokens that a rank walks through, the bytes that it "
        "sends and the bytes that its tokens have",
        "enters": "state that enters rank",
        "wrote": "written by rank",
        "left": "what is left",
        "walks": "tokens, one after another",
        "sends": "bytes sent by a rank",
        "holds": "bytes of its tokens",
        "alone": "One rank walks through all {tokens} tokens and sends nothing.",
        "say": "{ranks} ranks walk through {tokens} tokens each. A rank sends {sends}, whatever it holds: here {holds} "
        "of inputs. The state that enters the last one is made of {maps}.",
        "one map": "what one rank wrote",
        "maps": "what {maps} ranks wrote",
        "cell": {
            "next": "rank {column} wrote it, and nothing lies between: all of it enters rank {row}",
            "through": "rank {column} wrote it, and it went through {between}: {share} of it enters rank {row}",
            "first": "nobody comes before rank 0: the initial state enters, here zeros",
            "own": "rank {row} reads its own tokens inside its slice, not through a state",
            "later": "rank {column} comes after rank {row}",
        },
        "between": "the tokens of rank {first}",
        "between many": "the tokens of ranks {first} to {last}",
        "bar": {
            "walks": "{all} tokens / {ranks} = {tokens}",
            "sends": "what it writes into a state, {written}, and what it does to one, {transition}",
            "nothing": "a single rank has nobody to send to",
            "holds": "{tokens} tokens · {each} bytes of inputs",
        },
    },
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


@dataclass(frozen=True)
class RanksShown:
    """A sequence over ranks. left [ranks, ranks]: the share of what a rank (column) wrote that is left in the state
    that enters another (row), NaN where nothing is. tokens: of the sequence. each: bytes of a token's inputs; written,
    transition: bytes that a rank sends of what it writes into the state and of its effect on an entering state."""

    left: np.ndarray
    tokens: int
    each: int
    written: int
    transition: int

    @property
    def ranks(self) -> int:
        return len(self.left)

    @property
    def walks(self) -> int:
        return self.tokens // self.ranks

    @property
    def sends(self) -> int:
        """The bytes that a rank sends to all others in the forward pass."""
        return self.written + self.transition if self.ranks > 1 else 0

    @property
    def holds(self) -> int:
        return self.walks * self.each


class Ranks(Sketch, name="ranks", words=WORDS):
    """A map of what is left of each rank's writing in the others' states, and bars: a rank's tokens and bytes."""

    knobs = {
        "ranks": lambda: steps(4, RANKS, "ranks"),
        "op": lambda: operator_choice("rwkv6", ("rwkv6", "rwkv7")),
    }
    presets = {
        "one GPU": {"ranks": 1, "op": "rwkv6"},
        "two": {"ranks": 2, "op": "rwkv6"},
        "sixteen": {"ranks": 16, "op": "rwkv6"},
    }
    script = """from flakit.panels import sketch

shown = sketch("ranks", ranks={ranks}, op={op}).result
print("tokens of a rank", shown.walks, "bytes that it sends", shown.sends, "and holds", shown.holds)
print("what is left of each rank's writing in the last one's state", shown.left[-1, :-1])
"""

    @staticmethod
    def compute(ranks: int, op: str) -> RanksShown:
        M, N = slices(op, ranks)
        left = torch.full((ranks, ranks), torch.nan, dtype=torch.float64)
        for column in range(ranks):
            state = N[column]
            for row in range(column + 1, ranks):
                left[row, column] = state.norm() / N[column].norm()
                state = M[row] @ state
        each = 2 * _HEADS * _CHANNELS * len(OPERATORS[op].sequences)
        written = 4 * _HEADS * _CHANNELS**2
        transition = written if OPERATORS[op].solves else written // _CHANNELS
        return RanksShown(
            left.numpy(), recorded.read("h100_ranks").select(operator=op)[0]["T"], each, written, transition
        )

    def __init__(self, width: float):
        height, side = 2.9, 2.2
        self.canvas = Canvas(width, height)
        self._maps = Maps(
            self.canvas, {"ranks": Map("", array="left", empty="none")}, left=0.62, top=0.14, size=(side, side),
            rows=self.words["enters"], columns=self.words["wrote"],
        )  # fmt: skip
        self._maps.bar("ranks", self.words["left"], gap=0.12, width=0.13).set_yticks([0, 0.5, 1])
        left, self._bars = 0.62 + side + 1.15, {}
        for n, name in enumerate(BARS):
            ax = self.canvas.axes(left, 0.32 + 0.74 * n, width - left - 0.95, 0.3, yticks=[])
            ax.set_title(self.words[name], pad=3)
            colour = style.BLUE if name == "walks" else style.SKY
            self._bars[name] = LabelledBars(self.canvas, ax, name, [colour], thick=0.8, size=10, gap=0.015)

    def update(self, shown: RanksShown) -> None:
        self._maps.update({"left": shown.left, "none": np.isnan(shown.left)})
        most = shown.tokens * shown.each
        for name, value, full, label in (
            ("walks", shown.walks, shown.tokens, f"{shown.walks:,}"),
            ("sends", shown.sends, most, size(shown.sends)),
            ("holds", shown.holds, most, size(shown.holds)),
        ):
            self._bars[name].update([value / full], [label])

    def say(self, shown: RanksShown) -> str:
        before = shown.ranks - 1
        if shown.ranks == 1:
            return self.words.say("alone", tokens=f"{shown.tokens:,}")
        return self.words.say(
            "say", ranks=shown.ranks, tokens=f"{shown.walks:,}", sends=size(shown.sends), holds=size(shown.holds),
            maps=self.words.say("one map" if before == 1 else "maps", maps=before),
        )  # fmt: skip

    def arithmetic(self, shown: RanksShown, cell: Cell) -> str:
        row, column = cell.row, cell.column
        if cell.map in BARS:
            which = "nothing" if cell.map == "sends" and shown.ranks == 1 else cell.map
            at = {"all": f"{shown.tokens:,}", "ranks": shown.ranks, "tokens": f"{shown.walks:,}", "each": shown.each}
            at |= {"written": size(shown.written), "transition": size(shown.transition)}
            return self.words.say("bar", which, **at)
        if row <= column:
            which = "later" if row < column else "own" if row else "first"
            return self.words.say("cell", which, row=row, column=column)
        if row == column + 1:
            return self.words.say("cell", "next", row=row, column=column)
        between = self.words.say("between" if row == column + 2 else "between many", first=column + 1, last=row - 1)
        share = percent(float(shown.left[row, column]))
        return self.words.say("cell", "through", row=row, column=column, between=between, share=share)


def slices(op: str, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return M [ranks, K, K] and N [ranks, K, V] of one head, float64: a slice turns an entering state S into M S + N.

    The operator computes them with the slices as packed sequences. With values of zero it writes nothing, so that it
    turns the identity matrix into M."""
    run = OPERATORS[op].forms["recurrent"]
    x = inputs(op, T=_TOKENS, H=1, K=_K, decay=_DECAY, dtype=torch.float64)
    x |= {"cu_seqlens": torch.arange(0, _TOKENS + 1, _TOKENS // ranks), "output_final_state": True}
    identity = torch.eye(_K, dtype=torch.float64).expand(ranks, 1, _K, _K).contiguous()
    M = run(**x | {"v": torch.zeros_like(x["v"]), "initial_state": identity}).final_state
    return M[:, 0], run(**x).final_state[:, 0]
