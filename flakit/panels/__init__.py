"""Interactive panels for notebooks. A panel is a widget: knobs, a picture, and a readout in sentences.

    from flakit.panels import decay_explorer
    decay_explorer("rwkv6", decay=-1.5)

Each function returns a panel to show as the last line of a cell: live in JupyterLab, a picture wherever no kernel runs.
`panel.set(decay=-2)` moves knobs from code, `panel.text` is the readout, `panel.as_python()` a script with the numbers.
"""

from .audit import audit
from .case import case
from .decay_explorer import decay_explorer
from .fingerprint import diagnose, fingerprint
from .gradient_comparer import compare, gradient_comparer
from .headroom import headroom
from .infinity import infinity
from .kernel_trace import kernel_trace, lost_digits
from .phase_diagram import phase_diagram
from .sketches import sketch
from .state_stepper import state_stepper

__all__ = [
    "audit",
    "case",
    "compare",
    "decay_explorer",
    "diagnose",
    "fingerprint",
    "gradient_comparer",
    "headroom",
    "infinity",
    "kernel_trace",
    "lost_digits",
    "phase_diagram",
    "sketch",
    "state_stepper",
]
