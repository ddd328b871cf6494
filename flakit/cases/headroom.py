"""Headroom: how far the decays of a real model are from the laws of the casebook, kernel by kernel.

    print(flakit.headroom(w))                            # [B, T, H, K], natural-log decays <= 0
    flakit.headroom("decays.safetensors", "gsa").broken

A kernel that anchors a chunk's decay takes exponentials whose exponents are sums of decays; one of them above ln(max)
is an infinity, and then a NaN (`anchor`). Here the exponents are formed from the decays of a model, chunk by chunk and
in float64, no operator is run, and the largest is held against the limit: `margin` is what is left in natural-log
units, `factor` what all decays may still be multiplied with. Operands count as of order 1: others shift the limit
by ln |operand|, which is a percent or so of float32's and may be a fifth of float16's.

What no kernel sees is the gate that made the decays: w = -exp(x) has no gradient where w is -inf (`gate_gradient`).
`gate` counts such decays and says how far x is from there.
"""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..language import Words, say
from ..numerics.arguments import whole_number
from ..numerics.operators import Operator, operator
from ..numerics.table import Table
from ..numerics.words import number, padded
from ..ops.common.validation import check_offsets, check_packing
from . import padding
from .anchor import SCHEMES, Worst, law, worst
from .anchor.operators import OPERATORS
from .decay_files import checked
from .decay_files import layers as given_layers
from .device import on_cpu
from .laws import LN_MAX

WORDS = Words() | {
    "gone": {
        0: "Decays of this size are -inf in {dtype}",
        1: "1 decay is -inf",
        2: "{n} decays are -inf",
    },
    "no gradient": "{gone}: a gate w = -exp(x) has no gradient there (dx = 0 * inf = NaN), unless it is "
    "flakit.log_decay.",
    "far": "If a gate w = -exp(x) made these decays: x can grow by {margin:.3g} until w = -inf in {dtype} and "
    "dx = 0 * inf = NaN. flakit.log_decay has no such limit.",
    "others": "The x of the largest finite decay is {margin:.3g} below that in {dtype}.",
    "zero": "No decay is -inf.",
}

LATE = "pairwise, masked late"
"""Exact differences whose future is removed after the exponential (the case `masking`): the gradient is NaN."""

KERNELS = {
    **{name: scheme.label for name, scheme in SCHEMES.items()},
    LATE: "pairwise, masked late: only after exp",
    "padding, chunk": "padding, chunk: forgets nothing",
    "padding, blocks": "padding, blocks: empty blocks skipped",
}
"""What is held against the decays, each name with its words: the anchor schemes, the late mask, and the padding that
forgets nothing (of GSA as of RWKV6, wherever later blocks are gathered in a key's gradient)."""


def kernels(op: str) -> tuple[str, ...]:
    """The `KERNELS` that an operator can be computed with."""
    like = as_read(op)
    return tuple(name for name in KERNELS if like in padding.KEY_GRADIENT or not name.startswith("padding"))


def as_read(op: str | Operator) -> str:
    """The operator of the case `anchor` whose reads have decayed as those of `op`: the laws are the same for both."""
    of = operator(op)
    if of.name in OPERATORS:
        return of.name
    if not of.decay:
        raise ValueError(f"op: expected an operator with a decay among its arguments, got {of.name!r}")
    return next(name for name, x in OPERATORS.items() if set(x.meets) == set(of.inclusive))


@dataclass(frozen=True)
class Margin:
    """The distance of one kernel from its law."""

    kernel: str
    dtype: torch.dtype
    """What the operands of its products are stored in; exponentials and sums are float32."""
    exponent: float
    """The largest that the kernel takes, natural log; 0 where none is positive."""
    limit: float
    """The largest exponent whose exponential is finite, of the format that the exponent's factor is stored in."""
    layer: str = ""
    batch: int = 0
    token: int | None = None
    """Whose factor has the exponent, None where none is positive; in packed sequences counted from the first one's."""
    head: int = 0
    channel: int = 0
    tokens: tuple[int, int] | None = None
    """The first and the last of those whose decays add up to the exponent, None where it is infinite or 0."""

    @property
    def margin(self) -> float:
        """Natural-log units up to the limit; below 0 the kernel breaks."""
        return self.limit - self.exponent

    @property
    def factor(self) -> float:
        """What all decays may be multiplied with before it breaks; below 1 it does. inf: it never can."""
        return self.limit / self.exponent if self.exponent else math.inf

    @property
    def breaks(self) -> bool:
        return self.exponent > self.limit

    @property
    def place(self) -> str:
        """Where, in words."""
        if self.token is None:
            return ""
        layer = f"{self.layer}, " if self.layer else ""
        batch = say("batch {batch}, ").format(batch=self.batch) if self.batch else ""
        place = {"token": self.token, "head": self.head, "channel": self.channel}
        return f"{layer}{batch}" + say("token {token}, head {head}, channel {channel}").format(**place)


@dataclass(frozen=True)
class Gate:
    """How far decays are from where a gate w = -exp(x) loses its gradient: dx = w dw is inf * 0 = NaN at w = -inf."""

    dtype: torch.dtype
    """Of the decays as given (of float8's float32, of longdouble's float64): where it ends, w is -inf."""
    infinite: int
    """How many decays are -inf."""
    largest: float
    """The largest finite |w|."""
    layer: str = ""
    """The layer of the largest."""

    @property
    def margin(self) -> float:
        """How much the x of the largest finite decay may grow before w is -inf; inf where all finite decays are 0."""
        return math.log(torch.finfo(self.dtype).max) - math.log(self.largest) if self.largest else math.inf

    @property
    def breaks(self) -> bool:
        return self.infinite > 0 or self.margin < 0

    def __str__(self) -> str:
        said = {"margin": self.margin, "dtype": self.dtype}
        if not self.breaks:
            return WORDS.say("far" if self.largest else "zero", **said)
        gone = WORDS.say("gone", min(self.infinite, 2), n=self.infinite, dtype=self.dtype)
        line = WORDS.say("no gradient", gone=gone)
        return f"{line} {WORDS.say('others', **said)}" if 0 <= self.margin < math.inf else line


@dataclass(frozen=True)
class Headroom:
    """What `headroom` found. margins: by kernel and dtype, the worst of all layers.

    counts: how many decays there are in each bin of log10 |w| between `edges`; zeros: how many of them are 0.
    """

    op: str
    chunk: int
    block: int
    margins: tuple[Margin, ...]
    layers: Mapping[str, tuple[Margin, ...]]
    """The margins of each layer by its name, "" where there is one without a name."""
    gates: Mapping[str, Gate]
    """By layer, what the decays would be to a gate w = -exp(x)."""
    edges: np.ndarray
    counts: np.ndarray
    zeros: int

    @property
    def broken(self) -> tuple[Margin, ...]:
        """What breaks on these decays, the worst first."""
        return tuple(sorted((m for m in self.margins if m.breaks), key=lambda m: m.factor))

    @property
    def gate(self) -> Gate:
        """Of all layers: how many decays are -inf, and the largest finite one that is nearest to it."""
        nearest = min(self.gates.values(), key=lambda gate: gate.margin)
        return replace(nearest, infinite=sum(gate.infinite for gate in self.gates.values()))

    def margin(self, kernel: str, dtype: torch.dtype = torch.float32, layer: str | None = None) -> Margin:
        """One kernel's, of one layer or the worst of all."""
        measured = tuple(dict.fromkeys(m.kernel for m in self.margins))
        for name, known, got in (("kernel", measured, kernel), ("dtype", tuple(LN_MAX), dtype)):
            if got not in known:
                raise ValueError(f"{name}: expected one of {'; '.join(map(str, known))}; got {got!r}")
        if layer is not None and layer not in self.layers:
            raise ValueError(f"layer: expected one of {', '.join(self.layers)}, got {layer!r}")
        among = self.margins if layer is None else self.layers[layer]
        return next(m for m in among if (m.kernel, m.dtype) == (kernel, dtype))

    def times(self, factor: float) -> "Headroom":
        """The same with every decay multiplied by a factor above 0: exponents are sums of decays."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor: expected a finite number above 0, got {factor!r}")

        def more(margins: Sequence[Margin]) -> tuple[Margin, ...]:
            return tuple(replace(m, exponent=m.exponent * factor) for m in margins)

        layers = {name: more(margins) for name, margins in self.layers.items()}
        gates = {name: replace(gate, largest=gate.largest * factor) for name, gate in self.gates.items()}
        edges = self.edges + math.log10(factor)
        return replace(self, margins=more(self.margins), layers=layers, gates=gates, edges=edges)

    def uniform(self, kernel: str, dtype: torch.dtype = torch.float32) -> float:
        """The law at uniform decay: the largest |w| per token that the kernel survives; of padding the worst length."""
        if kernel.startswith("padding"):
            form = kernel.removeprefix("padding, ")
            how = {"chunk": self.chunk, "block": self.block}
            return min(padding.law(T, form, **how) for T in range(1, self.chunk + 1))
        return law(**_scheme(kernel), op=as_read(self.op), chunk=self.chunk, block=self.block, dtype=dtype)

    def __str__(self) -> str:
        wide = max(len(m.kernel) for m in self.margins) + 2
        head = (
            padded(say("kernel"), wide)
            + padded(say("exponent"), -10)
            + "".join(f"{number(dtype):>11}" for dtype in LN_MAX)
        )
        lines = [*self._says(), "", f"{head}  " + say("where the exponent is largest")]
        for kernel, exponent, factors, place in self._rows():
            told = "".join(padded(factor, -11) for factor in factors)
            lines.append(f"{kernel:{wide}}{exponent:>10}{told}  {place}".rstrip())
        return "\n".join([*lines, "", str(self.gate)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads = say("kernel"), say("exponent"), *map(number, LN_MAX), say("where the exponent is largest")
        rows = [dict(zip(heads, (name, of, *factors, at), strict=True)) for name, of, factors, at in self._rows()]
        said, gate = html.escape(" ".join(self._says())), html.escape(str(self.gate))
        return f"<p>{said}</p>{Table(rows)._repr_html_()}<p>{gate}</p>"

    def _says(self) -> tuple[str, str]:
        """How the table is read, in two lines."""
        return (
            say("{op}, chunks of {chunk}, blocks of {block}. By number format: what all decays can be").format(
                op=self.op, chunk=self.chunk, block=self.block
            ),
            say("multiplied by until it breaks; below 1: it breaks on these decays; any: it never breaks"),
        )

    def _rows(self) -> Iterator[tuple[str, str, list[str], str]]:
        """Of each kernel: its name, the largest exponent, the factor of each format, and where, in words."""
        for kernel in dict.fromkeys(m.kernel for m in self.margins):
            of = {m.dtype: m for m in self.margins if m.kernel == kernel}
            first, factors = of[torch.float32], [number(of[dtype].factor, 3, inf=say("any")) for dtype in LN_MAX]
            yield kernel, number(first.exponent), factors, first.place


def headroom(
    w: Tensor | np.ndarray | str | Path | Mapping[str, object],
    op: str | Operator | None = None,
    chunk: int = 64,
    *,
    block: int = 16,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Headroom:
    """The margin to the law of every anchor scheme and dtype, from the decays of a real model.

    Args:
        w: natural-log decays <= 0, [B, T, H, K] (GSA: the gates g [B, T, H, M]), of any floating dtype, float8 and
            numpy's longdouble included; or a file of them, .pt, .safetensors or .npy; or several layers by name: a
            mapping, a file that holds one, or the recording of a hook (`flakit.models.recorded`).
        op: an operator with a decay, "rwkv6", "gsa", "kda", … or a described one: whether reads have decayed by their
            own token decides what breaks. Decays of a head as a whole, as simple GLA has them, are [B, T, H]; those
            that are logarithms of base 2 are so here too. Default: what the recording says, else "rwkv6".
        chunk, block: tokens a chunk and rows a block in the kernels, powers of two.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one; each begins a chunk of its own.
        only: kernels to look at, of `kernels(op)`; default all.
        progress: told the name of the layer that comes next, how many are done, and of how many.

    Returns:
        Headroom: a `Margin` for each kernel and dtype, and of the gate the `Gate`; print it.

    Raises:
        ValueError, TypeError: naming the argument, the layer in it or the file, what was expected and what came.
        FileNotFoundError: where there is no such file.

    >>> flakit.headroom(-torch.rand(1, 100, 2, 8)).margin("none").breaks
    False
    """
    of = operator(op or getattr(w, "op", None) or "rwkv6")
    op, known, like = of.name, kernels(of), as_read(of)
    wanted = known if only is None else tuple(only)
    for kernel in wanted:
        if kernel not in known:
            raise ValueError(f"only: expected kernels of {op}: {'; '.join(known)}; got {kernel!r}")
    for name, size in (("chunk", chunk), ("block", block)):
        if whole_number(name, size) & (size - 1):
            raise ValueError(f"{name}: expected a power of two, got {size!r}")
    with on_cpu():  # where decays are looked at
        given = given_layers(w)
        if len(of.axes[of.decay].split()) == 3:  # one decay for all channels of a head
            given = {name: x[..., None] if getattr(x, "ndim", 0) == 3 else x for name, x in given.items()}
        layers, found = {name: checked(name, x) for name, x in given.items()}, {}
        if of.nats != 1:
            layers = {name: x.double() * of.nats for name, x in layers.items()}
        for done, (name, x) in enumerate(layers.items()):
            progress(name, done, len(layers))
            found[name] = tuple(
                m for kernel in wanted for m in _margins(kernel, x, like, chunk, block, cu_seqlens, name)
            )
        worst_of_all = tuple(min(same, key=lambda m: m.factor) for same in zip(*found.values(), strict=True))
        gates = {name: _gate(name, x) for name, x in layers.items()}
        return Headroom(op, chunk, block, worst_of_all, found, gates, *_histogram(layers.values()))


def _gate(layer: str, w: Tensor) -> Gate:
    finite = w[w.isfinite()]
    largest = -finite.min().double().item() if finite.numel() else 0.0
    return Gate(w.dtype, w.numel() - finite.numel(), abs(largest), layer)


def _scheme(kernel: str) -> dict:
    return {"scheme": "pairwise", "mask": "where"} if kernel == LATE else {"scheme": kernel}


def _margins(kernel: str, w: Tensor, op: str, chunk: int, block: int, cu_seqlens, layer: str) -> list[Margin]:
    """One margin for each dtype."""
    found: list[Worst] = []
    for start, sequence in _sequences(w, cu_seqlens):
        if kernel.startswith("padding"):
            more = _padding(sequence, kernel.removeprefix("padding, "), chunk, block)
        else:
            more = worst(sequence, **_scheme(kernel), op=op, chunk=chunk, block=block)
        found += (x._replace(token=x.token + start) for x in more)
    made = []
    for dtype in LN_MAX:
        limit = {True: LN_MAX[dtype], False: LN_MAX[torch.float32]}
        at = min(found, key=lambda x: limit[x.stored] / x.exponent, default=None)
        if at is None:
            made.append(Margin(kernel, dtype, 0.0, limit[True], layer))
        else:
            place = (at.batch, at.token, at.head, at.channel)
            made.append(Margin(kernel, dtype, at.exponent, limit[at.stored], layer, *place, _added(w, at, chunk)))
    return made


def _added(w: Tensor, at: Worst, chunk: int) -> tuple[int, int] | None:
    """The first and last of the tokens around its place whose decays add up to an exponent."""
    low, high = max(at.token - chunk, 0), min(at.token + chunk, w.shape[1])
    until = torch.cat((torch.zeros(1), -w[at.batch, low:high, at.head, at.channel].double().cumsum(0)))
    if not math.isfinite(at.exponent) or not until.isfinite().all():
        return None
    # The sums of the tokens first to last, both in, that hold the place or lie beside it.
    first, here = torch.arange(len(until) - 1), at.token - low
    sums = until[None, 1:] - until[:-1, None]
    fits = (sums - at.exponent).abs() <= 1e-9 * at.exponent
    fits &= (first[:, None] <= here + 1) & (first[None] >= here - 1)
    # Of equal sums, as of equal decays: the one that ends with the token, then the one that begins with it.
    found = [(first + low, last + low) for first, last in fits.nonzero().tolist()]
    return min(found, key=lambda x: (x[1] != at.token, x[0] != at.token, x[1] - x[0]), default=None)


def _padding(w: Tensor, form: str, chunk: int, block: int) -> list[Worst]:
    """Of the empty rows at the key block whose anchor is farthest; what their factor multiplies is 0 in any dtype."""
    T = w.shape[1]
    for anchor in padding.anchors(T, form, chunk=chunk, block=block)[:1]:  # decays have one sign: the most tokens win
        start = T - T % chunk
        exponents = -w[:, start : start + anchor.tokens].double().sum(1)  # [B, H, K]
        if exponents.max() > 0:
            batch, head, channel = (x.item() for x in torch.unravel_index(exponents.argmax(), exponents.shape))
            return [Worst(exponents.max().item(), False, batch, anchor.rows.start, head, channel)]
    return []


def _sequences(w: Tensor, cu_seqlens: Tensor | Sequence[int] | None) -> list[tuple[int, Tensor]]:
    if cu_seqlens is None:
        return [(0, w)]
    offsets = torch.as_tensor(cu_seqlens)
    check_packing(offsets, None, w.shape[0], offsets.device, "w")
    check_offsets(offsets, None, w.shape[1])
    offsets = offsets.tolist()
    return [(a, w[:, a:b]) for a, b in zip(offsets, offsets[1:], strict=False) if b > a]


_EDGES = np.linspace(-5, 4, 91)


def _histogram(layers: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, int]:
    counts, zeros = np.zeros(len(_EDGES) - 1, dtype=np.int64), 0
    for w in layers:
        sizes = -w[w != 0].double()
        zeros += w.numel() - sizes.numel()
        logs = sizes.log10().clamp(_EDGES[0], _EDGES[-1])
        counts += torch.histc(logs, len(counts), _EDGES[0], _EDGES[-1]).long().numpy()
    return _EDGES, counts, zeros
