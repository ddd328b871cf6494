"""The sketches of 00_start_here."""

from ...cases import anchor
from ...figures.sketches.start_here import Broken, BrokenShown
from ...numerics.evaluate import truth
from ...numerics.inputs import inputs
from ..knobs import DecayKnob
from .sketch import Sketch

_BREAKS = (0.0, -0.1, -0.3, -0.5, -0.7, -0.9, -1.0, -1.1, -1.2, -1.3, -1.33, -1.36, -1.39, -1.42, -1.5, -2.0, -5.0)


def _broken(decay: float, seed: int = 0) -> BrokenShown:
    x = inputs("rwkv6", T=64, H=1, K=32, decay=decay, seed=seed)
    run, exact = anchor.run(x, "none"), truth("rwkv6", x, recurrence=False)
    shares = {name: bad.double().mean().item() for name, bad in run.non_finite.items() if name != "final_state"}
    return BrokenShown(decay, run.tensors["dr"][0, :, 0].numpy(), exact["dr"][0, :, 0].numpy(), shares)


SKETCHES = {
    "broken": Sketch(
        {"decay": lambda: DecayKnob(-1.0, "decay", stops=_BREAKS, low=-5.0)},
        _broken,
        Broken,
        {"fine": {"decay": -1.33}, "broken": {"decay": -1.39}},
        """import flakit
from flakit.cases import anchor

x = flakit.inputs("rwkv6", T=64, H=1, K=32, decay={decay}, seed={seed})
for name, bad in anchor.run(x, "none").non_finite.items():
    print(f"{{name:12}} {{bad.double().mean():7.2%}} not finite")
""",
        random=True,
    ),
}
