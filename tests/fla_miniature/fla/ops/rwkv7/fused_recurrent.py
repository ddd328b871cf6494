def fused_recurrent_rwkv7(r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None):
    raise RuntimeError("needs a GPU")


def fused_mul_recurrent_rwkv7(
    r, w, k, v, kk, a, scale=1.0, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
):
    raise RuntimeError("needs a GPU")
