"""The panel of lost digits names the line that rounds its operands, and says the numbers of a line."""

import pytest

from flakit.figures import style
from flakit.figures.canvas import Cell
from flakit.instruments import workbench
from flakit.ops.common.dispatch import has_triton
from flakit.panels.lost_digits import lost_digits
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


def test_it_speaks_chinese_and_copies_as_python():
    panel = lost_digits(language="zh")
    assert "每个结果的误差都在预算之内" in panel.text
    assert "digits=True, products='ieee'" in panel.as_python()


def test_products_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="products: expected one of ieee, tf32, got 'tf64'"):
        workbench.traced(-0.5, digits=True, products="tf64")
