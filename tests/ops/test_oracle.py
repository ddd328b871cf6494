"""The float64 truth and the references held to an oracle written apart from them, which sees faults planted there.

test_covering_set.py does the same over every setting; here are what the oracle itself stands on, and the proof that
the comparison can fail.
"""

import ast
import inspect
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flakit.numerics.evaluate import LONGEST_RECURRENCE, truth
from flakit.numerics.operators import OPERATORS
from tests.ops.checking import measure, true_values
from tests.ops.oracle import STATES, oracle, outputs
from tests.ops.places import of
from tests.ops.settings import Setting, make

OPS = pytest.mark.parametrize("op", OPERATORS)
SMALL = Setting(T=9, K=4, V=3, H=2, B=2, decay="rwkv6-wide", dtype="float64", states="both")
PACKED = replace(SMALL, B=1, packing="ragged")


def disagreement(op, made, arriving, recurrence=None):
    """What the truth says otherwise than the oracle, one line a tensor. op: may hold other code than the operator."""
    return measure(truth(op, made, arriving=arriving, recurrence=recurrence), true_values(made, arriving, op), made)[1]


@pytest.mark.parametrize("setting", [SMALL, PACKED], ids=str)
@OPS
def test_oracle_against_finite_differences(op, setting):
    made, _ = make(replace(of(op, setting), T=4, K=3, V=2, M=2))
    described = OPERATORS[op]
    names = [*described.tensors, *(f"initial_{name}" for name in STATES[op])]

    def of_leaves(*leaves):
        return tuple(outputs(op, dict(zip(names, leaves, strict=True)), 0.3, made.get("cu_seqlens")).values())

    leaves = [x.requires_grad_() for x in described.leaves(made).values()]
    assert torch.autograd.gradcheck(of_leaves, leaves)


@pytest.mark.parametrize("recurrence", [True, False], ids=["recurrence", "chunks"])
@pytest.mark.parametrize("decay", ["none", "-1e-4", "rwkv6-wide", "-50", "inf-spikes", "forget"])
@pytest.mark.parametrize("setting", [SMALL, PACKED, replace(SMALL, T=150, states="none", scale="0.05")], ids=str)
@OPS
def test_truth_is_the_oracles(op, setting, decay, recurrence):
    made, arriving = make(of(op, setting, decay=decay))
    assert not disagreement(op, made, arriving, recurrence)


@OPS
def test_short_and_long_sequences_in_one_batch(op):
    # Those that the truth walks through and those that it computes in chunks, beside one another.
    made, arriving = make(of(op, replace(PACKED, T=LONGEST_RECURRENCE + 60)))
    made["cu_seqlens"] = torch.tensor([0, 0, 40, 40, 41, 41, 50, LONGEST_RECURRENCE + 60])
    assert max(made["cu_seqlens"].diff()) > LONGEST_RECURRENCE
    assert not disagreement(op, made, arriving)


def test_the_oracle_computes_stretches_again_to_the_same_bits(monkeypatch):
    made, arriving = make(of("gsa", PACKED))
    whole = oracle("gsa", made, arriving)
    monkeypatch.setattr("tests.ops.oracle.MOST_KEPT", 500)
    in_parts = oracle("gsa", made, arriving)
    for name in whole:
        torch.testing.assert_close(in_parts[name], whole[name], rtol=1e-14, atol=1e-15)


def computed_in_loops(op):
    """(place, name) of every number that a reference computes for a token, forward and backward."""
    steps = next(x for x in _tree(op).body if isinstance(x, ast.FunctionDef) and x.name == "steps")
    for n, statement in enumerate(_assignments(steps)):
        targets, values = _pairs(statement)
        for which, (target, value) in enumerate(zip(targets, values, strict=True)):
            told = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id.endswith("Step")
            if not told and not isinstance(value, (ast.Name, ast.GeneratorExp)):
                yield pytest.param(op, (n, which), id=f"{op}-{ast.unparse(target)}")


def _tree(op):
    return ast.parse(inspect.getsource(OPERATORS[op].reference))


def _assignments(steps):
    loops = [x for x in steps.body if isinstance(x, ast.For)]
    return [x for loop in loops for x in loop.body if isinstance(x, ast.Assign)]


def _pairs(statement):
    target, value = statement.targets[0], statement.value
    several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return (target.elts, value.elts) if several else ([target], [value])


def twice(op, place):
    """The operator with a reference that computes one number twice too large."""
    tree = _tree(op)
    steps = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "steps")
    statement, which = _assignments(steps)[place[0]], place[1]
    values = _pairs(statement)[1]
    doubled = ast.BinOp(ast.Constant(2), ast.Mult(), values[which])
    if isinstance(statement.value, ast.Tuple):
        statement.value.elts[which] = doubled
    else:
        statement.value = doubled
    module = ModuleType(OPERATORS[op].reference.__name__)
    exec(compile(ast.fix_missing_locations(tree), module.__name__, "exec"), module.__dict__)
    return replace(OPERATORS[op], reference=module)


@pytest.mark.full
@pytest.mark.parametrize(("op", "place"), [x for op in OPERATORS for x in computed_in_loops(op)])
def test_a_factor_of_two_anywhere_in_a_reference_is_seen(op, place):
    made, arriving = make(of(op, SMALL))
    assert not disagreement(OPERATORS[op], made, arriving)
    assert disagreement(twice(op, place), made, arriving)


def planted(op, way, how):
    """The operator with the reference's or the chunked form's `backward` put through `how`."""
    module = getattr(OPERATORS[op], way)
    faulty = ModuleType(module.__name__)
    faulty.forward, faulty.backward = module.forward, how(module.backward)
    return replace(OPERATORS[op], **{way: faulty})


@pytest.mark.parametrize("way", ["reference", "chunked"])
@pytest.mark.parametrize("setting", [SMALL, PACKED], ids=str)
@OPS
def test_every_gradient_twice_too_large_is_seen_and_named(op, setting, way):
    described = OPERATORS[op]
    made, arriving = make(of(op, setting))
    names = [f"d{name}" for name in (*described.tensors, *described.states)]
    for n, name in enumerate(names):

        def doubled(backward, n=n):
            def call(*given):
                *grads, dstate = backward(*given)
                flat = [*grads, *described.parts(dstate)]
                flat[n] = 2 * flat[n]
                return *flat[: len(grads)], described.state(flat[len(grads) :])

            return call

        wrong = disagreement(planted(op, way, doubled), made, arriving, way == "reference")
        assert [line.split(":")[0] for line in wrong] == [name]


@pytest.mark.parametrize("way", ["reference", "chunked"])
@OPS
def test_a_lost_gradient_of_the_final_state_is_seen(op, way):
    described = OPERATORS[op]
    made, arriving = make(of(op, SMALL))

    def without(backward):
        def call(*given):
            at = len(described.tensors) + 3  # after scale, the initial state and do
            nothing = described.state([torch.zeros_like(x) for x in described.parts(given[at])])
            return backward(*given[:at], nothing, *given[at + 1 :])

        return call

    wrong = disagreement(planted(op, way, without), made, arriving, way == "reference")
    assert {line.split(":")[0] for line in wrong} >= {f"d{name}" for name in ("k", "v", described.decay)}


@OPS
def test_a_boundary_one_token_late_is_seen(op):
    made, arriving = make(of(op, PACKED))
    late = made["cu_seqlens"].clone()
    late[5] += 1
    found = truth(op, {**made, "cu_seqlens": late}, arriving=arriving)
    wrong = measure(found, true_values(made, arriving, op), made)[1]
    assert {line.split(":")[0] for line in wrong} >= {"o", *OPERATORS[op].outputs, f"d{OPERATORS[op].decay}"}


def test_queries_of_another_group_are_seen():
    made, arriving = make(of("gsa", SMALL))
    mixed = torch.tensor([0, 2, 1, 3])  # as if head h read the memory of head h % H
    shuffled = {**made, "q": made["q"][:, :, mixed]}
    found = truth("gsa", shuffled, arriving=(arriving[0][:, :, mixed], arriving[1]))
    found |= {name: found[name][:, :, mixed] for name in ("o", "dq")}
    wrong = measure(found, true_values(made, arriving, "gsa"), made)[1]
    assert {line.split(":")[0] for line in wrong} >= {"o", "dq", "ds"}


@pytest.mark.parametrize("w, factor, is_right", [(-88.8, 0, True), (-88.8, 0.9, False), (-87.0, 0, False)])
@OPS
def test_a_decay_below_float32s_normal_numbers_counts_as_itself_or_as_nothing(op, w, factor, is_right):
    made, arriving = make(of(op, SMALL, dtype="float32", decay="-1e-2"))
    described = OPERATORS[op]
    made[described.decay][:, 4] = w
    # As large as dw may be and yet be a multiple of e^w: far above what float32 tells from 0.
    arriving = 1e6 * arriving[0], described.state([1e6 * x for x in described.parts(arriving[1])])
    expected, name = true_values(made, arriving, op), f"d{described.decay}"
    found = {output: x.float() for output, x in expected.values.items()}
    assert not measure(found, expected, made)[1]
    found[name][:, 4] *= factor
    assert bool(measure(found, expected, made)[1]) != is_right
