"""flakit: an interactive laboratory for the numerics of linear-attention kernels."""

__version__ = "0.1.0"
