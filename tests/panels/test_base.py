"""What every panel does: knobs, reset, errors, copy as Python, no backlog, runs that can be cancelled."""

import asyncio
import base64
import gc
import io
import threading
import time
import weakref

import ipywidgets as widgets
import nbformat
import pytest
import torch
from nbconvert import HTMLExporter
from PIL import Image

from flakit.figures import style
from flakit.figures.canvas import Canvas
from flakit.panels import knobs
from flakit.panels.base import DEBOUNCE, SETTLED, ButtonRun, Panel, Player


class Bars(Panel):
    """A bar as long as x; counts its redraws, takes as long as told and fails where told."""

    name = "bars"

    def __init__(self, seconds=0.0, how=(), **settings):
        how = dict(how)
        canvas = Canvas(2, 1)
        with style.context():
            ax = canvas.figure.add_axes((0.1, 0.1, 0.8, 0.8))
            ax.set(xlim=(0, 100), ylim=(-1, 1))
            (self.bar,) = ax.barh([0], [1])
        canvas.moving(self.bar)
        self.seconds, self.drawn = seconds, []
        made = {
            "x": knobs.integer(10, 0, 100, "x"),
            "decay": knobs.DecayKnob(-1.0),
            "kind": knobs.choice("a", {"first": "a", "second": "b"}, "kind"),
        }
        self._bars = canvas
        super().__init__(made, settings, alt="a bar", **how)

    def compute(self, x, **_):
        time.sleep(self.seconds)
        if x == 13:
            raise ValueError("x: expected no 13, got 13")
        return x

    def draw(self, result, **_):
        self.canvas = self._bars
        self.bar.set_width(result)
        self.drawn.append(result)

    def describe(self, result, *, decay, **_):
        return f"x is {result}, decay < {decay}"

    def script(self, *, x, **_):
        return f"print({x})"


def button(panel, text):
    found = [w for w in walk(panel) if isinstance(w, widgets.Button) and w.description == text]
    assert len(found) == 1
    return found[0]


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


def test_classes_for_the_page():
    panel = Bars()
    assert {"flakit-panel", "flakit-bars"} <= set(panel._dom_classes)
    classes = [name for widget in walk(panel) for name in widget._dom_classes]
    assert classes.count("flakit-readout") == 1 and panel.picture in list(walk(panel))


def test_a_moved_knob_redraws_and_speaks():
    panel = Bars()
    before = panel.png
    panel.knobs["x"].value = 60
    assert panel.png != before and panel.png.startswith(b"\x89PNG")
    assert panel.text == "x is 60, decay < -1.0"
    assert panel.readout.value == "x is 60, decay &lt; -1.0"


def test_set_moves_several_knobs_and_redraws_once():
    panel = Bars()
    panel.set(x=20, decay=-3.3, kind="b")
    assert panel.setting == {"x": 20, "decay": -3.3, "kind": "b", "seed": 0}
    assert panel.drawn == [10, 20]


def test_starting_values_are_where_reset_goes():
    panel = Bars(x=42, decay=-0.123)
    start, picture = panel.setting, panel.png
    panel.set(x=7, decay=0.0, kind="b", seed=5)
    button(panel, "reset").click()
    assert panel.setting == start and start["x"] == 42 and start["decay"] == -0.123
    assert panel.png == picture


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"y": 1}, TypeError, "bars: no knob named y; expected x, decay, kind, seed"),
        ({"x": 101}, ValueError, "x: expected a whole number from 0 to 100, got 101"),
        ({"x": 1.5}, ValueError, "x: expected a whole number from 0 to 100, got 1.5"),
        ({"x": "1"}, ValueError, "x: expected a whole number from 0 to 100, got '1'"),
        ({"decay": 0.5}, ValueError, "decay: expected a natural-log decay <= 0, got 0.5"),
        ({"decay": None}, ValueError, "decay: expected a natural-log decay <= 0, got None"),
        ({"decay": float("nan")}, ValueError, "decay: expected a natural-log decay <= 0, got nan"),
        ({"kind": "c"}, ValueError, "kind: expected one of a, b, got 'c'"),
        ({"seed": -1}, ValueError, "seed: expected a whole number from 0 to 2147483647, got -1"),
    ],
    ids=str,
)
def test_wrong_settings_name_the_knob_and_change_nothing(wrong, error, message):
    panel = Bars()
    before = panel.setting
    with pytest.raises(error) as raised:
        panel.set(**{"x": 50, **wrong})
    assert str(raised.value) == message
    assert panel.setting == before and panel.drawn == [10]
    with pytest.raises(error):
        Bars(**wrong)


def test_an_error_is_shown_and_the_panel_goes_on():
    panel = Bars()
    picture = panel.png
    panel.knobs["x"].value = 13
    assert panel.text == "ValueError: x: expected no 13, got 13"
    assert "flakit-error" in panel.readout.value and "last setting that worked" in panel.readout.value
    assert panel.png == picture
    panel.knobs["x"].value = 14
    assert panel.text.startswith("x is 14")
    with pytest.raises(ValueError, match="expected no 13"):
        Bars(x=13)


def test_shown_as_a_picture_where_no_kernel_runs():
    panel = Bars()
    bundle, metadata = panel._repr_mimebundle_()
    assert metadata == {"needs_background": "light"}  # what a dark JupyterLab goes by
    assert base64.b64decode(bundle["image/png"]) == panel.png
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == "bars: x is 10, decay < -1.0"


def test_nbconvert_and_so_nbviewer_show_the_stored_picture():
    bundle, metadata = Bars()._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", bundle, metadata=metadata)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("Bars()", outputs=[output])])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert f"data:image/png;base64,{bundle['image/png']}" in page.replace("\n", "")
    assert "widget-view+json" not in page  # its model is gone


def test_copy_as_python_shows_the_script():
    panel = Bars()
    panel.knobs["x"].value = 33
    button(panel, "copy as Python").click()
    shown = [w for w in walk(panel) if isinstance(w, widgets.Textarea)]
    assert [w.value for w in shown] == ["print(33)"] == [panel.as_python()]
    assert shown[0].layout.display == ""
    panel.reset()
    assert shown[0].layout.display == "none"


def test_save_picture_asks_the_browser_for_a_file(monkeypatch):
    panel, sent = Bars(), []
    monkeypatch.setattr(panel.picture, "send", sent.append)
    button(panel, "save picture").click()
    assert sent == [{"file": "flakit-bars.png"}]


def test_a_slow_panel_jumps_to_the_newest_value():
    async def hold_a_key(panel):
        for x in range(20, 60):
            panel.knobs["x"].value = x
            await asyncio.sleep(0.005)
        last = time.perf_counter()
        while panel.drawn[-1] != 59:
            await asyncio.sleep(0.005)
            assert time.perf_counter() - last < 2
        await asyncio.sleep(2 * DEBOUNCE + 2 * panel.seconds)

    panel = Bars(seconds=0.1)
    asyncio.run(hold_a_key(panel))
    assert panel.drawn == sorted(set(panel.drawn)), "values drawn twice or out of order"
    assert 1 < len(panel.drawn) < 15, panel.drawn
    assert panel.text.startswith("x is 59")


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["quick", "slow"])
def test_a_single_move_does_not_wait(seconds):
    async def move(panel):
        await asyncio.sleep(2 * DEBOUNCE)
        panel.knobs["x"].value = 77
        return panel.drawn[-1]

    assert asyncio.run(move(Bars(seconds))) == 77


def run_of(work):
    got = []
    return ButtonRun("go", work, done=got.append, failed=got.append), got


def test_a_run_reports_progress_and_hands_over_its_result():
    def work(progress, cancelled):
        for done in range(1, 4):
            progress(done, 3)
        return "result"

    run, got = run_of(work)
    run.start()
    run.wait(5)
    assert got == ["result"]
    assert (run.bar.value, run.bar.max) == (3, 3)
    assert run.status.value.startswith("done in ")
    assert not run.button.disabled and run.cancel_button.disabled


def test_a_run_is_cancelled_and_can_start_again():
    started = threading.Event()

    def work(progress, cancelled):
        started.set()
        while not cancelled():
            time.sleep(0.001)
        return "part"

    run, got = run_of(work)
    for times in (1, 2):
        run.start()
        assert started.wait(5)
        run.start()  # a second press while running changes nothing
        assert run.button.disabled and not run.cancel_button.disabled
        run.cancel_button.click()
        run.wait(5)
        assert got == ["part"] * times
        assert run.status.value == "cancelled"
        started.clear()


def test_a_failed_run_says_so():
    def work(progress, cancelled):
        raise RuntimeError("broke")

    run, got = run_of(work)
    run.start()
    run.wait(5)
    assert [str(error) for error in got] == ["broke"]
    assert run.status.value == "failed" and not run.button.disabled


def test_two_panels_that_redraw_at_once_leave_the_number_of_threads_as_it_was(monkeypatch):
    """PyTorch gives a new thread what was set last: the second panel would restore the first one's single thread."""
    first, second = Bars(), Bars()
    inside, entered = threading.Event(), threading.Event()

    def stays(**_):
        inside.set()
        entered.wait(0.2)  # in vain where the second has to wait for this one

    def enters(**_):
        entered.set()
        redraws[0].join(0.2)

    monkeypatch.setattr(first, "compute", stays)
    monkeypatch.setattr(second, "compute", enters)
    monkeypatch.setattr(Bars, "draw", lambda *_, **__: None)
    redraws = [threading.Thread(target=first.redraw), threading.Thread(target=second.redraw)]
    seen = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        redraws[0].start()
        inside.wait()
        redraws[1].start()
        for thread in redraws:
            thread.join()
        seen.start()
        seen.join()
    finally:
        torch.set_num_threads(before)
    assert found == [2]


# --- what is on view, presets, play, pin, and cells that are pointed at -----------------------------------------------


class Maps(Bars):
    """Two maps of three by four cells; says what it was asked."""

    name = "maps"
    on_view = ("x",)
    main = "x"
    presets = {"low": {"x": 1}, "high": {"x": 99, "kind": "b"}}

    def draw(self, result, **_):
        self.figure(self.made)

    @staticmethod
    def made(width):
        class Figure:
            canvas = Canvas(width, 2)

        with style.context():
            for n, name in enumerate(("left", "right")):
                ax = Figure.canvas.figure.add_axes((0.1 + 0.5 * n, 0.2, 0.3, 0.6))
                ax.set(xlim=(-0.5, 3.5), ylim=(2.5, -0.5))
                Figure.canvas.pointable(name, ax, 3, 4)
        return Figure

    def arithmetic(self, result, cell, *, x, **_):
        if cell.row == 2:
            raise ValueError("no third row")
        return f"{cell.map} {cell.row}, {cell.column} at {x}"

    def beside(self, cell):
        return [("right" if cell.map == "left" else "left", None, cell.column)]


def told(panel, kind, x=0.0, y=0.0):
    panel.picture._received({"kind": kind, "x": x, "y": y})
    return panel.picture.strip


def on_view(panel):
    (row,) = [w for w in walk(panel) if "flakit-knobs" in w._dom_classes]
    return [name for name, knob in panel.knobs.items() if knob in row.children]


def test_the_knobs_on_view_are_those_named():
    assert on_view(Bars()) == ["x", "decay", "kind"] and on_view(Maps()) == ["x"]
    assert on_view(Maps(how={"show": ("kind", "x")})) == ["x", "kind"]
    with pytest.raises(ValueError, match="show: expected names of knobs .x, decay, kind, seed., got .'y',."):
        Maps(how={"show": ("y",)})


def test_more_unfolds_the_others_and_folds_them_again():
    panel = Maps()
    (more,) = [w for w in walk(panel) if "flakit-more" in w._dom_classes]
    assert list(more.children) == [panel.knobs[name] for name in ("decay", "kind", "seed")]
    states = [more.layout.display]
    for _ in range(2):
        button(panel, "more").click()
        states.append(more.layout.display)
    assert states[0] == states[2] == "none" and states[1] != "none"


def test_presets_move_every_knob_they_name():
    panel = Maps()
    button(panel, "high").click()
    assert (panel.setting["x"], panel.setting["kind"]) == (99, "b")
    button(panel, "low").click()
    assert (panel.setting["x"], panel.setting["kind"]) == (1, "b")


def test_play_moves_the_main_knob_from_stop_to_stop_and_stops():
    panel = Maps(x=98)
    assert (panel.player.play.value, panel.player.play.max) == (98, 100)
    panel.player.play.value = 99
    assert panel.setting["x"] == 99
    for _ in range(3):
        panel.player.step(1)
    assert panel.setting["x"] == 100
    panel.set(x=5)
    assert panel.player.play.value == 5
    assert Bars().player is None


def test_the_cell_under_the_pointer_is_said_and_lit():
    panel = Maps()
    nothing = panel.picture.strip
    assert panel.picture.points and nothing.startswith("Point at a cell") and panel.picture.lit == []
    # Cell (1, 3) of the map at the left: its middle is 7/8 of the way across and half way down.
    assert told(panel, "point", 0.1 + 0.3 * 7 / 8, 0.2 + 0.6 / 2) == "left 1, 3 at 10"
    row, column, same, cell = panel.picture.lit
    assert [place[0] for place in (row, column, same, cell)] == ["line", "line", "same", "cell"]
    assert cell[1:] == pytest.approx((0.1 + 0.3 * 3 / 4, 0.4, 0.3 / 4, 0.2))
    assert row[1:] == pytest.approx((0.1, 0.4, 0.3, 0.2)) and same[1:] == pytest.approx((0.825, 0.2, 0.075, 0.6))
    assert told(panel, "leave") == nothing and panel.picture.lit == []
    assert told(panel, "point", 0.5, 0.5) == nothing  # between the maps


def test_a_picked_cell_stays_walks_and_follows_the_knobs():
    panel = Maps()
    assert told(panel, "step", 1, 0) == "left 0, 0 at 10"  # nothing was picked: the first cell
    assert told(panel, "step", 1, 1) == "left 1, 1 at 10"
    assert told(panel, "point", 0.9 - 0.01, 0.3) == "right 0, 3 at 10"
    assert told(panel, "leave") == "left 1, 1 at 10"
    for _ in range(4):
        told(panel, "step", -1, -1)
    assert panel.picture.strip == "left 0, 0 at 10"
    panel.set(x=20)
    assert panel.picture.strip == "left 0, 0 at 20"
    assert told(panel, "pick", 0.11, 0.79) == "ValueError: no third row"
    assert told(panel, "drop").startswith("Point at") and panel.picture.picked is None


def test_a_panel_without_arithmetic_is_not_pointed_at():
    assert not Bars().picture.points


def test_the_picture_is_laid_out_for_the_room_there_is():
    panel = Maps()
    assert panel.picture.width == 940
    told(panel, "room", 592, 1)
    assert panel.picture.width == panel.canvas.pixels[0] == 590
    told(panel, "room", 1100, 1)
    assert panel.picture.width == 940


def width_of(png):
    return Image.open(io.BytesIO(png)).width


def test_a_fine_screen_gets_a_sharp_picture_when_nothing_moves():
    async def moved():
        panel, widths = Maps(), []
        told(panel, "room", 1100, 1.5)
        for _ in range(2):
            widths.append(width_of(panel.png))
            await asyncio.sleep(2 * SETTLED)
            widths.append(width_of(panel.png))
            panel.move("x", 30)
        panel.move("x", 40)  # and again before it has settled
        return panel, widths

    panel, widths = asyncio.run(moved())
    assert widths == [940, 1880, 940, 1880]
    assert panel.picture.width == 940 == width_of(panel.png)


def test_a_pinned_picture_and_its_words_stay():
    panel = Maps(x=30)
    button(panel, "pin").click()
    still, words = panel._pinned.children
    kept = still.png
    panel.set(x=70)
    assert still.png == kept and still.alt.startswith("Pinned: ") and "x is 30" in still.alt
    assert "x is 30" in words.value and "x is 70" in panel.text and panel.picture.width == 590
    button(panel, "unpin").click()
    assert panel._pinned.children == () and panel.picture.width == 940


def test_the_alternative_text_says_what_is_shown_now():
    panel = Bars(x=42)
    assert panel.picture.alt == "a bar. x is 42, decay < -1.0"
    panel.set(x=43)
    assert panel.picture.alt == "a bar. x is 43, decay < -1.0"


def test_a_panel_is_freed_when_its_widgets_are_closed():
    panel = Bars()
    freed = weakref.ref(panel)
    del panel
    widgets.Widget.close_all()
    gc.collect()
    assert freed() is None


def test_a_player_with_fewer_places_than_before_moves_nothing():
    gone = []
    player = Player(9, gone.append)
    player.show(9)
    player.show(2, 4)
    assert (player.place, player.play.value, player.play.max) == (2, 2, 4) and gone == []
    player.show(7, 8)
    assert (player.play.value, player.play.max) == (7, 8) and gone == []
