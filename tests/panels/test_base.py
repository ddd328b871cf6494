"""What every panel does: knobs, reset, errors, copy as Python, no backlog, runs that can be cancelled."""

import asyncio
import base64
import threading
import time

import ipywidgets as widgets
import pytest
import torch

from flakit.figures import style
from flakit.figures.canvas import Canvas
from flakit.panels import knobs
from flakit.panels.base import DEBOUNCE, ButtonRun, Panel


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
    bundle = panel._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == panel.png
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == "bars: x is 10, decay < -1.0"


def test_copy_as_python_shows_the_script():
    panel = Bars()
    panel.knobs["x"].value = 33
    button(panel, "copy as Python").click()
    shown = [w for w in walk(panel) if isinstance(w, widgets.Textarea)]
    assert [w.value for w in shown] == ["print(33)"] == [panel.as_python()]
    assert shown[0].layout.display == ""
    panel.reset()
    assert shown[0].layout.display == "none"


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
