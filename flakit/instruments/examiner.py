"""The `Examiner` that every check receives: it leads from a setting to a finding.

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
    """CPU seconds of this process on a CPU, so that other load shortens no audit; wall-clock seconds on a GPU."""
    return time.process_time if device == "cpu" else time.monotonic


class Examiner:
    """A subject under examination.

    learnt: the result of `learn`. plain: the plainest call that the subject takes; probes vary it. supports: by
    feature, why it is not supported; None if it is. resolved: `Learnt.resolved`, a setting without what is not
    supported. full: use dense grids and long sequences. clock: `clock_of` the device.
    deadline: the time of `clock` after which probes try no further settings.
    Other arguments are those of `Runner` and `learn`.
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

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, setting: Setting, *, prepare: Prepare | None = None, device: str | None = None) -> Ran:
        """As `Runner.run`, with a backward pass if the subject has one."""
        return self.runner.run(setting, backward=self.learnt.backward, prepare=prepare, device=device)

    def run_once(self, setting: Setting) -> Ran:
        """`run`, cached: probes that ask different questions of one sweep share it."""
        if setting not in self._runs:
            self._runs[setting] = self.run(setting)
        return self._runs[setting]

    def forget(self, setting: Setting) -> None:
        """Drop what is cached of a setting: the next check runs it again."""
        self._runs.pop(setting, None)
        self.learnt.crashed.pop(setting, None)

    def close(self) -> None:
        """End the processes that runs started."""
        self.runner.close()

    # --- judging -----------------------------------------------------------------------------------------------------

    @property
    def allowances(self) -> dict[str, float]:
        """The relative errors that coarse tensors may have."""
        return {name: COARSER * error for name, error in self.learnt.coarse.items()}

    def truth(self, setting: Setting, *, device: str | None = None) -> Truth:
        """The float64 truth, at the default scale that the subject has."""
        return truth_of(self.op, setting, device or self.device, self.learnt.power)

    def crash(self, setting: Setting, error: Broken) -> Finding:
        """The finding for a crash. Raises Refused for a backward pass that raises the same at the plainest call."""
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
        """Run the subject and return the worst finding. Raises Refused if every tensor is excused.

        excused: known tensors, and why, as in `Learnt.known`: those that are "wrong" have to be finite, and no more is
            asked of any. Default: all that the plainest calls get wrong, and a crash of their backward pass.
        coarse: allow coarse tensors `COARSER` times their error at the plainest calls.
        finite: check finiteness alone.
        run: default, `run`. device: default, the examiner's.
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
