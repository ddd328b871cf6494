"""Room for the frames of a long run, so that no loop maps and unmaps memory at each of its calls.

CPython, from 3.11 on, keeps the frames of Python's functions in blocks of 16 KB: it maps one when the last is full, and
unmaps it when the first frame in it ends. A loop that happens to call from just below the end of a block does both each
time round, which took a quarter of an interpreted audit's time. A function that asks for half a megabyte gets a
block of a whole one, and what it calls has the rest, some thousand frames.
"""

import sys
from collections.abc import Callable

HALF = 2**16  # words
VERSIONS = (3, 11), (3, 12)
"""The versions of CPython whose blocks were measured."""


def roomy(function: Callable) -> Callable:
    """The function, with such a block for all that it calls; as it is in a Python that keeps its frames otherwise."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in VERSIONS:
        return function

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=HALF)  # asked for, and never touched
    return call
