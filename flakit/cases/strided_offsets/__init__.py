"""Offsets with a stride: a kernel that reads `cu_seqlens + i` cuts the packed sequences at other tokens.

Sequences of different lengths are packed one behind the other, and offsets [N + 1] say where each begins: sequence i
is the tokens offsets[i] … offsets[i + 1] - 1. A kernel reads the two numbers itself, one program a sequence. Where the
offsets are a column of a table, or every second entry of a longer list, the next one lies two numbers further on; a
kernel that looks one number further reads something else.

As told (this kit's own Triton forms, November 2026): relative errors from 0.8 to inf, whatever the memory holds, and no
message. As measured: every tensor with a time axis was made contiguous before a kernel saw it, the offsets were not,
and their check read them with `.tolist()`, which knows about strides: what was checked is not what was read. Beside the
ends of the sequences, every offset is read twice, and the programs of the second half of the sequences never come to
their turn: the first half is right, the rest is memory that nobody wrote. The cure is one `.contiguous()`, or the
stride as an argument.

`run` computes RWKV6 so; the `law` says from the numbers in memory which share of the tokens is wrong, and which share
of them no program computes at all.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.inputs import inputs as make_inputs
from ...ops.common.dispatch import choose_backend
from ...ops.rwkv6 import reference
from ..knobs import Range
from ..laws import Row, kernel_place

DECAY = -0.01
"""The log decay per token: so little that a wrong beginning shows in all tokens after it."""


def _beside_the_ends(offsets: Tensor) -> Tensor:
    return torch.stack((offsets, torch.cat((offsets[1:], offsets[-1:]))), 1)[:, 0]


def _of_halves(offsets: Tensor) -> Tensor:
    middles = (offsets[:-1] + offsets[1:]) // 2
    return torch.stack((offsets, torch.cat((middles, offsets[-1:]))), 1).flatten()[::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda offsets: offsets.contiguous(),
    "column of (begin, end)": _beside_the_ends,
    "every second of the halves": _of_halves,
}
"""Ways in which the same offsets [N + 1] lie in memory: alone; beside the end of each sequence; among the offsets of
all sequences cut in two."""


def layout(offsets: Tensor, name: str) -> Tensor:
    """offsets [N + 1] laid out as one of `LAYOUTS`."""
    if name not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name](offsets)


def offsets(sequences: int = 5, length: int = 20, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Offsets [sequences + 1] of sequences of 1 to 2 length - 1 tokens, as many of each length."""
    lengths = torch.randint(1, 2 * length, (sequences,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)


def inputs(T: int, *, H: int = 2, K: int = 8, V: int = 8, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """RWKV6 inputs of T packed tokens that forget slowly, without a bonus: it passes no state on."""
    made = make_inputs("rwkv6", T=T, H=H, K=K, V=V, decay=DECAY, device=device, seed=seed)
    return made | {"u": torch.zeros_like(made["u"])}


def run(inputs: Mapping[str, Tensor], offsets: Tensor, *, raw: bool = True, backend: str | None = None) -> Tensor:
    """o [1, T, H, V] of RWKV6 over packed sequences, NaN where no program wrote.

    inputs: as `inputs` makes them. offsets: [N + 1], 0 … T, of any stride. raw: the fault, the numbers one after the
    other in memory; without it, with the stride they have. What is read counts as T where it is more.
    backend: "triton" is the kernel, on a GPU or interpreted; "torch" its twin.
    """
    x = {name: inputs[name].detach().float() for name in ("r", "k", "v", "w", "u")}
    out = torch.full_like(x["v"], torch.nan)
    if choose_backend(backend, x["k"]) == "triton":
        from .kernel_triton import run_packed

        run_packed(*(x[name].contiguous() for name in ("r", "k", "v", "w")), out, offsets, raw)
        return out
    read = (offsets.as_strided(offsets.shape, (1,)) if raw else offsets).tolist()
    for begin, end in zip(read, read[1:], strict=False):
        if begin < end:
            out[:, begin:end] = _alone(x, begin, end)
    return out


def truth(inputs: Mapping[str, Tensor], offsets: Tensor) -> Tensor:
    """What `run` should return, in float64: each sequence by itself."""
    x, ends = {name: y.detach().double() for name, y in inputs.items()}, offsets.tolist()
    return torch.cat([_alone(x, *piece) for piece in zip(ends, ends[1:], strict=False) if len(range(*piece))], 1)


def _alone(x: Mapping[str, Tensor], begin: int, end: int) -> Tensor:
    """o of the tokens begin … end - 1, from an empty state."""
    return reference.forward(**{name: y if name == "u" else y[:, begin:end] for name, y in x.items()})[0]


class Share(NamedTuple):
    """Of all tokens: those whose output is wrong, and those among them that no program computes."""

    wrong: float
    missing: float


def in_memory(offsets: Sequence[int], name: str) -> list[int]:
    """The numbers from the first offset on, as a layout has them in memory: as many as there are offsets."""
    layout(torch.zeros(2, dtype=torch.int64), name)
    if name == "contiguous":
        return list(offsets)
    ends = [*offsets[1:], offsets[-1]]
    between = ends if name.startswith("column") else [(x + y) // 2 for x, y in zip(offsets, ends, strict=True)]
    return [x for pair in zip(offsets, between, strict=True) for x in pair][: len(offsets)]


def law(offsets: Sequence[int], read: Sequence[int]) -> Share:
    """Which shares of the tokens are wrong when `read` is taken for the offsets; pieces of `read` must not overlap.

    A token is right if the piece that holds it begins where its sequence does: a later beginning lacks the tokens
    before it, an earlier one brings a state along. Tokens that lie in no piece are missing.

    >>> law([0, 4, 8, 16], [0, 4, 4, 8])
    Share(wrong=0.5, missing=0.5)
    """
    pieces = [range(*piece) for piece in zip(read, read[1:], strict=False)]
    right = covered = 0
    for sequence in (range(*ends) for ends in zip(offsets, offsets[1:], strict=False)):
        for piece in pieces:
            shared = len(range(max(sequence.start, piece.start), min(sequence.stop, piece.stop)))
            covered += shared
            right += shared if piece.start == sequence.start else 0
    return Share(1 - right / offsets[-1], 1 - covered / offsets[-1])


def measured(inputs: Mapping[str, Tensor], offsets: Tensor, *, raw: bool = True, backend: str | None = None) -> Share:
    """The measured counterpart of `law`: the outputs of `run` against the truth, token by token."""
    return _share(_errors(inputs, offsets, raw, backend))


def _errors(inputs: Mapping[str, Tensor], offsets: Tensor, raw: bool, backend: str | None) -> Tensor:
    """The worst error of each token's output, [T], in units of the output's RMS; NaN where no program wrote."""
    found, exact = run(inputs, offsets, raw=raw, backend=backend).double(), truth(inputs, offsets)
    size = exact.square().mean().sqrt().item() or 1.0  # all is zero where every sequence has one token
    return (found - exact).abs().amax((-1, -2))[0].cpu() / size


def _share(errors: Tensor) -> Share:
    return Share(_wrong(errors).double().mean().item(), errors.isnan().double().mean().item())


def _wrong(errors: Tensor) -> Tensor:
    return ~(errors <= 1e-4)


def _tried(starts: Tensor, name: str, raw: bool, seed: int, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The offsets [N + 1] laid out, and the errors [T] of what is computed with them."""
    device, able = kernel_place()
    laid_out = layout(starts.to(device), name)
    return laid_out, _errors(inputs(int(starts[-1]), device=device, seed=seed), laid_out, raw, backend or able)


@functools.lru_cache(maxsize=1)
def _tried_once(layout: str, raw: bool, sequences: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    return _tried(offsets(sequences, length, seed=seed), layout, raw, seed)


def _rows(laid_out: Tensor, errors: Tensor, name: str, raw: bool) -> list[Row]:
    ends, found = laid_out.tolist(), _share(errors)
    predicted = law(ends, in_memory(ends, name) if raw else ends)
    stride, sequences = laid_out.stride(0), len(ends) - 1
    what = f"{name}, stride {stride}, {sequences} sequences"
    if not raw:
        what = f"{name}, stride {stride}, asked for, {sequences} sequences"
    return [
        Row(f"{what}: share of tokens wrong", math.nan, predicted.wrong, found.wrong),
        Row(f"{what}: never computed", math.nan, predicted.missing, found.missing),
    ]


def at(
    *,
    layout: Annotated[str, LAYOUTS] = "every second of the halves",
    raw: bool = True,
    sequences: Annotated[int, Range(1, 16)] = 5,
    length: Annotated[int, Range(2, 32)] = 10,
    seed: int = 0,
) -> list[Row]:
    """Packed sequences of about `length` tokens whose offsets lie in memory in one way, read raw or with a stride."""
    return _rows(*_tried_once(layout, raw, sequences, length, seed), layout, raw)


@dataclass(frozen=True)
class Shown:
    """What lies in memory, what is read of it, and what comes out."""

    memory: list[int]
    """The numbers from the first offset to the last."""
    stride: int
    """How many numbers there are from one offset to the next."""
    step: int
    """How many the kernel goes on."""
    errors: Tensor
    """Of each token's output, [T], in units of the output's RMS; NaN where no program wrote."""
    wrong: Tensor
    """Which of them are no rounding, [T]."""

    @property
    def offsets(self) -> list[int]:
        return self.memory[:: self.stride]

    @property
    def read(self) -> list[int]:
        """What the kernel takes for the offsets."""
        return self.memory[:: self.step][: len(self.offsets)]


def show(*, layout: str, raw: bool, sequences: int, length: int, seed: int) -> Shown:
    """What `at` measures, token by token."""
    laid_out, errors = _tried_once(layout, raw, sequences, length, seed)
    stride = laid_out.stride(0)
    memory = laid_out.as_strided(((len(laid_out) - 1) * stride + 1,), (1,)).tolist()
    return Shown(memory, stride, 1 if raw else stride, errors, _wrong(errors))


def reproduce(backend: str | None = None) -> list[Row]:
    """The shares of tokens that are wrong, by layout, and with the stride asked for; the table of the story last.

    backend: default the kernel where this process can run it, else its twin.
    """
    device, able = kernel_place()
    backend, starts = backend or able, offsets()
    tried = [(name, True) for name in LAYOUTS] + [("column of (begin, end)", False)]
    rows = [row for name, raw in tried for row in _rows(*_tried(starts, name, raw, 0, backend), name, raw)]
    table = torch.tensor([[0, 9], [5, 9], [20, 9]], device=device)
    found, predicted = measured(inputs(20, device=device), table[:, 0], backend=backend), law([0, 5, 20], [0, 9, 5])
    return [
        *rows,
        Row("a column of [[0, 9], [5, 9], [20, 9]]: share of tokens wrong", math.nan, predicted.wrong, found.wrong),
        Row("a column of [[0, 9], [5, 9], [20, 9]]: never computed", math.nan, predicted.missing, found.missing),
    ]
