"""Operators that take `group`, with the casebook's faults of ranks: right in one process, where there is no pre-pass.

They are small ones of their own: M of a slice is a matrix [K, K] of each head, and ranks meet in one all-gather a
tensor. They are objects, since two processes have to be able to import them.
"""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flakit.cases.over_ranks import FAULTS, pre_pass
from flakit.cases.rounded_chain import CHUNK, product
from flakit.ops.rwkv6 import chunk_rwkv6
from flakit.ops.rwkv7 import chunk_rwkv7

HEAD_0S_GATE, FIRST_RANKS_D, NONE = FAULTS


@dataclass(frozen=True)
class RWKV6:
    """`over_ranks`: in the pre-pass of the backward every head has the first one's gate, or what the first slice's
    tokens ask of the initial state is dropped."""

    fault: str = NONE

    def __call__(
        self, r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, group=None
    ):
        if group is None:
            return chunk_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens)
        return _OverRanks.apply(self, scale, group, initial_state, r, k, v, w, u)

    def run(self, tensors, scale, S):
        return chunk_rwkv6(*tensors, scale=scale, initial_state=S, output_final_state=True)

    def passes(self, tensors, scale):
        return torch.diag_embed(tensors[3].float().sum(1).exp())

    def passes_back(self, tensors, scale, do):
        """M and dN; None for what the operator itself finds."""
        if self.fault != HEAD_0S_GATE:
            return self.passes(tensors, scale), None
        r, _, _, w, _ = (x.float() for x in tensors)
        scale = r.shape[-1] ** -0.5 if scale is None else scale
        factor, dN = pre_pass(r * scale, w, do.float(), wrong=True)
        return torch.diag_embed(factor[..., 0]), dN


@dataclass(frozen=True)
class RWKV7:
    """`rounded_chain`: the transitions of a slice's chunks are multiplied in TF32."""

    way: str = "float32"
    fault: str = NONE

    def __call__(
        self, r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None, group=None
    ):
        if group is None:
            return chunk_rwkv7(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)
        return _OverRanks.apply(self, scale, group, initial_state, r, w, k, v, a, b)

    def run(self, tensors, scale, S):
        return chunk_rwkv7(*tensors, scale=scale, initial_state=S, output_final_state=True)

    def passes(self, tensors, scale):
        """A chunk's transition is what a state of 1 becomes in it where nothing is written."""
        r, w, k, v, a, b = (x.detach().float() for x in tensors)
        B, T, H, K = r.shape
        M = one = torch.eye(K).expand(B, H, K, K).contiguous()
        for begin in range(0, T, CHUNK):
            chunk = [x[:, begin : begin + CHUNK] for x in (r, w, k, torch.zeros_like(k), a, b)]
            _, its = self.run(chunk, scale, one)
            M = its if begin == 0 else product(its.double(), M.double(), self.way).float()
        return M

    def passes_back(self, tensors, scale, do):
        return self.passes(tensors, scale), None


def _gathered(x: Tensor, group) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, scale, group, initial_state, *tensors):
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
        _, N = op.run(tensors, scale, None)
        S = torch.zeros_like(N) if initial_state is None else initial_state.float()
        slices = zip(_gathered(op.passes(tensors, scale), group), _gathered(N, group), strict=True)
        for _, (M, N) in zip(range(rank), slices, strict=False):
            S = M @ S + N
        o, final = op.run(tensors, scale, S)
        ctx.how, ctx.told = (op, scale, group), initial_state is not None and rank == 0 and op.fault != FIRST_RANKS_D
        ctx.given = initial_state is not None
        ctx.save_for_backward(S, *tensors)
        return o, final * (rank == last)

    @staticmethod
    def backward(ctx, do, dfinal):
        (op, scale, group), (S, *tensors) = ctx.how, ctx.saved_tensors
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1

        def grads(D):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (S, *tensors)]
                return torch.autograd.grad(op.run(leaves[1:], scale, leaves[0]), leaves, (do, D))

        M, dN = op.passes_back(tensors, scale, do)
        dN = grads(torch.zeros_like(S))[0] if dN is None else dN
        Ms, dNs, Ds = (_gathered(x, group) for x in (M, dN, torch.zeros_like(S) if dfinal is None else dfinal))
        D = Ds[last]
        for n in range(last, rank, -1):
            D = Ms[n].mT @ D + dNs[n]
        dS, *found = grads(D)
        return None, None, None, (dS * ctx.told if ctx.given else None), *found


@dataclass(frozen=True)
class Failing(RWKV6):
    """In a group of processes the second one dies, hangs or raises an error of its own."""

    how: str = ""

    def __call__(self, r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, group=None):
        if group is not None and dist.get_rank(group) == 1:
            if self.how == "dies":
                os._exit(7)
            if self.how == "hangs":
                time.sleep(600)
            raise {"raises": IndexError, "refuses": ValueError}[self.how]("slices of unlike lengths")
        return super().__call__(r, k, v, w, u, scale, initial_state, output_final_state, group=group)


fading_as_head_0 = RWKV6(HEAD_0S_GATE)
