"""The contract of pictures that belong to cases and sketches."""

import typing

import pytest

from flakit.cases.registry import CASES, PictureModule
from flakit.figures.canvas import Canvas
from flakit.figures.drawing import Drawing
from flakit.panels.sketches import SKETCHES


class Dot(Drawing):
    def __init__(self, width):
        self.canvas, self.fresh = Canvas(width, 1), []
        (self.text,) = self.canvas.moving(self.canvas.figure.text(0.5, 0.5, ""))

    def update(self, shown):
        self.fresh.append(self.changed(len(shown)))
        self.text.set_text(shown)

    def say(self, shown):
        return shown

    def arithmetic(self, shown, cell):
        return shown


def test_fixed_parts_are_drawn_again_when_their_values_change():
    dot, backgrounds = Dot(2), []
    for shown in ("one", "two", "three", "seven"):
        dot.update(shown)
        dot.canvas.png()
        backgrounds.append(dot.canvas._background)
    assert dot.fresh == [True, False, True, False]
    first, same, other, again = backgrounds
    assert first is same is not other is again


def test_nothing_lights_up_unless_a_drawing_says_so():
    assert Dot(2).beside("one", None) == []


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_a_picture_by_the_contract(name):
    module = CASES[name].picture
    assert all(hasattr(module, each) for each in typing.get_type_hints(PictureModule, localns={"Drawing": Drawing}))
    assert issubclass(module.Picture, Drawing) and {"knobs", "alt"} <= set(module.WORDS)
    assert {knob for each in (module.ON_VIEW, *module.PRESETS.values()) for knob in each} <= set(CASES[name].knobs) | {
        "profile"
    }


def test_the_pictures_of_sketches_are_drawings():
    assert all(issubclass(sketch, Drawing) for sketch in SKETCHES.values())
