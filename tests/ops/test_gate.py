"""log_decay: -exp(x), with the gradient's limit where exp(x) is infinite."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flakit

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def around(dtype, device="cpu"):
    """Numbers on both sides of the end of exp, next to it and far away, and all that is no number."""
    end = math.log(torch.finfo(dtype).max)
    last = torch.tensor(end, dtype=dtype)
    last = last if last.exp().isfinite() else torch.nextafter(last, -last)
    x = [-torch.inf, -1e4, -1.0, 0.0, 1.0, last.item(), torch.nextafter(last, 2 * last).item(), 2 * end, 1e4, torch.inf]
    return torch.tensor(x, dtype=dtype, device=device), 6


@DEVICES
@EVERY_DTYPE
def test_values_and_gradients_on_both_sides_of_the_end(dtype, device):
    x, finite = around(dtype, device)
    x.requires_grad_()
    w = flakit.log_decay(x)
    assert w.dtype == dtype and torch.equal(w, -x.exp())
    assert w[:finite].isfinite().all() and w[finite:].isneginf().all()
    for dw in (torch.ones_like(w), w.detach().exp(), torch.full_like(w, -0.5)):
        (dx,) = torch.autograd.grad(w, x, dw, retain_graph=True)
        assert dx.dtype == dtype and torch.equal(dx[:finite], (dw * w)[:finite]) and not dx[finite:].any()
    plain = torch.autograd.grad(-x.exp(), x, w.detach().exp())[0]
    assert plain[finite:].isnan().all()  # what it is for


@EVERY_DTYPE
def test_a_nan_stays_one(dtype):
    x = torch.tensor([torch.nan, 1.0], dtype=dtype, requires_grad=True)
    w = flakit.log_decay(x)
    (dx,) = torch.autograd.grad(w.sum(), x)
    assert w.isnan().tolist() == [True, False] == dx.isnan().tolist()


@EVERY_DTYPE
def test_every_layout_and_no_input_is_written(dtype):
    x, _ = around(dtype)
    for given in (x, x.expand(3, 10), x.expand(3, 10).T, x[::3], x.view(1, 10)[:, None], x[0], x[:0]):
        before = given.clone()
        w = flakit.log_decay(given)
        assert torch.equal(w, -given.exp()) and torch.equal(given, before)
        w.add_(1)
        assert torch.equal(given, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compiled_in_one_graph(dtype):
    compiled_in_one_graph(dtype, "aot_eager")


@pytest.mark.full
def test_compiled_by_inductor(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for dtype in (torch.float32, torch.float16):
        compiled_in_one_graph(dtype, "inductor")


def compiled_in_one_graph(dtype, backend):
    x, finite = around(dtype)
    x.requires_grad_()
    torch._dynamo.reset()
    w = torch.compile(flakit.log_decay, fullgraph=True, backend=backend)(x)
    (dx,) = torch.autograd.grad(w, x, w.detach().exp())
    torch.testing.assert_close(w, -x.exp())
    assert dx[:finite].isfinite().all() and not dx[finite:].any()


@DEVICES
def test_under_autocast(device):
    x, _ = around(torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype):
            assert torch.equal(flakit.log_decay(x), -x.exp())
            narrow = x.to(dtype).requires_grad_()
            w = flakit.log_decay(narrow)
            assert torch.equal(w, -narrow.exp()) and w.dtype == narrow.exp().dtype
        (dx,) = torch.autograd.grad(w, narrow, w.detach().exp())
        assert dx.dtype == dtype and dx.isfinite().all()


def test_followed_by_all_of_pytorch():
    x, finite = around(torch.float64)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(flakit.log_decay(x).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)  # -exp(x) is its own derivative
    assert torch.equal(ddx[:finite], dx[:finite]) and not ddx[finite:].any()

    x = x.detach()
    each = torch.func.vmap(torch.func.grad(flakit.log_decay))(x)
    assert torch.equal(each, dx.detach())
    assert torch.equal(torch.func.jvp(flakit.log_decay, (x,), (torch.ones_like(x),))[1], dx.detach())
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(flakit.log_decay(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert torch.equal(tangent, dx.detach())

    x.requires_grad_()
    (again,) = torch.autograd.grad(checkpoint(flakit.log_decay, x, use_reentrant=False).sum(), x)
    assert torch.equal(again, dx.detach())


@pytest.mark.parametrize("x", [1.0, torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64), None])
def test_what_is_no_float_is_refused(x):
    with pytest.raises(TypeError, match="x: expected a tensor of float64, float32, bfloat16 or float16, got"):
        flakit.log_decay(x)
