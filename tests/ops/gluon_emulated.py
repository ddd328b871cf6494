"""Run Gluon and Triton kernels on CPU tensors: the kernels' own Python functions, with PyTorch behind the language.

`launch` calls a kernel's function once for each program, in order, with the names of Triton and Gluon in its globals
replaced: helper functions (`gluon.jit` as well as `triton.jit`) by emulated ones, the language by the operations of
`Program`. A value is a `Tile`, with Triton's types: int32 wraps around, integer division truncates, maxima ignore NaN.
A pointer is a tile of addresses; each argument has an address range of its own, far from all others.

What a GPU leaves undefined is NaN here (integers: -1): shared memory before its first store, elements that a mask
leaves out, and the destination of an asynchronous copy until `wait_group` has waited for it. An error ends the launch
at an access outside a tensor, at a store to the destination of a copy in flight, and where a program leaves copies
behind. All of a program's threads act at once, so races between them and wrong layouts do not show.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from types import CodeType, FunctionType, ModuleType
from unittest.mock import patch

import torch
from torch import Tensor
from triton import language as tl
from triton.runtime.jit import JITFunction, KernelInterface

_TORCH = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int16: torch.int16, tl.int32: torch.int32,
    tl.int64: torch.int64, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    tl.float64: torch.float64,
}  # fmt: skip
_TRITON = {torch_dtype: dtype for dtype, torch_dtype in _TORCH.items()}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RANGE = 40
"""The logarithm of the bytes between one argument's address and the next one's."""

_ASSEMBLY = {
    "": lambda x: x,
    "sub.rn.f32 $0, $1, $2;": torch.sub,
    "prmt.b32 $0, $1, $2, 0x7632;": lambda x: (x >> 16).to(torch.int16).view(torch.bfloat16),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": Tensor.bfloat16,
    "cvt.rn.f16x2.f32 $0, $2, $1;": Tensor.half,
    "max.NaN.bf16x2 $0, $1, $2;": torch.maximum,
    "and.b32 $0, $1, $2;": lambda mask, x: (mask & x.view(torch.int16)).view(torch.bfloat16),
}
"""What the inline assembly of kernels computes, element by element."""


class Tile:
    """A value of a kernel: a scalar or a block. `element`: of pointers, the torch dtype of what they point to."""

    def __init__(self, value: Tensor, element: torch.dtype | None = None):
        self.value, self.element = value, element

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self):
        return _TRITON[self.value.dtype] if self.element is None else tl.pointer_type(_TRITON[self.element])

    def to(self, dtype, fp_downcast_rounding=None, bitcast: bool = False) -> "Tile":
        if dtype.is_ptr():
            return Tile(self.value, _TORCH[dtype.element_ty])
        if bitcast:
            return Tile(self.value.view(_TORCH[dtype]))
        if dtype == tl.uint32:  # which PyTorch does not compare
            return Tile(self.value.long() & 0xFFFFFFFF)
        return Tile(self.value.to(_TORCH[dtype]))

    def __getitem__(self, index) -> "Tile":
        return Tile(self.value[index], self.element)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __neg__(self) -> "Tile":
        return Tile(-self.value)

    def __invert__(self) -> "Tile":
        return Tile(~self.value)

    def __repr__(self) -> str:
        return f"Tile({self.value}, {self.dtype})"


def _promoted(*operands) -> list[Tensor]:
    """Return operands with their common dtype. A Python number takes that of the tiles, or float32 beside integers."""
    tiles = [x.value.dtype for x in operands if isinstance(x, Tile)]
    numbers = [x for x in operands if not isinstance(x, Tile)]
    dtype = reduce(torch.promote_types, tiles) if tiles else torch.bool
    if not dtype.is_floating_point and any(isinstance(x, float) for x in numbers):
        dtype = torch.float32
    elif dtype == torch.bool and any(type(x) is int for x in numbers):
        dtype = torch.int32
    return [x.value.to(dtype) if isinstance(x, Tile) else torch.tensor(x, dtype=dtype) for x in operands]


def _binary(function: Callable, x, y) -> Tile:
    for pointer, offset in ((x, y), (y, x)):
        if isinstance(pointer, Tile) and pointer.element is not None:
            (offset,) = _promoted(offset)
            return Tile(function(pointer.value, offset.long() * pointer.element.itemsize), pointer.element)
    return Tile(function(*_promoted(x, y)))


_OPERATORS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide,
    "floordiv": partial(torch.div, rounding_mode="trunc"), "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
for _name, _function in _OPERATORS.items():
    setattr(Tile, f"__{_name}__", lambda x, y, function=_function: _binary(function, x, y))
    setattr(Tile, f"__r{_name}__", lambda y, x, function=_function: _binary(function, x, y))


def _address(n: int) -> int:
    """Return the address of argument n, in the middle of a range of its own."""
    return (2 * n + 1) << (_RANGE - 1)


def _undefined(shape, dtype: torch.dtype) -> Tensor:
    """Return NaNs (integers: -1)."""
    return torch.full(shape, -1, dtype=_INTEGERS[dtype.itemsize]).view(dtype)


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, memory: Tensor):
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.memory.shape)

    @property
    def dtype(self):
        return _TRITON[self.memory.dtype]

    def load(self, layout) -> Tile:
        return Tile(self.memory.clone())

    def store(self, value: Tile) -> None:
        if (value.shape, value.value.dtype) != (self.shape, self.memory.dtype):
            raise TypeError(f"expected {self.shape} {self.dtype}, got {value.shape} {value.dtype}")
        self.memory.copy_(value.value)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.memory.narrow(dim, start, length))

    def index(self, index) -> "Shared":
        return Shared(self.memory[int(index)])

    def permute(self, order) -> "Shared":
        return Shared(self.memory.permute(*order))

    def reshape(self, shape) -> "Shared":
        return Shared(self.memory.view(*shape))

    @property
    def bits(self) -> Tensor:
        return self.memory.view(_INTEGERS[self.memory.dtype.itemsize])


class _Namespace:
    """A module of Triton or Gluon with its operations emulated."""

    def __init__(self, module: ModuleType, program: "Program"):
        self._module, self._program = module, program

    def __getattr__(self, name: str):
        return self._program.emulated(getattr(self._module, name), name)


class Program:
    """The programs of one launch, one at a time, and the operations of the language, under their names there."""

    def __init__(self, grid: tuple[int, ...]):
        self.grid, self.ids = grid, grid
        self._memory: list[tuple[str, Tensor]] = []
        self._functions: dict[KernelInterface, FunctionType] = {}
        self._issued: list[tuple[Shared, Tensor]] = []
        self._groups: list[list[tuple[Shared, Tensor]]] = []

    def argument(self, name: str, x):
        """Return what a kernel gets for an argument of its launch."""
        if x is None or isinstance(x, bool):
            return x
        if not isinstance(x, Tensor):
            return Tile(torch.tensor(x, dtype=torch.int32 if isinstance(x, int) else torch.float32))
        if not x.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, got strides {x.stride()} of shape {list(x.shape)}")
        self._memory.append((name, x.detach().view(-1)))
        return Tile(torch.tensor(_address(len(self._memory) - 1)), x.dtype)

    def emulated(self, x, name: str):
        """Return what stands in a kernel's globals under a name, or its emulation."""
        if isinstance(x, tl.constexpr):
            return x.value
        if isinstance(x, ModuleType):
            return _Namespace(x, self) if x.__name__.startswith(("triton.", "flakit.")) else x
        if isinstance(x, KernelInterface):
            is_operation = x.fn.__module__.startswith("triton.") and hasattr(self, name)
            return getattr(self, name) if is_operation else partial(self.call, x)
        if getattr(x, "__triton_builtin__", False) or any(x is y for y in (tl.range, tl.static_range, tl.constexpr)):
            return getattr(self, name, partial(self._unknown, name))
        return x

    def call(self, kernel: KernelInterface, *args, **options):
        """Call a kernel's function, or a helper's, with its globals emulated."""
        if kernel not in self._functions:
            code, names = kernel.fn.__code__, kernel.fn.__globals__
            codes = (code, *(x for x in code.co_consts if isinstance(x, CodeType)))  # with its comprehensions
            used = {name for x in codes for name in x.co_names if name in names}
            known = {name: self.emulated(names[name], name) for name in used}
            known = {"range": self.range, "__builtins__": __builtins__} | known
            self._functions[kernel] = FunctionType(code, known, code.co_name, kernel.fn.__defaults__)
        return self._functions[kernel](*args, **options)

    def _unknown(self, name: str, *args, **options):
        raise NotImplementedError(f"the emulator has no {name}")

    def end(self) -> None:
        """End a program."""
        if self._issued or self._groups:
            raise RuntimeError(f"program {self.ids} ends with asynchronous copies in flight")

    # Indices, constants, types.

    def program_id(self, axis: int) -> Tile:
        return Tile(torch.tensor(self.ids[axis], dtype=torch.int32))

    def num_programs(self, axis: int) -> Tile:
        return Tile(torch.tensor(self.grid[axis], dtype=torch.int32))

    def range(self, *bounds, **hints):
        return (Tile(torch.tensor(n, dtype=torch.int32)) for n in range(*map(int, bounds)))

    def static_range(self, *bounds):
        return range(*bounds)

    def constexpr(self, x):
        return x

    def static_assert(self, holds: bool, message: str = "") -> None:
        assert holds, message

    def arange(self, start: int, end: int, layout=None) -> Tile:
        return Tile(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape, value, dtype, layout=None) -> Tile:
        (value,) = _promoted(value)
        return Tile(value.to(_TORCH[dtype]).expand(*shape))

    def zeros(self, shape, dtype, layout=None) -> Tile:
        return self.full(shape, 0, dtype)

    def zeros_like(self, x: Tile) -> Tile:
        return Tile(torch.zeros_like(x.value))

    def to_tensor(self, x) -> Tile:
        return Tile(*_promoted(x))

    def multiple_of(self, x: Tile, values) -> Tile:
        return x

    max_contiguous = multiple_of

    def cast(self, x, dtype, fp_downcast_rounding=None, bitcast: bool = False) -> Tile:
        return self.to_tensor(x).to(dtype, bitcast=bitcast)

    # Element by element.

    def where(self, condition, x, y) -> Tile:
        (condition,) = _promoted(condition)
        element = x.element if isinstance(x, Tile) else None
        return Tile(torch.where(condition, *_promoted(x, y)), element)

    def maximum(self, x, y) -> Tile:
        return Tile(torch.fmax(*_promoted(x, y)))

    def minimum(self, x, y) -> Tile:
        return Tile(torch.fmin(*_promoted(x, y)))

    def abs(self, x: Tile) -> Tile:
        return Tile(x.value.abs())

    def exp2(self, x: Tile) -> Tile:
        return Tile(x.value.exp2())

    def exp(self, x: Tile) -> Tile:
        return Tile(x.value.exp())

    def inline_asm_elementwise(self, asm: str, constraints, args, dtype, is_pure: bool, pack: int) -> Tile:
        if "prefetch.global.L2" in asm:
            return args[-1] * 0
        if asm not in _ASSEMBLY:
            raise NotImplementedError(f"the emulator does not know the assembly {asm!r}")
        value = _ASSEMBLY[asm](*(x.value for x in args))
        assert value.dtype == _TORCH[dtype]
        return Tile(value)

    # Shapes. Layouts place elements in threads and change no value.

    def reshape(self, x: Tile, *shape) -> Tile:
        return Tile(x.value.reshape(*shape), x.element)

    def permute(self, x: Tile, *order) -> Tile:
        return Tile(x.value.permute(*order), x.element)

    def trans(self, x: Tile, *order) -> Tile:
        return self.permute(x, order or (1, 0))

    def expand_dims(self, x: Tile, axis: int) -> Tile:
        return Tile(x.value.unsqueeze(axis), x.element)

    def broadcast_to(self, x: Tile, *shape) -> Tile:
        return Tile(x.value.broadcast_to(*shape), x.element)

    def join(self, x: Tile, y: Tile) -> Tile:
        return Tile(torch.stack(_promoted(x, y), -1))

    def split(self, x: Tile) -> tuple[Tile, Tile]:
        left, right = x.value.unbind(-1)
        return Tile(left), Tile(right)

    def convert_layout(self, x: Tile, layout, assert_trivial: bool = False) -> Tile:
        return x

    # Sums, maxima, products.

    def sum(self, x: Tile, axis: int | None = None, keep_dims: bool = False) -> Tile:
        dtype = x.value.dtype if x.value.is_floating_point() else torch.int32
        return Tile(x.value.sum(_axes(x, axis), keep_dims, dtype=dtype))

    def cumsum(self, x: Tile, axis: int) -> Tile:
        return Tile(x.value.cumsum(axis, dtype=x.value.dtype))

    def max(self, x: Tile, axis: int | None = None, keep_dims: bool = False) -> Tile:
        return _extreme(torch.amax, -torch.inf, x, _axes(x, axis), keep_dims)

    def min(self, x: Tile, axis: int | None = None, keep_dims: bool = False) -> Tile:
        return _extreme(torch.amin, torch.inf, x, _axes(x, axis), keep_dims)

    def mma_v2(self, a: Tile, b: Tile, acc: Tile) -> Tile:
        types = a.value.dtype, b.value.dtype, acc.value.dtype
        if types[0] != types[1] or types[0].itemsize != 2 or types[2] != torch.float32:
            raise TypeError(f"mma_v2 of {a.dtype} and {b.dtype}, added to {acc.dtype}")
        if acc.shape != (*a.shape[:-1], b.shape[-1]):
            raise TypeError(f"mma_v2 of {a.shape} and {b.shape}, added to {acc.shape}")
        return Tile(acc.value + a.value.float() @ b.value.float())

    def dot(self, a: Tile, b: Tile, acc: Tile | None = None, **options) -> Tile:
        return self.mma_v2(a, b, self.zeros((*a.shape[:-1], b.shape[-1]), tl.float32) if acc is None else acc)

    # Memory.

    def _accesses(self, pointer: Tile, mask) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each tensor of an access its elements, where in the tile it is accessed, and the indices there."""
        p, itemsize = pointer.value, pointer.element.itemsize
        mask = _promoted(True if mask is None else mask)[0].broadcast_to(p.shape)
        for n in (p[mask] >> _RANGE).unique().tolist():
            here = mask & (p >> _RANGE == n)
            name, memory = self._memory[n]
            memory, index = memory.view(pointer.element), p[here] - _address(n)
            first, last = int(index.min()), int(index.max())
            if first < 0 or last >= len(memory) * itemsize or (index % itemsize).any():
                raise IndexError(
                    f"program {self.ids} accesses elements {first / itemsize:g} to {last / itemsize:g} of {name}, "
                    f"which has {len(memory)}"
                )
            yield memory, here, index // itemsize

    def load(self, pointer: Tile, mask=None, other=None, **hints) -> Tile:
        loaded = _undefined(pointer.shape, pointer.element)
        if other is not None:
            loaded[...] = _promoted(other)[0].to(pointer.element)
        for memory, here, index in self._accesses(pointer, mask):
            loaded[here] = memory[index]
        return Tile(loaded)

    def store(self, pointer: Tile, value, mask=None, **hints) -> None:
        value = _promoted(value)[0].to(pointer.element).broadcast_to(pointer.shape)
        for memory, here, index in self._accesses(pointer, mask):
            memory[index] = value[here]

    def atomic_add(self, pointer: Tile, value, mask=None, **hints) -> Tile:
        before = self.load(pointer, mask)
        self.store(pointer, before + value, mask)
        return before

    def allocate_shared_memory(self, dtype, shape, layout, value: Tile | None = None) -> Shared:
        shared = Shared(_undefined(shape, _TORCH[dtype]))
        if value is not None:
            shared.store(value)
        return shared

    def async_copy_global_to_shared(self, shared: Shared, pointer: Tile, mask=None, **hints) -> None:
        if (shared.shape, shared.memory.dtype) != (pointer.shape, pointer.element):
            raise TypeError(f"expected {shared.shape} {shared.dtype}, got {pointer.shape} {pointer.dtype}")
        self._issued.append((shared, self.load(pointer, mask, 0).value))
        shared.bits.fill_(-1)

    def commit_group(self) -> None:
        self._groups.append(self._issued)
        self._issued = []

    def wait_group(self, num_outstanding: int = 0) -> None:
        while len(self._groups) > num_outstanding:
            for shared, value in self._groups.pop(0):
                if (shared.bits != -1).any():
                    raise RuntimeError(f"program {self.ids} writes to shared memory that a copy in flight fills")
                shared.memory.copy_(value)

    def barrier(self, **options) -> None:
        pass

    thread_barrier = debug_barrier = barrier


def _axes(x: Tile, axis: int | None) -> tuple[int, ...]:
    return tuple(range(len(x.shape))) if axis is None else (axis,)


def _extreme(function: Callable, neutral: float, x: Tile, axes: tuple[int, ...], keep_dims: bool) -> Tile:
    """Return the maxima or minima along axes, NaN only where all elements are."""
    if not x.value.is_floating_point():
        return Tile(function(x.value, axes, keep_dims))
    nan = x.value.isnan()
    return Tile(function(x.value.where(~nan, neutral), axes, keep_dims).where(~nan.all(axes, keep_dims), torch.nan))


@contextmanager
def emulated() -> Iterator[None]:
    """Emulate every launch of a Triton or Gluon kernel within, also by `kernel_triton.Kernel`."""

    def run(kernel, *args, grid, warmup, **options):
        launch(kernel, grid, *args, **options)

    with patch.object(JITFunction, "run", run):
        yield


def launch(kernel: KernelInterface, grid: tuple[int, ...], *args, **options) -> None:
    """Run a kernel's programs, one after the other. Options that its function does not take, num_warps and the like,
    have no effect."""
    program, signature = Program((*grid, 1, 1)[:3]), inspect.signature(kernel.fn)
    options = {name: x for name, x in options.items() if name in signature.parameters}
    arguments = signature.bind(*args, **options).arguments
    for name, x in arguments.items():
        if "constexpr" not in str(signature.parameters[name].annotation):
            arguments[name] = program.argument(name, x)
    for ids in itertools.product(*map(range, reversed(program.grid))):
        program.ids = ids[::-1]
        program.call(kernel, **arguments)
        program.end()
