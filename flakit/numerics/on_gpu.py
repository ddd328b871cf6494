"""Gradient errors of the GPU kernels, measured here if there is a GPU, else recorded, with a label that says which."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from . import recorded
from .arguments import listed
from .gradients import gradient_rows
from .operators import OPERATORS, operator

RECORDINGS = {op: f"h200_{op}_gradients" for op in OPERATORS}
"""The recording of each operator's gradient errors, data/<name>.json."""
SIZES = {op: {"B": 1, "H": 4, "K": 64, "V": 64} | ({"M": 64} if "M" in OPERATORS[op].sizes else {}) for op in OPERATORS}
"""The sizes in each recording, and of measurements here."""


class OnGPU(NamedTuple):
    """Gradient errors and their source. label: the caption that a table or figure of `rows` needs; rows: as
    `gradient_rows` returns them, empty without a source."""

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
    """Return the errors of an operator's kernels for every combination of dtypes, T and decays, in that order.

    forms and others as in `gradient_rows`; the recording has others by their names. decay: natural logs <= 0, or
    profiles. Without a GPU these are rows of the operator's recording; a combination that it lacks raises ValueError.
    Without either, the label says so and how to make the recording.
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
    selected: list[Mapping] = []
    for name, length, w in settings:
        matches = [
            row for row in recording.select(op=op, dtype=name, T=length, decay=w) if row["form"] in (*forms, *others)
        ]
        if not matches:
            raise ValueError(f"{RECORDINGS[op]}: holds no dtype {name}, T {length}, decay {w}")
        selected += matches
    return OnGPU(recording.label, selected)
