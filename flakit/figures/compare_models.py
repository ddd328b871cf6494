"""Two models compared: the relative difference of each layer at each token, and where it exceeds a tolerance."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ..language import Words
from . import style
from .maps import Map, Maps, powers
from .plots import Picture

WORDS = Words() | {
    "title": "relative difference of the two models, layer by layer in the order of execution",
    "alt": "How far two models differ, a row for each layer and a column for each token; orange where they part",
    "token t": "token t",
    "parts": "beyond {tolerance}: they part",
    "nothing": "plain grey: no difference",
}
_MOST = 40
"""The largest number of layers that are drawn."""


def draw(errors: Mapping[str, Tensor], tolerance: float) -> Picture:
    """Draw the difference of each layer over the tokens; of more than 40 layers those around the first beyond
    tolerance.

    errors: relative differences [T] by layer, inf where only one of the models is finite."""
    names = list(errors)
    if len(names) > _MOST:
        first = next((n for n, x in enumerate(errors.values()) if (x > tolerance).any()), 0)
        begin = min(max(0, first - _MOST // 2), len(names) - _MOST)
        names = [*names[begin : begin + _MOST - 1], names[-1]]
    values = np.stack([errors[name].numpy() for name in names])
    row, top, bottom, left = 0.19, 0.34, 0.82, 0.3 + 0.068 * max(map(len, names))
    picture = Picture(top + max(3, len(names)) * row + bottom, WORDS["alt"])
    width, height = picture.figure.get_size_inches()
    with style.context():
        maps = Maps(
            picture, {"errors": Map(WORDS["title"], powers(-8, 0), lost=("parted", ""))},
            left=left, top=top, size=(width - left - 0.8, max(3, len(names)) * row), columns=WORDS["token t"],
        )  # fmt: skip
        maps.bar("errors")
        ax = maps["errors"].ax
        maps.update({"errors": values, "parted": np.isfinite(values) & (values > tolerance)})
        ax.set_yticks(range(len(names)), names, fontsize=8)
        words = WORDS.say("parts", tolerance=f"{tolerance:.1e}")
        handles = style.swatch(style.BROKEN, words), *style.non_finite_handles()
        picture.legend(*handles, borderpad=0, borderaxespad=0.5, bbox_to_anchor=(1 - 0.1 / width, 0.01))
        picture.figure.text(0.1 / width, 0.02, WORDS["nothing"], fontsize=8.5, va="bottom")
    picture.stale()
    return picture
