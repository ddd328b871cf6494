"""Probes and faults, all against all: `python -m tests.instruments.test_audit_matrix FILE.png` draws it."""

import base64
import sys
from pathlib import Path

import pytest

import flakit
from flakit.figures.audit import matrix
from flakit.instruments.probes import PROBES
from tests.instruments.kernels import RIGHT, WRONG
from tests.instruments.planted import PLANTED
from tests.instruments.test_audit import MEMORY

FAULTS = {name: planted[:2] for name, planted in PLANTED.items()} | WRONG


def verdicts(op, kernel):
    found = flakit.audit(kernel, op, shrink=False)
    return {v.probe.name: v.verdict for v in found.verdicts}


HELD = {probe for _, _, probe, _ in PLANTED.values()} | set(MEMORY.values()) | {"other-device"}
"""Probes that test_audit.py holds to a fault of their own, one by one; test_audit_causes.py, the one for two GPUs."""
OTHERS = {"gradients": "no du", "halves": "dinitial off by the first decay", "inf-decay": "anchor: chunk before"}


@pytest.mark.parametrize("probe", sorted(set(PROBES) - HELD))
def test_every_other_probe_finds_a_fault(probe):
    op, kernel = FAULTS[OTHERS[probe]]
    found = flakit.audit(kernel, op, only=[probe], shrink=False)[probe]
    assert (found.verdict, found.cause) == ("fail", ""), found


def test_matrix_says_how_many_are_found():
    rows = {"a fault": {"truth": "fail", "packed": "not supported"}, "none": {"truth": "pass", "packed": "pass"}}
    picture = matrix(rows)
    assert picture.alt == "2 kernels and 2 probes: 1 of them fail at least one." and picture.png()


if __name__ == "__main__":
    from docs.execute import smaller

    rows = {name: verdicts(op, kernel) for name, (op, kernel) in {**FAULTS, **RIGHT}.items()}
    small = smaller(base64.b64encode(matrix(rows).png()).decode())
    Path(sys.argv[1]).write_bytes(base64.b64decode(small))
    for name, row in rows.items():
        print(f"{name:40} {', '.join(probe for probe, verdict in row.items() if verdict == 'fail') or '-'}")
