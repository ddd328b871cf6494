"""Measure a call on a GPU: its time on the device and on the host, its kernels, and its memory.

Functions that measure take a `Meter` as an argument, so that tests can pass one that needs no GPU.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

QUANTILES = (0.2, 0.5, 0.8)


class Times(NamedTuple):
    """The 20%, 50% and 80% quantiles of a call's time, in milliseconds."""

    low: float
    median: float
    high: float


class KernelTime(NamedTuple):
    """A kernel's share of a profiled call, under its name in the profiler."""

    kernel: str
    calls: float
    """The number of launches per profiled call."""
    ms: float
    """The milliseconds of all its launches in one profiled call."""
    share: float
    """The fraction of the time of all kernels."""


class Meter:
    """Measures calls on the current CUDA device."""

    device = "cuda"

    def times(self, call: Callable[[], object]) -> Times:
        """Time a call on the device with CUDA events, after a warm-up, with the L2 cache flushed before each call."""
        from triton.testing import do_bench

        return Times(*do_bench(call, warmup=50, rep=200, quantiles=QUANTILES))

    def replayed(self, call: Callable[[], object]) -> Times:
        """Time a call captured in a CUDA graph, which excludes launch overhead on the host."""
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            for _ in range(3):  # compile and allocate before the capture
                call()
        torch.cuda.current_stream().wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.times(graph.replay)

    def host_ms(self, call: Callable[[], object], calls: int = 50) -> float:
        """Return the median milliseconds that the host takes to issue a call to an idle device."""
        call()
        measured_ms = []
        for _ in range(calls):
            self.wait()
            start = time.perf_counter()
            call()
            measured_ms.append(1e3 * (time.perf_counter() - start))
        self.wait()
        return statistics.median(measured_ms)

    def extra_gib(self, call: Callable[[], object]) -> float:
        """Return the peak memory of a call above the memory allocated before it, in GiB."""
        gc.collect()  # tensors of earlier calls in cycles, which Python would else free during this one
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def kernels(self, call: Callable[[], object], calls: int = 10) -> list[KernelTime]:
        """Profile a call and return its kernels, the slowest first."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(3):
            call()
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(calls):
                call()
            self.wait()
        return by_kernel(profiler.events(), calls)

    def ceilings(self) -> dict[str, float]:
        """Measure the device's limits: "copy_tb_s", the bandwidth of a copy, reads plus writes, in 10^12 bytes per
        second, and "tflops", the rate of large bfloat16 matrix products."""
        x = torch.zeros(2**29, dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        copy_ms = self.times(lambda: y.copy_(x)).low
        return {"copy_tb_s": 2e-9 * len(x) / copy_ms, "tflops": self.matrix_tflops(torch.bfloat16)}

    def matrix_tflops(self, dtype: torch.dtype) -> float:
        """Measure the rate of large matrix products, in 10^12 operations per second."""
        a = torch.randn(8192, 8192, device=self.device, dtype=dtype)
        return 2e-9 * 8192**3 / self.times(lambda: a @ a).low

    def wait(self) -> None:
        torch.cuda.synchronize()


def by_kernel(events: Iterable, calls: int) -> list[KernelTime]:
    """Sum the profiler's device events by kernel, per call, the slowest kernel first. Host events are ignored."""
    counts: dict[str, int] = {}
    microseconds: dict[str, float] = {}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            counts[event.name] = counts.get(event.name, 0) + 1
            microseconds[event.name] = microseconds.get(event.name, 0.0) + event.time_range.elapsed_us()
    total = sum(microseconds.values()) or 1.0
    rows = [KernelTime(name, counts[name] / calls, 1e-3 * us / calls, us / total) for name, us in microseconds.items()]
    return sorted(rows, key=lambda kernel: -kernel.ms)
