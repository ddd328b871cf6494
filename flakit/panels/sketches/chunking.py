"""The sketches of 03_chunking."""

import torch

from ...cases.anchor import Scheme, exponents, tiles
from ...figures.sketches.chunking import KINDS, Chunks, ChunksShown, Split, SplitShown, Ways, WaysShown
from ...numerics.inputs import inputs
from ...ops.common.decay import level_blocks
from ...ops.rwkv6 import fused_recurrent_rwkv6
from ..knobs import choice, integer, steps
from .sketch import Sketch

_T, _SLOW = 32, -0.1  # of "chunks"
_CHUNK, _SMALL, _BLOCK, _DECAY = 64, 16, 4, -1.0  # of "split", of "ways", and the decay of both

MIDDLE = Scheme("whole-middle", "one product about the middle", whole=True, diagonal="middle")
"""A chunk as a single product, anchored at any row."""

WAYS = ("one product", "blocks", "halves of halves")


def _chunks(chunk: int) -> ChunksShown:
    """Each token writes its own unit vector, so that an output shows how much of each token it contains."""
    ones = torch.ones(1, _T, 1, 1, dtype=torch.float64)
    values, u = torch.eye(_T, dtype=torch.float64)[None, :, None], torch.zeros(1, 1, dtype=torch.float64)
    past, itself, inside = (
        fused_recurrent_rwkv6(ones, ones, values, _SLOW * ones, bonus, cu_seqlens=starts).o[0, :, 0]
        # A sequence for each chunk: no state enters a chunk.
        for bonus, starts in ((u, None), (u + 1, None), (u, torch.arange(0, _T + 1, chunk)))
    )
    kinds = torch.full((_T, _T), KINDS.index("future"))
    kinds[itself != 0], kinds[past != 0] = KINDS.index("itself"), KINDS.index("inter")
    kinds[inside != 0] = KINDS.index("intra")
    return ChunksShown(chunk, kinds.numpy(), past.numpy(), _SLOW)


def _split(anchor: int) -> SplitShown:
    x = inputs("rwkv6", T=_CHUNK, H=1, K=1, decay=_DECAY)
    if anchor == 0:
        read, key = exponents(x, "none")
    else:  # the decay before a token is the decay up to the previous row
        read, key = exponents(x, MIDDLE, row=anchor - 1)
    return SplitShown(anchor, _DECAY, read[:, 0].numpy(), key[0].numpy(), (read.exp() * key.exp()).numpy())


def _ways(way: str) -> WaysShown:
    x, C = inputs("rwkv6", T=_SMALL, H=1, K=1, decay=_DECAY), _SMALL
    number = torch.zeros(C, C, dtype=torch.int64)
    if way == "one product":
        read, key = exponents(x, MIDDLE, chunk=C, row=C // 2 - 1)
        number[:] = 1
    elif way == "blocks":
        read, key = exponents(x, "previous-row", chunk=C, block=_BLOCK)
        anchored = [tile for tile in tiles("previous-row", C, _BLOCK) if tile.anchor is not None]
        for n, tile in enumerate(anchored, 1):
            number[tile.rows, tile.keys] = n
    else:
        read, key = exponents(x, "dyadic", chunk=C)
        for n in range(1, C.bit_length()):
            level_blocks(number, C >> n)[:] = n
    number.masked_fill_(read.isnan(), -1)
    return WaysShown(_DECAY, number.numpy(), read.numpy(), key.numpy())


SKETCHES = {
    "chunks": Sketch(
        {"chunk": lambda: steps(8, [1 << n for n in range(_T.bit_length())], "chunk C")},
        _chunks,
        Chunks,
        {"token by token": {"chunk": 1}, "chunks of 8": {"chunk": 8}, "one chunk": {"chunk": _T}},
        """import torch
from flakit import fused_recurrent_rwkv6

T, chunk = 32, {chunk}
ones, values, u = torch.ones(1, T, 1, 1), torch.eye(T)[None, :, None], torch.zeros(1, 1)
inside = fused_recurrent_rwkv6(ones, ones, values, -0.1 * ones, u, cu_seqlens=torch.arange(0, T + 1, chunk)).o
print("steps", T // chunk, "pairs inside chunks", (inside != 0).sum().item())
""",
    ),
    "split": Sketch(
        {"anchor": lambda: integer(0, 0, _CHUNK, "anchor")},
        _split,
        Split,
        {"start": {"anchor": 0}, "middle": {"anchor": _CHUNK // 2}, "end": {"anchor": _CHUNK}},
        """import torch
from flakit.ops.common.decay import sum_before

w = torch.full((64, 1), -1.0)
gi, ge = w.cumsum(0), sum_before(w)
n = torch.cat((ge, gi[-1:]))[{anchor}]
read, key = (ge - n).exp(), (n - gi).exp()
print("largest factors", read.max().item(), key.max().item())
print("largest weight", (read @ key.T).tril(-1).max().item())
""",
    ),
    "ways": Sketch(
        {"way": lambda: choice(WAYS[0], {way: way for way in WAYS}, "way")},
        _ways,
        Ways,
        {way: {"way": way} for way in WAYS},
        """from flakit.panels import sketch

shown = sketch("ways", way={way}).result
made = shown.product > 0
print("products", shown.product.max(), "largest exponents", shown.read[made].max(), shown.key[made].max())
""",
    ),
}
