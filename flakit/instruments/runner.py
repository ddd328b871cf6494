"""`Runner` runs a subject at a setting, in this process or over two ranks, and returns its outputs and gradients."""

from collections.abc import Callable

from ..numerics.evaluate import Arriving
from ..ops.common.dispatch import interpreted_alone
from .call import Ran, forward_backward
from .pair import Pair, ranks_device
from .setting import Setting
from .subject import Stopped, Subject

Prepare = Callable[[dict, Arriving], tuple[dict, Arriving]]


class Runner:
    """Runs a subject, the callable under test, on the tensors of a setting.

    stopped: called before every run; once it returns true, a run raises `Stopped`. pair: the two processes for settings
    with slices; the first such setting starts them.
    """

    def __init__(self, subject: Subject, device: str = "cpu", stopped: Callable[[], bool] | None = None):
        self.subject, self.device, self.stopped = subject, device, stopped or (lambda: False)
        self.pair: Pair | None = None

    @interpreted_alone()
    def run(
        self, setting: Setting, *, backward: bool = True, prepare: Prepare | None = None, device: str | None = None
    ) -> Ran:
        """Run the subject at a setting, forward and, if `backward`, backward; return its outputs and gradients.

        prepare: a function of the arguments and the arriving gradients that returns those of the call, for example
        copies elsewhere in memory. device: default, the runner's. Raises Refused if the subject does not take the
        setting, Broken if it crashes or its result has another form than its operator's, Stopped if `stopped` says so.
        """
        if self.stopped():
            raise Stopped
        op = self.subject.op
        x, arriving = setting.laid_out(*setting.make(op, device or self.device), op)
        if prepare is not None:
            x, arriving = prepare(x, arriving)
        if setting.slices is None:
            return forward_backward(self.subject, setting, x, arriving, backward=backward)
        if self.pair is None:
            self.pair = Pair(self.subject, ranks_device(self.device), self.stopped)
        return self.pair.run(setting, x, arriving, backward)

    def close(self) -> None:
        """End the two processes, if any setting started them."""
        if self.pair is not None:
            self.pair.close()
