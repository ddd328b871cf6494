"""A training run that ends in NaN: a small RWKV6 learns Python's source, with kernels that differ only in their anchor.

    "none"        the factors of a chunk are taken from its start: NaN after some 80 steps
    "first-row"   blocks anchored at their first row, bug A of `anchor`: NaN after a thousand steps, from one token
    "right"       flakit's own: no NaN

Model, size and learning rate are those of `models.byte_prediction`. The loop has no guard: it applies the fatal step,
whose gradient is NaN, which makes every weight and the next loss NaN. data/fatal_run.json records each step.
data/fatal_run.npz has the state before each fatal step, and the text of the replayed steps, since the standard library
depends on the version of Python.

    resume(my_chunk_rwkv6)       continue the run from the step before, with another kernel
    fatal_batch()                the operator's inputs in that step, where the exponent is largest
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ...models import Corpus, LanguageModel, Run, loss, standard_library
from ...models.training import adamw
from ...numerics import recorded as recordings
from ...numerics.arguments import one_of
from ...ops.rwkv6 import chunk_rwkv6
from .watched import LIMIT, Drift, Output, exponents, faulty, follow

FATAL = {"none": "anchored at the chunk's start", "first-row": "anchored after a block's first row: bug A"}
"""The kernels that make the run fail, the earliest first, by their names in `anchor.SCHEMES`."""
KERNELS = FATAL | {"right": "flakit's own"}
SIZES = {"dim": 32, "layers": 1, "head_size": 16}
SEED = 14
"""The seed of the weights and of the text."""
CHUNK, TOKENS, SEQUENCES = 64, 128, 8
"""Tokens per chunk, tokens per sequence, sequences per step."""
RATE, WARMUP = 1e-2, 20
"""The learning rate, constant after this many warm-up steps."""
MODULES = 40
"""Number of modules of the standard library, in alphabetical order; the last tenth of their text is left out."""
LAYER = "blocks.0.time"
NAME = "fatal_run"


def initial() -> LanguageModel:
    """Return the untrained model with which every run starts."""
    return LanguageModel(Corpus.vocab, mixer="rwkv6", seed=SEED, **SIZES)


def library() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function `batch` for `models.train` that draws text from this Python's standard library."""
    return standard_library(MODULES).split(0.1)[0].batch


class Text:
    """The recorded text, one batch per step from step `first` on; `batch` is what `models.train` expects. Raises
    ValueError if no text was recorded for that step."""

    def __init__(self, first: int):
        starts = [int(name.split("/")[1]) for name in _stored() if name.startswith("text/")]
        start = max((n for n in starts if n <= first), default=0)
        self.pieces = _stored()[f"text/{start}"][first - start :]
        if not len(self.pieces):
            raise ValueError(f"first: expected a step whose text was recorded, got {first}")
        self.steps = len(self.pieces)
        """Number of recorded steps."""
        self._next = iter(self.pieces)

    def batch(self, size: int, T: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the next step's tokens and targets, int64 [SEQUENCES, TOKENS]. Raises ValueError for another size."""
        pieces = torch.from_numpy(next(self._next)).long()
        if pieces.shape != (size, T + 1):
            raise ValueError(f"size, T: expected {pieces.shape[0]} and {pieces.shape[1] - 1}, got {size} and {T}")
        return pieces[:, :-1], pieces[:, 1:]


@functools.cache
def _stored() -> Mapping[str, np.ndarray]:
    with np.load(recordings.data_folder() / f"{NAME}.npz", allow_pickle=False) as stored:
        return dict(stored)


@functools.cache
def _table() -> recordings.Recording:
    return recordings.read(NAME, needs=("kernel", "since", "step", "loss", "grad_norm", "exponent"))


def recorded(kernel: str = "none", *, of: str = "") -> Drift:
    """Return the recorded run with one of `KERNELS`, from its first step. Its quantiles hold only the largest exponent.
    of: with "right", one of `FATAL`: the recorded `resume`, from the state before that kernel's fatal step."""
    rows = _table().select(kernel=one_of("kernel", kernel, KERNELS), since=of)
    drift = Drift("rwkv6", kernel, Run([row["loss"] for row in rows], [row["grad_norm"] for row in rows]))
    drift.first = int(rows[0]["step"])
    drift.quantiles = [[row["exponent"]] for row in rows]
    return drift


def fatal_step(kernel: str = "none") -> int:
    """Return the number of the first step of a kernel's recorded run whose gradient is NaN; kernel: of `FATAL`."""
    return int(_stored()[f"{one_of('kernel', kernel, FATAL)}/step"])


def state(of: str = "none") -> tuple[LanguageModel, torch.optim.AdamW]:
    """Return the model and AdamW as recorded before the step whose gradient is NaN with a kernel; of: of `FATAL`."""
    stored, model = _stored(), initial()
    optimizer = adamw(model)
    for name, parameter in model.named_parameters():
        weights, *moments = (torch.from_numpy(stored[f"{of}/{name}{part}"]) for part in ("", "/exp_avg", "/exp_avg_sq"))
        parameter.data.copy_(weights)
        optimizer.state[parameter] = {"step": torch.tensor(float(fatal_step(of)))}
        optimizer.state[parameter] |= {"exp_avg": moments[0].clone(), "exp_avg_sq": moments[1].clone()}
    return model, optimizer


def start(kernel: str | Callable = "none", *, steps: int | None = None, model: LanguageModel | None = None) -> Drift:
    """Compute the run from its first step, on the recorded text. Only some twenty steps match the recording.

    kernel: one of `KERNELS`, or a function as in `resume`. steps: default two more than "none" has before its loss is
        NaN. model: a result of `initial`, to observe while it trains; it is trained in place.
    """
    steps = fatal_step() + 3 if steps is None else steps
    return _run(kernel, initial() if model is None else model, Text(0), steps)


def resume(kernel: str | Callable = "right", *, steps: int = 40, of: str = "none") -> Drift:
    """Continue the run with another kernel, from the state before its fatal step, whose gradient is NaN.

    kernel: one of `KERNELS`, or a function kernel(r, k, v, w, u) that returns o, or a tuple or a NamedTuple with o
        first: r, k, w [B, T, H, K], w the natural-log decay <= 0, v and o [B, T, H, V], u [H, K], all float32 with B =
        8, T = 128, H = 2, K = V = 16, scale K^-0.5, no initial state. It must be differentiable in all five.
    steps: number of steps, with the fatal one; text was recorded for `Text(fatal_step(of)).steps`. of: which of the
        `FATAL` runs.
    Returns a `Drift` whose `first` is the fatal step. No step is skipped: after a NaN all losses are NaN. Raises
    ValueError for other steps, an unknown kernel, or a function's result that is not o or not differentiable.
    """
    model, optimizer = state(of)
    first = fatal_step(of)
    return _run(kernel, model, Text(first), steps, first=first, scheme=of, optimizer=optimizer)


def relive(kernel: str = "none", *, steps: int = 3) -> Drift:
    """Return the run of a fatal kernel: recorded up to its fatal step, whose gradient is NaN, computed from there on.

    The computed steps start from recorded weights, so that the run fails on every machine. A run computed from its
    first step, by `start`, need not fail: rounding differs between machines and changes the losses visibly after some
    twenty steps, and with them every later exponent.

    kernel: one of `FATAL`. steps: number of computed steps. The quantiles hold only the largest exponents.
    """
    drift, end = recorded(one_of("kernel", kernel, FATAL)), resume(kernel, steps=steps, of=kernel)
    before = end.first - drift.first
    drift.run.losses[before:] = end.run.losses
    drift.run.grad_norms[before:] = end.run.grad_norms
    drift.quantiles[before:] = [[each[-1]] for each in end.quantiles]
    return drift


def _run(
    kernel: str | Callable,
    model: LanguageModel,
    text: Text,
    steps: int,
    *,
    first: int = 0,
    scheme: str = "none",
    optimizer: torch.optim.Optimizer | None = None,
) -> Drift:
    if not 1 <= steps <= text.steps:
        raise ValueError(f"steps: expected 1 to {text.steps}, for which text was recorded, got {steps}")
    name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", "yours")
    warmup = 0.0 if first else WARMUP / steps
    options = {"steps": steps, "warmup": warmup, "optimizer": optimizer, "progress": False}
    return train_on(text.batch, kernel, model, Drift("rwkv6", name, first=first), scheme=scheme, **options)


def train_on(
    batch: Callable, kernel: str | Callable, model: LanguageModel, drift: Drift, *, scheme: str, **options
) -> Drift:
    """Train a model on `batch` with this run's batch size and learning rate, skipping no step; fill in `drift`. kernel:
    as in `resume`. scheme: its exponents are recorded. options: steps, warmup, … of `models.train`."""
    fixed = {"size": SEQUENCES, "T": TOKENS, "lr": RATE, "skip": False, "seed": SEED, "label": drift.kernel}
    return follow(model, drift, _operator(kernel), batch, scheme=scheme, **fixed, **options)


def _operator(kernel: str | Callable) -> Callable[..., Output]:
    if kernel == "right":
        return chunk_rwkv6
    if isinstance(kernel, str):
        return faulty("rwkv6", TOKENS, one_of("kernel", kernel, KERNELS))

    def called(*x: Tensor) -> Output:
        o = kernel(*x)
        o = o[0] if isinstance(o, tuple) else o
        if not isinstance(o, Tensor) or o.shape != x[2].shape:
            got = list(o.shape) if isinstance(o, Tensor) else type(o).__name__
            raise ValueError(f"kernel: expected an output {list(x[2].shape)} like v, got {got}")
        if torch.is_grad_enabled() and not o.requires_grad:
            raise ValueError("kernel: expected an output that is differentiable, got one without a gradient function")
        return Output(o)

    return called


@dataclass(frozen=True)
class Replay:
    """One training step. tensors: the operator's r, k, v, w, u and o, and their gradients dr … do. loss: in nats.
    gradients: those of the weights, by name."""

    loss: float
    tensors: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    @property
    def lost(self) -> tuple[str, ...]:
        """The names of non-finite tensors: o and the operator's gradients, then the gradients of the weights."""
        computed = {name: x for name, x in self.tensors.items() if name not in "rkvwu" and name != "do"}
        return tuple(name for name, x in {**computed, **self.gradients}.items() if not x.isfinite().all())


def replay(kernel: str | Callable = "none", *, of: str = "none") -> Replay:
    """Compute a run's `fatal_step` again, forward and backward. kernel: as in `resume`; of: one of `FATAL`."""
    model, _ = state(of)
    tokens, targets = Text(fatal_step(of)).batch(SEQUENCES, TOKENS)
    compute, tensors = _operator(kernel), {}

    def recording(*x: Tensor) -> Any:
        result = compute(*x)
        tensors.update(zip("rkvwuo", (*x, result.o), strict=True))
        for each in tensors.values():
            each.retain_grad()
        return result

    model.blocks[0].time.operator = recording
    step_loss = loss(model(tokens), targets)
    step_loss.backward()
    gradients = {f"d{name}": x.grad for name, x in tensors.items()}
    values = {name: x.detach() for name, x in tensors.items()}
    return Replay(step_loss.item(), values | gradients, {name: p.grad for name, p in model.named_parameters()})


@dataclass(frozen=True)
class FatalBatch:
    """The operator's inputs in the fatal step, cut to the chunk and head with the largest exponent.

    inputs: r, k, v, w [1, 64, 1, 16] and u [1, 16], float32, natural-log decay: `chunk_rwkv6(**x.inputs)`.
    do: the gradient of o, [1, 64, 1, 16], with the right kernel, so finite. state: before this chunk, [1, 1, 16, 16].
    text: the 64 characters of the chunk, one per token.
    sequence, chunk, head, channel: the position in the batch, counted from 0.
    token: the token of the chunk at which the exponent exceeds 88.72: "none" sums the decays up to it, "first-row"
        takes this token's alone.
    exponent: the largest of the kernel's, natural log. step: the step number. loss: the step's mean, in nats.
    whole: the inputs of all sequences and heads, r … w [8, 128, 2, 16], u [2, 16], and "do".
    """

    inputs: Mapping[str, Tensor]
    do: Tensor
    state: Tensor
    text: str
    sequence: int
    chunk: int
    head: int
    channel: int
    token: int
    exponent: float
    step: int
    loss: float
    whole: Mapping[str, Tensor]

    @property
    def decays(self) -> Tensor:
        """The natural-log decays w of the channel with the largest exponent, [64]."""
        return self.inputs["w"][0, :, 0, self.channel]

    @property
    def words(self) -> tuple[tuple[str, slice], ...]:
        """The chunk's text split at white space: each word with the slice of its tokens; the outer two may be cut."""
        words, at = [], 0
        for word in self.text.split():
            at = self.text.index(word, at)
            words.append((word, slice(at, at + len(word))))
            at += len(word)
        return tuple(words)


@functools.cache
def _fatal(of: str) -> FatalBatch:
    step = replay("right", of=of)
    whole = {name: step.tensors[name] for name in (*"rkvwu", "do")}
    w = whole["w"]
    largest = exponents("rwkv6", w, of)
    sequence, head, channel = (int(n) for n in torch.unravel_index(largest.argmax(), largest.shape))
    if of == "none":
        sums = -torch.stack([part.cumsum(0) for part in w[sequence, :, head, channel].split(CHUNK)])
    else:
        sums = -w[sequence, :, head, channel].clone()
        sums[[p for p in range(TOKENS) if p % 16 or p % CHUNK == 0]] = 0.0
        sums = sums.view(-1, CHUNK)
    chunk = int(sums.amax(1).argmax())
    token = int((sums[chunk] > LIMIT).nonzero()[0])
    at, one = slice(chunk * CHUNK, (chunk + 1) * CHUNK), slice(head, head + 1)
    cut = {name: x[one] if name == "u" else x[sequence : sequence + 1, at, one] for name, x in whole.items()}
    before = {n: x[one] if n == "u" else x[sequence : sequence + 1, : at.start, one] for n, x in whole.items()}
    before.pop("do")
    state = torch.zeros(1, 1, *w.shape[-1:], whole["v"].shape[-1])
    if chunk:
        state = chunk_rwkv6(**before, output_final_state=True).final_state
    tokens, _ = Text(fatal_step(of)).batch(SEQUENCES, TOKENS)
    text = bytes(tokens[sequence, at].tolist()).decode("latin-1")
    do = cut.pop("do")
    place = {"sequence": sequence, "chunk": chunk, "head": head, "channel": channel, "token": token}
    return FatalBatch(
        cut, do, state, text, **place, exponent=float(largest.max()), step=fatal_step(of), loss=step.loss, whole=whole,
    )  # fmt: skip


def fatal_batch(of: str = "none") -> FatalBatch:
    """Return the operator's inputs in the fatal step: the tensors, the text and the token at fault. of: one of `FATAL`.

    >>> x = fatal_batch()
    >>> chunk_rwkv6(**x.inputs)        # the fatal chunk and head alone
    >>> x.text, x.words                # what the model reads there
    >>> -x.decays.cumsum(0)            # the exponents of that channel's keys; the limit is 88.72
    """
    return copy.deepcopy(_fatal(one_of("kernel", of, FATAL)))  # the caller may modify it
