"""Where an operator can run. A test over `PLACES` states a property once, for all of them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from flakit.numerics.evaluate import evaluate
from tests.ops.checking import check, true_values
from tests.ops.settings import make


@dataclass(frozen=True)
class Place:
    backend: str
    device: str
    chunk_sizes: tuple[int, ...]  # those of them that the operator has are run; the first is any operator's
    dtypes: tuple[torch.dtype, ...]  # 16-bit kernels may take another way through a chunk
    T: int = 37
    H: int = 2

    def make(self, setting, **changed):
        """The setting's tensors here, at this place's size unless said otherwise."""
        return make(replace(setting, **{"T": self.T, "H": self.H, **changed}), self.device)

    def run(self, made, arriving, form, op="rwkv6", **more):
        """Forward and backward here, without a check. op: a name, or an operator with other forms."""
        more = {"chunk_size": self.chunk_sizes[0], **more} if form == "chunk" else more
        return evaluate(op, made, form=form, backend=self.backend, arriving=arriving, **more)

    def check(self, made, arriving, form, op="rwkv6", **more):
        """The same, held against float64."""
        found = self.run(made, arriving, form, op, **more)
        check(found, true_values(made, arriving, op=op), made)
        return found


TORCH = Place("torch", "cpu", (16, 1, 2, 4, 8, 32, 64, 128, 256), (torch.float32, torch.bfloat16))
INTERPRETED = Place("triton", "cpu", (16, 32, 64), (torch.float32, torch.float16), T=21, H=1)  # 1 ms a token and head
GPU = Place("triton", "cuda", (16, 32, 64), (torch.float32, torch.bfloat16, torch.float16))

PLACES = [
    pytest.param(TORCH, id="torch"),
    pytest.param(INTERPRETED, id="interpreted", marks=pytest.mark.interpret),
    pytest.param(GPU, id="gpu", marks=pytest.mark.gpu),
]


SLOW_INTERPRETED = [
    pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.full] if p.id == "interpreted" else p.marks)
    for p in PLACES
]
"""The same for a test that takes long where kernels are interpreted: there it is for the full run."""


def everywhere(name, *values, interpreted=None, named=str):
    """Every place with every value; where kernels are interpreted, slowly, with the second alone or those given."""
    few = values[1:2] if interpreted is None else interpreted
    cases = [(p, x) for p in PLACES for x in (few if p.id == "interpreted" else values)]
    return pytest.mark.parametrize(
        ("place", name), [pytest.param(*p.values, x, id=f"{named(x)}-{p.id}", marks=p.marks) for p, x in cases]
    )


class Output(NamedTuple):
    o: torch.Tensor
    final_state: torch.Tensor | tuple[torch.Tensor, ...]


def of(op, setting, **changed):
    """The setting for an operator."""
    return replace(setting, op=op, **({"M": 24, "group": 2} if op == "gsa" else {}), **changed)
