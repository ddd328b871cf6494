"""The inverse of RWKV7's chunk form, taken in three ways: the powers that cancel and the digits that go with them."""

import functools
import math

import numpy as np
import torch

from ..cases import inverse as case
from ..figures.inverse import InverseFigure
from ..numerics.words import error
from . import knobs
from .base import Panel
from .shared import literal

_ALPHAS = np.linspace(0.05, 2.0, 40).round(3)
_SPREADS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0)


class Inverse(Panel):
    """One chunk whose tokens resemble each other: L = -alpha k_i . k_j, faded by w."""

    name = "inverse"
    readout_lines = 4

    def __init__(self, **settings):
        self._figure = InverseFigure(case.FORMS)
        made = {
            "alpha": knobs.steps(0.9, _ALPHAS.tolist(), "alpha"),
            "w": knobs.DecayKnob(-0.001, "log decay w"),
            "spread": knobs.steps(0.0, _SPREADS, "spread"),
            "C": knobs.steps(16, (4, 8, 16, 32, 64), "tokens C"),
            "rounding": knobs.choice("float32", ("float32", "tf32", "float16", "bfloat16"), "operands"),
            "form": knobs.choice("product", {words: name for name, words in case.FORMS.items()}, "error of"),
        }
        super().__init__(
            made,
            settings,
            alt="Magnitudes of the largest power of L, of the inverse of I - L and of the error of one way to take it; "
            "beside them the error of each way over alpha, the law of the product, and where its range ends",
        )

    def compute(self, alpha, w, spread, C, rounding, form, seed):
        L = case.matrix(alpha, w, spread, C=C, seed=seed)
        powers = case.powers(L)
        n = int(powers.flatten(1).norm(dim=1).argmax())
        exact = case.invert(L, "blocks", "float64")
        return {
            "power": (n + 1, powers[n].numpy()),
            "inverse": exact.numpy(),
            "error": (case.invert(L.float(), form, rounding).double() - exact).numpy(),
            "errors": case.errors(L, rounding),
            "law": case.law(L, rounding),
            "over": _over_alpha(w, spread, C, rounding, seed),
        }

    def draw(self, result, *, alpha, w, spread, C, rounding, form, **_) -> None:
        errors, law, ends = result["over"]
        alike = "equal keys" if spread == 0 else f"keys spread by {spread:g}"
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"{C} tokens with {alike}, alpha = {alpha:g}, w = {w:.4g}",
            subtitle=f"operands of every product in {rounding}, sums in float32",
            power=result["power"],
            inverse=result["inverse"],
            name=f"error of the {form}",
            error=result["error"],
            alphas=_ALPHAS,
            errors=errors,
            law=law,
            ends=ends,
            now=alpha,
        )

    def describe(self, result, *, alpha, rounding, **_) -> str:
        n, largest = result["power"]
        found, ends = result["errors"], result["over"][2]
        size = np.linalg.norm(largest) / np.linalg.norm(result["inverse"])
        lost = f"about {math.log10(size):.1f} digits cancel" if size > 3 else "nothing to cancel"
        law = math.inf if alpha >= ends else result["law"]
        return "\n".join(
            [
                f"Largest power L^{n}: {size:.2g} times the inverse, {lost}.",
                f"Product: law {error(law)}, measured {error(found['product'])}.",
                f"Blocks: {error(found['blocks'])}. Substitution: {error(found['substitution'])}.",
                f"In {rounding} the product "
                + (f"turns non-finite at alpha = {ends:.3g}." if ends < 2 else "stays in range for every alpha."),
            ]
        )

    def script(self, *, alpha, w, spread, C, rounding, form, seed) -> str:
        return f"""from flakit.cases import inverse as case

L = case.matrix({alpha}, {literal(w)}, {spread}, C={C}, seed={seed})
print("law of the product", case.law(L, {rounding!r}))
for form, error in case.errors(L, {rounding!r}).items():
    print(form, error)
"""


@functools.lru_cache(maxsize=64)
def _over_alpha(w: float, spread: float, C: int, rounding: str, seed: int):
    """Errors by form and the product's law over `_ALPHAS`, and where the product's range ends."""
    Ls = torch.tensor(_ALPHAS)[:, None, None] * case.matrix(1.0, w, spread, C=C, seed=seed)
    errors = {form: found.numpy() for form, found in case.errors(Ls, rounding).items()}
    gone = _ALPHAS[~np.isfinite(errors["product"])]
    return errors, case.law(Ls, rounding).numpy(), float(gone[0]) if gone.size else math.inf


def inverse(**settings) -> Inverse:
    """A panel on the inverse of one chunk of RWKV7 with a = -k, b = alpha k: product of powers, blocks, substitution.

    settings: any of its knobs: alpha (0.05 … 2 in steps of 0.05), w (natural-log decay <= 0), spread (0: equal keys;
    1: about 60 degrees apart; up to 5), C (4 … 64, powers of two), rounding ("float32", "tf32", "float16",
    "bfloat16"), form (whose error is shown, one of `flakit.cases.inverse.FORMS`), seed.

    >>> inverse(alpha=1.9, rounding="float16")
    """
    return Inverse(**settings)
