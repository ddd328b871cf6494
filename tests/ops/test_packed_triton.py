"""Padding behind the last packed sequence, and offsets that are no offsets: in every form, backend and way to call."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from flakit import checked
from flakit.numerics.evaluate import evaluate
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS, operator
from flakit.ops.common.dispatch import has_triton
from tests.ops.places import GPU, PLACES, TORCH

if has_triton():
    from flakit.ops.common.packed_triton import Packing

OPS = pytest.mark.parametrize("op", list(OPERATORS))
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
KERNELS = pytest.mark.parametrize("place", [p for p in PLACES if p.values[0] is not TORCH])
PADDED = [0, 9, 9, 20]  # of 29 rows
INVALID = {
    "decreasing": [0, 20, 9, 29],
    "not from 0": [3, 9, 20, 29],
    "negative": [-5, 9, 20, 29],
    "beyond T": [0, 9, 20, 61],
    "far beyond T": [0, 2**31 + 7, 2**33, 2**34],
}


def made(place, op, offsets, T=29, dtype=torch.float32, **more):
    """Every argument, the states of as many sequences as there are offsets for."""
    sizes = dict(H=2, K=16, V=24, dtype=dtype, device=place.device)
    sizes |= dict(M=16, HQ=4) if op == "gsa" else {}
    x = inputs(op, B=1, T=T, **sizes, **more)
    state = inputs(op, B=len(offsets) - 1, T=1, initial_state=True, **sizes)["initial_state"]
    return x | {"initial_state": state, "cu_seqlens": torch.tensor(offsets, device=place.device)}


def results(place, op, form, x, run=None):
    """Every output and gradient by name; an initial state goes in, a gradient arrives at the final one."""
    op = operator(op)
    leaves = {name: x[name] for name in op.tensors} | dict(zip(op.states, op.parts(x["initial_state"]), strict=True))
    leaves = {name: y.detach().clone().requires_grad_() for name, y in leaves.items()}
    o, final = (run or op.forms[form])(**op.arguments(leaves, x), backend=place.backend, output_final_state=True)
    outputs = (o, *op.parts(final))
    grads = torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(y) for y in outputs])
    names = (*op.outputs, *(f"d{name}" for name in leaves))
    return {name: y.detach() for name, y in zip(names, (*outputs, *grads), strict=True)}


def padding_of(op, found, end):
    sequences = ["o", *(f"d{name}" for name in OPERATORS[op].sequences)]
    return {name: found[name][:, end:] for name in sequences}


@OPS
@FORMS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("offsets", [PADDED, [0, 0, 0]], ids=["some rows", "all rows"])
def test_padding_is_not_read_and_gives_zeros(place, op, form, offsets, poisoned_memory):
    end = offsets[-1]
    x = made(place, op, offsets)
    for name in OPERATORS[op].sequences:
        x[name][:, end:] = torch.nan
    found = results(place, op, form, x)
    for name, rows in padding_of(op, found, end).items():
        assert not rows.any(), name
    assert all(y.isfinite().all() for y in found.values())
    if end:
        short = {name: y[:, :end] if name in OPERATORS[op].sequences else y for name, y in x.items()}
        for name, y in results(place, op, form, short).items():
            got = found[name][:, :end] if name in padding_of(op, found, end) else found[name]
            torch.testing.assert_close(got, y, rtol=2e-6, atol=2e-6 * y.abs().max().item(), msg=name)


@FORMS
@pytest.mark.parametrize("place", PLACES)
def test_padding_of_gsa_without_gates(place, form):
    x = made(place, "gsa", PADDED) | {"g": None}
    for name in ("q", "k", "v", "s"):
        x[name][:, PADDED[-1] :] = torch.nan
    del x["initial_state"]
    leaves = {name: x[name].clone().requires_grad_() for name in ("q", "k", "v", "s")}
    o = OPERATORS["gsa"].forms[form](**x | leaves, backend=place.backend).o
    grads = torch.autograd.grad(o.sum(), list(leaves.values()))
    for y in (o, *grads):
        assert y[:, : PADDED[-1]].isfinite().all() and not y[:, PADDED[-1] :].any()
    assert all(y.any() for y in grads)


@OPS
@FORMS
@KERNELS
@pytest.mark.parametrize("kind", list(INVALID))
def test_kernels_answer_invalid_offsets_with_nan_everywhere(place, op, form, kind, monkeypatch, poisoned_memory):
    # A CPU looks at values and refuses; kernels are asked as they are where nobody looks.
    monkeypatch.setattr("flakit.ops.common.validation.looks_at_values", lambda x: False)
    x = made(place, op, INVALID[kind])
    for name, y in results(place, op, form, x).items():
        assert y.isnan().all(), name


@OPS
@FORMS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", list(INVALID))
def test_invalid_offsets_are_refused_where_values_are_looked_at(place, op, form, kind):
    x = made(place, op, INVALID[kind])
    with checked(), pytest.raises(ValueError, match="cu_seqlens: expected (non-decreasing )?offsets"):
        OPERATORS[op].forms[form](**x, backend=place.backend)


@pytest.mark.gpu
@OPS
@FORMS
def test_offsets_that_become_invalid_in_a_graph(op, form):
    x = made(GPU, op, PADDED, dtype=torch.bfloat16)
    run = OPERATORS[op].forms[form]
    leaves = [y.requires_grad_() for name, y in x.items() if name in OPERATORS[op].tensors]

    def step():
        o, final = run(**x, output_final_state=True)
        return o, *OPERATORS[op].parts(final), *torch.autograd.grad(o.sum(), leaves)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for offsets, end in ((PADDED, 20), ([0, 5, 9, 11], 11), ([0, 9, 5, 20], None), ([0, 1, 2, 29], 29)):
        x["cu_seqlens"].copy_(torch.tensor(offsets))
        for y in found:
            y.fill_(7)
        graph.replay()
        for y in found:
            assert y.isnan().all() if end is None else y.isfinite().all()
        if end is not None:
            assert not found[0][:, end:].any() and found[0][:, end - 1].any()


@pytest.mark.gpu
@pytest.mark.full
@OPS
@FORMS
def test_padding_and_invalid_offsets_compiled(op, form):
    compiled = torch.compile(OPERATORS[op].forms[form], fullgraph=True)
    x = made(GPU, op, PADDED)
    for name in OPERATORS[op].sequences:
        x[name][:, PADDED[-1] :] = torch.nan
    found = results(GPU, op, form, x, compiled)
    assert all(not rows.any() for rows in padding_of(op, found, PADDED[-1]).values())
    x["cu_seqlens"] = torch.tensor(INVALID["decreasing"], device="cuda")
    assert all(y.isnan().all() for y in results(GPU, op, form, x, compiled).values())


@KERNELS
@pytest.mark.parametrize("lengths", [[5], [0, 0, 1, 0], [40, 1, 0, 17, 16, 48], [1] * 1030 + [70]], ids=len)
@pytest.mark.parametrize("tokens, least", [(16, 0), (16, 1), (48, 1), (1, 0)])
def test_pieces(place, lengths, tokens, least):
    T = sum(lengths) + 3
    packing = Packing(torch.tensor(list(accumulate(lengths, initial=0)), device=place.device), T)
    sizes = (7, 0), (96, 1), (tokens, least), (64, 1), (tokens, 1 - least)  # more than one launch lays out
    for size in sizes:
        packing.request(*size)
    assert packing.offsets.view().tolist()[: len(lengths) + 2] == [*accumulate(lengths, initial=0), 0]
    for tokens, least in sizes:
        pieces = packing.pieces(tokens, least)
        expected = [max(least, -(-length // tokens)) for length in lengths]
        assert pieces.before.view().tolist()[: len(lengths) + 1] == list(accumulate(expected, initial=0))
        assert sum(expected) <= pieces.capacity == packing.capacity(tokens)
        owners = [n for n, count in enumerate(expected) for _ in range(count)]
        owners += [len(lengths) - 1] * (pieces.capacity - sum(expected))
        assert pieces.sequence.view().tolist()[: pieces.capacity] == owners


@KERNELS
@pytest.mark.parametrize("offsets", [[0, 5], [0, 3, 3, 9]], ids=str)
def test_offsets_alone_write_nothing_behind_their_memory(place, offsets, monkeypatch):
    memory, sizes = torch.full((4096,), -7, dtype=torch.int32, device=place.device), []
    packing = Packing(torch.tensor(offsets, device=place.device), 9)
    new_empty = torch.Tensor.new_empty

    def guarded(x, size, **how):
        if x is not packing.cu_seqlens or "dtype" not in how:  # the interpreter copies arguments
            return new_empty(x, size, **how)
        sizes.append(size)
        return memory[:size]

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    assert packing.offsets.view().tolist()[: len(offsets) + 1] == [*offsets, 0]
    assert len(sizes) == 1 and (memory[sizes[0] :] == -7).all()


TWO_GPUS = torch.cuda.is_available() and torch.cuda.device_count() > 1


@pytest.mark.gpu
@pytest.mark.skipif(not TWO_GPUS, reason="needs two GPUs")
@OPS
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tensors_on_another_gpu_than_the_current_one(op, form, dtype):
    x = made(GPU, op, PADDED, dtype=dtype)
    there = {name: y.to("cuda:1") if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    there["initial_state"] = OPERATORS[op].state([y.to("cuda:1") for y in OPERATORS[op].parts(x["initial_state"])])
    torch.cuda.set_device(0)
    here = evaluate(op, x, form=form)
    for name, y in evaluate(op, there, form=form).items():
        assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        assert torch.equal(y.to("cuda:0"), here[name]), name


class ElsewhereModule:
    """Kernels that note which GPU is the current one when they are launched."""

    def __init__(self, current):
        self.current, self.noted = current, []

    def forward(self, *given):
        self.noted.append(("forward", *self.current))
        return None, None, None

    def backward(self, *given):
        self.noted.append(("backward", *self.current))
        return None, None


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize("index, expected", [(1, [0, 1]), (0, [0])])
def test_kernels_are_launched_on_the_gpu_of_their_tensors(index, expected, monkeypatch):
    from flakit.ops.common.ahead_triton import Kernels

    current = [0]

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(Kernels, "_memory", lambda *given: None)
    device = dict(is_cuda=True, device=torch.device("cuda", index), get_device=lambda: index)
    x = SimpleNamespace(**device, dtype=torch.float32, shape=(1, 2, 1, 1), ndim=4)
    module = ElsewhereModule(current)
    kernels = Kernels(module)
    kernels.forward(x, x, x, x, 1.0, None, False, None, 0, False)
    kernels.backward(x, x, x, x, 1.0, None, None, 0, (), x, None)
    assert module.noted == [("forward", *expected), ("backward", *expected)] and current == [0]
