"""The panel of `flakit.audit`: a table of probes, and for each failed one its wrong elements and a script."""

import time
from collections.abc import Callable, Iterable, Mapping

import ipywidgets as widgets

from ..figures.audit import ElementsFigure
from ..figures.canvas import Cell
from ..instruments.audit import FAIL, LEFT_OUT, PASS, SECONDS, UNSUPPORTED, Audit, Elements, Verdict, elements
from ..instruments.audit import audit as run_audit
from ..instruments.report import figure_words, setting_words
from ..instruments.subject import Subject, load
from ..language import Words, label, speaking
from ..numerics.operators import Operator
from ..numerics.table import Table
from ..numerics.words import error
from . import knobs
from .base import ButtonRun, Panel
from .knobs import NONE
from .shared import AXES

TABLE = 140
"""The largest height of the table of probes in pixels; a longer table scrolls."""

PAUSE = 0.2
"""The shortest time in seconds between two updates of the table during a run."""

WORDS = Words() | {
    "again": "audit again",
    "alt": "The tensor that fails a probe at the smallest setting found: as computed, as it is, and its errors",
    "heads": {"probe": "probe", "verdict": "verdict", "worst": "worst of budget", "found": "what was found"},
    "verdicts": {PASS: "✓ pass", FAIL: "✗ fail", UNSUPPORTED: "not supported", LEFT_OUT: "left out"},
    "learning": "Calling {name} as {op} is called, to see what it takes.",
    "asking": "{failed} of {total} probes failed so far; now asking {probe}.",
    "shrinking": "All {total} probes are through and {failed} failed. Looking for the smallest setting that shows it, "
    "and for a script.",
    "over": "{passed} of {total} probes passed, {failed} failed, {other} are not supported or were left out; "
    "{seconds:.0f} s.",
    "stopped": "Stopped after {seconds:.0f} s: {passed} of {total} probes passed by then and {failed} failed.",
    "wrong": "{probe}: {count} of {of} elements of {tensor} are wrong at {setting}.",
    "fails": "{probe}: {kind}, at {setting}.",
    "kinds": {
        "raises": "the call raises an error, or returns what no such operator returns",
        "no gradient": "a gradient does not come back",
        "changed": "what should stay the same changes",
        "wrong": "{tensor} is wrong",
        "non-finite": "{tensor} is not finite",
    },
    "copy": "“copy as Python” gives a script that shows it.",
    "title": "{probe}: {tensor}{place}",
    "place": ", {axis} {n}",
    "waiting": "no failure so far",
    "fine": "no probe failed",
    "nothing": "this failure has no tensor to show",
    "later": "which elements are wrong is shown when all probes are through",
    "cell": "{tensor}{place}: computed {got}, true {true}; error / RMS {off}, {said}",
    "said": {True: "wrong", False: "which rounding explains"},
}


class AuditPanel(Panel):
    """A panel that runs an audit in a background thread and shows each failure when it is reported. subject: the
    wrapped operator. audit: the `Audit`, None until the run has ended. options: arguments of `flakit.audit`."""

    name = "audit"
    on_view = ("failure",)
    result: tuple[Verdict, Elements | None] | None

    def __init__(self, subject: Subject, like: object, seed: int = 0, **options):
        self.subject, self._like, self._options = subject, like, options
        self._verdicts: dict[str, Verdict] = {}
        self._elements: dict[str, Elements | None] = {}
        self.audit: Audit | None = None
        self._now, self._total, self._error, self._stopped, self._updated = "", 0, "", False, 0.0
        self.run = ButtonRun(WORDS["again"], self._work, done=self._finished, failed=self._failed)
        layout = {"height": f"{TABLE}px", "overflow": "auto", "width": "auto", "flex": "0 0 auto"}
        self.table = widgets.HTML(layout=layout, tabbable=True).add_class("flakit-table")
        failure = knobs.choice(NONE, [NONE], "failure")
        self._picked = False
        failure.observe(self._pick, "value")
        super().__init__({"failure": failure}, {"seed": seed}, alt=WORDS["alt"], runs=(self.run,))
        children = list(self.children)
        children.insert(children.index(self.readout) + 1, self.table)
        self.children = children

    # The run.

    def _work(self, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> Audit:
        self._verdicts, self._elements, self.audit, self._error, self._now = {}, {}, None, "", ""
        self._picked = False
        self._offer()
        self._update()

        def at(probe: str, done: int, total: int) -> None:
            self._now, self._total = probe, total
            progress(done, total)
            self._update(PAUSE)

        options = {"seed": self.setting["seed"], "progress": at, "found": self._judged, "stopped": cancelled}
        audit = run_audit(self.subject, **options, **self._options)
        self._stopped = cancelled()
        return audit

    def _judged(self, verdict: Verdict) -> None:
        name = verdict.probe.name
        self._verdicts[name] = verdict
        self._elements.pop(name, None)
        if verdict.verdict == FAIL:
            self._offer()
        self._update(PAUSE)

    def _finished(self, audit: Audit) -> None:
        self.audit = audit
        self._verdicts |= {verdict.probe.name: verdict for verdict in audit.verdicts}
        self._offer()
        self._update()

    def _failed(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self._update()

    def _pick(self, _) -> None:
        self._picked |= not self._held

    def _offer(self) -> None:
        """List the failed probes in the knob; until the reader picks one, select one that no other failure explains."""
        failed = [v for v in self._verdicts.values() if v.verdict == FAIL]
        first = sorted(failed, key=lambda v: (bool(v.cause), v.smallest is None))
        names = [v.probe.name for v in failed] or [NONE]
        knob = self.knobs["failure"]
        chosen = knob.value if self._picked and knob.value in names else first[0].probe.name if first else NONE
        with self.held():
            if knobs.stops_of(knob) != names:
                knob.options = knobs.labelled({name: name for name in names})
            knob.value = self._start["failure"] = chosen
        self.redraw()

    def _update(self, pause: float = 0.0) -> None:
        """Update the table and the readout, unless the last update is less than `pause` seconds ago."""
        now = time.perf_counter()
        if now - self._updated < pause:
            return
        self._updated = now
        self.table.value = self._table_html()
        self.say(self.describe(self.result))

    def _table_html(self) -> str:
        """Return the probes as an HTML table: failures first, those that another failure explains after the others."""
        verdicts = sorted(self._verdicts.values(), key=lambda v: (v.verdict != FAIL, bool(v.cause)))
        rows = [
            {"probe": v.probe.name, "verdict": WORDS["verdicts"][v.verdict], "worst": figure_words(v), "found": v.words}
            for v in verdicts
        ]
        return Table(rows, dict(WORDS["heads"]))._repr_html_() if rows else ""

    # One failure.

    def compute(self, failure, **_) -> tuple[Verdict, Elements | None] | None:
        verdict = self._verdicts.get(failure)
        if verdict is None:
            return None
        if failure not in self._elements:
            self._elements[failure] = elements(verdict, self.subject.op)
        return verdict, self._elements[failure]

    def draw(self, result, **_) -> None:
        figure = self.figure(ElementsFigure)
        verdict, wrong = result or (None, None)
        if wrong is None:
            done, waiting = ("fine", "waiting") if verdict is None else ("nothing", "later")
            figure.update("", None, words=WORDS[done if self.audit else waiting])
            return
        title = WORDS.say("title", probe=verdict.probe.name, tensor=wrong.tensor, place=_place(wrong.where))
        figure.update(title, vars(wrong), rows=_axis(wrong.rows), columns=_axis(wrong.columns))

    def describe(self, result, **_) -> str:
        return "\n".join(filter(None, (self._status(), self._about(*result) if result else "")))

    def _status(self) -> str:
        """Return a sentence on how far the run is: which probe runs, or how many passed and failed."""
        if self._error:
            return self._error
        count = {verdict: sum(v.verdict == verdict for v in self._verdicts.values()) for verdict in (PASS, FAIL)}
        values = {"passed": count[PASS], "failed": count[FAIL]}
        if self.audit is not None:
            values |= {"total": len(self.audit.verdicts), "seconds": self.audit.seconds}
            other = values["total"] - sum(count.values())
            return WORDS.say("stopped" if self._stopped else "over", other=other, **values)
        if not self._now:
            return WORDS.say("learning", name=self.subject.name, op=self.subject.op.label)
        if self._now.startswith("shrinking"):
            return WORDS.say("shrinking", total=self._total, failed=count[FAIL])
        return WORDS.say("asking", total=self._total // 2, probe=self._now, failed=count[FAIL])

    def _about(self, verdict: Verdict, wrong: Elements | None) -> str:
        finding, setting = verdict.finding, setting_words(verdict.setting)
        values = {"probe": verdict.probe.name, "setting": setting, "tensor": finding.tensor}
        if wrong is not None:
            text = WORDS.say("wrong", count=wrong.count, of=wrong.total, **values)
        else:
            text = WORDS.say("fails", kind=WORDS.say("kinds", finding.kind, tensor=finding.tensor), **values)
        return f"{text} {WORDS['copy'] if verdict.repro else ''}"

    def arithmetic(self, result, cell: Cell, **_) -> str | None:
        if not result or result[1] is None:
            return None
        x, at = result[1], (cell.row, cell.column)
        where = {**x.where, **({x.rows: cell.row} if x.rows else {}), x.columns: cell.column}
        return WORDS.say(
            "cell", tensor=x.tensor, place=_place(where), got=x.got[at], true=x.true[at],
            off=error(x.off[at]), said=WORDS["said"][bool(x.wrong[at])],
        )  # fmt: skip

    def script(self, *, failure, seed, **_) -> str:
        """Return the script that reproduces the selected failure; without a failure, a script that runs the audit."""
        verdict = self._verdicts.get(failure)
        if verdict is not None and verdict.repro:
            return verdict.repro
        like = self._like if isinstance(self._like, str) else self.subject.op.name
        only = "" if self._options.get("only") is None else f", only={self._options['only']!r}"
        lines = "\n".join(self.subject.source)
        subject = "functools.partial(adapter, function)" if self.subject.adapted else "function"
        return f"""import functools

import flakit
{lines}

print(flakit.audit({subject}, like={like!r}, seed={seed}{only}))
"""


def _axis(name: str) -> str:
    return label(AXES.get(name, name))


def _place(where: Mapping[str, int]) -> str:
    return "".join(WORDS.say("place", axis=_axis(name), n=n) for name, n in where.items())


def audit(
    subject: str | Callable | Subject,
    like: str | Operator | None = None,
    *,
    adapter: str | Callable | None = None,
    only: Iterable[str] | str | None = None,
    full: bool = False,
    seed: int = 0,
    device: str | None = None,
    seconds: float | None = SECONDS,
    shrink: bool = True,
    language: str | None = None,
) -> AuditPanel:
    """Return a panel that audits a kernel in the background. A table fills with the probes' verdicts. For a failed
    probe the panel shows the wrong elements of a tensor at the smallest failing setting; "copy as Python" reproduces
    the failure.

    The audit starts at once; "cancel" ends it after the current call and keeps the verdicts. subject, like, adapter,
    only, full, seed, device, seconds, shrink: as in `flakit.audit`, which raises the same errors; its result is
    `panel.audit`.
    language: "en" or "zh"; default: the current language, see `flakit.language`. The probes' own messages are English.

    >>> audit(my_kernel, like="rwkv6")
    """
    with speaking(language):
        subject = load(subject, like, adapter)
        only = [only] if isinstance(only, str) else None if only is None else list(only)
        options = {"only": only, "full": full, "device": device, "seconds": seconds, "shrink": shrink}
        panel = AuditPanel(subject, like, seed, **options)
        panel.run.start()
        return panel
