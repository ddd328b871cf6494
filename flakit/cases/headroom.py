"""Headroom: how far a real model's decays are from the limits of each kernel in the casebook.

    print(flakit.headroom(w))                            # [B, T, H, K], natural-log decays <= 0
    flakit.headroom("decays.safetensors", "gsa").broken

A kernel that anchors a chunk's decay takes exponentials whose exponents are sums of decays. An exponent above ln(max)
gives an infinity, and then a NaN (`anchor`). `headroom` forms these exponents from a model's decays, chunk by chunk in
float64, without running an operator, and compares the largest with the limit. `margin` is the difference in natural-log
units; `factor` is the largest factor by which all decays may grow. Operands are assumed of order 1: others shift the
limit by ln |operand|, about a percent of float32's limit, up to a fifth of float16's.

A gate w = -exp(x) has no gradient where w is -inf (`gate_gradient`): `gate` counts such decays.
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
from .decay_files import layers as load_layers
from .laws import LN_MAX, on_cpu

WORDS = Words() | {
    "gone": {0: "Decays of this size are -inf in {dtype}", 1: "1 decay is -inf", 2: "{n} decays are -inf"},
    "no gradient": "{gone}: a gate w = -exp(x) has no gradient there (dx = 0 * inf = NaN), unless it is "
    "flakit.log_decay.",
    "far": "If a gate w = -exp(x) made these decays: x can grow by {margin:.3g} until w = -inf in {dtype} and "
    "dx = 0 * inf = NaN. flakit.log_decay has no such limit.",
    "others": "The x of the largest finite decay is {margin:.3g} below that in {dtype}.",
    "zero": "No decay is -inf.",
}

LATE = "pairwise, masked late"
"""Exact differences whose mask comes after the exponential (the case `masking`): the gradient is NaN."""

KERNELS = {
    **{name: scheme.label for name, scheme in SCHEMES.items()},
    LATE: "pairwise, masked late: only after exp",
    "padding, chunk": "padding, chunk: forgets nothing",
    "padding, blocks": "padding, blocks: empty blocks skipped",
}
"""Label by kernel: the anchor schemes, the late mask, and padding without decay (in GSA and RWKV6, wherever a key's
gradient sums over later blocks)."""


def kernels(op: str) -> tuple[str, ...]:
    """Return the names of the `KERNELS` that apply to an operator."""
    like = as_read(op)
    return tuple(name for name in KERNELS if like in padding.KEY_GRADIENT or not name.startswith("padding"))


def as_read(op: str | Operator) -> str:
    """Return the operator of the case `anchor` ("rwkv6", "rwkv7", "gsa") whose reads come before or after their token's
    decay as do those of `op`, so that its `law` applies. Raises ValueError for an operator without decay."""
    of = operator(op)
    if of.name in OPERATORS:
        return of.name
    if not of.decay:
        raise ValueError(f"op: expected an operator with a decay among its arguments, got {of.name!r}")
    return next(name for name, x in OPERATORS.items() if set(x.meets) == set(of.reads.values()))


@dataclass(frozen=True)
class Margin:
    """One kernel's largest exponent for some decays, where it arises, and how far it is from the limit."""

    kernel: str
    dtype: torch.dtype
    """Storage dtype of the operands; exponentials and sums are float32."""
    exponent: float
    """The largest exponent, natural log; 0 if none is positive."""
    limit: float
    """The largest exponent with a finite exponential, in the dtype that stores the factor."""
    layer: str = ""
    batch: int = 0
    token: int | None = None
    """The token whose factor has the exponent, counted over all packed sequences; None if no exponent is positive."""
    head: int = 0
    channel: int = 0
    tokens: tuple[int, int] | None = None
    """The first and last token whose decays add up to the exponent; None if it is infinite or 0."""

    @property
    def margin(self) -> float:
        """The limit minus the exponent, natural log; below 0 the kernel overflows."""
        return self.limit - self.exponent

    @property
    def factor(self) -> float:
        """The largest factor on all decays without overflow; below 1 these decays overflow. inf: none does."""
        return self.limit / self.exponent if self.exponent else math.inf

    @property
    def breaks(self) -> bool:
        return self.exponent > self.limit

    @property
    def place(self) -> str:
        """Where the largest exponent arises, in words; "" if none is positive."""
        if self.token is None:
            return ""
        layer = f"{self.layer}, " if self.layer else ""
        batch = say("batch {batch}, ").format(batch=self.batch) if self.batch else ""
        place = {"token": self.token, "head": self.head, "channel": self.channel}
        return f"{layer}{batch}" + say("token {token}, head {head}, channel {channel}").format(**place)


@dataclass(frozen=True)
class Gate:
    """How far decays are from where a gate w = -exp(x) has no gradient: at w = -inf, dx = w dw = inf * 0 = NaN."""

    dtype: torch.dtype
    """The decays' dtype (float32 for float8, float64 for longdouble), beyond whose range w is -inf."""
    infinite: int
    """Number of decays that are -inf."""
    largest: float
    """The largest finite |w|, natural log."""
    layer: str = ""
    """The layer that has `largest`."""

    @property
    def margin(self) -> float:
        """How much x of the largest finite decay may grow before w is -inf; inf if all finite decays are 0."""
        return math.log(torch.finfo(self.dtype).max) - math.log(self.largest) if self.largest else math.inf

    @property
    def breaks(self) -> bool:
        return self.infinite > 0 or self.margin < 0

    def __str__(self) -> str:
        values = {"margin": self.margin, "dtype": self.dtype}
        if not self.breaks:
            return WORDS.say("far" if self.largest else "zero", **values)
        gone = WORDS.say("gone", min(self.infinite, 2), n=self.infinite, dtype=self.dtype)
        line = WORDS.say("no gradient", gone=gone)
        return f"{line} {WORDS.say('others', **values)}" if 0 <= self.margin < math.inf else line


@dataclass(frozen=True)
class Headroom:
    """The result of `headroom`. margins: by kernel and dtype, the smallest over layers. counts: the number of decays
    per bin of log10 |w|, with bin edges `edges`; zeros: the number of decays that are 0."""

    op: str
    chunk: int
    block: int
    margins: tuple[Margin, ...]
    layers: Mapping[str, tuple[Margin, ...]]
    """Margins by layer name, "" for a single unnamed layer."""
    gates: Mapping[str, Gate]
    """By layer, the decays as outputs of a gate w = -exp(x)."""
    edges: np.ndarray
    counts: np.ndarray
    zeros: int

    @property
    def broken(self) -> tuple[Margin, ...]:
        """The margins of the kernels that overflow with these decays, the smallest factor first."""
        return tuple(sorted((m for m in self.margins if m.breaks), key=lambda m: m.factor))

    @property
    def gate(self) -> Gate:
        """Over all layers: the number of decays that are -inf, and the finite decay closest to overflow."""
        nearest = min(self.gates.values(), key=lambda gate: gate.margin)
        return replace(nearest, infinite=sum(gate.infinite for gate in self.gates.values()))

    def margin(self, kernel: str, dtype: torch.dtype = torch.float32, layer: str | None = None) -> Margin:
        """Return a kernel's margin, of one layer or the smallest over all. Raises ValueError for an unknown name."""
        measured = tuple(dict.fromkeys(m.kernel for m in self.margins))
        for name, known, got in (("kernel", measured, kernel), ("dtype", tuple(LN_MAX), dtype)):
            if got not in known:
                raise ValueError(f"{name}: expected one of {'; '.join(map(str, known))}; got {got!r}")
        if layer is not None and layer not in self.layers:
            raise ValueError(f"layer: expected one of {', '.join(self.layers)}, got {layer!r}")
        among = self.margins if layer is None else self.layers[layer]
        return next(m for m in among if (m.kernel, m.dtype) == (kernel, dtype))

    def times(self, factor: float) -> "Headroom":
        """Return the headroom with every decay multiplied by factor. Raises ValueError unless it is finite and > 0."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor: expected a finite number above 0, got {factor!r}")

        def more(margins: Sequence[Margin]) -> tuple[Margin, ...]:
            return tuple(replace(m, exponent=m.exponent * factor) for m in margins)

        layers = {name: more(margins) for name, margins in self.layers.items()}
        gates = {name: replace(gate, largest=gate.largest * factor) for name, gate in self.gates.items()}
        edges = self.edges + math.log10(factor)
        return replace(self, margins=more(self.margins), layers=layers, gates=gates, edges=edges)

    def uniform(self, kernel: str, dtype: torch.dtype = torch.float32) -> float:
        """Return up to which |w|, equal at all tokens, `kernel` does not overflow; for padding at the worst length."""
        if kernel.startswith("padding"):
            form = kernel.removeprefix("padding, ")
            sizes = {"chunk": self.chunk, "block": self.block}
            return min(padding.law(T, form, **sizes) for T in range(1, self.chunk + 1))
        return law(**_scheme(kernel), op=as_read(self.op), chunk=self.chunk, block=self.block, dtype=dtype)

    def __str__(self) -> str:
        width = max(len(m.kernel) for m in self.margins) + 2
        head = (
            padded(say("kernel"), width)
            + padded(say("exponent"), -10)
            + "".join(f"{number(dtype):>11}" for dtype in LN_MAX)
        )
        lines = [*self._legend(), "", f"{head}  " + say("where the exponent is largest")]
        for kernel, exponent, factors, place in self._rows():
            columns = "".join(padded(factor, -11) for factor in factors)
            lines.append(f"{kernel:{width}}{exponent:>10}{columns}  {place}".rstrip())
        return "\n".join([*lines, "", str(self.gate)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads = say("kernel"), say("exponent"), *map(number, LN_MAX), say("where the exponent is largest")
        rows = [dict(zip(heads, (name, of, *factors, at), strict=True)) for name, of, factors, at in self._rows()]
        legend, gate = html.escape(" ".join(self._legend())), html.escape(str(self.gate))
        return f"<p>{legend}</p>{Table(rows)._repr_html_()}<p>{gate}</p>"

    def _legend(self) -> tuple[str, str]:
        """Return two lines that explain the table."""
        return (
            say("{op}, chunks of {chunk}, blocks of {block}. By number format: what all decays can be").format(
                op=self.op, chunk=self.chunk, block=self.block
            ),
            say("multiplied by until it breaks; below 1: it breaks on these decays; any: it never breaks"),
        )

    def _rows(self) -> Iterator[tuple[str, str, list[str], str]]:
        """Yield each kernel's name, largest exponent, factor per dtype, and the position in words."""
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
    """Measure the margin of every anchor scheme and dtype to its limit, from the decays of a real model.

    Args:
        w: natural-log decays <= 0, [B, T, H, K] (GSA: the gates g [B, T, H, M]), of any floating dtype, also float8 and
            numpy's longdouble; or a file of them, .pt, .safetensors or .npy; or several layers by name: a mapping, a
            file with one, or a recording (`flakit.models.recorded`).
        op: an operator with a decay, "rwkv6", "gsa", "kda", … or a described one; what breaks depends on whether its
            reads come before or after their own token's decay. Decays per head, as in simple GLA, are [B, T, H]; for
            an operator with base-2 logarithms so are w. Default: the recording's, else "rwkv6".
        chunk, block: tokens per chunk and rows per block of the kernels, powers of two.
        cu_seqlens: offsets [N + 1] of sequences packed along T in a batch of one; each starts a new chunk.
        only: kernels to measure, of `kernels(op)`; default all.
        progress: called with the name of the next layer, the number of layers done, and their total.

    Returns:
        Headroom: a `Margin` for each kernel and dtype, and the `Gate`; print it for a table.

    Raises:
        ValueError, TypeError: naming the argument, layer or file, the expected and the actual value.
        FileNotFoundError: if there is no such file.

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
    with on_cpu():
        loaded = load_layers(w)
        if len(of.axes[of.decay].split()) == 3:  # one decay for all channels of a head
            loaded = {name: x[..., None] if getattr(x, "ndim", 0) == 3 else x for name, x in loaded.items()}
        layers, margins = {name: checked(name, x) for name, x in loaded.items()}, {}
        if of.nats != 1:
            layers = {name: x.double() * of.nats for name, x in layers.items()}
        for done, (name, x) in enumerate(layers.items()):
            progress(name, done, len(layers))
            margins[name] = tuple(
                m for kernel in wanted for m in _margins(kernel, x, like, chunk, block, cu_seqlens, name)
            )
        worst_of_all = tuple(min(same, key=lambda m: m.factor) for same in zip(*margins.values(), strict=True))
        gates = {name: _gate(name, x) for name, x in layers.items()}
        return Headroom(op, chunk, block, worst_of_all, margins, gates, *_histogram(layers.values()))


def _gate(layer: str, w: Tensor) -> Gate:
    finite = w[w.isfinite()]
    largest = -finite.min().double().item() if finite.numel() else 0.0
    return Gate(w.dtype, w.numel() - finite.numel(), abs(largest), layer)


def _scheme(kernel: str) -> dict:
    return {"scheme": "pairwise", "mask": "where"} if kernel == LATE else {"scheme": kernel}


def _margins(kernel: str, w: Tensor, op: str, chunk: int, block: int, cu_seqlens, layer: str) -> list[Margin]:
    """Return a kernel's `Margin` on one layer's decays w [B, T, H, K] for each dtype of `LN_MAX`."""
    exponents: list[Worst] = []
    for start, sequence in _sequences(w, cu_seqlens):
        if kernel.startswith("padding"):
            largest = _padding(sequence, kernel.removeprefix("padding, "), chunk, block)
        else:
            largest = worst(sequence, **_scheme(kernel), op=op, chunk=chunk, block=block)
        exponents += (x._replace(token=x.token + start) for x in largest)
    margins = []
    for dtype in LN_MAX:
        limit = {True: LN_MAX[dtype], False: LN_MAX[torch.float32]}
        at = min(exponents, key=lambda x: limit[x.stored] / x.exponent, default=None)
        if at is None:
            margins.append(Margin(kernel, dtype, 0.0, limit[True], layer))
        else:
            place = (at.batch, at.token, at.head, at.channel)
            tokens = _summed_tokens(w, at, chunk)
            margins.append(Margin(kernel, dtype, at.exponent, limit[at.stored], layer, *place, tokens))
    return margins


def _summed_tokens(w: Tensor, at: Worst, chunk: int) -> tuple[int, int] | None:
    """Return the first and last of the tokens near `at` whose decays sum to its exponent; None if there are none."""
    low, high = max(at.token - chunk, 0), min(at.token + chunk, w.shape[1])
    until = torch.cat((torch.zeros(1), -w[at.batch, low:high, at.head, at.channel].double().cumsum(0)))
    if not math.isfinite(at.exponent) or not until.isfinite().all():
        return None
    # Sums over tokens first … last, inclusive, that contain the position or are next to it.
    first, here = torch.arange(len(until) - 1), at.token - low
    sums = until[None, 1:] - until[:-1, None]
    fits = (sums - at.exponent).abs() <= 1e-9 * at.exponent
    fits &= (first[:, None] <= here + 1) & (first[None] >= here - 1)
    # Among equal sums, as from equal decays, prefer one that ends with the token, then one that begins with it.
    ranges = [(first + low, last + low) for first, last in fits.nonzero().tolist()]
    return min(ranges, key=lambda x: (x[1] != at.token, x[0] != at.token, x[1] - x[0]), default=None)


def _padding(w: Tensor, form: str, chunk: int, block: int) -> list[Worst]:
    """Return the largest exponent of the padding rows of w [B, T, H, K] as a list of one `Worst`, empty if none is
    positive. The `Worst` has stored=False, as its factor multiplies 0 in any dtype. form: one of `padding.FORMS`."""
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
