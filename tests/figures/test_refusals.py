"""Pictures refuse what they cannot draw, and say which argument that is, what they expected and what they got."""

import re

import numpy as np
import pytest
import torch

from flakit.figures import plots
from flakit.figures.eigenvalues import along_kappa
from flakit.figures.experiments import experiments
from flakit.figures.gradients import GradientFigure
from flakit.figures.over_ranks import over_ranks
from flakit.figures.phase import phase
from flakit.figures.roofline import speed
from flakit.figures.scenes import SCENES
from flakit.figures.states import filmstrip
from flakit.figures.stepper import Stepper
from flakit.figures.training import loss_curves, lost_steps
from flakit.numerics.sweep import sweep
from tests.figures.test_phase import overflow
from tests.figures.test_roofline import CEILINGS, OURS
from tests.figures.test_states import STATES
from tests.figures.test_training import QUANTILES

EIGHT = [str(n) for n in range(8)]
AXES = {"xlabel": "t", "ylabel": "y"}
UNEVEN, TIMELESS = {"T": [8], "decay": [-1.0, -2.0, -3.0]}, {"decay": [-1.0, -2.0]}
REFUSALS = [
    (lambda: plots.matrices({"A": torch.zeros(8)}), "panels['A']: expected a matrix, got shape [8]"),
    (lambda: plots.matrices({}), "panels: expected at least one matrix, got none"),
    (lambda: plots.curves(range(19), {"a": range(18)}, **AXES), "lines['a']: expected 19 values like x, got 18"),
    (lambda: plots.beside(..., torch.zeros(3)), "expected: expected a matrix of finite numbers, got shape [3]"),
    (lambda: along_kappa(np.zeros(9), np.zeros(11), np.zeros((9, 11))),
     "eigenvalues: expected [11, 9] like ab and w, got [9, 11]"),
    (lambda: experiments([]), "rows: expected at least one step"),
    (lambda: GradientFigure(dict.fromkeys("abcd", ""), ("o",)), "series: expected at most 3, got 4"),
    (lambda: Stepper(SCENES["rwkv6"], "sideways"), "which: expected 'forward' or 'backward', got 'sideways'"),
    (lambda: over_ranks("ranks", [1, 2], {"p": {"a": [1.0]}}, {}),
     "panels['p']: expected 2 efficiencies like ranks for every line"),
    (lambda: over_ranks("ranks", [1, 2], {"p": dict.fromkeys(EIGHT, [1.0, 1.0])}, {}),
     "panels['p']: expected at most 7 lines, got 8"),
    (lambda: filmstrip(STATES, "abc", "012", title=""), "titles: expected 4"),
    (lambda: filmstrip(STATES, "abcd", "01", title=""), "rows: exp"),
    (lambda: speed([], **CEILINGS), "rows: expected at least one with both_ms, got none of 0"),
    (lambda: speed([OURS | {"both_ms": None}], **CEILINGS), "rows: expected at least one with both_ms, got none of 1"),
    (lambda: speed([OURS], what="backward", **CEILINGS), "what: expected one of forward, both, got 'backward'"),
    (lambda: speed([OURS | {"who": who} for who in EIGHT[:6]], **CEILINGS),
     "rows: expected at most 5 who, got 0, 1, 2, 3, 4, 5"),
    (lambda: lost_steps({"a": {"faulty": [0.0]}}, {"b": QUANTILES}, window=20, limit=1.0),
     "gates: expected the names a, got b"),
    (lambda: loss_curves([10, 30], {}), "panels: expected at least one, got none"),
    (lambda: loss_curves([10, 30], {"a": {"one": {0: [1.0]}}}),
     "panels['a']['one']: expected 2 losses like steps for every seed"),
    (lambda: loss_curves([10, 30], {"a": dict.fromkeys(EIGHT, {})}), "panels['a']: expected at most 7 lines, got 8"),
    (lambda: phase(sweep(overflow, UNEVEN)), "across: expected decays evenly spaced in their logarithm"),
    (lambda: phase(sweep(overflow, TIMELESS, T=8)), "sweep: expected a sweep over two axes, got decay"),
]  # fmt: skip


@pytest.mark.parametrize(("draw", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_a_picture_says_what_it_cannot_draw(draw, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        draw()
