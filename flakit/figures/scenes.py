"""What the state stepper draws for each operator: its equations as rows of matrices, forward and backward.

Arrays have the names of the fields of the steps that the operator's `reference.steps` yields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..language import label, number, say

Formula = tuple[str, str]
"""A formula with symbols, and the same formula with numbers."""


@dataclass(frozen=True)
class Block:
    """A matrix and the vectors beside it, by name: `left` and `top` are its inputs, `right` and `bottom` its outputs.

    border: for a matrix made of two tables side by side, an array with as many columns as the first table."""

    matrix: str
    title: str
    sign: str = ""  # what joins it to the previous block
    left: str | None = None
    top: str | None = None
    right: str | None = None
    bottom: str | None = None
    border: str | None = None


class Row:
    """One equation, drawn as a row of blocks below its title `words`."""

    def __init__(self, words: str, equation: str, *blocks: Block):
        self.words, self.equation, self.blocks = words, equation, blocks


@dataclass(frozen=True)
class Scene:
    """What the state stepper draws for one operator.

    forward, backward: the equations of each pass.
    groups: matrices that share a colour scale, by the label of the scale.
    decay: the vector of the shares that survive a step; decays: what each of its entries belongs to.
    followed: per pass, the matrix whose RMS is drawn over time, and the title of that plot.
    labels: of vectors, where the label is not the name with an index t.
    words: names in a readout, where they differ from the arrays' own.
    axes: of every array, a letter per axis; "*" for an axis that no other array has.
    terms: each array as a sum of products of other arrays, by their names ("decay state_before + k v"; "-" is a factor
        of -1), summed over every axis that it lacks; or a function that formats it for a frame and a cell.
    derived: functions that compute from a backward step's arrays those that are no such sums."""

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]
    groups: Mapping[str, tuple[str, ...]]
    decay: str
    followed: Mapping[str, tuple[str, str]]
    axes: Mapping[str, str]
    terms: Mapping[str, str | Callable[[Mapping[str, np.ndarray], tuple[int, ...]], Formula]]
    decays: str = "row of the state"
    labels: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[dict], np.ndarray]] = field(default_factory=dict)

    def label(self, name: str) -> str:
        return self.labels.get(name, f"${name}_t$")

    def word(self, name: str) -> str:
        return label(self.words.get(name, name))

    def outputs(self, which: str) -> tuple[str, ...]:
        """Return the names of the result vectors of a step of a pass; which: "forward" or "backward"."""
        blocks = [block for row in getattr(self, which) for block in row.blocks]
        return tuple(name for block in blocks for name in (block.right, block.bottom) if name)

    def symbol(self, name: str, t: int) -> str:
        """Return an array's symbol with the index of its token, t or t - 1."""
        if name in ("scale", "u"):
            return label(name)
        return f"{self.word(name)}_{t - name.endswith('_before')}"

    def complete(self, frame: dict[str, np.ndarray]) -> None:
        """Add to a frame, the arrays of a step by name, in place, those that it lacks and `terms` defines as sums."""
        arrays = {"-": np.float32(-1), **frame}
        for name, terms in self.terms.items():
            products = [] if name in frame or callable(terms) else [term.split() for term in terms.split(" + ")]
            if products and arrays.keys() >= {x for factors in products for x in factors}:
                axes = [",".join(self.axes.get(x, "") for x in factors) for factors in products]
                values = [[arrays[x] for x in factors] for factors in products]
                sums = (np.einsum(f"{each}->{self.axes[name]}", *of) for each, of in zip(axes, values, strict=True))
                frame[name] = arrays[name] = sum(sums)

    @np.errstate(all="ignore")  # a state may overflow
    def arithmetic(self, frame: Mapping[str, np.ndarray], name: str, cell: tuple[int, ...], t: int) -> Formula | None:
        """Return the formula of a cell of the array `name`, with symbols and with numbers; None for an input of step t.

        A sum over an axis shows its two largest products, and how many more there are."""
        terms = self.terms.get(name)
        if terms is None or callable(terms):
            return terms and terms(frame, cell)
        terms = [term.split() for term in terms.split(" + ")]
        here = dict(zip(self.axes[name], cell, strict=True))
        sums = sum(any(set(self.axes.get(x, "")) - set(here) for x in term) for term in terms)
        formulas, numbers = [], []
        for term in terms:
            sign, factors = ("- ", term[1:]) if term[0] == "-" else ("+ ", term)
            outer = [x for x in factors if set(self.axes.get(x, "")) <= set(here)]
            inner = [x for x in factors if x not in outer]
            words = [self.symbol(x, t) for x in outer], [self.symbol(x, t) for x in inner]
            formulas.append(sign + " ".join([*words[0], *(["Σ", *words[1]] if inner else [])]))
            shown = [number(_entries(frame[x], self.axes.get(x, ""), here), 3) for x in outer]
            if inner:
                arrays = [_entries(frame[x], self.axes[x], here) for x in inner]
                total = np.prod(np.broadcast_arrays(*arrays), axis=0).sum()
                products = _products(arrays) if sums == 1 else number(total, 3)
                shown.append(f"({products})" if outer and sums == 1 else products)
            numbers.append(sign + " · ".join(shown))
        return " ".join(formulas).removeprefix("+ "), " ".join(numbers).removeprefix("+ ")


def _entries(x: np.ndarray, axes: str, here: Mapping[str, int]) -> np.ndarray:
    """Return an array's entries at a cell: a number, or one per index of the axis that is summed over."""
    return np.asarray(x)[tuple(here.get(axis, slice(None)) for axis in axes)]


def _products(arrays: list[np.ndarray]) -> str:
    arrays = [np.float64(x) for x in arrays]
    sizes = np.abs(np.prod(arrays, axis=0))
    sizes[np.isnan(sizes)] = np.inf
    largest = sorted(np.argsort(-sizes, kind="stable")[:2])
    words = " + ".join(" · ".join(number(x[n], 3) for x in arrays) for n in largest)
    more = sizes.size - len(largest)
    return words + say(" + {more} smaller").format(more=more) if more else words


def _axes(**names: str) -> dict[str, str]:
    """Return the axes of every array by name, from the names of the arrays that have the same axes ("_" stands for
    "*")."""
    return {name: axes.replace("_", "*") for axes, group in names.items() for name in group.split()}


def _softmax(frame: Mapping[str, np.ndarray], cell: tuple[int, ...]) -> Formula:
    z = np.float64(frame["scores"])
    total = z.max() + np.log(np.exp(z - z.max()).sum())
    return "e^z / Σ e^z", f"e^({number(z[cell])} - {number(total)})"


def _softmax_gradient(frame: Mapping[str, np.ndarray], cell: tuple[int, ...]) -> Formula:
    p, dp = np.float64(frame["p"]), np.float64(frame["dp"])
    mean = float((p * dp).sum())
    return "p (dp - Σ p dp)", f"{number(p[cell])} · ({number(dp[cell])} - {number(mean)})"


def _passed_slots(frame: Mapping[str, np.ndarray], cell: tuple[int, ...]) -> Formula:
    """Format a cell of "passed", whose columns are first those of a slot's values, then those of its keys."""
    slot, column = cell
    V = frame["hv_before"].shape[1]
    if column < V:
        formula, factors = "e^g hv Dv", (frame["hv_before"][slot, column], frame["dhv"][slot, column])
    else:
        formula, factors = "e^g hk Dk", (frame["hk_before"][column - V, slot], frame["dhk"][column - V, slot])
    return formula, " · ".join(number(x) for x in (frame["decay"][slot], *factors))


# Of the operators with one state.
_WORDS = {"state": "S", "state_before": "S", "dstate": "D", "dstate_before": "D"}
_WORDS |= {"decay": "e^w", "kv": "written", "passed": "product"}
_FOLLOWED = {
    "forward": ("state", "Size of the state $S_t$"),
    "backward": ("dstate", "Size of $D_t$, walked from\nright to left"),
}

SCENES: dict[str, Scene] = {
    "rwkv6": Scene(
        forward=(
            Row(
                "Read, before the token is written",
                r"$o_t = scale \cdot r_t^\top\,(S_{t-1} + diag(u)\,k_t v_t^\top)$",
                Block("state_before", r"state so far $S_{t-1}$"),
                Block("bonus", r"bonus $(u\,k_t)\,v_t^\top$", "+", left="uk", top="v"),
                Block("read", r"what $r_t$ reads", "=", left="r", bottom="o"),
            ),
            Row(
                "Write",
                r"$S_t = diag(e^{w_t})\,S_{t-1} + k_t v_t^\top$",
                Block("kept", r"kept $e^{w_t} S_{t-1}$", left="decay"),
                Block("kv", r"written $k_t v_t^\top$", "+", left="k", top="v"),
                Block("state", r"new state $S_t$", "="),
            ),
        ),
        backward=(
            Row(
                "Gradients at t",
                r"$R_t = S_{t-1} + diag(u)\,k_t v_t^\top$,   $D_t = dS_t$, from all after $t$",
                Block("read", r"$dr_t = scale \cdot R_t\,do_t$", top="do", right="dr"),
                Block("passed", r"$dw_t$: rows of $e^{w_t} S_{t-1}{\odot}D_t$", right="dw"),
                Block(
                    "dstate", r"$dk_t{=}D_t v_t$, $dv_t{=}D_t^\top k_t$ + bonus", left="k", top="v", right="dk",
                    bottom="dv",
                ),
            ),
            Row(
                "One step back",
                r"$D_{t-1} = diag(e^{w_t})\,D_t + scale \cdot r_t\,do_t^\top$",
                Block("dkept", r"kept $e^{w_t} D_t$", left="decay"),
                Block("dread", r"from the read", "+", left="r", top="do"),
                Block("dstate_before", r"handed on $D_{t-1}$", "="),
            ),
        ),
        groups={
            "colours: S, read, kept, written": ("state_before", "bonus", "read", "kept", "kv", "state"),
            r"colours: $e^{w_t} S_{t-1} \odot D_t$": ("passed",),
            "colours: D, kept, from the read": ("dstate", "dkept", "dread", "dstate_before"),
        },
        decay="decay",
        followed=_FOLLOWED,
        labels={"decay": "$e^{w_t}$", "uk": r"$u\,k_t$"},
        words=_WORDS | {"uk": "u k", "dkept": "kept", "dread": "from the read"},
        axes=_axes(
            K="r k u uk w decay dr dk dw", V="v o do dv",
            KV="kv state_before bonus read kept state dstate dstate_before passed dkept dread",
        ),
        terms={
            "uk": "u k",
            "bonus": "u k v",
            "read": "state_before + u k v",
            "o": "scale r read",
            "kept": "decay state_before",
            "kv": "k v",
            "state": "decay state_before + k v",
            "dr": "scale read do",
            "passed": "decay state_before dstate",
            "dw": "decay state_before dstate",
            "dk": "dstate v + scale r u do v",
            "dv": "dstate k + scale r u k do",
            "dkept": "decay dstate",
            "dread": "scale r do",
            "dstate_before": "decay dstate + scale r do",
        },
    ),
    "rwkv7": Scene(
        forward=(
            Row(
                "Look up, fade, edit",
                r"$f_t = a_t^\top S_{t-1}$,   $S_t = diag(e^{w_t})\,S_{t-1} + b_t f_t^\top + k_t v_t^\top$",
                Block("state_before", r"$a_t$ looks up $S_{t-1}$, finds $f_t$", left="a", bottom="removed"),
                Block("kept", r"kept $e^{w_t} S_{t-1}$", left="decay"),
                Block("edit", r"edit $b_t f_t^\top$", "+", left="b", top="removed"),
            ),
            Row(
                "Write, then read",
                r"$o_t = scale \cdot r_t^\top S_t$",
                Block("kv", r"+ written $k_t v_t^\top$", left="k", top="v"),
                Block("state", r"$r_t$ reads the new $S_t$", "=", left="r", bottom="o"),
                Block("change", r"in all: $S_t - S_{t-1}$"),
            ),
        ),
        backward=(
            Row(
                "Gradients at t",
                r"$D_t = dS_t$, the read at $t$ included",
                Block("state", r"$dr_t = scale \cdot S_t\,do_t$", top="do", right="dr"),
                Block("passed", r"$dw_t$: rows of $e^{w_t} S_{t-1}{\odot}D_t$", right="dw"),
                Block(
                    "dstate", r"$dk_t = D_t v_t$, $dv_t = D_t^\top k_t$", left="k", top="v", right="dk", bottom="dv"
                ),
            ),
            Row(
                "Through the edit, one step back",
                r"$D_{t-1} = diag(e^{w_t})\,D_t + a_t\,df_t^\top$",
                Block(
                    "dstate", r"$db_t = D_t f_t$, $df_t = D_t^\top b_t$", left="b", top="removed", right="db",
                    bottom="dremoved",
                ),
                Block("state_before", r"$da_t = S_{t-1}\,df_t$", top="dremoved", right="da"),
                Block("dstate_before", r"handed on $D_{t-1}$", left="a", top="dremoved"),
            ),
        ),
        groups={
            "colours: S, kept, written": ("state_before", "kept", "kv", "state", "change"),
            "colours: the edit": ("edit",),
            r"colours: $e^{w_t} S_{t-1} \odot D_t$": ("passed",),
            "colours: D": ("dstate", "dstate_before"),
        },
        decay="decay",
        followed=_FOLLOWED,
        labels={"decay": "$e^{w_t}$", "removed": "$f_t$", "dremoved": "$df_t$"},
        words=_WORDS | {"removed": "f", "dremoved": "df"},
        axes=_axes(
            K="r k w a b decay dr dk dw da db", V="v o do dv removed dremoved",
            KV="kv state_before kept edit state change dstate dstate_before passed",
        ),
        terms={
            "removed": "a state_before",
            "kept": "decay state_before",
            "edit": "b removed",
            "kv": "k v",
            "state": "decay state_before + b removed + k v",
            "change": "state + - state_before",
            "o": "scale r state",
            "dr": "scale state do",
            "passed": "decay state_before dstate",
            "dw": "decay state_before dstate",
            "dk": "dstate v",
            "dv": "dstate k",
            "db": "dstate removed",
            "dremoved": "dstate b",
            "da": "state_before dremoved",
            "dstate_before": "decay dstate + a dremoved",
        },
    ),
    "gsa": Scene(
        forward=(
            Row(
                "First pass: which slots does the query ask for?",
                r"$z_t = scale \cdot q_t^\top hk_t$",
                Block("hk_kept", r"kept $hk_{t-1}\,diag(e^{g_t})$", top="decay"),
                Block("ks", r"written $k_t s_t^\top$", "+", left="k", top="s"),
                Block("hk", r"$q_t$ asks the slots' keys $hk_t$", "=", left="q", bottom="scores"),
            ),
            Row(
                "Second pass: what do they hold?",
                r"$p_t = softmax(z_t)$,   $o_t = p_t^\top hv_t$",
                Block("hv_kept", r"kept $diag(e^{g_t})\,hv_{t-1}$", left="decay"),
                Block("sv", r"written $s_t v_t^\top$", "+", left="s", top="v"),
                Block("hv", r"$p_t$ mixes their values $hv_t$", "=", left="p", bottom="o"),
            ),
        ),
        backward=(
            Row(
                "Second pass, and the gate",
                r"$Dv_t = dhv_t$, $Dk_t = dhk_t$, the reads at $t$ included",
                Block("hv", r"$dp_t = hv_t\,do_t$", top="do", right="dp"),
                Block(
                    "dhv", r"$dv_t$; $ds_t = Dv_t v_t + Dk_t^\top k_t$", left="s", top="v", right="ds", bottom="dv"
                ),
                Block("passed", r"$dg_t$: $e^{g_t}hv{\odot}Dv$ | $hk{\odot}Dk$", right="dg", border="hv_before"),
            ),
            Row(
                "First pass, one step back",
                r"$dz_t = p_t\,(dp_t - p_t^\top dp_t)$",
                Block("hk", r"$dq_t = scale \cdot hk_t\,dz_t$", top="dscores", right="dq"),
                Block("dhk", r"$dk_t = Dk_t\,s_t$", top="s", right="dk"),
                Block("dhk_before", r"handed on $Dk_t\,diag(e^{g_t})$", top="decay"),
            ),
        ),
        # A row per slot: its values beside its keys.
        derived={"passed": lambda f: np.concatenate((f["hv_kept"] * f["dhv"], (f["hk_kept"] * f["dhk"]).T), 1)},
        groups={
            "colours: hk, hv": ("hk_kept", "ks", "hk", "hv_kept", "sv", "hv"),
            r"colours: $hv \odot Dv$, $hk \odot Dk$": ("passed",),
            "colours: Dk, Dv": ("dhk", "dhk_before", "dhv"),
        },
        decay="decay",
        decays="slot",
        followed={
            "forward": ("hv", "Size of the slots' values $hv_t$"),
            "backward": ("dhv", "Size of $Dv_t$, walked from\nright to left"),
        },
        labels={"decay": "$e^{g_t}$", "scores": "$z_t$", "dscores": "$dz_t$"},
        words={
            "scores": "z", "dscores": "dz", "hk_before": "hk", "hv_before": "hv", "hk_kept": "kept",
            "hv_kept": "kept", "ks": "written", "sv": "written", "passed": "product", "dhk": "Dk", "dhv": "Dv",
            "dhk_before": "Dk", "decay": "e^g",
        },
        axes=_axes(
            K="q k dq dk", V="v o do dv", M="s g decay scores p ds dg dp dscores",
            KM="hk_before hk_kept ks hk dhk dhk_before", MV="hv_before hv_kept sv hv dhv dhv_before", M_="passed",
        ),
        terms={
            "hk_kept": "hk_before decay",
            "ks": "k s",
            "hk": "hk_before decay + k s",
            "scores": "scale q hk",
            "hv_kept": "decay hv_before",
            "sv": "s v",
            "hv": "decay hv_before + s v",
            "p": _softmax,
            "o": "p hv",
            "dp": "hv do",
            "dscores": _softmax_gradient,
            "dv": "dhv s",
            "ds": "dhv v + dhk k",
            "passed": _passed_slots,
            "dg": "decay hv_before dhv + decay hk_before dhk",
            "dq": "scale hk dscores",
            "dk": "dhk s",
            "dhk_before": "dhk decay",
        },
    ),
}  # fmt: skip
