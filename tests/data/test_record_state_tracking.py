"""The command that records state tracking writes what notebook 10 reads."""

import pytest

from flakit.models.state_tracking import LENGTHS
from flakit.numerics import recorded


@pytest.mark.full
def test_the_command_remakes_the_recording(record):
    made, committed = record("record_state_tracking", "--quick"), recorded.read("state_tracking")
    assert made.columns == committed.columns
    assert set(made.meta) == set(committed.meta)
    assert made.meta["command"] == committed.meta["command"] == "python data/record_state_tracking.py"
    assert made.values("length") == list(LENGTHS)
    assert set(made.values("model")) < set(committed.values("model"))
