def fused_recurrent_rwkv6(
    r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
):
    raise RuntimeError("needs a GPU")
