"""The panel that steps through an operator's recurrence, forward and backward: what a step reads, keeps and writes."""

import functools
import itertools
import math
from collections.abc import Callable

import ipywidgets as widgets
import numpy as np
import torch

from ..figures.canvas import Cell
from ..figures.scenes import SCENES, Scene
from ..figures.stepper import DECAYS, Frame, Stepper, frames
from ..language import Words, say, speaking
from ..numerics.evaluate import cotangents
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from ..numerics.words import number
from . import knobs
from .base import Panel, Player
from .shared import chosen, decay_knobs, literal, only_for, own_default

GROWING = "growing"
ROOT = "K^-0.5"
_PROFILES = {name: op.profile for name, op in OPERATORS.items()} | {"rwkv6": "rwkv6-wide"}
_SCALES = {name: ROOT if op.scale_exponent else 1.0 for name, op in OPERATORS.items()}

WORDS = Words() | {
    "directions": {"forward": "forward", "backward": "backward"},
    "alt": "Heat maps of one time step: the state, what is read from it, what is kept and what is written; beside "
    "them what survives of each row at every step",
    "where": "{direction}, token {t} of 0 to {last}: {step}.",
    "survives": "{factor} of each {decays} survives the step",
    "all": {"0": "nothing", "1": "all"},
    "multiplied": "the step multiplies each {decays} by {factor}",
    "between": "between {low} and {high}",
    "sizes": "Typical size (root mean square): {sizes}.",
    "fine": "Everything is finite, forward and backward.",
    "bad here": "Not finite: {bad}.",
    "bad there": "{direction}, {bad} are not finite.",
    "bad array": "{name} at t = {steps}",
    "grows": "Each step multiplies the {memory} by e^{decay}; {dtype} ends at e^{limit}, after about {steps} steps.",
    "memory": {1: "state", 2: "slots"},
    "arithmetic": "{name}[{place}] = {formula} = {numbers} = {value:.3g}{true}",
    "given": "{name}[{place}] = {value:.3g}",
    "decay": "{name}[{place}] = e^{exponent:.3g} = {value:.3g}",
    "true": " (true: {true:.3g})",
    "comment": "a decay must not be positive: with this one the state grows without end",
}


class Passes(Player):
    """A `Player` over both passes that stops at the end of each; the next press plays the other one.

    Positions are 0 … T-1 forward, then T … 2T-1 backward; `play` has those of one pass."""

    def __init__(self, T: int, go: Callable[[int], None]):
        self._T, self._showing = T, False
        super().__init__(T - 1, go)

    @property
    def passes(self) -> list[int]:
        return [0, self._T, 2 * self._T]

    def step(self, by: int) -> None:
        """Move by a number of positions through both passes, and stop at their ends."""
        super()._moved(min(max(self.place + by, 0), 2 * self._T - 1))

    def show(self, place: int, T: int) -> None:
        """Set the position and the number of tokens without calling back."""
        first = place // T * T
        self.place, self._T, self._showing = place, T, True
        with self.play.hold_sync():
            self.play.min, self.play.max = 0, 2 * T - 1
            self.play.value = place
            self.play.min, self.play.max = first, first + T - 1
        self._showing = False

    def _moved(self, place: int) -> None:
        if self._showing:
            return
        # Pressed at the end of a pass, play starts at its beginning in the browser: go on to the other pass instead.
        if self.play.playing and self.place == self.play.max and place == self.play.min:
            place = (self.place + 1) % (2 * self._T)
        super()._moved(place)


class StateStepper(Panel):
    """The panel of `state_stepper`: one step of an operator's recurrence, with the arrays of its `reference.steps`."""

    name = "state-stepper"
    on_view = ("t", "decay")
    presets = {
        "remembers": {"profile": "constant", "decay": -0.03, "T": 16, "t": 15, "direction": "forward"},
        "forgets": {"profile": "constant", "decay": -2.0, "T": 16, "t": 15, "direction": "forward"},
        "backward": {"profile": "constant", "decay": -0.5, "T": 16, "t": 8, "direction": "backward"},
        "overflows": {"profile": GROWING, "decay": -8.0, "T": 16, "t": 12, "direction": "forward"},
    }
    readout_lines = 4

    def __init__(self, op: str = "rwkv6", show=None, **settings):
        self._run = functools.lru_cache(maxsize=4)(_run)
        first = next(iter(SCENES))
        controls = {
            "op": knobs.operator_choice(first, SCENES),
            "T": knobs.steps(16, (8, 16, 32, 64), "length T"),
            "t": knobs.integer(0, 0, 15, "time t"),
            **decay_knobs(self, _PROFILES[first], -0.5, {"growing: +|decay|": GROWING}),
            "direction": widgets.ToggleButtons(
                options=[(words, name) for name, words in WORDS["directions"].items()], style={"button_width": "96px"}
            ),
            "K": knobs.steps(8, (2, 4, 8, 16), "rows K"),
            "V": knobs.steps(8, (2, 4, 8, 16), "columns V"),
            "M": knobs.steps(8, (2, 4, 8, 16), "slots M"),
            "scale": knobs.choice(_SCALES[first], {ROOT: ROOT, "1": 1.0}, "scale"),
            "dtype": knobs.choice("float32", ("float32", "float64"), "dtype"),
            "colours": knobs.choice("value", {"signed value": "value", "log10 of the size": "size"}, "colours"),
        }
        own_default(self, controls["op"], controls["profile"], _PROFILES)
        own_default(self, controls["op"], controls["scale"], _SCALES)
        only_for(self, controls["op"], controls["M"], [name for name, of in OPERATORS.items() if "M" in of.sizes])
        controls["T"].observe(lambda change: setattr(controls["t"], "max", change.new - 1), "value")
        player = Passes(controls["T"].value, self._go_to)
        super().__init__(controls, {"op": op, **settings}, alt=WORDS["alt"], show=show, player=player)

    # Moving through time.

    @property
    def position(self) -> int:
        """The position of the step on view: 0 … T-1 forward, then T … 2T-1 backward."""
        t, T = self.knobs["t"].value, self.knobs["T"].value
        return t if self.knobs["direction"].value == "forward" else 2 * T - 1 - t

    def _go_to(self, position: int) -> None:
        T = self.knobs["T"].value
        if position < T:
            self.set(direction="forward", t=position)
        else:
            self.set(direction="backward", t=2 * T - 1 - position)

    # What a panel does.

    def compute(self, op, profile, decay, T, K, V, M, scale, dtype, seed, **_) -> dict[str, list[Frame]]:
        return self._run(op, profile, decay, T, K, V, M, scale, dtype, seed)

    def draw(self, run, *, op, direction, t, colours, **_) -> None:
        stepper = self._stepper(op, direction)
        if stepper.run is not run[direction] or stepper.magnitude != (colours == "size"):
            stepper.load(run[direction], magnitude=colours == "size")
        stepper.show(t)
        self.player.show(self.position, self.knobs["T"].value)

    def _stepper(self, op: str, direction: str) -> Stepper:
        return self.figure(lambda width: Stepper(SCENES[op], direction, width), op, direction)

    def describe(self, run, *, op, profile, decay, T, direction, t, dtype, **_) -> str:
        scene, frame = SCENES[op], run[direction][t]
        low, high = (number(x, 3) for x in (frame[scene.decay].min(), frame[scene.decay].max()))
        factor = low if low == high else WORDS.say("between", low=low, high=high)
        step = WORDS["multiplied"]
        if frame[scene.decay].max() <= 1:
            step, factor = WORDS["survives"], WORDS["all"].get(factor, factor)
        followed, _ = scene.followed[direction]
        sizes = (f"{scene.word(name)} {number(_rms(frame[name]), 3)}" for name in (*scene.outputs(direction), followed))
        name, step = WORDS["directions"][direction].capitalize(), step.format(factor=factor, decays=say(scene.decays))
        where = WORDS.say("where", direction=name, t=t, last=T - 1, step=step)
        finite = self._bad(run, scene, direction)
        if profile == GROWING and decay < 0:
            limit = math.log(torch.finfo(getattr(torch, dtype)).max)
            memory = WORDS["memory"][len(OPERATORS[op].states)]
            values = {"decay": f"{-decay:g}", "limit": f"{limit:.1f}", "steps": f"{limit / -decay:.0f}"}
            finite += " " + WORDS.say("grows", memory=memory, dtype=dtype, **values)
        return "\n".join((where, WORDS.say("sizes", sizes=", ".join(sizes)), finite))

    def _bad(self, run, scene: Scene, direction: str) -> str:
        """Return a sentence on which arrays are not finite, and, for the pass on view, at which steps."""
        bad = {}
        for which in run:
            for name in (*scene.outputs(which), scene.followed[which][0]):
                steps = [n for n, frame in enumerate(run[which]) if not np.isfinite(frame[name]).all()]
                if steps:
                    words = WORDS["bad array"] if which == direction else "{name}"
                    bad.setdefault(which, []).append(words.format(name=scene.word(name), steps=_ranges(steps)))
        if not bad:
            return WORDS["fine"]
        here = bad.pop(direction, None)
        parts = [WORDS.say("bad here", bad="; ".join(here))] if here else []
        for which, names in bad.items():
            other = WORDS["directions"][which].capitalize()
            parts.append(WORDS.say("bad there", direction=other, bad=", ".join(names)))
        return " ".join(parts)

    # Cells that are pointed at.

    def arithmetic(self, run, cell: Cell, *, op, direction, t, **setting) -> str:
        scene, stepper = SCENES[op], self._stepper(op, direction)
        name, place = stepper.entry(cell)
        t = cell.column if cell.map == DECAYS else t
        frame = run[direction][t]
        value = float(frame[name][place])
        values = {"name": scene.symbol(name, t), "place": ", ".join(map(str, place)), "value": value}
        if name == scene.decay:
            return WORDS.say("decay", exponent=frame[OPERATORS[op].decay][place], **values)
        formula = scene.arithmetic(frame, name, place, t)
        if formula is None:
            return WORDS.say("given", **values)
        true = ""
        if not math.isfinite(value):
            exact = self._run(
                op, *(setting[x] for x in ("profile", "decay", "T", "K", "V", "M", "scale")), "float64", setting["seed"]
            )
            exact = float(exact[direction][t][name][place])
            true = WORDS.say("true", true=exact) if math.isfinite(exact) else ""
        return WORDS.say("arithmetic", formula=formula[0], numbers=formula[1], true=true, **values)

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        at = self.setting
        return self._stepper(at["op"], at["direction"]).beside(cell, at["t"])

    def script(self, op, profile, decay, T, K, V, M, scale, dtype, direction, t, seed, **_) -> str:
        scene, which, reference = SCENES[op], OPERATORS[op].decay, OPERATORS[op].reference
        fields = (reference.ForwardStep if direction == "forward" else reference.BackwardStep)._fields
        names = [name for name in (*scene.outputs(direction), scene.followed[direction][0]) if name in fields]
        grow = f"x[{which!r}] = -x[{which!r}]  # {WORDS['comment']}\n"
        grow = grow if profile == GROWING else ""
        sizes = ", ".join(f"{name}={size}" for name, size in _sizes(op, T, K, V, M).items())
        step = t if direction == "forward" else 2 * T - 1 - t
        return f"""import torch
from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from {reference.__package__} import reference

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


def _run(op, profile, decay, T, K, V, M, scale, dtype, seed) -> dict[str, list[Frame]]:
    """Return both passes' frames, arrays by name. Inputs of any dtype are the same float64 numbers, rounded."""
    of = OPERATORS[op]
    x = inputs(op, **_sizes(op, T, K, V, M), decay=chosen(profile, decay), dtype=getattr(torch, dtype), seed=seed)
    if profile == GROWING:
        x[of.decay] = -x[of.decay]
    do, _ = cotangents(op, x)
    scale = K**-0.5 if scale == ROOT else scale
    still = {name: x[name] for name in of.tensors if name not in of.sequences}
    return frames(SCENES[op], of.reference.steps(**x, scale=scale, do=do), scale=scale, **still)


def _sizes(op: str, T: int, K: int, V: int, M: int) -> dict[str, int]:
    """Return the sizes of an operator's inputs by name; M, the number of slots, only if it has slots."""
    return {"T": T, "H": 1, "K": K, "V": V} | ({"M": M} if "M" in OPERATORS[op].sizes else {})


def _rms(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _ranges(steps: list[int]) -> str:
    """Format steps as ranges: [3, 4, 5, 9] becomes "3 … 5, 9"."""
    runs = [[t for _, t in run] for _, run in itertools.groupby(enumerate(steps), lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} … {run[-1]}" for run in runs)


def state_stepper(op: str = "rwkv6", show=None, *, language: str | None = None, **settings) -> StateStepper:
    """Return a panel that walks through an operator's recurrence step by step, forward and backward.

    op: an operator of `flakit.figures.scenes.SCENES`. show: names of the knobs on view, default t and decay; the others
        are folded under "more". settings: starting values of the knobs; an unknown name raises TypeError, a bad value
        ValueError: profile ("constant", "growing" or one of `flakit.numerics.inputs.DECAYS`), decay (natural-log, of
        "constant"), T, K, V, M (GSA's slots), scale, dtype, colours ("value" or "size"), direction ("forward" or
        "backward"), t (the token), seed.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> state_stepper(profile="constant", decay=-0.1, T=32, t=5)
    """
    with speaking(language):
        return StateStepper(op, show, **settings)
