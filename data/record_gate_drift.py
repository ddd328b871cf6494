"""Record data/gate_drift.json: gates that drift into a kernel's fault. Needs no GPU; about 15 minutes on one core.

python data/record_gate_drift.py [--out FILE] [--quick]
"""

import argparse
import datetime
import math
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from rich.progress import Progress

import flakit
from flakit.cases import gate_drift
from flakit.numerics import recorded
from flakit.ops.common.dispatch import has_triton

SEEDS, STEPS, WINDOW = range(4), 600, 20
SLOWER, SLOWER_STEPS = 4, 6000
"""A learning rate that is smaller by this factor, for GSA's faulty kernel, and how long it runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "gate_drift.json")
    parser.add_argument("--quick", action="store_true", help="one seed, two windows of each run")
    options = parser.parse_args()

    torch.set_num_threads(1)
    ops = [op for op in gate_drift.LEARNING_RATE if op != "attention"]
    settings = [(op, kernel, seed, 1) for op in ops for kernel in gate_drift.KERNELS for seed in SEEDS]
    settings += [("attention", "right", seed, 1) for seed in SEEDS]
    settings.append(("gsa", "faulty", 0, SLOWER))
    if options.quick:
        settings = [setting for setting in settings if setting[2] == 0]
    rows = []
    with Progress() as bar:
        task = bar.add_task("runs", total=len(settings))
        for op, kernel, seed, slower in settings:
            steps = STEPS if slower == 1 else SLOWER_STEPS
            rows += run(op, kernel, seed, 2 * WINDOW if options.quick else steps, slower)
            bar.advance(task)

    meta = {
        "device": f"{platform.machine()} CPU, one thread",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": version("triton") if has_triton() else "none",
        "flakit": flakit.__version__,
        "command": "python data/record_gate_drift.py",
        "experiment": f"flakit.cases.gate_drift.drift; T = {gate_drift.T}, {gate_drift.SIZE} sequences a step",
    }
    print("wrote", recorded.write(options.out, meta, rows))


def run(op: str, kernel: str, seed: int, steps: int, slower: int) -> list[dict]:
    """A row for each window; a faulty run goes on for half as long with its projection re-initialised."""
    lr = gate_drift.LEARNING_RATE[op] / slower
    model, found = gate_drift.drift(op, kernel, steps=steps, seed=seed, lr=lr, progress=False)
    setting = {"op": op, "kernel": kernel, "seed": seed, "lr": lr}
    rows = windows(setting | {"reinitialised": False}, found, 0)
    if kernel == "faulty" and slower == 1:
        start = gate_drift.reinitialised(model, gate_drift.PROJECTION[op], op)
        _, found = gate_drift.drift(op, kernel, steps=steps // 2, seed=seed, lr=lr, start=start, progress=False)
        rows += windows(setting | {"reinitialised": True}, found, steps)
    return rows


def windows(setting: dict, found: gate_drift.Drift, first: int) -> list[dict]:
    rows = []
    for n in range(0, len(found.lost), WINDOW):
        part = slice(n, n + WINDOW)
        losses = [loss for loss in found.run.losses[part] if math.isfinite(loss)]
        quantiles = found.quantiles[part] or [[math.nan] * 5]
        row = {"step": first + n, "lost": sum(found.lost[part]) / len(found.lost[part])}
        row["as_predicted"] = sum(a == b for a, b in zip(found.lost[part], found.predicted[part], strict=False))
        row["exponent_median"] = sum(q[2] for q in quantiles) / len(quantiles)
        row["exponent_largest"] = max(q[-1] for q in quantiles)
        row["loss"] = sum(losses) / len(losses) if losses else math.nan
        rows.append(setting | row)
    return rows


if __name__ == "__main__":
    main()
