"""`Setting` describes one call of a subject: sizes, dtypes, decay, states and memory layouts; it draws the tensors.

Probes vary settings, shrinking simplifies them, and scripts reproduce them.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..cases import strided_offsets, strides
from ..numerics.evaluate import Arriving, cotangents
from ..numerics.inputs import inputs as make_inputs
from ..numerics.operators import Operator

EXPANDED = "expanded, stride 0"
INT32 = "int32"
TRANSPOSED = "transposed"


@dataclass(frozen=True)
class Setting:
    """One call of an operator, forward and backward. The defaults of all fields are the plainest call.

    T, B, H, K, V, M: sizes. groups: heads of queries or values, where these have an axis HQ or HV, per head of keys.
    decay: a profile of `flakit.inputs`; one natural-log decay <= 0 for all; or a pair, for even and odd channels (for
        every eighth token and the others if a decay has no channels). decay_dtype: None for `dtype`.
    per_head: log decays of head h are 1 + h per_head times those of head 0. spike: (token, value), the decay of one
        token in all channels; rows: that token in each sequence of the batch, in place of spike's. first: the log decay
        of head h's first token is h times that.
    lengths: of packed sequences; T is ignored, and `padding` rows follow the last one. offsets: the layout of the
        offsets in memory, or "int32", their dtype.
    initial_state, final_state: pass one, request one. loss: the outputs with a gradient: "o", "both" or "state".
    scale: None for the operator's default, passed as a number if the subject takes one; default_scale: never pass it.
    layout, arriving: memory layouts of the inputs and of the gradient at o: "contiguous", TRANSPOSED (the last two
        axes exchanged in memory) or EXPANDED (stride 0). cotangent: a factor of the gradients at the outputs.
    written: a factor of the values; a small one leaves little in the state but the initial state.
    slices: tokens of each process of a group; T is their sum.
    cut: run in two pieces, passing the state on. changed: the token from which on `later_changed` changes the inputs.
    bad: (token, "nan" or "inf"), a non-finite v. repeated: all tokens have the same key; constant: also the same value.
    no_decay: pass None as the decay.
    states: the layout of tensors without a time axis and of the gradients at the final state.
    wanted: the inputs that require a gradient, None for all. again: return the gradients of a second backward pass.
    """

    T: int = 64
    B: int = 1
    H: int = 1
    K: int = 16
    V: int = 16
    M: int = 16
    dtype: str = "float32"
    decay_dtype: str | None = None
    decay: str | float | tuple[float, float] = "logsigmoid"
    per_head: float = 0.0
    spike: tuple[int, float] | None = None
    rows: tuple[int, ...] | None = None
    first: float = 0.0
    lengths: tuple[int, ...] | None = None
    padding: int = 0
    offsets: str = "contiguous"
    initial_state: bool = False
    final_state: bool = False
    loss: str = "o"
    scale: float | None = None
    default_scale: bool = False
    layout: str = "contiguous"
    arriving: str = "contiguous"
    cotangent: float = 1.0
    written: float = 1.0
    slices: tuple[int, ...] | None = None
    cut: int | None = None
    changed: int | None = None
    bad: tuple[int, str] | None = None
    repeated: bool = False
    constant: bool = False
    groups: int = 1
    no_decay: bool = False
    states: str = "contiguous"
    wanted: tuple[str, ...] | None = None
    again: bool = False
    seed: int = 0

    def summary(self, op: Operator) -> dict:
        """Return the sizes, and every other field that differs from the plainest call, by name, for reports."""
        plain = {x.name: x.default for x in fields(self)}
        always = {"T", *(axis for axis in op.sizes if axis in plain)}
        values = {name: getattr(self, name) for name in plain}
        if self.lengths is not None:
            values["T"] = self.tokens
        shown = {name: x for name, x in values.items() if name in always or x != plain[name]}
        return {name: x for name, x in shown.items() if name != "M" or "M" in always}

    @property
    def tokens(self) -> int:
        """The length of the time axis, with all packed sequences and the padding."""
        return self.T if self.lengths is None else sum(self.lengths) + self.padding

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def make(self, op: Operator, device: str = "cpu") -> tuple[dict, Arriving]:
        """Draw the arguments by the operator's names, and the gradients at o and the final state; equal calls draw the
        same. All are contiguous, with the setting's dtypes. The caller may write to them."""
        x, arriving = _drawn(self, op, device)
        return tree_map_only(Tensor, torch.clone, (x, arriving))  # a kernel may write to them

    def _draw(self, op: Operator, device: str) -> tuple[dict, Arriving]:
        sizes: dict[str, Any] = {axis: getattr(self, axis) for axis in ("B", "H", "K", "V", "M") if axis in op.sizes}
        sizes |= {axis: self.groups * self.H for axis in ("HQ", "HV") if axis in op.sizes}
        ends = None
        if self.lengths is not None:
            ends = torch.tensor([0, *self.lengths], device="cpu").cumsum(0)
        sizes |= {"T": self.tokens, "cu_seqlens": ends}
        options: dict[str, Any] = {"dtype": self.torch_dtype, "seed": self.seed, "initial_state": self.initial_state}
        options["decay_dtype"] = None if self.decay_dtype is None else getattr(torch, self.decay_dtype)
        if op.decay:
            options["decay"] = -1.0 if isinstance(self.decay, (tuple, list)) else self.decay
        x: dict[str, Any] = make_inputs(op, **sizes, **options, device=device)
        if op.decay:
            self._change(x[op.decay], op)
        if self.repeated or self.constant:
            for name in (*repeated(op), *([op.value] if self.constant else [])):
                x[name] = x[name][:, :1].expand_as(x[name]).contiguous()
        if self.written != 1.0:
            x[op.value] *= self.written
        if self.bad is not None:
            x[op.value][:1, self.bad[0], :1] = float(self.bad[1])
        if self.scale is not None:
            x["scale"] = self.scale
        arriving = cotangents(op, x, dfinal_state=True)
        if self.arriving == EXPANDED:
            arriving = torch.ones_like(arriving[0]), arriving[1]
        if self.cotangent != 1.0:
            do, dstate = arriving
            arriving = do * self.cotangent, op.state([part * self.cotangent for part in op.parts(dstate)])
        if self.states == EXPANDED:
            timed = (*op.sequences, "o")
            expand = lambda name, y: y if name in timed else y[:1].expand_as(y).contiguous()  # noqa: E731
            x, arriving = mapped(op, expand, x, arriving)
        if self.final_state:
            x["output_final_state"] = True
        return x, arriving

    def _change(self, w: Tensor, op: Operator) -> None:
        """Apply the fields `decay` (if a pair), `per_head`, `first` and `spike` to the log decays w, in place.

        The pair, `first` and `spike` are natural logarithms; one unit of w is `op.nats` of these.
        """
        axes = op.axes[op.decay].split()
        if isinstance(self.decay, (tuple, list)):
            pair = [x / op.nats for x in self.decay]
            if has_channels(op):
                w[..., 0::2], w[..., 1::2] = pair
            else:
                w[:], w[:, ::MIXED_TOKENS] = pair[1], pair[0]
        heads = next((n for n, axis in enumerate(axes) if axis.startswith("H")), None)
        if heads is not None and (self.per_head or self.first):
            each = torch.arange(w.shape[heads], device=w.device, dtype=w.dtype)
            each = each.view(-1, *[1] * (w.ndim - heads - 1))
            if self.per_head:
                w *= 1 + self.per_head * each
            if self.first and "T" in axes:
                w[:, 0] = self.first / op.nats * each
        if self.spike is not None and "T" in axes:
            for sequence, row in zip(w, self.rows or [self.spike[0]] * self.B, strict=False):
                sequence[row] = self.spike[1] / op.nats

    def laid_out(self, inputs: Mapping, arriving: Arriving, op: Operator) -> tuple[dict, Arriving]:
        """Return arguments and arriving gradients with the same values in this setting's memory layouts."""
        x, (do, dstate) = dict(inputs), arriving
        if self.states != "contiguous":
            states = (op.parts(y) for y in (x.get("initial_state"), dstate))
            state, dstate = (op.state([_stored(part, self.states) for part in parts]) for parts in states)
            x |= {name: _stored(x[name], self.states) for name in op.tensors if name not in op.sequences}
            x |= {} if state is None else {"initial_state": state}
        if x.get("cu_seqlens") is not None:
            ends = x["cu_seqlens"]
            x["cu_seqlens"] = ends.int() if self.offsets == INT32 else strided_offsets.layout(ends, self.offsets)
        x |= {name: strides.layout(x[name], self.layout) for name in op.sequences}
        return x, (strides.layout(do, self.arriving), dstate)

    def later_changed(self, inputs: Mapping, op: Operator) -> dict:
        """Return a copy of the inputs in which tokens from `changed` on have other values, to test causality."""
        x = {name: y.clone() if isinstance(y, Tensor) else y for name, y in inputs.items()}
        for name in op.sequences:
            tail = x[name][:, self.changed :]
            tail.mul_(1.37) if name == op.decay else tail.neg_()
        return x

    def without(self, **fields) -> "Setting":
        return replace(self, **fields)


def mapped(
    op: Operator, change: Callable[[str, Tensor], Tensor], inputs: Mapping, arriving: Arriving
) -> tuple[dict, Arriving]:
    """Return the arguments and the arriving gradients with every tensor replaced by change(name, tensor). A gradient
    has the name of the output at which it arrives."""
    leaves = {name: change(name, y) for name, y in op.leaves(inputs).items()}
    gradients = zip(op.outputs, (arriving[0], *op.parts(arriving[1])), strict=False)
    do, *dparts = (change(name, y) for name, y in gradients)
    return op.arguments(leaves, inputs), (do, op.state(dparts))


_drawn = functools.lru_cache(maxsize=2)(Setting._draw)
"""What `Setting.make` copies, drawn once for the run, the truth and its units."""


MIXED_TOKENS = 8
"""In a pair of decays without channels, the first one holds for every so many tokens."""


def has_channels(op: Operator) -> bool:
    """Whether the decay has an axis of channels, as RWKV6's, rather than one value per token and head."""
    return len(op.axes[op.decay].split()) > 3


def _stored(x: Tensor, how: str) -> Tensor:
    """Return x with transposed strides for TRANSPOSED; for EXPANDED, its first row in place of all, with stride 0."""
    if how == TRANSPOSED and x.ndim < 2:
        return torch.stack((x, x), -1)[..., 0]
    return x.mT.contiguous().mT if how == TRANSPOSED else x[:1].expand_as(x)


def repeated(op: Operator) -> tuple[str, ...]:
    """Return the names of the tensors that `Setting.repeated` makes equal for all tokens: keys and their like."""
    return tuple(name for name in ("k", "s", "a", "b") if name in op.tensors)
