def chunk_rwkv7(
    r,
    w,
    k,
    v,
    a,
    b,
    scale=1.0,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    safe_gate=False,
    chunk_size=None,
    disable_recompute=False,
    cp_context=None,
    lower_bound=None,
):
    raise RuntimeError("needs a GPU")
