"""Four maps of one chunk: exponents, what exp makes of them, what the mask leaves, and the gradient that comes back."""

import numpy as np
from torch import Tensor

from ...figures import style
from ...figures.canvas import Canvas, Cell
from ...figures.heatmap import HeatMap
from ...figures.marks import NonFiniteRings, whole_ticks
from ...language import Words
from ...numerics.words import number
from ..laws import LN_MAX
from . import Shown

WORDS = Words() | {
    "knobs": {"w": "decay w", "chunk": "chunk C", "mask": "mask", "exclusive": "read before decay"},
    "alt": "Four maps of the pairs of one chunk, a row for each output and a column for each key: exponents, their "
    "exponentials, the weights after the mask, and the gradient of the exponents",
    "exponents": {False: "1 exponents\n$gi_i - gi_j$", True: "1 exponents\n$ge_i - gi_j$"},
    "made": "2 after exp:\n$e^{exponent}$",
    "kept": "3 after the mask:\nthe weights",
    "gradient": "4 gradient of\nthe exponents",
    "colours": "1: orange negative, purple positive\n2, 3, 4: dark tiny, yellow huge, light grey 0",
    "output i": "output i",
    "key j": "key j",
    "fine": "All is finite: the largest exponent of a pair from the future is {largest}, and exp ends at {end}.",
    "infinite": {
        1: "One pair from the future has an exponent above {end}: exp makes it infinite.",
        2: "{count} pairs from the future have exponents above {end}: exp makes them infinite.",
    },
    "hidden": "The mask replaces what is infinite, so every weight is right. On the way back the gradient of exp is "
    "exp itself: the mask's 0 times inf is NaN, and dw is lost.",
    "seen": "The mask multiplies by 0, and 0 times inf is NaN: the output is lost, and every gradient.",
    "unmasked": "Nothing keeps that out of the sums: the output is lost, and every gradient.",
    "future": "No mask: all is finite here, but every output sees the future.",
    "before": "The mask comes first: a pair from the future has the exponent -inf, its weight is e^-inf = 0, and its "
    "gradient is 0 times 0.",
    "arithmetic": "output {i}, key {j}: e^{exponent} = {made}{masked}; back: {arriving} · {made} = {gradient}{true}",
    "first": "-inf (instead of {exponent})",
    "masked": ", masked {kept}",
    "true": " (true: 0)",
}
ON_VIEW = ("w", "mask")
LINE = "dw ends at |w|"
PRESETS = {
    "fine": {"w": -2.8, "mask": "where", "chunk": 32, "exclusive": False},
    "first NaN": {"w": -2.87, "mask": "where", "chunk": 32, "exclusive": False},
    "repaired": {"w": -2.87, "mask": "before", "chunk": 32, "exclusive": False},
}

_MAPS = ("exponents", "made", "kept", "gradient")


class Picture:
    """Persistent: `update` redraws in place. width: inches."""

    def __init__(self, width: float):
        left, gap, top, bottom = 0.55, 0.12, 0.47, 0.88
        side = (width - left - 0.1 - 3 * gap) / 4
        self.canvas = Canvas(width, top + side + bottom)
        self._maps, self._rings, self._exclusive, self._title = {}, {}, False, None
        with style.context():
            for n, name in enumerate(_MAPS):
                ax = whole_ticks(self.canvas.axes(left + n * (side + gap), top, side, side))
                title = ax.set_title(WORDS[name][False] if name == "exponents" else WORDS[name], fontsize=9)
                self._title = title if name == "exponents" else self._title
                ax.set_xlabel(WORDS["key j"])
                if n == 0:
                    ax.set_ylabel(WORDS["output i"])
                else:
                    ax.tick_params(labelleft=False)
                signed = name == "exponents"
                self._maps[name] = HeatMap(
                    self.canvas, ax, cmap=style.SIGNED if signed else style.MAGNITUDE, vmin=-1.0, vmax=1.0, name=name
                )
                self._rings[name] = NonFiniteRings(self.canvas, ax)
            figure = self.canvas.figure
            figure.text(left / width, 0.01, WORDS["colours"], fontsize=8.5, va="bottom")
            hatched = style.non_finite_handles()
            figure.legend(handles=hatched, loc="lower right", ncols=2, borderpad=0, bbox_to_anchor=(1, 0.01))

    def update(self, shown: Shown) -> None:
        end = LN_MAX[shown.made.dtype]
        if self._exclusive != shown.exclusive:
            self._exclusive = shown.exclusive
            self._title.set_text(WORDS["exponents"][shown.exclusive])
            self.canvas.stale()
        for name, heat in self._maps.items():
            x = getattr(shown, name)
            # Exponents from -end to end; sizes by their logarithm, from e^-20 to e^20.
            values = x.numpy() / end if name == "exponents" else _logarithm(x) / 20
            heat.update(values, empty=x.numpy() == 0 if name != "exponents" else None)
            self._rings[name].update(x)

    def say(self, shown: Shown) -> str:
        end = LN_MAX[shown.made.dtype]
        count, future = int(shown.made.isinf().sum()), shown.exponents.triu(1)
        infinite = WORDS["infinite"][min(max(count, 1), 2)].format(count=count, end=f"{end:.2f}")
        if count and not shown.finite["o"]:
            return f"{infinite} {WORDS['seen' if shown.kept.isnan().any() else 'unmasked']}"
        if count:
            return f"{infinite} {WORDS['hidden']}"
        if shown.kept.triu(1).any():
            return WORDS["future"]
        if future.max() > end:
            return WORDS["before"]
        return WORDS["fine"].format(largest=number(float(future.max())), end=f"{end:.2f}")

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        i, j = cell.row, cell.column
        made, kept = float(shown.made[i, j]), float(shown.kept[i, j])
        arriving, gradient = float(shown.arriving[i, j]), float(shown.gradient[i, j])
        exponent = number(float(shown.exponents[i, j]))
        if made == 0 and shown.exponents[i, j] > -1:
            exponent = WORDS["first"].format(exponent=exponent)
        return WORDS["arithmetic"].format(
            i=i,
            j=j,
            exponent=exponent,
            made=number(made),
            masked="" if made == kept else WORDS["masked"].format(kept=number(kept)),
            arriving=number(arriving),
            gradient=number(gradient),
            true=WORDS["true"] if j > i and gradient != 0 else "",
        )


def _logarithm(x: Tensor) -> np.ndarray:
    """Natural logarithm of the size; what is not finite stays so, and keeps its kind."""
    sizes = x.abs().numpy()
    with np.errstate(divide="ignore"):
        return np.where(np.isfinite(sizes), np.log(sizes), sizes)
