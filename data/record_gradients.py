"""Record data/h200_rwkv6_gradients.json: errors of every output and gradient against float64. Needs a GPU.

python data/record_gradients.py [--out FILE] [--quick]
"""

import argparse
import datetime
import itertools
import time
from pathlib import Path

import torch
import triton

import flakit
from flakit.cases.decay_gradient import running_sums
from flakit.numerics import recorded
from flakit.numerics.gradients import gradient_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (64, 256, 1024, 4096)
DECAYS = ("rwkv6-init", "logsigmoid", "uniform", "spikes", "none", -0.01, -0.1, -1.0, -4.0, -8.0, -20.0, -50.0, -80.0)
SIZES = {"B": 1, "H": 4, "K": 64, "V": 64}
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "h200_rwkv6_gradients.json")
    parser.add_argument("--quick", action="store_true", help="a few settings only, to try the command")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here: this records what GPU kernels do")

    settings = list(itertools.product(DTYPES, LENGTHS, DECAYS))
    if options.quick:
        settings = settings[:: len(settings) // 6]
    rows, start = [], time.monotonic()
    for n, (dtype, T, decay) in enumerate(settings):
        setting = {"dtype": dtype, "T": T, "decay": decay, **SIZES}
        rows += gradient_rows("rwkv6", others={"running sums": running_sums}, device="cuda", seed=SEED, **setting)
        print(f"\r{n + 1} of {len(settings)} settings, {time.monotonic() - start:.0f} s", end="", flush=True)
    print()

    for row in rows:
        row["backend"] = "torch" if row["form"] == "running sums" else "triton"
    meta = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flakit": flakit.__version__,
        "command": "python data/record_gradients.py",
        "sizes": ", ".join(f"{name} {size}" for name, size in SIZES.items()) + f", seed {SEED}",
    }
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
