"""Judging in the audit: compares the result of a run with the float64 truth, tensor by tensor, as `Finding`s."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics.operators import Operator
from .budget import budget, judge
from .call import Ran
from .setting import Setting
from .truth import Truth

COARSER = 8
"""How many times its error at the plainest calls a coarse tensor may have elsewhere."""
NONE: Mapping[str, float] = {}


@dataclass(frozen=True)
class Finding:
    """The result of one check at one setting: what it measured, and how much of it is allowed.

    kind: "fine", "wrong", "non-finite", "no gradient", "raises" or "changed"; every kind but "fine" is a failure.
    tensor: the one that `figure` was measured on, "" for none. figure: in general its error in the `measure` of
        `budget.Excess`; else what `words`, a sentence for the report, says. others: further tensors that fail.
    budget: the allowed relative L2 error, from which `allowed`, the limit of `figure`, follows for `measure`.
    """

    setting: Setting
    kind: str
    tensor: str
    figure: float
    allowed: float
    words: str
    others: tuple[str, ...] = ()
    measure: str = "L2"
    budget: float = 0.0

    @property
    def fails(self) -> bool:
        return self.kind != "fine"

    @property
    def share(self) -> float:
        """`figure` / `allowed`, by which findings are ranked; infinite for failures without a size, such as a crash."""
        if self.kind in ("no gradient", "raises", "non-finite"):
            return float("inf")
        return self.figure / self.allowed if self.allowed else float("inf") if self.figure else 0.0


def raised(setting: Setting, error: Exception) -> Finding:
    """Return the finding for a subject that crashed with this error."""
    return Finding(setting, "raises", "", float("inf"), 0.0, str(error))


def findings(
    op: Operator,
    ran: Ran,
    truth: Truth,
    setting: Setting,
    *,
    only: Collection[str] = (),
    finite: bool = False,
    allowances: Mapping[str, float] = NONE,
    excused: Collection[str] = (),
) -> list[Finding]:
    """Compare the outputs and gradients of a run with the truth, and return a finding for each of them.

    only: the tensors to judge; default, all. finite: check finiteness alone.
    allowances: relative L2 errors that tensors may have beyond their budget, by name.
    excused: tensors whose finding is not used; their sensitivity (`Truth.units`), which is slow, is not measured.
    """
    results = []
    for name in ran.cut_off:
        words = f"{name} is cut off: no gradient comes back from it"
        results.append(Finding(setting, "no gradient", name, float("inf"), 0.0, words))
    if ran.missing_state:
        words = "no final state came back"
        results.append(Finding(setting, "raises", op.outputs[1], float("inf"), 0.0, words))
    for name, got in ran.values.items():
        if only and name not in only:
            continue
        true = truth.values[name]
        if got is None:
            if true.any():
                words = f"{name[1:]} gets no gradient"
                results.append(Finding(setting, "no gradient", name, float("inf"), 0.0, words))
        elif finite:
            count = int((~got.isfinite() & true.isfinite()).sum())
            words = _non_finite(name, got, true)
            results.append(Finding(setting, "non-finite" if count else "fine", name, count, 0.0, words))
        else:
            allowance = allowances.get(name, 0.0)
            results.append(_against_budget(op, name, got, truth, setting, allowance, measured=name not in excused))
    return results


def worst_of(results: Sequence[Finding]) -> Finding:
    """Return the worst finding. If others fail, too, it names their tensors."""
    worst = max(results, key=lambda x: (x.fails, x.share))
    others = tuple(dict.fromkeys(x.tensor for x in results if x.fails and x is not worst and x.tensor))
    if worst.fails and others:
        worst = replace(worst, words=f"{worst.words}; also {', '.join(others)}", others=others)
    return worst


def _against_budget(
    op: Operator, name: str, got: Tensor, truth: Truth, setting: Setting, allowance: float, *, measured: bool
) -> Finding:
    """Compare one tensor with its error budget. allowance: a relative L2 error allowed beyond the budget. measured: if
    the tensor exceeds its budget, measure its sensitivity (`Truth.units`), which is slow, and compare once more."""
    true, n = truth.values[name], setting.tokens + setting.K + setting.V
    shared = name[1:] in op.tensors and name[1:] not in op.sequences
    rounding = budget(setting.torch_dtype, n, truth.total, setting.B * setting.tokens if shared else 0)
    allowed = max(rounding, allowance)
    got = got.to(true.device)  # ranks may compute elsewhere
    excess = judge(got, true, allowed)
    if excess.errors is not None and excess.errors.finite and measured:
        unit = truth.units[name]
        if not true.any():  # terms that cancel to zero are of the size of the other gradients
            sizes = (y.square().mean().sqrt().item() for x, y in truth.values.items() if x.startswith("d"))
            unit = torch.full_like(true, 3 * max(sizes))
        excess = judge(got, true, allowed, unit)
    errors = excess.errors
    if errors is not None and not errors.finite:
        words = _non_finite(name, got, true)
        return Finding(setting, "non-finite", name, excess.figure, excess.allowed, words, budget=allowed)
    words = f"{name}: {excess.measure} {excess.figure:.1e}, allowed {excess.allowed:.1e}"
    if allowance > rounding:
        words += f" ({COARSER} times its error at the plainest call)"
    if errors is not None and errors.worst_index is not None:
        words += f", worst at {list(errors.worst_index)}"
    kind = "fine" if errors is None else "wrong"
    return Finding(setting, kind, name, excess.figure, excess.allowed, words, measure=excess.measure, budget=allowed)


def _non_finite(name: str, got: Tensor, true: Tensor) -> str:
    bad = ~got.isfinite() & true.isfinite()
    if not bad.any():
        return f"{name}: finite"
    at = [int(i) for i in torch.unravel_index(bad.double().argmax(), bad.shape)] if bad.ndim else []
    kind = "NaN" if got.isnan().any() else "inf"
    return f"{name}: {kind}, {int(bad.sum())} of {bad.numel()} values are not finite, first at {at}"
