"""Formatting of numbers and lists that several sketches share."""

from ...language import say
from ...numerics.words import number


def short(x: float) -> str:
    return number(round(float(x), 2) + 0.0, 3)


def percent(share: float) -> str:
    if 0 < share < 0.1:
        return f"{100 * share:.2g}%"
    return f"{share:.0%}" if share != 0 else say("nothing")


def verb(names: list[str]) -> str:
    return say("is") if len(names) == 1 else say("are")


def listed(names: list[str]) -> str:
    return say(" and ").join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as "1.5 MB"; below 1000 as a plain number."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{number(count / unit, 3)} {name}"
    return f"{count:.0f}"
