"""What every fault of the casebook does to every tensor: the matrix that fills lesson by lesson, and a panel of ticks.

fingerprint(upto="05")             a picture: the causes that lessons 00 to 05 explain, the others still empty
diagnose(dr="nan", o="ok")         a panel: what was seen, and the causes that do that
"""

from collections.abc import Iterable

from ..cases import fingerprint as case
from ..cases.fingerprint import CAUSES, KINDS, TENSORS, Fit, Row
from ..figures.canvas import Canvas, Cell
from ..figures.fingerprint import ROW, Fingerprint, Line
from ..figures.plots import WIDTH, Picture
from ..language import Words, say, speaking
from ..numerics.words import error
from . import knobs
from .base import Panel

UNSEEN = "?"
"""A tensor that nobody has looked at."""

WORDS = Words() | {
    "alt": "A row for each fault and a column for each tensor, what became of it in each cell",
    "matrix": "{known} of {n} faults and what each does to {tensors}: ok, wrong, inf or NaN",
    "ask": "What became of each tensor? Set those that you have looked at.",
    "none": "No fault of the casebook does that. Nearest to it, with what is otherwise in bold:",
    "some": {1: "One fault does that.", 2: "{n} faults of the casebook do that."},
    "cause": "{name} (lesson {lesson}): {what}. {test}",
    "seen": "{name}: what you see",
    "cell": "{cause}, {name}: {kind}{where}; relative L2 error {error}",
    "everywhere": {True: "", False: ", at some tokens"},
    "empty": "no fault in this row",
}

_ROWS = 9
"""Causes that the panel shows at once."""

NAMES = tuple(case.SHORT.get(name, name) for name in TENSORS)
"""The tensors as knobs and as columns."""
_LABELS = {"S_T": "$S_T$", "dS_0": "$dS_0$"}


def fingerprint(
    upto: str | None = None, causes: Iterable[str] | None = None, *, language: str | None = None
) -> Picture:
    """A picture of all causes, those filled in that are known.

    upto: the number of a lesson, such as "05": causes that the lessons up to it explain; default: all.
    causes: names of `flakit.cases.fingerprint.CAUSES` instead. "00" is before the first: the empty matrix.
    language: of its words, "en" or "zh"; default: what flakit speaks.
    """
    with speaking(language):
        known = case.fingerprint(case.known(upto) if causes is None else causes)
        lines = [
            _line(known[name])
            if name in known
            else Line(cause.name, cause.lesson, [None] * len(TENSORS), [True] * len(TENSORS))
            for name, cause in CAUSES.items()
        ]
        said = WORDS.say("matrix", known=len(known), n=len(CAUSES), tensors=", ".join(NAMES))
        picture = Picture(0.75 + len(lines) * ROW, said, width=WIDTH)
        Fingerprint(picture, [_LABELS.get(name, name) for name in NAMES], len(lines)).update(lines)
        return picture


def _said(kind: str) -> str:
    return say(kind) if kind in ("ok", "wrong") else kind


def _line(row: Row, fit: Fit | None = None) -> Line:
    cells = row.cells.values()
    against = [name in fit.against for name in row.cells] if fit else ()
    return Line(row.cause.name, row.cause.lesson, [x.kind for x in cells], [x.everywhere for x in cells], against)


class Diagnosis(Panel):
    """A knob for each tensor; the causes that fit best first."""

    name = "diagnosis"
    presets = {
        "dr, dk and dw": {"o": "ok", "dr": "NaN", "dk": "NaN", "dv": "ok", "dw": "NaN", "du": "ok"},
        "all but du": {"o": "NaN", "dr": "NaN", "dk": "NaN", "dv": "NaN", "dw": "NaN", "du": "ok"},
        "dw alone": {"o": "ok", "dr": "ok", "dk": "ok", "dv": "ok", "dw": "wrong", "du": "ok"},
    }
    random = False
    readout_lines = 4

    def __init__(self, **settings):
        options = {kind: kind for kind in (UNSEEN, *KINDS)}
        made = {name: knobs.choice(UNSEEN, options, name) for name in NAMES}
        self.on_view = NAMES
        super().__init__(made, settings, alt=WORDS["alt"])

    def _seen(self, setting) -> dict[str, str]:
        return {name: setting[name] for name in NAMES if setting[name] != UNSEEN}

    def compute(self, **setting) -> list[Fit]:
        seen = self._seen(setting)
        if not seen:
            return [Fit(row, 0, 0, (), True) for row in case.fingerprint().values()]
        return case.diagnose(seen)

    def draw(self, result, **setting) -> None:
        figure = self.figure(_figure)
        seen = [None if setting[name] == UNSEEN else setting[name] for name in NAMES]
        figure.update([_line(fit.row, fit) for fit in result[:_ROWS]], seen)
        self.canvas = figure.canvas

    def describe(self, result, **setting) -> str:
        if not self._seen(setting):
            return WORDS["ask"]
        good = [fit for fit in result if fit.good]
        first = [fit for fit in good if fit.agree == good[0].agree]
        lines = [WORDS.say("some", n=len(first)) if good else WORDS["none"]]
        for fit in (first or result)[:3]:
            cause = fit.row.cause
            said = {"name": cause.name, "lesson": cause.lesson, "what": cause.what, "test": cause.test}
            lines.append(WORDS.say("cause", **said))
        return "\n".join(lines)

    def arithmetic(self, result, cell: Cell, **setting) -> str:
        name = NAMES[cell.column]
        if cell.map == "seen":
            return WORDS.say("seen", name=f"{name} {_said(setting[name])}")
        if cell.row >= len(result):
            return WORDS["empty"]
        row = result[cell.row].row
        found = row.cells[TENSORS[cell.column]]
        where = WORDS["everywhere"][found.everywhere]
        return WORDS.say(
            "cell", cause=row.cause.name, name=name, kind=_said(found.kind), where=where, error=error(found.error)
        )

    def script(self, **setting) -> str:
        return f"""from flakit.cases.fingerprint import diagnose

for fit in diagnose({self._seen(setting) or {"dr": "NaN"}!r}):
    print(f"{{fit.agree:g}} of {{fit.given}}  {{fit.row.cause.name}}, lesson {{fit.row.cause.lesson}}")
"""


def _figure(width: float) -> Fingerprint:
    canvas = Canvas(width, 1.14 + _ROWS * ROW)
    return Fingerprint(canvas, [_LABELS.get(name, name) for name in NAMES], _ROWS, seen=True)


def diagnose(*, language: str | None = None, **settings) -> Diagnosis:
    """A panel of ticks: what became of o, dr, dk, dv, dw, du, the final state S_T and its gradient's like dS_0?

    settings: of each tensor that was looked at "ok", "wrong", "inf" or "NaN".
    language: of its words, "en" or "zh"; default: what flakit speaks, see `flakit.language`.

    >>> diagnose(o="ok", dr="NaN", du="ok")
    """
    with speaking(language):
        return Diagnosis(**settings)
