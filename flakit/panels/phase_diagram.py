"""The panel of a phase diagram: where chunks stay finite, over decay and length, chunk size or place of one decay."""

import functools
import math
import textwrap
from collections.abc import Iterable

import numpy as np
import torch

from ..cases import anchor
from ..figures.phase import Map, PhaseFigure, worst
from ..language import Words, speaking
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from ..numerics.sweep import Sweep, sweep
from ..numerics.words import error, number
from . import knobs
from .base import ButtonRun, Panel, Player
from .knobs import stops_of
from .shared import RIGHT, around, in_words, mode, own_options, scheme_knobs, tensors

H, K = 1, 16
ANY = "any"

WORDS = Words() | {
    "against": {"T": "length T", "chunk": "chunk", "at": "token of the only decay"},
    "up": {"T": "length T (tokens)", "chunk": "chunk (tokens)", "at": "token t that decays"},
    "at": {"T": "T = {row}", "chunk": "chunk = {row}", "at": "token {row}"},
    "measure": "measure finely",
    "alt": "Map of decay against length, chunk or token: hatched where a value is not finite, coloured by error "
    "against float64 elsewhere, with the border that the law predicts drawn over it",
    "title": "Where {what} of {op} in chunks is finite",
    "every": "every tensor",
    "fixed": {"T": "chunk {chunk}", "chunk": "T {T}", "at": "T {T} · chunk {chunk}"},
    "across": "|log decay| per token (natural log); a small tick for each that was measured",
    "across at": "|log decay| of that token, all others 0; a small tick for each that was measured",
    "count": {
        True: "All {known} settings of this map were tried, and {share:%} of them break.",
        False: "{known} of the {all} settings of this map were tried, and {share:%} of them break.",
    },
    "none": "The law foretells that nothing breaks anywhere, and so it is.",
    "all": "The law foretold every one, even where only {near} away from its line.",
    "some": {
        1: "The law foretold all but 1 of them, marked, which lies {far} from its line.",
        2: "The law foretold all but {wrong} of them, marked, which lie up to {far} from its line.",
    },
    "coarse": 'This is a coarse map of what is finite; "measure finely" adds the error where all is.',
    "error": "Largest error where all is finite: {error}, at {at}, |{which}| = {decay}.",
    "cell": "{at}, |{which}| = {decay}{knob}: measured {share}{error}; by the law finite up to {law}: {verdict}",
    "unknown": "{at}, |{which}| = {decay}{knob}: not measured yet; by the law finite up to {law}",
    "knob": " per token",
    "lost": "not finite ({share:%} of {name})",
    "worst": "one tensor",
    "whole": "finite",
    "off": ", error {error} against float64",
    "no end": "any decay",
    "anywhere": "any distance",
    "verdict": {True: "as foretold", False: "the law is wrong here"},
}

AGAINST = {label: name for name, label in WORDS.english["against"].items()}
"""The knobs that can be the vertical axis, by label. With "at" one token alone decays, otherwise all do."""

_ROWS = {
    "coarse": {
        "T": (16, 32, 48, 64, 128, 256),
        "chunk": (8, 16, 32, 64, 128),
        "at": (0, 8, 15, 16, 17, 32, 63, 64),
    },
    "fine": {
        "T": (4, 8, 12, 16, 17, 24, 32, 40, 48, 56, 63, 64, 65, 128, 129, 256),
        "chunk": (4, 8, 16, 32, 64, 128, 256),
        "at": (0, 1, 8, 14, 15, 16, 17, 18, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 96),
    },
}
_DECAYS = {"coarse": 11, "fine": 25}  # evenly spaced; further ones lie around the laws
_NEAR = 1.004, 1.012  # distances from a law, as factors
_SAME = 0.02  # laws closer than this, less than two pixels, share their columns
_KEPT = 16  # the number of fine maps in memory
_LOWEST, _HIGHEST = 0.05, 500.0  # |log decay|
_MILLISECONDS = 2000  # per scheme while playing


class PhaseDiagram(Panel):
    """The panel of `phase_diagram`: a coarse map at once, on request a fine one with errors where all is finite."""

    name = "phase-diagram"
    on_view = ("against", "tensor", "scheme")
    main = "scheme"
    presets = {
        label: {"tensor": ANY, "mask": RIGHT, "dtype": "float32", "chunk": 64, "T": 128, **setting}
        for label, setting in {
            "start anchor": {"scheme": "none", "against": "T"},
            "bug A": {"scheme": "first-row", "against": "at"},
            "bad repair": {"scheme": "previous-row-across", "against": "T"},
            "repaired": {"scheme": "previous-row", "against": "T"},
        }.items()
    }
    readout_lines = 2

    def __init__(self, op: str = "rwkv6", show: Iterable[str] | None = None, **settings):
        self._fine = {}
        first = next(iter(anchor.OPERATORS))
        controls = {
            "op": knobs.operator_choice(first, anchor.OPERATORS),
            "against": knobs.choice("T", AGAINST, "against"),
            "tensor": knobs.choice(ANY, {name: name for name in _offered(first)}, "tensor"),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), "chunk"),
            "T": knobs.choice(128, (16, 32, 48, 64, 100, 128, 192, 256), "length T"),
        }
        own_options(self, controls["op"], controls["tensor"], _offered, dict.fromkeys(anchor.OPERATORS, ANY))
        controls["against"].observe(lambda _: self._disable(), "value")
        self.run = ButtonRun(WORDS["measure"], self._measure_finely, done=self._keep, failed=self.fail)
        schemes = stops_of(controls["scheme"])
        player = Player(len(schemes) - 1, lambda place: self.set(scheme=schemes[place]), _MILLISECONDS)
        options = {"alt": WORDS["alt"], "show": show, "player": player, "runs": (self.run,)}
        super().__init__(controls, {"op": op, **settings}, **options)
        self._disable()

    def _disable(self) -> None:
        """Disable the knob of the size that serves as the vertical axis."""
        for name in ("T", "chunk"):
            self.knobs[name].disabled = self.knobs["against"].value == name

    def compute(self, op, tensor, **setting) -> Map:
        key = _key(op=op, **setting)
        swept, law = self._fine.get(key) or _coarse(key)
        names = tensors(op) if tensor == ANY else (tensor,)
        rows, decay = swept.axes.values()
        return Map(
            rows=rows,
            decay=np.array(decay),
            share=worst(swept, names, "finite"),
            error=worst(swept, names, "l2"),
            law=np.array([min(limits[name] for name in names) for limits in law]),
        )

    def draw(self, result, *, op, against, scheme, mask, dtype, tensor, T, chunk, **_):
        fixed = WORDS.say("fixed", against, T=T, chunk=chunk)
        self.figure(PhaseFigure).update(
            title=WORDS.say("title", what=WORDS["every"] if tensor == ANY else tensor, op=OPERATORS[op].label),
            subtitle=f"{fixed} · {in_words(scheme, mask, dtype)}",
            across=WORDS["across at" if against == "at" else "across"],
            up=WORDS["up"][against],
            measured=result,
        )

    def describe(self, result, *, op, against, **_) -> str:
        rows, columns = result.share.shape
        known, whole = result.known, result.known & ~result.broken
        count = WORDS.say(
            "count",
            bool(known.all()),
            known=known.sum(),
            all=rows * columns,
            share=result.broken[known].mean(),
        )
        lines = [f"{count} {_agreement(result)}"]
        if result.error is None:
            lines.append(WORDS["coarse"])
        elif whole.any():
            row, column = np.unravel_index(np.where(whole, result.error, -1).argmax(), whole.shape)
            lines.append(
                WORDS.say("error",
                    error=error(result.error[row, column]), at=WORDS.say("at", against, row=result.rows[row]),
                    which=OPERATORS[op].decay, decay=f"{result.decay[column]:.3g}",
                )
            )  # fmt: skip
        return "\n".join(lines)

    def arithmetic(self, result, cell, *, op, against, tensor, **_) -> str:
        row, column = len(result.rows) - 1 - cell.row, cell.column
        values = {
            "at": WORDS.say("at", against, row=result.rows[row]),
            "which": OPERATORS[op].decay,
            "decay": result.decay[column],
            "knob": "" if against == "at" else WORDS["knob"],
            "law": number(result.law[row], inf=WORDS["no end"]),
        }
        if not result.known[row, column]:
            return WORDS.say("unknown", **values)
        broken, off = result.broken[row, column], result.error is not None
        name = WORDS["worst"] if tensor == ANY else tensor
        return WORDS.say(
            "cell",
            share=WORDS.say("lost", share=1 - result.share[row, column], name=name) if broken else WORDS["whole"],
            error=WORDS.say("off", error=error(result.error[row, column])) if off and not broken else "",
            verdict=WORDS["verdict"][not result.wrong[row, column]],
            **values,
        )

    def script(self, *, op, against, scheme, mask, dtype, tensor, T, chunk, seed):
        key = _key(op=op, against=against, scheme=scheme, mask=mask, dtype=dtype, T=T, chunk=chunk, seed=seed)
        how = "fine" if key in self._fine else "coarse"
        rows, decays, _ = _grid(key, how)
        listed = textwrap.indent(textwrap.fill(", ".join(f"{x:.7g}" for x in decays), 100), "    ")
        number_format = f"torch.{dtype}"
        length, size = ("T" if against == "T" else T), ("chunk" if against == "chunk" else chunk)
        which, names = OPERATORS[op].decay, tuple(tensors(op)) if tensor == ANY else (tensor,)
        spiked = f"    x[{which!r}][:, at] = -decay\n" if against == "at" else ""
        return f"""import torch

import flakit
from flakit.cases import anchor
from flakit.numerics.evaluate import truth
from flakit.numerics.sweep import sweep

names = {names!r}


def setting(decay, {against}):
    x = flakit.inputs(
        {op!r}, decay={"0.0" if against == "at" else "-decay"}, T={length}, H={H}, K={K},
        dtype={number_format}, decay_dtype=torch.float32, seed={seed},
    )
{spiked}    return x, dict(op={op!r}, chunk={size}, mask={mode(mask)!r}, dtype={number_format})


def measure(decay, {against}):
    x, how = setting(decay, {against})
    computed, exact = anchor.run(x, {scheme!r}, **how).tensors, truth({op!r}, x, recurrence=False)
    return {{name: (computed[name], exact[name]) for name in names}}


{against}s = {rows}
decays = [  # evenly spaced ones, and on both sides of every law
{listed}
]
measured = sweep(measure, {{{against!r}: {against}s, "decay": decays}})
for {against}, onset in zip({against}s, measured.onset("decay")):
    x, how = setting(1.0, {against})
    limits = anchor.limits({scheme!r}, x, **how)
    law = min(limits[name] for name in names)
    print(f"{against} = {{{against}:3}}: law |{which}| <= {{law:.4g}}, first non-finite setting at {{onset:.4g}}")
"""

    def _measure_finely(self, progress, cancelled):
        setting = self.setting
        del setting["tensor"]
        key = _key(**setting)
        return key, _measure(key, "fine", progress, cancelled)

    def _keep(self, measurement) -> None:
        key, measured = measurement
        self._fine[key] = measured
        if len(self._fine) > _KEPT:
            del self._fine[next(iter(self._fine))]
        self.redraw()


def _offered(op: str) -> tuple[str, ...]:
    return ANY, *tensors(op)


def _key(*, op, against, scheme, mask, dtype, T, chunk, seed) -> tuple:
    """Return the settings that determine a map, the cache key, with None for the size that its rows vary."""
    return op, against, scheme, mask, dtype, None if against == "T" else T, None if against == "chunk" else chunk, seed


def _setting(key, decay: float, **row) -> tuple[dict, dict]:
    """Return inputs and other arguments of `anchor.run` for |log decay| `decay`; row: the other axis's value."""
    op, _, _, mask, dtype, T, chunk, seed = key
    number_format = getattr(torch, dtype)
    x = inputs(
        op, T=row.get("T", T), H=H, K=K, decay=0.0 if "at" in row else -decay, dtype=number_format,
        decay_dtype=torch.float32, seed=seed,
    )  # fmt: skip
    if "at" in row:
        x[OPERATORS[op].decay][:, row["at"]] = -decay
    return x, {"op": op, "chunk": row.get("chunk", chunk), "mask": mode(mask), "dtype": number_format}


@functools.lru_cache(maxsize=64)
def _grid(key, how) -> tuple[list[int], list[float], list[dict[str, float]]]:
    """Return the rows, the columns, and each row's predicted limits by tensor. Columns, in |log decay|, are dense
    around every limit. how: "coarse" or "fine"."""
    op, against, scheme, _, _, T, _, _ = key
    rows, laws = [row for row in _ROWS[how][against] if against != "at" or row < T], []
    for row in rows:
        x, knobs = _setting(key, 1.0, **{against: row})
        laws.append(anchor.limits(scheme, x, **knobs))
    limits = {row[name] for row in laws for name in tensors(op)}
    inside = [[x] for x in limits if _LOWEST * _NEAR[1] < x < _HIGHEST / _NEAR[1]]
    even = np.geomspace(_LOWEST, _HIGHEST, _DECAYS[how]).round(6)
    return rows, sorted({*even.tolist(), *around(inside, _NEAR, same=_SAME)}), laws


def _measure(key, how, progress=None, cancelled=None) -> tuple[Sweep, list[dict[str, float]]]:
    """Return the sweep over rows and decays, and each row's predicted limits by tensor. how: "coarse" measures
    whether all is finite, "fine" the error against float64 as well."""
    op, against, scheme, *_ = key
    names = tensors(op)
    rows, decays, law = _grid(key, how)

    def measure(decay, **row):
        x, knobs = _setting(key, decay, **row)
        computed = anchor.run(x, scheme, **knobs).tensors
        if how == "coarse":
            return {name: computed[name] for name in names}
        exact = truth(op, x, recurrence=False)
        return {name: (computed[name], exact[name]) for name in names}

    return sweep(measure, {against: rows, "decay": decays}, progress=progress, cancelled=cancelled), law


_coarse = functools.lru_cache(maxsize=256)(functools.partial(_measure, how="coarse"))


def _agreement(result: Map) -> str:
    """Return a sentence: is every measured cell as predicted, and how near to the predicted limit was one measured."""
    wrong, distance = result.wrong, result.distance
    if wrong.any():
        far = _away(distance[wrong].max())
        return WORDS.say("some", wrong=int(wrong.sum()), far=far)
    # The nearest cell on each side of every row's line that crosses the map.
    crossed = [row for row, law in enumerate(result.law) if result.decay[0] < law < result.decay[-1]]
    sides = [
        distance[row][result.known[row] & (result.predicted[row] == side)].min(initial=math.inf)
        for row in crossed
        for side in (True, False)
    ]
    if not crossed and not result.broken.any():
        return WORDS["none"]
    return WORDS.say("all", near=_away(max(sides, default=math.inf)))


def _away(factor: float) -> str:
    """Format a distance from the predicted limit, given as a factor >= 1, as a percentage, rounded up."""
    return WORDS["anywhere"] if factor == math.inf else f"{math.ceil(1000 * (factor - 1)) / 10:g}%"


def phase_diagram(
    op: str = "rwkv6", show: Iterable[str] | None = None, *, language: str | None = None, **settings
) -> PhaseDiagram:
    """Return a panel that maps where a chunked computation is finite over decay and another setting, with the border
    predicted from the exponents.

    A coarse map is immediate; the button "measure finely" takes some seconds and adds the error against float64.

    op: an operator of `flakit.cases.anchor.OPERATORS`. show: names of the knobs on view, default against,
        tensor and scheme; the others are folded under "more". settings: starting values of the knobs; an unknown name
        raises TypeError, a bad value ValueError:
        against: the vertical axis, "T", "chunk" or "at", the position of the only token that decays.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right", the correct one.
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.
        tensor: "any", "o" or the gradient of one of the operator's inputs, such as "dw".
        T, chunk: length and tokens per chunk, where they are not an axis.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> phase_diagram(scheme="first-row", against="at")
    """
    with speaking(language):
        return PhaseDiagram(op, show, **settings)
