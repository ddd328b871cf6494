"""Numbers in words: one wording for tables, pictures, panels and the command line."""

import math
import unicodedata
from typing import Any

from ..language import number, percent, say

__all__ = ["error", "for_json", "number", "padded", "percent"]


def error(x: float) -> str:
    """The size of an error: its power of ten and two digits; 0 is said to be no rounded number.

    >>> error(1.234e-7), error(0.0), error(math.inf)
    ('1.2e-07', '0 (exact)', 'not finite')
    """
    if not math.isfinite(x):
        return say("not finite")
    return f"{x:.1e}" if x else say("0 (exact)")


def padded(text: str, width: int) -> str:
    """Text with spaces after it up to `width` columns of a terminal, before it where that is negative; a Chinese
    character takes two columns.

    >>> padded("ab", 4), padded("ab", -4), padded("状态", -5)
    ('ab  ', '  ab', ' 状态')
    """
    spaces = " " * (abs(width) - len(text) - sum(unicodedata.east_asian_width(x) in "WF" for x in text))
    return text + spaces if width > 0 else spaces + text


def for_json(x: object) -> Any:
    """What JSON has words for: NaN becomes null, infinities the strings "inf" and "-inf", in dicts and lists too."""
    if isinstance(x, dict):
        return {name: for_json(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [for_json(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else str(x)
    return x
