"""RWKV6's gate: w = -exp(x), which turns any number x into a natural-log decay w <= 0."""

import torch
from torch import Tensor

from .validation import FLOATS


def log_decay(x: Tensor) -> Tensor:
    """Return w = -exp(x), a natural-log decay for any x, with a finite gradient where exp(x) overflows.

    The gradient is dx = w dw. From x = 88.73 on (float16: 11.1) exp(x) overflows: w is -inf, everything is forgotten
    and dw = 0. Autograd of -torch.exp(x) computes 0 * inf = NaN there; the limit is 0, since dw vanishes like e^w, and
    dx is 0 here. A NaN stays NaN. The gate of arXiv:2404.05892, section 4.

    Args:
        x: any shape; float64, float32, bfloat16 or float16, ±inf among its values.

    Returns:
        w <= 0, the natural logarithm of the decay factor; shape and dtype of x, under autocast those of torch.exp(x).

    Raises:
        TypeError: where x is no tensor of these dtypes.

    >>> o = chunk_rwkv6(r, k, v, log_decay(x), u).o
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        got = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: expected a tensor of float64, float32, bfloat16 or float16, got {got}")
    # Mask before the exponential, so that its derivative is finite. Plain operations support torch.compile, torch.func
    # and second derivatives.
    overflows = x.detach().exp().isinf()
    return -x.masked_fill(overflows, 0).exp().masked_fill(overflows, torch.inf)
