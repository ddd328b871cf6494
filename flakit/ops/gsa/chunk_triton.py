"""GSA in chunks as Triton kernels: everything is parallel over chunks but a light stream of memories.

Forward:  `stream_kernel`        the memories hk and hv entering each chunk, and which chunks are mild
          `output_kernel`        scores, softmax and o from a chunk's tokens and its entering memories
Backward: `softmax_grads_kernel` p again, and dscores from it and from what reaches it through the second pass
          `stream_kernel`        in reverse: the gradients of both memories leaving each chunk
          `slot_grads_kernel`    ds and dg (for any decay `memory_grads_kernel` before it: what memories give)
          `pass_grads_kernel`    dk and dq, then dv

Both memories are kept with the slots as rows, hk turned to [M, K]. The two passes are then one thing to the backward: a
read x over the slots (dscores or p) meets the key s of the same and of earlier tokens with the score matrix q k^T or
do v^T, and both read a memory that has taken in their own token. All M slots are in registers: the softmax needs them.

There are two ways through a chunk (`mild_triton`, `dyadic_triton`); both are launched, here, and each leaves the
other's chunks alone. With upto_i the sum of g over the chunk's rows up to i, and mid that over its first half:
- `mild_*` (16-bit inputs, the chunk's whole decay fits float32): e^{upto_i - upto_j} is the product of what reads are
  multiplied with, e^{upto_i - mid}, and keys, e^{mid - upto_j}: x*_i and s*_j. What is left, e^{mid} where memories are
  read and e^{total - mid} where they are written, lies in the scales that mild kernels are given (`store_state`);
- any other: a read's own fading e^{g_i} is split off, so that what is left lies strictly between j and i as in RWKV6,
  products by dyadic level whose factors are all in [0, 1] (`pair_scores`); a token meets itself without any decay.
Rows beyond a sequence's end are loaded as zeros, g too; no factor is ever above e^55, so that a zero stays a zero.
Chunks have 64 tokens where inputs are bfloat16, slots 33 to 64 and queries as many as heads, else 32.

Mild operands are split into two bfloat16 numbers where decays are in them (`blocks_triton.split`). Products with a
memory, which is kept in float16 with a power of two for each row, take the other operand in float16 too, each of its
rows over a power of two: one product in the place of two or three, and the memory goes from where it lies to the tensor
core as it is. What that rounds, 2^-12, is what the memory has lost already. A score, though, is an exponent: a loss
of 2^-12 there changes p by that times the score. bfloat16 inputs lose more before they come here; beside float16 ones
the stream also stores what hk was rounded by, for the scores alone (`remainders`).

The decay's gradient is a difference of two running sums on the mild way. What a read finds, and what a key is found by,
come from the same split operands with all four products of their parts, and are summed from three parts, which is all
of float32: the same products are added and taken away, and only float32 accumulation is left to disagree. What reads
find is known to the forward (scores) and to softmax_grads (dp), which hand it on in float32.

Where tiles are loaded again so as not to be kept in registers, a `tl.debug_barrier` stands before: else Triton takes
two loads of the same for one, and moves those in a loop before it.
"""

import math
from functools import lru_cache

import torch

from ..common.launch import CHUNK_SIZE, TABLE, Launch, cdiv
from ..common.plan_triton import ChunkPlan, block_of, flags_of, kept_states_shape
from .dyadic_triton import (
    memory_grads_kernel,
    output_kernel,
    pass_grads_kernel,
    slot_grads_kernel,
    softmax_grads_kernel,
)
from .mild_triton import mild_output_kernel, mild_pass_grads_kernel, mild_slot_grads_kernel, mild_softmax_grads_kernel


def _op(M: int) -> str:
    """Prefix of the rows of the launch table for so many slots."""
    return "gsa" if M <= 64 else "gsa128"


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the slots, with the sizes of a group of queries beside it."""

    def __init__(self, q, v, s, packing, chunk_size):
        super().__init__(_op(s.shape[-1]), s, v.shape[-1], packing, _tokens(q, s, chunk_size))
        self.M, self.G = s.shape[-1], q.shape[2] // self.H
        self.scaled_together = TABLE[f"{self.op}.stream", self.width].BV

    def launch(
        self, kernel: str, mild_kernel, any_kernel, heads: int, blocks: dict[str, int], *given, apart=False, **more
    ) -> None:
        """Both ways through a chunk (of which one may be None), a program for each and each of so many heads.

        given: what the kernels take before `where`; blocks: what they go through block by block, as {"K": its size};
        apart: whether each of these blocks has a program of its own; more: further keyword arguments.
        """
        for way in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            kernel_of_way = mild_kernel if way == "mild" else any_kernel
            if kernel_of_way is None:
                continue
            row = TABLE[f"{self.op}.{kernel}.{way}", self.width]
            options, block_count = _options(
                row, self.H, self.G, self.M, self.C, self.scaled_together, self.flags, self.packing is not None,
                tuple(blocks.items()),
            )  # fmt: skip
            programs, where, own = self.chunks * heads, self.where, {}
            if way == "dyadic":
                programs = cdiv(self.chunks * self.H, self.at_once) * (heads // self.H)
                where = (*self.where, self.chunks)
                own = dict(LEVELS=self.C.bit_length() - 1, SCALED=self.scaled, AT_ONCE=self.at_once)
            if apart:
                programs *= block_count
            taken = self.taken_apart(given, mild=way == "mild")
            kernel_of_way[(programs,)](*taken, *where, **options, **own, **more)


@lru_cache(1024)
def _options(
    row: Launch, H: int, G: int, M: int, C: int, BS: int, flags: int, packed: bool, blocks: tuple[tuple[str, int], ...]
) -> tuple[dict, int]:
    """What a kernel of either way is launched with, and how many blocks there are."""
    options = dict(
        H=H, G=G, M=M, C=C, BM=block_of(C, M, 128), BS=BS, FLAGS=flags, PACKED=packed,
        num_warps=row.num_warps, num_stages=row.num_stages, maxnreg=row.maxnreg,
    )  # fmt: skip
    for name, size in blocks:
        options |= {name: size, f"B{name}": block_of(C, size, row.BV)}
    return options, math.prod(cdiv(size, options[f"B{name}"]) for name, size in blocks)


def _slot_rows(states) -> tuple:
    """(hk [N, H, K, M], hv [N, H, M, V]) with hk turned to [N, H, M, K]; as `ChunkPlan.states` takes it, if they are
    known later."""
    if callable(states):

        def asked(factor, written):
            arrived = states(factor, [written[0].mT, written[1]])
            return lambda: _slot_rows(arrived())

        return asked, None
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


def _tokens(q, s, chunk_size: int) -> int:
    """Tokens a chunk, 0 for as many as is best: 32 where queries share a memory. In chunks of 64 dv of such a group was
    wrong for strong gates on an H200, where a score matrix was made in a loop within a loop (data/tuning.md)."""
    return min(chunk_size or CHUNK_SIZE, CHUNK_SIZE) if q.shape[2] > s.shape[2] else chunk_size


def meets(*tensors) -> bool:
    """As of `ahead_triton.Kernels`: `ChunkPlan` takes a function in the place of a state to begin with."""
    return True


def kept_shapes(q, k, v, s, g, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: what q finds and, behind it, which chunks are mild; hk and hv
    entering every chunk, slots as rows."""
    chunk_size = _tokens(q, s, chunk_size)
    states = (kept_states_shape(_op(s.shape[-1]), s, x.shape[-1], packing, chunk_size) for x in (k, v))
    plan = _op(s.shape[-1]), s, v.shape[-1], packing, chunk_size
    return (q.shape[:3].numel() * s.shape[-1] + flags_of(*plan),), *states


def forward(q, k, v, s, g, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """o, (hk_T, hv_T) (None unless asked for), and as in `kept_shapes` (the first empty unless kept)."""
    plan = _Plan(q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    (first_hk, first_hv), last_hk, last_hv = _slot_rows(initial_state), None, None
    if output_final_state:
        last_hk, last_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    remainders = None
    if s.dtype == torch.float16:
        remainders = plan.empty(plan.chunks, plan.H, plan.M, K, dtype=torch.float16)
    (hk, hv), mild = plan.states(
        s, k, g, 1.0, first_hk, last_hk, reverse=False, beside=(s, v, first_hv, last_hv), remainders=remainders
    )
    o, found = q.new_empty(*q.shape[:3], V), plan.empty(q.shape[:3].numel() * plan.M + mild.numel() if keep else 0)
    plan.launch(
        "output", mild_output_kernel, output_kernel, q.shape[2], dict(K=K, V=V),
        q, k, v, s, g, plan.unpacked(hk, K), remainders, plan.unpacked(hv, V), mild, o, found, scale, KEEP=keep,
    )  # fmt: skip
    if keep:
        if packing is not None:
            packing.kept_rows.append(found[: -mild.numel()].view(*q.shape[:3], plan.M))
        found[-mild.numel() :].copy_(mild.view(torch.float32).flatten())
    return o, (last_hk.mT, last_hv) if output_final_state else None, (found, hk, hv)


def backward(q, k, v, s, g, scale, initial_state, packing, chunk_size, kept, do, dfinal_state):
    """dq, dk, dv, ds, dg in their inputs' dtypes and (dhk_0, dhv_0) in float32."""
    plan = _Plan(q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    plan.lay_out(K, V)
    found, mild = kept[0].split_with_sizes(
        [kept[0].numel() - plan.chunks * plan.H * plan.flags, plan.chunks * plan.H * plan.flags]
    )
    mild = mild.view(torch.int32)
    hk, hv = plan.unpacked(kept[1], K), plan.unpacked(kept[2], V)
    slots = *q.shape[:3], plan.M
    p = found.new_empty(slots, dtype=torch.float16 if plan.scaled else torch.float32)
    dscores, reads = plan.empty(slots), plan.empty(slots if plan.scaled else 0)
    plan.launch(
        "softmax_grads", mild_softmax_grads_kernel, softmax_grads_kernel, q.shape[2], dict(V=V),
        v, s, g, do, hv, found, mild, p, dscores, reads, scale,
    )  # fmt: skip
    last_hk, last_hv = _slot_rows(dfinal_state)
    first_hk, first_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    (dhk, dhv), _ = plan.states(
        dscores, q, g, 1.0, last_hk, first_hk, reverse=True, inclusive=True, beside=(p, do, last_hv, first_hv)
    )
    dhk, dhv = plan.unpacked(dhk, K), plan.unpacked(dhv, V)
    ds, dg = torch.empty_like(s), torch.empty_like(g)
    of_memories = plan.empty(s.shape), plan.empty(s.shape)
    memories = (q, k, v, s, g, do, hk, hv, dhk, dhv, p, dscores)
    plan.launch("slot_grads", mild_slot_grads_kernel, None, plan.H, dict(K=K, V=V), *memories, reads, mild, ds, dg)
    plan.launch("memory_grads", None, memory_grads_kernel, plan.H, dict(K=K, V=V), *memories, mild, *of_memories)
    plan.launch(
        "slot_grads", None, slot_grads_kernel, plan.H, dict(K=K, V=V),
        q, k, v, s, g, do, p, dscores, *of_memories, mild, ds, dg,
    )  # fmt: skip
    del reads, of_memories, memories  # whose memory the next gradients then take
    dv = torch.empty_like(v)
    plan.launch(
        "pass_grads", mild_pass_grads_kernel, pass_grads_kernel, plan.H, dict(D=V),
        p, v, do, s, g, hv, dhv, mild, dv, None, FIRST=False, apart=plan.G > 1,
    )  # fmt: skip
    del p, dhv
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    plan.launch(
        "pass_grads", mild_pass_grads_kernel, pass_grads_kernel, plan.H, dict(D=K),
        dscores, k, q, s, g, hk, dhk, mild, dk, dq, FIRST=True, apart=plan.G > 1,
    )  # fmt: skip
    return dq, dk, dv, ds, dg, (first_hk.mT, first_hv)
