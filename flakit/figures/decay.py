"""Where decay breaks a chunk: both exponents of every score, the scores, every tensor, and the onset on its scale."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..numerics.words import number, percent
from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_DECADES = (-4, 2)
_WEAKEST, _STRONGEST = 0.05, 500.0  # |w| on the onset axis


class Onset(NamedTuple):
    """Where a tensor turns non-finite, as |log decay|: by the law and measured; None where it never does."""

    law: float | None
    measured: float | None


class DecayFigure:
    """Heat maps of one chunk above, of whole tensors below; `update` redraws in place.

    tensors: their names, the output first, with words for what their columns are. scores: what A is, in words.
    """

    def __init__(self, tensors: Mapping[str, str], scores: str = "scores |A|"):
        self.tensors = dict(tensors)
        self.canvas = Canvas(9.2, 6.4)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.985, "", va="top", fontsize=11, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.945, "", va="top", fontsize=9.5, color=style.GREY)
            figure.legend(
                handles=style.non_finite_handles(), loc="upper right", bbox_to_anchor=(0.995, 0.995), ncols=2,
                handlelength=2, columnspacing=1.2, borderaxespad=0,
            )  # fmt: skip
            self._chunk(figure, scores)
            self._onset(figure)
            self._tensors(figure)
        self.canvas.labels(self._title, self._subtitle)

    def _chunk(self, figure, words: str) -> None:
        bottom, height, width = 0.56, 0.27, 0.155
        read, key, scores = (figure.add_axes((left, bottom, width, height)) for left in (0.06, 0.232, 0.482))
        self._exponents = [HeatMap(self.canvas, ax, cmap=style.SIGNED) for ax in (read, key)]
        self._A = HeatMap(self.canvas, scores, vmin=_DECADES[0], vmax=_DECADES[1])
        scores.set_title(words)
        self._factors = [ax.set_title("") for ax in (read, key)]
        for ax in (read, key, scores):
            ax.set_xlabel("token j of chunk")
            ax.tick_params(labelleft=ax is not key)
        read.set_ylabel("token i of chunk")
        self._exponent_bar = self._exponents[0].colorbar(figure.add_axes((0.395, bottom, 0.01, height)), "")

    def _onset(self, figure) -> None:
        self._scale = ax = figure.add_axes((0.68, 0.56, 0.15, 0.27))
        rows = np.arange(len(self.tensors))
        ax.set(xscale="log", xlim=(_WEAKEST, _STRONGEST), ylim=(len(rows) - 0.4, -0.6))
        ax.set_yticks(rows, self.tensors)
        ax.tick_params(axis="y", length=0)
        ax.minorticks_off()
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_title("where non-finite values begin", pad=20)
        self._broken = ax.barh(rows, 0 * rows, height=0.62, linewidth=0, zorder=1, **style.NAN)
        (self._law,) = ax.plot([], [], "|", color=style.BLACK, markersize=17, markeredgewidth=2, zorder=4)
        (self._measured,) = ax.plot([], [], "o", color=style.VERMILLION, markersize=6, zorder=3)
        self._now = ax.axvline(1, color=style.BLUE, zorder=5)
        beside = {"transform": ax.get_yaxis_transform(), "va": "center", "ha": "right", "fontsize": 8.5}
        self._numbers = [[ax.text(x, row, "", **beside) for x in (1.43, 2.07)] for row in rows]
        for x, words, colour in (
            (0.34, "\u2501 now", style.BLUE),
            (1.43, "\u2503 law", style.BLACK),
            (2.07, "\u25cf measured", style.VERMILLION),
        ):
            ax.text(x, -1 - 0.1 * (len(rows) - 6), words, **{**beside, "color": colour})
        self.canvas.labels(*(text for pair in self._numbers for text in pair))
        self.canvas.moving(*self._broken, self._law, self._measured, self._now, *ax.spines.values())

    def _tensors(self, figure) -> None:
        bottom, height = 0.085, 0.315
        self._maps, self._titles = {}, {}
        slot = 0.864 / len(self.tensors)
        for column, (name, columns) in enumerate(self.tensors.items()):
            ax = figure.add_axes((0.06 + slot * column, bottom, slot - 0.014, height))
            self._maps[name] = HeatMap(self.canvas, ax, vmin=_DECADES[0], vmax=_DECADES[1], rows_vary=True)
            self._titles[name] = ax.set_title("", fontsize=9)
            ax.set_xlabel(columns)
            if column == 0:
                ax.set_ylabel("token t")
                ax.yaxis.set_label_coords(-33 / ax.bbox.width, 0.5)
            else:
                ax.yaxis.set_visible(False)
        self.canvas.labels(*self._titles.values())
        bar = self._A.colorbar(figure.add_axes((0.925, bottom, 0.01, height)), "magnitude")
        ticks = range(_DECADES[0], _DECADES[1] + 1, 2)
        bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])

    def update(
        self,
        *,
        title: str,
        subtitle: str,
        factors: tuple[str, str],
        exponents: tuple[np.ndarray, np.ndarray],
        limit: float,
        A: np.ndarray,
        tensors: Mapping[str, np.ndarray],
        onsets: Mapping[str, Onset],
        knob: str,
        now: float,
    ) -> None:
        """exponents, A: [C, C] of a chunk; an exponent is NaN where no product is formed, inf where e^x overflows.

        factors: words above the two exponents. limit: ln of the largest number, the end of their scale.
        tensors: [T, columns], or [1, columns] without a time axis. onsets: by tensor. knob: what the onset axis
        measures; now: where it stands.
        """
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        C = len(A)
        norm = self._exponents[0].colours.norm
        if norm.vmax != limit:
            for heatmap in self._exponents:
                heatmap.colours.set_clim(-limit, limit)
            self._exponent_bar.set_ticks([-limit, 0, limit], labels=[f"{-limit:.1f}", "0", f"{limit:.1f}\nln max"])
            self.canvas.stale()
        for heatmap, exponent in zip(self._exponents, exponents, strict=True):
            heatmap.update(exponent, empty=np.isnan(exponent))
        for text, name in zip(self._factors, factors, strict=True):
            if text.get_text() != name:
                text.set_text(name)
                self.canvas.stale()
        self._A.update(_log10(A), empty=np.triu(np.ones((C, C), bool), 1) & (np.nan_to_num(A) == 0))
        for name, x in tensors.items():
            self._maps[name].update(_log10(x))
            share = 1 - np.isfinite(x).mean()
            self._titles[name].set_text(f"{name}\n" + (f"{percent(share)} non-finite" if share else "finite"))
        self._show_onsets(onsets, knob, now)

    def _show_onsets(self, onsets: Mapping[str, Onset], knob: str, now: float) -> None:
        found = [onsets[name] for name in self.tensors]
        self._law.set_data(*_points([onset.law for onset in found]))
        self._measured.set_data(*_points([onset.measured for onset in found]))
        for bar, texts, onset in zip(self._broken, self._numbers, found, strict=True):
            for text, value in zip(texts, onset, strict=True):
                said = "never" if value is None else number(value)
                if text.get_text() != said:
                    text.set(text=said, color=style.GREY if value is None else style.BLACK)
            bar.set_visible(onset.measured is not None)
            if onset.measured is not None:
                bar.set_x(onset.measured)
                bar.set_width(max(0, _STRONGEST - onset.measured))
        at = min(max(now, _WEAKEST), _STRONGEST)
        self._now.set_xdata([at, at])
        if self._scale.get_xlabel() != knob:
            self._scale.set_xlabel(knob)
            self.canvas.stale()


def _points(values) -> tuple[list[float], list[int]]:
    rows = [row for row, value in enumerate(values) if value is not None]
    return [values[row] for row in rows], rows


def _log10(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logs = np.log10(np.abs(x))
    return np.where(x == 0, _DECADES[0], logs)
