"""Static pictures for notebooks, drawn once from arrays: matrices side by side, and curves.

matrices({"read": read, "key": key}, rows="token i", columns="token j", label="exponent", signed=True)
beside(my_state, state)
curves(t, {"product": a, "sum": b}, xlabel="t", ylabel="relative error", log="y")
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..language import Words
from . import style
from .canvas import Canvas
from .maps import Map, Maps, Scale, signed

WIDTH = 8.4
DPI = 80

WORDS = Words() | {
    "row": "row",
    "column": "column",
    "maps": "{names}: heat maps of {rows} against {columns}",
    "yours": "yours",
    "expected": "expected",
    "difference": "yours - expected",
    "before": "before",
    "nothing": "nothing so far",
    "no matrix": "a {type}, no matrix",
    "shape": "shape {got}\nexpected {expected}",
    "beside": "yours and the expected, side by side: heat maps of {rows} against {columns}",
    "before, beside": "before, yours and the expected, side by side: heat maps of {rows} against {columns}",
    "curves": "{title}: {names} over {xlabel}",
}


class Picture(Canvas):
    """A canvas that is drawn once; `alt` describes it for readers who cannot see it. height, width: inches."""

    def __init__(self, height: float, alt: str, *, width: float = WIDTH):
        super().__init__(width, height, dpi=DPI)
        self.alt = alt

    def __repr__(self) -> str:
        return self.alt


def matrices(
    panels: Mapping[str, Sequence],
    *,
    rows: str | None = None,
    columns: str | None = None,
    label: str = "",
    signed: bool = False,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    empty: Sequence | None = None,
    height: float = 2.9,
    across: bool = False,
) -> Picture:
    """Draw heat maps in a row, with one colour scale.

    panels: matrices [rows, columns] by title, as tensors or arrays. NaN and inf are hatched. Raises ValueError for none
    or for another number of dimensions.
    across: whether they are tensors [T, channels], whose tokens are to run from left to right, as columns.
    signed: whether colours are symmetric around 0; limits: ends of the scale, by default those of the finite values.
    log: whether the scale is logarithmic, of absolute values. empty: cells without a value, boolean, for all
    matrices."""
    if not panels:
        raise ValueError("panels: expected at least one matrix, got none")
    arrays = {name: np.asarray(x, dtype=np.float64) for name, x in panels.items()}
    for name, x in arrays.items():
        if x.ndim != 2:
            raise ValueError(f"panels[{name!r}]: expected a matrix, got shape {list(x.shape)}")
    if across:
        arrays = {name: x.T for name, x in arrays.items()}
    hidden = np.zeros(1, bool) if empty is None else np.asarray(empty)
    seen = np.concatenate([x[np.isfinite(x) & ~hidden] for x in arrays.values()])
    if log:
        seen = np.log10(np.abs(seen[seen != 0]))
    low, high = limits or _limits(seen, signed)
    scale = Scale(style.SIGNED if signed else style.MAGNITUDE, low, high, log=log)

    rows, columns = rows or WORDS["row"], columns or WORDS["column"]
    picture = Picture(height, WORDS.say("maps", names=", ".join(arrays), rows=rows, columns=columns))
    bad = any((~np.isfinite(x) & ~hidden).any() for x in arrays.values())
    with style.context():
        maps = _row(
            picture, {name: Map(name, scale, empty=f"no {name}") for name in arrays}, rows, columns, bad=bad,
            right=0.95 if label else 0.75,
        )  # fmt: skip
        maps.update(arrays | {f"no {name}": np.broadcast_to(hidden, x.shape) for name, x in arrays.items()})
        first, *others = arrays
        for name in others:
            maps[name].ax.tick_params(labelleft=len(arrays[name]) != len(arrays[first]))
        maps.bar(first, label)
    return picture


def _row(picture: Picture, maps: Mapping[str, Map], rows: str, columns: str, *, bad: bool, right: float = 0.75) -> Maps:
    """Return maps that fill the width of a picture. bad: whether to add a legend of hatched cells. right: inches for
    the colour bar."""
    left, gap, top, bottom = 0.63, 0.2, 0.55 if bad else 0.33, 0.5
    width, height = picture.figure.get_size_inches()
    across = (width - left - right + gap) / max(len(maps), 2) - gap
    if bad:
        picture.legend(*style.non_finite_handles(), loc="upper right")
    size = across, height - top - bottom
    return Maps(picture, maps, left=left, top=top, size=size, gap=gap, rows=rows, columns=columns)


def _limits(values: np.ndarray, signed: bool) -> tuple[float, float]:
    if not values.size:
        return -1.0, 1.0
    low, high = values.min(), values.max()
    if signed:
        low, high = -np.abs(values).max(), np.abs(values).max()
    return (low, high) if low < high else (low - 1.0, high + 1.0)


def beside(
    yours,
    expected,
    *,
    rows: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    height: float = 2.6,
    before=None,
    across: bool = False,
) -> Picture:
    """Draw a learner's matrix, the expected one and their difference in one colour scale; non-finite cells are hatched.

    yours: a matrix like `expected` [rows, columns]; for anything else, such as the ... of an empty exercise, the
    picture shows an empty frame and says what is missing. rows, columns: a label, or the name of each. Raises
    ValueError if `expected` is no finite matrix.
    across: whether they are tensors [T, channels], whose tokens are to run from left to right, as columns.
    before: a matrix like `expected` that the learner began with, drawn first; the difference is then left out."""
    expected = np.asarray(expected, dtype=np.float64)
    if expected.ndim != 2 or not np.isfinite(expected).all():
        raise ValueError(f"expected: expected a matrix of finite numbers, got shape {list(expected.shape)}")
    rows, columns = rows or WORDS["row"], columns or WORDS["column"]
    got, missing = None, WORDS["nothing"]
    if yours is not None and yours is not ...:
        try:
            got = np.asarray(yours, dtype=np.float64)
        except (TypeError, ValueError):
            missing = WORDS.say("no matrix", type=type(yours).__name__)
        if got is not None and got.shape != expected.shape:
            got, missing = None, WORDS.say("shape", got=list(got.shape), expected=list(expected.shape))
    before = None if before is None else np.asarray(before, dtype=np.float64)
    if across:
        got, expected, before = (x if x is None else x.T for x in (got, expected, before))

    shown = {"yours": got, "expected": expected, "difference": None if got is None else got - expected}
    if before is not None:
        shown = {"before": before, "yours": got, "expected": expected}
    bad = before is not None and not np.isfinite(shown["before"]).all()
    largest = float(np.abs(expected).max()) or 1.0
    along = [x if isinstance(x, str) else ", ".join(x) for x in (rows, columns)]
    alt = WORDS["beside" if before is None else "before, beside"]
    picture = Picture(height, alt.format(rows=along[0], columns=along[1]))
    names = [x if isinstance(x, str) else "" for x in (rows, columns)]
    with style.context():
        declared = {name: Map(WORDS[name], signed(largest), empty=f"no {name}") for name in shown}
        maps = _row(picture, declared, *names, bad=bad)
        maps.update(
            {name: expected if x is None else x for name, x in shown.items()}
            | {f"no {name}": np.full(expected.shape, x is None) for name, x in shown.items()}
        )
        for name, heat in maps.items():
            for axis, each in ((heat.ax.xaxis, columns), (heat.ax.yaxis, rows)):
                if not isinstance(each, str):
                    axis.set_ticks(range(len(each)), each)
            if shown[name] is None and name == "yours":
                heat.ax.text(0.5, 0.5, missing, transform=heat.ax.transAxes, ha="center", va="center")
        maps.bar("expected")
    return picture


def curves(
    x: Sequence | Mapping[str, Sequence],
    lines: Mapping[str, Sequence],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log: str = "",
    laws: Mapping[str, Sequence] | None = None,
    levels: Mapping[str, float] | None = None,
    height: float = 3.0,
    markers: bool = False,
    ylim: tuple[float, float] | None = None,
) -> Picture:
    """Draw lines over x that differ in colour and dash. NaN and inf leave gaps.

    x: shared by all lines and laws, or one for each by name. laws: predictions, dashed in black over the lines.
    log: which axes are logarithmic, "x", "y" or "xy". levels: horizontal lines by name. markers: dots at every value.
    Raises ValueError for a line of another length than x, and for more than seven lines."""
    both = {**lines, **(laws or {})}
    along = x if isinstance(x, Mapping) else dict.fromkeys(both, x)
    for name, y in both.items():
        if len(y) != len(along[name]):
            raise ValueError(f"lines[{name!r}]: expected {len(along[name])} values like x, got {len(y)}")
    if len(lines) > len(style.LINES):
        raise ValueError(f"lines: expected at most {len(style.LINES)}, got {len(lines)}")
    picture = Picture(height, WORDS.say("curves", title=title or ylabel, names=", ".join(both), xlabel=xlabel))
    with style.context():
        ax = picture.figure.add_axes((0.095, 0.165, 0.6, 0.835 - 0.07 * bool(title) - 0.02))
        for (name, y), look in zip(lines.items(), style.LINES, strict=False):
            ax.plot(along[name], _finite(y), **look, label=name, marker="o" if markers else None, markersize=4.5)
        for n, (name, y) in enumerate((laws or {}).items()):
            ax.plot(
                along[name], _finite(y), **style.LAW | {"linestyle": ((0, (4, 2)), (0, (1, 1.5)))[n % 2]}, label=name
            )
        for name, at in (levels or {}).items():
            ax.axhline(at, color=style.GREY, linewidth=1)
            ax.annotate(
                name, (0, at), xycoords=("axes fraction", "data"), xytext=(6, 2), textcoords="offset points",
                va="bottom", fontsize=8.5, color=style.GREY,
            )  # fmt: skip
        ax.set_title(title)
        for name, axis, words in (("x", ax.xaxis, xlabel), ("y", ax.yaxis, ylabel)):
            axis.set_label_text(style.logarithmic(words) if name in log else words)
            ax.set(**{f"{name}scale": "log" if name in log else "linear"})
        if ylim is not None:
            ax.set_ylim(ylim)
        picture.figure.legend(loc="upper left", bbox_to_anchor=(0.7, 0.98), handlelength=3)
    return picture


def _finite(y: Sequence) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.where(np.isfinite(y), y, np.nan)
