"""A meter that needs no GPU: everything runs on the CPU, and time is what it is told to be."""

from flakit.bench.meter import KernelTime, Meter, Times


class FakeMeter(Meter):
    """Each measurement takes as many milliseconds as were asked for before it; `called` counts what was run."""

    device = "cpu"

    def __init__(self):
        self.called, self.asked = [], []

    def _run(self, kind, call):
        call()
        self.called.append(kind)
        return float(len(self.called))

    def times(self, call):
        ms = self._run("times", call)
        return Times(ms - 0.25, ms, ms + 0.25)

    def replayed(self, call):
        ms = self._run("replayed", call)
        return Times(ms - 0.25, ms, ms + 0.25)

    def host_ms(self, call, calls=50):
        return self._run("host", call)

    def extra_gib(self, call):
        return self._run("memory", call)

    def kernels(self, call, calls=10):
        self._run("kernels", call)
        return [KernelTime("a_kernel", 2.0, 3.0, 0.75), KernelTime("b_kernel", 1.0, 1.0, 0.25)]

    def ceilings(self):
        return {"copy_tb_s": 4.0, "tflops": 800.0}
