"""A mask that is the transpose of its tile: a compile error if you are lucky, wrong numbers if you are not.

The backward of a recurrent kernel recomputes the states forward, from the initial state if there is one. It holds them
as a tile [BV, BK], with a mask at the edges of K and V. The faulty kernel builds the mask as [BK, BV].

As reported (flash-linear-attention issue #18): "Cannot broadcast ... [16, 64], [64, 16]" on `loss.backward()`; a matter
of GPU and Triton version. As measured: a shape error for any GPU, which compiling shows without one. The line is
compiled only with an initial state, so tests without one miss it. And the error was luck: for a square tile the two
shapes are equal, the kernel compiles, and the mask removes the mirror image of what it should. Entries of the state in
a partial tile are never loaded; as many others are loaded from beyond the edge, harmless if they are finite, since they
belong to no entry of the state.

`law` counts the wrong entries. There are none if K and V are multiples of the tile, and none if K = V fits into one
tile: tests with square powers of two never detect this fault.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...numerics.errors import relative_l2
from ...numerics.evaluate import cotangents, truth
from ...numerics.inputs import inputs as make_inputs
from ...ops.common.dispatch import choose_backend, has_triton
from ...ops.rwkv6 import reference
from ..knobs import Range
from ..laws import Measured, Row, kernel_place

STORY = {(64, 64): 0, (100, 120): 992, (40, 64): 384}
"""Recorded number of wrong entries of the state by (K, V), in tiles of 32 x 32."""

RECORDED = {
    "triton": "3.7.1",
    "error": "Cannot make_shape_compatible: incompatible dimensions at index 0: 64 and 16",
    "line": "b_S = tl.load(initial_state + i_bh * K * V + o_s, mask=m_load, other=0.0)",
}
"""The compiler's error for the faulty kernel with BK = 16, BV = 64, for machines without Triton."""


def inputs(
    K: int = 100, V: int = 120, *, T: int = 8, B: int = 1, H: int = 1, device: str = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Draw RWKV6 inputs with an initial state and a bonus of 0: its part of dr does not depend on the state."""
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V}
    tensors = make_inputs("rwkv6", **sizes, decay="logsigmoid", initial_state=True, device=device, seed=seed)
    return tensors | {"u": torch.zeros_like(tensors["u"])}


class DoesNotCompile(ValueError):
    """The mask [BK, BV] does not fit the tile [BV, BK]. Raised by the kernel's compilation and by `run` in PyTorch."""


class Run(NamedTuple):
    """The initial state as the kernel loaded it, `seen` [B, H, K, V], and dr [B, T, H, K] computed from it."""

    seen: Tensor
    dr: Tensor


def run(
    inputs: Mapping[str, Tensor], BK: int = 32, BV: int = 32, *, transposed: bool = True, backend: str | None = None
) -> Run:
    """Return dr of RWKV6 and the initial state as loaded in tiles [BV, BK] under the right or the transposed mask.

    inputs: as from `inputs`; the bonus is ignored. The gradient of o is that of `numerics.evaluate`. backend: "triton"
        for the kernel itself, "torch" for the same in PyTorch; default as in the operators. Raises `DoesNotCompile` for
        rectangular tiles with the transposed mask.
    """
    x = {name: inputs[name].detach().float() for name in ("r", "k", "v", "w", "u", "initial_state")}
    do, scale = cotangents("rwkv6", inputs)[0].float(), x["k"].shape[-1] ** -0.5
    state = x["initial_state"]
    if choose_backend(backend, x["k"]) == "triton":
        from .kernel_triton import read_grads

        heads = [y.transpose(1, 2).flatten(0, 1) for y in (x["k"], x["v"], x["w"], do)]
        results = read_grads(*heads, state.flatten(0, 1), scale, BK, BV, transposed)
        dr, seen = (y.unflatten(0, state.shape[:2]) for y in results)
        return Run(seen, dr.transpose(1, 2))
    K, V = state.shape[-2:]
    mask = tiles(K, V, BK, BV, transposed=transposed)
    seen = torch.where(mask[:K, :V].to(state.device), state, 0.0)
    dr, *_ = reference.backward(**{**x, "initial_state": seen}, scale=scale, do=do, dfinal_state=None)
    return Run(seen, dr)


def tiles(K: int, V: int, BK: int = 32, BV: int = 32, *, transposed: bool = True) -> Tensor:
    """Return which entries of a state [K, V] the mask keeps, as the kernel forms it by tile: boolean.

    Both axes are rounded up to multiples of the tile, so that entries beyond the state are included. Raises
    `DoesNotCompile` for rectangular tiles with the transposed mask.
    """
    if _check_tile(BK, BV) is None and transposed:
        raise DoesNotCompile(
            f"BK, BV: expected a square tile with the transposed mask, got a mask [{BK}, {BV}] for a tile [{BV}, {BK}]"
        )
    NK, NV = -(-K // BK), -(-V // BV)
    m_k = (torch.arange(NK * BK) < K).view(NK, 1, BK)
    m_v = (torch.arange(NV * BV) < V).view(1, NV, BV)
    if transposed:
        mask = m_k[..., :, None] & m_v[..., None, :]  # [NK, NV, BK, BV]
    else:
        mask = m_v[..., :, None] & m_k[..., None, :]  # [NK, NV, BV, BK]
    return mask.permute(0, 3, 1, 2).reshape(NK * BK, NV * BV)


def law(K: int | Tensor, V: int | Tensor, BK: int = 32, BV: int = 32) -> int | Tensor | None:
    """Predict the number of wrong entries of a state [K, V]; None if the faulty kernel does not compile.

    With n full tiles of side B and r entries in a partial tile along each axis: each partial tile at an edge misses
    r (B - r) entries, the one in the corner min(r_K, r_V) |r_K - r_V|. K and V may be tensors that broadcast.

    >>> law(100, 120), law(40, 64), law(64, 64), law(100, 120, 16, 64)
    (992, 384, 0, None)
    """
    B = _check_tile(BK, BV)
    if B is None:
        return None
    sizes = torch.as_tensor(K), torch.as_tensor(V)
    (n_K, r_K), (n_V, r_V) = ((size // B, size % B) for size in sizes)
    count = n_K * r_V * (B - r_V) + n_V * r_K * (B - r_K) + torch.minimum(r_K, r_V) * (r_K - r_V).abs()
    return count if isinstance(K, Tensor) or isinstance(V, Tensor) else int(count)


def _check_tile(BK: int, BV: int) -> int | None:
    """Return the side of a square tile, None for a rectangular one. Raises ValueError unless both are powers of 2."""
    for name, size in (("BK", BK), ("BV", BV)):
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"{name}: expected a power of two, got {size!r}")
    return BK if BK == BV else None


def compile_table(tiles: Sequence[tuple[int, int]] = ((32, 32), (16, 64))) -> tuple[str, list[dict]]:
    """Compile the faulty and the right kernel, without a GPU. Return (label of the source, rows).

    tiles: pairs (BK, BV). A row has tile, mask, sm_80 and sm_90 ("compiles" or the compiler's last line), and "line",
        the source line of the error. Runs in a subprocess, about 3 s plus a second per tile. Without Triton, returns
        the recorded results for (32, 32) and (16, 64). Raises RuntimeError if the subprocess fails.
    """
    if not has_triton():
        label = f"recorded with Triton {RECORDED['triton']}"
        rows = [_row((32, 32), False), _row((32, 32), True), _row((16, 64), False)]
        return label, [*rows, _row((16, 64), True, RECORDED["error"], RECORDED["line"])]
    for tile in tiles:
        _check_tile(*tile)
    done = subprocess.run(
        [sys.executable, "-m", "flakit.cases.transposed_mask.kernel_triton", *(f"{BK}x{BV}" for BK, BV in tiles)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"compiling without a GPU failed:\n{done.stderr[-2000:]}")
    output = json.loads(done.stdout)
    rows: dict = {}
    for each in output["rows"]:
        key = (each["BK"], each["BV"]), each["transposed"]
        lines = (each["error"] or "").strip().splitlines()
        if key not in rows:
            # The compiler quotes the source up to the faulty line, then a caret below it, then the reason.
            carets = [n for n, line in enumerate(lines) if line.strip() == "^"]
            rows[key] = _row(*key, lines[-1] if lines else None, lines[carets[0] - 1].strip() if carets else "")
        rows[key][f"sm_{each['sm']}"] = lines[-1] if lines else "compiles"
    return f"compiled here with Triton {output['triton']}", list(rows.values())


def _row(tile: tuple[int, int], transposed: bool, error: str | None = None, line: str = "") -> dict:
    verdict = error or "compiles"
    mask = "transposed" if transposed else "right"
    return {"tile": f"{tile[0]} x {tile[1]}", "mask": mask, "sm_80": verdict, "sm_90": verdict, "line": line}


MOST = 128
"""The largest K and V of `show`."""


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, the state, true and as loaded, and `law` at all sizes up to `MOST`."""

    tile: tuple[int, int]
    """BK, BV."""
    transposed: bool
    state: Tensor
    """The true state, [K, V]."""
    seen: Tensor | None
    """The state as the kernel loads it, [K, V]; None if it does not compile."""
    mask: Tensor | None
    """`tiles(K, V, BK, BV)`: the entries that the mask keeps; None like `seen`."""
    counts: Tensor | None
    """`law` for K, V = 1 … `MOST`, [MOST, MOST], zeros for the right mask; None if the kernel does not compile."""
    dr: float
    """Relative L2 error of the first token's dr."""


def show(
    *,
    K: Annotated[int, Range(1, MOST)] = 100,
    V: Annotated[int, Range(1, MOST)] = 120,
    BK: Annotated[int, (16, 32, 64, 128)] = 32,
    BV: Annotated[int, (16, 32, 64, 128)] = 32,
    transposed: bool = True,
) -> Shown:
    """Load a random initial state [K, V] in tiles [BV, BK], with the Triton kernel if this process can run it, else in
    PyTorch. Return the number of wrong entries beside that of `law`, and the error of dr. transposed: the fault."""
    (device, backend), x, tile = kernel_place(), inputs(K, V, T=1), (BK, BV)
    state, predicted = x["initial_state"][0, 0], law(K, V, BK, BV) if transposed else 0
    what, refused = f"K, V = {K}, {V} in tiles {BK} x {BV}: wrong entries", "does not compile"
    expected = refused if predicted is None else predicted
    try:
        result = run({name: y.to(device) for name, y in x.items()}, BK, BV, transposed=transposed, backend=backend)
    except DoesNotCompile:
        row = Row(what, math.nan, expected, refused)
        return Shown([row], tile, transposed, state, None, None, None, math.nan)
    seen = result.seen[0, 0].cpu()
    row = Row(what, math.nan, expected, int((seen != state).sum()))
    mask = tiles(K, V, BK, BV, transposed=transposed)
    error = relative_l2(result.dr.cpu(), truth("rwkv6", x)["dr"])
    return Shown([row], tile, transposed, state, seen, mask, _counts(BK, transposed), error)


@functools.lru_cache(maxsize=8)
def _counts(B: int, transposed: bool) -> Tensor:
    sizes = torch.arange(1, MOST + 1)
    counts = law(sizes[:, None], sizes[None, :], B, B)
    return counts if transposed else torch.zeros_like(counts)


def reproduce() -> list[Row]:
    """Return the recorded, predicted and measured number of wrong entries by K and V, in tiles of 32 x 32."""
    rows = []
    for (K, V), recorded in STORY.items():
        (row,) = show(K=K, V=V).rows
        rows.append(row._replace(what=f"K, V = {K}, {V}: wrong entries", recorded=recorded))
    return rows
