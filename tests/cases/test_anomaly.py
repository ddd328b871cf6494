"""What anomaly detection says, against what the case of the padding predicts; what it passes over; what a mode sees."""

import pytest
import torch

from flakit.cases import anomaly as case
from flakit.cases import padding
from flakit.figures.canvas import Cell
from flakit.numerics.errors import compare
from flakit.numerics.evaluate import truth
from flakit.numerics.inputs import inputs
from tests.cases import drawing


@pytest.mark.parametrize("op", padding.KEY_GRADIENT)
@pytest.mark.parametrize("form", padding.FORMS)
def test_law_says_what_is_named(form, op):
    for T in (64, 100, 120):
        limit = min(padding.law(T, form), 50.0)
        for gate in (-0.99 * limit, -1.01 * limit):
            assert case.show(T=T, gate=gate, op=op, form=form).rows[0].agrees, (T, gate)


def test_a_wrong_law_is_rejected():
    row = case.show(T=120, gate=-1.86).rows[0]
    assert row.agrees and row.measured == "output 3, ds"
    assert not row._replace(law="output 4, dg").agrees  # the gate's gradient is NaN too, but not the first
    assert not row._replace(law=case.law(120, -1.84)).agrees


def test_the_operator_is_the_case_itself():
    x = inputs("gsa", T=40, H=2, K=8)
    call = case.operator("gsa", padding.products(40, "right"))
    found = case.report(call, x)
    do = torch.ones_like(found.o)
    exact = truth("gsa", x, arriving=(do, None))
    assert found.words == case.NOTHING and compare(found.o, exact["o"]).l2 < 1e-6
    assert max(compare(grad, exact[name]).l2 for name, grad in found.grads.items()) < 2e-6


def test_a_second_backward_is_refused():
    x = [y.requires_grad_() for y in inputs("gsa", T=40, H=1, K=4).values()]
    o = case.operator("gsa", padding.products(40))(*x)
    o.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward: expected one for each forward, got a second"):
        o.sum().backward()


def test_the_story():
    rows = {row.what: row for row in case.reproduce()}
    assert all(row.agrees is not False for row in rows.values())
    assert rows["bug A, w not trained: infinite gradients"].measured == "dr, dv"
    assert rows["bug A, w not trained: anomaly detection"].measured == case.NOTHING


def test_the_mode_names_the_operation():
    x = {"x": torch.tensor([89.0]), "y": torch.tensor([0.0])}
    assert case.first_operation(lambda x, y: x.exp() * y, x) == "exp"
    assert case.first_operation(lambda x, y: (x + y).log(), {"x": torch.ones(1), "y": -torch.ones(1)}) == "div"
    assert case.first_operation(lambda x, y: x * y, x) == case.NOTHING
    assert case.first_operation(lambda x, y: torch.where(y > 0, x, -torch.inf).exp(), x) == case.NOTHING


def test_other_errors_are_not_swallowed():
    with pytest.raises(RuntimeError, match="size"):
        case.report(lambda x: torch.ones(3) @ x.view(2), {"x": torch.ones(2)})


def by_parts(x):
    """Each view is taken, and the first part written, while the rest still holds what was there before."""
    made = torch.empty_like(x)
    made[:2].copy_(x[:2])
    made[2:].copy_(x[2:])
    return made


@pytest.mark.parametrize("copy", [lambda x: torch.empty_like(x).copy_(x), by_parts], ids=["whole", "by parts"])
def test_the_mode_passes_over_what_is_yet_to_be_written(copy):
    x = {"x": torch.ones(3), "y": torch.ones(3)}
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        seen = case.operations(lambda x, y: copy(x) * y, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {operation.kind for operation in seen} == {"finite"} and not any(operation.made for operation in seen)


# --- the picture ----------------------------------------------------------------------------------------------------

NAMED = dict(T=120, gate=-1.88, op="gsa", form="chunk")


def drawn(**setting):
    return drawing.drawn(case, **NAMED | setting)


@pytest.mark.parametrize("setting", [{}, {"op": "rwkv6"}, {"gate": -1.84}, {"form": "right", "gate": -50.0}], ids=str)
def test_it_shows_what_is_measured(setting):
    _, shown = drawn(**setting)
    said, first, o = case.show(**NAMED | setting).rows
    assert said.measured == shown.words
    assert first.measured == next((each.name for each in shown.operations if each.made), case.NOTHING)
    assert o.measured == (shown.nan["o"] + shown.inf["o"] == 0).all()
    lost = [name for name, share in shown.nan.items() if share.any()]
    assert bool(lost) == (shown.words != case.NOTHING)
    if lost:
        assert shown.words == f"output {list(shown.nan).index(lost[0]) - 1}, {lost[0]}"


def test_the_first_bad_operation_comes_before_every_other():
    _, shown = drawn()
    bad = [n for n, each in enumerate(shown.operations) if each.kind != "finite"]
    first = shown.operations[bad[0]]
    assert first.made and first.name == "exp" and first.kind == "inf" and not first.backward
    assert len(bad) > 50 and shown.operations[bad[-1]].kind == "NaN"
    passes = [each.backward for each in shown.operations]
    assert passes == sorted(passes) and 0 < sum(passes) < len(passes)


def test_the_picture_points_at_what_is_named():
    made, shown = drawn()
    assert made._named.get_visible() and list(made._named.get_ydata()) == [list(shown.nan).index("ds")]
    assert made._first.get_text() == "first: exp" and made._arrow.get_visible()
    fine, _ = drawn(gate=-1.84)
    assert not fine._named.get_visible() and not fine._arrow.get_visible() and fine.canvas.png() != made.canvas.png()


@pytest.mark.parametrize("op", padding.KEY_GRADIENT)
def test_its_sentence_changes_with_the_law(op):
    limit = padding.law(120)
    made, shown = drawn(op=op, gate=-1.001 * limit)
    named, also = {"gsa": ("output 3, ds", "dg"), "rwkv6": ("output 1, dk", "dw")}[op]
    said = made.say(shown)
    assert f"names {named}, and is right. It does not say that tokens 96 … 111 are lost" in said
    assert f"nor that {also} is lost too, nor that it began with an exp" in said
    made, shown = drawn(op=op, gate=-0.999 * limit)
    assert "there is nothing to say" in made.say(shown)


def test_its_arithmetic():
    made, shown = drawn()
    first = next(n for n, each in enumerate(shown.operations) if each.made)
    assert made.arithmetic(shown, Cell("operations", 0, first)) == (
        f"operation {first + 1} of the forward pass, exp: an infinity, made of finite numbers"
    )
    assert made.arithmetic(shown, Cell("operations", 0, 0)) == "operation 1 of the forward pass, detach: finite"
    assert made.arithmetic(shown, Cell("returned", 4, 100)) == "ds of token 100: 100% NaN, 0% infinite"
