"""Record data/transformers_accumulation.json: the case gradient_accumulation in the real Transformers Trainer. Needs no
GPU; some minutes.

python data/record_transformers.py [4.48.2 5.23.0 ...] [--accelerate 1.15.0] [--out FILE]
python data/record_transformers.py --here --out FILE     with the transformers of this environment

Each release runs in a virtual environment of its own, which pip fills (2 GB) and which is deleted afterwards.
"""

import os
import platform
import subprocess
import tempfile
import venv
from pathlib import Path

import torch
from rich.progress import track

from flakit.cases.gradient_accumulation import transformers_trainer
from flakit.numerics import recorded

ROOT = Path(__file__).parents[1]
RELEASES = ("4.48.2", "5.23.0")
"""The release in which the fault was reported, and the one that was current when this was recorded."""


def main() -> None:
    parser = recorded.script(__doc__, "transformers_accumulation", quick="an accumulation of 1 and 4, one contract")
    parser.add_argument("releases", nargs="*", default=RELEASES, help="of transformers")
    parser.add_argument("--accelerate", default="1.15.0", help="its release in every environment")
    parser.add_argument("--here", action="store_true", help="only this environment's transformers")
    options = parser.parse_args()

    rows = []
    if options.here:
        versions = transformers_trainer.installed()
        if versions is None:
            parser.error("--here: expected transformers and accelerate installed, found none")
        runs, accumulations = transformers_trainer.RUNS, transformers_trainer.ACCUMULATIONS
        settings = [(*run, n) for run in runs[: 1 if options.quick else None] for n in accumulations]
        torch.set_num_threads(1)
        for setting in track(settings[:: 2 if options.quick else 1], f"transformers {versions['transformers']}"):
            rows += [versions | row for row in transformers_trainer.run(*setting)]
    else:
        for release in options.releases:
            rows += in_its_own_environment(release, options.accelerate, options.quick)

    meta = recorded.provenance(
        "python data/record_transformers.py",
        f"{platform.machine()} CPU",
        python=platform.python_version(),
        experiment="flakit.cases.gradient_accumulation.transformers_trainer.run: "
        "the same 16 sequences a step at any accumulation, AdamW, "
        f"lr {transformers_trainer.LEARNING_RATE:g}, clipped to 1 after the norm was logged",
    )
    print("wrote", recorded.write(options.out, meta, rows))


def in_its_own_environment(release: str, accelerate: str, quick: bool) -> list[dict]:
    """Return the rows of one release of transformers, run in a new environment with this one's torch."""
    with tempfile.TemporaryDirectory() as folder:
        home, out = Path(folder), Path(folder) / "rows.json"
        venv.create(home / "env", with_pip=True)
        python = home / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
        wanted = [f"torch=={torch.__version__.split('+')[0]}", f"transformers=={release}", f"accelerate=={accelerate}"]
        print("installing", *wanted, flush=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", "-e", ROOT, *wanted], check=True)
        command = [python, __file__, "--here", "--out", out] + ["--quick"] * quick
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        return [dict(row) for row in recorded.read(out).rows]


if __name__ == "__main__":
    main()
