"""What the panels about computing in chunks share: the cases they drive, and the knobs those take."""

import ipywidgets as widgets

from ..cases import anchor, masking
from ..numerics.operators import OPERATORS
from . import knobs

QUERIES = {"rwkv6": ("r",), "rwkv7": ("r", "a"), "gsa": ("p",)}
"""What reads with decay between it and the key, the symbol of the paper; RWKV7 has two such reads."""

RIGHT = "right"
_COLUMNS = {"K": "channel of k", "V": "column of v", "M": "slot"}
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


def tensors(op: str) -> dict[str, str]:
    """The output and every gradient an anchor scheme makes of an operator, with words for their columns."""
    of = OPERATORS[op]
    names = [name for name in anchor.TENSORS[op] if name not in of.outputs or name == "o"]
    return {name: _COLUMNS[of.axes[name if name == "o" else name[1:]].split()[-1]] for name in names}


def mode(mask: str) -> str | None:
    """The mask argument of a case's functions."""
    return None if mask == RIGHT else mask


def in_words(scheme: str, mask: str, dtype: str) -> str:
    """The three knobs for a picture's subtitle."""
    masked = "" if mask == RIGHT else f" · mask: {masking.MASKS[mask]}"
    return f"anchor: {anchor.SCHEMES[scheme].label}{masked} · {dtype}"
