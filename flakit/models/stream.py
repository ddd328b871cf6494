"""What a layer knows about time in one call: which tokens are padding, where sequences begin, and what came before.

A layer asks its `Stream` for the token before each (`shift`), blanks what padding would write (`blank`) and runs its
operator through it (`run`), so that a mask, packed sequences and a state to go on from are written down once, here.
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
"""What runs in place of a chunked operator where a call has one token."""


class Layout:
    """Where the tokens of a call [B, T] stand.

    mask: [B, T] bool, False where there is no token. cu_seqlens: offsets [N + 1] of packed sequences, B = 1.
    At most one of them is given. sequences: N, or B.
    before: [B, T], the index of the token before, -1 where a sequence begins.
    last: [N], the index of each sequence's last token, -1 where it has none.
    sequence: [T], of packed tokens: the sequence that a token belongs to.
    """

    def __init__(self, B: int, T: int, device: torch.device, mask: Tensor | None, cu_seqlens: Tensor | None):
        self.mask, self.cu_seqlens, self.sequence = mask, cu_seqlens, None
        at = torch.arange(T, device=device)
        if mask is not None:
            self.sequences = B
            newest = torch.where(mask, at, -1).cummax(1).values
            self.before, self.last = F.pad(newest[:, :-1], (1, 0), value=-1), newest[:, -1]
        else:
            self.sequences = len(cu_seqlens) - 1
            starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            self.sequence = (torch.searchsorted(cu_seqlens.long(), at, right=True) - 1).clamp(max=len(starts) - 1)
            self.start = starts[self.sequence]
            self.before = torch.where(at == self.start, -1, at - 1)[None]
            self.last = torch.where(ends > starts, ends - 1, -1)

    def latest(self, x: Tensor, came: Tensor | None) -> Tensor:
        """x [B, T, D] at each sequence's last token, [N, D]; what came before (None: zeros) where it has none."""
        at = self.last.clamp(min=0)
        found = x[0, at] if self.sequence is not None else x[torch.arange(len(x), device=x.device), at]
        return torch.where(self.last[:, None] < 0, torch.zeros_like(found) if came is None else came, found)

    def shifted(self, x: Tensor, came: Tensor | None) -> Tensor:
        """The token before, [B, T, D]; before a sequence's first what came [N, D], or zeros."""
        found = x.gather(1, self.before.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))
        if came is None:
            first = torch.zeros_like(x[:, :1])
        else:
            first = came[:, None] if self.sequence is None else came[self.sequence][None]
        return torch.where(self.before[..., None] < 0, first, found)


class Stream:
    """One call as a part of the model sees it. Without arguments: whole rows, nothing before them, nothing kept.

    layout: None where all tokens are tokens and each row is a sequence. came: the state to go on from, by name.
    kept: where parts put the state that they leave, None where nobody wants it. part: the name before their names.
    over: the slice that this process holds, where several hold the sequences together; the layout is of the slice.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        came: Mapping[str, Tensor] | None = None,
        kept: dict[str, Tensor] | None = None,
        part: str = "",
        over: Slice | None = None,
    ):
        self.layout, self.came, self.kept, self.part, self.over = layout, came, kept, part, over

    def inside(self, part: str) -> "Stream":
        """The stream of a part of this part."""
        return Stream(self.layout, self.came, self.kept, f"{self.part}{part}.", self.over)

    def given(self, name: str, shape: Sequence[int | None], dtype: torch.dtype | None = None) -> Tensor | None:
        """A piece of the state that came, None where none did. Axes of `shape` that are None may have any size."""
        if self.came is None:
            return None
        found = self.came[self.part + name]
        if len(found.shape) != len(shape) or any(
            want not in (None, got) for want, got in zip(shape, found.shape, strict=True)
        ):
            wanted = ["any" if size is None else size for size in shape]
            raise ValueError(
                f"initial_state[{self.part + name!r}]: expected [{', '.join(map(str, wanted))}], "
                f"got {list(found.shape)}"
            )
        return found if dtype is None else found.to(dtype)

    def keep(self, name: str, x: Tensor) -> None:
        self.kept[self.part + name] = x

    def shift(self, x: Tensor) -> Tensor:
        """The token before each of x [B, T, D]; of a first one what came, or zeros."""
        T = x.shape[1]
        if self.over is not None:
            came = self._came_over_ranks(x)
        else:
            N = len(x) if self.layout is None else self.layout.sequences
            came = self.given("shift", (N, x.shape[-1]), x.dtype)
        if self.kept is not None:
            left = self._latest(x, came)
            self.keep("shift", left if self.over is None else self.over.ended(left))
        if self.layout is not None:
            return self.layout.shifted(x, came)
        return F.pad(x, (0, 0, 1, -1)) if came is None else torch.cat((came[: len(x), None], x[:, :-1]), 1)[:, :T]

    def _latest(self, x: Tensor, came: Tensor | None) -> Tensor:
        """The last token of each sequence; what came where it has none."""
        if self.layout is not None:
            return self.layout.latest(x, came)
        # A slice of no tokens: their sum ties what came to x, so that the backward meets the other ranks there, too.
        return x[:, -1] if x.shape[1] else came + x.sum(1)

    def _came_over_ranks(self, x: Tensor) -> Tensor:
        """The token before each sequence's first one here, on whichever rank that is."""
        came = self.given("shift", (self.over.sequences, x.shape[-1]), x.dtype)
        begun = self.over.here(came, x)
        if self.layout is None:
            has = torch.full((len(begun),), x.shape[1] > 0, device=x.device)
        else:
            has = self.layout.last >= 0
        return self.over.entered(self._latest(x, begun), has, begun)

    def blank(self, x: Tensor) -> Tensor:
        """x [B, T, ...] with zeros where a mask says that there is no token."""
        if self.layout is None or self.layout.mask is None:
            return x
        return torch.where(self.layout.mask.view(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def run(self, operator: Callable, *tensors: Tensor, state: Mapping[str, Sequence[int]]) -> Tensor:
        """o of an operator; state: names and shapes, without N, of the parts of its state."""
        how, N = {}, len(tensors[0])
        if self.over is not None:
            how["group"], N = self.over.group, self.over.sequences
            if self.over.packed:
                how |= {"cu_seqlens": self.over.cu_seqlens, "cu_seqlens_cpu": self.over.cu_seqlens_cpu}
        elif self.layout is not None and self.layout.cu_seqlens is not None:
            how["cu_seqlens"], N = self.layout.cu_seqlens, self.layout.sequences
        if self.came is not None:
            came = tuple(self.given(name, (N, *shape)) for name, shape in state.items())
            how["initial_state"] = came if len(came) > 1 else came[0]
        if self.kept is not None:
            how["output_final_state"] = True
        if how and self.over is None and tensors[0].shape[1] == 1:
            operator = RECURRENT.get(operator, operator)
        made = operator(*tensors, **how)
        if self.kept is not None:
            left = made.final_state if len(state) > 1 else (made.final_state,)
            for name, x in zip(state, left, strict=True):
                self.keep(name, x)
        return made.o


WHOLE = Stream()
"""Rows without padding, each a sequence from its beginning."""
