"""Record gates that drift into a kernel's fault: data/gate_drift.json, with --long data/h200_gate_drift.json, with
--text data/fatal_run.json and data/fatal_run.npz.

python data/record_gate_drift.py [--jobs 2] [--out FILE] [--quick]           needs no GPU; about 15 minutes on one core
python data/record_gate_drift.py --long [--seconds 480] [--out FILE] [--quick]                 on one GPU or several
python data/record_gate_drift.py --text [--out FILE] [--quick]                   needs no GPU; some minutes on one core

The long runs are those of a wider GSA on 3000 tokens, as in the report of this fault, at learning rates that people
use. One of them holds at most 0.46 GB of tensors (with the right kernel 0.39 GB; measured on a CPU, as the profiler
counts allocations): all six fit on one GPU beside other work, and `LIMIT_GB` enforces it.
"""

import math
import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from flakit.cases import gate_drift
from flakit.cases.gate_drift import text
from flakit.models.training import adamw
from flakit.numerics import recorded

SEEDS, STEPS, WINDOW = range(4), 600, 20
SLOWER, SLOWER_STEPS = 4, 6000
"""The factor by which a further learning rate for GSA's faulty kernel is smaller, and the steps of that run."""
LONG = {"dim": 128, "tokens": 3000}
LONG_RATES, LONG_SEEDS, LONG_WINDOW = (0.002, 0.001), range(2), 100
TEXT_STEPS, TEXT_WINDOW = 1200, 20
"""Of the run that becomes NaN: steps of the right kernel, and after how many steps each run is checked for NaN."""
AFTER, RESUMED, RESUMED_LATER = 2, 120, 40
"""Recorded steps of a NaN run from its first such step on; those stored after its first and later texts."""
LIMIT_GB = 8
"""The GPU memory that a run may use: one that needs more fails by itself and leaves the others theirs."""


def main() -> None:
    parser = recorded.script(__doc__, quick="one seed, two windows of each run")
    parser.add_argument("--long", action="store_true", help="the long runs, for a GPU, all at once")
    parser.add_argument("--text", action="store_true", help="the run that dies, on the text of the standard library")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cpu, with --long cuda")
    parser.add_argument("--seconds", type=float, default=480.0, help="when each of the long runs stops")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once without --long")
    options = parser.parse_args()
    device = options.device or ("cuda" if options.long else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since no GPU is here, got cuda")
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    if options.text:
        print("wrote", text_run(options.out or Path(__file__).parent / "fatal_run.json", options.quick))
        return

    sizes, settings = (LONG, long()) if options.long else ({"dim": 32, "tokens": gate_drift.T}, short())
    window = LONG_WINDOW if options.long else WINDOW
    if options.quick:
        settings = [setting | {"steps": 2 * WINDOW} for setting in settings if setting["seed"] == 0]
        settings = settings[::2] if options.long else settings  # one learning rate
        sizes, window = {"dim": 32, "tokens": gate_drift.T + 64 * options.long}, WINDOW
    budget = options.seconds if options.long else None
    jobs = len(settings) if options.long else options.jobs
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        how = {"sizes": sizes, "window": window, "device": device, "seconds": budget}
        runs = [pool.submit(run, n, **setting, **how) for n, setting in enumerate(settings)]
        title = f"runs, each of {budget:.0f} s" if budget else "runs"
        rows = [row for done in track(runs, title) for row in done.result()]

    meta = recorded.provenance(
        "python data/record_gate_drift.py" + " --long" * options.long,
        None if device == "cuda" else f"{platform.machine()} CPU, one thread",
        experiment=f"flakit.cases.gate_drift.drift; T = {sizes['tokens']}, {gate_drift.SIZE} sequences a step, "
        f"dim {sizes['dim']}; rows of {window} steps",
    )
    if budget:
        meta["stopped"] = f"each run after {budget:.0f} s, {len(runs)} at once"
    name = "h200_gate_drift.json" if options.long else "gate_drift.json"
    print("wrote", recorded.write(options.out or Path(__file__).parent / name, meta, rows))


def short() -> list[dict]:
    ops = [op for op in gate_drift.LEARNING_RATE if op != "attention"]
    every = [(op, kernel, seed, 1) for op in ops for kernel in gate_drift.KERNELS for seed in SEEDS]
    every += [("attention", "right", seed, 1) for seed in SEEDS]
    every.append(("gsa", "faulty", 0, SLOWER))
    return [
        {"op": op, "kernel": kernel, "seed": seed, "lr": gate_drift.LEARNING_RATE[op] / slower}
        | {"steps": STEPS if slower == 1 else SLOWER_STEPS, "go_on": kernel == "faulty" and slower == 1}
        for op, kernel, seed, slower in every
    ]


def long() -> list[dict]:
    faulty = [("faulty", seed, lr) for lr in LONG_RATES for seed in LONG_SEEDS]
    right = [("right", 0, lr) for lr in LONG_RATES]
    how = {"op": "gsa", "steps": 1_000_000, "go_on": False}  # as many as the time allows
    return [{"kernel": kernel, "seed": seed, "lr": lr} | how for kernel, seed, lr in faulty + right]


def run(n, *, op, kernel, seed, lr, steps, go_on, sizes, window, device, seconds) -> list[dict]:
    """Return a row for each window of a run's steps. go_on: also for half as many steps with the gates' projection
    re-initialised. n: the run's number, which selects its GPU in turn."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(n % torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_GB * 1e9 / torch.cuda.mem_get_info()[1]))
    how = {"seed": seed, "lr": lr, "device": device, "seconds": seconds, "progress": False, **sizes}
    model, drift = gate_drift.drift(op, kernel, steps=steps, **how)
    setting = {"op": op, "kernel": kernel, "seed": seed, "lr": lr}
    rows = windows(setting | {"reinitialised": False}, drift, 0, window)
    if go_on:
        start = gate_drift.reinitialised(model, gate_drift.PROJECTION[op], op)
        _, drift = gate_drift.drift(op, kernel, steps=steps // 2, start=start, **how)
        rows += windows(setting | {"reinitialised": True}, drift, steps, window)
    return rows


def windows(setting: dict, drift: gate_drift.Drift, first: int, window: int) -> list[dict]:
    rows = []
    for n in range(0, len(drift.lost), window):
        part = slice(n, n + window)
        losses = [loss for loss in drift.run.losses[part] if math.isfinite(loss)]
        quantiles = drift.quantiles[part] or [[math.nan] * 5]
        row = {"step": first + n, "lost": sum(drift.lost[part]) / len(drift.lost[part])}
        row["as_predicted"] = sum(a == b for a, b in zip(drift.lost[part], drift.predicted[part], strict=False))
        row["exponent_median"] = sum(q[2] for q in quantiles) / len(quantiles)
        row["exponent_largest"] = max(q[-1] for q in quantiles)
        row["loss"] = sum(losses) / len(losses) if losses else math.nan
        rows.append(setting | row)
    return rows


def text_run(path: Path, quick: bool) -> Path:
    """Record the run that becomes NaN, with each of its kernels, a row per step; store as .npz beside `path` what its
    last steps need. Return the path. Raise SystemExit if a faulty kernel causes no NaN.

    quick: without the kernel "first-row", and the right kernel for one window only."""
    torch.set_num_threads(1)
    runs = {kernel: TextRun(kernel) for kernel in text.KERNELS if not (quick and kernel == "first-row")}
    for kernel, run in runs.items():
        run.train(TEXT_WINDOW if quick and kernel == "right" else TEXT_STEPS)
    fatal = {kernel: run for kernel, run in runs.items() if kernel in text.FATAL}
    for kernel, run in fatal.items():
        if run.dead is None:
            raise SystemExit(f"{kernel}: expected a step that is not finite, got none in {TEXT_STEPS}")
    pieces = max(runs.values(), key=lambda run: len(run.pieces)).pieces
    first = fatal["none"].dead
    stored = {"text/0": torch.stack(pieces[: first + RESUMED])}
    for kernel, run in fatal.items():
        stored |= {f"{kernel}/{name}": x for name, x in run.before.items()} | {f"{kernel}/step": torch.tensor(run.dead)}
        if kernel != "none":
            stored[f"text/{run.dead}"] = torch.stack(pieces[run.dead : run.dead + RESUMED_LATER])
    np.savez_compressed(path.with_suffix(".npz"), **{name: x.numpy() for name, x in stored.items()})

    sizes = ", ".join(f"{name} {size}" for name, size in text.SIZES.items())
    meta = recorded.provenance(
        "python data/record_gate_drift.py --text",
        f"{platform.machine()} CPU, one thread",
        experiment=f"flakit.cases.gate_drift.text; RWKV6, {sizes}; {text.SEQUENCES} sequences of {text.TOKENS} bytes "
        f"a step; learning rate {text.RATE}; seed {text.SEED}",
        corpus=f"Python {platform.python_version()}'s standard library, its first {text.MODULES} modules without the "
        "last tenth",
    )
    os.environ["FLAKIT_DATA"] = str(path.parent)  # the step is replayed from what has just been stored
    meta |= {f"lost, {kernel}": " ".join(text.replay(kernel, of=kernel).lost) for kernel in fatal}
    rows = [row for run in runs.values() for row in run.rows]
    for kernel in fatal:
        rows += resumed(kernel, 2 if quick else text.Text(text.fatal_step(kernel)).steps)
    return recorded.write(path, meta, rows)


def resumed(kernel: str, steps: int) -> list[dict]:
    """Return the rows of the right kernel, resumed from the state before another kernel's first NaN step."""
    drift = text.resume("right", of=kernel, steps=steps)
    return [step_of(drift, n, "right", since=kernel) for n in range(steps)]


def step_of(drift: gate_drift.Drift, n: int, kernel: str, since: str = "") -> dict:
    """Return the row of step n. since: the kernel before whose first NaN step the run was resumed."""
    step = {"kernel": kernel, "since": since, "step": drift.first + n, "loss": drift.run.losses[n]}
    return step | {"grad_norm": drift.run.grad_norms[n], "exponent": drift.quantiles[n][-1]}


class TextRun:
    """One run of `text`, trained window by window: its rows, its text, and its state before the first NaN step,
    `dead`."""

    def __init__(self, kernel: str):
        self.kernel, self.model, self.dead, self.before = kernel, text.initial(), None, {}
        self.optimizer, self.generator = adamw(self.model), torch.Generator().manual_seed(text.SEED)
        self.rows, self.pieces, self._states, self._library = [], [], [], text.library()

    def train(self, steps: int) -> None:
        """Train for that many steps, or until a few steps after the first NaN step."""
        while len(self.rows) < (steps if self.dead is None else self.dead + AFTER):
            first, self._states = len(self.rows), []
            how = {"steps": TEXT_WINDOW, "optimizer": self.optimizer, "progress": False}
            how["warmup"] = text.WARMUP / TEXT_WINDOW if not first else 0.0
            scheme = "none" if self.kernel == "right" else self.kernel
            drift = gate_drift.Drift("rwkv6", self.kernel, first=first)
            text.train_on(self._batch, self.kernel, self.model, drift, scheme=scheme, **how)
            for n, lost in enumerate(drift.lost):
                if lost and self.dead is None:
                    self.dead, self.before = first + n, self._states[n]
                if self.dead is None or first + n < self.dead + AFTER:
                    self.rows.append(step_of(drift, n, self.kernel))
            print(f"{self.kernel}: step {len(self.rows)}, loss {self.rows[-1]['loss']:.3f}", flush=True)

    def _batch(self, size: int, T: int, _) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = self._library(size, T, self.generator)
        self.pieces.append(torch.cat([tokens, targets[:, -1:]], 1).to(torch.uint8))
        state = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            moments = self.optimizer.state.get(p, {})
            state |= {f"{name}/{key}": moments[key].clone() for key in ("exp_avg", "exp_avg_sq") if key in moments}
        self._states.append(state)
        return tokens, targets


if __name__ == "__main__":
    main()
