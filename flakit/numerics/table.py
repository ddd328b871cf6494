"""Tables for notebooks and terminals, with numbers short enough to compare."""

import html
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NamedTuple

from .words import number

_NEGATIVE = re.compile(r"(?<![\w-])-?[\d.,]+e-\d+|(?<![\w-])-(?:[\d.,]+\d|\d|inf\b)")
"""Numbers in HTML at whose minus a browser would break a line."""


class Table:
    """Rows with a header, displayed as HTML in a notebook and as aligned text elsewhere.

    rows: mappings, or named tuples such as `flakit.cases.laws.Row`; cells of missing values are empty.
    columns: the columns in order, as names or as {name: header}; default: all.
    digits: significant digits of numbers that are not whole.

    >>> print(Table([{"T": 64, "error": 1.234e-7}]))
     T    error
    64  1.2e-07
    """

    def __init__(
        self,
        rows: "Sequence[Mapping | NamedTuple]",
        columns: Sequence[str] | Mapping[str, str] | None = None,
        *,
        digits: int = 2,
        caption: str = "",
    ):
        dicts = [row if isinstance(row, Mapping) else row._asdict() for row in rows]
        known = list(dict.fromkeys(name for row in dicts for name in row))
        unknown = [name for name in columns or () if name not in known]
        if unknown and dicts:
            raise ValueError(f"columns: expected some of {', '.join(known)}, got {', '.join(unknown)}")
        heads = columns if isinstance(columns, Mapping) else {name: name for name in columns or known}
        self.heads = list(heads.values())
        self.cells = [[_text(row.get(name, ""), digits) for name in heads] for row in dicts]
        self._numbers = [all(_is_number(row[name]) for row in dicts if row.get(name) is not None) for name in heads]
        self.caption = caption

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heads, *self.cells, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if number else text.ljust(width)
                for text, width, number in zip(line, widths, self._numbers, strict=True)
            ).rstrip()
            for line in (self.heads, *self.cells)
        ]
        return "\n".join([self.caption, *lines] if self.caption else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, texts: Sequence[str]) -> str:
            unbroken = r'<span style="white-space: nowrap">\g<0></span>'
            sides = ("right" if number else "left" for number in self._numbers)
            cells = (
                f'<{tag} style="text-align: {side}">{_NEGATIVE.sub(unbroken, html.escape(text))}</{tag}>'
                for side, text in zip(sides, texts, strict=True)
            )
            return f"<tr>{''.join(cells)}</tr>"

        text = html.escape(self.caption)
        caption = f'<caption style="text-align: left; white-space: nowrap">{text}</caption>' if text else ""
        body = "\n".join(line("td", cells) for cells in self.cells)
        return f"<table>{caption}<thead>{line('th', self.heads)}</thead><tbody>\n{body}\n</tbody></table>"


def pivot(rows: Sequence[Mapping], index: str, columns: Sequence[str], value: str) -> list[dict]:
    """Return one row for each value of `index`, with a column for each combination of the values of `columns`.

    Rows and columns are in the order of first appearance; a repeated combination raises ValueError.

    >>> pivot([{"T": 64, "form": "chunk", "l2": 0.1}, {"T": 64, "form": "recurrent", "l2": 0.2}], "T", ["form"], "l2")
    [{'T': 64, 'chunk': 0.1, 'recurrent': 0.2}]
    """
    lines: dict = {}
    for row in rows:
        line = lines.setdefault(row[index], {index: row[index]})
        name = ", ".join(_text(row[column], 3) for column in columns)
        if name in line:
            raise ValueError(f"columns: expected one row for {index} {row[index]}, {name}, got two")
        line[name] = row[value]
    return list(lines.values())


def _is_number(x) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _text(x, digits: int) -> str:
    if x is None:
        return ""
    if isinstance(x, (tuple, list)):
        return ", ".join(_text(part, digits) for part in x)
    plain = _is_number(x) and abs(x) < 1e6 and (x == int(x) or abs(x) >= 10**digits)
    return f"{x:.0f}" if plain else number(x, digits)
