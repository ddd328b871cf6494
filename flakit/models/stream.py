"""Padding, sequence boundaries and states, as a layer sees them in one call.

From its `Stream` a layer gets each token's predecessor (`shift`); it zeroes what padding would write (`blank`) and runs
its operator through it (`run`). So masks, packed sequences and initial states are handled once, here.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.gsa import chunk_gsa, fused_recurrent_gsa
from ..ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from ..ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from .ranks import Slice

RECURRENT = {
    chunk_rwkv6: fused_recurrent_rwkv6,
    chunk_rwkv7: fused_recurrent_rwkv7,
    chunk_gsa: fused_recurrent_gsa,
}
"""The recurrent form that replaces each chunked operator in a call with one token and a state."""


class Layout:
    """The positions of the tokens of a call [B, T].

    mask: [B, T] bool, False for padding. cu_seqlens: offsets [N + 1] of packed sequences, B = 1. Exactly one of them is
    not None. sequences: the number of sequences, N, or B with a mask.
    before: [B, T], the index of the previous token, -1 at the start of a sequence.
    last: [N], the index of each sequence's last token, -1 if it has none.
    sequence: [T], the index of the sequence of each packed token; None with a mask."""

    def __init__(self, B: int, T: int, device: torch.device, mask: Tensor | None, cu_seqlens: Tensor | None):
        self.mask, self.cu_seqlens, self.sequence = mask, cu_seqlens, None
        t = torch.arange(T, device=device)
        if mask is not None:
            self.sequences = B
            newest = torch.where(mask, t, -1).cummax(1).values
            self.before, self.last = F.pad(newest[:, :-1], (1, 0), value=-1), newest[:, -1]
        else:
            self.sequences = len(cu_seqlens) - 1
            starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            self.sequence = (torch.searchsorted(cu_seqlens.long(), t, right=True) - 1).clamp(max=len(starts) - 1)
            self.start = starts[self.sequence]
            self.before = torch.where(t == self.start, -1, t - 1)[None]
            self.last = torch.where(ends > starts, ends - 1, -1)

    def latest(self, x: Tensor, initial: Tensor | None) -> Tensor:
        """Return x [B, T, D] at each sequence's last token, [N, D]; `initial` (None: zeros) for one without tokens."""
        t = self.last.clamp(min=0)
        last = x[0, t] if self.sequence is not None else x[torch.arange(len(x), device=x.device), t]
        return torch.where(self.last[:, None] < 0, torch.zeros_like(last) if initial is None else initial, last)

    def shifted(self, x: Tensor, initial: Tensor | None) -> Tensor:
        """Return the predecessor of each token in x [B, T, D]; for a sequence's first, `initial` [N, D] (None:
        zeros)."""
        previous = x.gather(1, self.before.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))
        if initial is None:
            first = torch.zeros_like(x[:, :1])
        else:
            first = initial[:, None] if self.sequence is None else initial[self.sequence][None]
        return torch.where(self.before[..., None] < 0, first, previous)


class Stream:
    """The padding, packing and states of one call, for a part of the model. Default: none of these.

    layout: None if there is no padding and each row is a sequence. initial: the initial state, tensors by full name.
    final: the dict that parts write their final state to, None if it is not requested. part: prefix of this part's
    names. over: this process's slice, when several hold the sequences together; the layout describes the slice."""

    def __init__(
        self,
        layout: Layout | None = None,
        initial: Mapping[str, Tensor] | None = None,
        final: dict[str, Tensor] | None = None,
        part: str = "",
        over: Slice | None = None,
    ):
        self.layout, self.initial, self.final, self.part, self.over = layout, initial, final, part, over

    def inside(self, part: str) -> "Stream":
        """Return the stream of the submodule named `part`."""
        return Stream(self.layout, self.initial, self.final, f"{self.part}{part}.", self.over)

    def read(self, name: str, shape: Sequence[int | None], dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the tensor `name` of the initial state, converted to dtype, None if there is no initial state. shape:
        None for an axis of any size. Raise ValueError for another shape."""
        if self.initial is None:
            return None
        x = self.initial[self.part + name]
        if len(x.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, x.shape, strict=True)):
            wanted = ["any" if size is None else size for size in shape]
            raise ValueError(
                f"initial_state[{self.part + name!r}]: expected [{', '.join(map(str, wanted))}], got {list(x.shape)}"
            )
        return x if dtype is None else x.to(dtype)

    def write(self, name: str, x: Tensor) -> None:
        """Store x as the tensor `name` of the final state."""
        self.final[self.part + name] = x

    def shift(self, x: Tensor) -> Tensor:
        """Return the predecessor of each token in x [B, T, D] (token shift); a first token's is the initial state, or
        zeros."""
        T = x.shape[1]
        if self.over is not None:
            initial = self._previous_over_ranks(x)
        else:
            N = len(x) if self.layout is None else self.layout.sequences
            initial = self.read("shift", (N, x.shape[-1]), x.dtype)
        if self.final is not None:
            last = self._latest(x, initial)
            self.write("shift", last if self.over is None else self.over.ended(last))
        if self.layout is not None:
            return self.layout.shifted(x, initial)
        if initial is None:
            return F.pad(x, (0, 0, 1, -1))
        return torch.cat((initial[: len(x), None], x[:, :-1]), 1)[:, :T]

    def _latest(self, x: Tensor, initial: Tensor | None) -> Tensor:
        """Return the last token of each sequence in x [B, T, D], [N, D]; `initial` for a sequence without tokens."""
        if self.layout is not None:
            return self.layout.latest(x, initial)
        # For an empty slice, x.sum(1) = 0 ties `initial` to x, so that its backward joins the other ranks' too.
        return x[:, -1] if x.shape[1] else initial + x.sum(1)

    def _previous_over_ranks(self, x: Tensor) -> Tensor:
        """Return the token before each sequence's first one on this rank, [rows, D], from whichever rank holds it."""
        initial = self.read("shift", (self.over.sequences, x.shape[-1]), x.dtype)
        begun = self.over.here(initial, x)
        if self.layout is None:
            has = torch.full((len(begun),), x.shape[1] > 0, device=x.device)
        else:
            has = self.layout.last >= 0
        return self.over.entered(self._latest(x, begun), has, begun)

    def blank(self, x: Tensor) -> Tensor:
        """Return x [B, T, ...] with zeros at padding."""
        if self.layout is None or self.layout.mask is None:
            return x
        return torch.where(self.layout.mask.view(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def run(self, operator: Callable, *tensors: Tensor, state: Mapping[str, Sequence[int]]) -> Tensor:
        """Run an operator with this call's packing and states, and return its output o; the final state is stored if
        requested. state: names and shapes, without the axis N, of the tensors of its state."""
        options, N = {}, len(tensors[0])
        if self.over is not None:
            options["group"], N = self.over.group, self.over.sequences
            if self.over.packed:
                options |= {"cu_seqlens": self.over.cu_seqlens, "cu_seqlens_cpu": self.over.cu_seqlens_cpu}
        elif self.layout is not None and self.layout.cu_seqlens is not None:
            options["cu_seqlens"], N = self.layout.cu_seqlens, self.layout.sequences
        if self.initial is not None:
            initial = tuple(self.read(name, (N, *shape)) for name, shape in state.items())
            options["initial_state"] = initial if len(initial) > 1 else initial[0]
        if self.final is not None:
            options["output_final_state"] = True
        if options and self.over is None and tensors[0].shape[1] == 1:
            operator = RECURRENT.get(operator, operator)
        result = operator(*tensors, **options)
        if self.final is not None:
            final = result.final_state if len(state) > 1 else (result.final_state,)
            for name, x in zip(state, final, strict=True):
                self.write(name, x)
        return result.o


WHOLE = Stream()
"""The stream of a plain call: no padding, each row one sequence from its start."""
