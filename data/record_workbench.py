"""Record data/workbench.json: what notebook 14 and its panel show where there is no Triton. Needs no GPU; a minute.

python data/record_workbench.py [--out FILE]
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
from rich.progress import track

from flakit.instruments import workbench
from flakit.numerics import recorded
from flakit.panels.kernel_trace import STOPS, STRONGEST

OUTPUTS = {
    "start": (-0.5, -1.0, -1.3, -1.39, -1.5, -2.5),
    "middle": (-2.5, -9.0),
    "blocks": (-9.0, -100.0),
    "halves": (-100.0,),
}
"""The decays at which the notebook draws the output; of all others the trace alone is kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "workbench.json")
    options = parser.parse_args()
    rows = []
    for way in track(workbench.WAYS, "anchors"):
        onsets = {f"{name}_onset": size for name, size in workbench.onset(way=way).items()}
        for decay in sorted({0.0, STRONGEST, *STOPS, *OUTPUTS[way]}, reverse=True):
            made = workbench.run(decay, way=way)
            o = np.asarray(made.o, np.float64).reshape(-1).tolist() if decay in OUTPUTS[way] else []
            trace = json.dumps(made.trace.to_dict(), separators=(",", ":"))
            rows.append({"way": way, "decay": decay, **onsets, "error": made.error, "o": o, "trace": trace})
    meta = recorded.provenance(
        "python data/record_workbench.py",
        f"{platform.machine()} CPU, Triton's interpreter",
        experiment="flakit.instruments.workbench.run of its own lines",
    )
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
