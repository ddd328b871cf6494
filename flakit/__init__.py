"""flakit: an interactive laboratory for the numerics of linear-attention kernels."""

from typing import TYPE_CHECKING

from .fla import in_place_of_fla
from .numerics.described import describe
from .numerics.inputs import inputs
from .numerics.sweep import sweep
from .ops.common.gate import log_decay
from .ops.common.validation import checked
from .ops.gsa import chunk_gsa, fused_recurrent_gsa
from .ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from .ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7

if TYPE_CHECKING:  # `__getattr__` brings them, of which type checkers do not ask
    from .cases.headroom import headroom
    from .instruments.audit import audit
    from .instruments.compare_models import compare
    from .instruments.trace import trace
    from .models import convert
    from .models.watch import watch

__version__ = "0.1.0"

__all__ = [
    "audit",
    "checked",
    "chunk_gsa",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "compare",
    "convert",
    "describe",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_gsa",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "headroom",
    "in_place_of_fla",
    "inputs",
    "log_decay",
    "sweep",
    "trace",
    "watch",
]


def __getattr__(name: str):
    # The casebook, the instruments and the models come when asked for: a plain import has no use for them.
    if name == "audit":
        from .instruments.audit import audit

        return audit
    if name == "compare":
        from .instruments.compare_models import compare

        return compare
    if name == "trace":
        from .instruments.trace import trace

        return trace
    if name == "convert":
        from .models import convert

        return convert
    if name not in ("headroom", "watch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cases.headroom import headroom

    if name == "headroom":
        return headroom
    import functools

    from .models.watch import watch

    return functools.wraps(watch)(functools.partial(watch, measure=headroom))
