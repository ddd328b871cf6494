"""Sketches: one knob each, and the numbers are those of the operators and of the casebook."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from flakit import chunk_rwkv6, inputs
from flakit.cases import anchor, gate_drift, inverse, masking
from flakit.cases.laws import LN_MAX
from flakit.models import Permutations
from flakit.numerics import recorded
from flakit.numerics.evaluate import cotangents, recurrence
from flakit.numerics.gradients import rounding_error
from flakit.numerics.operators import OPERATORS
from flakit.panels import sketch, sketches
from flakit.panels.knobs import stops_of
from flakit.panels.sketches import SKETCHES, chunking, pieces
from flakit.panels.sketches.chunk_vs_recurrent import SIZES
from flakit.panels.sketches.delta_rule import CLOSED, DOOR, LAMP, ON, OPEN
from flakit.panels.sketches.rwkv6_forward import KEYS, VALUES
from flakit.panels.sketches.sketch import Sketch
from tests.panels.live import NOT_LIVE, least_seconds
from tests.panels.reading import printed

ORDERS = list(itertools.permutations(range(3)))


def stop_by_stop(name, knob, **others):
    """A sketch at every stop of a knob: the stop and the panel."""
    panel = sketch(name, **others)
    for stop in stops_of(panel.knobs[knob]):
        yield stop, panel.set(**{knob: stop})


def test_no_two_sketches_have_one_name():
    defined = {each for base in Sketch.__subclasses__() for each in (base, *base.__subclasses__())}
    assert defined == set(SKETCHES.values())


@pytest.mark.parametrize("name", SKETCHES)
def test_one_knob_moves_picture_and_sentence(name):
    panel = sketch(name)
    assert panel.on_view[0] == panel.main and len(panel.on_view) <= 2
    stops = stops_of(panel.knobs[panel.main])
    seen = set()
    for stop in (stops[1], stops[-1]):
        panel.set(**{panel.main: stop})
        seen.add((panel.png, panel.text))
    assert len({png for png, _ in seen}) == len({text for _, text in seen}) == 2
    for preset in panel.presets.values():
        panel.set(**preset)
    assert panel.alt_text(panel.result).endswith(panel.text)
    assert least_seconds(panel.set, ({panel.main: stop} for stop in stops[:6])) < NOT_LIVE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "growth" else pytest.mark.full) for name in SKETCHES]
)
def test_the_script_runs(name):
    assert printed(sketch(name)).strip()


def test_broken_breaks_where_the_law_says():
    law = min(anchor.limits("none", {"w": torch.full((1, 64, 1, 32), -1.0)}, op="rwkv6").values())
    for decay, panel in stop_by_stop("broken", "decay"):
        assert ("everything is fine" in panel.text) == (-decay <= law), decay
        assert np.isfinite(panel.result.true).all()
        fine = panel.result.shares["dr"] == 0
        assert not fine or np.allclose(panel.result.computed, panel.result.true, atol=1e-4)


def test_reading_by_pairs_is_reading_the_state():
    state = (KEYS[:, :, None] * VALUES[:, None, :]).sum(0)
    for direction in (0, 90, 210):
        shown = sketch("reading", direction=direction).result
        assert np.allclose(shown.output, torch.as_tensor(shown.query) @ state, atol=1e-6)
        assert np.abs(shown.scores).max() < 2.6 and np.abs(shown.output).max() < 7.0, "the axes end there"


def test_forgetting_is_what_the_operator_does():
    for w in (0.0, -0.07, -5.0, -math.inf):
        left = sketch("forgetting", w=w).result.left
        assert np.allclose(left, [1.0 if w == 0 else math.exp(n * w) for n in range(1, len(left) + 1)], rtol=1e-12)


def test_a_format_ends_where_its_law_says():
    for exponent, panel in stop_by_stop("ends", "exponent"):
        for dtype, end in LN_MAX.items():
            held, most = panel.result.values[str(dtype).removeprefix("torch.")], torch.finfo(dtype)
            assert math.isinf(held) == (exponent > end + 2e-3)  # what is nearest to the largest is rounded to it
            assert (held == 0) == (exponent < math.log(most.smallest_normal * most.eps / 2))


@pytest.mark.parametrize("at", range(17))
def test_the_tokens_to_be_counted_are_those_of_the_largest_exponent(at):
    shown = sketch("counting", anchor=at).result
    scheme = dataclasses.replace(anchor.SCHEMES["none"], diagonal=at - 1)
    (worst, *_) = anchor.worst(-torch.ones(1, 16, 1, 1), scheme, chunk=16)
    assert shown.tokens.sum() == worst.exponent == max(at, 16 - at)
    run = np.flatnonzero(shown.tokens)
    assert len(run) == run[-1] - run[0] + 1 and shown.token in (run[0], run[-1])
    assert shown.anchor in (run[0], run[-1] + 1) and (worst.token == shown.token or at == 8)


@pytest.mark.parametrize("at", [1, 0, 4])
def test_one_token_is_fatal_where_a_run_of_its_own_is(at):
    shown = sketch("fatal", anchor=at).result
    scheme = dataclasses.replace(anchor.SCHEMES["first-row"], left=at - 1)
    for token in (0, 15, 16, 17, 19, 63, 64, 80, 127):
        alone = anchor.run(anchor.spike(token, sketches.decay_blowup.STRONG, T=128, K=2), scheme).finite
        assert {name: not lost[token] for name, lost in shown.lost.items()} == {
            name: alone[name] for name in shown.lost
        }


def test_only_before_the_block_no_token_is_fatal():
    assert [at for at, panel in stop_by_stop("fatal", "anchor") if not panel.result.fatal.any()] == [0]
    assert list(np.flatnonzero(sketch("fatal", anchor=1).result.fatal)) == [16, 32, 48, 80, 96, 112]


def pair_by_pair(C, decay):
    """The weight of every pair, as the casebook computes it with one exponential each, [C, C]."""
    return masking.weights(torch.full((C, 1), decay, dtype=torch.float64), "before", exclusive=True)[..., 0].numpy()


@pytest.mark.full
def test_every_pair_of_tokens_is_inside_a_chunk_or_goes_through_a_state():
    for chunk, panel in stop_by_stop("chunks", "chunk"):
        shown, T = panel.result, len(panel.result.kinds)
        i, j = np.indices((T, T))
        ways = [(i > j) & (i // chunk == j // chunk), i // chunk > j // chunk, i == j, i < j]
        for n, there in enumerate(ways):
            assert ((shown.kinds == n) == there).all(), (chunk, n)
        assert np.allclose(shown.weights, pair_by_pair(T, chunking.SLOW), rtol=1e-12)


def test_an_anchor_moves_the_factors_and_not_the_weights():
    for at in (0, 1, 20, 32, 63, 64):
        shown = sketch("split", anchor=at).result
        C = len(shown.read)
        assert (shown.read.max(), shown.key.max()) == (at, C - at)
        assert np.allclose(np.tril(shown.made, -1), pair_by_pair(C, chunking.DECAY), rtol=1e-5)


@pytest.mark.parametrize(("way", "products", "single", "largest"), [
    ("one product", 1, 0, 8), ("blocks", 3, 24, 0), ("halves of halves", 4, 0, 0),
])  # fmt: skip
def test_each_way_makes_every_pair_once(way, products, single, largest):
    shown = sketch("ways", way=way).result
    past = np.tri(len(shown.product), k=-1, dtype=bool)
    assert (shown.product[past] >= 0).all()
    assert (shown.product.max(), (shown.product == 0).sum()) == (products, single)
    assert max(shown.read[shown.product >= 0].max(), shown.key[shown.product >= 0].max()) == largest
    made = np.where(past, np.exp(shown.read) * np.exp(shown.key), 0)
    assert np.allclose(made, pair_by_pair(len(past), chunking.DECAY), rtol=1e-5)
    for n in range(1, products + 1):  # a product has a factor for each reader and one for each key
        assert all(len(set(shown.read[i, shown.product[i] == n])) <= 1 for i in range(len(past)))
        assert all(len(set(shown.key[shown.product[:, j] == n, j])) <= 1 for j in range(len(past)))


def test_halves_meet_where_the_indices_first_differ():
    shown = sketch("ways", way="halves of halves").result
    i, j = np.nonzero(shown.product > 0)
    s = 1 << np.floor(np.log2(i ^ j)).astype(int)
    assert (shown.product[i, j] == 4 - np.log2(s)).all()
    border = i - i % s  # at a decay of -1 the exponents count tokens: from the border to i, and from j to the border
    assert np.array_equal(shown.read[i, j], border - i) and np.array_equal(shown.key[i, j], j + 1 - border)


def test_editing_is_what_one_does_by_hand():
    for alpha in (0.0, 0.4, 1.0, 2.0):
        shown = sketch("editing", alpha=alpha).result
        before = torch.outer(DOOR, CLOSED) + torch.outer(LAMP, ON)
        now = before - alpha * torch.outer(DOOR, DOOR @ before) + torch.outer(DOOR, OPEN)
        assert np.allclose(shown.before, before) and np.allclose(shown.now, now)
        assert np.allclose(shown.before + shown.taken + shown.written, shown.now)
        assert max(np.abs(getattr(shown, name)).max() for name in ("before", "taken", "written", "now")) <= 2


def test_revisions_are_powers_of_what_is_left():
    for alpha in (0.0, 0.5, 1.0, 1.5):
        counts = sketch("revisions", alpha=alpha).result.counts
        assert np.allclose(counts, [(1 - alpha) ** (len(counts) - 1 - n) for n in range(len(counts))], atol=1e-12)


def test_chained_shows_the_inverse_of_what_it_shows():
    for spread in (0.0, 0.3, 5.0):
        shown = sketch("chained", spread=spread).result
        assert np.allclose((np.eye(len(shown.found)) - shown.found) @ shown.inverse, np.eye(len(shown.found)))
        assert np.allclose(shown.found, inverse.matrix(0.9, -1e-3, spread))
        assert np.abs(shown.inverse).max() <= 1 + 1e-12, "the colours end there"


def test_what_passes_a_token_is_the_gradient_of_its_decay():
    x = inputs("rwkv6", T=8, H=1, K=1, V=4, decay=-0.3, dtype=torch.float64, seed=chunking.SEED)
    x["w"].requires_grad_()
    do, _ = cotangents("rwkv6", x)
    (dw,) = torch.autograd.grad(OPERATORS["rwkv6"].forms["recurrent"](**x, scale=1.0).o, x["w"], do)
    for t in range(8):
        shown = sketch("passing", t=t).result
        assert shown.dw(t) == pytest.approx(dw[0, t, 0, 0].item(), abs=1e-12)
        assert shown.dw(t) == pytest.approx(shown.read(t) - shown.own(t), abs=1e-12)
        assert shown.count(t) == sum(j < t < i for i in range(8) for j in range(i))
        said = (round(x, 2) for x in (shown.read(t), shown.own(t), shown.dw(t)))
        assert math.isclose(next(said) - next(said), next(said), abs_tol=1e-9), "what is said adds up"
    assert 1 < np.abs(shown.pairs).max() <= 1.5, "the colours end there"


def test_walking_back_is_the_recurrence_and_its_mirror():
    shown = sketch("walking_back").result
    T, keep = len(shown.states), np.exp(shown.w[0])[:, None]
    S, D = np.zeros_like(shown.states[0]), np.zeros_like(shown.states[0])
    for t in range(T):
        S = keep * S + shown.k[t][:, None] * shown.v[t]
        assert np.allclose(shown.states[t], S)
    for t in reversed(range(T)):
        assert np.allclose(shown.gradients[t], D)
        D = keep * D + shown.r[t][:, None] * shown.do[t]
    begins, ends = sketches.rwkv6_backward.WRITES, sketches.rwkv6_backward.READS - 1
    forward, back = shown.states[begins:], shown.gradients[ends::-1]
    for n in range(5):
        assert np.allclose(forward[n] / forward[0], back[n] / back[0])


@pytest.mark.full
def test_growth_loses_dw_as_a_whole_and_the_tables_at_one_end():
    ends = math.log(torch.finfo(torch.float32).max)
    for w, panel in stop_by_stop("growth", "w"):
        shown, T = panel.result, len(panel.result.sizes["S"])
        whole = w * T
        assert abs(whole - ends) < 8 or (whole > ends) == (not shown.finite["S"].all()), w
        if whole > ends + 6:
            assert not shown.finite["dw"].any()
            assert shown.finite["S"][: T // 3].all() and shown.finite["D"][-T // 3 :].all()
        if whole < ends - 6:
            assert shown.finite["dw"].all()


def test_slots_hold_what_was_written_and_wiped_ones_are_attention():
    for gate in (0.0, -0.5, -math.inf):
        shown = sketch("slots", gate=gate).result
        kept = np.eye(4) * (1.0 if gate == 0 else math.exp(gate))
        assert np.allclose(shown.holds, np.concatenate((kept, np.eye(4)), 1))
        assert np.allclose(shown.weights, shown.p @ shown.holds) and math.isclose(shown.p.sum(), 1)
        assert (shown.off < 1e-12) == (gate == -math.inf)


def test_a_gate_leaves_what_its_formula_says():
    for f in (6.0, 0.0, -20.0):
        shown = sketch("slot_gate", f=f).result
        assert math.isclose(shown.g, -math.log1p(math.exp(-f)) / 8)
        assert np.allclose(shown.left, [math.exp(n * shown.g) for n in range(1, len(shown.left) + 1)], rtol=1e-9)


@pytest.mark.parametrize("op", OPERATORS)
def test_pieces_lose_what_is_not_handed_over(op):
    for handed, o_right, dv_right in (("state", True, True), ("detached", True, False), ("nothing", False, False)):
        shown = sketch("pieces", handed=handed, op=op).result
        assert shown.o[: pieces.CUT].max() < 1e-5, "what the cut cannot touch"
        assert handed == "nothing" or shown.dv[pieces.CUT :].max() < 1e-5
        assert (shown.o_second < 1e-5) == o_right and (shown.dv_first < 1e-5) == dv_right
        assert (shown.worst < 1e-5) == (handed == "state")


def test_moves_and_orders_are_those_of_the_task():
    task, shown = Permutations(items=3), sketch("swaps", t=0).result
    tokens, answers = task.batch(1, len(shown.moves) + 1, torch.Generator().manual_seed(1))
    assert [tuple(order) for order in shown.orders] == [ORDERS[n] for n in answers[0]]
    for (a, b), before, after in zip(shown.moves, shown.orders, shown.orders[1:], strict=False):
        swapped = before.copy()
        swapped[[a, b]] = before[[b, a]]
        assert (swapped == after).all()


def test_a_mirror_swaps_the_two_rows_and_forgetting_leaves_what_is_at_right_angles():
    shown = sketch("mirror", alpha=2.0).result
    assert np.allclose(shown.after, sketches.state_tracking.BEFORE[::-1]) and shown.factor == pytest.approx(-1)
    shown = sketch("mirror", alpha=1.0).result
    assert np.allclose(shown.after, sketches.state_tracking.BEFORE.mean())


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0, 2.0])
def test_again_and_again_is_a_power_of_the_eigenvalue(alpha):
    panel, kept = sketch("again", alpha=alpha), math.exp(sketches.state_tracking.DECAY)
    left = panel.result.left
    assert np.allclose(left, (kept - alpha) ** np.arange(1, len(left) + 1), rtol=1e-5)
    assert ("grows without end" in panel.text) == (alpha > 1 + kept)


def test_a_mean_of_means_is_right_for_equal_parts_alone():
    for cut, panel in stop_by_stop("mean_of_means", "cut"):
        shown = panel.result
        assert np.allclose(shown.averaged.sum(), 1) and np.allclose(shown.right.sum(), 1)
        assert np.allclose(shown.averaged, shown.right) == (2 * cut == len(shown.right))


def test_clipping_is_what_torch_does():
    assert "0.0592" in sketch("clipping", bad="5").text
    assert (sketch("clipping", bad="1e20").result.after == 0).all()
    assert np.isnan(sketch("clipping", bad="inf").result.after).sum() == 1
    assert np.isnan(sketch("clipping", bad="NaN").result.after).all()


def test_the_gates_break_where_the_law_says():
    for f, panel in stop_by_stop("f_proj", "f"):
        g = torch.nn.functional.logsigmoid(torch.tensor(f, dtype=torch.float64)).item() / 8
        assert np.isfinite(panel.result.computed).all() == (g >= gate_drift.law("gsa")), f
        assert np.isfinite(panel.result.true).all() and panel.result.output_finite
        assert panel.result.exponent == pytest.approx(-48 * g, rel=1e-5)


def test_two_forms_differ_in_float32_and_are_farther_off_and_alike_in_fewer_digits():
    panel = sketch("two_forms", digits=24)
    x = inputs("rwkv6", **SIZES)
    forms = [o[0, :, 0].double() for o in (chunk_rwkv6(**x).o, recurrence("rwkv6", x)["o"])]
    fine = panel.result
    assert fine.share == (forms[0] != forms[1]).double().mean().item() > 0.5
    assert min(fine.off.values()) > 3 * rounding_error(torch.float32), "both round on the way, not at the end alone"
    assert max(fine.off.values()) < 2 * min(fine.off.values()), "neither is the better one"
    for digits, dtype in ((11, torch.float16), (8, torch.bfloat16)):
        coarse = panel.set(digits=digits).result
        assert np.array_equal(coarse.chunk, forms[0].float().to(dtype).double()[: len(coarse.chunk), 0])
        assert coarse.share < 0.01 and min(coarse.off.values()) > 100 * max(fine.off.values())
        assert np.abs((coarse.chunk - coarse.true) / coarse.step).max() < 0.51


def test_what_each_measure_sees():
    found = {wrong: panel.result for wrong, panel in stop_by_stop("measures", "wrong")}
    errors = {wrong: shown.errors for wrong, shown in found.items()}
    own = {wrong: np.abs(shown.got / shown.true - 1).max() for wrong, shown in found.items()}
    assert max(own, key=own.get) == "inputs" and errors["inputs"].l2 < 0.01, "the harmless one"
    assert max(errors, key=lambda wrong: errors[wrong].l2) == "doubled"
    assert errors["token"].worst_row == 1 and errors["token"].l2 < 0.1
    assert errors["element"].worst == pytest.approx(3) and errors["element"].l2 < 0.05


def test_a_difference_goes_by_the_law_and_grows_only_without_a_decay():
    for w, panel in stop_by_stop("amplified", "w"):
        shown = panel.result
        assert np.allclose(shown.measured, np.exp(w * np.arange(1, len(shown.law) + 1)), rtol=1e-4)
        assert (shown.measured[-1] > 1.001) == (w > 0)


def test_a_planted_fault_is_seen_from_its_budget_on_and_not_before():
    for dtype in stops_of(sketch("budget").knobs["dtype"]):
        for fault, panel in stop_by_stop("budget", "fault", dtype=dtype):
            shown = panel.result
            if fault < 0.5 * shown.allowed.min():
                assert not shown.wrong.any(), (dtype, fault)
            if fault > 2 * shown.allowed.max():
                assert shown.wrong.all(), (dtype, fault)


def test_a_call_of_one_token_moves_its_state_and_one_of_many_its_tokens():
    copy_tb_s, tflops = sketches.speed.peaks()
    for tokens in stops_of(sketch("roof").knobs["tokens"]):
        for K, panel in stop_by_stop("roof", "K", tokens=tokens):
            shown, heads = panel.result, 8 * 32
            moves = heads * (tokens * 5 * K * 2 + 2 * K * K * 4)
            assert math.isclose(shown.bytes, moves + 2 * 32 * K, rel_tol=1e-12)  # and u
            assert shown.operations == heads * tokens * 2 * 2 * K * K
            slope = shown.intensity < tflops / copy_tb_s
            assert panel.text.endswith("the memory." if slope else "the products.")


def test_states_halve_and_pairs_double_with_the_chunk():
    pairs = sketches.speed.pair_times()
    assert np.allclose(pairs[1:] / pairs[:-1], 2)
    for itemsize, panel in stop_by_stop("kept", "itemsize"):
        shown = panel.result
        assert shown.bytes[0] == 8 * 4096 * 32 * 64 * 64 * itemsize
        assert np.allclose(shown.bytes[:-1] / shown.bytes[1:], 2)
        assert np.allclose(shown.states, 2e-9 * shown.bytes / sketches.speed.peaks()[0])
        for chunk, other in stop_by_stop("kept", "chunk", itemsize=itemsize):
            assert sketches.speed.TOKENS[other.result.at] == chunk


def test_few_steep_gates_are_in_many_heads():
    for by in ("head", "chunk"):
        for one_in, panel in stop_by_stop("tail", "one_in", by=by):
            shown = panel.result
            _, chunks, heads, slow = shown.shares
            assert math.isclose(chunks, 1 - (1 - 1 / one_in) ** (16 * 64), rel_tol=1e-6)
            assert math.isclose(heads, 1 - (1 - 1 / one_in) ** (4096 * 64), rel_tol=1e-6)
            # Counted in what is drawn, within three deviations.
            for counted, share in ((shown.steep, chunks), (shown.steep.any(1), heads)):
                assert abs(counted.mean() - share) <= 3 * math.sqrt(share * (1 - share) / counted.size) + 1e-9
            assert (shown.slow == (shown.steep.any(1)[:, None] if by == "head" else shown.steep)).all()
            assert slow == (heads if by == "head" else chunks)


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_slices_of_ranks_make_the_state_of_the_whole(op):
    (everything,), (whole,) = pieces.slices(op, 1)
    for ranks in pieces.RANKS[1:]:
        passed, state = torch.eye(len(everything), dtype=everything.dtype), torch.zeros_like(whole)
        for M, N in zip(*pieces.slices(op, ranks), strict=True):
            passed, state = M @ passed, M @ state + N
        torch.testing.assert_close(passed, everything)
        torch.testing.assert_close(state, whole)
    left = sketch("ranks", ranks=4, op=op).result.left
    assert (np.isnan(left) == ~np.tri(4, k=-1, dtype=bool)).all() and np.allclose(np.diag(left, -1), 1)


def test_ranks_send_what_was_counted_on_gpus():
    for op in ("rwkv6", "rwkv7"):
        shown = sketch("ranks", ranks=2, op=op).result
        row, _ = recorded.read("h100_ranks").select(operator=op)
        assert (row["T"], row["bytes"]) == (shown.tokens, shown.sends + shown.written)  # backward, only what is asked
