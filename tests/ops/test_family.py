"""The references of the family: against explicit matrices, by finite differences, and across packed sequences."""

import inspect

import numpy as np
import pytest
import torch

import flakit
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.family import FAMILY
from flakit.numerics.operators import OPERATORS
from flakit.ops import family

OPS = pytest.mark.parametrize("op", FAMILY)
SIZES = {"B": 2, "T": 7, "H": 2, "K": 5, "V": 3}


def text(op):
    return inspect.unwrap(FAMILY[op].reference.function)


def transition(op, x, b, t, h, h_keys, heads):
    """(A, what is written) of S_t = A S_{t-1} + written, as matrices [K, K] and [K, V]."""
    q, k, v = (x[name][b, t] for name in "qkv")
    K, key, value = k.shape[-1], k[h_keys], v[h]
    eye, writes = np.eye(K), np.outer(key, value)
    if op == "linear_attn":
        return eye, writes
    if op == "retention":
        return (1 - 2.0 ** -(5 + h)) * eye, writes
    if op == "lightning_attn":
        return np.exp(-8 * h / heads * (1 - 1 / 4)) * eye, writes
    if op in ("simple_gla", "gla", "hgrn2"):
        return np.diag(np.exp(np.broadcast_to(x["g"][b, t, h], K))), writes
    if op == "dplr_delta_rule":
        return np.diag(np.exp(x["gk"][b, t, h])) + np.outer(x["b"][b, t, h], x["a"][b, t, h]), writes
    beta = x["beta"][b, t, h]
    keep = eye if op == "delta_rule" else np.diag(np.exp(np.broadcast_to(x["g"][b, t, h], K)))
    return (eye - beta * np.outer(key, key)) @ keep, beta * writes


def by_matrices(op, x, scale, state):
    """o and the final state: the sum of what every token wrote, carried by products of matrices."""
    x = {name: y.numpy() for name, y in x.items()}
    B, T, H, K = x["k"].shape
    heads, V = x["v"].shape[2:]
    o, last = np.zeros((B, T, heads, V)), np.zeros((B, heads, K, V))
    for b, h in np.ndindex(B, heads):
        steps = [transition(op, x, b, t, h, h // (heads // H), heads) for t in range(T)]
        for t in range(T):
            S = np.zeros((K, V))
            for s in range(-1, t + 1):  # -1: the initial state
                carried = np.eye(K)
                for u in range(s + 1, t + 1):
                    carried = steps[u][0] @ carried
                S += carried @ (state[b, h] if s < 0 else steps[s][1])
            o[b, t, h], last[b, h] = scale * x["q"][b, t, h // (heads // H)] @ S, S
    return torch.from_numpy(o), torch.from_numpy(last)


@OPS
@pytest.mark.parametrize("groups", [1, 2])
def test_outputs_and_states_are_those_of_explicit_matrices(op, groups):
    of = FAMILY[op]
    more = {"HV": 4} if groups == 2 and "HV" in of.sizes else {}
    x = flakit.inputs(op, **SIZES, **more, dtype=torch.float64, initial_state=True)
    state = x.pop("initial_state")
    o, last = of.reference.function(
        **x, **{name: y for name, y in of.constants.items() if name in of.reference.named},
        scale=0.3, initial_state=state, output_final_state=True,
    )  # fmt: skip
    true, true_last = by_matrices(op, x, 0.3, state.numpy())
    torch.testing.assert_close(o, true, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, true_last, rtol=1e-12, atol=1e-12)


@OPS
def test_every_gradient_is_that_of_finite_differences(op):
    of = FAMILY[op]
    sizes = {"B": 1, "T": 3, "H": 1, "K": 2, "V": 3} | ({"HV": 2} if "HV" in of.sizes else {})
    x = of.leaves(flakit.inputs(op, **sizes, dtype=torch.float64, initial_state=True))

    def run(*given):
        leaves = dict(zip(x, given, strict=True))
        out = of.reference.on({name: leaves[name] for name in of.tensors}, 0.7, leaves["initial_state"])
        return out.o, out.final_state

    assert torch.autograd.gradcheck(run, [y.requires_grad_() for y in x.values()])


@OPS
def test_truth_has_every_gradient_and_carries_packed_sequences_apart(op):
    of, ends = FAMILY[op], [0, 4, 4, 9]
    x = flakit.inputs(op, T=11, H=2, K=4, V=3, cu_seqlens=ends, initial_state=True, dtype=torch.float64)
    whole = truth(op, x, dfinal_state=True)
    assert set(whole) == {*of.outputs, *(f"d{name}" for name in (*of.tensors, "initial_state"))}
    form = evaluate(op, x, form="naive", dfinal_state=True)
    for name, y in whole.items():
        torch.testing.assert_close(form[name], y, rtol=1e-12, atol=1e-12)
        if name == "o" or name[1:] in of.sequences:
            assert not y[:, 9:].any() and y[:, :9].any(), name  # rows of no sequence
    for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        assert begin < end or torch.equal(whole["final_state"][n], x["initial_state"][n])
        rows = {name: y[:, begin:end] for name, y in x.items() if name in of.sequences}
        if begin < end:
            alone = truth(op, rows | {"initial_state": x["initial_state"][n : n + 1]})
            torch.testing.assert_close(whole["o"][:, begin:end], alone["o"], rtol=1e-12, atol=1e-12)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arithmetic_is_float32_at_least(op, dtype):
    x = flakit.inputs(op, T=33, K=8, V=5, dtype=dtype, initial_state=True)
    found, true = evaluate(op, x, form="naive"), truth(op, x)
    assert found["o"].dtype == dtype and found["final_state"].dtype == torch.float32
    for name, y in found.items():
        assert (y - true[name]).norm() <= 2 * torch.finfo(y.dtype).eps * 33**0.5 * true[name].norm(), name


def test_rwkv7_is_dplr_with_other_names():
    x = flakit.inputs("rwkv7", T=9, K=4, V=3, dtype=torch.float64)
    o = family.naive_dplr_delta_rule(x["r"], x["k"], x["v"], x["a"], x["b"], x["w"], scale=1.0)[0]
    torch.testing.assert_close(o, evaluate("rwkv7", x, form="recurrent")["o"], rtol=1e-12, atol=1e-12)


def test_hgrn2_writes_what_it_forgets():
    x = flakit.inputs("hgrn2", T=50, dtype=torch.float64)
    torch.testing.assert_close(x["k"], 1 - x["g"].exp(), rtol=1e-12, atol=1e-12)


@OPS
def test_a_reference_is_short_and_says_its_formula_and_source(op):
    lines = inspect.getsource(text(op)).splitlines()
    said = text(op).__doc__
    assert "arXiv:" in said and "S_t = " in said.replace("S' = ", "S_t = ")
    code = len(lines) - len(said.splitlines()) - 1
    assert 8 <= code <= 20, code
    assert "`flakit" not in said and FAMILY[op].label


def test_no_name_is_taken_twice():
    assert not set(FAMILY) & set(OPERATORS)


# --- flash-linear-attention ------------------------------------------------------------------------------------------

THEIRS = {
    "linear_attn": "linear_attn.naive:naive_recurrent_linear_attn",
    "gated_delta_rule": "gated_delta_rule.naive:naive_recurrent_gated_delta_rule",
    "kda": "kda.naive:naive_recurrent_kda",
}


@pytest.mark.full
@pytest.mark.parametrize("op", THEIRS)
def test_flash_linear_attentions_plain_recurrence_agrees(op):
    pytest.importorskip("fla")
    from flakit.numerics.arguments import named_function

    theirs = named_function(f"fla.ops.{THEIRS[op]}", "theirs")
    x = flakit.inputs(op, T=20, K=8, V=5, initial_state=True)
    o, last = theirs(**x, output_final_state=True)
    true = truth(op, x)
    assert (o - true["o"]).norm() < 1e-5 * true["o"].norm()
    assert (last - true["final_state"]).norm() < 1e-5 * true["final_state"].norm()


@pytest.mark.full
@OPS
def test_arguments_are_flash_linear_attentions(op):
    pytest.importorskip("fla")
    import importlib

    package = {"hgrn2": "gla", "dplr_delta_rule": "generalized_delta_rule"}.get(op, op)
    name = "chunk_gla" if op == "hgrn2" else f"chunk_{op}"
    theirs = inspect.signature(getattr(importlib.import_module(f"fla.ops.{package}"), name)).parameters
    ours = inspect.signature(FAMILY[op].reference.function).parameters
    assert [x for x in theirs if x in ours] == list(ours)
    assert set(FAMILY[op].constants) <= set(theirs)
