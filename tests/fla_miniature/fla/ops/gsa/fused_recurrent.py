def fused_recurrent_gsa(
    q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
):
    raise RuntimeError("needs a GPU")
