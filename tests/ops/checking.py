"""What "right" means: one check for every operator, backend, dtype and decay, against float64 from the rounded inputs.

A budget b per dtype of the inputs, and these demands on every output and gradient:

- over the tensor: |error| <= b |truth| in L2;
- the worst element: |error| <= b (5 RMS + 2 max |truth|), five standard deviations and the rounding of the largest;
- every element by its own size: |error| <= b (6 unit + 2 |truth|). Its `unit` is the root of the sum of its squared
  terms, what it would be if their signs were random. So a row or a channel that is small, because little reaches it or
  because its decay is strong, is held to its own size and not to its neighbours'; and no row is off, in L2, by more
  than 6 b of its unit and 2 b of itself. Where no term arrives at all only 0 is right;
- dw is exactly 0 where w is -inf.

Two allowances. The range of a dtype: no value is asked to be right to better than one spacing of its stored dtype's
subnormal numbers (float16: e^-17), nor than float32's smallest normal number, 1e-38, below which tensor cores drop the
parts that a float32 product is split into. And for 16-bit inputs 2^-16 RMS on an element's own size: there a kernel may
take dw as a difference of float32 sums where no decay is below e^-4, which leaves about 4 e^4 2^-24.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flakit.numerics.errors import Errors, compare
from flakit.numerics.evaluate import evaluate, truth
from tests.ops.settings import Setting, make

BUDGETS = {
    # Two float64 evaluations of sums of up to 4096 * 256 terms.
    torch.float64: 1e-12,
    # A thousand terms accumulated in float32, each good to 2^-24, come to 1e-6; ten times that is the promise.
    torch.float32: 1e-5,
    # Rounding the output to 8 bits alone is 1.7e-3; as much again, in squares, may come from rounded operands.
    torch.bfloat16: 2.5e-3,
    # Rounding the output to 11 bits is 2.1e-4, and so is each of at most four roundings of operands (float16 or TF32).
    torch.float16: 5e-4,
}
LONGEST_RECURRENCE = 256
MOST_ELEMENTS = 2**24  # the recurrence keeps some matrices a step: at most about half a gigabyte


def walks(setting: Setting) -> bool:
    """Whether the step-by-step recurrence is affordable: it keeps every state."""
    return setting.elements <= MOST_ELEMENTS


@dataclass(frozen=True)
class Truth:
    """float64 values, and the unit each is measured in: see the module's text."""

    values: dict[str, Tensor]
    units: dict[str, Tensor]


def true_values(made: dict, arriving: tuple[Tensor, Tensor | None], recurrence: bool | None = None) -> Truth:
    """The truth for one set of arguments. Squared terms are the terms of squared inputs: the same sums, once more."""
    scale = made["r"].shape[-1] ** -0.5 if made.get("scale") is None else made["scale"]
    squared = {name: x.double().square() for name, x in made.items() if isinstance(x, Tensor) and name != "cu_seqlens"}
    squared |= {"w": 2 * made["w"].double(), "scale": scale**2, "cu_seqlens": made.get("cu_seqlens")}
    squares = tuple(None if x is None else x.double().square() for x in arriving)
    values = truth("rwkv6", made, arriving=arriving, recurrence=recurrence)
    units = truth("rwkv6", squared, arriving=squares, recurrence=False)
    return Truth(values, {name: x.sqrt() for name, x in units.items()})


def check(found: dict[str, Tensor], expected: Truth, made: dict) -> dict[str, Errors]:
    """Raise an AssertionError that names every tensor that is wrong and how; return the measured errors."""
    errors, wrong = measure(found, expected, made)
    assert not wrong, "\n".join(wrong)
    return errors


def measure(found: dict[str, Tensor], expected: Truth, made: dict) -> tuple[dict[str, Errors], list[str]]:
    """The errors of every tensor, and one line for each that is not within its budget."""
    dtype = made["r"].dtype
    budget, noise = BUDGETS[dtype], 2.0**-16 if dtype.itemsize == 2 else 0.0
    assert found.keys() == expected.values.keys()
    wrong, errors = [], {}
    for name, true in expected.values.items():
        got, unit = found[name], expected.units[name]
        assert got.shape == true.shape, f"{name}: expected {list(true.shape)}, got {list(got.shape)}"
        wanted = _dtype(name, made)
        assert got.dtype == wanted, f"{name}: expected {wanted}, got {got.dtype}"

        limits, computed = torch.finfo(got.dtype), torch.finfo(torch.promote_types(got.dtype, torch.float32))
        near = (got.double() - true).abs() <= max(limits.smallest_normal * limits.eps, computed.smallest_normal)
        got = torch.where(near, true, got.double())
        measured = errors[name] = compare(got, true)
        rms, largest = true.square().mean().sqrt(), true.abs().max()
        error = (got - true).abs()
        excess = error - budget * (6 * unit + 2 * true.abs()) - noise * rms
        if not measured.finite:
            wrong.append(f"{name}: {measured}")
        elif measured.l2 > budget:
            wrong.append(f"{name}: L2 above {budget:g}: {measured}")
        elif error.max() > budget * (5 * rms + 2 * largest):
            wrong.append(f"{name}: worst element above {budget * (5 + 2 * largest / rms):.1e}: {measured}")
        elif (excess > 0).any():
            at = torch.unravel_index(excess.argmax(), excess.shape)
            wrong.append(f"{name}: at {[int(i) for i in at]} {got[at]:.3e}, truth {true[at]:.3e}, unit {unit[at]:.1e}")
    if found["dw"][made["w"] == -torch.inf].any():
        wrong.append("dw: expected exactly 0 where w is -inf")
    return errors, wrong


def _dtype(name: str, made: dict) -> torch.dtype:
    """o like r; states and their gradients float32 or float64; each gradient like its input."""
    if name == "o":
        return made["r"].dtype
    if name in ("final_state", "dinitial_state"):
        return torch.promote_types(made["r"].dtype, torch.float32)
    return made[name[1:]].dtype


def measured(
    setting: Setting, form: str, backend: str | None = None, device: str = "cpu"
) -> tuple[dict[str, Errors], list[str]]:
    """`measure` one setting, forward and backward, on one backend."""
    made, arriving = make(setting, device)
    chunk_size = None if setting.chunk_size == "default" or form == "recurrent" else int(setting.chunk_size)
    found = evaluate("rwkv6", made, form=form, backend=backend, chunk_size=chunk_size, arriving=arriving)
    recurrence = walks(setting) and setting.T <= LONGEST_RECURRENCE
    return measure(found, true_values(made, arriving, recurrence), made)
