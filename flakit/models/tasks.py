"""Synthetic tasks: unlimited random sequences of any length with known answers, drawn from a generator.

    tokens, targets = Permutations(items=3).batch(64, T=32, generator=torch.Generator().manual_seed(0))

Both are [B, T] int64. `IGNORED` marks a position without a target. `vocab` is the vocabulary size a model needs.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from .language_model import IGNORED
from .layers import whole


@dataclass(frozen=True)
class Permutations:
    """State tracking: items are permuted, and after every move the model must name their current order.

    items: number of items, 2 to 5; 3 and 5 give the groups S3 and S5. moves: "swaps", transpositions only, or "all",
    any element of the group; others raise ValueError. Token 0 begins a sequence and moves nothing; token n > 0 is move
    n - 1. The target is the index of the current order, one of items! classes. It depends on all earlier moves and on
    their sequence. For 5 items the task is complete for NC1. If TC0 and NC1 differ, linear recurrences with diagonal
    transitions cannot express it in a fixed number of layers (arXiv:2404.08819)."""

    items: int = 3
    moves: str = "swaps"

    def __post_init__(self):
        if self.items not in range(2, 6):
            raise ValueError(f"items: expected 2, 3, 4 or 5, got {self.items!r}")
        if self.moves not in ("swaps", "all"):
            raise ValueError(f"moves: expected 'swaps' or 'all', got {self.moves!r}")

    @cached_property
    def after(self) -> Tensor:
        """Transition table [orders, moves], int64: the index of the order after a move. Order 0 is the identity."""
        orders = list(itertools.permutations(range(self.items)))
        index = {order: n for n, order in enumerate(orders)}
        displaced = [sum(a != b for a, b in zip(order, orders[0], strict=True)) for order in orders]
        moves = [order for order, n in zip(orders, displaced, strict=True) if self.moves == "all" or n == 2]
        return torch.tensor(
            [[index[tuple(order[i] for i in move)] for move in moves] for order in orders], device="cpu"
        )

    @property
    def classes(self) -> int:
        return len(self.after)

    @property
    def vocab(self) -> int:
        return max(self.classes, self.after.shape[1] + 1)

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        moves = torch.randint(self.after.shape[1], (size, T), generator=generator, device="cpu")
        order = torch.zeros(size, dtype=torch.long, device="cpu")
        targets = [order]
        for move in moves.unbind(1)[1:]:
            order = self.after[order, move]
            targets.append(order)
        tokens = moves + 1
        tokens[:, 0] = 0
        return tokens, torch.stack(targets, 1)


@dataclass(frozen=True)
class Recall:
    """Associative recall: keys and values alternate; where a key recurs, the model must predict its value. keys,
    values: the number of each. Each sequence draws its own value for every key."""

    keys: int = 16
    values: int = 16

    def __post_init__(self):
        whole("keys", self.keys), whole("values", self.values)

    @property
    def vocab(self) -> int:
        return self.keys + self.values

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        value_of = torch.randint(self.values, (size, self.keys), generator=generator, device="cpu") + self.keys
        key = torch.randint(self.keys, (size, -(-T // 2)), generator=generator, device="cpu")
        value = value_of.gather(1, key)
        seen = (key[:, :, None] == key[:, None, :]).tril(-1).any(-1)
        tokens = torch.stack((key, value), -1).flatten(1)
        targets = torch.stack((value.where(seen, IGNORED), torch.full_like(value, IGNORED)), -1).flatten(1)
        return tokens[:, :T], targets[:, :T]


@dataclass(frozen=True)
class Copying:
    """Copying: random symbols, a start token, then the same symbols again, each of which the model must predict.
    symbols: their number; the start token is one more. The first half of the sequence has no targets."""

    symbols: int = 16

    def __post_init__(self):
        whole("symbols", self.symbols)

    @property
    def vocab(self) -> int:
        return self.symbols + 1

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        half = (T + 1) // 2
        symbols = torch.randint(self.symbols, (size, half), generator=generator, device="cpu")
        start = torch.full((size, 1), self.symbols, device="cpu")
        ignored = torch.full((size, half), IGNORED, device="cpu")
        return torch.cat((symbols, start, symbols), 1)[:, :T], torch.cat((ignored, symbols), 1)[:, :T]


@dataclass(frozen=True)
class Delay:
    """Delayed copying: at every token predict the one `by` tokens earlier. Older tokens are noise, best forgotten.

    symbols: their number, drawn uniformly. The first `by` positions have no targets. Token shift reaches one token
    back, so for a delay of 2 or more the answer must pass through the recurrence."""

    symbols: int = 64
    by: int = 2

    def __post_init__(self):
        whole("symbols", self.symbols), whole("by", self.by)

    @property
    def vocab(self) -> int:
        return self.symbols

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        tokens = torch.randint(self.symbols, (size, T), generator=generator, device="cpu")
        targets = torch.full_like(tokens, IGNORED)
        targets[:, self.by :] = tokens[:, : -self.by]
        return tokens, targets
