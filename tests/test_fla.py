"""`flakit.in_place_of_fla()`, on a miniature of flash-linear-attention; tests/test_fla_layers.py has the real one."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import flakit
from flakit import fla as module
from tests import fla_on_cpu
from tests.commands import completed

MINIATURE = Path(__file__).parent / "fla_miniature"
PLACES = {
    "chunk_rwkv6": ["ops.rwkv6.chunk", "ops.rwkv6", "ops", "layers.rwkv6"],
    "fused_recurrent_rwkv6": ["ops.rwkv6.fused_recurrent", "ops.rwkv6", "ops", "layers.rwkv6"],
    "chunk_rwkv7": ["ops.rwkv7.chunk", "ops.rwkv7", "ops", "layers.rwkv7"],
    "fused_recurrent_rwkv7": ["ops.rwkv7.fused_recurrent", "ops.rwkv7", "ops"],
    "fused_mul_recurrent_rwkv7": ["ops.rwkv7.fused_recurrent", "ops.rwkv7", "layers.rwkv7"],
    "chunk_gsa": ["ops.gsa.chunk", "ops.gsa", "ops", "layers.gsa"],
    "fused_recurrent_gsa": ["ops.gsa.fused_recurrent", "ops.gsa", "ops", "layers.gsa"],
}


def loaded(name="fla"):
    return [key for key in sys.modules if key.split(".")[0] == name]


@pytest.fixture
def fla(monkeypatch):
    """The miniature, freshly imported with its layers; the real one, where it is loaded, comes back afterwards."""
    real = {name: sys.modules.pop(name) for name in loaded()}
    monkeypatch.syspath_prepend(MINIATURE)
    fla = importlib.import_module("fla")
    assert Path(fla.__file__).parent == MINIATURE / "fla"
    for layer in ("rwkv6", "rwkv7", "gsa"):
        importlib.import_module(f"fla.layers.{layer}")
    yield fla
    if module._now is not None:
        module._now.undo()
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(real)


def state_of(fla):
    """Every attribute of every module of it, by identity."""
    return {(name, key): id(value) for name in loaded() for key, value in vars(sys.modules[name]).items()}


def test_every_place_is_replaced_and_named(fla):
    before = state_of(fla)
    done = flakit.in_place_of_fla()
    expected = {}
    for name, places in PLACES.items():
        op = name.split("_")[-1]
        ours = f"flakit.fla.{name}" if name == "fused_recurrent_rwkv7" else f"flakit.ops.{op}.{name}"
        expected |= {f"fla.{place}.{name}": ours for place in places}
    assert done.replaced == expected
    for place, ours in expected.items():
        where, _, name = place.rpartition(".")
        assert getattr(sys.modules[where], name) is getattr(importlib.import_module(ours.rpartition(".")[0]), name)
    changed = {f"{name}.{key}" for name, key in before if state_of(fla)[name, key] != before[name, key]}
    assert changed == set(expected)
    printed = str(done)
    assert "flash-linear-attention 0.6.0" in printed
    assert all(place in printed and ours in printed for place, ours in expected.items())


def test_undo_puts_back_what_was_there_and_may_be_repeated(fla):
    before = state_of(fla)
    done = flakit.in_place_of_fla()
    assert state_of(fla) != before
    done.undo()
    assert state_of(fla) == before
    done.undo()
    assert state_of(fla) == before
    assert "no longer" in str(done)


def test_modules_imported_later_get_ours_and_give_them_back(fla):
    before = state_of(fla)
    late = sys.modules.pop("fla.layers.rwkv7")
    with flakit.in_place_of_fla() as done:
        assert "fla.layers.rwkv7.chunk_rwkv7" not in done.replaced
        new = importlib.import_module("fla.layers.rwkv7")
        assert new is not late
        assert new.chunk_rwkv7 is flakit.chunk_rwkv7
    assert new.chunk_rwkv7 is fla.ops.rwkv7.chunk_rwkv7 is not flakit.chunk_rwkv7
    unchanged = {key for key in before if key[0] not in ("fla.layers.rwkv7", "fla.layers")}
    assert {key: state_of(fla)[key] for key in unchanged} == {key: before[key] for key in unchanged}


def test_blocks_may_be_nested(fla):
    before = state_of(fla)
    with flakit.in_place_of_fla():
        inside = state_of(fla)
        with flakit.in_place_of_fla():
            assert state_of(fla) == inside
        assert state_of(fla) == inside != before
    assert state_of(fla) == before


def test_a_block_within_a_plain_call_leaves_it_as_it_was(fla):
    before = state_of(fla)
    done = flakit.in_place_of_fla()
    with flakit.in_place_of_fla():
        pass
    assert state_of(fla) != before
    assert flakit.in_place_of_fla() is done
    done.undo()
    assert state_of(fla) == before


def test_a_block_ends_with_an_exception_too(fla):
    before = state_of(fla)
    with pytest.raises(ZeroDivisionError), flakit.in_place_of_fla():
        1 / 0  # noqa: B018
    assert state_of(fla) == before


def test_after_undo_a_new_call_replaces_anew(fla):
    first = flakit.in_place_of_fla()
    first.undo()
    with pytest.raises(RuntimeError, match="undone"), first:
        pass
    second = flakit.in_place_of_fla()
    first.undo()
    assert fla.ops.chunk_gsa is flakit.chunk_gsa
    second.undo()
    assert fla.ops.chunk_gsa is not flakit.chunk_gsa


def test_without_flash_linear_attention_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"pip install flash-linear-attention==0\.6\.0"):
        flakit.in_place_of_fla()


def test_an_untested_version_is_refused_and_may_be_tried_by_name(fla):
    fla.__version__ = "0.7.3"
    before = state_of(fla)
    with pytest.raises(RuntimeError, match=r"expected version 0\.6\.0, got 0\.7\.3.*version='0\.7\.3'"):
        flakit.in_place_of_fla()
    with pytest.raises(RuntimeError, match=r"got 0\.7\.3"):
        flakit.in_place_of_fla(version="0.7.2")
    assert state_of(fla) == before
    with flakit.in_place_of_fla(version="0.7.3") as done:
        assert done.version == "0.7.3"
        assert fla.ops.chunk_rwkv6 is flakit.chunk_rwkv6


def changed_default(r, k, v, w, u, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None):
    pass


def changed_order(r, w, k, v, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    pass


def new_argument(
    r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, decay_base=2
):
    pass


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (changed_default, "argument 6 to be scale"),
        (changed_order, "argument 2 to be k"),
        (new_argument, "got decay_base"),
        (None, "is not there"),
    ],
    ids=["default", "order", "argument", "gone"],
)
def test_a_function_that_takes_other_arguments_is_refused_before_anything_is_replaced(fla, other, says):
    fla.ops.rwkv6.chunk_rwkv6 = other
    before = state_of(fla)
    with pytest.raises(RuntimeError, match=rf"fla\.ops\.rwkv6\.chunk_rwkv6 .*{says}"):
        flakit.in_place_of_fla()
    assert state_of(fla) == before


def test_importing_flakit_imports_no_flash_linear_attention():
    code = "import sys, flakit; print(sorted(name for name in sys.modules if name.split('.')[0] == 'fla'))"
    done = completed(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


# --- what the layers pass -----------------------------------------------------------------------------------------


def tensors(op, B, T, H=2, K=16, V=24, M=8):
    """Named as the layers' calls have them, in float64, as parameters."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if op == "rwkv6":
        given = {"r": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
        given |= {"w": -normal(B, T, H, K).exp(), "u": normal(H, K)}
    elif op == "rwkv7":
        given = {"r": normal(B, T, H, K), "w": -0.6065 * normal(B, T, H, K).sigmoid(), "k": normal(B, T, H, K)}
        kk = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
        given |= {"v": normal(B, T, H, V), "kk": kk, "a": normal(B, T, H, K).sigmoid()}
    else:
        f = torch.nn.functional.logsigmoid(normal(B, T, H, M)) / 8
        given = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "s": 1 - f.exp(), "f": f}
    return given


def as_given(given, dtype=torch.float32):
    return {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}


def off(got, true):
    return ((got.double() - true).norm() / true.norm()).item()


def flat(state):
    return list(state) if isinstance(state, (tuple, list)) else [state]


@pytest.mark.parametrize("T", [40, 100])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_the_layers_calls_compute_and_differentiate(fla, op, T):
    given = tensors(op, 2, T)
    layer = sys.modules[f"fla.layers.{op}"]
    true = as_given(given, torch.float64)
    with fla_on_cpu.recurrences_in_place():
        o_true, state_true = layer.mix(**true, use_cache=True)
    sum(x.sin().sum() for x in (o_true, *flat(state_true))).backward()
    ours = as_given(given)
    with flakit.in_place_of_fla():
        o, state = layer.mix(**ours, use_cache=True)
    sum(x.sin().sum() for x in (o, *flat(state))).backward()
    errors = {"o": off(o, o_true)} | {f"d{name}": off(ours[name].grad, true[name].grad) for name in given}
    errors |= {f"state {n}": off(*pair) for n, pair in enumerate(zip(flat(state), flat(state_true), strict=True))}
    assert {name: error for name, error in errors.items() if not error < 2e-5} == {}


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_decoding_from_a_prompt_gives_what_one_pass_gives(fla, op):
    given = tensors(op, 2, 76)
    layer = sys.modules[f"fla.layers.{op}"]
    with torch.no_grad():
        with fla_on_cpu.recurrences_in_place():
            true, _ = layer.mix(**given)
        over_time = {name: x.float() for name, x in given.items()}
        fixed = {"u": over_time.pop("u")} if op == "rwkv6" else {}
        outputs, state = [], None
        with flakit.in_place_of_fla():
            for start, end in [(0, 70), *((t, t + 1) for t in range(70, 76))]:
                part = {name: x[:, start:end] for name, x in over_time.items()}
                o, state = layer.mix(**part, **fixed, state=state, use_cache=True)
                state = list(state) if op == "gsa" else state  # as its cache may keep it
                outputs.append(o)
            assert flat(layer.mix(**part, **fixed, state=state, use_cache=None)[1]) == [None] * (1 + (op == "gsa"))
    assert off(torch.cat(outputs, 1), true) < 2e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_packed_sequences_as_the_layers_unpad_them(fla, op, dtype):
    given, cu_seqlens = tensors(op, 1, 100), torch.tensor([0, 17, 17, 90, 100], dtype=dtype)
    layer = sys.modules[f"fla.layers.{op}"]
    with fla_on_cpu.recurrences_in_place():
        true, states_true = layer.mix(**given, use_cache=True, cu_seqlens=cu_seqlens[[0, 1, 3, 4]])
    with flakit.in_place_of_fla():
        o, states = layer.mix(**as_given(given), use_cache=True, cu_seqlens=cu_seqlens)
    assert off(o, true) < 2e-6
    for got, expected in zip(flat(states), flat(states_true), strict=True):
        assert off(got[[0, 2, 3]], expected) < 2e-6
        assert not got[1].any()


def test_the_recurrent_rwkv7_keeps_the_defaults_it_is_called_with(fla):
    given = {name: x.float() for name, x in tensors("rwkv7", 1, 9).items()}
    r, w, k, v, kk, a = given.values()
    with flakit.in_place_of_fla():
        o, state = fla.ops.fused_recurrent_rwkv7(r, w, k, v, -kk, kk * a)
    expected = flakit.fused_recurrent_rwkv7(r, w, k, v, -kk, kk * a, 16**-0.5, None, True)
    torch.testing.assert_close((o, state), tuple(expected))
