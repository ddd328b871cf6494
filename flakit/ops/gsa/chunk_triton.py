"""GSA in chunks as Triton kernels: everything is parallel over chunks but a light scan over their states.

Forward:  `written_kernel`, `scan_kernel`, once for hk and once for hv: the memory entering each chunk
          `output_kernel`      scores, softmax and o from a chunk's tokens and its entering memory
Backward: `slot_grads_kernel`  the softmax again, p and dscores, and what ds and dg owe to pairs inside the chunk and
                               to the memory entering it
          `written_kernel`, `scan_kernel` in reverse, twice: the gradient of the memory leaving each chunk
          `grads_kernel`       dq, dk, dv; ds and dg completed by what leaves the chunk

Formulas as in `chunk_torch`: a read that has its own token's fading taken out, p~ = p e^g (and dscores~ in the first
pass), meets the key s of an earlier token through the decay strictly between the two, as in RWKV6; a token meets itself
without any. Both memories are kept with the slots as rows, hk turned to [M, K], so that one pair of kernels carries
both. All M slots are in registers: the softmax needs them.

There are two ways through a chunk, compiled apart (`common.chunks_triton`): and dyadic for any g <= 0.
Rows beyond a sequence's end are loaded as zeros, g too; no factor is ever above e^55, so that a zero stays a zero.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks_triton import decay_after, decay_before, dot, level_pairs, level_weights, to_operand
from ..common.chunks_triton import (
    ChunkPlan,
    about_middle,
    dyadic_pairs,
    dyadic_scores,
    is_mild,
    kept_states_shape,
    load_tile,
    locate,
    mild_pairs,
    state_pointers,
    store_tile,
)
from ..common.launch import TABLE, block, width


@triton.jit
def _load_gates(g, start, end, i_h, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """g of each row, of the row before it and of the row after it, [C, BM]; zero outside the chunk."""
    b_g = load_tile(g, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    b_prev = load_tile(g, start, end, i_h, 0, -1, H, M, C, BM).to(tl.float32)
    b_next = load_tile(g, start, end, i_h, 0, 1, H, M, C, BM).to(tl.float32)
    return b_g, b_prev, b_next


@triton.jit
def _below(b_A, C: tl.constexpr):
    """b_A below its diagonal, and its diagonal as a column."""
    o_c = tl.arange(0, C)
    diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_A, 0.0), 1)[:, None]
    return tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0), diagonal


@triton.jit
def _read_sums(b_A, b_base, b_s, b_g, b_prev, b_next, C: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
               MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sum_{j<i} A_ij s_j e^{decay strictly between} + base_i e^{decay before i}, [C, BM]; b_A is zero above."""
    if MILD:
        before, read, key = about_middle(b_g, C)
        b_sum = b_base * tl.exp(before) + dot(b_A, b_s * key, PRECISION) * read
    else:
        b_sum = b_base * tl.exp(decay_before(b_prev))
        for level in tl.static_range(LEVELS):
            b_a = tl.where(level_pairs(1 << level, C), b_A, 0.0)
            if level == 0:
                b_sum += dot(b_a, b_s, PRECISION)
            else:
                weight = level_weights(b_prev, b_next, 1 << level, C, BM)
                b_sum += dot(b_a, b_s * weight, PRECISION) * weight
    return b_sum


@triton.jit
def _pair_scores(b_x, b_own, b_s, b_g, b_prev, b_next, C: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
                 MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sum_m of read and key: x_i s_j e^{decay strictly between} for j < i, own_i s_i on the diagonal, [C, C]."""
    o_c = tl.arange(0, C)
    if MILD:
        _, read, key = about_middle(b_g, C)
        b_A = dot(b_x * read, tl.trans(b_s * key), PRECISION)
        b_A = tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0)
    else:
        b_A = dyadic_scores(b_x, b_s, b_prev, b_next, C, BM, LEVELS, PRECISION)
    return b_A + tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_own * b_s, 1)[:, None], 0.0)


@triton.jit
def _pair_grads(b_x, b_own, b_s, b_g, b_prev, b_next, b_dA, diagonal, b_base, C: tl.constexpr, BM: tl.constexpr,
                LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One pass's share of ds and dg, [C, BM]: pairs inside the chunk and reads of the memory entering it."""
    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_dA = to_operand(b_dA, PRECISION)
    if MILD:
        b_dx, b_ds, b_dg = mild_pairs(b_x, b_s, b_g, b_dA, b_base, b_ds, C, PRECISION)
    else:
        b_dx, b_ds, b_dg = dyadic_pairs(b_x, b_s, b_prev, b_next, b_dA, b_base, b_ds, C, BM, LEVELS, PRECISION)
    return b_ds + diagonal * b_own, b_dg + b_x * b_dx


@triton.jit
def _products(x, y, state, start, end, i_hx, i_h, i_s, HX: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
              M: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """x y^T [C, C] and x S^T [C, BM] over all of D: q with k and hk, do with v and hv."""
    b_A = tl.zeros([C, C], dtype=tl.float32)
    b_base = tl.zeros([C, BM], dtype=tl.float32)
    for i_d in range(0, (D + BD - 1) // BD):
        b_x = load_tile(x, start, end, i_hx, i_d, 0, HX, D, C, BD)
        b_y = load_tile(y, start, end, i_h, i_d, 0, H, D, C, BD)
        b_A += tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
        p, m = state_pointers(state, i_s, 0, i_d, M, D, BM, BD)
        b_S = tl.load(p, mask=m & (start < end), other=0.0)
        b_base += dot(b_x.to(tl.float32), tl.trans(b_S), PRECISION)
    return b_A, b_base


@triton.jit
def _softmax(b_scores, M: tl.constexpr, BM: tl.constexpr):
    b_scores = tl.where((tl.arange(0, BM) < M)[None, :], b_scores, -float("inf"))
    b_e = tl.exp(b_scores - tl.max(b_scores, 1)[:, None])
    return b_e / tl.sum(b_e, 1)[:, None]


@triton.jit
def output_kernel(
    q, k, v, s, g, hk, hv, o, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    ONE_OF_TWO: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o for one chunk and query head. In registers: A, then B [C, C]; scores, then p [C, BM]; o [C, BV] in turn.

    p = softmax(e^g (sums over A and hk) + A_ii s_i),   o = B v + (p e^{g + before}) hv
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_g, b_prev, b_next = _load_gates(g, start, end, i_h, H, M, C, BM)
    if ONE_OF_TWO:
        if is_mild(b_g) != MILD:
            return
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)

    b_A, b_base = _products(q, k, hk, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, PRECISION)
    b_A, diagonal = _below(b_A * scale, C)
    faded = _read_sums(b_A, b_base * scale, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
    b_p = _softmax(tl.exp(b_g) * faded + diagonal * b_s, M, BM)

    b_x = b_p * tl.exp(b_g)
    b_B = _pair_scores(b_x, b_p, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
    b_B, b_x = to_operand(b_B, PRECISION), b_x * tl.exp(decay_before(b_prev))
    for i_v in range(0, (V + BV - 1) // BV):
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        p_S, m_S = state_pointers(hv, i_s, 0, i_v, M, V, BM, BV)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_o = tl.dot(b_B, b_v, input_precision=PRECISION) + dot(b_x, b_S, PRECISION)
        store_tile(o, b_o, start, end, i_hq, i_v, H * G, V, C, BV)


@triton.jit
def slot_grads_kernel(
    q, k, v, s, g, do, hk, hv, p, dscores, ds, dg, scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    ONE_OF_TWO: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p, dscores and shares of ds, dg [B, T, HQ, M] for one chunk and query head.

    dp = e^g (sums over do v^T and hv) + (do v)_ii s_i,   dscores = p (dp - <p, dp>)
    In registers: A and dB [C, C]; s, g, p, dscores and the two reads' sums [C, BM].
    """
    i = tl.program_id(0)
    i_hq, i_c = i % (H * G), i // (H * G)
    i_h = i_hq // G
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_g, b_prev, b_next = _load_gates(g, start, end, i_h, H, M, C, BM)
    if ONE_OF_TWO:
        if is_mild(b_g) != MILD:
            return
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    now = tl.exp(b_g)

    b_A, b_base = _products(q, k, hk, start, end, i_hq, i_h, i_s, H * G, H, K, M, C, BK, BM, PRECISION)
    b_A, diagonal = _below(b_A * scale, C)
    b_base *= scale
    faded = _read_sums(b_A, b_base, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
    b_p = _softmax(now * faded + diagonal * b_s, M, BM)
    store_tile(p, b_p, start, end, i_hq, 0, H * G, M, C, BM)

    b_dB, b_dbase = _products(do, v, hv, start, end, i_hq, i_h, i_s, H * G, H, V, M, C, BV, BM, PRECISION)
    b_dB, ddiagonal = _below(b_dB, C)
    faded = _read_sums(b_dB, b_dbase, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
    b_dp = now * faded + ddiagonal * b_s
    b_ds, b_dg = _pair_grads(
        b_p * now, b_p, b_s, b_g, b_prev, b_next, b_dB, ddiagonal, b_dbase, C, BM, LEVELS, MILD, PRECISION
    )
    b_dp = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    store_tile(dscores, b_dp, start, end, i_hq, 0, H * G, M, C, BM)
    b_ds2, b_dg2 = _pair_grads(
        b_dp * now, b_dp, b_s, b_g, b_prev, b_next, b_A, diagonal, b_base, C, BM, LEVELS, MILD, PRECISION
    )
    store_tile(ds, b_ds + b_ds2, start, end, i_hq, 0, H * G, M, C, BM)
    store_tile(dg, b_dg + b_dg2, start, end, i_hq, 0, H * G, M, C, BM)


@triton.jit
def _load_read(x, b_now, start, end, i_hq, HQ: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """A read as it meets its own token, and faded by its own gate as it meets earlier ones."""
    b_own = load_tile(x, start, end, i_hq, 0, 0, HQ, M, C, BM).to(tl.float32)
    return b_own, b_own * b_now


@triton.jit
def grads_kernel(
    q, k, v, s, g, do, hk, dhk, dhv, hv, p, dscores, slot_ds, slot_dg, dq, dk, dv, ds, dg,
    scale, sequence_of_chunk, cu_seqlens, offsets, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    ONE_OF_TWO: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, and ds, dg completed, for one chunk and head; its group's queries are summed one after another.

    dq = scale (E k + (dscores e^{g + before}) hk),  dk = E^T scale q + (s e^{after}) D_hk,  E from dscores as B from p
    dv = B^T do + (s e^{after}) D_hv,                ds += (k D_hk^T + v D_hv^T) e^{after}
    dg_t += e^{total} sum(hk D_hk + hv D_hv) + sum_{j<t} s_j (that part of ds)_j
    In registers: E or B [C, C]; s, g and the part of ds [C, BM]; one gradient's [C, BK] or [C, BV].
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    i_s = i_c * H + i_h
    start, end = locate(i_c, sequence_of_chunk, cu_seqlens, offsets, T, C, PACKED)
    b_g, b_prev, b_next = _load_gates(g, start, end, i_h, H, M, C, BM)
    if ONE_OF_TWO:
        if is_mild(b_g) != MILD:
            return
    b_s = load_tile(s, start, end, i_h, 0, 0, H, M, C, BM).to(tl.float32)
    now, before, after = tl.exp(b_g), tl.exp(decay_before(b_prev)), tl.exp(decay_after(b_next))
    b_left = to_operand(b_s * after, PRECISION)

    b_ds = tl.zeros([C, BM], dtype=tl.float32)
    b_SD = tl.zeros([BM], dtype=tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        p_D, m_D = state_pointers(dhk, i_s, 0, i_k, M, K, BM, BK)
        p_S, m_S = state_pointers(hk, i_s, 0, i_k, M, K, BM, BK)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_S = tl.load(p_S, mask=m_S & (start < end), other=0.0)
        b_SD += tl.sum(b_S * b_D, 1)
        b_D, b_S = to_operand(b_D, PRECISION), to_operand(b_S, PRECISION)
        b_k = load_tile(k, start, end, i_h, i_k, 0, H, K, C, BK).to(tl.float32)
        b_ds += tl.dot(b_k, tl.trans(b_D), input_precision=PRECISION)
        b_dk = tl.dot(b_left, b_D, input_precision=PRECISION)
        for i_g in range(G):
            b_own, b_x = _load_read(dscores, now, start, end, i_h * G + i_g, H * G, M, C, BM)
            b_E = _pair_scores(b_x, b_own, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
            b_E = to_operand(b_E * scale, PRECISION)
            b_q = load_tile(q, start, end, i_h * G + i_g, i_k, 0, H * G, K, C, BK).to(tl.float32)
            b_dk += tl.dot(tl.trans(b_E), b_q, input_precision=PRECISION)
            b_dq = tl.dot(b_E, b_k, input_precision=PRECISION)
            b_dq += tl.dot(to_operand(b_x * before * scale, PRECISION), b_S, input_precision=PRECISION)
            store_tile(dq, b_dq, start, end, i_h * G + i_g, i_k, H * G, K, C, BK)
        store_tile(dk, b_dk, start, end, i_h, i_k, H, K, C, BK)

    for i_v in range(0, (V + BV - 1) // BV):
        p_D, m_D = state_pointers(dhv, i_s, 0, i_v, M, V, BM, BV)
        p_S, m_S = state_pointers(hv, i_s, 0, i_v, M, V, BM, BV)
        b_D = tl.load(p_D, mask=m_D & (start < end), other=0.0)
        b_SD += tl.sum(tl.load(p_S, mask=m_S & (start < end), other=0.0) * b_D, 1)
        b_D = to_operand(b_D, PRECISION)
        b_v = load_tile(v, start, end, i_h, i_v, 0, H, V, C, BV).to(tl.float32)
        b_ds += tl.dot(b_v, tl.trans(b_D), input_precision=PRECISION)
        b_dv = tl.dot(b_left, b_D, input_precision=PRECISION)
        for i_g in range(G):
            b_own, b_x = _load_read(p, now, start, end, i_h * G + i_g, H * G, M, C, BM)
            b_B = _pair_scores(b_x, b_own, b_s, b_g, b_prev, b_next, C, BM, LEVELS, MILD, PRECISION)
            b_do = load_tile(do, start, end, i_h * G + i_g, i_v, 0, H * G, V, C, BV).to(tl.float32)
            b_dv += dot(tl.trans(b_B), b_do, PRECISION)
        store_tile(dv, b_dv, start, end, i_h, i_v, H, V, C, BV)

    b_ds *= after
    o_c = tl.arange(0, C)
    earlier = (o_c[:, None] > o_c[None, :]).to(tl.float32)
    b_dg = (tl.exp(tl.sum(b_g, 0)) * b_SD)[None, :] + dot(earlier, b_s * b_ds, PRECISION)
    for i_g in range(G):
        b_ds += load_tile(slot_ds, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM)
        b_dg += load_tile(slot_dg, start, end, i_h * G + i_g, 0, 0, H * G, M, C, BM)
    store_tile(ds, b_ds, start, end, i_h, 0, H, M, C, BM)
    store_tile(dg, b_dg, start, end, i_h, 0, H, M, C, BM)


def _chunk_size(s, chunk_size: int) -> int:
    """Tokens a chunk where the caller does not say. A memory is M (K + V) large: longer chunks write fewer of them."""
    if chunk_size:
        return chunk_size
    return 64 if width(s.element_size()) == "16-bit" and s.shape[-1] <= 64 else 32


class _Plan(ChunkPlan):
    """A chunk plan whose states' rows are the slots, with the sizes of a group of queries beside them."""

    def __init__(self, q, k, v, s, cu_seqlens, chunk_size):
        super().__init__("gsa", s, v.shape[-1], cu_seqlens, _chunk_size(s, chunk_size))
        self.group, self.D = q.shape[2] // self.H, k.shape[-1]

    def launches(self, kernel: str):
        """Keyword arguments of each way through a chunk."""
        ways = ("mild", "dyadic") if self.width == "16-bit" else ("dyadic",)
        for way in ways:
            launch = TABLE[f"gsa.{kernel}.{way}", self.width]
            yield dict(
                H=self.H, G=self.group, K=self.D, V=self.V, M=self.K, C=self.C, BK=block(self.D, launch.BK),
                BV=block(self.V, launch.BV), BM=block(self.K, 128), ONE_OF_TWO=len(ways) == 2,
                LEVELS=self.C.bit_length() - 1, MILD=int(way == "mild"), PACKED=self.cu_seqlens is not None,
                PRECISION=self.precision, num_warps=launch.num_warps, num_stages=launch.num_stages,
            )  # fmt: skip

    def memory(self, x, k, v, g, first, last, scales, reverse):
        """hk and hv entering each chunk, or in reverse their gradients leaving it."""
        (x_k, x_v), (first_k, first_v), (last_k, last_v) = x, first, last
        hk, _ = self.states(x_k, k, g, scales[0], first_k, last_k, reverse, after=reverse)
        hv, _ = self.states(x_v, v, g, scales[1], first_v, last_v, reverse, after=reverse)
        return hk, hv


def _slot_rows(states) -> tuple:
    """(hk [N, H, K, M], hv [N, H, M, V]) with hk turned to [N, H, M, K]."""
    return (None, None) if states is None else (states[0].mT.contiguous(), states[1].contiguous())


def checkpoint_shapes(k, v, s, cu_seqlens, chunk_size) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what `forward` keeps for `backward`: hk and hv entering every chunk, slots as rows."""
    C = _chunk_size(s, chunk_size)
    return tuple(kept_states_shape(s, x.shape[-1], cu_seqlens, C) for x in (k, v))


def forward(q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep_states):
    """o, hk_T and hv_T (empty unless asked for), and both memories entering every chunk (empty unless kept)."""
    q, k, v, s, g = (x.contiguous() for x in (q, k, v, s, g))
    plan = _Plan(q, k, v, s, cu_seqlens, chunk_size)
    N, H, M, V = plan.state_shape()
    last = (plan.empty(N, H, M, plan.D), plan.empty(N, H, M, V)) if output_final_state else (None, None)
    hk, hv = plan.memory((s, s), k, v, g, _slot_rows(initial_state), last, (1.0, 1.0), reverse=False)
    o = q.new_empty(*q.shape[:3], V)
    for options in plan.launches("output"):
        output_kernel[(plan.chunks * H * plan.group,)](
            q, k, v, s, g, hk, hv, o, scale, *plan.where, **options
        )  # fmt: skip
    final = (last[0].mT.contiguous(), last[1]) if output_final_state else (plan.empty(0), plan.empty(0))
    return o, *final, *((hk, hv) if keep_states else (plan.empty(0), plan.empty(0)))


def backward(q, k, v, s, g, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state):
    """dq, dk, dv, ds, dg in their inputs' dtypes and (dhk_0, dhv_0) in float32."""
    q, k, v, s, g, do = (x.contiguous() for x in (q, k, v, s, g, do))
    plan = _Plan(q, k, v, s, cu_seqlens, chunk_size)
    N, H, M, V = plan.state_shape()
    hk, hv = kept
    rows = (*q.shape[:3], M)
    p, dscores, slot_ds, slot_dg = (plan.empty(rows) for _ in range(4))
    for options in plan.launches("slot_grads"):
        # A product is taken away from a sum that holds it: a fused multiply-add would not take the same one.
        slot_grads_kernel[(plan.chunks * H * plan.group,)](
            q, k, v, s, g, do, hk, hv, p, dscores, slot_ds, slot_dg, scale, *plan.where, **options,
            enable_fp_fusion=False,
        )  # fmt: skip

    first = plan.empty(N, H, M, plan.D), plan.empty(N, H, M, V)
    dhk, dhv = plan.memory((dscores, p), q, do, g, _slot_rows(dfinal_state), first, (scale, 1.0), reverse=True)
    dq, dk, dv, ds, dg = (torch.empty_like(x) for x in (q, k, v, s, g))
    for options in plan.launches("grads"):
        grads_kernel[(plan.chunks * H,)](
            q, k, v, s, g, do, hk, dhk, dhv, hv, p, dscores, slot_ds, slot_dg, dq, dk, dv, ds, dg,
            scale, *plan.where, **options,
        )  # fmt: skip
    return dq, dk, dv, ds, dg, (first[0].mT, first[1])
