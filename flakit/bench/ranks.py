"""One sequence over several GPUs, beside one GPU: times, their ratio, what is sent, and how far the results are apart.

    python -m flakit.bench.ranks [--gpus 2] [--tokens 262144] [--only rwkv6] [--json ranks.json]

Forward and all gradients, bfloat16, a sequence of so many tokens. Every rank holds the whole of it, runs it alone and
then its slice together with the others, and sends messages of the same sizes and nothing else; an error is that of its
slices against its own whole, the largest of all ranks. Of one more call a profiler tells how long the last rank's
messages are under way, and in how much of that time its kernels compute: the last rank is the one that waits, in the
forward, for what all others send. What one card has no memory for is timed over ranks only. Over more GPUs than there
are: flakit.bench.simulate.
"""

import argparse
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ..numerics import recorded
from ..ops.common.ranks import gathered
from .speed import Case

CASES = [
    Case("rwkv6", "chunk", 1, 262_144, 32, 64, 64, "rwkv6-init"),
    Case("rwkv7", "chunk", 1, 262_144, 32, 64, 64, "rwkv7"),
    Case("gsa", "chunk", 1, 262_144, 16, 128, 128, "gsa", M=64),
]
CALLS = 10


def measured(case: Case) -> dict:
    """A row of the table, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op, whole = case.operator, case.inputs()
    own = slice(case.T * rank // ranks, case.T * (rank + 1) // ranks)
    mine = {n: (x[:, own] if n in op.sequences else x).detach().contiguous() for n, x in whole.items()}
    mine = {n: x.requires_grad_() for n, x in mine.items()}
    do = torch.randn(1, 512, case.H, case.V, device="cuda", dtype=torch.bfloat16)
    do = do.repeat(1, -(-case.T // 512), 1, 1)[:, : case.T].contiguous()

    def run(given, do, **more) -> tuple[Tensor, ...]:
        o = op.forms["chunk"](**given, **more).o
        return o.detach(), *torch.autograd.grad(o, list(given.values()), do)

    row = {"operator": case.op, "T": case.T, "ranks": ranks, "alone_ms": None, "apart": None}
    do_mine, together = do[:, own].contiguous(), {"group": dist.group.WORLD}
    sent, gather = [], dist.all_gather

    def counted(found, x, **more):
        sent.append(x.numel() * x.element_size())
        return gather(found, x, **more)

    run(mine, do_mine, **together)
    dist.all_gather = counted
    found = run(mine, do_mine, **together)
    dist.all_gather = gather
    row |= {"messages": len(sent), "bytes": sum(sent)}
    fits = torch.ones((), device="cuda")
    try:
        true = run(whole, do)
        apart = max(_apart(x, y[:, own]) for n, x, y in zip(("o", *whole), found, true, strict=True) if n != "u")
        del true
    except torch.OutOfMemoryError:
        fits.zero_()
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    del found
    empty = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sent]
    row["gather_ms"] = _largest(_ms(lambda: [gathered(x, dist.group.WORLD) for x in empty]))
    row["together_ms"] = _largest(_ms(lambda: run(mine, do_mine, **together)))
    under_way, hidden = _under_way(lambda: run(mine, do_mine, **together))
    row |= {"under_way_ms": _of_last_rank(under_way), "overlapped": _of_last_rank(hidden / under_way)}
    if fits.item():
        row["apart"] = _largest(apart)
        row["alone_ms"] = _largest(_ms(lambda: run(whole, do)))
    return row


def _apart(x: Tensor, y: Tensor) -> float:
    total, off = 0.0, 0.0
    for a, b in zip(x.split(8192, 1), y.split(8192, 1), strict=True):  # in float32, a whole one takes too much memory
        total += b.float().square().sum().item()
        off += (a.float() - b.float()).square().sum().item()
    return (off / total) ** 0.5


def _largest(x: float) -> float:
    found = torch.tensor(x, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _of_last_rank(x: float) -> float:
    found = torch.tensor(x, device="cuda", dtype=torch.float64)
    dist.broadcast(found, dist.get_world_size() - 1)
    return found.item()


Span = tuple[float, float]
"""Of time: its beginning and its end."""


def shared(some: list[Span], others: list[Span]) -> tuple[float, float]:
    """How long any of some spans lasts, and in how much of that any of the others does, too."""
    ends = sorted({end for span in some + others for end in span})
    total = both = 0.0
    for begin, end in pairwise(ends):
        if any(a <= begin and end <= b for a, b in some):
            total += end - begin
            both += (end - begin) * any(a <= begin and end <= b for a, b in others)
    return total, both


def _under_way(call) -> tuple[float, float]:
    """Milliseconds in which NCCL's kernels run in a call, and of these the ones in which others do."""
    for _ in range(2):  # the first of a process pays for the profiler's own beginning
        dist.barrier()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    messages, kernels = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("nccl:"):
            spans = messages if event.name.startswith("nccl") else kernels
            spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    return shared(messages, kernels)


def _ms(call) -> float:
    """The median of some calls, each begun by all ranks at once."""
    times = []
    for _ in range(3 + CALLS):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times[3:])[CALLS // 2]


def _rank(rank: int, ranks: int, store: str, cases: list[Case], json: Path | None) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = []
    for case in cases:
        torch.manual_seed(0)
        rows.append(measured(case))
        torch.cuda.empty_cache()
        if rank == 0:
            print(_line(rows[-1]), flush=True)
    if rank == 0 and json:
        recorded.write(json, recorded.provenance("python -m flakit.bench.ranks"), rows)
    dist.destroy_process_group()


def _line(row: dict) -> str:
    alone = "no memory" if row["alone_ms"] is None else f"{row['alone_ms']:.2f}"
    ratio = "" if row["alone_ms"] is None else f"{row['alone_ms'] / row['together_ms']:.2f}"
    apart = "" if row["apart"] is None else f"{row['apart']:.1e}"
    shown = (
        row["operator"], row["T"], alone, f"{row['together_ms']:.2f}", ratio, row["messages"],
        f"{row['bytes'] / 2**20:.2f}", apart, f"{row['gather_ms']:.3f}", f"{row['under_way_ms']:.3f}",
        f"{row['overlapped']:.0%}",
    )  # fmt: skip
    return " ".join(f"{x!s:>12}" for x in shown)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--only", default="", help="an operator")
    parser.add_argument("--json", type=Path, help="write the rows as a recording")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.gpus:
        parser.error(f"expected {given.gpus} GPUs, found {torch.cuda.device_count()}")
    cases = [replace(case, T=given.tokens) for case in CASES if given.only in case.op]
    heads = "operator", "T", "one GPU, ms", f"{given.gpus} GPUs, ms", "ratio", "messages", "MiB a rank", "L2 apart"
    heads += "gathers, ms", "under way", "overlapped"
    print(" ".join(f"{x:>12}" for x in heads))
    with TemporaryDirectory() as folder:
        mp.spawn(_rank, (given.gpus, f"{folder}/store", cases, given.json), given.gpus)


if __name__ == "__main__":
    main()
