"""Convert checkpoints, states and decays between flakit and RWKV-LM or flash-linear-attention, in both directions.

    model = convert.model_from(torch.load("RWKV-x070….pth", weights_only=True))   # a LanguageModel
    convert.weights_of(model, "rwkv-lm")                                          # the same file's names and shapes

The names are those that BlinkDL/RWKV-LM's RWKV_Tmix_x070 and RWKV_Tmix_x060 and flash-linear-attention's
RWKV7ForCausalLM and RWKV6ForCausalLM save. A tensor without a counterpart here raises an error with its name.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from ..ops.common.gate import log_decay
from .language_model import LanguageModel

NAMES = ("rwkv-lm", "fla")
"""The naming conventions: RWKV-LM's and flash-linear-attention's."""
HEAD_NORM_EPS = 64e-5
"""RWKV-LM's eps of the head norm, for any head size."""
NORM_EPS = 1e-5
"""flash-linear-attention's default `norm_eps`; its RWKV7 multiplies it by the head size."""
BLENDS = {"rwkv-lm": "wkvrg", "fla": "rwkvg"}
"""The order in which RWKV6's projections of the token-shift weights are stacked in one tensor, by library."""


# --- decays -----------------------------------------------------------------------------------------------------------

FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp(w)": lambda w: w,
    "w": torch.log,
    "exp(-exp(w))": log_decay,
    "exp(-exp(-0.5) * sigmoid(w))": lambda w: -math.exp(-0.5) * w.sigmoid(),
}
"""Functions from another library's w to the natural-log decay, by the factor that multiplies the state."""


def log_decay_from(w: Tensor, factor: str) -> Tensor:
    """Convert another library's w to the natural-log decay <= 0 of the operators here, same shape and dtype.

    factor: the meaning of w, one of `FACTORS`: the factor that multiplies the state in a step.
        "exp(w)": flash-linear-attention's and ours. "w": the factor itself, in [0, 1].
        "exp(-exp(w))": RWKV-LM's kernels for RWKV6, and those for RWKV7 without clampw in their name.
        "exp(-exp(-0.5) * sigmoid(w))": RWKV-LM's clampw kernels for RWKV7, with w = w0 + tanh(x w1) w2.

    Raises TypeError unless w is a floating-point tensor, and ValueError for an unknown factor, or for a decay that is
    NaN or above 0, which means that w has another factor.
    """
    if not isinstance(w, Tensor) or not w.is_floating_point():
        got = str(w.dtype).removeprefix("torch.") if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"w: expected a tensor of floating-point numbers, got {got}")
    if factor not in FACTORS:
        raise ValueError(f"factor: expected one of {', '.join(map(repr, FACTORS))}, got {factor!r}")
    decay = FACTORS[factor](w)
    if not w.is_meta and not (decay <= 0).all():
        wrong = w.detach()[~(decay <= 0)][0].item()
        raise ValueError(f"w: expected a factor {factor!r} of at most 1 and no NaN, got w = {wrong:.4g}")
    return decay


# --- the names --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor of the other library's checkpoint, and the tensors of a model here that it holds.

    theirs, ours: the names. ndim: allowed numbers of axes of theirs. split: converts theirs to ours; join: ours to
    theirs."""

    theirs: str
    ours: tuple[str, ...]
    ndim: tuple[int, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


LAYOUTS: dict[str, tuple] = {
    "": ((2,), lambda x: [x], itemgetter(0)),
    "vector": ((1,), lambda x: [x], itemgetter(0)),
    "transposed": ((2,), lambda x: [x.T], lambda x: x[0].T),
    "row": ((1, 2, 3), lambda x: [x.reshape(-1)], lambda x: x[0].view(1, 1, -1)),
    "heads": ((2,), lambda x: [x.reshape(-1)], itemgetter(0)),
    "rows": ((2,), lambda x: x.unbind(0), lambda x: torch.stack(list(x))),
    "matrices": ((3,), lambda x: x.unbind(0), lambda x: torch.stack(list(x))),
    "beside": ((2,), lambda x: x.chunk(5, 1), lambda x: torch.cat(list(x), 1)),
    "transposed below": ((2,), lambda x: [y.T for y in x.chunk(5)], lambda x: torch.cat([y.T for y in x])),
    "transposed beside": ((2,), lambda x: [y.T for y in x.chunk(5, 1)], lambda x: torch.cat([y.T for y in x], 1)),
}
"""By name, how the other library stores one or several of our tensors: ndim, split and join of an `Entry`.

"row": a vector [dim] as [1, 1, dim]; "heads": one as [H, head_size]. The last five: five tensors in one.
"""

Names = Iterator[tuple[str, str, str]]
"""Tuples of three texts: our name, or several separated by spaces, whose tensors one of the other library holds; layout
and name in RWKV-LM's checkpoint; those in flash-linear-attention's. "": another tuple has these tensors."""


def _norm(ours: str, rwkv_lm: str, fla: str) -> Names:
    return ((f"{ours}.{x}", f"vector {rwkv_lm}.{x}", f"vector {fla}.{x}") for x in ("weight", "bias"))


def _outside_blocks() -> Names:
    yield "embedding.weight", "emb.weight", "model.embeddings.weight"
    yield "head.weight", "head.weight", "lm_head.weight"
    yield from _norm("norm_out", "ln_out", "model.norm")
    yield from _norm("norm_in", "blocks.0.ln0", "model.layers.0.pre_norm")


def _rwkv7(n: int) -> Names:
    for x in "rwkvag":
        yield f"time.blend.{x}", f"row att.x_{x}", f"row attn.x_{x}"
    for x, ours in {"w": "w", "a": "a", "v": "v_mix", "g": "g"}.items():
        if x == "v" and n == 0:
            continue
        if x != "g":
            yield f"time.{ours}.bias", f"row att.{x}0", f"vector attn.{x}_lora.lora.2.bias"
        yield f"time.{ours}.A", f"att.{x}1", f"transposed attn.{x}_lora.lora.0.weight"
        yield f"time.{ours}.B", f"att.{x}2", f"transposed attn.{x}_lora.lora.2.weight"
    yield "time.removal", "row att.k_k", "vector attn.k_k"
    yield "time.replacement", "row att.k_a", "vector attn.k_a"
    yield "time.bonus", "heads att.r_k", "heads attn.r_k"
    for name in ("receptance", "key", "value", "output"):
        yield f"time.{name}.weight", f"att.{name}.weight", f"attn.{name[0]}_proj.weight"
    yield from _norm("time.norm", "att.ln_x", "attn.g_norm")
    yield "channels.blend", "row ffn.x_k", "vector ffn.x_k"
    for name in ("key", "value"):
        yield f"channels.{name}.weight", f"ffn.{name}.weight", f"ffn.{name}.weight"


def _rwkv6(n: int) -> Names:
    yield "time.blend_all", "row att.time_maa_x", "vector attn.x_proj.0.mu"
    for x in BLENDS["rwkv-lm"]:
        yield f"time.blend.{x}", f"row att.time_maa_{x}", ""
    yield " ".join(f"time.blend.{x}" for x in BLENDS["fla"]), "", "rows attn.x_bias"
    (A, B), (fla_A, fla_B) = (
        [" ".join(f"time.blend_by_token.{x}.{factor}" for x in blends) for factor in "AB"] for blends in BLENDS.values()
    )
    yield A, "beside att.time_maa_w1", ""
    yield B, "matrices att.time_maa_w2", ""
    yield fla_A, "", "transposed below attn.x_proj.0.linear.weight"
    yield fla_B, "", "transposed beside attn.x_proj.2.weight"
    yield "time.w.bias", "row att.time_decay", "vector attn.w_proj.linear.lora.2.bias"
    yield "time.w.A", "att.time_decay_w1", "transposed attn.w_proj.linear.lora.0.weight"
    yield "time.w.B", "att.time_decay_w2", "transposed attn.w_proj.linear.lora.2.weight"
    yield "time.u", "heads att.time_faaaa", "heads attn.bonus"
    for name in ("receptance", "key", "value", "gate"):
        yield f"time.{name}.weight", f"att.{name}.weight", f"attn.{name[0]}_proj.linear.weight"
    yield "time.output.weight", "att.output.weight", "attn.o_proj.weight"
    yield from _norm("time.norm", "att.ln_x", "attn.g_norm")
    yield "channels.blend", "row ffn.time_maa_k", "vector ffn.key.mu"
    yield "channels.gate_blend", "row ffn.time_maa_r", "vector ffn.receptance.mu"
    yield "channels.key.weight", "ffn.key.weight", "ffn.key.linear.weight"
    yield "channels.value.weight", "ffn.value.weight", "ffn.value.weight"
    yield "channels.gate.weight", "ffn.receptance.weight", "ffn.receptance.linear.weight"


@dataclass(frozen=True)
class Kind:
    """A checkpoint format. names: the library that named its tensors, "rwkv-lm" or "fla". mixer: "rwkv6" or "rwkv7".

    by, heads: names of tensors in layer 0: one that only this format has, and one of shape [H, head_size].
    layer: function that returns the `Names` of layer n."""

    names: str
    mixer: str
    by: str
    heads: str
    layer: Callable[[int], Names]

    @property
    def whose(self) -> str:
        return {"rwkv-lm": "RWKV-LM", "fla": "flash-linear-attention"}[self.names] + f"'s {self.mixer.upper()}"

    @property
    def block(self) -> str:
        return {"rwkv-lm": "blocks", "fla": "model.layers"}[self.names]

    def norm_eps(self, head_size: int) -> float:
        """Return the eps of the head norm with which a model here computes the same logits.

        Our RWKV6 scales its output by head_size^-0.5, theirs by 1. The head norm cancels the scale if its eps is
        divided by head_size too."""
        eps = HEAD_NORM_EPS if self.names == "rwkv-lm" else NORM_EPS * (head_size if self.mixer == "rwkv7" else 1)
        return eps / head_size if self.mixer == "rwkv6" else eps

    def entries(self, layers: int, head_size: int) -> Iterator[Entry]:
        yield from self._entries(_outside_blocks(), head_size)
        for n in range(layers):
            norms = *_norm("norm_time", "ln1", "attn_norm"), *_norm("norm_channels", "ln2", "ffn_norm")
            for entry in self._entries([*norms, *self.layer(n)], head_size):
                ours = tuple(f"blocks.{n}.{name}" for name in entry.ours)
                yield replace(entry, theirs=f"{self.block}.{n}.{entry.theirs}", ours=ours)

    def _entries(self, names: Iterable[tuple[str, str, str]], head_size: int) -> Iterator[Entry]:
        for ours, *theirs in names:
            layout, _, name = theirs[NAMES.index(self.names)].rpartition(" ")
            if name:
                entry = Entry(name, tuple(ours.split()), *LAYOUTS[layout])
                yield entry if layout != "heads" else replace(entry, join=lambda x: x[0].view(-1, head_size))


KINDS = (
    Kind("rwkv-lm", "rwkv7", "att.w1", "att.r_k", _rwkv7),
    Kind("rwkv-lm", "rwkv6", "att.time_maa_w1", "att.time_faaaa", _rwkv6),
    Kind("fla", "rwkv7", "attn.w_lora.lora.0.weight", "attn.r_k", _rwkv7),
    Kind("fla", "rwkv6", "attn.x_proj.0.mu", "attn.bonus", _rwkv6),
)


def kind_of(weights: object) -> Kind | None:
    """Return the format of a checkpoint, a mapping of tensors by name; None if it is unknown."""
    if not isinstance(weights, Mapping):
        return None
    return next((kind for kind in KINDS if f"{kind.block}.0.{kind.by}" in weights), None)


# --- weights ----------------------------------------------------------------------------------------------------------


def model_from(weights: Mapping[str, Tensor]) -> LanguageModel:
    """Load a checkpoint into a new model, on the CPU, in the widest dtype of the checkpoint's tensors.

    weights: tensors by RWKV-LM's or flash-linear-attention's names, of RWKV7 (x070) or RWKV6 (x060). Sizes and ranks
        come from the shapes. Layer 0's unused v0, v1, v2, present in some RWKV7 checkpoints, are dropped.
    The logits equal those of the original model: RWKV-LM with its head-norm eps of 64e-5; flash-linear-attention with
    norm_eps = 1e-5, expand_k = 1 (RWKV6) and value_dim = hidden_size (RWKV7).

    Raises ValueError for an unknown format, and, naming the tensor, for one that is missing, unknown, or of another
    shape."""
    kind = kind_of(weights)
    if kind is None:
        got = f"{next(iter(weights), 'none')!r}" if isinstance(weights, Mapping) else type(weights).__name__
        known = ", ".join(f"{kind.block}.0.{kind.by} ({kind.whose})" for kind in KINDS)
        raise ValueError(f"weights: expected tensors by name, among them one of {known}; got {got}")
    return _Reader(kind, weights).model()


class _Reader:
    """Converts one checkpoint to a `LanguageModel`; errors name the tensor as the checkpoint does."""

    def __init__(self, kind: Kind, weights: Mapping[str, Tensor]):
        self.kind, self.weights = kind, dict(weights)
        if kind.names == "rwkv-lm" and kind.mixer == "rwkv7":
            for name in ("v0", "v1", "v2"):
                self.weights.pop(f"blocks.0.att.{name}", None)

    def take(self, name: str, ndim: tuple[int, ...] = (2,)) -> Tensor:
        x = self.weights.get(name)
        if not isinstance(x, Tensor):
            got = "none of that name" if x is None else type(x).__name__
            raise ValueError(f"weights: expected {name!r} as in {self.kind.whose}, got {got}")
        if x.ndim not in ndim:
            axes = " or ".join(map(str, ndim))
            raise ValueError(f"weights[{name!r}]: expected {axes} axes, got {list(x.shape)}")
        return x

    def model(self) -> LanguageModel:
        kind, prefix = self.kind, f"{self.kind.block}."
        numbers = {name[len(prefix) :].split(".")[0] for name in self.weights if name.startswith(prefix)}
        layers = 1 + max(int(n) for n in numbers if n.isdigit())
        heads, head_size = self.take(f"{prefix}0.{kind.heads}").shape
        tensors, used = {}, set()
        for entry in kind.entries(layers, head_size):
            parts = entry.split(self.take(entry.theirs, entry.ndim))
            if len(parts) != len(entry.ours):
                shape = list(self.weights[entry.theirs].shape)
                raise ValueError(f"weights[{entry.theirs!r}]: expected {len(entry.ours)} parts, got {shape}")
            used.add(entry.theirs)
            tensors |= {name: (x, entry.theirs) for name, x in zip(entry.ours, parts, strict=True)}
        unknown = [name for name in self.weights if name not in used]
        if unknown:
            raise ValueError(
                f"weights: expected the names of {kind.whose} and no others, got {unknown[0]!r}, for which a model "
                f"here has no place"
            )
        vocab, dim = tensors["embedding.weight"][0].shape
        model = self._new_model(vocab, dim, layers, head_size, {name: x.shape for name, (x, _) in tensors.items()})
        dtype = None
        for name, p in model.state_dict().items():
            x, theirs = tensors[name]
            if x.shape != p.shape:
                shape, holds = list(self.weights[theirs].shape), list(p.shape)
                raise ValueError(f"weights[{theirs!r}]: expected to hold {holds}, as dim = {dim}, got {shape}")
            dtype = x.dtype if dtype is None else torch.promote_types(dtype, x.dtype)
        model.to(dtype).load_state_dict({name: x for name, (x, _) in tensors.items()})
        return model

    def _new_model(self, vocab: int, dim: int, layers: int, head_size: int, shapes: dict) -> LanguageModel:
        def rank(name: str) -> int:
            return shapes[name][-1]

        if self.kind.mixer == "rwkv7":
            ranks = {f"{x}_rank": rank(f"blocks.0.time.{x}.A") for x in "wag"}
            if layers > 1:
                ranks["v_rank"] = rank("blocks.1.time.v_mix.A")
        else:
            ranks = {"w_rank": rank("blocks.0.time.w.A"), "blend_rank": rank("blocks.0.time.blend_by_token.w.A")}
        hidden, gated = shapes["blocks.0.channels.key.weight"][0], self.kind.mixer == "rwkv6"
        options = {"head_size": head_size, "norm_eps": self.kind.norm_eps(head_size), **ranks}
        return LanguageModel(vocab, dim, layers, self.kind.mixer, hidden=hidden, gated=gated, **options)


def weights_of(model: LanguageModel, names: str) -> dict[str, Tensor]:
    """Return a model's weights by RWKV-LM's names ("rwkv-lm") or flash-linear-attention's ("fla").

    model: with mixer "rwkv7" or "rwkv6". The tensors may share memory with the model's. `model_from` reads the result.

    Raises ValueError if their library cannot represent the model: another mixer, an `edit` other than 1 (RWKV7),
    another head-norm eps, or a channel mix gated otherwise. The message names the setting that they need."""
    kind = _kind(model, names)
    time, channels = model.blocks[0].time, model.blocks[0].channels
    if getattr(time, "edit", 1.0) != 1.0:
        raise ValueError(f"model: expected edit = 1, as {kind.whose} has it, got {time.edit}")
    eps = kind.norm_eps(time.head_size)
    if not math.isclose(time.norm.eps, eps, rel_tol=1e-9):
        raise ValueError(f"model: expected norm_eps = {eps:.6g}, as {kind.whose} has it, got {time.norm.eps:.6g}")
    if (channels.gate is not None) != (kind.mixer == "rwkv6"):
        expected = kind.mixer == "rwkv6"
        raise ValueError(f"model: expected gated = {expected}, as {kind.whose} has it, got {not expected}")
    ours = {name: x.detach() for name, x in model.state_dict().items()}
    entries = kind.entries(len(model.blocks), time.head_size)
    return {entry.theirs: entry.join([ours[name] for name in entry.ours]).contiguous() for entry in entries}


def _kind(model: object, names: object) -> Kind:
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    if names not in NAMES:
        raise ValueError(f"names: expected one of {', '.join(map(repr, NAMES))}, got {names!r}")
    mixer = type(model.blocks[0].time).__name__.lower()
    kind = next((kind for kind in KINDS if (kind.names, kind.mixer) == (names, mixer)), None)
    if kind is None:
        known = " or ".join(dict.fromkeys(repr(kind.mixer) for kind in KINDS))
        raise ValueError(f"model: expected a model with mixer {known}, got {mixer!r}")
    return kind


# --- states -----------------------------------------------------------------------------------------------------------


def state_from(model: LanguageModel, state: Sequence, names: str) -> dict[str, Tensor]:
    """Convert another library's state to an `initial_state` of this model.

    state: for "rwkv-lm" a list of three tensors per layer, for one sequence: the time mix's previous token [dim], the
        state, [H, V, K] for RWKV7 and [H, K, V] for RWKV6, and the channel mix's previous token [dim]. For "fla" a
        mapping per layer, like `past_key_values[layer]`, with "conv_state" [N, dim], "recurrent_state" [N, H, K, V] and
        "ffn_state" [N, dim].
    names: "rwkv-lm" or "fla".

    Keys and values have one size here, so shapes do not reveal a transposed state: `names` decides. Raises ValueError
    with the name of a tensor that is missing or has another shape."""
    kind = _kind(model, names)
    layers, time = len(model.blocks), model.blocks[0].time
    dim, K = model.embedding.embedding_dim, time.head_size
    expected = layers if names == "fla" else 3 * layers
    if len(state) != expected:
        raise ValueError(f"state: expected {expected} entries for {layers} layers, got {len(state)}")
    converted, N = {}, None
    for n in range(layers):
        for m, (ours, theirs) in enumerate(_PIECES.items()):
            if names == "fla":
                if theirs not in state[n]:
                    raise ValueError(f"state[{n}]: expected {theirs!r}, got none of that name")
                x, label = state[n][theirs], f"state[{n}][{theirs!r}]"
            else:
                x, label = state[3 * n + m][None], f"state[{3 * n + m}]"
                x = x.transpose(-1, -2) if ours == "time.state" and kind.mixer == "rwkv7" else x
            N = len(x) if N is None else N
            shape = (N, dim // K, K, K) if ours == "time.state" else (N, dim)
            if x.shape != shape:
                axes = slice(0 if names == "fla" else 1, None)
                raise ValueError(f"{label}: expected {list(shape[axes])}, got {list(x.shape[axes])}")
            converted[f"blocks.{n}.{ours}"] = x
    return converted


_PIECES = {"time.shift": "conv_state", "time.state": "recurrent_state", "channels.shift": "ffn_state"}


def state_of(model: LanguageModel, state: Mapping[str, Tensor], names: str) -> list:
    """Convert a final state of this model to another library's, the inverse of `state_from`; `names` as there.

    Raises ValueError for "rwkv-lm" if the state has more than one sequence."""
    kind, converted = _kind(model, names), []
    state = model._check_state(state)
    if names == "rwkv-lm" and (N := len(next(iter(state.values())))) != 1:
        raise ValueError(f"state: expected one sequence, as RWKV-LM keeps them, got {N}; give the rows one by one")
    for n in range(len(model.blocks)):
        layer = {theirs: state[f"blocks.{n}.{ours}"] for ours, theirs in _PIECES.items()}
        if names == "fla":
            converted.append(layer)
        else:
            before, x, before_channels = (x[0] for x in layer.values())
            converted += [before, x.transpose(-1, -2) if kind.mixer == "rwkv7" else x, before_channels]
    return converted
