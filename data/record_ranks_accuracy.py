"""Record data/cpu_ranks_accuracy.json: errors of results over several processes against the float64 truth, on a CPU.

python data/record_ranks_accuracy.py [--out FILE] [--quick]

One sequence with an initial state and a gradient for the final one, in slices of unequal length; each rank compares its
slice. With one rank the operator runs without a group.
"""

import itertools
import platform

import torch
import torch.distributed as dist

from flakit.bench.messages import on_ranks
from flakit.numerics import recorded
from flakit.numerics.evaluate import cotangents, evaluate, truth
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS, operator

SIZES = {
    "rwkv6": {"H": 2, "K": 64, "V": 64},
    "rwkv7": {"H": 2, "K": 64, "V": 64},
    "gsa": {"H": 1, "K": 64, "V": 64, "M": 32},
}
DTYPES = torch.float32, torch.bfloat16
DECAYS = "model", -0.01, "inf-spikes"
RANKS = 1, 2, 3, 4, 8
T = 1000


def main() -> None:
    parser = recorded.script(__doc__, "cpu_ranks_accuracy", quick="short sequences, two ranks at most")
    args = parser.parse_args()
    tokens, counts = (40, RANKS[:2]) if args.quick else (T, RANKS)
    settings, rows = list(itertools.product(OPERATORS, DTYPES, DECAYS, (tokens,))), []
    for ranks in counts:
        rows += on_ranks(ranks, measured, settings, backend="gloo")
        print(f"{ranks} ranks", flush=True)
    rows.sort(key=lambda row: (list(OPERATORS).index(row["operator"]), -len(row["dtype"]), row["ranks"]))
    sizes = "; ".join(f"{op}: {', '.join(f'{name} {n}' for name, n in own.items())}" for op, own in SIZES.items())
    meta = recorded.provenance(
        "python data/record_ranks_accuracy.py", f"{platform.machine()} CPU", sizes=f"T {tokens}; {sizes}"
    )
    print("wrote", recorded.write(args.out, meta, rows))


def measured(setting: tuple[str, torch.dtype, str | float, int]) -> dict:
    """Return the row of an operator, dtype, decay and number of tokens, with the relative L2 errors over all ranks: of
    o, and the worst of the gradients. Every rank must call it."""
    op, dtype, decay, tokens = setting
    kind, rank, ranks = operator(op), dist.get_rank(), dist.get_world_size()
    profile = kind.profile if decay == "model" else decay
    whole = inputs(op, T=tokens, dtype=dtype, decay=profile, initial_state=True, **SIZES[op])
    arriving = cotangents(op, whole, dfinal_state=True)
    expected = truth(op, whole, arriving=arriving)

    ends = [round(tokens * (r / ranks) ** 1.5) for r in range(ranks + 1)]  # of unlike length
    own = slice(ends[rank], ends[rank + 1])
    part = {name: x[:, own].contiguous() if name in kind.sequences else x for name, x in whole.items()}
    part |= {"group": dist.group.WORLD} if ranks > 1 else {}
    do, dfinal = arriving
    if rank < ranks - 1:  # where the sequence does not end, nothing arrives at the final state
        dfinal = kind.state([torch.zeros_like(x) for x in kind.parts(dfinal)])
    results = evaluate(kind, part, arriving=(do[:, own], dfinal))

    worst = {}
    for name in ("o", *(f"d{name}" for name in kind.leaves(whole))):
        x, true = results[name], expected[name]
        if name == "o" or name[1:] in kind.sequences:
            worst[name] = _relative(x.double() - true[:, own], true[:, own])
        else:  # a sum over ranks is what one process has
            total = x.double()
            dist.all_reduce(total)
            worst[name] = ((total - true).norm() / true.norm()).item()
    row = {"operator": op, "dtype": str(dtype).removeprefix("torch."), "decay": str(decay), "ranks": ranks, "T": tokens}
    return row | {"o": worst.pop("o"), "gradients": max(worst.values())}


def _relative(error: torch.Tensor, true: torch.Tensor) -> float:
    """Return the relative L2 error of all ranks' slices together. Every rank must call it."""
    sums = torch.stack([error.square().sum(), true.square().sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


if __name__ == "__main__":
    main()
