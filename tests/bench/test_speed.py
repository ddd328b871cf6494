"""What `flakit bench` times and writes, with a meter that needs no GPU; on one, that the real meter measures."""

import importlib.machinery
import sys
import types
from dataclasses import replace

import pytest
import torch

from flakit.bench import speed
from flakit.bench.meter import Meter, by_kernel
from flakit.bench.speed import CASES, Case, Competitor
from flakit.numerics import recorded
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS, operator
from flakit.numerics.work import work
from tests.bench.metering import FakeMeter


def sizes(op):
    return {"H": 2, "K": 16, "V": 24 if op == "rwkv6" else 16} | ({"M": 8} if "M" in operator(op).sizes else {})


def small(op, form="chunk", **more):
    setting = {"B": 1, "T": 32, "dtype": "float32", "decay": operator(op).profile} | sizes(op) | more
    return Case(op, form, **setting)


DECODES = [small(op, "recurrent", B=3, T=1, decode=True) for op in OPERATORS]


def run(cases, **how):
    meter = FakeMeter()
    return list(speed.rows(cases, **{"peers": False, "first_calls": False, "meter": meter} | how)), meter


@pytest.mark.parametrize("op", OPERATORS)
def test_a_row_has_times_quantiles_host_memory_and_error(op):
    ((row,), meter) = run([small(op)])
    assert meter.called == ["times"] * 4 + ["host", "host", "memory"]  # forward, both, forward, both
    assert (row["forward_ms"], row["both_ms"], row["both_ms_other_round"]) == (1.0, 2.0, 4.0)
    assert (row["both_ms_20"], row["both_ms_80"]) == (1.75, 2.25)
    assert (row["host_forward_ms"], row["host_both_ms"], row["extra_gib"]) == (5.0, 6.0, 7.0)
    assert 0 < row["error"] < 1e-5 and row["who"] == "flakit"


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_a_decode_is_replayed_from_a_graph_and_has_no_backward(case):
    ((row,), meter) = run([case], first_calls=True)
    assert meter.called == ["replayed", "replayed", "host", "memory"]
    assert row["both_ms"] is row["host_both_ms"] is row["both_ms_20"] is row["first_forward_s"] is None
    assert row["forward_ms"] == 1.0 and 0 < row["error"] < 1e-5


@pytest.mark.parametrize("op", ["rwkv6", "gsa"])
def test_a_long_sequence_has_the_same_tokens_over_and_over(op):
    case = small(op, B=2, T=speed.DRAWN * 2 + 3)
    made, drawn = case.inputs("cpu"), inputs(op, B=2, T=speed.DRAWN, decay=case.decay, **sizes(op))
    for name, x in made.items():
        assert x.is_leaf and x.requires_grad and x.is_contiguous()
        whole = torch.cat([drawn[name]] * 3, 1)[:, : case.T] if name in case.operator.sequences else drawn[name]
        assert torch.equal(x, whole)


@pytest.mark.parametrize("decay", [speed.TRAINED, "5% steep"])
def test_steep_gates_are_drawn_for_every_token(decay):
    case = small("rwkv6", B=1, T=2 * speed.DRAWN, H=4, K=64, decay=decay)
    x = case.inputs("cpu")
    first, second = x["w"].chunk(2, 1)
    assert x["w"].is_leaf and x["w"].requires_grad and torch.equal(*x["k"].chunk(2, 1))
    if decay == speed.TRAINED:
        assert (first != second).float().mean() > 0.9
    else:
        steep = (x["w"] == -20).any(-1).unflatten(1, (-1, 16)).any(2)
        assert steep.float().mean().item() == pytest.approx(speed.SHARES[decay], rel=0.5)
        assert not torch.equal(first == -20, second == -20)


def test_rows_of_all_kinds_make_one_recording(tmp_path):
    rows, _ = run([small("rwkv6"), DECODES[2], small("gsa")])
    table = recorded.read(recorded.write(tmp_path / "a.json", recorded.provenance("a", "a CPU"), rows))
    assert [row["op"] for row in table.rows] == ["rwkv6", "gsa", "gsa"]
    old = recorded.read("h200_speed")
    assert set(old.columns) <= set(table.columns)  # a notebook that reads the one can read the other


def test_the_recorded_table_has_a_floor_below_every_time():
    table = recorded.read("h200_speed")
    ceilings = {name: table.meta[name] for name in ("copy_tb_s", "tflops")}
    for row in table.rows:
        for what in ("forward", "both"):
            if what == "forward" or not row["decode"]:  # which has no backward
                assert work(row, what).floor_ms(**ceilings) < row[f"{what}_ms"]


def test_two_rounds_take_turns_and_progress_is_told(monkeypatch):
    monkeypatch.setattr(speed, "PEERS", {"peer": lambda case: Competitor(case.operator.forms["chunk"])})
    said = []
    rows, _ = run([small("rwkv6")], peers=True, progress=said.append)
    assert [row["who"] for row in rows] == ["flakit", "peer"]
    assert [(row["both_ms"], row["both_ms_other_round"]) for row in rows] == [(2.0, 6.0), (4.0, 8.0)]
    assert [line.rpartition(": ")[2] for line in said][:4] == [
        "flakit, first round", "peer, first round", "flakit, second round", "peer, second round",
    ]  # fmt: skip


def test_a_peer_that_is_not_there_or_does_not_load_is_told_once_and_the_rest_is_timed(monkeypatch):
    def missing(case):
        speed._installed("no_such_module", "a peer")

    def broken(case):
        raise RuntimeError("a lot of words\nnvcc: not found")

    monkeypatch.setattr(speed, "PEERS", {"missing": missing, "broken": broken, "not for this": lambda case: None})
    said = []
    rows, _ = run([small("rwkv6")], peers=True, say=said.append)
    assert [row["who"] for row in rows] == ["flakit"]
    assert said == [
        "missing is not timed: ModuleNotFoundError: a peer is not installed here",
        "broken is not timed: RuntimeError: nvcc: not found",
    ]


def test_a_peer_that_fails_when_it_runs_is_told_and_ours_is_timed(monkeypatch):
    def failing(*args, **named):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(speed, "PEERS", {"peer": lambda case: Competitor(failing)})
    said = []
    rows, meter = run([small("rwkv6")], peers=True, say=said.append)
    assert [row["who"] for row in rows] == ["flakit"] and len(meter.called) == 7
    assert said == [f"peer failed on {small('rwkv6')}: RuntimeError: operation not permitted when stream is capturing"]
    kernels = list(speed.profile([small("rwkv6")], meter=FakeMeter(), say=said.append))
    assert {row["who"] for row in kernels} == {"flakit"} and len(said) == 2


def test_where_ours_fails_nothing_goes_on():
    with pytest.raises(ValueError, match="r: expected K"):
        case = small("rwkv6")
        run([case], meter=type("Failing", (FakeMeter,), {"times": lambda self, call: _raise()})())


def _raise():
    raise ValueError("r: expected K <= 512")


@pytest.fixture
def wind(monkeypatch):
    """A wind_rwkv of our own recurrence, that takes its decay as e^{-e^w} and bfloat16 only."""
    module = types.ModuleType("wind_rwkv.rwkv7")
    module.loaded = []
    module.load_chunked_cuda = module.loaded.append

    def attn_chunked_cuda(r, w, k, v, a, b):
        assert {x.dtype for x in (r, w, k, v, a, b)} == {torch.bfloat16}
        wide = [x.float() for x in (r, w, k, v, a, b)]
        o, state = operator("rwkv7").forms["chunk"](wide[0], -wide[1].exp(), *wide[2:], scale=1.0)
        return o.bfloat16(), state

    module.attn_chunked_cuda = attn_chunked_cuda
    package = types.ModuleType("wind_rwkv")
    package.__spec__ = importlib.machinery.ModuleSpec("wind_rwkv", None, is_package=True)
    monkeypatch.setitem(sys.modules, "wind_rwkv", package)
    monkeypatch.setitem(sys.modules, "wind_rwkv.rwkv7", module)
    monkeypatch.setattr(speed, "PEERS", {"wind": speed._wind})
    return module


def test_wind_gets_its_own_decay_beforehand_and_its_error_is_that_of_its_inputs(wind):
    rows, _ = run([small("rwkv7", dtype="bfloat16", T=64)], peers=True)
    ours, theirs = rows
    assert theirs["who"] == "wind" and wind.loaded == [16]
    assert ours["error"] < 4e-3 and theirs["error"] < 4e-3


def test_the_error_is_that_of_as_many_sequences_as_are_timed():
    case, seen = small("rwkv7", B=3, T=64), []

    def watched(*leaves):
        seen.append(len(leaves[0]))
        return case.operator.forms["chunk"](*leaves)

    assert speed.error(speed.Competitor(watched), case, "cpu") < 1e-5 and set(seen) == {3}


def test_wind_is_asked_only_for_what_it_computes(wind):
    case = small("rwkv7", dtype="bfloat16")
    other = [small("rwkv6", dtype="bfloat16"), small("rwkv7"), small("rwkv7", dtype="bfloat16", T=33)]
    other += [small("rwkv7", dtype="bfloat16", V=24), small("rwkv7", "recurrent", dtype="bfloat16")]
    assert "wind" in speed.competitors(case) and not any("wind" in speed.competitors(each) for each in other)


def test_a_peer_with_a_wrong_gradient_shows_in_its_error(monkeypatch):
    def doubled(*args, **named):
        o, state = operator("rwkv6").forms["chunk"](args[0], 2 * args[1] - args[1].detach(), *args[2:], **named)
        return o, state  # o is right, dk is twice what it should be

    monkeypatch.setattr(speed, "PEERS", {"peer": lambda case: Competitor(doubled)})
    (ours, theirs), _ = run([small("rwkv6")], peers=True)
    assert ours["error"] < 1e-5 and theirs["error"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("", len(CASES)),
        ("decode", 9),
        ("rwkv6 chunk", 12),
        ("B=1", 6),
        ("T=32768", 3),
        ("K=512", 1),
        ("gsa float32", 1),
    ],
)
def test_cases_are_chosen_by_words(only, count):
    assert len(speed.chosen(only)) == count


@pytest.mark.parametrize("op", OPERATORS)
def test_steep_decays_fall_on_that_share_of_chunks_and_nowhere_else(op):
    case = small(op, B=2, T=256, dtype="float64")
    w = case.operator.decay
    mild, steep = (replace(case, decay=x).inputs("cpu")[w].detach() for x in (case.decay, "5% steep"))
    (changed,) = (steep[steep != mild].unique().tolist(),)
    assert changed == [-20.0]
    flagged = (steep != mild).sum(-1).unflatten(1, (16, 16)).sum(2)
    assert flagged.max() == 1
    assert 0.01 < flagged.double().mean() < 0.15  # 5% of 64 chunks and heads, drawn once


def test_trained_gates_have_a_tail():
    made = Case("rwkv6", "chunk", 8, 512, 8, 64, 64, "trained", "float64").inputs("cpu")["w"].detach()
    assert made.max() < 0 and -0.06 < made.median() < -0.04  # e^-3
    assert 0 < (made < -6).double().mean() < 1e-5  # by the normal's tail 8e-7
    assert made.min() > -20


def test_gates_of_a_files_values(tmp_path):
    values = torch.tensor([[-0.5, -3.0], [-7.0, -torch.inf]])
    cases = speed.of_gates(values, "mine.npy")
    assert [case.op for case in cases] == [*OPERATORS] and all("decay=mine.npy" in str(case) for case in cases)
    made = replace(cases[0], B=1, T=64, H=2).inputs("cpu")["w"].float()
    assert {*made.unique().tolist()} == {*values.flatten().tolist()}
    with pytest.raises(ValueError, match="values: expected natural-log decays <= 0, got 0.25"):
        speed.of_gates(torch.tensor([-1.0, 0.25]), "bad.npy")
    with pytest.raises(ValueError, match="values: expected decays, got none"):
        speed.of_gates(torch.empty(0), "none.npy")


def test_words_that_no_case_has_are_refused():
    with pytest.raises(ValueError, match="only: expected words of a case such as 'rwkv6 chunk .*', got 'rwkv5'"):
        speed.chosen("rwkv5")


def test_cases_have_one_name_each():
    assert len({str(case) for case in CASES}) == len(CASES)


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for made in (speed.rows([CASES[0]]), speed.profile([CASES[0]])):
        with pytest.raises(RuntimeError, match="expected a CUDA GPU, found none"):
            next(made)


# --- kernels --------------------------------------------------------------------------------------------------------


def event(name, microseconds, device=torch.autograd.DeviceType.CUDA):
    return types.SimpleNamespace(
        name=name, device_type=device, time_range=types.SimpleNamespace(elapsed_us=lambda: microseconds)
    )


def test_events_of_the_profiler_become_a_table_of_one_call():
    host = event("cudaLaunchKernel", 900.0, torch.autograd.DeviceType.CPU)
    events = [event("stream_kernel", 100.0), event("output_kernel", 600.0), event("stream_kernel", 100.0), host]
    first, second = by_kernel(events * 5, calls=5)
    assert first == ("output_kernel", 1.0, 0.6, 0.75)
    assert second == ("stream_kernel", 2.0, pytest.approx(0.2), 0.25)
    assert by_kernel([host], calls=5) == []


def test_a_profile_has_a_row_for_each_call_and_kernel(tmp_path):
    rows = list(speed.profile([small("rwkv6"), DECODES[0]], peers=False, meter=FakeMeter()))
    assert [(row["what"], row["kernel"]) for row in rows] == [
        (what, kernel) for what in ("forward", "both", "forward") for kernel in ("a_kernel", "b_kernel")
    ]
    assert rows[0]["share"] == 0.75 and rows[0]["who"] == "flakit"
    recorded.write(tmp_path / "a.json", recorded.provenance("a", "a CPU"), rows)


# --- on a GPU -------------------------------------------------------------------------------------------------------


def kernels_of(case):
    """The names of the kernels that its forward and backward launch."""
    from flakit.bench.launches import watched

    rival = Competitor(case.operator.forms["chunk"])
    with watched() as launched:
        speed.calls(rival, case, case.inputs("cuda"))["both"]()
    names = {launch.kernel.fn.__name__ for launch in launched}
    assert len(names) > 2
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_the_real_meter_measures_a_call_a_decode_and_its_kernels(op):
    sizes = {"K": 64, "V": 64, "dtype": "bfloat16"}
    both = small(op, T=512, **sizes)
    decode = small(op, "recurrent", B=3, T=1, decode=True, **sizes)
    trained, decoded = speed.rows([both, decode], peers=False, first_calls=False)
    # Other tests run on the same GPU: times of different calls do not compare.
    for what in ("forward", "both"):
        assert 0 < trained[f"{what}_ms_20"] <= trained[f"{what}_ms"] <= trained[f"{what}_ms_80"]
    assert min(decoded["forward_ms"], decoded["host_forward_ms"]) > 0
    assert max(trained["error"], decoded["error"]) < 4e-3 and trained["extra_gib"] > 0
    launched, kernels = kernels_of(both), list(speed.profile([both], peers=False))
    profiled = {what: {row["kernel"] for row in kernels if row["what"] == what} for what in ("forward", "both")}
    assert profiled["both"] >= launched and (profiled["forward"] & launched) < launched
    assert sum(row["share"] for row in kernels if row["what"] == "both") == pytest.approx(1)


@pytest.mark.gpu
def test_a_gpu_has_ceilings():
    found = Meter().ceilings()
    assert 0.1 < found["copy_tb_s"] < 20 and 10 < found["tflops"] < 5000
