"""The simulation of many ranks: limits that can be said without it, sizes that were recorded, and what it foretells."""

import math
import sys
from dataclasses import asdict, replace

import pytest

from flakit.bench import simulate
from flakit.bench.messages import fit
from flakit.bench.simulate import WAYS, Network, efficiency, messages, own, sized, together_ms
from flakit.numerics import recorded

OPS = pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
FREE = Network(0, math.inf, 0, 0, math.inf, small_us=0)


def test_it_foretells_what_was_measured_of_several_gpus():
    rows = simulate.foretold()
    assert len(rows) == sum(len(recorded.read(f"{card}_ranks").rows) for card in simulate.CARDS) == 9
    for row in rows:
        assert row["simulated_bytes"] == row["bytes"]
        assert abs(row["off"]) < {2: 0.05, 4: 0.1}[row["ranks"]]
        assert row["off_without_fixed"] < row["off"]


@OPS
def test_alone_it_is_what_was_measured(op):
    (row,) = [row for row in simulate.measured(op) if row["ranks"] == 2]
    assert together_ms(sized(op, row["T"]), 1) == pytest.approx(row["alone_ms"])
    assert efficiency(sized(op, row["T"]), 1) == 1


@OPS
@pytest.mark.parametrize("way", WAYS)
def test_messages_that_cost_nothing_leave_what_does_not_shrink(op, way):
    case, rank = sized(op, 2**20), own(sized(op, 2**20))
    for ranks in (2, 8, 64):
        assert together_ms(case, ranks, way, FREE) == pytest.approx(rank.fixed_ms + rank.ms_a_token * 2**20 / ranks)
    none = simulate.Rank(0, 1)
    assert efficiency(case, 64, way, FREE, none) == pytest.approx(1)


def test_how_often_each_way_waits_for_a_message():
    forward, _ = messages(sized("rwkv7", 2**20))
    begun = Network(1000, math.inf, 0, 0, math.inf, small_us=0)  # a millisecond to begin a message and nothing else
    for ranks in (2, 5, 8, 64, 1000):
        assert WAYS["gather"](ranks, forward, begun) == 1
        assert WAYS["chain"](ranks, forward, begun) == ranks - 1
        assert WAYS["tree"](ranks, forward, begun) == math.ceil(math.log2(ranks))
        assert WAYS["levels"](ranks, forward, begun) == (1 if ranks <= 8 else 3)


def test_bytes_go_at_the_pace_of_the_link_they_take():
    forward, backward = messages(sized("rwkv6", 2**20))
    K, H = 64, 32
    assert (forward.gathered, forward.state, backward.gathered) == (4 * H * (K + K * K), 4 * H * K * K, 4 * H * K * K)
    wires = Network(0, 400, 0, 0, 40, 8, small_us=0)
    ms = forward.map / 400e6
    assert WAYS["gather"](8, forward, wires) == pytest.approx(7 * ms)
    assert WAYS["gather"](16, forward, wires) == pytest.approx(15 * 10 * ms)  # a ring is as slow as its slowest link
    assert WAYS["tree"](16, forward, wires) == pytest.approx(4 * 10 * ms)  # in each round from a host to the next
    state = forward.state / 400e6
    assert WAYS["chain"](16, forward, wires) == pytest.approx((14 + 10) * state)
    assert WAYS["levels"](16, forward, wires) == pytest.approx((7 + 10 / 8 + 7) * ms)


@pytest.mark.parametrize(("op", "kernels"), [("rwkv6", 2), ("rwkv7", 2), ("gsa", 4)])
def test_a_map_is_applied_by_a_product_and_a_sum_for_each_part_of_a_state(op, kernels):
    forward, backward = messages(sized(op, 2**20))
    assert forward.apply == backward.apply == kernels and forward.join == kernels + 1


def test_messages_within_a_host_are_those_measured_of_two_gpus():
    rows, (sent, _), none = recorded.read("h200_messages").rows, messages(sized("rwkv7", 2**20)), {"small_us": 0}
    begin, rate, off = fit(rows)
    net = simulate.network(**none)
    assert WAYS["gather"](2, sent, net) * 1e3 == pytest.approx(begin + sent.gathered / rate / 1e3)
    own = next(row for row in rows if row["bytes"] == 2 ** round(math.log2(sent.gathered)))
    assert WAYS["gather"](2, replace(sent, gathered=own["bytes"]), net) * 1e3 == pytest.approx(own["us"], rel=off)
    # two fits of the same rows may differ in their last bits
    assert asdict(simulate.network(gb_s=9)) == pytest.approx(asdict(replace(simulate.network(), gb_s=9)))


@OPS
def test_heads_of_another_size_have_as_many_channels(op):
    case, wide = sized(op, 4096), sized(op, 4096, 256)
    assert case.H * case.K == wide.H * wide.K
    small, large = messages(case)[0], messages(wide)[0]
    assert large.state / small.state == (256 / case.K if op != "gsa" else 1)


def test_the_fastest_way():
    case = sized("rwkv7", 2**20)
    assert simulate.fastest(case, net=FREE) == [("gather", 2)]  # the first of equals
    slow_to_begin = Network(1e5, math.inf, 0, 0, math.inf, small_us=0)
    assert simulate.fastest(case, ["tree", "gather"], net=slow_to_begin) == [("tree", 2), ("gather", 4)]
    need = simulate.tokens_a_rank("rwkv7", 64, "levels", 0.9)
    assert efficiency(sized("rwkv7", 64 * need), 64, "levels") >= 0.9
    assert efficiency(sized("rwkv7", 32 * need), 64, "levels") < 0.9


def test_on_the_command_line(monkeypatch, capsys):
    given = ["--operator", "gsa", "--tokens", "4096", "--ranks", "4", "--gb-s", "100"]
    monkeypatch.setattr(sys, "argv", ["simulate", *given])
    simulate.main()
    said = capsys.readouterr().out
    assert "gsa, 4096 tokens, 16 heads of 128" in said
    assert [line.split()[0] for line in said.splitlines()[-3:]] == ["1", "2", "4"]
