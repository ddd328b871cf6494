"""The sketches of 11_gsa."""

import torch

from ...figures.sketches.gsa import SlotGate, SlotGateShown, Slots, SlotsShown
from ...ops.gsa import fused_recurrent_gsa, reference
from ..knobs import DecayKnob, NumberKnob
from .sketch import Sketch

_T, _M, _K = 8, 4, 6
_GATES = (0.0, -0.1, -0.2, -0.3, -0.5, -0.7, -1.0, -1.5, -2.0, -3.0, -5.0)
_MORE = 40  # tokens that "slot_gate" reads after the first
_F = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -5.0, -7.0, -10.0, -15.0, -20.0, -30.0, -40.0)
_FIELD = 50.0  # the largest |f|


def _slots(gate: float) -> SlotsShown:
    """Values are unit vectors, so that a slot's values show how much of each token it holds."""
    q, k = torch.randn(2, 1, _T, 1, _K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = torch.eye(_T, dtype=torch.float64)[None, :, None]
    s = torch.nn.functional.one_hot(torch.arange(_T) % _M, _M).double()[None, :, None]
    *_, last = reference.steps(q, k, v, s, torch.where(s > 0, gate, 0.0))
    window = slice(_T - _M, _T)
    attention = torch.zeros(_T, dtype=torch.float64)
    attention[window] = (_K**-0.5 * k[0, window, 0] @ q[0, -1, 0]).softmax(0)
    return SlotsShown(gate, *(x.numpy() for x in (last.hv[0, 0], last.p[0, 0], last.o[0, 0], attention)))


def _gate(f: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(f) / 8


def _slot_gate(f: float) -> SlotGateShown:
    """One slot, in which the first token writes 1: its softmax is 1, so the output is its value."""
    g = _gate(torch.tensor(f, dtype=torch.float64))
    ones = torch.ones(1, _MORE + 1, 1, 1, dtype=torch.float64)
    s = ones.clone()
    s[:, 1:] = 0
    o = fused_recurrent_gsa(ones, ones, ones, s, g * ones).o
    at = torch.linspace(max(_F) + 1, min(_F) - 1, 200, dtype=torch.float64)
    return SlotGateShown(f, g.item(), *(x.numpy() for x in (o[0, 1:, 0, 0], at, _gate(at))))


SKETCHES = {
    "slots": Sketch(
        {"gate": lambda: DecayKnob(0.0, "gate", stops=_GATES)},
        _slots,
        Slots,
        {"nothing fades": {"gate": 0.0}, "wiped first": {"gate": float("-inf")}},
        """import torch
from flakit.ops.gsa import reference

q, k = torch.randn(2, 1, 8, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
v = torch.eye(8, dtype=torch.float64)[None, :, None]
s = torch.nn.functional.one_hot(torch.arange(8) % 4, 4).double()[None, :, None]
*_, last = reference.steps(q, k, v, s, torch.where(s > 0, {gate}, 0.0))
print("what each slot holds of each token", last.hv[0, 0], sep="\\n")
print("weights of the tokens", last.o[0, 0])
print("softmax attention    ", (6**-0.5 * k[0, 4:, 0] @ q[0, -1, 0]).softmax(0))
""",
    ),
    "slot_gate": Sketch(
        {"f": lambda: NumberKnob(0.0, "f", stops=_F, low=-_FIELD, high=_FIELD)},
        _slot_gate,
        SlotGate,
        {"fresh": {"f": 0.0}, "drifted": {"f": -20.0}},
        """import torch

g = torch.nn.functional.logsigmoid(torch.tensor({f}, dtype=torch.float64)) / 8
print("g =", g.item())
for more in range(1, 41):
    print(more, (more * g).exp().item())
""",
    ),
}
