"""The gradient comparer: what is measured here, what was recorded, and that it says which."""

import inspect
import math
import re
import threading
from importlib import import_module

import pytest
import torch

from flakit.cases.decay_gradient import law
from flakit.figures.gradients import ERRORS, PLOTS
from flakit.numerics import recorded
from flakit.numerics.family import FAMILY
from flakit.numerics.gradients import MEASURES, rounding_error
from flakit.numerics.operators import OPERATORS
from flakit.ops.family import naive_kda
from flakit.ops.rwkv6 import chunk_rwkv6
from flakit.panels import compare, gradient_comparer
from flakit.panels.knobs import stops_of
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import assert_presets_differ, on_view, pointed, printed, sizes

META = {"device": "NVIDIA H200", "date": "2026-11-20", "torch": "2.11.0", "triton": "3.6.0", "command": "remake"}
MODULE = import_module("flakit.panels.gradient_comparer")
TENSORS = ("o", "final_state", "dr", "dk", "dv", "dw", "du")


@pytest.fixture(autouse=True)
def no_recording(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def recording(no_recording):
    rows = []
    for dtype, unit in (("float32", 1e-7), ("bfloat16", 1e-3)):
        for T in (64, 1024):
            for decay in ("logsigmoid", 0.0, -1.0, -8.0, -math.inf):
                for n, tensor in enumerate(TENSORS):
                    error = unit * (n + 1) * T
                    rows.append(
                        {"op": "rwkv6", "form": "chunk", "backend": "triton", "dtype": dtype, "T": T, "decay": decay}
                        | {"tensor": tensor, "l2": error, "worst_element": 3 * error, "worst_row": 2 * error}
                        | {"non_finite": 0, "rms": 1.0}
                    )
    return recorded.write(no_recording / "h200_rwkv6_gradients.json", META, rows)


def error(panel, form, tensor, measure="l2"):
    (row,) = [row for row in panel.result if (row["form"], row["tensor"]) == (form, tensor)]
    return row[measure]


def errors_of_script(panel) -> dict[tuple[str, str], tuple[float, ...]]:
    line = r"^(\w+) +(\w[\w ]*?) +l2 (\S+)  worst_element (\S+)  worst_row (\S+)"
    found = re.findall(line, printed(panel), re.M)
    return {(form, tensor): tuple(map(float, errors)) for tensor, form, *errors in found}


@pytest.mark.parametrize("op", OPERATORS)
def test_the_operators_own_gradients_are_at_rounding_level(op):
    panel = gradient_comparer(op, T=64)
    of = OPERATORS[op]
    for form in of.forms:
        for tensor in (*of.outputs, *(f"d{name}" for name in of.tensors)):
            assert error(panel, form, tensor) < 2.5e-3, (form, tensor)
    assert "All finite" in panel.text and "Ran here on" in panel.text
    assert panel.png.startswith(b"\x89PNG")


@pytest.mark.parametrize("op", OPERATORS)
def test_the_recurrent_form_rounds_at_every_token(op):
    """On a CPU the operator's own rounds once, at the end: beside it any chunk form looks worse than it is."""
    panel = gradient_comparer(op, T=64, dtype="float32")
    for tensor in ("o", f"d{OPERATORS[op].decay}"):
        chunk, recurrent = (error(panel, form, tensor) for form in OPERATORS[op].forms)
        assert recurrent > 2 * rounding_error(torch.float32), (tensor, recurrent)
        assert 1 / 3 < chunk / recurrent < 3, (tensor, chunk, recurrent)


def test_the_widely_used_dw_is_as_wrong_as_its_law_says():
    panel = gradient_comparer(T=256, dtype="float32", profile="constant", decay=-20)
    assert error(panel, "chunk", "dw") < 1e-6
    assert 1 < error(panel, "running sums", "dw") / law(-20, 256, "float32") < 4
    panel.set(decay=-math.inf)
    assert error(panel, "chunk", "dw") == 0
    assert "running sums infinite (not 0 where the truth is)" in panel.text and "chunk 0 (exact)" in panel.text


def test_a_gradient_too_small_for_its_dtype_is_told():
    panel = gradient_comparer(T=16, dtype="float16", profile="constant", decay=-20)
    assert "below what float16 holds in full (6.1e-05)" in panel.text
    panel.set(dtype="float32")
    assert "below what" not in panel.text


@pytest.mark.full
@pytest.mark.parametrize(
    "setting",
    [
        dict(dtype="bfloat16", profile="logsigmoid", T=128, seed=4),
        dict(dtype="float32", profile="constant", decay=-8.0, T=32, K=16),
        dict(dtype="float16", profile="constant", decay=-math.inf, T=16, K=16),
        dict(op="rwkv7", dtype="bfloat16", T=32, K=16),
        dict(op="gsa", dtype="bfloat16", T=16, K=16, M=16, HQ=4),
    ],
    ids=["bfloat16", "float32", "forget", "rwkv7", "gsa"],
)
def test_the_copied_script_reproduces_the_errors(setting):
    panel = gradient_comparer(**setting)
    found = errors_of_script(panel)
    assert len(found) == len(panel.result) == {"rwkv6": 15}.get(panel.setting["op"], 16)
    for row in panel.result:
        assert found[row["form"], row["tensor"]] == tuple(pytest.approx(row[m], rel=1e-3) for m in MEASURES)


def test_without_a_recording_there_is_nothing_recorded_to_choose():
    panel = gradient_comparer(T=16)
    with pytest.raises(ValueError, match="source: expected one of here, got 'recorded'"):
        panel.set(source="recorded")
    assert panel._figure("rwkv6")._plots[1]._note.get_text() == "press “measure along”"


def test_recorded_numbers_are_shown_as_recorded(recording):
    panel = gradient_comparer(source="recorded", dtype="bfloat16", T=64, profile="constant", decay=-8)
    assert "\nRecorded on NVIDIA H200, 2026-11-20, torch 2.11.0, triton 3.6.0." in panel.text
    assert "Nearest" not in panel.text
    assert error(panel, "chunk", "dr") == pytest.approx(3e-3 * 64)
    shown = panel._figure("rwkv6")
    assert shown._where.get_text() == recorded.read(recording).label
    lengths, decays = shown._plots
    assert list(lengths._lines["chunk"].get_xdata()) == [64, 1024]
    assert list(decays._lines["chunk"].get_xdata()) == [1, 8]
    found = errors_of_script(panel)
    assert found["chunk", "dr"] == pytest.approx((0.192, 0.576, 0.384), rel=1e-3)


def test_the_nearest_recorded_setting_is_named(recording):
    panel = gradient_comparer(source="recorded", T=512, profile="constant", decay=-5)
    assert "Nearest recorded setting: T = 1024, decay -8." in panel.text
    panel.set(profile="rwkv6-wide", T=16)
    assert "Nearest recorded setting: T = 64, decay logsigmoid." in panel.text
    panel.set(dtype="float16")
    assert "dtype: expected one of float32, bfloat16 in the recording, got float16" in panel.text


def test_without_a_gpu_the_recording_stands_beside_what_is_measured(recording):
    panel = gradient_comparer(T=16)
    if panel.device != "cpu":
        pytest.skip("this machine measures for itself")
    assert panel._figure("rwkv6")._plots[1]._title.get_text().endswith("recorded, NVIDIA H200")


@pytest.mark.parametrize("along", ["T", "decay", "dtype"])
def test_the_button_measures_along_a_knob(along, monkeypatch):
    panel = gradient_comparer(T=16, K=16, along=along, dtype="float32")
    few = {"T": (8, 16, 32), "decay": (-1.0, -8.0), "dtype": ("float32", "bfloat16")}
    monkeypatch.setattr(MODULE, "_ALONG", few)
    before = panel.png
    panel.sweep.start()
    panel.sweep.wait(60)
    assert panel.sweep.status.value.startswith("done") and panel.sweep.bar.value == len(few[along])
    plot = panel._figure("rwkv6")._plots[1]
    assert len(plot._lines["chunk"].get_xdata()) == len(few[along])
    assert "measured here" in plot._title.get_text()
    assert panel.png != before


def test_a_cancelled_run_keeps_what_it_has(monkeypatch):
    panel = gradient_comparer(T=16, K=16, along="T")
    monkeypatch.setattr(MODULE, "_ALONG", {"T": (8, 16, 32)})
    started, go_on = threading.Event(), threading.Event()
    measure = panel._measure

    def slow(**setting):
        started.set()
        go_on.wait(30)
        return measure(**setting)

    monkeypatch.setattr(panel, "_measure", slow)
    panel.sweep.start()
    started.wait(30)
    panel.sweep.cancel()
    go_on.set()
    panel.sweep.wait(60)
    assert panel.sweep.status.value == "cancelled"
    assert len(panel._swept["rows"]) == 15


@pytest.mark.parametrize(
    ("op", "tensor", "axis"),
    [
        ("rwkv6", "dw", "time t"),
        ("rwkv6", "du", "channel"),
        ("rwkv6", "final_state", "channel"),
        ("gsa", "final_hv", "slot"),
    ],
)
def test_what_has_no_time_is_not_drawn_over_time(op, tensor, axis):
    panel = gradient_comparer(op, T=32, K=16, tensor=tensor, M=16)
    plot = panel._figure(op)._plots[0]
    assert plot.ax.get_xlabel() == axis
    assert len(plot._lines["chunk"].get_xdata()) == {"time t": 32}.get(axis, 16)
    whole = error(panel, "chunk", tensor)
    steps = MODULE._along(
        OPERATORS[op],
        tensor,
        *((row["got"], row["true"]) for row in panel.result if row["tensor"] == tensor).__next__(),
    )
    assert math.sqrt(sum(x * x for x in steps) / len(steps)) == pytest.approx(whole, rel=1e-6), (
        "their mean is the whole"
    )


def test_a_dot_says_its_errors_and_the_worst_element_beside_the_truth():
    panel = gradient_comparer(T=32, K=16, profile="constant", decay=-20, dtype="float32")
    figure = panel._figure("rwkv6")
    for lane in range(len(figure.tensors) * len(figure.series)):
        tensor, form = figure.lane(lane)
        said = pointed(panel, ERRORS, lane, 0)
        if form == "running sums" and tensor != "dw":
            assert said == f"{tensor}: running sums makes none of its own."
            continue
        assert said.startswith(f"{tensor}, {form}: L2 ") and "Error" not in said
        (row,) = [row for row in panel.result if (row["form"], row["tensor"]) == (form, tensor)]
        got, true = map(float, re.search(r": (\S+) \(true: (\S+)\)$", said).groups())
        off = (row["got"].double() - row["true"].double()).abs()
        at = off.argmax()
        if row["worst_element"]:
            assert got == pytest.approx(row["got"].flatten()[at].item(), rel=1e-3)
            assert true == pytest.approx(row["true"].flatten()[at].item(), rel=1e-3)
    said = pointed(panel, PLOTS[0], 0, 7)
    assert said.startswith("dw, token 7: chunk ") and "running sums" in said
    assert panel.picture.lit


def test_at_most_three_knobs_on_view_and_every_slider_has_a_name():
    panel = gradient_comparer(T=16)
    assert on_view(panel) == ["dtype", "decay", "tensor"]
    assert all(knob.description for knob in panel.knobs.values())
    assert on_view(gradient_comparer(T=16, show=("T",))) == ["length T"]


def test_play_means_one_decay_for_all_tokens():
    """Whatever the profile was: a player that changes nothing would only puzzle."""
    panel = gradient_comparer(T=16, K=16, profile="logsigmoid", decay=-1.0)
    before = panel.png
    panel.player.step(1)
    assert panel.setting["profile"] == "constant" and panel.setting["decay"] < -1.0
    assert panel.png != before and f"decay {panel.setting['decay']:g}" in panel._figure("rwkv6")._title.get_text()


@pytest.mark.full
@pytest.mark.parametrize("op", OPERATORS)
def test_low_enough_at_both_widths(op):
    panel = gradient_comparer(op, T=16, K=16)
    (narrow, high), (wide, height) = sizes(panel)
    assert (narrow, wide) == (590, 940) and high <= 360 and height <= 430


def test_presets_draw_and_say_something_else():
    assert len(assert_presets_differ(gradient_comparer())) == 3


def test_reset_brings_the_first_picture_back():
    panel = gradient_comparer(T=16)
    start = panel.png
    panel.set(dtype="float32", tensor="dr", profile="none")
    assert panel.png != start
    panel.reset()
    assert panel.png == start


@pytest.mark.full
def test_redraws_are_quick():
    panel = gradient_comparer(profile="constant")
    assert least_seconds(panel.set, ({"decay": -0.1 * n} for n in range(1, 12))) < NOT_LIVE


def test_an_operator_brings_its_own_tensors_and_sizes():
    panel = gradient_comparer(T=16, K=16)
    for op, decay, profile, shown in (
        ("rwkv7", "dw", "rwkv7", "none"),
        ("gsa", "dg", "gsa", ""),
        ("rwkv6", "dw", "logsigmoid", "none"),
    ):
        panel.knobs["op"].value = op
        assert (panel.setting["tensor"], panel.setting["profile"]) == (decay, profile)
        assert {panel.knobs[name].layout.display for name in ("M", "HQ")} == {shown}
        assert {row["tensor"] for row in panel.result} == set(panel.knobs["tensor"].options)
        assert "\nRan here on" in panel.text and "All finite" in panel.text


def test_an_operator_without_a_recording_says_so(recording):
    panel = gradient_comparer(T=64, source="recorded")
    panel.knobs["op"].value = "gsa"
    assert panel.text == "ValueError: numbers: expected an operator with a recording in data/, got GSA"
    panel.set(source="here", T=16, K=16, M=16)
    assert "\nRan here on" in panel.text


@pytest.mark.parametrize("op", FAMILY)
def test_any_member_of_the_family_is_compared_with_a_kernel_of_ones_own(op):
    of = FAMILY[op]
    panel = compare(tripled(op), like=op, T=16, K=16)
    assert stops_of(panel.knobs["op"]) == [op]
    assert {row["form"] for row in panel.result} == {"naive", "tripled"}
    for tensor in ("o", "dv"):
        assert error(panel, "naive", tensor) < 1e-6 and error(panel, "tripled", tensor) == pytest.approx(2, rel=1e-4)
    assert "All finite; between the two, " in panel.text and f"tripled and naive, called as {of.label} is" in panel.text
    assert of.label in panel._figure(op)._title.get_text()
    (legend,) = panel._figure(op).canvas.figure.legends
    assert [words.get_text() for words in legend.get_texts()][:2] == ["tripled", "naive"]
    assert panel.knobs["decay"].layout.display == ("" if of.decay else "none")
    panel.set(**({"profile": "constant", "decay": -2.0} if of.decay else {"tensor": "dk"}))
    assert panel.png.startswith(b"\x89PNG") and "Error" not in panel.text
    assert pointed(panel, ERRORS, 0, 0).startswith("o, tripled: L2 2.0e+00")


def test_its_script_names_the_kernels():
    panel = compare(naive_kda, "flakit.ops.family:naive_kda", like="kda", T=16, K=16, decay=-1.0)
    found = errors_of_script(panel)
    expected = [error(panel, "mine", "dg", measure) for measure in ("l2", "worst_element", "worst_row")]
    assert found["mine", "dg"] == found["other", "dg"] == pytest.approx(expected, rel=1e-3)


def test_two_kernels_beside_each_other():
    """Decay, length and tensor on view; a state that only one returns, and a gradient that one lacks, are told."""

    def stateless(r, k, v, w, u):
        return chunk_rwkv6(r, k, v, w, u.detach()).o

    panel = compare(stateless, chunk_rwkv6, like="rwkv6", T=17, decay=-0.5)
    assert panel.named_on_view == ["dtype", "decay", "T", "tensor"] and panel.player is not None
    assert {row["form"] for row in panel.result} == {"stateless", "chunk_rwkv6"}
    assert "between the two, o differs most, by 0 (exact)." in panel.text
    assert "stateless makes no final_state, du." in panel.text
    before = panel.png
    panel.set(decay=-8.0, T=100)
    assert panel.png != before and "T = 100, decay -8" in panel._figure("rwkv6")._title.get_text()
    assert compare(stateless, stateless, like="rwkv6", T=16).own.keys() == {"mine", "other"}
    panel = compare(stateless, stateless, like="rwkv6", T=16)
    panel.set(tensor="du")
    assert panel.text == "ValueError: tensor: expected one that a kernel makes, got du"


def test_a_kernel_that_raises_is_told_beside_the_other(monkeypatch):
    def fussy(r, k, v, w, u):
        if r.shape[1] % 16:
            raise ValueError("T: expected a multiple of 16")
        return chunk_rwkv6(r, k, v, w, u)

    panel = compare(fussy, like="rwkv6", T=17)
    assert {row["form"] for row in panel.result} == {"chunk"}
    assert "fussy: ValueError: T: expected a multiple of 16." in panel.text
    panel.set(T=16)
    assert "multiple" not in panel.text and {row["form"] for row in panel.result} == {"fussy", "chunk"}
    monkeypatch.setattr(MODULE, "SLOW", 0.0)
    panel.set(T=32)
    assert re.search(r" fussy took \d+\.\d s\.", panel.text)
    with pytest.raises(RuntimeError, match="mine: ValueError: T: expected .*; other: ValueError"):
        compare(fussy, fussy, like="rwkv6", T=17)
    panel = compare(fussy, fussy, like="rwkv6", T=16)
    panel.set(T=17)
    assert panel.text.startswith("RuntimeError: mine: ValueError")
    panel.set(T=32)
    assert "All finite" in panel.text


def test_along_a_decay_that_is_not_there_is_refused():
    panel = gradient_comparer("delta_rule", T=16, K=16, along="decay")
    panel.sweep.start()
    panel.sweep.wait(60)
    assert "DeltaNet has no decay among its arguments" in panel.text


def tripled(op):
    """A kernel that is wrong by a factor, with the arguments of the operator."""
    right = FAMILY[op].reference.function

    def kernel(*given, **named):
        o, state = right(*given, **named)
        return 3 * o, state

    kernel.__signature__, kernel.__name__ = inspect.signature(right), "tripled"
    return kernel
