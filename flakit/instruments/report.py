"""An audit as a table in a terminal, as JSON, and as one self-contained page."""

import json
import platform
from collections.abc import Mapping
from html import escape as escape_html

import torch
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..numerics import table as still
from ..numerics.recorded import version_of
from ..numerics.words import for_json, number

COLOURS = {"pass": "green", "fail": "bold red", "not supported": "dim", "left out": "yellow"}
_MARKS = {
    "pass": "✓ pass",
    "fail": "✗ fail",
    "not supported": "not\N{NO-BREAK SPACE}supported",
    "left out": "left\N{NO-BREAK SPACE}out",
}


def setting_words(setting: Mapping) -> str:
    """A setting in words: T = 17, B = 1, ..., spike = (16, -100)."""
    return ", ".join(f"{name} = {_value(x)}" for name, x in setting.items())


def _value(x: object) -> str:
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_value, x))})"
    return number(x)


def figure_words(verdict) -> str:
    """The worst figure and its budget."""
    finding = verdict.finding
    if finding is None:
        return ""
    if finding.kind in ("no gradient", "raises"):
        return finding.kind
    if finding.kind == "non-finite":
        return "not finite"
    if not finding.allowed:
        return "0" if not finding.figure else number(finding.figure, 2)
    return f"{finding.figure:.1e} of {finding.allowed:.1e}"


def table(audit) -> Group:
    """The verdicts, a row for each, and below them what each failure means."""
    rows = Table(box=box.SIMPLE_HEAD, title=f"{audit.subject.name}, like {audit.subject.op.name}, on {audit.device}")
    for heading in ("probe", "verdict", "worst of budget", "what was found"):
        rows.add_column(heading, no_wrap=heading != "what was found")
    for v in audit.verdicts:
        colour = COLOURS[v.verdict]
        words = v.words
        if v.verdict == "fail":
            words = f"{v.words}\nat {setting_words(v.setting)}"
            if v.law:
                words += f"\n{v.law}"
        elif v.left_out and v.verdict == "pass":
            words += f" ({v.tried} of {v.settings} settings)"
        rows.add_row(v.probe.name, f"[{colour}]{v.verdict}[/]", escape(figure_words(v)), escape(words))
    lines: list = [rows, *(Text(words, style="bold red") for words in leading(audit))]
    for v in audit.failed:
        if v.cause:
            continue
        like = f" It resembles the case {v.case}: flakit cases {v.case}." if v.case else ""
        lines.append(Text.assemble((f"{v.probe.name}: ", "bold red"), v.probe.meaning + like))
    lines.append(Text(headline(audit), style="bold red" if audit.failed else "bold green"))
    return Group(*lines)


def headline(audit) -> str:
    """A sentence: how many probes passed, and how much was left out."""
    count = {word: sum(v.verdict == word for v in audit.verdicts) for word in COLOURS}
    named = {"fail": "failed", "pass": "passed"}
    total = ", ".join(f"{n} {named.get(word, word)}" for word, n in count.items() if n or word != "left out")
    settings = sum(v.settings for v in audit.verdicts)
    left = f"; {audit.left_out} of {settings} settings left out, --full tries them all" if audit.left_out else ""
    return f"{total}{left}; {audit.seconds:.0f} s"


def leading(audit) -> list[str]:
    """What to look at first: a sentence for each probe that is the cause of other failures."""
    causes = []
    for cause in dict.fromkeys(v.cause for v in audit.failed if v.cause):
        names = [v.probe.name for v in audit.failed if v.cause == cause]
        many = f"{len(names)} other probes fail" if len(names) > 1 else "another probe fails"
        causes.append(f"Look at `{cause}` first: {many} as it does, without what they ask: {', '.join(names)}.")
    return causes


def in_a_notebook(audit) -> str:
    """As `table`, in HTML that adapts to the width of the page."""
    rows = []
    for v in audit.verdicts:
        what = [v.words, f"at {setting_words(v.setting)}", v.law] if v.verdict == "fail" else [v.words]
        figure = figure_words(v).replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")
        row = {"probe": v.probe.name, "verdict": _MARKS[v.verdict], "worst of budget": figure}
        rows.append(row | {"what was found": "; ".join(filter(None, what))})
    parts = [still.Table(rows, caption=f"{audit.subject.name}, like {audit.subject.op.name}")._repr_html_()]
    parts += [f"<p><b>{escape_html(words)}</b></p>" for words in leading(audit)]
    for v in audit.failed:
        if v.cause:
            continue
        like = f" It resembles the case <code>{escape_html(v.case)}</code>." if v.case else ""
        parts.append(f"<p><b>{escape_html(v.probe.name)}</b>: {escape_html(v.probe.meaning)}{like}</p>")
    parts.append(f"<p>{escape_html(headline(audit))}</p>")
    return "\n".join(parts)


def as_dict(audit) -> dict:
    """Return versions, device and every verdict, as `flakit audit --json` writes them."""
    versions = {"flakit": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return for_json(
        {
            "subject": audit.subject.name,
            "like": audit.subject.op.name,
            "device": audit.device if audit.device == "cpu" else torch.cuda.get_device_name(),
            "versions": versions | {"triton": version_of("triton")},
            "seconds": round(audit.seconds, 1),
            "left_out": audit.left_out,
            "probes": [_row(v) for v in audit.verdicts],
        }
    )


def _row(v) -> dict:
    row = {"probe": v.probe.name, "verdict": v.verdict, "worst": v.worst, "budget": v.finding and v.finding.allowed}
    row |= {"setting": v.setting, "meaning": v.probe.meaning, "case": v.case, "cause": v.cause, "words": v.words}
    row |= {"law": v.law, "budget_from": v.probe.budget, "tried": v.tried, "settings": v.settings}
    return row | {"left_out": v.left_out, "repro": v.repro}


def as_json(audit) -> str:
    return json.dumps(as_dict(audit), indent=1)
