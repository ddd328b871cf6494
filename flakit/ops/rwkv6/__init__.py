"""RWKV6 (Finch): a matrix-valued state with a decay per channel and token."""

from .api import RWKV6Output, chunk_rwkv6, fused_recurrent_rwkv6

__all__ = ["RWKV6Output", "chunk_rwkv6", "fused_recurrent_rwkv6"]
