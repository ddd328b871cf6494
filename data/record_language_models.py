"""Record data/h200_language_models.json: small language models on every mixer, from both initialisations. Needs a GPU.

python data/record_language_models.py [--out FILE] [--device cpu] [--jobs 4] [--quick]

The file is written again after each model, so that an interrupted run leaves the finished ones. A model in training
holds at most 3.3 GB of tensors (RWKV7; RWKV6 2.2, GSA 1.9, attention 1.0 GB: what the profiler counts on a CPU for one
sequence and for two, extrapolated to 16), so that four at once and the process that started them stay below 20 GB.
"""

import itertools
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch
from rich.progress import track

from flakit.models import MIXERS, byte_prediction, train
from flakit.models.language_model import INITIALISATIONS
from flakit.numerics import recorded

SEEDS, WINDOW, TIMED = range(2), 20, 20
"""TIMED: the number of steps over which speed is measured, after as many that compile and warm up."""
AUTOCAST = torch.bfloat16


def main() -> None:
    parser = recorded.script(__doc__, "h200_language_models", quick="tiny models, one seed, two windows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="models trained at once, spread over all GPUs")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since no GPU is here, got cuda")
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")

    size, seeds = byte_prediction.LARGE, SEEDS
    if options.quick:
        size, seeds = replace(byte_prediction.SMALL, dim=32, T=16, size=2, steps=2 * WINDOW, modules=5), SEEDS[:1]
    text = len(byte_prediction.standard_library(size.modules).text)
    meta = recorded.provenance(
        "python data/record_language_models.py",
        None if on_gpu else f"{platform.machine()} CPU",
        experiment="flakit.models.byte_prediction.learn; matrix products and operators in bfloat16 by autocast",
        size=str(size),
        corpus=f"{text} bytes, the standard library of Python {platform.python_version()}; the last tenth held out",
    )
    settings = list(itertools.product(seeds, MIXERS, INITIALISATIONS))
    rows, speed = [], {}
    for mixer in track(MIXERS, "speed of each mixer, alone"):  # which also compiles the kernels once for all
        speed[mixer] = tokens_per_second(mixer, size, options.device)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(learn, n, *setting, size, options.device) for n, setting in enumerate(settings)]
        for done in track(as_completed(runs), "models", total=len(runs)):
            rows += [{**row, "tokens_per_second": speed[row["mixer"]]} for row in done.result()]
            recorded.write(options.out, meta, sorted(rows, key=_order))
    print("wrote", options.out)


def _order(row: dict) -> tuple:
    return list(MIXERS).index(row["mixer"]), INITIALISATIONS.index(row["initialisation"]), row["seed"], row["step"]


def tokens_per_second(mixer: str, size: byte_prediction.Size, device: str) -> float:
    """Return the tokens per second of training, with nothing else on the device."""
    model, (text, _) = byte_prediction.model(mixer, "published", size).to(device), byte_prediction.corpora(size)
    how = {"steps": TIMED, "size": size.size, "T": size.T, "autocast": AUTOCAST, "progress": False}
    train(model, text.batch, **how)
    return TIMED * size.tokens / train(model, text.batch, **how).seconds


def learn(n: int, seed: int, mixer: str, initialisation: str, size: byte_prediction.Size, device: str) -> list[dict]:
    """Train one model; return a row for each window of steps. n: the run's number, which selects its GPU in turn."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(n % torch.cuda.device_count())
    how = {"seed": seed, "device": device, "autocast": AUTOCAST, "progress": False}
    model, run, held_out = byte_prediction.learn(mixer, initialisation, size, **how)
    whole = {"first_loss": run.losses[0], "held_out": held_out, "skipped": len(run.skipped)}
    whole["parameters"] = sum(p.numel() for p in model.parameters())
    rows = []
    for step in range(0, size.steps, WINDOW):
        losses, norms = run.losses[step : step + WINDOW], run.grad_norms[step : step + WINDOW]
        row = {"mixer": mixer, "initialisation": initialisation, "seed": seed, "step": step}
        rows.append(row | {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)} | whole)
    return rows


if __name__ == "__main__":
    main()
