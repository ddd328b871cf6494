"""Synthetic tasks: endless sequences with known answers, of any length, made from a generator and nothing else.

    tokens, targets = Permutations(items=3).batch(64, T=32, generator=torch.Generator().manual_seed(0))

Both are [B, T] int64. A target of `IGNORED` is not asked about. `vocab` is the number of tokens a model must know.
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
    """State tracking: things change places, and after every move the model must say in which order they now lie.

    items: how many things, 2 to 5; 3 and 5 are the groups S3 and S5. moves: "swaps", each move exchanges two places,
    or "all", each is any element of the group. Token 0 begins a sequence and moves nothing, token n > 0 is move n - 1;
    the answer is the number of the order, one of items! classes. Every move counts for ever, and so does their order.
    For 5 items this is complete for NC1, which linear recurrences whose transitions are diagonal cannot express in a
    fixed number of layers if TC0 and NC1 differ (arXiv:2404.08819).
    """

    items: int = 3
    moves: str = "swaps"

    def __post_init__(self):
        if self.items not in range(2, 6):
            raise ValueError(f"items: expected 2, 3, 4 or 5, got {self.items!r}")
        if self.moves not in ("swaps", "all"):
            raise ValueError(f"moves: expected 'swaps' or 'all', got {self.moves!r}")

    @cached_property
    def after(self) -> Tensor:
        """The number of the order that a move makes of an order, [orders, moves]; order 0 has everything in place."""
        orders = list(itertools.permutations(range(self.items)))
        number = {order: n for n, order in enumerate(orders)}
        moved = [sum(a != b for a, b in zip(order, orders[0], strict=True)) for order in orders]
        moves = [order for order, n in zip(orders, moved, strict=True) if self.moves == "all" or n == 2]
        return torch.tensor(
            [[number[tuple(order[at] for at in move)] for move in moves] for order in orders], device="cpu"
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
    """Associative recall: keys and values take turns; where a key comes back, the model must say its value.

    keys, values: how many of each there are. Each sequence draws its own value for every key.
    """

    keys: int = 16
    values: int = 16

    def __post_init__(self):
        whole("keys", self.keys), whole("values", self.values)

    @property
    def vocab(self) -> int:
        return self.keys + self.values

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        book = torch.randint(self.values, (size, self.keys), generator=generator, device="cpu") + self.keys
        key = torch.randint(self.keys, (size, -(-T // 2)), generator=generator, device="cpu")
        value = book.gather(1, key)
        seen = (key[:, :, None] == key[:, None, :]).tril(-1).any(-1)
        tokens = torch.stack((key, value), -1).flatten(1)
        targets = torch.stack((value.where(seen, IGNORED), torch.full_like(value, IGNORED)), -1).flatten(1)
        return tokens[:, :T], targets[:, :T]


@dataclass(frozen=True)
class Copying:
    """Copying: random symbols, a sign to begin, and the same symbols again, which the model must say one ahead.

    symbols: how many there are; the sign is one token more. The first half of the sequence is not asked about.
    """

    symbols: int = 16

    def __post_init__(self):
        whole("symbols", self.symbols)

    @property
    def vocab(self) -> int:
        return self.symbols + 1

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        size, T = whole("size", size), whole("T", T)
        half = (T + 1) // 2
        said = torch.randint(self.symbols, (size, half), generator=generator, device="cpu")
        sign = torch.full((size, 1), self.symbols, device="cpu")
        silent = torch.full((size, half), IGNORED, device="cpu")
        return torch.cat((said, sign, said), 1)[:, :T], torch.cat((silent, said), 1)[:, :T]


@dataclass(frozen=True)
class Delay:
    """Delayed copying: at every token say the one `by` tokens before. Whatever is older is noise and best forgotten.

    symbols: how many there are, drawn evenly. The first `by` positions are not asked about. The models' token shifts
    reach one token back, so that for a delay of 2 and more the answer must come through the recurrence.
    """

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
