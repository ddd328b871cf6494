"""What the "copy as Python" scripts share."""

import math


def literal(value: str | float) -> str:
    """Python text of a decay: a profile's name or a number, infinities included."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
