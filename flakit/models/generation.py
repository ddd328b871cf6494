"""Generation: the prompt runs as one call, then each new token takes one step of the recurrence.

tokens, mask = pad([prompt, longer_prompt])
new = generate(model, tokens, 100, mask=mask, temperature=0.8, top_p=0.9, seed=0)  # [2, 100]
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from ..ops.common import validation as check
from ..ops.common.registration import plain_eager
from .language_model import LanguageModel
from .layers import whole
from .stream import RECURRENT
from .training import evaluating


def pad(sequences: Sequence[Tensor | Sequence[int]], device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Left-pad sequences of tokens, all on one device, to one length; return tokens [B, T], int64, and mask [B, T],
    bool, False at the padding.

    Raises ValueError for no sequences, or one that is empty or not 1-D; TypeError unless they hold int64 or int32."""
    if len(sequences) == 0:
        raise ValueError("sequences: expected at least one, got none")
    rows = [torch.as_tensor(row, device=device) for row in sequences]
    for n, row in enumerate(rows):
        if row.ndim != 1 or len(row) == 0:
            raise ValueError(f"sequences[{n}]: expected [T] with T of at least 1, got {list(row.shape)}")
        if row.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"sequences[{n}]: expected whole numbers, got {str(row.dtype).removeprefix('torch.')}")
    tokens = pad_sequence([row.long() for row in rows], batch_first=True, padding_side="left")
    mask = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return tokens, pad_sequence(mask, batch_first=True, padding_side="left")


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
    """Continue each row of tokens by sampling: [B, n], n = max_new_tokens, or fewer once every row has ended.

    The recurrent form of the operator computes each token from the state alone, so that time and memory per token do
    not grow with the text, except for mixer "attention". On a GPU a step replays as one CUDA graph, which avoids the
    launch overhead of its kernels. Hooks on the model, compiled parts, autocast, a custom operator, `flakit.trace` and
    `flakit.checked()` need the host: with any of them kernels are launched one by one. The tokens are the same.

    Args:
        tokens: the prompts, [B, T].
        mask: [B, T], as in the model's forward, for prompts of different lengths; `pad` makes both. Every row needs a
            token.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens only, the fewest whose probabilities (after temperature and top_k)
            reach p, at least one.
        eos: the token that ends a row; the rest of that row is eos.
        seed, generator: for sampling: an integer, or a generator on the model's device. Default PyTorch's global one.
        initial_state: the final state of an earlier call of the model, which these tokens continue.

    Raises TypeError or ValueError, naming the argument, the expected and the actual value. NaN in the logits raises
    ValueError where values are checked: on a CPU, or under `flakit.checked()`.
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
        new = tokens.new_full((len(tokens), max_new_tokens), 0 if eos is None else eos)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for n in range(max_new_tokens):
            token = draw(model.head(x), temperature, top_k, top_p, generator)
            if eos is not None:
                token = token.masked_fill(ended, eos)
                ended |= token == eos
            new[:, n] = token
            if eos is not None and ended.all():
                return new[:, : n + 1]
            if n + 1 < max_new_tokens:
                x = step(new[:, n : n + 1])
    return new


WORTH_A_GRAPH = 8
"""The number of steps from which a CUDA graph pays off; capturing one costs two steps."""


def _next_step(model: LanguageModel, state: Mapping[str, Tensor], steps: int) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens [B, 1] to the head's input [B, dim]; each call advances the model's state."""
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
    return _is_repeatable(model) and not torch.cuda.is_current_stream_capturing()


def _is_repeatable(model: LanguageModel) -> bool:
    """Return whether every step launches the same kernels and nothing in Python observes it: the replay of a CUDA graph
    calls no hook, and `flakit.trace` would not see it."""
    if not all(getattr(block.time, "operator", None) in RECURRENT for block in model.blocks):
        return False  # attention, whose state grows, or a custom operator, which may synchronise with the GPU
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    compiled = any(part._compiled_call_impl for part in model.modules())
    return plain_eager([model.head.weight]) and not (hooked or compiled)


class _Captured:
    """A step as a CUDA graph: it reads `token` and `state`, writes the head's input to `x`, and updates `state` in
    place."""

    def __init__(self, model: LanguageModel, state: Mapping[str, Tensor]):
        device = model.head.weight.device
        with torch.cuda.device(device):
            self.state = {name: each.clone() for name, each in state.items()}
            B = next(iter(self.state.values())).shape[0]
            self.token = torch.zeros(B, 1, dtype=torch.int64, device=device)
            warmup = torch.cuda.Stream()
            warmup.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warmup):  # compile and initialise before the capture
                model._features(self.token, initial_state=self.state, output_final_state=True)
            torch.cuda.current_stream().wait_stream(warmup)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                x, final_state, _ = model._features(self.token, initial_state=self.state, output_final_state=True)
                self.x = x[:, -1]
                for name, each in final_state.items():
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
    """Sample a token for each row of logits [B, vocab]; return int64 [B]. Raise ValueError for NaN where values are
    checked."""
    if check.looks_at_values(logits) and logits.isnan().any():
        row = logits.isnan().any(1).nonzero()[0].item()
        raise ValueError(
            f"model: expected logits to draw from, got NaN in row {row}; flakit.trace finds where it is born"
        )
    if temperature == 0:
        return logits.argmax(-1)
    # Subtract the maximum first: a small temperature then gives -inf for the others, never inf - inf.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0]
    scaled, candidates = scaled.topk(logits.shape[-1] if top_k is None else top_k)
    probs = scaled.softmax(-1)
    if top_p is not None:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)  # drop the tokens after p is reached
    return candidates.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]
