"""Knobs: a log scale whose ends are exact, and values between the stops."""

import math

import pytest

from flakit.panels import knobs


def test_decay_runs_from_zero_to_minus_infinity():
    knob = knobs.DecayKnob(-1.0)
    stops = [value for _, value in knob.options]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] == 0.0 and stops[-1] == -math.inf
    assert knob.value == -1.0


def test_decay_stops_are_even_in_the_logarithm():
    stops = [value for _, value in knobs.DecayKnob(0.0).options][1:-1]
    ratios = [later / earlier for earlier, later in zip(stops, stops[1:], strict=False)]
    assert all(1.05 < ratio < 1.07 for ratio in ratios)
    assert stops[0] == -1e-3 and stops[-1] == -1e3


@pytest.mark.parametrize("value", [-1.387, -88.8, -1e-7, -1e6, -2, 0, -0.0, -math.inf])
def test_any_decay_can_be_set(value):
    knob = knobs.DecayKnob(-1.0)
    knob.accept(value)
    assert knob.value == value
    assert math.copysign(1, knob.value) == (1 if value == 0 else -1)  # never shown as -0
    stops = [stop for _, stop in knob.options]
    assert stops == sorted(stops, reverse=True) and len(stops) == len(set(stops))


@pytest.mark.parametrize("make", [lambda: knobs.DecayKnob(-1.0), lambda: knobs.number(2.0, 1.0, 9.0, "x", None, False)])
def test_assigned_values_do_not_pile_up_as_stops(make):
    knob = make()
    even = len(knob.options)
    sign = -1 if knob.high == 0 else 1
    for n in range(20):
        knob.accept(sign * (3 + n / 7))
        assert knob.value == sign * (3 + n / 7)
        assert len(knob.options) <= even + 1
    knob.value = knob.options[0][1]  # moved by hand: the stop it came from stays until another is assigned
    knob.accept(sign * 3.1)
    assert knob.value == sign * 3.1 and len(knob.options) == even + 1


def test_an_optional_decay_can_be_none():
    knob = knobs.DecayKnob("none", stops=(-1.0, -88.8), optional=True)
    assert knob.value == "none"
    assert [label for label, _ in knob.options] == ["none", "0", "-1", "-88.8", "-inf"]
    knob.accept(-5)
    assert knob.value == -5.0
    knob.accept("none")
    assert knob.value == "none"
    with pytest.raises(ValueError, match="expected a natural-log decay <= 0 or 'none', got 'nothing'"):
        knob.accept("nothing")


def test_operator_choice_offers_what_a_panel_knows():
    knob = knobs.operator_choice("rwkv6", ["rwkv6"])
    assert knob.options == (("RWKV6", "rwkv6"),)
