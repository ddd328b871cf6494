"""The losses of the run that dies, and of others beside it."""

from collections.abc import Mapping

from ...figures.gate_drift import fatal_run
from ...figures.plots import Picture
from .watched import Drift


def curve(runs: Mapping[str, Drift], *, start: int = 0, end: int | None = None, window: int = 1) -> Picture:
    """The losses of some runs by training step, with a cross where one turns NaN.

    runs: by the name that the legend has, what `start`, `resume` and `recorded` return.
    start, end: the steps that are shown; by default up to the end of the longest. window: steps to a mean.
    """
    losses = {name: (run.first, run.run.losses) for name, run in runs.items()}
    return fatal_run(losses, start=start, end=end, window=window)
