"""Describes the operators of `ops.family` for the instruments: each reference's arguments, and how models draw them."""

from typing import Any

import torch
from torch import Tensor

from ..ops import family as texts
from .described import _described
from .draws import ONE_MINUS_DECAY, REMOVAL_KEY, SIGMOID, UNIT, WRITTEN_BACK
from .operators import Operator

_QKV = {"q k": "B T H K", "v": "B T H V"}
_GROUPED = {"q k": "B T H K", "v": "B T HV V"}
_LIGHTNING = {"layer_idx": 1, "num_layers": 4}


def _gammas(heads: int) -> Tensor:
    return torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))))


def _slopes(heads: int) -> Tensor:
    layer, layers = _LIGHTNING.values()
    return -8 / heads * (1 - layer / layers) * torch.arange(heads, dtype=torch.float64)


_DELTA: dict[str, Any] = {"draws": {"q k": UNIT, "beta": SIGMOID}, "state_products": 3, "solves": True}

FAMILY: dict[str, Operator] = {
    op.name: op
    for op in (
        _described(
            "linear_attn", texts.naive_linear_attn, _QKV, label="linear attention", constants={"normalize": False}
        ),
        _described(
            "retention", texts.naive_retention, _QKV, label="retention", fixed_decay=_gammas, heads_alike=False
        ),
        _described(
            "lightning_attn", texts.naive_lightning_attn, _QKV, label="lightning attention", constants=_LIGHTNING,
            fixed_decay=_slopes, heads_alike=False,
        ),
        _described(
            "simple_gla", texts.naive_simple_gla, _QKV | {"g": "B T H"}, label="simple GLA (Mamba-2's SSD)", decay="g",
            profile="mamba2",
        ),
        _described("gla", texts.naive_gla, _QKV | {"g": "B T H K"}, label="GLA", decay="g", profile="gla"),
        _described(
            "hgrn2", texts.naive_gla, _QKV | {"g": "B T H K"}, label="HGRN2", decay="g", draws={"k": ONE_MINUS_DECAY}
        ),
        _described("delta_rule", texts.naive_delta_rule, _QKV | {"beta": "B T H"}, label="DeltaNet", **_DELTA),
        _described(
            "gated_delta_rule", texts.naive_gated_delta_rule, _GROUPED | {"g beta": "B T HV"}, label="gated delta rule",
            decay="g", profile="mamba2", **_DELTA,
        ),
        _described(
            "kda", texts.naive_kda, _GROUPED | {"g": "B T HV K", "beta": "B T HV"}, label="KDA", decay="g",
            profile="mamba2", **_DELTA,
        ),
        _described(
            "dplr_delta_rule", texts.naive_dplr_delta_rule, {"q k a b gk": "B T H K", "v": "B T H V"}, label="DPLR",
            decay="gk", profile="rwkv7", draws={"a": REMOVAL_KEY, "b": WRITTEN_BACK}, state_products=4, solves=True,
            reads={"q": True, "a": False},
        ),
    )
}  # fmt: skip
"""References without kernels, by name. flash-linear-attention's functions for them are chunk_NAME and
fused_recurrent_NAME; HGRN2 uses GLA's."""
