"""The sketches of 07_chunk_vs_recurrent."""

import functools

import torch
from torch import Tensor

from ...cases.chunk_vs_recurrent import perturbed
from ...figures.sketches.chunk_vs_recurrent import (
    Amplified,
    AmplifiedShown,
    Measures,
    MeasuresShown,
    TwoForms,
    TwoFormsShown,
)
from ...numerics.errors import compare, relative_l2
from ...numerics.evaluate import recurrence, truth
from ...numerics.inputs import inputs
from ...ops.rwkv6 import chunk_rwkv6
from .. import knobs
from .sketch import Sketch

SIZES = {"T": 256, "H": 1, "K": 64, "decay": "logsigmoid"}

_FIRST = 40  # tokens that "two_forms" shows
_TOKENS = 64  # that "amplified" reads
_WRONG = {"inputs in bfloat16": "inputs", "doubled": "doubled", "one token lost": "token", "one number off": "element"}


def rounded(x: Tensor, digits: int) -> Tensor:
    """Round x to a number of binary digits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**digits).round() / 2.0**digits, exponent)


@functools.lru_cache(maxsize=2)
def _outputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [T, V] of one head as float64: by chunks and by the recurrence in float32, and the truth."""
    x = inputs("rwkv6", seed=seed, **SIZES)
    outputs = chunk_rwkv6(**x).o, recurrence("rwkv6", x)["o"], truth("rwkv6", x)["o"]
    return tuple(o[0, :, 0].double() for o in outputs)


def _two_forms(digits: int, seed: int = 0) -> TwoFormsShown:
    *forms, true = _outputs(seed)
    chunk, recurrent = (rounded(o, digits) for o in forms)
    first = slice(_FIRST), 0
    step = torch.ldexp(torch.ones_like(true[first]), torch.frexp(true[first]).exponent - digits)
    return TwoFormsShown(
        digits,
        *(x.numpy() for x in (chunk[first], recurrent[first], true[first], step)),
        (chunk != recurrent).double().mean().item(),
        {"chunk": relative_l2(chunk, true), "recurrent": relative_l2(recurrent, true)},
    )


@functools.lru_cache(maxsize=2)
def _exact(seed: int) -> tuple[Tensor, Tensor]:
    """Return o [T, V] of one head in float64, and the same from inputs rounded to bfloat16."""
    x = inputs("rwkv6", seed=seed, **SIZES)
    stored = {name: tensor.bfloat16() for name, tensor in x.items()}
    return tuple(truth("rwkv6", each)["o"][0, :, 0] for each in (x, stored))


def _measures(wrong: str, seed: int = 0) -> MeasuresShown:
    true, stored = _exact(seed)
    got = {"inputs": stored, "doubled": 2 * true}.get(wrong, true).clone()
    if wrong == "token":
        got[100] = 0
    if wrong == "element":
        got[100, 20] += 3 * true.square().mean().sqrt()
    return MeasuresShown(wrong, got.numpy(), true.numpy(), compare(got, true))


def _amplified(w: float) -> AmplifiedShown:
    x = inputs("rwkv6", T=_TOKENS, H=1, K=16, decay=0.0)
    measured, law = perturbed(x | {"w": torch.full_like(x["w"], w, dtype=torch.float64)})
    return AmplifiedShown(w, measured.numpy(), law.numpy())


SKETCHES = {
    "two_forms": Sketch(
        {"digits": lambda: knobs.integer(24, 6, 24, "digits kept")},
        _two_forms,
        TwoForms,
        {"float32": {"digits": 24}, "float16": {"digits": 11}, "bfloat16": {"digits": 8}},
        """import flakit
from flakit.numerics.errors import relative_l2
from flakit.numerics.evaluate import recurrence, truth
from flakit.panels.sketches.chunk_vs_recurrent import SIZES, rounded

x = flakit.inputs("rwkv6", seed={seed}, **SIZES)
forms = flakit.chunk_rwkv6(**x).o, recurrence("rwkv6", x)["o"]  # both in float32
chunk, recurrent = (rounded(o.double(), {digits}) for o in forms)
print("share that differs", (chunk != recurrent).double().mean().item())
print("off by", [relative_l2(o, truth("rwkv6", x)["o"]) for o in (chunk, recurrent)])
""",
        random=True,
    ),
    "measures": Sketch(
        {"wrong": lambda: knobs.choice("inputs", _WRONG, "wrong is")},
        _measures,
        Measures,
        {},
        """import numpy as np
from flakit.panels import sketch

shown = sketch("measures", wrong={wrong}, seed={seed}).result
print("largest error in its own units", np.abs(shown.got / shown.true - 1).max())
print(shown.errors)
""",
        random=True,
    ),
    "amplified": Sketch(
        {"w": lambda: knobs.steps(-0.1, (-0.3, -0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.05, 0.1), "decay w")},
        _amplified,
        Amplified,
        {"a decay": {"w": -0.1}, "w = 0": {"w": 0.0}, "w above 0": {"w": 0.1}},
        """import flakit
from flakit.cases.chunk_vs_recurrent import perturbed

x = flakit.inputs("rwkv6", T=64, H=1, K=16, decay=0.0)
measured, law = perturbed(x | {{"w": x["w"] + {w}}})
print("after 64 tokens", measured[-1].item(), "law", law[-1].item())
""",
    ),
}
