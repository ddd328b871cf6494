"""What a case refuses: the error names the argument, what was expected and what arrived."""

import importlib

import pytest
import torch

from flakit.numerics.inputs import inputs
from flakit.ops.rwkv6 import fused_recurrent_rwkv6

X = inputs("rwkv6", T=70, H=1, K=4)
ONES = torch.ones(3)


def detached(r, k, v, w, u):
    return fused_recurrent_rwkv6(*(x.detach() for x in (r, k, v, w, u)))


ERRORS = {  # by case: (a call, and the error)
    "anchor": [
        (lambda case: case.run(X, "last-row"), "scheme: expected one of none, first-row, .*, got 'last-row'"),
        (lambda case: case.run(X, "none", chunk=48), "chunk: expected a power of two, got 48"),
        (lambda case: case.run(X, "middle", block=0), "block: expected a power of two, got 0"),
        (lambda case: case.run(X, "middle", row=16), "row: expected 0 … 15 with scheme 'middle', got 16"),
        (lambda case: case.run(X, "none", row=3), "row: expected .* with scheme 'middle', got 3 with 'none'"),
        (
            lambda case: case.run(X, "none", mask="after"),
            "mask: expected one of none, multiply, where, before, got 'after'",
        ),
        (lambda case: case.run(X, "none", mask="before"), "mask: expected one of where, multiply, none, got 'before'"),
        (lambda case: case.run(X, "none", op="gla"), "op: expected one of rwkv6, rwkv7, gsa, got 'gla'"),
        (lambda case: case.run(X, "middle", backend="triton"), "backend"),  # it has no kernel
        (lambda case: case.law("none", tensor="dq"), "tensor: expected one of o, dr, .*, got 'dq'"),
        (
            lambda case: case.law("none", dtype=torch.float64),
            "dtype: expected one of torch.float32, .*, got torch.float64",
        ),
        (lambda case: case.exponents(X, "none", index=2), "index: expected a chunk 0 … 1, got 2"),
        (lambda case: case.exponents(X, "none", query="a"), "query: expected one of r for rwkv6, got 'a'"),
        (lambda case: case.show(w=1.0), r"w: expected a finite natural-log decay <= 0, got 1\.0"),
        (lambda case: case.show(row=64, T=64), "row: expected a token 0 … 63, got 64"),
    ],
    "backstepping": [
        (lambda case: case.law(rebuilt="again"), "rebuilt: expected one of by division, forward again, got 'again'"),
    ],
    "blind_measure": [(lambda case: case.show(size=65), "size: expected a multiple of 64, got 65")],
    "chunk_vs_recurrent": [
        (lambda case: case.ratio(ONES[:2], ONES), r"got: expected \[3\] like other, got \[2\]"),
        (lambda case: case.ratio(ONES, 0 * ONES), "expected values other than zero"),
    ],
    "clamping": [
        (lambda case: case.show(anchor=17), "anchor: expected a token 0 ... 15, or 16 for behind the last, got 17"),
    ],
    "decay_gradient": [
        (lambda case: case.law(0.0, 64), r"w: expected a natural-log decay < 0, got 0\.0"),
        (
            lambda case: case.round_to(ONES, "int8"),
            "rounding: expected one of bfloat16, float16, tf32, float32, float64, got 'int8'",
        ),
    ],
    "final_state_gradient": [
        (lambda case: case.law(X, on="final"), "on: expected one of o, state, both, got 'final'"),
        (lambda case: case.errors(X, on="final"), "on: expected one of o, state, both, got 'final'"),
    ],
    "fingerprint": [
        (lambda case: case.diagnose({}), "seen: expected what became of some of o, dr, .*, got nothing"),
        (lambda case: case.diagnose({"dq": "nan"}), "seen: expected tensors among o, dr, .*, got 'dq'"),
        (lambda case: case.diagnose({"dr": "bad"}), "dr: expected one of ok, wrong, inf, nan, got 'bad'"),
        (lambda case: case.fingerprint(["moon"]), "causes: expected names among scale, .*, got 'moon'"),
        (lambda case: case.known("5"), 'upto: expected the number of a lesson such as "05"'),
        (lambda case: case.known(5), 'upto: expected the number of a lesson such as "05"'),
        (lambda case: case.known("last"), 'upto: expected the number of a lesson such as "05"'),
    ],
    "future_anchor": [
        (lambda case: case.show(P=16), "P: expected a token 0 ... 15, got 16"),
        (lambda case: case.show(anchor="last"), "anchor: expected one of middle, first, pair, got 'last'"),
    ],
    "gate_drift": [
        (lambda case: case.drift("rwkv7"), "op: expected one of gsa, rwkv6, attention, got 'rwkv7'"),
        (lambda case: case.drift(kernel="best"), "kernel: expected one of faulty, clamped, right, got 'best'"),
        (lambda case: case.reinitialised(case.model(), "gate"), "part: expected one of embedding, .* got 'gate'"),
        (lambda case: case.relive("right"), "kernel: expected one of none, first-row, got 'right'"),
        (lambda case: case.resume("best"), "kernel: expected one of none, first-row, right, got 'best'"),
        (lambda case: case.resume(detached, steps=1), "kernel: expected an output that is differentiable"),
        (
            lambda case: case.resume(lambda *x: 1.0, steps=1),
            r"kernel: expected an output \[8, 128, 2, 16\] like v, got float",
        ),
        (lambda case: case.resume(steps=9999), "steps: expected 1 to 120, for which text was recorded, got 9999"),
        (lambda case: case.fatal_batch("right"), "kernel: expected one of none, first-row, got 'right'"),
        (lambda case: case.text.Text(500), "first: expected a step whose text was recorded, got 500"),
    ],
    "gradient_accumulation": [
        (lambda case: case.law(4, "divides"), r"contract: expected one of takes \*\*kwargs, .* got 'divides'"),
        (lambda case: case.step(loop="other"), "loop: expected 'trainer' or 'plain', got 'other'"),
        (lambda case: case.training(optimizer="Adam"), "optimizer: expected one of SGD, AdamW, got 'Adam'"),
    ],
    "gradient_accumulation.transformers_trainer": [
        (lambda case: case.run(contract="none"), "contract: expected"),
        (lambda case: case.run(accumulation=3), "accumulation: expected"),
    ],
    "infinity": [
        (lambda case: case.follow(0.5), "decay: expected a finite natural-log decay <= 0, got 0.5"),
        (lambda case: case.follow(float("nan")), "decay: expected a finite natural-log decay <= 0, got nan"),
        (lambda case: case.follow(-float("inf")), "decay: expected a finite natural-log decay <= 0, got -inf"),
    ],
    "inverse": [
        (lambda case: case.matrix(2.5), "alpha: expected 0 … 2, got 2.5"),
        (lambda case: case.matrix(w=0.5), "w: expected a natural-log decay <= 0, got 0.5"),
        (lambda case: case.matrix(C=24), "C: expected a power of two from 2, got 24"),
        (lambda case: case.matrix(spread=-1.0), "spread: expected 0 or more, got -1.0"),
        (
            lambda case: case.invert(case.matrix(), "lu"),
            "form: expected one of product, blocks, substitution, got 'lu'",
        ),
        (
            lambda case: case.invert(case.matrix(), rounding="float8"),
            "rounding: expected one of bfloat16, .*, got 'float8'",
        ),
    ],
    "log_space": [
        (lambda case: case.inputs("exp"), "fed: expected one of sigmoid, logsigmoid, -exp, got 'exp'"),
    ],
    "masking": [
        (lambda case: case.run(X, "after"), "mask: expected one of none, multiply, where, before, got 'after'"),
        (lambda case: case.law("where", tensor="du"), "tensor: expected one of o, dr, dk, dv, dw, got 'du'"),
    ],
    "nan_guard": [
        (lambda case: case.weights(ONES, "d != 0"), "guard: expected one of d < 0, d <= 0, got 'd != 0'"),
    ],
    "padding": [
        (lambda case: case.run(case.inputs(20), "wrong"), "form: expected one of chunk, blocks, right, got 'wrong'"),
        (lambda case: case.run(case.inputs(20), op="rwkv7"), "op: expected one of gsa, rwkv6, got 'rwkv7'"),
        (lambda case: case.law(0), "T: expected a whole number of at least 1, got 0"),
        (lambda case: case.inputs(20, uneven=0.0), "uneven: expected a share above 0 and up to 1, got 0.0"),
        (lambda case: case.inputs(20, 1.0), "gate: expected a finite natural-log decay <= 0, got 1.0"),
    ],
    "rounded_state": [
        (lambda case: case.written(3, "odd"), "writes: expected one of all equal, at random, got 'odd'"),
    ],
    "strided_offsets": [
        (lambda case: case.layout(ONES, "a row"), "layout: expected one of contiguous, .* got 'a row'"),
        (lambda case: case.in_memory([0, 1], "a row"), "layout: expected one of contiguous, .* got 'a row'"),
    ],
    "strides": [
        (lambda case: case.law("rows", (1, 1, 1, 1)), "layout: expected one of contiguous, .* got 'rows'"),
    ],
    "transposed_mask": [
        (lambda case: case.law(8, 8, 12, 12), "BK: expected a power of two, got 12"),
        (lambda case: case.run(case.inputs(8, 8), 16, 64), r"got a mask \[16, 64\] for a tile \[64, 16\]"),
        (lambda case: case.run(case.inputs(8, 8), backend="cuda"), "backend: expected one of .*, got 'cuda'"),
    ],
    "unscaled_term": [(lambda case: case.with_term(ONES.sum(), ONES, "none"), "way: expected one of")],
    "unwritten_rows": [
        (
            lambda case: case.run(torch.ones(3, case.CHANNELS), 2, "rust"),
            "memory: expected one of zeros, an earlier tensor, NaN, got 'rust'",
        ),
    ],
    "weak_test": [(lambda case: case.show(keep=0), "keep: expected at least 1 token, got 0")],
    "wrong_head_anchor": [
        (lambda case: case.show(H=0), "H, block: expected at least 1 head and 2 rows, got 0 and 16"),
    ],
    "zero_key": [(lambda case: case.lengths(ONES, "abs", 1e-6), "way: expected one of")],
}


@pytest.mark.parametrize(
    ("name", "call", "says"),
    [pytest.param(name, *row, id=f"{name}: {row[1][:30]}") for name, rows in ERRORS.items() for row in rows],
)
def test_an_error_names_the_argument(name, call, says):
    with pytest.raises(ValueError, match=says):
        call(importlib.import_module(f"flakit.cases.{name}"))
