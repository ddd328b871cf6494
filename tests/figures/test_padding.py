"""The picture of a chunk that the sequence ends in: what is outlined, hatched and left empty."""

import numpy as np

from flakit.figures.padding import PaddingFigure, _border


def segments(mask):
    x, y = (np.array(z).reshape(-1, 3)[:, :2] for z in _border(np.array(mask, bool)))
    return {tuple(sorted(zip(a, b, strict=True))) for a, b in zip(x, y, strict=True)}


def test_a_border_is_the_outline_and_nothing_inside():
    assert _border(np.zeros((3, 3), bool)) == ([], [])
    cell = segments([[0, 0], [0, 1]])
    corners = [(0.5, 0.5), (1.5, 0.5), (1.5, 1.5), (0.5, 1.5)]
    assert cell == {tuple(sorted(pair)) for pair in zip(corners, corners[1:] + corners[:1], strict=True)}
    block = segments(np.ones((3, 2)))
    assert len(block) == 2 * (3 + 2)
    assert {x for pair in block for x, _ in pair} == {-0.5, 0.5, 1.5}
    assert segments([[1, 0], [0, 1]]) == segments([[1, 0], [0, 0]]) | segments([[0, 0], [0, 1]])


def drawn(**changed):
    figure = PaddingFigure()
    exponents = np.full((8, 2), np.nan)
    exponents[4:, 0] = (-10.0, -20.0, 90.0, 90.0)
    given = dict(
        title="GSA", subtitle="", limit=88.7, exponents=exponents, tokens=6, name="ds", columns="slot", first=16,
        gradient=np.ones((6, 3)), predicted=np.zeros((6, 3), bool), limits=[np.inf, 5, 3], measured=5.0, now=(2, 4.0),
    )  # fmt: skip
    figure.update(**given | changed)
    return figure


def test_an_exponent_beyond_the_limit_is_hatched_as_an_infinity():
    hatched = {}
    for size in (80.0, 90.0):
        exponents = np.full((8, 2), np.nan)
        exponents[4:, 0] = size
        hatched[size] = drawn(exponents=exponents)._exponents._hatched["inf"].get_visible()
    assert hatched == {80.0: False, 90.0: True}


def test_lost_elements_are_hatched_and_counted():
    gradient = np.ones((6, 3))
    gradient[2:4] = np.nan
    figure = drawn(gradient=gradient, predicted=np.isnan(gradient))
    assert "33% not finite" in figure._name.get_text()
    assert figure._gradient._hatched["nan"].get_visible() and not drawn()._gradient._hatched["nan"].get_visible()
    assert "finite" in drawn()._name.get_text() and "not" not in drawn()._name.get_text()
    assert figure.canvas.png() != drawn(gradient=gradient).canvas.png()


def test_rows_are_named_by_their_token():
    assert drawn()._gradient_ax.yaxis.get_major_formatter()(0, 0) == "16"
