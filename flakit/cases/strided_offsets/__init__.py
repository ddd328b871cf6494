"""Offsets with a stride: a kernel that reads `cu_seqlens + i` cuts the packed sequences at other tokens.

Sequences of different lengths are packed one after another; offsets [N + 1] give their starts: sequence i has the
tokens offsets[i] … offsets[i + 1] - 1. A kernel reads both numbers itself, one program per sequence. If the offsets are
a column of a table, or every second entry of a longer list, they have a stride of 2; a kernel that assumes 1 reads
other numbers.

As reported (this kit's own Triton forms, November 2026): relative errors from 0.8 to inf, depending on the contents of
the memory, without a message. As measured: every tensor with a time axis was made contiguous before the kernel, but not
the offsets, and their check used `.tolist()`, which respects strides: the numbers checked were not those read. If each
offset lies beside its sequence's end, the kernel reads every offset twice, and never computes the second half of the
sequences: the first half is right, the rest is uninitialised memory. The cure is one `.contiguous()`, or the stride as
an argument.

`run` computes RWKV6 in this way; `law` predicts from the numbers in memory which fraction of tokens is wrong.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.arguments import one_of
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.dispatch import choose_backend
from ...ops.rwkv6 import reference
from ..knobs import Range
from ..laws import Measured, Row, kernel_place

DECAY = -0.01
"""The log decay per token, so weak that a wrong start shows in all later tokens."""


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
"""Functions that copy offsets [N + 1] to a memory layout: alone; beside the end of each sequence; among the offsets of
all sequences cut in two."""


def layout(offsets: Tensor, name: str) -> Tensor:
    """Copy offsets [N + 1] to one of the memory layouts of `LAYOUTS`. Raises ValueError for an unknown one."""
    return LAYOUTS[one_of("layout", name, LAYOUTS)](offsets)


def offsets(sequences: int = 5, length: int = 20, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Draw offsets [sequences + 1] of sequences of 1 to 2 length - 1 tokens, uniformly distributed."""
    lengths = torch.randint(1, 2 * length, (sequences,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)


def inputs(T: int, *, H: int = 2, K: int = 8, V: int = 8, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Draw RWKV6 inputs of T packed tokens, B = 1, decay `DECAY`, and u = 0, so that o comes from the state alone."""
    tensors = make_inputs("rwkv6", T=T, H=H, K=K, V=V, decay=DECAY, device=device, seed=seed)
    return tensors | {"u": torch.zeros_like(tensors["u"])}


def run(inputs: Mapping[str, Tensor], offsets: Tensor, *, raw: bool = True, backend: str | None = None) -> Tensor:
    """Return o [1, T, H, V] of RWKV6 over packed sequences, float32, NaN where no program wrote.

    inputs: as from `inputs`. offsets: [N + 1], 0 … T, of any stride. raw: the fault, read consecutive numbers in
        memory; False respects the stride. Numbers above T count as T.
    backend: "triton" for the kernel, on a GPU or interpreted; "torch" for the same in PyTorch; None as in operators.
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
    """Return the right o of `run` in float64, [1, T, H, V]: each sequence computed separately."""
    x, ends = {name: y.detach().double() for name, y in inputs.items()}, offsets.tolist()
    return torch.cat([_alone(x, *piece) for piece in zip(ends, ends[1:], strict=False) if len(range(*piece))], 1)


def _alone(x: Mapping[str, Tensor], begin: int, end: int) -> Tensor:
    """Return o of RWKV6 from the tokens begin … end - 1 of x alone, [1, end - begin, H, V], without initial state."""
    return reference.forward(**{name: y if name == "u" else y[:, begin:end] for name, y in x.items()})[0]


class Share(NamedTuple):
    """The fractions of tokens with a wrong or no output, and of those that no program computes, 0 to 1."""

    wrong: float
    missing: float


def in_memory(offsets: Sequence[int], name: str) -> list[int]:
    """Return what a kernel reads with stride 1 in the place of N + 1 offsets, copied to the layout `name` of `LAYOUTS`.
    Raises ValueError for an unknown one."""
    layout(torch.zeros(2, dtype=torch.int64), name)
    if name == "contiguous":
        return list(offsets)
    ends = [*offsets[1:], offsets[-1]]
    between = ends if name.startswith("column") else [(x + y) // 2 for x, y in zip(offsets, ends, strict=True)]
    return [x for pair in zip(offsets, between, strict=True) for x in pair][: len(offsets)]


def law(offsets: Sequence[int], read: Sequence[int]) -> Share:
    """Predict the fractions of wrong and missing tokens if a kernel takes the numbers `read` for the offsets. The
    ranges between neighbours in `read`, one per program, must not overlap.

    A token is right if its program begins where its sequence does: a later start lacks the tokens before it, an earlier
    one includes another sequence's state. Tokens in no program's range are missing.

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
    """Measure `law`: a token is wrong if o of `run` is off by more than 1e-4 of the RMS of o, or is never written."""
    return _share(_errors(inputs, offsets, raw, backend))


def _errors(inputs: Mapping[str, Tensor], offsets: Tensor, raw: bool, backend: str | None) -> Tensor:
    """Return the largest error of each token's output, [T], in units of the RMS of o; NaN if no program wrote it."""
    o, exact = run(inputs, offsets, raw=raw, backend=backend).double(), truth(inputs, offsets)
    size = exact.square().mean().sqrt().item() or 1.0  # all zeros if every sequence has one token
    return (o - exact).abs().amax((-1, -2))[0].cpu() / size


def _share(errors: Tensor) -> Share:
    return Share(_wrong(errors).double().mean().item(), errors.isnan().double().mean().item())


def _wrong(errors: Tensor) -> Tensor:
    return ~(errors <= 1e-4)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the memory with the offsets, what the kernel reads, and each token's error."""

    memory: list[int]
    """The numbers in memory from the first offset to the last."""
    stride: int
    """The stride of the offsets in `memory`."""
    step: int
    """The stride at which the kernel reads: 1 with the fault."""
    errors: Tensor
    """The error of each token's output, [T], in units of the output's RMS; NaN if no program wrote it."""
    wrong: Tensor
    """Whether each error exceeds rounding, [T]."""

    @property
    def offsets(self) -> list[int]:
        return self.memory[:: self.stride]

    @property
    def read(self) -> list[int]:
        """The numbers that the kernel uses as offsets."""
        return self.memory[:: self.step][: len(self.offsets)]


def show(
    *,
    layout: Annotated[str, LAYOUTS] = "every second of the halves",
    raw: bool = True,
    sequences: Annotated[int, Range(1, 16)] = 5,
    length: Annotated[int, Range(2, 32)] = 10,
    seed: int = 0,
) -> Shown:
    """Run RWKV6 over random packed sequences of about `length` tokens. Return the fractions of wrong and of missing
    tokens beside the prediction of `law`. layout: of `LAYOUTS`. raw: the fault, as in `run`."""
    device, backend = kernel_place()
    laid_out = LAYOUTS[layout](offsets(sequences, length, device=device, seed=seed))
    ends, stride = laid_out.tolist(), laid_out.stride(0)
    errors = _errors(inputs(ends[-1], device=device, seed=seed), laid_out, raw, backend)
    predicted, found = law(ends, in_memory(ends, layout) if raw else ends), _share(errors)
    what = f"{layout}, stride {stride}, {sequences} sequences"
    if not raw:
        what = f"{layout}, stride {stride}, asked for, {sequences} sequences"
    rows = [
        Row(f"{what}: share of tokens wrong", math.nan, predicted.wrong, found.wrong),
        Row(f"{what}: never computed", math.nan, predicted.missing, found.missing),
    ]
    memory = laid_out.as_strided((sequences * stride + 1,), (1,)).tolist()
    return Shown(rows, memory, stride, 1 if raw else stride, errors, _wrong(errors))


def reproduce() -> list[Row]:
    """Return predicted and measured fractions of wrong and missing tokens by layout, with the stride respected, and for
    the report's offsets, the first column of [[0, 9], [5, 9], [20, 9]]."""
    device, backend = kernel_place()
    tried = [(name, True) for name in LAYOUTS] + [("column of (begin, end)", False)]
    rows = [row for name, raw in tried for row in show(layout=name, raw=raw, length=20).rows]
    table = torch.tensor([[0, 9], [5, 9], [20, 9]], device=device)
    got, predicted = measured(inputs(20, device=device), table[:, 0], backend=backend), law([0, 5, 20], [0, 9, 5])
    return [
        *rows,
        Row("a column of [[0, 9], [5, 9], [20, 9]]: share of tokens wrong", math.nan, predicted.wrong, got.wrong),
        Row("a column of [[0, 9], [5, 9], [20, 9]]: never computed", math.nan, predicted.missing, got.missing),
    ]
