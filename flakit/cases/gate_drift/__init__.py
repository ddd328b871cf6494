"""Gates that drift in training until a kernel's fault is reached, and what brings the training back.

As reported (flash-linear-attention issue #77): NaN in the gradients as training goes on, rare at first, then more and
more often; re-initialising the forget gate's projection cures it, re-initialising anything else does not. As measured
here: the gates drift by themselves. The task is to predict the token two steps back (`Delay`). Older tokens are noise,
so faster decay is better, and AdamW lowers the log decays step by step. A step fails as soon as one exponent in the
faulty kernel exceeds ln(max) = 88.72:

    GSA, the fault of `padding`     minus the gates of the last chunk's first tokens, summed (48 of them at T = 56)
    RWKV6, bug A of `anchor`        minus the decay of one token, at the first row of a block inside a chunk

Which sequence fails depends on its tokens, hence "rare at first". A failed step is skipped, as by trainers with a
non-finite guard, and so is any step that would have reversed the drift: the fraction of failed steps grows, for GSA to
all. Re-initialising the projection of the gates, f_proj (RWKV6: w), cures the training until the gates have drifted
again. In GSA so does re-initialising the norms before it, which leaves the gates just inside the limit; no other
parameter does. The report's clamp |f| < 20 has no effect, |w| < 12 excludes bug A. The right kernel on the same data
fails in no step, nor does softmax attention, which has no gates.

The learning rate, `LEARNING_RATE`, is several times a usual one, and constant; nothing else speeds up the drift. At a
quarter of it GSA's first failure comes after 2680 steps instead of some 200 (data/gate_drift.json), then the same
happens. RWKV6 fails with three seeds of four. A wider GSA on the report's 3000 tokens at a rate of 0.002, on a GPU,
first fails after some 3000 steps, soon in every step; with the right kernel the same gates drift on, to three times the
limit, without a failure (data/h200_gate_drift.json).

`text` has a run that ends in NaN: a small RWKV6 learns Python's own source at an ordinary rate, in a loop without a
guard. Its decays drift in the same way; with a right kernel the loss continues to fall (data/fatal_run.json).
"""

from .delay import KERNELS, LEARNING_RATE, PROJECTION, SIZE, attempts, drift, law, model, parts, reinitialised
from .text import fatal_batch, fatal_step, initial, recorded, relive, replay, resume, start
from .watched import LIMIT, Drift, T, exponents, faulty

__all__ = [
    "KERNELS", "LEARNING_RATE", "LIMIT", "PROJECTION", "SIZE", "Drift", "T", "attempts", "drift", "exponents",
    "fatal_batch", "fatal_step", "faulty", "initial", "law", "model", "parts", "recorded", "reinitialised", "relive",
    "replay", "resume", "start",
]  # fmt: skip
