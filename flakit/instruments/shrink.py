"""Finds the smallest setting at which a probe still fails, with hypothesis, and the decay at which it begins to."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from ..cases.laws import LN_MAX
from ..numerics.errors import relative_l2
from .examiner import Examiner
from .finding import Finding
from .probes import Probe
from .setting import Setting
from .subject import Broken, Refused

MISSING = "shrinking needs hypothesis: pip install 'flakit[audit]', or audit without it: shrink=False, --no-shrink"
SECONDS = 6.0


def check_installed() -> None:
    """Raise ImportError, with the command that installs it, if hypothesis is missing."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def shrink(x: Examiner, probe: Probe, finding: Finding, seconds: float = SECONDS) -> Finding:
    """Return the finding at the smallest setting that fails in the same way and meets the probe's condition. The search
    stops after `seconds` of the examiner's clock and returns the smallest setting so far."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import HypothesisException

    known: dict[Setting, Finding | None] = {finding.setting: finding}
    deadline = x.clock() + seconds

    def fails(setting: Setting) -> bool:
        setting = x.resolved(setting)
        if setting not in known:
            if x.clock() > deadline or not probe.condition(x.op, setting):
                return False
            result = _again(x, probe, setting)
            other = result is not None and result.fails and result.kind == finding.kind and probe.cause(x, result)[0]
            known[setting] = None if other else result  # that is the failure of another probe
        result = known[setting]
        return result is not None and result.fails and result.kind == finding.kind

    @st.composite
    def smaller(draw: Callable) -> Setting:
        def step(ladder: list):
            """Draw an item of `ladder`; the last one, which is known to fail, has a probability of three quarters."""
            return ladder[min(draw(st.integers(0, 4 * len(ladder) - 1)), len(ladder) - 1)]

        s = finding.setting
        fields: dict[str, Any] = {}
        for name in ("B", "H", "K", "V", "M"):
            if name in x.op.sizes:
                fields[name] = step(list(range(1, getattr(s, name) + 1)))
        least = 1
        for name in ("spike", "bad"):
            if getattr(s, name) is not None:
                token, value = getattr(s, name)
                fields[name] = (step(list(range(token + 1))), value)
                least = fields[name][0] + 1
        for name in ("cut", "changed"):
            if getattr(s, name) is not None:
                fields[name] = step(list(range(1, getattr(s, name) + 1)))
                least = fields[name] + 1
        if s.slices is not None:
            fields["slices"] = tuple(step(list(range(1, length + 1))) for length in s.slices)
            fields["T"] = sum(fields["slices"])
        elif s.lengths is None:
            fields["T"] = step(list(range(min(least, s.T), s.T + 1)))
        else:
            count = step(list(range(1, len(s.lengths) + 1)))
            fields["lengths"] = tuple(step(list(range(1, length + 1))) for length in s.lengths[:count])
        if s.padding:
            fields["padding"] = step(list(range(1, s.padding + 1)))
        if isinstance(s.decay, str):
            fields["decay"] = step([-1.0, *(["forget"] if s.decay == "inf-spikes" else []), s.decay])
        if s.loss == "both":
            fields["loss"] = step(["o", "state", "both"])
        if s.initial_state:
            fields["initial_state"] = step([False, True])
        if s.final_state and s.loss == "o" or fields.get("loss") == "o":
            fields["final_state"] = step([False, s.final_state])
        return s.without(**fields)

    phases = (Phase.generate, Phase.shrink)  # `explain` varies the smallest, and `find` returns the last
    silent: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "print_blob": False}
    options = settings(max_examples=200, phases=phases, database=None, deadline=None, **silent)
    try:
        smallest = x.resolved(find(smaller(), fails, settings=options, random=Random(0)))
    except HypothesisException:
        return finding
    return known.get(smallest) or finding


def _again(x: Examiner, probe: Probe, setting: Setting) -> Finding | None:
    try:
        return probe.ask(x, setting)
    except Refused:
        return None


def onset(x: Examiner, probe: Probe, finding: Finding, tolerance: float = 5e-4) -> float | None:
    """Return the |log decay| at which non-finite values begin, by bisection to the relative tolerance. Return None for
    other kinds of failure, if several decays vary in the setting, or if the weakest decay fails, too."""
    if finding.kind != "non-finite":
        return None
    s = finding.setting
    at: Callable[[float], Setting]
    if s.spike is not None and s.spike[1] > -math.inf:
        token, value = s.spike
        largest, at = -value, lambda size: s.without(spike=(token, -size))
    elif isinstance(s.decay, float) and 0 > s.decay > -math.inf and not s.first and not s.per_head:
        largest, at = -s.decay, lambda size: s.without(decay=-size)
    elif isinstance(s.decay, tuple):
        strongest, rest = min(s.decay), s.decay[1:]
        largest, at = -strongest, lambda size: s.without(decay=(-size, *rest))
    else:
        return None
    low, high = 1e-6 * largest, largest
    result = _again(x, probe, at(low))
    if result is not None and result.kind == "non-finite":
        return None  # even the weakest decay fails
    while high - low > tolerance * high:
        middle = (low + high) / 2
        result = _again(x, probe, at(middle))
        low, high = (low, middle) if result is not None and result.kind == "non-finite" else (middle, high)
    return high


def law(x: Examiner, probe: Probe, finding: Finding) -> tuple[str, str]:
    """Return the case that a failure resembles, and a sentence on the log decay at which it begins, "" if unknown.
    ln(the dtype's largest number) divided by that decay is the number of tokens whose decays one exponent sums."""
    case, begins = probe.resembles(finding, x.op), onset(x, probe, finding)
    if begins is None:
        return case, ""
    limit = LN_MAX.get(finding.setting.torch_dtype, LN_MAX[torch.float32])
    n = limit / begins
    words = f"begins at a log decay of -{begins:.4g} = {limit:.4g} / {n:.3g}"
    if finding.setting.spike is not None:
        return case, f"{words}: one token's decay in an exponent"
    if probe.name == "decay-onset" and "o" not in (finding.tensor, *finding.others):
        if (off := _off_before(x, finding, begins / 2)) > 1:
            return "backstepping", (
                f"begins at a log decay of -{begins:.4g}; at half of that {finding.tensor} is finite and off by "
                f"{off:.1e} of its size: a rounding that grows with every token that is walked back"
            )
        case = "masking" if _masked_late(x, probe, finding, n) else case
    return case, f"{words}: an exponent holds about {max(1, round(n))} tokens"


def _off_before(x: Examiner, finding: Finding, size: float) -> float:
    """Return the failing tensor's relative L2 error at log decay -size; 0.0 if the subject does not run there."""
    setting = finding.setting.without(decay=-size)
    try:
        got = x.run(setting).values[finding.tensor]
    except (Refused, Broken, KeyError):
        return 0.0
    return 0.0 if got is None else relative_l2(got, x.truth(setting).values[finding.tensor])


def _masked_late(x: Examiner, probe: Probe, finding: Finding, n: float) -> bool:
    """Whether a failure that begins where the decay of n tokens overflows is a mask applied too late: n is C - 1, or C
    if reads come before the decay, for a chunk of C tokens, and a sequence of one chunk fails, too."""
    for C in (32, 64, 128):
        if abs(n - C + 0.5) < 1.1:
            result = _again(x, probe, finding.setting.without(T=C, decay=-1.01 * LN_MAX[torch.float32] / (C - 1)))
            return result is not None and result.kind == "non-finite"
    return False
