"""The eigenvalue of RWKV7's transition diag(e^w) + b a^T: where the state decays, is reflected or grows."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Patch, Rectangle

from . import style
from .plots import Picture

GROWS = {"facecolor": "none", "hatch": "\\\\\\\\", "edgecolor": style.BLACK, "linewidth": 0.0}
STRONGEST = -0.6065306597
"""The strongest natural-log decay of the published RWKV7, -e^-0.5; the weakest is 0."""


def along_kappa(w: Sequence, ab: Sequence, eigenvalues: Sequence, *, height: float = 3.3) -> Picture:
    """Draw the eigenvalue along kappa, [len(ab), len(w)], for a decay shared by all channels.

    w: natural-log decays, <= 0; ab: a . b, from 0 (no edit) to -2. Hatched where the state grows, since the magnitude
    is above 1; the frame marks the range of the published model, a . b from -1 to 0. Raises ValueError for another
    shape."""
    w, ab, z = (np.asarray(x, dtype=np.float64) for x in (w, ab, eigenvalues))
    if z.shape != (len(ab), len(w)):
        raise ValueError(f"eigenvalues: expected [{len(ab)}, {len(w)}] like ab and w, got {list(z.shape)}")
    picture = Picture(height, "Map of the eigenvalue along kappa over the log decay w and a . b; hatched below -1")
    with style.context():
        ax = picture.figure.add_axes((0.085, 0.145, 0.5, 0.82))
        ax.spines[:].set_visible(True)
        shown = ax.pcolormesh(w, ab, z, cmap=style.SIGNED, vmin=-1.5, vmax=1.5, shading="gouraud", rasterized=True)
        lines = ax.contour(w, ab, z, levels=[-1, -0.5, 0, 0.5], colors=style.BLACK, linewidths=[1.8, 0.7, 1.2, 0.7])
        ax.clabel(lines, fmt=lambda x: f"{x:g}", fontsize=8.5, inline_spacing=3)
        grows = ax.contourf(w, ab, z, levels=[-10, -1], colors="none", hatches=[GROWS["hatch"]])
        grows.set(edgecolor=GROWS["edgecolor"], linewidth=0)
        frame = Rectangle((STRONGEST, -1), -STRONGEST, 1, fill=False, edgecolor=style.BLUE, linewidth=2.2)
        frame.set_clip_on(False)
        ax.add_patch(frame)
        ax.set(xlabel="log decay w, the same in every channel", ylabel="a · b = −α", xlim=(w.min(), w.max()))
        ax.set_ylim(ab.min(), ab.max())
        bar = picture.figure.colorbar(shown, cax=picture.figure.add_axes((0.61, 0.145, 0.016, 0.82)))
        bar.set_label("eigenvalue along κ: $e^w$ + a · b")
        published = "published RWKV7:\nw > −0.607, a · b > −1"
        picture.figure.legend(
            handles=[
                Patch(fill=False, edgecolor=style.BLUE, linewidth=2.2, label=published),
                Patch(label="below −1: the state grows", **GROWS),
            ],
            loc="upper left", bbox_to_anchor=(0.71, 0.98), handlelength=2.4, labelspacing=1.0,
        )  # fmt: skip
    return picture
