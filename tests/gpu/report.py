"""A pytest plugin that sums up what the GPU suite measured: `FLAKIT_REPORT=errors.json python -m pytest -m gpu -n 16`.

Loaded by tests/conftest.py where FLAKIT_REPORT is set. One row for each operator, form, dtype and output: the worst
figure over the covering set by each measure of error, and the setting that gave it. Failed tests count too. The file is
a recorded table, read by `flakit.numerics.recorded`.
"""

import os
import platform
import shlex
from collections import Counter, defaultdict

import torch

from flakit.numerics import recorded

rows = []  # filled where reports arrive: in the one process, or in xdist's controller
outcomes = Counter()


def pytest_runtest_logreport(report):
    if report.when == "call":
        outcomes[report.outcome] += 1
        rows.extend(getattr(report, "measured", []))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput") or not rows:
        return
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["op"], row["form"], row["dtype"], row["output"]].append(row)
    meta = recorded.provenance(
        "FLAKIT_REPORT=FILE python -m pytest " + shlex.join(session.config.invocation_params.args),
        None if torch.cuda.is_available() else f"{platform.machine()} CPU",
        python=platform.python_version(),
        tests=", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())),
    )
    recorded.write(os.environ["FLAKIT_REPORT"], meta, [_worst(grouped[key]) for key in sorted(grouped)])


def _worst(group: list[dict]) -> dict:
    worst = {name: max(group, key=lambda row: row[name]) for name in ("l2", "worst", "worst_row")}
    summary = {name: group[0][name] for name in ("op", "form", "dtype", "output")} | {"settings": len(group)}
    for name, row in worst.items():
        summary |= {name: row[name], f"{name}_at": row["setting"]}
    return summary
