"""A sequence over ranks: the gradient that enters a slice from behind is wrong, and no output shows it.

Each rank of a group, a process with its own GPU, has one slice of the sequence's tokens. In the forward pass the state
S at the end of a slice is the initial state of the next slice. In the backward pass its gradient D goes the other way:
D at the start of a slice is the gradient of the final state of the slice before it. So that all ranks can work at once,
a pre-pass computes D first: a slice with log decays w maps D at its end to e^(sum of w) D + dN at its start, where dN
is the contribution of the slice's own outputs. The case has two faults of the pre-pass.

"head 0's gate": the kernel loads the decay without the head's offset, so that every head decays as head 0 does. As
reported (flash-linear-attention #1115, on KDA): dk, dv and the decay's gradient are off by some 10% on every rank but
the last, at whose end D is zero. The forward pass has a pre-pass of its own, which is right. As measured: D is a sum
over all later tokens, so the `law` predicts its error at each rank and head from the decays of head 0 and of that head.
Heads with equal decays, or a single head, show no error.

"first rank's D": the first rank sends D to no other rank, and drops it with the message. Every token's gradient is
right, and the gradient of the initial state is zero.

The audit's probe `ranks` detects both. It calls an operator that takes `group` in two processes, with heads of
different decays, an initial state and a gradient of the final state, and compares every gradient of every rank with
float64. A test in one process, which has no pre-pass, passes; so does a test of the last rank alone, or of the outputs.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...ops.rwkv6 import chunk_rwkv6
from ..knobs import Range
from ..laws import Measured, Row

T, H, K = 64, 4, 64
FAULTS = ("head 0's gate", "first rank's D", "none")


def pre_pass(r: Tensor, w: Tensor, do: Tensor, *, wrong: bool) -> tuple[Tensor, Tensor]:
    """Return (factor, dN) of a slice of L tokens of RWKV6: the state's gradient at its start is factor * D + dN.

    D is that at its end; factor [B, H, K, 1], the slice's decay; dN [B, H, K, V], the part of its outputs, which read
    the state before their tokens. r, w, do: [B, L, H, K or V]; w natural log. wrong: head 0's decays for all heads.
    """
    w = w[:, :, :1].expand_as(w) if wrong else w
    until = w.cumsum(1) - w
    dN = torch.einsum("bthk,bthv->bhkv", r * until.exp(), do)
    return w.sum(1).exp()[..., None], dN


def law(w: float, behind: int, walked: int = 0, *, fault: str = FAULTS[0], read: float = 0.0) -> float:
    """Predict the relative L2 error of D, the state's gradient, if the tokens' contributions r do^T to it are
    orthogonal and of equal size; 0 below rounding, and for the other faults, which leave D right.

    w: the head's log decay, uniform over tokens. behind: number of tokens in later slices; walked: number of tokens in
        its own slice that D has passed. read: the log decay that the pre-pass reads, head 0's. fault: one of `FAULTS`.

    >>> law(-0.1, 48, read=-0.1), round(law(-0.1, 48, read=-0.05), 3)
    (0.0, 0.537)
    """
    off, size = _squares(w, behind, walked, fault, read)
    return math.sqrt(off / size) if off > 1e-14 * size else 0.0


def _squares(w: float, behind: int, walked: int, fault: str, read: float) -> tuple[float, float]:
    """Return the squared norms of the error of D and of D, if each token contributes a norm of 1; see `law`."""
    size = sum(math.exp(2 * w * d) for d in range(behind + walked))
    if fault != FAULTS[0]:
        return 0.0, size
    off = sum((math.exp(read * d) - math.exp(w * d)) ** 2 for d in range(behind))
    return off * math.exp(2 * w * walked), size


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows and, by head, the relative errors of the state's gradient D at each slice and of
    each token's dv, measured and predicted. The loss is a randomly weighted sum of the outputs."""

    fault: str
    ranks: int
    decays: Tensor
    """Log decay of each head, [H]."""
    entering: Tensor
    """Relative error of D at the end of each rank's slice, [H, ranks]."""
    predicted: Tensor
    """The prediction of `entering`, [H, ranks]."""
    tokens: Tensor
    """Relative error of dv at each token, [H, T]; at the start of a slice D has passed all of its tokens."""
    law: Tensor
    """The prediction of `tokens`, [H, T]."""
    outputs: float
    """Relative error of o over all heads."""
    initial: float
    """Relative error of the initial state's gradient over all heads."""
    first: Tensor
    """The same by head, [H]."""

    @property
    def slice(self) -> int:
        return T // self.ranks


def show(
    *,
    ranks: Annotated[int, (2, 4, 8)] = 4,
    w: Annotated[float, Range(-1.0, 0.0)] = -0.05,
    spread: Annotated[float, Range(0, 2, 0.1)] = 0.2,
    fault: Annotated[str, FAULTS] = FAULTS[0],
    seed: int = 0,
) -> Shown:
    """Run RWKV6 over 64 tokens in `ranks` slices with one of `FAULTS`. Return the errors of the state's gradient, dv, o
    and the initial state's gradient beside those of `law`. Head h of 4 has the log decay w (1 + h * spread)."""
    decays = w * (1 + spread * torch.arange(H, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    r, do, k = _asked(generator)
    v = torch.randn(1, T, H, K, generator=generator, dtype=torch.float64)
    gate = decays[:, None].expand(1, T, H, K)
    u, first = torch.zeros(H, K, dtype=torch.float64), torch.randn(1, H, K, K, generator=generator, dtype=torch.float64)

    def run(own: slice, state: Tensor, D: Tensor | None):
        leaves = [x.clone().requires_grad_() for x in (v[:, own], state)]
        inputs = r[:, own], k[:, own], leaves[0], gate[:, own], u
        o, left = chunk_rwkv6(*inputs, scale=1.0, initial_state=leaves[1], output_final_state=True, backend="torch")
        arrives = (do[:, own], torch.zeros_like(left) if D is None else D)
        return o.detach(), left.detach(), *torch.autograd.grad((o, left), leaves, arrives)

    true_o, _, true_dv, true_dfirst = run(slice(None), first, None)
    L = T // ranks
    slices = [slice(L * n, L * (n + 1)) for n in range(ranks)]
    states = [first]
    for own in slices[:-1]:
        states.append(run(own, states[-1], None)[1])
    arriving = {}
    for wrong in (True, False):
        D = [torch.zeros(1, H, K, K, dtype=torch.float64)]
        for own in reversed(slices[1:]):
            factor, dN = pre_pass(r[:, own], gate[:, own], do[:, own], wrong=wrong and fault == FAULTS[0])
            D.append(factor * D[-1] + dN)
        arriving[wrong] = D[::-1]
    results = [run(own, S, D) for own, S, D in zip(slices, states, arriving[True], strict=True)]
    o, dv = (torch.cat([each[n] for each in results], 1) for n in (0, 2))
    dfirst = torch.zeros_like(first) if fault == FAULTS[1] else results[0][3]
    off = [
        [relative_l2(a[0, h], b[0, h]) if b.any() else 0.0 for a, b in zip(*arriving.values(), strict=True)]
        for h in range(H)
    ]
    entering, outputs, initial = torch.tensor(off), relative_l2(o, true_o), relative_l2(dfirst, true_dfirst)
    tokens = ((dv - true_dv).norm(dim=-1) / true_dv.norm(dim=-1).clamp(min=1e-300))[0].T
    predicted = torch.tensor(
        [[_law(decays, h, t // L, ranks, fault, L - 1 - t % L) for t in range(T)] for h in range(H)]
    )
    parts = [_squares(x, T - L, L, fault, decays[0].item()) for x in decays.tolist()]
    lost, size = (sum(part) for part in zip(*parts, strict=True))
    expected = float(fault == FAULTS[1]) or (math.sqrt(lost / size) if lost > 1e-14 * size else 0.0)
    last, recorded = H - 1, 0.1 if fault == FAULTS[0] and spread else math.nan
    rows = [
        Row(f"{fault}, {ranks} ranks: the outputs are off by", 0.0, 0.0, outputs),
        Row(f"{fault}, {ranks} ranks: D of the last head, where it enters the first slice, by", math.nan,
            _law(decays, last, 0, ranks, fault), entering[last, 0].item()),
        Row(f"{fault}, {ranks} ranks: dv of the last head at the first token by", recorded, predicted[last, 0].item(),
            tokens[last, 0].item()),
        Row(f"{fault}, {ranks} ranks: dv on the last rank by", 0.0, 0.0, tokens[:, -L:].max().item()),
        Row(f"{fault}, {ranks} ranks: the initial state's gradient by", math.nan, expected, initial),
    ]  # fmt: skip
    return Shown(
        rows, fault, ranks, decays, entering=entering, tokens=tokens, law=predicted, outputs=outputs, initial=initial,
        predicted=torch.tensor([[_law(decays, h, n, ranks, fault) for n in range(ranks)] for h in range(H)]),
        first=torch.tensor([relative_l2(dfirst[0, h], true_dfirst[0, h]) for h in range(H)]),
    )  # fmt: skip


def _asked(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw (r, do, k) [1, T, H, K]: r and do orthogonal along T, so that the tokens' contributions to the state's
    gradient are, and k so that all contributions have equal weight in the dv of every token before them."""
    rows = torch.linalg.qr(torch.randn(2, H, T, K, generator=generator, dtype=torch.float64)).Q
    signs = torch.randn(H, T, T, generator=generator, dtype=torch.float64).sign()
    return tuple(x.transpose(0, 1)[None] for x in (*rows, signs @ rows[0]))


def _law(decays: Tensor, h: int, rank: int, ranks: int, fault: str, walked: int = 0) -> float:
    behind = T // ranks * (ranks - 1 - rank)
    return law(decays[h].item(), behind, walked, fault=fault, read=decays[0].item())


def reproduce() -> list[Row]:
    """Return `show`'s rows, relative L2 errors of o, D and gradients, for each of `FAULTS` over two and eight ranks."""
    return [row for fault in FAULTS for ranks in (2, 8) for row in show(ranks=ranks, fault=fault).rows]
