"""What flash-linear-attention's own tests of these operators run, run on ours and held to our budgets.

Its sizes, dtypes, packing, chunk sizes and ways of drawing inputs; initial states in the dtype of the inputs, as it
gives them to RWKV6, and float32 ones. Where its tests are a grid, every value and not every combination.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import flakit
from flakit.numerics.evaluate import cotangents, evaluate
from flakit.numerics.operators import operator
from tests import fla_on_cpu
from tests.ops.checking import measure, true_values

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@dataclass(frozen=True)
class Setting:
    """B sequences of T tokens, or N packed into T; D is K and V. Decays are logsigmoid(normal) / normalizer."""

    op: str
    T: int
    D: int
    dtype: torch.dtype
    normalizer: float = 1
    N: int = 0
    M: int = 0
    H: int = 2
    state_dtype: torch.dtype | None = None
    decay_dtype: torch.dtype | None = None
    scale: float | None = None
    chunk_size: int | None = None

    def __str__(self):
        parts = [self.op, f"T{self.T}", f"D{self.D}", *[f"M{self.M}"] * bool(self.M), _short(self.dtype)]
        parts += [f"by{self.normalizer:g}"] * (self.normalizer != 1) + [f"packed{self.N}"] * bool(self.N)
        parts += [f"C{self.chunk_size}"] * bool(self.chunk_size)
        return "-".join(parts if self.state_dtype is None else [*parts, f"{_short(self.state_dtype)}-states"])


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def rwkv6(*args, **more):
    return Setting("rwkv6", *args, **{"state_dtype": args[2], **more})


def rwkv7(*args, **more):
    return Setting("rwkv7", *args, **{"decay_dtype": SINGLE, "scale": 0.25, **more})


def gsa(*args, **more):
    return Setting("gsa", *args, **more)


SETTINGS = [
    *(rwkv6(T, D, HALF) for T, D in [(16, 64), (64, 64), (64, 256), (268, 64), (2048, 64), (2048, 256)]),
    rwkv6(16, 64, HALF, 0.1),
    *(rwkv6(T, D, BRAIN, by) for T, D, by in [(1, 50, 1), (7, 64, 0.1), (15, 100, 10), (63, 200, 1)]),
    *(rwkv6(T, D, BRAIN, by) for T, D, by in [(286, 256, 0.1), (300, 100, 10)]),
    *(
        rwkv6(T, D, dtype, N=N)
        for N, T, D, dtype in [(2, 256, 64, BRAIN), (4, 512, 100, SINGLE), (4, 1024, 128, BRAIN)]
    ),
    *(rwkv6(T, D, dtype, N=N) for N, T, D, dtype in [(3, 400, 256, SINGLE), (5, 2048, 64, HALF)]),
    *(rwkv6(T, 64, HALF, chunk_size=C) for T, C in itertools.product((63, 286), (16, 32, 64))),
    *(rwkv7(T, D, HALF, by) for T, D, by in [(1, 32, 1), (15, 64, 0.1), (63, 100, 10), (300, 256, 1)]),
    *(rwkv7(T, D, HALF, by) for T, D, by in [(300, 32, 0.1), (300, 64, 10), (15, 256, 10), (2048, 64, 1)]),
    *(rwkv7(T, D, HALF, N=2) for T, D in [(63, 64), (286, 100), (300, 256), (512, 32)]),
    *(rwkv7(T, 64, HALF, chunk_size=C) for T, C in itertools.product((63, 300), (16, 32, 64))),
    *(rwkv7(300, 100, dtype, state_dtype=dtype) for dtype in (HALF, BRAIN)),
    *(gsa(T, D, SINGLE, by, M=M) for T, D, M, by in [(63, 64, 32, 1), (286, 100, 64, 0.05), (300, 256, 128, 20)]),
    *(gsa(T, D, SINGLE, by, M=M) for T, D, M, by in [(63, 256, 64, 20), (286, 64, 128, 1), (300, 100, 32, 0.05)]),
    *(gsa(T, D, SINGLE, M=M, N=2) for T, D, M in [(63, 100, 32), (286, 64, 64), (300, 256, 32), (512, 64, 128)]),
    *(gsa(T, 64, HALF, M=64, chunk_size=C) for T, C in itertools.product((63, 300), (16, 32, 64))),
    *(gsa(2048, 64, dtype, M=64, state_dtype=dtype) for dtype in (HALF, BRAIN)),
]


def make(setting, device):
    """The operator's arguments, drawn as its tests draw them."""
    op, rng = operator(setting.op), np.random.default_rng(42)
    B, H, T, D, dtype = 1 if setting.N else 2, setting.H, setting.T, setting.D, setting.dtype

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    sizes = dict(B=B, T=T, H=H, K=D, V=D) | ({"M": setting.M} if setting.M else {})
    decay = F.logsigmoid(normal(B, T, H, setting.M or D)) / setting.normalizer
    made = flakit.inputs(op, **sizes, decay=decay, dtype=dtype, decay_dtype=setting.decay_dtype or dtype)
    if setting.op == "rwkv7":  # of unit length and all positive; what is found is taken out whole
        a = F.normalize(torch.from_numpy(rng.random((B, T, H, D))), dim=-1).to(dtype)
        made |= {"a": a, "b": -a}
    if setting.op == "gsa":
        made["s"] = normal(B, T, H, setting.M).to(dtype)
    states = flakit.inputs(op, **sizes | {"B": setting.N or B, "T": 1}, initial_state=True)["initial_state"]
    made["initial_state"] = op.state([x.to(setting.state_dtype or SINGLE) for x in op.parts(states)])
    if setting.N:
        cuts = np.sort(rng.choice(np.arange(16, T), setting.N - 1, replace=False))
        made["cu_seqlens"] = torch.tensor([0, *cuts, T])
    if setting.scale:
        made["scale"] = setting.scale
    return {name: _to(x, device) for name, x in made.items()}


def _to(x, device):
    return tuple(part.to(device) for part in x) if isinstance(x, tuple) else x.to(device) if torch.is_tensor(x) else x


def on_devices(settings):
    """All of them on a GPU; the short ones on the CPU too, where these tests would otherwise be run by nobody."""
    return [(setting, "cpu") for setting in settings if setting.T < 100] + [
        pytest.param(setting, "cuda", marks=pytest.mark.gpu) for setting in settings
    ]


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("setting, device", on_devices(SETTINGS), ids=str)
def test_its_settings(setting, form, device, poisoned_memory):
    made = make(setting, device)
    arriving = cotangents(setting.op, made, dfinal_state=True)
    chunk_size = setting.chunk_size if form == "chunk" else None
    found = evaluate(setting.op, made, form=form, chunk_size=chunk_size, arriving=arriving)
    _, wrong = measure(found, true_values(made, arriving, setting.op), made)
    assert not wrong


@pytest.mark.parametrize("scale", [None, 1])
@pytest.mark.parametrize("T", [1, 1024])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_its_setting_of_the_fused_product(device, T, scale, poisoned_memory):
    rng = np.random.default_rng(42)
    drawn = [torch.from_numpy(rng.uniform(-8, -6, (2, T, 1, 64))) for _ in range(4)]
    kk = F.normalize(torch.from_numpy(rng.uniform(-1, 1, (2, T, 1, 64))), dim=-1)
    a = torch.from_numpy(rng.uniform(0, 0.1, (2, T, 1, 64)))
    h0 = torch.from_numpy(rng.standard_normal((2, 1, 64, 64)))
    given = [x.to(device, SINGLE) for x in (*drawn, kk, a)]  # r, w, k, v, kk, a
    h0 = h0.to(device, SINGLE)
    o, state = flakit.fused_mul_recurrent_rwkv7(*given, scale=scale, initial_state=h0, output_final_state=True)
    exact = [x.double() for x in given]
    o_true, state_true = fla_on_cpu.mul_rwkv7(*exact, scale=scale, initial_state=h0, output_final_state=True)
    for got, true in ((o, o_true), (state, state_true)):
        assert (got.double() - true).norm() < 1e-5 * true.norm()


@pytest.mark.parametrize("HQ", [8, 16])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_its_decoding_with_grouped_queries(device, HQ, poisoned_memory):
    T, D, M = 63, 100, 32
    made = {
        name: x.to(device) for name, x in flakit.inputs("gsa", B=2, T=T, K=D, M=M, HQ=HQ, decay="logsigmoid").items()
    }
    state, outputs = None, []
    for t in range(T):
        token = {name: x[:, t : t + 1] for name, x in made.items()}
        o, state = flakit.fused_recurrent_gsa(**token, initial_state=state, output_final_state=True)
        outputs.append(o)
    exact = {name: x.double() for name, x in made.items()}
    spread = {name: x if name == "q" else x.repeat_interleave(HQ // 2, 2) for name, x in exact.items()}
    true, _ = fla_on_cpu.gsa(**spread)
    assert (torch.cat(outputs, 1).double() - true).norm() < 2e-5 * true.norm()
