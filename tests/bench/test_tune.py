"""How rows of the launch table are found and written: with times that are made up, and on a GPU with real ones."""

import pytest
import torch

from flakit.bench import tune
from flakit.bench.tune import GAIN, Refused, Trial, Unreached, cases_of, chosen, climb, fields, fits, write
from flakit.ops.common.launch import TABLE, Chip, Launch, read_rows, rows_for
from tests.bench.metering import FakeMeter

ADA = Chip("NVIDIA RTX 4090", 89, 101376)
KEY = "rwkv6.output.mild", "16-bit"
START = Launch(64, 64, 4, 1)


def milliseconds(best, sharp=1.0):
    """A valley around one row: each field costs what it is away from it."""

    def measure(row, anew=False):
        away = sum(x != y for x, y in zip(row, best, strict=True))
        return 1.0 + sharp * away

    return measure


@pytest.mark.parametrize("best", [Launch(32, 64, 8, 2), Launch(64, 64, 4, 1, 168), Launch(128, 16, 1, 4)], ids=str)
def test_the_best_row_is_found_field_by_field(best):
    row, ms, before = climb(KEY, START, milliseconds(best), ADA)
    assert (row, ms) == (best, 1.0) and before == milliseconds(best)(START)


def test_a_gain_that_is_noise_is_no_gain():
    assert climb(KEY, START, milliseconds(Launch(32, 64, 4, 1), sharp=GAIN / 2), ADA)[0] == START


def test_the_luckiest_of_many_has_to_win_once_more():
    def lucky(row, anew):
        return 0.5 if row.num_warps == 8 and not anew else 1.0

    assert climb(KEY, START, lucky, ADA) == (START, 1.0, 1.0)


def test_what_is_refused_is_not_taken():
    def measure(row, anew):
        if row.num_warps == 8:
            raise Refused("o is off by 1e-1")
        return 0.1 if row.BK == 32 else 1.0

    assert climb(KEY, START, measure, ADA)[0] == START._replace(BK=32)


def test_registers_that_a_device_has_not_are_not_promised():
    asked = []

    def measure(row, anew):
        asked.append(row)
        return 1.0 / (row.maxnreg or 1)

    best, *_ = climb(KEY, START._replace(num_warps=8), measure, ADA._replace(registers=32 * 8 * 128))
    assert best.maxnreg * 32 * best.num_warps <= 32 * 8 * 128
    assert all(fits(row, ADA._replace(registers=32 * 8 * 128)) for row in asked)


def test_no_row_is_measured_twice_in_a_search():
    asked = []

    def measure(row, anew):
        asked.append(row) if not anew else None
        return milliseconds(Launch(32, 32, 2, 2))(row)

    climb(KEY, START, measure, ADA)
    assert len(asked) == len(set(asked)) < 40


@pytest.mark.parametrize("key", TABLE, ids=" ".join)
def test_every_row_has_a_case_and_fields(key):
    cases, changed = cases_of(key), fields(key)
    for case in cases:
        assert case.op in key[0] or key[0] == "scan"
        assert (case.dtype == "bfloat16") == (key[1] == "16-bit")
        assert (case.form == "recurrent") == ("recurrent" in key[0])
    assert changed and set(changed) <= set(Launch._fields)
    if TABLE[key].BK > 128:
        assert "BK" not in changed  # all of K in one program: a smaller block would refuse a larger K
    elif "recurrent" in key[0]:
        assert "BK" in changed  # a block of the channels, or slots, of a state


@pytest.mark.parametrize(
    "key", [k for k in TABLE if k[0].startswith("rwkv7.") and "recurrent" not in k[0]], ids=" ".join
)
def test_rwkv7_is_called_with_the_heads_that_a_row_is_for(key):
    pytest.importorskip("triton")
    from flakit.ops.common.dispatch import fits_fused
    from tests.ops.rwkv7.configurations import Launches, chunk, fused

    for case in cases_of(key):
        T = 64 if case.B > 1 else 4096  # which is cut into parts
        module = fused if fits_fused(torch.empty(case.K), torch.empty(case.V)) else chunk
        sizes = dict(K=case.K, V=case.V, H=case.B * case.H // 2, T=T)
        made = [Launches(module, getattr(torch, case.dtype), hopper=hopper, **sizes) for hopper in (False, True)]
        if key in {launch.row for each in made for launch in each.kernels()}:
            break
    else:
        pytest.fail(f"launched by none of {cases_of(key)}")
    if ".fused." in key[0]:
        from flakit.ops.common.pairs_triton import BLOCK_TOKEN

        mild = case.decay == "rwkv7"  # whose decays are -0.61 at least
        assert mild or case.decay < BLOCK_TOKEN.value
        assert mild != key[0].endswith(".dyadic") and not {"BK", "BV"} & set(fields(key))


def test_rows_are_chosen_by_words():
    assert chosen("gsa128 float32") == [key for key in TABLE if key[0].startswith("gsa128") and key[1] == "float32"]
    assert chosen() == list(TABLE)
    with pytest.raises(ValueError, match="only: expected words such as .* got 'rwkv5'"):
        chosen("rwkv5")


def test_rows_found_are_used_while_the_next_are_tuned_and_written(tmp_path, monkeypatch):
    other, seen = ("rwkv6.stream", "16-bit"), []

    def trial(key, row, anew):
        seen.append((key, TABLE[KEY]))
        return milliseconds(TABLE[key]._replace(num_warps=8) if key == KEY else row)(row)

    said = []
    rows = list(tune.tune([KEY, other], ADA, trial, said.append))
    assert [row["num_warps"] for row in rows] == [8, TABLE[other].num_warps]
    assert {used.num_warps for key, used in seen if key == other} == {8} and TABLE[KEY].num_warps == 4
    assert said[0] == "rwkv6.output.mild 16-bit: 1. 64 × 64, 4 warps, 1 stages, 168 registers"

    monkeypatch.setenv("FLAKIT_ROWS", str(tmp_path / "rows"))
    write(tmp_path / "rows" / "sm_89.json", ADA, rows[:1], "flakit tune --only output")
    write(tmp_path / "rows" / "sm_89.json", ADA, rows[1:])
    meta, found = read_rows(tmp_path / "rows" / "sm_89.json")
    assert found == rows_for(ADA) == {KEY: TABLE[KEY]._replace(num_warps=8), other: TABLE[other]}
    assert (meta["device"], meta["command"]) == (ADA.name, "flakit tune")
    write(tmp_path / "rows" / "sm_89.json", ADA, [rows[0] | {"num_warps": 2}])
    assert rows_for(ADA)[KEY].num_warps == 2 and len(rows_for(ADA)) == 2


def test_rows_of_two_kinds_of_device_do_not_share_a_file(tmp_path):
    row = {"kernel": KEY[0], "width": KEY[1], **START._asdict(), "ms": 1.0, "ms_before": 1.0}
    write(tmp_path / "sm_89.json", ADA, [row])
    with pytest.raises(ValueError, match="expected rows tuned on NVIDIA L40, got NVIDIA RTX 4090's; remove it"):
        write(tmp_path / "sm_89.json", ADA._replace(name="NVIDIA L40"), [row])


# --- a candidate's result, and its kernels --------------------------------------------------------------------------


@pytest.fixture
def trial(monkeypatch):
    """Of an operator whose gradient of v is wrong with 8 warps, a little with 2, and whose o is with one."""
    pytest.importorskip("triton")
    ones = torch.ones(4)

    def results():
        factor = {8: 1.1, 2: 1.001}.get(TABLE[KEY].num_warps, 1.0)
        return [ones, ones, ones * factor, ones, ones]

    made = {"forward": lambda: ones * (float("nan") if TABLE[KEY].num_warps == 1 else 1), "both": results}
    monkeypatch.setattr(tune, "calls", lambda *given: made)
    monkeypatch.setattr(tune.Case, "inputs", lambda *given: {})
    monkeypatch.setattr(FakeMeter, "wait", lambda self: None)
    monkeypatch.setattr(Trial, "_launched", lambda self, key: (("a_kernel", (("num_warps", TABLE[key].num_warps),)),))
    return Trial(FakeMeter())


def test_a_candidate_with_another_result_is_refused_before_it_is_timed(trial):
    assert trial(KEY, START) == 3.0  # the milliseconds of its own kernel, not of the others
    for warps, says in ((8, "dv is off by 1.0e-01"), (1, "o is off by nan")):
        with pytest.raises(Refused, match=says):
            trial(KEY, START._replace(num_warps=warps))
    assert trial.meter.called == ["kernels"]
    assert trial(KEY, START._replace(num_warps=2)) == 3.0  # off by rounding


def test_rows_that_launch_the_same_are_timed_once_unless_anew(trial):
    for stages in (1, 2, 3):
        trial(KEY, START._replace(num_stages=stages))
    assert trial.meter.called == ["kernels"]
    trial(KEY, START, True)
    assert trial.meter.called == ["kernels"] * 2


def test_a_row_that_nothing_launches_is_told_and_left_out(trial, monkeypatch):
    monkeypatch.setattr(Trial, "_launched", lambda self, key: () if key == KEY else (("a_kernel", ()),))
    with pytest.raises(Unreached, match="rwkv6.output.mild 16-bit: not launched by rwkv6 .* K=64 .* nor by .* K=128"):
        trial(KEY, START)
    said = []
    (row,) = tune.tune([KEY, ("rwkv6.stream", "16-bit")], ADA, trial, say=said.append)
    assert row["kernel"] == "rwkv6.stream" and [text.split(":")[0] for text in said] == ["rwkv6.output.mild 16-bit"]


def test_without_a_gpu_nothing_is_tuned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a CUDA GPU to time kernels on, found none"):
        tune.here()


@pytest.mark.gpu
def test_a_row_is_tuned_on_this_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "VALUES", {"num_warps": (2, 4, 8), "num_stages": (1, 64), "maxnreg": (None, 168)})
    device, _ = tune.here()
    (row,) = tune.tune([KEY], device, Trial(tune.Meter(), B=1))
    assert 0 < row["ms"] <= row["ms_before"]
    write(tmp_path / "rows.json", device, [row])
    assert set(read_rows(tmp_path / "rows.json")[1]) == {KEY}
