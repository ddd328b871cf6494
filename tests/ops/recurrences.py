"""The reference recurrences in float64, with inputs for each, states among them."""

from importlib import import_module

import torch

from flakit.numerics.evaluate import cotangents
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import operator


class Recurrence:
    """The reference of an operator and its chunked form in PyTorch, called with a state's parts as one argument."""

    def __init__(self, op: str):
        self.op = op
        self.tensors = operator(op).tensors
        self.reference, self.chunked = (
            import_module(f"flakit.ops.{op}.{name}") for name in ("reference", "chunk_torch")
        )
        self.sizes = {"K": 5, "V": 3} | ({"M": 4} if op == "gsa" else {})
        self.small = {"T": 3, "B": 1, "K": 3, "V": 2} | ({"M": 2, "G": 2} if op == "gsa" else {})
        model = operator(op).profile
        self.decays = [model, "rwkv6-wide", "none", -1e-4, -8.0, -50.0, "spikes", "inf-spikes", "forget"]

    def arguments(self, *, T=7, B=2, G=1, decay="rwkv6-wide", dtype=torch.float64, seed=0, **sizes):
        """Return the arguments of `forward`, and the gradients of o and of the final state."""
        sizes = self.sizes | sizes | ({"HQ": 2 * G} if G > 1 else {})
        made = inputs(self.op, B=B, T=T, H=2, decay=decay, dtype=dtype, initial_state=True, seed=seed, **sizes)
        do, dstate = cotangents(self.op, made, dfinal_state=True)
        return (*(made[name] for name in self.tensors), 0.3, made["initial_state"]), do, dstate

    def forward(self, *args):
        return flat(self.reference.forward(*args))

    def backward(self, *args):
        return flat(self.reference.backward(*args))

    def split(self, leaves):
        """Return the rows and the state of a flat list of tensors."""
        n = len(self.tensors)
        return leaves[:n], leaves[n] if len(leaves) == n + 1 else tuple(leaves[n:])

    def by_autograd(self, args, do, dstate):
        *rows, scale, state = args
        leaves = [x.clone().requires_grad_() for x in flat((*rows, state))]
        rows, state = self.split(leaves)
        return torch.autograd.grad(self.forward(*rows, scale, state), leaves, flat((do, dstate)))


def flat(results):
    """Return (x, …, (hk, hv)) as (x, …, hk, hv), and (x, …, state) as it is."""
    return (*results[:-1], *results[-1]) if isinstance(results[-1], tuple) else tuple(results)
