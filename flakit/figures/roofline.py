"""Measured times against the roofline's floor: per case in milliseconds, and as operations per second.

speed(recorded.read("h200_speed").rows, copy_tb_s=4.3, tflops=790)
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from ..numerics.operators import operator
from ..numerics.work import WHAT, Work, in_short, work
from . import name_rows, style
from .plots import Picture

_OURS = "flakit"
_LOOKS = (
    {"color": style.BLUE, "marker": "o"},
    {"color": style.INDIGO, "marker": "D"},
    {"color": style.GREEN, "marker": "s"},
    {"color": style.PURPLE, "marker": "^"},
    {"color": style.OLIVE, "marker": "v"},
)
"""Colour and marker of each implementation; flakit's is the first."""

_ENDS = {"marker": "|", "markersize": 10, "markeredgewidth": 1, "linewidth": 1.6, "zorder": 2}
"""The line from the 20% to the 80% quantile. Its ends are taller than the markers, which are mostly wider than it."""

_LANE, _WIDE = 0.19, 8.0  # height of a lane, smallest width of the wide layout; inches


def speed(
    rows: Sequence[Mapping],
    *,
    copy_tb_s: float,
    tflops: float,
    what: str = "both",
    title: str = "",
    width: float = 9.4,
    roofline: bool = True,
) -> Picture:
    """Draw a lane per case, with its floor and the time of each implementation, and below it, with roofline, the
    roofline. The floor is the shortest time in which the device can move the bytes and do the operations.

    rows: of `flakit bench --json`, or of a recording. A decode step has a forward only. Raises ValueError without a
    time or for too many implementations.
    copy_tb_s, tflops: the device's peaks, as in the recording's meta: 10^12 bytes per second of a copy, read plus
    written, and 10^12 operations per second.
    what: "both", a forward with all gradients, or "forward". title: e.g. where the rows were recorded."""
    lanes: dict[str, dict[str, Mapping]] = {}
    for row in rows:
        if row.get(f"{_timed(row, what)}_ms") is not None:
            lanes.setdefault(in_short(row), {})[row["who"]] = row
    if not lanes:
        raise ValueError(f"rows: expected at least one with {what}_ms, got none of {len(rows)}")
    names = sorted({who for lane in lanes.values() for who in lane}, key=lambda who: (who != _OURS, who))
    if len(names) > len(_LOOKS):
        raise ValueError(f"rows: expected at most {len(_LOOKS)} who, got {', '.join(names)}")
    looks = dict(zip(names if _OURS in names else ["", *names], _LOOKS, strict=False))
    label = {"both": "forward and all gradients", "forward": "forward"}[what]

    wide = width >= _WIDE
    beside = 2.72 if wide else 2.36  # inches for the labels of the lanes
    above, between, below = 0.62 if wide else 0.98, 0.86 if roofline else 0.0, 0.5
    tall, roof = _LANE * len(lanes), (2.6 if wide else 2.4) if roofline else 0.0
    height = above + tall + between + roof + below
    times = [f"{case}: {_ratios(lane, what, copy_tb_s, tflops)}" for case, lane in lanes.items()]
    picture = Picture(height, f"{title or label}: times as multiples of the floor. {'; '.join(times)}", width=width)
    with style.context():
        picture.text(0.1, 0.08, title or label, va="top", fontsize=10)
        lower = picture.axes(beside, above, width - beside - 0.72, tall)
        _lanes(lower, lanes, looks, what, copy_tb_s, tflops)
        decodes = any(row.get("decode") for lane in lanes.values() for row in lane.values())
        lower.set_xlabel(f"ms (log scale): {label}{'; of a decode the forward' if decodes else ''}")
        picture.text(width - 0.08, above - 0.05, "× floor", ha="right", va="bottom", fontsize=8.5)
        if roofline:
            under = picture.axes(0.62, above + tall + between, width - 0.8, roof)
            _roofline(under, lanes, looks, what, copy_tb_s, tflops)
        handles, _ = lower.get_legend_handles_labels()
        look = {"borderaxespad": 0, "columnspacing": 1.4, "handletextpad": 0.5}
        picture.legend(*handles, loc="upper left", at=(0.02, 0.26), ncols=len(handles) if wide else 2, **look)
    return picture


def _timed(row: Mapping, what: str) -> str:
    """Return which time of a row to show: `what`, or for a decode step "forward". Raise ValueError if unknown."""
    if what not in WHAT:
        raise ValueError(f"what: expected one of {', '.join(WHAT)}, got {what!r}")
    return "forward" if row.get("decode") else what


def _work(row: Mapping, what: str) -> Work:
    return work(row, _timed(row, what))


def _ratios(lane: Mapping[str, Mapping], what: str, *ceilings: float) -> str:
    row = next(iter(lane.values()))
    floor = _work(row, what).floor_ms(*ceilings)
    return ", ".join(f"{who} {row[f'{_timed(row, what)}_ms'] / floor:.3g}" for who, row in lane.items())


def _lanes(ax: Axes, lanes: Mapping, looks: Mapping, what: str, *ceilings: float) -> None:
    floors = [_work(next(iter(lane.values())), what).floor_ms(*ceilings) for lane in lanes.values()]
    ax.plot(floors, range(len(lanes)), "|", color=style.BLACK, markersize=11, markeredgewidth=2, label="floor")
    labelled, beyond = set(), 1 + 0.64 / (ax.get_position().width * ax.figure.get_figwidth())  # 0.64 inches
    spread = False
    for y, (lane, floor) in enumerate(zip(lanes.values(), floors, strict=True)):
        shown = {who: row[f"{_timed(row, what)}_ms"] for who, row in lane.items()}
        ax.plot([floor, max(shown.values())], [y, y], color=style.EMPTY, linewidth=0.8, zorder=0)
        for who, ms in shown.items():
            ends = [lane[who].get(f"{_timed(lane[who], what)}_ms_{part}") for part in (20, 80)]
            if None not in ends:
                ax.plot(ends, [y, y], color=looks[who]["color"], **_ENDS)
                spread = True
            ax.plot(
                ms, y, **looks[who], markersize=5.5, linestyle="", zorder=4 if who == _OURS else 3,
                label=None if who in labelled else who,
            )  # fmt: skip
            labelled.add(who)
        ours = shown.get(_OURS, min(shown.values()))
        place = {"transform": ax.get_yaxis_transform(), "va": "center", "ha": "right", "fontsize": 8.5}
        ax.text(beyond, y, f"{ours / floor:.3g}", **place)
    if spread:
        ax.plot([], [], color=style.GREY, **_ENDS, label="20–80% of the calls")
    ax.set(xscale="log", ylim=(len(lanes) - 0.4, -0.6))
    name_rows(ax, lanes)
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter("{x:g}")
    ax.spines["left"].set_visible(False)


def _roofline(ax: Axes, lanes: Mapping, looks: Mapping, what: str, copy_tb_s: float, tflops: float) -> None:
    """Draw operations per second over operations per byte, both of the floor's work: no point lies above the roof.

    The roof is that of 16-bit products, so rows in float32 are left out."""
    shown = [row for lane in lanes.values() for row in lane.values() if row["dtype"] != "float32"]
    points = [(_work(row, what), row) for row in shown]
    ridge, names = tflops / copy_tb_s, {}
    low, high = (end([each.intensity for each, _ in points], default=ridge) for end in (min, max))
    across = np.array([low / 2, ridge, 2 * max(ridge, high)])
    ax.plot(across, np.minimum(across * copy_tb_s, tflops), color=style.BLACK, linewidth=1.6)
    slowest = low * copy_tb_s
    for each, row in points:
        rate = 1e-9 * each.operations / row[f"{_timed(row, what)}_ms"]
        slowest = min(slowest, rate)
        ax.plot(each.intensity, rate, **looks[row["who"]], markersize=5.5, linestyle="", alpha=0.8)
        column = names.setdefault(round(20 * np.log10(each.intensity)), (each.intensity, {}))
        column[1][_which(row)] = None
    for at, labels in names.values():
        place = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8.5, "color": style.GREY}
        ax.text(at, 0.02, "\n".join(labels), transform=ax.get_xaxis_transform(), **place)
    top = 3 * tflops
    ax.set_ylim(top * (slowest / top) ** 1.65, top)  # below the slowest point there is room for names
    ax.set(xscale="log", yscale="log", xlabel="operations per byte that must move (log scale)")
    ax.set_ylabel("10¹² operations a second (log scale)")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_yticks(10.0 ** np.arange(np.floor(np.log10(slowest)), np.log10(top)))  # none beside the names
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    words = f"the roof: {copy_tb_s:.3g} · 10¹² bytes and\n{tflops:.3g} · 10¹² operations a second"
    ax.text(0.02, 0.97, words, transform=ax.transAxes, va="top", fontsize=8.5)


def _which(row: Mapping) -> str:
    """Return what tells a row's intensity from others', in the words of `in_short`."""
    parts = [operator(row["op"]).label] + ["decode"] * bool(row.get("decode")) + [f"K{row['K']}"] * (row["K"] > 128)
    return " ".join(parts)
