"""The sketches of 10_state_tracking."""

import itertools
import math

import numpy as np
import torch

from ...figures.sketches.state_tracking import Again, AgainShown, Mirror, MirrorShown, Swaps, SwapsShown
from ...models.tasks import Permutations
from ...ops.rwkv7 import fused_recurrent_rwkv7
from ..knobs import NumberKnob, integer, number
from .sketch import Sketch

MOVES, READINGS, DECAY = 10, 16, -0.6
TURNS = round(1 + math.exp(DECAY), 4)
"""The α that reverses the state at this decay without changing its size."""


def _swaps(t: int) -> SwapsShown:
    task = Permutations(items=3)
    tokens, answers = task.batch(1, MOVES + 1, torch.Generator().manual_seed(1))
    orders = list(itertools.permutations(range(3)))
    moved = [orders[order] for order in task.after[0]]  # the order after each move from the initial one
    swaps = [[place for place in range(3) if moved[token - 1][place] != place] for token in tokens[0, 1:]]
    return SwapsShown(t, np.array(swaps), np.array([orders[n] for n in answers[0]]))


def _read(column: torch.Tensor, kappa: torch.Tensor, w: float, alpha: float, times: int) -> torch.Tensor:
    """Return a state of one column [K] after each of `times` readings of a token that writes nothing, [times, K]."""

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return x.expand(1, times, 1, len(x))

    nothing, K = torch.zeros_like(kappa), len(kappa)
    x = {"w": tokens(torch.full_like(kappa, w)), "k": tokens(nothing), "v": tokens(nothing[:1])}
    x |= {"a": tokens(-kappa), "b": tokens(alpha * kappa), "initial_state": column.float().view(1, 1, K, 1)}
    rows = [fused_recurrent_rwkv7(r=tokens(row), **x).o[0, :, 0, 0] for row in torch.eye(K, dtype=kappa.dtype)]
    return torch.stack(rows, 1)


def _mirror(alpha: float) -> MirrorShown:
    kappa, before = torch.tensor([1.0, -1.0]).double() / math.sqrt(2), torch.tensor([0.9, 0.3]).double()
    after = _read(before, kappa, 0.0, alpha, 1)[0]
    return MirrorShown(alpha, kappa.numpy(), before.numpy(), after.numpy())


def _again(alpha: float) -> AgainShown:
    kappa = torch.full((4,), 0.5, dtype=torch.float64)
    return AgainShown(DECAY, alpha, (_read(kappa, kappa, DECAY, alpha, READINGS) @ kappa).numpy())


_SCRIPT = """import torch
from flakit import fused_recurrent_rwkv7

kappa, w, alpha, times = {kappa}, {w}, {alpha}, {times}
k = torch.zeros(1, times, 1, len(kappa))
a = -kappa + k
state = {state}[None, None, :, None]
x = dict(r=k, w=w + k, k=k, v=k[..., :1], a=a, b=-alpha * a, initial_state=state)
print(fused_recurrent_rwkv7(**x, output_final_state=True).final_state[0, 0, :, 0])
"""

SKETCHES = {
    "swaps": Sketch(
        {"t": lambda: integer(0, 0, MOVES, "moves")},
        _swaps,
        Swaps,
        {"begin": {"t": 0}, "end": {"t": MOVES}},
        f"""import torch
from flakit.models import Permutations

tokens, orders = Permutations(items=3).batch(1, {MOVES + 1}, torch.Generator().manual_seed(1))
print("moves", tokens[0, 1 : {{t}} + 1].tolist(), "order", orders[0, {{t}}].item())
""",
    ),
    "mirror": Sketch(
        {"alpha": lambda: number(0.0, 0.0, 2.0, "α", 0.125, log=False)},
        _mirror,
        Mirror,
        {"forgets": {"alpha": 1.0}, "mirrors": {"alpha": 2.0}},
        _SCRIPT.format(
            kappa="torch.tensor([1.0, -1.0]) / 2**0.5",
            w=0.0,
            alpha="{alpha}",
            times=1,
            state="torch.tensor([0.9, 0.3])",
        ),
    ),
    "again": Sketch(
        {
            "alpha": lambda: NumberKnob(
                1.0, "α", stops={*(round(0.1 * n, 1) for n in range(21)), TURNS}, low=0.0, high=2.0
            )
        },
        _again,
        Again,
        {"as published": {"alpha": 0.9}, "keeps its size": {"alpha": TURNS}, "grows": {"alpha": 2.0}},
        _SCRIPT.format(
            kappa="torch.full((4,), 0.5)", w=DECAY, alpha="{alpha}", times=READINGS, state="torch.full((4,), 0.5)"
        ),
    ),
}
