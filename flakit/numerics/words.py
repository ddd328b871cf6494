"""Numbers in words: one wording for tables, pictures, panels and the command line."""

import math
import unicodedata
from numbers import Integral, Real

import torch

from ..language import say


def number(x: object, digits: int = 4, *, nan: str = "NaN", inf: str = "inf") -> str:
    """x in a few characters: a whole number in full, any other with its significant digits, yes or no, a dtype's name.

    What is no number is said as `str` says it. nan: what NaN means here; inf: what infinity does, such as "never".

    >>> number(1 / 3), number(-88.7228, 3), number(math.inf, inf="never"), number(True), number(torch.float16)
    ('0.3333', '-88.7', 'never', 'yes', 'float16')
    """
    if type(x) is not float:  # by far the most are, and asking what a number is takes longer than saying it
        if isinstance(x, bool):
            return say("yes") if x else say("no")
        if isinstance(x, torch.dtype):
            return str(x).removeprefix("torch.")
        if not isinstance(x, Real) or isinstance(x, Integral):
            return str(x)
    if x != x:
        return nan
    return inf if x == math.inf else f"{x:.{digits}g}"


def error(x: float) -> str:
    """The size of an error: its power of ten and two digits; 0 is said to be no rounded number.

    >>> error(1.234e-7), error(0.0), error(math.inf)
    ('1.2e-07', '0 (exact)', 'not finite')
    """
    if not math.isfinite(x):
        return say("not finite")
    return f"{x:.1e}" if x else say("0 (exact)")


def percent(share: float) -> str:
    """A share that calls neither a little nothing nor nearly all everything.

    >>> percent(0.004), percent(0.5), percent(0.999), percent(1.0)
    ('<1%', '50%', '>99%', '100%')
    """
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def padded(text: str, width: int) -> str:
    """Text with spaces after it up to `width` columns of a terminal, before it where that is negative; a Chinese
    character takes two columns.

    >>> padded("ab", 4), padded("ab", -4), padded("状态", -5)
    ('ab  ', '  ab', ' 状态')
    """
    spaces = " " * (abs(width) - len(text) - sum(unicodedata.east_asian_width(x) in "WF" for x in text))
    return text + spaces if width > 0 else spaces + text


def for_json(x: object) -> object:
    """What JSON has words for: NaN becomes null, infinities the strings "inf" and "-inf", in dicts and lists too."""
    if isinstance(x, dict):
        return {name: for_json(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [for_json(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else str(x)
    return x
