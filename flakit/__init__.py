"""flakit: an interactive laboratory for the numerics of linear-attention kernels."""

from .numerics.inputs import inputs
from .numerics.sweep import sweep
from .ops.common.validation import checked
from .ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

__version__ = "0.1.0"

__all__ = ["checked", "chunk_rwkv6", "fused_recurrent_rwkv6", "inputs", "sweep"]
