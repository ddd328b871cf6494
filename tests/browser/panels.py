"""What the browser tests open: every panel."""

from flakit.cases import anchor
from flakit.figures.scenes import SCENES
from flakit.numerics.operators import OPERATORS

PANELS = {
    "decay-explorer": ("decay_explorer(decay=-0.1, show=('op', 'decay', 'scheme'))", "decay", anchor.OPERATORS),
    "gradient-comparer": (
        "gradient_comparer(profile='constant', decay=-1.0, show=('op', 'dtype', 'decay'))",
        "decay",
        OPERATORS,
    ),
    "compare": ("compare(__import__('flakit').chunk_rwkv6, T=16, K=16, decay=-1.0)", "decay", ()),
    "state-stepper": ("state_stepper(t=1, show=('op', 't', 'decay'))", "time t", SCENES),
    "infinity": ("infinity(step=4)", "decay", ()),
    "log-space": ("case('log_space')", "bias", ()),
    "padding": ("case('padding', T=100)", "length T", ()),
    "inverse": ("case('inverse')", "alpha", ()),
    "transposed-mask": ("case('transposed_mask', K=100)", "keys K", ()),
    "headroom": ("headroom(__import__('flakit').inputs('rwkv6', T=200)['w'])", "decays ×", ()),
    "gradient-accumulation": ("case('gradient_accumulation')", "in parts", ()),
    "kernel-trace": ("kernel_trace()", "decay", ()),
    "lost-digits": ("lost_digits()", "decay", ()),
    "sketch-reading": ("sketch('reading')", "direction", ()),
    "masking": ("case('masking', w=-1.0)", "decay w", ()),  # and, as this one, every other case
}
"""A setting of each panel with a slider, that slider, and the operators it is tried with where it has a choice."""

TIMED = ("decay-explorer", "gradient-comparer", "state-stepper")
"""Those whose time from a key to the picture is measured."""

WITHOUT_A_SLIDER = {
    "phase-diagram": ("phase_diagram()", "tensor", "dk"),
    "diagnosis": ("diagnose(o='ok', dr='NaN')", "dw", "NaN"),
    "audit": (
        "audit('tests.instruments.kernels:inclusive', 'rwkv6', only=('truth', 'initial-state'))",
        "failure",
        "initial-state",
    ),
}
"""A drop-down list of these, and what to choose there."""

PICTURES = {"fingerprint"}
"""What `flakit.panels` has beside panels."""

CODE = [code for code, *_ in (PANELS | WITHOUT_A_SLIDER).values()]


def cells(code):
    """Cells that show panels."""
    return [f"from flakit.panels import *\n{each}" for each in code]
