"""The form in which every case hands over its numbers."""

from typing import NamedTuple


class Row(NamedTuple):
    """One number of a story: what the case file says, what the law predicts, what is measured here and now."""

    what: str
    recorded: float
    law: float
    measured: float
