"""The panel that increases the decay until a chunk is non-finite: exponents, every tensor, and the onset of NaN."""

import functools
import math
from collections.abc import Iterable

import numpy as np
import torch

from ..cases import anchor
from ..cases.laws import LN_MAX
from ..figures.canvas import Cell
from ..figures.decay import WORDS as PICTURE
from ..figures.decay import DecayFigure, Onset
from ..language import Words, say, speaking
from ..numerics.errors import compare
from ..numerics.evaluate import truth
from ..numerics.inputs import inputs
from ..numerics.operators import OPERATORS
from ..numerics.words import number, percent
from . import knobs
from .base import WIDE, Panel
from .knobs import NONE
from .shared import RIGHT, SAME, around, literal, masking, mode, only_for, own_options, scheme_knobs, tensors
from .sketches.sketch import listed

H, K = 1, 32
_READS = {op: OPERATORS[op].reads for op in anchor.OPERATORS}
_SPIKES = (-1, -3, -10, -30, -60, -80, -85, -87, -88, -88.5, -88.7, -88.8, -89, -90, -95, -100, -150, -500, -1e4)
_TOLERANCE = 1e-4  # of a measured onset

WORDS = Words() | {
    "presets": {
        "fine": "a decay that everything survives",
        "first NaN": "just past the onset of the first tensor",
        "all NaN": "past the onset of every tensor",
        "bug A": "one token's decay is enough: the anchor is the block's first row",
    },
    "alt": "Heat maps of the two exponents of every pair of one chunk, of the output and of each gradient, NaN and inf "
    "hatched; beside them the decay at which each tensor breaks, by the law and as measured",
    "title": (
        "{op} · chunk {chunk} · {dtype}{mask} · upper maps: tokens {first} to {last} · ",
        "log decay {decay} a token{spike}",
    ),
    "short title": ("{op} · {dtype} · tokens {first} to {last} · ", "decay {decay}{spike}"),
    "title spike": ", {spike} at token {at}",
    "title mask": " · mask: {mask}",
    "factors": ("exponent on ${query}_i$", "exponent on ${key}_j$"),
    "paired": ("one exponent a pair", "no second one"),
    "knob": "|log decay| per token",
    "knob spike": "|log decay| of token {at}",
    "all broken": "Every tensor is broken.",
    "broken": {1: "{names} is broken", 2: "{names} are broken"},
    "fine": {
        "all": "Every tensor is fine, {right}.",
        1: "; {names} is fine, {right}.",
        2: "; {names} are fine, {right}.",
    },
    "finite": {
        "all": "Every tensor is finite, but {worst} {off}.",
        1: "; {names} is finite, but {off}.",
        2: "; {names} are finite, but {worst} {off}.",
    },
    "off": {True: "is off by {share:%}", False: "should be 0"},
    "right": {
        0: "equal to float64's",
        1: "right to one digit",
        2: "right to at least {digits} digits",
    },
    "share": "{share} of {names}",
    "all of": "all of {names}",
    "from": " (first at token {t})",
    "kinds": {"NaN": "{shares} are NaN", "inf": "{shares} are inf"},
    "also": "; ",
    "sentence": "{said}.",
    "first": {
        1: "The law: {names} breaks first, beyond |{which}| = {law} {knob}; measured: {measured}.",
        2: "The law: {names} break first, beyond |{which}| = {law} {knob}; measured: {measured}.",
        "all": "The law: all break together, beyond |{which}| = {law} {knob}; measured: {measured}.",
    },
    "nothing breaks": "The law: nothing breaks, however strong the decay {knob}; measured: {measured}.",
    "nothing": "nothing does",
    "of token": "of token {at}",
    "bound": "{op}'s own decay never goes past |{which}| = {bound}.",
    "no pair": "token {i}, key {j}: no product is formed for this pair, for it would read the future",
    "pair": "token {i}, key {j}: {exponents} = {factors}{product} (true: {true:.3g})",
    "masked": "token {i}, key {j}, the future: {exponents} = {factors}{product}, {after}",
    "after": {
        "where": "then masked: 0",
        "before": "masked first: 0",
        "multiply": "then times 0: {zero}",
        "none": "and nothing masks it (true: 0)",
    },
    "back": "; but in the sums of the gradients 0 · {product} is NaN",
    "operand": "; with its key {operand} · {factor:.2g} = {made}",
    "value": "{name} at token {t}, {column} {c}: {got} (true: {true})",
    "onset": "{name} breaks beyond |{which}| = {law} {knob} by the law, at {measured} as measured; now {now}: "
    "{verdict}",
    "no onset": "{name} never breaks, by the law and as measured: {verdict}",
    "verdict": {True: "fine", False: "broken"},
}


class DecayExplorer(Panel):
    """The panel of `decay_explorer`: one head of an operator, computed in chunks with an anchor scheme. Either all
    tokens have the same decay, or one token has a decay of its own, the spike."""

    name = "decay-explorer"
    on_view = ("decay", "spike", "scheme")
    main = "decay"
    presets = {
        label: {"T": 128, "spike": NONE, "mask": RIGHT, "dtype": "float32", "chunk": 64, **setting}
        for label, setting in {
            "fine": {"decay": -1.33, "scheme": "none"},
            "first NaN": {"decay": -1.39, "scheme": "none"},
            "all NaN": {"decay": -1.5, "scheme": "none"},
            "bug A": {"decay": 0.0, "scheme": "first-row", "spike": -88.8, "at": 16},
        }.items()
    }
    result: dict

    def __init__(self, op: str = "rwkv6", show: Iterable[str] | None = None, **settings):
        first, reads = next(iter(_READS)), {name: tuple(of)[0] for name, of in _READS.items()}
        controls = {
            "op": knobs.operator_choice(first, _READS),
            "query": knobs.choice(reads[first], tuple(_READS[first]), "exponents of"),
            "decay": knobs.DecayKnob(-1.0),
            "T": knobs.integer(128, 1, 256, "length T"),
            "spike": knobs.DecayKnob(NONE, "one token's", stops=_SPIKES, optional=True),
            "at": knobs.integer(16, 0, 255, "which token"),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), "chunk"),
        }
        own_options(self, controls["op"], controls["query"], _READS.get, reads)
        only_for(self, controls["op"], controls["query"], [name for name, of in _READS.items() if len(of) > 1])
        self.presets = {label: dict(setting) for label, setting in self.presets.items()}
        self.when(controls["op"], lambda _, name: self.presets["first NaN"].update(decay=_first_nan(name)))
        super().__init__(controls, {"op": op, **settings}, alt=WORDS["alt"], show=show)

    def _preset(self, label, setting):
        button = super()._preset(label, setting)
        button.tooltip = WORDS["presets"][label]
        return button

    def compute(self, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        x = _inputs(op, decay, T, spike, at, dtype, seed)
        number_format = getattr(torch, dtype)
        run = anchor.run(x, scheme, op=op, chunk=chunk, mask=mode(mask), dtype=number_format)
        shown = {name: run.tensors[name] for name in tensors(op)}
        index = _chunk_shown(shown, OPERATORS[op].decay, chunk, at if spike != NONE else 0)
        exact = truth(op, x, recurrence=False)
        onsets = _onsets(op, T, scheme, chunk, mask, None if spike == NONE else at, dtype, seed)
        # The slider whose decay the onsets are values of gets stops on both sides of each.
        spans = [[x for x in onset if x is not None] for onset in onsets.values()]
        stops = {-x for x in around(filter(None, spans), (1.0005, 1.008), (1.01, 1.02))}
        with self.held():
            self.knobs["decay"].dense(stops if spike == NONE else ())
            self.knobs["spike"].dense(stops if spike != NONE else ())
        exponents = anchor.exponents(x, scheme, op=op, query=query, chunk=chunk, mask=mode(mask), index=index)
        limit = _limit(scheme, chunk, number_format)
        return {
            "inputs": x,
            "tensors": shown,
            "exact": {name: exact[name] for name in shown},
            "index": index,
            "exponents": [np.where(each.numpy() > limit, np.inf, each.numpy()) for each in exponents],
            "factors": exponents,
            "formed": _formed(_READS[op][query], scheme, chunk, mask),
            "infinite": _infinite(op, x, exponents, limit, chunk, index),
            "errors": {name: compare(got, exact[name]) for name, got in shown.items()},
            "onsets": onsets,
        }

    def draw(self, result, *, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, **_):
        first, anchors = result["index"] * chunk, anchor.SCHEMES[scheme]
        paired = anchors.whole and anchors.diagonal is None
        still = [name for name in tensors(op) if name != "o" and "T" not in OPERATORS[op].axes[name[1:]].split()]
        figure = self.figure(lambda width: DecayFigure(tensors(op), still=still, width=width), op)
        shown = {
            "op": OPERATORS[op].label,
            "decay": f"{decay:.5g}",
            "spike": "" if spike == NONE else WORDS.say("title spike", spike=f"{spike:.5g}", at=at),
            "chunk": chunk,
            "dtype": dtype,
            "mask": "" if mask == RIGHT else WORDS.say("title mask", mask=say(masking.MASKS[mask])),
            "first": first,
            "last": min(first + chunk, T) - 1,
        }
        title = WORDS["title" if self.width == WIDE else "short title"]
        factors = tuple(text.format(query=query, key=OPERATORS[op].keys[0]) for text in WORDS["factors"])
        figure.update(
            title=tuple(part.format(**shown).replace("-", "\u2212") for part in title),
            factors=WORDS["paired"] if paired else factors,
            exponents=result["exponents"],
            formed=result["formed"],
            infinite=result["infinite"],
            limit=LN_MAX[torch.float32 if paired else getattr(torch, dtype)],
            tensors={name: x[0, :, 0].numpy() for name, x in result["tensors"].items() if x.dim() == 4},
            onsets=result["onsets"],
            knob=WORDS["knob"] if spike == NONE else WORDS.say("knob spike", at=at),
            now=-decay if spike == NONE else -spike,
        )

    # Words.

    def describe(self, result, *, op, spike, at, **_) -> str:
        bad = [name for name, x in result["tensors"].items() if not x.isfinite().all()]
        errors = {name: x.l2 for name, x in result["errors"].items() if name not in bad}
        if not bad:
            lines = [_right(errors, "all")]
        else:
            sentence = WORDS["all broken"]
            if errors:
                sentence = WORDS.say("broken", n=len(bad), names=listed(bad)) + _right(errors, min(len(errors), 2))
            lines = [f"{sentence} {_shares({name: result['tensors'][name] for name in bad})}"]
        lines.append(_law(result["onsets"], OPERATORS[op].decay, None if spike == NONE else at))
        if bound := bound_words(op):
            lines[-1] += f" {bound}"
        return "\n".join(lines)

    def beside(self, cell):
        """Highlight a pair in the other map of pairs and its two tokens in the tensors; a token in all maps."""
        of, chunk, maps = OPERATORS[self.setting["op"]], self.setting["chunk"], self.canvas.maps
        first = self.result["index"] * chunk
        if cell.map in ("read", "key"):
            places = [(name, cell.row, cell.column) for name in ("read", "key")]
            places += [(name, first + cell.row, None) for name in ("o", *(f"d{x}" for x in of.queries))]
            places += [(f"d{name}", first + cell.column, None) for name in of.written]
        elif cell.map == "onset":
            return []
        else:
            places = [(name, cell.row, None) for name, x in self.result["tensors"].items() if x.dim() == 4]
            if first <= cell.row < first + chunk:
                token = cell.row - first
                places += [("read", token, None), ("key", None, token)]
        return [x for x in places if x[0] != cell.map and (x[1] is None or x[1] < maps[x[0]][0])]

    def arithmetic(self, result, cell, **setting) -> str:
        if cell.map == "onset":
            return self._onset_of(result, tuple(result["onsets"])[cell.row], **setting)
        if cell.map in result["tensors"]:
            return _value(result, cell, setting["op"])
        return self._pair(result, cell.row, cell.column, **setting)

    def _onset_of(self, result, name, *, op, decay, spike, at, **_) -> str:
        onset = result["onsets"][name]
        verdict = WORDS["verdict"][result["tensors"][name].isfinite().all().item()]
        if onset == (None, None):
            return WORDS.say("no onset", name=name, verdict=verdict)
        law, measured = (PICTURE["never"] if x is None else number(x, 5) for x in onset)
        return WORDS.say("onset",
            name=name, which=OPERATORS[op].decay, law=law, measured=measured, verdict=verdict,
            knob=_along(None if spike == NONE else at), now=-decay if spike == NONE else -spike,
        )  # fmt: skip

    def _pair(self, result, i, j, *, op, query, T, scheme, chunk, mask, dtype, **_) -> str:
        """Return a line about query token i and key token j: both factors as stored, their product and the truth."""
        x, y = (each[i, j] for each in result["factors"])
        if not result["formed"][i, j]:
            return WORDS.say("no pair", i=i, j=j)
        anchors, exact = anchor.SCHEMES[scheme], _exact(scheme, chunk)[i, j]
        stored = torch.float32 if anchors.dyadic else getattr(torch, dtype)
        on_query, on_key = (each.exp().to(torch.float32 if exact else stored).float() for each in (x, y))
        product = on_query if exact else on_query * on_key
        values = {"i": i, "j": j, "product": number(product.item(), 3)}
        values["exponents"] = f"e^{number(x.item())}" + ("" if exact else f" · e^{number(y.item())}")
        values["factors"] = "" if exact else f"{number(on_query.item(), 2)} · {number(on_key.item(), 2)} = "
        of, inclusive, first = OPERATORS[op], _READS[op][query], result["index"] * chunk
        if j <= i - (not inclusive):
            between = result["inputs"][of.decay][0, first + j + 1 : first + i + inclusive, 0, 0]
            text = WORDS.say("pair", true=between.double().sum().exp(), **values)
        else:
            mask = anchors.masks[0] if mask == RIGHT else mask
            text = WORDS.say("masked", after=WORDS.say("after", mask, zero=(product * 0).item()), **values)
            if mask == "where" and not product.isfinite():
                text += WORDS.say("back", product=values["product"])
        if not exact and on_key.isfinite() and first + j < T:
            key = result["inputs"][of.keys[0]][0, first + j, 0].float()
            operand = key[key.abs().argmax()]
            if not (operand * y.exp()).to(stored).isfinite():
                operand = f"{of.keys[0]}_{j} = {number(operand.item(), 3)}"
                text += WORDS.say("operand", operand=operand, factor=on_key, made="inf")
        return text

    def script(self, *, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, seed):
        options = f"op={op!r}, chunk={chunk}, mask={mode(mask)!r}, dtype=torch.{dtype}"
        sizes = f"T={T}, H={H}, K={K}, dtype=torch.{dtype}, decay_dtype=torch.float32, seed={seed}"
        which, names = OPERATORS[op].decay, tuple(tensors(op))
        spiked = "" if spike == NONE else f"x[{which!r}][:, {at}] = {literal(spike)}\n"
        ray = "1.0" if spike == NONE else "0.0"
        one = "" if spike == NONE else f"ray[{which!r}][:, {at}] = -1.0\n"
        along = "per token" if spike == NONE else f"of token {at}"
        return f"""import torch

import flakit
from flakit.cases import anchor

x = flakit.inputs({op!r}, decay={literal(decay)}, {sizes})
{spiked}run = anchor.run(x, {scheme!r}, {options})
for name in {names!r}:
    bad = run.non_finite[name]
    print(f"{{name:3}} {{bad.float().mean():7.2%}} not finite")

# How large |{which}| {along} may grow, by the law and as measured.
ray = flakit.inputs({op!r}, decay=-{ray}, {sizes})
{one}law = anchor.limits({scheme!r}, ray, {options})
measured = anchor.onset(ray, {scheme!r}, near=law.values(), tolerance={_TOLERANCE}, {options})
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


@functools.cache
def _first_nan(op: str) -> float:
    """Return a natural-log decay halfway between the predicted onset of the first tensor to fail and that of o."""
    law = anchor.limits("none", _inputs(op, -1.0, 128, NONE, 0, "float32", 0), op=op)
    return -math.ceil(50 * (min(law.values()) + law["o"])) / 100


@functools.lru_cache(maxsize=512)
def _onsets(op, T, scheme, chunk, mask, at, dtype, seed) -> dict[str, Onset]:
    """Return each tensor's onset: the |log decay|, of all tokens or of token `at` alone, above which it breaks."""
    x = _inputs(op, -1.0 if at is None else 0.0, T, NONE if at is None else -1.0, at, dtype, seed)
    options = {"op": op, "chunk": chunk, "mask": mode(mask), "dtype": getattr(torch, dtype)}
    law = anchor.limits(scheme, x, **options)
    measured = anchor.onset(x, scheme, near=law.values(), tolerance=_TOLERANCE, **options)
    return {name: Onset(*(x[name] if x[name] < math.inf else None for x in (law, measured))) for name in tensors(op)}


@functools.lru_cache(maxsize=64)
def _formed(inclusive: bool, scheme: str, chunk: int, mask: str) -> np.ndarray:
    """Return the pairs that the scheme computes, boolean [chunk, chunk]. inclusive: a token reads itself, too."""
    anchors, past = anchor.SCHEMES[scheme], np.tri(chunk, k=0 if inclusive else -1, dtype=bool)
    if anchors.dyadic:
        return past
    formed = np.zeros_like(past)
    for tile in anchor.tiles(scheme, chunk):
        masked = tile.anchor is None and (anchors.masks[0] if mask == RIGHT else mask) == "before"
        formed[tile.rows, tile.keys] = past[tile.rows, tile.keys] if masked else True
    return formed


@functools.lru_cache(maxsize=64)
def _exact(scheme: str, chunk: int) -> np.ndarray:
    """Return the pairs without factors, as e^x is taken of the decay between both tokens, boolean [chunk, chunk]."""
    exact = np.zeros((chunk, chunk), bool)
    if not anchor.SCHEMES[scheme].dyadic:
        for tile in anchor.tiles(scheme, chunk):
            exact[tile.rows, tile.keys] = tile.anchor is None
    return exact


@functools.lru_cache(maxsize=64)
def _limit(scheme: str, chunk: int, number_format: torch.dtype) -> np.ndarray:
    """Return ln of the largest finite factor of each pair, [chunk, chunk]: of float32 for exact differences and the
    dyadic scheme, which compute in float32, else of `number_format`."""
    dyadic = anchor.SCHEMES[scheme].dyadic
    return np.where(dyadic | _exact(scheme, chunk), LN_MAX[torch.float32], LN_MAX[number_format])


def _infinite(op, x, exponents, limit, chunk, index) -> tuple[np.ndarray, np.ndarray]:
    """Return the queries whose factor is infinite, and the keys whose factor, or factor times key, is: [chunk] each."""
    on_query, on_key = (each.numpy() for each in exponents)
    size = torch.stack([x[name][0, :, 0].abs().amax(-1).float() for name in OPERATORS[op].keys]).amax(0)
    size = size[index * chunk :][:chunk].clamp(min=1).log().numpy()
    size = np.pad(size, (0, chunk - len(size)))
    return (on_query > limit).any(1), ((on_key + size > limit) & (on_key > 0)).any(0)


def _chunk_shown(shown, decay: str, chunk: int, at: int) -> int:
    """Return the index of the first chunk with a non-finite o, else with a non-finite gradient, else of token `at`.

    shown: tensors by name. decay: the decay's name; its gradient does not count, as its sums carry a NaN back to the
    first token. In RWKV7 and GSA a NaN in o reaches earlier chunks by the state's gradient, so o counts first."""
    gradients = [name for name, x in shown.items() if x.dim() == 4 and name not in ("o", f"d{decay}")]
    for names in (["o"], gradients):
        bad = torch.stack([~shown[name].isfinite().all(-1)[0, :, 0] for name in names]).any(0)
        if bad.any():
            return int(bad.nonzero()[0, 0]) // chunk
    return at // chunk


def _right(errors: dict[str, float], which: str | int) -> str:
    """Return a sentence on how many digits of the finite tensors are right. errors: relative L2 error by tensor. which:
    "all" if every tensor is finite, else the number of finite tensors, 1 or 2 for several."""
    worst = max(errors, key=errors.get)
    names = {"names": listed(list(errors)), "worst": worst}
    if errors[worst] > 0.1:  # infinite where the truth is 0
        off = WORDS.say("off", errors[worst] < math.inf, share=min(errors[worst], 1e9))
        return WORDS.say("finite", which, off=off, **names)
    digits = math.floor(-math.log10(errors[worst])) if errors[worst] else 0
    return WORDS.say("fine", which, right=WORDS.say("right", digits=digits), **names)


def _shares(bad: dict[str, torch.Tensor]) -> str:
    """Return a sentence on the share of NaN and of inf in each non-finite tensor, and the first token that has one."""
    kinds = []
    for kind, is_kind in (("NaN", torch.isnan), ("inf", torch.isinf)):
        alike: dict[tuple[str, int], list[str]] = {}  # names by share and first token
        for name, x in bad.items():
            hits = is_kind(x)
            if hits.any():
                first = int(hits.any(-1)[0, :, 0].nonzero()[0, 0]) if x.dim() == 4 and not hits.all() else 0
                alike.setdefault((percent(hits.double().mean().item()), first), []).append(name)
        parts = [
            WORDS.say("all of" if share == "100%" else "share", share=share, names=listed(names))
            + (WORDS.say("from", t=first) if first else "")
            for (share, first), names in alike.items()
        ]
        if parts:
            kinds.append(WORDS.say("kinds", kind, shares=listed(parts)))
    text = WORDS["also"].join(kinds)
    starts_with_name = text.startswith(tuple(bad))  # which keeps its lower case
    return WORDS.say("sentence", said=text if starts_with_name else text[0].upper() + text[1:])


def bound_words(op: str) -> str:
    """Return a sentence with the strongest decay that an operator's own parametrization allows; "" without a bound."""
    of = OPERATORS[op]
    if of.strongest == -math.inf:
        return ""
    return WORDS.say("bound", op=of.label, which=of.decay, bound=-of.strongest)


def _law(onsets: dict[str, Onset], which: str, at: int | None) -> str:
    """Return a sentence on which tensors are predicted to fail first, at which |log decay|, and where one did."""
    laws = {name: onset.law for name, onset in onsets.items() if onset.law is not None}
    measured = min((onset.measured for onset in onsets.values() if onset.measured is not None), default=None)
    values = {
        "which": which,
        "knob": _along(at),
        "measured": WORDS["nothing"] if measured is None else number(measured),
    }
    if not laws:
        return WORDS.say("nothing breaks", **values)
    least = min(laws.values())
    names = [name for name, law in laws.items() if law <= least * (1 + SAME)]
    count = "all" if len(names) == len(onsets) else min(len(names), 2)
    return WORDS.say("first", count, names=listed(names), law=least, **values)


def _along(at: int | None) -> str:
    return say("per token") if at is None else WORDS.say("of token", at=at)


def _value(result, cell: Cell, op: str) -> str:
    """Return a line with one value of a tensor as computed and its float64 truth."""
    name, at = cell.map, (0, cell.row, 0, cell.column)
    got, true = (result[which][name][at].item() for which in ("tensors", "exact"))
    return WORDS.say("value", name=name, t=cell.row, column=tensors(op)[name], c=cell.column, got=got, true=true)


def decay_explorer(
    op: str = "rwkv6", show: Iterable[str] | None = None, *, language: str | None = None, **settings
) -> DecayExplorer:
    """Return a panel that computes an operator in chunks at one decay and shows where NaN begins, as predicted
    from the exponents and as measured. The anchor scheme chooses the exponents' reference point.

    op: an operator of `flakit.cases.anchor.OPERATORS`. show: names of the knobs on view, default decay, spike
        and scheme; the others are folded under "more". settings: starting values of the knobs; an unknown name raises
        TypeError, a bad value ValueError:
        decay: natural-log decay <= 0 of every token, 0 and -inf included.
        query: whose exponents the upper maps show, "r" or for RWKV7 also "a".
        T: tokens, 1 … 256. chunk: tokens per chunk, 16 … 128.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right", the correct one.
        spike: natural-log decay of token `at` alone, or "none".
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> decay_explorer(decay=0.0, scheme="first-row", spike=-88.8, at=16)
    """
    with speaking(language):
        return DecayExplorer(op, show, **settings)
