"""The picture of `chunk_vs_recurrent`: each element of six tensors, chunk form against recurrent form, log-log."""

import numpy as np
from torch import Tensor

from ...figures import Canvas, Cell, Drawing, HeatMap, style
from ...language import Words, percent
from . import Shown

WORDS = Words() | {
    "knobs": {
        "scale": "other scale",
        "aliasing": "shared w",
        "precision": "rounded sums",
        "T": "tokens T",
        "K": "key K",
        "V": "value V",
    },
    "alt": "Six maps, one for each tensor: where its elements lie, the size by the recurrent form across and by the "
    "chunk form upwards, both on scales of powers of ten, with the line where both are the same",
    "title": "{name}: × {factor:.3g}\n{unexplained} unexplained",
    "recurrent": "recurrent / RMS",
    "chunk": "chunk / RMS",
    "same": "both the same",
    "equal": "Every element lies on the line where both are the same: the two forms agree to rounding.",
    "scale": "The elements lie on one line, {factor:.3g} times above the one where both are the same. A factor "
    "explains them: the chunk form was given another scale.",
    "scale "
    "too": "The chunk form was given another scale: what lies on a line lies {factor:.3g} times above the one where "
    "both are the same.",
    "cloud": "{names} are clouds: no factor makes one form of the other, {unexplained} of o is left. The first call "
    "wrote over the w that the second one read. du has no w in it.",
    "fan": "dw leaves its line where its elements are small, {unexplained} in all: an error of one size for large and "
    "small, from sums of rounded dr and dk.",
    "cell": "{name}: {count} of {all} elements lie here, one of them is {index}: chunk {chunk}, recurrent {recurrent}, "
    "{factor:.3g} times (law: {law:.3g})",
    "empty": "{name}: no element lies here",
}
ON_VIEW = ("scale", "aliasing", "precision")
LINE = "factor"
_OFF = {"scale": False, "aliasing": False, "precision": False}
PRESETS = {
    "no cause": _OFF,
    "scale": _OFF | {"scale": True},
    "aliasing": _OFF | {"aliasing": True},
    "precision": _OFF | {"precision": True},
}

_NAMES = ("o", "dr", "dk", "dv", "dw", "du")
_AXES = {"o": "thv", "dr": "thk", "dk": "thk", "dv": "thv", "dw": "thk", "du": "hk"}
_LOW, _HIGH, _BINS = -3.5, 2.5, 48  # powers of ten of the recurrent form's RMS
_DECADE = _BINS / (_HIGH - _LOW)


class Picture(Drawing):
    def __init__(self, width: float):
        columns = 6 if width > 8 else 3
        left, gap, title, bottom = 0.74, 0.12, 0.45, 0.72
        across = (width - left - 0.12 - gap * (columns - 1)) / columns
        down = across if columns == 6 else 1.12
        rows = len(_NAMES) // columns
        self.canvas = Canvas(width, rows * (title + down) + bottom)
        self._maps, self._titles = {}, {}
        for n, name in enumerate(_NAMES):
            row, column = divmod(n, columns)
            ax = self.canvas.axes(left + column * (across + gap), title + row * (title + down), across, down)
            self._titles[name] = ax.text(0, 1.03, "", transform=ax.transAxes, fontsize=9, linespacing=1.05)
            places = [(power - _LOW) * _DECADE - 0.5 for power in (-3, -1, 1)]
            ax.set_xticks(places, map(style.power, (-3, -1, 1)))
            # Row 0 is on top.
            ax.set_yticks([_BINS - 1 - place for place in places], map(style.power, (-3, -1, 1)))
            ax.tick_params(labelleft=column == 0, labelbottom=row == rows - 1)
            if column == 0:
                ax.set_ylabel(WORDS["chunk"])
            if row == rows - 1:
                ax.set_xlabel(WORDS["recurrent"])
            self._maps[name] = HeatMap(self.canvas, ax, vmin=-0.5, vmax=3.0, name=name)
            ends = [-0.5, _BINS - 0.5]
            (same,) = ax.plot(ends, ends[::-1], color=style.BLACK, lw=0.8, ls=(0, (3, 3)), label=WORDS["same"])
            self.canvas.moving(same)
        self.canvas.legend(same, loc="lower left", at=(left, rows * (title + down) + bottom), borderaxespad=0.1)
        self.canvas.labels(*self._titles.values())

    def update(self, shown: Shown) -> None:
        for name in _NAMES:
            counts = np.zeros((_BINS, _BINS))
            np.add.at(counts, _places(shown, name), 1)
            self._maps[name].update(np.log10(np.maximum(counts, 1)), empty=counts == 0)
            fit = shown.fits[name]
            title = WORDS.say("title", name=name, factor=fit.factor, unexplained=_left(fit.unexplained))
            self._titles[name].set_text(title)

    def say(self, shown: Shown) -> str:
        off = [name for name in _NAMES if shown.fits[name].unexplained >= shown.rest]
        left = {name: _left(shown.fits[name].unexplained) for name in off}
        sentences = []
        if abs(shown.fits["du"].factor - 1) > shown.rest:
            sentences.append(WORDS.say("scale too" if off else "scale", factor=shown.fits["du"].factor))
        if off == ["dw"]:
            sentences.append(WORDS.say("fan", unexplained=left["dw"]))
        elif off:
            sentences.append(WORDS.say("cloud", names=", ".join(off), unexplained=left["o"]))
        return " ".join(sentences) or WORDS["equal"]

    def arithmetic(self, shown: Shown, cell: Cell) -> str:
        name = cell.map
        rows, columns = _places(shown, name)
        here = np.flatnonzero((rows == cell.row) & (columns == cell.column))
        if not len(here):
            return WORDS.say("empty", name=name)
        x, y = (tensors[name].flatten()[here[0]].item() for tensors in (shown.recurrent, shown.chunk))
        shape = shown.chunk[name].shape
        index = [int(i) for i in np.unravel_index(here[0], shape)][-len(_AXES[name]) :]
        return WORDS.say(
            "cell", name=name, count=len(here), all=len(rows),
            index=" ".join(f"{axis} {i}" for axis, i in zip(_AXES[name], index, strict=True)), chunk=y, recurrent=x,
            factor=y / x if x else np.inf, law=shown.law,
        )  # fmt: skip


def _places(shown: Shown, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the map cell (row, column) of each element: |chunk| and |recurrent|, relative to the latter's RMS."""
    size = shown.recurrent[name].double().square().mean().sqrt().item()
    return _BINS - 1 - _bin(shown.chunk[name] / size), _bin(shown.recurrent[name] / size)


def _bin(x: Tensor) -> np.ndarray:
    """Return the bin of each |x| on the logarithmic axis, 0 … `_BINS` - 1; values beyond an end fall into its bin."""
    power = x.double().flatten().abs().log10().numpy()
    return (np.clip((power - _LOW) * _DECADE, 0, _BINS - 1)).astype(int)


def _left(unexplained: float) -> str:
    return percent(unexplained) if unexplained >= 0.01 else f"{unexplained:.1%}"
