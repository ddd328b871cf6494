"""The lines of a chunk kernel and the digits that each loses, as its decay grows and its products are rounded."""

import functools
import math
from collections.abc import Callable

from ..figures.canvas import Cell
from ..figures.digits import DigitsFigure
from ..instruments import workbench
from ..instruments.digits import Line, budget, right
from ..instruments.trace_record import Trace
from ..language import Words, speaking
from ..numerics.words import number
from . import knobs
from .base import Panel
from .kernel_trace import STOPS, STRONGEST, YOURS
from .kernel_trace import WORDS as KERNEL
from .shared import literal

WORDS = Words() | {
    "products": "products",
    "ways": {"ieee": "in float32", "tf32": "in TF32, as tensor cores do"},
    "alt": "The lines of a kernel from above, and for each how many decimal digits are right in what goes in and in "
    "what comes out; a dashed line at what a result should have, and the line that lost them with a cross",
    "fine": "At a decay of {decay} every result is right to its budget: {digits} digits of o are right, of {allowed} "
    "that it should have.",
    "most": " Most is lost in line {line}, “{code}”: {lost} digits.",
    "lost": "At a decay of {decay}, line {line} loses the digits, “{code}”: {what}. Of its worst lane it was given "
    "{inside} digits and leaves {out}.",
    "reaches": " {digits} digits of o are right, of {allowed} that it should have.",
    "all": "all",
    "row": "line {line}: {inside} digits right going in, {out} coming out; worst lane {index}: computed "
    "{computed}, exact {true}",
}

PRESETS = {
    "float32": {"decay": -0.5, "way": "start", "products": "ieee"},
    "TF32": {"decay": -0.5, "way": "start", "products": "tf32"},
    "large exponents": {"decay": -1.37, "way": "start", "products": "ieee"},
    "by halves": {"decay": -1.37, "way": "halves", "products": "ieee"},
}


class LostDigits(Panel):
    """Every setting runs the kernel once, interpreted, in a process of its own."""

    name = "lost-digits"
    main = "decay"
    on_view = ("decay", "way", "products")
    presets = PRESETS
    random = False
    readout_lines = 3

    def __init__(self, lines: tuple[Callable, ...] = (), show=None, **settings):
        self._lines = lines
        yours = workbench.answered(*lines)
        ways = [*workbench.WAYS, *([YOURS] if yours else [])]
        settings.setdefault("way", YOURS if yours else "start")
        made = {
            "decay": knobs.DecayKnob(-0.5, KERNEL["decay"], stops=STOPS, low=STRONGEST),
            "way": knobs.choice("start", {KERNEL["ways"][way]: way for way in ways}, KERNEL["way"]),
            "products": knobs.choice(
                "ieee", {WORDS["ways"][name]: name for name in workbench.PRODUCTS}, WORDS["products"]
            ),
        }
        super().__init__(made, settings, alt=WORDS["alt"], show=show)

    def compute(self, decay, way, products, **_) -> Trace:
        if way == YOURS:
            return _traced(decay, "start", products, self._lines)
        return _traced(decay, way, products)

    def draw(self, result: Trace, **_) -> None:
        figure = self.figure(DigitsFigure)
        figure.update(**result.digits.drawn())
        self.canvas = figure.canvas

    def describe(self, result: Trace, *, decay, **_) -> str:
        digits, decay, recorded = result.digits, number(decay), "" if workbench.tl else KERNEL["recorded"]
        (o,) = (x for x in digits.outputs if x.name == "o")
        got = {"digits": _digits(right(o.error)), "allowed": _digits(right(budget("float32")))}
        line = digits.first
        if line is None:
            worst = digits.losses[0]
            most = {"line": worst.place.line, "code": _code(worst), "lost": _digits(worst.lost)}
            return WORDS.say("fine", decay=decay, **got) + WORDS.say("most", **most) + recorded
        blame = line.blamed
        inside, out = _digits(right(blame.inside)), _digits(right(blame.out))
        said = WORDS.say(
            "lost", decay=decay, line=line.place.line, code=_code(line), what=line.words, inside=inside, out=out
        )
        return said + WORDS.say("reaches", **got) + recorded

    def arithmetic(self, result: Trace, cell: Cell, **_) -> str | None:
        shown = result.digits.shown()
        if cell.row >= len(shown):
            return None
        line = shown[cell.row]
        return WORDS.say("row",
            line=line.place.line, inside=_digits(right(line.inside)),
            out=_digits(right(line.out)), index=list(line.index), computed=f"{line.computed:.9g}",
            true=f"{line.true:.9g}",
        )  # fmt: skip

    def script(self, *, decay, way, products, **_) -> str:
        way = "start" if way == YOURS else way
        return f"""from flakit.instruments import workbench

print(workbench.traced({literal(decay)}, way={way!r}, digits=True, products={products!r}).digits)
"""


@functools.lru_cache(maxsize=32)
def _traced(decay: float, way: str, products: str, lines: tuple[Callable, ...] = ()) -> Trace:
    """Some seconds of an interpreted kernel: not again because a window has another width."""
    return workbench.traced(decay, *lines, way=way, digits=True, products=products)


def _digits(x: float) -> str:
    return f"{x:.1f}" if math.isfinite(x) else WORDS["all"]


def _code(line: Line) -> str:
    return " ".join((line.place.expression or line.place.statement).split())


def lost_digits(*lines: Callable, show=None, language: str | None = None, **settings) -> LostDigits:
    """A panel on the digits that each line of a chunk kernel loses; it runs the kernel, and needs Triton for all
    settings but its presets.

    lines: functions of one's own in place of the kernel's, as `flakit.instruments.workbench.run` takes them.
    show: names of the knobs on view. settings: decay (per token, of the head that forgets fastest), way: "start",
    "middle", "blocks", "halves" or "yours", and products: "ieee" or "tf32", of what is not yours.
    language: of its words, "en" or "zh"; default: what flakit speaks, see `flakit.language`.

    >>> lost_digits(products="tf32")
    """
    with speaking(language):
        return LostDigits(lines, show, **settings)
