"""GSA in chunks as Triton kernels: all work but a light stream of memories is parallel over chunks.

Forward:  `stream_kernel`        the memories hk and hv entering each chunk, and which chunks are mild
          `output_kernel`        scores, softmax and o from a chunk's tokens and its entering memories
Backward: `softmax_grads_kernel` p again, and dscores from p and its gradient from the second pass
          `stream_kernel`        in reverse: the gradients of both memories leaving each chunk
          `slot_grads_kernel`    ds and dg (for any decay after `memory_grads_kernel`, the part of the memories)
          `pass_grads_kernel`    dk and dq, then dv

Both memories are stored with the slots as rows, hk transposed to [M, K]. To the backward both passes then have one
form: a read x over the slots (dscores or p) sees the key s of the same and of earlier tokens through the score matrix
q k^T or do v^T, and reads a memory that includes its own token. All M slots are in registers: the softmax needs them.

Each chunk takes one of two paths (`mild_triton`, `dyadic_triton`); both kernels are launched here, and each skips the
chunks of the other. With upto_i the sum of g over the chunk's rows up to i, and mid that over its first half:
- `mild_*` (16-bit inputs, the chunk's whole decay fits float32): e^{upto_i - upto_j} is the product of a factor of the
  read, e^{upto_i - mid}, and one of the key, e^{mid - upto_j}: x*_i and s*_j. The remaining factors, e^{mid} where
  memories are read and e^{total - mid} where they are written, are part of the scales of mild kernels (`store_state`);
- any other: a read's own decay e^{g_i} is split off, so that the rest lies strictly between j and i as in RWKV6,
  products by dyadic level whose factors are all in [0, 1] (`pair_scores`); a token reads itself without any decay.
Rows past a sequence's end are loaded as zeros, g too; no factor exceeds e^55, so that a zero stays a zero. Chunks have
64 tokens where inputs are bfloat16, with 33 to 64 slots and as many queries as heads, else 32.

Mild operands that contain decays are split into two bfloat16 numbers (`blocks_triton.split`). A memory is stored in
float16 with a power of two for each row; products with it scale the rows of the other operand to float16 too: one
product instead of two or three, and the memory goes to the tensor core unchanged. The rounding error, 2^-12, is that of
the memory itself. But a score is an exponent: there an error of 2^-12 changes p by that times the score. bfloat16
inputs have larger errors themselves; for float16 inputs the stream also stores hk's rounding errors, for the scores
alone (`remainders`).

On the mild path the decay's gradient is a difference of two prefix sums. Reads and their counterparts at the keys come
from the same split operands, with all four products of their parts, and are summed in three parts, which hold all of
float32: the same products are added and subtracted, and only float32 accumulation can differ. The forward (scores) and
softmax_grads (dp) compute the results of the reads, and pass them on in float32.

Where tiles are reloaded instead of saved in registers, a `tl.debug_barrier` precedes: otherwise Triton merges two equal
loads, and hoists those in a loop.
"""

import math
from functools import lru_cache

import torch

from ..common.launch import CHUNK_SIZE, TABLE, Launch, cdiv
from ..common.plan_triton import ChunkPlan, block_of
from .dyadic_triton import (
    memory_grads_kernel,
    output_kernel,
    pass_grads_kernel,
    slot_grads_kernel,
    softmax_grads_kernel,
)
from .mild_triton import mild_output_kernel, mild_pass_grads_kernel, mild_slot_grads_kernel, mild_softmax_grads_kernel


def _op(M: int) -> str:
    """Return the prefix of the launch table's rows for M slots."""
    return "gsa" if M <= 64 else "gsa128"


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the slots, and which knows the queries a group."""

    def __init__(self, q, v, s, packing, chunk_size):
        super().__init__(_op(s.shape[-1]), s, v.shape[-1], packing, _tokens(q, s, chunk_size))
        self.M, self.G = s.shape[-1], q.shape[2] // self.H
        self.scale_block = TABLE[f"{self.op}.stream", self.width].BV

    def launch(
        self, kernel: str, mild_kernel, dyadic_kernel, heads: int, blocks: dict[str, int], *args, apart=False, **more
    ) -> None:
        """Launch the kernels of both paths (one may be None), with a program for each chunk and each of `heads`.

        args: the kernels' arguments before `where`; blocks: sizes of the axes they loop over in blocks, as {"K": K};
        apart: whether each of these blocks has its own program; more: further keyword arguments.
        """
        for path in ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",):
            kernel_of_path = mild_kernel if path == "mild" else dyadic_kernel
            if kernel_of_path is None:
                continue
            row = TABLE[f"{self.op}.{kernel}.{path}", self.width]
            options, block_count = _options(
                row, self.H, self.G, self.M, self.C, self.scale_block, self.flags, self.packing is not None,
                tuple(blocks.items()),
            )  # fmt: skip
            programs, where, own = self.chunks * heads, self.where, {}
            if path == "dyadic":
                programs = cdiv(self.chunks * self.H, self.at_once) * (heads // self.H)
                where = (*self.where, self.chunks)
                own = dict(LEVELS=self.C.bit_length() - 1, SCALED=self.scaled, AT_ONCE=self.at_once)
            if apart:
                programs *= block_count
            flat = self.flattened(args, mild=path == "mild")
            kernel_of_path[(programs,)](*flat, *where, **options, **own, **more)


@lru_cache(1024)
def _options(
    row: Launch, H: int, G: int, M: int, C: int, BS: int, flags: int, packed: bool, blocks: tuple[tuple[str, int], ...]
) -> tuple[dict, int]:
    """Return the launch options of a kernel of either path, and the number of blocks."""
    options = dict(
        H=H, G=G, M=M, C=C, BM=block_of(C, M, 128), BS=BS, FLAGS=flags, PACKED=packed,
        num_warps=row.num_warps, num_stages=row.num_stages, maxnreg=row.maxnreg,
    )  # fmt: skip
    for name, size in blocks:
        options |= {name: size, f"B{name}": block_of(C, size, row.BV)}
    return options, math.prod(cdiv(size, options[f"B{name}"]) for name, size in blocks)


def _slot_rows(states) -> tuple:
    """Return (hk [N, H, K, M], hv [N, H, M, V]) with hk transposed to [N, H, M, K]; a function of the states, for
    `ChunkPlan.states`, becomes one with this layout."""
    if callable(states):

        def transposed(factor, written):
            wait = states(factor, [written[0].mT, written[1]])
            return lambda: _slot_rows(wait())

        return transposed, None
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


def _tokens(q, s, chunk_size: int) -> int:
    """Return the tokens a chunk, 0 for the default: 32 where queries share a memory. In chunks of 64, dv of such a
    group was wrong for strong gates on an H200, where nested loops computed a score matrix (data/tuning.md)."""
    return min(chunk_size or CHUNK_SIZE, CHUNK_SIZE) if q.shape[2] > s.shape[2] else chunk_size


ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function (`ahead_triton.Kernels`)."""


def saved_shapes(q, k, v, s, g, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: q's reads followed by the mild flags, in one tensor; hk
    and hv entering every chunk, slots as rows."""
    plan = _Plan(q, v, s, packing, chunk_size)
    reads, flags = q.shape[:3].numel() * plan.M, plan.chunks * plan.H * plan.flags
    return (reads + flags,), *(plan.stored_shape(x.shape[-1]) for x in (k, v))


def forward(q, k, v, s, g, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, (hk_T, hv_T) (None unless requested), and the tensors of `saved_shapes` (first empty unless `keep`)."""
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
    o, logits = q.new_empty(*q.shape[:3], V), plan.empty(q.shape[:3].numel() * plan.M + mild.numel() if keep else 0)
    plan.launch(
        "output", mild_output_kernel, output_kernel, q.shape[2], dict(K=K, V=V),
        q, k, v, s, g, plan.unpacked(hk, K), remainders, plan.unpacked(hv, V), mild, o, logits, scale, KEEP=keep,
    )  # fmt: skip
    if keep:
        if packing is not None:
            packing.saved_rows.append(logits[: -mild.numel()].view(*q.shape[:3], plan.M))
        logits[-mild.numel() :].copy_(mild.view(torch.float32).flatten())
    return o, (last_hk.mT, last_hv) if output_final_state else None, (logits, hk, hv)


def backward(q, k, v, s, g, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dq, dk, dv, ds, dg in their inputs' dtypes and (dhk_0, dhv_0) in float32."""
    plan = _Plan(q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    plan.request_layout(K, V)
    logits, mild = saved[0].split_with_sizes(
        [saved[0].numel() - plan.chunks * plan.H * plan.flags, plan.chunks * plan.H * plan.flags]
    )
    mild = mild.view(torch.int32)
    hk, hv = plan.unpacked(saved[1], K), plan.unpacked(saved[2], V)
    slots = *q.shape[:3], plan.M
    p = logits.new_empty(slots, dtype=torch.float16 if plan.scaled else torch.float32)
    dscores, reads = plan.empty(slots), plan.empty(slots if plan.scaled else 0)
    plan.launch(
        "softmax_grads", mild_softmax_grads_kernel, softmax_grads_kernel, q.shape[2], dict(V=V),
        v, s, g, do, hv, logits, mild, p, dscores, reads, scale,
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
    del reads, of_memories, memories  # the next gradients reuse their memory
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
