"""Reports of an `Audit`: a table for a terminal or a notebook, JSON, and a self-contained HTML page."""

import base64
import platform
from collections.abc import Iterator, Mapping
from html import escape as _e

import torch
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..numerics import table as still
from ..numerics.gradients import along_time
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
    """Return a setting's fields as text: T = 17, B = 1, ..., spike = (16, -100)."""
    return ", ".join(f"{name} = {_value(x)}" for name, x in setting.items())


def _value(x: object) -> str:
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_value, x))})"
    return number(x)


def figure_words(verdict) -> str:
    """Return a verdict's worst figure and its allowed value as text, "" if nothing ran."""
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
    """Return the verdicts as a rich table with a row for each probe; sentences below it say what each failure means."""
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
    """Return one sentence: how many probes passed, how many settings were left out, and how long it took."""
    count = {word: sum(v.verdict == word for v in audit.verdicts) for word in COLOURS}
    named = {"fail": "failed", "pass": "passed"}
    total = ", ".join(f"{n} {named.get(word, word)}" for word, n in count.items() if n or word != "left out")
    settings = sum(v.settings for v in audit.verdicts)
    left = f"; {audit.left_out} of {settings} settings left out, --full tries them all" if audit.left_out else ""
    return f"{total}{left}; {audit.seconds:.0f} s"


def leading(audit) -> list[str]:
    """Return a sentence for each probe that explains the failures of others, to be looked at first."""
    causes = []
    for cause in dict.fromkeys(v.cause for v in audit.failed if v.cause):
        names = [v.probe.name for v in audit.failed if v.cause == cause]
        many = f"{len(names)} other probes fail" if len(names) > 1 else "another probe fails"
        causes.append(f"Look at `{cause}` first: {many} as it does, without what they ask: {', '.join(names)}.")
    return causes


def in_a_notebook(audit) -> str:
    """Return the verdicts as `table` does, in HTML that adapts to the width of the page."""
    rows = []
    for v in audit.verdicts:
        what = [v.words, f"at {setting_words(v.setting)}", v.law] if v.verdict == "fail" else [v.words]
        figure = figure_words(v).replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")
        row = {"probe": v.probe.name, "verdict": _MARKS[v.verdict], "worst of budget": figure}
        rows.append(row | {"what was found": "; ".join(filter(None, what))})
    parts = [still.Table(rows, caption=f"{audit.subject.name}, like {audit.subject.op.name}")._repr_html_()]
    parts += [f"<p><b>{_e(words)}</b></p>" for words in leading(audit)]
    for v in audit.failed:
        if v.cause:
            continue
        like = f" It resembles the case <code>{_e(v.case)}</code>." if v.case else ""
        parts.append(f"<p><b>{_e(v.probe.name)}</b>: {_e(v.probe.meaning)}{like}</p>")
    parts.append(f"<p>{_e(headline(audit))}</p>")
    return "\n".join(parts)


def as_dict(audit) -> dict:
    """Return versions, device and every verdict as plain data, as `flakit audit --json` writes them."""
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


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d1d1d; max-width: 1060px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; width: 100% } th { text-align: left }
td:nth-child(-n+3) { white-space: nowrap }
td, th { padding: .3em .7em .3em 0; vertical-align: top; border-bottom: 1px solid #ddd }
.fail { color: #b34700; font-weight: 600 } .pass { color: #00694c } .not-supported { color: #6b6b6b }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px }
img { max-width: 100%; height: auto } details { margin: .6em 0 } code { overflow-wrap: anywhere }
"""


def page(audit) -> str:
    """Return a self-contained HTML page of the audit, with figures if matplotlib is installed."""
    return "\n".join(_lines(audit))


def _lines(audit) -> Iterator[str]:
    failed = as_dict(audit)
    versions = ", ".join(f"{name} {version}" for name, version in failed["versions"].items() if version)
    title = f"Audit of {audit.subject.name}"
    count = len(audit.failed)
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{_e(title)}</h1>"
    yield f"<p>Held to the float64 truth of {_e(audit.subject.op.label)} on {_e(failed['device'])}; {_e(versions)}. "
    yield f"{count or 'No'} of {len(audit.verdicts)} probes failed. {_e(headline(audit))}.</p>"
    yield from (f"<p><b>{_e(words)}</b></p>" for words in leading(audit))
    yield from _figure(audit.picture)
    yield "<table><thead><tr><th>probe</th><th>verdict</th><th>worst of budget</th><th>what was found</th></tr></thead>"
    yield "<tbody>"
    for v in audit.verdicts:
        kind, name = v.verdict.replace(" ", "-"), _e(v.probe.name)
        link = f'<a href="#{name}">{name}</a>' if v.verdict == "fail" else name
        yield f'<tr><td>{link}</td><td class="{kind}">{v.verdict}</td><td>{_e(figure_words(v))}</td>'
        yield f"<td>{_e(v.words)}</td></tr>"
    yield "</tbody></table>"
    for v in audit.failed:
        yield f'<h2 id="{_e(v.probe.name)}">{_e(v.probe.name)}</h2><p>{_e(v.probe.meaning)}</p>'
        yield f"<p>{_e(v.words)}; at the smallest setting found: <code>{_e(setting_words(v.setting))}</code>.</p>"
        yield f"<p>{_e(v.law[:1].upper() + v.law[1:])}.</p>" if v.law else ""
        if v.case:
            yield f"<p>It resembles the case <code>{_e(v.case)}</code>: <code>flakit cases {_e(v.case)}</code>.</p>"
        yield f"<p>Budget: {_e(v.probe.budget)}.</p>"
        yield from _figure(_along, v)
        if v.repro:
            yield f"<details><summary>A script that shows it</summary><pre>{_e(v.repro)}</pre></details>"
    yield "</body></html>"


def _figure(draw, *about) -> Iterator[str]:
    try:
        picture = draw(*about)
    except ImportError:
        return
    if picture is not None:
        data = base64.b64encode(picture.png()).decode()
        yield f'<p><img alt="{_e(picture.alt)}" src="data:image/png;base64,{data}"></p>'


def _along(v):
    """Draw the errors of a verdict's failed tensor along the tokens, at the first failing setting, if it has 4 axes."""
    from ..figures.audit import along_time as draw

    if v.pair is None or v.pair[0].ndim != 4:
        return None
    got, true = v.pair
    return draw(v.finding.tensor, along_time(got, true.to(torch.float64)).tolist(), v.finding.allowed or 1e-6)
