"""The panel that shows how far each kernel of the casebook is from overflow at the decays of a reader's own model."""

import functools
import math
from pathlib import Path

import torch

from ..cases import headroom as case
from ..cases.decay_files import read
from ..cases.laws import LN_MAX
from ..figures.canvas import Cell
from ..figures.headroom import HeadroomFigure
from ..language import Words, say, speaking
from ..numerics.operators import operator
from ..numerics.words import number
from . import knobs
from .base import WIDE, Panel

ALL = "all layers"

WORDS = Words() | {
    "alt": "A histogram of the decays of all tokens; under it a lane for each kernel with the largest exponent that it "
    "makes of them, the limit above which it is NaN, and how far the one is from the other",
    "title": "Decays of {op}",
    "scaled": ", every decay times {times}",
    "in layer": "{layer}, ",
    "subtitle": "operands in {dtype}",
    "broken": {
        0: "None of {n} kernels breaks on these decays.",
        1: "1 of {n} kernels breaks on these decays.",
        2: "{count} of {n} kernels break on these decays.",
    },
    "first": "First of all “{kernel}”: e^{exponent} at {place}, and {dtype} ends at e^{limit}.",
    "near": "Nearest to its end: “{kernel}”, which holds up to {times:.3g} times these decays.",
    "safe": "{n} never break, whatever the decays.",
    "lane": "{kernel}: Σ|{w}| of {tokens} = {exponent} {sign} {limit}: e^{exponent} = {size}",
    "lane at": "{kernel}: the exponent at {tokens} = {exponent} {sign} {limit}: e^{exponent} = {size}",
    "tokens": {
        True: "token {first}, head {head}, channel {channel}{layer}",
        False: "tokens {first} to {last}, head {head}, channel {channel}{layer}",
    },
    "true": "inf (true: 1e{power})",
    "never": "{kernel}: no exponent is above 0 at any decay, so no factor above 1",
    "short": "{kernel}: no exponent is above 0 at this length, so no factor above 1",
    "given": "w: the decays that this panel was given",
}


class Headroom(Panel):
    """The panel of `headroom`. Exponents are summed once per chunk and block size; "times" only multiplies them."""

    name = "headroom"
    main = "times"
    on_view = ("times", "dtype", "layer")
    presets = {
        "as given": {"times": 1.0, "dtype": "float32"},
        "in float16": {"times": 1.0, "dtype": "float16"},
        "times 10": {"times": 10.0, "dtype": "float32"},
        "times 100": {"times": 100.0, "dtype": "float32"},
    }
    random = False
    readout_lines = 5

    def __init__(self, w, op: str | None = None, show=None, **settings):
        self._w, self._path = w, str(w) if isinstance(w, (str, Path)) else None
        if self._path:
            self._w = read(w)
        self._measured = functools.lru_cache(maxsize=16)(functools.partial(case.headroom, self._w))
        first = case.headroom(self._w, op, settings.get("chunk", 64), block=settings.get("block", 16))
        self.op, self.kernels = first.op, case.kernels(first.op)
        dtypes = [str(dtype).removeprefix("torch.") for dtype in LN_MAX]
        controls = {
            "times": knobs.number(1.0, 0.01, 100.0, "decays ×", None, log=True),
            "dtype": knobs.choice("float32", dtypes, "dtype"),
        }
        if len(first.layers) > 1:
            controls["layer"] = knobs.choice(ALL, {name: name for name in (ALL, *first.layers)}, "layer")
        else:
            self.on_view = ("times", "dtype")
        controls["chunk"] = knobs.steps(64, (16, 32, 64, 128), "chunk")
        controls["block"] = knobs.steps(16, (4, 8, 16, 32), "block")
        super().__init__(controls, settings, alt=WORDS["alt"], show=show)

    def compute(self, chunk, block, times, dtype, layer=ALL, **_):
        measured = self._measured(self.op, chunk, block=block).times(times)
        dtype = getattr(torch, dtype)
        margins = [measured.margin(kernel, dtype, None if layer == ALL else layer) for kernel in self.kernels]
        return measured, margins, [measured.uniform(kernel, dtype) for kernel in self.kernels]

    def draw(self, result, *, times, dtype, layer=ALL, **_) -> None:
        measured, margins, uniform = result
        # The narrow layout has room for the kernels' names in code only.
        names = [say(case.KERNELS[name]) if self.width == WIDE else name for name in self.kernels]
        scaled = "" if times == 1 else WORDS.say("scaled", times=times)
        where = "" if layer == ALL else WORDS.say("in layer", layer=layer)
        self.figure(lambda width: HeadroomFigure(names, width)).update(
            title=WORDS.say("title", op=operator(self.op).label) + scaled,
            subtitle=where + WORDS.say("subtitle", dtype=dtype),
            edges=measured.edges,
            counts=measured.counts,
            limit=LN_MAX[getattr(torch, dtype)],
            exponents=[m.exponent for m in margins],
            limits=[m.limit for m in margins],
            uniform=uniform,
        )

    def describe(self, result, *, dtype, layer=ALL, **_) -> str:
        measured, margins, uniform = result
        broken = sorted((m for m in margins if m.breaks), key=lambda m: m.factor)
        near = sorted((m for m in margins if m.token is not None and not m.breaks), key=lambda m: m.factor)
        lines = [WORDS.say("broken", count=len(broken), n=len(margins))]
        if broken:
            m = broken[0]
            values = {"kernel": say(case.KERNELS[m.kernel]), "exponent": number(m.exponent), "place": m.place}
            lines.append(WORDS.say("first", dtype=dtype, limit=f"{m.limit:.2f}", **values))
        if near:
            m = near[0]
            lines.append(WORDS.say("near", kernel=say(case.KERNELS[m.kernel]), times=m.factor))
        lines.append(WORDS.say("safe", n=uniform.count(math.inf)))
        gate = measured.gate if layer == ALL else measured.gates[layer]
        if gate.breaks:
            lines.append(str(gate))
        return "\n".join(lines)

    def arithmetic(self, result, cell: Cell, **_) -> str:
        """Return a line about a kernel: which decays add up to its largest exponent, and the exponential of that."""
        _, margins, uniform = result
        m = margins[cell.row]
        if m.token is None:
            return WORDS.say("never" if uniform[cell.row] == math.inf else "short", kernel=m.kernel)
        tokens = m.place
        if m.tokens:
            layer = f", {m.layer}" if m.layer else ""
            first, last = m.tokens
            place = {"first": first, "last": last, "head": m.head, "channel": m.channel, "layer": layer}
            tokens = WORDS.say("tokens", first == last, **place)
        true = WORDS.say("true", power=round(m.exponent / math.log(10))) if math.isfinite(m.exponent) else "inf"
        return WORDS.say(
            "lane" if m.tokens else "lane at",
            kernel=m.kernel,
            w=operator(self.op).decay,
            tokens=tokens,
            exponent=m.exponent,
            sign=">" if m.breaks else "<",
            limit=f"{m.limit:.2f}",
            size=true if m.breaks else number(math.exp(m.exponent), 2),
        )

    def script(self, *, chunk, block, times, **_) -> str:
        w = repr(self._path) if self._path else "w"
        comment = "" if self._path else f"# {WORDS['given']}\n"
        return f"""import flakit

{comment}headroom = flakit.headroom({w}, {self.op!r}, {chunk}, block={block}).times({times})
print(headroom)
"""


def headroom(w, op: str | None = None, show=None, *, language: str | None = None, **settings) -> Headroom:
    """Return a panel with a histogram of your own decays, and how far each kernel of the casebook is from its limit.

    w, op: as in `flakit.headroom`, which raises the same errors: natural-log decays <= 0 [B, T, H, K], layers of them
        by name, or a file of either.
    show: names of the knobs on view, default times, dtype and layer; the others are folded under "more".
    settings: starting values of the knobs: dtype (of the operands), times (0.01 … 100, a factor on all decays), chunk,
        block, and layer if there are several. An unknown name raises TypeError, a bad value ValueError.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> headroom(-torch.rand(1, 200, 4, 64), "rwkv6", times=2.0)
    """
    with speaking(language):
        return Headroom(w, op, show, **settings)
