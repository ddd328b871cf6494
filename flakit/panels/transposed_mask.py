"""A transposed mask over tile shape, K and V: which entries of the state are wrong, by the law and as measured."""

import functools

import torch

from ..cases import transposed_mask as case
from ..figures.transposed_mask import TileFigure
from ..numerics.errors import relative_l2
from ..numerics.evaluate import truth
from ..numerics.words import error
from . import knobs
from .base import ButtonRun, Panel

T = 4
MOST = 128
MASKS = {"transposed, [BK, BV]": "transposed", "right, [BV, BK]": "right"}


class TransposedMask(Panel):
    """The twin in PyTorch on every move; behind the button the Triton kernel itself."""

    name = "transposed-mask"
    readout_lines = 4

    def __init__(self, **settings):
        self._figure, self._kernel = TileFigure(MOST), {}
        made = {
            "BK": knobs.steps(32, (16, 32, 64), "tile BK"),
            "K": knobs.integer(100, 1, MOST, "K"),
            "BV": knobs.steps(32, (16, 32, 64), "tile BV"),
            "V": knobs.integer(120, 1, MOST, "V"),
            "mask": knobs.choice("transposed", MASKS, "mask"),
        }
        self.run = ButtonRun("run the Triton kernel", self._run_kernel, done=self._keep, failed=self.fail)
        super().__init__(
            made,
            settings,
            alt="The state as rows of keys and columns of values, cut into tiles: hatched where the mask leaves out an "
            "entry or lets through memory beyond the state; beside it the number of wrong entries for every K and V",
            runs=(self.run,),
        )

    def compute(self, BK, BV, K, V, mask, seed):
        if mask == "transposed" and BK != BV:
            return None
        x, exact = _made(K, V, seed)
        found = case.run(x, BK, BV, transposed=mask == "transposed", backend="torch")
        return _wrong(found, x), relative_l2(found.dr, exact)

    def draw(self, result, *, BK, BV, K, V, mask, **_) -> None:
        transposed = mask == "transposed"
        refused = f"does not compile:\nmask [{BK}, {BV}], tile [{BV}, {BK}]"
        self.canvas = self._figure.canvas
        self._figure.update(
            title=f"Tile [BV, BK] = [{BV}, {BK}], mask "
            + (f"[BK, BV] = [{BK}, {BV}]" if transposed else f"[BV, BK] = [{BV}, {BK}]")
            + f", a state of K x V = {K} x {V}",
            size=(K, V),
            tile=(BK, BV),
            loaded=None if result is None else case.tiles(K, V, BK, BV, transposed=transposed),
            counts=None if result is None else _counts(BK) if transposed else torch.zeros(MOST, MOST),
            refused=refused if result is None else "",
        )

    def describe(self, result, *, BK, BV, K, V, mask, seed) -> str:
        ran = self._kernel.get((BK, BV, K, V, mask, seed))
        if result is None:
            return "\n".join(
                [
                    f"A mask [{BK}, {BV}] does not fit a tile [{BV}, {BK}]: the compiler refuses the kernel, with any "
                    "GPU and with none.",
                    "That is luck. Make the tile square and the same line compiles.",
                    *([f"The kernel: {ran}"] if ran else []),
                ]
            )
        count, off = result
        predicted = case.law(K, V, BK, BV) if mask == "transposed" else 0
        lines = [
            f"Law: {predicted} of {K * V} entries of the state are wrong. Measured: {count}.",
            f"dr of the first {T} tokens is off by {error(off)} (L2): "
            + ("rounding, nothing to see." if off < 1e-5 else "finite, plausible, wrong."),
        ]
        if mask == "transposed" and count == 0:
            whole = K % BK == V % BV == 0
            why = "K and V are multiples of the tile" if whole else "K = V fits into one tile"
            lines.append(f"Hidden: {why}, and the mask is its own mirror image.")
        if ran:
            lines.append(f"The kernel: {ran}")
        return "\n".join(lines)

    def script(self, *, BK, BV, K, V, mask, seed) -> str:
        transposed = mask == "transposed"
        return f"""from flakit.cases import transposed_mask as case

x = case.inputs({K}, {V}, T={T}, seed={seed})
found = case.run(x, {BK}, {BV}, transposed={transposed})  # backend="triton": the kernel itself
measured = int((found.seen != x["initial_state"]).sum())
print("law", {f"case.law({K}, {V}, {BK}, {BV})" if transposed else 0}, "measured", measured)
"""

    def _run_kernel(self, progress, cancelled):
        setting = self.setting
        x, _ = _made(setting["K"], setting["V"], setting["seed"])
        if torch.cuda.is_available():
            x = {name: tensor.cuda() for name, tensor in x.items()}
        progress(0, 1)
        transposed = setting["mask"] == "transposed"
        try:
            found = case.run(x, setting["BK"], setting["BV"], transposed=transposed, backend="triton")
            said = f"{_wrong(found, x)} wrong entries."
        except case.DoesNotCompile as error:
            said = str(error)
        progress(1, 1)
        return tuple(setting[name] for name in ("BK", "BV", "K", "V", "mask", "seed")), said

    def _keep(self, found) -> None:
        key, said = found
        self._kernel[key] = said
        self.redraw()


def _wrong(found: case.Run, x: dict) -> int:
    return int((found.seen != x["initial_state"]).sum())


@functools.lru_cache(maxsize=64)
def _made(K: int, V: int, seed: int):
    x = case.inputs(K, V, T=T, seed=seed)
    return x, truth("rwkv6", x)["dr"]


@functools.lru_cache(maxsize=8)
def _counts(B: int) -> torch.Tensor:
    sizes = torch.arange(1, MOST + 1)
    return case.law(sizes[:, None], sizes[None, :], B, B)


def transposed_mask(**settings) -> TransposedMask:
    """A panel that loads a state in tiles under a mask, the right one or its transpose, and counts what is wrong.

    settings: any of its knobs: BK and BV (16, 32 or 64), K and V (1 … 128), mask ("transposed" or "right"), seed.

    >>> transposed_mask(K=40, V=64)
    """
    return TransposedMask(**settings)
