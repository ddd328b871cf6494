"""The losses of the run that dies, and of others beside it."""

from collections.abc import Mapping

from ...figures.gate_drift import fatal_run
from ...figures.plots import Picture
from .watched import LIMIT, Drift


def curve(
    runs: Mapping[str, Drift], *, start: int = 0, end: int | None = None, window: int = 1, exponents: bool = False
) -> Picture:
    """The losses of some runs by training step, with a cross where one turns NaN.

    runs: by the name that the legend has, what `start`, `resume` and `recorded` return.
    start, end: the steps that are shown; by default up to the end of the longest. window: steps to a mean.
    exponents: below, the largest exponent of each step, with the limit.
    """
    losses = {name: (run.first, run.run.losses) for name, run in runs.items()}
    largest = {name: (run.first, [each[-1] for each in run.quantiles]) for name, run in runs.items()}
    options = {"start": start, "end": end, "window": window}
    return fatal_run(losses, exponents=largest if exponents else None, limit=LIMIT, **options)
