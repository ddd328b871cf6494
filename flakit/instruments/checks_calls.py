"""Checks that compare several calls: permuted heads, changed offsets, transposed states, ranks, other GPUs."""

from dataclasses import replace

import torch
from torch import Tensor

from ..numerics.errors import compare
from ..numerics.operators import Operator
from .call import Ran
from .checks import through_states
from .examiner import Examiner
from .finding import Finding
from .pair import ranks_device
from .setting import Setting

ORDERED = 8
"""By how many spacings of the dtype results may move when heads, and with them sums, change places."""


def permuted(x: Examiner, setting: Setting) -> Finding:
    """Permuting the heads permutes the results."""
    setting, op = x.resolved(setting), x.op

    def turned(y: Tensor, name: str, by: int) -> Tensor:
        axis, grouped = heads_of(op, name)
        return y if axis < 0 else y.roll(by * (y.shape[axis] // setting.H if grouped else 1), axis)

    def prepare(inputs: dict, arriving: tuple) -> tuple[dict, tuple]:
        leaves = {name: turned(y, name, 1) for name, y in op.leaves(inputs).items()}
        do, dstate = arriving
        dparts = [turned(y, name, 1) for name, y in zip(op.outputs[1:], op.parts(dstate), strict=False)]
        return op.arguments(leaves, inputs), (turned(do, "o", 1), op.state(dparts))

    first, second = x.run(setting), x.run(setting, prepare=prepare)
    allowed = ORDERED * torch.finfo(setting.torch_dtype).eps
    moved = {}
    for name, y in first.values.items():
        z = second.values[name]
        if y is not None and z is not None and y.isfinite().all() and z.isfinite().all():
            moved[name] = compare(turned(z, name if name in op.outputs else name[1:], -1), y).l2
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
    """As `against_truth`, after a call in which the same tensor of offsets held other numbers."""
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
    """States go in and out as [K, V]; the finding says if their axes are transposed."""
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
            def prepare(inputs: dict, arriving: tuple) -> tuple[dict, tuple]:
                leaves, (do, dstate) = op.leaves(inputs), arriving
                if into:
                    leaves |= {name: leaves[name].mT.contiguous() for name in op.states if name in leaves}
                if out:
                    dstate = op.state([part.mT.contiguous() for part in op.parts(dstate)])
                return op.arguments(leaves, inputs), (do, dstate)

            ran = x.run(at, prepare=prepare)
            back = [f"d{name}" for name in op.states] * into + list(op.outputs[1:]) * out
            ran.values |= {name: y.mT for name in back if (y := ran.values.get(name)) is not None}
            return ran

        if not through_states(x, setting, run=turned).fails:
            rows, columns = op.axes[op.states[-1]].split()[-2:]
            words = f"{words} as [{columns}, {rows}] in the place of [{rows}, {columns}]"
            return replace(finding, words=f"{words}: {finding.words}")
    return finding


def over_ranks(x: Examiner, setting: Setting) -> Finding:
    """As `through_states`; the finding says if the ranks run on the CPU though the subject runs on a GPU."""
    finding = through_states(x, setting)
    if x.device != "cpu" and ranks_device(x.device) == "cpu":
        return replace(finding, words=f"{finding.words}; on the CPU, since ranks on GPUs need two")
    return finding


def elsewhere(x: Examiner, setting: Setting) -> Finding:
    """As `against_truth`, on a GPU that is not the current one."""
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    return x.compare(setting, device=f"cuda:{other}")
