"""The headroom panel: decays in, each kernel's verdict out, and scaling them shows which breaks next."""

import contextlib
import io
import time

import pytest
import torch

from flakit import headroom as measure
from flakit.panels import headroom
from tests.panels.live import NOT_LIVE

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
    assert f"{len(broken)} of {len(margins)} kernels break on these decays." in panel.text
    if broken:
        assert f"First of all {broken[0].kernel}: " in panel.text and f" at {broken[0].place}." in panel.text
    assert "No decays at all break previous-row, pairwise, dyadic." in panel.text


def test_the_main_knob_breaks_one_after_another_and_draws(panel):
    pictures, broken = set(), []
    for times in (0.1, 1.0, 3.0, 10.0, 100.0):
        panel.set(times=times)
        pictures.add(panel.png)
        broken.append(int(panel.text.split()[0]))
    assert len(pictures) == 5 and broken == sorted(broken) and broken[0] == 0 and broken[-1] == 8
    start = time.process_time()
    panel.set(times=2.0)
    assert time.process_time() - start < NOT_LIVE


def test_a_file_and_its_script(tmp_path):
    torch.save(-W.abs(), tmp_path / "w.pt")
    panel = headroom(tmp_path / "w.pt", "gsa", times=4.0, block=8)
    assert "layer" not in panel.knobs and panel.setting["block"] == 8
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(panel.as_python(), {})
    assert out.getvalue().strip() == str(measure(W, "gsa", block=8).times(4.0))
    assert "w.pt" in panel.as_python()


def test_the_script_for_tensors_says_what_it_needs(panel):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(panel.as_python(), {"w": {"first": W, "second": 3 * W}})
    assert "second, token" in out.getvalue()
    assert "# w: the decays that this panel was given" in panel.as_python()


def test_bad_decays_are_an_error_at_once():
    with pytest.raises(ValueError, match="w: expected natural-log decays <= 0"):
        headroom(W.exp())
