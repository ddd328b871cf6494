"""An audit as one self-contained page: verdicts, figures, settings and scripts."""

import base64
import html
from collections.abc import Iterator

import torch

from ..numerics.gradients import along_time
from .report import as_dict, figure_words, headline, leading, setting_words

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
    """The whole page as HTML, with figures if matplotlib is installed."""
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
        yield from _figure(_along, audit, v)
        if v.repro:
            yield f"<details><summary>A script that shows it</summary><pre>{_e(v.repro)}</pre></details>"
    yield "</body></html>"


def _e(text: object) -> str:
    return html.escape(str(text))


def _figure(draw, *about) -> Iterator[str]:
    try:
        picture = draw(*about)
    except ImportError:
        return
    if picture is not None:
        data = base64.b64encode(picture.png()).decode()
        yield f'<p><img alt="{_e(picture.alt)}" src="data:image/png;base64,{data}"></p>'


def _along(audit, v):
    """The errors of the tensor that failed along the tokens, at the setting of the first failure."""
    from ..figures.audit import along_time as draw

    if v.pair is None or v.pair[0].ndim != 4:
        return None
    got, true = v.pair
    return draw(v.finding.tensor, along_time(got, true.to(torch.float64)).tolist(), v.finding.allowed or 1e-6)
