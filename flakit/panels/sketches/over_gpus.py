"""The sketch of 17_over_gpus."""

import torch

from ...figures.sketches.over_gpus import Ranks, RanksShown
from ...numerics import recorded
from ...numerics.inputs import inputs
from ...numerics.operators import OPERATORS
from ..knobs import operator_choice, steps
from .sketch import Sketch

_TOKENS, _K, _DECAY = 64, 8, -0.05  # of the few tokens whose states are computed
_HEADS, _CHANNELS = 32, 64  # of the calls in data/h100_ranks.json, K = V; inputs in 16 bits, what is sent in float32
RANKS = [1, 2, 4, 8, 16]


def slices(op: str, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return M [ranks, K, K] and N [ranks, K, V] of one head: a state S that enters a slice leaves it as M S + N.

    The operator computes them with the slices as sequences. With values of zero it writes nothing, so it turns the
    identity into M.
    """
    run = OPERATORS[op].forms["recurrent"]
    x = inputs(op, T=_TOKENS, H=1, K=_K, decay=_DECAY, dtype=torch.float64)
    x |= {"cu_seqlens": torch.arange(0, _TOKENS + 1, _TOKENS // ranks), "output_final_state": True}
    identity = torch.eye(_K, dtype=torch.float64).expand(ranks, 1, _K, _K).contiguous()
    M = run(**x | {"v": torch.zeros_like(x["v"]), "initial_state": identity}).final_state
    return M[:, 0], run(**x).final_state[:, 0]


def _ranks(ranks: int, op: str) -> RanksShown:
    M, N = slices(op, ranks)
    left = torch.full((ranks, ranks), torch.nan, dtype=torch.float64)
    for column in range(ranks):
        state = N[column]
        for row in range(column + 1, ranks):
            left[row, column] = state.norm() / N[column].norm()
            state = M[row] @ state
    each = 2 * _HEADS * _CHANNELS * len(OPERATORS[op].sequences)
    written = 4 * _HEADS * _CHANNELS**2
    transition = written if OPERATORS[op].solves else written // _CHANNELS
    return RanksShown(left.numpy(), recorded.read("h100_ranks").select(operator=op)[0]["T"], each, written, transition)


SKETCHES = {
    "ranks": Sketch(
        {
            "ranks": lambda: steps(4, RANKS, "ranks"),
            "op": lambda: operator_choice("rwkv6", ("rwkv6", "rwkv7")),
        },
        _ranks,
        Ranks,
        {
            "one GPU": {"ranks": 1, "op": "rwkv6"},
            "two": {"ranks": 2, "op": "rwkv6"},
            "sixteen": {"ranks": 16, "op": "rwkv6"},
        },
        """from flakit.panels import sketch

shown = sketch("ranks", ranks={ranks}, op={op}).result
print("tokens of a rank", shown.walks, "bytes that it sends", shown.sends, "and holds", shown.holds)
print("what is left of each rank's writing in the last one's state", shown.left[-1, :-1])
""",
    ),
}
