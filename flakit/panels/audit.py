"""An audit while it runs: the table of probes as it fills; of each failure, which elements are wrong, and a script."""

import time
from collections.abc import Callable, Iterable, Mapping

import ipywidgets as widgets

from ..figures.audit import ElementsFigure
from ..figures.canvas import Cell
from ..instruments.audit import FAIL, LEFT_OUT, PASS, SECONDS, UNSUPPORTED, Audit, Verdict
from ..instruments.audit import audit as hold
from ..instruments.elements import Elements, elements
from ..instruments.report import figure_words, setting_words
from ..instruments.subject import Subject, load
from ..language import Words, label, speaking
from ..numerics.operators import Operator
from ..numerics.table import Table
from ..numerics.words import error
from . import knobs
from .base import ButtonRun, Panel
from .knobs import NONE

TABLE = 140
"""Pixels that the table of probes may be high before it scrolls."""

PAUSE = 0.2
"""Seconds between two messages about where a run stands."""

WORDS = Words() | {
    "failure": "failure",
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
    "axes": {
        **{"T": "token", "K": "channel of k", "V": "column of v", "M": "slot"},
        **{"B": "sequence", "N": "sequence", "H": "head", "HQ": "head", "HV": "head"},
    },
}


class AuditPanel(Panel):
    """It runs in the background; what has been found so far can be looked at meanwhile."""

    name = "audit"
    on_view = ("failure",)
    readout_lines = 3

    def __init__(self, subject: Subject, like: object, seed: int = 0, **how):
        self.subject, self._like, self._how = subject, like, how
        self._verdicts: dict[str, Verdict] = {}
        self._elements: dict[str, Elements | None] = {}
        self.audit: Audit | None = None
        self._now, self._total, self._broke, self._stopped, self._told = "", 0, "", False, 0.0
        self.run = ButtonRun(WORDS["again"], self._work, done=self._finished, failed=self._failed)
        layout = {"height": f"{TABLE}px", "overflow": "auto", "width": "auto", "flex": "0 0 auto"}
        self.table = widgets.HTML(layout=layout, tabbable=True)
        self.table.add_class("flakit-table")
        made = {"failure": knobs.choice(NONE, [NONE], WORDS["failure"])}
        self._picked = False
        made["failure"].observe(self._pick, "value")
        super().__init__(made, {"seed": seed}, alt=WORDS["alt"], runs=(self.run,))
        children = list(self.children)
        children.insert(children.index(self.readout) + 1, self.table)
        self.children = children

    # The run.

    def _work(self, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> Audit:
        self._verdicts, self._elements, self.audit, self._broke, self._now = {}, {}, None, "", ""
        self._picked = False
        self._offer()
        self._tell()

        def at(probe: str, done: int, total: int) -> None:
            self._now, self._total = probe, total
            progress(done, total)
            self._tell(PAUSE)

        found = hold(
            self.subject, seed=self.setting["seed"], progress=at, found=self._came, stopped=cancelled, **self._how
        )
        self._stopped = cancelled()
        return found

    def _came(self, verdict: Verdict) -> None:
        name = verdict.probe.name
        self._verdicts[name] = verdict
        self._elements.pop(name, None)
        if verdict.verdict == FAIL:
            self._offer()
        self._tell(PAUSE)

    def _finished(self, found: Audit) -> None:
        self.audit = found
        for verdict in found.verdicts:
            self._verdicts[verdict.probe.name] = verdict
        self._offer()
        self._tell()

    def _failed(self, why: Exception) -> None:
        self._broke = f"{type(why).__name__}: {why}"
        self._tell()

    def _pick(self, _) -> None:
        self._picked |= not self._held

    def _offer(self) -> None:
        """The failures to choose from; until somebody has chosen one, the one to look at first."""
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

    def _tell(self, pause: float = 0.0) -> None:
        """Table and readout as things stand, but not more often than somebody can read."""
        now = time.perf_counter()
        if now - self._told < pause:
            return
        self._told = now
        self.table.value = self._tabled()
        self.say(self.describe(self.result))

    def _tabled(self) -> str:
        """Failures first, those that fail for their own reason before the others."""
        said = list(self._verdicts.values())
        said.sort(key=lambda v: (v.verdict != FAIL, bool(v.cause)))
        rows = [
            {"probe": v.probe.name, "verdict": WORDS["verdicts"][v.verdict], "worst": figure_words(v), "found": v.words}
            for v in said
        ]
        return Table(rows, dict(WORDS["heads"]))._repr_html_() if rows else ""

    # What is shown of one failure.

    def compute(self, failure, **_) -> tuple[Verdict, Elements | None] | None:
        verdict = self._verdicts.get(failure)
        if verdict is None:
            return None
        if failure not in self._elements:
            self._elements[failure] = elements(verdict, self.subject.op)
        return verdict, self._elements[failure]

    def draw(self, result, **_) -> None:
        figure = self.figure(ElementsFigure)
        self.canvas = figure.canvas
        verdict, found = result or (None, None)
        if found is None:
            if verdict is None:
                words = "fine" if self.audit else "waiting"
            else:
                words = "nothing" if self.audit else "later"
            figure.update("", None, words=WORDS[words])
            return
        title = WORDS.say("title", probe=verdict.probe.name, tensor=found.tensor, place=_place(found.where))
        axes = {"rows": _axis(found.rows), "columns": _axis(found.columns)}
        figure.update(title, vars(found), **axes)

    def describe(self, result, **_) -> str:
        return "\n".join(filter(None, (self._stand(), self._about(*result) if result else "")))

    def _stand(self) -> str:
        """Where the run stands."""
        if self._broke:
            return self._broke
        count = {verdict: sum(v.verdict == verdict for v in self._verdicts.values()) for verdict in (PASS, FAIL)}
        said = {"passed": count[PASS], "failed": count[FAIL]}
        if self.audit is not None:
            said |= {"total": len(self.audit.verdicts), "seconds": self.audit.seconds}
            return WORDS.say("stopped" if self._stopped else "over", other=said["total"] - sum(count.values()), **said)
        if not self._now:
            return WORDS.say("learning", name=self.subject.name, op=self.subject.op.label)
        if self._now.startswith("shrinking"):
            return WORDS.say("shrinking", total=self._total, failed=said["failed"])
        return WORDS.say("asking", total=self._total // 2, probe=self._now, failed=said["failed"])

    def _about(self, verdict: Verdict, found: Elements | None) -> str:
        said = {
            "probe": verdict.probe.name,
            "setting": setting_words(verdict.setting),
            "tensor": verdict.finding.tensor,
        }
        copy = WORDS["copy"] if verdict.repro else ""
        if found is not None:
            return WORDS.say("wrong", count=found.count, of=found.total, **said) + f" {copy}"
        kind = WORDS.say("kinds", verdict.finding.kind, tensor=said["tensor"])
        return WORDS.say("fails", kind=kind, **said) + f" {copy}"

    def arithmetic(self, result, cell: Cell, **_) -> str | None:
        if not result or result[1] is None:
            return None
        found, at = result[1], (cell.row, cell.column)
        where = {**found.where, **({found.rows: cell.row} if found.rows else {}), found.columns: cell.column}
        return WORDS.say(
            "cell", tensor=found.tensor, place=_place(where), got=found.got[at], true=found.true[at],
            off=error(found.off[at]), said=WORDS["said"][bool(found.wrong[at])],
        )  # fmt: skip

    def script(self, *, failure, seed, **_) -> str:
        """That of the failure on view; where it has none, the audit itself."""
        verdict = self._verdicts.get(failure)
        if verdict is not None and verdict.repro:
            return verdict.repro
        like = self._like if isinstance(self._like, str) else self.subject.op.name
        only = "" if self._how.get("only") is None else f", only={self._how['only']!r}"
        lines = "\n".join(self.subject.source)
        subject = "functools.partial(adapter, function)" if self.subject.adapted else "function"
        return f"""import functools

import flakit
{lines}

print(flakit.audit({subject}, like={like!r}, seed={seed}{only}))
"""


def _axis(name: str) -> str:
    return WORDS["axes"][name] if name in WORDS["axes"] else label(name)


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
    """A panel that audits a kernel in the background: the table of probes as it fills, and of each failure which
    elements of which tensor are wrong at the smallest setting found, with a script that shows it ("copy as Python").

    It begins at once. "cancel" ends it after the call that is running, and what was found by then stays.
    subject and all others: as `flakit.audit` takes them; `panel.audit` is what that returns, None until it is over.
    language: of its words, "en" or "zh"; default: what flakit speaks, see `flakit.language`. What a probe found is
    English, as in every report.

    >>> audit(my_kernel, like="rwkv6")
    """
    with speaking(language):
        if isinstance(subject, str):
            subject = load(subject, like, adapter)
        elif not isinstance(subject, Subject):
            subject = Subject(subject, like, adapter=adapter)
        only = [only] if isinstance(only, str) else None if only is None else list(only)
        how = {"only": only, "full": full, "device": device, "seconds": seconds, "shrink": shrink}
        panel = AuditPanel(subject, like, seed, **how)
        panel.run.start()
        return panel
