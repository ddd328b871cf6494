"""Shared by several panels: knobs of some operators only, decays, anchor schemes, and text of scripts."""

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
    """Show a knob for these operators only."""

    def show(_, name: str) -> None:
        knob.layout.display = "" if name in operators else "none"

    panel.when(op, show)
    show(None, op.value)


def own_default(panel: Panel, op: widgets.Widget, knob: widgets.Widget, defaults: Mapping[str, object]) -> None:
    """Move a knob from the default of the previous operator to that of the chosen one; leave other values."""

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
    """Offer each operator's own options; if they lack the chosen one, choose that of `otherwise`."""

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
    """Return knobs "profile" and "decay". The slider, from 0 to `low`, is the decay of "constant" and of `others`
    (label: value). Moved while a profile of `flakit.inputs` is chosen, it selects "constant".
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
    """Return the `decay` argument of `flakit.inputs`: the profile's name, or the constant `decay` if it names none."""
    return profile if profile in DECAYS else decay


# --- computing in chunks: the cases that panels drive, and the knobs those take ---------------------------------------

RIGHT = "right"
AXES = {
    **{"T": "token", "K": "channel of k", "V": "column of v", "M": "slot"},
    **{"B": "sequence", "N": "sequence", "H": "head", "HQ": "head", "HV": "head"},
}
"""What an index along an axis counts."""
_MASKS = {"the right one of the scheme": RIGHT} | {label: name for name, label in masking.MASKS.items()}


def scheme_knobs() -> dict[str, widgets.Widget]:
    """Return knobs "scheme", "mask" and "dtype"; "mask" offers the modes that apply to the scheme."""
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
    """Return o and every gradient that an anchor scheme computes for an operator, with words for their columns."""
    of = OPERATORS[op]
    names = [name for name in anchor.TENSORS[op] if name not in of.outputs or name == "o"]
    return {name: say(AXES[of.axes[name if name == "o" else name[1:]].split()[-1]]) for name in names}


def mode(mask: str) -> str | None:
    """Return the mask argument of a case's functions."""
    return None if mask == RIGHT else mask


def in_words(scheme: str, mask: str, dtype: str) -> str:
    """Say the three knobs in a picture's subtitle."""
    masked = "" if mask == RIGHT else say(" · mask: {mask}").format(mask=say(masking.MASKS[mask]))
    return say("anchor: {anchor}").format(anchor=say(anchor.SCHEMES[scheme].label)) + f"{masked} · {dtype}"


# --- sizes of the decay around a law ---------------------------------------------------------------------------------

SAME = 1e-3
"""Onsets closer to each other than this share count as one."""


def around(onsets: Iterable[Collection[float]], *sides: tuple[float, float], same: float = SAME) -> set[float]:
    """Return sizes with few digits below and above every onset, and between any two that differ.

    onsets: of each the values by law and by measurement; those within a share `same` of each other count as one.
    sides: the least and the largest distance of a size from an onset, as factors.
    """
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
    """Return the middle of two numbers, rounded to the fewest digits that leave it between them."""
    middle = (low + high) / 2
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 17))
    return next(x for x in rounded if low < x < high)


# --- scripts ----------------------------------------------------------------------------------------------------------


def literal(value: str | float) -> str:
    """Return the Python text of a decay: a profile's name or a number, infinities included."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
