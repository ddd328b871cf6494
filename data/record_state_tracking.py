"""Record data/state_tracking.json: which models follow permutations, and for how long. Needs no GPU; about 20 minutes.

python data/record_state_tracking.py [--out FILE] [--quick]
"""

import platform

import torch
from rich.progress import track

from flakit.models.state_tracking import LEARNT, MODELS, follow
from flakit.numerics import recorded

RUNS = [(3, name, seed) for name in MODELS for seed in range(3 if "layers" in name else 5)]
RUNS += [(5, name, seed) for name in MODELS if "layers" not in name for seed in range(3)]


def main() -> None:
    parser = recorded.script(__doc__, "state_tracking", quick="five models, one seed, five steps")
    options = parser.parse_args()
    steps, runs = (5, RUNS[:25:5]) if options.quick else (None, RUNS)

    torch.set_num_threads(1)  # the tensors are small: more threads wait for one another
    rows = []
    for items, name, seed in track(runs, "models"):
        rows += follow(name, items, seed, steps=steps, progress=False)[-1]

    meta = recorded.provenance(
        "python data/record_state_tracking.py",
        f"{platform.machine()} CPU, one thread",
        experiment=f"flakit.models.state_tracking.follow; trained on at most {LEARNT} tokens",
    )
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
