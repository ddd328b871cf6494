"""Probes and faults, all against all: `python -m tests.instruments.test_audit_matrix FILE.png` draws it."""

import sys
from pathlib import Path

import pytest

import flakit
from flakit.figures.audit import matrix
from flakit.instruments.probes import PROBES
from tests.instruments.kernels import RIGHT, WRONG
from tests.instruments.planted import PLANTED

FAULTS = {name: planted[:2] for name, planted in PLANTED.items()} | WRONG


def verdicts(op, kernel):
    found = flakit.audit(kernel, op, shrink=False)
    return {v.probe.name: v.verdict for v in found.verdicts}


@pytest.mark.full
def test_every_probe_finds_a_fault_and_every_fault_is_found():
    """What other tests hold to one probe each, together; three probes have their faults in test_memory_and_bits."""
    found = {name: verdicts(op, kernel) for name, (op, kernel) in FAULTS.items()}
    assert [name for name, row in found.items() if "fail" not in row.values()] == []
    idle = {probe for probe in PROBES if not any(row[probe] == "fail" for row in found.values())}
    assert idle <= {"poison", "repeat", "non-finite", "canaries"}
    assert matrix(found).png().startswith(b"\x89PNG")


def test_matrix_says_how_many_are_found():
    rows = {"a fault": {"truth": "fail", "packed": "not supported"}, "none": {"truth": "pass", "packed": "pass"}}
    picture = matrix(rows)
    assert picture.alt == "2 kernels and 2 probes: 1 of them fail at least one." and picture.png()


if __name__ == "__main__":
    rows = {name: verdicts(op, kernel) for name, (op, kernel) in {**FAULTS, **RIGHT}.items()}
    Path(sys.argv[1]).write_bytes(matrix(rows).png())
    for name, row in rows.items():
        print(f"{name:40} {', '.join(probe for probe, verdict in row.items() if verdict == 'fail') or '-'}")
