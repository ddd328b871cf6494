"""Pictures of audits: each probe's worst error over its budget, the wrong elements of a tensor, the errors over time,
and a matrix of faults and the probes that detect them. No meaning lies in colour alone: a failure is a cross, a
non-finite value is hatched."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch, Rectangle

from ..language import Words
from . import style
from .canvas import Canvas
from .maps import Map, Maps, powers, signed
from .marks import name_rows
from .plots import Picture

WORDS = Words() | {
    "got": "as computed",
    "true": "as it is",
    "off": "error / RMS",
    "wrong": "wrong",
    "negative": "negative",
    "positive": "positive",
}

PASS, FAIL, UNSUPPORTED, LEFT_OUT = "pass", "fail", "not supported", "left out"
_LOW, _HIGH = 1e-4, 1e4


def shares(verdicts: Mapping[str, tuple[str, float]]) -> Picture:
    """Draw a lane per probe with its worst error as a multiple of the budget. verdicts: (verdict, multiple) by
    probe."""
    failed = sum(verdict == FAIL for verdict, _ in verdicts.values())
    alt = f"{len(verdicts)} probes, {failed} of them failed: the worst figure of each beside what is allowed."
    height = 0.9 + 0.21 * len(verdicts)
    picture = Picture(height, alt)
    with style.context():
        ax = picture.figure.add_axes((0.19, 0.55 / height, 0.66, 1 - 0.9 / height))
        ax.set(xscale="log", xlim=(_LOW / 2, _HIGH * 8), ylim=(len(verdicts) - 0.5, -0.5))
        ax.set_xlabel("worst figure / what rounding allows")
        name_rows(ax, verdicts)
        ax.axvline(1.0, **style.LAW)
        for y, (verdict, share) in enumerate(verdicts.values()):
            ax.axhline(y, color=style.EMPTY, linewidth=0.6, zorder=0)
            words, colour = _WORDS[verdict]
            beside = {"transform": ax.get_yaxis_transform(), "va": "center_baseline", "fontsize": 8.5}
            ax.text(1.02, y, words, color=colour, **beside)
            if verdict in (UNSUPPORTED, LEFT_OUT):
                continue
            if math.isinf(share):
                ax.add_patch(Rectangle((_HIGH * 1.5, y - 0.32), _HIGH * 5, 0.64, linewidth=0, **style.NAN))
                continue
            at = min(max(share, _LOW), _HIGH)
            ax.plot([at], [y], "x" if verdict == FAIL else "o", color=colour, ms=6.5 if verdict == FAIL else 5, mew=2)
    return picture


_WORDS = {
    PASS: ("✓ pass", style.GREEN),
    FAIL: ("✗ fail", style.BROKEN),
    UNSUPPORTED: ("not supported", style.GREY),
    LEFT_OUT: ("left out", style.GREY),
}


class ElementsFigure:
    """One matrix of a tensor below a legend: computed values, true values and errors, the wrong elements hatched; or
    only a message. `update` redraws it in place."""

    HEIGHT = 2.95

    def __init__(self, width: float = 9.4):
        self.canvas = Canvas(width, self.HEIGHT)
        gap = 0.2
        across = (width - 0.62 - 2 * gap - 1.0) / 3
        maps = {
            "got": Map(WORDS["got"], signed(), "got"),
            "true": Map(WORDS["true"], signed(), "true"),
            "off": Map(WORDS["off"], powers(-8, 0), "off", empty="none", lost=("wrong", WORDS["wrong"]), hatched=True),
        }
        with style.context():
            self.maps = Maps(self.canvas, maps, left=0.62, top=0.76, size=(across, 1.68), gap=gap)
            self._bar = self.maps.bar("off")
            self._title = self.canvas.text(0.1, 0.05, va="top", fontweight="bold")
            signs = (style.swatch(getattr(style, name.upper()), WORDS[name]) for name in ("negative", "positive"))
            wrong = Patch(linewidth=0, label=WORDS["wrong"], **style.HATCHED)
            look = {"loc": "upper left", "columnspacing": 1.4, "borderaxespad": 0, "borderpad": 0.3}
            self._key = self.canvas.legend(*signs, *style.non_finite_handles(), wrong, at=(0.05, 0.2), **look)
            self._words = self.canvas.figure.text(0.5, 0.5, "", ha="center", va="center", color=style.GREY)
        self._parts = [*(heat.ax for heat in self.maps.values()), self._bar, self._key]

    def update(self, title: str, shown: Mapping[str, np.ndarray] | None, **labels: str) -> None:
        """Redraw. shown: matrices got, true, off (error / RMS) and wrong (boolean), [rows, columns], or None for the
        message.
        labels: rows and columns, the axes' labels, or words, the message."""
        self._title.set_text(title)
        self._words.set_text("" if shown is not None else labels["words"])
        for part in self._parts:
            part.set_visible(shown is not None)
        if shown is not None:
            largest = np.abs(shown["true"][np.isfinite(shown["true"])]).max(initial=0.0) or 1.0
            none = np.zeros(shown["true"].shape, bool)
            share = {name: shown[name] / largest for name in ("got", "true")}
            for n, heat in enumerate(self.maps.values()):
                heat.ax.set(xlabel=labels["columns"], ylabel=labels["rows"] if n == 0 else "")
            self.maps.update({**shown, **share, "none": none})
        self.canvas.stale()


def along_time(name: str, errors: Sequence[float], allowed: float) -> Picture:
    """Draw the error of each token over time. errors: [T], relative to the tensor's RMS; inf, which is hatched, where a
    value is not finite. allowed: the budget, a dashed line."""
    errors = np.asarray(errors, dtype=np.float64)
    bad = ~np.isfinite(errors)
    alt = f"Errors of {name} over {len(errors)} tokens; {int(bad.sum())} of them are not finite."
    picture = Picture(2.1, alt)
    shown = np.where(bad | (errors == 0), np.nan, errors)
    with style.context():
        ax = picture.figure.add_axes((0.1, 0.24, 0.86, 0.62))
        ax.spines[:].set_visible(True)
        ax.set(yscale="log", xlim=(-0.7, len(errors) - 0.3), xlabel="token", title=f"{name}: error / RMS")
        finite = shown[np.isfinite(shown)]
        low, high = (finite.min(), finite.max()) if len(finite) else (allowed, 1.0)
        ax.set_ylim(min(low, allowed) / 5, max(high, allowed, 1e-8) * 8)
        ax.plot(range(len(errors)), shown, ".-", color=style.BLUE, linewidth=1)
        ax.axhline(allowed, **style.LAW)
        for t in np.flatnonzero(bad):
            ax.add_patch(
                Rectangle((t - 0.5, 0), 1, 1, transform=ax.get_xaxis_transform(), linewidth=0, zorder=0, **style.NAN)
            )
    return picture


def matrix(verdicts: Mapping[str, Mapping[str, str]]) -> Picture:
    """Draw a row per fault and a column per probe: a cross where the probe fails, a dot where it passes.

    verdicts: by fault, then by probe. If the last faults pass every probe, a line separates them from the others."""
    probes = list(next(iter(verdicts.values())))
    missed = sum(FAIL not in row.values() for row in verdicts.values())
    alt = f"{len(verdicts)} kernels and {len(probes)} probes: {len(verdicts) - missed} of them fail at least one."
    height = 1.5 + 0.19 * len(verdicts)
    picture = Picture(height, alt, width=9.6)
    with style.context():
        ax = picture.figure.add_axes((0.3, 0.1 / height, 0.62, 1 - 1.3 / height))
        ax.set(xlim=(-0.5, len(probes) - 0.5), ylim=(len(verdicts) - 0.5, -0.5))
        ax.xaxis.tick_top()
        ax.set_xticks(range(len(probes)), probes, rotation=60, ha="left", rotation_mode="anchor", fontsize=8)
        ax.set_yticks(range(len(verdicts)), list(verdicts), fontsize=8)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        for x in range(len(probes)):
            ax.axvline(x, color=style.EMPTY, linewidth=0.4, zorder=0)
        failing = max((y for y, row in enumerate(verdicts.values()) if FAIL in row.values()), default=-1)
        if 0 <= failing < len(verdicts) - 1:  # kernels that pass every probe
            ax.axhline(failing + 0.5, color=style.BLACK, linewidth=1.2)
        for y, row in enumerate(verdicts.values()):
            ax.axhline(y, color=style.EMPTY, linewidth=0.5, zorder=0)
            for x, verdict in enumerate(row.values()):
                if verdict == FAIL:
                    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color="#F9E3D3", linewidth=0, zorder=1))
                    ax.plot([x], [y], "x", color=style.BROKEN, ms=6, mew=1.8)
                elif verdict == PASS:
                    ax.plot([x], [y], ".", color=style.GREEN, ms=4)
    return picture
