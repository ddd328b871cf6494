"""The emulator of Gluon kernels: its operations against PyTorch's and numpy's, and the faults that it reports."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flakit.ops.common.dispatch import interpreted
from flakit.ops.common.kernel_triton import Kernel
from tests.ops.gluon_emulated import emulated, launch

pytestmark = pytest.mark.skipif(interpreted(), reason="the emulator runs kernels that are not interpreted")

N = tl.constexpr(16)
LINE = tl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SHARED = tl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@triton.jit
def first_row(i, rows):
    """Return how many rows the blocks before block i have. A helper in Triton."""
    first = i * 0
    for n in range(0, i):
        first += tl.load(rows + n)
    return first


@gluon.jit
def halves(x):
    return gl.split(gl.permute(gl.reshape(x, (N, 2, N // 2)), (0, 2, 1)))


@gluon.jit
def product_kernel(x, y, product, difference, largest, rows, scale, COLUMNS: gl.constexpr):
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    i_b = gl.program_id(0)
    i = gl.arange(0, N, gl.SliceLayout(1, M))[:, None]
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, M))[None, :]
    at = (first_row(i_b, rows) + i) * COLUMNS + j
    s_x = gl.allocate_shared_memory(gl.bfloat16, [N, COLUMNS], WIDE)
    async_copy.async_copy_global_to_shared(s_x, x + at, mask=i < gl.load(rows + i_b))
    async_copy.commit_group()
    s_y = gl.allocate_shared_memory(gl.bfloat16, [N, COLUMNS], WIDE, gl.load(y + i * COLUMNS + j))
    async_copy.wait_group(0)
    left = s_x.load(gl.DotOperandLayout(0, M, 2))
    b_xy = gl.zeros([N, N], gl.float32, M)
    b_xy = mma_v2(left, s_y.permute([1, 0]).load(gl.DotOperandLayout(1, M, 2)), b_xy) * scale
    gl.store(product + i_b * (N * N) + i * N + gl.arange(0, N, gl.SliceLayout(0, M))[None, :], b_xy)
    left, right = halves(b_xy)
    half = i * (N // 2) + gl.arange(0, N // 2, gl.SliceLayout(0, M))[None, :]
    gl.store(difference + i_b * (N * N // 2) + half, left - right)
    for n in gl.static_range(2):
        gl.store(largest + i_b * 2 + n, gl.max(gl.max(gl.where(i % 2 == n, b_xy, -float("inf")), 1), 0))


def test_products_through_shared_memory():
    rows = torch.tensor([3, 16, 1], dtype=torch.int32)
    x, y = random(20, 32, dtype=torch.bfloat16), random(16, 32, dtype=torch.bfloat16)
    product, difference, largest = torch.empty(3, 16, 16), torch.empty(3, 16, 8), torch.empty(3, 2)
    launch(product_kernel, (3,), x, y, product, difference, largest, rows, 0.5, COLUMNS=32, num_warps=4)
    blocks = [torch.cat((block, block.new_zeros(16 - len(block), 32))) for block in x.split(rows.tolist())]
    expected = torch.stack(blocks).double() @ y.double().mT / 2
    assert_close(product.double(), expected, rtol=1e-6, atol=1e-6)
    assert_close(difference, product[..., :8] - product[..., 8:], rtol=0, atol=0)
    assert_close(largest, torch.stack([product[:, n::2].amax((1, 2)) for n in range(2)], 1), rtol=0, atol=0)


@gluon.jit
def integer_kernel(x, y, out, count):
    i = gl.arange(0, N, LINE)
    a, b = gl.load(x + i), gl.load(y + i)
    results = (a * b, a // b, a % b, a >> 3, a & -65536, gl.minimum(a, b), gl.maximum(a, 5), gl.where(a < b, a, 7))
    for n in gl.static_range(8):
        gl.store(out + n * N + i, results[n])
    far = gl.program_id(0).to(gl.int64) + 2**31
    gl.store(out + 8 * N + i, ((far + i * count) >> 31).to(gl.int32))


def test_int32_wraps_around_and_divides_as_on_a_gpu():
    generator = np.random.default_rng(0)
    x = generator.integers(-(2**31), 2**31 - 1, 16, dtype=np.int32)
    y = generator.integers(1, 2**20, 16, dtype=np.int32) * generator.choice([-1, 1], 16).astype(np.int32)
    out = torch.empty(9, 16, dtype=torch.int32)
    launch(integer_kernel, (1,), torch.from_numpy(x), torch.from_numpy(y), out, 1)
    quotient = np.trunc(x / y).astype(np.int32)
    expected = [x * y, quotient, x - quotient * y, x >> 3, x & ~0xFFFF, np.minimum(x, y), np.maximum(x, 5)]
    expected += [np.where(x < y, x, 7), np.ones(16)]
    np.testing.assert_array_equal(out.numpy(), np.stack(expected))


@gluon.jit
def number_kernel(x, high, low, half, bits, extremes, product):
    i = gl.arange(0, N, LINE)
    b_x = gl.load(x + i)
    b_bits = b_x.to(gl.int32, bitcast=True)
    top = (b_bits & -65536).to(gl.float32, bitcast=True)
    rest = gl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [b_x, top], gl.float32, True, 1)
    b_high = gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [b_bits], gl.bfloat16, True, 2)
    b_low = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [rest], gl.bfloat16, True, 2)
    b_half = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [b_x], gl.float16, True, 2)
    gl.store(high + i, b_high)
    gl.store(low + i, b_low)
    gl.store(half + i, b_half)
    gl.store(bits + i, b_half.to(gl.int16, bitcast=True))
    b_x = gl.where(i == 3, float("nan"), b_x)
    gl.store(extremes, gl.max(b_x, 0))
    gl.store(extremes + 1, gl.min(b_x, 0))
    gl.store(extremes + 2, gl.max(gl.where(i >= 0, float("nan"), b_x), 0))
    gl.store(extremes + 3, gl.maximum(gl.max(b_x, 0), float("nan")))
    gl.store(extremes + 4, gl.sum(b_x, 0))
    gl.store(product + i, b_half * b_high)


def test_formats_and_nan():
    x = random(16)
    high, low, half = (torch.empty(16, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float16))
    bits, extremes, product = torch.empty(16, dtype=torch.int16), torch.empty(5), torch.empty(16)
    launch(number_kernel, (1,), x, high, low, half, bits, extremes, product)
    truncated = torch.from_numpy((x.numpy().view(np.int32) & ~0xFFFF).view(np.float32))
    assert_close(high.float(), truncated, rtol=0, atol=0)
    assert_close(low, (x - truncated).bfloat16(), rtol=0, atol=0)
    assert_close(half, x.half(), rtol=0, atol=0)
    assert_close(bits, x.half().view(torch.int16), rtol=0, atol=0)
    others = x[torch.arange(16) != 3]
    expected = torch.stack((others.max(), others.min(), torch.tensor(torch.nan), others.max(), torch.tensor(torch.nan)))
    assert_close(extremes, expected, rtol=0, atol=0, equal_nan=True)
    assert_close(product, half.float() * high.float(), rtol=0, atol=0)


@gluon.jit
def mask_kernel(x, out):
    i = gl.arange(0, N, LINE)
    mask = gl.where(i % 3 == 0, -1, 0).to(gl.int16)
    b_x = gl.load(x + i)
    b_x = gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [mask, b_x], gl.bfloat16, True, 2)
    gl.store(out + i, b_x)


def test_bits_of_a_mask():
    x, out = random(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
    x[1:3] = torch.tensor([float("nan"), float("inf")])
    launch(mask_kernel, (1,), x, out)
    assert_close(out, torch.where(torch.arange(16) % 3 == 0, x, 0), rtol=0, atol=0)


@gluon.jit
def pointer_kernel(x, y, out):
    i = gl.arange(0, N, LINE)
    from_y = y.to(gl.pointer_type(gl.int16), bitcast=True)
    p = gl.where(i % 2 == 0, x.to(gl.pointer_type(gl.int16), bitcast=True), from_y) + i
    gl.store(out + i, gl.load(p, mask=i < 12, other=-5), mask=i != 7)


def test_a_pointer_into_one_of_two_tensors():
    x, y = random(16, dtype=torch.bfloat16), random(16, dtype=torch.float16)
    out = torch.full((16,), 9, dtype=torch.int16)
    launch(pointer_kernel, (1,), x, y, out)
    i = torch.arange(16)
    expected = torch.where(i % 2 == 0, x.view(torch.int16), y.view(torch.int16))
    expected[12:], expected[7] = -5, 9
    assert_close(out, expected, rtol=0, atol=0)


@gluon.jit
def positive_kernel(x, positive):
    i = gl.program_id(0)
    if gl.load(x + i) > 0:
        gl.store(positive + 1 + gl.atomic_add(positive, 1), i)


def test_programs_append_to_a_list():
    x = torch.tensor([1, -1, 0, 2, 3], dtype=torch.int32)
    positive = torch.tensor([0, -1, -1, -1, -1, -1], dtype=torch.int32)
    launch(positive_kernel, (5,), x, positive)
    assert positive.tolist() == [3, 0, 3, 4, -1, -1]


@gluon.jit
def copy_kernel(x, out, there, GROUPS: gl.constexpr, WAITS: gl.constexpr, STORES: gl.constexpr):
    """Copy `there` elements of x to out by way of shared memory. GROUPS: of copies, of which all but WAITS wait."""
    i = gl.arange(0, N, LINE)
    shared = gl.allocate_shared_memory(gl.float32, [GROUPS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for n in gl.static_range(GROUPS):
        async_copy.async_copy_global_to_shared(shared.index(n), x + i, mask=i < there)
        async_copy.commit_group()
    if STORES:
        shared.index(0).store(gl.zeros([N], gl.float32, LINE))
    if WAITS is not None:
        async_copy.wait_group(WAITS)
    gl.store(out + i, shared.index(0).load(LINE), mask=i < there)
    async_copy.wait_group(0)


def copied(x, there, out=None, **options):
    out = torch.zeros(16) if out is None else out
    launch(copy_kernel, (1,), x, out, there, **{"GROUPS": 1, "WAITS": 0, "STORES": False} | options)
    return out


def test_a_copy_arrives_when_it_is_waited_for():
    x = random(16)
    assert_close(copied(x, 16), x, rtol=0, atol=0)
    assert_close(copied(x, 16, GROUPS=2, WAITS=1), x, rtol=0, atol=0)
    assert copied(x, 16, WAITS=None).isnan().all(), "no wait_group"
    assert copied(x, 16, GROUPS=2, WAITS=2).isnan().all(), "waits for no group"
    with pytest.raises(RuntimeError, match="copy in flight"):
        copied(x, 16, STORES=True)


def test_an_access_outside_a_tensor_is_an_error():
    both = random(32)
    x, behind = both[:14], both[14:]
    assert_close(copied(x, 14, out := torch.zeros(16))[:14], x, rtol=0, atol=0)
    assert not out[14:].any()
    with pytest.raises(IndexError, match="elements 0 to 15 of x, which has 14"):
        copied(x, 16)
    with pytest.raises(IndexError, match="elements 0 to 15 of out, which has 14"):
        copied(both, 16, x)
    with pytest.raises(IndexError, match="elements -2 to 13 of x, which has 18"):
        launch(before_kernel, (1,), behind, torch.zeros(16))


@gluon.jit
def before_kernel(x, out):
    i = gl.arange(0, N, LINE)
    gl.store(out + i, gl.load(x + i - 2))


@gluon.jit
def careless_kernel(x, out, OF: gl.constexpr):
    i = gl.arange(0, N, LINE)
    shared = gl.allocate_shared_memory(gl.float32, [N], SHARED)
    if OF == "shared memory":
        gl.store(out + i, shared.load(LINE))
    if OF == "masked":
        gl.store(out + i, gl.load(x + i, mask=i < 4))
    if OF == "exit":
        async_copy.async_copy_global_to_shared(shared, x + i)
        async_copy.commit_group()
    if OF == "type":
        shared.store(gl.load(x + i).to(gl.bfloat16))


def test_what_is_undefined_is_nan():
    x, out = random(16), torch.zeros(16)
    launch(careless_kernel, (1,), x, out, OF="shared memory")
    assert out.isnan().all()
    launch(careless_kernel, (1,), x, out, OF="masked")
    assert_close(out[:4], x[:4], rtol=0, atol=0)
    assert out[4:].isnan().all()


def test_carelessness_is_an_error():
    with pytest.raises(RuntimeError, match="in flight"):
        launch(careless_kernel, (1,), random(16), torch.zeros(16), OF="exit")
    with pytest.raises(TypeError, match="expected .* fp32, got .* bf16"):
        launch(careless_kernel, (1,), random(16), torch.zeros(16), OF="type")


def test_every_launch_in_a_context():
    """By flakit's own launcher too, of kernels in Triton."""

    def triton_kernel(x, out, length, scale: tl.constexpr):
        i = tl.program_id(1) * N + tl.arange(0, N)
        tl.store(out + i, tl.load(x + i, mask=i < length, other=1.0) * scale, mask=i < length)

    x, out = random(40), torch.zeros(40)
    with emulated():
        Kernel(triton_kernel, ("length",))[1, 3](x, out, 40, scale=2.0, num_warps=1)
    assert_close(out, 2 * x, rtol=0, atol=0)
