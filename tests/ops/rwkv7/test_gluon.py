"""RWKV7 in Gluon, through the public function, against float64: emulated on CPU tensors, and on a GPU.

The emulator tests what the kernels compute and access; only a Hopper GPU tests their layouts and barriers.
"""

from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import flakit
from flakit.numerics.evaluate import evaluate
from flakit.numerics.operators import OPERATORS
from flakit.ops.common import kernel_triton, validation
from flakit.ops.common.dispatch import interpreted
from flakit.ops.rwkv7 import api, fused_chunk_triton
from tests.ops.checking import SOLVES, check, true_values
from tests.ops.gluon_emulated import emulated
from tests.ops.settings import Setting, make

GRADIENTS = "dr", "dw", "dk", "dv", "da", "db"
SETTING = Setting(T=40, K=64, V=64, decay="model", dtype="bfloat16", op="rwkv7", H=1)
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.together("RWKV7 in Gluon")])
ON_GPU = pytest.mark.parametrize("device", [CUDA], indirect=True)

pytestmark = pytest.mark.skipif(interpreted(), reason="the emulator runs kernels that are not interpreted")


@pytest.fixture(params=["cpu", CUDA])
def device(request, monkeypatch, poisoned_memory):
    """Where to compute; on the CPU the kernels for Hopper GPUs are launched and emulated."""
    if request.param == "cuda":
        yield "cuda"
        return
    monkeypatch.setattr(api, "choose_backend", lambda backend, x: "triton")
    monkeypatch.setattr(fused_chunk_triton, "_takes_gluon", lambda *tensors: True)
    with emulated():
        yield "cpu"


def checked(device, **changed):
    """Check a setting's outputs and gradients against float64, and return them."""
    made, arriving = make(replace(SETTING, **changed), device)
    results = evaluate("rwkv7", made, arriving=arriving)
    check(results, true_values(made, arriving, "rwkv7"), made)
    return results


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 33, 100])
def test_lengths(device, T):
    assert not checked(device, T=T, H=2)["dw"][:, 0].any(), "nothing is written before the first token"


@pytest.mark.parametrize("states", ["initial", "final", "both"])
@pytest.mark.parametrize("packing", ["none", "packed", "ragged"])
def test_states_and_packed_sequences(device, states, packing):
    """Ragged ones: empty, of one token, with unused parts and rows behind the last."""
    checked(device, T=70, H=2, states=states, packing=packing, B=2 if packing == "none" else 1)


@pytest.mark.parametrize("packing", ["none", "packed", "ragged"])
@pytest.mark.parametrize("T", [300, 512])
def test_parts(device, packing, T):
    """Sequences cut into parts of eight chunks."""
    checked(device, T=T, states="both", packing=packing)


@pytest.mark.parametrize("T, H", [(17, 2), (300, 1)])
def test_outputs_without_gradients(device, T, H):
    """The same bits, without what the backward needs, for a sequence in one part and in three."""
    made, _ = make(replace(SETTING, T=T, H=H, states="both"), device)
    kept = evaluate("rwkv7", made)
    with torch.no_grad():
        out = flakit.chunk_rwkv7(**OPERATORS["rwkv7"].leaves(made), output_final_state=True)
    assert torch.equal(out.o, kept["o"]) and torch.equal(out.final_state, kept["final_state"])


@ON_GPU
@pytest.mark.parametrize("B, T, H", [(1, 600, 2), (1, 4096, 2), (20, 600, 2), (70, 50, 2), (40, 4096, 2)])
def test_few_heads_and_many(device, B, T, H):
    """Many heads walk whole sequences."""
    checked(device, B=B, T=T, H=H, states="both")


@pytest.mark.parametrize("decay", ["none", "-1e-5", "-1.7", "-8", "-80", "spikes", "inf-spikes", "forget", "uniform"])
def test_mild_and_steep_chunks(device, decay):
    checked(device, T=70, decay=decay, states="both")


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_layouts_and_scale(device, layout):
    checked(device, layout=layout, scale="0.05")


@pytest.mark.parametrize("decay", ["model", "spikes"])
@pytest.mark.parametrize("of_v, of_do", [(100, 0), (-100, 0), (0, 100), (0, -100), (40, 40), (-40, -40), (100, -100)])
def test_powers_of_two_scale_gradients(device, decay, of_v, of_do):
    """Gradients are linear in do, and in v all but dv. No bit is lost with values of 1e30 or 1e-30, but on a GPU, whose
    tensor cores drop what is below float32's smallest normal number."""
    most = 2.0**-12 if device == "cuda" and min(of_v, of_do) == -100 else 0.0
    made, (do, _) = make(replace(SETTING, decay=decay), device)
    expected = evaluate("rwkv7", made, arriving=(do, None))
    results = evaluate("rwkv7", made | {"v": made["v"] * 2.0**of_v}, arriving=(do * 2.0**of_do, None))
    for name in GRADIENTS:
        true = expected[name].double() * 2.0 ** (of_do if name == "dv" else of_do + of_v)
        in_range = (true.abs() > 2.0**-100) & (true.abs() < 2.0**120)
        assert (results[name] - true)[in_range].norm() <= most * true.norm(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["r", "w", "k", "v", "a", "b", "do"])
def test_nan_and_infinity_reach_the_gradients(device, monkeypatch, name, value):
    """Where they are in float64, but for what the kernel in Triton knows to be zero: dw before anything is written.
    Values beside them, where finite, are right."""
    made, (do, _) = make(SETTING, device)
    (do if name == "do" else made[name])[0, 20, 0, 5] = -value if name == "w" else value
    truth = true_values(made, (do, None), "rwkv7").values
    with validation.nan_decays_pass():
        results = evaluate("rwkv7", made, arriving=(do, None))
        monkeypatch.setattr(fused_chunk_triton, "_takes_gluon", lambda *tensors: False)
        of_triton = evaluate("rwkv7", made, arriving=(do, None))
    for gradient in GRADIENTS:
        got, true = results[gradient].double(), truth[gradient]
        lost = ~true.isfinite() & ~of_triton[gradient].isfinite()
        assert not got[lost].isfinite().any(), gradient
        finite = got.isfinite() & true.isfinite()
        assert (got - true)[finite].norm() <= SOLVES[torch.bfloat16] * true[finite].norm(), gradient


@ON_GPU
@pytest.mark.parametrize("decay", ["model", "spikes"])
def test_every_run_and_a_captured_graph_give_the_same_bits(device, decay):
    made, arriving = make(replace(SETTING, T=600, B=20, H=2, decay=decay, states="both"), device)
    expected = evaluate("rwkv7", made, arriving=arriving)
    again = evaluate("rwkv7", made, arriving=arriving)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evaluate("rwkv7", made, arriving=arriving)
    for x in captured.values():
        x.fill_(7)
    graph.replay()
    for name, x in expected.items():
        assert torch.equal(x, again[name]) and torch.equal(x, captured[name]), name


@pytest.mark.parametrize("B, T, H", [(8, 4096, 32), (1, 4096, 1), (2, 600, 40), (1, 2**20, 2), (64, 128, 64)])
def test_memory(monkeypatch, B, T, H):
    """Each kernel is launched once. Beside the gradients there is memory for D of unfinished chunks."""
    monkeypatch.setattr(fused_chunk_triton, "_takes_gluon", lambda *tensors: True)
    tensors = [torch.empty(B, T, H, 64, dtype=torch.bfloat16, device="meta") for _ in range(6)]
    saved = fused_chunk_triton.saved_shapes(*tensors, None, 0)
    saved = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in saved]
    launches = []

    def run(kernel, *args, grid, warmup, **options):
        launches.append((kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False)), options))

    with patch.object(JITFunction, "run", run):
        fused_chunk_triton.backward(*tensors, 1.0, None, None, 0, saved, torch.empty_like(tensors[3]), None)
    (gradients,) = [n for n, (*_, options) in enumerate(launches) if options.get("KEEP")]
    names = [name for name, *_ in launches]
    assert names[gradients:] == ["chain_kernel", "grads_kernel"]
    _, args, _ = launches[gradients]
    assert args["tails"].nbytes == (B * H * 2**13 if T % 16 else 0)


class OnGPU(NamedTuple):
    """What is asked of a tensor on a GPU."""

    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, ...] = (1, 64, 2, 64)
    address: int = 512
    is_cuda: bool = True

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0


@pytest.mark.parametrize("at", range(7))
def test_other_calls_take_the_kernel_in_triton(monkeypatch, at):
    """At each place among r, w, k, v, a, b and do."""
    monkeypatch.setattr(kernel_triton, "_has_gluon", lambda device: True)

    def takes(*saved, **changed):
        tensors = [OnGPU() for _ in range(7)]
        tensors[at] = tensors[at]._replace(**changed)
        return fused_chunk_triton._takes_gluon(*tensors, *saved)

    assert takes()
    assert not takes(dtype=torch.float32)
    assert not takes(address=520)
    assert not takes(OnGPU(address=8))
    assert at or not takes(is_cuda=False)
    if at in (0, 3):
        assert not takes(shape=(1, 64, 2, 48))

    def rewriting(*args, **options):
        """Stands for a tool that rewrites kernels."""

    rewriting.rewrites = True
    with patch.object(JITFunction, "run", rewriting):
        assert not takes()
    monkeypatch.setattr(kernel_triton, "_has_gluon", lambda device: False)
    assert not takes()
