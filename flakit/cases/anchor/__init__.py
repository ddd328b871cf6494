"""Where a chunk's decay is anchored: the choice that decides at which decay NaN begins.

Inside a chunk, key j has the weight exp(seen_i - gi_j) in output i. gi is the inclusive cumulative log decay. seen_i is
the cumulative decay at the read of token i: ge, the exclusive one, for RWKV6 and for RWKV7's a; gi itself for RWKV7's r
and for GSA. A matrix product needs the weight as two factors, exp(seen_i - n) * exp(n - gi_j), with some anchor n. In
algebra any n will do. In floating point an exponent above ln(max) = 88.72 makes a factor infinite, and the other
factor, a zero, turns it into NaN.

As reported (flash-linear-attention issue #77): exp(b_gq - b_gn) explodes because RWKV6's cumulative decay is exclusive.
As measured: the anchor was the block's *first* row p ("bug A"). There ge_p - gi_p = -w_p is one token's decay, not a
cumulative one, so a single w[16] = -88.8 suffices, in the forward pass too; -500 at any other row is harmless. With gi
of the row before (n = gi_{p-1}) both exponents are <= 0. The first repair read that row across the chunk boundary,
where the cumulative sum restarts, and failed at 88.72 / 64 per token instead. An inclusive read has gi_p - gi_p = 0 at
row p: GSA is immune to bug A (not to the first repair's fault), RWKV7 is not, because of its a.

`SCHEMES` holds the anchors in use, from none to the dyadic form of flakit's own operators. `run` computes an operator
with one of them, `limits` and `law` predict the decay up to which it is finite, `worst` finds the largest exponent and
its position, `onset` measures the limit. A bounded decay may never reach it: with RWKV7's w > -0.6065 the middle of a
block of 16 or 64 is far from any limit in float32; only factors stored in float16 overflow, after 18 tokens.

All schemes but "dyadic" take the decay's gradient from running sums, as published kernels do: finite where the other
gradients are, but at strong decay a difference of large numbers that leaves noise (see `decay_gradient`).
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
