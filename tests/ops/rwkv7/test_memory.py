"""Old tokens matter: an implementation that forgets them cannot pass the check, with realistic and with slow decay.

A published test of RWKV7 feeds log decays of -6 to -8 a token, and passes with all but the last two tokens forgotten.
Each fault below is planted in the operator itself and must be refused in o, in gradients or in the final state.
"""

from dataclasses import replace

import pytest
import torch

from flakit.numerics.evaluate import evaluate
from flakit.numerics.operators import OPERATORS
from flakit.ops.rwkv7 import RWKV7Output, chunk_rwkv7
from tests.ops.checking import check, measure, true_values
from tests.ops.settings import Setting, make

SETTING = Setting(T=130, K=24, V=40, decay="model", states="both", op="rwkv7")
DECAYS = ("model", "-1e-2", "-1e-4", "none")
DTYPES = ("float32", "bfloat16")


def pieces(length, overlap=0):
    """The operator on pieces of `length` tokens, each from an empty state that has seen only `overlap` tokens."""

    def form(initial_state, output_final_state, **given):
        T, outputs, state = given["r"].shape[1], [], None
        for start in range(0, T, length):
            first = max(0, start - overlap)
            part = {n: x[:, first : start + length] if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            begins = initial_state if first == 0 else torch.zeros_like(initial_state)
            o, state = chunk_rwkv7(**part, initial_state=begins, output_final_state=True)
            outputs.append(o[:, start - first :])
        return RWKV7Output(torch.cat(outputs, 1), state)

    return form


def decay_before_looking_up(a, w, **given):
    """a reads diag(e^{w_t}) S_{t-1} instead of S_{t-1}."""
    return chunk_rwkv7(a=(a.float() * w.float().exp()).to(a.dtype), w=w, **given)


def edits_forgotten(b, **given):
    return chunk_rwkv7(b=0 * b, **given)


def read_before_written(r, w, k, v, a, b, **given):
    """o_t reads S_{t-1}, as RWKV6 does."""
    first = [torch.zeros_like(x[:, :1]) for x in (r, w, k, v, a, b)]
    later = [torch.cat((zero, x[:, :-1]), 1) for zero, x in zip(first, (r, w, k, v, a, b), strict=True)]
    o = chunk_rwkv7(r, *later[1:], **given).o
    return RWKV7Output(o, chunk_rwkv7(r, w, k, v, a, b, **given).final_state)


FAULTS = {
    "forgets all but two tokens": pieces(1, overlap=1),
    "resets its state every 64 tokens": pieces(64),
    "a reads a decayed state": decay_before_looking_up,
    "no edits": edits_forgotten,
    "reads before it writes": read_before_written,
}


def planted(setting, form):
    made, arriving = make(setting)
    op = replace(OPERATORS["rwkv7"], forms={"chunk": form})
    return measure(evaluate(op, made, arriving=arriving), true_values(made, arriving, op="rwkv7"), made)


# Where nothing decays, a decayed state is the right one.
SEEN = [(fault, decay) for fault in FAULTS for decay in DECAYS if "decayed" not in fault or decay == "model"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault, decay", SEEN)
def test_fault_is_refused(fault, decay, dtype):
    T = 70 if "two" in fault else SETTING.T
    errors, wrong = planted(replace(SETTING, decay=decay, dtype=dtype, T=T), FAULTS[fault])
    assert any(line.startswith("o: L2") for line in wrong)
    assert errors["o"].l2 > 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
def test_without_a_fault_it_passes(decay, dtype):
    made, arriving = make(replace(SETTING, decay=decay, dtype=dtype))
    found = evaluate("rwkv7", made, arriving=arriving)
    check(found, true_values(made, arriving, op="rwkv7"), made)


@pytest.mark.parametrize("fault", list(FAULTS)[:2])
def test_at_a_decay_of_minus_seven_the_fault_is_all_but_invisible(fault):
    """Why the decay of the inputs matters: the same fault, and an error in o that a loose tolerance lets through."""
    errors, _ = planted(replace(SETTING, decay="-7", T=70), FAULTS[fault])
    assert errors["o"].l2 < 2e-2
