"""The table of operators, `OPERATORS`, the single source for everything that works "for any operator"."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.common.validation import check_offsets, check_packing, check_tensor
from ..ops.gsa import api as gsa_api
from ..ops.gsa import chunk_gsa, fused_recurrent_gsa
from ..ops.gsa import chunk_torch as gsa_chunked
from ..ops.gsa import reference as gsa_reference
from ..ops.rwkv6 import api as rwkv6_api
from ..ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from ..ops.rwkv6 import chunk_torch as rwkv6_chunked
from ..ops.rwkv6 import reference as rwkv6_reference
from ..ops.rwkv7 import api as rwkv7_api
from ..ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from ..ops.rwkv7 import chunk_torch as rwkv7_chunked
from ..ops.rwkv7 import reference as rwkv7_reference
from .arguments import one_of, shown
from .draws import REMOVAL_KEY, SOFTMAX, WRITTEN_BACK, Draw, Sampler

if TYPE_CHECKING:
    from .described import ByAutograd


@dataclass(frozen=True, eq=False)
class Operator:
    """What instruments and panels need to drive an operator; compared by identity.

    tensors: the arguments with a gradient, in the order of `reference` and `chunked`; o has the dtype of the first.
    states: names of the state's parts; several form a tuple in arguments and results.
    axes: of every tensor, state and of o, by name ("B T H K"): B batch, T time, H heads, K keys, V values; GSA also HQ
    query heads, M slots; of a state, N sequences.
    reference: `forward` and `backward`, which define the operator: a module of `ops`, which also has `steps`, or
    `described.ByAutograd` around a function; chunked: the same in chunks, or None.
    decay: the log-decay argument, or ""; profile: the default decay of `flakit.inputs`; profiles: those of this
    operator alone. nats: natural-log units of one unit of the decay argument, 1, or ln 2 for logarithms of base 2.
    fixed_decay: function of the number of heads that returns their natural-log decays, where these are no argument.
    draws: distributions of tensors in a model; default: standard normal. constants: further arguments, passed to
    functions whose signature names them. own_sizes: of axes without an argument of `flakit.inputs`.
    heads_alike: whether a head's result is independent of its index. has_scale: whether the formula has a scale.
    solves: whether its chunked form solves a triangular system, as a delta rule does.
    reads: the vectors that read the state, by their letters in the paper (GSA's p is made of q): whether the state has
    decayed by their own token's decay before. keys: the arguments with which they form scores.
    strongest: the natural-log decay below which no gate of its model can go.
    formula: Python for token t, in float64, that sets the state's parts and appends to the list o, for scripts;
    `{scale}` is the scale. It may be empty where `reference` wraps a function, whose own text scripts then quote.
    scale_exponent: the default scale is K to this power. chunk_sizes: those of the kernels.
    state_products: products with the full state at each token: write and read, for RWKV7 also those of b and a.
    """

    name: str
    label: str
    forms: Mapping[str, Callable]
    reference: "ModuleType | ByAutograd"
    chunked: ModuleType | None
    axes: Mapping[str, str]
    tensors: tuple[str, ...]
    decay: str
    profile: str
    chunk_sizes: tuple[int, ...]
    scale_exponent: float = -0.5
    state_products: int = 2
    states: tuple[str, ...] = ("initial_state",)
    outputs: tuple[str, ...] = ("o", "final_state")
    profiles: Mapping[str, Sampler] = field(default_factory=dict)
    nats: float = 1.0
    fixed_decay: Callable[[int], Tensor] | None = None
    draws: Mapping[str, Draw] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    own_sizes: Mapping[str, int] = field(default_factory=dict)
    heads_alike: bool = True
    has_scale: bool = True
    solves: bool = False
    reads: Mapping[str, bool] = field(default_factory=lambda: {"q": True})
    keys: tuple[str, ...] = ("k",)
    strongest: float = -math.inf
    formula: str = ""

    @property
    def value(self) -> str:
        """The name of the tensor of values: v, or the first with axes T and V."""
        names = [name for name in self.sequences if "V" in self.axes[name].split()]
        return "v" if "v" in names or not names else names[0]

    def log_decay(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the natural-log decays [B, T, ...] in the inputs; without a decay argument, `fixed_decay` or 0."""
        first = inputs[self.sequences[0]]
        if self.decay:
            w = inputs[self.decay].detach() * self.nats
            return w if self.decay in self.sequences else w.expand(*first.shape[:2], *w.shape)
        heads = next((n for n, axis in enumerate(self.axes[self.sequences[0]].split()) if axis[0] == "H"), None)
        if self.fixed_decay is None or heads is None:
            return first.new_zeros(first.shape[:2], dtype=torch.float64)
        w = self.fixed_decay(first.shape[heads]).to(first.device, torch.float64)
        return w.expand(*first.shape[:2], -1)

    @property
    def sequences(self) -> tuple[str, ...]:
        """The names of the tensors with a time axis."""
        return tuple(name for name in self.tensors if "T" in self.axes[name].split())

    @property
    def queries(self) -> tuple[str, ...]:
        """The arguments whose row belongs to the token that reads, by name: those of `reads`, or the first of all."""
        return tuple(name for name in self.reads if name in self.tensors) or self.tensors[:1]

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments whose row belongs to the token that is read, by name: all sequences but queries and decay."""
        return tuple(name for name in self.sequences if name not in (*self.queries, self.decay))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The letters of the axes whose sizes describe a problem, in the order B, T, H, then the operator's own."""
        return tuple(dict.fromkeys(axis for name in (*self.tensors, "o") for axis in self.axes[name].split()))

    def leaves(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors and the initial state's parts by name. Raises TypeError or ValueError for wrong ones."""
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs: expected a dict of tensors by name, got {shown(inputs)}")
        missing = [name for name in self.tensors if inputs.get(name) is None]
        if missing:
            raise ValueError(f"inputs: expected {', '.join(self.tensors)}, got none for {', '.join(missing)}")
        tensors: dict[str, Tensor] = {name: inputs[name] for name in self.tensors}
        size: dict[str, int] = {}
        for name, x in tensors.items():
            self.check_shape(name, x, size)
            size |= zip(self.axes[name].split(), x.shape, strict=True)
        cu_seqlens = inputs.get("cu_seqlens")
        if cu_seqlens is not None:
            check_packing(cu_seqlens, None, size["B"], tensors[self.tensors[0]].device, self.tensors[0])
            check_offsets(cu_seqlens, None, size["T"])
        parts = self.checked_parts("initial_state", inputs.get("initial_state"), self.size(tensors, cu_seqlens))
        return tensors | dict(zip(self.states, parts, strict=False))

    def checked_parts(self, name: str, state: object, size: Mapping[str, int]) -> tuple[Tensor, ...]:
        """Return the parts of a state called `name`, () for None. Raises TypeError or ValueError for wrong sizes."""
        parts: tuple = (state,)
        if isinstance(state, (Tensor, tuple, list, type(None))):
            parts = self.parts(state)
        if parts and (len(parts) != len(self.states) or not all(isinstance(part, Tensor) for part in parts)):
            expected = "a tensor" if len(self.states) == 1 else f"a tuple of {len(self.states)} tensors"
            raise TypeError(f"{name}: expected {expected} or None, got {shown(state)}")
        for part_name, part in zip(self.states, parts, strict=False):
            self.check_shape(part_name, part, size, name if len(parts) == 1 else f"{name}'s {part_name[-2:]}")
        return parts

    def check_shape(self, name: str, x: object, size: Mapping[str, int], called: str = "") -> None:
        """Raise ValueError or TypeError, naming x `called`, unless x has the axes of `name`, of sizes as in `size`."""
        shape = {axis: size.get(axis) for axis in self.axes[name].split()}
        check_tensor(called or name, x, shape, f" like {self.tensors[0]}" if size else "")

    def arguments(self, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any] | None = None) -> dict:
        """Return the operator's arguments: `inputs` with `leaves` replacing those of the same name."""
        args = {**(inputs or {}), **{name: x for name, x in leaves.items() if name not in self.states}}
        state = self.state([leaves[name] for name in self.states if name in leaves])
        return args if state is None else args | {"initial_state": state}

    def state(self, parts: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
        """Return a state in the operator's form: its single part, or a tuple of parts; None for no parts."""
        return None if not parts else parts[0] if len(self.states) == 1 else tuple(parts)

    def parts(self, state: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Return the parts of a state, the inverse of `state`; a tuple of None, as operators return, is no state."""
        if state is None or isinstance(state, Tensor):
            return () if state is None else (state,)
        parts = tuple(state)
        return () if all(part is None for part in parts) else parts

    def size(self, leaves: Mapping[str, Tensor], cu_seqlens: Tensor | None = None) -> dict[str, int]:
        """Return the size of every axis, by its letter; N, of states, is B or the number of packed sequences."""
        size = {
            axis: size
            for name in self.tensors
            for axis, size in zip(self.axes[name].split(), leaves[name].shape, strict=True)
        }
        return size | {"N": size["B"] if cu_seqlens is None else len(cu_seqlens) - 1}

    def scale(self, inputs: Mapping[str, Any]) -> float:
        """Return the scale in the inputs, or the default one."""
        scale = inputs.get("scale")
        return inputs[self.tensors[0]].shape[-1] ** self.scale_exponent if scale is None else scale


_ROWS, _STATE = "B T H K", "N H K V"

OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            name="rwkv6",
            label="RWKV6",
            forms={"chunk": chunk_rwkv6, "recurrent": fused_recurrent_rwkv6},
            reference=rwkv6_reference,
            chunked=rwkv6_chunked,
            tensors=("r", "k", "v", "w", "u"),
            axes=dict.fromkeys("rkw", _ROWS)
            | {"v": "B T H V", "u": "H K", "initial_state": _STATE, "final_state": _STATE, "o": "B T H V"},
            decay="w",
            profile="rwkv6-init",
            reads={"r": False},
            chunk_sizes=rwkv6_api.CHUNK_SIZES,
            formula="""\
kv = k[:, t, :, :, None] * v[:, t, :, None]
o.append({scale} * (r[:, t, :, :, None] * (S + u[..., None] * kv)).sum(-2))
S = w[:, t].exp()[..., None] * S + kv""",
        ),
        Operator(
            name="rwkv7",
            label="RWKV7",
            forms={"chunk": chunk_rwkv7, "recurrent": fused_recurrent_rwkv7},
            reference=rwkv7_reference,
            chunked=rwkv7_chunked,
            tensors=("r", "w", "k", "v", "a", "b"),
            axes=dict.fromkeys("rwkab", _ROWS)
            | {"v": "B T H V", "initial_state": _STATE, "final_state": _STATE, "o": "B T H V"},
            decay="w",
            profile="rwkv7",
            chunk_sizes=rwkv7_api.CHUNK_SIZES,
            scale_exponent=0.0,
            state_products=4,
            draws={"a": REMOVAL_KEY, "b": WRITTEN_BACK},
            solves=True,
            reads={"r": True, "a": False},
            keys=("k", "b"),
            strongest=-math.exp(-0.5),
            formula="""\
found = (a[:, t, :, :, None] * S).sum(-2, keepdim=True)
S = w[:, t].exp()[..., None] * S + b[:, t, :, :, None] * found + k[:, t, :, :, None] * v[:, t, :, None]
o.append({scale} * (r[:, t, :, :, None] * S).sum(-2))""",
        ),
        Operator(
            name="gsa",
            label="GSA",
            forms={"chunk": chunk_gsa, "recurrent": fused_recurrent_gsa},
            reference=gsa_reference,
            chunked=gsa_chunked,
            tensors=("q", "k", "v", "s", "g"),
            axes={"q": "B T HQ K", "k": _ROWS, "v": "B T H V", "s": "B T H M", "g": "B T H M", "o": "B T HQ V"}
            | dict.fromkeys(("initial_hk", "final_hk"), "N H K M")
            | dict.fromkeys(("initial_hv", "final_hv"), "N H M V"),
            decay="g",
            profile="gsa",
            chunk_sizes=gsa_api.CHUNK_SIZES,
            states=("initial_hk", "initial_hv"),
            outputs=("o", "final_hk", "final_hv"),
            draws={"s": SOFTMAX},
            reads={"p": True},
            keys=("s",),
            formula="""\
kept = g[:, t].exp()
hk = hk * kept[..., None, :] + k[:, t, :, :, None] * s[:, t, :, None]
hv = hv * kept[..., None] + s[:, t, :, :, None] * v[:, t, :, None]
p = ({scale} * q[:, t, :, :, None] * hk).sum(-2).softmax(-1)
o.append((p[..., None] * hv).sum(-2))""",
        ),
    )
}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


DESCRIBED: dict[str, Operator] = {}
"""Operators described by `flakit.describe` in this process, by name."""


def known() -> dict[str, Operator]:
    """Return all operators by name: flakit's own, the family, the described ones."""
    from .family import FAMILY  # imports this module

    return OPERATORS | FAMILY | DESCRIBED


def operator(op: str | Operator) -> Operator:
    """Return the operator of a name or of a reference "file.py:function"; raises ValueError if there is none."""
    if isinstance(op, Operator):
        return op
    if isinstance(op, str) and ":" in op:
        from .described import from_reference

        return from_reference(op)
    return known()[one_of("op", op, known())]
