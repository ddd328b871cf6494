"""A GPU's stopwatch: how long a call takes on the device and on the host, in which kernels, and with how much memory.

What times a call gets one of these, so that a test can give it another, which needs no GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

QUANTILES = (0.2, 0.5, 0.8)


class Times(NamedTuple):
    """Milliseconds: of all calls 20% were faster than `low`, half than `median`, 80% than `high`."""

    low: float
    median: float
    high: float


class KernelTime(NamedTuple):
    """A kernel by the name that the profiler gives it."""

    kernel: str
    calls: float
    """In one call of what was profiled."""
    ms: float
    """Of all these."""
    share: float
    """Of all kernels' time."""


class Meter:
    """Of the current CUDA device."""

    device = "cuda"

    def times(self, call: Callable[[], object]) -> Times:
        """On the device, between two events, after warming up and with its cache emptied before each call."""
        from triton.testing import do_bench

        return Times(*do_bench(call, warmup=50, rep=200, quantiles=QUANTILES))

    def replayed(self, call: Callable[[], object]) -> Times:
        """Of a CUDA graph that holds one call: what is left of it where the host costs nothing."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # compile, and allocate, before anything is captured
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.times(graph.replay)

    def host_ms(self, call: Callable[[], object], calls: int = 50) -> float:
        """What the host needs to issue one to an idle device, without waiting for it: the median."""
        call()
        found = []
        for _ in range(calls):
            self.wait()
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
        self.wait()
        return statistics.median(found)

    def extra_gib(self, call: Callable[[], object]) -> float:
        """Most memory in use during a call, above what was before."""
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def kernels(self, call: Callable[[], object], calls: int = 10) -> list[KernelTime]:
        """The kernels of a call, the longest first."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(3):
            call()
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(calls):
                call()
            self.wait()
        return by_kernel(watched.events(), calls)

    def ceilings(self) -> dict[str, float]:
        """What bounds every kernel here: a copy's 10^12 bytes a second, read and written, and a product's 10^12
        operations, of large bfloat16 matrices."""
        x = torch.zeros(2**29, dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        a = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        copied, multiplied = self.times(lambda: y.copy_(x)).low, self.times(lambda: a @ a).low
        return {"copy_tb_s": 2e-9 * len(x) / copied, "tflops": 2e-9 * 8192**3 / multiplied}

    def wait(self) -> None:
        torch.cuda.synchronize()


def by_kernel(events: Iterable, calls: int) -> list[KernelTime]:
    """The profiler's events on a device as a table, for one of so many calls; events on the host are left out."""
    counts: dict[str, int] = {}
    microseconds: dict[str, float] = {}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            counts[event.name] = counts.get(event.name, 0) + 1
            microseconds[event.name] = microseconds.get(event.name, 0.0) + event.time_range.elapsed_us()
    whole = sum(microseconds.values()) or 1.0
    found = [KernelTime(name, counts[name] / calls, 1e-3 * us / calls, us / whole) for name, us in microseconds.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)
