"""How long a message between the GPUs of a host takes, by its size: what flakit.bench.simulate begins from.

    python -m flakit.bench.messages [--gpus 2] [--json messages.json]

A message is an all-gather, as `group=` sends it, between two dependent kernels. A CUDA graph replays many pairs of a
small kernel and a gather, which excludes the host's launch overhead; the time of the same graph without gathers is
subtracted. `fit` reduces the table to the two parameters of the simulation: latency and bandwidth.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..numerics import recorded
from ..ops.common.ranks import gathered

SIZES = [2**n for n in range(10, 27)]
"""Bytes sent per rank, 1 KiB to 64 MiB; the operators send 0.25 to 4 MiB for the heads of `ranks.CASES`."""
CALLS, REPLAYS = 20, 7


def measured(size: int) -> dict:
    """Time a gather of `size` bytes from each rank. Return a row with the slowest rank's microseconds."""
    x, small = torch.zeros(size // 4, device="cuda"), torch.zeros(64, device="cuda")

    def kernel_and_gather() -> None:
        small.add_(1)
        gathered(x, dist.group.WORLD)

    us = largest(_graph_us(kernel_and_gather) - _graph_us(lambda: small.add_(1)))
    return {"ranks": dist.get_world_size(), "bytes": size, "us": us}


def _graph_us(call) -> float:
    """Return the microseconds of one call in a CUDA graph of `CALLS` calls: the median over replays."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(3 + REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return sorted(times[3:])[REPLAYS // 2]


def fit(rows: Sequence[Mapping]) -> tuple[float, float, float]:
    """Fit us = latency + bytes / rate to the rows of `measured`, by least squares of the relative error.

    Return the latency in microseconds, the rate in GB/s (10^9 bytes per second) and the largest relative error. A
    gather over R ranks counts as R - 1 such messages in sequence."""
    steps, sizes, us = (
        torch.tensor([float(x) for x in column], dtype=torch.float64)
        for column in zip(*((row["ranks"] - 1, row["bytes"], row["us"]) for row in rows), strict=True)
    )
    design = torch.stack([1 / us, steps * sizes / us], 1)
    latency, slope = torch.linalg.lstsq(design, torch.ones_like(us)[:, None]).solution[:, 0].tolist()
    errors = (latency + slope * steps * sizes) / us - 1
    return latency, 1e-3 / slope, errors.abs().max().item()


def largest(x: float) -> float:
    """Return the largest x of all ranks. Every rank must call it."""
    value = torch.tensor(x, device="cuda", dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def on_ranks(ranks: int, row_of: Callable, cases: Sequence, line: Callable | None = None, backend: str = "nccl"):
    """Return row_of(case) of every case, called in a process for each rank of a process group: what rank 0 returns.

    line: line(row) is printed for each. backend: "nccl", where each rank has its own GPU, or "gloo"."""
    with TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, row_of, cases, line, backend, folder), ranks)
        return torch.load(f"{folder}/rows")


def _rank(rank: int, ranks: int, row_of: Callable, cases: Sequence, line: Callable | None, backend: str, folder: str):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    rows = []
    for case in cases:
        torch.manual_seed(0)
        rows.append(row_of(case))
        torch.cuda.empty_cache()
        if rank == 0 and line is not None:
            print(line(rows[-1]), flush=True)
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.destroy_process_group()


def _line(row: dict) -> str:
    return f"{row['bytes']:>12} {row['us']:>12.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.messages", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows as a recording")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.gpus:
        parser.error(f"expected {args.gpus} GPUs, found {torch.cuda.device_count()}")
    print(f"{'bytes a rank':>12} {'us':>12}")
    rows = on_ranks(args.gpus, measured, SIZES, _line)
    latency, rate, error = fit(rows)
    print(f"{latency:.1f} us to begin, then {rate:.0f} GB/s: at most {error:.0%} off")
    if args.json:
        recorded.write(args.json, recorded.provenance("python -m flakit.bench.messages"), rows)


if __name__ == "__main__":
    main()
