def chunk_rwkv6(
    r,
    k,
    v,
    w,
    u,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **kwargs,
):
    raise RuntimeError("needs a GPU")
