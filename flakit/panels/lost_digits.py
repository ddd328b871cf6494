"""The panel that shows the correct digits each line of a chunk kernel loses, by decay and precision of products."""

import functools
import math
from collections.abc import Callable

from ..figures.canvas import Cell
from ..figures.digits import DigitsFigure
from ..instruments import workbench
from ..instruments.digits import budget, right
from ..instruments.trace_record import Trace
from ..language import Words, say, speaking
from ..numerics.words import number
from . import knobs
from .kernel_trace import WORDS as KERNEL
from .kernel_trace import YOURS, WorkbenchPanel
from .shared import literal

WORDS = Words() | {
    "alt": "The lines of a kernel from above, and for each how many decimal digits are right in what goes in and in "
    "what comes out; a dashed line at what a result should have, and the line that lost them with a cross",
    "fine": "At a decay of {decay} every result is right to its budget: {digits} digits of o are right, of {allowed} "
    "that it should have.",
    "most": " Most is lost in line {line}, “{code}”: {lost} digits.",
    "lost": "At a decay of {decay}, line {line} loses the digits, “{code}”: {what}. Of its worst lane it was given "
    "{inside} digits and leaves {out}.",
    "reaches": " {digits} digits of o are right, of {allowed} that it should have.",
    "row": "line {line}: {inside} digits right going in, {out} coming out; worst lane {index}: computed "
    "{computed}, exact {true}",
}


class LostDigits(WorkbenchPanel):
    """The panel of `lost_digits`: for every source line, the correct digits of its operands and of its result."""

    name = "lost-digits"
    on_view = ("decay", "way", "products")
    presets = {
        "float32": {"decay": -0.5, "way": "start", "products": "ieee"},
        "TF32": {"decay": -0.5, "way": "start", "products": "tf32"},
        "large exponents": {"decay": -1.37, "way": "start", "products": "ieee"},
        "by halves": {"decay": -1.37, "way": "halves", "products": "ieee"},
    }

    def __init__(self, lines: tuple[Callable, ...] = (), show=None, **settings):
        products = {"in float32": "ieee", "in TF32, as tensor cores do": "tf32"}
        more = {"products": knobs.choice("ieee", products, "products")}
        super().__init__(-0.5, lines, settings, more, alt=WORDS["alt"], show=show)

    def compute(self, decay, way, products, **_) -> Trace:
        return _traced(decay, "start", products, self._lines) if way == YOURS else _traced(decay, way, products)

    def draw(self, result: Trace, **_) -> None:
        self.figure(DigitsFigure).update(**result.digits.drawn())

    def describe(self, result: Trace, *, decay, **_) -> str:
        digits, decay, recorded = result.digits, number(decay), "" if workbench.tl else KERNEL["recorded"]
        (o,) = (x for x in digits.outputs if x.name == "o")
        reached = {"digits": _digits(right(o.error)), "allowed": _digits(right(budget("float32")))}
        line = digits.first
        if line is None:
            worst = digits.losses[0]
            most = {"line": worst.place.line, "code": worst.place.code(), "lost": _digits(worst.lost)}
            return WORDS.say("fine", decay=decay, **reached) + WORDS.say("most", **most) + recorded
        change = {"inside": _digits(right(line.blamed.inside)), "out": _digits(right(line.blamed.out))}
        code = line.place.code()
        lost = WORDS.say("lost", decay=decay, line=line.place.line, code=code, what=line.words, **change)
        return lost + WORDS.say("reaches", **reached) + recorded

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
    """Return `workbench.traced` with digits, cached: it takes seconds, and a redraw at another width needs it again."""
    return workbench.traced(decay, *lines, way=way, digits=True, products=products)


def _digits(x: float) -> str:
    return f"{x:.1f}" if math.isfinite(x) else say("all")


def lost_digits(*lines: Callable, show=None, language: str | None = None, **settings) -> LostDigits:
    """Return a panel with the decimal digits that each line of a chunk kernel loses. Without Triton only its presets
    work, which are recorded.

    lines: your own functions in place of the kernel's, as in `flakit.instruments.workbench.run`.
    show: names of the knobs on view. settings: starting values of decay (natural-log, per token, of the head that
        forgets fastest), way (anchor of the scores' decays: "start", "middle", "blocks", "halves"; "yours") and
        products ("ieee" or "tf32", the precision of flakit's lines). An unknown name raises TypeError, a bad value
        ValueError.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> lost_digits(products="tf32")
    """
    with speaking(language):
        return LostDigits(lines, show, **settings)
