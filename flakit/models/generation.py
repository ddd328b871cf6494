"""Text from a model, a token at a time: the prompt goes in whole, then each token costs one step of the recurrence.

tokens, mask = pad([prompt, longer_prompt])
new = generate(model, tokens, 100, mask=mask, temperature=0.8, top_p=0.9, seed=0)  # [2, 100]
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Generator, Tensor

from ..ops.common import validation as check
from ..ops.common.registration import unseen
from .language_model import LanguageModel
from .layers import whole
from .stream import RECURRENT
from .training import evaluating


def pad(sequences: Sequence[Tensor | Sequence[int]], device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Sequences of tokens, each with its own length, as rows that end together: tokens [B, T] and mask [B, T].

    Zeros stand on the left where mask is False.
    """
    if len(sequences) == 0:
        raise ValueError("sequences: expected at least one, got none")
    rows = [torch.as_tensor(row, device=device) for row in sequences]
    for n, row in enumerate(rows):
        if row.ndim != 1 or len(row) == 0:
            raise ValueError(f"sequences[{n}]: expected [T] with T of at least 1, got {list(row.shape)}")
        if row.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"sequences[{n}]: expected whole numbers, got {str(row.dtype).removeprefix('torch.')}")
    T = max(map(len, rows))
    tokens, mask = (rows[0].new_zeros(len(rows), T, dtype=dtype) for dtype in (torch.int64, torch.bool))
    for n, row in enumerate(rows):
        tokens[n, T - len(row) :] = row
        mask[n, T - len(row) :] = True
    return tokens, mask


def generate(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    initial_state: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """What a model says after each row of tokens: [B, n], n = max_new_tokens, or less once every row has ended.

    Each token is computed from the state alone, by the recurrent form of the operator. Memory and time of a token do
    not grow with the text, but for mixer "attention". On a GPU its kernels are launched as one CUDA graph, so that the
    host does not hold the GPU up. Hooks on the model, compiled parts, autocast, an operator of your own,
    `flakit.trace` and `flakit.checked()` need the host: there they are launched one by one. The tokens are the same.

    Args:
        tokens: the prompts, [B, T].
        mask: [B, T], as the model takes it, for prompts of different lengths; `pad` makes both. No row may be empty.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the k likeliest tokens are drawn from.
        top_p: only the likeliest tokens whose probabilities, after temperature and top_k, add up to p are drawn from:
            the fewest that reach p, and at least one.
        eos: a token after which a row ends. What follows it in that row is eos again.
        seed, generator: of the drawing: a number, or a generator on the model's device. Default PyTorch's own.
        initial_state: what an earlier call of the model left, before these tokens.

    Raises TypeError or ValueError, naming the argument, what was expected and what came. Logits that are NaN are a
    ValueError where values are looked at: on a CPU, or under `flakit.checked()`.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    whole("max_new_tokens", max_new_tokens, 0)
    temperature, top_k, top_p = _check_sampling(model, temperature, top_k, top_p)
    if eos is not None and not (whole("eos", eos, 0) < model.vocab):
        raise ValueError(f"eos: expected 0 to {model.vocab - 1}, as vocab = {model.vocab}, got {eos}")
    generator = _generator(seed, generator, model)
    with evaluating(model):
        x, state, layout = model._features(tokens, mask, None, initial_state, True)
        if layout is None:
            x = x[:, -1]
        else:
            if check.looks_at_values(layout.last) and (layout.last < 0).any():
                raise ValueError(f"mask: expected a token in every row, got none in row {layout.last.argmin().item()}")
            x = layout.latest(x, None)
        step = _next_step(model, state, max_new_tokens - 1)
        made = tokens.new_full((len(tokens), max_new_tokens), 0 if eos is None else eos)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for n in range(max_new_tokens):
            token = draw(model.head(x), temperature, top_k, top_p, generator)
            if eos is not None:
                token = token.masked_fill(ended, eos)
                ended |= token == eos
            made[:, n] = token
            if eos is not None and ended.all():
                return made[:, : n + 1]
            if n + 1 < max_new_tokens:
                x = step(made[:, n : n + 1])
    return made


WORTH_A_GRAPH = 8
"""Tokens from which on a graph pays: it costs two steps to capture."""


def _next_step(model: LanguageModel, state: Mapping[str, Tensor], steps: int) -> Callable[[Tensor], Tensor]:
    """step(tokens [B, 1]) -> what the head reads, [B, dim]. Each step goes on from where the one before left off."""
    if steps >= WORTH_A_GRAPH and _can_be_captured(model):
        return _Captured(model, state)

    def step(token: Tensor) -> Tensor:
        nonlocal state
        x, state, _ = model._features(token, initial_state=state, output_final_state=True)
        return x[:, -1]

    return step


def _can_be_captured(model: LanguageModel) -> bool:
    weight = model.head.weight
    if not weight.is_cuda or check.looks_at_values(weight) or torch.is_autocast_enabled("cuda"):
        return False
    return _repeats_itself(model) and not torch.cuda.is_current_stream_capturing()


def _repeats_itself(model: LanguageModel) -> bool:
    """A step launches the same kernels each time, flakit's among them, and nothing follows it on the host: a replay
    calls no hook, and `flakit.trace` would see nothing of it."""
    if not all(getattr(block.time, "operator", None) in RECURRENT for block in model.blocks):
        return False  # attention, whose state grows; an operator of somebody else's, which may wait for the GPU
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    compiled = any(part._compiled_call_impl for part in model.modules())
    return unseen([model.head.weight]) and not (hooked or compiled)


class _Captured:
    """A step as a CUDA graph: it reads `token` and `state`, and leaves `x` and the state after it in their places."""

    def __init__(self, model: LanguageModel, state: Mapping[str, Tensor]):
        device = model.head.weight.device
        with torch.cuda.device(device):
            self.state = {name: each.clone() for name, each in state.items()}
            B = next(iter(self.state.values())).shape[0]
            self.token = torch.zeros(B, 1, dtype=torch.int64, device=device)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # what happens in a first call alone, compiling above all, is no part of it
                model._features(self.token, initial_state=self.state, output_final_state=True)
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                x, after, _ = model._features(self.token, initial_state=self.state, output_final_state=True)
                self.x = x[:, -1]
                for name, each in after.items():
                    self.state[name].copy_(each)

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.graph.replay()
        return self.x


def _check_sampling(
    model: LanguageModel, temperature: object, top_k: object, top_p: object
) -> tuple[float, int | None, float | None]:
    temperature = check.check_number("temperature", temperature)
    if temperature < 0:
        raise ValueError(f"temperature: expected a number of at least 0, got {temperature}")
    if top_k is not None:
        top_k = min(whole("top_k", top_k), model.vocab)
    if top_p is not None:
        top_p = check.check_number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected a number above 0, at most 1, got {top_p}")
    return temperature, top_k, top_p


def _generator(seed: object, generator: object, model: LanguageModel) -> Generator | None:
    device = model.head.weight.device
    if seed is not None:
        if generator is not None:
            raise ValueError("seed: expected None beside a generator, which has its own")
        return Generator(device).manual_seed(whole("seed", seed, 0))
    if generator is not None:
        if not isinstance(generator, Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")
        if generator.device.type != device.type:
            raise ValueError(f"generator: expected device {device} like the model, got {generator.device}")
    return generator


def draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Generator | None
) -> Tensor:
    """A token for each row of logits [B, vocab]."""
    if check.looks_at_values(logits) and logits.isnan().any():
        row = logits.isnan().any(1).nonzero()[0].item()
        raise ValueError(
            f"model: expected logits to draw from, got NaN in row {row}; flakit.trace finds where it is born"
        )
    if temperature == 0:
        return logits.argmax(-1)
    # From the largest down, so that a small temperature makes -inf of the others and never inf - inf.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return torch.multinomial(chosen.softmax(-1), 1, generator=generator)[:, 0]
    chosen, which = chosen.topk(logits.shape[-1] if top_k is None else top_k)
    share = chosen.softmax(-1)
    if top_p is not None:
        share = share.masked_fill(share.cumsum(-1) - share >= top_p, 0)  # those that come after p is reached
    return which.gather(1, torch.multinomial(share, 1, generator=generator))[:, 0]
