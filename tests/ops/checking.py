"""What "right" means: one check for every operator, backend, dtype and decay, against float64 from the rounded inputs.

The float64 values are the oracle's (oracle.py), which shares no code with what is checked.

A budget b per operator, dtype of the inputs and tensor, and these demands on every output and gradient:

- over the tensor: |error| <= b max(|truth|, |unit| / 3) in L2, so that a tensor whose terms happen to cancel is held to
  its terms (RWKV7's db of equal keys, or of one single token; elsewhere |unit| is about 1 to 3 |truth|);
- the worst element: |error| <= b (5 RMS + 2 max |truth|), five standard deviations and the rounding of the largest;
- every element by its own size: |error| <= b (6 unit + 2 |truth|). Its `unit` is how far it moves when every input
  moves by one part in one, to first order and with random signs: the root of the sum of its squared terms. So a row or
  a channel that is small, because little reaches it or because its decay is strong, is held to its own size and not to
  its neighbours'. Where no term arrives at all only 0 is right;
- the decay's gradient is exactly 0 where the decay is -inf.

RWKV6's outputs are sums of products of its inputs, so its units are the same sums of squares. The others' are found by
moving the inputs, DRAWS times; of large settings that would take long, and they are held to the first two only.

Four allowances. The range of a dtype: no value is asked to be right to better than one spacing of its stored dtype's
subnormal numbers (float16: e^-17), nor than float32's smallest normal number, 1e-38, below which tensor cores drop
the parts that a float32 product is split into; and what is beyond its largest number (float16: 65504) is the infinity
of its sign. A decay e^w below that number (w < -87.3) counts as itself or as
nothing, as `blocks_triton.exp` has it: there the decay's gradient, which is a multiple of e^w, is right or exactly 0.
And for 16-bit inputs 2^-16 RMS on an element's own size: there a kernel may take the decay's gradient as a difference
of float32 sums where no decay is below e^-4, which leaves about 4 e^4 2^-24. And GSA's float64 is held to a float64
oracle: where a softmax is all but one slot, the small differences in its gradient have the rounding of what they are
differences of, 2^-50 RMS, which 2^-46 allows for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flakit.instruments.budget import units
from flakit.numerics.errors import Errors, compare, out_of_range
from flakit.numerics.evaluate import Arriving, evaluate, truth
from flakit.numerics.operators import OPERATORS, Operator, operator, state_dtype
from tests.ops.oracle import oracle
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
SOLVES = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 1.4e-3, torch.float64: 2e-12}
"""The budgets of RWKV7 and GSA, but for bfloat16's o: RWKV7 solves a system in each chunk, GSA puts a softmax between
two passes. Their gradients go through about a dozen roundings of operands, 2.1e-4 each in float16: 7e-4, and as much
again for what the solution and the softmax make of them. bfloat16's are the same ones: it rounds operands to TF32."""

LONGEST_LOOP = 256  # tokens, on a GPU
MOST_MOVED = 2**21
MOST_MOVED_ON_A_GPU = 2**23  # of at most LONGEST_LOOP tokens
DRAWS = 8


def budget(op: Operator, dtype: torch.dtype, name: str) -> float:
    """Most relative L2 error of a tensor: bfloat16's o 2.5e-3 everywhere, RWKV7's and GSA's gradients 4e-3."""
    solves = op.name != "rwkv6" and not (name == "o" and dtype == torch.bfloat16)
    return (SOLVES if solves else BUDGETS)[dtype]


@dataclass(frozen=True)
class Truth:
    """float64 values, and the unit each is measured in (empty: not measured); see the module's text."""

    op: Operator
    values: dict[str, Tensor]
    units: dict[str, Tensor]


def true_values(made: Mapping, arriving: Arriving, op: str | Operator = "rwkv6") -> Truth:
    """The truth for one set of arguments: the oracle's, which shares no code with the operators.

    Long sequences on a GPU are held to `flakit.numerics.evaluate.truth` instead: a loop over tokens is slow there, and
    test_oracle.py and test_covering_set.py hold that to the oracle.
    """
    op = OPERATORS[operator(op).name]
    first = made[op.tensors[0]]
    values = (truth if first.is_cuda and first.shape[1] > LONGEST_LOOP else oracle)(op.name, made, arriving=arriving)
    return Truth(op, values, (_squares if op.name == "rwkv6" else _movements)(op, made, arriving, values))


def _squares(op: Operator, made: Mapping, arriving: Arriving, values: Mapping) -> dict[str, Tensor]:
    """Squared terms are the terms of squared inputs: the same sums, once more."""
    squared = {name: x.double().square() for name, x in op.leaves(made).items()}
    squared[op.decay] = 2 * made[op.decay].double()
    rest = {"scale": op.scale(made) ** 2, "cu_seqlens": made.get("cu_seqlens")}
    squares = tuple(None if x is None else x.double().square() for x in arriving)
    summed = truth(op, op.arguments(squared, rest), arriving=squares, recurrence=False)
    return {name: x.sqrt() for name, x in summed.items()}


def _movements(op: Operator, made: Mapping, arriving: Arriving, values: Mapping) -> dict[str, Tensor]:
    """How far every value moves, per part that the inputs move, in the mean square of a few draws."""
    size = op.size(op.leaves(made))
    most = MOST_MOVED_ON_A_GPU if made[op.tensors[0]].is_cuda and size["T"] <= LONGEST_LOOP else MOST_MOVED
    if size["B"] * size["T"] * size["H"] * size["K"] * max(size["V"], size.get("M", 1)) > most:
        return {}
    return units(op, made, arriving, values, draws=DRAWS)


def check(found: Mapping[str, Tensor], expected: Truth, made: Mapping) -> dict[str, Errors]:
    """Raise an AssertionError that names every tensor that is wrong and how; return the measured errors."""
    errors, wrong = measure(found, expected, made)
    assert not wrong, "\n".join(wrong)
    return errors


def measure(found: Mapping[str, Tensor], expected: Truth, made: Mapping) -> tuple[dict[str, Errors], list[str]]:
    """The errors of every tensor, and one line for each that is not within its budget."""
    op, leaves = expected.op, expected.op.leaves(made)
    dtype = leaves[op.tensors[0]].dtype
    noise = 2.0**-16 if dtype.itemsize == 2 else 2.0**-46 if dtype == torch.float64 and op.name == "gsa" else 0.0
    assert found.keys() == expected.values.keys()
    wrong, errors = [], {}
    for name, true in expected.values.items():
        got, most = found[name], budget(op, dtype, name)
        assert got.shape == true.shape, f"{name}: expected {list(true.shape)}, got {list(got.shape)}"
        wanted = _dtype(name, op, leaves)
        assert got.dtype == wanted, f"{name}: expected {wanted}, got {got.dtype}"

        limits, computed = torch.finfo(got.dtype), torch.finfo(torch.promote_types(got.dtype, torch.float32))
        near = (got.double() - true).abs() <= max(limits.smallest_normal * limits.eps, computed.smallest_normal)
        near |= out_of_range(got, true)
        if name == f"d{op.decay}":
            near |= (leaves[op.decay].double().exp() < computed.smallest_normal) & (got == 0)
        got = torch.where(near, true, got.double())
        measured = errors[name] = compare(got, true)
        rms, largest = true.square().mean().sqrt(), true.abs().max()
        error = (got - true).abs()
        if not measured.finite:
            wrong.append(f"{name}: {measured}")
        elif measured.l2 > most * _cancels(true, expected.units.get(name)):
            wrong.append(f"{name}: L2 above {most:g}: {measured}")
        elif error.max() > most * (5 * rms + 2 * largest):
            wrong.append(f"{name}: worst element above {most * (5 + 2 * largest / rms):.1e}: {measured}")
        elif expected.units:
            unit = expected.units[name]
            excess = error - most * (6 * unit + 2 * true.abs()) - noise * rms
            if (excess > 0).any():
                at = torch.unravel_index(excess.argmax(), excess.shape)
                where = [int(i) for i in at]
                wrong.append(f"{name}: at {where} {got[at]:.3e}, truth {true[at]:.3e}, unit {unit[at]:.1e}")
    if found[f"d{op.decay}"][leaves[op.decay] == -torch.inf].any():
        wrong.append(f"d{op.decay}: expected exactly 0 where {op.decay} is -inf")
    return errors, wrong


def _cancels(true: Tensor, unit: Tensor | None) -> float:
    """By how much the tensor is smaller than its terms let expect; 1 where it is not, or not known."""
    if unit is None or not true.any():
        return 1.0
    return max(1.0, (unit.norm() / true.norm() / 3).item())


def _dtype(name: str, op: Operator, leaves: Mapping[str, Tensor]) -> torch.dtype:
    """o like the first tensor; final states float32 or float64; each gradient like its input."""
    first = leaves[op.tensors[0]].dtype
    if name == "o":
        return first
    return leaves[name[1:]].dtype if name[1:] in leaves else state_dtype(first)


def run(
    setting: Setting, made: Mapping, arriving: Arriving, form: str, backend: str | None = None
) -> dict[str, Tensor]:
    """Forward and backward of one form, with the setting's chunk size."""
    chunk_size = None if setting.chunk_size == "default" or form == "recurrent" else int(setting.chunk_size)
    return evaluate(setting.op, made, form=form, backend=backend, chunk_size=chunk_size, arriving=arriving)


def measured(
    setting: Setting, form: str, backend: str | None = None, device: str = "cpu"
) -> tuple[dict[str, Errors], list[str]]:
    """`measure` one form on one setting, forward and backward."""
    made, arriving = make(setting, device)
    return measure(run(setting, made, arriving, form, backend), true_values(made, arriving, setting.op), made)
