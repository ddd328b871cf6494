"""evaluate and truth: the same problem, twice, by ways that share no arithmetic."""

import pytest
import torch

from flakit.numerics.errors import compare
from flakit.numerics.evaluate import LONGEST_NOT_FINITE, cotangents, evaluate, recurrence, truth
from flakit.numerics.inputs import DECAYS, inputs
from flakit.numerics.operators import OPERATORS

OPS = pytest.mark.parametrize("op", OPERATORS)
NAMES = {"o", "final_state", "dr", "dk", "dv", "dw", "du"}


def worst(got, exact):
    assert got.keys() == exact.keys()
    return max(compare(got[name], exact[name]).l2 for name in exact)


@OPS
@pytest.mark.parametrize("decay", [*DECAYS, -20.0], ids=str)
def test_both_ways_to_the_truth_agree(op, decay):
    x = inputs(op, T=LONGEST_NOT_FINITE + 37, H=1, K=8, V=5, decay=decay, initial_state=True)
    walked, chunked = (truth(op, x, dfinal_state=True, recurrence=way) for way in (True, False))
    assert worst(chunked, walked) < 2e-14
    assert worst(truth(op, x, dfinal_state=True), chunked) == 0  # long ones come from the chunks


@OPS
@pytest.mark.parametrize("change", ["an infinite value", "a growing state"])
def test_what_is_not_finite_begins_where_the_recurrence_says(op, change):
    x = inputs(op, T=100, H=1, K=8, V=5)
    if change == "an infinite value":
        x["v"][0, 40] = torch.inf
    else:
        x[OPERATORS[op].decay][0, 30:] = 40.0  # e^709 is the last float64, some 18 tokens on
    walked, chosen = truth(op, x, recurrence=True), truth(op, x)
    assert not walked["o"][:, 60:].isfinite().any() and walked["o"][:, :40].isfinite().all()
    for name, exact in walked.items():
        torch.testing.assert_close(chosen[name], exact, rtol=0, atol=0, equal_nan=True)


@OPS
def test_outputs_and_gradients_of_every_operator(op):
    x = inputs(op, B=2, T=33, K=8, V=5, initial_state=True)
    described = OPERATORS[op]
    found, exact = evaluate(op, x, dfinal_state=True), truth(op, x, dfinal_state=True)
    assert set(exact) == {*described.outputs, *(f"d{name}" for name in (*described.tensors, *described.states))}
    assert worst(found, exact) < 1e-6
    axes, size = described.axes, described.size(described.leaves(x))
    for name, got in found.items():
        axis = axes[name] if name in described.outputs else axes[name[1:]]
        assert got.shape == tuple(size[a] for a in axis.split()), name


@OPS
def test_an_operator_says_who_reads_and_what_is_written(op):
    of, x = OPERATORS[op], inputs(op, T=3, H=1, K=4, dtype=torch.float64, initial_state=True, requires_grad=True)
    leaves = {name: x[name] for name in of.sequences}
    last = of.forms["recurrent"](**x).o[:, -1].square().sum()
    gradients = dict(zip(leaves, torch.autograd.grad(last, list(leaves.values())), strict=True))
    reach_later_tokens = {name for name, x in gradients.items() if x[:, 1].any()}
    assert {*of.written, of.decay} <= reach_later_tokens and of.queries[0] not in reach_later_tokens
    assert {*of.keys} <= {*of.written}
    includes_its_own_decay = next(iter(of.reads.values()))
    assert bool(gradients[of.decay][:, -1].any()) == includes_its_own_decay


def test_truth_is_what_automatic_differentiation_of_the_definition_gives():
    x = inputs("rwkv6", B=2, T=9, K=4, V=3, initial_state=True, dtype=torch.float64, requires_grad=True)
    do, dstate = cotangents("rwkv6", x, dfinal_state=True)
    S, outputs = x["initial_state"], []
    for t in range(9):
        r, k, v, w = (x[name][:, t] for name in "rkvw")
        kv = k[..., :, None] * v[..., None, :]
        outputs.append(0.5 * (r[..., None] * (S + x["u"][..., None] * kv)).sum(-2))
        S = w.exp()[..., None] * S + kv
    grads = torch.autograd.grad((torch.stack(outputs, 1), S), tuple(x.values()), (do, dstate))
    exact = truth("rwkv6", x, dfinal_state=True)
    assert set(exact) == NAMES | {"dinitial_state"}
    for name, grad in zip(x, grads, strict=True):
        assert compare(exact[f"d{name}"], grad).l2 < 1e-15


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
def test_evaluate_agrees_with_truth(form, dtype, tolerance):
    x = inputs("rwkv6", B=2, T=65, K=16, V=24, decay="logsigmoid", dtype=dtype, initial_state=True)
    got = evaluate("rwkv6", x, form=form, dfinal_state=True)
    assert worst(got, truth("rwkv6", x, dfinal_state=True)) < tolerance
    assert {name: y.dtype for name, y in got.items() if name[1:] in x} == {f"d{name}": x[name].dtype for name in x}


def test_a_recurrence_in_float32_is_the_definition_walked_in_float32():
    x = inputs("rwkv6", T=64, H=1, K=8, V=5, decay="logsigmoid")
    S, outputs = torch.zeros(8, 5), []
    for t in range(64):
        r, k, v, w = (x[name][0, t, 0] for name in "rkvw")
        outputs.append(8**-0.5 * (r[:, None] * (S + x["u"][0, :, None] * (k[:, None] * v))).sum(0))
        S = w.exp()[:, None] * S + k[:, None] * v
    found = recurrence("rwkv6", x)
    assert torch.equal(found["o"][0, :, 0], torch.stack(outputs)) and torch.equal(found["final_state"][0, 0], S)


@OPS
@pytest.mark.parametrize("dtype, state", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_a_recurrence_stores_what_an_operator_would(op, dtype, state):
    x = inputs(op, B=3, T=20, H=1, K=8, V=5, dtype=dtype, initial_state=True)
    packed = {
        name: tensor.flatten(0, 1)[None] if name in OPERATORS[op].sequences else tensor for name, tensor in x.items()
    }
    packed["cu_seqlens"] = torch.tensor([0, 20, 40, 60])
    for given in (x, packed):
        found, stored = recurrence(op, given, dfinal_state=True), evaluate(op, given, dfinal_state=True)
        assert {name: y.dtype for name, y in found.items()} == {name: y.dtype for name, y in stored.items()}
        assert found[OPERATORS[op].outputs[1]].dtype == state
        assert worst(found, truth(op, given, dfinal_state=True)) < {torch.float64: 1e-14}.get(dtype, 2.5e-3)


def test_a_recurrence_in_float32_drifts_where_the_operators_own_does_not():
    """Thousands of products with the same rounded e^w add its error up: why the torch backend walks in float64."""
    x = inputs("rwkv6", T=4096, H=1, K=8, decay=-1e-4)
    exact = truth("rwkv6", x)["o"]
    drift = compare(recurrence("rwkv6", x)["o"], exact).l2
    own = compare(evaluate("rwkv6", x, form="recurrent")["o"], exact).l2
    assert 1e-5 < drift < 1e-4 and own < 3e-8


@OPS
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_recurrent_kernel_rounds_as_a_recurrence_in_float32_does(op, device):
    x = inputs(op, T=32, H=1, K=64, device=device)
    exact, kernel, plain = truth(op, x), evaluate(op, x, form="recurrent", backend="triton"), recurrence(op, x)
    for name in exact:
        assert 1 / 3 < compare(kernel[name], exact[name]).l2 / compare(plain[name], exact[name]).l2 < 3, name


def test_the_state_gradient_arrives_only_on_request():
    x = inputs("rwkv6", T=20, K=8, initial_state=True)
    without, with_state = (evaluate("rwkv6", x, dfinal_state=asked) for asked in (False, True))
    assert compare(without["dv"], with_state["dv"]).l2 > 0.1
    assert worst(without, truth("rwkv6", x)) < 1e-6


def test_scale_chunk_size_backend_and_seed_are_passed_on():
    x = inputs("rwkv6", T=40, K=8) | {"scale": 0.3}
    exact = truth("rwkv6", x)
    assert worst(evaluate("rwkv6", x, chunk_size=16), exact) < 1e-6
    assert worst(evaluate("rwkv6", x, backend="reference"), exact) < 1e-6
    assert compare(truth("rwkv6", {**x, "scale": 0.6})["o"], exact["o"]).l2 == pytest.approx(1.0)
    assert compare(truth("rwkv6", x, grad_seed=2)["dv"], exact["dv"]).l2 > 0.5


@pytest.mark.parametrize("offsets", [[0, 1, 30, 94], [0, 40, 40, 94]], ids=["uneven", "one empty"])
def test_packed_sequences_are_their_parts(offsets):
    x = inputs("rwkv6", T=94, H=2, K=8, V=5)
    state = inputs("rwkv6", B=3, T=1, H=2, K=8, V=5, initial_state=True)["initial_state"]
    packed = x | {"initial_state": state, "cu_seqlens": torch.tensor(offsets)}
    exact = truth("rwkv6", packed, dfinal_state=True)
    for form in ("chunk", "recurrent"):
        assert worst(evaluate("rwkv6", packed, form=form, dfinal_state=True), exact) < 1e-6
    do, dstate = cotangents("rwkv6", packed, dfinal_state=True)
    start, end = offsets[-2:]
    last = {name: x[name][:, start:end] for name in "rkvw"} | {"u": x["u"], "initial_state": state[2:]}
    alone = truth("rwkv6", last, arriving=(do[:, start:end], dstate[2:]))
    assert compare(exact["dw"][:, start:end], alone["dw"]).l2 < 1e-14
    assert compare(exact["dinitial_state"][2:], alone["dinitial_state"]).l2 < 1e-14


def test_cotangents_are_independent_of_inputs_with_the_same_seed():
    x = inputs("rwkv6", seed=1)
    do, _ = cotangents("rwkv6", x, grad_seed=1)
    assert all(abs(torch.corrcoef(torch.stack((do.flatten(), x[n].flatten())))[0, 1]) < 0.1 for n in "rkv")


def test_inputs_are_left_alone():
    x = inputs("rwkv6", T=20, K=8, requires_grad=True)
    copies = {name: t.detach().clone() for name, t in x.items()}
    evaluate("rwkv6", x)
    assert all(t.grad is None and torch.equal(t.detach(), copies[name]) for name, t in x.items())


def test_wrong_arguments_are_named():
    x = inputs("rwkv6", T=4, K=4)
    with pytest.raises(ValueError, match="form: expected one of chunk, recurrent, got 'parallel'"):
        evaluate("rwkv6", x, form="parallel")
    with pytest.raises(ValueError, match="inputs: expected r, k, v, w, u, got none for w"):
        truth("rwkv6", {name: t for name, t in x.items() if name != "w"})
    with pytest.raises(ValueError, match="op: expected one of rwkv6, rwkv7, gsa, .*, got 'rwkv5'"):
        truth("rwkv5", x)
