"""The operators, described once: everything that works "for any operator" looks here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from ..ops.rwkv6 import chunk_rwkv6, chunk_torch, fused_recurrent_rwkv6
from ..ops.rwkv6 import reference as rwkv6_reference


@dataclass(frozen=True)
class Operator:
    """What an instrument or a panel must know to drive an operator.

    axes: the axes of every input by name, states included ("B T H K"); B batch, T time, H heads, K keys, V values.
    reference: module with `forward`, `backward` and `steps`; chunked: the same maths in chunks, `forward`, `backward`.
    """

    name: str
    label: str
    forms: Mapping[str, Callable]
    reference: ModuleType
    chunked: ModuleType
    axes: Mapping[str, str]
    tensors: tuple[str, ...]
    decay: str
    states: tuple[str, ...] = ("initial_state",)
    outputs: tuple[str, ...] = ("o", "final_state")


OPERATORS: dict[str, Operator] = {
    "rwkv6": Operator(
        name="rwkv6",
        label="RWKV6",
        forms={"chunk": chunk_rwkv6, "recurrent": fused_recurrent_rwkv6},
        reference=rwkv6_reference,
        chunked=chunk_torch,
        axes={
            "r": "B T H K",
            "k": "B T H K",
            "v": "B T H V",
            "w": "B T H K",
            "u": "H K",
            "initial_state": "B H K V",
        },
        tensors=("r", "k", "v", "w", "u"),
        decay="w",
    ),
}


def operator(op: str | Operator) -> Operator:
    """Look an operator up by name; an `Operator` is returned as it is."""
    if isinstance(op, Operator):
        return op
    if op not in OPERATORS:
        raise ValueError(f"op: expected one of {', '.join(OPERATORS)}, got {op!r}")
    return OPERATORS[op]
