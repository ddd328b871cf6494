"""The state stepper: moving through time, what it says, and the script that remakes it."""

import math
import re

import numpy as np
import pytest
import torch
from ipywidgets import IntSlider, SelectionSlider

from flakit.figures.canvas import Cell
from flakit.figures.scenes import SCENES
from flakit.figures.stepper import DECAYS
from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.panels import state_stepper
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import assert_presets_differ, on_view, pointed, printed, sizes


def outputs(panel) -> dict[str, tuple[float, bool]]:
    lines = re.findall(r"^(\w+) RMS (\S+) finite (\w+)$", printed(panel), re.M)
    return {name: (float(rms), finite == "True") for name, rms, finite in lines}


every_operator = pytest.mark.parametrize("op", SCENES)


@every_operator
def test_starts_with_everything_finite_and_a_picture(op):
    panel = state_stepper(op, t=5)
    assert panel.text.startswith("Forward, token 5 of 0 to 15: between ")
    assert "Everything is finite" in panel.text
    assert panel.png.startswith(b"\x89PNG")
    assert "image/png" in panel._repr_mimebundle_()[0]


def test_steps_go_forward_then_backward_and_stop():
    panel = state_stepper(T=8)
    seen = []
    for _ in range(17):
        seen.append((panel.setting["direction"], panel.setting["t"]))
        panel.player.step(1)
    forward = [("forward", t) for t in range(8)]
    assert seen == [*forward, *(("backward", t) for t in reversed(range(8))), ("backward", 0)]
    panel.player.step(-1)
    assert (panel.setting["direction"], panel.setting["t"]) == ("backward", 1)


def press_play(panel):
    """What the browser does when ▶ is pressed, until it stops by itself; the settings it came through."""
    play, seen = panel.player.play, []
    with play.hold_trait_notifications():
        play.playing = True
        if play.value == play.max:
            play.value = play.min
    while True:
        seen.append((panel.setting["direction"], panel.setting["t"]))
        if play.value == play.max:
            play.playing = False
            return seen
        play.value += 1


@pytest.mark.full
@pytest.mark.parametrize("T", [8, 16])
def test_play_stops_at_the_last_token_and_pressed_again_goes_through_the_backward_pass(T):
    panel = state_stepper(T=T, t=2)
    assert press_play(panel) == [("forward", t) for t in range(2, T)]
    assert press_play(panel) == [("backward", t) for t in reversed(range(T))]
    assert press_play(panel) == [("forward", t) for t in range(T)]


def test_the_direction_switch_is_the_other_way_into_the_backward_pass():
    panel = state_stepper(T=8, t=7)
    panel.knobs["direction"].value = "backward"
    assert press_play(panel) == [("backward", t) for t in reversed(range(8))]
    panel.set(t=3)
    panel.player.play.value = panel.player.play.min  # the stop button
    assert (panel.setting["direction"], panel.setting["t"]) == ("backward", 7)


def test_play_moves_the_slider_and_the_slider_moves_play():
    panel = state_stepper(T=8)
    panel.player.play.value = 5
    assert (panel.setting["direction"], panel.setting["t"]) == ("forward", 5)
    panel.set(direction="backward", t=4)
    assert panel.player.play.value == 11 and (panel.player.play.min, panel.player.play.max) == (8, 15)
    assert panel.text.startswith("Backward, token 4 of 0 to 7")
    panel.knobs["t"].value = 6
    assert panel.player.play.value == 9
    panel.set(T=32, t=30, direction="forward")
    assert panel.player.play.max == 31 and panel.player.play.value == 30
    panel.set(T=16)
    assert panel.setting["t"] == 15
    with pytest.raises(ValueError, match="t: expected a whole number from 0 to 15, got 16"):
        panel.set(t=16)


def test_time_and_decay_are_on_view_and_every_slider_has_a_name():
    assert on_view(state_stepper()) == ["time t", "decay"]
    assert on_view(state_stepper(show=("t", "direction"))) == ["time t", ""]
    with pytest.raises(ValueError, match="show: expected names of knobs"):
        state_stepper(show=("speed",))
    sliders = [knob for knob in state_stepper().knobs.values() if isinstance(knob, (IntSlider, SelectionSlider))]
    names = [slider.description for slider in sliders]
    assert {"time t", "decay"} < set(names) and all(names)


@pytest.mark.full
@every_operator
def test_low_enough_at_both_widths(op):
    panel = state_stepper(op)
    for direction in ("forward", "backward"):
        (narrow, high), (wide, height) = sizes(panel.set(direction=direction))
        assert (narrow, wide) == (590, 940) and high <= 390 and height <= 430


@pytest.mark.full
@every_operator
def test_presets_draw_and_say_something_else(op):
    first, _, _, last = assert_presets_differ(state_stepper(op))
    assert "Not finite" in last and "finite, forward and backward" in first


def reference_steps(panel):
    """The numbers of the operator's reference at the panel's setting: forward and backward, each by t."""
    at, of = panel.setting, OPERATORS[panel.setting["op"]]
    sizes = {name: at[name] for name in "KVM" if name in of.sizes}
    x = inputs(of.name, T=at["T"], H=1, **sizes, decay=at["profile"], dtype=getattr(torch, at["dtype"]))
    do, _ = cotangents(of.name, x)
    steps = list(of.reference.steps(**x, do=do))
    return {"forward": steps[: at["T"]], "backward": steps[at["T"] :][::-1]}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@every_operator
def test_the_arithmetic_has_the_numbers_of_the_reference(op, direction):
    panel = state_stepper(op, profile="uniform", T=8, K=4, V=4, M=4, t=5, direction=direction)
    steps, t, compared = reference_steps(panel), 5, set()
    for name, (rows, columns) in panel.canvas.maps.items():
        cell = name, rows - 1, columns // 2
        said = pointed(panel, *cell)
        array, place = panel._stepper(op, direction).entry(Cell(*cell))
        value = float(said.rsplit("= ", 1)[1])
        for which in ("forward", "backward"):
            step = steps[which][columns // 2 if name == DECAYS else t]
            if hasattr(step, array):
                assert value == pytest.approx(getattr(step, array)[0, 0][place].item(), rel=6e-3, abs=1e-12), said
                compared.add(array)
        if "smaller" not in said and said.count("=") > 1:
            numbers = said.rsplit(" = ", 2)[1].replace("·", "*").replace("e^", "2.718281828459045**")
            assert eval(numbers) == pytest.approx(value, rel=0.03, abs=0.02), said
    assert {"rwkv6": "state", "rwkv7": "state", "gsa": "hv"}[op] in compared or direction == "backward"
    assert compared >= ({"o"} if direction == "forward" else {f"d{x}" for x in OPERATORS[op].sequences})


@pytest.mark.full
def test_what_overflowed_is_said_as_computed_and_as_it_is():
    panel = state_stepper(profile="growing", decay=-8, t=12)
    said = pointed(panel, "state", 0, 0)
    said = re.fullmatch(r"S_12\[0, 0\] = e\^w_12 S_11 \+ k_12 v_12 = .* = (\S+) \(true: (\S+)\)", said)
    assert said.group(1) == "-inf" and float(said.group(2)) < -1e38
    exact = state_stepper(profile="growing", decay=-8, t=12, dtype="float64").result["forward"][12]["state"][0, 0]
    assert float(said.group(2)) == pytest.approx(exact, rel=6e-3)
    panel.set(profile="constant")
    assert "true" not in panel.picture.strip and "Error" not in panel.picture.strip


def test_a_picked_cell_lights_its_row_and_column_everywhere():
    panel = state_stepper(t=5)
    panel.picture.pick(Cell("state", 3, 2))
    box = panel.canvas.box
    lit = [tuple(place) for place in panel.picture.lit]
    for place in (box("state_before", 3, 2), box("k", 3, None), box("v", None, 2), box(DECAYS, 3, 5)):
        assert ("same", *place) in lit
    assert ("cell", *box("state", 3, 2)) in lit


def test_a_growing_state_is_told_where_it_ends():
    panel = state_stepper(profile="growing", decay=-4, T=32, K=8, V=8, t=22)
    first = int(re.search(r"S at t = (\d+) … 31", panel.text).group(1))
    predicted = int(re.search(r"after about (\d+) steps", panel.text).group(1))
    assert predicted == round(88.72 / 4) and abs(first - predicted) <= 1
    assert "Backward, dr, dw, dk, dv, D are not finite." in panel.text
    panel.set(direction="backward")
    assert "dw at t = 0 … 31" in panel.text  # 0 * inf, even where D is still zero
    panel.set(dtype="float64")
    assert "Everything is finite" in panel.text


@pytest.mark.full
@every_operator
@pytest.mark.parametrize("decay", [0.0, -math.inf, -1e-3])
@pytest.mark.parametrize("colours", ["value", "size"])
def test_any_decay_shows(op, decay, colours):
    panel = state_stepper(op, profile="constant", decay=decay, colours=colours, t=3)
    row = "slot" if op == "gsa" else "row of the state"
    kept = {0.0: "all", -math.inf: "nothing"}.get(decay) or f"{math.exp(decay):.3g}"
    assert f"token 3 of 0 to 15: {kept} of each {row} survives the step." in panel.text
    assert "Everything is finite" in panel.text


@pytest.mark.full
@pytest.mark.parametrize(
    "setting",
    [
        dict(profile="logsigmoid", K=4, V=16, t=7, seed=3),
        dict(profile="constant", decay=-math.inf, T=8, direction="backward", t=2),
        dict(profile="spikes", scale=1.0, dtype="float64", direction="backward", t=0),
        dict(profile="growing", decay=-20, T=16, direction="backward", t=9),
        dict(op="rwkv7", K=4, t=7, seed=3),
        dict(op="rwkv7", profile="growing", decay=-20, T=16, direction="backward", t=9),
        dict(op="gsa", K=4, V=16, M=2, t=7),
        dict(op="gsa", profile="growing", decay=-20, T=16, scale=1.0, direction="backward", t=9),
    ],
    ids=["profile", "forget", "scale 1", "growing", "rwkv7", "rwkv7 growing", "gsa", "gsa growing"],
)
def test_the_copied_script_reproduces_the_step(setting):
    panel = state_stepper(**setting)
    direction, t = panel.setting["direction"], panel.setting["t"]
    found = outputs(panel)
    of, memory = OPERATORS[panel.setting["op"]], {"gsa": "hv"}.get(panel.setting["op"], "state")
    assert set(found) >= ({"o", memory} if direction == "forward" else {f"d{x}" for x in (*of.sequences, memory)})
    for name, (rms, finite) in found.items():
        values = panel.result[direction][t][name].astype(np.float64)
        assert finite == np.isfinite(values).all()
        with np.errstate(all="ignore"):
            assert rms == pytest.approx(np.sqrt(np.mean(values**2)), rel=1e-6, nan_ok=True)


def test_reset_brings_the_first_picture_back():
    panel = state_stepper(t=3)
    start = panel.png
    panel.set(profile="constant", decay=-2, direction="backward")
    assert panel.png != start
    panel.reset()
    assert panel.png == start


@pytest.mark.full
def test_redraws_are_quick():
    panel = state_stepper(T=16)
    panel.set(direction="backward")
    assert least_seconds(panel.set, ({"t": t} for t in range(12))) < NOT_LIVE
    decays = ({"profile": "constant", "decay": -0.1 * n} for n in range(12))
    assert least_seconds(panel.set, decays) < NOT_LIVE


def test_moving_the_decay_means_a_constant_decay():
    panel = state_stepper(profile="logsigmoid", decay=-1)
    panel.knobs["decay"].accept(-2)
    assert panel.setting["profile"] == "constant" and "token 0 of 0 to 15: 0.135 of" in panel.text
    panel.set(profile="growing")
    panel.knobs["decay"].accept(-3)
    assert panel.setting["profile"] == "growing" and "e^3" in panel.text
    panel.set(profile="logsigmoid", decay=-4)
    assert panel.setting["profile"] == "logsigmoid"


@pytest.mark.full
def test_an_operator_brings_its_own_knobs_and_defaults():
    panel = state_stepper()
    slots = panel.knobs["M"].layout
    assert slots.display == "none" and (panel.setting["profile"], panel.setting["scale"]) == ("rwkv6-wide", "K^-0.5")
    panel.knobs["op"].value = "rwkv7"
    assert slots.display == "none" and (panel.setting["profile"], panel.setting["scale"]) == ("rwkv7", 1.0)
    panel.knobs["op"].value = "gsa"
    assert slots.display == "" and (panel.setting["profile"], panel.setting["scale"]) == ("gsa", "K^-0.5")
    panel.set(profile="spikes")
    panel.set(op="rwkv6")
    assert panel.setting["profile"] == "spikes", "what a person chose stays"
    panel.reset()
    assert panel.setting["profile"] == "rwkv6-wide"


def test_the_copied_script_has_no_word_of_ours():
    text = state_stepper(profile="growing").as_python()
    assert "# a decay must not be positive" in text and "casebook" not in text


def test_another_operator_is_one_redraw(monkeypatch):
    panel, drawn = state_stepper(), []
    monkeypatch.setattr(panel, "draw", lambda *_, **__: drawn.append(1))
    panel.knobs["op"].value = "rwkv7"
    assert len(drawn) == 1


@pytest.mark.full
def test_the_delta_rule_takes_away_a_part_of_what_stands_under_its_key():
    """Nothing fades: what a finds after the edit is 1 + a.b of what it found, between none and all of it."""
    frame = state_stepper("rwkv7", profile="none", t=9).result["forward"][9]
    share = 1 + frame["a"] @ frame["b"]
    assert 0 < share < 1
    after = frame["a"] @ (frame["kept"] + frame["edit"])
    np.testing.assert_allclose(after, share * frame["removed"], rtol=1e-4, atol=1e-6)
