"""Compile kernels for GPUs that are not here, exactly as their own launch code would, and read what they need.

Triton asks its driver which device is active and compiles for that. A driver that names another chip, and a launch that
stops after compiling, leave everything else as it is: the launch table, specialisation of arguments, options.
"""

import hashlib
import math
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from flakit.bench.launches import Launch, watched
from flakit.ops.common import bands_triton
from flakit.ops.common.kernel_triton import Memory
from flakit.ops.common.launch import SHARED_MEMORY, Chip
from flakit.ops.common.packed_triton import Packing


def target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


class _AbsentDevice:
    def __init__(self, capability: int, name: Hashable):
        self.capability, self.name = capability, name

    def get_current_device(self) -> Hashable:
        return self.name

    def get_current_stream(self, device: Hashable) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return target(self.capability)


@contextmanager
def absent_gpu(capability: int, name: Hashable = None) -> Iterator[None]:
    """Make a GPU of this compute capability the active device. name: the key under which Triton caches what it compiles
    for the device; default: the capability."""
    active = driver._active
    driver.set_active(_AbsentDevice(capability, name or capability))
    try:
        yield
    finally:
        driver._active = active


def launches(code: Callable[[], object]) -> list[Launch]:
    """Return the launches of `code`, on CPU tensors, without running them."""
    with watched(run=False) as recorded:
        code()
    return recorded


BLOCKS = "C", "BK", "BV", "BM", "BD", "BE"
"""Options that are sides of a program's tiles."""


def described(launch: Launch) -> dict:
    """Return what a kernel's code depends on: its row, switches, block sizes, and the types of its arguments."""
    options = {n: x for n, x in launch.options.items() if isinstance(x, (bool, str)) or n in BLOCKS}
    kinds = {n: _kind(x) for n, x in enumerate(launch.args)}
    return {"row": launch.row, **options, **kinds}


def _kind(x: object) -> str:
    if isinstance(x, Tensor):
        return str(x.dtype)
    return "1" if x == 1 else type(x).__name__  # Triton makes a constant of a 1


def tile(launch: Launch) -> int:
    """Return the elements of a program's tile of a chunk: compile time and shared memory grow with it."""
    return math.prod(launch.options.get(name) or 1 for name in BLOCKS)


@dataclass(frozen=True)
class Compiled:
    """The resources of a kernel's machine code, and a hash of the code."""

    registers: int
    spilled: int  # bytes of local memory a thread
    shared: int  # bytes a block
    twice: float  # the fraction of tile elements that are computed a second time, in another layout
    instructions: str  # a hash of the PTX without the target's name and source locations


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile one launch to machine code for a compute capability (80: A100, 90: H100 and H200)."""
    compiled = compiled_for(launch, capability)
    registers, stack = _usage(compiled.asm["cubin"])
    instructions = re.sub(rf"(\.target sm_){capability}\b", r"\1", ptx(compiled))
    digest = hashlib.sha256(instructions.encode()).hexdigest()[:16]
    return Compiled(registers, stack, compiled.metadata.shared, computed_twice(compiled.asm["ttgir"]), digest)


def ptx(compiled: CompiledKernel) -> str:
    """Return a kernel's PTX without files and lines: those in Triton's cache may be of another folder."""
    code = compiled.asm["ptx"].partition(".section")[0]
    return re.sub(r"^\s*\.(file|loc)\b.*\n", "", code, flags=re.MULTILINE)


COMPUTED = re.compile(
    r"= (?P<what>(?:arith|math)\.(?!constant)\w+) .*?tensor<(?P<sizes>[\dx]+)x(?:bf16|f16|f32), (?P<layout>#.*?)>"
    r"(?: to tensor<.*>)? loc\((?P<where>#loc\d*)\)$",
    re.MULTILINE,
)


def computed_twice(ttgir: str) -> float:
    """Return the fraction of tile elements that a kernel computes a second time, from its TTGIR.

    Operands of one operation need the same layout. Where they differ, Triton converts one of them, or recomputes it in
    the other's layout with everything that it depends on: a state carried through a loop too, so that the whole loop
    runs twice. In the TTGIR an operation of one source location then occurs once for each layout.
    """
    layouts = defaultdict(Counter)
    for match in COMPUTED.finditer(ttgir):
        elements = math.prod(map(int, match["sizes"].split("x")))
        layouts[match["what"], match["sizes"], match["where"]][match["layout"]] += elements
    total = sum(counts.total() for counts in layouts.values())
    once = sum(max(counts.values()) for counts in layouts.values())
    return round(1 - once / total, 3) if total else 0.0


SHIFT = re.compile(r"(?P<name>%[\w.]+) = shl nuw (?:nsw )?<\d+ x i32> [^,]+, <(?P<by>[^>]*)>")
FAR = 25
"""Bits of a shift beyond which bits of a thread's index are lost from 32."""


def shifted_out(llir: str) -> str | None:
    """Return the line of a miscompiled vector of shifts, or None.

    LLVM joins two shifts of a thread's index in a vector. One loses bits, yet both are marked `nuw`, which holds for
    the other alone; the lost bits then reach the other lane, and addresses are wrong (Triton 3.6 and 3.7; three
    settings failed so on an H200, data/tuning.md). It is harmless where no code uses the lane that is shifted far.
    """
    for function in llir.split("\ndefine "):
        for match in SHIFT.finditer(function):
            by = [int(x.rpartition(" ")[2]) if x[-1].isdigit() else 0 for x in match["by"].split(", ")]
            far = {lane for lane, bits in enumerate(by) if bits >= FAR}
            if far and any(_uses(line, match["name"], far, len(by)) for line in function.splitlines()):
                return match[0]
    return None


def _uses(line: str, name: str, lanes: set[int], width: int) -> bool:
    """Return whether a line of LLVM IR uses certain lanes of a vector."""
    _, _, right = line.partition(" = ")
    if not re.search(rf"{re.escape(name)}(?![\w.])", right or line):
        return False
    if match := re.match(r"extractelement <.*?> \S+, i\d+ (\d+)", right):
        return int(match[1]) in lanes
    if match := re.match(r"shufflevector <.*?> (\S+), <.*?> (\S+), <\d+ x i32> (?:<(.*?)>|zeroinitializer)", right):
        chosen = [int(x.rpartition(" ")[2]) for x in match[3].split(", ") if x[-1].isdigit()] if match[3] else [0]
        vectors = match[1], match[2]
        return any(vectors[n // width] == name and n % width in lanes for n in chosen)
    return True


def compiled_for(launch: Launch, capability: int) -> CompiledKernel:
    with absent_gpu(capability):
        compiled = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    miscompiled = shifted_out(compiled.asm.get("llir", ""))
    assert miscompiled is None, f"{launch.name}: compiled wrongly for sm_{capability}: {miscompiled}"
    return compiled


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory, a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return registers, stack


@dataclass(frozen=True)
class Configuration:
    """A call of the kernels in one of an operator's modules, forward and, with `gradients`, backward."""

    module: ModuleType
    dtype: torch.dtype
    K: int
    V: int
    T: int = 100
    H: int = 2
    wide: torch.dtype | None = None  # dtype of the inputs that may be float32 beside 16 bits
    chunk_size: int = 0  # 0: the default
    packed: bool = False
    states: bool = False
    only: str = ""  # part of the names of the kernels to compile; default all
    hopper: bool = False  # as on a Hopper GPU, which runs kernels in Gluon
    gradients: bool = True

    def zeros(self) -> tuple[tuple[Tensor, ...], Tensor | tuple[Tensor, ...], Tensor]:
        """Return the operator's tensors, its state, and the gradient of o."""
        raise NotImplementedError

    def run(self, capability: int) -> None:
        """Call forward, and backward if there are gradients, as on a chip."""
        tensors, state, do = self.zeros()
        packing = Packing(self.cu_seqlens, self.T) if self.packed else None
        args, rest = (Memory(), *tensors, 0.5, state if self.states else None), (packing, self.chunk_size)
        here = mock.patch.object(bands_triton, "runs_gluon", lambda *tensors: self.hopper)
        chip = Chip("absent", capability, SHARED_MEMORY[capability])
        there = mock.patch.object(self.module, "chip_of", lambda x: chip, create=True)
        with here, there, mock.patch.object(self.module, "FEWEST", 0, create=True):
            _, _, saved = self.module.forward(*args, self.states, *rest, self.gradients)
            if self.gradients:
                self.module.backward(*args, *rest, saved, do, state if self.states else None)

    @property
    def most_spilled(self) -> float:
        """Bytes of local memory that a thread may use."""
        raise NotImplementedError

    @property
    def B(self) -> int:
        return 1 if self.packed or self.T == 1 else 2

    @property
    def N(self) -> int:
        return 3 if self.packed else self.B

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, 7, 7, self.T], dtype=torch.int32) if self.packed else None

    def kernels(self, capability: int = 90) -> list[Launch]:
        """Return its launches on a chip, one for each kernel with the same switches."""
        selected = (
            x for x in launches(lambda: self.run(capability)) if x.row and (self.only in x.name or x.row[0] == "scan")
        )
        return list({launch.name: launch for launch in selected}.values())
