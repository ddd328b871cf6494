"""Steps of kernel tuning: the expected and the measured time of each.

experiments(recorded.read("h200_steps").select(op="rwkv6"))
"""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullLocator

from ..language import number
from ..numerics.operators import operator
from . import name_rows, style
from .plots import WIDTH, Picture

_LANE, _LOW, _HIGH = 0.24, 0.21, 3.6
_KEPT = {"color": style.BLUE, "marker": "o", "markersize": 7}
_GIVEN_UP = {"color": style.BROKEN, "marker": "X", "markersize": 8}
_EXPECTED = {"color": "white", "marker": "D", "markersize": 9, "markeredgecolor": style.BLACK, "zorder": 3}


def experiments(rows: Sequence[Mapping], *, title: str = "", width: float = WIDTH) -> Picture:
    """Draw a line per step: a kernel's time as a multiple of the time before, expected and measured.

    rows: of the recording h200_steps, at least one, else ValueError is raised. An expected time is a diamond; where a
    step was expected to be faster by an unknown amount, the faster half of its line is shaded."""
    if not rows:
        raise ValueError("rows: expected at least one step, got none")
    several = len({row["op"] for row in rows}) > 1
    above, below, left, right = 0.78, 0.5, (4.1 if several else 3.3), 1.4
    height = above + _LANE * len(rows) + below
    names = [f"{operator(row['op']).label} " * several + f"{row['part']}: {row['name']}" for row in rows]
    outcomes = "; ".join(f"{name}: {_outcome(row)}" for name, row in zip(names, rows, strict=True))
    picture = Picture(height, f"{title or 'Steps'}, how many times as long as before: {outcomes}", width=width)
    with style.context():
        ax = picture.axes(left, above, width - left - right, _LANE * len(rows))
        ax.axvline(1, color=style.GREY, linewidth=1, zorder=1)
        for y, row in enumerate(rows):
            low, high = times(row)
            look = _KEPT if row["kept"] else _GIVEN_UP
            if row["expected_ms"] is not None:
                ax.plot(row["expected_ms"] / row["before_ms"], y, linestyle="", **_EXPECTED)
            elif row["expected"] is not None:
                ax.barh(y, 1 - _LOW, left=_LOW, height=0.8, color=style.FINITE, zorder=0)
            if low != high:
                ax.plot([low, high], [y, y], color=look["color"], linewidth=2, zorder=4)
            ax.plot([low, high], [y, y], linestyle="", zorder=5, **look)
            place = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
            ax.text(1.02, y, _outcome(row), **place)
        ax.set(xscale="log", xlim=(_LOW, _HIGH), ylim=(len(rows) - 0.4, -0.6))
        name_rows(ax, names)
        ax.set_xticks([0.25, 0.5, 0.7, 1, 1.5, 2, 3], ["0.25", "0.5", "0.7", "1", "1.5", "2", "3"])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("times as long as before (log scale)")
        ax.spines["left"].set_visible(False)
        picture.text(0.1, 0.08, title, va="top", fontsize=10)
        handles = [
            ax.plot([], [], linestyle="", label="expected time", **_EXPECTED)[0],
            style.swatch(style.FINITE, "expected to be faster"),
            ax.plot([], [], linestyle="", label="measured, kept", **_KEPT)[0],
            ax.plot([], [], linestyle="", label="measured, given up", **_GIVEN_UP)[0],
        ]
        picture.legend(*handles, loc="upper left", at=(0.02, 0.32), borderaxespad=0.5, columnspacing=1.6)
    return picture


def times(row: Mapping) -> tuple[float, float]:
    """Return the lowest and the highest time measured after a tuning step, as multiples of the time before it."""
    if row["times"] is not None:
        low, high = row["times"]
        return low, high
    after = row["after_ms"] if isinstance(row["after_ms"], list) else [row["after_ms"]]
    return min(after) / row["before_ms"], max(after) / row["before_ms"]


def _outcome(row: Mapping) -> str:
    if row["times"] is not None:
        return f"× {_range(row['times'])}"
    after = row["after_ms"] if isinstance(row["after_ms"], list) else [row["after_ms"]]
    return f"{row['before_ms']:.2f} → {_range(after)} ms"


def _range(values: Sequence[float]) -> str:
    return " to ".join(number(x) if len(values) > 1 else f"{x:.2f}" for x in values)
