"""The kernel of the transposed mask. Its faulty and its right form differ in one line.

python -m flakit.cases.transposed_mask.kernel_triton 32x32 16x64   (BK x BV)

compiles both forms for other GPUs and prints the results as JSON. A process compiles or interprets, never both, so
`transposed_mask.compile_table` starts this module in a process of its own.
"""

import json
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from ...ops.common.dispatch import interpreted_alone
from ..transposed_mask import DoesNotCompile


@triton.jit
def read_grads_kernel(
    k, v, w, do, initial_state, dr, seen, scale, T, K, V,
    BK: tl.constexpr, BV: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """dr_t = scale * S_{t-1} do_t, the part from this block of V; S <- diag(e^{w_t}) S + k_t v_t^T. In registers: S as
    a tile [BV, BK], values down, keys across. `seen` receives the initial state as it was loaded."""
    i_k, i_v, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_k, o_v = i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[None, :] * V + o_v[:, None], m_v[:, None] & m_k[None, :]  # [BV, BK]
    if TRANSPOSED:
        m_load = m_k[:, None] & m_v[None, :]  # [BK, BV]
    else:
        m_load = m_s
    b_S = tl.load(initial_state + i_bh * K * V + o_s, mask=m_load, other=0.0)
    tl.store(seen + i_bh * K * V + o_s, b_S, mask=m_s)
    for t in range(0, T):
        row = i_bh * T + t
        b_k = tl.load(k + row * K + o_k, mask=m_k, other=0.0)
        b_w = tl.load(w + row * K + o_k, mask=m_k, other=0.0)
        b_v = tl.load(v + row * V + o_v, mask=m_v, other=0.0)
        b_do = tl.load(do + row * V + o_v, mask=m_v, other=0.0)
        b_dr = tl.sum(b_S * b_do[:, None], 0) * scale
        tl.store(dr + ((i_v * tl.num_programs(2) + i_bh) * T + t) * K + o_k, b_dr, mask=m_k)
        b_S = tl.exp(b_w)[None, :] * b_S + b_v[:, None] * b_k[None, :]


@interpreted_alone()
def read_grads(
    k: Tensor, v: Tensor, w: Tensor, do: Tensor, initial_state: Tensor, scale: float, BK: int, BV: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return dr without the bonus's part, [BH, T, K], and the initial state as the kernel loaded it, [BH, K, V]. Inputs
    are heads first: k, w [BH, T, K], v, do [BH, T, V]. Raises `DoesNotCompile` if mask and tile do not fit."""
    (BH, T, K), V = k.shape, v.shape[-1]
    NK, NV = triton.cdiv(K, BK), triton.cdiv(V, BV)
    # The faulty mask reads beyond the last state: pad, so that it reads zeros and no other tensor.
    padded = initial_state.new_zeros(BH * K * V + BK * V + BV)
    padded[: BH * K * V] = initial_state.reshape(-1)
    dr, seen = k.new_empty(NV, BH, T, K), torch.empty_like(initial_state)
    k, v, w, do = (x.contiguous() for x in (k, v, w, do))
    try:
        read_grads_kernel[NK, NV, BH](
            k, v, w, do, padded, dr, seen, scale, T, K, V, BK=BK, BV=BV, TRANSPOSED=transposed
        )  # fmt: skip
    except TritonError as error:  # it wraps whatever a line of the kernel raises, so that its type alone says little
        message = str(error).strip().splitlines()[-1]
        if "incompatible dimensions" not in message:
            raise
        raise DoesNotCompile(message) from error
    return dr.sum(0), seen


def compile_error(BK: int, BV: int, transposed: bool, capability: int) -> str | None:
    """Compile `read_grads_kernel` for a compute capability (80: A100, 90: H100). Return its error; None on success."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    pointers = ("k", "v", "w", "do", "initial_state", "dr", "seen")
    constants = {"BK": BK, "BV": BV, "TRANSPOSED": transposed}
    numbers = {"scale": "fp32", "T": "i32", "K": "i32", "V": "i32"}
    signature = dict.fromkeys(pointers, "*fp32") | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(pointers))}
    source = ASTSource(fn=read_grads_kernel, signature=signature, constexprs=constants, attrs=aligned)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    except CompilationError as error:
        return str(error)
    return None if compiled.asm["cubin"] else "no machine code"


if __name__ == "__main__":
    rows = []
    for tile in sys.argv[1:]:
        BK, BV = (int(size) for size in tile.split("x"))
        for capability in (80, 90):
            for transposed in (False, True):
                error = compile_error(BK, BV, transposed, capability)
                rows.append({"BK": BK, "BV": BV, "transposed": transposed, "sm": capability, "error": error})
    print(json.dumps({"triton": triton.__version__, "rows": rows}))
