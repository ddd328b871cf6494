"""Every argument of every instrument: an error that names it for what it cannot mean, and the obvious meaning taken."""

import math
import re

import numpy as np
import pytest
import torch

from flakit.course import check
from flakit.numerics.errors import compare, relative_l2
from flakit.numerics.evaluate import cotangents, evaluate, truth
from flakit.numerics.gradients import along_time, gradient_rows, measures, rounding_error
from flakit.numerics.inputs import inputs
from flakit.numerics.on_gpu import gradients_on_gpu
from flakit.numerics.pieces import in_pieces
from flakit.numerics.sweep import sweep

SMALL = {"T": 4, "H": 1, "K": 2}
ODD = {
    "None": None,
    "True": True,
    "np.True": np.bool_(True),
    "-1": -1,
    "0": 0,
    "1": 1,
    "2.0": 2.0,
    "np.float32": np.float32(-0.5),
    "np.int64": np.int64(2),
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "huge": 10**400,
    "too long to print": -(10**5000),
    "complex": 1j,
    "string": "odd",
    "bytes": b"odd",
    "[]": [],
    "()": (),
    "[1]": [1],
    "{}": {},
    "object": object(),
    "function": lambda *args, **settings: {},
    "tensor": torch.zeros(1),
    "complex tensor": torch.zeros(1, dtype=torch.complex64),
    "truth tensor": torch.tensor(True),
    "one in a tensor": torch.tensor(1),
    "array": np.zeros(3),
    "dtype": torch.float32,
    "int dtype": torch.int32,
    "float8": torch.float8_e5m2,
    "set": {1, 2},
}
WHOLE = {"1", "np.int64", "one in a tensor"}
FLAG = {"True", "np.True", "truth tensor"}
DECAY = {"None", "-1", "0", "np.float32", "-inf"}
DTYPE = {"dtype"}


def of_inputs(name, op="rwkv6"):
    return name, lambda x: inputs(**{"op": op, **SMALL, name: x})


def of_evaluate(name, function=evaluate):
    return name, lambda x: function(**{"op": "rwkv6", "inputs": inputs(**SMALL), name: x})


def of_rows(name):
    return name, lambda x: gradient_rows(**{"op": "rwkv6", "forms": "chunk", **SMALL, name: x})


def of_sweep(name):
    return name, lambda x: sweep(**{"subject": lambda T: {"T": T}, "over": {"T": [1]}, name: x})


def of_pair(name, function):
    pair = {"got": torch.ones(1, 2, 1, 2), "truth": torch.ones(1, 2, 1, 2)}
    return name, lambda x: function(**{**pair, name: x})


ARGUMENTS = {  # what is called: (its argument, a call with a value for it), the values that have a meaning
    "inputs op": (of_inputs("op"), set()),
    **{f"inputs {name}": (of_inputs(name), WHOLE) for name in "BTHK"},
    "inputs T": (of_inputs("T"), WHOLE | {"None"}),
    "inputs V": (of_inputs("V"), WHOLE | {"None"}),
    "inputs M": (of_inputs("M", "gsa"), WHOLE | {"None"}),
    "inputs HQ": (of_inputs("HQ", "gsa"), WHOLE | {"None"}),
    "inputs M of RWKV6": (of_inputs("M"), {"None"}),
    "inputs decay": (of_inputs("decay"), DECAY),
    "inputs dtype": (of_inputs("dtype"), DTYPE),
    "inputs decay_dtype": (of_inputs("decay_dtype"), DTYPE | {"None"}),
    "inputs device": (of_inputs("device"), set()),
    "inputs seed": (of_inputs("seed"), WHOLE | {"0", "huge"}),
    "inputs initial_state": (of_inputs("initial_state"), FLAG),
    "inputs requires_grad": (of_inputs("requires_grad"), FLAG),
    "inputs cu_seqlens": (of_inputs("cu_seqlens"), {"None"}),
    **{f"{f.__name__} op": (of_evaluate("op", f), set()) for f in (evaluate, truth, cotangents)},
    **{f"{f.__name__} inputs": (of_evaluate("inputs", f), set()) for f in (evaluate, truth, cotangents)},
    **{
        f"{f.__name__} grad_seed": (of_evaluate("grad_seed", f), WHOLE | {"0", "huge"})
        for f in (evaluate, truth, cotangents)
    },
    **{f"{f.__name__} dfinal_state": (of_evaluate("dfinal_state", f), FLAG) for f in (evaluate, truth, cotangents)},
    **{f"{f.__name__} arriving": (of_evaluate("arriving", f), {"None"}) for f in (evaluate, truth)},
    "evaluate form": (of_evaluate("form"), set()),
    "truth recurrence": (of_evaluate("recurrence", truth), FLAG | {"None"}),
    "gradient_rows op": (of_rows("op"), set()),
    "gradient_rows forms": (of_rows("forms"), {"None"}),
    "gradient_rows others": (of_rows("others"), {"None", "{}"}),
    "gradient_rows grad_seed": (of_rows("grad_seed"), WHOLE | {"0", "huge"}),
    "gradient_rows dfinal_state": (of_rows("dfinal_state"), FLAG),
    "gradient_rows recurrence": (of_rows("recurrence"), FLAG | {"None"}),
    "gradient_rows over_time": (of_rows("over_time"), FLAG),
    "gradient_rows cu_seqlens": (of_rows("cu_seqlens"), {"None"}),
    "gradient_rows T": (of_rows("T"), WHOLE | {"None"}),
    "sweep subject": (of_sweep("subject"), {"function"}),
    "sweep over": (of_sweep("over"), set()),
    "sweep progress": (of_sweep("progress"), {"None", "function", "True", "False"}),
    "sweep cancelled": (of_sweep("cancelled"), {"None", "function"}),
    **{
        f"{f.__name__} {name}": (of_pair(name, f), set())
        for f in (compare, relative_l2, measures, along_time)
        for name in ("got", "truth")
    },
    "rounding_error dtype": (("dtype", rounding_error), DTYPE | {"float8"}),
    "in_pieces op": (("op", lambda x: in_pieces(x, [1])), set()),
    "in_pieces cuts": (("cuts", lambda x: in_pieces("rwkv6", x)), WHOLE | {"[]", "()", "[1]", "{}", "set", "huge"}),
    "in_pieces handed": (("handed", lambda x: in_pieces("rwkv6", [1], handed=x)), set()),
    "check tolerance": (
        ("tolerance", lambda x: check("", 1.0, 1.0, tolerance=x)),
        {"0", "1", "2.0", "np.int64", "huge"},
    ),
}

ALSO = {"sweep subject": ["op"], **{f"{name} truth": ["got"] for name in ("compare", "relative_l2", "measures")}}
"""What a message may name instead: of two shapes that differ either may be the wrong one."""


@pytest.mark.parametrize("what", ARGUMENTS)
def test_a_wrong_argument_is_named_and_a_right_one_taken(what):
    (name, call), meant = ARGUMENTS[what]
    for label, value in ODD.items():
        if label in meant:
            call(value)
            continue
        try:
            call(value)
        except (TypeError, ValueError) as error:
            message = str(error)
            names = "|".join((name, *ALSO.get(what, ())))
            assert re.match(rf"({names})(\[.+?\])?: expected .+, got .+", message, re.S), f"{what} = {label}: {message}"
            assert len(message) < 400
        else:
            pytest.fail(f"{what} = {label} was taken")


@pytest.mark.parametrize(
    "given, meant",
    [
        (dict(T=np.int64(9), B=torch.tensor(2), K=np.int32(3)), dict(T=9, B=2, K=3)),
        (dict(seed=np.uint8(7), initial_state=np.bool_(True)), dict(seed=7, initial_state=True)),
        (dict(decay=np.float64(-0.5)), dict(decay=-0.5)),
        (dict(decay=torch.tensor(-0.5)), dict(decay=-0.5)),
        (dict(decay=-np.ones((1, 64, 2, 32))), dict(decay=-torch.ones(1, 64, 2, 32))),
        (dict(T=None, V=None, decay=None, decay_dtype=None), {}),
    ],
    ids=["sizes", "seed and flag", "numpy decay", "decay in a tensor", "decay in an array", "defaults"],
)
def test_numpy_and_tensor_scalars_mean_the_number_they_hold(given, meant):
    got, expected = inputs(**given), inputs(**meant)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_size_no_memory_holds_is_named_before_anything_is_drawn():
    with pytest.raises(ValueError, match=r"^T: expected a size that fits into a memory, got r \[1, 100000.*0, 2, 32\]"):
        inputs(T=10**30)


@pytest.mark.parametrize("offsets", [[0, 5, 9], (0, 5, 9), np.array([0, 5, 9]), torch.tensor([0, 5, 9])], ids=type)
def test_offsets_come_in_any_sequence(offsets):
    made = inputs(cu_seqlens=offsets, K=2, initial_state=True)
    assert (
        made["cu_seqlens"].tolist() == [0, 5, 9] and made["r"].shape[:2] == (1, 9) and len(made["initial_state"]) == 2
    )
    assert torch.equal(made["r"], inputs(T=9, K=2)["r"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(cu_seqlens=[0, 9], T=5), "cu_seqlens: expected offsets up to T = 5 at most, got 9 at the end"),
        (dict(cu_seqlens=[1, 9]), "cu_seqlens: expected offsets from 0, got 1 at index 0"),
        (dict(cu_seqlens=[0, 6, 5, 9]), "cu_seqlens: expected non-decreasing offsets, got 6 then 5 at index 2"),
        (dict(cu_seqlens=[0, 9], B=2), "cu_seqlens: expected a batch of 1 with packed sequences, got B = 2"),
        (dict(cu_seqlens=[0, 0]), "cu_seqlens: expected ascending offsets from 0 to T, got [0, 0]"),
        (dict(cu_seqlens=[0.0, 9.0]), "cu_seqlens: expected int32 or int64, got float32"),
        (
            dict(decay=torch.zeros(1, 64, 2, 32) > 0),
            "decay: expected real numbers, got a tensor [1, 64, 2, 32] of bool",
        ),
        (dict(decay=-(10**400)), "decay: expected a number that float64 can hold, got -1000000000000"),
        (dict(device="gpu"), "device: expected one that is here, such as \"cpu\", got 'gpu'"),
    ],
    ids=["beyond T", "late", "falling", "batch", "empty", "floats", "truth values", "huge decay", "no device"],
)
def test_wrong_values_of_inputs(wrong, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        inputs(**wrong)


@pytest.mark.parametrize("function", [evaluate, truth, cotangents])
@pytest.mark.parametrize(
    "op, wrong, message",
    [
        ("rwkv6", dict(k=[1.0]), "k: expected a tensor, got list"),
        ("rwkv6", dict(k=torch.zeros(3)), "k: expected [1, 4, 1, 2] like r, got [3]"),
        ("rwkv6", dict(v=torch.zeros(1, 5, 1, 2)), "v: expected [1, 4, 1, V] like r, got [1, 5, 1, 2]"),
        ("rwkv6", dict(initial_state=torch.zeros(2, 1, 2, 2)), "initial_state: expected [1, 1, 2, 2] like r, got [2,"),
        ("rwkv6", dict(initial_state=3), "initial_state: expected a tensor or None, got 3"),
        (
            "gsa",
            dict(initial_state=torch.zeros(1, 1, 2, 32)),
            "initial_state: expected a tuple of 2 tensors or None, got",
        ),
        (
            "gsa",
            dict(initial_state=(torch.zeros(1, 1, 2, 9),) * 2),
            "initial_state's hk: expected [1, 1, 2, 32] like q",
        ),
        ("rwkv6", dict(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens: expected offsets up to T = 4 at most, got 5"),
        ("rwkv6", dict(cu_seqlens=[0, 4]), "cu_seqlens: expected an integer tensor, got list"),
    ],
    ids=["list", "axes", "length", "state of two", "no state", "half a pair", "slots", "offsets", "list of offsets"],
)
def test_inputs_that_do_not_fit_each_other(function, op, wrong, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        function(op, inputs(op, **SMALL) | wrong)


@pytest.mark.parametrize("function", [evaluate, truth])
@pytest.mark.parametrize(
    "op, arriving, message",
    [
        ("rwkv6", torch.zeros(2, 2), "arriving: expected a pair, gradients at o and (or None) the state, got a tensor"),
        ("rwkv6", (torch.zeros(1, 4, 1, 3), None), "arriving[0]: expected [1, 4, 1, 2] like r, got [1, 4, 1, 3]"),
        ("rwkv6", (None, None), "arriving[0]: expected a tensor, got NoneType"),
        ("rwkv6", (torch.zeros(1, 4, 1, 2), torch.zeros(2)), "arriving[1]: expected [1, 1, 2, 2] like r, got [2]"),
        ("gsa", (torch.zeros(1, 4, 1, 2), torch.zeros(2)), "arriving[1]: expected a tuple of 2 tensors or None, got a"),
    ],
    ids=["no pair", "wrong shape", "none", "wrong state", "half a state"],
)
def test_gradients_that_do_not_fit_the_outputs(function, op, arriving, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        function(op, inputs(op, **SMALL), arriving=arriving)


def test_no_state_as_an_operator_returns_it_is_no_state():
    made = inputs("gsa", **SMALL)
    exact = truth("gsa", made)
    given = evaluate("gsa", made | {"initial_state": (None, None)})
    assert given.keys() == exact.keys() and all(compare(given[name], exact[name]).l2 < 1e-6 for name in exact)


def test_what_evaluate_decides_itself_may_stand_among_the_inputs():
    made = inputs(**SMALL)
    among = evaluate("rwkv6", made | {"output_final_state": False, "backend": "torch"}, backend="reference")
    assert all(torch.equal(x, among[name]) for name, x in evaluate("rwkv6", made, backend="reference").items())


def test_shapes_that_would_be_stretched_are_refused():
    with pytest.raises(ValueError, match=r"truth: expected \[1, 6, 2, 3\] like got, got \[1, 1, 2, 3\]"):
        along_time(torch.zeros(1, 6, 2, 3), torch.zeros(1, 1, 2, 3))


def test_one_form_one_decay_one_length_need_no_list():
    rows = gradient_rows("rwkv6", forms="chunk", **SMALL)
    assert {row["form"] for row in rows} == {"chunk"}
    listed, single = (
        gradients_on_gpu(dtype=dtype, T=T, decay=decay).rows
        for dtype, T, decay in ((["float32"], [64], [-1.0]), (torch.float32, np.int64(64), -1.0))
    )
    assert listed and single == listed
    with pytest.raises(ValueError, match="dtype, T, decay: expected at least one of each"):
        gradients_on_gpu(T=[])


@pytest.mark.parametrize(
    "others, message",
    [
        ({"mine": 3}, "others: expected a dict of functions or None, got {'mine': 3}"),
        (
            {"mine": lambda made, do: do},
            "others['mine']: expected some of o, final_state, dr, dk, dv, dw, du by name, got",
        ),
        ({"mine": lambda made, do: {"dx": do}}, "others['mine']: expected some of o, .*, got dx"),
    ],
    ids=["no function", "no dict", "unknown tensor"],
)
def test_makers_that_are_none(others, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message).replace(r"\.\*", ".*")):
        gradient_rows("rwkv6", others=others, **SMALL)
