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

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from flakit.bench.launches import Launch, watched
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
    """A GPU of this compute capability is the one in use. name: apart from others; what was compiled for a device,
    Triton keeps by it."""
    here = driver._active
    driver.set_active(_AbsentDevice(capability, name or capability))
    try:
        yield
    finally:
        driver._active = here


def launches(code: Callable[[], object]) -> list[Launch]:
    """What `code` launches, on CPU tensors; nothing is computed."""
    with watched(run=False) as found:
        code()
    return found


BLOCKS = "C", "BK", "BV", "BM", "BD", "BE"
"""Sides of the tiles that a program holds."""


def described(launch: Launch) -> dict:
    """What makes other code of a kernel: its row, its switches and blocks, and what its arguments are."""
    options = {n: x for n, x in launch.options.items() if isinstance(x, (bool, str)) or n in BLOCKS}
    kinds = {n: _kind(x) for n, x in enumerate(launch.args)}
    return {"row": launch.row, **options, **kinds}


def _kind(x: object) -> str:
    if isinstance(x, Tensor):
        return str(x.dtype)
    return "1" if x == 1 else type(x).__name__  # of a 1 Triton makes a constant


def tile(launch: Launch) -> int:
    """Numbers in a program's block of a chunk, which is what time to compile and shared memory grow with."""
    return math.prod(launch.options.get(name) or 1 for name in BLOCKS)


@dataclass(frozen=True)
class Compiled:
    """What the machine code of a kernel needs, and which code it is."""

    registers: int
    spilled: int  # bytes a thread keeps in local memory
    shared: int  # bytes a block
    twice: float  # the part of its tiles' numbers that it computes once more, spread over the threads in another way
    instructions: str  # a hash of its PTX, but for the target's name and where each line came from


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile one launch to machine code for a compute capability (80: A100, 90: H100 and H200)."""
    compiled = compiled_for(launch, capability)
    registers, stack = _usage(compiled.asm["cubin"])
    instructions = re.sub(rf"(\.target sm_){capability}\b", r"\1", ptx(compiled))
    said = hashlib.sha256(instructions.encode()).hexdigest()[:16]
    return Compiled(registers, stack, compiled.metadata.shared, computed_twice(compiled.asm["ttgir"]), said)


def ptx(compiled: CompiledKernel) -> str:
    """Its PTX without the files and lines that it came from: Triton's cache may have them from another folder."""
    code = compiled.asm["ptx"].partition(".section")[0]
    return re.sub(r"^\s*\.(file|loc)\b.*\n", "", code, flags=re.MULTILINE)


COMPUTED = re.compile(
    r"= (?P<what>(?:arith|math)\.(?!constant)\w+) .*?tensor<(?P<sizes>[\dx]+)x(?:bf16|f16|f32), (?P<spread>#.*?)>"
    r"(?: to tensor<.*>)? loc\((?P<where>#loc\d*)\)$",
    re.MULTILINE,
)


def computed_twice(ttgir: str) -> float:
    """The part of its tiles' numbers that a kernel computes a second time, by Triton's last text that still has tiles.

    Two tensors that meet have to be spread over the threads alike. Where they are not, Triton moves one of them, or
    computes it anew as the other is spread, with all that it was made of: a state that is carried through a loop, too,
    and then the whole loop runs twice. In the text, what one line of code computes stands there once for each spread.
    """
    spreads = defaultdict(Counter)
    for found in COMPUTED.finditer(ttgir):
        numbers = math.prod(map(int, found["sizes"].split("x")))
        spreads[found["what"], found["sizes"], found["where"]][found["spread"]] += numbers
    every = sum(each.total() for each in spreads.values())
    once = sum(max(each.values()) for each in spreads.values())
    return round(1 - once / every, 3) if every else 0.0


SHIFT = re.compile(r"(?P<name>%[\w.]+) = shl nuw (?:nsw )?<\d+ x i32> [^,]+, <(?P<by>[^>]*)>")
FAR = 25
"""Bits, beyond which the number of a thread falls out of 32."""


def shifted_out(llir: str) -> str | None:
    """LLVM's vector of two shifts of a thread's number, one so far that bits fall out, and yet said not to: that
    promise belongs to the other one. What is made of it has the fallen bits in the other's place, and so looks at
    wrong addresses (Triton 3.6 and 3.7; three settings on an H200 ended so, data/tuning.md). Where nothing takes the
    one that is shifted far, all is well. Returns the line, or None."""
    for function in llir.split("\ndefine "):
        for found in SHIFT.finditer(function):
            by = [int(x.rpartition(" ")[2]) if x[-1].isdigit() else 0 for x in found["by"].split(", ")]
            far = {lane for lane, bits in enumerate(by) if bits >= FAR}
            if far and any(_takes(line, found["name"], far, len(by)) for line in function.splitlines()):
                return found[0]
    return None


def _takes(line: str, name: str, lanes: set[int], width: int) -> bool:
    """Whether a line of LLVM's code makes something of certain lanes of a vector."""
    _, _, right = line.partition(" = ")
    if not re.search(rf"{re.escape(name)}(?![\w.])", right or line):
        return False
    if picked := re.match(r"extractelement <.*?> \S+, i\d+ (\d+)", right):
        return int(picked[1]) in lanes
    if picked := re.match(r"shufflevector <.*?> (\S+), <.*?> (\S+), <\d+ x i32> (?:<(.*?)>|zeroinitializer)", right):
        of = [int(x.rpartition(" ")[2]) for x in picked[3].split(", ") if x[-1].isdigit()] if picked[3] else [0]
        sides = picked[1], picked[2]
        return any(sides[n // width] == name and n % width in lanes for n in of)
    return True


def compiled_for(launch: Launch, capability: int) -> CompiledKernel:
    with absent_gpu(capability):
        compiled = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    wrong = shifted_out(compiled.asm.get("llir", ""))
    assert wrong is None, f"{launch.name}: compiled wrongly for sm_{capability}: {wrong}"
    return compiled


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes in local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return registers, stack


@dataclass(frozen=True)
class Configuration:
    """One way to call an operator's kernels, of those in a module, forward and backward."""

    module: ModuleType
    dtype: torch.dtype
    K: int
    V: int
    T: int = 100
    H: int = 2
    wide: torch.dtype | None = None  # of the inputs that may be float32 beside 16 bits
    chunk_size: int = 0  # 0: the default
    packed: bool = False
    states: bool = False
    only: str = ""  # in the names of the kernels to compile; default all

    def zeros(self) -> tuple[tuple[Tensor, ...], Tensor | tuple[Tensor, ...], Tensor]:
        """The operator's tensors, its state, and the gradient arriving at o."""
        raise NotImplementedError

    def run(self) -> None:
        """Call forward and backward."""
        tensors, state, do = self.zeros()
        packing = Packing(self.cu_seqlens, self.T) if self.packed else None
        given, rest = (*tensors, 0.5, state if self.states else None), (packing, self.chunk_size)
        _, _, kept = self.module.forward(*given, self.states, *rest, True)
        self.module.backward(*given, *rest, kept, do, state if self.states else None)

    @property
    def most_spilled(self) -> float:
        """Bytes that a thread may keep in local memory."""
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

    def kernels(self) -> list[Launch]:
        """What it launches; the same kernel with the same switches once."""
        found = (x for x in launches(self.run) if x.row and (self.only in x.name or x.row[0] == "scan"))
        return list({launch.name: launch for launch in found}.values())
