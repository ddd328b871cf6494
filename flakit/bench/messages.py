"""How long a message between the GPUs of a host takes, by its size: what flakit.bench.simulate begins from.

    python -m flakit.bench.messages [--gpus 2] [--json messages.json]

A message is what `group=` sends, an all-gather between two kernels that wait for each other. A CUDA graph replays many
such pairs, a small kernel and a gather, so that no host is in between; the time of the same graph without gathers is
subtracted. `fit` makes two numbers of the table, as a simulation takes them: microseconds to begin, and bytes a second.
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
"""Bytes a rank sends, 1 KiB to 64 MiB; the operators send 0.25 to 4 MiB for the heads of `ranks.CASES`."""
CALLS, REPLAYS = 20, 7


def measured(size: int) -> dict:
    """A row of the table: the slowest rank's microseconds for a gather of so many bytes from each."""
    x, small = torch.zeros(size // 4, device="cuda"), torch.zeros(64, device="cuda")

    def both() -> None:
        small.add_(1)
        gathered(x, dist.group.WORLD)

    us = _graph_us(both) - _graph_us(lambda: small.add_(1))
    slowest = torch.tensor(us, device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"ranks": dist.get_world_size(), "bytes": size, "us": slowest.item()}


def _graph_us(call) -> float:
    """Microseconds of one call, in a graph of many: the median of some replays."""
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
    """Microseconds to begin a message and 10^9 bytes a second, and how far off the worst row then is, as a fraction.

    Least squares of relative errors, of us = begin + bytes / rate. Rows of more than two ranks send several in turn.
    """
    steps, sizes, us = (
        torch.tensor([float(x) for x in column], dtype=torch.float64)
        for column in zip(*((row["ranks"] - 1, row["bytes"], row["us"]) for row in rows), strict=True)
    )
    design = torch.stack([1 / us, steps * sizes / us], 1)
    begin, slope = torch.linalg.lstsq(design, torch.ones_like(us)[:, None]).solution[:, 0].tolist()
    off = (begin + slope * steps * sizes) / us - 1
    return begin, 1e-3 / slope, off.abs().max().item()


def _rank(rank: int, ranks: int, store: str, json: Path | None) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = []
    for size in SIZES:
        rows.append(measured(size))
        if rank == 0:
            print(f"{size:>12} {rows[-1]['us']:>12.2f}", flush=True)
    if rank == 0:
        begin, rate, off = fit(rows)
        print(f"{begin:.1f} us to begin, then {rate:.0f} GB/s: at most {off:.0%} off")
        if json:
            recorded.write(json, recorded.provenance("python -m flakit.bench.messages"), rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flakit.bench.messages", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows as a recording")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.gpus:
        parser.error(f"expected {given.gpus} GPUs, found {torch.cuda.device_count()}")
    print(f"{'bytes a rank':>12} {'us':>12}")
    with TemporaryDirectory() as folder:
        mp.spawn(_rank, (given.gpus, f"{folder}/store", given.json), given.gpus)


if __name__ == "__main__":
    main()
