"""The least work of an operator: bytes moved, operations, and a lower bound of their time.

A row, as of data/h200_speed.json, maps op, B, T, H, K, V, dtype, for GSA M, and decode: one token with both states.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from .arguments import one_of
from .operators import Operator, operator, state_dtype

WHAT = ("forward", "both")
"""A forward without gradients, or a forward with the gradients of all inputs."""


@dataclass(frozen=True)
class Work:
    """The least work of one call: the bytes that it moves and its floating-point operations."""

    bytes: int
    operations: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def floor_ms(self, copy_tb_s: float, tflops: float) -> float:
        """Return a lower bound of the time in ms: the longer of moving the bytes and performing the operations.

        copy_tb_s: bytes that a copy reads and writes, in 10^12/s; tflops: operations in 10^12/s.
        """
        return 1e-9 * max(self.bytes / copy_tb_s, self.operations / tflops)


def work(row: Mapping, what: str = "both") -> Work:
    """Return the least work of a call. row: as in the module's docstring. what: "forward", or "both" with a backward.

    Bytes: every input is read once and every output written once; a backward reads the inputs again, reads do and
    writes a gradient for each; a decode also moves both states. Operations: the products of the recurrence with its
    states, a multiplication and an addition each, and for a backward two more of each; without those inside chunks.
    """
    one_of("what", what, WHAT)
    op, dtype = operator(row["op"]), getattr(torch, row["dtype"])
    names = [*op.tensors, "o"]
    if what == "both":
        names += [*op.tensors, *(f"d{name}" for name in op.tensors), "do"]
    states = ("states", "states") if row.get("decode") else ()
    size = _size(row)
    once = 2 * op.state_products * size["T"] * sum(_elements(op, name, size) for name in op.states)
    of_states = moved(row, states, every=size["T"], itemsize=state_dtype(dtype).itemsize)
    return Work(moved(row, names) + of_states, once * (3 if what == "both" else 1))


def moved(row: Mapping, names: Iterable[str], *, every: int = 1, itemsize: int = 4) -> int:
    """Return the bytes of reading or writing each of the named tensors of a call once; a name may occur several times.

    names: the operator's tensors and o, or "d" + name for a gradient, all in the row's dtype; "states" and "dstates"
    are the states of all heads, and their gradients, stored every `every` tokens, of `itemsize` bytes an element.
    """
    op, size, item = operator(row["op"]), _size(row), getattr(torch, row["dtype"]).itemsize
    known = {*op.tensors, "o", "states"}
    known |= {f"d{name}" for name in known}
    total = 0
    for name in names:
        if one_of("names", name, sorted(known)).endswith("states"):
            count = -(-size["T"] // every)
            total += itemsize * count * sum(_elements(op, part, size) for part in op.states)
        else:
            total += item * _elements(op, name if name in op.axes else name[1:], size)
    return total


def in_short(row: Mapping) -> str:
    """Return a row as a short label: operator, form, B and T, and K above 128, another dtype than bfloat16 and another
    decay than the operator's `profile`. The row also needs form and decay."""
    op = operator(row["op"])
    parts = [op.label, "decode" if row.get("decode") else row["form"], f"B{row['B']}"]
    parts += [f"T{row['T']}"] * (not row.get("decode")) + [f"K{row['K']}"] * (row["K"] > 128)
    parts += [row["dtype"]] * (row["dtype"] != "bfloat16")
    parts += [f"w {row['decay']:g}" if isinstance(row["decay"], float) else row["decay"]] * (row["decay"] != op.profile)
    return " ".join(parts)


def _size(row: Mapping) -> dict[str, int]:
    size = {axis: row[axis] for axis in "BTHKVM" if row.get(axis) is not None}
    return size | {"HQ": size["H"], "N": size["B"]}


def _elements(op: Operator, name: str, size: Mapping[str, int]) -> int:
    return prod(size[axis] for axis in op.axes[name].split())
