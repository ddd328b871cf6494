"""The covering sets: the settings that every operator is run on, in settings/*.csv; a GPU's are in tests/gpu/covering.

`full` has about 80 rows; `small` has few and tiny ones, for Triton's interpreter (which has no bfloat16). RWKV6 and
RWKV7 share theirs; GSA has its own, since it has slots and groups of query heads as well.
Pairwise over the factors below. Lengths and decays are paired by kind, since every length with every decay alone would
be 200 rows; each single value occurs, and extremes are a kind of their own. `python -m tests.ops.settings` remakes the
files; a test checks that what is committed still covers everything.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from math import ceil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flakit.numerics.evaluate import Arriving, cotangents
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import operator
from tests.ops.pairwise import Row, covering_rows
from tests.quick import each_value_once

LENGTHS = {
    "one": (1,),
    "short": (15, 16, 17),
    "chunk": (63, 64, 65),
    "odd": (100, 37),
    "few chunks": (128, 257),
    "long": (1000,),
    "longest": (4096,),
}
DECAYS = {
    "nothing": ("none",),
    "slow": ("-1e-5", "-1e-4", "-1e-2"),
    "model": ("model",),
    "late": ("rwkv6-wide", "uniform"),
    "-1.7": ("-1.7",),
    "-8": ("-8",),
    "strong": ("-20", "-50", "-80"),
    "spikes": ("spikes",),
    "inf-spikes": ("inf-spikes",),
    "everything": ("forget",),
}
FULL = {
    "T": LENGTHS,
    "K": (16, 24, 40, 64, 100, 128, 256),
    "V": (16, 32, 40, 64, 120, 128, 256),
    "decay": DECAYS,
    "dtype": ("float32", "bfloat16", "float16"),
    "decay_dtype": ("same", "float32"),
    "states": ("none", "initial", "final", "both"),
    "packing": ("none", "packed", "ragged"),
    "layout": ("contiguous", "strided", "expanded"),
    "scale": ("default", "1", "0.05"),
    "chunk_size": ("default", "16", "32", "64"),
    "H": (1, 2, 3),
    "B": (1, 2, 3),
}
SMALL = FULL | {
    "T": {"one": (1,), "below a chunk": (5, 15), "chunks and one": (17, 33), "chunks": (32,)},
    "K": (16, 24, 40),
    "V": (16, 40),
    "dtype": ("float32", "float16"),
    "scale": ("default", "0.05"),
    "chunk_size": ("default", "16"),
    "H": (1, 2),
    "B": (1, 2),
}
GSA = {"M": (16, 24, 64, 100, 128), "group": (1, 2, 4)}
SETS = {
    "full": FULL,
    "small": SMALL,
    "gsa_full": FULL | {"K": (16, 24, 64, 100, 128, 512), "V": (16, 40, 64, 120, 128, 512)} | GSA,
    "gsa_small": SMALL | {"M": (16, 24), "group": (1, 2)},
}
LARGEST = 2**28  # B * T * H * K * V: the longest sequence with the largest state, once


def path(name: str) -> Path:
    return Path(__file__).with_name("settings") / f"{name}.csv"


@dataclass(frozen=True)
class Setting:
    """One row. Everything a run needs is in it: `make(setting)`."""

    T: int
    K: int
    V: int
    decay: str  # a profile of flakit.numerics.inputs.DECAYS, "model" for the operator's own, or a constant log decay
    dtype: str = "float32"
    decay_dtype: str = "same"
    states: str = "none"  # an initial state, a gradient arriving at the final state, or both
    packing: str = "none"  # "packed": three sequences; "ragged": also empty ones, one of length 1, and padding
    layout: str = (
        "contiguous"  # of all inputs, offsets too, and of o's gradient; "expanded": that one has stride 0 along B and T
    )
    scale: str = "default"
    chunk_size: str = "default"
    H: int = 2
    B: int = 1
    op: str = "rwkv6"
    M: int = 0  # slots, and query heads a head: of GSA only
    group: int = 1

    def __str__(self) -> str:
        short = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
        decay = operator(self.op).profile if self.decay == "model" else self.decay
        sizes = {"T": self.T, "K": self.K, "V": self.V, "M": self.M, "H": self.H, "G": self.group, "B": self.B}
        parts = [f"{axis}{size}" for axis, size in sizes.items() if self.M or axis not in "MG"]
        parts += [decay, short[self.dtype]]
        parts += ["wf32"] * (self.decay_dtype == "float32" != self.dtype)
        parts += [f"{self.states}-states"] * (self.states != "none")
        parts += [x for x in (self.packing, self.layout) if x not in ("none", "contiguous")]
        parts += [f"scale{self.scale}"] * (self.scale != "default")
        parts += [f"C{self.chunk_size}"] * (self.chunk_size != "default")
        return "-".join(parts)

    @property
    def elements(self) -> int:
        """State elements visited, over all steps: what a run costs."""
        each = self.M * (self.K + self.V) * self.group if self.M else self.K * self.V
        return self.B * self.T * self.H * each

    @property
    def lengths(self) -> list[int]:
        """Lengths of the packed sequences; empty where nothing is packed."""
        third = (self.T - 1) // 3
        return {
            "none": [],
            "packed": [self.T // 2, self.T // 3, self.T - self.T // 2 - self.T // 3],
            "ragged": [0, 1, 0, 0, third, self.T - 1 - third - self.padding, 0],
        }[self.packing]

    @property
    def padding(self) -> int:
        """Rows behind the last sequence."""
        return self.T // 6 if self.packing == "ragged" else 0


def make(setting: Setting, device="cpu") -> tuple[dict[str, object], Arriving]:
    """The operator's tensors and scale, and the gradients arriving at o and (or None) at the final state."""
    op, dtype = operator(setting.op), getattr(torch, setting.dtype)
    decay_dtype = None if setting.decay_dtype == "same" else getattr(torch, setting.decay_dtype)
    decay = float(setting.decay) if setting.decay[0] == "-" else None if setting.decay == "model" else setting.decay
    sizes = dict(H=setting.H, K=setting.K, V=setting.V, dtype=dtype, device=device)
    if "M" in op.sizes:
        sizes |= dict(M=setting.M, HQ=setting.H * setting.group)
    made = inputs(op, B=setting.B, T=setting.T, decay=decay, decay_dtype=decay_dtype, **sizes)
    if setting.lengths:
        offsets = list(accumulate(setting.lengths, initial=0))
        made["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    if setting.states in ("initial", "both"):
        sequences = len(setting.lengths) or setting.B
        made["initial_state"] = inputs(op, B=sequences, T=1, initial_state=True, **sizes)["initial_state"]
    if setting.scale != "default":
        made["scale"] = float(setting.scale)

    do, dstate = cotangents(op, made, dfinal_state=setting.states in ("final", "both"))
    dparts = op.parts(dstate)
    if setting.layout == "expanded":  # all ones, as from o.sum(), would leave few values: their rounding is no average
        do = do[:1, :1].expand_as(do)
        dparts = [x[:1].expand_as(x) for x in dparts]
    if setting.layout == "strided":
        leaves = op.leaves(made)
        made = op.arguments({name: strided(x) for name, x in leaves.items()}, made)
        if setting.lengths:
            offsets = made["cu_seqlens"]  # a column of a table whose other one is an offset too
            made["cu_seqlens"] = torch.stack((offsets, offsets.flip(0) // 2), 1)[:, 0]
        do, dparts = strided(do), [strided(x) for x in dparts]
    return made, (do, op.state(dparts))


def strided(x: Tensor) -> Tensor:
    """The same values with no axis contiguous: the axes in reverse order in memory, with a gap after each element."""
    gapped = torch.full((*reversed(x.shape), 2), torch.nan, dtype=x.dtype, device=x.device)
    gapped[..., 0] = x.permute(*reversed(range(x.ndim)))
    return gapped[..., 0].permute(*reversed(range(x.ndim)))


def read(path: Path) -> list[Setting]:
    """The rows of a file, for the first operator that they serve."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    types = {f.name: f.type for f in fields(Setting)}
    return [_of_first({column: types[column](x) for column, x in row.items()}) for row in rows]


def _of_first(row: dict) -> Setting:
    return Setting(op="gsa" if "M" in row else "rwkv6", **row)


def load(name: str) -> list[Setting]:
    """The rows of a set of `SETS`."""
    return read(path(name))


def of_operator(op: str, settings: Sequence[Setting]) -> list[Setting]:
    """The settings for another operator; chunks longer than its kernels take are its longest."""
    most = max(operator(op).chunk_sizes)
    chunks = {str(C): str(min(C, most)) for C in (16, 32, 64)} | {"default": "default"}
    return [replace(setting, op=op, chunk_size=chunks[setting.chunk_size]) for setting in settings]


def covering_set(op: str, size: str) -> list[Setting]:
    """The settings of an operator, "full" or "small"."""
    return of_operator(op, load(f"gsa_{size}" if op == "gsa" else size))


def named(setting):
    return f"{setting.op}-{setting}"


def programs(setting: Setting) -> int:
    """Of a kernel with one for each sequence, head and 16 tokens: what a run costs where kernels are interpreted."""
    lengths = setting.lengths or [setting.T] * setting.B
    return setting.H * setting.group * sum(1 + ceil(length / 16) for length in lengths)


def sampled(settings: Sequence[Setting], cost: Callable[[Setting], float]) -> list:
    """The settings as parameters. Few and cheap ones have every value of every factor, for each operator every dtype,
    packing, layout and kind of states, and every packing in every layout; the others are marked `full`."""
    few = each_value_once([_shown(setting) for setting in settings], [cost(setting) for setting in settings])
    return [pytest.param(x, marks=() if n in few else pytest.mark.full) for n, x in enumerate(settings)]


def _shown(setting: Setting) -> dict[str, object]:
    together = [("op", factor) for factor in ("dtype", "packing", "layout", "states")] + [("packing", "layout")]
    return asdict(setting) | {pair: tuple(getattr(setting, factor) for factor in pair) for pair in together}


def kinds(name: str) -> dict[str, tuple]:
    """What is paired: each factor's values, or the kinds that they are grouped into."""
    return {factor: tuple(values) for factor, values in SETS[name].items()}


def allowed(row: Row) -> bool:
    """Whether a partial row, of values or kinds, can be completed: a packed batch is one, and no run is enormous."""
    if row.get("packing", "none") != "none" and row.get("B", 1) != 1:
        return False
    T = row.get("T", 1)
    cost = T if isinstance(T, int) else max({**LENGTHS, **SMALL["T"]}[T])
    for name, smallest in (("B", 1), ("H", 1), ("group", 1), ("K", 16), ("V", 16)):
        cost *= row.get(name, smallest)
    return cost <= LARGEST


def with_values(rows: Iterable[Row], factors: Mapping) -> list[Setting]:
    """Settings of rows by kind: in each row the value of its kind that has been used least often."""
    used, settings = Counter(), []
    for row in rows:
        for factor, values in factors.items():
            if isinstance(values, dict):
                row[factor] = min(values[row[factor]], key=lambda x: used[x])
                used[row[factor]] += 1
        settings.append(_of_first(row))
    return settings


def generate(name: str) -> list[Setting]:
    settings = with_values(covering_rows(kinds(name), allowed), SETS[name])
    return sorted(settings, key=lambda s: (s.T, s.K, s.V, s.decay, s.dtype))


def write(path: Path, factors: Iterable[str], settings: Iterable[Setting]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(factors), extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(map(asdict, settings))


if __name__ == "__main__":
    for name in SETS:
        write(path(name), SETS[name], generate(name))
