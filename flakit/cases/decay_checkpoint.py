"""The decays of a checkpoint: run its model on tokens and record each layer's decays.

A checkpoint does not contain decays, since they depend on the tokens. Real text gives the decays of actual use; random
tokens show which decays the weights can produce.
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
"""Default number of random tokens."""


def load(path: str | Path) -> Mapping[str, Tensor] | None:
    """Return the weights in a file .pt, .pth or .safetensors; None for another file or an unknown model format."""
    if Path(path).suffix.lower() not in (".pt", ".pth", ".safetensors"):
        return None
    weights = read(path)
    return weights if kind_of(weights) is not None else None


def decays(weights: Mapping[str, Tensor], tokens: str | Path | Tensor | None = None) -> tuple[str, dict[str, Tensor]]:
    """Return a checkpoint's operator, and its natural-log decays by layer, [B, T, H, K], in float32 on the CPU.

    weights: as in `flakit.models.convert.model_from`. tokens: integers [T] or [B, T], or the path of a .pt or .npy file
        of them; default `RANDOM` random ones, from seed 0. Raises ValueError or TypeError for other files or dtypes.
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
        tokens = np.load(path, allow_pickle=False)
        tokens = torch.from_numpy(tokens.astype(np.int64)) if tokens.dtype.kind in "iu" else tokens
    elif path.suffix.lower() in (".pt", ".pth"):
        tokens = read(path)
    else:
        raise ValueError(f"tokens: expected a file .pt, .pth or .npy, got {path.name!r}")
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        raise TypeError(f"tokens: expected whole numbers [T] or [B, T] in {path.name!r}, got {shown(tokens)}")
    return tokens.long()
