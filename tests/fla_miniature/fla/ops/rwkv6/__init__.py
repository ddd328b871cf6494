from .chunk import chunk_rwkv6
from .fused_recurrent import fused_recurrent_rwkv6

__all__ = ["chunk_rwkv6", "fused_recurrent_rwkv6"]
