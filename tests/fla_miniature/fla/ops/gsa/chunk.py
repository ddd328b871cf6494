def chunk_gsa(
    q,
    k,
    v,
    s,
    g=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    checkpoint_level=2,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **kwargs,
):
    raise RuntimeError("needs a GPU")
