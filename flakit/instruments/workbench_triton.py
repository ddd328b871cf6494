"""RWKV6 forward in chunks, as a lesson writes it: loads and stores, and four ways to form the scores of a chunk.

`workbench` makes a file of it with one of the four, or with a learner's lines. One program goes through one head, chunk
after chunk, with the state in registers. Over a chunk, with gi the cumulative log decay up to each token and ge that
before it:

    o = A v + (r e^{ge}) S          A_ij = sum_c r_ic k_jc e^{ge_ic - gi_jc} for j < i,  A_ii = sum_c r_ic u_c k_ic
    S <- e^{all} S + (k e^{all - gi})^T v          all: the chunk's whole decay

The four differ in the row n of gi, the anchor, about which e^{ge_i - gi_j} becomes e^{ge_i - n} times e^{n - gi_j}.
"""

import triton
import triton.language as tl


@triton.jit
def scores_from_the_start(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    b_reads = b_r * tl.exp(b_ge)
    b_keys = b_k * tl.exp(-b_gi)
    return tl.dot(b_reads, tl.trans(b_keys), input_precision="ieee")


@triton.jit
def scores_from_the_middle(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    b_n = tl.sum(tl.where(o_i == C // 2 - 1, b_gi, 0.0), 0)[None, :]
    b_reads = b_r * tl.exp(b_ge - b_n)
    b_keys = b_k * tl.exp(b_n - b_gi)
    return tl.dot(b_reads, tl.trans(b_keys), input_precision="ieee")


@triton.jit
def scores_in_blocks(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for p in tl.static_range(0, C, 16):
        inside = (o_i >= p) & (o_i < p + 16)
        b_n = tl.sum(tl.where(o_i == p + 7, b_gi, 0.0), 0)[None, :]
        b_reads = b_r * tl.exp(tl.where(inside, b_ge - b_n, float("-inf")))
        b_keys = b_k * tl.exp(tl.where(o_i < p + 16, b_n - b_gi, float("-inf")))
        b_A += tl.dot(b_reads, tl.trans(b_keys), input_precision="ieee")
    return b_A


@triton.jit
def scores_by_halves(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
    b_A = tl.zeros([C, C], dtype=tl.float32)
    for level in tl.static_range(6):
        s = 1 << level
        right = o_i // s % 2 == 1
        b_n = tl.gather(b_gi, tl.broadcast_to(o_i // (2 * s) * (2 * s) + s - 1, b_gi.shape), 0)
        b_p = tl.where(right, b_r, b_k) * tl.exp(tl.where(right, b_ge - b_n, b_n - b_gi))
        meet = right & (o_i // s == o_j // s + 1)
        b_A += tl.where(meet, tl.dot(b_p, tl.trans(b_p), input_precision="ieee"), 0.0)
    return b_A


scores = scores_from_the_start


@triton.jit
def output(b_A, b_v, b_r, b_ge, b_S):
    b_o = tl.dot(b_A, b_v, input_precision="ieee")
    return b_o + tl.dot(b_r * tl.exp(b_ge), b_S, input_precision="ieee")


@triton.jit
def next_state(b_S, b_k, b_v, b_gi, b_all):
    b_keys = b_k * tl.exp(b_all[None, :] - b_gi)
    return tl.exp(b_all)[:, None] * b_S + tl.dot(tl.trans(b_keys), b_v, input_precision="ieee")


@triton.jit
def chunk_kernel(
    r, k, v, w, u, o, scale, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr
):
    i_h = tl.program_id(0)
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    o_k, o_v = tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    b_u = tl.load(u + i_h * K + o_k)
    b_S = tl.zeros([K, V], dtype=tl.float32)
    for start in range(0, T, C):
        at_k = ((start + o_i) * H + i_h) * K + o_k
        at_v = ((start + o_i) * H + i_h) * V + o_v
        b_r, b_k = tl.load(r + at_k) * scale, tl.load(k + at_k)
        b_v, b_w = tl.load(v + at_v), tl.load(w + at_k)
        b_gi = tl.cumsum(b_w, 0)
        b_ge, b_all = b_gi - b_w, tl.sum(b_w, 0)
        b_A = scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C)
        b_own = tl.sum(b_r * b_u * b_k, 1)[:, None]
        b_A = tl.where(o_i > o_j, b_A, tl.where(o_i == o_j, b_own, 0.0))
        tl.store(o + at_v, output(b_A, b_v, b_r, b_ge, b_S))
        b_S = next_state(b_S, b_k, b_v, b_gi, b_all)
