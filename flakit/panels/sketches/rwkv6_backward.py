"""The sketches of lesson 02_rwkv6_backward: both passes over a state, and how a growing state overflows."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ...figures import Canvas, Cell, CellGrid, HeatMap, name_rows, style
from ...language import Words
from ...numerics.evaluate import cotangents
from ...numerics.inputs import inputs
from ...ops.rwkv6 import reference
from ..knobs import integer, number
from .sketch import Sketch, listed, percent, short

DECAYS = torch.tensor([0.0, -0.2, -1.0, -2.0])
"""The natural-log decay of each row of the state in "walking_back", the same at every token."""

WRITES, READS = 1, 6
"""The only token that writes, and the only token whose output enters the loss."""

_WRITTEN = torch.tensor([1.0, -0.6, 0.3, -0.9, 0.5])
_ARRIVES = torch.tensor([-0.8, 0.4, 1.0, 0.6, -0.3])
_TOKENS = 8

_LONG = 192  # tokens of "growth": at w = 0.5 a state overflows after 177
END = math.log10(torch.finfo(torch.float32).max)

WORDS = Words() | {
    "walking_back": {
        "alt": "Two rows of small heat maps over eight tokens: above the state S after each token, filled from left to "
        "right, below it D, the gradient with respect to that state, filled from right to left",
        "S": "S walks forward: what has been written",
        "D": "D walks back: what will be read",
        "decay": "w = {w}",
        "writes": "token {t} writes",
        "reads": "token {t} reads $S_{{{before}}}$",
        "S empty": "Forward, token {t}: nothing has been written yet, so S_{t} is zero.",
        "S first": "Forward, token {t}: this is the token that writes, into all rows alike.",
        "S fades": "Forward, token {t}: of what token {first} wrote, {shares} are left in the four rows.",
        "D last": "Back, D_{t}: no token comes after the last one, so D_{t} is zero.",
        "D empty": "Back, D_{t}: no token after {t} is heard by the loss, so D_{t} is zero.",
        "D first": "Back, D_{t}: token {next} reads S_{t}, so here D gets its first numbers.",
        "D fades": "Back, D_{t}: of the numbers in D_{first}, {shares} are left in the four rows.",
        "not yet": "{name}_{t} is not there yet at this step",
        "S sum": "S_{t}[{row}, {column}] = e^w · S_{before}[{row}, {column}] + k · v "
        "= e^{w} · {old} + {k} · {v} = {value}",
        "S begin": "S_{t}[{row}, {column}] = e^w · 0 + k · v = {k} · {v} = {value}",
        "D sum": "D_{t}[{row}, {column}] = e^w · D_{after}[{row}, {column}] + r · do "
        "= e^{w} · {old} + {r} · {do} = {value}",
        "D begin": "D_{t}[{row}, {column}] = 0: nothing reads S_{t}",
    },
    "growth": {
        "alt": "Three lines on a logarithmic axis over the tokens: the largest number in the state S, in D and in dw, "
        "drawn bold where float32 holds them and dotted where it does not; above, the range that float32 lacks",
        "x": "token t",
        "y": r"$\log_{10}$ of the largest number",
        "end": "too large for float32, which ends at $10^{{{end:.1f}}}$",
        "names": {"S": "$S_t$, going forward", "D": "$D_t$, coming back", "dw": r"$dw_t$, made of both"},
        "true": "beyond float32",
        "step": "With w = {w} every token multiplies the rows by {factor:.3g}.",
        "fine": "Everything is finite; the largest number is {largest:.2g}.",
        "lost": "{S} {D} Of dw, {dw}.",
        "S lost": "S is not finite from token {t} on.",
        "S kept": "S is finite throughout.",
        "D lost": "D, coming back, is not finite from token {t} down.",
        "D kept": "D is finite throughout.",
        "dw none": "not one token is left",
        "dw all": "all tokens are finite",
        "dw some": "{n} of {T} tokens are finite",
        "token": "token {t}: the largest number is {sizes}",
        "size": "{size:.2g} in {name}",
        "beyond": "{size:.2g} in {name} (not finite in float32)",
    },
}


@dataclass(frozen=True)
class WalkShown:
    """Both passes of one head over T tokens up to a step: 0 … T-1 forward, then T … 2T-1 backward.

    r, k, w: [T, K]; v, do: [T, V]. states: the state S_t after every token; gradients: D_t = dS_t, [T, K, V] each."""

    step: int
    r: np.ndarray
    k: np.ndarray
    w: np.ndarray
    v: np.ndarray
    do: np.ndarray
    states: np.ndarray
    gradients: np.ndarray

    @property
    def here(self) -> tuple[str, int]:
        """The map that this step computes, "S" (state) or "D" (its gradient), and its token."""
        return ("S", self.step) if self.step < _TOKENS else ("D", 2 * _TOKENS - 1 - self.step)

    def there(self, name: str, t: int) -> bool:
        """Return whether a map has been computed by this step."""
        return self.step >= (t if name == "S" else 2 * _TOKENS - 1 - t)

    def of(self, name: str) -> np.ndarray:
        """Return the states for "S" or their gradients for "D", [T, K, V]."""
        return self.states if name == "S" else self.gradients


class Walk(Sketch, name="walking_back", words=WORDS):
    """A map of the state S after each token, filled from left to right, then of its gradient D, from right to left."""

    knobs = {"step": lambda: integer(2 * _TOKENS - 1, 0, 2 * _TOKENS - 1, "step")}
    presets = {"forward, done": {"step": _TOKENS - 1}, "back, done": {"step": 2 * _TOKENS - 1}}
    script = """from flakit.panels import sketch

shown = sketch("walking_back", step={step}).result
for t, (S, D) in enumerate(zip(shown.states, shown.gradients)):
    print(f"token {{t}}: rows of S {{abs(S).max(1)}}, rows of D {{abs(D).max(1)}}")
"""

    @staticmethod
    def compute(step: int) -> WalkShown:
        return WalkShown(step, **_walk())

    def __init__(self, width: float):
        self.canvas = Canvas(width, 2.72)
        self._maps: dict[str, list[HeatMap]] = {}
        gap, left = 0.1, 0.72
        size = (width - left - 0.12 + gap) / _TOKENS - gap
        for name, top, at, mark in (
            ("S", 0.0, WRITES, self.words.say("writes", t=WRITES)),
            ("D", 1.36, READS - 1, self.words.say("reads", t=READS, before=READS - 1)),
        ):
            self.canvas.text(0.06, top + 0.12, self.words[name], va="center", fontweight="bold")
            end = float(np.abs(_walk()["states" if name == "S" else "gradients"]).max())
            self._maps[name] = []
            for t in range(_TOKENS):
                ax = self.canvas.axes(left + t * (size + gap), top + 0.46, size, 0.62)
                ax.set_title(f"${name}_{t}$", loc="center", pad=3)
                ax.set(xticks=[], yticks=[])
                if t == 0:
                    name_rows(ax, [self.words.say("decay", w=short(w)) for w in DECAYS])
                    ax.tick_params(axis="y", pad=2)
                if t == at:
                    ax.text(0.5, -0.06, mark, transform=ax.transAxes, ha="center", va="top", fontsize=8.5)
                heat = HeatMap(self.canvas, ax, cmap=style.SIGNED, vmin=-end, vmax=end, name=f"{name} {t}")
                self._maps[name].append(heat)
        frame = Rectangle((0, 0), 1, 1, transform=self.canvas.figure.transFigure, facecolor="none", zorder=8)
        frame.set(edgecolor=style.BLUE, linewidth=2.6)
        self.canvas.figure.add_artist(frame)
        (self._frame,) = self.canvas.moving(frame)

    def update(self, shown: WalkShown) -> None:
        for name, maps in self._maps.items():
            for t, heat in enumerate(maps):
                values = shown.of(name)[t]
                heat.update(values, empty=np.full(values.shape, not shown.there(name, t)))
        name, t = shown.here
        box = self._maps[name][t].ax.get_position()
        self._frame.set_bounds(box.x0, box.y0, box.width, box.height)

    def say(self, shown: WalkShown) -> str:
        (name, t) = shown.here
        values = shown.of(name)
        first = WRITES if name == "S" else READS - 1
        far = t - first if name == "S" else first - t
        if name == "D" and t == _TOKENS - 1:
            return self.words.say("D last", t=t)
        if far < 0:
            return self.words.say(f"{name} empty", t=t)
        if far == 0:
            return self.words.say(f"{name} first", t=t, next=t + 1)
        left = np.abs(values[t]).max(1) / np.abs(values[first]).max(1)
        return self.words.say(f"{name} fades", t=t, first=first, shares=listed([percent(float(x)) for x in left]))

    def arithmetic(self, shown: WalkShown, cell: Cell) -> str:
        (name, t) = cell.map.split()
        t, row, column = int(t), cell.row, cell.column
        values = shown.of(name)[:, row, column]
        at = {"t": t, "row": row, "column": column, "value": short(values[t])}
        if not shown.there(name, t):
            return self.words.say("not yet", name=name, t=t)
        if name == "S":
            at |= {"k": short(shown.k[t, row]), "v": short(shown.v[t, column]), "w": short(shown.w[t, row])}
            return self.words.say("S sum" if t else "S begin", before=t - 1, old=short(values[t - 1]), **at)
        if t == _TOKENS - 1:
            return self.words.say("D begin", **at)
        at |= {"r": short(shown.r[t + 1, row]), "do": short(shown.do[t + 1, column]), "w": short(shown.w[t + 1, row])}
        return self.words.say("D sum", after=t + 1, old=short(values[t + 1]), **at)


@dataclass(frozen=True)
class GrowthShown:
    """For a log decay w, which may be positive here, by "S", "D" and "dw": the largest true magnitude at each token
    [T], and whether all values there are finite in float32, boolean [T]."""

    w: float
    sizes: Mapping[str, np.ndarray]
    finite: Mapping[str, np.ndarray]


class Growth(Sketch, name="growth", words=WORDS):
    """The magnitude of the state S, its gradient D and dw over the tokens, against the largest float32 number."""

    knobs = {"w": lambda: number(0.5, -0.3, 0.8, "w", 0.05, False)}
    presets = {"fades": {"w": -0.1}, "grows": {"w": 0.4}, "overflows": {"w": 0.6}}
    script = """import torch
from flakit import inputs
from flakit.numerics.evaluate import cotangents
from flakit.ops.rwkv6 import reference

x = inputs("rwkv6", T=192, H=1, K=4, V=4, decay=0.0)
x["w"] += {w}  # above 0 no logarithm of a decay: the state grows
do, _ = cotangents("rwkv6", x)
for step in reference.steps(**x, do=do):
    if isinstance(step, reference.BackwardStep):
        print(step.t, "D", step.dstate.abs().max().item(), "dw", step.dw.abs().max().item())
    else:
        print(step.t, "S", step.state.abs().max().item())
"""

    @staticmethod
    def compute(w: float) -> GrowthShown:
        x = inputs("rwkv6", T=_LONG, H=1, K=4, V=4, decay=0.0, dtype=torch.float64)
        x["w"] = torch.full_like(x["w"], w)
        do, _ = cotangents("rwkv6", x)
        sizes, finite = {}, {}
        for dtype in (torch.float64, torch.float32):
            steps = list(reference.steps(**{name: tensor.to(dtype) for name, tensor in {**x, "do": do}.items()}))
            forward, backward = steps[:_LONG], steps[: _LONG - 1 : -1]
            for name, field, part in (("S", "state", forward), ("D", "dstate", backward), ("dw", "dw", backward)):
                along = torch.stack([getattr(step, field) for step in part]).flatten(1)
                if dtype is torch.float64:
                    sizes[name] = along.abs().amax(1).numpy()
                else:
                    finite[name] = along.isfinite().all(1).numpy()
        return GrowthShown(w, sizes, finite)

    _low, _high = -4.0, 78.0  # ends of the axis, log10: w = 0.8 gives 10^67 after 192 tokens
    _dotted = {"linestyle": (0, (1, 1.4)), "linewidth": 2.6}

    def __init__(self, width: float):
        self._lines, legend = {}, 2.2
        ax = self.plot(width, 2.75, left=0.6, right=0.15 + legend, top=0.14, bottom=0.52)
        ax.set(xlabel=self.words["x"], xlim=(-0.5, _LONG - 0.5))
        ax.set(ylabel=self.words["y"], ylim=(self._low, self._high), yticks=(0, 20, 40, 60))
        ax.axhspan(END, self._high, linewidth=0, zorder=0, color=style.INF["facecolor"])
        place = {"transform": ax.get_yaxis_transform(), "va": "top", "ha": "center", "fontsize": 8.5}
        ax.text(0.5, self._high - 1.5, self.words.say("end", end=END), **place)
        CellGrid(self.canvas, ax, "tokens", 1, _LONG)
        dashes = {"S": "-", "D": "--", "dw": "-."}
        for name, dash in dashes.items():
            look = {"color": style.letter(name), "linestyle": dash}
            thin = self.canvas.line(ax, color=look["color"], zorder=3, **self._dotted)
            self._lines[name] = thin, self.canvas.line(ax, **look, linewidth=2.6, zorder=4)
        dots = Line2D([], [], color=style.GREY, **self._dotted)
        handles = [*(bold for _, bold in self._lines.values()), dots]
        labels = [*self.words["names"].values(), self.words["true"]]
        place = {"loc": "upper left", "bbox_to_anchor": (1 - (legend + 0.1) / width, 0.95)}
        self.canvas.figure.legend(handles, labels, handlelength=2.4, **place)

    def update(self, shown: GrowthShown) -> None:
        for name, (thin, bold) in self._lines.items():
            with np.errstate(divide="ignore"):
                size = np.log10(shown.sizes[name])
            size[~np.isfinite(size)] = np.nan  # a zero has no place on this axis
            for line, there in ((thin, ~shown.finite[name]), (bold, shown.finite[name])):
                line.set_data(range(_LONG), np.where(there, size, np.nan))

    def say(self, shown: GrowthShown) -> str:
        began = self.words.say("step", w=shown.w, factor=math.exp(shown.w))
        if all(finite.all() for finite in shown.finite.values()):
            largest = max(float(size.max()) for size in shown.sizes.values())
            return f"{began} {self.words.say('fine', largest=largest)}"
        lost = {name: np.flatnonzero(~finite) for name, finite in shown.finite.items()}
        S, D = (self.words[f"{name} {'lost' if len(lost[name]) else 'kept'}"] for name in ("S", "D"))
        left = _LONG - len(lost["dw"])
        dw = self.words.say("dw none" if left == 0 else "dw all" if left == _LONG else "dw some", n=left, T=_LONG)
        S, D = S.format(t=min(lost["S"], default=0)), D.format(t=max(lost["D"], default=0))
        return f"{began} {self.words.say('lost', S=S, D=D, dw=dw)}"

    def arithmetic(self, shown: GrowthShown, cell: Cell) -> str:
        t = cell.column
        sizes = [
            self.words.say("size" if shown.finite[name][t] else "beyond", size=along[t], name=name)
            for name, along in shown.sizes.items()
        ]
        return self.words.say("token", t=t, sizes=listed(sizes))


@functools.cache
def _walk() -> dict:
    """Return the arrays of `WalkShown` by name for eight tokens, of which one writes and one reads."""
    x = {name: torch.zeros(1, _TOKENS, 1, 4) for name in ("r", "k")}
    x |= {name: torch.zeros(1, _TOKENS, 1, 5) for name in ("v", "do")}
    x["k"][:, WRITES], x["v"][:, WRITES] = 1.0, _WRITTEN
    x["r"][:, READS], x["do"][:, READS] = 1.0, _ARRIVES
    w = DECAYS.expand(1, _TOKENS, 1, 4)
    steps = list(reference.steps(**x, w=w, u=torch.zeros(1, 4), scale=1.0))
    forward, backward = steps[:_TOKENS], steps[: _TOKENS - 1 : -1]
    arrays = {name: tensor[0, :, 0] for name, tensor in {**x, "w": w}.items()}
    arrays["states"] = torch.stack([step.state[0, 0] for step in forward])
    arrays["gradients"] = torch.stack([step.dstate[0, 0] for step in backward])
    return {name: tensor.numpy() for name, tensor in arrays.items()}
