"""The sketches of 16_speed."""

import functools

import numpy as np

from ...figures.sketches.speed import Kept, KeptShown, Roof, RoofShown, Tail, TailShown
from ...numerics import recorded
from ...numerics.work import moved, work
from ..knobs import choice, steps
from .sketch import Sketch

_CHUNK = 16
"""Tokens of the chunks that RWKV6's kernels take for this call."""
_ONE_IN = [n * 10**power for power in range(6, 2, -1) for n in (10, 5, 2)] + [1000]
_TOKENS, _HEADS = [1 << n for n in range(13)], (16, 32, 64, 128, 256, 512)


@functools.cache
def _recorded() -> tuple[dict, dict]:
    """Return the recorded row of RWKV6 in a model's sizes, and the peak rates of its device."""
    table = recorded.read("h200_speed")
    row = table.select(op="rwkv6", form="chunk", who="flakit", B=8, decay="rwkv6-init", dtype="bfloat16")[0]
    return dict(row), {name: table.meta[name] for name in ("copy_tb_s", "tflops")}


def _roof(tokens: int, K: int) -> RoofShown:
    """A call that reads a state and returns one."""
    row, rates = _recorded()
    call = work(row | {"T": tokens, "K": K, "V": K, "decode": True}, "forward")
    return RoofShown(tokens, K, call.bytes, call.operations, **rates)


def _kept(chunk: int, itemsize: int) -> KeptShown:
    row, rates = _recorded()
    sizes = np.array([moved(row, ["states"], every=C, itemsize=itemsize) for C in _TOKENS])
    # For every pair of tokens of a chunk: a score, and a product with the value.
    pairs = [2 * row["B"] * row["T"] * row["H"] * C * (row["K"] + row["V"]) for C in _TOKENS]
    return KeptShown(
        _TOKENS.index(chunk),
        itemsize,
        _TOKENS,
        sizes,
        2e-9 * sizes / rates["copy_tb_s"],
        1e-9 * np.array(pairs) / rates["tflops"],
        work(row, "forward").floor_ms(**rates),
        rates["copy_tb_s"],
    )


def _tail(one_in: int, by: str) -> TailShown:
    row, _ = _recorded()
    gates = _CHUNK * row["K"]
    # One seed for every share, so that steep chunks stay steep; with this one the heads shown are about as expected.
    lowest = np.random.default_rng(38).random((row["H"], row["T"] // _CHUNK))
    steep = lowest < -np.expm1(gates * np.log1p(-1 / one_in))
    return TailShown(one_in, by == "head", steep, _CHUNK, gates, row["T"] * row["K"])


SKETCHES = {
    "roof": Sketch(
        {"tokens": lambda: steps(1, _TOKENS, "tokens"), "K": lambda: steps(64, _HEADS, "channels K")},
        _roof,
        Roof,
        {"one token": {"tokens": 1, "K": 64}, "a text": {"tokens": 4096, "K": 64}, "wide": {"tokens": 4096, "K": 512}},
        """from flakit.numerics import recorded
from flakit.numerics.work import work

table = recorded.read("h200_speed")
row = table.rows[0] | {{"T": {tokens}, "K": {K}, "V": {K}, "decode": True}}
call = work(row, "forward")
floor = call.floor_ms(table.meta["copy_tb_s"], table.meta["tflops"])
print("operations per byte", call.intensity, "floor", floor, "ms")
""",
    ),
    "kept": Sketch(
        {
            "chunk": lambda: steps(32, _TOKENS, "chunk C"),
            "itemsize": lambda: choice(4, {"float32": 4, "float16": 2}, "states"),
        },
        _kept,
        Kept,
        {
            "every token": {"chunk": 1, "itemsize": 4},
            "32, float32": {"chunk": 32, "itemsize": 4},
            "64, float16": {"chunk": 64, "itemsize": 2},
        },
        """from flakit.numerics import recorded
from flakit.numerics.work import moved

table = recorded.read("h200_speed")
size = moved(table.rows[0], ["states"], every={chunk}, itemsize={itemsize})
print(size, "bytes of states, written and read in", 2e-9 * size / table.meta["copy_tb_s"], "ms")
""",
    ),
    "tail": Sketch(
        {
            "one_in": lambda: steps(1_000_000, [(f"{n:,}", n) for n in _ONE_IN], "one gate in"),
            "by": lambda: choice("head", {"the head": "head", "each chunk": "chunk"}, "chooses"),
        },
        _tail,
        Tail,
        {
            "one in a million": {"one_in": 1_000_000, "by": "head"},
            "each chunk": {"one_in": 1_000_000, "by": "chunk"},
            "one in 10,000": {"one_in": 10_000, "by": "head"},
        },
        """steep = 1 / {one_in}
gates = {{"chunk": 16 * 64, "head": 4096 * 64}}
held = {{name: 1 - (1 - steep) ** n for name, n in gates.items()}}
print("hold a steep gate:", held, "computed the slow way:", held[{by}])
""",
    ),
}
