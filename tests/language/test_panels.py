"""Panels that speak Chinese: no English left, nothing cut off, every character in the font."""

import itertools
import json
import logging
import re
import warnings

import matplotlib
import pytest
from fontTools.ttLib import TTFont
from matplotlib.text import Text

from docs.lessons import NOTEBOOKS
from flakit import chunk_rwkv6, inputs, panels
from flakit.cases.registry import CASES
from flakit.figures.canvas import Cell
from flakit.figures.fonts import FILE
from flakit.figures.plots import curves
from flakit.language import speaking, table, use
from flakit.panels import case, compare, headroom, sketch
from flakit.panels.base import NARROW, WIDE, Panel
from flakit.panels.sketches import SKETCHES
from tests.figures.words import assert_legible

GATES = {
    "first": inputs("rwkv6", T=64, H=1, K=8)["w"],
    "last": inputs("rwkv6", T=64, H=1, K=8, decay="rwkv6-wide")["w"],
}
OTHERS = "audit", "case", "fingerprint", "sketch"  # without arguments, or no panels
PANELS = {
    **{name: lambda name=name, **options: sketch(name, **options) for name in SKETCHES},
    **{name: lambda name=name, **options: case(name, **options) for name in CASES},
    **{name: getattr(panels, name) for name in panels.__all__ if name not in OTHERS},
    "compare": lambda **options: compare(chunk_rwkv6, **options),
    "headroom": lambda **options: headroom(GATES, "rwkv6", **options),
}

NAMES = set(
    "Python ij float bfloat inf NaN nan log max exp where RMS RWKV GSA GPU ln ge gi do dr dk dv dw du dA final state "
    "none first row previous across block start middle pairwise dyadic masked late padding chunk blocks init wide rwkv "
    "gsa gla mamba logsigmoid uniform spikes forget multiply before mask last softmax ds dq dg sigmoid attention right "
    "both pair forward detach sub alpha tf TF None BK BV PyTorch torch triton Triton "
    "dW cpu NVIDIA KB MB GB TB True False kwargs tl dot trans ieee dx da db slice".split()
)
"""What has the same name in code and in Chinese."""


@pytest.fixture
def no_warning(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        yield
    assert caplog.records == []


LINE = r"(kernel\.py:)?\d+  [^：（]*"
"""A line of a kernel, after its number."""


def english(text):
    """Its words, but for code and names in it."""
    return {word for word in re.findall(r"[A-Za-z]{2,}", re.sub(rf"{LINE}|[\w.]+_\w*", "", text))} - NAMES


def labels(panel):
    """The words of everything that can be moved, pressed or chosen."""
    for widget in walk(panel):
        for name in ("description", "tooltip", "placeholder"):
            if isinstance(getattr(widget, name, None), str) and not getattr(widget, name).count("|"):
                yield getattr(widget, name)
        for option in getattr(widget, "options", ()):
            yield option[0] if isinstance(option, tuple) else str(option)


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


QUICK = ("state_stepper", "phase_diagram", "budget")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in PANELS])
def test_a_panel_says_everything_in_chinese(name, no_warning):
    panel = PANELS[name](language="zh")
    buttons = {f"{knob} {value}" for setting in panel.presets.values() for knob, value in setting.items()}
    for words in labels(panel):
        for setting in buttons:
            words = words.replace(setting, "")
        assert not english(words), words
    panel.pin()
    for setting in ({}, *panel.presets.values()):
        panel.set(**setting)
        heard = [panel.text, panel.picture.alt]
        for map_, (rows, columns) in panel.canvas.maps.items():
            for row, column in itertools.product({0, rows // 2, rows - 1}, {0, columns // 2, columns - 1}):
                heard.append(panel._strip(Cell(map_, row, column)))
        assert [text for text in heard if english(text)] == []
        assert [text for text in heard if re.search("[，。；：！？）] ", text)] == []
        for width in (WIDE, NARROW):
            panel.width = width
            panel.redraw()
            assert_legible(panel.canvas)
            drawn = [re.sub(r"\$[^$]*\$", "", text.get_text()) for text in panel.canvas.figure.findobj(Text)]
            assert [text for text in drawn if english(text)] == []


def test_panels_of_two_languages_stand_side_by_side():
    chinese, plain = sketch("forgetting", language="zh"), sketch("forgetting")
    for w in (-0.2, -1.0):
        chinese.set(w=w), plain.set(w=w)
        assert "之后" in chinese.text and "after" in plain.text
        assert "之后" in chinese.alt_text(chinese.result) and "之后" in chinese._strip(Cell("left", 0, 0))
    try:
        use("zh")
        plain.set(w=-0.3)
        assert "after" in plain.text and "之后" in sketch("forgetting").text
    finally:
        use("en")


def test_a_panel_names_a_language_it_does_not_speak():
    with pytest.raises(ValueError, match="language: expected one of en, zh, got 'fr'"):
        sketch("forgetting", language="fr")


class Untranslated(Panel):
    name = "untranslated"

    def __init__(self):
        super().__init__({}, alt="words that nobody has translated")

    def compute(self, **_):
        return None

    def draw(self, result, **_):
        self.canvas = curves([0, 1], {"a": [0, 1]}, xlabel="x", ylabel="y")

    def describe(self, result, **_):
        from flakit.language import say

        return say("words that nobody has translated")


def test_a_panel_without_a_translation_is_refused():
    with speaking("zh"), pytest.raises(ValueError, match="language: expected 'en' where 'words that nobody"):
        Untranslated()


# --- the font -------------------------------------------------------------------------------------------------------


def test_the_font_is_small_and_has_its_licence():
    assert FILE.stat().st_size < 2e6
    assert "SIL OPEN FONT LICENSE Version 1.1" in (FILE.parent / "OFL.txt").read_text()


def test_the_font_has_every_character_that_is_used():
    used = "".join(table("zh").values())
    for path in sorted((NOTEBOOKS / "zh").glob("*.ipynb")):
        used += "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    latin = TTFont(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf").getBestCmap()
    there = TTFont(FILE).getBestCmap().keys() | latin.keys() | {ord("\n")}
    assert sorted({x for x in used if ord(x) not in there}) == []


def test_a_picture_without_a_panel_finds_the_font(no_warning):
    words = {"xlabel": "词元", "ylabel": "误差 $10^{-3}$", "title": "分块 −1 e^2"}
    picture = curves([0, 1], {"实测": [0, 1], "$e^{w_t}$ 的定律": [1, 0]}, **words)
    assert len(picture.png()) > 1000
