"""Check what works on this machine: `flakit doctor` in a terminal, `flakit.doctor.examine()` in a notebook.

It looks at Python, the versions that have to fit each other, Triton (GPU or interpreter), JupyterLab and its widgets,
and runs every operator, forward and backward, against float64 on each backend that this machine has.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from packaging.version import Version
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.markup import escape
from rich.table import Table

from .numerics import carried
from .numerics.errors import compare
from .numerics.evaluate import evaluate, truth
from .numerics.inputs import inputs
from .numerics.operators import OPERATORS
from .numerics.recorded import version_of
from .ops.common.dispatch import interpreted, interpreted_too_late
from .ops.common.launch import RUN_ON, SHARED_MEMORY, TABLE, Chip, chips, read_rows, rows_file
from .torch_build import CPU_INDEX, LARGE, SMALL

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "BROKEN"
STYLES = {OK: "green", NOTE: "default", WARNING: "yellow", BROKEN: "bold red"}

PACKAGES = [
    *"flakit torch triton numpy einops".split(),
    *"jupyterlab jupyterlab_widgets ipykernel ipywidgets anywidget matplotlib pillow".split(),
]
PYTHON = "3.10"
TRITON_OF_TORCH = {"2.10": "3.6", "2.11": "3.6", "2.13": "3.7"}
"""The Triton release line that each PyTorch release is built with."""

CHAINED_WRONG = (100, 103), "3.6.0", "3.7.1"
"""Compute capabilities, and the first and last Triton version known to miscompile, for a tile of 64 rows, two products
that are added to one sum (triton-lang/triton#10821). Later versions are untested."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1.4e-3}
"""The largest relative L2 error against float64 that an operator may have, by the dtype of its inputs."""

LAB_EXTENSIONS = {
    "jupyterlab_widgets": "share/jupyter/labextensions/@jupyter-widgets/jupyterlab-manager",
    "anywidget": "share/jupyter/labextensions/anywidget",
}
"""The JupyterLab extensions, by package, that show sliders and the pictures of panels: folders of the environment."""


@dataclass(frozen=True)
class Finding:
    topic: str
    level: str
    says: str
    cure: str = ""


@dataclass(frozen=True)
class Check:
    """The result of one operator's forward and backward on one backend: its error against float64, or its failure."""

    operator: str
    form: str
    backend: str
    error: float | None = None  # the largest relative L2 error over outputs and gradients
    tensor: str = ""  # where it is
    seconds: float = 0.0
    failure: str = ""  # instead of an error: what was raised, or what is not finite
    essential: bool = True  # False: something else does its work here, as a GPU does the interpreter's
    dtype: str = "float32"  # of the inputs
    channels: int | None = None  # of each head, where heads of other sizes have other kernels
    slots: int | None = None  # of GSA, where chunks of more slots are longer

    @property
    def level(self) -> str:
        if self.error is not None and self.error <= TOLERANCE[self.dtype]:
            return OK
        return BROKEN if self.essential else WARNING


@dataclass(frozen=True)
class Diagnosis(JupyterMixin):
    """The findings of `flakit doctor`; it displays itself as a table in a terminal and in a notebook."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether nothing essential is broken."""
        return all(x.level != BROKEN for x in self.findings + self.checks)

    def as_json(self) -> str:
        checks = [{**asdict(check), "level": check.level} for check in self.checks]
        report = {"works": self.works, "versions": self.versions, "findings": list(map(asdict, self.findings))}
        return json.dumps({**report, "checks": checks}, indent=1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        findings = Table(box=None, pad_edge=False, show_header=False)
        for x in self.findings:
            findings.add_row(_badge(x.level), x.topic, escape(x.says))
            if x.cure:
                findings.add_row("", "", f"[bold]-> {escape(x.cure)}[/]")
        yield findings
        checks = Table(
            box=None, pad_edge=False, title="\nOperators, forward and backward, against float64", title_justify="left"
        )
        for heading in ("", "operator", "form", "inputs", "backend", "largest error (relative L2)", "time"):
            checks.add_column(heading, justify="right" if heading == "time" else "left")
        for x in self.checks:
            error = escape(x.failure) if x.error is None else f"{x.error:.0e} in {x.tensor}"
            time = f"{1000 * x.seconds:.0f} ms"
            form = x.form if x.channels is None else f"{x.form}, heads of {x.channels}"
            form += f", {x.slots} slots" * (x.slots is not None)
            checks.add_row(_badge(x.level), OPERATORS[x.operator].label, form, x.dtype, x.backend, error, time)
        yield checks
        if not self.works:
            yield "\n[bold red]Something essential is broken: see BROKEN above.[/]"

    def _repr_mimebundle_(self, include, exclude, **kwargs) -> dict[str, str]:
        """Return HTML of one line that unfolds to the report; it is unfolded if some finding needs action."""
        shown = super()._repr_mimebundle_(include, exclude, **kwargs)
        if "text/html" in shown:
            todo = sum(x.level in (WARNING, BROKEN) for x in self.findings + self.checks)
            line = f"{todo} of {len(self.findings + self.checks)} lines need a look" if todo else "all is well"
            shown["text/html"] = (
                f"<details{' open' * bool(todo)}><summary>The doctor's report: {line}</summary>"
                f"{shown['text/html']}</details>"
            )
        return shown


def _badge(level: str) -> str:
    return f"[{STYLES[level]}]{level}[/]"


def examine() -> Diagnosis:
    """Examine this machine and return the `Diagnosis`; takes some seconds, most of them to run the kernels."""
    versions = installed()
    devices = chips() if versions["triton"] and torch.cuda.is_available() else []
    findings = (
        *python_and_packages(versions),
        *mismatches(versions),
        kernels(versions),
        *compiled_wrongly(devices, versions["triton"]),
        *launch_rows(devices),
        *lab(versions),
    )
    return Diagnosis(findings, tuple(check_operators()), versions)


def installed() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


def python_and_packages(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    python = versions["python"]
    if Version(python) < Version(PYTHON):
        yield Finding("Python", BROKEN, f"{python}, flakit needs {PYTHON} or newer", "make lab PYTHON=python3.12")
    else:
        yield Finding("Python", OK, f"{python} on {platform.system()} {platform.machine()}")
    yield build_of_torch(str(versions["torch"]), torch.version.cuda, torch.cuda.is_available())
    yield Finding("numpy", OK, str(versions["numpy"]))


def build_of_torch(version: str, cuda: str | None, gpu: bool) -> Finding:
    """Report PyTorch's build: one for CUDA works without a GPU, but takes several times the disk space."""
    if not cuda or gpu:
        return Finding("torch", OK, version)
    says = f"{version}, a build for CUDA {cuda}, and no GPU that it can use: it works, but takes {LARGE} on disk"
    again = "make clean, then make lab" if carried.IN_CHECKOUT else "a new environment, and pip install"
    cure = f"for the build for CPUs, {SMALL}: {again} with {CPU_INDEX}"
    return Finding("torch", NOTE, says, cure)


def mismatches(versions: Mapping[str, str | None], system: str = sys.platform) -> Iterator[Finding]:
    """Yield a finding for each pair of versions that do not work together, with a cure."""
    torch_, triton, numpy, widgets = (versions.get(name) for name in ("torch", "triton", "numpy", "ipywidgets"))
    if triton is None and system == "linux":
        yield Finding("triton", WARNING, "missing, so no kernel can run", _pip_install("triton"))
    built_with = TRITON_OF_TORCH.get(_line(torch_))
    if triton and built_with and _line(triton) != built_with:
        says = f"torch {torch_} is built with triton {built_with}, here is {triton}"
        yield Finding("torch and triton", WARNING, says, f"pip install 'triton=={built_with}.*'")
    if triton and numpy and Version(triton).release == (3, 6, 0) and Version(numpy) >= Version("2.4"):
        says = f"triton 3.6.0 with numpy {numpy}: interpreted kernels fail on loops up to a run-time bound"
        yield Finding("triton and numpy", WARNING, says, "pip install 'numpy<2.4'")
    if widgets and Version(widgets) < Version("8"):
        yield Finding("ipywidgets", BROKEN, f"{widgets}: the panels need 8 or newer", "pip install 'ipywidgets>=8.1'")


def _pip_install(what: str) -> str:
    """Return the pip command that installs `what`, with the tested versions if their list is available."""
    return f"pip install {'-c constraints.txt ' * carried.IN_CHECKOUT}{what}"


def _line(version: str | None) -> str:
    return ".".join(map(str, Version(version).release[:2])) if version else ""


def kernels(versions: Mapping[str, str | None]) -> Finding:
    gpu = ""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    here = f"triton {versions['triton']}, " if versions["triton"] else ""
    if not here:
        says = "no triton: the torch and reference backends do the work"
        return Finding("kernels", NOTE, says + f", on {gpu}" * bool(gpu))
    if interpreted_too_late():
        says = here + "TRITON_INTERPRET=1 was set after triton was imported: reductions in kernels will fail"
        cure = "set it before Python starts (`flakit lab` does), then restart the kernel"
        return Finding("kernels", BROKEN, says, cure)
    if interpreted():
        despite = f", although there is a GPU: {gpu}" if gpu else " on the CPU, without a GPU"
        return Finding("kernels", NOTE if gpu else OK, f"{here}interpreted{despite}")
    if gpu:
        return Finding("kernels", OK, f"{here}compiled for {gpu}")
    says = f"{here}no GPU, interpreter off: the torch backend does the work"
    return Finding("kernels", NOTE, says, "to run kernels on the CPU set TRITON_INTERPRET=1 before Python starts")


def compiled_wrongly(devices: Sequence[Chip], triton: str | None) -> Iterator[Finding]:
    """Yield a finding for each GPU for which this Triton compiles kernels like flakit's wrongly, or may do so."""
    capabilities, first, last = CHAINED_WRONG
    for device in devices:
        if device.capability in capabilities and triton:
            known = Version(first) <= Version(triton) <= Version(last)
            here = f"here is {triton}" if known else f"whether {triton} does is not known"
            says = (
                f"{device.name}: triton {first} to {last} compile two products that are added to one sum wrongly for "
                f"sm_{device.capability} (triton-lang/triton#10821), as flakit's kernels do; {here}"
            )
            cure = "backend='torch' computes the same without Triton; below, every operator is held to float64 here"
            yield Finding("kernels", WARNING, says, cure)


def launch_rows(devices: Sequence[Chip]) -> Iterator[Finding]:
    """Yield for each kind of GPU which rows of the launch table it uses, and whether they ever ran on such a GPU."""
    for device in devices:
        place = rows_file(device.capability)
        try:
            meta, tuned = read_rows(place) if len(devices) == 1 else ({}, {})
        except ValueError as error:
            yield Finding("launch table", BROKEN, str(error), f"remove {place}, or make it anew: flakit tune")
            continue
        several = f"{device.name}, beside GPUs of another kind: " if len(devices) > 1 else ""
        known, says = [key for key in tuned if key in TABLE], []
        if tuned:
            says.append(f"{len(known)} rows of {place}, tuned on {meta.get('device')}, {meta.get('date')}")
        if len(known) < len(tuned):
            says.append(f"{len(tuned) - len(known)} there are of kernels that flakit no longer has")
        left = len(TABLE) - len(known)
        if left:
            says.append(f"{'the other' if known else 'all'} {left} rows are those built in, {_seen(device)}")
        unseen = left and device.capability not in RUN_ON
        cure = "flakit tune tries rows on this GPU and writes the best" if unseen else ""
        yield Finding("launch table", NOTE if unseen else OK, several + "; ".join(says), cure)


def _seen(device: Chip) -> str:
    """Return a phrase on how far the built-in rows were tested on a chip."""
    if device.capability in RUN_ON:
        return f"found and run on {RUN_ON[device.capability]} (sm_{device.capability})"
    only = f"found on {' and '.join(RUN_ON.values())}"
    if device.capability in SHARED_MEMORY:
        return f"{only}, compiled for sm_{device.capability} in flakit's tests, and run on no such GPU"
    needs, has = min(SHARED_MEMORY.values()) // 1024, device.shared // 1024
    room = "" if has >= needs else f", which may need {needs} KB of shared memory a block, and here are {has}"
    return f"{only}, neither run on a GPU with compute capability {device.capability / 10} nor compiled for one{room}"


def lab(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Check that JupyterLab, the kernel and the widgets share an environment; else sliders show "model not found"."""
    needed = ("jupyterlab", "ipykernel", "ipywidgets", "anywidget", "matplotlib", "pillow")
    missing = [name for name in needed if not versions[name]]
    if missing:
        cure = _pip_install("-e '.[lab]'" if carried.IN_CHECKOUT else "'flakit[lab]'")
        yield Finding("notebooks", NOTE, f"not installed: {', '.join(missing)}", cure)
        return
    here, server = Path(sys.executable).parent, serving_python()
    if server and server != here:
        says = f"JupyterLab runs from {server}, this kernel from {here}: sliders may say 'model not found'"
        cure = "start JupyterLab from the kernel's environment: python -m flakit.cli lab, or python -m jupyterlab"
        yield Finding("notebooks", BROKEN, says, cure)
    elif absent := [name for name, place in LAB_EXTENSIONS.items() if not (Path(sys.prefix) / place).is_dir()]:
        says = f"JupyterLab's extension of {' and '.join(absent)} is not in this environment: panels will say"
        cure = f"pip install --force-reinstall {' '.join(absent)}"
        yield Finding("notebooks", BROKEN, f"{says} 'model not found'", cure)
    else:
        together = f"JupyterLab {versions['jupyterlab']} and ipywidgets {versions['ipywidgets']} in one environment"
        yield Finding("notebooks", OK, f"{together}, matplotlib {versions['matplotlib']}")
    other = shutil.which("jupyter-lab")
    if other and Path(other).parent != here:
        says = f"the command `jupyter lab` belongs to another environment ({other})"
        yield Finding("notebooks", NOTE, says, "use flakit lab, or python -m jupyterlab")


def serving_python() -> Path | None:
    """Return the folder of the Python that runs JupyterLab, from inside a kernel; None if unknown."""
    if "JPY_PARENT_PID" not in os.environ:
        return None
    import psutil  # comes with ipykernel

    try:
        server = psutil.Process(os.getppid())
        python = Path(os.path.normpath(Path(server.cwd(), server.cmdline()[0])))
    except (psutil.Error, IndexError):
        return None
    return python.parent if python.name.startswith("python") and python.is_file() else None


def check_operators() -> Iterator[Check]:
    """Run each operator and form on each backend, in the order reference, torch, triton; yield a `Check` each."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    yield from check_on("reference", "cpu")
    for device in devices:
        yield from check_on("torch", device)
    if installed()["triton"] is None:
        return
    if "cuda" in devices and not interpreted():
        yield from check_on("triton", "cuda")
    if not interpreted():
        yield from (replace(check, essential="cuda" not in devices) for check in _interpreted_elsewhere())
    elif not interpreted_too_late():
        yield from check_on("triton", "cpu")


def check_on(backend: str, device: str) -> Iterator[Check]:
    """Run every operator and form on a few tokens in float32, on a GPU also in bfloat16; yield a `Check` each. Chunks
    of RWKV6 and RWKV7 also run with heads of 64 channels, for which Triton has other kernels, and those of GSA with 64
    slots, of which its chunks have 64 tokens."""
    for name, op in OPERATORS.items():
        for form in op.forms:
            cases = [{}]
            if backend == "triton" and form == "chunk":
                cases.append({"T": 70, "M": 64} if name == "gsa" else {"K": 64, "V": 64})
            for sizes in cases:
                sizes = {"T": 20, "K": 16, "V": 24} | sizes
                tensors = inputs(op, H=1, **sizes, initial_state=True, device=device)
                channels = sizes["K"] if sizes["K"] == 64 else None
                yield _checked(name, form, backend, device, tensors, channels, sizes.get("M"))
    if backend == "triton" and device == "cuda":
        yield from check_16_bits(device)


def check_16_bits(device: str) -> Iterator[Check]:
    """Run the kernels for 16-bit inputs, which differ from those for float32; yield a `Check` each. Of the heads of 64
    channels, one has a model's decays and one has -20 (natural log), so that the fast path through a chunk, for weak
    decays, and the general path both run. RWKV6 and RWKV7 also run in chunks with heads of 80 channels, which have
    their own kernels, and GSA with 64 slots. The interpreter cannot multiply bfloat16 and gets float16."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    for name, op in OPERATORS.items():
        for form in op.forms:
            cases = [(None, None)]
            if form == "chunk":
                cases = [(None, None), (None, 64)] if name == "gsa" else [(64, None), (80, None)]
            for channels, slots in cases:
                K = channels or 64
                tensors = inputs(op, T=70, H=2, K=K, V=K, M=slots, dtype=dtype, initial_state=True, device=device)
                tensors[op.decay][:, :, 1] = -20.0
                yield _checked(name, form, "triton", device, tensors, channels, slots)


def _checked(
    name: str, form: str, backend: str, device: str, tensors: dict, channels: int | None, slots: int | None
) -> Check:
    op = OPERATORS[name]
    dtype = str(tensors[op.tensors[0]].dtype).removeprefix("torch.")
    label = f"{backend} on {device}" + ", interpreted" * (backend == "triton" and device == "cpu")
    check = Check(name, form, label, dtype=dtype, channels=channels, slots=slots)
    exact = truth(op, tensors, dfinal_state=True)
    start = time.perf_counter()
    try:
        results = evaluate(op, tensors, form=form, backend=backend, dfinal_state=True)
    except Exception as error:  # any error is a result of the check
        return replace(check, failure=f"{type(error).__name__}: {error}")
    errors = {tensor: compare(results[tensor], exact[tensor]) for tensor in exact}
    worst = max(errors, key=lambda tensor: errors[tensor].l2)
    check = replace(check, tensor=worst, seconds=time.perf_counter() - start)
    if errors[worst].finite:
        return replace(check, error=errors[worst].l2)
    return replace(check, failure=f"{worst}: {errors[worst]}")


def _interpreted_elsewhere() -> Iterator[Check]:
    """Run the interpreted kernels in a separate process, since the interpreter must be enabled before Python starts."""
    command, env = "from flakit import doctor; doctor._print_interpreted()", {**os.environ, "TRITON_INTERPRET": "1"}
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", command], env=env, **streams)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        yield from (
            Check(name, form, "triton on cpu, interpreted", failure=message)
            for name, op in OPERATORS.items()
            for form in op.forms
        )
    else:
        yield from (Check(**check) for check in json.loads(done.stdout.splitlines()[-1]))


def _print_interpreted() -> None:
    print(json.dumps([asdict(check) for check in check_on("triton", "cpu")]))
