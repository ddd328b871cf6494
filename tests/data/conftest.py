"""The commands of data/ in this process, which has imported PyTorch: a process for each takes three seconds more."""

import importlib
import sys

import pytest

from flakit.numerics import recorded
from tests.commands import ROOT

DATA = ROOT / "data"
sys.path.insert(0, str(DATA))  # from where tests import a command, and processes that it spawns


@pytest.fixture
def record(monkeypatch, tmp_path):
    """record("record_gate_drift", "--quick") -> the table that the command has written to `out`."""

    def run(name, *options, out=tmp_path / "recorded.json"):
        assert (DATA / f"{name}.py").read_text().endswith('\n\nif __name__ == "__main__":\n    main()\n')
        monkeypatch.setattr(sys, "argv", [f"data/{name}.py", *options, "--out", str(out)])
        importlib.import_module(name).main()
        return recorded.read(out)

    return run
