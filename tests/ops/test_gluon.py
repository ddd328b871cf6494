"""RWKV6 and RWKV7 in Gluon, through the public functions, against float64: emulated on CPU tensors, and on a GPU.

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
from flakit.ops.common import bands_triton, kernel_triton, validation
from flakit.ops.common.dispatch import interpreted
from flakit.ops.common.kernel_triton import Memory
from flakit.ops.rwkv6 import api as rwkv6
from flakit.ops.rwkv6 import fused_chunk_triton as fused_rwkv6
from flakit.ops.rwkv7 import api as rwkv7
from flakit.ops.rwkv7 import fused_chunk_triton as fused_rwkv7
from tests.ops.checking import SOLVES, check, true_values
from tests.ops.gluon_emulated import emulated
from tests.ops.settings import Setting, make

ROWS = {"rwkv6": "rwkv", "rwkv7": "rwkvab"}
GRADIENTS = {"rwkv6": ("dr", "dw", "dk", "dv", "du"), "rwkv7": ("dr", "dw", "dk", "dv", "da", "db")}
SETTING = Setting(T=40, K=64, V=64, decay="model", dtype="bfloat16", op="rwkv7", H=1)
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.together("Gluon")])
ON_GPU = pytest.mark.parametrize("device", [CUDA], indirect=True)

pytestmark = pytest.mark.skipif(interpreted(), reason="the emulator runs kernels that are not interpreted")


@pytest.fixture(params=["cpu", CUDA])
def device(request, monkeypatch, poisoned_memory):
    """Where to compute; on the CPU the kernels for Hopper GPUs are launched and emulated. Small calls take them too."""
    monkeypatch.setattr(fused_rwkv6, "FEWEST", 0)
    if request.param == "cuda":
        yield "cuda"
        return
    for api in (rwkv6, rwkv7):
        monkeypatch.setattr(api, "choose_backend", lambda backend, x: "triton")
    monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors: True)
    with emulated():
        yield "cpu"


@pytest.fixture(params=ROWS)
def op(request):
    return request.param


def checked(device, op, **changed):
    """Check a setting's outputs and gradients against float64, and return them."""
    made, arriving = make(replace(SETTING, op=op, **changed), device)
    results = evaluate(op, made, arriving=arriving)
    check(results, true_values(made, arriving, op), made)
    return results


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 33, 100])
def test_lengths(device, op, T):
    assert not checked(device, op, T=T, H=2)["dw"][:, 0].any(), "nothing is written before the first token"


@pytest.mark.parametrize("states", ["initial", "final", "both"])
@pytest.mark.parametrize("packing", ["none", "packed", "ragged"])
def test_states_and_packed_sequences(device, op, states, packing):
    """Ragged ones: empty, of one token, with unused parts and rows behind the last."""
    checked(device, op, T=70, H=2, states=states, packing=packing, B=2 if packing == "none" else 1)


@pytest.mark.parametrize("packing", ["none", "packed", "ragged"])
@pytest.mark.parametrize("T", [300, 512])
def test_parts(device, op, packing, T):
    """Sequences cut into parts of eight chunks."""
    checked(device, op, T=T, states="both", packing=packing)


@pytest.mark.parametrize("T, H", [(17, 2), (300, 1)])
def test_outputs_without_gradients(device, op, T, H):
    """The same bits, without what the backward needs, for a sequence in one part and in three."""
    made, _ = make(replace(SETTING, op=op, T=T, H=H, states="both"), device)
    kept = evaluate(op, made)
    with torch.no_grad():
        out = getattr(flakit, f"chunk_{op}")(**OPERATORS[op].leaves(made), output_final_state=True)
    assert torch.equal(out.o, kept["o"]) and torch.equal(out.final_state, kept["final_state"])


@ON_GPU
@pytest.mark.parametrize("B, T, H", [(1, 600, 2), (1, 4096, 2), (20, 600, 2), (70, 50, 2), (40, 4096, 2)])
def test_few_heads_and_many(device, op, B, T, H):
    """Many heads walk whole sequences."""
    checked(device, op, B=B, T=T, H=H, states="both")


@pytest.mark.parametrize("decay", ["none", "-1e-5", "-1.7", "-8", "-80", "spikes", "inf-spikes", "forget", "uniform"])
def test_mild_and_steep_chunks(device, op, decay):
    checked(device, op, T=70, decay=decay, states="both")


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_layouts_and_scale(device, op, layout):
    checked(device, op, layout=layout, scale="0.05")


@pytest.mark.parametrize("decay", ["model", "spikes"])
@pytest.mark.parametrize("of_v, of_do", [(100, 0), (-100, 0), (0, 100), (0, -100), (40, 40), (-40, -40), (100, -100)])
def test_powers_of_two_scale_gradients(device, op, decay, of_v, of_do):
    """Gradients are linear in do, and in v all but dv. No bit is lost with values of 1e30 or 1e-30, but on a GPU, whose
    tensor cores drop what is below float32's smallest normal number."""
    most = 2.0**-12 if device == "cuda" and min(of_v, of_do) == -100 else 0.0
    made, (do, _) = make(replace(SETTING, op=op, decay=decay), device)
    expected = evaluate(op, made, arriving=(do, None))
    results = evaluate(op, made | {"v": made["v"] * 2.0**of_v}, arriving=(do * 2.0**of_do, None))
    for name in GRADIENTS[op]:
        true = expected[name].double() * 2.0 ** (of_do if name == "dv" else of_do + of_v)
        in_range = (true.abs() > 2.0**-100) & (true.abs() < 2.0**120)
        assert (results[name] - true)[in_range].norm() <= most * true.norm(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("op, name", [(op, name) for op in ROWS for name in (*ROWS[op], "do")])
def test_nan_and_infinity_reach_the_gradients(device, op, monkeypatch, name, value):
    """Where they are in float64, but for what the kernel in Triton knows to be zero: dw before anything is written.
    Values beside them, where finite, are right."""
    made, (do, _) = make(replace(SETTING, op=op), device)
    (do if name == "do" else made[name])[0, 20, 0, 5] = -value if name == "w" else value
    truth = true_values(made, (do, None), op).values
    with validation.nan_decays_pass():
        results = evaluate(op, made, arriving=(do, None))
        monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors: False)
        of_triton = evaluate(op, made, arriving=(do, None))
    for gradient in GRADIENTS[op]:
        got, true = results[gradient].double(), truth[gradient]
        lost = ~true.isfinite() & ~of_triton[gradient].isfinite()
        assert not got[lost].isfinite().any(), gradient
        finite = got.isfinite() & true.isfinite()
        assert (got - true)[finite].norm() <= SOLVES[torch.bfloat16] * true[finite].norm(), gradient


@ON_GPU
@pytest.mark.parametrize("decay", ["model", "spikes"])
def test_every_run_and_a_captured_graph_give_the_same_bits(device, op, decay):
    made, arriving = make(replace(SETTING, op=op, T=600, B=20, H=2, decay=decay, states="both"), device)
    expected = evaluate(op, made, arriving=arriving)
    again = evaluate(op, made, arriving=arriving)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evaluate(op, made, arriving=arriving)
    for x in captured.values():
        x.fill_(7)
    graph.replay()
    for name, x in expected.items():
        assert torch.equal(x, again[name]) and torch.equal(x, captured[name]), name


@pytest.mark.parametrize("B, T, H", [(8, 4096, 32), (1, 4096, 1), (2, 600, 40), (1, 2**20, 2), (64, 128, 64)])
def test_memory_of_rwkv7(monkeypatch, B, T, H):
    """Each kernel is launched once. Beside the gradients there is memory for D of unfinished chunks."""
    monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors: True)
    tensors = [torch.empty(B, T, H, 64, dtype=torch.bfloat16, device="meta") for _ in range(6)]
    saved = fused_rwkv7.saved_shapes(*tensors, None, 0)
    saved = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in saved]
    launches = []

    def run(kernel, *args, grid, warmup, **options):
        launches.append((kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False)), options))

    with patch.object(JITFunction, "run", run):
        fused_rwkv7.backward(Memory(), *tensors, 1.0, None, None, 0, saved, torch.empty_like(tensors[3]), None)
    (gradients,) = [n for n, (*_, options) in enumerate(launches) if options.get("KEEP")]
    names = [name for name, *_ in launches]
    assert names[gradients:] == ["chain_kernel", "grads_kernel"]
    _, args, _ = launches[gradients]
    assert args["tails"].nbytes == (B * H * 2**13 if T % 16 else 0)


@pytest.mark.parametrize("B, T, H", [(8, 4096, 32), (1, 4000, 40), (1, 2**20, 2), (1, 4096, 31)])
def test_memory_of_rwkv6(monkeypatch, B, T, H):
    """D is stored in dv; a sequence's last one, where it is not zero, beside. Few chunks take the kernel in Triton."""
    monkeypatch.setattr(bands_triton, "runs_gluon", lambda *tensors: True)
    r, k, v, w = (torch.empty(B, T, H, 64, dtype=torch.bfloat16, device="meta") for _ in range(4))
    saved = fused_rwkv6.saved_shapes(r, k, v, w, r[0, 0], None, 0)
    saved = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in saved]
    launches = {}

    def run(kernel, *args, grid, warmup, **options):
        launches[kernel.fn.__name__] = dict(zip(kernel.arg_names, args, strict=False))

    with patch.object(JITFunction, "run", run):
        rest = 1.0, None, None, 0, saved, torch.empty_like(v), None
        _, _, dv, *_ = fused_rwkv6.backward(Memory(), r, k, v, w, r[0, 0], *rest)
    if H == 31:
        assert list(launches)[-1] == "backward_kernel"
        return
    *_, chain, gradients = launches
    assert (chain, gradients) == ("chain_kernel", "grads_kernel")
    for args in (launches[chain], launches[gradients]):
        assert args["D"].untyped_storage()._cdata == dv.untyped_storage()._cdata
        assert (args["ends"] is None) == (B * H > 128) and args["d_units"].nbytes <= B * H * (T + 64) * 4
    assert args["ends"] is None or args["ends"].nbytes == B * H * 2**13


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


@pytest.mark.parametrize("op, at", [(op, at) for op in ROWS for at in range(len(ROWS[op]) + 1)])
def test_other_calls_take_the_kernels_in_triton(monkeypatch, op, at):
    """At each place among the rows and do."""
    monkeypatch.setattr(kernel_triton, "_has_gluon", lambda device: True)

    def takes(*saved, **changed):
        tensors = [OnGPU() for _ in (*ROWS[op], "do")]
        tensors[at] = tensors[at]._replace(**changed)
        return bands_triton.takes_gluon(tensors, saved)

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
