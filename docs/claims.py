"""Check the numbers in a lesson's prose against what its cells computed.

    After one token 0.7%<!--= left --> of it is left, and nearly all<!--= share > 0.95 --> of the rest is lost.

A comment after a number says what the number has to be: an expression of the notebook's own names, with `math` and
`torch`, evaluated where the sentence stands, when all cells above it have run. The number may be off by half a unit of
its last digit; for a number with a percent sign the expression is the share. After words, or if it is true or false,
the expression has to be true. Pages do not show comments.

A number that claims nothing, such as a setting or a size that was chosen, stands in a formula or in code.

What a panel of the same section says, in its readout or in its picture, is read as well. A number of the prose that
comes near one of a panel's and is not the same one, rounded or not, contradicts the panel, unless the expression is a
comparison. If it is another number, the expression says so in a comment of its own: `1.386<!--= END / 64  # without the
keys' sizes -->`.
"""

import json
import math
import re
from dataclasses import dataclass

import nbformat

_DIGITS = r"[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?"
CLAIM = re.compile(
    rf"(?:(?<![\w.])(?P<number>{_DIGITS})(?P<percent>\s?%)?[\s*$)]*)?<!--=\s*(?P<expression>.+?)\s*-->", re.S
)
_SAID = re.compile(rf"(?<![\w.^/])(?P<number>{_DIGITS})(?P<percent>\s?%)?(?![\w/^])")
NEAR = 0.04
"""Numbers that differ by less than this share are taken for the same quantity."""

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

READS = """
import json as _json
def _written(figure):
    from matplotlib.text import Text
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = {id(label) for axis in axes for label in axis.get_ticklabels(which="both")}
    return [x.get_text() for x in figure.findobj(Text) if x.get_visible() and id(x) not in ticks]
_shown = Out.get(len(In) - 2)
print(_json.dumps([_shown.text, *_written(_shown.canvas.figure)] if hasattr(_shown, "as_python") else []))
"""
"""Code that prints the texts of the panel shown by the cell above: its readout and its picture's texts except ticks."""


@dataclass(frozen=True)
class Claim:
    """The text before a claim's comment, the number in it (a share if it is a percentage; None after words), and the
    expression for what it has to be.

    figures: the significant digits of the number; kind: "%", or "." for a fraction and "" for a count. Numbers of
    different kinds mean different quantities: a count of 64 cannot contradict 66.6 ms."""

    written: str
    expression: str
    number: float | None = None
    half_unit: float = 0.0
    figures: int = 0
    kind: str = ""

    def wrong(self, value) -> str:
        """Return a message if the claim does not hold for the expression's value, "" if it does."""
        if isinstance(value, str) or (self.number is None and not isinstance(value, bool)):
            return f"{self.written!r}: {self.expression} is {value}"
        if isinstance(value, bool):
            return "" if value else f"{self.written!r}: not so: {self.expression}"
        near = math.isclose(value, self.number, rel_tol=1e-9, abs_tol=self.half_unit * (1 + 1e-9))
        return "" if near else f"{self.written!r}: {self.expression} is {value:.6g}"


def claims(prose):
    """Return every claim in a cell of prose, in order."""
    return [
        Claim(_context(prose, match), match["expression"], **(_number(match) if match["number"] else {}))
        for match in CLAIM.finditer(prose)
    ]


def _number(match):
    """Return the fields of `Claim` that a matched number determines."""
    digits, percent = match["number"].replace("−", "-").replace(",", ""), bool(match["percent"])
    mantissa, _, power = digits.partition("e")
    unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]) - 2 * percent)
    return {
        "number": float(digits) / (100 if percent else 1),
        "half_unit": unit / 2,
        "figures": len(re.sub(r"\D", "", mantissa).lstrip("0")),  # zeros behind an integer count
        "kind": "%" if percent else "." if "." in digits else "",
    }


def _context(prose, match):
    before = re.sub(r"<!--.*?-->", "", prose[: prose.rindex("<!--=", 0, match.start("expression"))], flags=re.S)
    return " ".join(before.split())[-50:]


def with_probes(notebook):
    """Insert into the notebook a cell after each cell of prose that prints the values of its claims' expressions, and
    one after each cell of code that prints a panel's texts; return the notebook."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        source = READS
        if cell.cell_type == "markdown":
            held = claims(cell.source)
            source = f"EXPRESSIONS = {[claim.expression for claim in held]!r}\n{PROBE}" if held else ""
        if source:
            cells.append(nbformat.v4.new_code_cell(source, metadata={"probe_of": cell.id}))
    notebook.cells = cells
    return notebook


def values(notebook):
    """Return {id of a cell: values of its claims' expressions, or the texts of its panel} of a notebook that ran
    `with_probes`."""
    return {
        cell.metadata["probe_of"]: json.loads(
            "".join(output.text for output in cell.outputs if output.output_type == "stream")
        )
        for cell in notebook.cells
        if "probe_of" in cell.metadata
    }


def broken(notebook, results=None):
    """Return messages for the claims of a notebook that do not hold or that a panel of their section contradicts.

    results: `values` of an earlier run; None: of this notebook's."""
    results, sections = values(notebook) if results is None else results, [([], [])]
    for cell in notebook.cells:
        if "probe_of" in cell.metadata:
            continue
        if cell.cell_type == "code":
            sections[-1][1].extend(results.get(cell.id, []))
            continue
        held = iter(results.get(cell.id, []))
        for n, prose in enumerate(re.split(r"^(?=## )", cell.source, flags=re.M)):
            if n:
                sections.append(([], []))
            sections[-1][0].extend((claim, next(held)) for claim in claims(prose))
    return [
        fault
        for checked, texts in sections
        for claim, value in checked
        if (fault := claim.wrong(value) or ("" if value is True else contradicted(claim, texts)))
    ]


def contradicted(claim, texts):
    """Return a message if panels show another number near the claim's and none of them the same, else ""."""
    if claim.number is None or "#" in claim.expression or claim.figures < 2:
        return ""
    near = []
    for text in texts:
        for match in _SAID.finditer(re.sub(r"\$[^$]*\$", " ", text)):
            said = _number(match)
            number = abs(said["number"])
            apart = abs(number - abs(claim.number))
            if apart <= max(said["half_unit"], claim.half_unit) * (1 + 1e-9):
                return ""
            if said["kind"] == claim.kind and said["figures"] > 1 and apart < NEAR * number:
                near.append(match[0].strip())
    return f"{claim.written!r}: a panel says {near[0]}" if near else ""
