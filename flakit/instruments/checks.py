"""The checks of the probes. Each runs the subject at one setting and returns a `Finding`, which fails or not.

The first sentence of a check's docstring is what a kernel has to satisfy to pass. Every check takes the `Examiner` of
the subject and a `Setting`, and raises Refused if the subject does not take that setting. "Excused" tensors are those
that are wrong in the plainest calls, `learn.PLAIN`, already, so that only the probe `truth` reports them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..numerics.errors import compare
from ..numerics.mutation import touched
from ..numerics.operators import Operator
from .call import Ran
from .examiner import Examiner
from .finding import Finding, findings, raised
from .pair import ranks_device
from .setting import Setting, mapped
from .subject import Broken, Refused
from .truth import truth_of


def against_truth(x: Examiner, setting: Setting) -> Finding:
    """Check that every tensor matches float64 within its error budget, except those that are excused."""
    return x.compare(setting)


def everything(x: Examiner, setting: Setting) -> Finding:
    """Check that every output and gradient matches float64, without an excuse for errors of the plainest calls. Missing
    gradients are left to the probe `gradients`. A crash of the plainest call is returned as its finding."""
    if setting in x.learnt.crashed:
        return x.learnt.crashed[setting]
    excused = {name: why for name, why in x.learnt.known.items() if why != "wrong"}
    return x.compare(setting, excused=excused, coarse=False)


def through_states(x: Examiner, setting: Setting, run: Callable[[Setting], Ran] | None = None) -> Finding:
    """Check every tensor against float64 but those wrong in the plainest call without states. run: as in `compare`."""
    states = (*x.op.outputs[1:], *(f"d{name}" for name in x.op.states))
    excused = {name: why for name, why in x.learnt.known.items() if name not in states}
    return x.compare(setting, excused=excused, run=run)


def finite(x: Examiner, setting: Setting) -> Finding:
    """Check that every value is finite where its float64 truth is."""
    return x.compare(setting, finite=True, run=x.run_once)


def accurate(x: Examiner, setting: Setting) -> Finding:
    """Check that finite results match float64; non-finite ones pass, as the probe `decay-onset` reports them."""
    finding = finite(x, setting)
    if finding.fails:
        return replace(finding, kind="fine", tensor="", figure=0.0, words="not finite everywhere")
    return x.compare(setting, run=x.run_once)


def row_after_row(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64. If a batch fails in which each sequence has its decay spike at another token
    (`Setting.rows`), return the finding of the first sequence that fails alone, a smaller setting to report."""
    finding = x.compare(setting)
    if not finding.fails or setting.rows is None or setting.spike is None:
        return finding
    for row in setting.rows:
        alone = x.compare(setting.without(B=1, spike=(row, setting.spike[1]), rows=None))
        if alone.fails:
            return alone
    return finding


def tail(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64 at a length T that does not fill the last block of 64 tokens. If it fails as
    well at the next multiple of 64, the tail is not to blame: return the finding at T with a decay close to 0."""
    finding = x.compare(setting)
    if not finding.fails:
        return finding
    if x.compare(setting.without(T=-(-setting.T // 64) * 64)).kind == finding.kind:
        return x.compare(setting.without(decay=(-0.5, -0.05)))
    return finding


def half(x: Examiner, setting: Setting) -> Finding:
    """Check 16-bit results against float64; one that is not finite in float32 either passes, left to another probe."""
    finding = x.compare(setting)
    if finding.kind == "non-finite":
        try:
            wide = x.compare(setting.without(dtype="float32"))
        except Refused:
            return finding
        if wide.kind == "non-finite":
            return replace(finding, kind="fine", figure=0.0, words="not finite in float32 either")
    return finding


def mixed(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64; PyTorch's own error for two dtypes in one product counts as a refusal."""
    finding = x.compare(setting)
    if finding.kind == "raises" and "RuntimeError" in finding.words and "type" in finding.words:
        raise Refused(finding.words)
    return finding


def gradients(x: Examiner, setting: Setting) -> Finding:
    """Check that every input with a nonzero true gradient gets a gradient."""
    setting = x.resolved(setting.without(initial_state=False, final_state=False, loss="o"))
    try:
        ran = x.run(setting)
    except Broken as broken:
        return raised(setting, broken)  # no excuse: what the plainest call raises is the answer here
    true = x.truth(setting).values
    none = [name for name in ran.values if ran.values[name] is None and true[name].any()]
    cut = ran.cut_off
    if none or cut:
        words = f"no gradient for {', '.join(name[1:] for name in none)}" if none else "o is cut off from every input"
        return Finding(setting, "no gradient", none[0] if none else "o", len(none), 0.0, words)
    return Finding(setting, "fine", "", 0.0, 0.0, "every input gets a gradient")


def scale(x: Examiner, setting: Setting) -> Finding:
    """Check that the subject uses the argument `scale`, and that its default is the operator's. A failure says by which
    constant factor o differs. Raises Refused if no constant factor explains the error of the plainest call's o."""
    if setting.scale is not None and x.supports["scale"] is not None:
        raise Refused(x.supports["scale"])
    ran = x.run(setting)
    truth = truth_of(x.op, setting, x.device)  # at the operator's own default scale
    finding = findings(x.op, ran, truth, setting, only=("o",), allowances=x.allowances)[0]
    if "o" in x.learnt.known and x.learnt.power is None:
        raise Refused("o is wrong at the plainest call already, by more than a factor")
    if finding.kind != "wrong":
        return Finding(setting, "fine", "o", finding.figure, finding.allowed, finding.words)
    o = ran.values["o"]
    assert o is not None  # it is wrong, so it exists
    got, true = o.double().flatten(), truth.values["o"].flatten()
    factor = (true @ got) / (true @ true)
    rest = ((got - factor * true).norm() / got.norm()).item()
    words = f"o is {factor.item():.4g} times what it should be, {rest:.0e} of it unexplained"
    if rest > 0.01:
        words = finding.words
    return Finding(setting, "wrong", "o", finding.figure, finding.allowed, words)


def causal(x: Examiner, setting: Setting) -> Finding:
    """Check that outputs before token `changed` keep their bits when the inputs from that token on change. A kernel
    that is not repeatable to the bit has to keep them to 100 roundings."""
    setting = x.resolved(setting)
    op, P = x.op, setting.changed
    o = []
    for changed in (False, True, False):
        inputs, arriving = setting.make(op, x.device)
        inputs = setting.later_changed(inputs, op) if changed else inputs
        with torch.no_grad():
            y, _ = x.subject(inputs)
        o.append(y[:, :P].detach().double())
    if not torch.equal(o[0].nan_to_num(), o[2].nan_to_num()):
        # Not repeatable to the bit: hold the change to rounding instead.
        change, allowed, of = compare(o[1], o[0]).l2, 100 * torch.finfo(setting.torch_dtype).eps, ""
    else:
        same = (o[0] == o[1]) | o[0].isnan() & o[1].isnan()
        size = torch.where(o[0].isfinite(), o[0], 0.0).square().mean().sqrt()
        moved = torch.where(same, 0.0, o[1] - o[0]).abs().nan_to_num(math.inf).max()
        change, allowed, of = 0.0 if same.all() else (moved / size).item(), 0.0, " of their RMS"
    kind = "changed" if change > allowed else "fine"
    return Finding(setting, kind, "o", change, allowed, f"outputs before token {P} change by {change:.1e}{of}")


def unchanged(x: Examiner, setting: Setting) -> Finding:
    """Check that the subject writes neither to its inputs nor to the gradients that arrive at its outputs."""
    setting, op = x.resolved(setting), x.op
    inputs, arriving = setting.laid_out(*setting.make(op, x.device), op)
    tensors = {**op.leaves(inputs), "do": arriving[0], "cu_seqlens": inputs.get("cu_seqlens")}
    report = touched(lambda **_: x.run(setting, prepare=lambda *_: (inputs, arriving)), tensors)
    worst = max(report, key=lambda y: y.share)
    if not worst.changed:
        return Finding(setting, "fine", "", 0.0, 0.0, "inputs are as they were")
    words = f"{100 * worst.share:.3g}% of {worst.name} changed"
    return Finding(setting, "changed", worst.name, worst.share, 0.0, words)


def apart(x: Examiner, setting: Setting) -> Finding:
    """Check that no output shares memory with an input, and that the next call leaves earlier outputs alone."""
    setting, op = x.resolved(setting), x.op
    first_inputs, _ = setting.make(op, x.device)
    inputs = op.leaves(first_inputs)
    with torch.no_grad():
        o, parts = x.subject(first_inputs)
        outputs = dict(zip(op.outputs, (o, *(parts if setting.final_state else ())), strict=False))
        for name, y in outputs.items():
            for other, z in inputs.items():
                if _overlap(y, z):
                    words = f"{name} lies in the memory of {other}"
                    return Finding(setting, "changed", name, 1.0, 0.0, words)
        copies = {name: y.detach().clone() for name, y in outputs.items()}
        again, _ = setting.without(seed=setting.seed + 1).make(op, x.device)
        x.subject(again)
        for name, y in outputs.items():
            if not torch.equal(y.nan_to_num(), copies[name].nan_to_num()):
                return Finding(setting, "changed", name, 1.0, 0.0, f"{name} is overwritten by the next call")
    return Finding(setting, "fine", "", 0.0, 0.0, "outputs have memory of their own")


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


CALLS = 50
"""How many times `repeatable` calls a subject at most, within REPEATING seconds; interpreted kernels, twice."""
REPEATING = 1.0


def repeatable(x: Examiner, setting: Setting) -> Finding:
    """Check that repeated calls, `CALLS` at most, return the same bits, outputs and gradients."""
    setting, begun = x.resolved(setting), x.clock()
    first = x.run(setting)
    for n in range(1, CALLS if x.full or not x.learnt.interpreted else 2):
        if n > 1 and not x.full and x.clock() - begun > REPEATING:
            break
        second = x.run(setting)
        for name, y in first.values.items():
            z = second.values[name]
            if y is not None and z is not None and not torch.equal(y.nan_to_num(), z.nan_to_num()):
                off = ((y - z).double().norm() / y.double().norm()).item()
                return Finding(setting, "changed", name, off, 0.0, f"{name} differs by {off:.1e} at call {n + 1}")
    return Finding(setting, "fine", "", 0.0, 0.0, f"equal bits in {n + 1} calls")


def poisoned(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64 while PyTorch fills uninitialised memory with NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` loads PyTorch's compiler: three seconds
    try:
        return x.compare(setting)
    finally:
        torch.set_deterministic_debug_mode(before)


GUARD = 256  # elements before and behind a tensor


class _Fences:
    """Copies tensors to memory with guards, `GUARD` elements of NaN, on both sides; `broken` names one overwritten."""

    def __init__(self):
        self.guards: list[tuple[str, Tensor]] = []

    def around(self, x: Tensor, name: str) -> Tensor:
        """Return a copy of x whose memory has guards before and behind it. name: what `broken` calls it."""
        memory = torch.full((x.numel() + 2 * GUARD,), math.nan, dtype=x.dtype, device=x.device)
        memory[GUARD : GUARD + x.numel()] = x.detach().flatten()
        self.guards += [(name, memory[:GUARD]), (name, memory[GUARD + x.numel() :])]
        return memory[GUARD : GUARD + x.numel()].view(x.shape)

    def broken(self) -> str | None:
        return next((name for name, guard in self.guards if not guard.isnan().all()), None)


def fenced(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64 with NaN on both sides of all inputs in memory, and that this NaN stays."""
    fences, op = _Fences(), x.op
    labels: dict[str, str] = {"o": "do"} | dict.fromkeys(op.outputs[1:], "a state's gradient")

    def fence(name: str, y: Tensor) -> Tensor:
        return fences.around(y, labels.get(name, name))

    def allocate(original: Callable, filled: bool = False) -> Callable:
        def call(*args, **kwargs):
            y = original(*args, **kwargs)
            if not isinstance(y, Tensor) or not y.is_floating_point() or not y.is_contiguous() or y.requires_grad:
                return y
            return fences.around(y if filled else torch.full_like(y, math.nan), "an output or a buffer")

        return call

    def run(at: Setting) -> Ran:
        of_torch, of_tensor = ("empty", "empty_like", "zeros", "zeros_like"), ("new_empty", "new_zeros")
        functions: dict[str, Any] = {n: allocate(getattr(torch, n), "zeros" in n) for n in of_torch}
        methods: dict[str, Any] = {n: allocate(getattr(Tensor, n), "zeros" in n) for n in of_tensor}
        with mock.patch.multiple(torch, **functions), mock.patch.multiple(Tensor, **methods):
            return x.run(at, prepare=partial(mapped, op, fence))

    finding = x.compare(setting, run=run)
    written = fences.broken()
    if written is not None:
        words = f"numbers were written beyond {written}"
        return Finding(finding.setting, "changed", "", 1.0, 0.0, words)
    return finding


def contained(x: Examiner, setting: Setting) -> Finding:
    """Check that a non-finite v stays in its sequence and head; the finding says how many tokens back it reaches."""
    setting, op = x.resolved(setting), x.op
    assert setting.bad is not None
    inputs, _ = setting.make(op, x.device)
    with torch.no_grad():
        o, _ = x.subject(inputs)
    bad = ~o.isfinite().all(-1)  # [B, T, H]
    t, groups = setting.bad[0], o.shape[2] // inputs[op.value].shape[2]
    own = torch.zeros_like(bad)
    own[0, :, :groups] = True
    if setting.lengths is not None:
        start = 0
        for length in setting.lengths:
            if not start <= t < start + length:
                own[0, start : start + length] = False
            start += length
    outside = int((bad & ~own).sum())
    first = int(bad[0, :, 0].double().argmax()) if bad[0, :, 0].any() else t
    reach = t - first
    words = f"reaches {reach} tokens back" if reach else "no token before it"
    if outside:
        at = [int(i) for i in torch.unravel_index((bad & ~own).double().argmax(), bad.shape)]
        words = f"{outside} outputs of other sequences or heads are not finite, first at {at}"
    return Finding(setting, "non-finite" if outside else "fine", "o", outside, 0.0, words)


ORDERED = 8
"""By how many spacings of the dtype results may move when heads, and with them sums, change places."""


def permuted(x: Examiner, setting: Setting) -> Finding:
    """Check that permuting the heads permutes the results, to within `ORDERED` spacings of the dtype."""
    setting, op = x.resolved(setting), x.op

    def turned(name: str, y: Tensor, by: int = 1) -> Tensor:
        axis, grouped = heads_of(op, name)
        return y if axis < 0 else y.roll(by * (y.shape[axis] // setting.H if grouped else 1), axis)

    first, second = x.run(setting), x.run(setting, prepare=partial(mapped, op, turned))
    allowed = ORDERED * torch.finfo(setting.torch_dtype).eps
    moved = {}
    for name, y in first.values.items():
        z = second.values[name]
        if y is not None and z is not None and y.isfinite().all() and z.isfinite().all():
            moved[name] = compare(turned(name if name in op.outputs else name[1:], z, -1), y).l2
    if not moved:
        return Finding(setting, "fine", "", 0.0, allowed, "not finite everywhere: another probe says so")
    name = max(moved, key=moved.__getitem__)
    words = f"{name} moves by {moved[name]:.1e} where heads change places"
    return Finding(setting, "changed" if moved[name] > allowed else "fine", name, moved[name], allowed, words)


def heads_of(op: Operator, name: str) -> tuple[int, bool]:
    """Return the index of a tensor's axis of heads, -1 without one, and whether its heads come in groups (HQ, HV)."""
    axes = op.axes[name].split()
    return next(((n, axis != "H") for n, axis in enumerate(axes) if axis in ("H", "HQ", "HV")), (-1, False))


def memoised(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64 after a call in which the same tensor of offsets held other numbers."""
    setting, ends = x.resolved(setting), []
    assert setting.lengths is not None

    def seen(inputs: dict, arriving: tuple) -> tuple[dict, tuple]:
        ends.append(inputs["cu_seqlens"])
        return inputs, arriving

    def overwritten(inputs: dict, arriving: tuple) -> tuple[dict, tuple]:
        ends[0].copy_(inputs["cu_seqlens"])
        return inputs | {"cu_seqlens": ends[0]}, arriving

    x.run(setting.without(lengths=setting.lengths[::-1]), prepare=seen)
    finding = x.compare(setting, run=lambda at: x.run(at, prepare=overwritten))
    if finding.fails and finding.kind != "raises":
        return replace(finding, words=f"{finding.words}; the same tensor held other offsets at an earlier call")
    return finding


def as_documented(x: Examiner, setting: Setting) -> Finding:
    """Check that states go in and out as [K, V]; the finding says if the subject transposes their axes."""
    finding = through_states(x, setting)
    if finding.kind != "wrong":
        return finding
    op = x.op
    for words, into, out in (
        ("states are taken and returned", True, True),
        ("the initial state is taken", True, False),
        ("the final state is returned", False, True),
    ):

        def turned(at: Setting, into: bool = into, out: bool = out) -> Ran:
            names = op.states * into + op.outputs[1:] * out
            turn = partial(mapped, op, lambda name, y: y.mT.contiguous() if name in names else y)
            ran = x.run(at, prepare=turn)
            back = [f"d{name}" if name in op.states else name for name in names]
            ran.values |= {name: y.mT for name in back if (y := ran.values.get(name)) is not None}
            return ran

        if not through_states(x, setting, run=turned).fails:
            rows, columns = op.axes[op.states[-1]].split()[-2:]
            words = f"{words} as [{columns}, {rows}] in the place of [{rows}, {columns}]"
            return replace(finding, words=f"{words}: {finding.words}")
    return finding


def over_ranks(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor as `through_states` does, with each sequence in slices over two processes of a group. The
    finding says if the processes run on the CPU although the subject runs on a GPU."""
    finding = through_states(x, setting)
    if x.device != "cpu" and ranks_device(x.device) == "cpu":
        return replace(finding, words=f"{finding.words}; on the CPU, since ranks on GPUs need two")
    return finding


def elsewhere(x: Examiner, setting: Setting) -> Finding:
    """Check every tensor against float64 on a GPU that is not the current device."""
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    return x.compare(setting, device=f"cuda:{other}")
