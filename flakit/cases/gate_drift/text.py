"""A run that dies: a small RWKV6 learns Python's own source, with kernels that differ in their anchor and nothing else.

    "none"        the factors of a chunk are taken from its start: dead after some 80 steps
    "first-row"   blocks anchored at their first row, bug A of `anchor`: lives longer, and dies of one token
    "right"       flakit's own: goes on

The model, its size and its learning rate are those of `models.byte_prediction`, nothing hurries it, and the loop has no
guard: the step whose gradient is NaN is taken, every weight is NaN after it, and so is the next loss. Recorded in
data/fatal_run.json (each step) and data/fatal_run.npz (the state before each fatal step, and the text of the steps that
are replayed, since another version of Python has another standard library).

    resume(my_chunk_rwkv6)       the run goes on from the step before, with another kernel
    fatal_batch()                what the operator was given in that step, where the exponent is largest
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
from ...ops.rwkv6 import chunk_rwkv6
from .watched import LIMIT, Drift, Output, exponents, faulty, follow

FATAL = {"none": "anchored at the chunk's start", "first-row": "anchored after a block's first row: bug A"}
"""The kernels that the run dies of, in the order in which they do, by their names in `anchor.SCHEMES`."""
KERNELS = FATAL | {"right": "flakit's own"}
SIZES = {"dim": 32, "layers": 1, "head_size": 16}
SEED = 14
"""Of the weights and of the text."""
CHUNK, TOKENS, SEQUENCES = 64, 128, 8
"""Tokens a chunk and a sequence; sequences a step."""
RATE, WARMUP = 1e-2, 20
"""The learning rate, and the steps until it is reached; it is held from then on."""
MODULES = 40
"""Of the standard library, in alphabetical order, without the last tenth."""
LAYER = "blocks.0.time"
NAME = "fatal_run"


def initial() -> LanguageModel:
    """The model before its first step."""
    return LanguageModel(Corpus.vocab, mixer="rwkv6", seed=SEED, **SIZES)


def library() -> Callable[..., tuple[Tensor, Tensor]]:
    """The text as this Python has it: `batch` of `models.train`."""
    return standard_library(MODULES).split(0.1)[0].batch


class Text:
    """The recorded text, a batch a step: `batch` of `models.train`, from the step `first` on.

    Raises ValueError where no text was recorded for that step.
    """

    def __init__(self, first: int):
        starts = [int(name.split("/")[1]) for name in _stored() if name.startswith("text/")]
        start = max((n for n in starts if n <= first), default=0)
        self.pieces = _stored()[f"text/{start}"][first - start :]
        if not len(self.pieces):
            raise ValueError(f"first: expected a step whose text was recorded, got {first}")
        self.steps = len(self.pieces)
        """How many steps there are."""
        self._next = iter(self.pieces)

    def batch(self, size: int, T: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """The next step's tokens and targets, each [SEQUENCES, TOKENS] int64."""
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
    """The recorded run with one of `KERNELS`, from its first step. Its quantiles have the largest exponent alone.

    of: with "right", one of `FATAL`: what `resume` gives, from the state before that kernel's fatal step.
    """
    rows = _table().select(kernel=_known(kernel, KERNELS), since=of)
    found = Drift("rwkv6", kernel, Run([row["loss"] for row in rows], [row["grad_norm"] for row in rows]))
    found.first = int(rows[0]["step"])
    found.quantiles = [[row["exponent"]] for row in rows]
    return found


def fatal_step(kernel: str = "none") -> int:
    """The step whose gradient is NaN."""
    return int(_stored()[f"{_known(kernel, FATAL)}/step"])


def lost_tensors(kernel: str = "none") -> tuple[str, ...]:
    """As recorded: which of the operator's output and gradients were not finite in the fatal step, then which of the
    weights' gradients."""
    return tuple(_table().meta[f"lost, {_known(kernel, FATAL)}"].split())


def state(of: str = "none") -> tuple[LanguageModel, torch.optim.AdamW]:
    """The model and its optimizer before the fatal step of a kernel."""
    stored, made = _stored(), initial()
    optimizer = adamw(made)
    for name, parameter in made.named_parameters():
        weights, *moments = (torch.from_numpy(stored[f"{of}/{name}{part}"]) for part in ("", "/exp_avg", "/exp_avg_sq"))
        parameter.data.copy_(weights)
        optimizer.state[parameter] = {"step": torch.tensor(float(fatal_step(of)))}
        optimizer.state[parameter] |= {"exp_avg": moments[0].clone(), "exp_avg_sq": moments[1].clone()}
    return made, optimizer


def start(
    kernel: str | Callable = "none",
    *,
    steps: int | None = None,
    model: LanguageModel | None = None,
    progress: bool = False,
) -> Drift:
    """The run from its first step, computed here and on the recorded text. Only some twenty steps are as recorded.

    kernel: one of `KERNELS`, or a function as `resume` takes it. steps: default two more than "none" lives.
    model: what `initial` has made, to be looked at while it trains; it is trained in place.
    """
    steps = fatal_step() + 3 if steps is None else steps
    return _run(kernel, initial() if model is None else model, Text(0), steps, progress=progress)


def resume(kernel: str | Callable = "right", *, steps: int = 40, of: str = "none", progress: bool = False) -> Drift:
    """The run goes on from the step before the one that was fatal, with another kernel.

    kernel: one of `KERNELS`, or a function kernel(r, k, v, w, u) that returns o, or a tuple or a NamedTuple with o
        first: r, k, w [B, T, H, K], w the natural-log decay <= 0, v and o [B, T, H, V], u [H, K], all float32 with
        B = 8, T = 128, H = 2, K = V = 16, scale K^-0.5, no initial state. It must be differentiable in all five.
    steps: how many, the fatal one among them; text was recorded for `Text(fatal_step(of)).steps`.
    of: which of the `FATAL` runs.
    Returns a `Drift` whose `first` is the fatal step. No step is skipped: after a NaN all losses are NaN.
    """
    made, optimizer = state(of)
    first = fatal_step(of)
    return _run(kernel, made, Text(first), steps, first=first, scheme=of, optimizer=optimizer, progress=progress)


def relive(kernel: str = "none", *, steps: int = 3) -> Drift:
    """The run of a kernel that dies, as recorded up to its fatal step; that step and those after it are computed here.

    They begin with the weights that were kept, so that it dies on every machine. Computed from its first step, as by
    `start`, it need not: what a machine rounds in another way changes the losses visibly after some twenty steps, and
    the exponent of any later step with them.

    kernel: one of `FATAL`. steps: how many are computed here. The quantiles are the largest exponents alone.
    """
    found, end = recorded(_known(kernel, FATAL)), resume(kernel, steps=steps, of=kernel)
    before = end.first - found.first
    found.run.losses[before:] = end.run.losses
    found.run.grad_norms[before:] = end.run.grad_norms
    found.quantiles[before:] = [[each[-1]] for each in end.quantiles]
    return found


def _run(
    kernel: str | Callable,
    made: LanguageModel,
    text: Text,
    steps: int,
    *,
    first: int = 0,
    scheme: str = "none",
    optimizer: torch.optim.Optimizer | None = None,
    progress: bool = False,
) -> Drift:
    if not 1 <= steps <= text.steps:
        raise ValueError(f"steps: expected 1 to {text.steps}, for which text was recorded, got {steps}")
    name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", "yours")
    warmup = 0.0 if first else WARMUP / steps
    how = {"steps": steps, "warmup": warmup, "optimizer": optimizer, "progress": progress}
    return train_on(text.batch, kernel, made, Drift("rwkv6", name, first=first), scheme=scheme, **how)


def train_on(
    batch: Callable, kernel: str | Callable, made: LanguageModel, found: Drift, *, scheme: str, **how
) -> Drift:
    """Train a model as this run is trained: the size, the rate and the missing guard are fixed.

    scheme: whose exponents are watched. how: steps, warmup and whatever else `models.train` takes.
    """
    fixed = {"size": SEQUENCES, "T": TOKENS, "lr": RATE, "skip": False, "seed": SEED, "label": found.kernel}
    return follow(made, found, _operator(kernel), batch, scheme=scheme, **fixed, **how)


def _operator(kernel: str | Callable) -> Callable[..., Output]:
    if kernel == "right":
        return chunk_rwkv6
    if isinstance(kernel, str):
        return faulty("rwkv6", TOKENS, _known(kernel, KERNELS))

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


def _known(name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise ValueError(f"kernel: expected one of {', '.join(names)}, got {name!r}")
    return name


@dataclass(frozen=True)
class Replay:
    """One step. tensors: the operator's inputs r, k, v, w, u, its output o, and of each the gradient, "d" + its name.

    gradients: of the weights, by their names.
    """

    loss: float
    tensors: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    @property
    def lost(self) -> tuple[str, ...]:
        """Which of o and the operator's gradients are not finite, then which of the weights'."""
        made = {name: x for name, x in self.tensors.items() if name not in "rkvwu" and name != "do"}
        return tuple(name for name, x in {**made, **self.gradients}.items() if not x.isfinite().all())


def replay(kernel: str | Callable = "none", *, of: str = "none") -> Replay:
    """The fatal step once more, forward and backward, with one of `KERNELS` or a function as `resume` takes it."""
    made, _ = state(of)
    tokens, targets = Text(fatal_step(of)).batch(SEQUENCES, TOKENS)
    compute, tensors = _operator(kernel), {}

    def seen(*x: Tensor) -> Any:
        made = compute(*x)
        tensors.update(zip("rkvwuo", (*x, made.o), strict=True))
        for each in tensors.values():
            each.retain_grad()
        return made

    made.blocks[0].time.operator = seen
    found = loss(made(tokens), targets)
    found.backward()
    arrived = {f"d{name}": x.grad for name, x in tensors.items()}
    held = {name: x.detach() for name, x in tensors.items()}
    return Replay(found.item(), held | arrived, {name: p.grad for name, p in made.named_parameters()})


@dataclass(frozen=True)
class FatalBatch:
    """What the operator was given in the fatal step, cut to the chunk and head in which the exponent is largest.

    inputs: r, k, v, w [1, 64, 1, 16] and u [1, 16] float32, as an operator takes them: `chunk_rwkv6(**x.inputs)`.
    do: the gradient that arrives at o, [1, 64, 1, 16]; of the right kernel, finite.
    state: what the head has written before this chunk, [1, 1, 16, 16]: the initial state.
    text: the 64 characters of the chunk; a token is a character.
    sequence, chunk, head, channel: where in the batch it is, each counted from 0.
    token: the token of the chunk at which the exponent passes 88.72: "none" has added up the decays so far, "first-row"
        takes this token's alone.
    exponent: the largest that the kernel takes, natural log. step: the number of the step. loss: its mean, in nats.
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
    layer: str
    whole: Mapping[str, Tensor]

    @property
    def decays(self) -> Tensor:
        """The channel's natural-log decays w, [64]."""
        return self.inputs["w"][0, :, 0, self.channel]

    @property
    def words(self) -> tuple[tuple[str, slice], ...]:
        """What stands between blanks in the chunk, each with its tokens; its ends may cut a word."""
        found, at = [], 0
        for word in self.text.split():
            at = self.text.index(word, at)
            found.append((word, slice(at, at + len(word))))
            at += len(word)
        return tuple(found)


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
        cut, do, state, text, **place, exponent=float(largest.max()), step=fatal_step(of), loss=step.loss,
        layer=LAYER, whole=whole,
    )  # fmt: skip


def fatal_batch(of: str = "none") -> FatalBatch:
    """What the operator was given in the fatal step: the tensors, the text and the token at fault.

    >>> x = fatal_batch()
    >>> chunk_rwkv6(**x.inputs)        # the fatal chunk and head alone
    >>> x.text, x.words                # what the model reads there
    >>> -x.decays.cumsum(0)            # the exponents of that channel's keys; the limit is 88.72
    """
    return copy.deepcopy(_fatal(_known(of, FATAL)))  # a reader may change what it holds
