"""Record data/h200_<operator>_gradients.json: errors of every output and gradient against float64. Needs a GPU.

python data/record_gradients.py rwkv6 [--out FILE] [--quick]
"""

import itertools
import platform
from pathlib import Path

import torch
from rich.progress import track

from flakit.cases.decay_gradient import running_sums
from flakit.numerics import recorded
from flakit.numerics.gradients import gradient_rows
from flakit.numerics.on_gpu import RECORDINGS, SIZES
from flakit.numerics.operators import OPERATORS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (64, 256, 1024, 4096)
DECAYS = ("logsigmoid", "uniform", "spikes", "none", -0.01, -0.1, -1.0, -4.0, -8.0, -20.0, -50.0, -80.0)
SEED = 0
OTHERS = {"rwkv6": {"running sums": running_sums}}


def main() -> None:
    parser = recorded.script(__doc__, quick="a few settings only")
    parser.add_argument("op", choices=OPERATORS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since no GPU is here, got cuda")

    op, others, sizes = OPERATORS[options.op], OTHERS.get(options.op, {}), SIZES[options.op]
    out = options.out or Path(__file__).parent / f"{RECORDINGS[op.name]}.json"
    lengths, decays = (LENGTHS[:1], DECAYS[::4]) if options.quick else (LENGTHS, (op.profile, *DECAYS))
    settings = list(itertools.product(DTYPES, lengths, decays))
    rows = []
    for dtype, T, decay in track(settings, "settings"):
        setting = {"dtype": dtype, "T": T, "decay": decay, **sizes}
        rows += gradient_rows(op, others=others, device=options.device, seed=SEED, **setting)

    for row in rows:
        row["backend"] = "triton" if on_gpu and row["form"] not in others else "torch"
    meta = recorded.provenance(
        f"python data/record_gradients.py {op.name}",
        None if on_gpu else f"{platform.machine()} CPU",
        sizes=", ".join(f"{name} {size}" for name, size in sizes.items()) + f"; seed {SEED}",
    )
    print("wrote", recorded.write(out, meta, rows))


if __name__ == "__main__":
    main()
