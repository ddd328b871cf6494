"""Train a language model on one process or several.

    python -m flakit.train --out runs/first
    torchrun --nproc-per-node 2 -m flakit.train --out runs/first

Every rank draws the same sequences of a step, from the seed and the step's number, and takes its rows of them: any
number of ranks sees the same data, and a training that goes on needs no more than the step. `models.distributed` says
how a model lies on ranks and in files; the step itself is `models.training.take`, as of `models.train`.
"""

import importlib.util
import json
import math
import os
import pickle
import platform
import re
import signal
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Generator, Tensor

from .cases.headroom import headroom
from .models import MIXERS, LanguageModel, accumulate, distributed, standard_library
from .models.accumulation import micro_batches
from .models.corpus import Corpus, text
from .models.distributed import Ranks
from .models.training import adamw, bar, share_of_lr, take
from .models.watch import Recording, watch
from .numerics import recorded
from .numerics.arguments import one_of
from .numerics.words import for_json
from .numerics.work import work
from .ops.common.validation import nan_decays_pass

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
"""What matrix products and operators compute in; parameters, their gradients, and sums over ranks are float32."""
PARALLEL = ("ddp", "fsdp2")
NOT_FINITE = ("stop", "skip")
DONE, LOST, WRONG = 0, 1, 2
KEPT = 3
"""Files of what was not finite, at most, that a training which skips them leaves."""


@dataclass(frozen=True)
class Settings:
    """What `main` takes, by the same names."""

    out: Path
    data: Path | None
    mixer: str
    dim: int
    layers: int
    head_size: int
    slots: int
    steps: int
    size: int
    T: int
    accumulation: int
    lr: float
    warmup: float
    weight_decay: float
    clip: float
    seed: int
    dtype: str
    parallel: str
    checkpointing: bool
    compile: bool
    save_every: int
    keep: int
    watch_every: int
    not_finite: str
    tensorboard: bool
    device: str | None

    def __post_init__(self):
        for name, known in (("mixer", MIXERS), ("dtype", DTYPES), ("parallel", PARALLEL), ("not_finite", NOT_FINITE)):
            one_of(name, getattr(self, name), tuple(known))
        for name in ("lr", "warmup", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number of at least 0, got {getattr(self, name)}")

    @property
    def model(self) -> dict:
        """What `LanguageModel` takes."""
        slots = {"slots": self.slots} if self.mixer == "gsa" else {}
        sizes = {"dim": self.dim, "layers": self.layers, "head_size": self.head_size}
        return {"vocab": Corpus.vocab, "mixer": self.mixer, "seed": self.seed, **sizes, **slots}

    @property
    def plain(self) -> dict:
        """In words and numbers, for JSON."""
        return {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self).items()}


ALIKE = (
    *("mixer", "dim", "layers", "head_size", "slots", "size", "T", "lr", "warmup", "weight_decay", "clip"),
    *("seed", "dtype"),
)
"""What a training that goes on has to have as it began."""

EXACT = ("ranks", "device", "torch", "triton", "flakit")
"""What else has to be the same, so that it goes on bit for bit."""


def batch(corpus: Corpus, s: Settings, step: int) -> tuple[Tensor, Tensor]:
    """Of all ranks. A generator looks at 32 bits of its seed, which so have to come from both numbers."""
    return corpus.batch(s.size, s.T, Generator().manual_seed(zlib.crc32(f"{s.seed} {step}".encode())))


def train(s: Settings) -> int:
    """What the command does, on every rank; its status: 0, 1 where it stopped for what was not finite, or 128 and the
    signal that ended it. Raises ValueError or OSError, on every rank, for arguments that do not fit."""
    ranks = Ranks(s.device)
    try:
        status = Training(s, ranks).run()
    except (ValueError, OSError):
        ranks.close()
        raise
    ranks.close()
    return status


class Training:
    """One training on this rank: all that `train` has between its arguments and its status."""

    def __init__(self, s: Settings, ranks: Ranks):
        self.s, self.ranks, self.autocast = s, ranks, DTYPES[s.dtype]
        self.corpus = _corpus(s)
        if s.size % (ranks.size * s.accumulation):
            raise ValueError(
                f"size: expected a multiple of ranks times accumulation, {ranks.size} * {s.accumulation}, got {s.size}"
            )
        self.about = {"settings": s.plain, "text": _fingerprint(self.corpus), "ranks": ranks.size}
        self.about |= _versions(ranks.device)
        texts = ranks.objects(self.about["text"])
        if len(set(texts)) > 1:
            raise ValueError(f"data: expected the same text on every rank, got {', '.join(dict.fromkeys(texts))}")
        try:
            s.out.mkdir(parents=True, exist_ok=True)
        except OSError:
            raise ValueError(f"out: expected a folder that there is or can be made, got {s.out}") from None
        self.console = Console(stderr=True, quiet=ranks.rank != 0, soft_wrap=True, highlight=False, markup=False)
        model = LanguageModel(**s.model)
        self.parameters, self.operations = sum(p.numel() for p in model.parameters()), operations(model, s)
        how = {"shard": s.parallel == "fsdp2", "checkpointing": s.checkpointing, "compiled": s.compile}
        self.model = distributed.spread(model, ranks, **how).train()
        self.optimizer = adamw(self.model, weight_decay=s.weight_decay)
        self.begin = self.saved = self._go_on()
        self.kept = 0

    def _go_on(self) -> int:
        """From the newest checkpoint, if there is one: the step to begin with."""
        found = distributed.checkpoints(self.s.out)
        if not found:
            return 0
        before = distributed.about(found[-1])
        for name, had, got in (
            *((name, before["settings"][name], self.s.plain[name]) for name in ALIKE),
            ("data", before["text"], self.about["text"]),
        ):
            if had != got:
                raise ValueError(f"{name}: expected {had} as {found[-1]} has it, got {got}; another out begins anew")
        distributed.load(found[-1], self.model, self.optimizer)
        other = [f"{n} {before[n]} then, {self.about[n]} now" for n in EXACT if before[n] != self.about[n]]
        self.console.print(f"goes on from {found[-1]}{': within rounding, ' if other else ''}{'; '.join(other)}")
        return before["step"]

    def run(self) -> int:
        s, ranks = self.s, self.ranks
        if self.begin >= s.steps:
            self.console.print(f"all {s.steps} steps are taken; a larger --steps goes on, another --out begins anew")
            return DONE
        tokens, targets = map(ranks.rows, batch(self.corpus, s, self.begin))
        distributed.settle(self.model, tokens[:1], targets[:1], self.autocast)
        self.rate = matrix_rate(ranks.device, self.autocast) if ranks.rank == 0 else None
        ranks.wait()
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with Log(s, self.begin, ranks.rank == 0) as self.log, _Signals() as told:
            processes = ranks.objects(os.getpid())
            sizes = {"parameters": self.parameters, "operations_per_token": self.operations, "matrix_tflops": self.rate}
            self.log.write("begin", self.begin, **self.about, **sizes, processes=processes)
            look = Headrooms(self)
            label = f"{s.mixer}, {ranks.size} × {ranks.device.type}"
            shown = {"shown": ranks.rank == 0, "console": self.console}
            with bar(label, s.steps, done=self.begin, **shown) as tell:
                for step in range(self.begin, s.steps):
                    found = self._step(step)
                    tell(f"loss {found['loss']:.3f}  {found['tokens_per_second']:,.0f} tokens/s")
                    look(step)
                    lost = not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"]))
                    if lost:
                        self._keep(step, found)
                    number = max(int(x) for (x,) in ranks.gather(told.number))
                    stops = lost and s.not_finite == "stop"
                    done = step if stops else step + 1
                    if stops or number or done == s.steps or done % s.save_every == 0:
                        self._save(done)
                    if stops or number:
                        break
            look.close()
            return self._end(done, stops, 0 if done == s.steps else number)

    def _step(self, step: int) -> dict:
        """Take it, and what the log says of it."""
        s, ranks, start = self.s, self.ranks, time.perf_counter()
        lr = s.lr * share_of_lr(step, s.steps, s.warmup, True)
        how = {"lr": lr, "clip": s.clip or None, "accumulation": s.accumulation, "autocast": self.autocast}
        tokens, targets = map(ranks.rows, batch(self.corpus, s, step))
        loss, norm = take(self.model, tokens, targets, self.optimizer, **how, ranks=ranks)
        memory = max(x for (x,) in ranks.gather(_memory(ranks.device)))  # which waits for the optimizer too
        seconds = time.perf_counter() - start
        speed = s.size * s.T / seconds
        tflops = speed * self.operations * 1e-12 / ranks.size
        found = {"loss": loss, "grad_norm": norm, "lr": lr, "seconds": seconds, "tokens_per_second": speed}
        found |= {"tflops": tflops, "matrix_share": self.rate and tflops / self.rate}
        found |= {"memory_gib": memory, "losses": [x * ranks.size for x in ranks.losses], "grad_norms": ranks.norms}
        self.log.write("step", step, **found)
        return found

    def _save(self, done: int) -> None:
        if done > self.saved:
            distributed.save(self.s.out, done, self.model, self.optimizer, self.ranks, self.about, self.s.keep)
            self.saved = done

    def _keep(self, step: int, found: dict) -> None:
        """What was not finite, in a file: the batch of all ranks, and the weights, which the step did not change."""
        self.kept += 1
        if self.kept > KEPT:
            return
        path, weights = self.s.out / f"not-finite-{step:08d}.pt", distributed.weights(self.model)
        tokens, targets = batch(self.corpus, self.s, step)
        kept = {"model": self.s.model, "dtype": self.s.dtype, "parts": self.ranks.size * self.s.accumulation}
        kept |= {"step": step, "tokens": tokens, "targets": targets, "weights": weights}
        kept |= {name: found[name] for name in ("loss", "grad_norm", "losses")}
        if self.ranks.rank == 0:
            distributed.write_whole(path, lambda file: torch.save(kept, file))
        self.log.write("not finite", step, loss=found["loss"], grad_norm=found["grad_norm"], file=str(path))
        self.console.print(
            f"step {step} was not taken: loss {found['loss']:.4g}, gradient norm {found['grad_norm']:.4g}. "
            f"{path} has its batch and weights. This says where it begins:\n"
            f"flakit trace -m flakit.train --replay {path}"
        )

    def _end(self, done: int, stops: bool, number: int) -> int:
        """number: of the signal that ended it, 0 for none."""
        if stops or number:
            why = "not finite" if stops else signal.Signals(number).name
            self.log.write("end", done, why=why)
            self.console.print(f"ended after {done} steps ({why}), which are kept; the same command goes on from there")
            return LOST if stops else 128 + number
        weights, path = distributed.weights(self.model), self.s.out / "model.pt"
        if self.ranks.rank == 0:
            kept = {"model": self.s.model, "step": done, "weights": weights}
            distributed.write_whole(path, lambda file: torch.save(kept, file))
        self.log.write("end", done, why="done")
        self.console.print(f"{done} steps are taken; weights: {path}, losses: {self.log.path}")
        return DONE


class Headrooms:
    """Every rank watches the decays of its own rows; rank 0 tells of the worst.

    Called after each step by all ranks. A watch counts forward passes, of which a step has `accumulation`.
    """

    def __init__(self, training: Training):
        self.of, self.told, self.watching = training, [], None
        s = training.s
        if s.watch_every and s.mixer != "attention":  # which has no decays
            self.dtype = training.autocast or torch.float32
            model, every = distributed.bare(training.model), s.watch_every * s.accumulation
            self.watching = watch(model, every, measure=_measured, dtype=self.dtype, tell=self.told.append)

    def __call__(self, step: int) -> None:
        s, parts = self.of.s, self.of.s.accumulation
        if self.watching is None or (step - self.of.begin) % s.watch_every:
            return
        own = {}
        if self.watching.headrooms:  # none where decays were NaN
            measured = self.watching.headrooms.popitem()[1]
            own = {m.kernel: (m.exponent, m.limit, m.layer) for m in measured.margins if m.dtype == self.dtype}
        said = [
            str(f._replace(step=step, pace=f.pace * parts, used_up=self.of.begin + f.used_up / parts))
            for f in self.told
        ]
        self.told.clear()
        found = self.of.ranks.objects((own, said))
        kernels = {}
        for rank, (margins, _) in enumerate(found):
            for kernel, (exponent, limit, layer) in margins.items():
                if kernel not in kernels or exponent > kernels[kernel]["exponent"]:
                    kernels[kernel] = {"exponent": exponent, "limit": limit, "layer": layer, "rank": rank}
        forecasts = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(found) for line in lines]
        self.of.log.write("headroom", step, kernels=kernels, forecasts=forecasts)
        for line in forecasts:
            self.of.console.print(line)

    def close(self) -> None:
        if self.watching is not None:
            self.watching.close()


def steepest(w: Tensor, chunk: int = 64) -> Tensor:
    """Of decays [B, T, H, K] the places that laws of headroom ask for: of all decays of a large model they would take
    minutes. Where a head has the largest sum over 1, 16, 32 and 64 tokens, with and without the first of them, or over
    what is left of T behind whole chunks: its chunk, the one before, and what is left. [8, at most 191, 1, K]."""
    whole, places = w.shape[1] // chunk, []
    windows = F.pad(w.float(), (0, 0, 0, 0, 0, -w.shape[1] % chunk)).unflatten(1, (-1, chunk))
    for window, first in ((1, 0), (16, 0), (16, 1), (32, 0), (32, 1), (chunk, 0), (chunk, 1)):
        sums = windows.unflatten(2, (-1, window))[:, :, :, first:].sum(3)
        b, n, _, h, _ = torch.unravel_index(sums.argmin(), sums.shape)
        places.append((b, int(n), h))
    if w.shape[1] % chunk:
        sums = windows[:, -1].sum(1)
        b, h, _ = torch.unravel_index(sums.argmin(), sums.shape)
        places.append((b, whole, h))
    found = []
    for b, n, h in places:
        begin = chunk * max(0, min(n, whole - 1) - 1)
        found.append(torch.cat((w[b, begin : min(begin + 2 * chunk, chunk * whole), h], w[b, chunk * whole :, h])))
    return torch.stack(found)[:, :, None]


def _measured(recording: Recording, **how):
    found = Recording({name: steepest(w) for name, w in recording.items()})
    found.op = recording.op
    return headroom(found, **how)


class Log:
    """log.jsonl: a line a step, written by rank 0. What a training that goes on takes again is struck out first."""

    def __init__(self, s: Settings, begin: int, here: bool):
        self.path, self.here, self.board = s.out / "log.jsonl", here, None
        if not here:
            return
        if self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if _before(line, begin)]
            content = "".join(f"{line}\n" for line in lines).encode()
            distributed.write_whole(self.path, lambda file: file.write(content))
        self.file = self.path.open("a")
        if s.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(s.out / "tensorboard"), purge_step=begin)

    def write(self, kind: str, step: int, **more) -> None:
        """step: the one that it is about; of a beginning and an end, how many were taken."""
        if not self.here:
            return
        self.file.write(json.dumps(for_json({"kind": kind, "step": step, **more})) + "\n")
        self.file.flush()
        if self.board is not None and kind == "step":
            for name, x in more.items():
                if isinstance(x, float):
                    self.board.add_scalar(name, x, step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        if self.here:
            self.file.close()
        if self.board is not None:
            self.board.close()


def _before(line: str, begin: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # of one that was killed while it wrote
        return False
    return record["step"] < begin + (record["kind"] in ("begin", "end"))


class _Signals:
    """While it lasts, Ctrl-C and SIGTERM end no step: number is that of the signal that came, 0 before."""

    number = 0

    def __enter__(self) -> "_Signals":
        self.had = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _heard(self, number: int, _) -> None:
        self.number = number  # once more changes nothing: torchrun passes a Ctrl-C on that every rank has heard

    def __exit__(self, *_) -> None:
        for number, had in self.had.items():
            signal.signal(number, had)


# --- what is counted --------------------------------------------------------------------------------------------------


def operations(model: LanguageModel, s: Settings) -> float:
    """Floating-point operations that training cannot do without, a token: 6 for every weight of a matrix, 2 forward
    and 4 backward, and three times the forward of what mixes along time. Of RWKV and GSA that is the recurrence as
    `numerics.work` counts it, of attention its two products with the tokens before, half of T on average. What is
    computed again, or by chunks on top, does not count; the embedding looks up and multiplies nothing."""
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.weight")
    if s.mixer == "attention":
        along = 6 * s.T * s.dim
    else:
        heads = {"H": s.dim // s.head_size, "K": s.head_size, "V": s.head_size, "M": s.slots}
        row = {"op": s.mixer, "B": 1, "T": s.T, "dtype": "bfloat16", **heads}
        along = work(row, "both").operations / s.T
    return 6 * matrices + s.layers * along


def matrix_rate(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """10^12 operations a second of a product of large matrices on this GPU; None on a CPU."""
    if device.type == "cpu":
        return None
    from .bench.meter import Meter

    a = torch.randn(8192, 8192, device=device, dtype=dtype or torch.float32)
    return 2e-9 * 8192**3 / Meter().times(lambda: a @ a).low


def _memory(device: torch.device) -> float:
    """The most that tensors took so far, in GiB; NaN on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan


def _versions(device: torch.device) -> dict:
    name = None if device.type == "cuda" else f"{platform.machine()} CPU"
    found = recorded.provenance("flakit.train", name)
    return {x: found[x] for x in ("device", "torch", "triton", "flakit")}


# --- data -------------------------------------------------------------------------------------------------------------


def _corpus(s: Settings) -> Corpus:
    if s.data is None:
        found = standard_library()
    elif not s.data.is_file():
        raise ValueError(f"data: expected a file, {s.data} is none")
    elif not s.data.stat().st_size:
        raise ValueError(f"data: expected a file with text in it, {s.data} is empty")
    else:
        found = text(s.data)
    if s.T >= len(found.text):
        raise ValueError(f"T: expected fewer tokens than the {len(found.text)} bytes of the text, got {s.T}")
    return found


def _fingerprint(corpus: Corpus) -> str:
    """Tells texts apart by their length and by bytes from all over them."""
    n = len(corpus.text)
    some = corpus.text[torch.linspace(0, n - 1, min(n, 2**16), dtype=torch.float64).long()]
    return f"{n} bytes, {zlib.crc32(some.numpy().tobytes()):08x}"


# --- what was not finite, again ---------------------------------------------------------------------------------------


def again(path: Path, device: str | None = None) -> str:
    """Compute the parts of a step again, one after another in this process, until one is not finite; in words."""
    if not path.is_file():
        raise ValueError(f"replay: expected a file that a training has left, {path} is none")
    try:
        kept = torch.load(path, weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError):  # no file of PyTorch's
        kept = None
    if not isinstance(kept, dict) or "parts" not in kept:
        raise ValueError(f"replay: expected a file not-finite-….pt that a training has left, got {path}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = LanguageModel(**kept["model"])
    model.load_state_dict(kept["weights"])
    model = model.to(device).train()
    for n, (tokens, targets) in enumerate(micro_batches(kept["tokens"], kept["targets"], kept["parts"]), 1):
        model.zero_grad()
        with nan_decays_pass():
            loss = accumulate(model, tokens.to(device), targets.to(device), autocast=DTYPES[kept["dtype"]])
        wrong = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
        if wrong or not loss.isfinite():
            of = f", and the gradient of {len(wrong)} parameters is not finite, first {wrong[0]}" if wrong else ""
            return f"step {kept['step']}, part {n} of {kept['parts']}: loss {loss.item():.4g}{of}"
    return f"step {kept['step']}: each of its {kept['parts']} parts is finite here; their sum, or another card, was not"


# --- the command ------------------------------------------------------------------------------------------------------


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[
        Path | None, typer.Option(help="A folder for checkpoints, the log and the weights; found there, it goes on.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Any file; a token is a byte. Default: the source of Python's standard library.")
    ] = None,
    mixer: Annotated[str, typer.Option(help="rwkv7, rwkv6, gsa or attention.")] = "rwkv7",
    dim: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    head_size: Annotated[int, typer.Option(min=1, help="Channels of a head, a divisor of --dim.")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Of GSA, a head.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Of the whole training, those before it goes on counted.")] = 1000,
    size: Annotated[int, typer.Option(min=1, help="Sequences a step, of all ranks together.")] = 16,
    T: Annotated[int, typer.Option("--T", min=1, help="Tokens a sequence.")] = 1024,
    accumulation: Annotated[
        int, typer.Option(min=1, help="Parts that a rank computes its sequences in, one after another.")
    ] = 1,
    lr: Annotated[float, typer.Option(help="Reached after the warmup, then falling to 0 along a cosine.")] = 2e-3,
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient; 0: none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the weights and of the data.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16: of products and operators; the weights stay float32.")
    ] = "float32",
    parallel: Annotated[
        str, typer.Option(help="ddp: every rank has the whole model; fsdp2: its share of each parameter.")
    ] = "ddp",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute activations again in the backward pass: less memory.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile each layer.")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay, the newest.")] = 2,
    watch_every: Annotated[
        int, typer.Option(min=0, help="Steps between measurements of headroom on every rank; 0: none.")
    ] = 100,
    not_finite: Annotated[
        str, typer.Option(help="Where loss or gradient is not finite: stop or skip. The batch is kept in a file.")
    ] = "stop",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log there; it has to be installed.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Instead: compute the step in such a file again, for `flakit trace`.")
    ] = None,
):
    """Train a language model on bytes, on one process or on several that torchrun starts.

    python -m flakit.train --out runs/first

    torchrun --nproc-per-node 2 -m flakit.train --out runs/second --dtype bfloat16 --parallel fsdp2 --compile

    torchrun --nproc-per-node 2 -m flakit.train --out runs/third --data book.txt --mixer rwkv6 --device cpu

    Killed or stopped with Ctrl-C, the same command goes on from the last checkpoint: bit for bit on as many ranks,
    within rounding on another number. --out has log.jsonl, a line for each step; step-…, the checkpoints; model.pt,
    the weights at the end; not-finite-….pt, a step that was not finite.

    Exits with 0 when all steps are taken, 1 if it stopped for a step that was not finite, 2 if it could not run, and
    128 and the number of the signal that ended it.
    """
    given = {name: value for name, value in locals().items() if name not in ("replay", "out")}
    try:
        if replay is not None:
            typer.echo(again(replay, device))  # for a trace it came to its end, whatever was found
            return
        if out is None:
            raise ValueError("out: expected a folder, got none")
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("tensorboard: it is not installed here: pip install tensorboard; log.jsonl needs nothing")
        status = train(Settings(out=out, **given))
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            said = re.sub(r"^(\w+):", lambda name: f"--{name[1].replace('_', '-')}:", str(error))
            Console(stderr=True, soft_wrap=True).print(
                f"flakit.train: {said}", style="red", markup=False, highlight=False
            )
        raise typer.Exit(WRONG) from None
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
