"""The panel of lost digits names the line that rounds its operands, and says the numbers of a line."""

import re

import pytest

from flakit.figures import style
from flakit.figures.canvas import Cell
from flakit.instruments import workbench
from flakit.instruments.digits import Kind
from flakit.ops.common.dispatch import has_triton
from flakit.panels.kernel_trace import LostDigits, _traced, lost_digits
from tests.figures.test_plots import has_colour

pytestmark = [pytest.mark.full, pytest.mark.skipif(not has_triton(), reason="needs Triton")]


def test_products_in_tf32_are_named_and_products_in_float32_are_not():
    panel = lost_digits()
    assert "every result is right to its budget" in panel.text and not has_colour(panel.canvas, style.BROKEN)
    panel.set(products="tf32")
    text = workbench.source().splitlines()
    line = next(n for n, code in enumerate(text, 1) if "tl.dot(b_reads" in code)
    assert f"line {line} loses the digits" in panel.text and "TF32" in panel.text
    assert has_colour(panel.canvas, style.BROKEN)
    trace = workbench.traced(-0.5, digits=True, products="tf32")
    row = next(n for n, shown in enumerate(trace.digits.shown()) if shown.place.line == line)
    said = panel.arithmetic(trace, Cell("lines", row, 0))
    assert said.startswith(f"line {line}: ") and "worst lane" in said
    assert panel.arithmetic(trace, Cell("lines", 40, 0)) is None


@pytest.mark.parametrize("way", ["start", "middle"])
def test_products_in_tf32_are_named_where_exponentials_have_lost_digits_before(way):
    """An exponential's loss is in both factors and leaves the scores with the product; what the product adds stays."""
    found = workbench.traced(-1.3, way=way, digits=True, products="tf32").digits
    assert [(finding.line.operation, finding.line.blamed.kind) for finding in found.findings] == [("dot", Kind.TF32)]


def test_it_speaks_chinese_and_copies_as_python():
    panel = lost_digits(language="zh")
    assert "每个结果的误差都在预算之内" in panel.text
    assert "digits=True, products='ieee'" in panel.as_python()


def test_products_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="products: expected one of ieee, tf32, got 'tf64'"):
        workbench.traced(-0.5, digits=True, products="tf64")


def test_lines_of_ones_own_are_run_as_they_are_written():
    from flakit.instruments.workbench import tl

    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        return tl.dot(b_r * tl.exp(b_ge), tl.trans(b_k * tl.exp(-b_gi)))

    panel = lost_digits(scores)
    assert panel.setting["way"] == "yours" and "loses the digits, “tl.dot(b_r * tl.exp(b_ge)" in panel.text
    made = workbench.run(-0.5, scores, digits=True)
    assert made.lossy == "line 7, return tl.dot(b_r * tl.exp(b_ge), tl.trans(b_k * tl.exp(-b_gi)))"
    assert workbench.run(-0.5, digits=True).lossy == "none"


def _apart(text):
    """A text without its numbers of digits, and these."""
    number = r"\d+\.\d(?= digits)"
    return re.sub(number, "N", text), [float(x) for x in re.findall(number, text)]


def test_its_presets_were_recorded_for_machines_without_triton(monkeypatch):
    live = {name: lost_digits(**at).text for name, at in LostDigits.presets.items()}
    monkeypatch.setattr(workbench, "has_triton", lambda: False)
    monkeypatch.setattr(workbench, "tl", None)
    _traced.cache_clear()
    for name, at in LostDigits.presets.items():
        (words, digits), (live_words, live_digits) = _apart(lost_digits(**at).text), _apart(live[name])
        assert words == live_words + " There is no Triton here: this is a recording.", name
        assert digits == pytest.approx(live_digits, abs=0.11), name  # each processor's products sum in their own order
    panel = lost_digits(products="tf32")
    panel.knobs["decay"].value = -1.0
    assert "products in tf32, were recorded -0.5" in panel.text
    _traced.cache_clear()
