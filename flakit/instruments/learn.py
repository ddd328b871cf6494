"""Learning, the first step of an audit: calls a subject in a few plain ways to see what it supports and gets wrong."""

import sys
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ..numerics.operators import Operator
from ..ops.common.dispatch import interpreted, interpreted_alone
from .call import Ran, forward_backward
from .finding import Finding, findings, raised
from .pair import ranks_device, unsupported
from .runner import Runner
from .setting import Setting
from .subject import ONCE, BackwardBroken, Broken, Refused
from .truth import truth_of

PLAIN = (
    Setting(),
    Setting(K=32, V=32, M=32),
    Setting(K=64, V=64, M=64),
    *(Setting(K=64, V=64, M=64, dtype=dtype) for dtype in ("bfloat16", "float16")),
    Setting(dtype="float64"),
)
"""The settings to try first; the first that a subject takes is its plainest call."""

SCALES = (None, 0.0, -0.5, -1.0)
"""Candidates for a default scale: K to one of these powers; None: the operator's own."""

COARSE = 0.02
"""Up to which relative error at the plainest calls a tensor is coarse rather than wrong."""

STATES = {"initial_state": True, "final_state": True}


@dataclass
class Learnt:
    """What the first calls of `learn` show of a subject.

    plain: the plainest call that it takes.
    supports: for each feature, why it is not supported; None if it is.
    granule: lengths of sequences have to be a multiple of this.
    interpreted: it launches kernels in Triton's interpreter, where a program takes milliseconds.
    crashed: findings of plainest calls that crashed, and of crashes that a second call did not repeat.
    backward: whether it has a backward pass.
    raising: the error of the backward pass at the plainest call, "" for none.
    power: its default scale is K ** power; None: the operator's own.
    known: tensors that are wrong at the plainest call, and why: "wrong", "missing", "cut off".
    with_states: tensors that are wrong only in calls with an initial and a final state.
    coarse: relative errors, at the plainest calls, of tensors that are right but less precise than their dtype.
    """

    op: Operator
    plain: Setting = PLAIN[0]
    supports: dict[str, str | None] = field(default_factory=dict)
    granule: int = 1
    interpreted: bool = False
    crashed: dict[Setting, Finding] = field(default_factory=dict)
    backward: bool = True
    raising: str = ""
    power: float | None = None
    known: dict[str, str] = field(default_factory=dict)
    with_states: dict[str, str] = field(default_factory=dict)
    coarse: dict[str, float] = field(default_factory=dict)

    def refuses(self, feature: str) -> bool:
        return self.supports.get(feature) is not None

    def resolved(self, setting: Setting) -> Setting:
        """Return the nearest setting that the subject supports: without refused features, lengths in whole granules."""
        fields: dict[str, Any] = {}
        without: dict[str, dict[str, Any]] = {"batches": {"B": 1}, "heads": {"H": 1}, "groups": {"groups": 1}}
        without |= {"initial state": {"initial_state": False}, "K != V": {"V": setting.K}}
        for feature, values in without.items():
            fields |= values if self.refuses(feature) else {}
        if self.refuses("final state"):
            fields |= {"final_state": False, "loss": "o" if setting.loss == "both" else setting.loss}
        elif setting.loss == "both" and any(self.known.get(name) == "cut off" for name in self.op.outputs[1:]):
            fields["loss"] = "o"
        if self.granule > 1:
            n = self.granule
            fields["T"] = -(-setting.T // n) * n
            if setting.lengths is not None:
                fields["lengths"] = tuple(-(-length // n) * n for length in setting.lengths)
            if setting.slices is not None:
                fields["slices"] = tuple(-(-length // n) * n for length in setting.slices)
                fields["T"] = sum(fields["slices"])
            if setting.cut is not None:
                fields["cut"] = min(max(n, setting.cut // n * n), fields["T"] - n)
        if setting.scale is None and not setting.default_scale and not self.refuses("scale"):
            fields["scale"] = float(setting.K) ** self.op.scale_exponent
        return setting.without(**fields)


def learn(runner: Runner, seed: int = 0) -> Learnt:
    """Call the runner's subject in a few plain ways, and return what it supports and what it gets wrong. seed: of the
    inputs. Raises ValueError if the subject takes none of the plainest calls."""
    learnt = Learnt(runner.subject.op)
    _plainest(runner, learnt, seed)
    _features(runner, learnt)
    learnt.supports["backward"] = _backward(runner, learnt)
    learnt.backward = not learnt.refuses("backward")
    if learnt.refuses("scale"):
        learnt.power = _default_power(runner, learnt)
    if learnt.backward:
        _missing(runner, learnt)
    _wrong(runner, learnt)
    return learnt


def _plainest(runner: Runner, learnt: Learnt, seed: int) -> None:
    refusals = []
    for setting in PLAIN:
        learnt.plain = setting.without(seed=seed)
        why = _refusal(runner, learnt)
        if why is None:
            return
        refusals.append(why)
    raise ValueError(f"{runner.subject.name}: it takes none of the plainest calls. {refusals[0]}")


def _tried(runner: Runner, setting: Setting, backward: bool = True) -> Ran | Refused | Broken:
    """Return the result of running a setting, or the error Refused or Broken that it raised."""
    try:
        return runner.run(setting, backward=backward)
    except (Refused, Broken) as error:
        return error


def _refusal(runner: Runner, learnt: Learnt, crash_refuses: bool = False, **fields) -> str | None:
    """Return why the subject does not take its plainest call with these fields, None if it does.

    A crash is no refusal, except with `crash_refuses` and at the plainest call itself. `learnt.crashed` records a crash
    of the plainest call, and crashes that a second call does not repeat; the probe `truth` runs these settings again.
    """
    setting = learnt.plain.without(**fields)
    ran = _tried(runner, setting, backward=False)
    if isinstance(ran, Ran):
        return None
    plain = setting == learnt.plain
    if isinstance(ran, Broken) and not crash_refuses and (plain or ONCE in str(ran)):
        learnt.crashed[setting] = raised(setting, ran)
    refuses = isinstance(ran, Refused) or ("raised" in str(ran) if crash_refuses else plain)
    return str(ran) if refuses else None


def _features(runner: Runner, learnt: Learnt) -> None:
    op, subject, supports, plain = learnt.op, runner.subject, learnt.supports, learnt.plain

    def refusal(**fields) -> str | None:
        return _refusal(runner, learnt, **fields)

    lacks = f"the reference of {op.label} has no"
    supports["scale"] = refusal(scale=float(plain.K) ** -0.5)
    if not op.has_scale:
        supports["scale"] = f"{lacks} scale"
    supports["decay"] = None if op.decay else f"{op.label} has no decay among its arguments"
    supports["initial state"] = refusal(initial_state=True)
    supports["final state"] = refusal(final_state=True)
    if not op.states:
        supports |= dict.fromkeys(("initial state", "final state"), f"{lacks} state")
    if supports["final state"] is None:
        ran = _tried(runner, plain.without(final_state=True), backward=False)
        if isinstance(ran, Ran) and ran.missing_state:
            supports["final state"] = "it returns no final state"
    supports["batches"] = refusal(B=2)
    supports["heads"] = refusal(H=3)
    supports["K != V"] = refusal(V=plain.V * 2)
    supports["packed sequences"] = refusal(lengths=(32, 32))
    supports["padded sequences"] = refusal(lengths=(32, 32), padding=64)
    supports["heads alike"] = None if op.heads_alike else f"a head of {op.label} depends on where it stands"
    supports["groups"] = None if {"HQ", "HV"} & {*op.sizes} else f"{op.label} has no groups of heads"
    if supports["groups"] is None:  # no signature names them, and few subjects refuse them in words
        supports["groups"] = refusal(T=16, H=2, groups=2, crash_refuses=True)
    without = op.name == "gsa" and subject.without_decay  # what no decay means differs between operators
    supports["None as decay"] = None if without else f"{op.decay} has no default None"
    several = runner.device.startswith("cuda") and torch.cuda.device_count() > 1
    supports["two GPUs"] = None if several else "it needs two GPUs"
    supports["group"] = ranks_refusal(runner, plain)
    if _launches_interpreted(runner, plain):
        learnt.interpreted = True
        supports["bfloat16"] = "Triton's interpreter computes wrongly with bfloat16; float16 stands for it"
    learnt.granule = next((n for n in (1, 16, 64) if not refusal(T=64 + n)), 64)
    for dtype in ("bfloat16", "float16"):
        supports.setdefault(dtype, refusal(dtype=dtype))


def ranks_refusal(runner: Runner, plain: Setting) -> str | None:
    """Return why the subject cannot be called over two ranks, None if it can. plain: its plainest call."""
    why = unsupported(runner.subject)
    if why is not None or not runner.device.startswith("cuda") or ranks_device(runner.device) == "cuda":
        return why
    try:
        forward_backward(runner.subject, plain, *plain.make(runner.subject.op), backward=False)
    except (Refused, Broken) as error:
        return f"ranks on GPUs need two of them, and on the CPU it does not run: {error}"
    return None


@interpreted_alone()
def _launches_interpreted(runner: Runner, plain: Setting) -> bool:
    """Whether the plainest call launches a kernel in Triton's interpreter, which is patched to notice it."""
    executor = getattr(sys.modules.get("triton.runtime.interpreter"), "GridExecutor", None)
    if executor is None or not interpreted():
        return False
    launch, launched = executor.__call__, []

    def call(*args, **kwargs):
        launched.append(True)
        return launch(*args, **kwargs)

    with mock.patch.object(executor, "__call__", call):
        _tried(runner, plain, backward=False)
    return bool(launched)


def _backward(runner: Runner, learnt: Learnt) -> str | None:
    """Return why there is no backward pass; None if an input gets a gradient in any of a few calls, or all crash."""
    why, crashes = "no input gets a gradient", True
    for fields in ({}, {"final_state": True, "loss": "both"}, {"K": 64, "V": 64, "M": 64}, {"T": 16}, {"H": 2}):
        ran = _tried(runner, learnt.resolved(learnt.plain.without(**fields)))
        crashes = crashes and isinstance(ran, BackwardBroken)
        if not isinstance(ran, Ran):
            why = str(ran)
        elif any(y is not None for name, y in ran.values.items() if name not in learnt.op.outputs):
            return None
    return None if crashes else why


def _default_power(runner: Runner, learnt: Learnt) -> float | None:
    """Return the p of SCALES for which a subject without an argument `scale` scales by K ** p; None for no p."""
    setting = learnt.resolved(learnt.plain)
    ran = _tried(runner, setting, learnt.backward)
    if not isinstance(ran, Ran):
        return None
    for power in SCALES:
        if not any(x.fails for x in _findings(runner, setting, ran, power, only=("o",))):
            return power
    return None


def _findings(runner: Runner, setting: Setting, ran: Ran, power: float | None, **options) -> list[Finding]:
    """Return the `findings` of a run, beside the truth with a default scale of K ** power."""
    op = runner.subject.op
    return findings(op, ran, truth_of(op, setting, runner.device, power), setting, **options)


def _missing(runner: Runner, learnt: Learnt) -> None:
    """Record in `learnt.known` which outputs are cut off from the inputs and which inputs get no gradient."""
    for setting in (learnt.plain.without(**STATES, loss="both"), learnt.plain):
        setting = learnt.resolved(setting)
        ran = _tried(runner, setting)
        if isinstance(ran, Ran):
            none = (
                x.tensor for x in _findings(runner, setting, ran, learnt.power, finite=True) if x.kind == "no gradient"
            )
            learnt.known |= {name: "cut off" if name in ran.cut_off else "missing" for name in none}
            return


def _wrong(runner: Runner, learnt: Learnt) -> None:
    """Record which tensors are wrong and which are coarse, in the plainest call and in one with states."""
    for setting in (learnt.plain.without(final_state=True), learnt.plain):
        if _note_wrong(runner, learnt, setting, learnt.known):
            break
    rich = learnt.plain.without(T=16, B=2, H=2, decay="rwkv6-init", **STATES, loss="both")
    _note_wrong(runner, learnt, rich, learnt.with_states)


def _note_wrong(runner: Runner, learnt: Learnt, setting: Setting, into: dict[str, str]) -> bool:
    """Record in `into` the tensors that are wrong at a setting, in `learnt.coarse` those less precise than their dtype.
    Return False if the subject refuses the setting."""
    setting = learnt.resolved(setting)
    ran = _tried(runner, setting, learnt.backward)
    if not isinstance(ran, Ran):
        learnt.raising = str(ran) if isinstance(ran, Broken) else learnt.raising
        return isinstance(ran, Broken)
    for x in _findings(runner, setting, ran, learnt.power):
        if x.kind != "wrong" or x.tensor in learnt.known:
            continue
        error = x.share * x.budget
        if error <= COARSE:
            learnt.coarse[x.tensor] = max(error, learnt.coarse.get(x.tensor, 0.0))
        else:
            into[x.tensor] = "wrong"
            learnt.coarse.pop(x.tensor, None)
    return True
