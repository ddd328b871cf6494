import torch

from fla.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7


def mix(r, w, k, v, kk, a, state=None, use_cache=False, cu_seqlens=None):
    if r.shape[1] >= 64 or torch.is_grad_enabled():
        return chunk_rwkv7(
            r=r,
            w=w,
            k=k,
            v=v,
            a=-kk,
            b=kk * a,
            scale=1.0,
            initial_state=state,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            safe_gate=True,
            lower_bound=-0.6065306597126334,
            chunk_size=64,
        )
    return fused_mul_recurrent_rwkv7(
        r=r,
        w=w,
        k=k,
        v=v,
        kk=kk,
        a=a,
        scale=1.0,
        initial_state=state,
        output_final_state=use_cache,
        cu_seqlens=cu_seqlens,
    )
