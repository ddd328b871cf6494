"""The least that an operator has to move and to compute, against counts made by hand."""

import pytest

from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.numerics.work import Work, in_short, moved, work

MAIN = {"B": 8, "T": 4096, "K": 64, "V": 64, "H": 32, "dtype": "bfloat16"}
GSA = MAIN | {"op": "gsa", "H": 16, "K": 128, "V": 128, "M": 64}
SEQUENCE = 8 * 4096 * 32 * 64 * 2  # bytes of one of r, k, v, w, o


@pytest.mark.parametrize(("op", "forward", "both"), [("rwkv6", 5, 14), ("rwkv7", 7, 20)])
def test_sequences_move_once_and_gradients_once_more(op, forward, both):
    row = MAIN | {"op": op}
    assert work(row, "forward").bytes == pytest.approx(forward * SEQUENCE, rel=1e-4)  # u is a few thousand numbers
    assert work(row).bytes == pytest.approx(both * SEQUENCE, rel=1e-4)


def test_bytes_and_operations_of_a_token_and_head():
    tokens = 8 * 4096 * 16
    assert (work(GSA, "forward").bytes / tokens, work(GSA).bytes / tokens) == (1280, 3584)
    assert work(GSA, "forward").operations / tokens == 2 * (2 * 128 * 64 + 2 * 64 * 128)
    tokens *= 2
    assert work(MAIN | {"op": "rwkv6"}, "forward").operations / tokens == 2 * 2 * 64 * 64
    assert work(MAIN | {"op": "rwkv7"}).operations / tokens == 3 * 2 * 4 * 64 * 64


def test_a_decode_moves_its_states():
    row = MAIN | {"op": "rwkv6", "T": 1, "decode": True}
    assert work(row, "forward").bytes - work(row | {"decode": False}, "forward").bytes == 2 * 4 * 8 * 32 * 64 * 64


def test_kept_states_are_those_of_every_head_and_of_a_last_short_piece():
    row = MAIN | {"op": "rwkv6"}
    assert moved(row, ["states"], every=32) == 4 * 8 * 128 * 32 * 64 * 64
    assert moved(row, ["dstates", "dr"], every=64, itemsize=2) == 2 * 8 * 64 * 32 * 64 * 64 + SEQUENCE
    assert moved(row | {"T": 65}, ["states"], every=64) == 4 * 8 * 2 * 32 * 64 * 64
    assert moved(GSA, ["states"], every=4096) == 4 * 8 * 16 * 2 * 64 * 128
    assert moved(row, ["r", "r"]) == 2 * SEQUENCE and moved(row, []) == 0
    with pytest.raises(ValueError, match="names: expected one of .*, got 'x'"):
        moved(row, ["x"])


@pytest.mark.parametrize("op", OPERATORS)
def test_bytes_are_those_of_the_inputs(op):
    made = inputs(op, B=2, T=7, H=3, K=16, V=24)
    size = OPERATORS[op].size(OPERATORS[op].leaves(made))
    o = made["v"].numel()
    given = sum(made[name].numel() for name in OPERATORS[op].tensors)
    row = {"op": op, "dtype": "float32", **size}
    assert work(row, "forward").bytes == 4 * (given + o) and work(row).bytes == 4 * (3 * given + 2 * o)


def test_the_floor_is_the_longer_of_both():
    assert Work(4 * 10**9, 10**9).floor_ms(4.0, 1.0) == pytest.approx(1.0)
    assert Work(4 * 10**9, 9 * 10**9).floor_ms(4.0, 1.0) == pytest.approx(9.0)
    assert Work(10, 30).intensity == 3


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="what: .*'backward'"):
        work(GSA, "backward")


def test_a_case_in_short_says_what_is_not_usual():
    usual = GSA | {"form": "chunk", "decay": "gsa"}
    assert in_short(usual) == "GSA chunk B8 T4096"
    assert in_short(usual | {"decay": -5.0, "dtype": "float32", "K": 512}) == "GSA chunk B8 T4096 K512 float32 w -5"
    assert in_short(usual | {"T": 1, "decode": True, "decay": "logsigmoid"}) == "GSA decode B8 logsigmoid"
