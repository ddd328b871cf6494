"""What several panels share: knobs that only some operators have, decays, anchor schemes, and text of scripts."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import ipywidgets as widgets

from ..cases import anchor, masking
from ..cases.laws import LN_MAX
from ..language import label, say
from ..numerics.inputs import DECAYS
from ..numerics.operators import OPERATORS
from . import knobs
from .base import Panel

# --- knobs that only some operators have, and options and defaults of their own ---------------------------------------


def only_for(panel: Panel, op: widgets.Widget, knob: widgets.Widget, operators: Collection[str]) -> None:
    """Show a knob only while the knob `op` selects one of these operators."""

    def show(_, name: str) -> None:
        knob.layout.display = "" if name in operators else "none"

    panel.when(op, show)
    show(None, op.value)


def own_default(panel: Panel, op: widgets.Widget, knob: widgets.Widget, defaults: Mapping[str, object]) -> None:
    """When the operator changes and a knob has the old operator's default, move it to the new one's; else leave it."""

    def follow(before: str, name: str) -> None:
        if knob.value == defaults[before]:
            knob.value = defaults[name]

    panel.when(op, follow)


def own_options(
    panel: Panel,
    op: widgets.Widget,
    knob: widgets.Widget,
    options: Callable[[str], Iterable[str]],
    otherwise: Mapping[str, str],
) -> None:
    """Offer in a knob the chosen operator's own options, options(op). If these lack its value, set otherwise[op]."""

    def offer(_, name: str) -> None:
        value, offered = knob.value, tuple(options(name))
        knob.options = knobs.labelled({each: each for each in offered})
        knob.value = value if value in offered else otherwise[name]

    panel.when(op, offer)


# --- decays: a profile, or one natural-log decay for every token ------------------------------------------------------

CONSTANT = "constant"


def decay_knobs(
    panel: Panel,
    profile: str,
    decay: float,
    others: Mapping[str, str] | None = None,
    *,
    stops: Iterable[float] | None = None,
    low: float = -math.inf,
) -> dict[str, widgets.Widget]:
    """Return knobs "profile" and "decay" by name. The slider, from 0 to `low`, is every token's natural-log decay if
    the profile is "constant" or one of `others` (value by label). Moving it under another profile selects "constant".
    """
    options = {CONSTANT: CONSTANT, **{name: name for name in DECAYS}, **(others or {})}
    profiles, slider = knobs.choice(profile, options, "decays"), knobs.DecayKnob(decay, stops=stops, low=low)

    def select_constant(_) -> None:
        if not panel._held and profiles.value in DECAYS:
            with panel.held():  # the slider itself redraws
                profiles.value = CONSTANT

    slider.observe(select_constant, "value")
    return {"profile": profiles, "decay": slider}


def chosen(profile: str, decay: float) -> str | float:
    """Return the `decay` argument of `flakit.inputs`: the profile's name, or `decay` if that is no profile."""
    return profile if profile in DECAYS else decay


# --- computing in chunks: the cases that panels drive, and the knobs those take ---------------------------------------

RIGHT = "right"
AXES = {
    **{"T": "token", "K": "channel of k", "V": "column of v", "M": "slot"},
    **{"B": "sequence", "N": "sequence", "H": "head", "HQ": "head", "HV": "head"},
}
"""By the letter of an axis, what its index counts."""
_MASKS = {"the right one of the scheme": RIGHT} | {label: name for name, label in masking.MASKS.items()}


def scheme_knobs() -> dict[str, widgets.Widget]:
    """Return the knobs "scheme", "mask" and "dtype" by name; "mask" offers only the modes that apply to the scheme."""
    schemes = knobs.choice("none", {each.label: each.name for each in anchor.SCHEMES.values()}, "anchor")
    mask = knobs.choice(RIGHT, _MASKS, "mask")
    dtype = knobs.choice("float32", [str(dtype).removeprefix("torch.") for dtype in LN_MAX], "dtype")

    def offer(scheme: str) -> None:
        allowed = RIGHT, *anchor.SCHEMES[scheme].masks
        options = tuple((label(text), name) for text, name in _MASKS.items() if name in allowed)
        if tuple(mask.options) != options:
            value = mask.value
            mask.options = options
            mask.value = value if value in allowed else RIGHT

    schemes.observe(lambda change: offer(change.new), "value")
    offer("none")
    return {"scheme": schemes, "mask": mask, "dtype": dtype}


def tensors(op: str) -> dict[str, str]:
    """Return o and every gradient that an anchor scheme computes, with the label of each one's last axis, by name."""
    of = OPERATORS[op]
    names = [name for name in anchor.TENSORS[op] if name not in of.outputs or name == "o"]
    return {name: say(AXES[of.axes[name if name == "o" else name[1:]].split()[-1]]) for name in names}


def mode(mask: str) -> str | None:
    """Convert the knob "mask" to the `mask` argument of `cases.anchor`: None for the scheme's correct mask."""
    return None if mask == RIGHT else mask


def in_words(scheme: str, mask: str, dtype: str) -> str:
    """Return the knobs scheme, mask and dtype as a phrase for a picture's subtitle."""
    masked = "" if mask == RIGHT else say(" · mask: {mask}").format(mask=say(masking.MASKS[mask]))
    return say("anchor: {anchor}").format(anchor=say(anchor.SCHEMES[scheme].label)) + f"{masked} · {dtype}"


# --- sizes of the decay around a law ---------------------------------------------------------------------------------

SAME = 1e-3
"""Onsets that differ by less than this share count as one."""


def around(onsets: Iterable[Collection[float]], *sides: tuple[float, float], same: float = SAME) -> set[float]:
    """Return values of |log decay| with few digits below and above every onset, and between any two that differ.

    onsets: the values of each, predicted and measured; those within a share `same` of each other count as one.
    sides: the least and the largest distance from an onset, as factors, of each value below it and above it."""
    groups = []
    for low, high in sorted((min(values), max(values)) for values in onsets):
        if groups and low <= max(groups[-1][0] * (1 + same), groups[-1][1]):
            groups[-1][1] = max(groups[-1][1], high)
        else:
            groups.append([low, high])
    sizes = set()
    for (_, below), (above, _) in zip([(0.0, 0.0), *groups], [*groups, (math.inf, math.inf)], strict=True):
        if above < 1.02 * below:
            sizes.add(_short(below, above))
            continue
        for near, far in sides:
            sizes |= {_short(below * near, below * far)} if below else set()
            sizes |= {_short(above / far, above / near)} if above < math.inf else set()
    return sizes


def _short(low: float, high: float) -> float:
    """Return the middle of low and high, rounded to the fewest digits that keep it between them."""
    middle = (low + high) / 2
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 17))
    return next(x for x in rounded if low < x < high)


# --- scripts ----------------------------------------------------------------------------------------------------------


def literal(value: str | float) -> str:
    """Return a decay as Python source: a profile's name or a number, with infinities as float("…")."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
