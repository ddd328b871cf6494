"""The float64 truth of a setting, with which the audit compares a subject; computed once per setting and cached."""

import functools

import torch
from torch import Tensor

from ..numerics.evaluate import Arriving, one_thread, truth
from ..numerics.operators import Operator
from .budget import total_decay, units
from .setting import TRANSPOSED, Setting

SETTINGS = 2048
"""How many truths are cached; an audit of one operator has some 190."""


class Truth:
    """The outputs and gradients of an operator at one setting, in float64. values: by name, as `flakit.truth` names
    them. total: the largest |sum of log decays| of a channel over the sequence."""

    @one_thread()
    def __init__(self, op: Operator, setting: Setting, device: str):
        self.op, self.setting, self.device = op, setting, device
        x, arriving = self._inputs()
        values = _running_means(op, x, arriving) if setting.no_decay else truth(op, x, arriving=arriving)
        self.values: dict[str, Tensor] = {name: y.detach() for name, y in values.items()}
        self.total = total_decay(op.log_decay(x))

    @functools.cached_property
    @one_thread()
    def units(self) -> dict[str, Tensor]:
        """How far rounding of the inputs moves each value, from `budget.units`; slow, so computed at first use."""
        if self.setting.no_decay:  # means of so many tokens do not cancel
            return {name: torch.zeros_like(y) for name, y in self.values.items()}
        return units(self.op, *self._inputs(), self.values)

    def _inputs(self) -> tuple[dict, Arriving]:
        x, (do, dstate) = self.setting.make(self.op, self.device)
        loss = self.setting.loss
        return x, (torch.zeros_like(do) if loss == "state" else do, None if loss == "o" else dstate)


def truth_of(op: Operator, setting: Setting, device: str, power: float | None = None) -> Truth:
    """Return the `Truth` of a setting, cached. power: the default scale is K ** power; None for the operator's own."""
    if setting.scale is None and power is not None:
        setting = setting.without(scale=float(setting.K) ** power)
    # Layouts, pieces and slices do not change the truth.
    key = setting.without(layout="contiguous", offsets="contiguous", cut=None, wanted=None, again=False, slices=None)
    return _cached(op, key.without(states="contiguous") if key.states == TRANSPOSED else key, device)


_cached = functools.lru_cache(maxsize=SETTINGS)(Truth)


def _running_means(op: Operator, x: dict, arriving: Arriving) -> dict[str, Tensor]:
    """Return GSA's truth without a decay: slot m at token t holds the mean of all writes up to t, weighted by e^s. It
    is computed with decays log(sum of e^s before t) - log(sum up to t), and writes e^s / (sum up to t)."""
    s = x["s"].detach().double().requires_grad_()
    total = s.logcumsumexp(1)
    g = torch.cat((torch.zeros_like(total[:, :1]), total[:, :-1] - total[:, 1:]), 1)  # token 0 has nothing to forget
    share = (s - total).exp()
    values = truth(op, x | {"s": share.detach(), "g": g.detach()}, arriving=arriving)
    (ds,) = torch.autograd.grad([share, g], s, [values["ds"], values["dg"]])
    return values | {"ds": ds}
