"""Train a language model on one process or several.

    python -m flakit.train --out runs/first
    torchrun --nproc-per-node 2 -m flakit.train --out runs/first

Every rank draws the same batch, from the seed and the step number, and takes its own rows. So the data do not depend on
the number of ranks, and the step number is all that is needed to resume. `models.distributed` spreads a model over
ranks and writes checkpoints; a step is `models.training.take`, as in `models.train`.
"""

import importlib.util
import inspect
import json
import math
import os
import pickle
import platform
import re
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
from .models.distributed import Ranks, leave
from .models.training import adamw, bar, share_of_lr, take
from .models.watch import Recording, watch
from .numerics import recorded
from .numerics.arguments import one_of
from .numerics.words import for_json
from .numerics.work import work
from .ops.common.validation import nan_decays_pass

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
"""The dtype of matrix products and operators; parameters, gradients and sums over ranks are float32."""
PARALLEL = ("ddp", "fsdp2")
NOT_FINITE = ("stop", "skip")
DONE, LOST, WRONG = 0, 1, 2
MAX_REPLAYS = 3
"""The largest number of files not-finite-….pt that a training writes if it skips such steps."""


@dataclass(frozen=True)
class Settings:
    """The options of the command. A wrong one raises ValueError with its name."""

    out: Annotated[
        Path | None, typer.Option(help="A folder for checkpoints, the log and the weights; found there, it goes on.")
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Any file; a token is a byte. Default: the source of Python's standard library.")
    ] = None
    mixer: Annotated[str, typer.Option(help="rwkv7, rwkv6, gsa or attention.")] = "rwkv7"
    dim: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256
    layers: Annotated[int, typer.Option(min=1)] = 4
    head_size: Annotated[int, typer.Option(min=1, help="Channels of a head, a divisor of --dim.")] = 64
    slots: Annotated[int, typer.Option(min=1, help="Of GSA, a head.")] = 64
    steps: Annotated[int, typer.Option(min=1, help="Of the whole training, those before it goes on counted.")] = 1000
    size: Annotated[int, typer.Option(min=1, help="Sequences a step, of all ranks together.")] = 16
    T: Annotated[int, typer.Option("--T", min=1, help="Tokens a sequence.")] = 1024
    accumulation: Annotated[
        int, typer.Option(min=1, help="Parts that a rank computes its sequences in, one after another.")
    ] = 1
    lr: Annotated[float, typer.Option(help="Reached after the warmup, then falling to 0 along a cosine.")] = 2e-3
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.1
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient; 0: none.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of the weights and of the data.")] = 0
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16: of products and operators; the weights stay float32.")
    ] = "float32"
    parallel: Annotated[
        str, typer.Option(help="ddp: every rank has the whole model; fsdp2: its share of each parameter.")
    ] = "ddp"
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute activations again in the backward pass: less memory.")
    ] = False
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile each layer.")] = False
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay, the newest.")] = 2
    watch_every: Annotated[
        int, typer.Option(min=0, help="Steps between measurements of headroom on every rank; 0: none.")
    ] = 100
    not_finite: Annotated[
        str, typer.Option(help="Where loss or gradient is not finite: stop or skip. The batch is kept in a file.")
    ] = "stop"
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log there; it has to be installed.")] = False
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None

    def __post_init__(self):
        if self.out is None:
            raise ValueError("out: expected a folder, got none")
        for name, known in (("mixer", MIXERS), ("dtype", DTYPES), ("parallel", PARALLEL), ("not_finite", NOT_FINITE)):
            one_of(name, getattr(self, name), tuple(known))
        for name in ("lr", "warmup", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number of at least 0, got {getattr(self, name)}")

    @property
    def model(self) -> dict:
        """The keyword arguments of `LanguageModel`."""
        slots = {"slots": self.slots} if self.mixer == "gsa" else {}
        sizes = {"dim": self.dim, "layers": self.layers, "head_size": self.head_size}
        return {"vocab": Corpus.vocab, "mixer": self.mixer, "seed": self.seed, **sizes, **slots}

    @property
    def plain(self) -> dict:
        """The settings by name as strings and numbers, for JSON."""
        return {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self).items()}


ALIKE = (
    *("mixer", "dim", "layers", "head_size", "slots", "size", "T", "lr", "warmup", "weight_decay", "clip"),
    *("seed", "dtype"),
)
"""The settings that must not change when a training resumes."""

EXACT = ("ranks", "device", "torch", "triton", "flakit")
"""What else must not change if a resumed training is to be bit-identical."""


def batch(corpus: Corpus, s: Settings, step: int) -> tuple[Tensor, Tensor]:
    """Draw the batch of a step for all ranks: tokens and targets, [size, T] int64 each.

    A generator uses only 32 bits of its seed, hence a hash of seed and step."""
    return corpus.batch(s.size, s.T, Generator().manual_seed(zlib.crc32(f"{s.seed} {step}".encode())))


def train(s: Settings) -> int:
    """Run a training on every rank. Return its exit status: 0, 1 if it stopped at a non-finite step, or 128 plus the
    number of the signal that ended it. Raise ValueError or OSError, on every rank, for invalid arguments."""
    ranks = Ranks(s.device)
    try:
        status = Training(s, ranks).run()
    except (ValueError, OSError):
        ranks.close()
        raise
    ranks.close()
    return status


class Training:
    """One training on this rank. The constructor loads the newest checkpoint if there is one. Raises ValueError for
    sizes that the ranks do not divide, texts that differ over ranks, and a folder that cannot be made."""

    def __init__(self, s: Settings, ranks: Ranks):
        self.s, self.ranks, self.autocast = s, ranks, DTYPES[s.dtype]
        self.corpus = _corpus(s)
        if s.size % (ranks.size * s.accumulation):
            raise ValueError(
                f"size: expected a multiple of ranks times accumulation, {ranks.size} * {s.accumulation}, got {s.size}"
            )
        self.about = {"settings": s.plain, "text": _fingerprint(self.corpus), "ranks": ranks.size}
        here = recorded.provenance("flakit.train", None if ranks.device.type == "cuda" else f"{platform.machine()} CPU")
        self.about |= {name: here[name] for name in ("device", "torch", "triton", "flakit")}
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
        options = {"shard": s.parallel == "fsdp2", "checkpointing": s.checkpointing, "compiled": s.compile}
        self.model = distributed.spread(model, ranks, **options).train()
        self.optimizer = adamw(self.model, weight_decay=s.weight_decay)
        self.begin = self.saved = self._resume()
        self.replays = 0

    def _resume(self) -> int:
        """Load the newest checkpoint, if any, and return the step to begin with. Raise ValueError if it was written
        with other data or other `ALIKE` settings."""
        checkpoints = distributed.checkpoints(self.s.out)
        if not checkpoints:
            return 0
        newest = checkpoints[-1]
        before = distributed.about(newest)
        for name, expected, got in (
            *((name, before["settings"][name], self.s.plain[name]) for name in ALIKE),
            ("data", before["text"], self.about["text"]),
        ):
            if expected != got:
                raise ValueError(f"{name}: expected {expected} as {newest} has it, got {got}; another out begins anew")
        distributed.load(newest, self.model, self.optimizer)
        changes = [f"{n} {before[n]} then, {self.about[n]} now" for n in EXACT if before[n] != self.about[n]]
        self.console.print(f"goes on from {newest}{': within rounding, ' if changes else ''}{'; '.join(changes)}")
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
        with (
            closing(Log(s, self.begin, ranks.rank == 0)) as self.log,
            closing(Headrooms(self)) as measure_headroom,
            _deferred_signals() as arrived,
        ):
            processes = ranks.objects(os.getpid())
            sizes = {"parameters": self.parameters, "operations_per_token": self.operations, "matrix_tflops": self.rate}
            self.log.write("begin", self.begin, **self.about, **sizes, processes=processes)
            label = f"{s.mixer}, {ranks.size} × {ranks.device.type}"
            options = {"shown": ranks.rank == 0, "console": self.console}
            with bar(label, s.steps, done=self.begin, **options) as advance:
                for step in range(self.begin, s.steps):
                    record = self._step(step)
                    advance(f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tokens/s")
                    measure_headroom(step)
                    nonfinite = not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]))
                    if nonfinite:
                        self._save_replay(step, record)
                    number = max(int(x) for (x,) in ranks.gather(arrived[-1] if arrived else 0))
                    stops = nonfinite and s.not_finite == "stop"
                    done = step if stops else step + 1
                    if stops or number or done == s.steps or done % s.save_every == 0:
                        self._save(done)
                    if stops or number:
                        break
            return self._end(done, stops, 0 if done == s.steps else number)

    def _step(self, step: int) -> dict:
        """Take one step, log it, and return the logged record."""
        s, ranks, start = self.s, self.ranks, time.perf_counter()
        lr = s.lr * share_of_lr(step, s.steps, s.warmup, True)
        options = {"lr": lr, "clip": s.clip or None, "accumulation": s.accumulation, "autocast": self.autocast}
        tokens, targets = map(ranks.rows, batch(self.corpus, s, step))
        loss, norm = take(self.model, tokens, targets, self.optimizer, **options, ranks=ranks)
        memory = max(x for (x,) in ranks.gather(_memory(ranks.device)))  # also waits for the optimizer
        seconds = time.perf_counter() - start
        speed = s.size * s.T / seconds
        tflops = speed * self.operations * 1e-12 / ranks.size
        record = {"loss": loss, "grad_norm": norm, "lr": lr, "seconds": seconds, "tokens_per_second": speed}
        record |= {"tflops": tflops, "matrix_share": self.rate and tflops / self.rate}
        record |= {"memory_gib": memory, "losses": [x * ranks.size for x in ranks.losses], "grad_norms": ranks.norms}
        self.log.write("step", step, **record)
        return record

    def _save(self, done: int) -> None:
        if done > self.saved:
            distributed.save(self.s.out, done, self.model, self.optimizer, self.ranks, self.about, self.s.keep)
            self.saved = done

    def _save_replay(self, step: int, record: dict) -> None:
        """Save a non-finite step for `replay`: the batch of all ranks, and the weights, which it did not change."""
        self.replays += 1
        if self.replays > MAX_REPLAYS:
            return
        path, weights = self.s.out / f"not-finite-{step:08d}.pt", distributed.weights(self.model)
        tokens, targets = batch(self.corpus, self.s, step)
        saved = {"model": self.s.model, "dtype": self.s.dtype, "parts": self.ranks.size * self.s.accumulation}
        saved |= {"step": step, "tokens": tokens, "targets": targets, "weights": weights}
        saved |= {name: record[name] for name in ("loss", "grad_norm", "losses")}
        if self.ranks.rank == 0:
            distributed.write_whole(path, lambda file: torch.save(saved, file))
        self.log.write("not finite", step, loss=record["loss"], grad_norm=record["grad_norm"], file=str(path))
        self.console.print(
            f"step {step} was not taken: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}. "
            f"{path} has its batch and weights. This says where it begins:\n"
            f"flakit trace -m flakit.train --replay {path}"
        )

    def _end(self, done: int, stops: bool, number: int) -> int:
        """Write the final weights or report why the training ended; return the exit status.

        done: steps taken. stops: whether a non-finite step ended it. number: the signal that ended it, 0 for none."""
        if stops or number:
            why = "not finite" if stops else signal.Signals(number).name
            self.log.write("end", done, why=why)
            self.console.print(f"ended after {done} steps ({why}), which are kept; the same command goes on from there")
            return LOST if stops else 128 + number
        weights, path = distributed.weights(self.model), self.s.out / "model.pt"
        if self.ranks.rank == 0:
            saved = {"model": self.s.model, "step": done, "weights": weights}
            distributed.write_whole(path, lambda file: torch.save(saved, file))
        self.log.write("end", done, why="done")
        self.console.print(f"{done} steps are taken; weights: {path}, losses: {self.log.path}")
        return DONE


class Headrooms:
    """Watches the decays of each rank's rows; rank 0 reports the smallest headroom of all.

    All ranks call it after each step. A watch counts forward passes, of which a step has `accumulation`."""

    def __init__(self, training: Training):
        self.training, self.forecasts, self.watching = training, [], None
        s = training.s
        if s.watch_every and s.mixer != "attention":  # which has no decays
            self.dtype = training.autocast or torch.float32
            model, every = distributed.bare(training.model), s.watch_every * s.accumulation
            self.watching = watch(model, every, measure=_headroom, dtype=self.dtype, tell=self.forecasts.append)

    def __call__(self, step: int) -> None:
        s, parts = self.training.s, self.training.s.accumulation
        if self.watching is None or (step - self.training.begin) % s.watch_every:
            return
        own = {}
        if self.watching.headrooms:  # empty if decays were NaN
            measured = self.watching.headrooms.popitem()[1]
            own = {m.kernel: (m.exponent, m.limit, m.layer) for m in measured.margins if m.dtype == self.dtype}
        own_lines = [
            str(f._replace(step=step, pace=f.pace * parts, used_up=self.training.begin + f.used_up / parts))
            for f in self.forecasts
        ]
        self.forecasts.clear()
        by_rank = self.training.ranks.objects((own, own_lines))
        kernels = {}
        for rank, (margins, _) in enumerate(by_rank):
            for kernel, (exponent, limit, layer) in margins.items():
                if kernel not in kernels or exponent > kernels[kernel]["exponent"]:
                    kernels[kernel] = {"exponent": exponent, "limit": limit, "layer": layer, "rank": rank}
        forecasts = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(by_rank) for line in lines]
        self.training.log.write("headroom", step, kernels=kernels, forecasts=forecasts)
        for line in forecasts:
            self.training.console.print(line)

    def close(self) -> None:
        if self.watching is not None:
            self.watching.close()


def steepest(w: Tensor, chunk: int = 64) -> Tensor:
    """Return the strongest decays of w [B, T, H, K] for measuring headroom; all of a large model's would take minutes.

    Windows of 1, 16, 32 and 64 tokens (the longer three also without their first token), and the incomplete last chunk:
    for the largest sum of each, take its head's chunk, the previous chunk and the incomplete one. The result is [7 or
    8, at most 191, 1, K]."""
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
    pieces = []
    for b, n, h in places:
        begin = chunk * max(0, min(n, whole - 1) - 1)
        pieces.append(torch.cat((w[b, begin : min(begin + 2 * chunk, chunk * whole), h], w[b, chunk * whole :, h])))
    return torch.stack(pieces)[:, :, None]


def _headroom(recording: Recording, **options):
    selected = Recording({name: steepest(w) for name, w in recording.items()})
    selected.op = recording.op
    return headroom(selected, **options)


class Log:
    """The file log.jsonl: a line per step, written by rank 0. A resumed training first removes the steps that it
    repeats."""

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

    def write(self, kind: str, step: int, **values) -> None:
        """Append a record. step: its step; for kinds "begin" and "end" the number of steps taken."""
        if not self.here:
            return
        self.file.write(json.dumps(for_json({"kind": kind, "step": step, **values})) + "\n")
        self.file.flush()
        if self.board is not None and kind == "step":
            for name, x in values.items():
                if isinstance(x, float):
                    self.board.add_scalar(name, x, step)

    def close(self) -> None:
        if self.here:
            self.file.close()
        if self.board is not None:
            self.board.close()


def _before(line: str, begin: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # a process was killed while writing it
        return False
    return record["step"] < begin + (record["kind"] in ("begin", "end"))


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Defer Ctrl-C and SIGTERM to the end of a step: yield a list of the signals that have arrived."""
    arrived: list[int] = []  # one may repeat: torchrun forwards a Ctrl-C that every rank has already received
    previous = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --- operation counts -------------------------------------------------------------------------------------------------


def operations(model: LanguageModel, s: Settings) -> float:
    """Return the minimal floating-point operations of training per token.

    Each matrix weight counts 6, 2 forward and 4 backward; time mixing counts three times its forward. For RWKV and GSA
    that is the recurrence, by `numerics.work`; for attention its two products with the earlier tokens, T/2 on average.
    Recomputation, the extra work of chunks and the embedding's lookup do not count."""
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.weight")
    if s.mixer == "attention":
        mixing = 6 * s.T * s.dim
    else:
        heads = {"H": s.dim // s.head_size, "K": s.head_size, "V": s.head_size, "M": s.slots}
        row = {"op": s.mixer, "B": 1, "T": s.T, "dtype": "bfloat16", **heads}
        mixing = work(row, "both").operations / s.T
    return 6 * matrices + s.layers * mixing


def matrix_rate(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Measure the rate of large matrix products on this GPU, in TFLOP/s; None on a CPU."""
    if device.type == "cpu":
        return None
    from .bench.meter import Meter

    return Meter().matrix_tflops(dtype or torch.float32)


def _memory(device: torch.device) -> float:
    """Return the peak memory of tensors so far, in GiB; NaN on a CPU, where PyTorch does not track it."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan


# --- data -------------------------------------------------------------------------------------------------------------


def _corpus(s: Settings) -> Corpus:
    try:
        corpus = standard_library() if s.data is None else text(s.data)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(str(error).replace("path:", "data:", 1)) from None
    if s.T >= len(corpus.text):
        raise ValueError(f"T: expected fewer tokens than the {len(corpus.text)} bytes of the text, got {s.T}")
    return corpus


def _fingerprint(corpus: Corpus) -> str:
    """Return a text's length and a checksum of bytes sampled across it, to compare texts over ranks and runs."""
    n = len(corpus.text)
    sample = corpus.text[torch.linspace(0, n - 1, min(n, 2**16), dtype=torch.float64).long()]
    return f"{n} bytes, {zlib.crc32(sample.numpy().tobytes()):08x}"


# --- replay of a non-finite step --------------------------------------------------------------------------------------


def again(path: Path, device: str | None = None) -> str:
    """Recompute a saved step, micro-batch by micro-batch in this process, until one is not finite; return a report.

    path: a file not-finite-….pt; another raises ValueError. device: default cuda if available."""
    if not path.is_file():
        raise ValueError(f"replay: expected a file that a training has left, {path} is none")
    try:
        saved = torch.load(path, weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError):  # not a file of torch.save
        saved = None
    if not isinstance(saved, dict) or "parts" not in saved:
        raise ValueError(f"replay: expected a file not-finite-….pt that a training has left, got {path}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    step, parts = saved["step"], saved["parts"]
    model = LanguageModel(**saved["model"])
    model.load_state_dict(saved["weights"])
    model = model.to(device).train()
    for n, (tokens, targets) in enumerate(micro_batches(saved["tokens"], saved["targets"], parts), 1):
        model.zero_grad()
        with nan_decays_pass():
            loss = accumulate(model, tokens.to(device), targets.to(device), autocast=DTYPES[saved["dtype"]])
        wrong = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
        if wrong or not loss.isfinite():
            of = f", and the gradient of {len(wrong)} parameters is not finite, first {wrong[0]}" if wrong else ""
            return f"step {step}, part {n} of {parts}: loss {loss.item():.4g}{of}"
    return f"step {step}: each of its {parts} parts is finite here; their sum, or another card, was not"


# --- the command ------------------------------------------------------------------------------------------------------


Replay = Annotated[
    Path | None, typer.Option(help="Instead: compute the step in such a file again, for `flakit trace`.")
]


def main(replay: Replay = None, **options):
    """Train a language model on bytes, on one process or on several that torchrun starts.

    python -m flakit.train --out runs/first

    torchrun --nproc-per-node 2 -m flakit.train --out runs/second --dtype bfloat16 --parallel fsdp2 --compile

    torchrun --nproc-per-node 2 -m flakit.train --out runs/third --data book.txt --mixer rwkv6 --device cpu

    Killed or stopped with Ctrl-C, the same command goes on from the last checkpoint: bit for bit on as many ranks,
    within rounding on another number. --out has log.jsonl, a line for each step; step-…, the checkpoints; model.pt, the
    weights at the end; not-finite-….pt, a step that was not finite.

    Exits with 0 when all steps are taken, 1 if it stopped for a step that was not finite, 2 if it could not run, and
    128 plus the number of the signal that ended it."""
    try:
        if replay is not None:
            typer.echo(
                again(replay, options["device"])
            )  # exit without an error, for `flakit trace`, whatever it reports
            return
        settings = Settings(**options)
        if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("tensorboard: it is not installed here: pip install tensorboard; log.jsonl needs nothing")
        status = train(settings)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            message = re.sub(r"^(\w+):", lambda name: f"--{name[1].replace('_', '-')}:", str(error))
            Console(stderr=True, soft_wrap=True).print(
                f"flakit.train: {message}", style="red", markup=False, highlight=False
            )
        raise typer.Exit(WRONG) from None
    raise typer.Exit(status)


# Typer reads the options from the signature: the fields of `Settings`, then `replay`.
_replay, _ = inspect.signature(main).parameters.values()
main.__signature__ = inspect.Signature([*inspect.signature(Settings).parameters.values(), _replay])
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)


if __name__ == "__main__":
    try:
        app()
    except SystemExit as end:
        if "RANK" not in os.environ:  # torchrun sets it
            raise
        leave(int(end.code or DONE))
