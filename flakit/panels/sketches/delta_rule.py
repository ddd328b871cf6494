"""The sketches of 08_delta_rule."""

import torch

from ...figures.sketches.delta_rule import Editing, EditingShown, Revisions, RevisionsShown
from ...ops.rwkv7 import fused_recurrent_rwkv7, reference
from .. import knobs
from .sketch import Sketch

DOOR, LAMP = torch.eye(2)
OPEN, CLOSED, ON, OFF = torch.eye(4)
"""Keys of two things and values for their states."""

_WRITES = ((DOOR, CLOSED), (LAMP, ON), (DOOR, OPEN))
_TOKENS = 8  # of "revisions", all under one key


def _editing(alpha: float) -> EditingShown:
    k, v = (torch.stack(rows)[None, :, None] for rows in zip(*_WRITES, strict=True))
    *_, last = reference.steps(r=k, w=torch.zeros_like(k), k=k, v=v, a=-k, b=alpha * k)
    tables = (last.state_before, last.edit, last.kv, last.state)
    return EditingShown(alpha, *(table[0, 0].numpy() for table in tables))


def _revisions(alpha: float) -> RevisionsShown:
    """The gradient of the last output with respect to every value: how much each contributes."""
    k = torch.ones(1, _TOKENS, 1, 1, dtype=torch.float64)
    v = torch.ones_like(k, requires_grad=True)
    o = fused_recurrent_rwkv7(k, torch.zeros_like(k), k, v, -k, alpha * k).o
    (counts,) = torch.autograd.grad(o[0, -1].sum(), v)
    return RevisionsShown(alpha, counts[0, :, 0, 0].numpy())


def _alpha():
    return knobs.number(1.0, 0.0, 2.0, "taken out α", 0.1, False)


SKETCHES = {
    "editing": Sketch(
        {"alpha": _alpha},
        _editing,
        Editing,
        {"adds": {"alpha": 0.0}, "corrects": {"alpha": 0.5}, "replaces": {"alpha": 1.0}, "turns round": {"alpha": 2.0}},
        """import torch
from flakit.panels.sketches.delta_rule import CLOSED, DOOR, LAMP, ON, OPEN

memory = torch.outer(DOOR, CLOSED) + torch.outer(LAMP, ON)
answer = DOOR @ memory
memory = memory - {alpha} * torch.outer(DOOR, answer) + torch.outer(DOOR, OPEN)
print("asked about the door: open, closed, on, off =", (DOOR @ memory).tolist())
""",
    ),
    "revisions": Sketch(
        {"alpha": _alpha},
        _revisions,
        Revisions,
        {"adds": {"alpha": 0.0}, "corrects": {"alpha": 0.5}, "replaces": {"alpha": 1.0}, "turns round": {"alpha": 2.0}},
        """import torch
from flakit import fused_recurrent_rwkv7

k = torch.ones(1, 8, 1, 1)  # eight tokens, all under one key
v = torch.ones_like(k, requires_grad=True)
o = fused_recurrent_rwkv7(k, torch.zeros_like(k), k, v, -k, {alpha} * k).o
print(torch.autograd.grad(o[0, -1].sum(), v)[0].flatten().tolist())
""",
    ),
}
