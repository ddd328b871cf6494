from .gsa import chunk_gsa, fused_recurrent_gsa
from .rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from .rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7

__all__ = [
    "chunk_gsa",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_recurrent_gsa",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
]
