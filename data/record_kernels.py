"""Record in which kernels a forward with all gradients spends its time, and what their memory traffic alone would take.

    python data/record_kernels.py data/h200_kernels.json

On a GPU, for each operator as a model has it: every kernel's time by the profiler, and the bytes of its tensor
arguments, each once. Launches for chunks with strong decays find nothing to do here and count no bytes; where the
kernel is the same, their time is included in its own.
"""

import sys
from collections import Counter

from torch import Tensor

from flakit.bench.launches import watched
from flakit.bench.meter import Meter
from flakit.bench.speed import CASES, OURS, calls, competitors
from flakit.numerics import recorded

OTHERS = "all others"
"""The row of launches without work, and of PyTorch's kernels."""


def handed(launches) -> Counter:
    """Return the bytes of the tensor arguments of launches, by kernel, each memory once per launch."""
    moved: Counter = Counter()
    for launch in launches:
        idle = launch.options.get("MILD") is False or launch.kernel.fn.__name__.startswith("steep")
        if launch.row is None or not (idle or launch.row[0].endswith(".dyadic")):
            tensors = {x.data_ptr(): x.numel() * x.element_size() for x in launch.args if isinstance(x, Tensor)}
            moved[launch.kernel.fn.__name__] += sum(tensors.values())
    return moved


def rows(meter: Meter, copy_tb_s: float):
    for case in CASES:
        as_in_a_model = case.decay == case.operator.profile and case.dtype == "bfloat16"
        if as_in_a_model and case.form == "chunk" and case.B == 8 and case.K <= 128:
            call = calls(competitors(case, peers=False)[OURS], case, case.inputs(meter.device))["both"]
            call()
            with watched() as launched:
                call()
            moved, by_row = handed(launched), {}
            for kernel in sorted(meter.kernels(call), key=lambda kernel: not moved[kernel.kernel]):
                by_row.setdefault(kernel.kernel if moved[kernel.kernel] else OTHERS, []).append(kernel)
            for name, kernels in by_row.items():
                ms, gb = sum(x.ms for x in kernels), 1e-9 * moved[name]
                row = {"op": case.op, "kernel": name, "calls": sum(x.calls for x in kernels), "ms": round(ms, 4)}
                yield row | {"gb": round(gb, 3), "of_copy": round(gb / copy_tb_s / ms, 3)}


def main(path: str) -> None:
    meter = Meter()
    copy_tb_s = meter.ceilings()["copy_tb_s"]
    meta = recorded.provenance(f"python data/record_kernels.py {path}") | {"copy_tb_s": round(copy_tb_s, 3)}
    recorded.write(path, meta, list(rows(meter, copy_tb_s)))


if __name__ == "__main__":
    main(sys.argv[1])
