"""Measures the cost of a trace: python -m flakit.instruments.trace_overhead [--rounds 5] [--only case]

Runs each operator, forward and backward, and the casebook's two kernels, alternately alone and traced, and prints
medians of wall time. Kernels are interpreted on a CPU and compiled on a GPU; compile time, which is minutes for an
operator, is excluded.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable


def subjects() -> dict[str, Callable[[], object]]:
    import torch

    from ..cases import anchor, padding
    from ..numerics.evaluate import evaluate
    from ..numerics.inputs import inputs

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    T, H, K = (2048, 8, 64) if gpu else (130, 1, 32)

    def on(x):
        return {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in x.items()}

    def operator(op):
        x = inputs(op, T=T, H=H, K=K, decay=-0.5, device=device)
        return lambda: evaluate(op, x, form="chunk", backend="triton")

    spike, bad = on(anchor.spike(16, -80.0)), on(anchor.spike(16, -100.0))
    padded, lost = on(padding.inputs(120, -1.5)), on(padding.inputs(120, -2.5))
    return {f"chunk_{op}, forward and backward": operator(op) for op in ("rwkv6", "rwkv7", "gsa")} | {
        "case anchor, finite": lambda: anchor.run(spike, "first-row", backend="triton"),
        "case anchor, NaN": lambda: anchor.run(bad, "first-row", backend="triton"),
        "case padding, finite": lambda: padding.run(padded, backend="triton"),
        "case padding, NaN": lambda: padding.run(lost, backend="triton"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="subjects whose name holds this")
    asked = parser.parse_args()

    import torch

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.call([sys.executable, "-m", __spec__.name, *sys.argv[1:]], env=env)

    import triton
    from rich.console import Console
    from rich.table import Table

    from .trace import trace

    def seconds(run) -> float:
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    how = "compiled, " + torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreted"
    table = Table(f"Triton {triton.__version__}, {how}", "alone, ms", "traced, ms", "times")
    for name, run in subjects().items():
        if asked.only not in name:
            continue
        alone, traced = [], []
        run()
        for first in [True, *[False] * asked.rounds]:
            alone.append(seconds(run))
            with trace():
                traced.append(seconds(run))
            if first:  # compile, and fill caches
                alone.clear()
                traced.clear()
        plain, watched = (1e3 * statistics.median(x) for x in (alone, traced))
        table.add_row(name, f"{plain:.1f}", f"{watched:.1f}", f"{watched / plain:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
