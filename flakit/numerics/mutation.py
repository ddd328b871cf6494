"""Detects writes of a call to its inputs by comparing them with clones, the only reliable way.

PyTorch counts in-place operations in `tensor._version`. A Triton or CUDA kernel writes to an address without PyTorch's
knowledge, so the counter does not change.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Touched:
    """What a call changed in one of its inputs: how many values, and which `share` of all.

    version: how many in-place operations PyTorch counted. shared: the outputs that share the input's memory.
    """

    name: str
    changed: int
    share: float
    version: int
    shared: tuple[str, ...]


def touched(call: Callable, inputs: Mapping[str, object]) -> list[Touched]:
    """Run `call(**inputs)` and report the changes to every tensor among the inputs, in order.

    Tensors inside tuples, lists and mappings count, in inputs and outputs: those of a pair are named
    "initial_state[0]" and "initial_state[1]", fields of a named tuple "out.o". A NaN that stays NaN has not changed.
    """
    tensors = dict(_tensors(inputs))
    before = {name: (x.detach().clone(), x._version) for name, x in tensors.items()}
    outputs = dict(_tensors(call(**inputs), "out"))
    report = []
    for name, x in tensors.items():
        old, version = before[name]
        differs = (x.detach() != old) & ~(x.detach().isnan() & old.isnan())
        shared = tuple(out for out, y in outputs.items() if _overlap(x, y))
        changed = int(differs.sum())
        report.append(Touched(name, changed, changed / max(1, x.numel()), x._version - version, shared))
    return report


def _tensors(x: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for key, part in x.items():
            yield from _tensors(part, f"{name}.{key}" if name else str(key))
    elif isinstance(x, (tuple, list)):
        fields = getattr(x, "_fields", None)
        for n, part in enumerate(x):
            yield from _tensors(part, f"{name}.{fields[n]}" if fields else f"{name}[{n}]")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the memory ranges from first to last value of x and of y overlap."""
    if x.device != y.device or x.numel() == 0 or y.numel() == 0:
        return False
    (x_start, x_end), (y_start, y_end) = _span(x), _span(y)
    return x_start < y_end and y_start < x_end


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
