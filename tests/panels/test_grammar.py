"""The grammar of pictures (docs/pictures.md): what colours mean, what axes say, nothing too thin to be seen."""

import ast
import functools
import re
from pathlib import Path

import nbformat.v4
import numpy as np
import pytest
from matplotlib.colors import rgb_to_hsv, to_rgb
from matplotlib.patches import Ellipse, PathPatch, Rectangle
from matplotlib.transforms import Bbox

import flakit
from docs.lessons import LESSONS, NOTEBOOKS, SOLUTIONS, TRANSLATIONS, read
from flakit.cases.registry import CASES
from flakit.figures import style
from flakit.figures.heatmap import _Cells
from flakit.panels import sketch, state_stepper
from flakit.panels.base import NARROW, WIDE
from flakit.panels.sketches import SKETCHES
from tests.language.test_panels import PANELS

SOURCES = [path for kind in ("py", "js", "css") for path in Path(flakit.__file__).parent.rglob(f"*.{kind}")]
QUICK = [name for name in PANELS if name in SKETCHES or name in ("masking", "clamping", "state_stepper", "diagnose")]


@functools.cache
def panel_of(name):
    return PANELS[name]()


every = pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in PANELS])


def is_orange(rgb):
    """Of colours [..., 3] between 0 and 1: whether somebody would call them orange or a pale orange."""
    hue, saturation, value = np.moveaxis(rgb_to_hsv(np.asarray(rgb)), -1, 0)
    return (hue > 0.04) & (hue < 0.125) & (saturation > 0.2) & (value > 0.6)


# --- orange is for what is broken -------------------------------------------------------------------------------------


def test_no_colour_in_the_code_is_orange_but_that_of_what_is_broken():
    assert is_orange(to_rgb(style.BROKEN)) and not is_orange(to_rgb(style.YELLOW))
    # Under hatching, behind the crosses of the audit's matrix, and dark enough for the word "fail" on its page.
    also = {style.NAN["facecolor"], "#F9E3D3", "#b34700"}
    for path in SOURCES:
        for colour in re.findall(r"#[0-9A-Fa-f]{6}\b", path.read_text(encoding="utf-8")):
            assert not is_orange(to_rgb(colour)) or colour in {style.BROKEN} | also, (path, colour)


def test_there_is_one_palette_for_signs_and_one_for_sizes():
    used = set()
    for path in SOURCES:
        used |= set(re.findall(r'cmap="(\w+)"|"cmap": "(\w+)"', path.read_text(encoding="utf-8")))
    assert {name for pair in used for name in pair if name} <= {"Greys", "Greys_r", "Blues", "Blues_r"}, (
        "shades, which mean no more"
    )
    ends = [style.mpl.colormaps[name](x)[:3] for name in (style.SIGNED, style.MAGNITUDE) for x in np.linspace(0, 1, 32)]
    assert not is_orange(np.array(ends)).any()


RIGHT = [
    ("broken", "fine"), ("growth", "fine"), ("ends", {"exponent": 5}), ("fatal", {"anchor": 0}),
    ("split", {}), ("chunks", {}), ("ways", {}), ("reading", {}), ("two_forms", {}), ("again", {}), ("mirror", {}),
    ("masking", "fine"), ("masking", "repaired"), ("clamping", "fine"), ("nan_guard", "fine"), ("anchor", "fine"),
    ("anchor", "repaired"), ("padding", "fine"), ("padding", "repaired"), ("wrong_head_anchor", "nothing shows"),
    ("transposed_mask", "repaired"), ("log_space", "repaired"), ("decay_gradient", "float32"), ("inverse", {}),
    ("chunk_vs_recurrent", {}), ("state_stepper", {}), ("gradient_accumulation", "repaired"), ("walking_back", {}),
    ("backstepping", "RWKV7's bound"), ("backstepping", "repaired"),
]  # fmt: skip
"""Panels at settings at which nothing is broken, by the name of a preset or by knobs."""


@pytest.mark.parametrize(
    ("name", "setting"),
    [pytest.param(*x, id=" ".join(map(str, x)), marks=() if x[0] in QUICK else pytest.mark.full) for x in RIGHT],
)
def test_where_nothing_is_broken_nothing_is_orange(name, setting):
    panel = panel_of(name)
    if name == "growth":
        setting = {"w": 0.3}
    panel.set(**(panel.presets[setting] if isinstance(setting, str) else setting))
    figure = panel.canvas.figure
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    seen = [legend.get_visible() for legend in legends]
    try:
        for legend in legends:  # they name what would be orange
            legend.set_visible(False)
        panel.canvas.stale()
        assert not is_orange(panel.canvas.rgba()[..., :3] / 255).any()
    finally:
        for legend, visible in zip(legends, seen, strict=True):
            legend.set_visible(visible)
        panel.canvas.stale()


def test_what_is_broken_is_orange():
    for name, preset in (("broken", "broken"), ("masking", "first NaN"), ("clamping", "full weight")):
        panel = panel_of(name).set(**panel_of(name).presets[preset])
        assert is_orange(panel.canvas.rgba()[..., :3] / 255).sum() > 100


# --- tokens run from left to right ------------------------------------------------------------------------------------

TOKENS, KEYS = re.compile(r"(token|reader|output|词元|读取|输出)"), re.compile(r"(token|key|词元|键)")


def of_tokens_down(path):
    """Pictures of a notebook's own whose tokens run down and are not those that read, with the keys across."""
    found = []
    for cell in read(path).cells:
        calls = ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ()
        for call in calls:
            if isinstance(call, ast.Call):
                given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
                rows, columns = (given.get(name) for name in ("rows", "columns"))
                down = isinstance(rows, str) and TOKENS.match(rows)
                if down and not (isinstance(columns, str) and KEYS.match(columns)):
                    found.append(ast.unparse(call))
    return found


def test_in_lessons_and_solutions_tokens_run_from_left_to_right():
    assert {path: found for path in LESSONS + SOLUTIONS + TRANSLATIONS if (found := of_tokens_down(path))} == {}


def test_tokens_that_run_down_are_seen(tmp_path):
    cells = [
        nbformat.v4.new_code_cell('beside(yours, expected, rows="token", columns="channel")'),
        nbformat.v4.new_code_cell('matrices(shown, rows="output i", columns="key")'),
        nbformat.v4.new_code_cell('matrices(shown, rows="channel", columns="token", across=True)'),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lesson.ipynb")
    assert len(of_tokens_down(tmp_path / "lesson.ipynb")) == 1


# --- axes -------------------------------------------------------------------------------------------------------------


def value(text):
    """The number that a tick's label stands for, and whether it is written as a power of ten."""
    text = text.replace("\u2212", "-").replace("$", "").replace("\\mathdefault", "").strip("{}")
    power = re.fullmatch(r"10\^\{?(-?\d+)", text)
    if power:
        return 10.0 ** int(power.group(1)), True
    try:
        return float(text), False
    except ValueError:
        return None, False


def is_logarithmic(axis):
    """Whether it is one, whatever matplotlib thinks of it; and whether its ticks say so."""
    ticks = [value(tick.label1.get_text()) for tick in axis.get_major_ticks() if tick.label1.get_text()]
    numbers = np.array(sorted({x for x, _ in ticks if x is not None and x > 0}))
    ratios, steps = numbers[1:] / numbers[:-1], np.diff(numbers)
    even = (
        len(numbers) > 2 and np.allclose(ratios, ratios[0], rtol=0.05) and not np.allclose(steps, steps[0], rtol=0.05)
    )
    return axis.get_scale() == "log" or even, any(power for _, power in ticks)


@every
def test_a_logarithmic_axis_says_that_it_is_one(name):
    panel = panel_of(name)
    panel.canvas.png()
    for ax in panel.canvas.figure.axes:
        for axis in (ax.xaxis, ax.yaxis) if ax.get_visible() else ():
            logarithmic, said = is_logarithmic(axis)
            if logarithmic and axis.get_visible() and any(t.label1.get_visible() for t in axis.get_major_ticks()):
                assert said or "log scale" in axis.get_label_text(), axis.get_label_text()


# --- wide enough to be seen -------------------------------------------------------------------------------------------


@every
def test_what_is_broken_is_at_least_three_pixels_wide_or_has_a_mark(name):
    """Cells that are not finite, all of a map together, across and down; else a ring, a frame or an arrow."""
    panel = panel_of(name)
    for setting in ({}, *panel.presets.values()):
        panel.set(**setting)
        for width in (WIDE, NARROW):
            panel.width = width
            panel.redraw()
            for ax in panel.canvas.figure.axes:
                if ax.get_visible() and any(isinstance(artist, _Cells) for artist in ax.get_children()):
                    thin(ax, setting)


def thin(ax, setting):
    marked = any(isinstance(artist, Ellipse) and artist.get_visible() for artist in ax.get_children())
    marked |= any(isinstance(artist, Rectangle) and artist.get_linewidth() >= 2 for artist in ax.patches)
    marked |= any(len(line.get_xdata()) and line.get_marker() in "<>v^" for line in ax.lines if line.get_visible())
    hatched = [
        patch for patch in ax.patches if isinstance(patch, PathPatch) and patch.get_visible() and patch.get_hatch()
    ]
    boxes = [patch.get_path().get_extents(ax.transData) for patch in hatched if len(patch.get_path().vertices)]
    if boxes and not marked:
        box = Bbox.union(boxes)
        assert min(abs(box.width), abs(box.height)) >= 3, (setting, box)


# --- letters ----------------------------------------------------------------------------------------------------------


def test_letters_have_their_colours():
    colours = [style.letter(name) for name in ("r", "k", "v", "w", "S", "D")]
    assert len(set(colours)) == 6 and not any(is_orange(to_rgb(colour)) for colour in colours)
    assert [style.letter(f"d{name}") for name in "rkvw"] == colours[:4] and style.letter("o") == style.BLACK
    stepper = state_stepper("rwkv6", T=8, direction="backward")
    drawn = {text.get_text(): text.get_color() for text in stepper.canvas.figure.texts}
    assert drawn["$k_t$"] == drawn["$dk_t$"] == style.K and drawn["$r_t$"] == drawn["$dr_t$"] == style.R
    lines = {line.get_label(): line.get_color() for line in sketch("split").canvas.figure.axes[0].lines}
    assert (lines["reader"], lines["key"]) == (style.R, style.K)


def test_a_formula_has_the_letters_in_their_colours():
    panel = panel_of("infinity").set(step=8)
    assert f'<span style="color: {style.R}">dr</span><sub>i</sub>' in panel.readout.value
    assert "span" not in panel.text and "dr_i = e^(ge_i)" in panel.text


def test_the_glossary_and_the_grammar_name_these_colours():
    named = {"r": "blue", "k": "green", "v": "magenta", "w": "olive", "S": "black", "D": "indigo"}
    looks = {"blue": style.BLUE, "green": style.GREEN, "magenta": "#A8437E", "olive": style.OLIVE, "black": style.BLACK,
             "indigo": style.INDIGO}  # fmt: skip
    assert {name: looks[colour] for name, colour in named.items()} == {name: style.letter(name) for name in named}
    for path in (NOTEBOOKS / "glossary.md", NOTEBOOKS.parent / "docs" / "pictures.md"):
        words = path.read_text(encoding="utf-8")
        for name, colour in named.items():
            assert re.search(rf"\${name}\$[^,.|]*(, [^.|]*)?\b{colour}\b", words), (path, name)


def test_the_cases_are_all_looked_at():
    assert set(CASES) | set(SKETCHES) <= set(PANELS)
