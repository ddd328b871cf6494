"""The `Examiner`, which every check of the audit receives: it runs the subject at a setting and judges the result.

Before any probe, `learn` calls the subject in a few plain ways. Then, for each setting, `Runner` runs the subject and
`findings` judges the result beside the float64 `Truth`; `Examiner.compare` does both.
"""

import time
from collections.abc import Callable, Mapping

from .call import Ran
from .finding import COARSER, Finding, findings, raised, worst_of
from .learn import learn
from .runner import Prepare, Runner
from .setting import Setting
from .subject import BackwardBroken, Broken, Refused, Subject
from .truth import Truth, truth_of


def clock_of(device: str) -> Callable[[], float]:
    """Return a clock in seconds: on a CPU this process's CPU time, unaffected by other load; on a GPU, wall-clock."""
    return time.process_time if device == "cpu" else time.monotonic


class Examiner:
    """Runs and judges one subject, and caches what probes share.

    learnt: the result of `learn`. plain: the plainest call that the subject takes, which probes vary. supports: for
        each feature, why it is not supported, None if it is. resolved: `Learnt.resolved`.
    full: use dense grids and long sequences. clock: `clock_of` the device. deadline: the time of `clock` after which
        probes try no further settings.

    The other arguments are those of `Runner` and `learn`.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        device: str = "cpu",
        full: bool = False,
        seed: int = 0,
        stopped: Callable[[], bool] | None = None,
    ):
        self.subject, self.op, self.device, self.full = subject, subject.op, device, full
        self.clock, self.deadline = clock_of(device), float("inf")
        self.runner = Runner(subject, device, stopped)
        self.learnt = learn(self.runner, seed)
        self.plain, self.supports, self.resolved = self.learnt.plain, self.learnt.supports, self.learnt.resolved
        self._runs: dict[Setting, Ran] = {}

    @property
    def late(self) -> bool:
        return self.clock() > self.deadline

    @property
    def short_dtypes(self) -> list[str]:
        """The names of the 16-bit dtypes that the subject supports."""
        return [name for name in ("bfloat16", "float16") if self.supports[name] is None]

    def run(self, setting: Setting, *, prepare: Prepare | None = None, device: str | None = None) -> Ran:
        """Return the outputs and, if the subject has a backward pass, the gradients at a setting; see `Runner.run`."""
        return self.runner.run(setting, backward=self.learnt.backward, prepare=prepare, device=device)

    def run_once(self, setting: Setting) -> Ran:
        """Return `run` at a setting, cached, since several probes ask different questions of the same runs."""
        if setting not in self._runs:
            self._runs[setting] = self.run(setting)
        return self._runs[setting]

    def forget(self, setting: Setting) -> None:
        """Drop everything cached for a setting, so that the next check runs it again."""
        self._runs.pop(setting, None)
        self.learnt.crashed.pop(setting, None)

    def close(self) -> None:
        """End the processes that runs over ranks started."""
        self.runner.close()

    @property
    def allowances(self) -> dict[str, float]:
        """By name, the errors allowed to tensors that are less precise than their dtype in the plainest calls."""
        return {name: COARSER * error for name, error in self.learnt.coarse.items()}

    def truth(self, setting: Setting, *, device: str | None = None) -> Truth:
        """Return the float64 truth of a setting, computed with the subject's own default scale."""
        return truth_of(self.op, setting, device or self.device, self.learnt.power)

    def crash(self, setting: Setting, error: Broken) -> Finding:
        """Return the finding for a crash. Raises Refused if the plainest call's backward pass raises the same error."""
        if isinstance(error, BackwardBroken) and str(error) == self.learnt.raising:
            raise Refused(str(error)) from error
        return raised(setting, error)

    def compare(
        self,
        setting: Setting,
        *,
        excused: Mapping[str, str] | None = None,
        coarse: bool = True,
        finite: bool = False,
        run: Callable[[Setting], Ran] | None = None,
        device: str | None = None,
    ) -> Finding:
        """Run the subject at a setting and return the worst finding. Raises Refused if every tensor is excused.

        excused: tensors that are known to be wrong, and why, as in `Learnt.known`. One that is "wrong" has to be
            finite, the others are ignored. Default: all that the plainest calls get wrong, and a crash of their
            backward pass.
        coarse: allow coarse tensors `COARSER` times their error at the plainest calls.
        finite: check finiteness alone.
        run: replaces `Examiner.run`. device: default, the examiner's.
        """
        setting = self.resolved(setting)
        excuses = self.learnt.with_states | self.learnt.known if excused is None else excused
        try:
            ran = self.run(setting, device=device) if run is None else run(setting)
        except Broken as broken:
            return self.crash(setting, broken) if excused is None else raised(setting, broken)
        true, allowances = self.truth(setting, device=device), self.allowances if coarse else {}
        results = findings(self.op, ran, true, setting, finite=finite, allowances=allowances, excused=excuses)
        results = [
            x for x in results if x.tensor not in excuses or x.kind == "non-finite" and excuses[x.tensor] == "wrong"
        ]
        if not results:
            raise Refused("nothing is left to compare: every tensor is wrong at the plainest call already")
        return worst_of(results)
