"""Record data/h200_rwkv6_gradients.json: errors of every output and gradient against float64. Needs a GPU.

python data/record_gradients.py [--out FILE] [--quick]
"""

import argparse
import datetime
import itertools
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

import flakit
from flakit.cases.decay_gradient import running_sums
from flakit.numerics import recorded
from flakit.numerics.gradients import gradient_rows
from flakit.ops.common.dispatch import has_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (64, 256, 1024, 4096)
DECAYS = ("rwkv6-init", "logsigmoid", "uniform", "spikes", "none", -0.01, -0.1, -1.0, -4.0, -8.0, -20.0, -50.0, -80.0)
SIZES = {"B": 1, "H": 4, "K": 64, "V": 64}
SEED = 0
OTHERS = {"running sums": running_sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "h200_rwkv6_gradients.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few settings only")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since no GPU is here, got cuda")

    lengths, decays = (LENGTHS[:1], DECAYS[1::4]) if options.quick else (LENGTHS, DECAYS)
    settings = list(itertools.product(DTYPES, lengths, decays))
    rows, start = [], time.monotonic()
    for n, (dtype, T, decay) in enumerate(settings):
        setting = {"dtype": dtype, "T": T, "decay": decay, **SIZES}
        rows += gradient_rows("rwkv6", others=OTHERS, device=options.device, seed=SEED, **setting)
        print(f"\r{n + 1} of {len(settings)} settings, {time.monotonic() - start:.0f} s", end="", flush=True)
    print()

    for row in rows:
        row["backend"] = "triton" if on_gpu and row["form"] not in OTHERS else "torch"
    meta = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": version("triton") if has_triton() else "none",
        "flakit": flakit.__version__,
        "command": "python data/record_gradients.py",
        "sizes": ", ".join(f"{name} {size}" for name, size in SIZES.items()) + f"; seed {SEED}",
    }
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
