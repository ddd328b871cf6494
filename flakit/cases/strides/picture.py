"""The picture of `strides`: the memory by row, as it is and as a kernel takes it, and a sequence's rows as read."""

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...figures import Canvas, Cell, Drawing, Map, Maps, Strip, name_rows, style
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"layout": "in memory", "B": "batch B", "T": "tokens T", "H": "heads H", "D": "row D"},
    "alt": "The memory of a tensor row by row, with what a kernel takes each row for; below it two maps of heads and "
    "tokens: which token belongs there, and which one the kernel reads",
    "memory": "the memory from its first address on, a row of {D} a cell: token, head",
    "taken": "taken for",
    "there": "holds",
    "one": "1 of {D}",
    "beyond": "?",
    "meant": "the token that belongs there",
    "read": "what the kernel reads",
    "right": "right row",
    "not": "of another tensor",
    "ended": "none",
    "fine": "The rows lie in memory in the order that the shape says, and what the kernel takes for a row is that row.",
    "contiguous": "",
    "heads first, transposed": "The memory holds all tokens of head 0, then those of head 1, and so on. The kernel "
    "takes one row after the other for the heads of one token: it reads other tokens, and no number looks odd. "
    "Right rows: {right} of {rows}.",
    "slice of a fused projection": "Beside each row lie the rows of two other tensors. The kernel takes those for the "
    "next heads and tokens, and of this sequence it comes no further than token {last}. Right rows: "
    "{right} of {rows}.",
    "expanded, stride 0": "All {size} elements are one number in memory: every stride is 0. The kernel steps on, and "
    "after that one number it reads whatever lies behind it.",
    "place": "token {t}, head {h}: the kernel reads from ({t} · {H} + {h}) · {D} = {taken} on, where {found}; {right}",
    "found": {
        "right": "this row lies",
        "row": "token {t}, head {h} lies",
        "other": "another tensor's row lies, beside token {t}, head {h}",
        "beyond": "the tensor's memory is at its end",
    },
    "belongs": "it lies from {t} · {by_token} + {h} · {by_head} = {address} on",
}
ON_VIEW = ("layout", "T", "H")
LINE = "misread"
_SIZES = {"B": 2, "T": 100, "H": 4, "D": 64}
PRESETS = {
    "fine": {"layout": "contiguous"} | _SIZES,
    "transposed": {"layout": "heads first, transposed"} | _SIZES,
    "slice": {"layout": "slice of a fused projection"} | _SIZES,
    "expanded": {"layout": "expanded, stride 0"} | _SIZES,
}

_LEFT, _RIGHT = 0.85, 0.12
_CELL = 0.56


class Picture(Drawing):
    def __init__(self, width: float):
        room = width - _LEFT - _RIGHT
        self._columns = int(room / _CELL)
        self.canvas = Canvas(width, 3.75)
        ax = self.canvas.axes(_LEFT, 0.3, room, 0.56, xticks=[])
        self._title = ax.text(0, 1.1, "", transform=ax.transAxes, fontsize=9.5)
        self.canvas.labels(self._title)
        name_rows(ax, [WORDS["taken"], WORDS["there"]])
        self._memory = Strip(self.canvas, ax, 2, self._columns, name="memory")
        self._maps = Maps(
            self.canvas,
            {name: Map(WORDS[name], across=True, empty=f"{name} of another") for name in ("meant", "read")},
            left=_LEFT, top=1.27, size=(room, 0.85), gap=0.3, rows=say("head h"), columns=say("token t"),
            stacked=True,
        )  # fmt: skip
        ax = self._maps["read"].ax
        for heat in self._maps.values():
            heat.ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        self._right = self.canvas.line(
            ax, "o", ms=5, mfc="white", mec=style.BLACK, clip_on=False, zorder=6, label=WORDS["right"]
        )
        ax.legend(
            handles=[
                self._right,
                style.swatch(style.EMPTY, WORDS["not"]),
                Patch(linewidth=0, label=WORDS["ended"], **style.NAN),
            ],
            loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, borderaxespad=0, handletextpad=0.4,
        )  # fmt: skip

    def update(self, shown: Shown) -> None:
        _, T, H, D = shown.shape
        last = max(T - 1, 1)
        self._title.set_text(WORDS.say("memory", D=D))
        other = shown.neighbour.T.numpy()
        rows = {"meant": shown.meant // H / last, "read": shown.read // H / last}
        self._maps.update(rows | {"meant of another": np.zeros_like(other), "read of another": other})
        right = _right(shown)
        self._right.set_data(*(np.nonzero(right) if not right.all() else ([], [])))

        places = range(min(self._columns, T * H))
        read, other = (x.flatten()[: len(places)] for x in (shown.read, shown.neighbour))
        taken = [_row(n, H) for n in places]
        there = [
            say("other") if other[n] else _row(int(read[n]), H) if read[n] == read[n] else WORDS["beyond"]
            for n in places
        ]
        if not any(shown.strides) and D > 1:
            there[0] = WORDS.say("one", D=D)
        tokens = np.stack([np.arange(len(places)) // H, read // H])
        most = max(np.nanmax(tokens), 1)
        self._memory.update(tokens / most, [taken, there], empty=np.stack([np.zeros(len(places), bool), other]))

    def say(self, shown: Shown) -> str:
        _, T, H, _ = shown.shape
        if not shown.misread:
            return WORDS["fine"]
        return WORDS.say(
            shown.layout, right=int(_right(shown).sum()), rows=T * H, last=int(shown.read.nan_to_num().max()) // H,
            size=int(np.prod(shown.shape)),
        )  # fmt: skip

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        _, T, H, D = shown.shape
        t, h = divmod(cell.column, H) if cell.map == "memory" else (cell.column, cell.row)
        right, other = _right(shown)[t, h], bool(shown.neighbour[t, h])
        read = float(shown.read[t, h])
        kind = "right" if right else "other" if other else "beyond" if read != read else "row"
        at = dict(zip("th", divmod(int(read), H) if read == read else (t, h), strict=True))
        _, by_token, by_head, _ = shown.strides
        belongs = WORDS.say("belongs", t=t, h=h, by_token=by_token, by_head=by_head, address=t * by_token + h * by_head)
        return WORDS.say(
            "place", t=t, h=h, H=H, D=D, taken=(t * H + h) * D, found=WORDS.say("found", kind, **at),
            right=say("as it should be") if right else belongs,
        )  # fmt: skip


def _right(shown: Shown) -> np.ndarray:
    """Return for which rows [T, H] a kernel that assumes contiguous memory reads the right row, boolean."""
    return ((shown.read == shown.meant) & ~shown.neighbour).numpy()


def _row(n: int, heads: int) -> str:
    return "{}, {}".format(*divmod(n, heads))
