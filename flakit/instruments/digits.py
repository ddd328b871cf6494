"""The result of `flakit.trace(digits=True)`, which source lines lost digits, and its report.

Every operation also runs in float64, as its shadow; a digit is lost where the two differ. A `Line` is one operation at
one place of the source. An `Output` is a tensor that a kernel stored, or that PyTorch code computed and never used
again. A `Finding` is a line and the outputs that are wrong because of it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.text import Text

from ..language import ENGLISH, Words, speaking
from ..numerics.words import number
from .trace_record import Place, Report, grid, place_rows, restored_place, section

if TYPE_CHECKING:
    from ..figures.canvas import Canvas


class Kind:
    """The ways in which a line loses digits; `WORDS["kinds"]` explains each in a sentence."""

    CANCELLATION, ABSORPTION, UNDERFLOW, OVERFLOW, ROUNDING, TF32, AMPLIFICATION, ACCUMULATION, EQUALS, COMPILED = (
        "cancellation", "absorption", "underflow", "overflow", "rounding", "TF32", "amplification", "accumulation",
        "equals", "compiled",
    )  # fmt: skip


WORDS = Words() | {
    "kinds": {
        Kind.CANCELLATION: "cancellation: nearly equal terms were subtracted, and the digits that they shared are gone",
        Kind.ABSORPTION: "absorption: a small addend vanished beside a large one",
        Kind.UNDERFLOW: "underflow: a value fell below the smallest normal number",
        Kind.OVERFLOW: "overflow: a finite value went beyond the largest number",
        Kind.ROUNDING: "rounding: a value was cast to a format with fewer digits",
        Kind.TF32: "TF32: the operands of a product were rounded to ten bits behind the point",
        Kind.AMPLIFICATION: "amplification: the operation made the error of its operands grow",
        Kind.ACCUMULATION: "accumulation: many roundings added up, none of them large",
        Kind.EQUALS: "a difference of equals: nothing but rounding is left of it",
        Kind.COMPILED: "lost by the compiled kernel, not by its arithmetic as written",
    },
    "short": {
        Kind.CANCELLATION: "cancellation",
        Kind.ABSORPTION: "absorption",
        Kind.UNDERFLOW: "underflow",
        Kind.OVERFLOW: "overflow",
        Kind.ROUNDING: "rounding to a shorter format",
        Kind.TF32: "operands in TF32",
        Kind.AMPLIFICATION: "an error that was amplified",
        Kind.ACCUMULATION: "many roundings",
        Kind.EQUALS: "a difference of equals",
        Kind.COMPILED: "by the compiled kernel",
    },
    "lost": "Digits lost: {what}",
    "accurate": "Every result is right to its budget",
    "many": "over many lines, at none of them many",
    "to one": "the value became exactly 1: a decay that forgets nothing",
}
"""What happened at a line. Printed reports are English in every language."""

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of one rounding."""

WORSE = 8
"""A compiled kernel's error is due to the compiler beyond this many times the error of the arithmetic as written: sums
in another order and fused operations cause less."""
ALLOWED = 256
"""How many roundings of float32 a result may be wrong by: 2^-16, which leaves more than four and a half digits."""


def budget(dtype: str) -> float:
    """Return the allowed |computed - float64| of a result over the RMS of that tensor: the larger of 2^-16 and four
    roundings of the dtype."""
    return max(ALLOWED * UNIT["float32"], 4 * UNIT.get(dtype, 0.0))


def right(error: float) -> float:
    """Return the number of correct decimal digits at a relative error, -log10 of it: inf for 0, at least 0."""
    return math.inf if error == 0 else max(0.0, -math.log10(error)) if error < math.inf else 0.0


@dataclass
class Blame:
    """How a line made lanes inaccurate, described by its worst lane. A lane is one element of a tile or tensor.

    kind: of `Kind`. inside, out: relative errors of the lane's operands (of a sum: over the size of its terms) and of
    the lane. gain: out over inside, or over one rounding of float32 if that is larger than inside.
    computed, true: the values of the lane and of its float64 shadow. index, shape: of the lane in its tile, and of the
    tile; program: of the grid, None for PyTorch. lanes: how many lanes of this kind the line made inaccurate in all.
    weight: the lane's |computed - true| over the RMS of its tile, by which the worst lane is chosen.
    """

    kind: str
    inside: float
    out: float
    gain: float
    computed: float
    true: float
    index: tuple[int, ...]
    shape: tuple[int, ...]
    program: tuple[int, ...] | None
    lanes: int
    weight: float = 0.0


@dataclass(eq=False)
class Line:
    """One operation at one place of the source, with the digits that it lost in all its runs.

    dtype: of the result. tiles: how often it ran.
    inside, out: the errors of operands and result in the run that lost most, each the largest |computed - float64| over
        the tile's RMS; lost: the decimal digits between the two, log10(out / inside).
    worst: the largest `out` of all runs. index, computed, true: the worst lane of the run that lost most, its value and
        that in float64; shape, program: the tile's shape and its program in the grid, None for PyTorch.
    absorbed: how many addends vanished, the sum being equal to the other addend. otherwise: how many lanes of a
        comparison, an index or an integer would differ in float64.
    unmeasured: why the error is unknown, "" if it is known. blames: by `Kind`, how lanes became inaccurate.
    """

    place: Place
    operation: str
    dtype: str
    tiles: int = 0
    inside: float = 0.0
    out: float = 0.0
    lost: float = 0.0
    worst: float = 0.0
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    program: tuple[int, ...] | None = None
    computed: float = math.nan
    true: float = math.nan
    absorbed: int = 0
    otherwise: int = 0
    unmeasured: str = ""
    blames: dict[str, Blame] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return not self.unmeasured

    def saw(self, inside, out, off, x, exact, program, unit, exactly: bool = False) -> None:
        """Record one more run. inside, out: as the fields. x, exact: result and shadow. off: |x - exact|. unit: the
        relative error of one rounding. exactly: the operation cannot lose digits."""
        self.tiles += 1
        lost = 0.0 if exactly or out <= max(inside, unit) else math.log10(out / max(inside, unit))
        self.worst = max(self.worst, out)
        if out and (lost > self.lost or (lost == self.lost and out > self.out)):
            lane = np.unravel_index(int(off.argmax()), off.shape)
            self.inside, self.out, self.lost, self.program = inside, out, lost, program
            self.index, self.shape = tuple(int(i) for i in lane), off.shape
            self.computed, self.true = float(x[lane]), float(exact[lane])

    def blame(self, new: Blame) -> None:
        known = self.blames.get(new.kind)
        if known is None:
            self.blames[new.kind] = new
            return
        lanes = known.lanes + new.lanes
        if new.weight > known.weight:
            self.blames[new.kind] = known = new
        known.lanes = lanes

    @property
    def blamed(self) -> Blame | None:
        """The loss to report: absorption, if there was any, else the kind that affected most lanes; None for none."""
        if Kind.ABSORPTION in self.blames:
            return self.blames[Kind.ABSORPTION]
        return max(self.blames.values(), key=lambda x: x.lanes, default=None)

    @property
    def words(self) -> str:
        """A sentence on how this line lost digits, "" if it did not."""
        return _what(self.blamed) if self.blamed else ""


def _what(blame: Blame) -> str:
    words = WORDS["kinds"][blame.kind]
    if blame.kind == Kind.ROUNDING and blame.computed == 1.0 != blame.true:
        words += f"; {WORDS['to one']}"
    return words


@dataclass(eq=False)
class Output:
    """A tensor that a kernel stored or PyTorch computed, compared with its float64 shadow.

    kernel: "" for PyTorch code. name: the kernel's argument, or the line that computed the tensor.
    error: the largest |computed - true| of a lane over the RMS of the shadow. index, computed, true: that lane, its
    value and that in float64. over: how many lanes exceed the budget.
    line: the position in `Digits.lines` of the line that caused the worst lane's error, -1 for none.
    anew: a shadow was restarted from computed values; the error does not include digits lost before that.

    A compiled kernel has one output for each source line that stores, `store`; lanes: how many elements that line
    stored. format: the shortest format among the kernel's arguments. as_written: the error of the same launch in the
    interpreter, which stored `interpreted` in the worst lane. apart: the largest difference between both launches, as
    `error` is measured. by_compiler: only the compiled launch exceeds the budget.
    """

    name: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    index: tuple[int, ...]
    computed: float
    true: float
    over: int
    line: int = -1
    anew: bool = False
    store: Place | None = None
    lanes: int = 0
    format: str = ""
    as_written: float = math.nan
    apart: float = math.nan
    interpreted: float = math.nan
    by_compiler: bool = False

    @property
    def allowed(self) -> float:
        """The budget of the output's dtype, or of the shortest format among the kernel's arguments."""
        return max(budget(self.dtype), budget(self.format))

    @property
    def accurate(self) -> bool:
        return not self.over


@dataclass(frozen=True)
class Finding:
    """A source line, and the outputs that are wrong because of it. line: None if no single line lost much. compiled:
    the compiler, not a line, lost the digits (`Output.by_compiler`); then `store` is the line that stores them."""

    line: Line | None
    outputs: tuple[Output, ...]
    compiled: bool = False

    @property
    def store(self) -> Place | None:
        return self.outputs[0].store if self.compiled else None

    @property
    def kind(self) -> str:
        """How the digits were lost, of `Kind`."""
        if self.line is None:
            return Kind.COMPILED if self.compiled else Kind.ACCUMULATION
        assert self.line.blamed is not None  # a line with an error has a blame
        return self.line.blamed.kind

    @property
    def words(self) -> str:
        return self.line.words if self.line is not None else WORDS["kinds"][self.kind]


class Digits(Report):
    """Which lines lost digits in a trace. Rich, `print` and the command line print the same report.

    lines: in the order in which they first ran. outputs: the results, each at its worst. notes: limits of the
    measurement. partial: launches or programs of compiled kernels were left out. rounds: a `Rounds`, None if not run.
    """

    def __init__(self):
        super().__init__()
        self.lines: list[Line] = []
        self.outputs: list[Output] = []
        self.partial = False
        self.rounds = None

    def judged(self, output: Output) -> None:
        """Add an output. If it is computed repeatedly, store the run with the largest error."""
        for n, known in enumerate(self.outputs):
            if (known.kernel, known.name, known.store) == (output.kernel, output.name, output.store):
                if output.error > known.error:
                    self.outputs[n] = output
                return
        self.outputs.append(output)

    @property
    def findings(self) -> list[Finding]:
        """A finding for each line at fault, the one behind the largest error first."""
        by: dict[tuple, list[Output]] = {}
        for output in sorted(self.outputs, key=lambda x: -x.error):
            if not output.accurate and not self._equals(output):
                key = (-1, output.store) if output.by_compiler else (output.line, None)
                by.setdefault(key, []).append(output)
        return [
            Finding(self.lines[at] if at >= 0 else None, tuple(outputs), store is not None)
            for (at, store), outputs in by.items()
        ]

    def _equals(self, output: Output) -> bool:
        """Whether the blamed line subtracts results that are equal but for rounding, as a comparison of them does."""
        if output.line < 0:
            return False
        blamed = self.lines[output.line].blamed
        return blamed is not None and blamed.kind == Kind.EQUALS

    @property
    def first(self) -> Line | None:
        """The line behind the largest error; None if there is none, or if no single line lost much."""
        return next((finding.line for finding in self.findings), None)

    @property
    def accurate(self) -> bool:
        """Whether every result is within its budget."""
        return not self.findings

    @property
    def losses(self) -> list[Line]:
        """The lines that lost digits, those with the largest loss first."""
        return sorted((x for x in self.lines if x.measured and x.lost > 0), key=lambda x: -x.lost)

    @property
    def unmeasured(self) -> list[Line]:
        return [x for x in self.lines if not x.measured]

    def picture(self) -> "Canvas":
        """Draw the correct digits of operands and result, a row for each of the source lines that lost most."""
        from ..figures.digits import DigitsFigure

        figure = DigitsFigure()
        figure.update(**self.drawn())
        return figure.canvas

    def drawn(self, most: int = 13) -> dict:
        """Return the arguments of `DigitsFigure.update`, with rows for the `most` lines that lost most."""
        from ..figures.digits import Row

        finding = next(iter(self.findings), None)
        blamed = {id(finding.line) for finding in self.findings}
        rows = [
            Row(
                f"{x.place.line}  {x.place.statement}", right(x.inside) if x.measured else None,
                right(x.out) if x.measured else None, id(x) in blamed,
            )
            for x in self.shown(most)
        ]  # fmt: skip
        if finding is None:
            title, subtitle = WORDS["accurate"], ""
        else:
            title = WORDS["lost"].format(what=WORDS["short"][finding.kind])
            place = finding.line.place if finding.line is not None else finding.store
            subtitle = WORDS["many"] if place is None else f"{place.short}  {place.statement}"
        more = len(self._by_line()) - len(rows)
        return {"title": title, "subtitle": subtitle, "rows": rows, "budget": right(budget("float32")), "more": more}

    def shown(self, most: int = 13) -> list[Line]:
        """Return the operation that lost most in each line of source, for the `most` worst lines, in source order."""
        blamed = {id(finding.line) for finding in self.findings}
        lines = sorted(self._by_line().values(), key=lambda x: _weight(x, blamed), reverse=True)
        return sorted(lines[: most if len(lines) <= most else most - 1], key=lambda x: (x.place.file, x.place.line))

    def _by_line(self) -> dict[tuple, Line]:
        blamed = {id(finding.line) for finding in self.findings}
        lines: dict[tuple, list[Line]] = {}
        for x in self.lines:
            lines.setdefault((x.place.file, x.place.line), []).append(x)
        return {key: max(of_line, key=lambda x: _weight(x, blamed)) for key, of_line in lines.items()}

    def to_dict(self) -> dict:
        """Return plain lists, numbers and strings; an output refers to its line by position in "lines"."""
        return {
            "accurate": self.accurate,
            "findings": [
                {
                    "line": -1 if finding.line is None else self.lines.index(finding.line),
                    "what": finding.words,
                    "outputs": [output.name for output in finding.outputs],
                }
                for finding in self.findings
            ],
            "lines": [
                {name: x for name, x in vars(line).items() if name not in ("place", "blames")}
                | {"place": _written(line.place)}
                | {"blames": [asdict(x) for x in line.blames.values()], "what": line.words}
                for line in self.lines
            ],
            "outputs": [
                asdict(x) | {"allowed": x.allowed, "accurate": x.accurate, "store": _written(x.store)}
                for x in self.outputs
            ],
            "notes": self.notes,
            "partial": self.partial,
            "rounds": None if self.rounds is None else self.rounds.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "Digits":
        """Restore a `Digits` from the result of `to_dict`."""
        digits = cls()
        digits.notes, digits.partial = list(data["notes"]), data.get("partial", False)
        for x in data["lines"]:
            rest = {name: _read(value) for name, value in x.items() if name not in ("place", "blames", "what")}
            line = Line(restored_place(x["place"]), **rest)
            for blame in x["blames"]:
                line.blame(Blame(**{name: _read(value) for name, value in blame.items()}))
            digits.lines.append(line)
        for x in data["outputs"]:
            rest = {name: _read(value) for name, value in x.items() if name not in ("allowed", "accurate", "store")}
            digits.outputs.append(Output(**rest, store=restored_place(x["store"]) if x.get("store") else None))
        if data.get("rounds"):
            from .digits_rounding import Rounds

            digits.rounds = Rounds.from_dict(data["rounds"])
        return digits

    def __rich__(self) -> Group:
        with speaking(ENGLISH):
            parts = [*self._found(), *self._stores(), *self._table(), *self._not_measured()]
            if self.rounds is not None:
                parts.append(self.rounds)
        return Group(*parts, *(Text(words, style="dim") for words in self.notes))

    def _found(self) -> Iterator:
        if not self.lines:
            yield Text("No digits were measured: nothing ran that a shadow can follow.", style="bold red")
            return
        for finding in self.findings:
            yield from _told(finding)
        if self.findings:
            return
        if not self.outputs:
            yield Text("No result was measured.", style="yellow")
            return
        worst = max(self.outputs, key=lambda x: x.error / x.allowed)
        every = "Every result that was measured" if self.unmeasured or self.partial else "Every result"
        words = f"{every} is right to its budget; nearest to it, {_named(worst)}: {_digits(worst.error)}"
        yield Text(words + (" (counted from where its shadow began anew)" if worst.anew else ""), style="green")

    def _stores(self) -> Iterator:
        rows = []
        for x in sorted(self.outputs, key=lambda x: -x.error / x.allowed):
            if x.store is not None:
                compiled = Text(_digits(x.error, False), "green" if x.accurate else "red")
                apart = f"apart by {number(x.apart)}, {x.lanes} lanes of {_named(x)}"
                rows.append((x.store.short, compiled, _digits(x.as_written, False), apart, x.store.code(40)))
        title = "Digits that are right in what each line stored: compiled, and interpreted as written"
        yield from section(title, rows, "lines with more of theirs")

    def _table(self) -> Iterator:
        rows = []
        for x in self.losses:
            at = f"{list(x.index)}" + (f" of program {x.program}" if x.program is not None else "")
            errors = f"{number(x.inside)} → {number(x.out)} at {at}"
            colour = "red" if x.lost >= 3 else "yellow" if x.lost >= 1.5 else "green"
            rows.append((x.place.short, Text(f"{x.lost:.1f}", colour), errors, x.place.code(48)))
        each = "each interpreted line" if any(x.store for x in self.outputs) else "each line"
        title = f"Digits that {each} lost, the worst tile of each (error of its worst lane over the tile's RMS)"
        yield from section(title, rows, "that lost less")

    def _not_measured(self) -> Iterator:
        rows = [(x.place.short, f"{x.operation}: {x.unmeasured}", x.place.code(48)) for x in self.unmeasured]
        yield from section("Not measured", rows, "more")
        other = [x for x in self.lines if x.otherwise]
        rows = [(x.place.short, f"{x.operation}: {x.otherwise} lanes", x.place.code(48)) for x in other]
        yield from section("Decided otherwise without rounding; the shadow follows what was computed", rows[:8], "")


def _told(finding: Finding) -> Iterator:
    line = finding.line
    if (store := finding.store) is not None:
        yield Text(f"Digits {finding.words}", style="bold red")
        x = finding.outputs[0]
        rows = place_rows(store, f"kernel {x.kernel}, {store.short}", expression=False)
        rows += [("as written", f"interpreted, {_digits(x.as_written)} are right: {_exactly(x.interpreted)} there")]
    elif line is None:
        yield Text("Digits lost over many lines, at none of them many", style="bold red")
        rows = []
    else:
        blame = line.blamed
        assert blame is not None  # a line with an error has a blame
        yield Text(f"Digits lost: {_what(blame)}", style="bold red")
        where = f"kernel {line.place.kernel}, " if line.place.kernel else ""
        where += f"program {blame.program}, " if blame.program is not None else ""
        backward = f", in its backward pass ({line.place.backward})" if line.place.backward else ""
        rows = place_rows(line.place, f"{where}{line.place.short}{backward}")
        index = f"lane {list(blame.index)} of {line.dtype} {list(blame.shape)}"
        lost = "every digit"
        if blame.gain < math.inf:
            lost = f"{math.log10(max(blame.gain, 1.0)):.1f} digits lost"
        rows += [
            ("worst lane", f"{index}: computed {_exactly(blame.computed)}, exact {_exactly(blame.true)}"),
            ("error", f"{number(blame.inside)} in, {number(blame.out)} out: {lost}"),
        ]
        if line.absorbed:
            rows += [("vanished", f"{line.absorbed} addends left their sums as they were")]
    for x in finding.outputs[:4]:
        words = (
            f"{_named(x)}: {_digits(x.error)} of {_digits(x.allowed, False)} that it should have; {x.over} lanes over "
        )
        words += f"the budget, {list(x.index)} is {_exactly(x.computed)}, exact {_exactly(x.true)}"
        rows += [("reaches", words)]
    if len(finding.outputs) > 4:
        rows += [("", f"and {len(finding.outputs) - 4} more")]
    yield grid(rows, bold="line")


def _digits(error: float, unit: bool = True) -> str:
    count = right(error)
    words = "all" if count == math.inf else f"{count:.1f}"
    return f"{words} digits" if unit else words


def _named(x: Output) -> str:
    return f"{x.name} of {x.kernel}" if x.kernel else x.name


def _exactly(x: float) -> str:
    return f"{x:.9g}"


def _weight(line: Line, blamed: set[int]) -> tuple:
    return id(line) in blamed, line.measured, line.lost, line.worst


def _written(place: Place | None) -> dict | None:
    return None if place is None else asdict(place) | {"text": place.statement}


def _read(x):
    return tuple(x) if isinstance(x, list) else float(x) if x in ("inf", "-inf", "nan") else x
