"""The sketch of lesson 15_audit_your_kernel: a planted fault against the audit's error budget."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...figures import Bars, Cell, CellGrid, name_rows, style
from ...instruments.examiner import Examiner
from ...instruments.finding import findings
from ...instruments.subject import Subject
from ...language import Words, say
from ...numerics.words import error
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import choice, steps
from .sketch import Sketch, listed, verb

_FAULTS = (0.0, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)

WORDS = Words() | {
    "budget": {
        "alt": "A bar for the output and each gradient of a right kernel with a fault planted in it, as long as its "
        "error, beside a mark at what the budget allows",
        "x": "relative error",
        "within": "within its budget",
        "beyond": "called wrong",
        "none": "Nothing is planted: what is left is rounding in {dtype}. The largest error is {worst} of its budget.",
        "unseen": "All values are {fault} too large. The largest error is {worst} of its budget: the fault is lost in "
        "the rounding of {dtype}.",
        "seen": "All values are {fault} too large, and {names} {verb} called wrong.",
        "arithmetic": "{name}: off by {error}, allowed {allowed}",
    }
}
_LOW, _HIGH = -9.0, 0.3


def fault_words(fault: float) -> str:
    """Format a share as a percentage in full digits, without a power of ten."""
    return f"{100 * fault:.8f}".rstrip("0").rstrip(".") + "%"


@dataclass(frozen=True)
class BudgetShown:
    """The audit's errors of the N tensors in `names`, if all values are multiplied by 1 + `fault`; its budgets."""

    fault: float
    dtype: str
    names: Sequence[str]
    errors: np.ndarray
    allowed: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        """Whether each tensor's error exceeds its budget, boolean [N]."""
        return self.errors > self.allowed


class Budget(Sketch, name="budget", words=WORDS):
    """A bar on a logarithmic axis for each tensor's error, with a mark at its budget."""

    knobs = {
        "fault": lambda: steps(0.0, [(fault_words(x), x) for x in _FAULTS], "fault"),
        "dtype": lambda: choice("float32", ("float32", "float16", "bfloat16"), "format"),
    }
    presets = {"rounding": {"fault": 0.0}, "seen": {"fault": 1e-4, "dtype": "float32"}}
    script = """import flakit
from flakit.ops.rwkv6 import fused_recurrent_rwkv6

def planted(r, k, v, w, u, scale=None):
    return (1 + {fault}) * fused_recurrent_rwkv6(r, k, v, w, u, scale=scale, backend="torch").o

print(flakit.audit(planted, like="rwkv6", only=["truth", "16-bit"], shrink=False))
"""

    @staticmethod
    def compute(fault: float, dtype: str) -> BudgetShown:
        setting, run = _run(dtype)
        planted = {name: (x.double() * (1 + fault)).to(x.dtype) for name, x in run.values.items()}
        examiner = _examiner()
        results = findings(examiner.op, dataclasses.replace(run, values=planted), examiner.truth(setting), setting)
        errors, allowed = (np.array([getattr(x, name) for x in results]) for name in ("figure", "allowed"))
        return BudgetShown(fault, dtype, tuple(x.tensor for x in results), errors, allowed)

    def __init__(self, width: float):
        ax = self.plot(width, 2.6, left=0.6, right=1.95, top=0.13, bottom=0.52)
        ax.set(xlabel=self.words["x"], xlim=(_LOW, _HIGH))
        powers = range(int(_LOW), 1, 2 if width < 7 else 1)
        ax.set_xticks(list(powers), [f"$10^{{{n}}}$" for n in powers])
        self._within = Bars(self.canvas, ax, horizontal=True, thick=0.6, facecolor=style.BLUE)
        self._beyond = Bars(
            self.canvas, ax, horizontal=True, thick=0.6, facecolor=style.BROKEN, hatch="//", edgecolor="white"
        )
        handles = [style.swatch(style.BLUE, self.words["within"]), style.swatch(style.BROKEN, self.words["beyond"])]
        handles += ax.plot([], [], color=style.BLACK, linewidth=2.5, label=say("allowed"))
        at = (1 - 1.8 / width, 0.95)
        self.canvas.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at, handlelength=1.4)
        self._marks = self.canvas.line(ax, "|", color=style.BLACK, markersize=15, markeredgewidth=2.5)
        tensors = _run("float32")[1].values
        name_rows(ax, tensors)
        ax.set_ylim(len(tensors) - 0.4, -0.6)
        CellGrid(self.canvas, ax, "tensors", len(tensors), 1)

    def update(self, shown: BudgetShown) -> None:
        with np.errstate(divide="ignore"):
            ends = np.log10(shown.errors).clip(_LOW, _HIGH)
        self._within.update(np.where(shown.wrong, np.nan, ends), _LOW)
        self._beyond.update(np.where(shown.wrong, ends, np.nan), _LOW)
        self._marks.set_data(np.log10(shown.allowed), range(len(shown.names)))

    def say(self, shown: BudgetShown) -> str:
        fault = fault_words(shown.fault)
        if shown.wrong.any():
            wrong = [name for name, beyond in zip(shown.names, shown.wrong, strict=True) if beyond]
            return self.words.say("seen", fault=fault, names=listed(wrong), verb=verb(wrong))
        worst = f"{math.ceil(100 * (shown.errors / shown.allowed).max())}%"
        return self.words.say("unseen" if shown.fault else "none", fault=fault, worst=worst, dtype=shown.dtype)

    def arithmetic(self, shown: BudgetShown, cell: Cell) -> str:
        off, allowed = error(float(shown.errors[cell.row])), error(float(shown.allowed[cell.row]))
        return self.words.say("arithmetic", name=shown.names[cell.row], error=off, allowed=allowed)


@functools.cache
def _examiner() -> Examiner:
    return Examiner(Subject(functools.partial(fused_recurrent_rwkv6, backend="torch"), "rwkv6"))


@functools.cache
def _run(dtype: str):
    """Return an audit setting of this dtype, and the unchanged kernel's `Run` there."""
    examiner = _examiner()
    setting = examiner.resolved(examiner.plain.without(T=64, decay="logsigmoid", dtype=dtype))
    return setting, examiner.run(setting)
