"""Still pictures for notebooks: matrices side by side, curves, ranges. Arrays in, a picture out.

matrices({"read": read, "key": key}, rows="token i", columns="token j", label="exponent", signed=True)
beside(my_state, state)
curves(t, {"product": a, "sum": b}, xlabel="t", ylabel="relative error", log="y")
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..language import Words
from . import style
from .canvas import Canvas
from .heatmap import HeatMap

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
    "ranges": "{title}: ranges of {names}",
}


class Picture(Canvas):
    """A canvas that is drawn once; `alt` says what it shows where it cannot be seen."""

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
) -> Picture:
    """Heat maps in a row under their names, one colour scale for all.

    panels: matrices [rows, columns], as tensors or arrays. NaN and inf are hatched.
    signed: colours around 0; limits: ends of the scale, default those of the finite values.
    log: show log10 of the sizes. empty: where a matrix holds nothing, a boolean array for all of them.
    """
    if not panels:
        raise ValueError("panels: expected at least one matrix, got none")
    arrays = {name: np.asarray(x, dtype=np.float64) for name, x in panels.items()}
    for name, x in arrays.items():
        if x.ndim != 2:
            raise ValueError(f"panels[{name!r}]: expected a matrix, got shape {list(x.shape)}")
    if log:
        with np.errstate(divide="ignore"):
            logs = {name: np.log10(np.abs(x)) for name, x in arrays.items()}
        lowest = min((x[np.isfinite(x)].min() for x in logs.values() if np.isfinite(x).any()), default=-1.0)
        arrays = {name: np.where(x == -np.inf, lowest, x) for name, x in logs.items()}
    hidden = np.zeros(1, bool) if empty is None else np.asarray(empty)
    if limits is None:
        limits = _limits(np.concatenate([x[np.isfinite(x) & ~hidden] for x in arrays.values()]), signed)

    rows, columns = rows or WORDS["row"], columns or WORDS["column"]
    picture = Picture(height, WORDS["maps"].format(names=", ".join(arrays), rows=rows, columns=columns))
    bad = any((~np.isfinite(x) & ~hidden).any() for x in arrays.values())
    with style.context():
        grid = picture.figure.add_gridspec(
            1, len(arrays) + 1, width_ratios=[1] * len(arrays) + [0.05],
            left=0.075, right=0.92 if len(arrays) > 1 else 0.55, bottom=0.17, top=0.8 if bad else 0.88, wspace=0.14,
        )  # fmt: skip
        for n, (name, x) in enumerate(arrays.items()):
            ax = picture.figure.add_subplot(grid[n])
            heatmap = HeatMap(
                picture, ax, cmap=style.SIGNED if signed else style.MAGNITUDE, vmin=limits[0], vmax=limits[1]
            )
            heatmap.update(x, empty=None if empty is None else np.broadcast_to(hidden, x.shape))
            ax.set(title=name, xlabel=columns)
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
            if n == 0:
                ax.set_ylabel(rows)
            elif len(x) == len(next(iter(arrays.values()))):
                ax.tick_params(labelleft=False)
        bar = heatmap.colorbar(picture.figure.add_subplot(grid[-1]), label)
        if log:
            bar.locator = MaxNLocator(5, integer=True)
            bar.formatter = lambda value, _: f"$10^{{{value:.0f}}}$"
            bar.update_ticks()
        if bad:
            picture.figure.legend(handles=style.non_finite_handles(), loc="upper right", ncols=2, borderaxespad=0.2)
    return picture


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
) -> Picture:
    """A learner's matrix, the expected one and what is between them, in one colour scale; non-finite cells hatched.

    rows, columns: what is counted along them, or the name of each. before: a matrix like `expected` that is shown
    first, as what the learner began with; then what is between yours and the expected is left out.
    yours: a matrix like `expected` [rows, columns]; of anything else, such as the ... of an empty exercise, the picture
    shows an empty frame and says what is missing.
    """
    expected = np.asarray(expected, dtype=np.float64)
    if expected.ndim != 2 or not np.isfinite(expected).all():
        raise ValueError(f"expected: expected a matrix of finite numbers, got shape {list(expected.shape)}")
    rows, columns = rows or WORDS["row"], columns or WORDS["column"]
    got, missing = None, WORDS["nothing"]
    if yours is not None and yours is not ...:
        try:
            got = np.asarray(yours, dtype=np.float64)
        except (TypeError, ValueError):
            missing = WORDS["no matrix"].format(type=type(yours).__name__)
        if got is not None and got.shape != expected.shape:
            got, missing = None, WORDS["shape"].format(got=list(got.shape), expected=list(expected.shape))

    shown = {"yours": got, "expected": expected, "difference": None if got is None else got - expected}
    if before is not None:
        shown = {"before": np.asarray(before, dtype=np.float64), "yours": got, "expected": expected}
    bad = before is not None and not np.isfinite(shown["before"]).all()
    largest = float(np.abs(expected).max()) or 1.0
    along = [x if isinstance(x, str) else ", ".join(x) for x in (rows, columns)]
    alt = WORDS["beside" if before is None else "before, beside"]
    picture = Picture(height, alt.format(rows=along[0], columns=along[1]))
    with style.context():
        grid = picture.figure.add_gridspec(
            1,
            4,
            width_ratios=[1, 1, 1, 0.05],
            left=0.075,
            right=0.92,
            bottom=0.2,
            top=0.8 if bad else 0.87,
            wspace=0.14,
        )
        for n, (name, x) in enumerate(shown.items()):
            ax = picture.figure.add_subplot(grid[n])
            heat = HeatMap(picture, ax, cmap=style.SIGNED, vmin=-largest, vmax=largest)
            heat.update(expected if x is None else x, empty=None if x is not None else np.ones(expected.shape, bool))
            ax.set_title(WORDS[name])
            for axis, names in ((ax.xaxis, columns), (ax.yaxis, rows)):
                if isinstance(names, str):
                    axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
                    axis.set_label_text(names if axis is ax.xaxis or n == 0 else "")
                else:
                    axis.set_ticks(range(len(names)), names)
            ax.tick_params(labelleft=n == 0)  # the same rows
            if x is None:
                text = missing if name == "yours" else ""
                ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center")
        heat.colorbar(picture.figure.add_subplot(grid[-1]), "")
        if bad:
            picture.figure.legend(handles=style.non_finite_handles(), loc="upper right", ncols=2, borderaxespad=0.2)
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
    """Lines over x, told apart by colour and dash. NaN and inf leave gaps.

    x: the same for all lines and laws, or one for each by name. laws: predictions, drawn dashed in black on the lines.
    log: which axes are logarithmic, "x", "y" or "xy". levels: named horizontal lines. markers: dots at every value.
    """
    both = {**lines, **(laws or {})}
    along = x if isinstance(x, Mapping) else dict.fromkeys(both, x)
    for name, y in both.items():
        if len(y) != len(along[name]):
            raise ValueError(f"lines[{name!r}]: expected {len(along[name])} values like x, got {len(y)}")
    if len(lines) > len(style.LINES):
        raise ValueError(f"lines: expected at most {len(style.LINES)}, got {len(lines)}")
    picture = Picture(height, WORDS["curves"].format(title=title or ylabel, names=", ".join(both), xlabel=xlabel))
    with style.context():
        ax = picture.figure.add_axes((0.095, 0.165, 0.6, 0.835 - 0.07 * bool(title) - 0.02))
        ax.spines[["top", "right"]].set_visible(False)
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
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if "x" in log:
            ax.set_xscale("log")
        if "y" in log:
            ax.set_yscale("log")
        if ylim is not None:
            ax.set_ylim(ylim)
        picture.figure.legend(loc="upper left", bbox_to_anchor=(0.7, 0.98), handlelength=3)
    return picture


def _finite(y: Sequence) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.where(np.isfinite(y), y, np.nan)


def ranges(
    spans: Mapping[str, tuple[float, float, float]],
    *,
    xlabel: str,
    limits: Mapping[str, float] | None = None,
    title: str = "",
) -> Picture:
    """A bar from low to high with a tick at the middle for each name (low, middle, high), on a logarithmic axis.

    limits: named vertical lines, such as the decay at which something breaks.
    """
    above = 1.08 if limits else 0.3
    alt = WORDS["ranges"].format(title=title or xlabel, names=", ".join(spans))
    picture = Picture(0.33 * len(spans) + 0.67 + above, alt)
    height = picture.figure.get_figheight()
    with style.context():
        ax = picture.figure.add_axes((0.17, 0.52 / height, 0.8, 1 - (0.52 + above) / height))
        ax.spines[["top", "right", "left"]].set_visible(False)
        for row, (low, middle, high) in enumerate(spans.values()):
            ax.barh(row, high - low, left=low, height=0.5, color=style.SKY, zorder=2)
            ax.plot([middle], [row], "|", color=style.BLACK, markersize=13, markeredgewidth=2, zorder=3)
        ax.set_yticks(range(len(spans)), spans)
        ax.tick_params(axis="y", length=0)
        ax.set(xscale="log", ylim=(len(spans) - 0.4, -0.6), xlabel=xlabel)
        for (name, at), look in zip((limits or {}).items(), style.LINES[1:], strict=False):
            ax.axvline(at, **look, label=f"{name}: {at:.4g}", zorder=1)
        if limits:
            picture.figure.legend(loc="upper left", bbox_to_anchor=(0.16, 1 - 0.3 / height), ncols=2, handlelength=3)
        picture.figure.text(0.012, 1 - 0.06 / height, title, va="top", fontsize=10)
    return picture
