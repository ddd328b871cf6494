"""The numbers in a lesson's prose, held to what its cells computed.

    After one token 0.7%<!--= left --> of it is left, and nearly all<!--= share > 0.95 --> of the rest is lost.

A comment after a number says what the number has to be: an expression of the notebook's own names, with `math` and
`torch`, evaluated where the sentence stands, when all cells above it have run. The number may be off by half a unit of
its last digit; of one with a percent sign the expression is the share. After words, and where it is true or false, it
has to be true. Pages do not show comments.

A number that claims nothing, such as a setting or a size that was chosen, stands in a formula or in code.
"""

import json
import math
import re
from dataclasses import dataclass

import nbformat

_DIGITS = r"[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?"
_CLAIM = re.compile(
    rf"(?:(?<![\w.])(?P<number>{_DIGITS})(?P<percent>\s?%)?[\s*$)]*)?<!--=\s*(?P<expression>.+?)\s*-->", re.S
)
_NO_CLAIMS = [
    r"^```.*?^```",  # code
    r"`[^`]*`",
    r"\$\$.*?\$\$",  # formulas
    r"\$[^$]*\$",
    r"\]\([^)]*\)",  # where a link leads to
    r"\b[Nn]otebooks? \d\d(?:(?:, | and | to )\d\d)*",
    r"\[\d\d_\w+",  # their names
    r"\babout \d+ minutes",
    r"约?需要 \d+ 分钟|约 \d+ 分钟",
    r"\bExercise \d+",
    r"练习 \d+",
    r"第 \d\d 课",
    r"^\s*\d+\. ",  # lists
    r"^\| \d+ \|",
]

PROBE = """
import json as _json, math as _math, torch as _torch
def _held(expression):
    try:
        value = eval(expression, {"math": _math, "torch": _torch, **globals()})
        value = value.item() if hasattr(value, "item") else value
        return value if isinstance(value, (bool, int, float)) else f"{value!r}, no number"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(_json.dumps([_held(expression) for expression in EXPRESSIONS]))
"""


@dataclass(frozen=True)
class Claim:
    """What is written, the number in it (a share where it is a percentage; None after words), and what it has to be."""

    written: str
    number: float | None
    half_unit: float
    expression: str

    def wrong(self, value) -> str:
        """What is wrong with it, nothing if it holds."""
        if isinstance(value, str) or (self.number is None and not isinstance(value, bool)):
            return f"{self.written!r}: {self.expression} is {value}"
        if isinstance(value, bool):
            return "" if value else f"{self.written!r}: not so: {self.expression}"
        near = math.isclose(value, self.number, rel_tol=1e-9, abs_tol=self.half_unit * (1 + 1e-9))
        return "" if near else f"{self.written!r}: {self.expression} is {value:.6g}"


def claims(prose):
    """Every claim of a cell of prose, in order."""
    found = []
    for match in _CLAIM.finditer(prose):
        written, number, half = _context(prose, match), None, 0.0
        if match["number"]:
            digits = match["number"].replace("−", "-").replace(",", "")
            mantissa, _, power = digits.partition("e")
            unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]) - 2 * bool(match["percent"]))
            number, half = float(digits) / (100 if match["percent"] else 1), unit / 2
        found.append(Claim(written, number, half, match["expression"]))
    return found


def _context(prose, match):
    before = re.sub(r"<!--.*?-->", "", prose[: prose.rindex("<!--=", 0, match.start("expression"))], flags=re.S)
    return " ".join(before.split())[-50:]


def not_held(prose):
    """The numbers that claim something and are held to nothing."""
    for pattern in _NO_CLAIMS:
        # What a formula holds stays held by the comment after it.
        prose = re.sub(pattern, " ", prose, flags=re.M | re.S)
    prose = _CLAIM.sub(" ", prose)
    prose = re.sub(r"<!--.*?-->", " ", prose, flags=re.S)
    return re.findall(r"(?<![\w.,])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?\s?%?(?![\w])", prose)


def with_probes(notebook):
    """The notebook with a cell after each cell of prose that prints what its claims have to be."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "markdown" and (held := claims(cell.source)):
            source = f"EXPRESSIONS = {[claim.expression for claim in held]!r}\n{PROBE}"
            cells.append(nbformat.v4.new_code_cell(source, metadata={"claims_of": cell.id}))
    notebook.cells = cells
    return notebook


def values(notebook):
    """{id of a cell of prose: what its claims have to be}, of a notebook that ran `with_probes`."""
    return {
        cell.metadata["claims_of"]: json.loads(
            "".join(output.text for output in cell.outputs if output.output_type == "stream")
        )
        for cell in notebook.cells
        if "claims_of" in cell.metadata
    }


def broken(notebook, found=None):
    """The claims of a notebook that do not hold. found: `values` of an earlier run; its own, unless given."""
    found = values(notebook) if found is None else found
    prose = {cell.id: cell.source for cell in notebook.cells}
    checked = [pair for cell, row in found.items() for pair in zip(claims(prose[cell]), row, strict=True)]
    return [said for claim, value in checked if (said := claim.wrong(value))]


def minutes(path):
    """About how long a lesson takes: prose at 130 words a minute, half a minute a cell of code, in steps of five."""
    cells = nbformat.read(path, as_version=4).cells
    prose = " ".join(
        re.sub(r"<!--.*?-->", "", cell.source, flags=re.S) for cell in cells if cell.cell_type == "markdown"
    )
    code = sum(cell.cell_type == "code" for cell in cells)
    return 5 * math.ceil((len(prose.split()) / 130 + code / 2) / 5)
