"""One optimizer step in parts: what a trainer's contract does to loss and gradient, beside the plain loop."""

import functools
import math

import torch

from ..cases import gradient_accumulation as case
from ..figures.accumulation import AccumulationFigure
from ..numerics.words import error
from . import knobs
from .base import Panel

_SHOWN = 400  # elements of the gradient


class GradientAccumulation(Panel):
    """The first step of a small language model, the same 16 sequences at any accumulation."""

    name = "gradient-accumulation"
    readout_lines = 3

    def __init__(self, **settings):
        self._figure = AccumulationFigure()
        made = {
            "contract": knobs.choice("takes **kwargs", list(case.CONTRACTS), "model"),
            "accumulation": knobs.steps(4, (1, 2, 4, 8, 16), "in parts"),
            "mixer": knobs.choice("rwkv7", {"RWKV7": "rwkv7", "softmax attention": "attention"}, "mixer"),
        }
        super().__init__(
            made,
            settings,
            alt="Bars of the loss that the plain loop and this loop report, against ln(vocabulary), and this loop's "
            "gradient against the plain loop's, element by element, with the law's factor as a line",
        )

    def compute(self, contract, accumulation, mixer, seed):
        return _run(contract, accumulation, mixer, seed)

    def draw(self, result, *, contract, accumulation, mixer, **_) -> None:
        row, loss, gradients = result
        parts = "in one part" if accumulation == 1 else f"in {accumulation} parts"
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"{case.SEQUENCES} sequences {parts}; {mixer}, {contract}",
            losses=(loss, row.loss),
            gradients=gradients,
            law=case.law(accumulation, contract),
            known=math.log(case.VOCAB),
        )

    def describe(self, result, *, contract, accumulation, **_) -> str:
        row, loss, _ = result
        return "\n".join(
            [
                f"Reported: {row.loss:.4f}, the plain loop {loss:.4f}; ln({case.VOCAB}) = {math.log(case.VOCAB):.4f}.",
                f"Law: loss and gradient {case.law(accumulation, contract):.4g} times the plain loop's. "
                f"Measured: {row.loss_factor:.4g} and {row.grad_factor:.4g}.",
                f"What is left of the gradient beside that multiple: {error(row.rest)} of its norm.",
            ]
        )

    def script(self, *, contract, accumulation, mixer, seed) -> str:
        return f"""from flakit.cases import gradient_accumulation as case

row = case.measured({contract!r}, {accumulation}, {mixer!r}, seed={seed})
print("law", case.law({accumulation}, {contract!r}), "loss", row.loss_factor, "gradient", row.grad_factor)
"""


@functools.lru_cache(maxsize=64)
def _run(contract, accumulation, mixer, seed):
    loss, plain = case.step(contract, mixer, loop="plain", seed=seed)(1)
    _, ours = case.step(contract, mixer, seed=seed)(accumulation)
    both = [torch.cat([g.flatten() for g in gradients]) for gradients in (plain, ours)]
    some = torch.randperm(len(both[0]), generator=torch.Generator().manual_seed(0))[:_SHOWN]
    row = case.measured(contract, accumulation, mixer, seed=seed)
    return row, loss, tuple(g[some].numpy() for g in both)


def gradient_accumulation(**settings) -> GradientAccumulation:
    """A panel that sends one step's sequences through a model in parts, as a trainer does.

    settings: any of its knobs: contract (one of `flakit.cases.gradient_accumulation.CONTRACTS`), accumulation (1, 2, 4,
    8, 16), mixer ("rwkv7" or "attention"), seed.

    >>> gradient_accumulation(contract="takes **kwargs", accumulation=8)
    """
    return GradientAccumulation(**settings)
