"""Record data/h200_distributed.json: one training on one GPU and on two, killed and resumed. Needs two GPUs.

python data/record_distributed.py [--out FILE] [--seconds 240] [--quick]

Each run is `flakit.train` in separate processes, on the same global batches; the file is written again after each, and
none is begun after so many seconds. --quick: small, on two processes of a CPU.
"""

import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flakit.numerics import recorded

LARGE = {
    "mixer": "rwkv7", "dim": 1024, "layers": 12, "head_size": 64, "T": 2048, "size": 16, "steps": 30, "lr": 1e-3,
    "dtype": "bfloat16", "device": "cuda", "watch_every": 20, "save_every": 10,
}  # fmt: skip
SMALL = LARGE | {"dim": 16, "layers": 1, "head_size": 8, "T": 16, "size": 4, "steps": 24, "lr": 1e-2}
SMALL |= {"device": "cpu", "watch_every": 0, "save_every": 4}
RUNS = {
    "1": (1, {"accumulation": 2}),
    "2, ddp": (2, {}),
    "2, ddp, killed": (2, {}),
    "2, fsdp2": (2, {"parallel": "fsdp2"}),
    "1, float32": (1, {"accumulation": 2, "dtype": "float32", "T": 512}),
    "2, ddp, float32": (2, {"dtype": "float32", "T": 512}),
    "2, fsdp2, killed": (2, {"parallel": "fsdp2"}),
    "1, compiled": (1, {"accumulation": 2, "compile": True, "watch_every": 0}),
    "2, ddp, compiled": (2, {"compile": True, "watch_every": 0}),
}
"""By name: the number of ranks and their own settings. A step has 16 sequences in all runs, 8 at once on a GPU."""
WARM = 5
"""The number of first steps that a run's speed excludes: they compile kernels and allocate memory."""


def main() -> None:
    parser = recorded.script(__doc__, "h200_distributed", quick="small, on two processes of a CPU")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    options = parser.parse_args()
    if not options.quick and torch.cuda.device_count() < 2:
        parser.error(f"expected two GPUs, found {torch.cuda.device_count()}")
    begin, logs = time.monotonic(), {}
    for name, (ranks, own) in RUNS.items():
        if name not in options.only or time.monotonic() - begin > options.seconds:
            continue
        with TemporaryDirectory() as folder:
            settings = (SMALL if options.quick else LARGE) | own
            if not name.endswith("killed"):
                settings |= {"save_every": 999}
            run(Path(folder), ranks, settings, kill_after=settings["steps"] // 2 if name.endswith("killed") else None)
            logs[name] = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
        print(f"{time.monotonic() - begin:5.0f} s  {name}: {summary(logs, name)}", flush=True)
        meta = recorded.provenance(
            "python data/record_distributed.py",
            f"{platform.machine()} CPU" if options.quick else None,
            settings=json.dumps(SMALL if options.quick else LARGE),
            **{f"run {other}": summary(logs, other) for other in logs},
        )
        recorded.write(options.out, meta, rows(logs))
    print("wrote", options.out)


def run(folder: Path, ranks: int, settings: dict, kill_after: int | None) -> None:
    """Train in a folder; with kill_after, kill the run once its log has that many steps, and resume it."""
    words = [f"--{name.replace('_', '-')}={x}" for name, x in settings.items() if x is not True]
    words += [f"--{name}" for name, x in settings.items() if x is True] + [f"--out={folder}"]
    many = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *many, "flakit.train", *words]
    log = folder / "log.jsonl"
    with (folder / "output.txt").open("w") as out:
        if kill_after is not None:
            process = subprocess.Popen(command, stdout=out, stderr=out)
            mark = '{"kind": "step"'  # of a step in the log
            while process.poll() is None and not (log.is_file() and log.read_text().count(mark) >= kill_after):
                time.sleep(0.05)
            process.kill()  # torchrun before its ranks, whose end it would tell of
            for pid in json.loads(log.read_text().partition("\n")[0])["processes"]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            time.sleep(2)  # until their memory is free
        if subprocess.call(command, stdout=out, stderr=out):
            sys.exit((folder / "output.txt").read_text())


def steps(log: list[dict]) -> list[dict]:
    return [x for x in log if x["kind"] == "step"]


def summary(logs: dict[str, list[dict]], name: str) -> str:
    """Return a line about a run: its speed, and the distance of its loss curve from that of its counterpart."""
    own, begins = steps(logs[name]), [x for x in logs[name] if x["kind"] == "begin"]
    middle = {x: [step[x] for step in own[WARM:]] for x in ("tokens_per_second", "tflops", "matrix_share")}
    words = [f"loss {own[0]['loss']:.4f} to {own[-1]['loss']:.4f}"]
    words += [f"{statistics.median(middle['tokens_per_second']):,.0f} tokens/s"]
    if begins[0]["matrix_tflops"]:
        tflops, share = (statistics.median(middle[x]) for x in ("tflops", "matrix_share"))
        words += [f"{tflops:.0f} TFLOP/s a GPU, {share:.1%} of {begins[0]['matrix_tflops']:.0f}"]
        words += [f"{max(x['memory_gib'] for x in own):.1f} GiB"]
    whole = name.removesuffix(", killed")
    if whole != name and whole in logs:
        same = [x["loss"] for x in own] == [x["loss"] for x in steps(logs[whole])]
        words += [f"killed, gone on from {begins[-1]['step']}: {'the same bits' if same else apart(logs, name, whole)}"]
    alone = "1" + name[1:].replace(", ddp", "").replace(", fsdp2", "").replace(", killed", "")
    if alone != name and alone in logs:
        words += [apart(logs, name, alone)]
    return ", ".join(words)


def apart(logs: dict[str, list[dict]], name: str, other: str) -> str:
    pairs = zip(steps(logs[name]), steps(logs[other]), strict=True)
    return f"losses at most {max(abs(a['loss'] / b['loss'] - 1) for a, b in pairs):.1e} from those of {other!r}"


def rows(logs: dict[str, list[dict]]) -> list[dict]:
    names = ("loss", "grad_norm", "seconds", "tokens_per_second", "tflops", "matrix_share", "memory_gib")
    return [
        {"run": name, "step": x["step"], **{each: x[each] for each in names}}
        for name, log in logs.items()
        for x in steps(log)
    ]


if __name__ == "__main__":
    main()
