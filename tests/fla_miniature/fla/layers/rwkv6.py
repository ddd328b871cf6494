from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6


def mix(r, k, v, w, u, state=None, use_cache=False, cu_seqlens=None):
    operator = fused_recurrent_rwkv6 if r.shape[1] <= 64 else chunk_rwkv6
    return operator(
        r=r,
        k=k,
        v=v,
        w=w,
        u=u,
        scale=1.0,
        initial_state=state,
        output_final_state=use_cache,
        cu_seqlens=cu_seqlens,
    )
