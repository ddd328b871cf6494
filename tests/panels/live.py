"""The promise, a redraw in under 100 ms on two idle cores, is measured by the browser tests and recorded, not asserted:
a machine that runs tests is seldom idle, and another one is slower."""

import time
from collections.abc import Callable, Iterable

NOT_LIVE = 0.5
"""Seconds of a core that no redraw may take on any machine: five times the promise."""


def least_seconds(redraw: Callable, settings: Iterable[dict]) -> float:
    """Of this process, for one redraw; the least of all settings, since other work on a machine can slow any one down
    tenfold, while a redraw that is slow is slow each time."""
    taken = []
    for setting in settings:
        start = time.process_time()
        redraw(**setting)
        taken.append(time.process_time() - start)
    return min(taken)
