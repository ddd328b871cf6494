"""Turn the decay up until a chunk breaks: the exponents, the scores, every tensor, the law beside the measurement."""

import functools
import math

import numpy as np
import torch

from ..cases import anchor
from ..cases.laws import LN_MAX
from ..figures.decay import DecayFigure, Onset
from ..numerics.errors import compare
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from ..numerics.words import error, percent
from . import knobs
from .base import Panel
from .knobs import NONE
from .shared import QUERIES, in_words, literal, mode, only_for, own_options, scheme_knobs, tensors

H, K = 1, 32
_KEYS = {"rwkv6": "k", "rwkv7": "k", "gsa": "s"}
_SCORES = {"rwkv6": "scores |A|", "rwkv7": "|A|, r with k", "gsa": "|A|, p with s"}
_BOUNDS = {"rwkv7": "The model's own decay, -0.6065 sigmoid(x), never goes past |w| = 0.6065."}
_SPIKES = (-1, -3, -10, -30, -60, -80, -85, -87, -88, -88.5, -88.7, -88.8, -89, -90, -95, -100, -150, -500, -1e4)
_TOLERANCE = 5e-4  # of a measured onset


class DecayExplorer(Panel):
    """One head of an operator, in chunks by an anchor scheme, at one decay for all tokens or a spike at one."""

    name = "decay-explorer"
    readout_lines = 5

    def __init__(self, op: str = "rwkv6", **settings):
        self._figures: dict[str, DecayFigure] = {}
        first = next(iter(OPERATORS))
        made = {
            "op": knobs.operator_choice(first),
            "query": knobs.choice(QUERIES[first][0], QUERIES[first], "exponents of"),
            "decay": knobs.DecayKnob(-1.0),
            "T": knobs.integer(128, 1, 256, "length T"),
            "spike": knobs.DecayKnob(NONE, "spike", stops=_SPIKES, optional=True),
            "at": knobs.integer(16, 0, 255, "at token"),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), "chunk"),
        }
        own_options(self, made["op"], made["query"], QUERIES.get, {name: reads[0] for name, reads in QUERIES.items()})
        only_for(self, made["op"], made["query"], [name for name, reads in QUERIES.items() if len(reads) > 1])
        super().__init__(
            made,
            {"op": op, **settings},
            alt="Heat maps of the two exponents of every score of one chunk, of the scores, and of the output and each "
            "gradient over time, NaN and inf hatched; beside them the decay at which each tensor turns non-finite, "
            "by the law and as measured",
        )

    def _figure(self, op: str) -> DecayFigure:
        if op not in self._figures:
            self._figures[op] = DecayFigure(tensors(op), _SCORES[op])
        return self._figures[op]

    def compute(self, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        x = _inputs(op, decay, T, spike, at, dtype, seed)
        number_format = getattr(torch, dtype)
        run = anchor.run(x, scheme, op=op, chunk=chunk, mask=mode(mask), dtype=number_format)
        shown = {name: run.tensors[name] for name in tensors(op)}
        index = _chunk_shown(shown, OPERATORS[op].decay, chunk, at if spike != NONE else 0)
        exact = truth(op, x, recurrence=False)
        return {
            "tensors": shown,
            "index": index,
            "A": run.A[0, 0, index],
            "exponents": _exponents(op, query, x, scheme, chunk, mask, number_format, index),
            "errors": {name: compare(got, exact[name]) for name, got in shown.items()},
            "onsets": _onsets(op, T, scheme, chunk, mask, None if spike == NONE else at, dtype, seed),
        }

    def draw(self, result, *, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, **_):
        first, anchors = result["index"] * chunk, anchor.SCHEMES[scheme]
        paired = anchors.whole and anchors.diagonal is None
        title = f"{OPERATORS[op].label} in chunks, log decay {decay:.5g} per token"
        figure = self._figure(op)
        self.canvas = figure.canvas
        figure.update(
            title=title if spike == NONE else f"{title}, {spike:.5g} at token {at}",
            subtitle=f"T {T} · chunk {chunk} · {in_words(scheme, mask, dtype)} · "
            f"upper maps: tokens {first} to {first + chunk - 1}",
            factors=("one exponent a pair", "no second one")
            if paired
            else (f"exponent on ${query}_i$", f"exponent on ${_KEYS[op]}_j$"),
            exponents=result["exponents"],
            limit=LN_MAX[torch.float32 if paired else getattr(torch, dtype)],
            A=result["A"].numpy(),
            tensors={name: (x[0, :, 0] if x.dim() == 4 else x).numpy() for name, x in result["tensors"].items()},
            onsets=result["onsets"],
            knob="|log decay| per token" if spike == NONE else f"|log decay| of token {at} (others 0)",
            now=-decay if spike == NONE else -spike,
        )

    def describe(self, result, *, op, spike, at, **_) -> str:
        bad = {name: x for name, x in result["tensors"].items() if not x.isfinite().all()}
        errors = {name: found.l2 for name, found in result["errors"].items() if name not in bad}
        lines = []
        if bad:
            lines.append(f"Not finite: {', '.join(_in_words(name, x) for name, x in bad.items())}.")
        if errors:
            worst = max(errors, key=errors.get)
            names = ", ".join(errors) if bad else "every tensor"
            lines.append(f"Finite: {names}; largest error against float64: {error(errors[worst])} ({worst}).")
        law, measured = (_weakest({name: onset[which] for name, onset in result["onsets"].items()}) for which in (0, 1))
        knob = "per token" if spike == NONE else f"of token {at}"
        size = f"|{OPERATORS[op].decay}|"
        law = f"no limit to {size}" if law is None else f"{size} <= {law[1]:.4g} {knob} ({law[0]} fails first)"
        measured = "none" if measured is None else f"{measured[1]:.4g} ({measured[0]})"
        lines.append(f"Law: {law}. Measured onset: {measured}.")
        return "\n".join([*lines, *([_BOUNDS[op]] if op in _BOUNDS else [])])

    def script(self, *, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        how = f"op={op!r}, chunk={chunk}, mask={mode(mask)!r}, dtype=torch.{dtype}"
        made = f"T={T}, H={H}, K={K}, dtype=torch.{dtype}, decay_dtype=torch.float32, seed={seed}"
        which, names = OPERATORS[op].decay, tuple(tensors(op))
        spiked = "" if spike == NONE else f"x[{which!r}][:, {at}] = {literal(spike)}\n"
        ray = "1.0" if spike == NONE else "0.0"
        one = "" if spike == NONE else f"ray[{which!r}][:, {at}] = -1.0\n"
        along = "per token" if spike == NONE else f"of token {at}"
        return f"""import torch

import flakit
from flakit.cases import anchor

x = flakit.inputs({op!r}, decay={literal(decay)}, {made})
{spiked}run = anchor.run(x, {scheme!r}, {how})
for name in {names!r}:
    bad = run.non_finite[name]
    print(f"{{name:3}} {{bad.float().mean():7.2%}} not finite")

# How large |{which}| {along} may grow, by the law and as measured.
ray = flakit.inputs({op!r}, decay=-{ray}, {made})
{one}law = anchor.limits({scheme!r}, ray, {how})
measured = anchor.onset(ray, {scheme!r}, near=law.values(), tolerance={_TOLERANCE}, {how})
for name in {names!r}:
    print(f"{{name:3}} law {{law[name]:.4g}}, measured {{measured[name]:.4g}}")
"""


def _inputs(op, decay, T, spike, at, dtype, seed):
    x = inputs(op, T=T, H=H, K=K, decay=decay, dtype=getattr(torch, dtype), decay_dtype=torch.float32, seed=seed)
    if spike != NONE:
        if at >= T:
            raise ValueError(f"at: expected a token 0 … {T - 1} for the spike, got {at}")
        x[OPERATORS[op].decay][:, at] = spike
    return x


@functools.lru_cache(maxsize=512)
def _onsets(op, T, scheme, chunk, mask, at, dtype, seed) -> dict[str, Onset]:
    """Along uniform decay, or along the decay of token `at` alone."""
    x = _inputs(op, -1.0 if at is None else 0.0, T, NONE if at is None else -1.0, at, dtype, seed)
    how = {"op": op, "chunk": chunk, "mask": mode(mask), "dtype": getattr(torch, dtype)}
    law = anchor.limits(scheme, x, **how)
    measured = anchor.onset(x, scheme, near=law.values(), tolerance=_TOLERANCE, **how)
    return {name: Onset(_or_none(law[name]), _or_none(measured[name])) for name in tensors(op)}


def _or_none(x: float) -> float | None:
    return x if x < math.inf else None


def _exponents(op, query, x, scheme, chunk, mask, number_format, index) -> list[np.ndarray]:
    """Both exponents of every pair, inf where e^x overflows. Exact tiles store no factor: their format is float32."""
    limit = np.full((chunk, chunk), LN_MAX[torch.float32])
    for tile in anchor.tiles(scheme, chunk):
        if tile.anchor is not None:
            limit[tile.rows, tile.keys] = LN_MAX[number_format]
    query = query if len(QUERIES[op]) > 1 else None
    pair = anchor.exponents(x, scheme, op=op, query=query, chunk=chunk, mask=mode(mask), index=index)
    return [np.where(each.numpy() > limit, np.inf, each.numpy()) for each in pair]


def _weakest(found: dict[str, float | None]) -> tuple[str, float] | None:
    """The tensor that fails first."""
    failing = {name: x for name, x in found.items() if x is not None}
    return min(failing.items(), key=lambda item: item[1]) if failing else None


def _chunk_shown(shown, decay: str, chunk: int, at: int) -> int:
    """The first chunk that goes wrong, by o where that does; else by the gradients whose time axis tells.

    The decay's gradient is no witness: its sums carry a NaN back to the first token. The others are for RWKV7 and GSA
    only where o is whole, for a NaN in o's chunk reaches all earlier ones through the gradient of the state.
    """
    gradients = [name for name, x in shown.items() if x.dim() == 4 and name not in ("o", f"d{decay}")]
    for names in (["o"], gradients):
        bad = torch.stack([~shown[name].isfinite().all(-1)[0, :, 0] for name in names]).any(0)
        if bad.any():
            return int(bad.nonzero()[0, 0]) // chunk
    return at // chunk


def _in_words(name: str, x: torch.Tensor) -> str:
    kinds = (("NaN", x.isnan()), ("inf", x.isinf()))
    shares = " and ".join(f"{percent(hit.double().mean().item())} {kind}" for kind, hit in kinds if hit.any())
    if x.dim() < 4:
        return f"{name} {shares}"
    first = int((~x.isfinite()).any(-1)[0, :, 0].nonzero()[0, 0])
    return f"{name} {shares} (from t={first})"


def decay_explorer(op: str = "rwkv6", **settings) -> DecayExplorer:
    """Panel: chunked computation at one decay, by anchor scheme, with the onset of NaN by law and as measured.

    op: an operator of `flakit.numerics.operators.OPERATORS`. settings: starting values of the knobs:
        decay: natural-log decay <= 0 of every token, 0 and -inf included.
        query: whose exponents the upper maps show, of RWKV7 "r" or "a".
        T: tokens, 1 … 256. chunk: tokens a chunk, 16 … 128.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right".
        spike: natural-log decay of token `at` alone, or "none".
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.

    >>> decay_explorer(decay=-0.5, scheme="first-row", spike=-88.8, at=16)
    """
    return DecayExplorer(op, **settings)
