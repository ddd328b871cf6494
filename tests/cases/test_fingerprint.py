"""The fingerprints of faults: what each does to every tensor, held to the cases' own laws and measurements."""

import math

import pytest
import torch

from docs.lessons import NOTEBOOKS
from flakit.cases import (
    anchor,
    backstepping,
    chunk_vs_recurrent,
    final_state_gradient,
    log_space,
    masking,
    padding,
    transposed_mask,
)
from flakit.cases import fingerprint as case
from flakit.cases.fingerprint import CAUSES, TENSORS, diagnose, fingerprint, known
from flakit.cases.registry import CASES

GRADIENTS = TENSORS[1:6]


def kinds(name):
    return {tensor: cell.kind for tensor, cell in fingerprint([name])[name].cells.items()}


def finite(name):
    return {tensor for tensor, kind in kinds(name).items() if kind in ("ok", "wrong")}


def test_every_cause_has_a_case_and_a_lesson():
    numbers = {path.name[:2] for path in NOTEBOOKS.glob("[0-9]*.ipynb")}
    for cause in CAUSES.values():
        assert cause.case in CASES and cause.name and cause.what and cause.test
        assert cause.lesson in numbers | {"06"}


def test_every_fault_breaks_something_and_no_two_are_alike_but_where_a_test_tells_them_apart():
    rows = {name: tuple(row.cells.values()) for name, row in fingerprint().items()}
    assert all(any(cell.kind != "ok" for cell in cells) for cells in rows.values())
    seen = {}
    for name, cells in rows.items():
        seen.setdefault(tuple((cell.kind, cell.everywhere) for cell in cells), []).append(name)
    alike = [names for names in seen.values() if len(names) > 1]
    assert sorted(alike) == [["backstepping", "transposed mask"], ["clamp", "zero decay forbidden"]]


# --- what the cases say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme", "decay"),
    [("start anchor", "none", -1.39), ("bad repair", "previous-row-across", -1.4)],
)
def test_anchors_lose_what_their_law_says(name, scheme, decay):
    limits = anchor.limits(scheme, case._inputs(decay=-1.0))
    assert finite(name) >= {tensor for tensor, end in limits.items() if end > -decay}
    assert {tensor for tensor, end in limits.items() if end < -decay}.isdisjoint(finite(name))


def test_the_end_of_the_chunk_is_the_mirror_image_of_its_start():
    start, end = (fingerprint([name])[name].cells for name in ("start anchor", "end anchor"))
    assert start["dr"].everywhere and not start["dk"].everywhere
    assert end["dk"].everywhere and not end["dr"].everywhere


def test_bug_a_loses_what_the_case_measures_at_one_token():
    run = anchor.run(anchor.spike(16, -88.8, T=128), "first-row")
    assert {name for name, fine in run.finite.items() if not fine} == set(TENSORS) - finite("bug A")


def test_an_overflowing_state_spares_du_alone_of_the_gradients():
    growth = log_space.run(log_space.inputs("sigmoid", B=1, H=2, K=16))
    assert [name for name in ("o", *GRADIENTS) if growth.finite[name] == 1] == ["du"]
    assert finite("state overflows") == {"du"}


def test_a_late_mask_loses_dw_alone():
    lost = {name for name in masking.TENSORS if masking.law("where", tensor=name, chunk=64, exclusive=True) < 1.4}
    assert lost == {"dw"} == set(TENSORS) - finite("late mask")


def test_causes_that_make_two_forms_differ_are_those_of_their_case():
    x = chunk_vs_recurrent.inputs(B=1, T=128, H=2, K=32, V=32)
    for name, switch in (("scale", "scale"), ("overwritten input", "aliasing"), ("precision", "precision")):
        fits = chunk_vs_recurrent.switches(x, **{switch: True})
        off = {tensor for tensor, fit in fits.items() if abs(fit.factor - 1) > 0.05 or fit.unexplained > 0.03}
        assert off == {tensor for tensor in fits if kinds(name)[tensor] == "wrong"}, name


def test_a_walk_back_strikes_what_reads_its_states():
    assert {name for name, kind in kinds("backstepping").items() if kind == "wrong"} == set(backstepping.READ["rwkv6"])
    assert backstepping.law(16, "rwkv6") < 0.75 and finite("backstepping") == set(TENSORS)


def test_padding_strikes_what_the_case_says():
    found = padding.run(padding.inputs(120, -2.0, op="rwkv6"), op="rwkv6")
    lost = {name for name, x in found.items() if not x.isfinite().all()}
    assert lost == set(TENSORS) - finite("padding")
    assert padding.law(120) < 2.0 and padding.KEY_GRADIENT["rwkv6"] in lost


def test_the_states_gradient_and_its_mask():
    x = case._inputs()
    errors = final_state_gradient.errors(x)
    assert {name for name, error in errors.items() if error > 1e-4} == {
        name for name, kind in kinds("no gradient from S_T").items() if kind == "wrong"
    }
    assert transposed_mask.law(40, 64) > 0 and kinds("transposed mask")["dr"] == "wrong"


def test_a_scale_is_one_factor_and_spares_the_state():
    cells = fingerprint(["scale"])["scale"].cells
    assert cells["final_state"].kind == "ok"
    errors = [cell.error for name, cell in cells.items() if name != "final_state"]
    assert errors == pytest.approx([math.sqrt(16) - 1] * 7, rel=1e-4)


# --- lesson by lesson, and from what was seen -------------------------------------------------------------------------


def test_it_fills_lesson_by_lesson():
    assert known("00") == () and known("01") == ("scale",) and set(known("05")) < set(known("06")) < set(known())


def test_every_fault_is_found_by_its_own_fingerprint():
    for name in CAUSES:
        best = diagnose(kinds(name))
        assert best[0].agree == len(TENSORS) and name in [fit.row.cause.key for fit in best[:2]]


def test_what_was_seen_may_be_little():
    seen = {"o": "ok", "dr": "nan", "S_T": "ok"}
    good = [fit.row.cause.key for fit in diagnose(seen) if fit.good]
    assert good == ["start anchor", "end anchor", "bad repair"]
    (half,) = [fit for fit in diagnose({"dr": "NaN"}) if fit.row.cause.key == "bug A"]
    assert (half.agree, half.against, half.good) == (0.5, (), False)


def test_a_cell_says_where():
    exact = torch.zeros(1, 4, 2, 3, dtype=torch.float64) + 1
    got = exact.float().clone()
    got[0, 2] = torch.inf
    assert case._cell("dr", got, exact, 1e-4)[:2] == ("inf", False)
    assert case._cell("dr", got * torch.inf, exact, 1e-4)[:2] == ("inf", True)
    got[0, 1, 0, 0] = torch.nan
    assert case._cell("dr", got, exact, 1e-4)[:2] == ("NaN", False)
    assert case._cell("dr", exact.float() + 1e-2, exact, 1e-4).kind == "wrong"
