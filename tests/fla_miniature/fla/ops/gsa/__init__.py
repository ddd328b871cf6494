from .chunk import chunk_gsa
from .fused_recurrent import fused_recurrent_gsa

__all__ = ["chunk_gsa", "fused_recurrent_gsa"]
