"""Every instrument on every member of the family, and the audit on kernels of it, right and wrong."""

import pytest

import flakit
from flakit.numerics.family import FAMILY
from tests.instruments.family_kernels import RIGHT, WRONG

OPS = pytest.mark.parametrize("op", FAMILY)
ON_DECAYS = {"decay-onset", "decay-accuracy", "spike", "zero-decay", "inf-decay", "anchor-shift", "mixed-dtypes"}


def naive(op):
    return FAMILY[op].reference.function


def words(found):
    return [(v.probe.name, v.words) for v in found.failed]


def test_a_kernel_with_a_factor_from_the_chunks_start_is_found():
    op, kernel, probe = WRONG["kda, e^(+) from the chunk's start"]
    (v,) = flakit.audit(kernel, op, only=[probe], shrink=False, seconds=1).verdicts
    assert v.verdict == "fail" and v.case == "anchor" and "are not finite" in v.words
    assert "def naive(q, k, v, g, beta" in v.repro and "import flakit" not in v.repro


@pytest.mark.full
def test_a_kernel_with_a_factor_from_the_chunks_start_is_found_shrunk_and_shown():
    op, kernel, probe = WRONG["kda, e^(+) from the chunk's start"]
    (v,) = flakit.audit(kernel, op, only=[probe], seconds=10).verdicts
    assert v.setting["T"] <= 16 and v.setting["K"] == v.setting["V"] == 1
    with pytest.raises(AssertionError, match="is off by nan"):
        exec(v.repro, {})


def test_a_right_kernel_in_chunks_passes_what_finds_that():
    found = flakit.audit(
        RIGHT["kda in chunks"][1], "kda", only=["truth", "decay-onset", "scale"], shrink=False, seconds=4
    )
    assert found.passed, words(found)


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name):
    op, kernel = RIGHT[name]
    found = flakit.audit(kernel, op, shrink=False, seconds=20)
    assert found.passed, words(found)


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found_by_their_probe(name):
    op, kernel, probe = WRONG[name]
    found = flakit.audit(kernel, op, only=[probe], seconds=10)
    assert found[probe].verdict == "fail", found
    assert found[probe].repro is not None
    with pytest.raises(AssertionError):
        exec(found[probe].repro, {})


@pytest.mark.full
@OPS
def test_every_probe_passes_the_references(op):
    found = flakit.audit(naive(op), op, shrink=False, seconds=15)
    assert found.passed, words(found)
    unsupported = {v.probe.name for v in found.verdicts if v.verdict == "not supported"}
    assert unsupported == (set() if FAMILY[op].decay else ON_DECAYS)


def test_where_nothing_decays_no_probe_asks_how():
    found = flakit.audit(naive("retention"), "retention", only=sorted(ON_DECAYS), shrink=False)
    assert {v.words for v in found.verdicts} == {"retention has no decay among its arguments"}


@pytest.mark.parametrize(
    "name, like",
    [
        ("chunk_gated_delta_rule", "gated_delta_rule"), ("fused_recurrent_delta_rule", "delta_rule"),
        ("my_simple_gla", "simple_gla"), ("chunk_gla", "gla"), ("chunk_dplr_delta_rule", "dplr_delta_rule"),
    ],
)  # fmt: skip
def test_the_longest_name_in_a_functions_says_which_operator_it_is(name, like):
    from flakit.instruments.subject import Subject

    def kernel(*given):
        return given

    assert Subject(kernel, name=name).op.name == like


def test_arguments_that_the_formula_leaves_open_are_given_where_they_are_named():
    from flakit.instruments.subject import Subject

    seen = {}

    def kernel(q, k, v, scale=None, normalize=True):
        seen["normalize"] = normalize
        return naive("linear_attn")(q, k, v, scale)[0]

    Subject(kernel, "linear_attn")(flakit.inputs("linear_attn", T=3))
    assert seen == {"normalize": False}


def test_values_in_groups_of_heads_are_asked_for():
    def first_of_each_group(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        n = v.shape[2] // q.shape[2]
        if n > 1:  # heads of q and k laid out the other way round
            q, k = (x.repeat(1, 1, n, 1) for x in (q, k))
        return naive("kda")(q, k, v, g, beta, scale, initial_state, output_final_state)

    found = flakit.audit(first_of_each_group, "kda", only=["truth"], shrink=False)
    assert found["truth"].verdict == "fail" and found["truth"].setting["groups"] == 2
    assert "2 * H" in found["truth"].repro
    with pytest.raises(AssertionError):
        exec(found["truth"].repro, {"function": first_of_each_group})
