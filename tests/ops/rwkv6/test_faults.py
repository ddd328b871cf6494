"""The check itself is tested: every fault below is one that kernels have had, and each must be refused, by name."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flakit.cases.decay_gradient import identity, round_to
from flakit.cases.final_state_gradient import ignoring
from flakit.cases.transposed_mask import tiles
from flakit.numerics.evaluate import evaluate
from flakit.numerics.operators import OPERATORS
from flakit.numerics.pieces import in_pieces
from flakit.ops.rwkv6 import RWKV6Output, chunk_rwkv6
from tests.ops.checking import check, true_values
from tests.ops.settings import Setting, make

SETTING = Setting(T=100, K=40, V=64, decay="rwkv6-init", states="both")
BFLOAT16 = replace(SETTING, dtype="bfloat16")


def with_form(setting, form, made=None):
    """What a faulty form finds where the true operator is expected."""
    given, arriving = make(setting)
    op = replace(OPERATORS["rwkv6"], forms={"chunk": form})
    return evaluate(op, made or given, arriving=arriving), given, arriving


def right(setting):
    return with_form(setting, chunk_rwkv6)


def dw_of_zeros(setting):
    found, *rest = right(setting)
    return found | {"dw": torch.zeros_like(found["dw"])}, *rest


def dw_by_the_cancelling_identity(setting):
    """reverse_cumsum(r dr - k dk), from gradients as good as float32 dots make them."""
    made, (do, dstate) = make(setting)
    found = evaluate("rwkv6", made, arriving=(do, dstate))
    no_bonus = evaluate("rwkv6", {**made, "u": torch.zeros_like(made["u"])}, arriving=(do, dstate))
    at_end = None if dstate is None else (found["final_state"] * dstate).sum(-1)
    dw = identity(made["r"], made["k"], no_bonus["dr"].float(), no_bonus["dk"].float(), at_end)
    return found | {"dw": dw.to(made["w"].dtype)}, made, (do, dstate)


def state_reset_every_64_tokens(setting):
    pieces = in_pieces("rwkv6", range(64, setting.T, 64), handed="nothing")
    return with_form(setting, pieces.forms["chunk"])


def final_state_without_a_gradient(setting):
    return with_form(setting, ignoring(chunk_rwkv6))


def initial_state_without_a_gradient(setting):
    def form(initial_state, **given):
        return chunk_rwkv6(initial_state=initial_state.detach() + 0 * initial_state, **given)

    return with_form(setting, form)


def initial_state_forgotten(setting):
    return with_form(setting, lambda initial_state, **given: chunk_rwkv6(initial_state=0 * initial_state, **given))


def initial_state_loaded_with_a_transposed_mask(setting):
    """Tiles of 32 x 32 whose masks for rows and columns are exchanged: K = V, or multiples of 32, would hide it."""

    def form(initial_state, **given):
        K, V = initial_state.shape[-2:]
        inside = tiles(K, V, 32, 32)[:K, :V]
        return chunk_rwkv6(initial_state=initial_state * inside, **given)

    return with_form(setting, form)


def inclusive_decay(setting):
    """Token i reads the state after its own decay, as in GLA."""

    def form(r, w, u, **given):
        return chunk_rwkv6(r=r * w.exp(), w=w, u=u, **given)

    return with_form(setting, form)


def decay_clamped(setting):
    return with_form(setting, lambda w, **given: chunk_rwkv6(w=w.clamp(min=-12), **given))


def scale_of_one(setting):
    return with_form(setting, lambda **given: chunk_rwkv6(**{**given, "scale": 1.0}))


def bonus_forgotten(setting):
    return with_form(setting, lambda u, **given: chunk_rwkv6(u=0 * u, **given))


def packed_sequences_run_into_one_another(setting):
    def form(cu_seqlens, initial_state, **given):
        o, state = chunk_rwkv6(initial_state=initial_state[:1], **given)
        return RWKV6Output(o, torch.cat((state, initial_state[1:])))

    return with_form(setting, form)


def empty_sequence_loses_its_state(setting):
    def form(cu_seqlens, initial_state, **given):
        lasting = torch.tensor([a < b for a, b in pairwise(cu_seqlens.tolist())])[:, None, None, None]
        o, state = chunk_rwkv6(cu_seqlens=cu_seqlens, initial_state=initial_state * lasting, **given)
        return RWKV6Output(o, state)

    return with_form(setting, form)


def one_head_reads_anothers_decay(setting):
    return with_form(setting, lambda w, **given: chunk_rwkv6(w=w.roll(1, 2), **given))


def spoil(name, how):
    def fault(setting):
        found, *rest = right(setting)
        x = found[name].clone()
        how(x)
        return found | {name: x}, *rest

    return fault


def one_wrong_element(x):
    x[0, 60, 1, 3] += 0.2 * x.square().mean().sqrt()


def one_wrong_small_row(x):
    # Too small for any measure over the whole tensor.
    at = x.norm(dim=-1)[0, :, 0].argmin()
    x[0, at, 0] *= 1.05


def one_nan(x):
    x[0, 63, 0, 0] = torch.nan


def one_infinity(x):
    x.flatten()[-1] = torch.inf


def tiny_instead_of_zero(x):
    x[x == 0] = 1e-30


def stored_in_tf32(x):
    x.copy_(round_to(x, "tf32"))


def rounded_to_seven_bits(x):
    mantissa, exponent = torch.frexp(x)
    x.copy_(torch.ldexp((mantissa * 2**7).round() / 2**7, exponent))


FAULTS = {
    "dw of zeros": (dw_of_zeros, SETTING, "dw: L2"),
    "dw of zeros at -8": (dw_of_zeros, replace(SETTING, decay="-8"), "dw: L2"),
    "dw of zeros at -80": (dw_of_zeros, replace(SETTING, decay="-80", dtype="bfloat16"), "dw: L2"),
    "dw of zeros at -8 in float16": (dw_of_zeros, replace(SETTING, decay="-8", dtype="float16"), "dw: L2"),
    "dw by the cancelling identity at -8": (dw_by_the_cancelling_identity, replace(SETTING, decay="-8"), "dw: L2"),
    "dw by the cancelling identity at -50": (dw_by_the_cancelling_identity, replace(SETTING, decay="-50"), "dw: L2"),
    "dw by the cancelling identity among slow channels": (
        dw_by_the_cancelling_identity,
        replace(SETTING, decay="rwkv6-wide"),
        "dw: at",
    ),
    "dw by the cancelling identity in bfloat16": (dw_by_the_cancelling_identity, BFLOAT16, "dw: "),
    "state reset every 64 tokens": (state_reset_every_64_tokens, SETTING, "o: L2"),
    "state reset every 64 tokens in bfloat16": (state_reset_every_64_tokens, BFLOAT16, "final_state: L2"),
    "final state without a gradient": (final_state_without_a_gradient, SETTING, "dk: L2"),
    "initial state without a gradient": (initial_state_without_a_gradient, SETTING, "dinitial_state: L2"),
    "initial state forgotten": (initial_state_forgotten, SETTING, "o: L2"),
    "transposed mask": (initial_state_loaded_with_a_transposed_mask, SETTING, "o: L2"),
    "inclusive decay": (inclusive_decay, SETTING, "o: L2"),
    "decay clamped": (decay_clamped, replace(SETTING, decay="-20"), "dw: L2"),
    "scale of 1": (scale_of_one, SETTING, "o: L2"),
    "bonus forgotten": (bonus_forgotten, SETTING, "du: L2"),
    "packed sequences run together": (
        packed_sequences_run_into_one_another,
        replace(SETTING, packing="packed"),
        "o: L2",
    ),
    "empty sequence loses its state": (
        empty_sequence_loses_its_state,
        replace(SETTING, packing="ragged"),
        "final_state: L2",
    ),
    "another head's decay": (one_head_reads_anothers_decay, SETTING, "o: L2"),
    "one wrong element": (spoil("dv", one_wrong_element), BFLOAT16, "dv: "),
    "one wrong small row": (spoil("o", one_wrong_small_row), BFLOAT16, "o: at"),
    "one NaN": (spoil("dr", one_nan), SETTING, r"dr: non-finite .*NaN.*first at \[0, 63, 0, 0\]"),
    "one infinity": (spoil("du", one_infinity), SETTING, r"du: non-finite .*\+inf"),
    "dw nearly 0 at -inf": (
        spoil("dw", tiny_instead_of_zero),
        replace(SETTING, decay="forget"),
        "dw: expected exactly 0 where w is -inf",
    ),
    "float32 through TF32": (spoil("final_state", stored_in_tf32), SETTING, "final_state: L2"),
    "bfloat16 less one bit": (spoil("dk", rounded_to_seven_bits), BFLOAT16, "dk: L2"),
}


@pytest.mark.parametrize("fault, setting, text", FAULTS.values(), ids=FAULTS)
def test_fault_is_refused(fault, setting, text):
    found, made, arriving = fault(setting)
    expected = true_values(made, arriving)
    with pytest.raises(AssertionError, match=f"(?m)^(AssertionError: )?{text}"):
        check(found, expected, made)


@pytest.mark.parametrize("setting", dict.fromkeys(setting for _, setting, _ in FAULTS.values()), ids=str)
def test_without_the_fault_it_passes(setting):
    found, made, arriving = right(setting)
    check(found, true_values(made, arriving), made)


def test_wrong_dtype_and_shape_are_refused():
    found, made, arriving = right(BFLOAT16)
    expected = true_values(made, arriving)
    with pytest.raises(AssertionError, match="dw: expected torch.bfloat16, got torch.float32"):
        check(found | {"dw": found["dw"].float()}, expected, made)
    with pytest.raises(AssertionError, match=r"du: expected \[2, 40\], got \[40, 2\]"):
        check(found | {"du": found["du"].T}, expected, made)
    with pytest.raises(AssertionError):
        check({name: x for name, x in found.items() if name != "dinitial_state"}, expected, made)


def test_a_gradient_beyond_float16_is_infinite_and_nothing_else():
    setting = replace(SETTING, dtype="float16", decay="none", T=64)
    made, (do, dstate) = make(setting)
    given = (2.0**14 * do.clamp(-1, 1), None)
    found, expected = evaluate("rwkv6", made, arriving=given), true_values(made, given)
    beyond = expected.values["dw"].abs() > 2**16
    assert beyond.any() and found["dw"].isinf().any()
    check(found, expected, made)
    with pytest.raises(AssertionError, match="dw: "):
        check(found | {"dw": torch.where(beyond, -found["dw"], found["dw"])}, expected, made)
    with pytest.raises(AssertionError, match="dw: "):
        check(found | {"dw": found["dw"].clamp(-65504, 65504)}, expected, made)
