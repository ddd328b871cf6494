"""The audit: runs every probe on a linear-attention kernel, compares it with float64, and collects the verdicts.

Call it as `flakit.audit(my_op, like="rwkv6")`, or from a shell as `flakit audit my.py:my_op`. Each probe asks one
question that a real failure taught, a case of `flakit.cases`.
"""

import contextlib
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from rich.console import Console
from torch import Tensor

from ..numerics.arguments import one_of, whole_number
from ..numerics.operators import Operator
from ..ops.common.dispatch import interpreted
from .examiner import Examiner, clock_of
from .finding import Finding
from .probes import PROBES, Probe
from .report import as_dict, in_a_notebook, page, table
from .repro import repro
from .shrink import SECONDS as SHRINKING
from .shrink import check_installed, law
from .shrink import shrink as shrink_finding
from .subject import ONCE, Broken, Refused, Stopped, Subject, load

PASS, FAIL, UNSUPPORTED, LEFT_OUT = "pass", "fail", "not supported", "left out"
SECONDS = 60.0
"""Time limit for all probes together; beyond it only their first settings run. --full has none."""
OVERTIME = 1.5
"""No probe starts after this many times the limit, so that the audit of a slow kernel ends, too."""


@dataclass(frozen=True)
class Verdict:
    """The result of one probe.

    verdict: PASS, FAIL, UNSUPPORTED or LEFT_OUT. finding: that of the largest `share`, None if nothing ran.
    words: the finding's measured value and the allowed one, or why the probe is not supported.
    setting: the smallest setting that fails, or that of `finding`, as fields by name.
    case: the case of the casebook that the failure resembles. law: a sentence on the decay at which it begins.
    tried: how many of `settings` ran. left_out: how many did not, for lack of time or because they need --full.
    cause: another probe that fails for the same reason, "" for none. control: the finding that shows it.
    repro: a standalone script that reproduces the failure.
    pair: the tensor that failed first, as computed and in float64. smallest: the same at `setting`.
    """

    probe: Probe
    verdict: str
    words: str
    finding: Finding | None = None
    setting: Mapping | None = None
    case: str | None = None
    law: str = ""
    tried: int = 0
    settings: int = 0
    left_out: int = 0
    cause: str = ""
    control: Finding | None = None
    repro: str | None = None
    pair: tuple[Tensor, Tensor] | None = None
    smallest: tuple[Tensor, Tensor] | None = None

    @property
    def worst(self) -> float:
        """The `figure` of `finding`, the probe's worst measurement against what is allowed; NaN if nothing ran."""
        return math.nan if self.finding is None else self.finding.figure


@dataclass(frozen=True)
class Audit:
    """The result of an audit, a verdict for each probe, as in `audit["truth"]`; prints as a table.

    device: of the tensors, "cpu" or "cuda". seconds: wall-clock time. `to_dict` returns all of it as plain data.
    """

    subject: Subject
    verdicts: tuple[Verdict, ...]
    device: str
    seconds: float

    @property
    def failed(self) -> tuple[Verdict, ...]:
        return tuple(x for x in self.verdicts if x.verdict == FAIL)

    @property
    def passed(self) -> bool:
        """Whether no probe failed; an unsupported feature is no failure."""
        return not self.failed

    @property
    def left_out(self) -> int:
        """How many settings did not run, for lack of time or because they need --full."""
        return sum(x.left_out for x in self.verdicts)

    def __getitem__(self, name: str) -> Verdict:
        verdicts = {x.probe.name: x for x in self.verdicts}
        return verdicts[one_of("probe", name, verdicts)]

    __rich__ = table
    _repr_html_ = in_a_notebook
    to_dict = as_dict

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=140, file=text, force_jupyter=False).print(self)
        return text.getvalue()

    __repr__ = __str__

    def picture(self):
        """Draw every probe's worst figure as a share of its budget, and return the matplotlib `Picture`."""
        from ..figures.audit import shares

        return shares({v.probe.name: (v.verdict, 0.0 if v.finding is None else v.finding.share) for v in self.verdicts})

    def write_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(as_dict(self), indent=1) + "\n", encoding="utf-8")

    def write_html(self, path: str | Path) -> None:
        Path(path).write_text(page(self), encoding="utf-8")

    def write_repros(self, folder: str | Path) -> None:
        """Write the script of each failure that has one to folder/<probe>.py, "_" in place of "-"."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for v in self.failed:
            if v.repro:
                Path(folder, f"{v.probe.name.replace('-', '_')}.py").write_text(v.repro, encoding="utf-8")


@dataclass(frozen=True)
class Elements:
    """One matrix of a failed tensor: of all its batch entries and heads, the one with the most wrong elements.

    got, true, off: computed and true values, and |got - true| over the whole tensor's RMS, float64 [rows, columns].
    wrong: booleans of the same shape: non-finite where the truth is finite, or off by more than allowed.
    rows, columns: the letters of their axes, "" for none; T is always the columns. where: the index along other axes.
    count, total: how many elements of the whole tensor are wrong, of how many.
    """

    tensor: str
    got: np.ndarray = field(repr=False)
    true: np.ndarray = field(repr=False)
    off: np.ndarray = field(repr=False)
    wrong: np.ndarray = field(repr=False)
    rows: str
    columns: str
    where: Mapping[str, int]
    count: int
    total: int


def elements(verdict: Verdict, op: Operator) -> Elements | None:
    """Return the wrong elements of a verdict, for a picture of them. Return None if no element exceeds the allowed
    error by itself, or if the audit ended before it shrank the failure."""
    finding = verdict.finding
    if verdict.smallest is None or finding is None:
        return None
    got, true = (x.detach().double().cpu() for x in verdict.smallest)
    name = finding.tensor
    off = torch.where(got == true, 0.0, got - true).abs()
    allowed = (finding.budget or finding.allowed) * _size(finding, off, true)
    wrong = ~got.isfinite() & true.isfinite() | (off > allowed)
    if not wrong.any():  # the failure lies elsewhere, or in another call
        return None
    axes = op.axes[name if name in op.axes else name[1:]].split()
    columns = "T" if "T" in axes else axes[-1]
    rows = next((axis for axis in reversed(axes) if axis != columns and axis not in ("B", "N")), "")
    others = [axis for axis in axes if axis not in (rows, columns)]
    sizes = [true.shape[axes.index(axis)] for axis in others]
    matrices = f"{' '.join(axes)} -> ({' '.join(others)}) {rows or 1} {columns}"
    got, true, off, wrong = (rearrange(x, matrices) for x in (got, true, off, wrong))
    most = int(wrong.sum((1, 2)).argmax())
    places = np.unravel_index(most, sizes) if others else ()
    rms = true.square().mean().sqrt()
    where = {axis: int(n) for axis, n in zip(others, places, strict=True)}
    one = [x[most].numpy() for x in (got, true, off / rms if rms else off, wrong)]
    return Elements(name, one[0], one[1], one[2], one[3], rows, columns, where, int(wrong.sum()), wrong.numel())


def _size(finding: Finding, off: Tensor, true: Tensor) -> float:
    """Return the size by which the audit divided the errors, the true tensor's RMS or more, from the finding."""
    rms = true.square().mean().sqrt().item()
    if finding.kind != "wrong" or not finding.figure:
        return rms
    whole = {"L2": off.square().mean().sqrt(), "worst element": off.max()}.get(finding.measure)
    return rms if whole is None else max(rms, whole.item() / finding.figure)


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
    progress: Callable[[str, int, int], None] | None = None,
    found: Callable[[Verdict], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Audit:
    """Compare a linear-attention kernel with the float64 truth, in every probe of the casebook.

    subject: a callable, or its name: "chunk_rwkv6", "package.module:attribute", "file.py:attribute". It is called with
        the operator's tensors, by name if its signature has those names, else in the operator's order; it gets `scale`,
        `initial_state`, `output_final_state`, `cu_seqlens` and `group` if its signature names them. It returns o, a
        tuple (o, final state), or a result with `o` and `final_state`. Decays are natural logarithms, <= 0.
    like: the operator that it computes: "rwkv6", "rwkv7", "gsa", one of the family ("kda", "gated_delta_rule", …: the
        names of `flakit.numerics.operators.known()`), a result of `flakit.describe`, or "file.py:naive", a reference
        whose docstring describes it. Default: guess from the subject's name.
    adapter: a function, or its name, called in the subject's place with it and the operator's arguments by name.
    only: names of the probes to run, of `PROBES`. full: denser grids and long sequences, without a time limit.
    device: default, the GPU if there is one and Triton does not interpret.
    seconds: the time limit of all probes together, in CPU time of this process on a CPU. Each probe first runs its most
        telling setting; then all run the others until time is up, and the rest is counted as left out. No probe starts
        after 1.5 times the limit. Shrinking and scripts have half of `SECONDS`.
    shrink: search for the smallest setting at which each failure persists, with hypothesis (the extra `audit`).
    progress: called with (the probe's name, probes done, probes in all).
    found: called with each verdict as soon as it is known, and again whenever it changes.
    stopped: asked before every call of the subject; once it returns true, the audit ends with its verdicts so far.

    A verdict is "pass", "fail", "left out" if time was up, or "not supported": the signature does not name an argument;
    the subject refuses it with a TypeError, a ValueError, a NotImplementedError or an AssertionError; or there is no
    backward pass. Any other error is a failure, and so is a refusal or an error that the same call does not repeat.
    Once any input gets a gradient, one that gets none is a failure. A probe that also fails without its own condition
    fails for the reason of another, most often `truth`, and its verdict says so.

    Raises ValueError if the subject takes none of the plainest calls, TypeError if it is not callable.

    >>> print(flakit.audit(my_op, like="rwkv6"))
    """
    if shrink:
        check_installed()
    subject = load(subject, like, adapter)
    names = list(PROBES) if only is None else [only] if isinstance(only, str) else list(only)
    chosen = [PROBES[one_of("only", name, PROBES)] for name in names]
    if device is None:
        device = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
    progress, found = progress or (lambda name, done, total: None), found or (lambda verdict: None)
    start, limit = time.monotonic(), math.inf if seconds is None or full else seconds
    seed = whole_number("seed", seed, least=0)
    begun = clock_of(device)()
    verdicts = [Verdict(probe, LEFT_OUT, "no time was left for it") for probe in chosen]

    def tell(index: int, verdict: Verdict) -> None:
        verdicts[index] = verdict
        found(verdict)

    with contextlib.suppress(Stopped), contextlib.ExitStack() as afterwards:
        examiner = Examiner(subject, device=device, full=full, seed=seed, stopped=stopped)
        afterwards.callback(examiner.close)
        queue = [_Progress(probe, examiner) for probe in chosen]
        verdicts = [each.so_far() for each in queue]
        examiner.deadline = begun + OVERTIME * limit
        for n, each in enumerate(queue):
            progress(each.probe.name, n, 2 * len(queue))
            each.go_on(first=True)
            tell(n, each.so_far())
        for n, each in enumerate(queue):
            progress(each.probe.name, len(queue) + n, 2 * len(queue))
            now = examiner.clock()
            examiner.deadline = now + max(0.0, begun + limit - now) / (len(queue) - n) * 2
            each.go_on()
            tell(n, each.so_far())
        for n, verdict in enumerate(_fail_causes((each.verdict() for each in queue), examiner.op)):
            tell(n, verdict)
        failed = [n for n, v in enumerate(verdicts) if v.verdict == FAIL]
        end = examiner.clock() + (math.inf if limit == math.inf else SECONDS / 2)
        for left, n in zip(range(len(failed), 0, -1), failed, strict=True):
            progress(f"shrinking {verdicts[n].probe.name}", len(chosen), len(chosen))
            examiner.deadline = end
            smaller = shrink and not verdicts[n].cause
            seconds_left = max(0.0, min(SHRINKING, (end - examiner.clock()) / left))
            tell(n, _smallest(verdicts[n], examiner, smaller, seconds_left))
        progress("", len(chosen), len(chosen))
    return Audit(subject, tuple(verdicts), device, time.monotonic() - start)


def _smallest(v: Verdict, x: Examiner, shrunk: bool, seconds: float) -> Verdict:
    """Shrink a failure, if `shrunk`, for `seconds` at most; return the verdict with its law, script and tensors."""
    if x.late or v.finding is None:
        return v
    finding = shrink_finding(x, v.probe, v.finding, seconds) if shrunk else v.finding
    if v.cause:
        pair = _pair(x, finding)
        return replace(v, repro=repro(x, v.probe, finding), pair=pair, smallest=pair)
    case, words = law(x, v.probe, v.finding)
    if v.probe.name == "anchor-shift" and _with_one_head(x, v):
        case = "anchor"  # a single head cannot read another's anchor
    script = repro(x, v.probe, finding) or repro(x, v.probe, v.finding)  # the smallest may be wrong by too little
    shown: dict[str, Any] = {"words": finding.words, "finding": finding, "setting": finding.setting.summary(x.op)}
    shown |= {"case": case or None, "law": words, "repro": script}
    return replace(v, **shown, pair=_pair(x, v.finding), smallest=_pair(x, finding))


def _with_one_head(x: Examiner, v: Verdict) -> bool:
    """Whether the head with the strongest decay also fails alone, so that no other head's decay is to blame."""
    assert v.finding is not None  # it failed
    s = v.finding.setting
    assert isinstance(s.decay, float)  # as in every setting of this probe
    spike = (0, s.first * (s.H - 1)) if s.first else None
    alone = s.without(H=1, first=0.0, per_head=0.0, spike=spike, decay=s.decay * (1 + s.per_head * (s.H - 1)))
    try:
        return v.probe.ask(x, alone).fails
    except Refused:
        return False


def _pair(x: Examiner, finding: Finding) -> tuple[Tensor, Tensor] | None:
    if finding.kind not in ("wrong", "non-finite"):
        return None
    try:
        got = x.run(finding.setting).values.get(finding.tensor)
    except (Refused, Broken):
        return None
    true = x.truth(finding.setting).values.get(finding.tensor)
    return None if got is None or true is None or got.shape != true.shape else (got, true)


def _unrepeated(probe: Probe, x: Examiner, finding: Finding) -> str:
    """Run a failed setting again, uncached. Return `ONCE`, words for the report, if it passes this time, else ""."""
    x.forget(finding.setting)
    try:
        return "" if ONCE in finding.words or probe.ask(x, finding.setting).fails else ONCE
    except Refused:
        return ONCE


class _Progress:
    """One probe in the course of an audit: the settings that it has not run yet, and its worst finding so far."""

    def __init__(self, probe: Probe, x: Examiner):
        self.probe, self.x, self.tried = probe, x, 0
        self.refused: list[str] = []
        self.worst: Finding | None = None
        self.unsupported = next((why for name in probe.needs if (why := x.supports.get(name)) is not None), None)
        self.waiting, self.costly = [], 0
        if self.unsupported is None:
            settings, costly = (list(dict.fromkeys(map(x.resolved, of(x)))) for of in (probe.settings, probe.costly))
            tried = [] if x.learnt.interpreted and not x.full else [s for s in costly if s not in settings]
            self.waiting, self.costly = settings + tried, len(costly) - len(tried)
        self.settings = len(self.waiting) + self.costly

    def go_on(self, first: bool = False) -> None:
        """Run settings until one fails or time is up; run a failed one twice. first: stop after a supported setting."""
        while self.waiting and not (self.worst is not None and self.worst.fails) and not self.x.late:
            try:
                finding = self.probe.ask(self.x, self.waiting.pop(0))
            except Refused as why:
                self.refused.append(str(why))
                continue
            self.tried += 1
            if self.worst is None or (finding.fails, finding.share) > (self.worst.fails, self.worst.share):
                self.worst = finding
            if finding.fails:
                self.worst = replace(finding, words=finding.words + _unrepeated(self.probe, self.x, finding))
            if first:
                return

    def verdict(self) -> Verdict:
        """Return the final verdict; for a failure, run the probe's controls to see if another probe explains it."""
        probe, worst, v = self.probe, self.worst, self.so_far()
        if v.verdict != FAIL or worst is None:
            return v
        cause, control = ("", None) if ONCE in worst.words else probe.cause(self.x, worst)
        if cause:
            return replace(v, words=f"fails as `{cause}` does, {worst.words}", cause=cause, control=control)
        return replace(v, case=probe.resembles(worst, self.x.op) or None)

    def so_far(self) -> Verdict:
        """Return the verdict on the settings run so far, without running anything."""
        probe, worst = self.probe, self.worst
        if self.unsupported is not None:
            return Verdict(probe, UNSUPPORTED, self.unsupported)
        left_out = 0 if worst is not None and worst.fails else len(self.waiting) + self.costly
        fields: dict[str, Any] = {"tried": self.tried, "settings": self.settings, "left_out": left_out}
        if worst is None and self.waiting:
            return Verdict(probe, LEFT_OUT, "no time was left for it", **fields)
        if worst is None:
            words = self.refused[0] if self.refused else "nothing that it asks is supported"
            return Verdict(probe, UNSUPPORTED, words, **fields)
        fields |= {"finding": worst, "setting": worst.setting.summary(self.x.op)}
        if worst.fails:
            return Verdict(probe, FAIL, worst.words, **fields)
        words = worst.words
        if self.refused:
            words += f"; {len(self.refused)} of {self.settings} settings refused: {self.refused[0]}"
        return Verdict(probe, PASS, words, **fields)


def _fail_causes(verdicts: Iterable[Verdict], op: Operator) -> list[Verdict]:
    """Return the verdicts, in which a probe that passed by itself but explains another's failure fails, too. This probe
    gets the finding of the control that showed it."""
    results = list(verdicts)
    for n, v in enumerate(results):
        control = next((other.control for other in results if other.cause == v.probe.name), None)
        if v.verdict == PASS and control is not None:
            fields: dict[str, Any] = {"finding": control, "setting": control.setting.summary(op), "left_out": 0}
            results[n] = replace(v, verdict=FAIL, words=control.words, **fields)
    return results
