"""Gradient errors of the GPU kernels: measured here where there is a GPU, else recorded ones, always saying which."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from . import recorded
from .arguments import listed
from .gradients import gradient_rows
from .operators import OPERATORS, operator

RECORDINGS = {op: f"h200_{op}_gradients" for op in OPERATORS}
"""The recorded gradient errors of each operator, data/<name>.json."""
SIZES = {op: {"B": 1, "H": 4, "K": 64, "V": 64} | ({"M": 64} if "M" in OPERATORS[op].sizes else {}) for op in OPERATORS}
"""The sizes of each recording, used here too."""


class OnGPU(NamedTuple):
    """label: what a table or figure made from `rows` must say; rows: as from `gradient_rows`, none without a source."""

    label: str
    rows: Sequence[Mapping]


def gradients_on_gpu(
    *,
    dtype: str | Iterable[str] = ("float32", "bfloat16", "float16"),
    T: int | Iterable[int] = (256,),
    decay: float | str | Iterable[float | str] = (-1.0,),
    forms: Iterable[str] | None = None,
    others: Mapping[str, Callable] | None = None,
    op: str = "rwkv6",
) -> OnGPU:
    """Errors of an operator's kernels for every combination of dtype, T and decay, in that order, one or several each.

    forms and others as in `gradient_rows`; the recording knows others by their names.
    Without a GPU these are rows of the operator's recording; a combination it does not hold is a ValueError.
    Where there is neither, the label says so and how to make the recording.
    """
    forms, others = listed(operator(op).forms if forms is None else forms), others or {}
    dtypes = [str(x).removeprefix("torch.") for x in listed(dtype)]
    settings = [(name, length, w) for name in dtypes for length in listed(T) for w in listed(decay)]
    if not settings:
        raise ValueError(f"dtype, T, decay: expected at least one of each, got {dtype}, {T} and {decay}")
    if torch.cuda.is_available():
        rows: list[Mapping] = []
        for name, length, w in settings:
            x = {"dtype": getattr(torch, name), "T": length, "decay": w, **SIZES[op]}
            rows += gradient_rows(op, forms=forms, others=others, backend="triton", device="cuda", **x)
        return OnGPU(f"measured here, on {torch.cuda.get_device_name()}, torch {torch.__version__}", rows)
    try:
        recording = recorded.read(
            RECORDINGS[op], needs=("op", "form", "dtype", "T", "decay", "tensor", "l2", "non_finite")
        )
    except FileNotFoundError:
        return OnGPU(
            f"No GPU here and no recording data/{RECORDINGS[op]}.json: nothing to show. On a GPU, "
            f"`python data/record_gradients.py {op}` makes it.",
            [],
        )
    picked: list[Mapping] = []
    for name, length, w in settings:
        found = [
            row for row in recording.select(op=op, dtype=name, T=length, decay=w) if row["form"] in (*forms, *others)
        ]
        if not found:
            raise ValueError(f"{RECORDINGS[op]}: holds no dtype {name}, T {length}, decay {w}")
        picked += found
    return OnGPU(recording.label, picked)
