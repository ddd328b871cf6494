"""Where a chunk's decay is anchored: the choice that decides at which decay NaN begins.

Inside a chunk, the weight of key j in output i is exp(g_i - gi_j): gi the inclusive cumulative log decay, and g_i what
the read has decayed by: ge, the exclusive one, in RWKV6 and for RWKV7's a; gi itself for RWKV7's r and in GSA. A matrix
product needs it as two factors, exp(g_i - n) * exp(n - gi_j), with some anchor n. Algebra does not care which;
floating point does: an exponent above ln(max) = 88.72 makes an infinity, and the other factor, a zero, turns it into
NaN.

As reported (flash-linear-attention issue #77): exp(b_gq - b_gn) explodes because RWKV6's cumulative decay is exclusive.
As measured: the anchor was the block's *first* row p. There ge_p - gi_p = -w_p is one token's decay, not a cumulative
one, so a single w[16] = -88.8 suffices, in the forward pass too; -500 at any other row is harmless. With gi of the row
before (n = gi_{p-1}) both exponents are <= 0. A first repair read that row across the chunk boundary, where the
cumulative sum had just restarted, and failed at 88.72 / 64 per token instead. An inclusive read has gi_p - gi_p = 0
there: GSA is immune to the first fault (not to the repair's), RWKV7 is not, because of its a.

`SCHEMES` holds the anchors of the field, from none to the dyadic form flakit's own operators use; `run` computes an
operator with one of them, `limits` and `law` predict the decay it survives, `worst` says where it ends, `onset`
measures it. A decay with a bound never gets there: RWKV7's w > -0.6065 leaves the middle of a block of 16 (or of 64)
far from any limit in float32; only factors stored in float16 overflow, after 18 tokens.

All but "dyadic" take the decay's gradient from running sums, as published kernels do: finite where the others are, but
at strong decay a difference of large numbers that leaves noise (see `decay_gradient`).
"""

from .law import Worst, law, limits, worst
from .measurement import KERNEL_ANCHORS, Run, exponents, onset, run
from .operators import OPERATORS, TENSORS
from .schemes import SCHEMES, Scheme, Tile, key_tiles, tiles
from .story import Anchored, Shown, reproduce, show, spike

__all__ = [
    "KERNEL_ANCHORS", "OPERATORS", "SCHEMES", "TENSORS", "Anchored", "Run", "Scheme", "Shown", "Tile", "Worst",
    "exponents", "key_tiles", "law", "limits", "onset", "reproduce", "run", "show", "spike", "tiles", "worst",
]  # fmt: skip
