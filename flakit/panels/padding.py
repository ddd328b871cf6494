"""Rows beyond the end of a sequence: when the zeros they are loaded as send a NaN back into it (casebook 3B)."""

import functools
import math

import torch

from ..cases import padding as case
from ..cases.laws import LN_MAX
from ..figures.padding import PaddingFigure
from ..numerics.operators import OPERATORS
from ..numerics.words import number
from . import knobs
from .base import Panel
from .shared import literal

K = 16
_SHARES = {"all channels": 1.0, "half of them": 0.5, "a quarter": 0.25, "one": 1 / K}


class Padding(Panel):
    """One head, one gate for all tokens: the last chunk's exponents, the key's gradient, and the limit by length."""

    name = "padding"
    readout_lines = 4

    def __init__(self, op: str = "gsa", **settings):
        self._figure = PaddingFigure()
        made = {
            "gate": knobs.DecayKnob(-1.9, "log gate"),
            "T": knobs.integer(120, 1, 320, "length T"),
            "form": knobs.choice("chunk", {words: name for name, words in case.FORMS.items()}, "padding"),
            "uneven": knobs.choice(1.0, _SHARES, "gate of"),
            "chunk": knobs.choice(64, (32, 64, 128), "chunk"),
            "block": knobs.choice(16, (8, 16, 32), "block"),
            "op": knobs.operator_choice("gsa", case.KEY_GRADIENT),
        }
        super().__init__(
            made,
            {"op": op, **settings},
            alt="The last chunk of a sequence: the exponent of every row at the anchor of every block of keys, the "
            "empty rows below the end of the sequence; the key's gradient, NaN hatched, with what the law predicts "
            "outlined; and the largest gate without a NaN for every number of tokens in that chunk",
        )

    def compute(self, op, gate, T, form, uneven, chunk, block, seed):
        x = case.inputs(T, gate, uneven=uneven, op=op, K=K, M=K, seed=seed)
        how = {"op": op, "chunk": chunk, "block": block}
        return {
            "tensors": case.run(x, form, **how),
            "predicted": case.predicted(x, form, **how),
            "exponents": case.exponents(x, form, **how),
            "law": case.law(T, form, chunk=chunk, block=block),
            "measured": _onset(op, T, form, chunk, block),
        }

    def draw(self, result, *, op, gate, T, form, uneven, chunk, block, **_) -> None:
        name, R = case.KEY_GRADIENT[op], T % chunk or chunk
        last = slice(T - R, T)
        channels = "slot" if op == "gsa" else "channel of k"
        measured = result["measured"]
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"{OPERATORS[op].label}, T = {T}: {R} tokens in the last chunk of {chunk}",
            subtitle=case.FORMS[form],
            limit=LN_MAX[torch.float32],
            exponents=result["exponents"].numpy(),
            tokens=R,
            name=name,
            columns=channels,
            first=T - R,
            gradient=result["tensors"][name][0, last, 0].numpy(),
            predicted=result["predicted"][0, last, 0].numpy(),
            limits=_limits(form, chunk, block),
            measured=measured if measured < math.inf else None,
            now=(R, -gate),
        )

    def describe(self, result, *, op, gate, T, uneven, **_) -> str:
        name, law, measured = case.KEY_GRADIENT[op], result["law"], result["measured"]
        lost = [key for key, x in result["tensors"].items() if not x.isfinite().all()]
        rows = case.lost_rows(~result["tensors"][name].isfinite())
        where = ", ".join(f"{run.start} … {run.stop - 1}" for run in rows)
        agree = torch.equal(~result["tensors"][name].isfinite(), result["predicted"])
        kept = [key for key in result["tensors"] if key not in lost]
        limit = "no limit at this length" if law == math.inf else f"|log gate| <= {law:.4g}"
        onset = number(measured, inf="none")
        return "\n".join(
            [
                f"Lost: {', '.join(lost)}; {name} at tokens {where}." if lost else "Lost: nothing.",
                f"Finite: {', '.join(kept)}.",
                f"Law: {limit}. Measured onset: {onset}. "
                + ("Every element is as the law says." if agree else "The law is wrong about some elements."),
            ]
        )

    def script(self, *, op, gate, T, form, uneven, chunk, block, seed) -> str:
        how = f"{form!r}, op={op!r}, chunk={chunk}, block={block}"
        return f"""from flakit.cases import padding as case

x = case.inputs({T}, {literal(gate)}, uneven={uneven}, op={op!r}, K={K}, M={K}, seed={seed})
found = case.run(x, {how})
lost = ~found["{case.KEY_GRADIENT[op]}"].isfinite()
print("law", case.law({T}, {form!r}, chunk={chunk}, block={block}), "per token")
print("lost", case.lost_rows(lost), "as predicted:", bool((lost == case.predicted(x, {how})).all()))
"""


@functools.lru_cache(maxsize=512)
def _onset(op: str, T: int, form: str, chunk: int, block: int) -> float:
    return case.onset(T, form, op=op, chunk=chunk, block=block)


@functools.lru_cache(maxsize=64)
def _limits(form: str, chunk: int, block: int) -> list[float]:
    return [case.law(chunk + R, form, chunk=chunk, block=block) for R in range(1, chunk + 1)]


def padding(op: str = "gsa", **settings) -> Padding:
    """A panel on a sequence that does not fill its last chunk: what its empty rows do to the keys' gradient.

    op: "gsa" or "rwkv6". settings: starting values of the knobs:
        gate: natural-log decay <= 0 of every token, 0 and -inf included.
        T: tokens, 1 … 320. chunk and block: tokens a chunk (32, 64, 128) and rows a block (8, 16, 32).
        form: one of `flakit.cases.padding.FORMS`.
        uneven: the share of channels that have the gate (1, 0.5, 0.25 or 1/16), the others keep -0.01.
        seed: of the inputs.

    >>> padding(T=100, gate=-3.0)
    """
    return Padding(op, **settings)
