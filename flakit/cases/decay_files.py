"""Load natural-log decays from a tensor, an array, or a file that contains one tensor or several by name."""

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.convert import kind_of
from ..numerics.arguments import shown
from ..ops.common.validation import FLOATS


def layers(w: object) -> dict[str, object]:
    """Return decays by layer name, "" for a single unnamed one. w: a tensor, an array, a mapping of them, or a file of
    `read`. Raises ValueError for an empty mapping and for a checkpoint's weights, and whatever `read` raises."""
    if isinstance(w, (str, Path)):
        w = read(w)
    if not isinstance(w, Mapping):
        return {"": w}
    if not w:
        raise ValueError("w: expected decays of at least one layer, got none")
    kind = kind_of(w)
    if kind is not None:
        raise ValueError(
            f"w: expected decays, got the weights of {kind.whose}, whose decays depend on tokens. `flakit headroom` "
            f"runs such a file; in Python: with recorded(convert.model_from(weights)) as w: …, both of flakit.models"
        )
    return {str(name): x for name, x in w.items()}


def checked(name: str, x: object) -> Tensor:
    """Check one layer's natural-log decays, <= 0, and return them on the CPU, [B, T, H, K], in a dtype with arithmetic.
    Raises TypeError unless x has floats, ValueError for other shapes, NaN or values above 0; both name the layer."""
    label = f"w[{name!r}]" if name else "w"
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        x = _of_numpy(x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{label}: expected a tensor of floating-point decays, got {shown(x)}")
    if x.is_nested:
        raise ValueError(f"{label}: expected one tensor [B, T, H, K], got a nested one; pack it and give cu_seqlens")
    if x.is_meta:
        raise ValueError(f"{label}: expected decays with values, got {shown(x)} on the meta device, which has none")
    if x.ndim != 4 or not x.numel():
        cure = "; of [B, T, H, K] make w.unflatten(-1, (H, K))" if x.ndim == 3 else ""
        raise ValueError(f"{label}: expected decays [B, T, H, K], got {list(x.shape)}{cure}")
    x = x.detach().cpu()
    if x.layout != torch.strided:
        x = x.to_dense()  # unstored elements are decays of 0
    if x.dtype not in FLOATS:
        x = x.float()  # float8 has no arithmetic; float32 represents it exactly
    if x.isnan().any() or x.max() > 0:
        got = "NaN" if x.isnan().any() else f"{x.max().item():.4g}"
        raise ValueError(
            f"{label}: expected natural-log decays <= 0, got {got}; of a factor e^w between 0 and 1 take the logarithm"
        )
    return x


def _of_numpy(x: np.ndarray) -> Tensor:
    """Convert a float array in any byte order to a tensor of its dtype; a longdouble becomes float64."""
    dtype = x.dtype.newbyteorder("=") if x.dtype.itemsize <= 8 else np.dtype(np.float64)
    with np.errstate(over="ignore"):  # below float64's range a decay acts like -inf
        return torch.from_numpy(np.array(x, dtype=dtype, order="C"))


def read(path: str | Path) -> Tensor | dict[str, Tensor]:
    """Read the tensor, or the tensors by name, in a file .pt (or .pth), .safetensors or .npy, without executing code.
    Raises FileNotFoundError for a missing file, ValueError or TypeError with the reason for an unreadable one."""
    path = Path(path)
    readers = {".pt": _read_pt, ".pth": _read_pt, ".safetensors": _read_safetensors, ".npy": _read_npy}
    reader = readers.get(path.suffix.lower())
    if path.is_dir():
        raise ValueError(f"w: expected a file {', '.join(readers)}, got the folder {str(path)!r}")
    if reader is None:
        raise ValueError(f"w: expected a file {', '.join(readers)}, got {path.name!r}")
    if not path.exists():
        raise FileNotFoundError(f"w: expected a file of decays, there is none at {str(path)!r}")
    with path.open("rb") as file:
        begins = file.read(40)
    if not begins:
        raise _refused(path, "it is empty")
    if begins.startswith(b"version https://git-lfs"):
        raise _refused(path, "it is a pointer of Git LFS; `git lfs pull` brings the file itself")
    return reader(path)


def _refused(path: Path, why: str) -> ValueError:
    kind = {".npy": "a .npy file", ".safetensors": "a safetensors file"}.get(
        path.suffix.lower(), "a file of torch.save"
    )
    return ValueError(f"w: expected {kind}, got {path.name!r}: {why}")


def _read_pt(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # PyTorch's own message recommends executing the file
        if zipfile.is_zipfile(path):
            why = "it holds more than tensors, and nothing in a file is executed; save a tensor, or a dict of tensors"
        else:
            why = "it is cut short, or no such file"
        raise _refused(path, why) from None


def _read_npy(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        pickled = "allow_pickle" in str(error) and path.open("rb").read(6) == b"\x93NUMPY"
        why = "it holds Python objects, no numbers" if pickled else "it is cut short, or no such file"
        raise _refused(path, why) from None
    if not isinstance(array, np.ndarray):
        raise _refused(path, "it is an archive of several arrays; save one, or a dict of tensors by torch.save")
    if array.dtype.kind != "f":
        raise TypeError(f"w: expected floating-point decays in {path.name!r}, got {shown(array)}")
    return _of_numpy(array)


_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read tensors by name: 8 bytes with the length of a JSON header (little-endian), the header, the values."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise _refused(path, f"a header of {length} bytes in {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise _refused(path, str(error)) from None
    if not isinstance(header, dict):
        raise _refused(path, f"a header that is no mapping, {shown(header)}")
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        match about:
            case {"dtype": str(kind), "shape": [*shape], "data_offsets": [start, end]}:
                valid = all(type(n) is int and n >= 0 for n in (*shape, start, end))
            case _:
                valid = False
        if not valid:
            raise _refused(path, f"of {name!r} expected dtype, shape and data_offsets, got {shown(about)}")
        dtype = _SAFETENSORS.get(kind)
        if dtype is None:
            raise ValueError(f"w[{name!r}]: expected one of {', '.join(_SAFETENSORS)}, got {kind}")
        size, body = math.prod(shape) * dtype.itemsize, data[8 + length + start : 8 + length + end]
        if not len(body) == end - start == size:
            raise ValueError(f"w[{name!r}]: expected {size} bytes for {shape}, got {len(body)}")
        tensors[name] = (torch.frombuffer(bytearray(body), dtype=dtype) if body else torch.empty(0)).reshape(shape)
    return tensors
