"""What the panels about computing in chunks share: the cases they drive, and the knobs those take."""

import ipywidgets as widgets

from ..cases import anchor, masking
from . import knobs

CASES = {"rwkv6": anchor}
"""The module of anchor schemes of each operator that has one."""

RIGHT = "right"
_MASKS = {"the right one of the scheme": RIGHT} | {label: name for name, label in masking.MASKS.items()}


def scheme_knobs(scheme: str = "none") -> dict[str, widgets.Widget]:
    """Knobs "scheme", "mask" and "dtype"; the mask modes offered are those that mean something with the scheme."""
    schemes = {each.label: each.name for each in anchor.SCHEMES.values()}
    made = {
        "scheme": knobs.choice(scheme, schemes, "anchor"),
        "mask": knobs.choice(RIGHT, _MASKS, "mask"),
        "dtype": knobs.choice("float32", [str(dtype).removeprefix("torch.") for dtype in anchor.LN_MAX], "dtype"),
    }

    def offer(scheme: str) -> None:
        mask, allowed = made["mask"], (RIGHT, *anchor.SCHEMES[scheme].masks)
        options = tuple((label, name) for label, name in _MASKS.items() if name in allowed)
        if mask.options != options:
            kept = mask.value
            mask.options = options
            mask.value = kept if kept in allowed else RIGHT

    made["scheme"].observe(lambda change: offer(change.new), "value")
    offer(scheme)
    return made


def mode(mask: str) -> str | None:
    """The mask argument of a case's functions."""
    return None if mask == RIGHT else mask


def in_words(scheme: str, mask: str, dtype: str) -> str:
    """The three knobs for a picture's subtitle."""
    masked = "" if mask == RIGHT else f" · mask: {masking.MASKS[mask]}"
    return f"anchor: {anchor.SCHEMES[scheme].label}{masked} · {dtype}"
