"""The panels of a traced chunk kernel: its first non-finite tile, what inherits that and each line's headroom; and the
correct digits that each line loses, by decay and precision of products."""

import functools
import math
from collections.abc import Callable

from ..figures.canvas import Cell
from ..figures.digits import DigitsFigure
from ..figures.trace import TraceFigure
from ..instruments import workbench
from ..instruments.digits import budget, right
from ..instruments.trace_record import Headroom, Trace
from ..language import Words, say, speaking
from ..numerics.words import number
from . import knobs
from .base import Panel
from .shared import literal

YOURS = "yours"

WORDS = Words() | {
    "ways": {
        "start": "counted from the start",
        "middle": "from the middle",
        "blocks": "block by block",
        "halves": "by halves of halves",
        YOURS: "as you wrote them",
    },
    "alt": "Left, the first tile that is not finite with its bad lanes hatched, and under it the programs of the grid; "
    "right, what came of it as a tree, and for each exponential of the kernel how far it is from the end of float32",
    "fine": "At a decay of {decay} every value in every tile is finite. {line}",
    "least": "The least headroom has line {line}, “{code}”: its largest exponent is {largest}, and float32 ends at "
    "{end}.",
    "flat": "No exponent of any line is above 0, so none can ever overflow.",
    "broken": "At a decay of {decay}, line {line} is the first to leave float32, “{code}”: {what} in {bad} of {size} "
    "lanes, the first at token {token}, in program {program}.",
    "reached": " It gets into {into}.",
    "dropped": " A mask drops it before anything is stored: the output is finite.",
    "lane": {True: "token {row}, channel {column}: {value}", False: "row {row}, column {column}: {value}"},
    "there": "token {row}, channel {column}: e^{exponent} = {value} (float32 ends at e^{end})",
    "values": {0: "finite", 1: "inf", 2: "NaN"},
    "program": "program {n}, head {n}, of decay {decay}: {what}",
    "program bad": "not finite",
    "program fine": "finite",
    "branch": "{place}  {statement}  ({what})",
    "room": "{place}  {code}: at most e^{largest}, in program {program}; float32 ends at e^{end}",
    "recorded": " There is no Triton here: this is a recording.",
    "digits": {
        "alt": "The lines of a kernel from above, and for each how many decimal digits are right in what goes in and "
        "in what comes out; a dashed line at what a result should have, and the line that lost them with a cross",
        "fine": "At a decay of {decay} every result is right to its budget: {digits} digits of o are right, of "
        "{allowed} that it should have.",
        "most": " Most is lost in line {line}, “{code}”: {lost} digits.",
        "lost": "At a decay of {decay}, line {line} loses the digits, “{code}”: {what}. Of its worst lane it was given "
        "{inside} digits and leaves {out}.",
        "reaches": " {digits} digits of o are right, of {allowed} that it should have.",
        "row": "line {line}: {inside} digits right going in, {out} coming out; worst lane {index}: computed "
        "{computed}, exact {true}",
    },
}

STOPS = (
    -0.5, -1.0, -1.3, -1.37, -1.38, -1.39, -1.4, -1.5, -2.0, -2.5, -2.8, -3.0, -5.0, -5.6, -9.0, -11.2, -100.0,
)  # fmt: skip
STRONGEST = -1000.0
"""The stops of the decay's slider and its lower end, natural-log decays per token."""


class WorkbenchPanel(Panel):
    """Base of the panels on the chunk kernel of `flakit.instruments.workbench`, which runs once for each setting,
    interpreted, in a new process."""

    main = "decay"
    random = False

    def __init__(self, decay: float, lines: tuple[Callable, ...], settings: dict, more: dict | None = None, **options):
        """decay: natural-log, at the start. lines: the reader's functions for parts of the kernel. more: other
        knobs."""
        self._lines = lines
        yours = workbench.answered(*lines)
        ways = [*workbench.WAYS, *([YOURS] if yours else [])]
        controls = {
            "decay": knobs.DecayKnob(decay, "decay", stops=STOPS, low=STRONGEST),
            "way": knobs.choice("start", {WORDS["ways"][way]: way for way in ways}, "scores"),
        }
        super().__init__(controls | (more or {}), {"way": YOURS if yours else "start"} | settings, **options)


class KernelTrace(WorkbenchPanel):
    """The panel of `kernel_trace`. Headroom is the distance from an exponential's largest exponent to overflow."""

    name = "kernel-trace"
    on_view = ("decay", "way")
    presets = {
        "fine": {"decay": -1.3, "way": "start"},
        "first inf": {"decay": -1.39, "way": "start"},
        "in the output": {"decay": -1.5, "way": "start"},
        "repaired": {"decay": -100.0, "way": "halves"},
    }

    def __init__(self, lines: tuple[Callable, ...] = (), show=None, **settings):
        super().__init__(-1.3, lines, settings, alt=WORDS["alt"], show=show)

    def compute(self, decay, way, **_) -> Trace:
        return workbench.traced(decay, *(self._lines if way == YOURS else ()), way="start" if way == YOURS else way)

    def draw(self, result: Trace, **_) -> None:
        self.figure(TraceFigure).update(**result.drawn())

    def describe(self, result: Trace, *, decay, **_) -> str:
        recorded = "" if workbench.tl else WORDS["recorded"]
        decay, site = number(decay), result.first
        if site is None:
            line = result.headroom[0]
            values = {"line": line.place.line, "code": line.place.code(), "largest": line.largest, "end": _end(line)}
            least = WORDS.say("least", **values) if line.largest > 0 else WORDS["flat"]
            return WORDS.say("fine", decay=decay, line=least) + recorded
        tile = site.first
        text = WORDS.say("broken",
            decay=decay, line=site.place.line, code=site.place.code(), what=tile.what, bad=tile.bad, size=tile.size,
            token=tile.index[0] if tile.index else 0, program=tile.program[0],
        )  # fmt: skip
        into = {store.into for site in result.roots for store in site.stores}
        fate = WORDS.say("reached", into=say(" and ").join(sorted(into))) if into else WORDS["dropped"]
        return text + fate + recorded

    def arithmetic(self, result: Trace, cell: Cell, *, decay, **_) -> str | None:
        if cell.map == "tile":
            return _lane(result, cell)
        if cell.map == "programs":
            bad = any((cell.column, 0, 0) in site.programs for site in result.sites)
            at = number(workbench.PACES[cell.column] * decay)
            return WORDS.say("program", n=cell.column, decay=at, what=WORDS["program bad" if bad else "program fine"])
        if cell.map == "tree":
            _, site = result.tree(result.first)[cell.row]
            return WORDS.say("branch", place=site.place.short, statement=site.place.statement, what=site.words)
        line = result.headroom[cell.row]
        return WORDS.say("room",
            place=line.place.short, code=line.place.code(), largest=line.largest, program=line.program[0],
            end=_end(line),
        )  # fmt: skip

    def script(self, *, decay, way, **_) -> str:
        return f"""from flakit.instruments import workbench

made = workbench.run({literal(decay)}, way={"start" if way == YOURS else way!r})
print(made)
print(made.trace)
"""


def _lane(trace: Trace, cell: Cell) -> str:
    site = trace.first
    at = {"row": cell.row, "column": cell.column}
    if site is None:
        line = trace.headroom[0]
        if (cell.row, cell.column) == line.index:
            return WORDS.say("there", **at, exponent=line.largest, value=WORDS["values"][0], end=_end(line))
        return WORDS.say("lane", True, **at, value=WORDS["values"][0])
    tile = site.first
    value = WORDS["values"][int(tile.lanes[cell.row, cell.column])]
    (operand, *others) = tile.operands or (None,)
    if (cell.row, cell.column) == tile.index and site.operation == "exp" and operand.at is not None and not others:
        end = f"{math.log(3.4028234663852886e38):.2f}"
        return WORDS.say("there", **at, exponent=operand.at, value=value, end=end)
    return WORDS.say("lane", tile.shape[0] != tile.shape[1], **at, value=value)


def _end(line: Headroom) -> str:
    return f"{line.room + line.largest:.2f}"


class LostDigits(WorkbenchPanel):
    """The panel of `lost_digits`: for every source line, the correct digits of its operands and of its result."""

    name = "lost-digits"
    words = WORDS["digits"]
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
        super().__init__(-0.5, lines, settings, more, alt=self.words["alt"], show=show)

    def compute(self, decay, way, products, **_) -> Trace:
        return _traced(decay, "start", products, self._lines) if way == YOURS else _traced(decay, way, products)

    def draw(self, result: Trace, **_) -> None:
        self.figure(DigitsFigure).update(**result.digits.drawn())

    def describe(self, result: Trace, *, decay, **_) -> str:
        digits, decay, recorded = result.digits, number(decay), "" if workbench.tl else WORDS["recorded"]
        (o,) = (x for x in digits.outputs if x.name == "o")
        reached = {"digits": _digits(right(o.error)), "allowed": _digits(right(budget("float32")))}
        line = digits.first
        if line is None:
            worst = digits.losses[0]
            most = {"line": worst.place.line, "code": worst.place.code(), "lost": _digits(worst.lost)}
            return self.words.say("fine", decay=decay, **reached) + self.words.say("most", **most) + recorded
        change = {"inside": _digits(right(line.blamed.inside)), "out": _digits(right(line.blamed.out))}
        code = line.place.code()
        lost = self.words.say("lost", decay=decay, line=line.place.line, code=code, what=line.words, **change)
        return lost + self.words.say("reaches", **reached) + recorded

    def arithmetic(self, result: Trace, cell: Cell, **_) -> str | None:
        shown = result.digits.shown()
        if cell.row >= len(shown):
            return None
        line = shown[cell.row]
        return self.words.say("row",
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


def kernel_trace(*lines: Callable, show=None, language: str | None = None, **settings) -> KernelTrace:
    """Return a panel of a traced chunk kernel: its first non-finite tile, the tiles that inherit it, and how far each
    line's largest exponent is from overflow.

    lines: your own functions in place of the kernel's, as in `flakit.instruments.workbench.run`.
    show: names of the knobs on view. settings: starting values of decay (natural-log, per token, of the head that
        forgets fastest) and way (anchor of the scores' decays: "start", "middle", "blocks", "halves"; "yours"). An
        unknown name raises TypeError, a bad value ValueError.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> kernel_trace(decay=-1.4)
    """
    with speaking(language):
        return KernelTrace(lines, show, **settings)


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
