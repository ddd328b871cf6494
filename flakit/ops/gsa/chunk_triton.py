"""GSA in chunks as Triton kernels: all work but a light stream of memories is parallel over chunks.

Forward:  `stream_kernel`        the memories hk and hv entering each chunk, and into which blocks to cut it
          `output_kernel`        scores, softmax and o from a chunk's tokens and its entering memories
Backward: `softmax_grads_kernel` p again, and dscores from p and its gradient from the second pass
          `stream_kernel`        in reverse: the gradients of both memories leaving each chunk
          `slot_grads_kernel`    ds and dg, in steep chunks `steep_slot_grads_kernel`
          `pass_grads_kernel`    dk and dq, then dv

Both memories are stored with the slots as rows, hk transposed to [M, K]. To the backward both passes then have one
form: a read x over the slots (dscores or p) sees the key s of the same and of earlier tokens through the score matrix
q k^T or do v^T, and reads a memory that includes its own token. All M slots are in registers: the softmax needs them.

**Blocks.** A chunk is one block if its whole decay fits float32 (*mild*). Any other is cut into blocks of `BLOCK` rows
or, where these are not mild either (*steep*), into single rows. With upto_i the sum of g from the middle of i's block
up to row i, negative before the middle, the decay of two rows of a block is the product of a factor of the read and one
of the key, e^{upto_i - upto_j}: x*_i = x_i e^{upto_i} and s*_j = s_j e^{-upto_j}. (Of a single row upto is 0: a token
reads itself without any decay.) Two rows of different blocks are in opposite halves at one dyadic level. There x* and
s* are multiplied by the decay from their blocks' middles to the boundary of the halves, which is at most 1 and the same
for all rows of a block; likewise to the chunk's start where x* reads a memory, and to its end where s* writes one. For
mild chunks of 16-bit inputs the memories' scales contain these two (`store_state`). All these exponents are sums of g
over rows: products with the matrices of `sums_of_rows`.

Rows past a sequence's end are loaded as zeros, g too; no factor exceeds e^55, so that a zero stays a zero. Chunks have
64 tokens where inputs are bfloat16 or float32, with 33 to 64 slots and as many queries as heads, else 32.

Operands of 16-bit inputs that contain decays are split into two bfloat16 numbers (`blocks_triton.split`). A memory is
stored in float16 with a power of two for each row; products with it scale the rows of the other operand to float16 too:
one product instead of two or three, and the memory goes to the tensor core unchanged. The rounding error, 2^-12, is
that of the memory itself. But a score is an exponent: there an error of 2^-12 changes p by that times the score.
bfloat16 inputs have larger errors themselves; for float16 inputs the stream also stores hk's rounding errors, for the
scores alone (`remainders`).

Operands of float32 inputs, memories too, are sums of three bfloat16 numbers, which hold all of float32: six products,
as long as three in TF32, whose right operands the tensor core reads from shared memory as they are. What is left is the
error of a factor e^x, x 2^-24. So the bounds of a mild chunk are narrower (`tiles_triton`), and logarithms are binary
(`slots_triton.load_exponents`).

In a chunk of mild blocks the decay's gradient is a difference of two sums over rows, of reads and of their counterparts
at the keys. In a mild chunk of 16-bit inputs both come from the same split operands, with all four products of their
parts, and are summed in three parts, which hold all of float32: the same products are added and subtracted, and only
float32 accumulation can differ. (dscores of 16-bit inputs go from launch to launch in float16 with a power of two for
each row; the sums of the reads contain them as stored.) In smaller blocks a token's read of itself, which has no decay,
is computed in float32 on both sides, and all other terms, which may differ by 2^-17, contain a decay as the gradient
does. The forward (scores) and softmax_grads (dp) compute the results of the reads, and pass them on in float32. In a
steep chunk the gradient may be far smaller than such a difference: there each term carries its own decay
(`steep_triton`).

A `tl.debug_barrier` precedes each tile reloaded to save registers, or Triton would merge equal loads, or hoist them.
"""

import math
from functools import cached_property, lru_cache, partial

import torch

from ..common import launch
from ..common.kernel_triton import Memory, Part
from ..common.launch import CHUNK_SIZE, TABLE, cdiv, chip_of
from ..common.plan_triton import ChunkPlan, block_of, whole_lines
from ..common.tiles_triton import BLOCK as _BLOCK
from .inside_triton import output_kernel, pass_grads_kernel, slot_grads_kernel, softmax_grads_kernel
from .steep_triton import steep_slot_grads_kernel

BLOCK = _BLOCK.value


def _op(M: int) -> str:
    """Return the prefix of the names of the launch table's rows for M slots."""
    return "gsa" if M <= 64 else "gsa128"


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the M slots. G: query heads that share a memory."""

    blocks = True

    def __init__(self, memory, q, v, s, packing, chunk_size):
        super().__init__(memory, _op(s.shape[-1]), s, v.shape[-1], packing, _tokens(q, s, chunk_size))
        self.M, self.G = s.shape[-1], q.shape[2] // self.H
        self.s = s

    @property
    def scale_block(self) -> int:
        """The columns of a memory that share a row's scale, a block of the stream."""
        limit = TABLE[f"{self.op}.stream", self.width].BV
        return block_of(self.C, limit, limit)

    @cached_property
    def inside(self) -> tuple:
        """The arguments of positions that kernels inside chunks share: `sums_of_rows`, then `where`."""
        return sums_of_rows(self.C, self.s.device), *self.where

    def saved_sizes(self, q) -> tuple[int, int]:
        """Return the elements of the first saved tensor: scores, rounded up to 16 bytes, and mild flags."""
        return cdiv(q.shape[:3].numel() * self.M, 4) * 4, self.chunks * self.H * self.flags

    def launch(
        self, name: str, kernel, heads: int, blocks: dict[str, int], *args, apart=False, steep=False, **more
    ) -> None:
        """Launch a kernel that works inside chunks, with a program for each chunk and each of `heads`: once for mild
        chunks (MILD), then for the others; each launch skips the chunks of the other, and where the chip can, the
        second begins while the last programs of the first run (`end_after_last`).

        name: of its row in the launch table; args: its arguments before those of positions; blocks: sizes of the axes
        it loops over in blocks, as {"K": K}; apart: whether each of these blocks has its own program; steep: whether
        the kernel is for steep chunks alone, of which a program checks `at_once`; more: further keyword arguments.
        """
        count = self.memory.once((name, *blocks.values()), lambda: self._sizes(name, blocks)[1]) if apart else 1
        at_once = self.at_once if steep else 1
        for mild, flat in zip((True, False), self.flattened(args), strict=True):
            if mild and steep:
                continue
            flat += [*self.inside, self.chunks] if steep else self.inside
            self.memory.launch(
                kernel, cdiv(self.chunks * heads, at_once) * count, flat,
                partial(self._constants, name, blocks, apart, mild, steep),
                **(dict(AT_ONCE=at_once) if steep else dict(MILD=mild)), **blocks, **more,
            )  # fmt: skip

    def _sizes(self, name: str, blocks: dict[str, int]) -> tuple[dict[str, int], int]:
        """Return the lengths of blocks along the axes in `blocks` as {"BK": …}, and how many blocks these are."""
        limit = min(TABLE[f"{self.op}.{name}", self.width].BV, self.scale_block)  # a row has one scale a block
        sizes = {f"B{x}": block_of(self.C, size, limit) for x, size in blocks.items()}
        return sizes, math.prod(cdiv(size, sizes[f"B{x}"]) for x, size in blocks.items())

    def _constants(self, name: str, blocks: dict[str, int], apart: bool, mild: bool, steep: bool) -> dict:
        """Return the keyword arguments of a launch; arguments as of `launch`."""
        (sizes, count), BS = self._sizes(name, blocks), self.scale_block
        row = TABLE[f"{self.op}.{name}", self.width]
        # Both were measured for 16-bit inputs alone, and two stages with up to 64 slots.
        chip = chip_of(self.s) if self.scaled else None
        overlaps = chip is not None and chip.capability >= launch.OVERLAPS
        roomy = chip is not None and chip.shared >= launch.TWO_STAGES and self.op == "gsa"
        two_stages = roomy and name in ("output", "pass_grads") and not apart and count > 1
        three = mild and name in ("output", "softmax_grads") and roomy and not two_stages
        three = three and self.C == launch.LONG_CHUNK_SIZE  # other chunks would spill
        early = {} if steep else dict(OVERLAPS=overlaps) | (dict(launch_pdl=True) if overlaps and not mild else {})
        return dict(
            H=self.H, G=self.G, M=self.M, C=self.C, BM=block_of(self.C, self.M, 128), BS=BS,
            FLAGS=self.flags, PACKED=self.packing is not None, LEVELS=self.C.bit_length() - 1, SCALED=self.scaled,
            num_warps=row.num_warps, num_stages=max(row.num_stages, 2) if two_stages else row.num_stages,
            maxnreg=row.maxnreg or (launch.REGISTERS_OF_THREE if three else None), **sizes, **early,
        )  # fmt: skip


def sums_of_rows(C: int, device: torch.device) -> torch.Tensor:
    """Return matrices of -1, 0 and 1 whose products with log decays g [C, M] are the exponents of the factors inside a
    chunk, [3, 3 + log2 C, C, C] in bfloat16.

    For blocks of 1 row, of `BLOCK` rows, and of C rows: from a block's middle up to each row; for all rows of a block
    alike, from its middle to the chunk's start, to its end, and to the boundary of its halves at each dyadic level.
    """
    # What a capture computes is the graph's own, and has no values before its first replay.
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _sums_of_rows(C, device) if captured else _remembered_sums_of_rows(C, device)


@lru_cache(1024)
def _remembered_sums_of_rows(C: int, device: torch.device) -> torch.Tensor:
    """Compute on the CPU: on a GPU a dozen operations would be loaded, for which a process' first call waits."""
    return _sums_of_rows(C, torch.device("cpu")).to(device)


def _sums_of_rows(C: int, device: torch.device) -> torch.Tensor:
    j = torch.arange(C, device=device)
    i = j[:, None]

    def between(begin, end):
        return ((j >= begin) & (j < end)).float()

    def matrices(rows):
        middle = i // rows * rows + (rows + 1) // 2
        yield from (between(middle, i + 1) - between(i + 1, middle), between(0, middle), between(middle, C))
        for level in range(C.bit_length() - 1):
            boundary = (i >> (level + 1) << (level + 1)) + (1 << level)
            yield between(boundary, middle) + between(middle, boundary)

    return torch.stack([torch.stack(list(matrices(rows))) for rows in (1, BLOCK, C)]).bfloat16()


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
    """Return the tokens a chunk, 0 for the default: at most 32 where query heads share a memory. In chunks of 64, dv of
    these was wrong for strong gates on an H200, where nested loops computed a score matrix (data/tuning.md)."""
    return min(chunk_size or CHUNK_SIZE, CHUNK_SIZE) if q.shape[2] > s.shape[2] else chunk_size


ACCEPTS_FUNCTIONS = True
"""Whether a state may be a function that exchanges states with other ranks (`ahead_triton.Kernels`)."""


def saved_shapes(q, k, v, s, g, packing, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what `forward` saves for `backward`: in one tensor the scores before scaling and without
    e^{upto}, [B, T, HQ, M], and the mild flags (`_Plan.saved_sizes`); hk and hv entering every chunk, slots as rows."""
    plan = _Plan(Memory(), q, v, s, packing, chunk_size)
    return (sum(plan.saved_sizes(q)),), *(plan.stored_shape(x.shape[-1]) for x in (k, v))


def forward(memory, q, k, v, s, g, scale, initial_state, output_final_state, packing, chunk_size, keep):
    """Return o, the final (hk, hv) (None unless requested), and `saved_shapes`' tensors (no scores unless `keep`)."""
    plan = _Plan(memory, q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    (first_hk, first_hv), last_hk, last_hv = _slot_rows(initial_state), None, None
    if output_final_state:
        last_hk, last_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    remainders = None
    if s.dtype == torch.float16:
        remainders = plan.empty(plan.chunks, plan.H, plan.M, K, dtype=torch.float16)
    reads, flags = plan.saved_sizes(q)
    kept = plan.empty(reads + flags if keep else flags)
    if keep and (used := q.shape[:3].numel() * plan.M) < reads:
        kept[used:reads] = 0
    mild = Part(kept, reads if keep else 0, flags, torch.int32)
    (hk, hv), _ = plan.states(
        s, k, g, 1.0, first_hk, last_hk, reverse=False, beside=(s, v, first_hv, last_hv), remainders=remainders,
        mild=mild,
    )  # fmt: skip
    o = q.new_empty(*q.shape[:3], V)
    plan.launch(
        "output", output_kernel, q.shape[2], dict(K=K, V=V),
        q, k, v, s, g, hk, remainders, hv, mild, o, kept, scale, KEEP=keep,
    )  # fmt: skip
    if keep and packing is not None and packing.returned:
        packing.saved_rows.append(kept[:used].view(*q.shape[:3], plan.M))
    return o, (last_hk.mT, last_hv) if output_final_state else None, (kept, hk.whole, hv.whole)


def backward(memory, q, k, v, s, g, scale, initial_state, packing, chunk_size, saved, do, dfinal_state):
    """Return dq, dk, dv, ds, dg in their inputs' dtypes, and those of the initial (hk, hv) in float32 if there are."""
    plan = _Plan(memory, q, v, s, packing, chunk_size)
    K, V = q.shape[-1], v.shape[-1]
    plan.request_layout(K, V)
    logits, hk, hv = saved
    mild = Part(logits, *plan.saved_sizes(q), torch.int32)
    hk, hv = plan.unpacked(hk, K), plan.unpacked(hv, V)
    rows, dtype = q.shape[:3].numel(), torch.float16 if plan.scaled else torch.float32
    size = cdiv(rows * plan.M * dtype.itemsize, 4)
    p, reads = Part(plan.empty(size), 0, size, dtype), plan.empty(rows * plan.M)
    lines, more = whole_lines(size), rows if plan.scaled else 0
    whole = plan.empty(lines + more)
    dscores, units = Part(whole, 0, size, dtype), Part(whole, lines, more, torch.float32) if plan.scaled else None
    plan.launch(
        "softmax_grads", softmax_grads_kernel, q.shape[2], dict(V=V),
        v, s, g, do, hv, logits, mild, p, dscores, units, reads, scale,
    )  # fmt: skip
    last_hk, last_hv = _slot_rows(dfinal_state)
    first_hk, first_hv = None, None
    if initial_state is not None:
        first_hk, first_hv = (plan.empty(plan.N, plan.H, plan.M, D) for D in (K, V))
    (dhk, dhv), _ = plan.states(
        dscores, q, g, 1.0, last_hk, first_hk, reverse=True, inclusive=True, beside=(p, do, last_hv, first_hv),
        units=units,
    )  # fmt: skip
    ds, dg = torch.empty_like(s), torch.empty_like(g)
    blocks, args = dict(K=K, V=V), (q, k, v, s, g, do, hk, hv, dhk, dhv, p, dscores, units, reads, mild, ds, dg)
    plan.launch("slot_grads", slot_grads_kernel, plan.H, blocks, *args)
    plan.launch("steep_slot_grads", steep_slot_grads_kernel, plan.H, blocks, *args, steep=True)
    del reads, args  # the next gradients reuse its memory
    dv = torch.empty_like(v)
    plan.launch(
        "pass_grads", pass_grads_kernel, plan.H, dict(D=V),
        p, None, v, do, s, g, hv, dhv, mild, dv, None, FIRST=False, apart=plan.G > 1,
    )  # fmt: skip
    del p, dhv
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    plan.launch(
        "pass_grads", pass_grads_kernel, plan.H, dict(D=K),
        dscores, units, k, q, s, g, hk, dhk, mild, dk, dq, FIRST=True, apart=plan.G > 1,
    )  # fmt: skip
    return dq, dk, dv, ds, dg, None if first_hk is None else (first_hk.mT, first_hv)
