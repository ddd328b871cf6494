"""GSA's kernels that work inside chunks, whatever the decays; `chunk_triton` explains them and their precision."""

import triton
import triton.language as tl

from ..common.bands_triton import turned
from ..common.blocks_triton import (
    add_products,
    add_sums,
    diagonal,
    end_after_last,
    input_terms,
    kernel,
    let_next_begin,
    program,
    split,
    sums,
)
from ..common.pairs_triton import BLOCK_LEVELS, masked, within
from ..common.positions_triton import locate_chunk
from ..common.tiles_triton import load_tile, mildest, prefetch_state, prefetch_tile, store_in_units, store_tile
from .slots_triton import (
    TO_BOUNDARY,
    TO_END,
    TO_START,
    add_input_product,
    add_written,
    chosen,
    decays,
    factor,
    in_terms,
    is_empty,
    load_exponents,
    load_reads,
    read_memory,
    softmax,
    softmax_grads,
    weighed_memory,
)


@triton.jit
def _blocks(flag, ones, LEVELS: tl.constexpr, MILD: tl.constexpr):
    """Return base, the binary logarithm of the rows of a chunk's blocks, and a pointer to the matrices of these blocks.

    flag: the chunk's (`halves_and_mild`): 2 if MILD, 1 with mild blocks, else 0. ones: `chunk_triton.sums_of_rows`.
    """
    if MILD:
        base = LEVELS
    else:
        base = tl.where(flag == 1, BLOCK_LEVELS, 0)
    return base, ones + flag * ((TO_BOUNDARY + LEVELS) << (2 * LEVELS))


@triton.jit
def _upto(ones, b_g, C: tl.constexpr, MILD: tl.constexpr, product=None):
    """Return the log decay from the middle of its block up to each row, [C, BM]; MILD: of the chunk, without waiting
    for `ones`. b_g [C, BM]: log decays; product [C, C]: any (`chosen`), or None."""
    if MILD:
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        upto = sums(chosen(i >= j, product) - (j < C // 2).to(tl.float32), b_g)
    else:
        upto = decays(ones, 0, b_g, C)
    return upto


@triton.jit
def _decayed(x, upto, SIGN: tl.constexpr, SCALED: tl.constexpr):
    """Return x times the `factor` of upto or, with SIGN -1, of -upto, in float32."""
    return x.to(tl.float32) * factor(SIGN * upto, SCALED)


@triton.jit
def _as_split(x, SPLIT: tl.constexpr):
    """Return float32 x; SPLIT: rounded to the sum of the two bfloat16 parts of a split operand."""
    if SPLIT:
        high, low = split(x)
        x = high.to(tl.float32) + low.to(tl.float32)
    return x


@triton.jit
def _below(base, C: tl.constexpr, OWN: tl.constexpr):
    """Return the mask [C, C] of the pairs i > j of one block of 2^base rows, with OWN of i = j too."""
    o_c = tl.arange(0, C)
    return within(o_c >> base << base, o_c + OWN, C)


@triton.jit
def _between(level, C: tl.constexpr):
    """Return the mask [C, C] of rows of the right and columns of the left half of one block of 2^(level + 1) rows."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i > j) & ((i ^ j) >> level == 1)


@triton.jit
def _reads(x, y, states, scales, b_s, b_g, base, ones, start, end, i_hx, i_h, i_s, HX: tl.constexpr,
           H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
           BS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
           remainders=None):  # fmt: skip
    """Return x's read of each slot, of this chunk's s through x y^T and of S, without the factor e^{upto}, [C, BM], and
    upto (`_upto`), which no register holds before.

    base, ones: from `_blocks`; S: memory i_s of states; remainders: its rounding errors, or None.
    """
    b_A = tl.zeros([C, C], dtype=tl.float32)
    reads = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_A = add_input_product(b_A, b_x, b_y)
        reads += read_memory(b_x, states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED, remainders)
    upto = _upto(ones, b_g, C, MILD, b_A)
    b_s = _decayed(b_s, upto, -1, SCALED)
    if (not SCALED) or base < LEVELS:
        reads *= factor(decays(ones, TO_START, b_g, C), SCALED)
    for n in range(base, LEVELS):
        weight = factor(decays(ones, TO_BOUNDARY + n, b_g, C), SCALED)
        A, s = in_terms(masked(_between(n, C), b_A), SCALED), in_terms(b_s * weight, SCALED)
        reads += add_products(tl.zeros([C, BM], dtype=tl.float32), A, s) * weight
    A = in_terms(masked(_below(base, C, MILD), b_A), SCALED)
    reads = add_products(reads, A, in_terms(b_s, SCALED), SCALED)
    if not MILD:
        reads += diagonal(b_A, C) * b_s
    return reads, upto


@triton.jit
def _scores(b_x, b_s, b_g, base, ones, C: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr):
    """Return the scores [C, C] of reads b_x and keys b_s, both [C, BM] times `_decayed`'s factors, in terms."""
    x, s = in_terms(b_x, SCALED), in_terms(b_s, SCALED)
    b_E = masked(_below(base, C, True), add_products(tl.zeros([C, C], dtype=tl.float32), x, turned(s)))
    for n in range(base, LEVELS):
        right = (tl.arange(0, C) >> n) & 1 == 1
        b_x_or_s = tl.where(right[:, None], b_x, b_s) * factor(decays(ones, TO_BOUNDARY + n, b_g, C), SCALED)
        x_or_s = in_terms(b_x_or_s, SCALED)
        scores = add_products(tl.zeros([C, C], dtype=tl.float32), x_or_s, turned(x_or_s))
        b_E += masked(_between(n, C), scores)
    return in_terms(b_E, SCALED)


@kernel
def output_kernel(
    q, k, v, s, g, hk, hk_scales, remainders, hv, hv_scales, mild, o, logits, scale,
    ones, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute p = softmax(scale logits) and o = B v + (p e^{to start}) hv of a chunk and query head, B the scores of p
    with s, logits q's reads of hk (KEEP: stored without e^{upto}), e^{to start} the decay since the chunk's start.

    In registers: A = q k^T, then B [C, C]; q's reads, then p [C, BM]; o [C, BV].

    q [B, T, H G, K], k [B, T, H, K], v [B, T, H, V], s, g [B, T, H, M], o [B, T, H G, V], logits [B, T, H G, M]
    hk, remainders [chunks, H, M, K], hv [chunks, H, M, V], *_scales [chunks, H, NS, M], NS = ceil(K or V / BS);
    hk and hv are float16, for float32 inputs float32 without scales (None)
    mild [chunks, H, FLAGS] int32, sequence_of_chunk [chunks], cu_seqlens, chunks_before [N + 1]; ones: `sums_of_rows`
    """
    if not MILD:
        end_after_last(OVERLAPS)
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    flag = mildest(mild, i_c * H + i_h, FLAGS)
    if (flag == 2) != MILD:
        return
    if MILD:
        let_next_begin(OVERLAPS)
    base, ones = _blocks(flag, ones, LEVELS, MILD)
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, MILD, SCALED)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    prefetch_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    prefetch_tile(v, start, end, i_h, 0, H, V, C, V)
    b_p, upto = _reads(
        q, k, hk, hk_scales, b_s, b_g, base, ones, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, BS,
        LEVELS, MILD, SCALED, remainders,
    )  # fmt: skip
    if KEEP:
        store_tile(logits, b_p, start, end, i_hq, 0, H * G, M, C, BM)
    b_p = _decayed(softmax(_decayed(b_p, upto, 1, SCALED) * scale, M, BM), upto, 1, SCALED)
    B = _scores(b_p, _decayed(b_s, upto, -1, SCALED), b_g, base, ones, C, LEVELS, SCALED)
    if (not SCALED) or base < LEVELS:
        b_p *= factor(decays(ones, TO_START, b_g, C), SCALED)
    for i_v in range(0, (V + BV - 1) // BV):
        b_o = weighed_memory(b_p, hv, hv_scales, i_s, start < end, i_v, M, V, BM, BV, BS, SCALED)
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV)
        b_o = add_products(b_o, B, input_terms(b_v))
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@kernel
def softmax_grads_kernel(
    v, s, g, do, hv, hv_scales, logits, mild, p, dscores, units, reads, scale,
    ones, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute p, scale dscores = scale p (dp - <p, dp>), where dp is do's read, and reads for one chunk and query head.

    reads: the part of a read in the gradient of the decays up to it, of both passes, p dp + scale dscores logits, from
    the operands x* of `slot_grads_kernel`. In registers: do v^T [C, C]; dp, p and logits [C, BM].
    SCALED: dscores are float16 in `units` (`store_in_units`), and reads contain them as stored.

    v [B, T, H, V], s, g [B, T, H, M], do [B, T, H G, V], logits, p, dscores, reads [B, T, H G, M]
    units [B, T, H G], for float32 inputs None; hv [chunks, H, M, V], hv_scales [chunks, H, NS, M]
    mild, sequence_of_chunk, … as of `output_kernel`
    """
    if not MILD:
        end_after_last(OVERLAPS)
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    flag = mildest(mild, i_c * H + i_h, FLAGS)
    if (flag == 2) != MILD:
        return
    if MILD:
        let_next_begin(OVERLAPS)
    base, ones = _blocks(flag, ones, LEVELS, MILD)
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, MILD, SCALED)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    prefetch_tile(logits, start, end, i_hq, 0, H * G, M, C, M)
    b_dp, upto = _reads(
        do, v, hv, hv_scales, b_s, b_g, base, ones, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, BS,
        LEVELS, MILD, SCALED,
    )  # fmt: skip
    b_logits = load_tile(logits, start, end, i_hq, 0, 0, H * G, M, C, BM)
    b_p = softmax(_decayed(b_logits, upto, 1, SCALED) * scale, M, BM)
    stored = b_p.to(p.dtype.element_ty)
    store_tile(p, stored, start, end, i_hq, 0, H * G, M, C, BM)
    b_x = softmax_grads(b_p, _decayed(b_dp, upto, 1, SCALED), SCALED) * scale
    if SCALED:
        b_x = store_in_units(dscores, units, b_x, start, end, i_hq, H * G, M, C, BM)
    else:
        store_tile(dscores, b_x, start, end, i_hq, 0, H * G, M, C, BM)
    b_reads = _as_split(_decayed(stored, upto, 1, SCALED), MILD and SCALED) * b_dp
    b_reads += _as_split(_decayed(b_x, upto, 1, SCALED), MILD and SCALED) * b_logits
    store_tile(reads, b_reads, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def _add_key_reads(b_z, x, units, y, z, b_g, upto, base, ones, start, end, i_hq, i_h, HQ: tl.constexpr, H: tl.constexpr,
                   M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
                   LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Return b_z + the reads of each key in one pass, sum_i (z_i^T y_j) x_i without the factor e^{-upto_j}, [C, BM].
    units: of x (`load_reads`), or None."""
    b_dA = tl.zeros([C, C], dtype=tl.float32)
    b_x = load_reads(x, units, start, end, i_hq, HQ, M, C, BM)
    for i_d in range(0, (D + BD - 1) // BD):
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_z1 = load_tile(z, start, end, i_hq, i_d, 0, HQ, D, C, BD)
        b_dA = add_input_product(b_dA, b_y, b_z1)
    b_x = _decayed(b_x, upto, 1, SCALED)
    for n in range(base, LEVELS):
        weight = factor(decays(ones, TO_BOUNDARY + n, b_g, C), SCALED)
        dA = in_terms(masked(tl.trans(_between(n, C)), b_dA), SCALED)
        b_z += add_products(tl.zeros([C, BM], dtype=tl.float32), dA, in_terms(b_x * weight, SCALED)) * weight
    if not MILD:
        b_z += diagonal(b_dA, C) * b_x
    dA = in_terms(masked(tl.trans(_below(base, C, MILD)), b_dA), SCALED)
    return add_products(b_z, dA, in_terms(b_x, SCALED), SCALED)


@kernel
def slot_grads_kernel(
    q, k, v, s, g, do, hk, hk_scales, hv, hv_scales, dhk, dhk_scales,
    dhv, dhv_scales, p, dscores, units, reads, mild, ds, dg, ones,
    sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute ds and dg for one chunk of mild blocks and head. In registers: y z^T [C, C], then Z, dg and Y [C, BM].

    Over both passes, x and z of each query of a group, S and D_S as in `pass_grads_kernel`:
        Z = sum of the reads of each key,   Y = sum (y D_S^T) e^{to end},   ds = (Y + Z) e^{-upto}
        dg_t = e^{total} sum S D_S + sum_{i>=t} reads_i - sum_{j>=t} s*_j Z_j + sum_{j<t} s*_j Y_j
    upto, s*, to end: of `chunk_triton`; reads: of `softmax_grads_kernel`.

    q [B, T, H G, K], k [B, T, H, K], v [B, T, H, V], do [B, T, H G, V], s, g, ds, dg [B, T, H, M]
    p, dscores, reads [B, T, H G, M], units [B, T, H G] or None (`load_reads`)
    hk, dhk [chunks, H, M, K], hv, dhv [chunks, H, M, V]
    *_scales [chunks, H, NS, M]; mild, sequence_of_chunk, … as of `output_kernel`
    """
    if not MILD:
        end_after_last(OVERLAPS)
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    flag = mildest(mild, i_c * H + i_h, FLAGS)
    if flag != 1 + MILD:
        return
    if MILD:
        let_next_begin(OVERLAPS)
    base, ones = _blocks(flag, ones, LEVELS, MILD)
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    o_c = tl.arange(0, C)
    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, True, SCALED)
    if MILD:  # other chunks take longer for their arithmetic, and gain nothing
        for i_g in range(G):
            i_hq = i_h * G + i_g
            prefetch_tile(dscores, start, end, i_hq, 0, H * G, M, C, M)
            prefetch_tile(do, start, end, i_hq, 0, H * G, V, C, V)
            prefetch_tile(p, start, end, i_hq, 0, H * G, M, C, M)
            prefetch_tile(reads, start, end, i_hq, 0, H * G, M, C, M)
        prefetch_tile(v, start, end, i_h, 0, H, V, C, V)
    upto = _upto(ones, b_g, C, MILD)
    b_z = tl.zeros([C, BM], dtype=tl.float32)
    for i_g in range(G):
        i_hq = i_h * G + i_g
        b_z = _add_key_reads(
            b_z, dscores, units, k, q, b_g, upto, base, ones, start, end, i_hq, i_h, H * G, H, M, K, C, BM, BK, LEVELS,
            MILD, SCALED,
        )  # fmt: skip
        b_z = _add_key_reads(
            b_z, p, None, v, do, b_g, upto, base, ones, start, end, i_hq, i_h, H * G, H, M, V, C, BM, BV, LEVELS,
            MILD, SCALED,
        )  # fmt: skip
    if MILD:
        prefetch_tile(s, start, end, i_h, 0, H, M, C, M)
        prefetch_state(dhk, i_s, start < end, 0, 0, M, K, BM, K)
        prefetch_state(hk, i_s, start < end, 0, 0, M, K, BM, K)
        prefetch_state(dhv, i_s, start < end, 0, 0, M, V, BM, V)
        prefetch_state(hv, i_s, start < end, 0, 0, M, V, BM, V)
    b_y, b_SD = tl.zeros([C, BM], dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
    b_y, b_SD = add_written(
        b_y, b_SD, k, hk, hk_scales, dhk, dhk_scales, start, end, i_h, i_s, H, M, K, C, BM, BK, BS, SCALED
    )  # fmt: skip
    b_y, b_SD = add_written(
        b_y, b_SD, v, hv, hv_scales, dhv, dhv_scales, start, end, i_h, i_s, H, M, V, C, BM, BV, BS, SCALED
    )  # fmt: skip
    tl.debug_barrier()
    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, True, SCALED)
    key = factor(-_upto(ones, b_g, C, MILD), SCALED)
    if (not SCALED) or base < LEVELS:
        b_y *= factor(decays(ones, TO_END, b_g, C), SCALED)
        b_SD *= factor(tl.sum(b_g.to(tl.float32), 0), SCALED)
    store_tile(ds, (b_y + b_z) * key, start, end, i_h, 0, H, M, C, BM)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32) * key
    b_s = _as_split(b_s, MILD and SCALED)
    passing = tl.zeros([C, BM], dtype=tl.float32) - b_s * b_z  # -b_s * b_z would spill more where chunks are not mild
    for i_g in range(G):
        passing += load_tile(reads, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM)
    b_dg = add_sums(tl.zeros([C, BM], dtype=tl.float32), o_c[:, None] <= o_c[None, :], passing, True)
    b_dg += b_SD[None, :]
    b_dg = add_sums(b_dg, o_c[:, None] > o_c[None, :], b_s * b_y, not SCALED)
    empty = is_empty(hk, hk_scales, i_s, start < end, M, K, BM, BK, BS, SCALED)
    empty &= is_empty(hv, hv_scales, i_s, start < end, M, V, BM, BV, BS, SCALED)
    b_dg = tl.where((o_c == 0)[:, None] & empty[None, :], 0.0, b_dg)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


@kernel
def pass_grads_kernel(
    x, units, y, z, s, g, states, scales, dstates, dscales, mild, dy, dz,
    ones, sequence_of_chunk, cu_seqlens, chunks_before, T,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, FIRST: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute a pass's gradients for one chunk and head: x = p, y = v, z = do; FIRST: x = scale dscores, y = k, z = q.

    With E the scores of x with s, S the memory entering and D_S the gradient of the one leaving the chunk:
        dy = E^T z + (s* e^{to end}) D_S,   dz = E y + (x* e^{to start}) S (FIRST: dq; do has no gradient)
    In registers: E [C, C]; x* = x e^{upto} and s* = s e^{-upto} [C, BM]; dy or dz [C, BD].
    Each query of a group has its own E, computed for one block of D: a program loops over all blocks only if G is 1.

    x [B, T, H G, M], units [B, T, H G] or None (`load_reads`), y, dy [B, T, H, D], z, dz [B, T, H G, D]
    s, g [B, T, H, M]
    states, dstates [chunks, H, M, D], scales, dscales [chunks, H, NS, M]
    mild, sequence_of_chunk, … as of `output_kernel`
    """
    if not MILD:
        end_after_last(OVERLAPS)
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    OWN_BLOCKS: tl.constexpr = BLOCKS if G == 1 else 1
    i_b, i = program(BLOCKS // OWN_BLOCKS)
    i_h, i_c = i % H, i // H
    flag = mildest(mild, i_c * H + i_h, FLAGS)
    if (flag == 2) != MILD:
        return
    if MILD:
        let_next_begin(OVERLAPS)
    base, ones = _blocks(flag, ones, LEVELS, MILD)
    start, end = locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C, PACKED)
    i_s = i_c * H + i_h
    b_g = load_exponents(g, start, end, i_h, H, M, C, BM, MILD, SCALED)
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM)
    if G == 1:
        b_x = load_reads(x, units, start, end, i_h, H, M, C, BM)
        prefetch_state(dstates, i_s, start < end, 0, 0, M, D, BM, D)
        prefetch_tile(z, start, end, i_h, 0, H, D, C, D)
        if FIRST:
            prefetch_state(states, i_s, start < end, 0, 0, M, D, BM, D)
            prefetch_tile(y, start, end, i_h, 0, H, D, C, D)
    upto = _upto(ones, b_g, C, MILD)
    b_s = _decayed(b_s, upto, -1, SCALED)
    if G == 1:
        b_x = _decayed(b_x, upto, 1, SCALED)
        E = _scores(b_x, b_s, b_g, base, ones, C, LEVELS, SCALED)
    left = b_s
    if (not SCALED) or base < LEVELS:
        left *= factor(decays(ones, TO_END, b_g, C), SCALED)
    for n in tl.range(0, OWN_BLOCKS, disable_licm=True):
        i_d = i_b + n
        b_dy = weighed_memory(left, dstates, dscales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
        for i_g in range(G):
            if G > 1:
                b_x = load_reads(x, units, start, end, i_h * G + i_g, H * G, M, C, BM)
                b_x = _decayed(b_x, upto, 1, SCALED)
                E = _scores(b_x, b_s, b_g, base, ones, C, LEVELS, SCALED)
            b_z = load_tile(z, start, end, i_h * G + i_g, i_d, 0, H * G, D, C, BD)
            b_dy = add_products(b_dy, turned(E), input_terms(b_z))
        store_tile(dy, b_dy, start, end, i_h, i_d, H, D, C, BD)
    if FIRST:
        tl.debug_barrier()
        for i_g in range(G):
            i_hq = i_h * G + i_g
            b_x = _decayed(load_reads(x, units, start, end, i_hq, H * G, M, C, BM), upto, 1, SCALED)
            if G > 1:
                E = _scores(b_x, b_s, b_g, base, ones, C, LEVELS, SCALED)
            if (not SCALED) or base < LEVELS:
                b_x *= factor(decays(ones, TO_START, b_g, C), SCALED)
            for n in tl.range(0, OWN_BLOCKS, disable_licm=True):
                i_d = i_b + n
                b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
                b_dz = weighed_memory(b_x, states, scales, i_s, start < end, i_d, M, D, BM, BD, BS, SCALED)
                b_dz = add_products(b_dz, E, input_terms(b_y))
                store_tile(dz, b_dz, start, end, i_hq, i_d, H * G, D, C, BD)
