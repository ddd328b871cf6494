"""The panel that follows one infinite factor of a key through a chunk, step by step, until a whole gradient is NaN."""

import functools
import html
import itertools
import math
import re
from collections.abc import Mapping

import ipywidgets as widgets
import numpy as np
import torch

from ..cases import infinity as case
from ..cases.laws import LN_MAX
from ..figures import Cell, style
from ..figures.infinity import CHUNKS, LIT, LossFigure, WayFigure, rounded
from ..language import Words, speaking
from ..numerics.words import percent
from . import knobs
from .base import Panel, Player

C, K = 8, 4
ROW = 1  # the row of dr whose sum the panel shows
KERNEL_CHUNK, KERNEL_DECAY = 64, -1.39  # a kernel's chunk, and a decay just past 88.72 / 64
SECONDS = 5  # per step while playing: time to read a sentence
END = LN_MAX[torch.float32]
_SMALLEST, _NORMAL = (math.log(torch.finfo(torch.float32).smallest_normal * x) for x in (2**-23, 1))

STEPS = ("key", "read", "pair", "all", "mask", "row", "dA", "dr", "loss")

FORWARD = (
    ("o<sub>i</sub> = Σ<sub>j</sub>", ("row",)),
    ("mask<sub>ij</sub>", ("mask",)),
    ("( r<sub>i</sub>", ("all",)),
    ("e<sup>ge<sub>i</sub></sup>", ("read", "pair", "all")),
    ("·", ("all",)),
    ("k<sub>j</sub>", ("all",)),
    ("e<sup>−gi<sub>j</sub></sup>", ("key", "pair", "all")),
    (")", ("all",)),
    ("v<sub>j</sub>", ("row",)),
)
BACKWARD = (
    ("dr<sub>i</sub> = e<sup>ge<sub>i</sub></sup>", ()),
    ("Σ<sub>j</sub>", ("dr",)),
    ("dA<sub>ij</sub>", ("dA", "dr")),
    ("·", ("dr",)),
    ("k<sub>j</sub>", ("dr",)),
    ("e<sup>−gi<sub>j</sub></sup>", ("dr", "loss")),
)
"""The formulas of both passes as (HTML, names of the steps that highlight this term) for each term."""

WORDS = Words() | {
    "symbols forward": "r: a token's query, scaled; k, v: its key and value; o: its output; w: the decay, a natural "
    "logarithm, one for all here; ge_i: w added up over the tokens before i; gi_j: up to and with j. The mask comes "
    "last: 0 unless j < i (RWKV6 adds a token's own key by its bonus u)",
    "symbols backward": "do, dr: the gradients of o and r; dA_ij: that of the score of pair (i, j), do_i · v_j, "
    "scaled and masked; w: the decay, a natural logarithm; ge_i: w added up over the tokens before i; gi_j: up to and "
    "with j",
    "key": "These {C} tokens are one chunk. Token i sees an earlier key j faded by e^(w (i−j−1)), the weight of the "
    "pair. One product makes all weights at once, from a factor on r and one on k. Key {j}, {place}, needs "
    "e^({tokens} · {decay}) = e^{up}: {fate}",
    "place": {True: "the last of {C}", False: "number {tokens} of {C}"},
    "fate": {True: "past float32's end e^{end}, so inf{others}.", False: "below float32's end e^{end}."},
    "others": {0: "", 1: " (so is key {keys})", 2: " (so are keys {keys})"},
    "read": "Token {i}, the next one, reads key {j}. Its own factor, on r, is e^{down}: {size}.",
    "read, own": "Key {j} is the last: no token of this chunk reads it. The factor of token {i} itself, on r, is "
    "e^{down}: {size}.",
    "read, fine": "No token of this chunk reads the last key, so follow the one before from here on: token {i} reads "
    "key {j}. Its own factor, on r, is e^{down}: {size}.",
    "normal": "an ordinary number",
    "tiny": "tiny, but not zero (a GPU that flushes numbers below e^{normal} has 0 here, and 0 times inf would be NaN)",
    "zero": "float32's smallest number is e^{smallest}, so this factor becomes 0",
    "pair, fine": "Together the two are the weight of key {j} for token {i}, and it comes out right.",
    "pair, inf": "Together the two should make {true}. But any number above 0, however tiny, times inf is inf.",
    "pair, own": "Together the two would make {true}, larger than 1, for key {j} is not older than token {i}: a pair "
    "that must not count. But any number above 0, however tiny, times inf is inf.",
    "pair, nan": "Together the two should make {true}. But 0 times inf is NaN, not a number at all.",
    "all": "Now also times r and k, added up over {K} channels: the score. One product makes the scores of all {all} "
    "pairs, also of pairs that must not count. {fate}",
    "all, bad": "Each one in the column of an infinite key is spoilt{why}: {spoilt} scores.",
    "all, fine": "All are finite.",
    "why": {"zero": " (0 times inf is NaN)", "difference": " (inf − inf is NaN)", "": ""},
    "mask, some": "Only now the mask writes 0 over the {cut} pairs above the line, which must not count. Of "
    "{spoilt} spoilt scores, {left} below the line: {stay}.",
    "mask, none": "Only now the mask writes 0 over the {cut} pairs above the line, which must not count. All "
    "{spoilt} spoilt scores were among them: nothing bad is left to see.",
    "mask, fine": "Only now the mask writes 0 over the {cut} pairs above the line, which must not count.",
    "row, bad": "A row of the output adds up its scores times v. One {score} in it makes the sum {sum}: {rows} of "
    "{C} rows of o {are} lost.",
    "row, hidden": "A row of the output adds up its scores times v. All are finite now, so o is right, and a test that "
    "looks only at o finds no fault.",
    "row, fine": "A row of the output adds up its scores times v. All are finite, so o is right.",
    "dA": "On the way back, dA comes from do and v, not from the scores, and so is finite. It is masked too: exactly "
    "0 for each of the {cut} pairs above the line, which must change nothing in dr.",
    "dr, bad": "A row of dr adds up every key, the masked ones times their 0. Forward the mask overwrites what is "
    "spoilt; backward it multiplies it, and 0 times inf is not 0, it is NaN. Every row has such a pair, for instance "
    "row {row}.",
    "dr, fine": "A row of dr adds up every key, the masked ones times their 0: forward the mask overwrites, backward "
    "it multiplies. As long as every key's factor is finite that adds 0, and dr is right.",
    "loss": "From a decay w of -{first} on ({end}/{C}, the chunk's length) a key overflows that nobody reads: it "
    "costs {unread}. From -{second} on ({end}/{before}, one token less) also one that is read: it costs {heard}.",
    "all of": "all of {names}",
    "rows of": "{share} rows of {names}",
    "count": "{keys} {dr} of {C} rows of dr are lost.",
    "count, keys": {1: "1 of the {C} keys' factors is infinite.", 2: "{count} of the {C} keys' factors are infinite."},
    "count, fine": "No key's factor is infinite, and nothing of dr is lost.",
    "count, kernel": "Beside it a fixed example, a chunk of {chunk} at w = {decay}: {keys64} keys' factors is "
    "infinite, {dr64} rows of dr are lost. Its law is {end}/{chunk} = {law}.",
    "title key": "key j: its factor, on k",
    "title read": "token i:\nits factor,\non r",
    "title token": "token i",
    "title grid": "a cell for each pair (token i, key j)",
    "title pair": "token's factor · key's factor",
    "title all": "scores of all pairs, before the mask",
    "title mask": "scores, after the mask",
    "title row": "scores, after the mask",
    "title dA": "dA, the gradient of the scores",
    "title dr": "dA, the gradient of the scores",
    "result forward": "output o",
    "result backward": "gradient dr",
    "not yet": "{name}: not yet",
    "heading loss": "What is lost, of how many tokens",
    "arithmetic": "{made} (true: {true})",
    "term": "this term is {true}",
    "lost": "{name} in a {chunk}: NaN or infinite for {share} tokens",
    "score": "score ({i}, {j}) = {sum} = {score}",
    "left": {True: "{left} is", False: "{left} are"},
    "stay": {True: "it stays", False: "they stay"},
    "are": {True: "is", False: "are"},
    "and": " and ",
    "and also": ", and ",
    "of": "{n} of {all}",
    "no key": "none",
    "in the past": "pair ({i}, {j}) is below the line: {score} stays",
    "cut": "pair ({i}, {j}) is not below the line: {score} becomes 0",
    "chunk": "chunk of {C}, w = {decay}",
    "law": "{chunk}{fixed}\nlaw: |w| = {end}/{C} = {law}",
    "fixed": " (fixed)",
    "alt": "Step {step} of {steps}, decay {decay}: {title}. {sentence} Numbers printed in a grid of {C} tokens i, from "
    "above, by {C} keys j, from the left; infinite keys: {bad}.",
    "alt loss": "Step {step} of {steps}, decay {decay}: bars of what is lost, NaN or infinite. {shares}",
    "lost names": {"keys": "the keys' factors", "o": "output o", **{f"d{x}": f"gradient d{x}" for x in "vkrw"}},
}


class Infinity(Panel):
    """The panel of `infinity`. Its methods' `way` is a chunk of 8 tokens and 4 channels, computed by `case.follow`."""

    name = "infinity"
    presets = {
        "fine": {"decay": -10.5},
        "dr dies": {"decay": -11.5},
        "o dies too": {"decay": -13.5},
        "zero meets inf": {"decay": -15.5},
    }

    def __init__(self, show=None, **settings):
        names = list(WORDS["lost names"].values())
        self._figure, self._losses = WayFigure(C, K), LossFigure(WORDS["heading loss"], names)
        controls = {
            "decay": knobs.DecayKnob(-13.5, stops=_stops(), low=-16.0),
            "step": knobs.integer(1, 1, len(STEPS), "step"),
        }
        player = Player(len(STEPS) - 1, lambda place: self.set(step=place + 1), 1000 * SECONDS)
        super().__init__(controls, settings, alt="", show=show, player=player)
        self._side_by_side()

    def _side_by_side(self) -> None:
        """Place the readout to the right of the picture, or above it on a screen too narrow for both."""
        self.readout.layout = {"flex": "1 1 290px", "min_height": "197px", "width": "auto", "padding": "0 0 0 6px"}
        self._make_room()
        both = widgets.Box([self.readout, self._pictures])
        both.layout = {"flex_flow": "row-reverse wrap", "justify_content": "flex-end", "align_items": "flex-start"}
        children = [child for child in self.children if child is not self.readout]
        children[children.index(self._pictures)] = both
        self.children = children

    def _make_room(self) -> None:
        """Reserve the picture's width, or the full width if another picture is pinned beside it."""
        self._pictures.layout.flex = f"0 1 {self.canvas.pixels[0]}px" if self._pinned_setting is None else "1 1 100%"

    def pin(self) -> None:
        super().pin()
        self._make_room()

    def _size_readout(self) -> None:
        pass  # it is as high as the picture beside it

    def compute(self, decay, seed, **_) -> case.Way:
        return _follow(decay, C=C, K=K, seed=seed)

    def draw(self, way, *, decay, step, seed) -> None:
        self.player.show(step - 1)
        if STEPS[step - 1] == "loss":
            self.canvas = self._losses.canvas
            sizes, chunks, shares = self._lost(way, decay, seed)
            titles = [
                WORDS.say("law", chunk=chunk, C=size, end=f"{END:.2f}", law=f"{END / size:.4g}", fixed=fixed)
                for chunk, size, fixed in zip(chunks, sizes, ("", WORDS["fixed"]), strict=True)
            ]
            labels = [[_share(x, size) for x in each] for each, size in zip(shares, sizes, strict=True)]
            self._losses.update(titles, shares, labels)
        else:
            self.canvas = self._figure.canvas
            self._draw_way(way, STEPS[step - 1])

    def _lost(self, way: case.Way, decay: float, seed: int) -> tuple[list[int], list[str], list[list[float]]]:
        """Return, for this chunk and one of a kernel's size: lengths, captions, each tensor's non-finite share."""
        ways = {(C, decay): way, (KERNEL_CHUNK, KERNEL_DECAY): _kernel(seed)}
        chunks = [WORDS.say("chunk", C=size, decay=f"{w:g}") for size, w in ways]
        shares = [[each.lost[name] for name in WORDS["lost names"]] for each in ways.values()]
        return [size for size, _ in ways], chunks, shares

    def _draw_way(self, way: case.Way, step: str) -> None:
        computed, at, (i, j) = way.made, STEPS.index(step), way.cell
        back, last = step in ("dA", "dr"), C - 1
        if step == "key" and computed.key.isfinite().all():
            j = last
        pair = (i, j) if not back else (ROW, last)
        lit = {
            "key": {"key": (0, j)},
            "read": {"read": (i, 0)},
            "pair": {"key": (0, j), "read": (i, 0), "pairs": pair},
            "row": {"pairs": pair, "result": (i, 0)},
            "dr": {"pairs": pair, "key": (0, last), "result": (ROW, 0)},
        }.get(step, {"pairs": pair})
        centre = {"pair": computed.pairs, "all": computed.scores, "mask": computed.kept, "row": computed.kept}.get(step)
        if step == "pair":  # only the pair of the sentence; the next step shows all
            centre = np.ma.masked_all(centre.shape)
            centre[pair] = computed.pairs[pair].item()
        shown = {
            "key": computed.key,
            "read": computed.read if at else None,
            "pairs": computed.dA if back else centre,
            "result": {"row": computed.o, "dr": computed.dr}.get(step),
        }
        words = {"key": WORDS["title key"], "read": WORDS["title read" if at else "title token"]}
        words["pairs"] = WORDS[f"title {step}" if at > 1 else "title grid"]
        result = WORDS[f"result {'backward' if back else 'forward'}"]
        words["result"] = result if step in ("row", "dr") else WORDS.say("not yet", name=result)
        exponents = tuple(x.tolist() for x in way.exponents)
        self._figure.update(exponents=exponents, words=words, lit=lit, diagonal=at > 3, dim=step == "dA", **shown)

    # Words.

    def sentence(self, way: case.Way, step: str) -> str:
        """Return the sentence that explains a step at this decay. step: one of `STEPS`."""
        computed, true, (i, j) = way.made, way.true, way.cell
        down, up = (x.tolist() for x in way.exponents)
        bad = [n for n, x in enumerate(computed.key) if not x.isfinite()]
        values = {"end": f"{END:.2f}", "C": C, "i": i, "j": j, "down": f"{down[i]:.4g}", "up": f"{up[j]:.4g}"}
        values["cut"] = C * (C + 1) // 2
        if step == "key":
            return self._first(way, bad, values)
        if step == "read":
            size = _size(computed.read[i].item()).format(normal=f"{_NORMAL:.1f}", smallest=f"{_SMALLEST:.1f}")
            return WORDS.say("read, fine" if not bad else "read" if i > j else "read, own", size=size, **values)
        if step == "pair":
            pair = computed.pairs[i, j]
            kind = "fine" if pair.isfinite() else "nan" if pair.isnan() else "own" if i == j else "inf"
            return WORDS.say(f"pair, {kind}", true=_number(true.pairs[i, j]), **values)
        spoilt, left = (int((~x.isfinite()).sum()) for x in (computed.scores, computed.kept))
        if step == "all":
            fate = WORDS.say(f"all, {'bad' if spoilt else 'fine'}", spoilt=spoilt, why=WORDS["why"][_why(way, i, j)])
            return WORDS.say("all", all=C * C, K=K, fate=fate)
        if step == "mask":
            kind = "some" if left else "none" if spoilt else "fine"
            values |= {x: WORDS.say(x, left == 1, left=left) for x in ("left", "stay")}
            return WORDS.say(f"mask, {kind}", spoilt=spoilt, **values)
        if step == "row":
            rows = int((~computed.o.isfinite()).any(-1).sum())
            values |= {"score": _number(computed.kept[i, j]), "sum": _number(computed.o[i, 0])}
            values |= {"rows": rows, "are": WORDS["are"][rows == 1]}
            return WORDS.say(f"row, {'bad' if rows else 'hidden' if spoilt else 'fine'}", **values)
        if step == "dr":
            return WORDS.say(f"dr, {'fine' if computed.dr.isfinite().all() else 'bad'}", row=ROW)
        if step == "loss":
            first, second = (f"{END / n:.2f}" for n in (C, C - 1))
            unread, heard = (_follow(-1.001 * END / n, C=C, K=K).lost for n in (C, C - 1))
            new = {name: share for name, share in heard.items() if not unread[name]}
            values |= {"unread": _cost(unread), "heard": _cost(new)}
            return WORDS.say("loss", first=first, second=second, before=C - 1, **values)
        return WORDS.say(step, **values)

    def _first(self, way: case.Way, bad: list[int], values: dict) -> str:
        """Return the first step's sentence: one key's factor, and which others overflow. bad: those keys' indices."""
        j = way.cell[1] if bad else C - 1
        others = [str(n) for n in bad if n != j]
        others = WORDS.say("others", n=len(others), keys=WORDS["and"].join(others))
        values |= {"j": j, "tokens": j + 1, "up": f"{way.exponents[1][j].item():.4g}"}
        values["decay"] = f"{way.exponents[1][0].item():.4g}"
        values["place"] = WORDS.say("place", j == C - 1, **values)
        values["fate"] = WORDS.say("fate", bool(bad), others=others, **values)
        return WORDS.say("key", **values)

    def shown(self, way: case.Way, step: str) -> str:
        """Return a line with the highlighted cell's number in float32, and the true one; "" without one."""
        (i, j), last = way.cell, C - 1
        if step == "key":
            return _factor(way, "key", last if way.made.key.isfinite().all() else j)
        if step == "read":
            return _factor(way, "read", i)
        if step in ("dA", "dr"):
            i, j = ROW, last
        if step == "row":
            return _output(way, i, 0, j)
        return _CELLS[step](way, i, j) if step in _CELLS else ""

    def arithmetic(self, way: case.Way, cell: Cell, *, step, decay, seed, **_) -> str | None:
        """Return the arithmetic of a cell that holds a number, with these numbers; None for an empty cell."""
        name, i, j = STEPS[step - 1], cell.row, cell.column
        if name == "loss":
            n, row = CHUNKS.index(cell.map), cell.row
            sizes, chunks, shares = self._lost(way, decay, seed)
            words = list(WORDS["lost names"].values())[row]
            return WORDS.say("lost", name=words, chunk=chunks[n], share=_share(shares[n][row], sizes[n]))
        if not self._figure.printed(cell):
            return None
        if cell.map in ("key", "read"):
            return _factor(way, cell.map, max(i, j))
        if cell.map == "result":
            return _output(way, i, j, max(i - 1, 0)) if name == "row" else _gradient(way, i, j)
        return _CELLS[name](way, i, j)

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Highlight the query's row and the key's column in the other maps."""
        if cell.map in CHUNKS:
            return []
        row = None if cell.map == "key" else cell.row
        column = cell.column if cell.map in ("key", "pairs") else None
        maps = [("key", None, column), ("read", row, None), ("pairs", row, column), ("result", row, None)]
        return [each for each in maps if each[0] != cell.map and each[1:] != (None, None)]

    def count(self, way: case.Way, step: str, seed: int) -> str:
        """Return a sentence on how few keys are infinite and how many rows of dr they make non-finite."""
        count, rows = (int((~x.isfinite()).sum()) for x in (way.made.key, way.made.dr.sum(-1)))
        keys = WORDS.say("count, keys", count=count, C=C) if count else ""
        if step == "loss":
            kernel = {f"{name}64": _share(_kernel(seed).lost[name], KERNEL_CHUNK) for name in ("keys", "dr")}
            law = {"end": f"{END:.2f}", "law": f"{END / KERNEL_CHUNK:.4g}"}
            return WORDS.say("count, kernel", chunk=KERNEL_CHUNK, decay=KERNEL_DECAY, **law, **kernel)
        if not count:
            return WORDS["count, fine"]
        return WORDS.say("count", keys=keys, dr=rows, C=C) if step == "dr" else keys

    def alt_text(self, way: case.Way, *, decay: float, step: int, **_) -> str:
        name, values = STEPS[step - 1], {"step": step, "steps": len(STEPS), "decay": f"{decay:g}", "C": C}
        if name == "loss":
            shares = ", ".join(f"{words} {_share(way.lost[x], C)}" for x, words in WORDS["lost names"].items())
            return WORDS.say("alt loss", shares=shares, **values)
        bad = ", ".join(str(n) for n, x in enumerate(way.made.key) if not x.isfinite()) or WORDS["no key"]
        title, sentence = WORDS[f"title {name}"], self.sentence(way, name)
        return WORDS.say("alt", title=title, sentence=sentence, bad=bad, **values)

    def describe(self, way, *, step, seed, **_) -> str:
        name = STEPS[step - 1]
        lines = [_plain(_formula(name)), self.sentence(way, name), self.shown(way, name)]
        return "\n".join(line for line in (*lines, self.count(way, name, seed)) if line)

    def say(self, text: str) -> None:
        super().say(text)
        step = STEPS[self.knobs["step"].value - 1]
        symbols = _typeset(WORDS[f"symbols {'backward' if step in ('dA', 'dr', 'loss') else 'forward'}"])
        _, sentence, *rest = map(_typeset, text.split("\n"))
        bold = "font-family: monospace; font-weight: bold; margin: 5px 0"
        self.readout.value = (
            f'<div style="font-size: 115%">{_formula(step)}</div>'
            f'<div style="font-size: 85%; line-height: 1.25; opacity: 0.75">{symbols}</div>'
            f'<div style="margin: 5px 0">{sentence}</div>'
            + (f'<div style="{bold}">{rest[0]}</div>' if len(rest) == 2 else "")
            + f"<div>{rest[-1]}</div>"
        )

    def script(self, *, decay, seed, **_) -> str:
        return f"""from flakit.cases import infinity

way = infinity.follow({decay!r}, C={C}, K={K}, seed={seed})
i, j = way.cell
print("key factors", way.made.key)
print(f"read {{i}}, key {{j}}:", way.made.read[i], "*", way.made.key[j], "=", way.made.pairs[i, j])
print("true", way.true.pairs[i, j])
print("scores after the mask", way.made.kept)
print("o", way.made.o)
print("dA", way.made.dA)
print("dr", way.made.dr)
for name, share in way.lost.items():
    print(name, "lost", share)
"""


_follow = functools.lru_cache(maxsize=64)(case.follow)


def _kernel(seed: int) -> case.Way:
    return _follow(KERNEL_DECAY, C=KERNEL_CHUNK, K=K, seed=seed)


def _stops() -> set[float]:
    """Return the decay slider's stops: evenly spaced, and on both sides of every decay at which more breaks."""
    laws = [END / n for n in (C, C - 1, C - 2)] + [(-_SMALLEST + math.log(2)) / (C - 1)]
    near = {round(math.floor(100 * law) / 100 + by, 2) for law in laws for by in (-0.02, 0, 0.01, 0.03)}
    return {-x for x in near} | {-n / 10 for n in range(90, 161)}


def _size(factor: float) -> str:
    if factor == 0:
        return WORDS["zero"]
    return WORDS["tiny" if factor < torch.finfo(torch.float32).smallest_normal else "normal"]


def _number(x: torch.Tensor | float) -> str:
    """Format a number with three digits, very large or small ones with two; a tie is decided by the decimal digits."""
    x = float(x) + 0.0  # no -0
    if x != x:
        return "NaN"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return rounded(x, 3 if 0.01 <= abs(x) < 1000 else 2)


def _share(x: float, tokens: int) -> str:
    """Format a share of tokens as "3 of 8" or, if only some channels of one count, as a percentage."""
    return WORDS.say("of", n=round(x * tokens), all=tokens) if x * tokens == round(x * tokens) else percent(x)


def _cost(lost: Mapping[str, float]) -> str:
    """Return a phrase: which tensors are entirely non-finite, of which some rows. lost: that share by tensor."""
    names = {share: [name for name in case.TENSORS if lost.get(name) == share] for share in set(lost.values()) - {0}}
    parts = [
        WORDS.say("all of" if share == 1 else "rows of", share=_share(share, C), names=WORDS["and"].join(names[share]))
        for share in sorted(names, reverse=True)
        if names[share]
    ]
    return WORDS["and also"].join(parts)


def _why(way: case.Way, i: int, j: int) -> str:
    """Return how score (i, j) becomes NaN: "zero" by a product 0 · inf, "difference" by inf - inf, "" if it is not."""
    terms = way.operands["r"][i] * way.made.read[i] * way.made.scaled[j]
    return "zero" if terms.isnan().any() else "difference" if terms.sum().isnan() else ""


def _true(computed: str, true: torch.Tensor | float) -> str:
    return WORDS.say("arithmetic", made=computed, true=_number(true))


def _factor(way: case.Way, which: str, n: int) -> str:
    """Return a line with the factor of query n (which = "read") or of key n ("key"), computed and true."""
    exponent = way.exponents[which == "key"][n].item()
    return _true(f"e^{exponent:.4g} = {_number(getattr(way.made, which)[n])}", getattr(way.true, which)[n])


def _pair(way: case.Way, i: int, j: int) -> str:
    computed, (down, up) = way.made, way.exponents
    factors = f"{_number(computed.read[i])} · {_number(computed.key[j])} = {_number(computed.pairs[i, j])}"
    return _true(f"e^{down[i].item():.4g} · e^{up[j].item():.4g} = {factors}", way.true.pairs[i, j])


def _score(way: case.Way, i: int, j: int) -> str:
    terms = way.operands["r"][i] * way.made.read[i] * way.made.scaled[j]
    score = WORDS.say("score", i=i, j=j, sum=_sum(terms), score=_number(way.made.scores[i, j]))
    return _true(score, way.true.scores[i, j])


def _masked(way: case.Way, i: int, j: int) -> str:
    return WORDS.say("in the past" if j < i else "cut", i=i, j=j, score=_number(way.made.scores[i, j]))


def _output(way: case.Way, i: int, c: int, last: int) -> str:
    """Return a line with row i of o, channel c, by its terms of the keys last - 1 and last, and its true value."""
    computed, v = way.made, way.operands["v"]
    first = max(last - 1, 0)
    terms = " + ".join(f"{_number(computed.kept[i, n])} · {_number(v[n, c])}" for n in range(first, last + 1))
    before, after = "… + " * (first > 0), " + …" * (last < i - 1)
    return _true(f"o_{i} = {before}{terms}{after} = {_number(computed.o[i, c])}", way.true.o[i, c])


def _arriving(way: case.Way, i: int, j: int) -> str:
    return _true(f"dA ({i}, {j}) = {_number(way.made.dA[i, j])}", way.true.dA[i, j])


def _term(way: case.Way, i: int, j: int) -> str:
    """Return a line with key j's term in row i of dr, channel 0, computed and true."""
    computed, up = way.made, way.exponents[1][j].item()
    product = computed.dA[i, j] * computed.scaled[j, 0]
    factors = f"{_number(computed.dA[i, j])} · {_number(computed.scaled[j, 0])} = {_number(product)}"
    true = WORDS.say("term", true=_number(way.true.dA[i, j] * way.true.scaled[j, 0]))
    return WORDS.say("arithmetic", made=f"dA ({i}, {j}) · k_{j} e^{up:.4g} = {factors}", true=true)


def _gradient(way: case.Way, i: int, c: int) -> str:
    """Return a line with row i of dr, channel c, by its last two terms, and its true value."""
    computed = way.made
    terms = " + ".join(f"{_number(computed.dA[i, n])} · {_number(computed.scaled[n, c])}" for n in (C - 2, C - 1))
    exponent = way.exponents[0][i].item()
    return _true(f"dr_{i} = e^{exponent:.4g} · (… + {terms}) = {_number(computed.dr[i, c])}", way.true.dr[i, c])


_CELLS = {"pair": _pair, "all": _score, "mask": _masked, "row": _masked, "dA": _arriving, "dr": _term}
"""By step, the function (way, row, column) that returns the line about a cell of the square map."""


def _sum(terms: torch.Tensor) -> str:
    first, *others = (_number(x) for x in terms)
    return first + "".join(f" − {x[1:]}" if x.startswith("-") else f" + {x}" for x in others)


def _formula(step: str) -> str:
    """Return the formula of a step as HTML, with the step's own terms on the colour of the highlighted cell."""
    terms = BACKWARD if step in ("dA", "dr", "loss") else FORWARD
    look = (
        f"background: {LIT['edgecolor']}; color: white; border-radius: 3px; padding: 2px 3px 4px; display: inline-block"
    )
    parts = []
    for lit, group in itertools.groupby(terms, lambda term: step in term[1]):
        text = " ".join(text for text, _ in group)
        coloured = _LETTER.sub(lambda x: f'<span style="color: {style.letter(x[0])}">{x[0]}</span>', text)
        parts.append(f'<mark style="{look}">{text}</mark>' if lit else coloured)
    return " ".join(parts)


_LETTER = re.compile(r"(?<![A-Za-z])d?[rkv](?=<sub>)")
_INDEX = re.compile(r"(?<=[A-Za-z])_([a-z]{1,2}|\d+)\b")
_POWER = re.compile(r"(?<=\be)\^(?:\(((?:[^()]|\([^()]*\))*)\)|([-−]?\d+(?:\.\d+)?))")


def _typeset(text: str) -> str:
    """Escape text for HTML, with its indices as subscripts and its powers of e as superscripts, as in a formula."""
    return _POWER.sub(
        lambda power: f"<sup>{power[1] or power[2]}</sup>", _INDEX.sub(r"<sub>\1</sub>", html.escape(text))
    )


def _plain(formula: str) -> str:
    """Convert a formula from HTML to plain text, with the highlighted terms in brackets."""
    text = re.sub(r"</?span[^>]*>", "", re.sub(r"<mark[^>]*>(.*?)</mark>", r"[\1]", formula))
    return re.sub(r"<sup>(.*?)</sup>", r"^(\1)", re.sub(r"<sub>(.*?)</sub>", r"_\1", text))


def infinity(show=None, *, language: str | None = None, **settings) -> Infinity:
    """Return a panel that follows one infinite factor through a chunk, forward and backward, with every number printed.

    show: names of the knobs on view, default all but seed; the others are folded under "more".
    settings: starting values of the knobs: decay (natural logarithm, -16 … 0, the same for all tokens), step (1 … 9),
        seed. An unknown name raises TypeError, a bad value ValueError.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> infinity(decay=-11.5, step=8)
    """
    with speaking(language):
        return Infinity(show, **settings)
