"""The state stepper: moving through time, what it says, and the script that remakes it."""

import contextlib
import io
import math
import re
import time

import numpy as np
import pytest

from flakit.numerics.operators import OPERATORS
from flakit.panels import state_stepper
from tests.panels.live import NOT_LIVE


def outputs(script: str) -> dict[str, tuple[float, bool]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {})
    lines = re.findall(r"^(\w+) RMS (\S+) finite (\w+)$", printed.getvalue(), re.M)
    return {name: (float(rms), finite == "True") for name, rms, finite in lines}


every_operator = pytest.mark.parametrize("op", OPERATORS)


@every_operator
def test_starts_with_everything_finite_and_a_picture(op):
    panel = state_stepper(op, t=5)
    assert panel.text.startswith("forward, t = 5 of 0 … 15")
    assert "Everything is finite" in panel.text
    assert panel.png.startswith(b"\x89PNG")
    assert "image/png" in panel._repr_mimebundle_()


def test_steps_go_forward_then_backward_and_stop():
    panel = state_stepper(T=8)
    seen = []
    for _ in range(17):
        seen.append((panel.setting["direction"], panel.setting["t"]))
        panel.step()
    forward = [("forward", t) for t in range(8)]
    assert seen == [*forward, *(("backward", t) for t in reversed(range(8))), ("backward", 0)]
    panel.step(-1)
    assert (panel.setting["direction"], panel.setting["t"]) == ("backward", 1)


def test_play_moves_the_slider_and_the_slider_moves_play():
    panel = state_stepper(T=8)
    panel.player.play.value = 11
    assert (panel.setting["direction"], panel.setting["t"]) == ("backward", 4)
    assert panel.text.startswith("backward, t = 4")
    panel.knobs["t"].value = 6
    assert panel.player.play.value == 9
    panel.set(T=32, t=30, direction="forward")
    assert panel.player.play.max == 63 and panel.player.play.value == 30
    panel.set(T=16)
    assert panel.setting["t"] == 15
    with pytest.raises(ValueError, match="t: expected a whole number from 0 to 15, got 16"):
        panel.set(t=16)


def test_a_growing_state_is_told_where_it_ends():
    panel = state_stepper(profile="growing", decay=-4, T=32, K=8, V=8, t=22)
    first = int(re.search(r"S at t = (\d+) … 31", panel.text).group(1))
    predicted = int(re.search(r"after about (\d+) steps", panel.text).group(1))
    assert predicted == round(88.72 / 4) and abs(first - predicted) <= 1
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
    assert f"between {math.exp(decay):.3g} and {math.exp(decay):.3g} of each {row}" in panel.text
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
    found = outputs(panel.as_python())
    of, memory = OPERATORS[panel.setting["op"]], {"gsa": "hv"}.get(panel.setting["op"], "state")
    assert set(found) >= ({"o", memory} if direction == "forward" else {f"d{x}" for x in (*of.sequences, memory)})
    for name, (rms, finite) in found.items():
        values = panel.result[direction][t][name].astype(np.float64)
        assert finite == np.isfinite(values).all()
        with np.errstate(all="ignore"):
            assert rms == pytest.approx(np.sqrt(np.mean(values**2)), rel=1e-6, nan_ok=True)


def test_reset_and_wrong_settings():
    panel = state_stepper(t=3)
    start = panel.png
    panel.set(profile="constant", decay=-2, direction="backward")
    assert panel.png != start
    panel.reset()
    assert panel.png == start
    with pytest.raises(ValueError, match="profile: expected one of constant"):
        state_stepper(profile="fast")
    with pytest.raises(TypeError, match="no knob named speed"):
        state_stepper(speed=3)
    with pytest.raises(ValueError, match="op: expected one of rwkv6, rwkv7, gsa, got 'rwkv5'"):
        state_stepper("rwkv5")


def test_redraws_are_quick():
    panel = state_stepper(T=16)
    panel.set(direction="backward")

    def seconds(settings):
        taken = []
        for setting in settings:
            start = time.process_time()
            panel.set(**setting)
            taken.append(time.process_time() - start)
        return min(taken)  # other tests share these cores

    assert seconds([{"t": t} for t in range(12)]) < NOT_LIVE
    assert seconds([{"profile": "constant", "decay": -0.1 * n} for n in range(12)]) < NOT_LIVE


def test_moving_the_decay_means_a_constant_decay():
    panel = state_stepper(profile="logsigmoid", decay=-1)
    panel.knobs["decay"].accept(-2)
    assert panel.setting["profile"] == "constant" and "between 0.135 and 0.135" in panel.text
    panel.set(profile="growing")
    panel.knobs["decay"].accept(-3)
    assert panel.setting["profile"] == "growing" and "e^3" in panel.text
    panel.set(profile="logsigmoid", decay=-4)
    assert panel.setting["profile"] == "logsigmoid"


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


def test_another_operator_is_one_redraw(monkeypatch):
    panel, drawn = state_stepper(), []
    monkeypatch.setattr(panel, "draw", lambda *_, **__: drawn.append(1))
    panel.knobs["op"].value = "rwkv7"
    assert len(drawn) == 1


def test_the_delta_rule_takes_away_a_part_of_what_stands_under_its_key():
    """Nothing fades: what a finds after the edit is 1 + a.b of what it found, between none and all of it."""
    frame = state_stepper("rwkv7", profile="none", t=9).result["forward"][9]
    share = 1 + frame["a"] @ frame["b"]
    assert 0 < share < 1
    after = frame["a"] @ (frame["kept"] + frame["edit"])
    np.testing.assert_allclose(after, share * frame["removed"], rtol=1e-4, atol=1e-6)
