"""Step through time, forward and backward: what is read, what is kept, what is written."""

import math

import ipywidgets as widgets
import numpy as np
import torch

from ..figures.scenes import SCENES
from ..figures.stepper import Frame, Stepper, frames
from ..numerics.evaluate import cotangents
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from . import knobs
from .base import Panel, Player
from .shared import chosen, decay_knobs, literal, only_for, own_default

GROWING = "growing"
ROOT = "K^-0.5"
_PROFILES = {name: {"rwkv6": "rwkv6-wide"}.get(name, op.profile) for name, op in OPERATORS.items()}
_SCALES = {name: ROOT if op.scale_exponent else 1.0 for name, op in OPERATORS.items()}


class StateStepper(Panel):
    """The recurrence of an operator's reference, one step at a time; every array is what `reference.steps` yields."""

    name = "state-stepper"
    readout_lines = 4

    def __init__(self, op: str = "rwkv6", **settings):
        self._steppers: dict[tuple[str, str], Stepper] = {}
        self._made_for = self._run = self._loaded = None
        first = next(iter(SCENES))
        made = {
            "op": knobs.operator_choice(first, SCENES),
            **decay_knobs(self, _PROFILES[first], -0.5, {"growing: +|decay|": GROWING}),
            "T": knobs.steps(16, (8, 16, 32, 64), "length T"),
            "K": knobs.steps(8, (2, 4, 8, 16), "rows K"),
            "V": knobs.steps(8, (2, 4, 8, 16), "columns V"),
            "M": knobs.steps(8, (2, 4, 8, 16), "slots M"),
            "scale": knobs.choice(_SCALES[first], {ROOT: ROOT, "1": 1.0}, "scale"),
            "dtype": knobs.choice("float32", ("float32", "float64"), "dtype"),
            "colours": knobs.choice("value", {"signed value": "value", "log10 of the size": "size"}, "colours"),
            "direction": widgets.ToggleButtons(options=["forward", "backward"], style={"button_width": "96px"}),
            "t": knobs.integer(0, 0, 15, "time t"),
        }
        own_default(self, made["op"], made["profile"], _PROFILES)
        own_default(self, made["op"], made["scale"], _SCALES)
        only_for(self, made["op"], made["M"], [name for name, each in OPERATORS.items() if "M" in each.sizes])
        made["T"].observe(lambda change: self._lengthen(change.new), "value")
        super().__init__(
            made,
            {"op": op, **settings},
            alt="Heat maps of one time step: the state, what is read from it, what is kept and what is written; beside "
            "them the decays and the size of the state over time",
            player=Player(31, self._go_to),
        )

    # Moving through time.

    @property
    def position(self) -> int:
        """Where the two passes are: 0 … T-1 forward, then T … 2T-1 backward."""
        t, T = self.knobs["t"].value, self.knobs["T"].value
        return t if self.knobs["direction"].value == "forward" else 2 * T - 1 - t

    def step(self, by: int = 1) -> None:
        """Move on (or back) along both passes, stopping at their ends."""
        self.player.step(by)

    def _go_to(self, position: int) -> None:
        T = self.knobs["T"].value
        if position < T:
            self.set(direction="forward", t=position)
        else:
            self.set(direction="backward", t=2 * T - 1 - position)

    def _lengthen(self, T: int) -> None:
        self.knobs["t"].max = T - 1

    # What a panel does.

    def compute(self, op, profile, decay, T, K, V, M, scale, dtype, seed, **_) -> dict[str, list[Frame]]:
        made_for = (op, profile, decay, T, K, V, M, scale, dtype, seed)
        if made_for != self._made_for:
            of = OPERATORS[op]
            decays = chosen(profile, decay)
            x = inputs(op, T=T, H=1, K=K, V=V, **_slots(op, M), decay=decays, dtype=getattr(torch, dtype), seed=seed)
            if profile == GROWING:
                x[of.decay] = -x[of.decay]
            do, _ = cotangents(op, x)
            scale = K**-0.5 if scale == ROOT else scale
            still = {name: x[name] for name in of.tensors if name not in of.sequences}
            self._run = frames(SCENES[op], of.reference.steps(**x, scale=scale, do=do), scale=scale, **still)
            self._made_for = made_for
        return self._run

    def draw(self, run, *, op, direction, t, colours, **_) -> None:
        stepper = self._stepper(op, direction)
        self.canvas = stepper.canvas
        loaded = (self._made_for, direction, colours)
        if loaded != self._loaded:
            stepper.load(run[direction], magnitude=colours == "size")
            self._loaded = loaded
        stepper.show(t)
        self.player.show(self.position, 2 * self.knobs["T"].value - 1)

    def describe(self, run, *, op, profile, decay, T, direction, t, dtype, **_) -> str:
        scene, frame = SCENES[op], run[direction][t]
        survives = frame[scene.decay]
        followed, _ = scene.followed[direction]
        sizes = (f"{scene.word(name)} {_rms(frame[name]):.3g}" for name in (*scene.outputs(direction), followed))
        lines = [
            f"{direction}, t = {t} of 0 … {T - 1}: between {survives.min():.3g} and {survives.max():.3g} of each "
            f"{scene.decays} survives the step.",
            f"Size (RMS): {', '.join(sizes)}.",
        ]
        bad = []
        for which in ("forward", "backward"):
            for name in (*scene.outputs(which), scene.followed[which][0]):
                steps = [n for n, frame in enumerate(run[which]) if not np.isfinite(frame[name]).all()]
                if steps:
                    bad.append(f"{scene.word(name)} at t = {_ranges(steps)}")
        lines.append(f"Not finite: {'; '.join(bad)}." if bad else "Everything is finite, forward and backward.")
        if profile == GROWING and decay < 0:
            limit = math.log(torch.finfo(getattr(torch, dtype)).max)
            memory = "state" if len(OPERATORS[op].states) == 1 else "slots"
            lines.append(
                f"Each step multiplies the {memory} by e^{-decay:g}; {dtype} ends at e^{limit:.1f}, after about "
                f"{limit / -decay:.0f} steps."
            )
        return "\n".join(lines)

    def script(self, op, profile, decay, T, K, V, M, scale, dtype, direction, t, seed, **_) -> str:
        scene, which = SCENES[op], OPERATORS[op].decay
        derived = [name for each in scene.derived.values() for name in each]
        names = [*scene.outputs(direction), scene.followed[direction][0]]
        names = [name for name in names if name not in derived]
        grow = f"x[{which!r}] = -x[{which!r}]  # a decay must not be positive: this is casebook 1\n"
        grow = grow if profile == GROWING else ""
        sizes = {"T": T, "H": 1, "K": K, "V": V, **_slots(op, M)}
        sizes = ", ".join(f"{name}={size}" for name, size in sizes.items())
        step = t if direction == "forward" else 2 * T - 1 - t
        return f"""import torch
from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from {OPERATORS[op].reference.__package__} import reference

x = inputs({op!r}, {sizes}, decay={literal(chosen(profile, decay))}, dtype=torch.{dtype}, seed={seed})
{grow}do, _ = cotangents({op!r}, x)
# {T} forward from t = 0, then {T} backward from t = {T - 1}
steps = list(reference.steps(**x, scale={f"{K}**-0.5" if scale == ROOT else scale}, do=do))

step = steps[{step}]  # {direction}, t = {t}
for name in {names!r}:
    values = getattr(step, name)[0, 0]
    print(name, "RMS", values.double().square().mean().sqrt().item(), "finite", values.isfinite().all().item())
    print(values)
"""

    def _stepper(self, op: str, direction: str) -> Stepper:
        if (op, direction) not in self._steppers:
            self._steppers[op, direction] = Stepper(SCENES[op], direction)
        return self._steppers[op, direction]


def _slots(op: str, M: int) -> dict[str, int]:
    """The size that only some operators have."""
    return {"M": M} if "M" in OPERATORS[op].sizes else {}


def _rms(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _ranges(steps: list[int]) -> str:
    """[3, 4, 5, 9] -> "3 … 5, 9"."""
    runs = []
    for t in steps:
        if runs and runs[-1][1] == t - 1:
            runs[-1][1] = t
        else:
            runs.append([t, t])
    return ", ".join(f"{a}" if a == b else f"{a} … {b}" for a, b in runs)


def state_stepper(op: str = "rwkv6", **settings) -> StateStepper:
    """A panel that steps through an operator's recurrence, forward and backward.

    op: an operator of `flakit.numerics.operators.OPERATORS`.
    settings: any of its knobs: profile ("constant", "growing" or one of `flakit.numerics.inputs.DECAYS`), decay (the
    natural-log decay of "constant"), T, K, V, M (GSA's slots), scale, dtype, colours ("value" or "size"), direction,
    t, seed.

    >>> state_stepper(profile="constant", decay=-0.1, T=32, t=5)
    """
    return StateStepper(op, **settings)
