"""Headroom: the law's number for given decays, and NaN in the faulty kernels themselves just where it says."""

import html
import json
import math
import re

import numpy as np
import pytest
import torch

import flakit
from flakit.cases import anchor, padding
from flakit.cases.anchor.operators import OPERATORS
from flakit.cases.decay_files import read
from flakit.cases.headroom import KERNELS, LATE, headroom, kernels
from flakit.cases.laws import LN_MAX
from flakit.numerics.inputs import inputs

FLOATS = tuple(LN_MAX)


def decays(kind, *shape, seed=0):
    """Log decays of any kind a model may have."""
    w = -torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "spike":
        w = w * 0.01
        w[-1, shape[1] // 2, -1, 0] = -40.0
    return -torch.ones(*shape) if kind == "uniform" else w


# --- the law and nothing else -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("T", [1, 16, 17, 76, 128, 150])
@pytest.mark.parametrize("kind", ["uniform", "random", "spike"])
def test_every_factor_is_that_of_the_law(op, T, kind):
    w = decays(kind, 2, T, 2, 3)
    for chunk, block in ((64, 16), (32, 8)):
        found = headroom(w, op, chunk, block=block)
        for m in found.margins:
            if m.kernel.startswith("padding"):
                continue
            how = {"scheme": "pairwise", "mask": "where"} if m.kernel == LATE else {"scheme": m.kernel}
            limits = anchor.limits(
                **how, inputs={OPERATORS[op].decay: w}, op=op, chunk=chunk, block=block, dtype=m.dtype
            )
            assert m.factor == pytest.approx(min(limits.values()), rel=1e-9), m


@pytest.mark.parametrize("op", ["gsa", "rwkv6"])
@pytest.mark.parametrize("form", ["chunk", "blocks"])
@pytest.mark.parametrize("T", [3000, 76, 120, 64, 16])
def test_padding_is_that_of_its_law(op, form, T):
    m = headroom(torch.full((1, T, 1, 2), -1.0), op).margin(f"padding, {form}")
    assert m.factor == pytest.approx(padding.law(T, form), rel=1e-9)
    if m.token is not None:
        assert m.token == padding.anchors(T, form)[0].rows.start


def test_the_uniform_law_is_the_factor_of_a_uniform_decay():
    w = torch.full((1, 120, 1, 1), -1.0)
    found = headroom(w)
    for kernel in kernels("rwkv6"):
        if kernel != "padding, chunk":  # at 120 tokens it is 88.72 / 48, the worst there is
            assert found.uniform(kernel) <= found.margin(kernel).factor * (1 + 1e-9)
    assert (
        found.uniform("padding, chunk") == pytest.approx(88.72 / 48, rel=1e-4) == found.margin("padding, chunk").factor
    )
    assert found.uniform("none") == pytest.approx(88.72 / 64, rel=1e-4)


@pytest.mark.parametrize("kernel", ["none", "first-row", "previous-row", "pairwise", "dyadic"])
def test_forgetting_everything_is_no_number_except_for_the_dyadic_form(kernel):
    w = torch.full((1, 40, 1, 2), -0.1)
    w[0, 18, 0, 1] = -math.inf
    with_limits = min(anchor.limits(kernel, {"w": w}).values())
    m = headroom(w).margin(kernel)
    assert m.factor == with_limits == (math.inf if kernel == "dyadic" else 0.0)
    finite = all(anchor.run({**inputs("rwkv6", T=40, H=1, K=2), "w": w}, kernel).finite.values())
    assert finite == (not m.breaks)


# --- the kernels themselves -------------------------------------------------------------------------------------------

WITHIN = {"none": 0.03, "block-start": 0.03, "middle": 0.03}
"""How near the law the kernel is run, where sums of several large products meet; else 0.002."""


def operands(op, w):
    """Inputs of size 1 around the decays."""
    x = inputs(op, B=w.shape[0], T=w.shape[1], H=w.shape[2], K=w.shape[3], **({"M": w.shape[3]} if op == "gsa" else {}))
    unit = {name: y.sign() for name, y in x.items() if name not in (OPERATORS[op].decay, "a", "b")}
    return {**x, **unit, OPERATORS[op].decay: w}


def finite(kernel, op, w):
    if kernel.startswith("padding"):
        form = kernel.removeprefix("padding, ")
        return all(bool(y.isfinite().all()) for y in padding.run(operands(op, w), form, op=op).values())
    how = {"scheme": "pairwise", "mask": "where"} if kernel == LATE else {"scheme": kernel}
    return all(anchor.run(operands(op, w), **how, op=op).finite.values())


@pytest.mark.parametrize("op", ["rwkv6", "gsa", "rwkv7"])
@pytest.mark.parametrize("kind", ["random", "spike"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_begins_where_headroom_says(kernel, kind, op):
    if kernel not in kernels(op):
        assert op == "rwkv7" and kernel.startswith("padding")
        return
    w = decays(kind, 2, 112, 2, 4, seed=3)
    m = headroom(w, op).margin(kernel)
    if m.token is None:
        assert finite(kernel, op, w * 100)
        return
    step = WITHIN.get(kernel, 2e-3)
    assert finite(kernel, op, w * m.factor * (1 - step))
    assert not finite(kernel, op, w * m.factor * (1 + step))


def test_exclusive_breaks_by_a_spike_where_inclusive_is_immune():
    w = torch.full((1, 100, 1, 4), -0.01)
    w[0, 16, 0, 2] = -88.8
    m = headroom(w, "rwkv6").margin("first-row")
    assert m.breaks and (m.token, m.channel) == (16, 2) and m.exponent == pytest.approx(88.8, rel=1e-6)
    assert headroom(w, "gsa").margin("first-row").token is None
    assert (finite("first-row", "rwkv6", w), finite("first-row", "gsa", w)) == (False, True)
    w[0, 16], w[0, 17] = -0.01, -500.0
    assert not headroom(w, "rwkv6").margin("first-row").breaks and finite("first-row", "rwkv6", w)


@pytest.mark.parametrize("op", ["rwkv6", "gsa"])
def test_factors_in_float16_break_at_their_own_limit(op):
    w = decays("random", 1, 50, 1, 4)
    found = headroom(w, op).margin("block-start", torch.float16)
    assert found.limit == LN_MAX[torch.float16]
    below, above = (
        anchor.run(operands(op, w * found.factor * side), "block-start", op=op, dtype=torch.float16).finite
        for side in (0.97, 1.03)
    )
    assert all(below.values()) and not all(above.values())


def test_the_place_is_where_the_factor_is():
    w = decays("random", 2, 100, 3, 5, seed=1)
    m = headroom(w).margin("first-row")
    assert -w[m.batch, m.token, m.head, m.channel].item() == pytest.approx(m.exponent, rel=1e-6)
    assert m.token in (16, 32, 48, 80, 96) and m.exponent == pytest.approx(-w[:, [16, 32, 48, 80, 96]].min().item())


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_packed_sequences_begin_chunks_of_their_own():
    w = decays("random", 1, 100, 2, 3)
    offsets = torch.tensor([0, 30, 30, 100])
    packed = headroom(w, cu_seqlens=offsets)
    apart = [headroom(w[:, a:b]) for a, b in ((0, 30), (30, 100))]
    for n, m in enumerate(packed.margins):
        nearest = min((h.margins[n] for h in apart), key=lambda x: x.factor)
        assert m.factor == nearest.factor
        if m.token is not None:
            assert m.token - nearest.token in (0, 30)
    assert packed.margin("none").factor != headroom(w).margin("none").factor


def test_layers_are_judged_apart_and_the_worst_is_on_top():
    layers = {"a": decays("random", 1, 40, 1, 2), "b": 3 * decays("random", 1, 40, 1, 2)}
    found = headroom(layers, only=["none"])
    assert [m.layer for m in found.margins] == ["b"] * 3 and set(found.layers) == {"a", "b"}
    assert found.margin("none", layer="a").factor == pytest.approx(3 * found.margin("none").factor)
    assert "b, token" in str(found) and found.counts.sum() + found.zeros == 160


def test_times_multiplies_what_measuring_again_would_find():
    w = decays("random", 1, 100, 1, 3).double()
    for scaled, again in zip(headroom(w).times(2.5).margins, headroom(2.5 * w).margins, strict=True):
        assert scaled.exponent == pytest.approx(again.exponent) and scaled.place == again.place
        assert scaled.breaks == again.breaks


# --- the gate that made them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_gates_margin_is_where_autograd_loses_its_gradient(dtype):
    """x shifted to 1% below the margin has a gradient, 1% above it none."""
    x = torch.linspace(-6, 2, 40, dtype=torch.float64)
    gate = headroom(-x.exp().to(dtype).view(1, 20, 1, 2)).gate
    assert (gate.dtype, gate.infinite, gate.breaks) == (dtype, 0, False)
    assert gate.margin == pytest.approx(math.log(torch.finfo(dtype).max) - 2, rel=3e-3)
    for share, finite in ((0.99, True), (1.01, False)):
        moved = (x + share * gate.margin).to(dtype).requires_grad_()
        w = -moved.exp()
        (w.exp().sum()).backward()  # dw = e^w, 0 where w = -inf
        assert moved.grad.isfinite().all().item() == finite
        assert headroom(w.view(1, 20, 1, 2)).gate.breaks != finite


def test_decays_of_minus_infinity_are_counted_and_say_what_a_gate_does_there():
    x = torch.tensor([0.0, 89.0, 10.0, 100.0]).view(1, 4, 1, 1)
    w = -x.exp()
    found = headroom({"calm": decays("random", 1, 4, 1, 2), "wild": w}, only=["dyadic"])
    assert found.gates["calm"].infinite == 0 and found.gates["wild"].infinite == found.gate.infinite == 2
    assert found.gate.layer == "wild" and found.gate.largest == pytest.approx(math.exp(10))
    said = str(found).splitlines()[-1]
    assert said == str(found.gate)
    assert said.startswith("2 decays are -inf: a gate w = -exp(x) has no gradient there (dx = 0 * inf = NaN), unless")
    assert "flakit.log_decay" in said and "largest finite decay is 78.7 below that in float32" in said
    one = headroom(w[:, :2], only=["dyadic"])
    assert str(one.gate).startswith("1 decay is -inf: ")


def test_a_gate_that_is_far_from_it_says_how_far():
    found = headroom({"a": decays("uniform", 1, 4, 1, 1).half(), "b": 60 * decays("uniform", 1, 4, 1, 1)})
    assert found.gate.layer == "a" and found.gate.dtype == torch.float16  # nearer, though smaller
    assert "x can grow by 11.1 until w = -inf in float16" in str(found) and "flakit.log_decay" in str(found)
    nothing = headroom(torch.zeros(1, 4, 1, 1)).gate
    assert nothing.margin == math.inf and str(nothing) == "No decay is -inf."
    everything = headroom(torch.full((1, 4, 1, 1), -math.inf)).gate
    assert everything.infinite == 4 and everything.margin == math.inf and "finite" not in str(everything)


def test_a_notebook_shows_the_lines_as_a_table():
    found = headroom(-torch.rand(1, 100, 2, 8))
    page = found._repr_html_()
    said = " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())
    assert said == " ".join(str(found).split()) and page.count("<tr>") == 1 + len({m.kernel for m in found.margins})


def test_multiplied_decays_leave_the_format_where_their_gate_does():
    w = torch.full((1, 4, 1, 1), -1000.0).half()
    near, beyond = (headroom(w).times(factor).gate for factor in (60.0, 70.0))
    assert not near.breaks and beyond.breaks and (w * 70).isinf().all() and not (w * 60).isinf().any()
    assert str(beyond).startswith("Decays of this size are -inf in float16: a gate")


def save_safetensors(path, tensors):
    header, body = {"__metadata__": {"format": "pt"}}, b""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_files(tmp_path):
    w = decays("random", 1, 70, 2, 4)
    torch.save(w, tmp_path / "w.pt")
    torch.save({"a": w, "b": 2 * w}, tmp_path / "layers.pth")
    np.save(tmp_path / "w.npy", w.numpy())
    save_safetensors(tmp_path / "w.safetensors", {str(dtype): w.to(dtype) for dtype in (*FLOATS, torch.float64)})
    alone = headroom(w).margins
    assert headroom(tmp_path / "w.pt").margins == headroom(str(tmp_path / "w.npy")).margins == alone
    assert set(headroom(tmp_path / "layers.pth").layers) == {"a", "b"}
    stored = read(tmp_path / "w.safetensors")
    assert len(stored) == 4 and all(torch.equal(x, w.to(x.dtype)) for x in stored.values())
    assert {str(x.dtype) for x in stored.values()} == set(stored)


@pytest.mark.parametrize(
    ("w", "how", "says"),
    [
        (torch.rand(1, 4, 1, 1), {}, "w: expected natural-log decays <= 0, got 0.*take the logarithm"),
        (torch.full((1, 4, 1, 1), math.nan), {}, "w: expected natural-log decays <= 0, got NaN"),
        (-torch.rand(4, 1, 6), {}, r"w: expected decays \[B, T, H, K\], got \[4, 1, 6\]; of .* make w.unflatten"),
        ({"x": torch.ones(2, 3)}, {}, r"w\['x'\]: expected decays \[B, T, H, K\], got \[2, 3\]"),
        ({}, {}, "w: expected decays of at least one layer, got none"),
        (torch.zeros(1, 2, 1, 1, dtype=torch.int64), {}, "w: expected a tensor of floating-point decays, got a tensor"),
        ("w.csv", {}, "w: expected a file .pt, .pth, .safetensors, .npy, got 'w.csv'"),
        (torch.zeros(1, 2, 1, 1), {"op": "rwkv5"}, "op: expected one of rwkv6, rwkv7, gsa, .*, got 'rwkv5'"),
        (torch.zeros(1, 2, 1, 1), {"op": "retention"}, "op: expected an operator with a decay among its arguments"),
        (torch.zeros(1, 2, 1, 1), {"chunk": 48}, "chunk: expected a power of two, got 48"),
        (torch.zeros(1, 2, 1, 1), {"only": ["gla"]}, "only: expected kernels of rwkv6: none; .* got 'gla'"),
        (torch.zeros(1, 2, 1, 1), {"cu_seqlens": [0, 3]}, "cu_seqlens: expected offsets up to T = 2 at most, got 3"),
    ],
)
def test_bad_arguments_are_named(w, how, says):
    with pytest.raises((ValueError, TypeError), match=says):
        headroom(w, **how)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="expected a safetensors file, got 'w.safetensors': a header of 32 bytes"):
        headroom(tmp_path / "w.safetensors")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _saved(suffix, tmp_path):
    """The bytes of a good file."""
    path, w = tmp_path / f"good{suffix}", decays("random", 1, 70, 2, 4)
    if suffix == ".npy":
        np.save(path, w.numpy())
    elif suffix == ".safetensors":
        save_safetensors(path, {"a": w})
    else:
        torch.save({"a": w}, path)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".npy", ".safetensors"])
@pytest.mark.parametrize("kind", ["empty", "lfs", "noise", "cut short", "half a header"])
def test_a_file_that_is_none_is_named(suffix, kind, tmp_path):
    path, good = tmp_path / f"w{suffix}", _saved(suffix, tmp_path)
    content = {"empty": b"", "lfs": LFS, "noise": b"noise" * 20, "cut short": good[:-200], "half a header": good[:20]}
    path.write_bytes(content[kind])
    with pytest.raises(ValueError, match="w: expected|w\\['a'\\]: expected") as raised:
        headroom(path)
    says = str(raised.value)
    assert f"w{suffix}" in says or kind == "cut short" and "bytes" in says
    assert "weights_only" not in says and "pickle" not in says
    assert {"empty": "it is empty", "lfs": "git lfs pull"}.get(kind, "") in says


@pytest.mark.parametrize("name", ["w.pt", "w.npy", "w.safetensors", "W.NPY"])
def test_a_missing_file_and_a_folder_are_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"w: expected a file of decays, there is none at .*{name}"):
        headroom(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"w: expected a file .pt, .* got the folder .*{name}"):
        headroom(tmp_path / name)


def test_files_of_anything_else_are_named(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model.pt")
    with pytest.raises(
        ValueError, match="w: expected a file of torch.save, got 'model.pt': it holds more than tensors"
    ):
        headroom(tmp_path / "model.pt")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="w: expected a .npy file, got 'objects.npy': it holds Python objects"):
        headroom(tmp_path / "objects.npy")
    np.save(tmp_path / "whole.npy", np.zeros((1, 2, 1, 1), dtype=int))
    with pytest.raises(TypeError, match="w: expected floating-point decays in 'whole.npy', got an array"):
        headroom(tmp_path / "whole.npy")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([], "a header that is no mapping"),
        ({"a": 3}, "of 'a' expected dtype, shape and data_offsets, got 3"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "of 'a' expected dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "of 'a' expected dtype, shape"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "of 'a' expected dtype, shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "of 'a' expected dtype, shape"),
        ({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, r"w\['a'\]: expected one of F64, .* got I64"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"w\['a'\]: expected 8 bytes for \[2\], got 4"),
        ({"a": {"dtype": "F32", "shape": [1, 0, 1, 1], "data_offsets": [0, 0]}}, r"w\['a'\]: .* got \[1, 0, 1, 1\]"),
        ({}, "w: expected decays of at least one layer, got none"),
    ],
)
def test_odd_headers_are_named(header, says, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=says):
        headroom(tmp_path / "w.safetensors")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", "<f4", np.longdouble])
def test_numpys_floats_in_any_order_are_decays(dtype, tmp_path):
    w = decays("random", 1, 70, 2, 4).half()
    array = w.numpy().astype(dtype)
    np.save(tmp_path / "w.npy", array)
    array.flags.writeable = False
    expected = headroom(w.double()).margins
    assert headroom(array).margins == headroom(array[::-1]).margins == headroom(tmp_path / "w.npy").margins == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_floats_are_decays(dtype, tmp_path):
    w = decays("random", 1, 70, 2, 4).to(dtype)
    expected = headroom(w.float()).margins
    torch.save(w, tmp_path / "w.pt")
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    header = json.dumps({"w": {"dtype": names[dtype], "shape": list(w.shape), "data_offsets": [0, w.numel()]}}).encode()
    body = w.view(torch.uint8).numpy().tobytes()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    assert headroom(w).margins == headroom(tmp_path / "w.pt").margins == expected
    assert [m.factor for m in headroom(tmp_path / "w.safetensors").margins] == [m.factor for m in expected]


def test_other_kinds_of_tensors():
    w = decays("random", 1, 40, 2, 4)
    w[0, ::2] = 0.0
    assert headroom(w.to_sparse()).margins == headroom(w).margins
    with pytest.raises(ValueError, match=r"w: expected decays with values, got a tensor \[1, 40, 2, 4\] .* meta"):
        headroom(w.to("meta"))
    with pytest.raises(ValueError, match=r"w\['a'\]: expected one tensor \[B, T, H, K\], got a nested one"):
        headroom({"a": torch.nested.nested_tensor([w[0], w[0, :20]], layout=torch.jagged)})


def test_progress_is_told():
    told = []
    headroom({"a": decays("random", 1, 4, 1, 1), "b": decays("random", 1, 4, 1, 1)}, progress=lambda *x: told.append(x))
    assert told == [("a", 0, 2), ("b", 1, 2)]


def test_it_is_flakits_own_name():
    assert flakit.headroom is headroom
    with pytest.raises(AttributeError, match="no attribute 'head'"):
        flakit.head  # noqa: B018


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gsa"])
@pytest.mark.parametrize("T", [13, 50, 200])
def test_the_decays_of_the_tokens_add_up_to_the_exponent(op, T):
    w = -torch.rand(2, T, 3, 4, generator=torch.Generator().manual_seed(T))
    with_tokens = set()
    for m in headroom(w, op).margins:
        if m.tokens is not None:
            first, last = m.tokens
            total = -w[m.batch, first : last + 1, m.head, m.channel].double().sum().item()
            assert total == pytest.approx(m.exponent, rel=1e-9), m
            with_tokens.add(m.kernel)
        else:  # no exponent, or one that a decay of the read itself is taken from
            assert m.token is None or (op, m.kernel) == ("gsa", "previous-row-across")
    assert {"none", "block-start", "middle"} <= with_tokens


def test_equal_decays_and_endless_ones():
    (margin,) = headroom(-torch.ones(1, 100, 1, 1), only=["none"]).margins[:1]
    assert margin.tokens == (0, 63)
    w = -torch.ones(1, 100, 1, 1)
    w[:, 20] = -torch.inf
    assert all(m.tokens is None for m in headroom(w, only=["none"]).margins)
