"""Launch parameters of every kernel, in one place: no autotuning at run time, so a first call takes seconds.

Keyed by kernel and by whether the inputs are 16-bit; "gsa128" is GSA with more than 64 slots, all of them in registers.
Found on an H200 (sm_90); they also fit sm_80's shared memory.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    BK: int
    """Largest block of key channels a program holds; a smaller K takes the next power of two, at least 16."""
    BV: int
    """Likewise of value channels; of a scan, the elements of the state a program carries."""
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Registers a thread may have, where fewer than it would take let more programs run at once."""


CHUNK_SIZE = 32
"""Tokens a chunk where the caller does not say, and the most a kernel for any decay looks at."""

LONG_CHUNK_SIZE = 64
"""Likewise of bfloat16 RWKV6 with heads of 33 to 64 channels, which is what models have and where it was tried."""

CHECKPOINT = 32
"""Tokens between the states a recurrent forward keeps for its backward."""

ENOUGH = 512
"""Programs that walk along time which fill a GPU: about four a multiprocessor."""

SHORTEST_SEGMENT = 16
"""Chunks; below it, cutting sequences into segments costs more than it brings."""

TABLE = {
    ("scan", "16-bit"): Launch(1, 1024, 4, 1),
    ("scan", "float32"): Launch(1, 1024, 4, 1),
    ("rwkv6.stream", "16-bit"): Launch(64, 64, 4, 3),
    ("rwkv6.stream", "float32"): Launch(32, 64, 2, 2),
    ("rwkv6.output.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.output.dyadic", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv6.output.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv6.value_grads.mild", "16-bit"): Launch(64, 64, 4, 1, 168),
    ("rwkv6.value_grads.dyadic", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv6.value_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv6.key_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.key_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv6.key_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv6.recurrent", "16-bit"): Launch(512, 16, 4, 1),
    ("rwkv6.recurrent", "float32"): Launch(512, 16, 4, 1),
    ("rwkv6.recurrent_grads", "16-bit"): Launch(512, 16, 4, 1),
    ("rwkv6.recurrent_grads", "float32"): Launch(512, 16, 4, 1),
    ("rwkv7.prepare.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.prepare.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv7.stream", "16-bit"): Launch(256, 64, 4, 1),
    ("rwkv7.stream", "float32"): Launch(256, 32, 4, 1),
    ("rwkv7.output.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.output.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.output.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv7.prepare_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare_grads.dyadic", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.prepare_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv7.value_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("rwkv7.value_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.value_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv7.key_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("rwkv7.key_grads.dyadic", "16-bit"): Launch(64, 64, 8, 1),
    ("rwkv7.key_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("rwkv7.recurrent", "16-bit"): Launch(512, 16, 4, 1),
    ("rwkv7.recurrent", "float32"): Launch(512, 16, 4, 1),
    ("rwkv7.recurrent_grads", "16-bit"): Launch(512, 16, 4, 1),
    ("rwkv7.recurrent_grads", "float32"): Launch(512, 16, 4, 1),
    ("gsa.gates", "16-bit"): Launch(128, 1, 1, 1),
    ("gsa.gates", "float32"): Launch(128, 1, 1, 1),
    ("gsa.stream", "16-bit"): Launch(32, 128, 2, 2),
    ("gsa.stream", "float32"): Launch(32, 64, 2, 2),
    ("gsa.output.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("gsa.output.dyadic", "16-bit"): Launch(32, 32, 4, 1),
    ("gsa.output.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("gsa.softmax_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("gsa.softmax_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa.softmax_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("gsa.slot_grads.mild", "16-bit"): Launch(64, 64, 2, 1),
    ("gsa.slot_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa.slot_grads.dyadic", "float32"): Launch(32, 32, 4, 1),
    ("gsa.pass_grads.mild", "16-bit"): Launch(32, 32, 2, 1),
    ("gsa.pass_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa.pass_grads.dyadic", "float32"): Launch(16, 16, 4, 1),
    ("gsa128.stream", "16-bit"): Launch(32, 128, 2, 2),
    ("gsa128.stream", "float32"): Launch(32, 64, 2, 2),
    ("gsa128.gates", "16-bit"): Launch(128, 1, 2, 1),
    ("gsa128.gates", "float32"): Launch(128, 1, 2, 1),
    ("gsa128.output.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.output.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.output.dyadic", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.softmax_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.softmax_grads.dyadic", "16-bit"): Launch(64, 64, 8, 1),
    ("gsa128.softmax_grads.dyadic", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.slot_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.slot_grads.dyadic", "16-bit"): Launch(64, 64, 8, 1),
    ("gsa128.slot_grads.dyadic", "float32"): Launch(32, 32, 8, 1),
    ("gsa128.pass_grads.mild", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.pass_grads.dyadic", "16-bit"): Launch(64, 64, 4, 1),
    ("gsa128.pass_grads.dyadic", "float32"): Launch(16, 16, 8, 1),
    ("gsa.recurrent", "16-bit"): Launch(128, 16, 4, 1),
    ("gsa.recurrent", "float32"): Launch(128, 16, 4, 1),
    ("gsa.recurrent_grads", "16-bit"): Launch(128, 16, 4, 1),
    ("gsa.recurrent_grads", "float32"): Launch(128, 16, 4, 1),
}


def width(itemsize: int) -> str:
    return "16-bit" if itemsize == 2 else "float32"


def block(size: int, limit: int) -> int:
    """The block that covers an axis: the next power of two, at least 16 (what a tensor-core dot needs)."""
    return min(max(16, 1 << (size - 1).bit_length()), limit)


def elements(size: int, rows: int, limit: int) -> int:
    """Elements of `rows` states of `size` elements that one program of a scan carries.

    Few states are cut finer: a scan is as fast as its loads overlap, and about two programs a multiprocessor do that.
    """
    BE = limit
    while BE > 256 and -(-size // BE) * rows < 256:
        BE //= 2
    return BE
