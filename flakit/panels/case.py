"""The panel of a case, a reproduced fault: its knobs, its picture, and a sentence on prediction and measurement."""

import math

import ipywidgets as widgets

from ..cases.knobs import Knob
from ..cases.laws import Row
from ..cases.registry import Case, find
from ..figures.canvas import Cell
from ..language import Words, rephrase, say, speaking
from ..numerics.words import number
from . import knobs
from .base import Panel
from .shared import chosen, decay_knobs, literal

WORDS = Words() | {
    "agrees": "{what}: {law} by the law, {measured} measured. The two agree{others}.",
    "differs": "{what}: {law} by the law, {measured} measured. The two differ.",
    "others": {0: "", 1: ", and so they do in the other number", 2: ", and so they do in the other {n} numbers"},
    "some": " Of the {n} numbers compared at this setting, {right} are as the law says.",
}


class CasePanel(Panel):
    """The panel of one `Case`. Its knobs are the arguments of the case's `show`: sliders for ranges, lists for choices,
    check boxes for booleans. The case's `PictureModule` draws and describes what `show(**knobs)` returns."""

    readout_lines = 4

    def __init__(self, case: Case, show=None, **settings):
        self.case, self.name, self.random = case, case.name.replace("_", "-"), "seed" in case.knobs
        self._words, self.on_view, self.presets = case.picture.WORDS, case.picture.ON_VIEW, case.picture.PRESETS
        controls = {}
        for name, knob in case.knobs.items():
            if name != "seed":
                controls |= self._widgets(name, knob)
        first = self.on_view[0]
        self.main = first if isinstance(controls[first], (widgets.SelectionSlider, widgets.IntSlider)) else None
        super().__init__(controls, settings, alt=self._words["alt"], show=show)
        self.add_class("flakit-case")

    def _widgets(self, name: str, knob: Knob) -> dict[str, widgets.Widget]:
        """Return a knob's widgets by setting name: two for a decay that is a profile or a number, else one."""
        value, numbers = knob.default, knob.range
        label = self._words["knobs"].get(name) or say(name)
        if str in knob.kinds and float in knob.kinds:
            return decay_knobs(self, value, -1.0, low=numbers.low)
        if bool in knob.kinds:
            return {name: knobs.switch(value, label)}
        if knob.choices:
            make = knobs.choice if str in knob.kinds else knobs.steps
            phrases = any(" " in str(x) for x in knob.choices)  # a single word is a name in code
            return {name: make(value, {x: x for x in knob.choices} if phrases else knob.choices, label)}
        if int in knob.kinds and numbers.log:
            stops = [numbers.low * 2**n for n in range(int(math.log2(numbers.high / numbers.low)) + 1)]
            return {name: knobs.steps(value, stops, label)}
        if int in knob.kinds and type(None) in knob.kinds:
            return {name: knobs.steps(value, (knobs.NONE, *range(numbers.low, numbers.high + 1)), label)}
        if int in knob.kinds:
            return {name: knobs.integer(value, numbers.low, numbers.high, label, numbers.step or 1)}
        if numbers.decay:
            return {name: knobs.DecayKnob(value, label, low=numbers.low)}
        return {name: knobs.number(value, numbers.low, numbers.high, label, numbers.step, numbers.log)}

    def _arguments(self, setting: dict) -> dict:
        """Convert a setting, the knobs' values by name, to the keyword arguments of the case's `show`."""
        if "profile" in setting:
            setting = setting | {"decay": chosen(setting["profile"], setting["decay"])}
        optional = {name for name, knob in self.case.knobs.items() if type(None) in knob.kinds}
        values = {name: setting[name] for name in self.case.knobs}
        return {name: None if name in optional and x == knobs.NONE else x for name, x in values.items()}

    def compute(self, **setting):
        return self.case.show(**self._arguments(setting))

    def draw(self, result, **_) -> None:
        self._picture().update(result)

    def _picture(self):
        return self.figure(self.case.picture.Picture)

    def describe(self, result, **_) -> str:
        inf = self._words.get("inf") or say("never")
        return f"{self._picture().say(result)}\n{law_and_measurement(result.rows, self.case.picture.LINE, inf=inf)}"

    def arithmetic(self, result, cell: Cell, **_) -> str | None:
        return self._picture().arithmetic(result, cell)

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        return self._picture().beside(self.result, cell)

    def script(self, **setting) -> str:
        arguments = ", ".join(f"{name}={literal(x)}" for name, x in self._arguments(setting).items())
        return f"""from flakit.cases.registry import CASES

for row in CASES[{self.case.name!r}].at({arguments}):
    print(row.what, "law", row.law, "measured", row.measured, row.agrees)
"""


def law_and_measurement(rows: list[Row], about: str, *, inf: str = "never") -> str:
    """Return a sentence that compares one row's measurement with its predicted value, `law`, and counts the others.

    The row is the first that differs from its law, else the first whose name contains `about`; StopIteration is
    raised if there is neither. "" if no row has a law. inf: the text for infinity."""
    judged = [row for row in rows if row.agrees is not None]
    wrong = [row for row in judged if not row.agrees]
    if not judged:
        return ""
    row, which = (wrong[0], "differs") if wrong else (next(row for row in judged if about in row.what), "agrees")
    more = len(judged) - 1
    text = WORDS.say(
        which,
        what=rephrase(row.what),
        law=rephrase(number(row.law, inf=inf)),
        measured=rephrase(number(row.measured, inf=inf)),
        others=WORDS.say("others", n=more),
    )
    return text + WORDS.say("some", n=len(judged), right=len(judged) - len(wrong)) if wrong and more else text


def case(name: str, show=None, *, language: str | None = None, **settings) -> CasePanel:
    """Return the panel of a case: its knobs, a picture of how the fault arises, and prediction beside measurement.

    name: a case that `flakit cases` lists. show: names of the knobs on view; the others are folded under "more".
    settings: starting values of the knobs. A decay that may be a profile or a number has two: profile, or "constant",
        and decay, a natural logarithm <= 0. Raises ValueError for an unknown case or a bad value, TypeError for another
        name.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> case("masking", w=-3.0, mask="multiply")
    """
    with speaking(language):
        return CasePanel(find(name), show, **settings)
