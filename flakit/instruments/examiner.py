"""Runs a subject at a setting, forward and backward, and holds what comes to the float64 truth."""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..numerics.evaluate import Arriving, one_thread, truth
from ..numerics.operators import Operator
from ..ops.common.dispatch import interpreted, interpreted_alone
from .budget import budget, judge, total_decay, units
from .call import Ran, called
from .pair import Pair, ranks_device, unsupported
from .setting import TRANSPOSED, Setting
from .subject import ONCE, BackwardBroken, Broken, Refused, Stopped, Subject

SCALES = (None, 0.0, -0.5, -1.0)
"""The default scale is K to one of these powers; None: the operator's own."""

PLAIN = (
    Setting(),
    Setting(K=32, V=32, M=32),
    Setting(K=64, V=64, M=64),
    *(Setting(K=64, V=64, M=64, dtype=dtype) for dtype in ("bfloat16", "float16")),
    Setting(dtype="float64"),
)
"""The calls that are tried first; the first that is taken is the plainest one of a subject."""

COARSE, COARSER = 0.02, 8
"""Up to which relative error a tensor is coarse rather than wrong; how many times that error it may have elsewhere."""
EMPTY: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Finding:
    """What one check found at one setting: its worst figure and what was allowed; fails where that is exceeded."""

    setting: Setting
    kind: str  # "fine", "wrong", "non-finite", "no gradient", "raises", "changed"
    tensor: str
    figure: float
    allowed: float
    words: str
    others: tuple[str, ...] = ()  # further tensors that fail
    measure: str = "L2"  # of `figure`, where it is an error
    budget: float = 0.0  # the relative L2 error that is allowed, of which `allowed` is made for `measure`

    @property
    def fails(self) -> bool:
        return self.kind != "fine"

    @property
    def share(self) -> float:
        """Of what is allowed; infinite for what is not a matter of size."""
        if self.kind in ("no gradient", "raises", "non-finite"):
            return float("inf")
        return self.figure / self.allowed if self.allowed else float("inf") if self.figure else 0.0


def raised(setting: Setting, error: Exception) -> Finding:
    return Finding(setting, "raises", "", float("inf"), 0.0, str(error))


def clock_of(device: str) -> Callable[[], float]:
    """Seconds of this process on a CPU, so that others who use it shorten no audit; of the world on a GPU."""
    return time.process_time if device == "cpu" else time.monotonic


SETTINGS = 2048
"""Of which truths are kept; an audit has some 190 of an operator."""


@functools.lru_cache(maxsize=SETTINGS)
@one_thread()
def true_values(op: Operator, setting: Setting, device: str, power: float | None) -> tuple[dict[str, Tensor], float]:
    """The float64 truth of a setting, and the largest sum of its log decays; power: of K, the default scale."""
    x, (do, dstate) = setting.make(op, device)
    arriving = do, None if setting.loss == "o" else dstate
    if setting.loss == "state":
        arriving = torch.zeros_like(do), dstate
    if setting.scale is None and power is not None:
        x["scale"] = float(setting.K) ** power
    found = _running_means(op, x, arriving) if setting.no_decay else truth(op, x, arriving=arriving)
    return {name: y.detach() for name, y in found.items()}, total_decay(op.log_decay(x))


def _running_means(op: Operator, x: dict, arriving: Arriving) -> dict[str, Tensor]:
    """GSA without a decay: slot m at token t is the mean of what was written, weighted by e^s. As decays, these are
    log(sum of e^s before t) - log(sum up to t), and what is written e^s over that sum."""
    s = x["s"].detach().double().requires_grad_()
    total = s.logcumsumexp(1)
    g = torch.cat((torch.zeros_like(total[:, :1]), total[:, :-1] - total[:, 1:]), 1)  # there is nothing to forget
    share = (s - total).exp()
    found = truth(op, x | {"s": share.detach(), "g": g.detach()}, arriving=arriving)
    (ds,) = torch.autograd.grad([share, g], s, [found["ds"], found["dg"]])
    return found | {"ds": ds}


@functools.lru_cache(maxsize=SETTINGS)
@one_thread()
def true_units(op: Operator, setting: Setting, device: str, power: float | None) -> dict[str, Tensor]:
    values, _ = true_values(op, setting, device, power)
    if setting.no_decay:  # means of so many tokens do not cancel
        return {name: torch.zeros_like(y) for name, y in values.items()}
    x, (do, dstate) = setting.make(op, device)
    if setting.scale is None and power is not None:
        x["scale"] = float(setting.K) ** power
    arriving = torch.zeros_like(do) if setting.loss == "state" else do, None if setting.loss == "o" else dstate
    return units(op, x, arriving, values)


class Examiner:
    """A subject, and what was learnt of it: what it supports, which tensors are wrong at the plainest call already.

    supports: why a feature is not supported, None where it is. known: tensors that need no second mention, and why.
    coarse: tensors that are right but less precise than their dtype (TensorFloat-32 products, say), and their relative
        error at the plainest calls: elsewhere they are held to COARSER times that.
    crashed: what came of plainest calls that did not end, and of crashes that a second call did not repeat.
    interpreted: whether it launches kernels in Triton's interpreter, where a program takes milliseconds.
    power: its default scale is K to this power, None for the operator's own.
    clock: as `clock_of` says.
    pair: two processes, which settings of a sequence over ranks run in; started by the first of them.
    deadline: the moment from which probes try no further settings.
    stopped: asked before every run; `Stopped` is raised once it says so.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        device: str = "cpu",
        full: bool = False,
        seed: int = 0,
        stopped: Callable[[], bool] | None = None,
    ):
        self.stopped = stopped or (lambda: False)
        self.subject, self.op, self.device, self.full, self.seed = subject, subject.op, device, full, seed
        self.clock = clock_of(device)
        self.deadline = float("inf")
        self.pair: Pair | None = None
        self._remembered: dict[Setting, Ran] = {}
        self.known: dict[str, str] = {}
        self.with_states: dict[str, str] = {}
        self.coarse: dict[str, float] = {}
        self.granule = 1
        self.interpreted = False
        self.raising, self.asking = "", False
        self.crashed: dict[Setting, Finding] = {}
        self.supports: dict[str, str | None] = {"scale": None, "backward": None}
        self.power: float | None = None
        self.backward = True
        self._learn()

    # --- one run ---------------------------------------------------------------------------------------------------

    @interpreted_alone()
    def run(self, setting: Setting, *, backward: bool = True, keep: Callable | None = None) -> Ran:
        """Raises Refused where the subject does not take it, Broken where its backward pass or its result is wrong.

        keep: a function of the arguments and arriving gradients that may put them elsewhere in memory.
        """
        if self.stopped():
            raise Stopped
        x, arriving = setting.make(self.op, self.device)
        x, arriving = setting.laid_out(x, arriving, self.op)
        if keep is not None:
            x, arriving = keep(x, arriving)
        backward = backward and self.backward
        try:
            if setting.slices is not None:
                return self._over_ranks(setting, x, arriving, backward)
            return called(self.subject, setting, x, arriving, backward=backward)
        except BackwardBroken as broken:
            if str(broken) == self.raising and not self.asking:
                raise Refused(str(broken)) from broken
            raise

    def _over_ranks(self, setting: Setting, x: dict, arriving: Arriving, backward: bool) -> Ran:
        if self.pair is None:
            self.pair = Pair(self.subject, ranks_device(self.device), self.stopped)
        return self.pair.run(setting, x, arriving, backward)

    def close(self) -> None:
        """End the processes that were started for it."""
        if self.pair is not None:
            self.pair.close()

    # --- what the subject takes ------------------------------------------------------------------------------------

    def _learn(self) -> None:
        refusals = []
        for plain in PLAIN:
            self.plain = plain.without(seed=self.seed)
            why = self._refuses(self.plain)
            if why is None:
                break
            refusals.append(why)
        else:
            raise ValueError(f"{self.subject.name}: it takes none of the plainest calls. {refusals[0]}")
        none = f"the reference of {self.op.label} has no"
        self.supports["scale"] = self._refuses(self.plain.without(scale=float(self.plain.K) ** -0.5))
        if not self.op.has_scale:
            self.supports["scale"] = f"{none} scale"
        self.supports["decay"] = None if self.op.decay else f"{self.op.label} has no decay among its arguments"
        self.supports["initial state"] = self._refuses(self.plain.without(initial_state=True))
        self.supports["final state"] = self._refuses(self.plain.without(final_state=True))
        if not self.op.states:
            self.supports |= dict.fromkeys(("initial state", "final state"), f"{none} state")
        if self.supports["final state"] is None and not self._returns_state():
            self.supports["final state"] = "it returns no final state"
        self.supports["batches"] = self._refuses(self.plain.without(B=2))
        self.supports["heads"] = self._refuses(self.plain.without(H=3))
        wide, narrow = self.plain.V * 2, self.plain.K
        self.supports["K != V"] = self._refuses(self.plain.without(K=narrow, V=wide))
        self.supports["packed sequences"] = self._refuses(self.plain.without(lengths=(32, 32)))
        self.supports["padded sequences"] = self._refuses(self.plain.without(lengths=(32, 32), padding=64))
        alike = "" if self.op.heads_alike else f"a head of {self.op.label} depends on where it stands"
        self.supports["heads alike"] = alike or None
        self.supports["groups"] = None if {"HQ", "HV"} & {*self.op.sizes} else f"{self.op.label} has no groups of heads"
        if self.supports["groups"] is None:
            self.supports["groups"] = self._raises(self.plain.without(T=16, H=2, groups=2))
        without = self.op.name == "gsa" and self.subject.without_decay  # what no decay means is each operator's own
        self.supports["None as decay"] = None if without else f"{self.op.decay} has no default None"
        several = self.device.startswith("cuda") and torch.cuda.device_count() > 1
        self.supports["two GPUs"] = None if several else "it needs two GPUs"
        self.supports["group"] = self._no_ranks()
        if self._launches_interpreted():
            self.interpreted = True
            self.supports["bfloat16"] = "Triton's interpreter computes wrongly with bfloat16; float16 stands for it"
        self.granule = next((n for n in (1, 16, 64) if not self._refuses(self.plain.without(T=64 + n))), 64)
        for dtype in ("bfloat16", "float16"):
            self.supports.setdefault(dtype, self._refuses(self.plain.without(dtype=dtype)))
        self.supports["backward"] = self._learn_backward()
        self.backward = self.supports["backward"] is None
        self._learn_scale()
        if self.backward:
            self._learn_missing()
        self._learn_wrong()

    def _no_ranks(self) -> str | None:
        """Why it cannot be called over ranks, None where it can."""
        why = unsupported(self.subject)
        if why is not None or not self.device.startswith("cuda") or ranks_device(self.device) == "cuda":
            return why
        try:
            called(self.subject, self.plain, *self.plain.make(self.op), backward=False)
        except (Refused, Broken) as error:
            return f"ranks on GPUs need two of them, and on the CPU it does not run: {error}"
        return None

    def _refuses(self, setting: Setting) -> str | None:
        try:
            self.run(setting, backward=False)
        except Refused as refused:
            return str(refused)
        except Broken as broken:
            plain = setting == self.plain
            if plain or ONCE in str(broken):
                self.crashed[setting] = raised(setting, broken)
            if plain:
                return str(broken)
        return None

    def _raises(self, setting: Setting) -> str | None:
        """As `_refuses`, where no signature says what is taken, and few who do not take it say so: a crash refuses."""
        try:
            self.run(setting, backward=False)
        except Refused as refused:
            return str(refused)
        except Broken as broken:
            return str(broken) if "raised" in str(broken) else None
        return None

    @interpreted_alone()
    def _launches_interpreted(self) -> bool:
        """Whether the plainest call runs a kernel in Triton's interpreter."""
        executor = getattr(sys.modules.get("triton.runtime.interpreter"), "GridExecutor", None)
        if executor is None or not interpreted():
            return False
        launch, launched = executor.__call__, []

        def call(*args, **kwargs):
            launched.append(True)
            return launch(*args, **kwargs)

        with mock.patch.object(executor, "__call__", call):
            self.run(self.plain, backward=False)
        return bool(launched)

    def _returns_state(self) -> bool:
        try:
            return not self.run(self.plain.without(final_state=True), backward=False).missing_state
        except (Refused, Broken):
            return True

    def _learn_backward(self) -> str | None:
        """None where any input gets a gradient in any of a few calls, or where every backward pass crashes."""
        why, crashes = "no input gets a gradient", True
        for fields in ({}, {"final_state": True, "loss": "both"}, {"K": 64, "V": 64, "M": 64}, {"T": 16}, {"H": 2}):
            try:
                ran = self.run(self.resolved(self.plain.without(**fields)))
            except (Refused, Broken) as error:
                why, crashes = str(error), crashes and isinstance(error, BackwardBroken)
                continue
            crashes = False
            if any(y is not None for name, y in ran.values.items() if name not in self.op.outputs):
                return None
        return None if crashes else why

    def _learn_scale(self) -> None:
        """Which default scale a subject without a `scale` has, so that other probes can go on."""
        if self.supports["scale"] is None:
            return
        for power in SCALES:
            self.power = power
            try:
                found = self.compare(self.plain, excuse="none", only=("o",))
            except (Refused, Broken):
                break
            if not found.fails:
                return
        self.power = None

    def _learn_missing(self) -> None:
        richest = self.plain.without(initial_state=True, final_state=True, loss="both")
        for setting in (richest, self.plain):
            try:
                ran = self.run(self.resolved(setting))
            except (Refused, Broken):
                continue
            for name in ran.cut_off:
                self.known[name] = "cut off"
            exact, _ = self.exact(self.resolved(setting))
            for name, y in ran.values.items():
                if y is None and exact[name].any():
                    self.known[name] = "missing"
            return

    def _learn_wrong(self) -> None:
        plain, states = self.plain.without(final_state=True), {"initial_state": True, "final_state": True}
        for setting in (plain, self.plain):
            if self._note_wrong(setting, self.known):
                break
        rich = self.plain.without(T=16, B=2, H=2, decay="rwkv6-init", **states, loss="both")
        self._note_wrong(rich, self.with_states)

    def _note_wrong(self, setting: Setting, into: dict) -> bool:
        try:
            found = self.findings(self.resolved(setting))
        except Refused:
            return False
        for x in found:
            if x.kind != "wrong" or x.tensor in self.known:
                continue
            error = x.share * x.budget
            if error <= COARSE:
                self.coarse[x.tensor] = max(error, self.coarse.get(x.tensor, 0.0))
            else:
                into[x.tensor] = "wrong"
                self.coarse.pop(x.tensor, None)
        self.raising = next((x.words for x in found if x.kind == "raises" and not x.tensor), self.raising)
        return True

    def resolved(self, setting: Setting) -> Setting:
        """The setting without what the subject does not support."""

        def refused(feature: str) -> bool:
            return self.supports.get(feature) is not None

        fields: dict[str, Any] = {}
        if refused("initial state"):
            fields["initial_state"] = False
        if refused("final state"):
            fields |= {"final_state": False, "loss": "o" if setting.loss == "both" else setting.loss}
        elif setting.loss == "both" and any(self.known.get(name) == "cut off" for name in self.op.outputs[1:]):
            fields["loss"] = "o"
        if refused("batches"):
            fields["B"] = 1
        if refused("heads"):
            fields["H"] = 1
        if refused("groups"):
            fields["groups"] = 1
        if refused("K != V"):
            fields["V"] = setting.K
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
        if setting.scale is None and not setting.default_scale and not refused("scale"):
            fields["scale"] = float(setting.K) ** self.op.scale_exponent
        return setting.without(**fields)

    # --- against the truth -----------------------------------------------------------------------------------------

    def exact(self, setting: Setting) -> tuple[dict[str, Tensor], float]:
        return true_values(self.op, _same_values(setting), self.device, self.power)

    def unit(self, setting: Setting) -> dict[str, Tensor]:
        return true_units(self.op, _same_values(setting), self.device, self.power)

    def findings(
        self,
        setting: Setting,
        *,
        ran: Ran | None = None,
        only: Iterable[str] = (),
        finite: bool = False,
        coarse: Mapping[str, float] = EMPTY,
        spared: Iterable[str] = (),
    ) -> list[Finding]:
        """Every tensor against the truth at a setting that is resolved.

        finite: only whether it is finite. coarse: errors of tensors that are allowed COARSER times as much. spared:
        tensors of which nobody asks how wrong they are: how far rounding moves them is not measured, which takes long.
        """
        try:
            ran = self.run(setting) if ran is None else ran
        except Broken as broken:
            return [raised(setting, broken)]
        exact, total = self.exact(setting)
        terms, found = setting.tokens + setting.K + setting.V, []
        for name in ran.cut_off:
            words = f"{name} is cut off: no gradient comes back from it"
            found.append(Finding(setting, "no gradient", name, float("inf"), 0.0, words))
        if ran.missing_state and self.supports.get("final state") is None:
            words = "no final state came back"
            found.append(Finding(setting, "raises", self.op.outputs[1], float("inf"), 0.0, words))
        for name, got in ran.values.items():
            if only and name not in only:
                continue
            true = exact[name]
            if got is None:
                if true.any():
                    words = f"{name[1:]} gets no gradient"
                    found.append(Finding(setting, "no gradient", name, float("inf"), 0.0, words))
                continue
            if finite:
                bad = ~got.isfinite() & true.isfinite()
                kind, count = ("non-finite", int(bad.sum())) if bad.any() else ("fine", 0)
                found.append(Finding(setting, kind, name, count, 0.0, _non_finite(name, got, true)))
                continue
            shared = name[1:] in self.op.tensors and name[1:] not in self.op.sequences
            allowed = budget(setting.torch_dtype, terms, total, setting.B * setting.tokens if shared else 0)
            lenient = COARSER * coarse.get(name, 0.0) > allowed
            allowed = max(allowed, COARSER * coarse.get(name, 0.0))
            got = got.to(true.device)  # which other processes may have found elsewhere
            excess = judge(got, true, allowed)
            if excess.errors is not None and excess.errors.finite and name not in spared:
                unit = self.unit(setting)[name]
                if not true.any():  # terms that cancel to nothing are of the size of the other gradients
                    unit = torch.full_like(true, 3 * max(_rms(y) for x, y in exact.items() if x.startswith("d")))
                excess = judge(got, true, allowed, unit)
            errors = excess.errors
            kind = "fine" if errors is None else "wrong" if errors.finite else "non-finite"
            words = f"{name}: {excess.measure} {excess.figure:.1e}, allowed {excess.allowed:.1e}"
            if lenient:
                words += f" ({COARSER} times its error at the plainest call)"
            if kind == "non-finite":
                words = _non_finite(name, got, true)
            elif errors is not None and errors.worst_index is not None:
                words += f", worst at {list(errors.worst_index)}"
            measure = "L2" if kind == "non-finite" else excess.measure
            found.append(
                Finding(setting, kind, name, excess.figure, excess.allowed, words, measure=measure, budget=allowed)
            )
        return found

    def compare(
        self,
        setting: Setting,
        *,
        excuse: str = "all",
        but: Iterable[str] = (),
        only: Iterable[str] = (),
        finite: bool = False,
        run: Callable[[Setting], Ran] | None = None,
        coarse: bool = True,
    ) -> Finding:
        """The worst of all tensors. Raises Refused where none is left.

        excuse: which known tensors are held to finiteness alone: "all", those of the "plain" call, or "none"; but for
        names in `but`. coarse: hold coarse tensors to their own error rather than to their dtype's.
        """
        setting, self.asking = self.resolved(setting), excuse != "all"
        try:
            ran = (run or self.run)(setting)
        except Broken as broken:
            return raised(setting, broken)
        allowances = self.coarse if coarse and excuse != "none" else EMPTY
        known = {"all": self.with_states | self.known, "plain": self.known, "none": {}}[excuse]
        spared = set(known) - set(but)
        found = self.findings(setting, ran=ran, only=only, finite=finite, coarse=allowances, spared=spared)
        found = [x for x in found if x.tensor not in spared or x.kind == "non-finite" and known[x.tensor] == "wrong"]
        if not found:
            raise Refused("nothing is left to compare: every tensor is wrong at the plainest call already")
        worst = max(found, key=lambda x: (x.fails, x.share))
        others = [x.tensor for x in found if x.fails and x is not worst and x.tensor]
        if worst.fails and others:
            once = tuple(dict.fromkeys(others))
            worst = replace(worst, words=f"{worst.words}; also {', '.join(once)}", others=once)
        return worst

    def run_once(self, setting: Setting) -> Ran:
        """`run`, remembered: probes that ask different questions of one sweep share it."""
        if setting not in self._remembered:
            self._remembered[setting] = self.run(setting)
        return self._remembered[setting]

    def forget(self, setting: Setting) -> None:
        """Run a setting anew at its next turn."""
        self._remembered.pop(setting, None)
        self.crashed.pop(setting, None)

    @property
    def late(self) -> bool:
        return self.clock() > self.deadline


def _same_values(setting: Setting) -> Setting:
    """The plainest setting with the same truth."""
    plain = setting.without(layout="contiguous", offsets="contiguous", cut=None, wanted=None, again=False)
    plain = plain.without(slices=None)
    return plain.without(states="contiguous") if plain.states == TRANSPOSED else plain


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _non_finite(name: str, got: Tensor, true: Tensor) -> str:
    bad = ~got.isfinite() & true.isfinite()
    if not bad.any():
        return f"{name}: finite"
    at = [int(i) for i in torch.unravel_index(bad.double().argmax(), bad.shape)] if bad.ndim else []
    kind = "NaN" if got.isnan().any() else "inf"
    return f"{name}: {kind}, {int(bad.sum())} of {bad.numel()} values are not finite, first at {at}"
