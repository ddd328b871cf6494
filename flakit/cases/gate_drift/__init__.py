"""Gates that drift in training until a kernel's fault is reached, and what brings the training back.

As told (flash-linear-attention issue #77): NaN in the gradients as training goes on, rare at first, then more and more
often; re-initialising the forget gate's projection cures it, re-initialising anything else does not.
As measured here: nothing has to push the gates. The task is to say the token two before (`Delay`), all older tokens are
noise, and forgetting faster is better, so that AdamW lowers the log decays step by step. A step is lost as soon as one
exponent that the faulty kernel takes passes ln(max) = 88.72:

    GSA, the fault of `padding`     minus the gates of the last chunk's first tokens, summed (48 of them at T = 56)
    RWKV6, bug A of `anchor`        minus the decay of one token, at the first row of a block inside a chunk

Which sequence does it depends on its tokens, hence "rare at first". A lost step is skipped, as trainers with a
non-finite guard do, and so is any step that would have turned back: the share of lost steps grows, for GSA to all.
The projection that makes the gates, f_proj (RWKV6: w), re-initialised brings the training back, until the gates have
drifted again. In GSA so do the norms that it sees everything through, which leaves the gates just inside the limit; of
the other parameters none does. The thread's clamp |f| < 20 changes nothing, |w| < 12 rules bug A out. The right kernel
on the same data loses no step, nor does softmax attention, which has no gates.

The one knob that hurries is the learning rate, `LEARNING_RATE`: several times a usual one, and held. At a quarter of it
GSA loses its first step after 2680 instead of some 200 (data/gate_drift.json), and then goes the same way. RWKV6 gets
there with three seeds of four. A wider GSA on the story's 3000 tokens at a rate of 0.002, on a GPU, loses its first
step after some 3000 and soon all of them; with the right kernel the same gates drift on, to three times the limit, and
no step is lost (data/h200_gate_drift.json).

And a run that dies (`text`): a small RWKV6 learns Python's own source at an ordinary rate, in a loop without a guard.
Its decays drift in the same way: with chunks anchored at their start the loss is NaN after some 80 steps, with bug A
after a thousand, of one token; with a right kernel it goes on falling (data/fatal_run.json). `resume` puts any kernel
into the run from the step before, `fatal_batch` says what the operator was given in the step that was fatal.
"""

from .delay import (
    KERNELS,
    LEARNING_RATE,
    PROJECTION,
    SIZE,
    WARMUP,
    Attempt,
    attempts,
    drift,
    law,
    model,
    parts,
    reinitialised,
)
from .text import FatalBatch, Replay, fatal_batch, fatal_step, initial, recorded, relive, replay, resume, start
from .watched import LIMIT, Drift, T, exponents, faulty

__all__ = [
    "KERNELS", "LEARNING_RATE", "LIMIT", "PROJECTION", "SIZE", "WARMUP", "Attempt", "Drift", "FatalBatch", "Replay",
    "T", "attempts", "drift", "exponents", "fatal_batch", "fatal_step", "faulty", "initial", "law", "model", "parts",
    "recorded", "reinitialised", "relive", "replay", "resume", "start",
]  # fmt: skip
