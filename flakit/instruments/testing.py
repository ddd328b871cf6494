"""The audit as pytest tests: one line in a test file makes a test of every probe.

from flakit.instruments.testing import audited

test_my_op = audited(my_op, like="rwkv6")
"""

from collections.abc import Callable, Iterable

from ..numerics.arguments import one_of
from ..numerics.operators import Operator
from .audit import UNSUPPORTED, audit
from .probes import PROBES
from .report import setting_words
from .subject import Subject, load


def audited(
    subject: str | Callable | Subject,
    like: str | Operator | None = None,
    *,
    adapter: str | Callable | None = None,
    only: Iterable[str] | None = None,
    shrink: bool = False,
    **how,
) -> Callable:
    """Return a pytest function with a case for every probe; it skips an unsupported probe, with the reason.

    subject, like, adapter, only, how: as `flakit.audit` takes them. shrink: shrink failures, which takes time. Raises
    an error in these arguments at once, rather than in each case.
    """
    import pytest

    names = [one_of("only", name, PROBES) for name in (PROBES if only is None else only)]
    subject = load(subject, like, adapter)

    @pytest.mark.parametrize("probe", names)
    def test(probe: str) -> None:
        __tracebackhide__ = True
        (verdict,) = audit(subject, only=[probe], shrink=shrink, **how).verdicts
        if verdict.verdict == UNSUPPORTED:
            pytest.skip(verdict.words)
        if verdict.verdict == "fail":
            script = f"\n\n{verdict.repro}" if verdict.repro else ""
            pytest.fail(
                f"{verdict.words}\nat {setting_words(verdict.setting or {})}\n{verdict.probe.meaning}{script}",
                pytrace=False,
            )

    return test
