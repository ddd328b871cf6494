"""RWKV7 in chunks of 64 tokens: each becomes one transition of the state, so that only a light walk over them waits.

What bfloat16 heads of 33 to 64 channels take on GPUs of compute capability 9 where there are few of them or they are
packed; `chunk_triton`, which is called, decides.

With q the reads r of the state, U = (I - A_ab)^{-1}, a~ = a e^{before}, q~ = scale r e^{upto}, b^ = b e^{after} and
k^ = k e^{after} (README.md of `ops`), what a chunk does to the state that enters it is

    S_out = G S + W                o = own + Q S            T = U a~    f = U A_ak v
    G = diag(e^{total}) + b^^T T   W = k^^T v + b^^T f
    Q = q~ + A_rb T                own = A_rk v + A_rb f

Forward:  `transition_kernel`    U, G, W, Q, own of every chunk
          `walk_kernel`          S <- G S + W, chunk after chunk; where heads are few, of all segments at once
          `walk_segments_kernel` the same from segment to segment, before that
          `read_kernel`          o = own + Q S
Backward: `walk_kernel`          in reverse: D <- G^T D + Q^T do
          `found_kernel`         v2 = U (A_ak v + a~ S), y = U^T (A_rb^T do + b^ D) and dv
          `read_grads_kernel`    dr, da and what the reads leave of dw
          `write_grads_kernel`   dk, db, dw

There are two ways through a chunk, mild and any other (`common.chunks_triton`), compiled apart: `transition_kernel` and
`found_kernel` find out which chunks are mild. The walk does not ask.
- Mild: all decays are taken about the middle of the chunk. r* = scale r e^{upto - mid}, a* = a e^{before - mid},
  k* = k e^{mid - upto} and b* likewise serve for the scores and, with e^{mid} and e^{total - mid} on the states' rows,
  for the states.
- Any other: the states meet a~, q~, b^ and k^ themselves, and the scores are formed in blocks and levels whose factors
  no decay can break (`_fine_pair_scores`). There a read does not meet its own token's key: without a decay between
  them, the diagonal is added apart. Its kernels are launched in two halves each (`LongPlan.launch`).

Operands are split into two bfloat16 numbers (`blocks_triton.split`), which leaves 2^-17 of them. What a program holds
until the end is what it spills: so tiles are loaded again, behind a `tl.debug_barrier` where Triton would else take two
loads of the same for one, or move them in a loop before it.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import (
    above,
    add_given_by_split,
    add_product,
    add_split_by_given,
    add_sums,
    add_whole_product,
    below,
    diagonal,
    exp,
    level_pairs,
    program,
    split,
    sums,
)
from ..common.chunks_triton import (
    BLOCK_LEVELS,
    ChunkPlan,
    about_blocks,
    chunks_of,
    from_middle,
    half_decays,
    halves,
    halves_and_mild,
    kept_state,
    kept_states_shape,
    level_decays,
    load_decays,
    load_tile,
    locate,
    locate_segment,
    matrix_pointers,
    meet,
    only,
    same_block,
    scaled,
    state_pointers,
    store_state,
    store_tile,
    takes,
    within,
)
from ..common.dispatch import interpreted
from ..common.launch import LONG_CHUNK_SIZE, block

BLOCK_PRECISION = "ieee" if interpreted() else "tf32x3"
"""Of the products that invert the blocks of 16 tokens on the diagonal of A_ab, each of them by one warp."""


@triton.jit
def _decides(mild, i, w, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
             MILD: tl.constexpr):  # fmt: skip
    """Whether chunk-and-head i is this launch's, where it is the first: the mild one looks and leaves a flag."""
    if MILD:
        _, _, found = halves_and_mild(load_decays(w, start, end, i_h, 0, H, K, C, BK), C)
        tl.store(mild + i, found)
    else:
        found = takes(mild, i, 1, MILD)
    return found


@triton.jit
def _load_w(w, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            MILD: tl.constexpr):  # fmt: skip
    if MILD:
        b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    else:
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
    return b_w


@triton.jit
def _upto(b_w, C: tl.constexpr, MILD: tl.constexpr):
    """Log decay up to and with each row, [C, BK]: what r reads with. MILD: counted from the middle."""
    if MILD:
        upto = from_middle(b_w, C)
    else:
        o_c = tl.arange(0, C)
        upto = sums(o_c[:, None] >= o_c[None, :], b_w)
    return upto


@triton.jit
def _before(b_w, C: tl.constexpr, MILD: tl.constexpr):
    """Log decay before each row, [C, BK]: what a reads with. MILD: counted from the middle."""
    if MILD:
        before = from_middle(b_w, C) - b_w.to(tl.float32)
    else:
        o_c = tl.arange(0, C)
        before = sums(o_c[:, None] > o_c[None, :], b_w)
    return before


@triton.jit
def _after(b_w, C: tl.constexpr, MILD: tl.constexpr):
    """Log decay after each row, [C, BK]: what k and b write with. MILD: up to the middle."""
    if MILD:
        after = -from_middle(b_w, C)
    else:
        o_c = tl.arange(0, C)
        after = sums(o_c[:, None] < o_c[None, :], b_w)
    return after


@triton.jit
def _of_states(b_w, C: tl.constexpr, MILD: tl.constexpr):
    """Log decay, [BK] each, of rows of the state that enters, of rows of the one that leaves, and of both: what reads
    and writes themselves do not hold, and the chunk's total."""
    mid, rest = half_decays(b_w, C)
    total = mid + rest
    if not MILD:
        mid, rest = tl.zeros_like(mid), tl.zeros_like(rest)
    return mid, rest, total


@triton.jit
def _rows_by(p, start, end, i_h, factor, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """A head's rows times a factor, split."""
    return split(load_tile(p, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * factor)


@triton.jit
def _as_split(x):
    """x as `split` leaves it, 16 bits of its mantissa, in float32."""
    high, low = split(x)
    return high.to(tl.float32) + low.to(tl.float32)


@triton.jit
def _whole_state(states, scales, i, there, factor, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr):  # fmt: skip
    """State number i in float32, its rows times a factor (a number or [BK]); 0 if nothing is `there`."""
    b_S, unit = kept_state(states, scales, i, there, 0, 0, K, V, BK, BV, True)
    return b_S.to(tl.float32) * (unit * factor)[:, None]


@triton.jit
def _fine_pair_scores(b_q, b_k, b_w, C: tl.constexpr, LEVELS: tl.constexpr, TURNED: tl.constexpr):
    """As `pair_scores`, in split operands: what U is made of has to be finer than float16."""
    b_A = tl.zeros([C, C], dtype=tl.float32)
    read, key, mild = about_blocks(b_w, C)
    if mild:
        q_high, q_low = split(b_q * exp(read))
        k_high, k_low = split(b_k * exp(key))
        if TURNED:
            b_a = add_product(b_A, k_high, k_low, tl.trans(q_high), tl.trans(q_low))
        else:
            b_a = add_product(b_A, q_high, q_low, tl.trans(k_high), tl.trans(k_low))
        b_A = tl.where(same_block(C), b_a, 0.0)
    for level in range(mild.to(tl.int32) * BLOCK_LEVELS, LEVELS):
        _, right, _, _ = halves(level, C)
        high, low = split(tl.where(right[:, None], b_q, b_k) * exp(level_decays(b_w, level, C)))
        b_a = tl.zeros([C, C], dtype=tl.float32)
        b_A += tl.where(meet(level, C), add_product(b_a, high, low, tl.trans(high), tl.trans(low)), 0.0)
    return b_A


@triton.jit
def _along_rows(x, states, scales, i, there, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """x S of x [C, BK] and a state, which has 11 bits: with x in as many, one product is as good as they are."""
    b_S, unit = kept_state(states, scales, i, there, 0, 0, K, V, BK, BV, True)
    x_16, x_unit = scaled(x * unit[None, :])
    return tl.dot(x_16, b_S) * x_unit[:, None]


@triton.jit
def _along_columns(x, states, scales, i, there, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """x S^T of x [C, BV] and a state, in one product likewise."""
    b_S, unit = kept_state(states, scales, i, there, 0, 0, K, V, BK, BV, True)
    x_16, x_unit = scaled(x)
    return tl.dot(x_16, tl.trans(b_S)) * x_unit[:, None] * unit[None, :]


@triton.jit
def _product(a_high, a_low, b_high, b_low):
    return add_product(tl.zeros([a_high.shape[0], b_high.shape[1]], dtype=tl.float32), a_high, a_low, b_high, b_low)


@triton.jit
def _mild_scores(x_high, x_low, y_high, y_low, C: tl.constexpr, OWN: tl.constexpr, TURNED: tl.constexpr):
    """The scores of reads x with keys y, operands about the middle, [C, C], zero where the key is later.

    OWN: x is r, which sees its own token's key; else a, which does not. TURNED: keys along the rows.
    """
    o_c = tl.arange(0, C)
    if TURNED:
        b_A = _product(y_high, y_low, tl.trans(x_high), tl.trans(x_low))
        ahead = o_c[None, :] - o_c[:, None]
    else:
        b_A = _product(x_high, x_low, tl.trans(y_high), tl.trans(y_low))
        ahead = o_c[:, None] - o_c[None, :]
    if OWN:
        b_A = tl.where(ahead >= 0, b_A, 0.0)
    else:
        b_A = tl.where(ahead > 0, b_A, 0.0)
    return b_A


@triton.jit
def _fine_scores(x, y, z, take_z, w, scale, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
                 BK: tl.constexpr, LEVELS: tl.constexpr, OWN: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """As `_mild_scores`, for any decay: of reads x with keys y or, for take_z, with keys z."""
    o_c = tl.arange(0, C)
    if TURNED:
        ahead = o_c[None, :] - o_c[:, None]
    else:
        ahead = o_c[:, None] - o_c[None, :]
    b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
    b_x = load_tile(x, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32)
    b_y = _either(y, z, take_z, start, end, i_h, H, K, C, BK).to(tl.float32)
    b_own = tl.zeros([C], dtype=tl.float32)
    if OWN:
        b_x *= scale
        b_own += tl.sum(b_x * b_y, 1)
        b_x *= exp(b_w.to(tl.float32))
    b_A = _fine_pair_scores(b_x, b_y, b_w, C, LEVELS, TURNED)
    return tl.where(ahead > 0, b_A, tl.where(ahead == 0, b_own[:, None], 0.0))


@triton.jit
def _fine_scores_of_two(x, y, z, w, scale, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
                        BK: tl.constexpr, LEVELS: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """`_fine_scores` of reads x with keys y, and with keys z: by one code, since a kernel's should not be large."""
    b_A, b_B = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for n in range(2):
        tl.debug_barrier()
        b_A = b_B
        b_B = _fine_scores(x, y, z, n == 1, w, scale, start, end, i_h, H, K, C, BK, LEVELS, OWN, False)
    return b_A, b_B


@triton.jit
def _either(y, z, take_z, start, end, i_h, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """A tile of y or, for take_z, of z."""
    if take_z:
        b_y = load_tile(z, start, end, i_h, 0, 0, H, D, C, BD)
    else:
        b_y = load_tile(y, start, end, i_h, 0, 0, H, D, C, BD).to(z.dtype.element_ty)
    return b_y


@triton.jit
def _inverse_of_blocks(b_A, C: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^{-1} of the blocks of S rows on A's diagonal, zero elsewhere, [C, C]; A strictly lower triangular."""
    N: tl.constexpr = C // S
    o_n, o_s = tl.arange(0, N), tl.arange(0, S)
    same = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_D = tl.sum(tl.where(same, tl.reshape(b_A, [N, S, N, S]), 0.0), 2)
    pairs = tl.where(level_pairs(1, S)[None, :, :], b_D, 0.0)
    b_U = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, pairs)
    for level in tl.static_range(1, LEVELS):
        pairs = tl.where(level_pairs(1 << level, S)[None, :, :], b_D, 0.0)
        b_U += tl.dot(b_U, tl.dot(pairs, b_U, input_precision=PRECISION), input_precision=PRECISION)
    return tl.reshape(tl.where(same, b_U[:, :, None, :], 0.0), [C, C])


@triton.jit
def _inverse(b_A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^{-1}, A strictly lower triangular [C, C]: at each level the lower left blocks join two inverses."""
    b_U = _inverse_of_blocks(b_A, C, 16, 4, PRECISION)
    for level in tl.static_range(4, 6):
        A_high, A_low = split(tl.where(level_pairs(1 << level, C), b_A, 0.0))
        U_high, U_low = split(b_U)
        x_high, x_low = split(_product(A_high, A_low, U_high, U_low))
        b_U = add_product(b_U, U_high, U_low, x_high, x_low)
    return b_U


@triton.jit
def transition_kernel(
    r, w, k, v, a, b, G, W, Q, own, inverse, mild, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk as above: FIRST U, G and W, SECOND Q and own, into whose places the first puts T and f for it.

    In registers: one of them [64, 64] at a time, and the operands of two products; what else is needed lies in shared
    memory.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    if _decides(mild, i, w, start, end, i_h, H, K, C, BK, MILD) == 0:
        return
    b_w = _load_w(w, start, end, i_h, H, K, C, BK, MILD)
    mid, _, _ = _of_states(b_w, C, MILD)
    if FIRST:
        a_high, a_low = _rows_by(a, start, end, i_h, exp(_before(b_w, C, MILD)), H, K, C, BK)
    b_high, b_low = _rows_by(b, start, end, i_h, exp(_after(b_w, C, MILD)), H, K, C, BK)
    k_high, k_low = _rows_by(k, start, end, i_h, exp(_after(b_w, C, MILD)), H, K, C, BK)
    if FIRST:
        if MILD:
            b_A = _mild_scores(a_high, a_low, k_high, k_low, C, False, False)
        else:
            b_A, b_B = _fine_scores_of_two(a, k, b, w, 1.0, start, end, i_h, H, K, C, BK, LEVELS, False)
        A_high, A_low = split(b_A)
        b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
        x_high, x_low = split(add_split_by_given(tl.zeros([C, BV], dtype=tl.float32), A_high, A_low, b_v))
        if MILD:
            b_B = _mild_scores(a_high, a_low, b_high, b_low, C, False, False)
        b_U = _inverse(b_B, C, PRECISION)
        tl.store(matrix_pointers(inverse, i, C), b_U)
        U_high, U_low = split(b_U)
        # e^{mid} comes in here: T's rows of late tokens may hold channels that have all but decayed.
        b_T = _product(U_high, U_low, a_high, a_low) * exp(mid)[None, :]
        T_high, T_low = split(b_T)
        b_f = _product(U_high, U_low, x_high, x_low)
        f_high, f_low = split(b_f)

        b_w = _load_w(w, start, end, i_h, H, K, C, BK, MILD)
        _, rest, total = _of_states(b_w, C, MILD)
        o_k = tl.arange(0, BK)
        b_G = _product(tl.trans(b_high), tl.trans(b_low), T_high, T_low) * exp(rest)[:, None]
        b_G += tl.where(o_k[:, None] == o_k[None, :], exp(total)[:, None], 0.0)
        p_G, m_G = state_pointers(G, i, 0, 0, K, K, BK, BK)
        tl.store(p_G, b_G, mask=m_G)
        b_W = add_split_by_given(tl.zeros([BK, BV], dtype=tl.float32), tl.trans(k_high), tl.trans(k_low), b_v)
        b_W = add_product(b_W, tl.trans(b_high), tl.trans(b_low), f_high, f_low) * exp(rest)[:, None]
        p_W, m_W = state_pointers(W, i, 0, 0, K, V, BK, BV)
        tl.store(p_W, b_W, mask=m_W)
        if not SECOND:
            store_tile(Q, b_T, start, end, i_h, 0, H, K, C, BK)
            store_tile(own, b_f, start, end, i_h, 0, H, V, C, BV)
    if SECOND:
        if not FIRST:
            b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
        r_high, r_low = _rows_by(r, start, end, i_h, exp(_upto(b_w, C, MILD)) * scale, H, K, C, BK)
        if MILD:
            b_A = _mild_scores(r_high, r_low, k_high, k_low, C, True, False)
        else:
            b_A, b_B = _fine_scores_of_two(r, k, b, w, scale, start, end, i_h, H, K, C, BK, LEVELS, True)
        A_high, A_low = split(b_A)
        b_o = add_split_by_given(tl.zeros([C, BV], dtype=tl.float32), A_high, A_low, b_v)
        if MILD:
            b_B = _mild_scores(r_high, r_low, b_high, b_low, C, True, False)
        A_high, A_low = split(b_B)
        if not FIRST:
            f_high, f_low = split(load_tile(own, start, end, i_h, 0, 0, H, V, C, BV))
        store_tile(own, add_product(b_o, A_high, A_low, f_high, f_low), start, end, i_h, 0, H, V, C, BV)
        if not FIRST:
            T_high, T_low = split(load_tile(Q, start, end, i_h, 0, 0, H, K, C, BK))
        b_Q = (r_high.to(tl.float32) + r_low.to(tl.float32)) * exp(mid)[None, :]
        store_tile(Q, add_product(b_Q, A_high, A_low, T_high, T_low), start, end, i_h, 0, H, K, C, BK)


@triton.jit
def walk_kernel(
    G, W, Q, do, states, scales, products, written, first, last,
    sequence_of_segment, segment_offsets, cu_seqlens, offsets, T, L,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, TOTALS: tl.constexpr, SEGMENTED: tl.constexpr, HAS_FIRST: tl.constexpr,
    WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- G S + W, chunk after chunk of a segment of L; in reverse, where S is its gradient, S <- G^T S + Q^T do.

    The state before each chunk is stored; or, for TOTALS, what the whole segment makes of a zero state, and the product
    of its transitions, which is what it makes of the identity where nothing is written. In registers: S [BK, BV].
    """
    PARTS: tl.constexpr = 2 if TOTALS else 1
    part, i_sh = program(PARTS)
    i_s, i_h = i_sh // H, i_sh % H
    begin, end, first_chunk, chunks = locate_segment(
        i_s, sequence_of_segment, segment_offsets, cu_seqlens, offsets, T, L, C, SEGMENTED, PACKED
    )
    writes = part == 0
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_S = tl.where((o_k[:, None] == o_v[None, :]) & (part == 1), 1.0, tl.zeros([BK, BV], dtype=tl.float32))
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_sh, 0, 0, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    for j in range(0, chunks):
        if REVERSE:
            i_c = chunks - 1 - j
        else:
            i_c = j
        i = (first_chunk + i_c) * H + i_h
        p_G, m_G = state_pointers(G, i, 0, 0, K, K, BK, BK)
        G_high, G_low = split(tl.load(p_G, mask=m_G, other=0.0))
        if not TOTALS:
            store_state(states, scales, i, b_S, 0, 0, K, V, BK, BV, True)
        S_high, S_low = split(b_S)
        if REVERSE:
            start = begin + i_c * C
            Q_high, Q_low = split(load_tile(Q, start, end, i_h, 0, 0, H, K, C, BK))
            b_do = load_tile(do, start, tl.where(writes, end, start), i_h, 0, 0, H, V, C, BV)
            b_S = add_split_by_given(tl.zeros([BK, BV], dtype=tl.float32), tl.trans(Q_high), tl.trans(Q_low), b_do)
            b_S = add_product(b_S, tl.trans(G_high), tl.trans(G_low), S_high, S_low)
        else:
            p_W, m_W = state_pointers(W, i, 0, 0, K, V, BK, BV)
            b_S = add_product(tl.load(p_W, mask=m_W & writes, other=0.0), G_high, G_low, S_high, S_low)
    if TOTALS:
        p_S, m_S = state_pointers(written, i_sh, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S & writes)
        p_S, m_S = state_pointers(products, i_sh, 0, 0, K, K, BK, BV)
        tl.store(p_S, b_S, mask=m_S & (part == 1))
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_sh, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def walk_segments_kernel(
    products, written, entering, first, last, offsets, parts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, WANTS_LAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- product S + written, segment after segment; the state before each is stored as entering it.

    parts: of each sequence, where they are not packed. In registers: S [BK, BV].
    """
    i_nh = tl.program_id(0)
    i_n, i_h = i_nh // H, i_nh % H
    if PACKED:
        first_part = tl.load(offsets + i_n)
        parts = tl.load(offsets + i_n + 1) - first_part
    else:
        first_part = i_n * parts
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST:
        p_S, m_S = state_pointers(first, i_nh, 0, 0, K, V, BK, BV)
        b_S += tl.load(p_S, mask=m_S, other=0.0)
    for j in range(0, parts):
        if REVERSE:
            i = (first_part + parts - 1 - j) * H + i_h
        else:
            i = (first_part + j) * H + i_h
        p_P, m_P = state_pointers(products, i, 0, 0, K, K, BK, BK)
        P_high, P_low = split(tl.load(p_P, mask=m_P, other=0.0))
        p_W, m_W = state_pointers(written, i, 0, 0, K, V, BK, BV)
        p_S, m_S = state_pointers(entering, i, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)
        S_high, S_low = split(b_S)
        b_S = add_product(tl.load(p_W, mask=m_W, other=0.0), P_high, P_low, S_high, S_low)
    if WANTS_LAST:
        p_S, m_S = state_pointers(last, i_nh, 0, 0, K, V, BK, BV)
        tl.store(p_S, b_S, mask=m_S)


@triton.jit
def read_kernel(
    Q, own, states, scales, o, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """o = own + Q S for one chunk."""
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_Q = load_tile(Q, start, end, i_h, 0, 0, H, K, C, BK)
    b_o = load_tile(own, start, end, i_h, 0, 0, H, V, C, BV)
    b_o += _along_rows(b_Q, states, scales, i, start < end, K, V, BK, BV)
    store_tile(o, b_o, start, end, i_h, 0, H, V, C, BV)


@triton.jit
def found_kernel(
    r, w, k, v, a, b, do, inverse, states, scales, dstates, dscales, mild, found, y, dv, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Of one chunk FIRST y = U^T (A_rb^T do + b^ D), SECOND dv = A_rk^T do + A_ak^T y + k^ D and
    v2 = U (A_ak v + a~ S)."""
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    if _decides(mild, i, w, start, end, i_h, H, K, C, BK, MILD) == 0:
        return
    there = start < end
    b_w = _load_w(w, start, end, i_h, H, K, C, BK, MILD)
    mid, rest, _ = _of_states(b_w, C, MILD)
    if FIRST:
        b_high, b_low = _rows_by(b, start, end, i_h, exp(_after(b_w, C, MILD)), H, K, C, BK)
    D_high, D_low = split(_whole_state(dstates, dscales, i, there, exp(rest), K, V, BK, BV))
    if FIRST:
        b_x = _product(b_high, b_low, D_high, D_low)
    r_high, r_low = _rows_by(r, start, end, i_h, exp(_upto(b_w, C, MILD)) * scale, H, K, C, BK)
    if FIRST:
        if MILD:
            b_A = _mild_scores(r_high, r_low, b_high, b_low, C, True, True)
        else:
            b_A = _fine_scores(r, b, b, False, w, scale, start, end, i_h, H, K, C, BK, LEVELS, True, True)
        A_high, A_low = split(b_A)
    b_do = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
    if FIRST:
        x_high, x_low = split(add_split_by_given(b_x, A_high, A_low, b_do))
        U_high, U_low = split(tl.load(matrix_pointers(inverse, i, C)))
        b_y = _product(tl.trans(U_high), tl.trans(U_low), x_high, x_low)
        store_tile(y, b_y, start, end, i_h, 0, H, V, C, BV)

    if SECOND:
        if FIRST:
            y_high, y_low = split(b_y)
        b_w = _load_w(w, start, end, i_h, H, K, C, BK, MILD)
        k_high, k_low = _rows_by(k, start, end, i_h, exp(_after(b_w, C, MILD)), H, K, C, BK)
        b_dv = _product(k_high, k_low, D_high, D_low)
        if MILD:
            b_A = _mild_scores(r_high, r_low, k_high, k_low, C, True, True)
        else:
            b_A = _fine_scores(r, k, k, False, w, scale, start, end, i_h, H, K, C, BK, LEVELS, True, True)
        A_high, A_low = split(b_A)
        b_dv = add_split_by_given(b_dv, A_high, A_low, b_do)
        b_w = _load_w(w, start, end, i_h, H, K, C, BK, MILD)
        a_high, a_low = _rows_by(a, start, end, i_h, exp(_before(b_w, C, MILD)), H, K, C, BK)
        if MILD:
            b_A = _mild_scores(a_high, a_low, k_high, k_low, C, False, False)
        else:
            b_A = _fine_scores(a, k, k, False, w, 1.0, start, end, i_h, H, K, C, BK, LEVELS, False, False)
        A_high, A_low = split(b_A)
        if not FIRST:
            y_high, y_low = split(load_tile(y, start, end, i_h, 0, 0, H, V, C, BV))
        b_dv = add_product(b_dv, tl.trans(A_high), tl.trans(A_low), y_high, y_low)
        store_tile(dv, b_dv, start, end, i_h, 0, H, V, C, BV)

        S_high, S_low = split(_whole_state(states, scales, i, there, exp(mid), K, V, BK, BV))
        b_x = _product(a_high, a_low, S_high, S_low)
        b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
        x_high, x_low = split(add_split_by_given(b_x, A_high, A_low, b_v))
        U_high, U_low = split(tl.load(matrix_pointers(inverse, i, C)))
        store_tile(found, _product(U_high, U_low, x_high, x_low), start, end, i_h, 0, H, V, C, BV)


@triton.jit
def mild_read_grads_kernel(
    r, w, k, v, a, b, do, found, y, states, scales, mild, dr, da, passed, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dr, da for one chunk, and the reads' share of dw. In registers: a score's gradient [C, C], x, z [C, BK].

    x_r = (do v^T) k* + (do v2^T) b* + do (e^{mid} S)^T          dr = scale (x_r e^{upto - mid} + own)
    x_a = (y v^T) k* + (y v2^T) b* + y (e^{mid} S)^T             da = x_a e^{before - mid}
    passed_t = sum_{i>=t} r*_i x_r_i + sum_{i>t} a*_i x_a_i
    with all scores strictly below the diagonal: own, what r reads of its token's own keys, no decay is passed for.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    mid, _ = half_decays(b_w, C)
    upto = from_middle(b_w, C)
    key = exp(-upto)
    k_high, k_low = _rows_by(k, start, end, i_h, key, H, K, C, BK)
    b_high, b_low = _rows_by(b, start, end, i_h, key, H, K, C, BK)
    f_high, f_low = split(load_tile(found, start, end, i_h, 0, 0, H, V, C, BV))
    b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)

    b_do = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
    S_high, S_low = split(_whole_state(states, scales, i, start < end, exp(mid), K, V, BK, BV))
    x = tl.zeros([C, BK], dtype=tl.float32)
    x = add_given_by_split(x, b_do, tl.trans(S_high), tl.trans(S_low))
    b_A = tl.dot(b_do, tl.trans(b_v))
    d_k = diagonal(b_A, C)
    A_high, A_low = split(below(b_A, C))
    x = add_whole_product(x, A_high, A_low, k_high, k_low)
    b_A = add_given_by_split(tl.zeros([C, C], dtype=tl.float32), b_do, tl.trans(f_high), tl.trans(f_low))
    d_b = diagonal(b_A, C)
    A_high, A_low = split(below(b_A, C))
    x = add_whole_product(x, A_high, A_low, b_high, b_low)
    read = exp(upto) * scale
    own = d_k * load_tile(k, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32)
    own += d_b * load_tile(b, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32)
    store_tile(dr, x * read + own * scale, start, end, i_h, 0, H, K, C, BK)
    x *= _as_split(load_tile(r, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * read)

    b_y = load_tile(y, start, end, i_h, 0, 0, H, V, C, BV)
    y_high, y_low = split(b_y)
    z = _product(y_high, y_low, tl.trans(S_high), tl.trans(S_low))
    b_A = add_split_by_given(tl.zeros([C, C], dtype=tl.float32), y_high, y_low, tl.trans(b_v))
    A_high, A_low = split(below(b_A, C))
    z = add_whole_product(z, A_high, A_low, k_high, k_low)
    b_A = _product(y_high, y_low, tl.trans(f_high), tl.trans(f_low))
    A_high, A_low = split(below(b_A, C))
    z = add_whole_product(z, A_high, A_low, b_high, b_low)
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    read = exp(from_middle(b_w, C) - b_w.to(tl.float32))
    store_tile(da, z * read, start, end, i_h, 0, H, K, C, BK)
    z *= _as_split(load_tile(a, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * read)
    x = add_sums(x, o_c[:, None] < o_c[None, :], x + z, True)
    store_tile(passed, x, start, end, i_h, 0, H, K, C, BK)


@triton.jit
def mild_write_grads_kernel(
    r, w, k, v, a, b, do, found, y, states, scales, dstates, dscales, mild, passed, dw, dk, db, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dk, db, dw for one chunk. In registers: a score's gradient [C, C], z, x and dw's keys [C, BK].

    z_k = (do v^T)^T r* + (y v^T)^T a*,  x_k = v (e^{total - mid} D)^T      dk = (z_k + x_k) e^{mid - upto} + own
    z_b and x_b likewise with v2 in the place of v                          db = (z_b + x_b) e^{mid - upto} + own
    dw_t = passed_t + e^{total} sum_v S D - sum_{j>=t} (k* z_k + b* z_b)_j + sum_{j<t} (k* x_k + b* x_b)_j,
    of whose two sums one is all rows' less one over j < t. Scores and own as in `mild_read_grads_kernel`.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i, FLAGS, 1) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    upto = from_middle(b_w, C)
    r_high, r_low = _rows_by(r, start, end, i_h, exp(upto) * scale, H, K, C, BK)
    a_high, a_low = _rows_by(a, start, end, i_h, exp(upto - b_w.to(tl.float32)), H, K, C, BK)

    b_do = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
    b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
    b_A = tl.dot(b_v, tl.trans(b_do))
    own = diagonal(b_A, C)
    A_high, A_low = split(above(b_A, C))
    z = add_whole_product(tl.zeros([C, BK], dtype=tl.float32), A_high, A_low, r_high, r_low)
    y_high, y_low = split(load_tile(y, start, end, i_h, 0, 0, H, V, C, BV))
    b_A = add_given_by_split(tl.zeros([C, C], dtype=tl.float32), b_v, tl.trans(y_high), tl.trans(y_low))
    A_high, A_low = split(above(b_A, C))
    z = add_whole_product(z, A_high, A_low, a_high, a_low)
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    _, rest = half_decays(b_w, C)
    D_high, D_low = split(_whole_state(dstates, dscales, i, start < end, exp(rest), K, V, BK, BV))
    x = tl.zeros([C, BK], dtype=tl.float32)
    x = add_given_by_split(x, b_v, tl.trans(D_high), tl.trans(D_low))
    key = exp(-from_middle(b_w, C))
    b_k = load_tile(k, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * key
    both = _as_split(b_k) * z
    pairs = tl.sum(both, 0)
    both += b_k * x
    own *= load_tile(r, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * scale
    store_tile(dk, (z + x) * key + own, start, end, i_h, 0, H, K, C, BK)

    f_high, f_low = split(load_tile(found, start, end, i_h, 0, 0, H, V, C, BV))
    b_A = add_split_by_given(tl.zeros([C, C], dtype=tl.float32), f_high, f_low, tl.trans(b_do))
    own = diagonal(b_A, C)
    A_high, A_low = split(above(b_A, C))
    z = add_whole_product(tl.zeros([C, BK], dtype=tl.float32), A_high, A_low, r_high, r_low)
    b_A = _product(f_high, f_low, tl.trans(y_high), tl.trans(y_low))
    A_high, A_low = split(above(b_A, C))
    z = add_whole_product(z, A_high, A_low, a_high, a_low)
    x = _product(f_high, f_low, tl.trans(D_high), tl.trans(D_low))
    b_w = load_tile(w, start, end, i_h, 0, 0, H, K, C, BK)
    mid, rest = half_decays(b_w, C)
    key = exp(-from_middle(b_w, C))
    b_b = load_tile(b, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * key
    met = _as_split(b_b) * z
    pairs += tl.sum(met, 0)
    both += met + b_b * x
    own *= load_tile(r, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * scale
    store_tile(db, (z + x) * key + own, start, end, i_h, 0, H, K, C, BK)
    b_S = _whole_state(states, scales, i, start < end, exp(mid), K, V, BK, BV)
    b_SD = tl.sum(b_S * _whole_state(dstates, dscales, i, start < end, exp(rest), K, V, BK, BV), 1)
    b_dw = load_tile(passed, start, end, i_h, 0, 0, H, K, C, BK) + (b_SD - pairs)[None, :]
    b_dw = add_sums(b_dw, o_c[:, None] > o_c[None, :], both, True)
    store_tile(dw, b_dw, start, end, i_h, 0, H, K, C, BK)


@triton.jit
def _add_pairs(b_x, b_dw, b_own, A_high, A_low, b_other, b_w, C: tl.constexpr, LEVELS: tl.constexpr,
               READS: tl.constexpr):  # fmt: skip
    """x and dw with what the pairs inside a chunk add to them, for any decay: the gradient of reads x_i, which is
    sum_{j<i} A_ij other_j e^{decay strictly between j and i}; or of keys, with i and j changed over.

    own: the reads or keys that x is the gradient of; A [C, C]: gradients of scores, of which the part that is none does
    not matter. Of dw the reads' and the keys' share together are what passes by a token. Inside a block that is mild it
    is a difference between them, of the same products.
    """
    o_c = tl.arange(0, C)
    later, earlier = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    read, key, mild = about_blocks(b_w, C)
    if mild:
        if READS:
            own, other, inside = exp(read), exp(key), same_block(C) & earlier
        else:
            own, other, inside = exp(key), exp(read), same_block(C) & later
        high, low = split(b_other * other)
        x = add_whole_product(tl.zeros_like(b_x), only(inside, A_high), only(inside, A_low), high, low)
        passing = _as_split(b_own * own) * x
        if READS:
            b_dw = add_sums(b_dw, same_block(C) & later, passing, True)
        else:
            b_dw = add_sums(b_dw - passing, same_block(C) & later, -passing, True)
        b_x += x * own
    for level in range(mild.to(tl.int32) * BLOCK_LEVELS, LEVELS):
        o_c, right, first, size = halves(level, C)
        if READS:
            met, passes = right[:, None] & meet(level, C), within(o_c + 1, first + size, C)
        else:
            met, passes = (~right)[:, None] & meet(level, C), within(first, o_c, C)
        weight = exp(level_decays(b_w, level, C))
        high, low = split(b_other * weight)
        x = add_product(tl.zeros_like(b_x), only(met, A_high), only(met, A_low), high, low) * weight
        b_dw = add_sums(b_dw, passes, b_own * x, False)
        b_x += x
    return b_x, b_dw


@triton.jit
def _read_of(r, a, b_w, scale, start, end, i_h, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
             OF_R: tl.constexpr):  # fmt: skip
    """q = scale r e^w, or a."""
    if OF_R:
        b_q = load_tile(r, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * exp(b_w.to(tl.float32)) * scale
    else:
        b_q = load_tile(a, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32)
    return b_q


@triton.jit
def read_grads_kernel(
    r, w, k, v, a, b, do, found, y, states, scales, mild, dr, da, passed, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """FIRST dr, else da, for one chunk, and the reads' share of dw. In registers: scores' gradients [C, C], x and dw
    [C, BK].

    dq = (do S^T) e^{before} + pairs, da = (y S^T) e^{before} + pairs, dr = scale (e^w dq + diagonal), q = scale r e^w
    passed_t = q_t dq_t + sum_{i>t} (q_i dq_i^S + a_i da_i^S) + the pairs' share
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i, FLAGS, 0) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    later = o_c[:, None] < o_c[None, :]
    b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
    x = exp(_before(b_w, C, False))
    if FIRST:
        b_g = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
        passed_by = tl.zeros([C, BK], dtype=tl.float32)
    else:
        b_g = load_tile(y, start, end, i_h, 0, 0, H, V, C, BV)
        passed_by = load_tile(passed, start, end, i_h, 0, 0, H, K, C, BK)
    x *= _along_columns(b_g, states, scales, i, start < end, K, V, BK, BV)
    b_q = _read_of(r, a, b_w, scale, start, end, i_h, H, K, C, BK, FIRST)
    passed_by = add_sums(passed_by, later, b_q * x, False)
    for n in range(2):  # v and k, then v2 and b
        tl.debug_barrier()
        if FIRST:
            g_high, g_low = split(load_tile(do, start, end, i_h, 0, 0, H, V, C, BV))
        else:
            g_high, g_low = split(load_tile(y, start, end, i_h, 0, 0, H, V, C, BV))
        v_high, v_low = split(_either(v, found, n == 1, start, end, i_h, H, V, C, BV))
        A_high, A_low = split(_product(g_high, g_low, tl.trans(v_high), tl.trans(v_low)))
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        b_k = _either(k, b, n == 1, start, end, i_h, H, K, C, BK)
        b_q = _read_of(r, a, b_w, scale, start, end, i_h, H, K, C, BK, FIRST)
        x, passed_by = _add_pairs(x, passed_by, b_q, A_high, A_low, b_k, b_w, C, LEVELS, True)
    if FIRST:
        tl.debug_barrier()
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        passed_by += _read_of(r, a, b_w, scale, start, end, i_h, H, K, C, BK, FIRST) * x
        x *= exp(b_w.to(tl.float32))
        b_g = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
        for n in range(2):
            b_v = _either(v, found, n == 1, start, end, i_h, H, V, C, BV)
            b_k = _either(k, b, n == 1, start, end, i_h, H, K, C, BK)
            x += tl.sum(b_g.to(tl.float32) * b_v, 1)[:, None] * b_k
        store_tile(dr, x * scale, start, end, i_h, 0, H, K, C, BK)
    else:
        store_tile(da, x, start, end, i_h, 0, H, K, C, BK)
    store_tile(passed, passed_by, start, end, i_h, 0, H, K, C, BK)


@triton.jit
def write_grads_kernel(
    r, w, k, v, a, b, do, found, y, states, scales, dstates, dscales, mild, passed, dw, dk, db, scale,
    sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FLAGS: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """FIRST dk, else db and dw, for one chunk. In registers: scores' gradients [C, C], x and dw [C, BK].

    dk = (v D^T) e^{after} + pairs + diagonal, db likewise with v2 in the place of v
    dw_t = passed_t + e^{total} sum_v S D + sum_{j<t} (k_j dk_j^D + b_j db_j^D) + the pairs' share
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    if takes(mild, i, FLAGS, 0) == 0:
        return
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    o_c = tl.arange(0, C)
    earlier = o_c[:, None] > o_c[None, :]
    b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
    b_dw = load_tile(passed, start, end, i_h, 0, 0, H, K, C, BK)
    if FIRST:
        b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
        b_k = load_tile(k, start, end, i_h, 0, 0, H, K, C, BK)
    else:
        b_v = load_tile(found, start, end, i_h, 0, 0, H, V, C, BV)
        b_k = load_tile(b, start, end, i_h, 0, 0, H, K, C, BK)
        b_D = _whole_state(dstates, dscales, i, start < end, 1.0, K, V, BK, BV)
        b_SD = tl.sum(b_D * _whole_state(states, scales, i, start < end, 1.0, K, V, BK, BV), 1)
        b_dw += (exp(tl.sum(b_w.to(tl.float32), 0)) * b_SD)[None, :]
    x = _along_columns(b_v, dstates, dscales, i, start < end, K, V, BK, BV) * exp(_after(b_w, C, False))
    b_dw = add_sums(b_dw, earlier, b_k * x, False)
    for n in range(2):  # do and r, then y and a
        tl.debug_barrier()
        if FIRST:
            v_high, v_low = split(load_tile(v, start, end, i_h, 0, 0, H, V, C, BV))
            b_k = load_tile(k, start, end, i_h, 0, 0, H, K, C, BK)
        else:
            v_high, v_low = split(load_tile(found, start, end, i_h, 0, 0, H, V, C, BV))
            b_k = load_tile(b, start, end, i_h, 0, 0, H, K, C, BK)
        g_high, g_low = split(_either(do, y, n == 1, start, end, i_h, H, V, C, BV))
        A_high, A_low = split(_product(v_high, v_low, tl.trans(g_high), tl.trans(g_low)))
        b_w = load_decays(w, start, end, i_h, 0, H, K, C, BK)
        if n == 0:
            b_q = _read_of(r, a, b_w, scale, start, end, i_h, H, K, C, BK, True)
        else:
            b_q = _read_of(r, a, b_w, scale, start, end, i_h, H, K, C, BK, False)
        x, b_dw = _add_pairs(x, b_dw, b_k, A_high, A_low, b_q, b_w, C, LEVELS, False)
    tl.debug_barrier()
    b_do = load_tile(do, start, end, i_h, 0, 0, H, V, C, BV)
    if FIRST:
        b_v = load_tile(v, start, end, i_h, 0, 0, H, V, C, BV)
    else:
        b_v = load_tile(found, start, end, i_h, 0, 0, H, V, C, BV)
    own = tl.sum(b_do.to(tl.float32) * b_v.to(tl.float32), 1)[:, None]
    x += own * load_tile(r, start, end, i_h, 0, 0, H, K, C, BK).to(tl.float32) * scale
    if FIRST:
        store_tile(dk, x, start, end, i_h, 0, H, K, C, BK)
        store_tile(passed, b_dw, start, end, i_h, 0, H, K, C, BK)
    else:
        store_tile(db, x, start, end, i_h, 0, H, K, C, BK)
        store_tile(dw, b_dw, start, end, i_h, 0, H, K, C, BK)


class LongPlan(ChunkPlan):
    """The launches of chunks of 64 tokens, whose states are 16-bit, each row over a power of two.

    Every program holds a head's channels whole, whatever a row of the launch table says: what one kernel writes of a
    state, with one scale a row, another reads.
    """

    def __init__(self, r, v, cu_seqlens, chunk_size):
        super().__init__("rwkv7", r, v.shape[-1], cu_seqlens, chunk_size, flags=1)
        self.each = (self.chunks * self.H,)

    def room_for_flags(self):
        """Which chunks are mild, to be found out."""
        return self.empty(self.chunks, self.H, self.flags, dtype=torch.int32)

    def options(self, kernel):
        common, _, _ = self.sizes(f"long.{kernel}")
        del common["PRECISION"]
        return common | dict(BK=block(self.rows, self.C), BV=block(self.columns, self.C))

    def launch(self, kernel, mild_kernel, any_kernel, *given, **more):
        """Both ways through a chunk; given: what the kernels take before `where`.

        Any other than mild is launched in two halves, one after the other: a multiprocessor keeps 128 KB of code near,
        and what is past it takes more than twice as long.
        """
        ways = [("mild", mild_kernel, True, True)]
        ways += [("dyadic", any_kernel, True, False), ("dyadic", any_kernel, False, True)]
        for way, found, first, second in ways:
            switches = dict(LEVELS=self.C.bit_length() - 1, MILD=int(way == "mild"), FIRST=first, SECOND=second)
            switches = {name: value for name, value in switches.items() if name in found.arg_names}
            options = self.options(f"{kernel}.{way}") | dict(FLAGS=self.flags) | switches | more
            found[self.each](*given, *self.where, **options)

    def walk(self, G, W, Q, do, first, last, reverse):
        """The state entering each chunk (reverse: the gradient leaving it), in one tensor of `kept_shape`."""
        kept = self.room_for_states(self.columns)
        states = self.unpacked(kept, self.columns)[:2]
        L, segments, segment_offsets, sequence_of_segment = self.segments(2 * self.H)
        where = (sequence_of_segment, segment_offsets, self.cu_seqlens, self.offsets, self.T, L)
        options = self.options("walk") | dict(REVERSE=reverse, SEGMENTED=segments > self.N)
        if segments > self.N:
            products = self.empty(segments, self.H, self.rows, self.rows)
            written, entering = (self.empty(segments, self.H, self.rows, self.columns) for _ in range(2))
            walk_kernel[(2 * segments * self.H,)](
                G, W, Q, do, None, None, products, written, None, None, *where,
                TOTALS=True, HAS_FIRST=False, WANTS_LAST=False, **options,
            )  # fmt: skip
            walk_segments_kernel[(self.N * self.H,)](
                products, written, entering, first, last, segment_offsets, segments // self.N, REVERSE=reverse,
                HAS_FIRST=first is not None, WANTS_LAST=last is not None, **self.options("walk"),
            )  # fmt: skip
            first, last = entering, None
        walk_kernel[(segments * self.H,)](
            G, W, Q, do, *states, None, None, first, last, *where,
            TOTALS=False, HAS_FIRST=first is not None, WANTS_LAST=last is not None, **options,
        )  # fmt: skip
        return kept


def kept_shapes(r, w, k, v, a, b, cu_seqlens, chunk_size) -> tuple[tuple[int, ...], ...]:
    """Shapes of what `forward` keeps for `backward`: the state entering every chunk; G and U of each; Q."""
    states = kept_states_shape("rwkv7", r, v.shape[-1], cu_seqlens, chunk_size)
    chunks = chunks_of("rwkv7", r, v.shape[-1], cu_seqlens, chunk_size)
    H, K = r.shape[2:]
    return states, (chunks, H, K, K), (chunks, H, LONG_CHUNK_SIZE, LONG_CHUNK_SIZE), tuple(r.shape)


def forward(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep):
    """o, the final state (None unless asked for), and as in `kept_shapes`."""
    plan = LongPlan(r, v, cu_seqlens, chunk_size)
    o, final_state = torch.empty_like(v), plan.empty(plan.state_shape()) if output_final_state else None
    G, inverse = plan.empty(plan.chunks, plan.H, plan.rows, plan.rows), plan.empty(plan.chunks, plan.H, plan.C, plan.C)
    Q, own, W = plan.empty(r.shape), plan.empty(v.shape), plan.empty(plan.chunks, plan.H, plan.rows, plan.columns)
    plan.launch(
        "transition", transition_kernel, transition_kernel,
        r, w, k, v, a, b, G, W, Q, own, inverse, plan.room_for_flags(), scale, PRECISION=BLOCK_PRECISION,
    )  # fmt: skip
    kept = plan.walk(G, W, None, None, initial_state, final_state, reverse=False)
    read_kernel[plan.each](Q, own, *plan.unpacked(kept, plan.columns)[:2], o, *plan.where, **plan.options("read"))
    return o, final_state, (kept, G, inverse, Q)


def backward(r, w, k, v, a, b, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dr, dw, dk, dv, da, db in their inputs' dtypes and dinitial_state [N, H, K, V] in float32."""
    plan = LongPlan(r, v, cu_seqlens, chunk_size)
    kept, G, inverse, Q = kept
    dinitial_state = plan.empty(plan.state_shape())
    dkept = plan.walk(G, None, Q, do, dfinal_state, dinitial_state, reverse=True)
    states, dstates = plan.unpacked(kept, plan.columns)[:2], plan.unpacked(dkept, plan.columns)[:2]
    dr, dw, dk, dv, da, db = (torch.empty_like(x) for x in (r, w, k, v, a, b))
    found, y, passed, mild = plan.empty(v.shape), plan.empty(v.shape), plan.empty(r.shape), plan.room_for_flags()
    plan.launch(
        "found", found_kernel, found_kernel,
        r, w, k, v, a, b, do, inverse, *states, *dstates, mild, found, y, dv, scale,
    )  # fmt: skip
    given = (r, w, k, v, a, b, do, found, y, *states)
    plan.launch("read_grads", mild_read_grads_kernel, read_grads_kernel, *given, mild, dr, da, passed, scale)
    plan.launch(
        "write_grads", mild_write_grads_kernel, write_grads_kernel,
        *given, *dstates, mild, passed, dw, dk, db, scale,
    )  # fmt: skip
    return dr, dw, dk, dv, da, db, dinitial_state
