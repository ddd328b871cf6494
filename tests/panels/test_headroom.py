"""The headroom panel: decays in, each kernel's verdict out, and scaling them shows which breaks next."""

import math
import re

import pytest
import torch

from flakit import headroom as measure
from flakit.cases.headroom import KERNELS
from flakit.figures.headroom import LANES
from flakit.panels import headroom
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import assert_presets_differ, on_view, pointed, printed, sizes

W = -torch.rand(1, 120, 2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def panel():
    return headroom({"first": W, "second": 3 * W})


@pytest.fixture(autouse=True)
def at_the_start(panel):
    panel.reset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", ["all layers", "first", "second"])
def test_says_what_headroom_says(panel, dtype, layer):
    panel.set(dtype=dtype, layer=layer, times=2.0, chunk=32)
    found = measure({"first": 2 * W, "second": 6 * W}, chunk=32)
    margins = [
        m for m in (found.margins if layer == "all layers" else found.layers[layer]) if m.dtype == getattr(torch, dtype)
    ]
    broken = sorted((m for m in margins if m.breaks), key=lambda m: m.factor)
    count = f"{len(broken)} of" if broken else "None of"
    assert panel.text.startswith(f"{count} {len(margins)} kernels break")
    if broken:
        m = broken[0]
        assert f"First of all “{KERNELS[m.kernel]}”: e^{m.exponent:.4g} at {m.place}, and {dtype} ends at" in panel.text
    never = [m.kernel for m in margins if found.uniform(m.kernel, m.dtype) == math.inf]
    assert never == ["previous-row", "pairwise", "dyadic"] and "3 never break, whatever the decays." in panel.text


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("times", [1.0, 10.0])
def test_a_lane_says_whose_decays_add_up_to_what(panel, times, dtype):
    panel.set(times=times, dtype=dtype)
    summed = 0
    for m in panel.result[1]:
        said = pointed(panel, LANES, panel.kernels.index(m.kernel), 0)
        assert said.startswith(f"{m.kernel}: ")
        if m.token is None:
            assert "no exponent is above 0" in said
            continue
        tokens = re.search(r"of tokens? (\d+)(?: to (\d+))?, head (\d), channel (\d), (\w+) =", said)
        first, last, head, channel = (int(x) for x in (tokens[1], tokens[2] or tokens[1], tokens[3], tokens[4]))
        layer = {"first": W, "second": 3 * W}[tokens[5]]
        total = -times * layer[0, first : last + 1, head, channel].double().sum().item()
        assert f" = {total:.4g} {'>' if m.breaks else '<'} {m.limit:.2f}: e^{total:.4g} = " in said
        assert said.split(" = ")[-1].startswith("inf (true: 1e") == m.breaks
        summed += 1
    assert summed >= 6


def test_low_enough_at_both_widths(panel):
    (narrow, high), (wide, height) = sizes(panel)
    assert (narrow, wide) == (590, 940) and high <= 365 and height <= 430
    assert list(panel.canvas.maps) == [LANES]


def test_decays_of_minus_infinity_are_told_where_they_are():
    wild = W.clone()
    wild[0, 3, 0, 0] = -math.inf
    panel = headroom({"calm": W, "wild": wild})
    says = "1 decay is -inf: a gate w = -exp(x) has no gradient there"
    assert says in panel.text and "flakit.log_decay" in panel.text
    panel.set(layer="calm")
    assert says not in panel.text and "log_decay" not in panel.text
    assert "1 个衰减为 -inf" in headroom(wild, language="zh").text


def test_knobs_on_view_and_presets(panel):
    assert on_view(panel) == ["decays ×", "dtype", "layer"]
    assert on_view(headroom(W, show=("chunk",))) == ["chunk"]
    assert len(assert_presets_differ(panel)) == 4


def test_the_main_knob_breaks_one_after_another_and_draws(panel):
    pictures, broken = set(), []
    for times in (0.1, 1.0, 3.0, 10.0, 100.0):
        panel.set(times=times)
        pictures.add(panel.png)
        broken.append(sum(m.breaks for m in panel.result[1]))
        assert panel.text.split()[0] == str(broken[-1] or "None")
    assert len(pictures) == 5 and broken == sorted(broken) and broken[0] == 0 and broken[-1] == 8
    assert least_seconds(panel.set, ({"times": times} for times in (2.0, 5.0, 20.0, 50.0))) < NOT_LIVE


def test_a_file_and_its_script(tmp_path):
    torch.save(-W.abs(), tmp_path / "w.pt")
    panel = headroom(tmp_path / "w.pt", "gsa", times=4.0, block=8)
    assert "layer" not in panel.knobs and panel.setting["block"] == 8
    assert printed(panel).strip() == str(measure(W, "gsa", block=8).times(4.0))
    assert "w.pt" in panel.as_python()


def test_the_script_for_tensors_says_what_it_needs(panel):
    assert "second, token" in printed(panel, w={"first": W, "second": 3 * W})
    assert "# w: the decays that this panel was given" in panel.as_python()
