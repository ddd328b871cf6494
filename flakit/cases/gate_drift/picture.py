"""The loss curves of gate_drift's run that ends in NaN, and of other runs beside it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...figures import style
from ...figures.plots import Picture
from ...language import Words
from .watched import Drift

WORDS = Words() | {
    "loss": "loss, nats a byte",
    "step": "training step",
    "died": "{name}: NaN from step {step}",
    "fatal": "The loss of each training step: {names}",
}


def curve(runs: Mapping[str, Drift], *, start: int = 0, end: int | None = None, window: int = 1) -> Picture:
    """Draw the losses of several runs, in nats per byte, by training step. A run that becomes NaN ends in an orange
    cross; the legend gives the step.

    runs: what `start`, `resume` and `recorded` return, by name in the legend.
    start, end: the steps that are shown; by default up to the end of the longest. window: steps per mean; the last
    window may be shorter."""
    ends = {
        name: next((n for n, loss in enumerate(run.run.losses) if not math.isfinite(loss)), None)
        for name, run in runs.items()
    }
    died = {name: run.first + ends[name] for name, run in runs.items() if ends[name] is not None}
    labels = {name: WORDS.say("died", name=name, step=died[name]) if name in died else name for name in runs}
    end = max(run.first + len(run.run.losses) for run in runs.values()) if end is None else end
    height = 2.6
    picture = Picture(height, WORDS.say("fatal", names="; ".join(labels.values())))
    with style.context():
        ax = picture.figure.add_axes((0.075, 1 - (height - 0.5) / height, 0.9, (height - 0.85) / height))
        for n, ((name, run), look) in enumerate(zip(runs.items(), style.LINES, strict=False)):
            x, y = _means(run.first, run.run.losses[: ends[name]], window)
            shown = (x >= start) & (x <= end)
            ax.plot(x[shown], y[shown], **look | {"linewidth": 2.6 if n == 0 else 1.5}, label=labels[name])
            if died.get(name, math.inf) <= end and ends[name]:
                ax.plot(x[-1], y[-1], "x", color=style.BROKEN, markersize=11, markeredgewidth=3, zorder=9)
        ax.set(ylabel=WORDS["loss"], xlabel=WORDS["step"], xlim=(start, end))
        picture.figure.legend(
            *ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.065, 1.0), ncols=3, handlelength=3
        )
    return picture


def _means(first: int, values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle step and the mean loss of each window, [windows] each."""
    y = np.asarray(values, dtype=np.float64)
    parts = [y[n : n + window] for n in range(0, len(y), window)]
    x = [first + n * window + (len(part) - 1) / 2 for n, part in enumerate(parts)]
    return np.array(x), np.array([part.mean() for part in parts])
