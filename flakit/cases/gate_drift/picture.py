"""The loss curves of gate_drift's run that ends in NaN, and of other runs beside it."""

from collections.abc import Mapping

from ...figures.gate_drift import fatal_run
from ...figures.plots import Picture
from .watched import Drift


def curve(runs: Mapping[str, Drift], *, start: int = 0, end: int | None = None, window: int = 1) -> Picture:
    """Return a picture of the losses of several runs by training step, with a cross where a loss turns NaN.

    runs: what `start`, `resume` and `recorded` return, by name in the legend.
    start, end: the steps that are shown; by default up to the end of the longest. window: number of steps averaged.
    """
    losses = {name: (run.first, run.run.losses) for name, run in runs.items()}
    return fatal_run(losses, start=start, end=end, window=window)
