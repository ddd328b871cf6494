"""Still pictures: what they refuse, and that what they show is what they were given."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from flakit.figures import plots, style
from tests.figures.words import assert_legible


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(picture.png())).convert("RGB")).astype(int)


def area(picture, colour):
    rgb = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)])
    return int((np.abs(pixels(picture) - rgb).sum(-1) < 6).sum())


def has_colour(picture, colour):
    return area(picture, colour) > 0


def test_matrices_hatch_what_is_not_finite():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    whole = plots.matrices({"A": x, "B": x.abs()}, signed=True, label="size")
    assert not has_colour(whole, style.NAN["facecolor"]) and "A, B" in repr(whole)
    x[2, 3] = torch.nan
    assert has_colour(plots.matrices({"A": x}, log=True), style.NAN["facecolor"])
    assert not has_colour(plots.matrices({"A": x}, empty=x.isnan()), style.NAN["facecolor"])


def test_curves_draw_lines_laws_and_levels():
    t = np.arange(1, 20)
    plain = plots.curves(t, {"a": t}, xlabel="t", ylabel="y")
    assert has_colour(plain, style.BLUE) and not has_colour(plain, style.PURPLE)
    full = plots.curves(
        t, {"a": t, "b": t**2}, laws={"law": t**1.5}, levels={"ln max": 88.7}, xlabel="t", ylabel="y", log="xy"
    )
    assert has_colour(full, style.PURPLE) and "law over t" in repr(full)
    gap = plots.curves(t, {"a": np.full(19, np.inf)}, xlabel="t", ylabel="y")
    assert (pixels(gap) != pixels(plain)).any()
    apart = plots.curves({"a": t, "b": t[:5]}, {"a": t, "b": t[:5]}, xlabel="t", ylabel="y")
    assert has_colour(apart, style.BLUE) and has_colour(apart, style.PURPLE)


def test_beside_shows_yours_and_what_is_between():
    expected = torch.arange(6.0).reshape(2, 3)
    right, wrong = plots.beside(expected, expected), plots.beside(expected.T.reshape(2, 3), expected)
    assert right.png() != wrong.png()
    assert area(plots.beside(..., expected), style.EMPTY) > 100 * area(right, style.EMPTY)
    broken = plots.beside(expected / 0, expected)
    assert has_colour(broken, style.NAN["facecolor"]) and has_colour(broken, style.INF["facecolor"])


def test_beside_names_rows_and_columns():
    picture = plots.beside(..., torch.eye(2), rows=["door", "lamp"], columns=["open", "closed"])
    first = picture.figure.axes[0]
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["door", "lamp"]
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["open", "closed"]


def test_beside_shows_what_the_learner_began_with():
    expected = torch.arange(6.0).reshape(2, 3)
    picture = plots.beside(expected, expected, before=expected / 0)
    assert [ax.get_title(loc="left") for ax in picture.figure.axes[:3]] == ["before", "yours", "expected"]
    assert has_colour(picture, style.NAN["facecolor"]) and has_colour(picture, style.INF["facecolor"])


@pytest.mark.parametrize(
    ("yours", "says"),
    [
        (..., "nothing so far"),
        (None, "nothing so far"),
        ("S", "a str, no matrix"),
        (torch.zeros(3, 2), "shape [3, 2]\nexpected [2, 3]"),
    ],
    ids=["...", "None", "str", "shape"],
)
def test_beside_says_what_is_missing(yours, says):
    picture = plots.beside(yours, torch.arange(6.0).reshape(2, 3))
    assert has_colour(picture, style.EMPTY)
    assert says in [text.get_text() for ax in picture.figure.axes for text in ax.texts]


def test_tokens_run_from_left_to_right():
    """Of tensors [T, channels], which code has with tokens first."""
    x, names = np.arange(12.0).reshape(6, 2), {"rows": "channel", "columns": "token"}
    for picture in (plots.beside(x, x, **names, across=True), plots.matrices({"x": x}, **names, across=True)):
        (first, *_) = picture.figure.axes
        assert (first.get_xlim(), first.get_ylim()) == ((-0.5, 5.5), (1.5, -0.5)) and first.get_xlabel() == "token"
    assert plots.beside(..., x, **names, across=True).png() != plots.beside(x, x, **names, across=True).png()
    assert plots.matrices({"x": x}, across=True).png() == plots.matrices({"x": x.T}).png()


def test_a_label_beside_long_numbers_is_not_cut_off():
    picture = plots.matrices({"a": [[-0.87, 1.0]], "b": [[0.5, 0.25]]}, signed=True, label="of its largest")
    assert_legible(picture)
