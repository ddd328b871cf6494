"""RWKV7 (Goose): a matrix-valued state that a generalised delta rule edits, with a decay per channel and token."""

from .api import RWKV7Output, chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7

__all__ = ["RWKV7Output", "chunk_rwkv7", "fused_mul_recurrent_rwkv7", "fused_recurrent_rwkv7"]
