"""How long a message between the GPUs of a host takes, by its size: what flakit.bench.simulate begins from.

    python -m flakit.bench.messages [--gpus 2] [--json messages.json]

A message is an all-gather, as `group=` sends it, between two dependent kernels. A CUDA graph replays many pairs of a
small kernel and a gather, which excludes the host's launch overhead; the time of the same graph without gathers is
subtracted. `fit` reduces the table to the two parameters of the simulation: latency and bandwidth.
"""

import argparse
from collections.abc import Mapping, Sequence
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

    us = _graph_us(kernel_and_gather) - _graph_us(lambda: small.add_(1))
    slowest = torch.tensor(us, device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"ranks": dist.get_world_size(), "bytes": size, "us": slowest.item()}


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


def _rank(rank: int, ranks: int, store: str, json: Path | None) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = []
    for size in SIZES:
        rows.append(measured(size))
        if rank == 0:
            print(f"{size:>12} {rows[-1]['us']:>12.2f}", flush=True)
    if rank == 0:
        latency, rate, error = fit(rows)
        print(f"{latency:.1f} us to begin, then {rate:.0f} GB/s: at most {error:.0%} off")
        if json:
            recorded.write(json, recorded.provenance("python -m flakit.bench.messages"), rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.messages", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows as a recording")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.gpus:
        parser.error(f"expected {args.gpus} GPUs, found {torch.cuda.device_count()}")
    print(f"{'bytes a rank':>12} {'us':>12}")
    with TemporaryDirectory() as folder:
        mp.spawn(_rank, (args.gpus, f"{folder}/store", args.json), args.gpus)


if __name__ == "__main__":
    main()
