from .chunk import chunk_rwkv7
from .fused_recurrent import fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7

__all__ = ["chunk_rwkv7", "fused_mul_recurrent_rwkv7", "fused_recurrent_rwkv7"]
