"""Realistic inputs for notebooks, tests and scripts: `chunk_rwkv6(**flakit.inputs("rwkv6"))`.

Numbers are drawn on the CPU in float64 from a private generator, rounded to the requested dtype and then moved, so that
a CPU and a GPU see the same values. Each tensor has its own stream, drawn token by token: another decay leaves r, k, v
and u unchanged, and a longer T continues the same sequence.
"""

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from ..ops.common.validation import FLOATS, check_offsets, check_packing
from .arguments import flag, plain, shown, whole_number
from .draws import NORMAL, logsigmoid, sigmoid
from .operators import Operator, operator, state_dtype


def _rwkv6_init(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    # The model initializes x over its channels as -6 + 5 z^p, z in [0, 1]; p rises from 0.7 in the first layer to 2.0
    # in the last, here the mean. Its token-dependent part is zero at the start of training and of order 1 later.
    channels = math.prod(shape[2:])
    x = -6 + 5 * np.linspace(0, 1, channels).reshape(shape[2:]) ** 1.35
    return -np.exp(x + 0.5 * rng.standard_normal(shape))


def _spikes(value: float) -> Callable:
    return lambda rng, shape: np.where(rng.random(shape) < 0.05, value, -0.01)


def _mamba2(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    # A is drawn once for each head, from 1 to 16, and the step's bias so that steps are 0.001 to 0.1, plus token noise.
    A = rng.uniform(1, 16, (shape[2], *[1] * (len(shape) - 3)))
    step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape[2:]))
    return -A * np.logaddexp(0.0, np.log(np.expm1(step)) + 0.5 * rng.standard_normal(shape))


_PROFILES: dict[str, tuple[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]]] = {
    "rwkv6-init": (
        "-exp(x), x from -6 to -1 over the channels as in a fresh RWKV6, plus token noise",
        _rwkv6_init,
    ),
    "rwkv6-wide": (
        "-exp(x), x uniform in [-6, 2.5]: RWKV6 late in training, down to -12 per token",
        lambda rng, shape: -np.exp(rng.uniform(-6, 2.5, shape)),
    ),
    "rwkv7": (
        "-0.6065 sigmoid(x), x normal: RWKV7, bounded by -0.6065 per token",
        lambda rng, shape: -math.exp(-0.5) * sigmoid(rng.standard_normal(shape)),
    ),
    "gsa": ("logsigmoid(x) / 8, x normal: GSA", lambda rng, shape: logsigmoid(rng.standard_normal(shape)) / 8),
    "mamba2": (
        "-A softplus(x): Mamba-2, gated delta rule and KDA as fresh models have them, A from 1 to 16 for each head",
        _mamba2,
    ),
    "gla": ("logsigmoid(x) / 16, x normal: GLA", lambda rng, shape: logsigmoid(rng.standard_normal(shape)) / 16),
    "logsigmoid": ("logsigmoid(x), x normal: mean -0.81", lambda rng, shape: logsigmoid(rng.standard_normal(shape))),
    "uniform": (
        "log-uniform in [-8, -1e-5]: slow and fast channels side by side",
        lambda rng, shape: -np.exp(rng.uniform(math.log(1e-5), math.log(8), shape)),
    ),
    "none": ("0: nothing is ever forgotten", lambda rng, shape: np.zeros(shape)),
    "spikes": ("-0.01 with 5% of -1e4: now and then a channel is wiped", _spikes(-1e4)),
    "inf-spikes": ("-0.01 with 5% of -inf: now and then a channel is wiped exactly", _spikes(-math.inf)),
    "forget": ("-inf: everything is forgotten at every token", lambda rng, shape: np.full(shape, -math.inf)),
}

MODEL = "model"
"""The profile of the operator's own model."""

DECAYS: dict[str, str] = {name: description for name, (description, _) in _PROFILES.items()}
"""The decay profiles by name, with one line each; all are natural-log decays per token."""


def inputs(
    op: str | Operator = "rwkv6",
    *,
    B: int = 1,
    T: int | None = None,
    H: int = 2,
    K: int = 32,
    V: int | None = None,
    M: int | None = None,
    HQ: int | None = None,
    HV: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    decay: str | float | Tensor | np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
    decay_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    initial_state: bool = False,
    requires_grad: bool = False,
) -> dict[str, Tensor]:
    """Draw inputs of an operator by the names of its arguments, ready for `chunk_rwkv6(**inputs("rwkv6"))`.

    B, T, H, K, V: batch, time, heads, rows (keys) and columns (values) of the state; T defaults to 64, V to K.
    M, HQ: of GSA only: memory slots, default 32; query heads, a multiple of H, default H. HV: of gated delta rule and
        KDA only: heads of the values, a multiple of H, default H.
    cu_seqlens: the offsets [N + 1] of N packed sequences, from 0, non-decreasing; the last one is T's default, and
        rows up to a larger T are padding; B is 1. The result includes them; initial states are for N sequences.
    decay: a profile of `DECAYS`, one natural-log decay <= 0 for all tokens, or a tensor of natural logarithms of the
        decay's shape. Default: that of the operator's model ("rwkv6-init", "gsa", …). None without a decay argument.
    dtype: of every sequence tensor; decay_dtype: of the decay alone (default: dtype).
    initial_state: whether to add a random float32 (float64 for float64) initial state, for GSA a pair (hk, hv).
    All but the decay are standard normal, except where the model differs: RWKV7's a = -κ̂ and b = κ̂ sigmoid(x) with κ̂
    of length 1 in each head, GSA's s = softmax over the slots of a normal, q and k of length 1 and beta = sigmoid(x) of
    the delta rules, HGRN2's k = 1 - e^g; for a described operator, as its description says.
    """
    op = operator(op)
    offsets = None if cu_seqlens is None else _offsets(cu_seqlens, B, T)
    sizes = _sizes(op, offsets, B=B, T=T, H=H, K=K, V=V, M=M, HQ=HQ, HV=HV)
    decay_dtype = dtype if decay_dtype is None else decay_dtype
    for name, choice in (("dtype", dtype), ("decay_dtype", decay_dtype)):
        if not isinstance(choice, torch.dtype) or choice not in FLOATS:
            raise ValueError(f"{name}: expected torch.float64, float32, bfloat16 or float16, got {shown(choice)}")
    device, seed = _device(device), whole_number("seed", seed, least=0)
    own_state = ': put a state of your own among the inputs, inputs(...) | {"initial_state": state}'
    initial_state = flag("initial_state", initial_state, own_state)
    requires_grad = flag("requires_grad", requires_grad)

    if not op.decay and decay is not None:
        raise ValueError(f"decay: expected None, {op.label} has no such argument, got {shown(decay)}")
    tensors = {}
    for stream, name in enumerate(op.tensors + (op.states if initial_state else ())):
        axes = op.axes[name].split()
        if name == op.decay:
            rng = np.random.default_rng([seed, stream])
            profiles = _PROFILES | {name: ("", sample) for name, sample in op.profiles.items()}
            profile = op.profile if decay is None or isinstance(decay, str) and decay == MODEL else decay
            x = _decay(profile, rng, axes, sizes, profiles) / op.nats
        else:
            drawn = op.draws.get(name, NORMAL)
            stream = op.tensors.index(drawn.stream) if drawn.stream else stream
            x = _time_first(np.random.default_rng([seed, stream]), axes, sizes, drawn.sample)
        to = state_dtype(dtype) if name in op.states else decay_dtype if name == op.decay else dtype
        tensors[name] = x.to(to).to(device).requires_grad_(requires_grad)
    return op.arguments(tensors, {} if offsets is None else {"cu_seqlens": offsets.to(device)})


def _sizes(op: Operator, offsets: Tensor | None, **requested) -> dict[str, int]:
    """Return the size of every axis of an operator, requested or default. Raises ValueError for a wrong one."""
    default = {"T": 64 if offsets is None else offsets[-1], "V": requested["K"], "M": 32}
    default |= dict.fromkeys(("HQ", "HV"), requested["H"])
    sizes = dict(op.own_sizes)
    for axis, size in requested.items():
        if axis in op.sizes:
            sizes[axis] = whole_number(axis, default.get(axis) if size is None else size)
        elif size is not None:
            raise ValueError(f"{axis}: expected None, {op.label} has no such axis, got {shown(size)}")
    for heads in ("HQ", "HV"):
        if sizes.get(heads, sizes["H"]) % sizes["H"]:
            raise ValueError(f"{heads}: expected a multiple of H = {sizes['H']}, got {sizes[heads]}")
    sizes["N"] = sizes["B"] if offsets is None else len(offsets) - 1
    for name in (*op.tensors, *op.states):
        axes = op.axes[name].split()
        if 8 * math.prod(sizes[axis] for axis in axes) > sys.maxsize:
            largest, shape = max(axes, key=sizes.__getitem__), ", ".join(shown(sizes[axis]) for axis in axes)
            raise ValueError(f"{largest}: expected a size that fits into a memory, got {name} [{shape}]")
    return sizes


def _offsets(cu_seqlens, B: int, T: int | None) -> Tensor:
    """Return cu_seqlens as a tensor on the CPU, checked against B and T; raises TypeError or ValueError."""
    expected = f"cu_seqlens: expected ascending offsets from 0 to T, got {shown(cu_seqlens)}"
    try:
        if not isinstance(cu_seqlens, (Tensor, np.ndarray, list, tuple)) or not len(cu_seqlens):
            raise TypeError
        offsets = torch.as_tensor(cu_seqlens, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(expected) from error
    check_packing(offsets, None, whole_number("B", B), offsets.device)
    check_offsets(offsets, None, int(offsets[-1]) if T is None else whole_number("T", T))
    if offsets[-1] < 1:
        raise ValueError(expected)
    return offsets


def _device(device) -> torch.device:
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"a {type(device).__name__}")
        return torch.empty(0, device=device).device
    except (AssertionError, TypeError, RuntimeError) as error:  # PyTorch without CUDA fails an assertion
        first = str(error).splitlines()[0]
        raise ValueError(f'device: expected one that is here, such as "cpu", got {shown(device)} ({first})') from error


def _time_first(rng, axes: list[str], sizes: dict[str, int], draw: Callable) -> Tensor:
    """Return float64 numbers with these axes, drawn token by token, so that a longer T continues a shorter one."""
    drawn = sorted(axes, key=lambda a: a != "T")
    x = torch.from_numpy(np.asarray(draw(rng, tuple(sizes[a] for a in drawn)), dtype=np.float64))
    return x.permute([drawn.index(a) for a in axes]).contiguous()


def _decay(decay, rng, axes: list[str], sizes: dict[str, int], profiles: dict) -> Tensor:
    shape = tuple(sizes[a] for a in axes)
    if isinstance(decay, str):
        if decay not in profiles:
            expected = f"one of {', '.join(profiles)}, a number <= 0 or a tensor"
            raise ValueError(f"decay: expected {expected}, got {shown(decay)}")
        return _time_first(rng, axes, sizes, profiles[decay][1])
    number = plain(decay)
    if isinstance(number, Real) and not isinstance(number, bool):
        try:
            x = torch.full(shape, float(number), dtype=torch.float64, device="cpu")
        except OverflowError as error:
            raise ValueError(f"decay: expected a number that float64 can hold, got {shown(decay)}") from error
    elif isinstance(decay, (Tensor, np.ndarray)):
        if tuple(decay.shape) != shape:
            raise ValueError(f"decay: expected a tensor [{', '.join(axes)}] = {list(shape)}, got {list(decay.shape)}")
        x = torch.as_tensor(decay, device="cpu")
        if x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"decay: expected real numbers, got {shown(decay)}")
        x = x.detach().to("cpu", torch.float64, copy=True)
    else:
        raise TypeError(f"decay: expected a profile name, a number <= 0 or a tensor, got {shown(decay)}")
    if not (x <= 0).all():
        worst = "NaN" if x.isnan().any() else f"{x.max().item():g}"
        raise ValueError(f"decay: expected natural-log decays <= 0, got {worst}; a positive one makes the state grow")
    return x
