"""Record data/workbench.json: what notebook 14 and its panel show where there is no Triton. Needs no GPU; a minute.

python data/record_workbench.py [--out FILE]
"""

import json
import platform

import numpy as np
from rich.progress import track

from flakit.instruments import workbench
from flakit.numerics import recorded
from flakit.panels.kernel_trace import STOPS, STRONGEST, LostDigits

OUTPUTS = {
    "start": (-0.5, -1.0, -1.3, -1.39, -1.5, -2.5),
    "middle": (-2.5, -9.0),
    "blocks": (-9.0, -100.0),
    "halves": (-100.0,),
}
"""By way of computing the scores, the decays at which the notebook draws the output; else only the trace is."""

DIGITS = sorted({(at["way"], at["decay"], at["products"]) for at in LostDigits.presets.values()}, reverse=True)
"""The (way, decay, products) settings for which lost digits are recorded."""


def main() -> None:
    parser = recorded.script(__doc__, "workbench")
    options = parser.parse_args()
    rows = []
    for way in track(workbench.WAYS, "anchors"):
        onsets = {f"{name}_onset": size for name, size in workbench.onset(way=way).items()}
        whole = {(decay, products) for each, decay, products in DIGITS if each == way}
        plain = {(decay, "ieee") for decay in {0.0, STRONGEST, *STOPS, *OUTPUTS[way]}} - whole
        for decay, products in sorted(plain | whole, reverse=True):
            digits = (decay, products) in whole
            run = workbench.run(decay, way=way, digits=digits, products=products)
            drawn = digits or decay in OUTPUTS[way]
            o = np.asarray(run.o, np.float64).reshape(-1).tolist() if drawn else []
            trace = json.dumps(run.trace.to_dict(), separators=(",", ":"))
            row = {"way": way, "decay": decay, "products": products, "digits": digits, **onsets}
            rows.append(row | {"error": run.error, "o": o, "trace": trace})
    meta = recorded.provenance(
        "python data/record_workbench.py",
        f"{platform.machine()} CPU, Triton's interpreter",
        experiment="flakit.instruments.workbench.run of its own lines",
    )
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
