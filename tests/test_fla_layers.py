"""flash-linear-attention's own layers on flakit's operators, unchanged and on a CPU, against themselves in float64.

Its helper kernels need a GPU: `tests.fla_on_cpu` does the same in plain PyTorch, for both sides.
"""

import copy
import importlib
import inspect
import sys

import pytest
import torch

import flakit
from flakit import fla as module
from tests import fla_on_cpu
from tests.test_fla import MINIATURE, PLACES, off

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # it warns that there is no GPU, and about its own RWKV
]


@pytest.fixture(scope="module")
def fla():
    pytest.importorskip("transformers", reason="needs flash-linear-attention: pip install --editable '.[fla]'")
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention: pip install --editable '.[fla]'")
    importlib.import_module("fla.models")
    with fla_on_cpu.helper_kernels_in_torch():
        yield sys.modules["fla"]


def new_layer(fla, op):
    torch.manual_seed(0)
    new = {
        "rwkv6": lambda: fla.layers.RWKV6Attention(hidden_size=64, num_heads=2, layer_idx=0),
        "rwkv7": lambda: fla.layers.RWKV7Attention(hidden_size=64, head_dim=32, layer_idx=0, num_hidden_layers=2),
        "gsa": lambda: fla.layers.GatedSlotAttention(hidden_size=64, num_heads=2, num_slots=16, layer_idx=0),
    }[op]()
    with torch.no_grad():
        for parameter in new.parameters():  # some begin as zeros, and nothing passes through zeros
            parameter += 0.1 * torch.randn_like(parameter)
    return new


def test_all_its_places_are_known_and_replaced(fla):
    raven = {f"fla.layers.raven.{name}" for name in ("chunk_gsa", "fused_recurrent_gsa")}
    expected = {f"fla.{place}.{name}" for name, places in PLACES.items() for place in places} | raven
    with flakit.in_place_of_fla() as done:
        assert set(done.replaced) == expected
        assert fla.layers.rwkv7.chunk_rwkv7 is flakit.chunk_rwkv7
    assert fla.layers.rwkv7.chunk_rwkv7 is not flakit.chunk_rwkv7


def test_the_miniature_has_its_signatures(fla, monkeypatch):
    def signatures():
        ops = {package: importlib.import_module(package) for package in module.REPLACEMENTS}
        return {
            f"{package}.{function.__name__}": [
                (argument.name, argument.kind, argument.default)
                for argument in inspect.signature(getattr(ops[package], function.__name__)).parameters.values()
            ]
            for package, functions in module.REPLACEMENTS.items()
            for function in functions
        }

    real = signatures()
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(MINIATURE)
    small = signatures()
    assert MINIATURE / "fla" / "__init__.py" == type(MINIATURE)(sys.modules["fla"].__file__)
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]
    assert small == real


def outcome(layer, x, mask):
    """Its output and every gradient."""
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    o = layer(x, attention_mask=mask)[0]
    o.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"o": o.detach(), "dx": x.grad, **gradients}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("T", [40, 100])
@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_forward_and_backward(fla, op, T, padded):
    """Twice what rounding to float32 in a plain recurrence costs; its norms make much of it where a row is padding."""
    layer, x, mask = new_layer(fla, op), torch.randn(2, T, 64), None
    if padded:
        mask = torch.ones(2, T, dtype=torch.long)
        mask[1, : T // 3] = 0
    with fla_on_cpu.recurrences_in_place():
        true, plain = outcome(copy.deepcopy(layer).double(), x.double(), mask), outcome(layer, x, mask)
    with flakit.in_place_of_fla():
        ours = outcome(layer, x, mask)
    assert list(ours) == list(true)
    errors = {name: (off(ours[name], true[name]), off(plain[name], true[name])) for name in true}
    assert {name: error for name, error in errors.items() if not error[0] <= 2 * error[1] + 1e-6} == {}


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_decoding_through_its_cache_gives_what_one_pass_gives(fla, op):
    from fla.models.utils import Cache

    ours = new_layer(fla, op).eval()
    x = torch.randn(2, 76, 64)
    with torch.no_grad():
        with fla_on_cpu.recurrences_in_place():
            true = copy.deepcopy(ours).double()(x.double())[0]
        cache, outputs = Cache(), []
        with flakit.in_place_of_fla():
            for start, end in [(0, 70), *((t, t + 1) for t in range(70, 76))]:
                o, _, cache, *_ = ours(x[:, start:end], past_key_values=cache, use_cache=True)
                outputs.append(o)
    assert off(torch.cat(outputs, 1), true) < 5e-6


def gradients(net, tokens):
    net.zero_grad()
    net(tokens, labels=tokens).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
def test_a_model_in_bfloat16_is_as_near_float32_as_with_plain_recurrences(fla, op, record_property):
    # How far two right computations of a model's gradients lie apart in bfloat16: data/README.md says it of RWKV6.
    models, name = importlib.import_module("fla.models"), op.upper()
    config = getattr(models, f"{name}Config")(
        hidden_size=128, num_hidden_layers=3, vocab_size=128, fuse_cross_entropy=False
    )
    torch.manual_seed(0)
    net = getattr(models, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    net = net.bfloat16()  # both dtypes begin with the same weights
    tokens = torch.randint(128, (2, 100))
    found = {}
    for who, operators in (("ours", flakit.in_place_of_fla), ("recurrence", fla_on_cpu.recurrences_in_place)):
        for dtype in (torch.float32, torch.bfloat16):
            with operators():
                found[who, dtype] = gradients(copy.deepcopy(net).to(dtype), tokens)

    def apart(one, other):
        return ((one - other).norm() / other.norm()).item()

    exact = found["recurrence", torch.float32]
    assert apart(found["ours", torch.float32], exact) < 1e-5
    ours, recurrence = (apart(found[who, torch.bfloat16], exact) for who in ("ours", "recurrence"))
    record_property(
        "relative L2 of a bfloat16 model's gradients", f"ours {ours:.1e}, plain recurrence {recurrence:.1e}"
    )
    assert ours < 1.5 * recurrence
