"""Runs a learner's lines of a Triton kernel, interpreted and traced. The lessons on the chunked kernel use it.

    def scores(b_r, b_k, b_ge, b_gi, o_i, o_j, C):
        return tl.dot(…)

    result = workbench.run(-1.4, scores)
    result.o, result.expected, result.trace

Only the text of the functions is used here. It goes into a file, and a separate process, always started with
TRITON_INTERPRET=1, runs that under `flakit.trace` and returns the output and the trace. Without Triton (it exists for
Linux) the kernel does not run: the result is a recorded run of our lines, and says so.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..cases.laws import search
from ..numerics.arguments import one_of
from ..numerics.inputs import inputs as make_inputs
from ..numerics.recorded import Recording, read
from ..numerics.words import error as in_words
from ..numerics.words import number
from ..ops.common.dispatch import has_triton
from ..ops.rwkv6 import fused_recurrent_rwkv6
from .trace_record import Trace

if TYPE_CHECKING:
    from ..figures.plots import Picture

tl = importlib.import_module("triton.language") if has_triton() else None
"""What a kernel's lines call; None without Triton, where their text is read all the same."""

WAYS = {
    "start": "scores_from_the_start",
    "middle": "scores_from_the_middle",
    "blocks": "scores_in_blocks",
    "halves": "scores_by_halves",
}
"""The anchors of the scores' decays, and our function for each, which becomes the file's `scores`."""

PIECES = ("scores", "output", "next_state")
"""The functions of the file that a learner may write."""

PRODUCTS = ("ieee", "tf32")
"""The precisions of `tl.dot`."""

CHUNK = 64
PACES = (0.25, 0.5, 0.75, 1.0)
"""The decay of each head, as a share of the requested one; the picture shows the last head."""

RECORDING = "workbench"

_GIVEN = Path(__file__).with_name("workbench_triton.py")


@dataclass(frozen=True)
class Run:
    """The result of one run of the kernel.

    decay: the requested natural-log decay per token. trace: the `Trace` of the run.
    o, expected: the output of the last head, [T, V]: the kernel's in float32 and the true one in float64.
    error: the relative L2 error of o, NaN or infinite if o is not finite.
    yours: o, or `...` (a lesson's empty answer) if lines are missing or nothing ran.
    said: a note to display: whether the learner's lines ran or ours, and in Triton or from the recording.
    """

    decay: float
    o: np.ndarray = field(repr=False)
    expected: np.ndarray = field(repr=False)
    trace: Trace = field(repr=False)
    error: float
    yours: object = field(repr=False)
    said: str = ""

    @property
    def finite(self) -> bool:
        """Whether every element of the output is finite."""
        return bool(np.isfinite(self.o).all())

    def picture(self, before: "Run | None" = None) -> "Picture":
        """Draw the learner's output, the expected one and their difference; an empty frame without an output of theirs.
        before: another run at this decay, whose output comes first."""
        from ..figures.plots import beside

        yours = ... if self.yours is ... else self.o.T
        first = None if before is None else before.o.T
        return beside(yours, self.expected.T, rows="channel", columns="token", before=first)

    def compared(self) -> "Picture":
        """Draw the computed output beside the expected one, whoever wrote the lines that ran."""
        from ..figures.plots import matrices

        largest = float(np.abs(self.expected).max())
        shown: dict[str, Any] = {"as computed": self.o.T, "as it is": self.expected.T}
        return matrices(shown, rows="channel", columns="token", signed=True, limits=(-largest, largest), height=2.4)

    @property
    def lossy(self) -> object:
        """The source lines that lost digits in a run with `digits`, as text, "none" for none; `...` (a lesson's empty
        answer) if the learner's lines are missing."""
        if self.yours is ...:
            return ...
        assert self.trace.digits is not None  # of a run with digits
        lines = (finding.line for finding in self.trace.digits.findings)
        named = [f"line {line.place.line}, {line.place.statement}" if line else "many lines" for line in lines]
        return "; ".join(named) or "none"

    @property
    def words(self) -> str:
        """A sentence on the output: finite or not, and its relative error."""
        if self.finite:
            words = f"finite, with a relative error of {in_words(self.error)}"
        else:
            rows = int((~np.isfinite(self.o)).any(1).sum())
            words = f"not finite in {rows} of {len(self.o)} tokens"
        return f"decay {number(self.decay)}: the output is {words}"

    def __repr__(self) -> str:
        return f"{self.words}\n({self.said})" if self.said else self.words


def inputs(decay: float) -> dict[str, Tensor]:
    """Return the inputs of the kernel: two chunks, four heads of 16 channels; head n has `PACES[n]` times the decay."""
    x = make_inputs("rwkv6", T=2 * CHUNK, H=len(PACES), K=16, V=16, decay=decay)
    return x | {"w": x["w"] * torch.tensor(PACES, device="cpu")[:, None]}


def run(decay: float, *lines: Callable, way: str = "start", digits: bool = False, products: str = "ieee") -> Run:
    """Run the kernel on `inputs(decay)`, interpreted and traced, in a separate process.

    decay: natural-log decay <= 0 per token of the last head.
    lines: functions named as in PIECES, in place of ours. One that still has a `...` is replaced by ours, the scores by
        those of `way`, and the run says so. way: the scores' anchor, of `WAYS`.
    digits: also find the lines that lose digits; products are then rounded as on a GPU.
    products: the precision of `tl.dot` in our lines: "ieee", or "tf32" as on tensor cores.

    Raises ValueError for an argument out of range, RuntimeError, with the line, if the kernel fails.
    """
    one_of("way", way, WAYS)
    if not decay <= 0:
        raise ValueError(f"decay: expected a natural-log decay <= 0, got {decay!r}")
    _, empty = _answered(lines)
    expected = _expected(float(decay))
    if not has_triton():
        row, trace = _recorded(decay, way, digits=digits, products=products)
        o = np.array(row["o"], dtype=np.float64).reshape(expected.shape)
        note = f"there is no Triton on this machine: your lines were not run, and ours gave this, {_recording().label}"
        return Run(decay, o, expected, trace, row["error"], ..., note)
    o, trace = _interpreted(float(decay), source(*lines, way=way, products=products), digits)
    error = float(np.linalg.norm(o - expected) / np.linalg.norm(expected))
    note = f"{', '.join(empty)}: nothing of yours so far, ours ran" if empty else ""
    return Run(decay, o, expected, trace, error, ... if empty else o, note)


def traced(decay: float, *lines: Callable, way: str = "start", digits: bool = False, products: str = "ieee") -> Trace:
    """Run the kernel as `run` does, and return its `Trace` alone."""
    if not has_triton():
        return _recorded(decay, way, digits=digits, products=products, with_output=False)[1]
    return _interpreted(float(decay), source(*lines, way=way, products=products), digits)[1]


def source(*lines: Callable, way: str = "start", products: str = "ieee") -> str:
    """Return the text of the file to run: imports, the functions of `PIECES`, the learner's or ours, the kernel."""
    one_of("products", products, PRODUCTS)
    own, _ = _answered(lines)
    ours = {name: text.replace('="ieee"', f'="{products}"') for name, text in _ours().items()}
    parts = [own.get(name) or ours[WAYS[way] if name == "scores" else name] for name in PIECES]
    parts[0] = parts[0].replace(f"def {WAYS[way]}(", "def scores(", 1)
    decorated = ("@triton.jit\n" + part.strip() for part in (*parts, ours["chunk_kernel"]))
    return "import triton\nimport triton.language as tl\n\n\n" + "\n\n\n".join(decorated) + "\n"


def listing(*lines: Callable, way: str = "start", products: str = "ieee", only: str | None = None) -> str:
    """Return the text of `source` with the line numbers that traces cite. only: the name of the function to show."""
    file = source(*lines, way=way, products=products)
    numbered = list(enumerate(file.splitlines(), 1))
    if only is not None:
        functions = [node for node in ast.parse(file).body if isinstance(node, ast.FunctionDef)]
        (definition,) = (node for node in functions if node.name == only)
        numbered = numbered[definition.decorator_list[0].lineno - 1 : definition.end_lineno]
    return "\n".join(f"{n:3}  {text}".rstrip() for n, text in numbered).rstrip()


def answered(*lines: Callable) -> bool:
    """Whether the learner's lines could run here: a `scores` without a `...`, and Triton."""
    return has_triton() and "scores" in _answered(lines)[0]


def onset(*lines: Callable, way: str = "start") -> dict[str, float]:
    """Return the smallest |decay| at which a "tile" and the "output" are not finite, to 0.5%; inf for none."""
    if not has_triton():
        row = _recording().select(way=way)[0]
        return {name: row[f"{name}_onset"] for name in ("tile", "output")}
    tight = traced(-1.0, *lines, way=way).headroom[0]  # exponents grow with the decay
    law = (tight.largest + tight.room) / tight.largest if tight.largest > 0 else 1.0
    text = source(*lines, way=way)

    def finite(size: float) -> dict[str, bool]:
        o, trace = _interpreted(-size, text)
        return {"tile": trace.finite, "output": bool(np.isfinite(o).all())}

    return search(finite, near=[law / 2, law], tolerance=5e-3)


def _answered(lines: tuple[Callable, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the text of functions without `...`, by name, and the others' names. ValueError for one not in PIECES."""
    own, empty = {}, []
    for function in lines:
        name = getattr(function, "__name__", None)
        if name not in PIECES:
            raise ValueError(f"lines: expected functions named {', '.join(PIECES)}, got {name or function!r}")
        text = textwrap.dedent(inspect.getsource(getattr(function, "fn", function)))
        (tree,) = ast.parse(text).body
        if any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree)):
            empty.append(name)
        else:
            own[name] = "\n".join(text.splitlines()[tree.lineno - 1 :])
    return own, empty


@functools.lru_cache(maxsize=1)
def _ours() -> dict[str, str]:
    """Return the text of each function in `workbench_triton.py`, by name."""
    text = _GIVEN.read_text(encoding="utf-8")
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_source_segment(text, node) or "" for node in functions}


@functools.lru_cache(maxsize=64)
def _expected(decay: float) -> np.ndarray:
    x: dict[str, Any] = {name: tensor.double() for name, tensor in inputs(decay).items()}
    return fused_recurrent_rwkv6(**x).o[0, :, -1].numpy()


@functools.lru_cache(maxsize=256)
def _interpreted(decay: float, text: str, digits: bool = False) -> tuple[np.ndarray, Trace]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.py").write_text(text, encoding="utf-8")
        answer = _PROCESS.ask({"folder": folder, "decay": decay, "digits": digits})
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return np.array(answer["o"], dtype=np.float32), Trace.from_dict(answer["trace"])


class _Process:
    """A process with Triton's interpreter that starts at the first request and answers one request after another."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def ask(self, request: Mapping) -> dict:
        if self._process is None or self._process.poll() is not None:
            env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
            command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
            self._process = subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe)
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None  # pipes
        try:
            to.write(json.dumps(request) + "\n")
            to.flush()
            answer = back.readline()
        except BaseException:  # interrupted: its answer is no longer needed
            self.stop()
            raise
        if not answer:
            self.stop()
            raise RuntimeError("the process that runs the kernel ended; run the cell again")
        return json.loads(answer)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_PROCESS = _Process()


def main() -> None:
    """Answer requests from standard input, a line of JSON each, until the input ends; `_Process` starts this."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a kernel may print, which is no answer
    for line in sys.stdin:
        request = json.loads(line)
        path = Path(request["folder"]) / "kernel.py"
        try:
            o, trace = _launch(path, request["decay"], request["digits"])
            answer = {"o": np.asarray(o, np.float64).tolist(), "trace": trace.to_dict()}
        except Exception as error:
            answer = {"error": _failure(error, path)}
        text = json.dumps(answer).replace(json.dumps(str(path)), json.dumps(path.name))  # the folder is temporary
        answers.write(text + "\n")
        answers.flush()


def _launch(path: Path, decay: float, digits: bool) -> tuple[Tensor, Trace]:
    from .trace import trace

    kernel = runpy.run_path(str(path))["chunk_kernel"]
    x = inputs(decay)
    _, T, H, K = x["r"].shape
    V = x["v"].shape[-1]
    o = torch.full_like(x["v"], math.nan)
    with trace(digits=digits) as result:
        kernel[(H,)](*x.values(), o, K**-0.5, T, H=H, K=K, V=V, C=CHUNK)
    return o[0, :, -1], result


def _failure(error: BaseException, path: Path) -> str:
    """Return an error as text, with the line of the file at which it occurred."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = f"{type(error).__name__}: {error}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
    if not frames:
        return words
    return f"{path.name}:{frames[-1].lineno}  {frames[-1].line}\n{words}"


_COLUMNS = ("way", "decay", "products", "digits", "tile_onset", "output_onset", "error", "o", "trace")


@functools.lru_cache(maxsize=1)
def _recording() -> Recording:
    return read(RECORDING, needs=_COLUMNS)


def _recorded(
    decay: float, way: str, *, digits: bool = False, products: str = "ieee", with_output: bool = True
) -> tuple[Mapping, Trace]:
    rows = _recording().select(way=way, products=products)
    rows = [row for row in rows if (row["o"] or not with_output) and (row["digits"] or not digits)]
    match = next((row for row in rows if row["decay"] == decay), None)
    if match is None:
        decays = ", ".join(number(row["decay"]) for row in rows) or "none"
        what = f"of {way!r}{f', products in {products},' if digits else ''} were recorded {decays}"
        raise ValueError(f"decay: there is no Triton here, and {what}; got {number(decay)}")
    return match, Trace.from_dict(json.loads(match["trace"]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # interrupting a notebook reaches this process, too
        main()
