"""What every fault of the casebook does to every tensor: a picture of the table, and a panel to look faults up.

fingerprint(upto="05")             a picture: the rows of lessons 00 to 05 are filled in, the others are empty
diagnose(dr="NaN", o="ok")         a panel: the faults that have these effects
"""

from collections.abc import Iterable

from ..cases import fingerprint as case
from ..cases.fingerprint import CAUSES, KINDS, TENSORS, Fit, Row
from ..figures.canvas import Canvas, Cell
from ..figures.fingerprint import ROW, Fingerprint, Line
from ..figures.plots import WIDTH, Picture
from ..language import Words, label, speaking
from ..numerics.words import error
from . import knobs
from .base import Panel

UNSEEN = "?"
"""The value of a knob whose tensor the reader has not looked at."""

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
"""The number of faults that the panel lists."""

NAMES = tuple(case.SHORT.get(name, name) for name in TENSORS)
"""The tensors' short names, which serve as names of the knobs and as headings of the columns."""
_LABELS = [{"S_T": "$S_T$", "dS_0": "$dS_0$"}.get(name, name) for name in NAMES]


def fingerprint(
    upto: str | None = None, causes: Iterable[str] | None = None, *, language: str | None = None
) -> Picture:
    """Return a picture of the faults: a row per cause, a column per tensor, filled in for the selected causes.

    upto: the number of a lesson, such as "05": select the causes that the lessons up to it explain; default: all.
        "00" selects none.
    causes: select these names of `flakit.cases.fingerprint.CAUSES` instead.
    language: "en" or "zh"; default: the current language, see `flakit.language`."""
    with speaking(language):
        known = case.fingerprint(case.known(upto) if causes is None else causes)
        empty = [None] * len(TENSORS), [True] * len(TENSORS)
        lines = [
            _line(known[name]) if name in known else Line(cause.name, cause.lesson, *empty)
            for name, cause in CAUSES.items()
        ]
        alt = WORDS.say("matrix", known=len(known), n=len(CAUSES), tensors=", ".join(NAMES))
        picture = Picture(0.75 + len(lines) * ROW, alt, width=WIDTH)
        Fingerprint(picture, _LABELS, len(lines)).update(lines)
        return picture


def _line(row: Row, fit: Fit | None = None) -> Line:
    cells = row.cells.values()
    against = [name in fit.against for name in row.cells] if fit else ()
    return Line(row.cause.name, row.cause.lesson, [x.kind for x in cells], [x.everywhere for x in cells], against)


class Diagnosis(Panel):
    """The panel of `diagnose`: a knob for the state of each tensor, and the causes, those that agree best first."""

    name = "diagnosis"
    on_view = NAMES
    presets = {
        "dr, dk and dw": {"o": "ok", "dr": "NaN", "dk": "NaN", "dv": "ok", "dw": "NaN", "du": "ok"},
        "all but du": {"o": "NaN", "dr": "NaN", "dk": "NaN", "dv": "NaN", "dw": "NaN", "du": "ok"},
        "dw alone": {"o": "ok", "dr": "ok", "dk": "ok", "dv": "ok", "dw": "wrong", "du": "ok"},
    }
    random = False
    readout_lines = 4

    def __init__(self, **settings):
        options = {kind: kind for kind in (UNSEEN, *KINDS)}
        controls = {name: knobs.choice(UNSEEN, options, name) for name in NAMES}
        super().__init__(controls, settings, alt=WORDS["alt"])

    def _seen(self, setting) -> dict[str, str]:
        return {name: setting[name] for name in NAMES if setting[name] != UNSEEN}

    def compute(self, **setting) -> list[Fit]:
        seen = self._seen(setting)
        return case.diagnose(seen) if seen else [Fit(row, 0, 0, (), True) for row in case.fingerprint().values()]

    def draw(self, result, **setting) -> None:
        figure = self.figure(lambda width: Fingerprint(Canvas(width, 1.14 + _ROWS * ROW), _LABELS, _ROWS, seen=True))
        seen = [None if setting[name] == UNSEEN else setting[name] for name in NAMES]
        figure.update([_line(fit.row, fit) for fit in result[:_ROWS]], seen)

    def describe(self, result, **setting) -> str:
        if not self._seen(setting):
            return WORDS["ask"]
        good = [fit for fit in result if fit.good]
        first = [fit for fit in good if fit.agree == good[0].agree]
        lines = [WORDS.say("some", n=len(first)) if good else WORDS["none"]]
        for fit in (first or result)[:3]:
            cause = fit.row.cause
            lines.append(WORDS.say("cause", name=cause.name, lesson=cause.lesson, what=cause.what, test=cause.test))
        return "\n".join(lines)

    def arithmetic(self, result, cell: Cell, **setting) -> str:
        name = NAMES[cell.column]
        if cell.map == "seen":
            return WORDS.say("seen", name=f"{name} {label(setting[name])}")
        if cell.row >= len(result):
            return WORDS["empty"]
        row = result[cell.row].row
        x = row.cells[TENSORS[cell.column]]
        values = {"kind": label(x.kind), "where": WORDS["everywhere"][x.everywhere], "error": error(x.error)}
        return WORDS.say("cell", cause=row.cause.name, name=name, **values)

    def script(self, **setting) -> str:
        return f"""from flakit.cases.fingerprint import diagnose

for fit in diagnose({self._seen(setting) or {"dr": "NaN"}!r}):
    print(f"{{fit.agree:g}} of {{fit.given}}  {{fit.row.cause.name}}, lesson {{fit.row.cause.lesson}}")
"""


def diagnose(*, language: str | None = None, **settings) -> Diagnosis:
    """Return a panel with the likely causes of what you see in o, dr, dk, dv, dw, du, the final state S_T and its
    gradient dS_0.

    settings: "ok", "wrong", "inf" or "NaN" for each tensor that you have looked at; others raise TypeError or
    ValueError.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> diagnose(o="ok", dr="NaN", du="ok")
    """
    with speaking(language):
        return Diagnosis(**settings)
