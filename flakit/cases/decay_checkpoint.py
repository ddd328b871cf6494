"""The decays of a checkpoint: its model runs on tokens, and each layer's are recorded.

A checkpoint has no decays in it: they depend on the tokens. Real text says what they are in use; random tokens say what
the weights can make of anything.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.convert import kind_of, model_from
from ..models.watch import recorded
from ..numerics.arguments import shown
from .decay_files import read

RANDOM = 1024
"""Tokens that are drawn where none are given."""


def load(path: str | Path) -> Mapping[str, Tensor] | None:
    """The weights in a file .pt, .pth or .safetensors; None where it holds something else."""
    if Path(path).suffix.lower() not in (".pt", ".pth", ".safetensors"):
        return None
    found = read(path)
    return found if kind_of(found) is not None else None


def decays(weights: Mapping[str, Tensor], tokens: str | Path | Tensor | None = None) -> tuple[str, dict[str, Tensor]]:
    """Of which operator a checkpoint is, and its decays by layer, [B, T, H, K], computed in float32 on the CPU.

    weights: as `flakit.models.convert.model_from` takes them. tokens: [T] or [B, T], or a file of them, .pt or .npy;
    default `RANDOM` random ones, drawn from seed 0.
    """
    with torch.device("cpu"):
        model = model_from(weights).float()
        if tokens is None:
            tokens = torch.randint(model.vocab, (1, RANDOM), generator=torch.Generator().manual_seed(0))
        elif not isinstance(tokens, Tensor):
            tokens = _read_tokens(Path(tokens))
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        with torch.no_grad(), recorded(model) as w:
            model(tokens)
    return w.op, dict(w)


def _read_tokens(path: Path) -> Tensor:
    if path.suffix.lower() == ".npy":
        found = np.load(path, allow_pickle=False)
        found = torch.from_numpy(found.astype(np.int64)) if found.dtype.kind in "iu" else found
    elif path.suffix.lower() in (".pt", ".pth"):
        found = read(path)
    else:
        raise ValueError(f"tokens: expected a file .pt, .pth or .npy, got {path.name!r}")
    if not isinstance(found, Tensor) or found.is_floating_point():
        raise TypeError(f"tokens: expected whole numbers [T] or [B, T] in {path.name!r}, got {shown(found)}")
    return found.long()
