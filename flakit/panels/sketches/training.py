"""The sketches of lesson 13_training: means of means, clipped gradients, and a gate that drifts into overflow."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ...cases import gate_drift, padding
from ...cases.gradient_accumulation import clipped
from ...figures import Bars, Canvas, Cell, CellGrid, HeatMap, Strip, name_rows, style
from ...language import Words, say
from ...numerics.words import number
from ..knobs import integer, steps
from .sketch import Sketch

TARGETS = 12
_BAD = ("5", "1000", "1e20", "inf", "NaN")
_F = tuple(0.0 - f for f in (*range(0, 14), 14, 14.5, 14.7, 14.8, 14.9, 15, *range(16, 26)))
"""Stops of the knob f, close together where the kernel breaks."""
_SUMMED = padding.anchors(gate_drift.T)[0].tokens
"""The number of tokens whose gates add up to the largest exponent."""

WORDS = Words() | {
    "mean_of_means": {
        "alt": "A bar for each target of a step that goes through the model in two parts: how much its loss counts "
        "where the means of the two parts are averaged, with a line at what it counts where all are averaged at once",
        "x": "target",
        "y": "counts",
        "first": "first part",
        "second": "second part",
        "right": "all at once: 1/{n}",
        "same": "Cut in the middle, both parts have {first} targets. Each counts {one:.3g}, as it does all at once.",
        "uneven": "The first part has {first} and the second {second}. In the mean of the two means each of the first "
        "counts {one:.3g} and each of the others {other:.3g}; all at once, each would count {right:.3g}.",
        "arithmetic": "target {t}: 1/2 · 1/{size} = {weight:.3g}, and all at once 1/{n} = {right:.3g}",
    },
    "clipping": {
        "alt": "Two tables of three parameters with three gradients each, before the norm is clipped and after",
        "before": "before",
        "after": "after",
        "parameter": "parameter {n}",
        "finite": "The norm of all nine is {norm:.3g}. Clipping multiplies each of them by {factor:.3g}, and the norm "
        "is 1.",
        "zero": "All nine are finite, but the norm, a sum of squares, is inf. Clipping multiplies by 1 / inf = 0: all "
        "nine are lost.",
        "inf": "The norm is inf, and clipping multiplies by 1 / inf = 0: eight are lost, and inf times 0 is NaN.",
        "nan": "The norm is NaN, and clipping multiplies by 1 / NaN: one NaN has become nine.",
        "arithmetic": "parameter {p}, element {e}: {before:.3g} becomes {after:.3g}",
    },
    "f_proj": {
        "alt": "Left, the exponent that a faulty kernel takes, over what the gates' projection says, with the limit of "
        "float32, and a mark at the value now; right, a gradient of all slots and tokens, hatched where it is lost",
        "x": "f",
        "y": "largest exponent",
        "limit": "float32 ends: {limit}",
        "clamp": "|f| < 20",
        "map": "ds by the faulty kernel",
        "fine": "At f = {f} the gate is g = {g:.3g} a token. {tokens} of them add up to an exponent of {exponent:.3g}, "
        "below {limit}: everything is finite.",
        "lost": "At f = {f} the gate is g = {g:.3g} a token. {tokens} of them add up to an exponent of {exponent:.3g}, "
        "above {limit}: {lost} of {all} tokens have lost their gradient. The output is {output}.",
        "curve": "f = {f}: {tokens} · {g:.3g} = -{exponent:.3g}; e^{exponent:.3g} = {size}",
        "element": "ds of token {t}, slot {m}: {computed} (true: {true})",
    },
}


@dataclass(frozen=True)
class MeanOfMeansShown:
    """The weight of each of N targets' losses, [N] each: if the means of the first `cut` targets and of the others are
    averaged, and in the mean over all targets (`right`)."""

    cut: int
    averaged: np.ndarray
    right: np.ndarray


class MeanOfMeans(Sketch, name="mean_of_means", words=WORDS):
    """A bar for the weight of each target if two parts of different length count the same."""

    knobs = {"cut": lambda: integer(2, 1, TARGETS - 1, "cut after")}
    presets = {"in the middle": {"cut": TARGETS // 2}, "one and the rest": {"cut": 1}}
    script = f"""import torch

losses = torch.zeros({TARGETS}, requires_grad=True)
mean_of_means = (losses[:{{cut}}].mean() + losses[{{cut}}:].mean()) / 2
print(torch.autograd.grad(mean_of_means, losses)[0])
"""

    @staticmethod
    def compute(cut: int) -> MeanOfMeansShown:
        losses = torch.zeros(TARGETS, requires_grad=True)
        parts = losses[:cut], losses[cut:]
        ways = torch.stack([part.mean() for part in parts]).mean(), losses.mean()
        return MeanOfMeansShown(cut, *(torch.autograd.grad(way, losses)[0].numpy() for way in ways))

    def __init__(self, width: float):
        ax = self.plot(width, 2.3, left=0.65, right=1.9, top=0.12, bottom=0.5)
        ax.set(xlabel=self.words["x"], xticks=range(TARGETS), xlim=(-0.6, TARGETS - 0.4))
        ax.set(ylabel=self.words["y"], ylim=(0, 0.54), yticks=(0, 0.25, 0.5))
        self._first = Bars(self.canvas, ax, facecolor=style.BLUE)
        self._second = Bars(self.canvas, ax, facecolor=style.PURPLE)
        ax.axhline(1 / TARGETS, **style.LAW, zorder=3)
        place = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
        ax.text(1.02, 1 / TARGETS, self.words.say("right", n=TARGETS), **place)
        CellGrid(self.canvas, ax, "targets", 1, TARGETS)
        handles = [style.swatch(style.BLUE, self.words["first"]), style.swatch(style.PURPLE, self.words["second"])]
        at = (1 - 1.75 / width, 0.95)
        self.canvas.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at, handlelength=1.4)

    def update(self, shown: MeanOfMeansShown) -> None:
        first = np.arange(TARGETS) < shown.cut
        self._first.update(np.where(first, shown.averaged, np.nan))
        self._second.update(np.where(first, np.nan, shown.averaged))

    def say(self, shown: MeanOfMeansShown) -> str:
        return self.words.say(
            "same" if np.allclose(shown.averaged, shown.right) else "uneven", first=shown.cut,
            second=TARGETS - shown.cut, one=shown.averaged[0], other=shown.averaged[-1], right=shown.right[0],
        )  # fmt: skip

    def arithmetic(self, shown: MeanOfMeansShown, cell: Cell) -> str:
        t = cell.column
        size = shown.cut if t < shown.cut else TARGETS - shown.cut
        weight, right = shown.averaged[t], shown.right[t]
        return self.words.say("arithmetic", t=t, size=size, weight=weight, n=TARGETS, right=right)


@dataclass(frozen=True)
class ClippingShown:
    """Gradients [3, 3] before and after their common norm is clipped to 1, and the norm before."""

    before: np.ndarray
    after: np.ndarray
    norm: float


class Clipping(Sketch, name="clipping", words=WORDS):
    """Two tables of nine gradients, before and after clipping, with a number in each cell."""

    knobs = {"bad": lambda: steps("5", _BAD, "gradient")}
    presets = {"one inf": {"bad": "inf"}, "one NaN": {"bad": "NaN"}}
    script = """from flakit.cases.gradient_accumulation import clipped

before, after = clipped(float({bad}))
print(before)
print(after)
"""

    @staticmethod
    def compute(bad: str) -> ClippingShown:
        before, after = clipped(float(bad))
        return ClippingShown(before.numpy(), after.numpy(), torch.nn.utils.get_total_norm([before]).item())

    def __init__(self, width: float):
        height = 1.9
        self.canvas, self._strips = Canvas(width, height), {}
        side, gap = 1.0, 0.3
        across = min((width - side - gap - 0.15) / 2, 3.6)
        for n, (name, largest) in enumerate((("before", 9.0), ("after", 0.6))):
            ax = self.canvas.axes(side + n * (across + gap), 0.35, across, height - 0.5)
            ax.set(title=self.words[name], xticks=[])
            name_rows(ax, [self.words.say("parameter", n=row) if n == 0 else "" for row in range(3)])
            self._strips[name] = Strip(
                self.canvas, ax, 3, 3, size=10, cmap="Blues_r", vmin=-largest, vmax=largest, name=name
            )
        self.canvas.legend(*style.non_finite_handles(), loc="upper right", borderaxespad=0.1, fontsize=8.5)

    def update(self, shown: ClippingShown) -> None:
        for name, strip in self._strips.items():
            values = np.asarray(getattr(shown, name), dtype=np.float64)
            strip.update(values, [[number(x, 3) for x in row] for row in values])

    def say(self, shown: ClippingShown) -> str:
        if math.isnan(shown.norm):
            return self.words["nan"]
        if math.isinf(shown.norm):
            return self.words["zero" if np.isfinite(shown.after).all() else "inf"]
        return self.words.say("finite", norm=shown.norm, factor=min(1.0, 1 / shown.norm))

    def arithmetic(self, shown: ClippingShown, cell: Cell) -> str:
        before, after = (x[cell.row, cell.column] for x in (shown.before, shown.after))
        return self.words.say("arithmetic", p=cell.row, e=cell.column, before=before, after=after)


@dataclass(frozen=True)
class FProjShown:
    """If the model outputs f for all tokens and slots: its gate (natural-log, <= 0), the largest exponent in a faulty
    kernel's factors, ds by that kernel and by a correct one (`true`) [T, M], and whether that kernel's o is finite."""

    f: float
    gate: float
    exponent: float
    computed: np.ndarray
    true: np.ndarray
    output_finite: bool


class FProj(Sketch, name="f_proj", words=WORDS):
    """A kernel's largest exponent as a function of the model's output f, and ds, which is NaN above float32's limit."""

    knobs = {"f": lambda: steps(-8.0, [(f"{f:g}", f) for f in _F], "f")}
    presets = {"fine": {"f": -14.7}, "first NaN": {"f": -14.8}, "at the clamp": {"f": -20.0}}
    script = """import torch
from flakit.cases import gate_drift, padding

g = torch.nn.functional.logsigmoid(torch.tensor({f})).item() / 8
x = padding.inputs(gate_drift.T, g)
print("largest exponent", gate_drift.exponents("gsa", x["g"]).max().item())
for name, tensor in padding.run(x).items():
    print(name, "finite" if tensor.isfinite().all() else "lost")
"""

    @staticmethod
    def compute(f: float) -> FProjShown:
        x = padding.inputs(gate_drift.T, _g(f))
        runs = {form: padding.run(x, form) for form in ("chunk", "right")}
        computed, true = (run["ds"][0, :, 0].numpy() for run in runs.values())
        gate, exponent = (float(numbers[_F.index(f)]) for numbers in _exponents())
        return FProjShown(f, gate, exponent, computed, true, bool(runs["chunk"]["o"].isfinite().all()))

    def __init__(self, width: float):
        height = 2.75
        self.canvas = Canvas(width, height)
        left, right, gap = 0.7, 0.12, 0.8
        across = (width - left - right - gap) / 2
        ax = self.canvas.axes(left, 0.35, across, height - 0.85)
        ax.set(xlabel=self.words["x"], ylabel=self.words["y"])
        self._here = self.canvas.line(ax, "o", **style.HERE, markersize=9, zorder=6)
        limit, clamp = gate_drift.LIMIT, padding.CLAMPS["gsa"]
        _, exponents = _exponents()
        ax.plot(_F, exponents, **style.LINES[0])
        ax.set(xlim=(0.6, _F[-1]), ylim=(0, 1.04 * exponents[-1]))
        ax.axhline(limit, **style.LAW)
        ax.text(0, limit, self.words.say("limit", limit=f"{limit:.2f}"), va="bottom", fontsize=9)
        ax.axvline(clamp, color=style.GREY, linewidth=1.2, linestyle=(0, (2, 2)))
        ax.text(clamp, 3, self.words["clamp"] + " ", ha="right", va="bottom", fontsize=9, color=style.GREY)
        at = self.canvas.axes(left + across + gap, 0.35, across, height - 0.85)
        at.set(title=self.words["map"], xlabel=say("token"), ylabel=say("slot"))
        self._map = HeatMap(self.canvas, at, cmap=style.SIGNED, name="ds")
        self.canvas.legend(*style.non_finite_handles()[:1], loc="upper right", borderaxespad=0.1)
        CellGrid(self.canvas, ax, "exponent", 1, len(_F))

    def update(self, shown: FProjShown) -> None:
        self._here.set_data([shown.f], [shown.exponent])
        largest = float(np.abs(shown.true).max())
        self._map.colours.set_clim(-largest, largest)
        self._map.update(shown.computed.T)

    def say(self, shown: FProjShown) -> str:
        bad = ~np.isfinite(shown.computed).all(1)
        return self.words.say(
            "lost" if bad.any() else "fine", f=shown.f, g=shown.gate, tokens=_SUMMED, exponent=shown.exponent,
            limit=f"{gate_drift.LIMIT:.2f}", lost=int(bad.sum()), all=len(bad),
            output=say("finite") if shown.output_finite else say("lost, too"),
        )  # fmt: skip

    def arithmetic(self, shown: FProjShown, cell: Cell) -> str:
        if cell.map == "ds":
            m, t = cell.row, cell.column
            return self.words.say("element", t=t, m=m, computed=shown.computed[t, m], true=shown.true[t, m])
        n = cell.column
        gate, exponent = (float(numbers[n]) for numbers in _exponents())
        if exponent <= gate_drift.LIMIT:
            size = number(math.exp(exponent), 2)
        else:
            size = say("inf (true: {size})").format(size=f"1e{exponent / math.log(10):.0f}")
        return self.words.say("curve", f=_F[n], tokens=_SUMMED, g=gate, exponent=exponent, size=size)


def _g(f: float) -> float:
    """Return GSA's gate for the model's output f, as in the published model: logsigmoid(f) / 8."""
    return F.logsigmoid(torch.tensor(f, dtype=torch.float64)).item() / 8


@functools.cache
def _exponents() -> tuple[np.ndarray, np.ndarray]:
    """Return the gate and the faulty kernel's largest exponent at each stop of f, float32 [stops] each."""
    gates = torch.tensor([_g(f) for f in _F])
    exponents = gate_drift.exponents("gsa", gates[:, None, None, None].expand(-1, gate_drift.T, 1, 1))
    return gates.numpy(), exponents.flatten().float().numpy()
