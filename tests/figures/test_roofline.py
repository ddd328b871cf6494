"""The picture of measured times against the floor: what is drawn is what was given, and no word lies over another."""

import pytest

from flakit.figures.roofline import speed
from flakit.numerics import recorded
from flakit.numerics.work import work
from tests.figures.words import assert_legible

CEILINGS = {"copy_tb_s": 4.0, "tflops": 800.0}
MAIN = {"op": "rwkv6", "form": "chunk", "B": 8, "T": 4096, "H": 32, "K": 64, "V": 64, "decay": "rwkv6-init",
        "dtype": "bfloat16", "M": None}  # fmt: skip
OURS = MAIN | {"who": "flakit", "forward_ms": 1.0, "both_ms": 4.0, "both_ms_20": 3.9, "both_ms_80": 4.4}
PEER = MAIN | {"who": "fla", "forward_ms": 2.0, "both_ms": 6.0}
DECODE = MAIN | {"T": 1, "form": "recurrent", "decode": True, "who": "flakit", "forward_ms": 0.02, "both_ms": None}


def lines(ax, **like):
    return [line for line in ax.get_lines() if all(getattr(line, f"get_{n}")() == x for n, x in like.items())]


def test_a_lane_has_the_floor_and_every_competitor():
    picture = speed([OURS, PEER, DECODE], **CEILINGS)
    lanes, roof = picture.figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["RWKV6 chunk B8 T4096", "RWKV6 decode B8"]
    (floor,) = lines(lanes, label="floor")
    expected = [work(OURS).floor_ms(4.0, 800.0), work(DECODE, "forward").floor_ms(4.0, 800.0)]
    assert floor.get_xdata().tolist() == pytest.approx(expected)
    ours, decode = lines(lanes, marker="o")
    (peer,) = lines(lanes, marker="D")
    assert [line.get_xdata()[0] for line in (ours, decode, peer)] == [4.0, 0.02, 6.0]
    assert [3.9, 4.4] in [list(line.get_xdata()) for line in lanes.get_lines()]  # 20% to 80%
    assert f"{4.0 / expected[0]:.3g}" in {text.get_text() for text in lanes.texts}
    assert f"RWKV6 chunk B8 T4096: flakit {4.0 / expected[0]:.3g}, fla {6.0 / expected[0]:.3g}" in picture.alt


def test_no_point_of_the_roofline_lies_above_the_floor():
    at_the_floor = OURS | {"both_ms": work(OURS).floor_ms(4.0, 800.0)}
    _, roof = speed([at_the_floor], **CEILINGS).figure.axes
    (point,) = lines(roof, marker="o")
    (x,), (y,) = point.get_xdata(), point.get_ydata()
    assert x == pytest.approx(work(OURS).intensity) and y == pytest.approx(4.0 * x)


def test_the_forward_alone_and_no_float32_under_the_roof():
    rows = [OURS, PEER, OURS | {"dtype": "float32", "forward_ms": 7.0, "both_ms": 30.0}]
    lanes, roof = speed(rows, what="forward", **CEILINGS).figure.axes
    assert [line.get_xdata()[0] for line in lines(lanes, marker="o")] == [1.0, 7.0]
    assert len(lines(roof, marker="o")) == 1


@pytest.mark.parametrize("width", [9.4, 5.9], ids=["wide", "narrow"])
def test_each_column_of_the_roofline_has_names_of_its_own_below_its_points(width):
    picture = speed(recorded.read("h200_speed").rows, width=width, **CEILINGS)
    _, roof = picture.figure.axes
    texts = [text for text in roof.texts if text.get_rotation() == 90]
    names = [name for text in texts for name in text.get_text().splitlines()]
    assert len(names) == len({*names})
    assert {*names} == {"RWKV6", "RWKV7", "GSA", "GSA K512", "RWKV6 decode", "RWKV7 decode", "GSA decode"}
    picture.png()
    points = [line.get_xydata()[0] for line in roof.get_lines() if len(line.get_xdata()) == 1]
    for text in texts:
        column = [point for point in points if point[0] == pytest.approx(text.get_position()[0], rel=0.02)]
        lowest = roof.transData.transform(column)[:, 1].min()
        assert column and text.get_window_extent().y1 < lowest, text.get_text()


def test_the_ends_of_the_quantiles_stand_out_and_the_legend_says_what_they_are():
    picture = speed([OURS | {"both_ms_20": 3.999, "both_ms_80": 4.001}], **CEILINGS)
    lanes, _ = picture.figure.axes
    (ends,) = (line for line in lanes.get_lines() if list(line.get_xdata()) == [3.999, 4.001])
    (ours,) = lines(lanes, marker="o")
    assert ends.get_marker() == "|" and ends.get_markersize() > ours.get_markersize()
    assert "20–80% of the calls" in lanes.get_legend_handles_labels()[1]
    assert "20–80% of the calls" not in speed([PEER], **CEILINGS).figure.axes[0].get_legend_handles_labels()[1]


@pytest.mark.parametrize("width", [9.4, 5.9], ids=["wide", "narrow"])
def test_the_recorded_table_is_legible(width):
    table = recorded.read("h200_speed")
    picture = speed([*table.rows, DECODE], title=table.label, width=width, **CEILINGS)
    assert picture.pixels[0] == round(80 * width)
    assert_legible(picture, least=8.5)
    assert picture.png().startswith(b"\x89PNG")
