"""Sketches: small panels with one or two knobs, each for one sentence of a lesson. There is a class per sketch, and a
module per lesson or for lessons on one subject, with its knobs, the arrays of a setting, and the picture."""

import functools
from importlib import import_module
from typing import Any

from ...figures.canvas import Cell
from ...language import speaking
from ..base import Panel
from ..shared import literal
from .sketch import SKETCHES

for _lesson in (
    "rwkv6_forward", "rwkv6_backward", "chunking", "decay_blowup", "chunk_vs_recurrent", "delta_rule",
    "state_tracking", "gsa", "pieces", "training", "audit_your_kernel", "speed",
):  # fmt: skip
    import_module(f".{_lesson}", __name__)


class SketchPanel(Panel):
    """The panel of one `Sketch`: one or two knobs, a readout of a sentence or two, one small picture."""

    readout_lines = 2
    result: Any

    def __init__(self, name: str, **settings):
        self.sketch, self.name = SKETCHES[name], f"sketch-{name}"
        self.random = self.sketch.random
        self.on_view = tuple(self.sketch.knobs)
        self.main, self.presets = self.on_view[0], self.sketch.presets
        self._compute = functools.lru_cache(maxsize=64)(self.sketch.compute)
        controls = {knob: make() for knob, make in self.sketch.knobs.items()}
        super().__init__(controls, settings, alt=self.sketch.words["alt"])

    def compute(self, **setting):
        return self._compute(**{name: x for name, x in setting.items() if name != "seed" or self.random})

    def draw(self, result, **_) -> None:
        self.figure(self.sketch).update(result)

    def describe(self, result, **_) -> str:
        return self.figure(self.sketch).say(result)

    def arithmetic(self, result, cell: Cell, **_) -> str:
        return self.figure(self.sketch).arithmetic(result, cell)

    def script(self, **setting) -> str:
        return self.sketch.script.format(**{name: literal(x) for name, x in setting.items()})


def sketch(name: str, *, language: str | None = None, **settings) -> SketchPanel:
    """Return the panel of a sketch, a small picture with one or two knobs.

    name: one of SKETCHES, such as "broken" (a gradient that a decay breaks), "reading" (four tokens read by a query) or
        "forgetting" (what is left of a token). settings: starting values of its knobs, and a seed if its inputs are
        random.
    language: "en" or "zh"; default: the current language, see `flakit.language`.
    Raises ValueError for an unknown sketch or a bad value, TypeError for an unknown knob.

    >>> sketch("forgetting", w=-0.5)
    """
    if name not in SKETCHES:
        raise ValueError(f"name: expected one of {', '.join(SKETCHES)}, got {name!r}")
    with speaking(language):
        return SketchPanel(name, **settings)
