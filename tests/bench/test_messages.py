"""What a table of messages is taken to say: how long one takes to begin, and how fast its bytes go."""

import sys

import pytest
import torch

from flakit.bench import messages


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_table_gives_back_what_it_was_made_of(ranks):
    rows = [{"ranks": ranks, "bytes": n, "us": 12 + (ranks - 1) * n / 300e3} for n in messages.SIZES]
    begin, rate, off = messages.fit(rows)
    assert (begin, rate) == pytest.approx((12, 300)) and off < 1e-9


def test_the_worst_row_is_told():
    rows = [{"ranks": 2, "bytes": n, "us": 12 + n / 300e3} for n in messages.SIZES]
    rows[3]["us"] *= 2
    *_, off = messages.fit(rows)
    assert 0.3 < off < 0.5  # of a row that takes twice as long, half is missing, less what the fit gives way


def test_it_wants_gpus(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["messages", "--gpus", str(torch.cuda.device_count() + 1)])
    with pytest.raises(SystemExit):
        messages.main()
    assert f"expected {torch.cuda.device_count() + 1} GPUs" in capsys.readouterr().err
