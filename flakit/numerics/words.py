"""Formats numbers as text, the same in tables, pictures, panels and the command line."""

import math
import unicodedata
from typing import Any

from ..language import number, percent, say

__all__ = ["error", "for_json", "number", "padded", "percent"]


def error(x: float) -> str:
    """Format an error with two digits and a power of ten; 0 is marked as exact.

    >>> error(1.234e-7), error(0.0), error(math.inf)
    ('1.2e-07', '0 (exact)', 'not finite')
    """
    if not math.isfinite(x):
        return say("not finite")
    return f"{x:.1e}" if x else say("0 (exact)")


def padded(text: str, width: int) -> str:
    """Pad text on the right to `width` terminal columns, on the left to -width; a Chinese character takes two.

    >>> padded("ab", 4), padded("ab", -4), padded("状态", -5)
    ('ab  ', '  ab', ' 状态')
    """
    spaces = " " * (abs(width) - len(text) - sum(unicodedata.east_asian_width(x) in "WF" for x in text))
    return text + spaces if width > 0 else spaces + text


def for_json(x: object) -> Any:
    """Replace what JSON lacks, in dicts and lists too: NaN by null, infinities by the strings "inf" and "-inf"."""
    if isinstance(x, dict):
        return {name: for_json(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [for_json(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else str(x)
    return x
