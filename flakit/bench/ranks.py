"""One sequence over several GPUs, beside one GPU: times, their ratio, the messages, and the error between the results.

    python -m flakit.bench.ranks [--gpus 2] [--tokens 262144] [--only rwkv6] [--json ranks.json]

Forward and all gradients, bfloat16, one sequence. Every rank holds the full sequence. It runs it alone, then runs its
slice together with the others, then sends messages of the same sizes without computing. The error compares the slices
with the rank's own full run, the largest over ranks. A profiled call gives the time that the last rank's messages take
and the part of it that overlaps with its kernels: in the forward the last rank waits for all others. A sequence that
does not fit on one GPU is timed over ranks only. For more GPUs than available: flakit.bench.simulate.
"""

import argparse
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..numerics import recorded
from ..ops.common.ranks import gathered
from .messages import largest, on_ranks
from .speed import Case

CASES = [
    Case("rwkv6", "chunk", 1, 262_144, 32, 64, 64, "rwkv6-init"),
    Case("rwkv7", "chunk", 1, 262_144, 32, 64, 64, "rwkv7"),
    Case("gsa", "chunk", 1, 262_144, 16, 128, 128, "gsa", M=64),
]
CALLS = 10


def measured(case: Case) -> dict:
    """Measure a case and return its row, the same on every rank; times in milliseconds. Every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op, full = case.operator, case.inputs()
    own = slice(case.T * rank // ranks, case.T * (rank + 1) // ranks)
    part = {n: (x[:, own] if n in op.sequences else x).detach().contiguous() for n, x in full.items()}
    part = {n: x.requires_grad_() for n, x in part.items()}
    do = torch.randn(1, 512, case.H, case.V, device="cuda", dtype=torch.bfloat16)
    do = do.repeat(1, -(-case.T // 512), 1, 1)[:, : case.T].contiguous()

    def run(inputs, do, **options) -> tuple[Tensor, ...]:
        o = op.forms["chunk"](**inputs, **options).o
        return o.detach(), *torch.autograd.grad(o, list(inputs.values()), do)

    row = {"operator": case.op, "T": case.T, "ranks": ranks, "alone_ms": None, "apart": None}
    do_part, together = do[:, own].contiguous(), {"group": dist.group.WORLD}
    sent, gather = [], dist.all_gather

    def counted(outputs, x, **options):
        sent.append(x.numel() * x.element_size())
        return gather(outputs, x, **options)

    run(part, do_part, **together)
    dist.all_gather = counted
    results = run(part, do_part, **together)
    dist.all_gather = gather
    row |= {"messages": len(sent), "bytes": sum(sent)}
    fits = torch.ones((), device="cuda")
    try:
        expected = run(full, do)
        error = max(_error(x, y[:, own]) for n, x, y in zip(("o", *full), results, expected, strict=True) if n != "u")
        del expected
    except torch.OutOfMemoryError:
        fits.zero_()
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    del results
    empty = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sent]
    row["gather_ms"] = largest(_ms(lambda: [gathered(x, dist.group.WORLD) for x in empty]))
    row["together_ms"] = largest(_ms(lambda: run(part, do_part, **together)))
    message_ms, overlap_ms = _message_ms(lambda: run(part, do_part, **together))
    row |= {"under_way_ms": _of_last_rank(message_ms), "overlapped": _of_last_rank(overlap_ms / message_ms)}
    if fits.item():
        row["apart"] = largest(error)
        row["alone_ms"] = largest(_ms(lambda: run(full, do)))
    return row


def _error(x: Tensor, y: Tensor) -> float:
    """Return the relative L2 error of x against y, both [1, T, …]."""
    total, error = 0.0, 0.0
    for a, b in zip(x.split(8192, 1), y.split(8192, 1), strict=True):  # all of it in float32 takes too much memory
        total += b.float().square().sum().item()
        error += (a.float() - b.float()).square().sum().item()
    return (error / total) ** 0.5


def _of_last_rank(x: float) -> float:
    value = torch.tensor(x, device="cuda", dtype=torch.float64)
    dist.broadcast(value, dist.get_world_size() - 1)
    return value.item()


Span = tuple[float, float]
"""An interval of time as (begin, end), in milliseconds."""


def shared(some: list[Span], others: list[Span]) -> tuple[float, float]:
    """Return the length of the union of `some`, and the length of its overlap with the union of `others`."""
    ends = sorted({end for span in some + others for end in span})
    total = overlap = 0.0
    for begin, end in pairwise(ends):
        if any(a <= begin and end <= b for a, b in some):
            total += end - begin
            overlap += (end - begin) * any(a <= begin and end <= b for a, b in others)
    return total, overlap


def _message_ms(call) -> tuple[float, float]:
    """Return the milliseconds of a call in which NCCL's kernels run, and those in which other kernels run too."""
    for _ in range(2):  # the first profile of a process includes the profiler's start-up
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
    """Return the median milliseconds of a call that all ranks begin together."""
    times = []
    for _ in range(3 + CALLS):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times[3:])[CALLS // 2]


def _line(row: dict) -> str:
    alone = "no memory" if row["alone_ms"] is None else f"{row['alone_ms']:.2f}"
    ratio = "" if row["alone_ms"] is None else f"{row['alone_ms'] / row['together_ms']:.2f}"
    error = "" if row["apart"] is None else f"{row['apart']:.1e}"
    columns = (
        row["operator"], row["T"], alone, f"{row['together_ms']:.2f}", ratio, row["messages"],
        f"{row['bytes'] / 2**20:.2f}", error, f"{row['gather_ms']:.3f}", f"{row['under_way_ms']:.3f}",
        f"{row['overlapped']:.0%}",
    )  # fmt: skip
    return " ".join(f"{x!s:>12}" for x in columns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--only", default="", help="an operator")
    parser.add_argument("--json", type=Path, help="write the rows as a recording")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.gpus:
        parser.error(f"expected {args.gpus} GPUs, found {torch.cuda.device_count()}")
    cases = [replace(case, T=args.tokens) for case in CASES if args.only in case.op]
    heads = "operator", "T", "one GPU, ms", f"{args.gpus} GPUs, ms", "ratio", "messages", "MiB a rank", "L2 apart"
    heads += "gathers, ms", "under way", "overlapped"
    print(" ".join(f"{x:>12}" for x in heads))
    rows = on_ranks(args.gpus, measured, cases, _line)
    if args.json:
        recorded.write(args.json, recorded.provenance("python -m flakit.bench.ranks"), rows)


if __name__ == "__main__":
    main()
