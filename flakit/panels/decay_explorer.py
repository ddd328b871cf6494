"""Turn the decay up until a chunk breaks: the exponents, the scores, every tensor, the law beside the measurement."""

import functools
import math

import numpy as np
import torch

from ..cases.laws import LN_MAX
from ..figures.decay import TENSORS, DecayFigure, Onset
from ..numerics.errors import compare
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from . import knobs
from .base import Panel
from .chunked import CASES, in_words, mode, scheme_knobs
from .knobs import NONE
from .scripts import literal

H, K = 1, 32
_SPIKES = (-1, -3, -10, -30, -60, -80, -85, -87, -88, -88.5, -88.7, -88.8, -89, -90, -95, -100, -150, -500, -1e4)
_TOLERANCE = 5e-4  # of a measured onset


class DecayExplorer(Panel):
    """One head of an operator, in chunks by an anchor scheme, at one decay for all tokens or a spike at one."""

    name = "decay-explorer"
    readout_lines = 4

    def __init__(self, op: str = "rwkv6", **settings):
        self._figure = DecayFigure()
        made = {
            "decay": knobs.DecayKnob(-1.0),
            "T": knobs.integer(128, 1, 256, "length T"),
            "spike": knobs.DecayKnob(NONE, "spike", stops=_SPIKES, optional=True),
            "at": knobs.integer(16, 0, 255, "at token"),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), "chunk"),
            "op": knobs.operator_choice("rwkv6", CASES),
        }
        super().__init__(
            made,
            self._figure.canvas,
            {"op": op, **settings},
            alt="Heat maps of the two exponents of every score of one chunk, of the scores, and of the output and each "
            "gradient over time, NaN and inf hatched; beside them the decay at which each tensor turns non-finite, "
            "by the law and as measured",
        )

    def compute(self, op, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        case, x = CASES[op], _inputs(op, decay, T, spike, at, dtype, seed)
        number_format = getattr(torch, dtype)
        run = case.run(x, scheme, chunk=chunk, mask=mode(mask), dtype=number_format)
        tensors = {name: run.tensors[name] for name in TENSORS}
        index = _chunk_shown(tensors, chunk, at if spike != NONE else 0)
        exact = truth(op, x, recurrence=False)
        return {
            "tensors": tensors,
            "index": index,
            "A": run.A[0, 0, index],
            "exponents": _exponents(case, x, scheme, chunk, mask, number_format, index),
            "errors": {name: compare(got, exact[name]) for name, got in tensors.items()},
            "onsets": _onsets(op, T, scheme, chunk, mask, None if spike == NONE else at, dtype, seed),
        }

    def draw(self, result, *, op, decay, T, scheme, chunk, mask, spike, at, dtype, **_):
        first, anchors = result["index"] * chunk, CASES[op].SCHEMES[scheme]
        paired = anchors.whole and anchors.diagonal is None
        title = f"{OPERATORS[op].label} in chunks, log decay {decay:.5g} per token"
        self._figure.update(
            title=title if spike == NONE else f"{title}, {spike:.5g} at token {at}",
            subtitle=f"T {T} · chunk {chunk} · {in_words(scheme, mask, dtype)} · "
            f"upper maps: tokens {first} to {first + chunk - 1}",
            paired=paired,
            exponents=result["exponents"],
            limit=LN_MAX[torch.float32 if paired else getattr(torch, dtype)],
            A=result["A"].numpy(),
            tensors={name: (x[0, :, 0] if x.dim() == 4 else x).numpy() for name, x in result["tensors"].items()},
            onsets=result["onsets"],
            knob="|log decay| per token" if spike == NONE else f"|log decay| of token {at} (others 0)",
            now=-decay if spike == NONE else -spike,
        )

    def describe(self, result, *, spike, at, **_) -> str:
        bad = {name: x for name, x in result["tensors"].items() if not x.isfinite().all()}
        errors = {name: error.l2 for name, error in result["errors"].items() if name not in bad}
        lines = []
        if bad:
            lines.append(f"Not finite: {', '.join(_in_words(name, x) for name, x in bad.items())}.")
        if errors:
            worst = max(errors, key=errors.get)
            names = ", ".join(errors) if bad else "every tensor"
            lines.append(f"Finite: {names}; largest error against float64: {errors[worst]:.1e} ({worst}).")
        law, measured = (_weakest({name: onset[which] for name, onset in result["onsets"].items()}) for which in (0, 1))
        knob = "per token" if spike == NONE else f"of token {at}"
        law = "no limit to |w|" if law is None else f"|w| <= {law[1]:.4g} {knob} ({law[0]} fails first)"
        measured = "none" if measured is None else f"{measured[1]:.4g} ({measured[0]})"
        return "\n".join([*lines, f"Law: {law}. Measured onset: {measured}."])

    def script(self, *, op, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        how = f"chunk={chunk}, mask={mode(mask)!r}, dtype=torch.{dtype}"
        made = f"T={T}, H={H}, K={K}, dtype=torch.{dtype}, decay_dtype=torch.float32, seed={seed}"
        spiked = "" if spike == NONE else f'x["w"][:, {at}] = {literal(spike)}\n'
        ray = "1.0" if spike == NONE else "0.0"
        one = "" if spike == NONE else f'ray["w"][:, {at}] = -1.0\n'
        along = "per token" if spike == NONE else f"of token {at}"
        return f"""import torch

import flakit
from flakit.cases import {CASES[op].__name__.rpartition(".")[2]} as case

x = flakit.inputs({op!r}, decay={literal(decay)}, {made})
{spiked}run = case.run(x, {scheme!r}, {how})
for name in {TENSORS!r}:
    bad = run.non_finite[name]
    print(f"{{name:3}} {{bad.float().mean():7.2%}} not finite")

# How large |w| {along} may grow, by the law and as measured.
ray = flakit.inputs({op!r}, decay=-{ray}, {made})
{one}law = case.limits({scheme!r}, ray, {how})
measured = case.onset(ray, {scheme!r}, tolerance={_TOLERANCE}, {how})
for name in {TENSORS!r}:
    print(f"{{name:3}} law {{law[name]:.4g}}, measured {{measured[name]:.4g}}")
"""


def _inputs(op, decay, T, spike, at, dtype, seed):
    x = inputs(op, T=T, H=H, K=K, decay=decay, dtype=getattr(torch, dtype), decay_dtype=torch.float32, seed=seed)
    if spike != NONE:
        if at >= T:
            raise ValueError(f"at: expected a token 0 … {T - 1} for the spike, got {at}")
        x["w"][:, at] = spike
    return x


@functools.lru_cache(maxsize=512)
def _onsets(op, T, scheme, chunk, mask, at, dtype, seed) -> dict[str, Onset]:
    """Along uniform decay, or along the decay of token `at` alone."""
    x = _inputs(op, -1.0 if at is None else 0.0, T, NONE if at is None else -1.0, at, dtype, seed)
    how = {"chunk": chunk, "mask": mode(mask), "dtype": getattr(torch, dtype)}
    law, measured = CASES[op].limits(scheme, x, **how), CASES[op].onset(x, scheme, tolerance=_TOLERANCE, **how)
    return {name: Onset(_or_none(law[name]), _or_none(measured[name])) for name in TENSORS}


def _or_none(x: float) -> float | None:
    return x if x < math.inf else None


def _exponents(case, x, scheme, chunk, mask, number_format, index) -> list[np.ndarray]:
    """Both exponents of every pair, inf where e^x overflows. Exact tiles store no factor: their format is float32."""
    limit = np.full((chunk, chunk), LN_MAX[torch.float32])
    for tile in case.tiles(scheme, chunk):
        if tile.anchor is not None:
            limit[tile.rows, tile.keys] = LN_MAX[number_format]
    pair = case.exponents(x, scheme, chunk=chunk, mask=mode(mask), index=index)
    return [np.where(each.numpy() > limit, np.inf, each.numpy()) for each in pair]


def _weakest(found: dict[str, float | None]) -> tuple[str, float] | None:
    """The tensor that fails first."""
    failing = {name: x for name, x in found.items() if x is not None}
    return min(failing.items(), key=lambda item: item[1]) if failing else None


def _chunk_shown(tensors, chunk: int, at: int) -> int:
    """The first chunk that goes wrong; dw is no witness, since its sums carry a NaN back to the first token."""
    bad = torch.stack([~tensors[name].isfinite().all(-1)[0, :, 0] for name in ("o", "dr", "dk")]).any(0)
    return (int(bad.nonzero()[0, 0]) if bad.any() else at) // chunk


def _in_words(name: str, x: torch.Tensor) -> str:
    kinds = (("NaN", x.isnan()), ("inf", x.isinf()))
    shares = " and ".join(f"{_percent(hit)} {kind}" for kind, hit in kinds if hit.any())
    if x.dim() < 4:
        return f"{name} {shares}"
    first = int((~x.isfinite()).any(-1)[0, :, 0].nonzero()[0, 0])
    return f"{name} {shares} (from t={first})"


def _percent(hit: torch.Tensor) -> str:
    share = hit.float().mean().item()
    return "<1%" if share < 0.01 else f"{share:.0%}"


def decay_explorer(op: str = "rwkv6", **settings) -> DecayExplorer:
    """Panel: chunked computation at one decay, by anchor scheme, with the onset of NaN by law and as measured.

    op: an operator of `CASES`. settings: starting values of the knobs:
        decay: natural-log decay <= 0 of every token, 0 and -inf included.
        T: tokens, 1 … 256. chunk: tokens a chunk, 16 … 128.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right".
        spike: natural-log decay of token `at` alone, or "none".
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.

    >>> decay_explorer(decay=-0.5, scheme="first-row", spike=-88.8, at=16)
    """
    return DecayExplorer(op, **settings)
