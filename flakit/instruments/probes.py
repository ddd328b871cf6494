"""The probes: each asks one question of a kernel that a real failure of the casebook has taught.

A probe has settings, the plainest first, and a check that runs the subject at one of them and returns a `Finding`. Its
`case` is the one that it resembles, by the law; `budget` says where the allowed figure comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..numerics.operators import Operator
from .checks import (
    accurate,
    against_truth,
    apart,
    causal,
    contained,
    everything,
    fenced,
    finite,
    gradients,
    half,
    mixed,
    poisoned,
    repeatable,
    scale,
    tail,
    through_states,
    unchanged,
)
from .examiner import Broken, Examiner, Finding, raised
from .setting import EXPANDED, INT32, Setting

ROUNDING = "rounding: 2 (sqrt(12) roundings of the dtype + (T + K + V + |sum of log decays|) of float32)"
EXACT = "none: equal bits"
FINITE = "none: every value whose truth is finite is finite"


@dataclass(frozen=True)
class Probe:
    """One question.

    needs: features without which it is not supported. condition: whether a setting is still what the probe asks about,
    of (operator, setting); a failure shrinks no further than that.
    """

    name: str
    meaning: str
    case: str
    settings: Callable[[Examiner], Sequence[Setting]]
    check: Callable[[Examiner, Setting], Finding]
    budget: str = ROUNDING
    needs: tuple[str, ...] = ()
    condition: Callable[[Operator, Setting], bool] = lambda op, setting: True
    kinds: dict[str, str] = field(default_factory=dict)
    """Another case for a kind of finding, or for a finding of "kind tensor"."""

    def ask(self, x: Examiner, setting: Setting) -> Finding:
        """What `check` finds; a subject that crashes fails. Raises Refused."""
        try:
            return self.check(x, setting)
        except Broken as broken:
            return raised(setting, broken)

    def resembles(self, finding: Finding, op: Operator) -> str:
        """The name of the case that a failure resembles, "" for none."""
        if finding.kind == "raises":
            return "transposed_mask" if "compatible" in finding.words or "broadcast" in finding.words else ""
        decay = "decay" if finding.tensor == f"d{op.decay}" and not finding.others else "other"
        case = self.kinds.get(f"{finding.kind} {decay}") or self.kinds.get(finding.kind) or self.case
        return "" if case == "inverse" and not op.solves else case


# --- settings ----------------------------------------------------------------------------------------------------

SIZES = {"B": 2, "H": 3}
STATES = {"initial_state": True, "final_state": True}
BOTH = {**STATES, "loss": "both"}
MIXED = (-6.0, -0.05)
# The telling ones first: where kernels are interpreted, time may not do for all.
SWEEP = (-8.0, -1.5, -20.0, -3.0, -90.0, -0.5, -6.0, -12.0, -1e3, -2.0, -50.0, -1.0, -0.1, -1e-4)


def _truth(x: Examiner) -> list[Setting]:
    p = x.plain
    found = [
        *x.crashed,
        p.without(T=100, **SIZES, **BOTH),
        p,
        p.without(T=17, **SIZES),
        *([p.without(T=50, H=2, groups=2, **BOTH)] if {"HQ", "HV"} & {*x.op.sizes} else []),
        p.without(T=100, **SIZES, **BOTH, decay="rwkv6-init", seed=p.seed + 1),
        p.without(T=96, **SIZES, **BOTH, decay="none"),
        p.without(T=70, **SIZES, **BOTH, decay="uniform"),
        p.without(T=1, **SIZES, **BOTH),
        p.without(T=2, **BOTH),
        p.without(T=257, H=2, **BOTH, decay="gsa"),
    ]
    if x.full:
        found += [p.without(T=T, **SIZES, **BOTH, decay="rwkv6-init") for T in (1000, 4096)]
    return found


def _half(x: Examiner) -> list[Setting]:
    dtypes = [name for name in ("bfloat16", "float16") if x.supports[name] is None]
    return [
        x.plain.without(dtype=dtype, **fields)
        for fields in (
            {"T": 64},
            {"T": 256, "H": 2, "decay": "logsigmoid"},
            {"T": 200, "H": 2, "decay": "rwkv6-init", **BOTH},
            {"T": 256, "decay": -2.0},
        )
        for dtype in dtypes
    ]


def _sweep(x: Examiner) -> list[Setting]:
    values = SWEEP if not x.full else [-(10 ** (n / 8)) for n in range(-32, 33)]
    return [x.plain.without(T=128, decay=w, **BOTH) for w in values]


def _spikes(x: Examiner) -> list[Setting]:
    rows = sorted(range(64), key=lambda p: (p % 16 not in (0, 15, 1, 8), p < 16, p))
    found = [x.plain.without(T=66 + 14 * (p % 2), decay=-0.01, spike=(p, -100.0)) for p in rows]
    return found + [x.plain.without(T=130, decay=-0.01, spike=(p, -100.0)) for p in (64, 65, 80, 96, 127, 128)]


def _tails(x: Examiner) -> list[Setting]:
    lengths = (100, 17, 15, 1, 63, 65, 33, 113, 127, 129, 2, 3, 16, 31, 32, 47, 48, 49, 80, 81, 97, 120)
    lengths = range(1, 200) if x.full else lengths
    return [x.plain.without(T=T, decay=MIXED, **BOTH) for T in lengths]


def _suffixes(x: Examiner) -> list[Setting]:
    places = [(64, P) for P in (5, 8, 16, 20, 24, 31, 32, 33, 40, 48, 56, 63)]
    places += [(6, 5), (16, 7), (23, 20), (50, 45), (80, 64), (80, 70), (130, 3), (130, 100)]
    return [x.plain.without(T=T, changed=P, K=max(32, x.plain.K), V=max(32, x.plain.V)) for T, P in places]


def _repeated(x: Examiner) -> list[Setting]:
    lengths = (32, 16, 64, 8)
    decays = (-1e-3, "none")
    dtypes = ["float32", *(name for name in ("float16", "bfloat16") if x.supports[name] is None)]
    return [x.plain.without(T=T, decay=w, repeated=True, dtype=d) for d in dtypes for w in decays for T in lengths]


def _layouts(x: Examiner) -> list[Setting]:
    p = x.plain.without(T=37, **SIZES)
    return [
        p.without(arriving=EXPANDED),
        p.without(layout="heads first, transposed"),
        p.without(layout="slice of a fused projection"),
        p.without(arriving="heads first, transposed"),
        p.without(arriving="slice of a fused projection"),
        p.without(T=130, layout="heads first, transposed", decay=(-0.5, -0.05), **BOTH),
    ]


def _trained(x: Examiner) -> list[Setting]:
    sizes = ((64, 64), (16, 256), *([(128, 128)] if x.full else []))
    return [x.plain.without(T=70, K=K, V=V, **BOTH) for K, V in sizes]


LENGTHS = (20, 1, 37, 64, 9)


def _decays(op: Operator, setting: Setting) -> Tensor:
    return setting.make(op)[0][op.decay]


def _strided(op: Operator, setting: Setting) -> bool:
    x, (do, _) = setting.laid_out(*setting.make(op), op)
    return not all(y.is_contiguous() for y in (*(x[name] for name in op.sequences), do))


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe(
            "truth",
            "Outputs or gradients differ from the formula by more than rounding, in the mean, an element or a row.",
            "",
            _truth,
            everything,
        ),
        Probe(
            "16-bit",
            "In 16 bits something is rounded that has to stay in float32: running sums, states, or their gradients.",
            "decay_gradient",
            _half,
            half,
            kinds={"non-finite": "inverse"},
        ),
        Probe(
            "mixed-dtypes",
            "Decays in float32 beside other inputs of 16 bits are misread, or get a wrong gradient.",
            "",
            lambda x: [
                x.plain.without(T=70, H=2, dtype=dtype, decay_dtype="float32", **BOTH)
                for dtype in ("bfloat16", "float16")
                if x.supports[dtype] is None
            ],
            mixed,
            needs=("decay",),
        ),
        Probe(
            "gradients",
            "An input gets no gradient although others do: training leaves what made it as it was.",
            "final_state_gradient",
            lambda x: [x.plain, x.plain.without(T=17, H=2)],
            gradients,
            budget="none: every input has a gradient",
            needs=("backward",),
        ),
        Probe(
            "scale",
            "Results are a constant multiple of the operator's: a scale is ignored, or its default is another one.",
            "chunk_vs_recurrent",
            lambda x: [x.plain.without(default_scale=True), *(x.plain.without(scale=s) for s in (1.0, 0.3))],
            scale,
        ),
        Probe(
            "decay-onset",
            "From some decay on values are not finite: an exponent spans so many tokens that e to it overflows.",
            "anchor",
            _sweep,
            finite,
            budget=FINITE,
            needs=("decay",),
        ),
        Probe(
            "decay-accuracy",
            "At strong decay values are finite and wrong: a clamp, or numbers of order 1 that cancel to e^w.",
            "clamping",
            _sweep,
            accurate,
            kinds={"wrong decay": "decay_gradient"},
            needs=("decay",),
        ),
        Probe(
            "spike",
            "One token that forgets all, at one row of a block, makes others NaN: the block's anchor is that row.",
            "anchor",
            _spikes,
            against_truth,
            needs=("decay",),
        ),
        Probe(
            "zero-decay",
            "Where nothing is forgotten, w = 0, something is: a guard takes a difference of exactly 0 for forbidden.",
            "nan_guard",
            lambda x: [x.plain.without(T=70, decay=d, **BOTH) for d in ("none", (0.0, -0.3), -1e-30)],
            against_truth,
            condition=lambda op, s: _decays(op, s).max() >= -1e-30,
            needs=("decay",),
        ),
        Probe(
            "inf-decay",
            "A log decay of -inf, which forgets everything, gives NaN or a gradient that is not 0.",
            "anchor",
            lambda x: [x.plain.without(T=70, decay=d, **BOTH) for d in ("inf-spikes", "forget", "spikes")],
            against_truth,
            condition=lambda op, s: _decays(op, s).min() <= -1e4,
            needs=("decay",),
        ),
        Probe(
            "tails",
            "Lengths that do not fill the last block are wrong or NaN: rows beyond the end hold what they should not.",
            "padding",
            _tails,
            tail,
        ),
        Probe(
            "suffix",
            "Outputs depend on tokens after them: an anchor in the future, or a mask that lets something through.",
            "future_anchor",
            _suffixes,
            causal,
            budget=EXACT,
        ),
        Probe(
            "anchor-shift",
            "Decays that no output should see, or of other heads, change the result: an anchor is read elsewhere.",
            "wrong_head_anchor",
            lambda x: [
                x.plain.without(T=48, H=4, decay=-0.1, first=-40.0),
                x.plain.without(T=48, H=4, decay=-0.05, per_head=40.0),
                x.plain.without(T=80, H=4, decay=-0.1, first=-200.0),
                x.plain.without(T=48, H=4, decay=-0.01, per_head=300.0),
            ],
            against_truth,
            needs=("heads", "decay"),
            condition=lambda op, s: s.H > 1,
        ),
        Probe(
            "halves",
            "A sequence in two pieces, the state handed over, is not the whole: the state or its gradient is wrong.",
            "final_state_gradient",
            lambda x: [
                x.plain.without(T=100, H=2, cut=cut, decay=d, **{**BOTH, "initial_state": False})
                for cut, d in ((64, "logsigmoid"), (37, "rwkv6-init"), (1, "logsigmoid"))
            ],
            through_states,
            needs=("initial state", "final state"),
        ),
        Probe(
            "final-state",
            "A loss on the final state alone gives wrong gradients or none: what arrives there is ignored.",
            "final_state_gradient",
            lambda x: [x.plain.without(T=T, H=2, **STATES, loss="state") for T in (50, 64, 1)],
            through_states,
            needs=("final state", "backward"),
        ),
        Probe(
            "initial-state",
            "The initial state is used wrongly, or gets a wrong gradient or none.",
            "final_state_gradient",
            lambda x: [
                x.plain.without(T=T, B=2, H=2, initial_state=True, final_state=True, decay=d)
                for T, d in ((33, "logsigmoid"), (64, "rwkv6-init"), (1, "logsigmoid"))
            ],
            through_states,
            needs=("initial state",),
            condition=lambda op, s: s.initial_state,
        ),
        Probe(
            "rectangles",
            "With K and V different, or no multiple of a tile, states or gradients are wrong: a mask is transposed.",
            "transposed_mask",
            lambda x: [
                x.plain.without(T=20, H=2, K=K, V=V, M=M, **BOTH)
                for K, V, M in ((40, 64, 24), (16, 32, 16), (64, 40, 32), (100, 120, 40), (24, 17, 9))
            ],
            against_truth,
            needs=("K != V",),
            condition=lambda op, s: s.K != s.V,
        ),
        Probe(
            "sizes",
            "Heads of the sizes that models have, or more values than a block of them holds, are wrong.",
            "",
            _trained,
            against_truth,
            condition=lambda op, s: s.V >= 64,
        ),
        Probe(
            "cotangent",
            "Gradients are no multiple of what arrives: small ones are flushed, large ones clamped, or some ignore it.",
            "",
            lambda x: [x.plain.without(T=37, H=2, cotangent=c, **BOTH) for c in (2.0**-20, 1024.0, 0.0, -1.0)],
            against_truth,
            needs=("backward",),
        ),
        Probe(
            "mutation",
            "An input is written to: every later call that is given the same tensor is wrong.",
            "aliasing",
            lambda x: [
                x.plain.without(T=T, H=2, initial_state=True, final_state=state, loss="both" if state else "o")
                for T, state in ((64, True), (1, True), (100, False))
            ],
            unchanged,
            budget=EXACT,
        ),
        Probe(
            "aliasing",
            "An output lies in memory that is somebody else's: what is written there later changes it.",
            "aliasing",
            lambda x: [x.plain.without(T=T, H=2, initial_state=True, final_state=True) for T in (1, 64, 2)],
            apart,
            budget=EXACT,
        ),
        Probe(
            "strides",
            "Inputs or an arriving gradient that are not contiguous are misread.",
            "strides",
            _layouts,
            against_truth,
            condition=_strided,
        ),
        Probe(
            "repeat",
            "The same call gives other bits: an atomic sum, or memory that nobody wrote.",
            "aliasing",
            lambda x: [x.plain.without(T=T, **SIZES, **BOTH) for T in (64, 100)],
            repeatable,
            budget=EXACT,
        ),
        Probe(
            "poison",
            "A value is read before it is written: what it holds is a matter of luck.",
            "padding",
            lambda x: [x.plain.without(T=T, **SIZES, **BOTH) for T in (64, 37, 100, 1)],
            poisoned,
        ),
        Probe(
            "canaries",
            "Memory before or behind a tensor is read or written.",
            "transposed_mask",
            lambda x: [
                x.plain.without(T=37, **SIZES, **BOTH),
                x.plain.without(T=20, H=2, K=24 if x.plain.K == 16 else x.plain.K, V=40, **BOTH),
            ],
            fenced,
        ),
        Probe(
            "packed",
            "Packed sequences are cut at other tokens, or something passes from one to the next.",
            "strided_offsets",
            lambda x: [
                x.plain.without(H=2, lengths=lengths, decay=d, **BOTH)
                for lengths, d in ((LENGTHS, "rwkv6-init"), ((64, 64), "logsigmoid"), ((3, 100, 16), MIXED))
            ],
            against_truth,
            needs=("packed sequences",),
        ),
        Probe(
            "padded-rows",
            "Rows behind the last packed sequence are not written, or not as zeros: a padded batch sums over them.",
            "unwritten_rows",
            lambda x: [
                x.plain.without(H=2, lengths=lengths, padding=28, decay="rwkv6-init", **BOTH)
                for lengths in (LENGTHS, (60, 40))
            ],
            poisoned,
            needs=("packed sequences", "padded sequences"),
        ),
        Probe(
            "strided-offsets",
            "Offsets of packed sequences that have a stride are read as if they had none.",
            "strided_offsets",
            lambda x: [
                x.plain.without(H=2, lengths=LENGTHS, decay="rwkv6-init", offsets=how, **BOTH)
                for how in ("column of (begin, end)", "every second of the halves")
            ],
            against_truth,
            needs=("packed sequences",),
        ),
        Probe(
            "int32-offsets",
            "Offsets of packed sequences that are int32 are read as if they were int64.",
            "strided_offsets",
            lambda x: [x.plain.without(H=2, lengths=LENGTHS, decay="rwkv6-init", offsets=INT32, **BOTH)],
            against_truth,
            needs=("packed sequences",),
        ),
        Probe(
            "non-finite",
            "One non-finite token makes other sequences or heads NaN.",
            "masking",
            lambda x: [x.plain.without(T=70, **SIZES, bad=(45, value), decay="rwkv6-init") for value in ("inf", "nan")],
            contained,
            budget="none: other sequences and heads stay finite",
        ),
        Probe(
            "repeated-tokens",
            "Equal tokens lose digits or give NaN: roundings add up one way, or, in RWKV7, powers of a table cancel.",
            "inverse",
            _repeated,
            against_truth,
            condition=lambda op, s: s.T > 1,
        ),
    )
}
"""Every probe by its name."""
