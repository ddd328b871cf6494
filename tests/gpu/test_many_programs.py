"""More sequences and heads than a grid's second and third axis can count, which ends at 65535."""

import pytest
import torch

from flakit.numerics.operators import OPERATORS
from tests.ops.places import GPU, of
from tests.ops.settings import Setting

pytestmark = pytest.mark.gpu
LIMIT = 65535
SETTING = Setting(T=3, K=16, V=16, decay="rwkv6-wide", dtype="bfloat16", states="both")


def halves(op, made, arriving):
    """The batch in two, each of which the axis could count."""
    described, (do, dstate) = OPERATORS[op], arriving
    for part in (slice(0, do.shape[0] // 2), slice(do.shape[0] // 2, None)):
        leaves = described.leaves(made)
        rows = {n: x[part] if n in described.sequences + described.states else x for n, x in leaves.items()}
        arrives = do[part], described.state([x[part] for x in described.parts(dstate)])
        yield described.arguments(rows, made), arrives


def repeated(x, axes, times=8):
    """x with each head `times` times. axes: the names of its axes."""
    heads = next(n for n, axis in enumerate(axes.split()) if axis.startswith("H"))
    return x.repeat_interleave(times, heads)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", OPERATORS)
def test_a_batch_of_many_heads(op, form):
    made, arriving = GPU.make(of(op, SETTING), T=3, B=1040, H=64)
    assert 1040 * 64 > LIMIT
    found = GPU.run(made, arriving, form, op)
    parts = [GPU.run(*half, form, op) for half in halves(op, made, arriving)]
    for name, x in found.items():
        if name == "du":
            torch.testing.assert_close(x.float(), sum(p[name].float() for p in parts), rtol=2e-2, atol=0.5)
        else:
            assert torch.equal(x, torch.cat([p[name] for p in parts])), name


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", OPERATORS)
def test_many_packed_sequences(op, form):
    # Each of one token: packed or as a batch, the same numbers.
    N = LIMIT + 100
    made, (do, dstate) = GPU.make(of(op, SETTING), T=1, B=N, H=1)
    batch = GPU.run(made, (do, dstate), form, op)
    described = OPERATORS[op]
    leaves = {n: x.transpose(0, 1) if n in described.sequences else x for n, x in described.leaves(made).items()}
    packed = described.arguments(leaves, made) | {"cu_seqlens": torch.arange(N + 1, device="cuda")}
    found = GPU.run(packed, (do.transpose(0, 1), dstate), form, op)
    for name, x in found.items():
        x = x.transpose(0, 1) if name == "o" or name[1:] in described.sequences else x
        torch.testing.assert_close(
            x.float(), batch[name].float(), rtol=1e-2, atol=1e-2, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.parametrize("op", OPERATORS)
def test_long_packed_sequences(op):
    # Room for more chunks and parts than are filled, in tensors that end where a GPU's memory may: one after another,
    # the same numbers.
    ends = [0, 37, 9000, 9000, 9017, 20002, 20004, 27006, 32761]
    setting = of(op, SETTING, K=64, V=64)
    made, (do, dstate) = GPU.make(setting, T=ends[-1], B=1, H=4)
    described = OPERATORS[op]
    # Four heads, eight times: to draw as many numbers for 32 takes a minute.
    leaves = {n: repeated(x, described.axes[n]) for n, x in described.leaves(made).items()}
    do = repeated(do, described.axes["o"])
    dstate = described.state(
        [repeated(x, described.axes[n]) for n, x in zip(described.states, described.parts(dstate), strict=True)]
    )
    N = len(ends) - 1
    states = {n: leaves[n].expand(N, *leaves[n].shape[1:]).contiguous() for n in described.states}
    dstates = [x.expand(N, *x.shape[1:]).contiguous() for x in described.parts(dstate)]
    packed = described.arguments(leaves | states, made) | {"cu_seqlens": torch.tensor(ends, device="cuda")}
    found = GPU.run(packed, (do, described.state(dstates)), "chunk", op)
    for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if begin == end:
            continue
        rows = {x: y[:, begin:end] if x in described.sequences else y for x, y in leaves.items()}
        alone = GPU.run(described.arguments(rows, made), (do[:, begin:end], dstate), "chunk", op)
        for name, x in alone.items():
            if name == "du":
                continue
            of_all = found[name]
            whole = of_all[:, begin:end] if name == "o" or name[1:] in described.sequences else of_all[n : n + 1]
            error = (whole.double() - x.double()).norm() / x.double().norm().clamp(min=1e-30)
            assert error < 4e-3, f"{name} of sequence {n}: {error:.1e}"
