"""The picture of `strided_offsets`: memory and the numbers read from it; each token's sequence, program and output."""

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...figures import Canvas, Cell, Drawing, HeatMap, Strip, name_rows, style
from ...language import Words, say
from . import Shown

WORDS = Words() | {
    "knobs": {"layout": "in memory", "raw": "ignore stride", "length": "tokens each"},
    "alt": "The numbers in memory, which of them are offsets and which the kernel takes for offsets; below, a column "
    "for each token: the sequence it belongs to, the program that computes it, and whether its output is right",
    "memory": "the numbers in memory, and the offsets among them",
    "meant": "is offset",
    "read": "read as",
    "tokens": "the tokens, one sequence after the other",
    "missing": "never computed",
    "side by side": "The offsets lie side by side. Every program begins where its sequence does, and every output is "
    "right.",
    "asked": "An offset lies at every second place, and the kernel asks for the stride: it goes on by {stride}. Every "
    "output is right.",
    "luck": "An offset lies at every second place. The kernel takes every place for one, and what it finds is right "
    "by chance.",
    "faulty": "An offset lies at every second place, but the kernel takes every place for one. Of {T} tokens {wrong} "
    "come out wrong: {late}, and {missing} {are} never computed.",
    "late": "{late} because {their} program begins at another token",
    "none late": "none because its program begins elsewhere",
    "place": "place {place} holds {number}: {meant}; {read}",
    "is": "it is offset {n}",
    "is none": "it is no offset",
    "as": "the kernel takes it for offset {n}{true}",
    "true": ", which is {number}",
    "not read": "the kernel does not read it",
    "token": "token {t}: sequence {sequence} begins at {begin}; {program}",
    "computed": "program {program} begins at {begin}: off by {error:.2g} of the output's size",
    "nobody": "no program computes it",
}
ON_VIEW = ("sequences", "layout", "raw")
LINE = "share of tokens wrong"
_SIZES = {"sequences": 5, "length": 10}
PRESETS = {
    "fine": {"layout": "contiguous", "raw": True} | _SIZES,
    "halves": {"layout": "every second of the halves", "raw": True} | _SIZES,
    "column": {"layout": "column of (begin, end)", "raw": True} | _SIZES,
    "repaired": {"layout": "column of (begin, end)", "raw": False} | _SIZES,
}

_LEFT, _RIGHT = 0.85, 0.12
_CELL, _NUMBERED = 0.35, 0.2
_MOST = 16
_WRONG = 0.95  # of the colours


class Picture(Drawing):
    def __init__(self, width: float):
        room = width - _LEFT - _RIGHT
        self._places, self._room = int(room / _CELL), room
        self.canvas = Canvas(width, 3.15)
        ax = self.canvas.axes(_LEFT, 0.3, room, 0.9, title=WORDS["memory"], xticks=[])
        name_rows(ax, [say("number"), WORDS["meant"], WORDS["read"]])
        self._memory = Strip(self.canvas, ax, 3, self._places, name="memory")

        ax = self.canvas.axes(_LEFT, 1.65, room, 0.64, title=WORDS["tokens"])
        ax.set_yticks([0, 1], [say("sequence"), say("program")])
        ax.tick_params(length=0, labelbottom=False)
        self._lanes = HeatMap(self.canvas, ax, name="tokens")
        self._numbers = [
            [ax.text(0, row, str(n), ha="center", va="center_baseline", fontsize=8.5, zorder=5) for n in range(_MOST)]
            for row in range(2)
        ]
        self.canvas.moving(*(text for row in self._numbers for text in row))

        ax = self.canvas.axes(_LEFT, 2.33, room, 0.32)
        name_rows(ax, [say("output")])
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        ax.set_xlabel(say("token t"), loc="left")
        self._output = HeatMap(self.canvas, ax, name="output")
        ax.legend(
            handles=[
                style.swatch(style.FINITE, say("right")),
                style.swatch(self._output.colours.cmap(_WRONG), say("wrong")),
                Patch(linewidth=0, label=WORDS["missing"], **style.NAN),
            ],
            loc="upper right", bbox_to_anchor=(1.0, -0.6), ncols=3, borderaxespad=0, handletextpad=0.4,
        )  # fmt: skip

    def update(self, shown: Shown) -> None:
        N, T = len(shown.offsets) - 1, len(shown.errors)
        places = range(min(len(shown.memory), self._places))
        meant = [_th(place, shown.stride, N) for place in places]
        read = [_th(place, shown.step, N) for place in places]
        words = [[str(shown.memory[place]) for place in places]]
        words += [["" if n is None else str(n) for n in row] for row in (meant, read)]
        empty = np.array([[False] * len(places), *([n is None for n in row] for row in (meant, read))])
        colours = [[_colour(n) for n in row] for row in (meant, meant, read)]
        empty[0] = empty[1]
        self._memory.update(colours, words, empty=empty)

        lanes = np.array([_pieces(offsets, T) for offsets in (shown.offsets, shown.read)])
        self._lanes.update(_colour(lanes), empty=lanes < 0)
        for texts, row in zip(self._numbers, lanes, strict=True):
            for n, text in enumerate(texts):
                at = np.nonzero(row == n)[0]
                text.set_visible(len(at) * self._room / T >= _NUMBERED)
                text.set(x=at.mean() if len(at) else 0, color="white" if _colour(n) < 0.5 else style.BLACK)
        errors, wrong = shown.errors.numpy()[None], shown.wrong.numpy()[None]
        self._output.update(np.where(np.isnan(errors), np.nan, _WRONG), finite=~wrong)

    def say(self, shown: Shown) -> str:
        wrong, missing = int(shown.wrong.sum()), int(shown.errors.isnan().sum())
        late = wrong - missing
        if not wrong:
            which = "side by side" if shown.stride == 1 else "asked" if shown.step == shown.stride else "luck"
            return WORDS.say(which, stride=shown.stride)
        return WORDS.say(
            "faulty",
            T=len(shown.errors),
            wrong=wrong,
            late=WORDS.say("late", late=late, their=say("its") if late == 1 else say("their"))
            if late
            else WORDS["none late"],
            missing=missing or say("none"),
            are=say("are") if missing > 1 else say("is"),
        )

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        N = len(shown.offsets) - 1
        if cell.map == "memory":
            place = cell.column
            meant, read = (_th(place, step, N) for step in (shown.stride, shown.step))
            true = "" if meant == read else WORDS.say("true", number=shown.offsets[read or 0])
            return WORDS.say(
                "place",
                place=place,
                number=shown.memory[place],
                meant=WORDS["is none"] if meant is None else WORDS.say("is", n=meant),
                read=WORDS["not read"] if read is None else WORDS.say("as", n=read, true=true),
            )
        t, T = cell.column, len(shown.errors)
        sequence, program = (_pieces(offsets, T)[t] for offsets in (shown.offsets, shown.read))
        return WORDS.say(
            "token",
            t=t,
            sequence=sequence,
            begin=shown.offsets[sequence],
            program=WORDS["nobody"]
            if program < 0
            else WORDS.say("computed", program=program, begin=shown.read[program], error=shown.errors[t]),
        )


def _th(place: int, step: int, N: int) -> int | None:
    """Return n if the n-th of N + 1 offsets with stride `step` is at index `place` of the memory, else None."""
    return place // step if place % step == 0 and place // step <= N else None


def _pieces(offsets: list[int], T: int) -> np.ndarray:
    """Return for each of T tokens which range offsets[n] … offsets[n + 1] - 1 it is in, [T]; -1 for none."""
    piece = np.full(T, -1)
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        piece[begin:end] = n
    return piece


def _colour(n: int | None | np.ndarray) -> float | np.ndarray:
    """Return a number in 0 … 1 for a colour map by the sequence's number: neighbours differ much; None gives 0."""
    return 0.0 if n is None else 0.05 + 0.9 * (n * 0.618 % 1)
