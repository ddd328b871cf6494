"""The probes of the audit. Each asks a kernel one question, which a real failure of the casebook taught.

A probe has settings, the most telling first, and a check that runs the subject at one of them and returns a `Finding`.
Its `case` is the case of the casebook that a failure resembles; `budget` says where the allowed figure comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..numerics.operators import Operator
from . import checks
from . import probe_settings as settings
from .examiner import Examiner
from .finding import Finding
from .learn import COARSE
from .probe_settings import BOTH, LENGTHS, MIXED, SIZES, STATES, decays, strided
from .setting import INT32, Setting
from .subject import Broken, Refused

ROUNDING = "rounding: 2 (sqrt(12) roundings of the dtype + (T + K + V + |sum of log decays|) of float32)"
EXACT = "none: equal bits"
FINITE = "none: every value whose truth is finite is finite"
ORDER = f"none but {checks.ORDERED} spacings of the dtype: equal values in another order"
PROGRAMS = 1040
"""Programs of the setting that needs more than 1,024 of them."""
WIDEST = 64
"""The widest tile that kernels cut a head into; the widths of others divide it."""

Check = Callable[[Examiner, Setting], Finding]
Control = tuple[str, Callable[[Setting], Setting]]


def bare(probe: str = "truth", **fields) -> Control:
    """Return a control: the name of another probe, and a function that sets a setting's fields to these values."""
    return probe, lambda s: s.without(**fields)


def one_sequence(s: Setting) -> Setting:
    """Return the setting with the longest of its packed sequences alone, unpacked."""
    return s.without(lengths=None, padding=0, offsets="contiguous", T=max(s.lengths or (s.T,)))


def whole_tiles(s: Setting) -> Setting:
    """Return the setting with K = V = M, rounded up to a multiple of `WIDEST`, the widest tile: where no tile is
    partial, a mask with its two axes exchanged does no harm."""
    size = -(-max(s.K, s.V) // WIDEST) * WIDEST
    return s.without(K=size, V=size, M=size)


STATELESS = bare(initial_state=False, final_state=False, loss="o")


@dataclass(frozen=True)
class Probe:
    """One question to a kernel, with the settings and the check that answer it.

    case: the case of the casebook that a failure resembles; kinds: other cases, for some kinds of failure.
    meaning: a sentence on what a failure says. budget: where the allowed figure comes from, for reports.
    needs: features that the subject has to support.
    condition: of (operator, setting), whether the setting still poses this question; shrinking keeps it true.
    controls: (other probe, function that turns a setting into one of that probe's). If the other probe fails as badly
        there, this probe fails for the other's reason.
    costly: settings that interpreted kernels run with --full alone.
    """

    name: str
    case: str
    settings: Callable[[Examiner], Sequence[Setting]]
    check: Check
    meaning: str
    budget: str = ROUNDING
    needs: tuple[str, ...] = ()
    condition: Callable[[Operator, Setting], bool] = lambda op, setting: True
    controls: tuple[Control, ...] = ()
    costly: Callable[[Examiner], Sequence[Setting]] = lambda x: ()
    kinds: dict[str, str] = field(default_factory=dict)
    """Other cases: by a finding's kind, by "kind decay" or "kind other" for its tensor, or for "slightly wrong"."""

    def ask(self, x: Examiner, setting: Setting) -> Finding:
        """Run the check; a crash is a finding that fails. Raises Refused if the subject does not take the setting."""
        return _run(self.check, x, setting)

    def cause(self, x: Examiner, finding: Finding) -> tuple[str, Finding | None]:
        """Return the probe that explains a failure, and its finding at the control's setting; ("", None) for none."""
        check = self.check
        if check in (checks.as_documented, checks.over_ranks):
            check = checks.through_states
        elif check in (checks.poisoned, checks.fenced, checks.memoised, checks.elsewhere):
            check = checks.against_truth
        for name, control in self.controls:
            setting = control(finding.setting)
            if setting == finding.setting and check is self.check:
                continue
            try:
                result = _run(check, x, setting)
            except Refused:
                continue
            if result.fails and result.kind == finding.kind and _as_bad(result, finding):
                in_16_bits = name == "truth" and setting.torch_dtype.itemsize == 2
                return "16-bit" if in_16_bits else name, result
        return "", None

    def resembles(self, finding: Finding, op: Operator) -> str:
        """Return the name of the case that a failure of this probe resembles; "" for none."""
        if finding.kind == "raises":
            return "transposed_mask" if "compatible" in finding.words or "broadcast" in finding.words else ""
        slight = finding.kind == "wrong" and finding.share * finding.budget <= COARSE
        decay = "decay" if finding.tensor == f"d{op.decay}" and not finding.others else "other"
        names = (*(["slightly wrong"] if slight else []), f"{finding.kind} {decay}", finding.kind)
        case = next((self.kinds[name] for name in names if name in self.kinds), self.case)
        return "" if case in ("inverse", "rounded_chain") and not op.solves else case


def _run(check: Check, x: Examiner, setting: Setting) -> Finding:
    try:
        return check(x, setting)
    except Broken as broken:
        return x.crash(x.resolved(setting), broken)


def _as_bad(control: Finding, finding: Finding) -> bool:
    """Whether a control explains `finding`: the same tensor fails in it, with more than a tenth of its `share`."""
    if control.kind != "wrong":
        return True
    return finding.tensor in (control.tensor, *control.others) and control.share > finding.share / 10


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe(
            "truth", "", settings.truth, checks.everything,
            "Outputs or gradients differ from the formula by more than rounding, in the mean, an element or a row.",
        ),
        Probe(
            "16-bit", "decay_gradient", settings.half, checks.half,
            "In 16 bits something is rounded that has to stay in float32: running sums, states, or their gradients.",
            kinds={"non-finite": "inverse"}, controls=(bare(dtype="float32"),),
        ),
        Probe(
            "mixed-dtypes", "",
            lambda x: [x.plain.without(T=70, H=2, dtype=d, decay_dtype="float32", **BOTH) for d in x.short_dtypes],
            checks.mixed,
            "Decays in float32 beside other inputs of 16 bits are misread, or get a wrong gradient.",
            needs=("decay",), controls=(bare(dtype="float32", decay_dtype=None), bare("16-bit", decay_dtype=None)),
        ),
        Probe(
            "gradients", "final_state_gradient", lambda x: [x.plain, x.plain.without(T=17, H=2)], checks.gradients,
            "An input gets no gradient although others do: training leaves what made it as it was.",
            budget="none: every input has a gradient", needs=("backward",),
        ),
        Probe(
            "scale", "chunk_vs_recurrent",
            lambda x: [x.plain.without(default_scale=True), *(x.plain.without(scale=s) for s in (1.0, 0.3))],
            checks.scale,
            "Results are a constant multiple of the operator's: a scale is ignored, or its default is another one.",
        ),
        Probe(
            "decay-onset", "anchor", settings.sweep, checks.finite,
            "From some decay on values are not finite: an exponent spans so many tokens that e to it overflows.",
            budget=FINITE, needs=("decay",), controls=(bare(decay="rwkv6-init"),),
        ),
        Probe(
            "decay-accuracy", "clamping", settings.sweep, checks.accurate,
            "At strong decay values are finite and wrong: a clamp, or numbers of order 1 that cancel to e^w.",
            kinds={"wrong decay": "decay_gradient"}, needs=("decay",), controls=(bare(decay="rwkv6-init"),),
        ),
        Probe(
            "spike", "anchor", settings.spikes, checks.row_after_row,
            "One token that forgets all, at one row of a block, makes others NaN: the block's anchor is that row.",
            needs=("decay",), controls=(bare(spike=None, rows=None),),
        ),
        Probe(
            "zero-decay", "nan_guard",
            lambda x: [x.plain.without(T=70, decay=d, **BOTH) for d in ("none", (0.0, -0.3), -1e-30)],
            checks.against_truth,
            "Where nothing is forgotten, w = 0, something is: a guard takes a difference of exactly 0 for forbidden.",
            needs=("decay",), condition=lambda op, s: bool(decays(op, s).max() >= -1e-30),
            controls=(bare(decay="rwkv6-init"),),
        ),
        Probe(
            "inf-decay", "anchor",
            lambda x: [x.plain.without(T=70, decay=d, **BOTH) for d in ("inf-spikes", "forget", "spikes")],
            checks.against_truth,
            "A log decay of -inf, which forgets everything, gives NaN or a gradient that is not 0.",
            needs=("decay",), condition=lambda op, s: bool(decays(op, s).min() <= -1e4), controls=(bare(decay=-0.01),),
        ),
        Probe(
            "tails", "padding", settings.tails, checks.tail,
            "Lengths that do not fill the last block are wrong or NaN: rows beyond the end hold what they should not.",
            controls=(("truth", lambda s: s.without(T=-(-s.T // 64) * 64)),),
        ),
        Probe(
            "suffix", "future_anchor", settings.suffixes, checks.causal,
            "Outputs depend on tokens after them: an anchor in the future, or a mask that lets something through.",
            budget=EXACT,
        ),
        Probe(
            "anchor-shift", "wrong_head_anchor",
            lambda x: [
                x.plain.without(T=48, H=4, decay=-0.1, first=-40.0),
                x.plain.without(T=48, H=4, decay=-0.05, per_head=40.0),
                x.plain.without(T=80, H=4, decay=-0.1, first=-200.0),
                x.plain.without(T=48, H=4, decay=-0.01, per_head=300.0),
            ],
            checks.against_truth,
            "Decays that no output should see, or of other heads, change the result: an anchor is read elsewhere.",
            needs=("heads", "decay"), condition=lambda op, s: s.H > 1, controls=(bare(first=0.0, per_head=0.0),),
        ),
        Probe(
            "halves", "final_state_gradient",
            lambda x: [
                x.plain.without(T=100, H=2, cut=cut, decay=d, **{**BOTH, "initial_state": False})
                for cut, d in ((64, "logsigmoid"), (37, "rwkv6-init"), (1, "logsigmoid"))
            ],
            checks.through_states,
            "A sequence in two pieces, the state handed over, is not the whole: the state or its gradient is wrong.",
            needs=("initial state", "final state"), controls=(bare(cut=None),),
        ),
        Probe(
            "final-state", "final_state_gradient",
            lambda x: [x.plain.without(T=T, H=2, **STATES, loss="state") for T in (50, 64, 1)], checks.through_states,
            "A loss on the final state alone gives wrong gradients or none: what arrives there is ignored.",
            needs=("final state", "backward"), controls=(STATELESS,),
        ),
        Probe(
            "initial-state", "final_state_gradient",
            lambda x: [
                x.plain.without(T=T, B=2, H=2, initial_state=True, final_state=True, decay=d)
                for T, d in ((33, "logsigmoid"), (64, "rwkv6-init"), (1, "logsigmoid"))
            ],
            checks.through_states,
            "The initial state is used wrongly, or gets a wrong gradient or none.",
            needs=("initial state",), condition=lambda op, s: s.initial_state, controls=(STATELESS,),
        ),
        Probe(
            "rectangles", "transposed_mask",
            lambda x: [
                x.plain.without(T=20, H=2, K=K, V=V, M=M, **BOTH)
                for K, V, M in ((40, 64, 24), (16, 32, 16), (64, 40, 32), (100, 120, 40), (24, 17, 9))
            ],
            checks.against_truth,
            "With K and V different, or no multiple of a tile, states or gradients are wrong: a mask is transposed.",
            needs=("K != V",), condition=lambda op, s: s.K != s.V, controls=(("truth", whole_tiles),),
        ),
        Probe(
            "sizes", "", settings.trained, checks.against_truth,
            "Heads of the sizes that models have, or more values than a block of them holds, are wrong.",
            condition=lambda op, s: s.V >= 64, controls=(bare(K=16, V=16, M=16),),
        ),
        Probe(
            "large", "",
            lambda x: [
                x.plain.without(B=3, H=5, T=20, **BOTH, decay="rwkv6-init"),
                x.plain.without(T=320, **BOTH, decay="rwkv6-init"),
            ],
            checks.against_truth,
            "A larger batch, more heads or a longer sequence are wrong: a program takes the place of another.",
            condition=lambda op, s: s.B > 2 or s.H > 4 or s.T > 300, controls=(bare(B=1, H=1, T=64),),
            costly=lambda x: [
                x.plain.without(B=3, H=5, T=320, **BOTH, decay="rwkv6-init"),
                x.plain.without(B=PROGRAMS, T=3, **BOTH),
                x.plain.without(B=52, H=20, T=3, **BOTH),
            ],
        ),
        Probe(
            "head-order", "wrong_head_anchor",
            lambda x: [x.plain.without(T=50, H=3, **BOTH), x.plain.without(T=50, B=2, H=5, groups=2)], checks.permuted,
            "With the heads in another order a head's results are others: programs do not all do the same.",
            budget=ORDER, needs=("heads", "heads alike"), condition=lambda op, s: s.H > 1,
        ),
        Probe(
            "cotangent", "",
            lambda x: [
                x.plain.without(T=37, H=2, cotangent=c, **BOTH) for c in (2.0**-20, 1024.0, 0.0, -1.0, 1e-4, 3.0)
            ],
            checks.against_truth,
            "Gradients are no multiple of what arrives: small ones are flushed, large ones clamped, or some ignore it.",
            needs=("backward",), controls=(bare(cotangent=1.0),),
        ),
        Probe(
            "some-gradients", "", settings.wanted, checks.through_states,
            "Where only some inputs require a gradient, those that do get a wrong one or none.",
            needs=("backward",),
            condition=lambda op, s: s.wanted is not None and (s.initial_state or not set(op.states) & set(s.wanted)),
            controls=(bare(wanted=None),),
        ),
        Probe(
            "second-backward", "aliasing", lambda x: [x.plain.without(T=T, H=2, again=True, **BOTH) for T in (50, 64)],
            checks.against_truth,
            "A second backward pass on a retained graph gives other gradients: the first one wrote to what was saved.",
            needs=("backward",), condition=lambda op, s: s.again, controls=(bare(again=False),),
        ),
        Probe(
            "mutation", "aliasing",
            lambda x: [
                x.plain.without(T=T, H=2, initial_state=True, final_state=s, loss="both" if s else "o", decay=decay)
                for T, s, decay in (
                    (64, True, "logsigmoid"),
                    (37, True, (-1000.0, -0.05)),  # a clamp of decays, in place
                    (1, True, "logsigmoid"),
                    (100, False, "logsigmoid"),
                )
            ],
            checks.unchanged,
            "An input is written to: every later call that is given the same tensor is wrong.",
            budget=EXACT,
        ),
        Probe(
            "aliasing", "aliasing",
            lambda x: [x.plain.without(T=T, H=2, initial_state=True, final_state=True) for T in (1, 64, 2)],
            checks.apart,
            "An output lies in memory that is somebody else's: what is written there later changes it.",
            budget=EXACT,
        ),
        Probe(
            "strides", "strides", settings.layouts, checks.against_truth,
            "Inputs or an arriving gradient that are not contiguous are misread.",
            condition=strided, controls=(bare(layout="contiguous", arriving="contiguous"),),
        ),
        Probe(
            "state-strides", "strides", settings.state_layout, checks.through_states,
            "States, what has no time axis, or a gradient at a final state that are not contiguous are misread.",
            condition=lambda op, s: s.states != "contiguous", controls=(bare(states="contiguous"),),
        ),
        Probe(
            "state-layout", "", lambda x: [x.plain.without(T=20, **SIZES, **BOTH)], checks.as_documented,
            "The axes of a state stand the other way round, which its shape hides where they are equally long.",
            needs=("initial state", "final state"), condition=lambda op, s: s.initial_state and s.final_state,
            controls=(STATELESS,),
        ),
        Probe(
            "repeat", "aliasing",
            lambda x: [
                x.plain.without(T=64, H=2, **BOTH),
                *[x.plain.without(H=2, lengths=LENGTHS, **BOTH)] * (x.supports["packed sequences"] is None),
                x.plain.without(T=100, **SIZES, **BOTH),
            ],
            checks.repeatable,
            "The same call gives other bits: an atomic sum, or memory that nobody wrote.",
            budget=EXACT,
        ),
        Probe(
            "poison", "padding", lambda x: [x.plain.without(T=T, B=2, H=2, **BOTH) for T in (37, 64, 100, 1)],
            checks.poisoned,
            "A value is read before it is written: what it holds is a matter of luck.",
            controls=(bare(),),
        ),
        Probe(
            "canaries", "transposed_mask",
            lambda x: [
                x.plain.without(T=37, B=2, H=2, **BOTH),
                x.plain.without(T=20, H=2, K=24 if x.plain.K == 16 else x.plain.K, V=40, **BOTH),
            ],
            checks.fenced,
            "Memory before or behind a tensor is read or written.",
            controls=(bare(),),
        ),
        Probe(
            "packed", "strided_offsets",
            lambda x: [
                x.plain.without(H=2, lengths=lengths, decay=d, **BOTH)
                for lengths, d in ((LENGTHS, "rwkv6-init"), ((64, 64), "logsigmoid"), ((3, 100, 16), MIXED))
            ],
            checks.against_truth,
            "Packed sequences are cut at other tokens, or something passes from one to the next.",
            needs=("packed sequences",), controls=(("truth", one_sequence),),
        ),
        Probe(
            "padded-rows", "unwritten_rows",
            lambda x: [
                x.plain.without(H=2, lengths=lengths, padding=28, decay="rwkv6-init", **BOTH)
                for lengths in (LENGTHS, (60, 40))
            ],
            checks.poisoned,
            "Rows behind the last packed sequence are not written, or not as zeros: a padded batch sums over them.",
            needs=("packed sequences", "padded sequences"),
            controls=(("truth", one_sequence), bare("packed", padding=0)),
        ),
        Probe(
            "strided-offsets", "strided_offsets",
            lambda x: [
                x.plain.without(H=2, lengths=LENGTHS, decay="rwkv6-init", offsets=how, **BOTH)
                for how in ("column of (begin, end)", "every second of the halves")
            ],
            checks.against_truth,
            "Offsets of packed sequences that have a stride are read as if they had none.",
            needs=("packed sequences",), controls=(("truth", one_sequence), bare("packed", offsets="contiguous")),
        ),
        Probe(
            "int32-offsets", "strided_offsets",
            lambda x: [x.plain.without(H=2, lengths=LENGTHS, decay="rwkv6-init", offsets=INT32, **BOTH)],
            checks.against_truth,
            "Offsets of packed sequences that are int32 are read as if they were int64.",
            needs=("packed sequences",), controls=(("truth", one_sequence), bare("packed", offsets="contiguous")),
        ),
        Probe(
            "changed-offsets", "strided_offsets",
            lambda x: [x.plain.without(H=2, lengths=LENGTHS, decay="rwkv6-init", **BOTH)], checks.memoised,
            "Offsets that change in the same tensor are read as they were: something made of them is kept by its name.",
            needs=("packed sequences",), condition=lambda op, s: s.lengths is not None and s.lengths != s.lengths[::-1],
            controls=(("truth", one_sequence), bare("packed")),
        ),
        Probe(
            "non-finite", "masking",
            lambda x: [x.plain.without(T=70, **SIZES, bad=(45, value), decay="rwkv6-init") for value in ("inf", "nan")],
            checks.contained,
            "One non-finite token makes other sequences or heads NaN.",
            budget="none: other sequences and heads stay finite",
        ),
        Probe(
            "repeated-tokens", "inverse", settings.repeated, checks.against_truth,
            "Equal tokens lose digits or give NaN: roundings add up one way, or, in RWKV7, powers of a table cancel.",
            condition=lambda op, s: s.T > 1, controls=(bare(repeated=False),),
        ),
        Probe(
            "constant-writes", "rounded_state", settings.constant, checks.against_truth,
            "A state that grows by the same amount at each token stops growing: it is rounded to 16 bits on the way.",
            condition=lambda op, s: s.T > 256,
            controls=(bare(dtype="float32", constant=False), bare("16-bit", constant=False, decay="logsigmoid")),
        ),
        Probe(
            "other-device", "", lambda x: [x.plain.without(T=50, **SIZES, **BOTH)], checks.elsewhere,
            "Tensors on a GPU that is not the current one are computed wrongly, or not at all.",
            needs=("two GPUs",), controls=(bare(),),
        ),
        Probe(
            "ranks", "over_ranks", settings.ranks, checks.over_ranks,
            "A sequence over two processes of a group is not the whole: what passes from slice to slice is wrong.",
            kinds={"slightly wrong": "rounded_chain"}, needs=("group",), condition=lambda op, s: s.slices is not None,
            controls=(bare(slices=None),), costly=settings.chain,
        ),
    )
}  # fmt: skip
"""Every probe by its name."""
