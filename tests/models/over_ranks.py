"""A language model over several processes, each with its slice of T, beside the same one in one process."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flakit.models import LanguageModel, loss, sum_gradients
from flakit.models.language_model import IGNORED
from tests.models.awake import awake

VOCAB, B, T = 11, 2, 24
MIXERS = "rwkv6", "rwkv7", "gsa"
CUTS = {2: ((11, 13), (24, 0)), 3: ((5, 1, 18), (0, 20, 4)), 4: ((7, 6, 5, 6), (0, 9, 0, 15))}


@dataclass(frozen=True)
class Call:
    """What a model is called with."""

    mask: bool = False
    offsets: tuple[int, ...] | None = None
    states: bool = False


CALLS = (
    Call(),
    Call(states=True),
    Call(mask=True, states=True),
    Call(offsets=(0, 5, 5, 20, 22), states=True),
    Call(offsets=(0, T)),
    Call(offsets=(0, 1, 12, 13, 24, 24), states=True),
)


def made(call: Call, mixer: str):
    """A model in which every layer has something to say, whole rows of tokens and targets, and how to call it."""
    generator = torch.Generator().manual_seed(3)
    gated = mixer == "rwkv6"
    model = LanguageModel(VOCAB, dim=16, layers=2, mixer=mixer, head_size=8, gated=gated).double()
    awake(model, generator=generator)
    rows = B if call.offsets is None else 1
    tokens = torch.randint(VOCAB, (rows, T), generator=generator)
    targets = torch.randint(VOCAB, (rows, T), generator=generator)
    how, told = {}, torch.ones_like(tokens, dtype=torch.bool)
    if call.mask:
        told = torch.rand(rows, T, generator=generator) < 0.5
        told[0, : T // 2], told[1, 4:] = False, False  # a row that begins on a later rank, and one that ends early
        how["mask"] = told
    if call.offsets is not None:
        told[:, call.offsets[-1] :] = False
        how["cu_seqlens"] = torch.tensor(call.offsets)
    targets = targets.masked_fill(~told | (torch.rand(rows, T, generator=generator) < 0.2), IGNORED)
    if call.states:
        n = rows if call.offsets is None else len(call.offsets) - 1
        _, state = model(torch.randint(VOCAB, (n, 3), generator=generator), output_final_state=True)
        how["initial_state"] = {name: x.detach().requires_grad_() for name, x in state.items()}
        how["output_final_state"] = True
    return model, tokens, targets, told, how


def run(model, tokens, targets, told, how, own=slice(None), group=None):
    """The loss and its gradient at the logits; logits, where there are tokens; final states; gradients of parameters
    and of initial states. `own`: which of the T these tokens are."""
    found, states = model(tokens, **how, **({} if group is None else {"group": group})), {}
    if isinstance(found, tuple):
        found, states = found
    total = loss(found, targets, group)
    (asked,) = torch.autograd.grad(total, found, retain_graph=True)
    random = torch.Generator().manual_seed(4)
    weights = torch.randn(len(tokens), T, VOCAB, generator=random, dtype=found.dtype)[:, own] * told[..., None]
    reads = [(x * torch.randn(x.shape, generator=random, dtype=x.dtype)).sum() for x in states.values()]
    ((found * weights).sum() + sum(reads)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    given = how.get("initial_state", {})
    begun = {f"initial {n}": torch.zeros_like(x) if x.grad is None else x.grad for n, x in given.items()}
    return total, asked, found * told[..., None], {name: x.detach() for name, x in states.items()}, grads, begun


def models(rank: int) -> None:
    """Everything that one process gives is what the ranks give together."""
    group, world = dist.group.WORLD, dist.get_world_size()
    for n, (mixer, call) in enumerate((mixer, call) for mixer in MIXERS for call in CALLS):
        model, tokens, targets, told, how = made(call, mixer)
        true = run(model, tokens, targets, told, how)
        lengths = CUTS[world][n % 2]
        end = list(accumulate(lengths))[rank]
        own = slice(end - lengths[rank], end)
        model, tokens, targets, told, how = made(call, mixer)
        if call.mask:
            how["mask"] = how["mask"][:, own]
        *found, states, grads, begun = run(model, tokens[:, own], targets[:, own], told[:, own], how, own, group)
        sum_gradients(model.parameters(), group)
        for x in (*states.values(), *begun.values()):
            dist.all_reduce(x)
        total, asked, logits, *named = true
        # The loss is in float32, all else in float64.
        for name, x, y, at in zip(
            ("loss", "dlogits", "logits"),
            found,
            (total, asked[:, own], logits[:, own]),
            (1e-6, 1e-6, 1e-10),
            strict=True,
        ):
            assert torch.allclose(x, y, rtol=at, atol=at), (mixer, call, lengths, name)
        for x, y in zip((states, grads, begun), named, strict=True):
            assert x.keys() == y.keys()
            for name in x:
                assert torch.allclose(x[name], y[name], rtol=1e-9, atol=1e-10), (mixer, call, lengths, name)


def refused(rank: int) -> None:
    group = dist.group.WORLD
    model = LanguageModel(VOCAB, dim=16, layers=1, head_size=8)
    attention = LanguageModel(VOCAB, dim=16, layers=1, head_size=8, mixer="attention")
    tokens = torch.zeros(1, 5, dtype=torch.long)
    other = tokens if rank == 0 else tokens + VOCAB
    wider = tokens.expand(1 + rank, -1)
    for call, given, more, text in (
        (attention, tokens, {}, "group: expected None with mixer 'attention'"),
        (model, wider, {}, r"tokens: expected the same on every rank of the group, got \[1, T\] on rank 0"),
        (model, tokens, {"mask": tokens == 0} if rank else {}, "mask: expected the same on every rank of the group"),
        (model, tokens, {"cu_seqlens": torch.tensor([0, 11])}, "cu_seqlens: expected offsets up to T = 10"),
        (model, other, {}, "tokens: expected 0 to 10" if rank else "group: no rank runs, since rank 1 was refused"),
    ):
        with pytest.raises(ValueError, match=text):
            call(given, group=group, **more)
        assert model(tokens, group=group).shape == (1, 5, VOCAB)


def averaged(rank: int) -> None:
    """DistributedDataParallel takes the mean over ranks of gradients: as often as there are ranks."""
    group, world = dist.group.WORLD, dist.get_world_size()
    model, tokens, targets, *_ = made(Call(), "rwkv7")
    loss(model(tokens), targets).backward()
    true = [p.grad for p in model.parameters()]
    model, *_ = made(Call(), "rwkv7")
    own = slice(T // world * rank, T // world * (rank + 1))
    wrapped = DistributedDataParallel(model, process_group=dist.new_group())
    (world * loss(wrapped(tokens[:, own], group=group), targets[:, own], group)).backward()
    for p, y in zip(model.parameters(), true, strict=True):
        assert torch.allclose(p.grad, y, rtol=1e-5, atol=1e-8)
