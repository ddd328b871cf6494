"""Docstrings of the public functions and classes as MyST markdown: plain text with shapes and formulas in it."""

import inspect
import re
import textwrap

SECTIONS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises", "Yields:": "Yields"}
FORMULA = re.compile(r"\w+_t += [\w\s*+(){}^-]+")
"""A line of a recurrence, as docstrings show it in a terminal."""

LATEX = (
    (r"\b(diag|softmax)\b", r"\\operatorname{\1}"),
    (r"\bscale\b", r"\\text{scale}"),
    (r"\b(hk|hv)_", r"\\mathit{\1}_"),
    (r"\^T\b", r"^\\top"),
    (r" \* ", r" \\cdot "),
    (r" +=", r" &="),
)

TERM = re.compile(r"(?P<terms>\w+(, \w+)*): +(?P<rest>.*)$")


def entry(name, thing):
    """Return the page section of a function or class: a heading, its call, and its docstring."""
    signature = inspect.signature(thing)
    text = markdown(inspect.getdoc(thing), tuple(signature.parameters))
    return f"## {name.rpartition('.')[2]}\n\n```python\n{_call(name, signature)}\n```\n\n{text}\n"


def _call(name, signature):
    """Return the call with its defaults and without annotations, whose place the text below takes."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"<function .*? at 0x\w+>", "...", text)
    if len(name + text) <= 88:
        return name + text
    inner = textwrap.fill(text[1:-1], 84, break_long_words=False, break_on_hyphens=False)
    return f"{name}(\n{textwrap.indent(inner, '    ')}\n)"


def markdown(doc, arguments=()):
    """Return a docstring's paragraphs, formulas, lists of arguments and examples as markdown.

    arguments: names of which one may be explained behind another on the same line, "a: the first. b: the second."
    """
    parts = []
    for block in re.split(r"\n\s*\n", doc or ""):
        lines = block.rstrip().splitlines()
        section = SECTIONS.get(lines[0]) if len(lines) > 1 else None
        if section:
            parts.append(f"**{section}**")
            lines = textwrap.dedent("\n".join(lines[1:])).splitlines()
        parts.append(_block(lines, section, arguments))
    return "\n\n".join(parts)


def formula(lines):
    """Return lines of a recurrence as one equation in LaTeX; None if a line is anything else."""
    lines = [line.strip() for line in lines]
    if not all(FORMULA.fullmatch(line) for line in lines):
        return None
    for plain, latex in LATEX:
        lines = [re.sub(plain, latex, line) for line in lines]
    return "$$\n\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}\n$$"


def _block(lines, section, arguments):
    text = "\n".join(lines)
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if all(line.startswith("    ") for line in lines):
        return formula(lines) or f"```text\n{textwrap.dedent(text)}\n```"
    items = _items(lines, arguments)
    if items and (section or len(items) > 1 or items[0][0] is not None and len(lines) > 1):
        return "\n\n".join(_item(*item) for item in items)
    return escaped(" ".join(lines))


def _items(lines, arguments):
    """Return [names or None, text] for each line that begins with names and a colon, with the indented lines that
    follow it; [] if none does."""
    items = []
    for line in lines:
        term = TERM.match(line)
        if term and not line.startswith(" "):
            items.append([term["terms"], term["rest"]])
        elif line.startswith(" ") and items:
            items[-1][1] += " " + line.strip()
        elif items and items[-1][0] is None:
            items[-1][1] += " " + line
        else:
            items.append([None, line])
    if not any(terms for terms, _ in items):
        return []
    behind = re.compile(rf"(?<=[.;] )({'|'.join(arguments)}): ") if arguments else re.compile("(?!)")
    apart = []
    for terms, words in items:
        first, *others = behind.split(words)
        named = zip(others[::2], others[1::2], strict=True)
        apart += [[terms, first.rstrip()], *([name, text.rstrip()] for name, text in named)]
    return apart


def _item(terms, words):
    if terms is None:
        return escaped(words)
    return ", ".join(f"`{term}`" for term in terms.split(", ")) + f"\n: {escaped(words)}"


def escaped(text):
    """Return text as markdown in which only what stands in backquotes is markup."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]$|#~])", r"\\\1", part) for part in parts)
