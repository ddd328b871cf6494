"""Turn the decay up until a chunk breaks: the exponents, every tensor, the law beside the measurement."""

import functools
import math
from collections.abc import Iterable

import numpy as np
import torch

from ..cases import anchor
from ..cases.laws import LN_MAX
from ..figures.canvas import Cell
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

H, K = 1, 32
_READS = {op: OPERATORS[op].reads for op in anchor.OPERATORS}
_SPIKES = (-1, -3, -10, -30, -60, -80, -85, -87, -88, -88.5, -88.7, -88.8, -89, -90, -95, -100, -150, -500, -1e4)
_TOLERANCE = 1e-4  # of a measured onset

WORDS = Words() | {
    "knobs": {
        "op": "operator",
        "query": "exponents of",
        "decay": "decay",
        "T": "length T",
        "spike": "one token's",
        "at": "which token",
        "scheme": "anchor",
        "mask": "mask",
        "dtype": "dtype",
        "chunk": "chunk",
    },
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
    "read": "exponent on ${query}_i$",
    "key": "exponent on ${key}_j$",
    "paired": ("one exponent a pair", "no second one"),
    "knob": "|log decay| per token",
    "knob spike": "|log decay| of token {at}",
    "picture": {
        "token i": "token i of chunk",
        "token j": "token j of chunk",
        "token t": "token t",
        "onset": "where each tensor breaks",
        "law": "law",
        "measured": "measured",
        "now": "now",
        "never": "never",
        "magnitude": "magnitude",
        "fine": "fine",
        "lost": "{share} lost",
    },
    "and": " and ",
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
    "per token": "per token",
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
"""Everything the panel says."""

PRESETS = {
    "fine": {"decay": -1.33, "scheme": "none"},
    "first NaN": {"decay": -1.39, "scheme": "none"},
    "all NaN": {"decay": -1.5, "scheme": "none"},
    "bug A": {"decay": 0.0, "scheme": "first-row", "spike": -88.8, "at": 16},
}
PRESETS = {
    label: {"T": 128, "spike": NONE, "mask": RIGHT, "dtype": "float32", "chunk": 64, **setting}
    for label, setting in PRESETS.items()
}


class DecayExplorer(Panel):
    """One head of an operator, in chunks by an anchor scheme, at one decay for all tokens or a spike at one."""

    name = "decay-explorer"
    on_view = ("decay", "spike", "scheme")
    main = "decay"
    readout_lines = 3

    def __init__(self, op: str = "rwkv6", show: Iterable[str] | None = None, **settings):
        first, reads = next(iter(_READS)), {name: tuple(of)[0] for name, of in _READS.items()}
        made = {
            "op": knobs.operator_choice(first, _READS),
            "query": knobs.choice(reads[first], tuple(_READS[first]), ""),
            "decay": knobs.DecayKnob(-1.0),
            "T": knobs.integer(128, 1, 256, ""),
            "spike": knobs.DecayKnob(NONE, stops=_SPIKES, optional=True),
            "at": knobs.integer(16, 0, 255, ""),
            **scheme_knobs(),
            "chunk": knobs.choice(64, (16, 32, 64, 128), ""),
        }
        for name, knob in made.items():
            knob.description = WORDS["knobs"][name]
        own_options(self, made["op"], made["query"], _READS.get, reads)
        only_for(self, made["op"], made["query"], [name for name, of in _READS.items() if len(of) > 1])
        self.presets = {label: dict(setting) for label, setting in PRESETS.items()}
        self.when(made["op"], lambda _, name: self.presets["first NaN"].update(decay=_first_nan(name)))
        super().__init__(made, {"op": op, **settings}, alt=WORDS["alt"], show=show)

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
        self._stop_around(onsets, spike)
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

    def _stop_around(self, onsets: dict[str, Onset], spike: float | str) -> None:
        """Let the slider of the decay that the onsets are about stop on both sides of each."""
        spans = [[x for x in onset if x is not None] for onset in onsets.values()]
        stops = {-x for x in around(filter(None, spans), (1.0005, 1.008), (1.01, 1.02))}
        with self.held():
            self.knobs["decay"].dense(stops if spike == NONE else ())
            self.knobs["spike"].dense(stops if spike != NONE else ())

    def draw(self, result, *, op, query, decay, T, scheme, chunk, mask, spike, at, dtype, **_):
        first, anchors = result["index"] * chunk, anchor.SCHEMES[scheme]
        paired = anchors.whole and anchors.diagonal is None
        figure = self.figure(_figure, op)
        self.canvas = figure.canvas
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
        symbols = {"query": query, "key": OPERATORS[op].keys[0]}
        figure.update(
            title=tuple(part.format(**shown).replace("-", "\u2212") for part in title),
            factors=WORDS["paired"] if paired else tuple(_filled(WORDS[x], symbols) for x in ("read", "key")),
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
        errors = {name: found.l2 for name, found in result["errors"].items() if name not in bad}
        if not bad:
            lines = [_right(errors, "all")]
        else:
            sentence = WORDS["all broken"]
            if errors:
                sentence = WORDS.say("broken", min(len(bad), 2), names=_listed(bad)) + _right(
                    errors, min(len(errors), 2)
                )
            lines = [f"{sentence} {_shares({name: result['tensors'][name] for name in bad})}"]
        lines.append(_law(result["onsets"], OPERATORS[op].decay, None if spike == NONE else at))
        if bound := bound_words(op):
            lines[-1] += f" {bound}"
        return "\n".join(lines)

    def beside(self, cell):
        """A pair's cell lights up in the other maps of pairs, its two tokens in the tensors; a token everywhere."""
        of, chunk, maps = OPERATORS[self.setting["op"]], self.setting["chunk"], self.canvas.maps
        first = self.result["index"] * chunk
        if cell.map in ("read", "key"):
            found = [(name, cell.row, cell.column) for name in ("read", "key")]
            found += [(name, first + cell.row, None) for name in ("o", *(f"d{x}" for x in of.queries))]
            found += [(f"d{name}", first + cell.column, None) for name in of.written]
        elif cell.map == "onset":
            return []
        else:
            found = [(name, cell.row, None) for name, x in self.result["tensors"].items() if x.dim() == 4]
            if first <= cell.row < first + chunk:
                token = cell.row - first
                found += [("read", token, None), ("key", None, token)]
        return [
            (name, row, column)
            for name, row, column in found
            if name != cell.map and (row is None or row < maps[name][0])
        ]

    def arithmetic(self, result, cell, **setting) -> str:
        if cell.map == "onset":
            return self._onset_of(result, tuple(result["onsets"])[cell.row], **setting)
        if cell.map in result["tensors"]:
            return _value(result, cell, setting["op"])
        return self._pair(result, cell.row, cell.column, **setting)

    def _onset_of(self, result, name, *, op, decay, spike, at, **_) -> str:
        onset, fine = result["onsets"][name], result["tensors"][name].isfinite().all().item()
        verdict = WORDS["verdict"][fine]
        if onset == (None, None):
            return WORDS.say("no onset", name=name, verdict=verdict)
        law, measured = (WORDS["picture"]["never"] if x is None else number(x, 5) for x in onset)
        return WORDS.say("onset",
            name=name, which=OPERATORS[op].decay, law=law, measured=measured, verdict=verdict,
            knob=WORDS["per token"] if spike == NONE else WORDS.say("of token", at=at),
            now=-decay if spike == NONE else -spike,
        )  # fmt: skip

    def _pair(self, result, i, j, *, op, query, T, scheme, chunk, mask, dtype, **_) -> str:
        """Both factors as they are stored, their product, and what it should be."""
        x, y = (each[i, j] for each in result["factors"])
        if not result["formed"][i, j]:
            return WORDS.say("no pair", i=i, j=j)
        anchors, exact = anchor.SCHEMES[scheme], _exact(scheme, chunk)[i, j]
        stored = torch.float32 if anchors.dyadic else getattr(torch, dtype)
        on_query, on_key = (each.exp().to(torch.float32 if exact else stored).float() for each in (x, y))
        made = on_query if exact else on_query * on_key
        said = {"i": i, "j": j, "product": number(made.item(), 3)}
        said["exponents"] = f"e^{number(x.item())}" + ("" if exact else f" · e^{number(y.item())}")
        said["factors"] = "" if exact else f"{number(on_query.item(), 2)} · {number(on_key.item(), 2)} = "
        inclusive = _READS[op][query]
        made_of, first = result["inputs"], result["index"] * chunk
        if j <= i - (not inclusive):
            between = made_of[OPERATORS[op].decay][0, first + j + 1 : first + i + inclusive, 0, 0]
            text = WORDS.say("pair", true=between.double().sum().exp(), **said)
        else:
            mask = anchors.masks[0] if mask == RIGHT else mask
            after = WORDS.say("after", mask, zero=(made * 0).item())
            text = WORDS.say("masked", after=after, **said)
            if mask == "where" and not made.isfinite():
                text += WORDS.say("back", product=said["product"])
        if not exact and on_key.isfinite() and first + j < T:
            name = OPERATORS[op].keys[0]
            key = made_of[name][0, first + j, 0].float()
            operand = key[key.abs().argmax()]
            if not (operand * y.exp()).to(stored).isfinite():
                text += WORDS.say(
                    "operand",
                    operand=f"{name}_{j} = {number(operand.item(), 3)}",
                    factor=on_key,
                    made="inf",
                )
        return text

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


def _figure(op: str, width: float) -> DecayFigure:
    still = [name for name in tensors(op) if name != "o" and "T" not in OPERATORS[op].axes[name[1:]].split()]
    return DecayFigure(tensors(op), WORDS["picture"], still=still, width=width)


def _inputs(op, decay, T, spike, at, dtype, seed):
    x = inputs(op, T=T, H=H, K=K, decay=decay, dtype=getattr(torch, dtype), decay_dtype=torch.float32, seed=seed)
    if spike != NONE:
        if at >= T:
            raise ValueError(f"at: expected a token 0 … {T - 1} for the spike, got {at}")
        x[OPERATORS[op].decay][:, at] = spike
    return x


@functools.cache
def _first_nan(op: str) -> float:
    """A decay halfway between the law's first onset and that of o: something is broken, and o is right where it can."""
    law = anchor.limits("none", _inputs(op, -1.0, 128, NONE, 0, "float32", 0), op=op)
    return -math.ceil(50 * (min(law.values()) + law["o"])) / 100


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


@functools.lru_cache(maxsize=64)
def _formed(inclusive: bool, scheme: str, chunk: int, mask: str) -> np.ndarray:
    """The pairs for which a product is formed, [chunk, chunk]."""
    anchors, past = anchor.SCHEMES[scheme], np.tri(chunk, k=0 if inclusive else -1, dtype=bool)
    if anchors.dyadic:
        return past
    found = np.zeros_like(past)
    for tile in anchor.tiles(scheme, chunk):
        first = tile.anchor is None and (anchors.masks[0] if mask == RIGHT else mask) == "before"
        found[tile.rows, tile.keys] = past[tile.rows, tile.keys] if first else True
    return found


@functools.lru_cache(maxsize=64)
def _exact(scheme: str, chunk: int) -> np.ndarray:
    """The pairs that have one exponent, their difference, and no factor that is stored."""
    found = np.zeros((chunk, chunk), bool)
    if not anchor.SCHEMES[scheme].dyadic:
        for tile in anchor.tiles(scheme, chunk):
            found[tile.rows, tile.keys] = tile.anchor is None
    return found


@functools.lru_cache(maxsize=64)
def _limit(scheme: str, chunk: int, number_format: torch.dtype) -> np.ndarray:
    """ln of the largest number that each pair's factor can be; exact differences and dyadic products are float32."""
    dyadic = anchor.SCHEMES[scheme].dyadic
    return np.where(dyadic | _exact(scheme, chunk), LN_MAX[torch.float32], LN_MAX[number_format])


def _infinite(op, x, exponents, limit, chunk, index) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose read's factor overflows, and columns whose key's factor does, alone or with its key."""
    on_query, on_key = (each.numpy() for each in exponents)
    size = torch.stack([x[name][0, :, 0].abs().amax(-1).float() for name in OPERATORS[op].keys]).amax(0)
    size = size[index * chunk :][:chunk].clamp(min=1).log().numpy()
    size = np.pad(size, (0, chunk - len(size)))
    return (on_query > limit).any(1), ((on_key + size > limit) & (on_key > 0)).any(0)


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


def _listed(names: Iterable[str]) -> str:
    """a, b and c"""
    *others, last = names
    return WORDS["and"].join([", ".join(others), last]) if others else last


def _right(errors: dict[str, float], which: str | int) -> str:
    """To how many digits finite tensors are right; which: "all" of them, else 1 or 2 of those beside broken ones."""
    worst = max(errors, key=errors.get)
    said = {"names": _listed(errors), "worst": worst}
    if errors[worst] > 0.1:  # infinite where the truth is 0
        off = WORDS.say("off", errors[worst] < math.inf, share=min(errors[worst], 1e9))
        return WORDS.say("finite", which, off=off, **said)
    digits = math.floor(-math.log10(errors[worst])) if errors[worst] else 0
    right = WORDS.say("right", min(digits, 2), digits=digits)
    return WORDS.say("fine", which, right=right, **said)


def _shares(bad: dict[str, torch.Tensor]) -> str:
    """How much of each broken tensor is NaN, how much inf, and where that begins."""
    said = []
    for kind, hit in (("NaN", torch.isnan), ("inf", torch.isinf)):
        found: dict[tuple[str, int], list[str]] = {}
        for name, x in bad.items():
            hits = hit(x)
            if hits.any():
                first = int(hits.any(-1)[0, :, 0].nonzero()[0, 0]) if x.dim() == 4 and not hits.all() else 0
                found.setdefault((percent(hits.double().mean().item()), first), []).append(name)
        parts = [
            WORDS.say("all of" if share == "100%" else "share", share=share, names=_listed(names))
            + (WORDS.say("from", t=first) if first else "")
            for (share, first), names in found.items()
        ]
        if parts:
            said.append(WORDS.say("kinds", kind, shares=_listed(parts)))
    text = WORDS["also"].join(said)
    named = text.startswith(tuple(bad))  # a name is no word to be written large
    return WORDS.say("sentence", said=text if named else text[0].upper() + text[1:])


def bound_words(op: str) -> str:
    """How far an operator's own gate can go; "" where it has no bound."""
    of = OPERATORS[op]
    if of.strongest == -math.inf:
        return ""
    return WORDS.say("bound", op=of.label, which=of.decay, bound=-of.strongest)


def _law(onsets: dict[str, Onset], which: str, at: int | None) -> str:
    """The tensors that fail first by the law, and where the first one failed."""
    laws = {name: onset.law for name, onset in onsets.items() if onset.law is not None}
    measured = min((onset.measured for onset in onsets.values() if onset.measured is not None), default=None)
    said = {
        "which": which,
        "knob": WORDS["per token"] if at is None else WORDS.say("of token", at=at),
        "measured": WORDS["nothing"] if measured is None else number(measured),
    }
    if not laws:
        return WORDS.say("nothing breaks", **said)
    least = min(laws.values())
    names = [name for name, law in laws.items() if law <= least * (1 + SAME)]
    return WORDS.say(
        "first", "all" if len(names) == len(onsets) else min(len(names), 2), names=_listed(names), law=least, **said
    )


def _value(result, cell: Cell, op: str) -> str:
    """One value of a tensor beside its truth."""
    name, x = cell.map, result["tensors"][cell.map]
    at = (0, cell.row, 0, cell.column)
    got, true = x[at].item(), result["exact"][name][at].item()
    return WORDS.say(
        "value",
        name=name,
        t=cell.row,
        column=tensors(op)[name],
        c=cell.column,
        got=got,
        true=true,
    )


def _filled(text: str, symbols: dict[str, str]) -> str:
    for name, symbol in symbols.items():
        text = text.replace(f"{{{name}}}", symbol)
    return text


def decay_explorer(
    op: str = "rwkv6", show: Iterable[str] | None = None, *, language: str | None = None, **settings
) -> DecayExplorer:
    """Panel: chunked computation at one decay, by anchor scheme, with the onset of NaN by law and as measured.

    op: an operator of `flakit.numerics.operators.OPERATORS`. show: names of the knobs on view, default decay, spike
        and scheme; the others lie under "more". settings: starting values of the knobs:
        decay: natural-log decay <= 0 of every token, 0 and -inf included.
        query: whose exponents the upper maps show, of RWKV7 "r" or "a".
        T: tokens, 1 … 256. chunk: tokens a chunk, 16 … 128.
        scheme: one of `flakit.cases.anchor.SCHEMES`. mask: one of its `masks`, or "right".
        spike: natural-log decay of token `at` alone, or "none".
        dtype: "float32", "bfloat16" or "float16", of the inputs and of the stored factors. seed: of the inputs.
    language: of its words, "en" or "zh"; default: what flakit speaks, see `flakit.language`.

    >>> decay_explorer(decay=0.0, scheme="first-row", spike=-88.8, at=16)
    """
    with speaking(language):
        return DecayExplorer(op, show, **settings)
