"""What is fed as the decay: watch a state grow until it overflows, and which gradients survive (casebook 1)."""

import functools

import numpy as np
import torch

from ..cases import log_space as case
from ..figures.growth import GrowthFigure
from ..numerics.words import percent
from . import knobs
from .base import Panel

B, H, K = 1, 2, 32
_FORMULAS = {"sigmoid": "sigmoid(x + bias)", "logsigmoid": "logsigmoid(x + bias)", "-exp": "-exp(x + bias)"}


class LogSpace(Panel):
    """The recurrence and its backward pass for the loss o.mean(), with w as a decay or as its logarithm."""

    name = "log-space"
    readout_lines = 4

    def __init__(self, **settings):
        self._figure = GrowthFigure(("o", *case.GRADIENTS))
        made = {
            "fed": knobs.choice("sigmoid", {_FORMULAS[name]: name for name in case.FED}, "fed as w"),
            "bias": knobs.steps(0.0, np.arange(-4, 4.01, 0.25).tolist(), "bias"),
            "T": knobs.integer(256, 32, 512, "length T", step=32),
            "dtype": knobs.choice("float32", ("float32", "float64"), "dtype"),
        }
        super().__init__(
            made,
            settings,
            alt="The size of the largest state over time against the largest number of the format, with the law's and "
            "the measured onset, and the share of the output and of each gradient that is finite",
        )

    def compute(self, fed, bias, T, dtype, seed):
        return _run(fed, bias, T, dtype, seed)

    def draw(self, result, *, fed, bias, dtype, **_) -> None:
        growth, law, _ = result
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"Fed as log decay: {_formula(fed, bias)}, x standard normal, in {dtype}",
            size=growth.state.numpy(),
            onset=growth.onset,
            law=law,
            end=(dtype, torch.finfo(getattr(torch, dtype)).max),
            finite=growth.finite,
        )

    def describe(self, result, *, T, **_) -> str:
        growth, law, (low, high) = result
        effect = "every row of the state grows" if low > 0 else "every row of the state fades"
        whole = [name for name, share in growth.finite.items() if share == 1]
        bad = [f"{name} {percent(1 - share)}" for name, share in growth.finite.items() if share < 1]
        return "\n".join(
            [
                f"w from {low:.3g} to {high:.3g}, so e^w from {np.exp(low):.3g} to {np.exp(high):.3g}: {effect}.",
                f"Law: the state overflows {_when(law, T)}. Measured: {_when(growth.onset, T)}.",
                f"Not finite: {', '.join(bad) or 'nothing'}.",
                f"Finite: {', '.join(whole) or 'nothing'}.",
            ]
        )

    def script(self, *, fed, bias, T, dtype, seed) -> str:
        return f"""import torch
from flakit.cases import log_space

x = log_space.inputs({fed!r}, bias={bias}, B={B}, T={T}, H={H}, K={K}, seed={seed})
growth = log_space.run(x, torch.{dtype})

print("law", log_space.law(x["w"], torch.{dtype}), "measured", growth.onset)
for name, share in growth.finite.items():
    print(name, "finite", share)
"""


@functools.lru_cache(maxsize=64)
def _run(fed, bias, T, dtype, seed):
    x, dtype = case.inputs(fed, bias=bias, B=B, T=T, H=H, K=K, seed=seed), getattr(torch, dtype)
    return case.run(x, dtype), case.law(x["w"], dtype), tuple(end.item() for end in x["w"].aminmax())


def _formula(fed: str, bias: float) -> str:
    return _FORMULAS[fed].replace(" + bias", f" {'+-'[bias < 0]} {abs(bias):g}" if bias else "")


def _when(t: int | None, T: int) -> str:
    return f"at t = {t}" if t is not None else f"nowhere in {T} tokens"


def log_space(**settings) -> LogSpace:
    """A panel that feeds RWKV6 a decay, or its logarithm, and shows where the state overflows.

    settings: any of its knobs: fed (one of `flakit.cases.log_space.FED`), bias (-4 … 4 in quarters), T (32 … 512),
    dtype ("float32" or "float64"), seed.

    >>> log_space(fed="sigmoid", bias=-1.0)
    """
    return LogSpace(**settings)
