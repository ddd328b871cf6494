"""GSA (gated slot attention): a memory of slots that fade, read twice with a softmax in between."""

from .api import GSAOutput, chunk_gsa, fused_recurrent_gsa

__all__ = ["GSAOutput", "chunk_gsa", "fused_recurrent_gsa"]
