"""An inverse and what it was made from: the largest power, the inverse, the error of one form, errors over alpha."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from . import style
from .canvas import Canvas
from .heatmap import HeatMap

_SMALLEST = -9
"""Power of ten at the dark end of the maps."""
_LOWEST, _HIGHEST = 1e-9, 1e12  # errors on the curves


class InverseFigure:
    """Persistent: `update` redraws in place. forms: names of the curves by form, at most three."""

    def __init__(self, forms: Mapping[str, str]):
        self.canvas = Canvas(9.2, 3.8)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.98, "", va="top", fontsize=10.5, fontweight="bold")
            self._subtitle = figure.text(0.012, 0.928, "", va="top", fontsize=9.5, color=style.GREY)
            figure.legend(
                handles=style.non_finite_handles(), loc="upper right", bbox_to_anchor=(0.995, 0.99), ncols=2,
                handlelength=2, columnspacing=1.2, borderaxespad=0,
            )  # fmt: skip
            self._draw_maps(figure)
            self._draw_curves(figure.add_axes((0.735, 0.14, 0.255, 0.51)), forms)
        self.canvas.labels(self._title, self._subtitle)

    def _draw_maps(self, figure) -> None:
        bottom, height, width = 0.14, 0.6, 0.165
        self._maps, self._titles = [], []
        for n, left in enumerate((0.055, 0.235, 0.415)):
            ax = figure.add_axes((left, bottom, width, height))
            self._maps.append(HeatMap(self.canvas, ax, vmin=_SMALLEST, vmax=0.0))
            self._titles.append(ax.set_title(""))
            ax.set_xlabel("token j")
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.tick_params(labelleft=n == 0)
            if n == 0:
                ax.set_ylabel("token i")
        self._bar = self._maps[0].colorbar(figure.add_axes((0.592, bottom, 0.012, height)), "magnitude")
        self.canvas.labels(*self._titles)

    def _draw_curves(self, ax, forms: Mapping[str, str]) -> None:
        ax.set(yscale="log", xlim=(0, 2), ylim=(_LOWEST, _HIGHEST), xlabel="alpha", ylabel="relative error")
        ax.set_yticks([1e-8, 1e-4, 1, 1e4, 1e8, 1e12])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        self._curves = {
            form: ax.plot([], [], **look, label=words)[0]
            for (form, words), look in zip(
                forms.items(), (style.LINES[1], style.LINES[0], style.LINES[2]), strict=False
            )
        }
        (self._law,) = ax.plot([], [], **style.LAW, label="law of the product")
        self._gone = ax.axvspan(2, 2, linewidth=0, **style.NAN)
        self._now = ax.axvline(0, color=style.GREY, linewidth=1)
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), handlelength=2.6, borderaxespad=0, labelspacing=0.25)
        self.canvas.moving(self._gone, self._now, *self._curves.values(), self._law, *ax.spines.values())

    def update(
        self,
        *,
        title: str,
        subtitle: str,
        power: tuple[int, np.ndarray],
        inverse: np.ndarray,
        name: str,
        error: np.ndarray,
        alphas: Sequence[float],
        errors: Mapping[str, Sequence[float]],
        law: Sequence[float],
        ends: float,
        now: float,
    ) -> None:
        """power: n and L^n; inverse: the true one; name, error: a form and its difference to that; all [C, C].

        A zero is left empty. errors: by form, over alphas, inf where not finite; law: of the product; ends: the alpha
        at which the format's range ends for it; now: the present alpha.
        """
        self._title.set_text(title)
        self._subtitle.set_text(subtitle)
        n, largest = power
        # In strides: a new scale redraws the whole figure.
        top = 3 * max(1.0, np.ceil(np.log10(np.abs(largest).max() or 1.0) / 3))
        if self._maps[0].colours.norm.vmax != top:
            for heatmap in self._maps:
                heatmap.colours.set_clim(_SMALLEST, top)
            ticks = np.arange(_SMALLEST, top + 1, 3 if top < 10 else 9).astype(int)
            self._bar.set_ticks(ticks, labels=[f"$10^{{{tick}}}$" for tick in ticks])
            self.canvas.stale()
        upper = np.triu(np.ones(inverse.shape, bool), 1)
        for heatmap, text, matrix, words in zip(
            self._maps,
            self._titles,
            (largest, inverse, error),
            (
                f"largest power, $L^{{{n}}}$\n{_size(largest)}",
                f"the inverse\n{_size(inverse)}",
                f"{name}\n{_size(error)}",
            ),
            strict=True,
        ):
            with np.errstate(divide="ignore"):
                logs = np.log10(np.abs(matrix))
            heatmap.update(logs, empty=upper | (matrix == 0))
            text.set_text(words)
        for form, line in self._curves.items():
            line.set_data(alphas, np.where(np.isfinite(errors[form]), errors[form], np.nan))
        self._law.set_data(alphas, law)
        self._gone.set_x(min(ends, 2.0))
        self._gone.set_width(max(0.0, 2.0 - ends))
        self._now.set_xdata([now, now])


def _size(x: np.ndarray) -> str:
    return f"up to {np.abs(x).max():.2g}" if np.isfinite(x).all() else "not finite"
