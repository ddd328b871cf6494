"""What is recorded of a panel: every frame as the panel shows it, and where each move of a knob leads."""

import base64
import functools
import html
import io
import json
import re
import zlib

import numpy as np
import pytest
from PIL import Image, ImageChops

from docs import frames
from flakit import panels
from flakit.figures import style
from flakit.figures.canvas import Canvas, Cell
from flakit.language import speaking
from flakit.panels import base, knobs, sketch
from flakit.panels.base import Panel
from flakit.panels.shared import decay_knobs
from tests.site.players import recorded


class Bars(Panel):
    """A bar as long as x, and two maps. For b, x has one stop more; a decay that is moved gives up its profile."""

    name = "bars"
    main = "x"
    on_view = ("x", "kind")
    presets = {
        "strong": {"profile": "constant", "decay": -2.0},
        "long": {"x": 9, "kind": "b"},
        "profile": {"decay": -2.0},
    }

    def __init__(self, **settings):
        self._bars = Canvas(2, 1)
        with style.context():
            ax = self._bars.axes(0.2, 0.1, 0.8, 0.8)
            ax.set(xlim=(0, 10), ylim=(-0.5, 2.5))
            uneven = self._bars.axes(1.1, 0.1, 0.8, 0.8)
            uneven.set(xlim=(0, 8), ylim=(3.5, -0.5))
        (self.bar,) = self._bars.moving(*ax.barh([0], [1]))
        self._bars.pointable("upward", ax, 3, 10)
        self._bars.pointable("uneven", uneven, 4, 3, edges=np.array([0.0, 1.0, 3.0, 8.0]))
        made = {
            "x": knobs.NumberKnob(5.0, "x", stops=[n / 4 for n in range(37)], low=0.0, high=9.0),
            **decay_knobs(self, "logsigmoid", -1.0, stops=[-n / 10 for n in range(1, 40)], low=-4.0),
            "kind": knobs.choice("a", {"first": "a", "second": "b"}, "kind"),
        }
        super().__init__(made, settings, alt="a bar")

    def compute(self, x, decay, kind, **_):
        was_held, self._held = self._held, True
        self.knobs["x"].dense([5.1] if kind == "b" else [])
        self._held = was_held
        return x - decay

    def draw(self, result, **_):
        self.canvas = self._bars
        self.bar.set_width(result)

    def describe(self, result, *, profile, **_):
        return f"{result:.3g} < 100, {profile}"

    def arithmetic(self, result, cell, **_):
        return f"{cell.map} {cell.row} {cell.column}: {result:.3g}" if cell.row else None

    def beside(self, cell):
        return [("uneven", None, 1)] if cell.map == "upward" else []

    def script(self, **setting):
        return f"print({setting})"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder, panel = tmp_path_factory.mktemp("frames"), Bars()
    page, data = recorded(panel, folder, FRAMES=8, PRESET=12)
    return folder, panel, data, page


@pytest.fixture
def data(recording):
    return recording[2]


def setting_of(data, frame):
    """The setting of a frame, as its knobs' labels."""
    return {knob["name"]: knob["values"][at] for knob, at in zip(data["knobs"], frame["at"], strict=True)}


def labels(panel):
    found = {name: f"{x:.5g}" if isinstance(x, float) else str(x) for name, x in panel.setting.items()}
    return found | {"kind": {"a": "first", "b": "second"}[panel.setting["kind"]]}


@functools.cache
def bars():
    return Bars()


def live(data, frame):
    """The panel at the setting of a frame."""
    said = setting_of(data, frame)
    kinds = {"first": "a", "second": "b"}
    return bars().set(
        x=float(said["x"]), profile=said["profile"], decay=float(said["decay"]), kind=kinds[said["kind"]], seed=0
    )


def test_every_frame_is_what_the_panel_shows(recording, data):
    folder, *_ = recording
    for frame in data["frames"]:
        panel = live(data, frame)
        assert data["texts"][frame["readout"]] == panel.readout.value
        assert data["texts"][frame["text"]] == panel.text and data["texts"][frame["alt"]] == panel.picture.alt
        drawn = Image.open(io.BytesIO(panel.canvas.png(2))).convert("RGB")
        shown = Image.open(folder / "lesson-1" / f"{frame['picture']}.webp").convert("RGB")
        assert list(shown.size) == [2 * size for size in data["pixels"][frame["picture"]]]
        assert max(most for _, most in ImageChops.difference(shown, drawn).getextrema()) <= 4


def test_a_frame_is_drawn_once(tmp_path, monkeypatch):
    panel, drawn, draw = Bars(kind="b", x=3.0), [], Bars.draw

    def counted(self, result, **setting):
        drawn.append(setting)
        draw(self, result, **setting)

    monkeypatch.setattr(Bars, "draw", counted)
    _, data = recorded(panel, tmp_path, FRAMES=8)
    count = len(data["frames"])
    assert count <= len(drawn) <= 1.2 * count  # knobs that move others pass settings that are not kept


FEW = {"FRAMES": 4, "STOPS": 6, "SECOND": 2, "SLOW": 3, "PRESET": 3}


def test_a_panel_whose_second_knob_stands_at_its_last_stop_begins_with_its_own_words(tmp_path):
    """Moving that knob to where it stands draws nothing anew: what the stop before it has drawn is not taken for it."""
    panel = panels.case("strides", ["layout", "T", "H"], T=16, H=16)
    _, data = recorded(panel, tmp_path, **FEW)
    assert data["texts"][data["frames"][data["start"]]["text"]] == panel.text
    assert "[2, 16, 16, 64]" in panel.text


def test_presets_add_no_stops(tmp_path, monkeypatch):
    """They are recorded first, and may stand between a knob's stops."""
    for limit, count in FEW.items():
        monkeypatch.setattr(frames, limit, count)
    panel = panels.case("decay_gradient", profile="logsigmoid", show=["decay"])
    stops = {value for _, value in panel.knobs["decay"].options}
    assert {preset.get("decay", 0.0) for preset in panel.presets.values()} - stops
    recorder, walked = frames.Recording(panel), []
    monkeypatch.setattr(recorder, "_walk", lambda first, count, dense: walked.append(set(recorder._values(first))))
    recorder.record()
    assert walked[0] == stops


def test_every_picture_says_where_it_is_cut(data):
    assert len(data["looks"]) == len(data["pixels"]) and set(data["looks"]) == set(range(len(data["pieces"])))
    assert data["pieces"] == [[[0, 0, 200, 100, 200]]]  # a small one is whole


def test_the_first_picture_comes_with_the_page(recording, data):
    *_, page = recording
    source = re.search(r'src="data:image/webp;base64,([^"]+)"', page)[1]
    first = Image.open(io.BytesIO(base64.b64decode(source)))
    assert list(first.size) == data["pixels"][data["frames"][data["start"]]["picture"]]


def test_every_move_leads_where_it_leads_in_the_panel(data):
    places = {tuple(frame["at"]): n for n, frame in enumerate(data["frames"])}
    names, followed = [knob["name"] for knob in data["knobs"]], 0
    for frame in data["frames"]:
        for n, name in enumerate(names[:-1]):
            offers = data["offers"][frame["offers"]].get(str(n)) if "offers" in frame else None
            offers = range(len(data["knobs"][n]["values"])) if offers is None else offers
            for value in {offers[0], offers[len(offers) // 2], offers[-1]}:
                moves = frame.get("moves", {}).get(str(n), {})
                at = (*frame["at"][:n], value, *frame["at"][n + 1 :])
                to = moves.get(str(value), places.get(at))
                if to is None or to < 0 or value == frame["at"][n]:
                    continue
                panel, label = live(data, frame), data["knobs"][n]["values"][value]
                stops = {frames._label(each): each for each in knobs.stops_of(panel.knobs[name])}
                stops |= {"first": "a", "second": "b"}
                assert label in stops, (name, label)
                panel.move(name, stops[label])
                assert labels(panel) == setting_of(data, data["frames"][to])
                followed += bool(moves)
    assert followed


def test_stops_are_those_that_the_panel_offers_at_that_frame(data):
    n = [knob["name"] for knob in data["knobs"]].index("x")
    dense = data["knobs"][n]["values"].index("5.1")
    for frame in data["frames"]:
        offered = data["offers"][frame["offers"]].get(str(n)) if "offers" in frame else None
        there = setting_of(data, frame)["kind"] == "second" or frame["at"][n] == dense
        assert (offered is None or dense in offered) == there


def test_both_ends_presets_and_the_stops_beside_them_are_kept(data):
    x = next(knob for knob in data["knobs"] if knob["name"] == "x")
    assert {"0", "4.75", "5", "5.25", "9"} <= set(x["values"]) and len(x["values"]) < x["stops"]
    assert [float(each) for each in x["values"]] == sorted(map(float, x["values"]))
    strong, long, profile = (setting_of(data, data["frames"][preset["frame"]]) for preset in data["presets"])
    assert (strong["x"], strong["decay"], strong["profile"]) == ("5", "-2", "constant")
    assert (long["x"], long["kind"]) == ("9", "second") and (profile["decay"], profile["profile"]) == (
        "-2",
        "logsigmoid",
    )


def test_lines_of_maps_lie_where_the_canvas_has_them(recording, data):
    _, panel, *_ = recording
    for name, each in zip(panel.canvas.maps, data["layouts"][data["frames"][0]["layout"]], strict=True):
        for count, edges, which, at in ((each["rows"], each["y"], "row", 1), (each["columns"], each["x"], "column", 0)):
            edges = np.linspace(*edges, count + 1) if len(edges) == 2 else edges
            for n in range(count):
                box = panel.canvas.box(name, **{which: n})
                assert min(edges[n], edges[n + 1]) == pytest.approx(box[at], abs=2e-5)
                assert max(edges[n], edges[n + 1]) == pytest.approx(box[at] + box[at + 2], abs=2e-5)


def test_cells_have_the_words_of_the_panel_and_what_lights_up(recording, data):
    folder, *_ = recording
    first = 0
    for pack, count in enumerate(data["packs"]):
        text = (folder / "lesson-1" / f"more-{pack}.js").read_text()
        packed = re.fullmatch(rf'flakitMore\("lesson-1", {pack}, "(.*)"\);\n', text)[1]
        read = json.loads(zlib.decompress(base64.b64decode(packed), -15))
        for frame, (words, beside, script) in zip(data["frames"][first:], read["frames"], strict=False):
            panel = live(data, frame)
            cells = [Cell(name, i, j) for name, (m, n) in panel.canvas.maps.items() for i in range(m) for j in range(n)]
            assert [read["words"][n] for n in words] == [panel._strip(cell) for cell in cells]
            assert read["beside"][beside] == [[1, -1, 1] if cell.map == "upward" else [] for cell in cells]
            assert script == panel.as_python()
        first += count
    assert first == len(data["frames"])


def test_a_picture_is_stored_once(recording, data):
    folder, *_ = recording
    files = sorted(int(each.stem) for each in (folder / "lesson-1").glob("*.webp"))
    assert files == sorted({frame["picture"] for frame in data["frames"]})
    decoded = {Image.open(folder / "lesson-1" / f"{n}.webp").tobytes() for n in files}
    assert len(decoded) == len(files) < len(data["frames"])  # the profile alone does not change it


def test_small_maps_are_whole_and_large_ones_share_the_rest():
    for sizes, total in (([8, 8, 64, 64, 128], 120), ([1, 1000], 300), ([5, 5], 300)):
        most = frames._share(sizes, total)
        taken = [min(size, most) for size in sizes]
        assert sum(taken) == pytest.approx(min(total, sum(sizes))) and taken[0] == sizes[0]


def test_a_lattice_has_about_as_many_cells_as_it_is_told():
    for rows, columns, cells in ((128, 32, 30), (64, 64, 30), (1, 32, 30), (21, 1, 5), (3, 4, 300)):
        down, across = frames._lattice(rows, columns, cells)
        assert down[0] == across[0] == 0 and down[-1] == rows - 1 and across[-1] == columns - 1
        assert len(down) * len(across) <= max(1.5 * cells, 4)


def test_displaying_a_panel_records_it_and_leaves_it_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "FRAMES", 8)
    monkeypatch.setattr(Panel, "_repr_mimebundle_", Panel._repr_mimebundle_)
    frames.install(tmp_path, "04_lesson")
    panel = Bars(x=3.0)
    before, width = panel.setting, panel.width
    first, second = panel._repr_mimebundle_(), Bars()._repr_mimebundle_()
    assert panel.setting == before and panel.width == width and panel.text in first["text/plain"]
    for bundle, name in ((first, "04_lesson-1"), (second, "04_lesson-2")):
        assert f'data-frames="{name}"' in bundle["text/html"] and "image/png" not in bundle
        assert (tmp_path / f"{name}.js").exists() and (tmp_path / name / "0.webp").exists()
    assert "04_lesson.ipynb" in first["text/html"] and "&lt; 100" in first["text/html"]


def test_a_panel_that_speaks_another_language_is_recorded_in_it(tmp_path):
    panel = sketch("chunks", chunk=8, language="zh")
    page, data = recorded(panel, tmp_path, FRAMES=4)
    with speaking("zh"):
        assert data["words"]["reset"] == base.WORDS["reset"] and data["words"]["point"] == base.WORDS["point"]
    assert data["texts"][data["frames"][data["start"]]["text"]] == panel.text and panel.text in html.unescape(page)
    assert all(re.search("[\u4e00-\u9fff]", preset["label"]) for preset in data["presets"])
