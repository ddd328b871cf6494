"""The command that records errors over ranks, as small as it goes."""

import pytest


@pytest.mark.full
def test_the_command_compares_one_process_and_two(record):
    table = record("record_ranks_accuracy", "--quick")
    assert table.values("ranks") == [1, 2] and len(table.rows) == 2 * 3 * 2 * 3
    bounds = {"float32": 1e-6, "bfloat16": 3e-3}
    for row in table.rows:
        assert 0 < row["o"] < bounds[row["dtype"]] and 0 < row["gradients"] < bounds[row["dtype"]], row
