"""Did a call write to its inputs? Compare them with clones: nothing else tells.

PyTorch counts in-place operations in `tensor._version`. A Triton or CUDA kernel writes to an address, which PyTorch
never hears of, so that the counter stays where it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Touched:
    """What a call did to one of its inputs."""

    name: str
    changed: int  # values that are not what they were
    share: float  # the same as a share of all values
    version: int  # how many in-place operations PyTorch counted
    shared: tuple[str, ...]  # outputs that live in this input's memory


def touched(call: Callable, inputs: Mapping[str, object]) -> list[Touched]:
    """Run `call(**inputs)` and look at every tensor among the inputs, in the order they were given.

    Tensors inside tuples, lists and mappings count, inputs and outputs alike: a pair is named "initial_state[0]",
    "initial_state[1]"; so are the fields of a named tuple, "out.o". An input that was NaN and still is has not changed.
    """
    given = dict(_tensors(inputs))
    before = {name: (x.detach().clone(), x._version) for name, x in given.items()}
    returned = dict(_tensors(call(**inputs), "out"))
    found = []
    for name, x in given.items():
        old, version = before[name]
        differs = (x.detach() != old) & ~(x.detach().isnan() & old.isnan())
        shared = tuple(out for out, y in returned.items() if _overlap(x, y))
        changed = int(differs.sum())
        found.append(Touched(name, changed, changed / max(1, x.numel()), x._version - version, shared))
    return found


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
    """Whether the memory from x's first to its last value and that of y have a byte in common."""
    if x.device != y.device or x.numel() == 0 or y.numel() == 0:
        return False
    (x_start, x_end), (y_start, y_end) = _span(x), _span(y)
    return x_start < y_end and y_start < x_end


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
