"""An operator described by its user: what is understood, what is refused, and that its truth is the right one."""

import math
import sys

import numpy as np
import pytest
import torch

import flakit
from flakit.numerics.described import from_reference
from flakit.numerics.evaluate import evaluate, truth
from flakit.numerics.family import FAMILY
from flakit.numerics.operators import DESCRIBED, operator
from flakit.numerics.sweep import sweep

AXES = {"q k g": "B T H K", "v": "B T H V"}


def gated(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = 0 if initial_state is None else initial_state
    o = []
    for t in range(k.shape[1]):
        S = g[:, t].exp()[..., None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1), S


def in_base_2(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    return gated(q, k, v, g * math.log(2), scale, initial_state)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    before = dict(DESCRIBED)
    yield
    DESCRIBED.clear()
    DESCRIBED.update(before)


def assert_same(found, true, names=None):
    for name in names or true:
        torch.testing.assert_close(found[name].double(), true[name], rtol=1e-10, atol=1e-12)


def test_a_described_operator_has_the_truth_of_the_built_in_one():
    op = flakit.describe("mine", gated, AXES, decay="g", profile="gla")
    assert operator("mine") is op and op.states == ("initial_state",) and op.axes["final_state"] == "N H K V"
    x = flakit.inputs("mine", T=20, K=6, V=4, dtype=torch.float64, initial_state=True)
    assert all(torch.equal(x[name], y) for name, y in flakit.inputs("gla", T=20, K=6, V=4, dtype=torch.float64).items())
    assert_same(truth("mine", x, dfinal_state=True), truth("gla", x, dfinal_state=True))
    packed = flakit.inputs("mine", K=6, V=4, cu_seqlens=[0, 3, 3, 9], dtype=torch.float64)
    assert_same(evaluate("mine", packed, form="naive", dfinal_state=True), truth("gla", packed, dfinal_state=True))


def test_a_decay_of_base_2_is_drawn_counted_and_differentiated_as_one():
    natural = flakit.describe("natural", gated, AXES, decay="g")
    binary = flakit.describe("binary", in_base_2, AXES, decay="g", log="base 2")
    x, y = (flakit.inputs(op, T=12, K=4, dtype=torch.float64, decay=-2.0) for op in (natural, binary))
    assert y["g"].unique().item() == pytest.approx(-2 / math.log(2))
    assert torch.allclose(binary.log_decay(y), natural.log_decay(x))
    a, b = truth(natural, x), truth(binary, y)
    assert_same(b, a, ("o", "dq", "dk", "dv"))
    torch.testing.assert_close(b["dg"], a["dg"] * math.log(2))


def test_without_states_scale_or_decay():
    def softmax_free(q, k, v):
        A = torch.tril(torch.einsum("bihk,bjhk->bhij", q, k))
        return torch.einsum("bhij,bjhv->bihv", A, v)

    op = flakit.describe("plain", softmax_free, {"q k": "B T H K", "v": "B T H V"}, scale_exponent=0)
    assert op.heads_alike and op.states == () and op.outputs == ("o",) and not op.has_scale and op.decay == ""
    x = flakit.inputs(op, T=9, K=4, V=3, dtype=torch.float64)
    assert_same(truth(op, x), truth("linear_attn", x | {"scale": 1.0}), ("o", "dq", "dk", "dv"))


def test_two_parts_of_a_state_and_an_axis_of_its_own():
    def normalized(q, k, v, lora, initial_state=None):
        S, z = initial_state or (0.0, 0.0)
        o = []
        for t in range(k.shape[1]):
            S, z = S + k[:, t, :, :, None] * v[:, t, :, None], z + k[:, t]
            read = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
            o.append(read / (1 + (q[:, t] * z).sum(-1, keepdim=True).square()) * lora.square().sum(-1)[..., None])
        return torch.stack(o, 1), (S, z)

    axes = {"q k": "B T H K", "v": "B T H V", "lora": "H R", "initial_state": ["N H K V", "N H K"]}
    op = flakit.describe("normalized", normalized, axes, sizes={"R": 2})
    assert op.states == ("initial_1", "initial_2") and op.outputs == ("o", "final_1", "final_2")
    x = flakit.inputs(op, T=9, K=4, V=3, dtype=torch.float64, initial_state=True, cu_seqlens=[0, 4, 9])
    assert x["lora"].shape == (2, 2) and [tuple(y.shape) for y in x["initial_state"]] == [(2, 2, 4, 3), (2, 2, 4)]
    found = truth(op, x, dfinal_state=True)
    assert_same(evaluate(op, x, form="naive", dfinal_state=True), found)
    assert all(y.any() for y in found.values())


def test_what_a_model_gives_is_what_is_said():
    draws = {"q": "unit", "k": (0.5, 2.0), "v": lambda rng, shape: rng.integers(3, 5, shape)}
    op = flakit.describe("said", gated, AXES, decay="g", profile="rwkv7", draws=draws)
    x = flakit.inputs(op, T=200, K=8)
    torch.testing.assert_close(x["q"].norm(dim=-1), torch.ones(1, 200, 2))
    assert 0.5 <= x["k"].min() < 0.55 and 1.95 < x["k"].max() <= 2 and set(x["v"].unique().tolist()) == {3.0, 4.0}
    assert -0.6066 < x["g"].min() < -0.5


@pytest.mark.parametrize("kind", ["npz", "pt", "safetensors"])
def test_real_tensors_come_from_a_file(tmp_path, kind):
    real = {"q": torch.arange(2.0 * 5 * 3 * 4).view(2, 5, 3, 4), "g": -torch.rand(2, 5, 3, 4)}
    file = tmp_path / f"real.{kind}"
    if kind == "npz":
        np.savez(file, **{name: x.numpy() for name, x in real.items()})
    elif kind == "pt":
        torch.save(real, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(real, file)
    op = flakit.describe("real", gated, AXES, decay="g", data=file)
    x = flakit.inputs(op, B=2, T=12, H=3, K=4)
    first = x["q"][0, 0, 0, 0].item() // 12  # q counts its elements, 12 a token
    for name in real:
        assert torch.equal(x[name], real[name][:, [int(first + t) % 5 for t in range(12)]]) or name == "g"
    assert set(x["g"].unique().tolist()) <= set(real["g"].unique().tolist()) and op.profile == "data"
    assert flakit.inputs(op, K=4, decay=-1.0)["g"].unique().tolist() == [-1.0]


def casts(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    S = None if initial_state is None else initial_state.float()
    o, S = gated(q.float(), k.float(), v.float(), g.float(), scale, S)
    return o.double(), S.double()


def forgets(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    return gated(q, k, v, g, scale, None)


def transposes(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    o, S = gated(q, k, v, g, scale, None if initial_state is None else initial_state.mT)
    return o, S.mT


def detaches(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    return tuple(x.detach() for x in gated(q, k, v, g, scale, initial_state))


def raises(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"forward": casts}, "forward: expected float64 arithmetic for float64 inputs"),
        ({"forward": forgets}, "forward: expected two halves .* to be the whole, got another o"),
        ({"forward": transposes}, r"forward: it raised RuntimeError"),
        ({"forward": detaches}, "forward: expected o to be differentiable"),
        ({"forward": raises}, "forward: it raised RuntimeError: no such luck"),
        (
            {"forward": lambda q, k, v, g: gated(q, k, v, g)[0].float()},
            "forward: expected o in float64 .*, got torch.f",
        ),
        ({"forward": 3}, "forward: expected a function, got 3"),
        ({"name": "kda"}, "name: expected one that is not built in, got 'kda'"),
        ({"name": "my op"}, "name: expected letters, digits and _, got 'my op'"),
        ({"axes": {"q k g": "B H T K", "v": "B T H V"}}, 'axes: expected batch and time first, .*, got "B H T K" as q'),
        ({"axes": {"q k g v": "B T H K"}}, "axes: expected a tensor with the axes T and V, got none"),
        ({"axes": {"q k g": "B T K", "v": "B T V"}}, "axes: expected B, T, H, K, V among .*, got none called H"),
        ({"axes": {"q k g": "B T H K", "v": "B T H V", "x": "R"}}, "sizes: expected the size of R"),
        ({"axes": {"q k g": 4}}, "axes: expected letters with spaces between"),
        ({"axes": {**AXES, "initial_state": []}}, "axes: expected letters with spaces between"),
        ({"axes": {**AXES, "g_state": ["B T H K", "B T H"]}}, "axes: expected letters with spaces between"),
        ({"axes": {**AXES, "o": "B T H K"}}, r"forward: expected o \[B T H K\] = \[2, 5, 2, 4\], got \[2, 5, 2, 3\]"),
        ({"decay": "w"}, "decay: expected one of q, k, v, g, got 'w'"),
        ({"log": "base 10"}, "log: expected one of natural, base 2, got 'base 10'"),
        ({"draws": {"w": "unit"}}, "draws: expected one of q, k, v, g, got 'w'"),
        ({"draws": {"q": "huge"}}, r"draws\['q'\]: expected one of normal, unit, sigmoid, softmax, a pair"),
        ({"data": {"g": torch.ones(1, 2, 1, 4)}}, r"data\['g'\]: expected log decays <= 0, got 1"),
        ({"data": {"q": torch.ones(3)}}, r"data\['q'\]: expected a tensor \[B, T, H, K\], got a tensor \[3\]"),
        ({"data": "nowhere.pt"}, "data: expected a file, nowhere.pt does not exist"),
        ({"kernels": {"chunk": 1}}, r"kernels\['chunk'\]: expected a function, got 1"),
        ({"profile": "steep"}, "decay: expected one of .*, got 'steep'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_is_wrong_is_named(wrong, message):
    given = {"name": "wrong", "forward": gated, "axes": AXES, "decay": "g"} | wrong
    with pytest.raises((ValueError, TypeError), match=message):
        flakit.describe(given.pop("name"), given.pop("forward"), given.pop("axes"), **given)
    assert "wrong" not in DESCRIBED


# --- in files --------------------------------------------------------------------------------------------------------

FILE = '''
import torch

def naive(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
    """Gated linear attention, token by token.

    {said}
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S = 0 if initial_state is None else initial_state
    o = []
    for t in range(k.shape[1]):
        S = g[:, t].exp()[..., None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, 1), S
'''
SAID = '''axes = {{ "q k g" = "B T H K", v = "B T H V" }}
    decay = "g"
    profile = "gla"'''.replace("{{", "{").replace("}}", "}")


@pytest.fixture
def file(tmp_path, request):
    path = tmp_path / f"of_a_user_{abs(hash(request.node.name))}.py"
    yield path
    sys.modules.pop(path.stem, None)
    sys.path[:] = [x for x in sys.path if x != str(tmp_path)]


def in_its_docstring(file):
    file.write_text(FILE.replace("{said}", f"[flakit]\n    {SAID}"))


def beside_it(file):
    file.write_text(FILE.replace("{said}", "Nothing is said here."))
    file.with_suffix(".toml").write_text("[naive]\n" + SAID.replace("\n    ", "\n"))


@pytest.mark.parametrize("say", [in_its_docstring, beside_it])
def test_a_reference_in_a_file_describes_itself(file, say):
    say(file)
    op = operator(f"{file}:naive")
    assert (op.name, op.decay, op.profile) == ("naive", "g", "gla") and op is operator(f"{file}:naive")
    x = flakit.inputs(op, T=12, K=4, V=3, dtype=torch.float64)
    assert_same(truth(op, x), truth("gla", x))


@pytest.mark.parametrize(
    "said, message",
    [
        ("Nothing.", "reference: expected a description of naive, in its docstring after a line .flakit. or in"),
        ("[flakit]\n    axes = 3 4", "reference: expected TOML in the docstring of naive"),
        ("[flakit]\n    decays = 'g'", "reference: expected keys among name, axes, decay, .*, got decays"),
        ("[flakit]\n    decay = 'g'", "reference: expected axes in the docstring of naive, got none"),
        ("[flakit]\n    forward = 'g'", "reference: expected keys among .*, got forward"),
    ],
)
def test_what_a_file_says_wrongly_is_named(file, said, message):
    file.write_text(FILE.replace("{said}", said))
    with pytest.raises(ValueError, match=message):
        from_reference(f"{file}:naive")


def test_a_kernel_is_swept_like_a_reference_in_a_file(file):
    in_its_docstring(file)
    found = sweep(f"{file}:naive", {"decay": [-1.0, -40.0], "T": [5, 20]}, like=f"{file}:naive", K=4)
    assert found["o.l2"].shape == (2, 2) and found["dg.l2"].max() < 1e-6 and (found["o.finite"] == 1).all()
    builtin = sweep("kda", {"T": [5]}, form="naive", K=4)
    assert builtin["dbeta.l2"].max() < 1e-5


def test_forms_of_ones_own_are_run_beside_the_naive_one():
    op = flakit.describe(
        "formed", gated, AXES, decay="g", kernels={"chunk": gated, "half": lambda **x: gated(**x)[0] / 2}
    )
    x = flakit.inputs(op, T=8, K=4)
    true = truth(op, x)
    assert (evaluate(op, x, form="chunk")["o"] - true["o"]).norm() < 1e-5 * true["o"].norm()
    assert list(op.forms) == ["naive", "chunk", "half"]


def test_family_members_say_what_decays():
    assert {name for name, op in FAMILY.items() if op.decay} == {
        "simple_gla", "gla", "hgrn2", "gated_delta_rule", "kda", "dplr_delta_rule"
    }  # fmt: skip
    gammas = FAMILY["retention"].log_decay(flakit.inputs("retention", T=3, H=4))
    assert gammas.shape == (1, 3, 4) and gammas[0, 0].tolist() == pytest.approx(
        [math.log(1 - 2**-n) for n in range(5, 9)]
    )
    assert not FAMILY["linear_attn"].log_decay(flakit.inputs("linear_attn", T=3)).any()


def test_a_head_that_depends_on_where_it_stands_is_known():
    def retention(q, k, v, scale=None, initial_state=None, output_final_state=False):
        return FAMILY["retention"].reference.function(q, k, v, scale, initial_state, output_final_state)

    assert not flakit.describe("of_its_head", retention, {"q k": "B T H K", "v": "B T H V"}).heads_alike
