from fla.ops.gsa import chunk_gsa, fused_recurrent_gsa


def mix(q, k, v, s, f, state=None, use_cache=False, cu_seqlens=None):
    operator = fused_recurrent_gsa if q.shape[1] <= 64 else chunk_gsa
    return operator(
        q=q,
        k=k,
        v=v,
        s=s,
        g=f,
        initial_state=state,
        output_final_state=use_cache,
        scale=1.0,
        cu_seqlens=cu_seqlens,
    )
