"""The sketch of 15_audit_your_kernel."""

import dataclasses
import functools

import numpy as np

from ...figures.sketches.audit_your_kernel import Budget, BudgetShown, fault_words
from ...instruments.examiner import Examiner
from ...instruments.finding import findings
from ...instruments.subject import Subject
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import choice, steps
from .sketch import Sketch

_FAULTS = (0.0, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)


@functools.cache
def _examiner() -> Examiner:
    return Examiner(Subject(functools.partial(fused_recurrent_rwkv6, backend="torch"), "rwkv6"))


@functools.cache
def _run(dtype: str):
    """Return the setting, and the run of the unchanged kernel there."""
    examiner = _examiner()
    setting = examiner.resolved(examiner.plain.without(T=64, decay="logsigmoid", dtype=dtype))
    return setting, examiner.run(setting)


def _budget(fault: float, dtype: str) -> BudgetShown:
    setting, run = _run(dtype)
    planted = {name: (x.double() * (1 + fault)).to(x.dtype) for name, x in run.values.items()}
    examiner = _examiner()
    results = findings(examiner.op, dataclasses.replace(run, values=planted), examiner.truth(setting), setting)
    errors, allowed = (np.array([getattr(x, name) for x in results]) for name in ("figure", "allowed"))
    return BudgetShown(fault, dtype, tuple(x.tensor for x in results), errors, allowed)


SKETCHES = {
    "budget": Sketch(
        {
            "fault": lambda: steps(0.0, [(fault_words(x), x) for x in _FAULTS], "fault"),
            "dtype": lambda: choice("float32", ("float32", "float16", "bfloat16"), "format"),
        },
        _budget,
        Budget,
        {"rounding": {"fault": 0.0}, "seen": {"fault": 1e-4, "dtype": "float32"}},
        """import flakit
from flakit.ops.rwkv6 import fused_recurrent_rwkv6

def planted(r, k, v, w, u, scale=None):
    return (1 + {fault}) * fused_recurrent_rwkv6(r, k, v, w, u, scale=scale, backend="torch").o

print(flakit.audit(planted, like="rwkv6", only=["truth", "16-bit"], shrink=False))
""",
    ),
}
