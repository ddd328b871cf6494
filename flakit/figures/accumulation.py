"""What a loop reports and what it hands to the optimizer, held against the plain loop on the same data."""

from collections.abc import Sequence

import numpy as np

from . import style
from .canvas import Canvas

_LOW, _HIGH = 1e-7, 1.0  # of a gradient's elements


class AccumulationFigure:
    """Persistent: `update` redraws in place. Bars of the two losses beside the two gradients, element by element."""

    def __init__(self):
        self.canvas = Canvas(9.0, 3.3)
        with style.context():
            figure = self.canvas.figure
            self._title = figure.text(0.012, 0.975, "", va="top", fontsize=10.5, fontweight="bold")
            self._draw_losses(figure.add_axes((0.11, 0.16, 0.36, 0.62)))
            self._draw_gradients(figure.add_axes((0.60, 0.16, 0.38, 0.62)))
        self.canvas.labels(self._title)

    def _draw_losses(self, ax) -> None:
        self._ax = ax
        ax.set(ylim=(-0.6, 1.6), xlabel="reported loss of the step, nats")
        ax.set_yticks([1, 0], ["plain loop", "this loop"])
        ax.tick_params(axis="y", length=0)
        ax.spines[["top", "right", "left"]].set_visible(False)
        self._bars = ax.barh([1, 0], [0, 0], height=0.5, color=[style.SKY, style.ORANGE], zorder=2)
        self._values = [ax.text(0, y, "", va="center", fontsize=9, zorder=4) for y in (1, 0)]
        self._known = ax.axvline(0, **style.LAW, zorder=3, label="ln(vocabulary): knows nothing")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        self.canvas.moving(*self._bars, self._known)
        self.canvas.labels(*self._values)

    def _draw_gradients(self, ax) -> None:
        ends = np.array([_LOW, _HIGH])
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ax.set(xlabel="|gradient|, plain loop", ylabel="|gradient|, this loop")
        ax.spines[["top", "right"]].set_visible(False)
        ax.plot(ends, ends, color=style.GREY, linewidth=1, label="the same")
        (self._law,) = ax.plot(ends, ends, **style.LAW, label="law", zorder=4)
        (self._points,) = ax.plot([], [], "o", color=style.ORANGE, markersize=3, alpha=0.6, linewidth=0)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=3)
        self.canvas.moving(self._points, self._law)

    def update(
        self, *, title: str, losses: tuple[float, float], gradients: tuple[Sequence, Sequence], law: float, known: float
    ) -> None:
        """losses: of the plain loop and of this one; gradients: elements of each, in the same order.

        law: by which factor this loop's gradient should differ. known: the loss of a model that knows nothing.
        """
        self._title.set_text(title)
        top = max(1.18 * max(losses), 1.6 * known)
        if self._ax.get_xlim() != (0.0, top):
            self._ax.set_xlim(0, top)
            self.canvas.stale()
        for bar, words, loss in zip(self._bars, self._values, losses, strict=True):
            bar.set_width(loss)
            words.set_text(f" {loss:.3f}")
            words.set_x(loss)
        self._known.set_xdata([known, known])
        self._points.set_data(*(np.abs(np.asarray(g, dtype=np.float64)) for g in gradients))
        self._law.set_ydata(law * np.array([_LOW, _HIGH]))
