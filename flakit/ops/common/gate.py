"""The gate whose logarithm has no bound: w = -exp(x), as RWKV6 makes its decays."""

import torch
from torch import Tensor

from .validation import FLOATS


def log_decay(x: Tensor) -> Tensor:
    """w = -exp(x), a natural-log decay of any number x, with a gradient where exp(x) is infinite.

    The gradient is dx = w dw. From x = 88.73 on, in float16 from 11.1, exp(x) is above the dtype's largest number: w is
    -inf, everything is forgotten and dw = 0. Of -torch.exp(x) autograd makes 0 * inf = NaN there; the limit is 0, since
    dw vanishes like e^w, and so is dx here. A NaN stays NaN. The gate of arXiv:2404.05892, section 4.

    Args:
        x: any shape; float64, float32, bfloat16 or float16, ±inf among its values.

    Returns:
        w <= 0, natural logarithm of what a token keeps; shape and dtype of x, under autocast those of torch.exp(x).

    Raises:
        TypeError: where x is no tensor of these dtypes.

    >>> o = chunk_rwkv6(r, k, v, log_decay(x), u).o
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        came = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: expected a tensor of float64, float32, bfloat16 or float16, got {came}")
    # Masked before the exponential, so that what is differentiated is finite; of plain operations, so that all of
    # PyTorch can follow: torch.compile, torch.func, a second derivative.
    total = x.detach().exp().isinf()
    return -x.masked_fill(total, 0).exp().masked_fill(total, torch.inf)
