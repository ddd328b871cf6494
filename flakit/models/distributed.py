"""Distributed training: the process group, a model over it by DDP or FSDP2, and checkpoints.

    ranks = Ranks()                                  # those that torchrun started, or a single process
    model = spread(model, ranks, shard=True)         # FSDP2; else DDP
    take(model, tokens, targets, optimizer, lr=1e-3, ranks=ranks)  # this rank's rows
    save(folder, 100, model, optimizer, ranks, {"seed": 0})

The command `flakit.train` is built from these.
"""

import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ..ops.common.validation import nan_decays_pass
from .accumulation import Alone, accumulate

APART = 1e-3
"""The largest relative difference between the gradient norms that ranks compute of the same gradient."""


class Ranks(Alone):
    """The processes of one training. rank, size: this process's number and their count; device: this process's.

    losses, norms: for the last step, each rank's share of the loss, and the gradient norm that it computed."""

    def __init__(self, device: str | None = None):
        """Use the existing process group, or else initialise one from torchrun's environment, or for this process only.

        device: "cuda" or "cpu"; None: "cuda" if available. Raises ValueError for another, and if a process has no GPU.
        """
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"device: expected cuda or cpu, got {device!r}")
        there, env = dist.is_initialized(), os.environ
        self.rank = dist.get_rank() if there else int(env.get("RANK", 0))
        self.size = dist.get_world_size() if there else int(env.get("WORLD_SIZE", 1))
        local, here = int(env.get("LOCAL_RANK", self.rank)), int(env.get("LOCAL_WORLD_SIZE", self.size))
        self.device, self.losses, self.norms, self._own = torch.device("cpu"), [], [], not there
        if kind == "cuda":
            if torch.cuda.device_count() < here:
                gpus = torch.cuda.device_count()
                raise ValueError(f"device: expected a GPU for each of {here} processes, found {gpus}; cpu takes any")
            self.device = torch.device(kind, local)
            torch.cuda.set_device(local)
        elif sys.platform == "linux" and here == self.size:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
        if not there:
            alone = {} if "RANK" in env else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            own = {"device_id": self.device} if kind == "cuda" else {}
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", **alone, **own)

    def rows(self, x: Tensor) -> Tensor:
        """Return this rank's share of the rows of x, on this rank's device."""
        return x.chunk(self.size)[self.rank].to(self.device)

    def total(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    def gather(self, *numbers: float | Tensor) -> list[list[float]]:
        """Exchange numbers with all ranks; return a list of them per rank. Every rank must call it."""
        own = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in numbers])
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).tolist()

    def objects(self, x: object) -> list:
        """Exchange a picklable object with all ranks; return one per rank. Every rank must call it."""
        objects = [None] * self.size
        dist.all_gather_object(objects, x)
        return objects

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.losses, self.norms = map(list, zip(*self.gather(loss, full), strict=True))
        least, most = min(self.norms), max(self.norms)
        if all(map(math.isfinite, self.norms)) and most - least > APART * most:
            raise RuntimeError(f"ranks: expected one gradient, got norms {self.norms}: they are out of step")
        nonfinite = next((x for x in self.norms if not math.isfinite(x)), None)
        return sum(self.losses), self.norms[0] if nonfinite is None else nonfinite

    def sends(self, model: nn.Module, now: bool) -> AbstractContextManager:
        # FSDP2 reduces after every micro-batch: until the last, each rank would hold the gradients of all parameters.
        return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def wait(self) -> None:
        """Return once every rank has called this."""
        self.gather(0.0)

    def close(self) -> None:
        """Destroy the process group, unless it existed before this object."""
        if self._own:
            dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process at once with an exit status, without Python's own clean-up at exit.

    For a process of a group, once its work is done. PyTorch's caches keep a group of FSDP2's alive, and with it the
    threads of gloo. One that drops its last tensor while Python ends aborts the process, and torchrun would report a
    finished training as a failed one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def spread(
    model: nn.Module, ranks: Ranks, *, shard: bool = False, checkpointing: bool = False, compiled: bool = False
) -> nn.Module:
    """Prepare a `LanguageModel` for training over ranks, and return it. It must be on the CPU and the same on every
    rank.

    shard: shard parameters, gradients and optimizer states over ranks and gather them block by block (FSDP2); default:
    each rank holds all of them (DDP). checkpointing: recompute a block's activations in the backward pass instead of
    storing them. compiled: torch.compile each block."""
    for block in model.blocks:
        if checkpointing:  # blocks use no random numbers
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        if compiled:
            block.compile()
    if compiled:  # blocks share a program, except layer 0, and except under a watch, where each has its own name
        limit = 8 + 4 * len(model.blocks)
        torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    if shard:
        # It warns of in-place changes to a block's output; there are none here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    model.to(ranks.device)
    if shard or ranks.size == 1:
        return model
    where = [ranks.device.index] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=where, gradient_as_bucket_view=True)


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's wrapper, as it was passed to `spread`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def settle(model: nn.Module, tokens: Tensor, targets: Tensor, autocast: torch.dtype | None) -> None:
    """Run one backward pass and discard it. After its first, DDP rebuilds its gradient buckets, so without this a
    resumed training would sum in another order than an uninterrupted one."""
    if isinstance(model, DistributedDataParallel):
        with nan_decays_pass():
            accumulate(model, tokens, targets, autocast=autocast)
        model.zero_grad(set_to_none=True)


# --- files ------------------------------------------------------------------------------------------------------------

ABOUT = "training.json"


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    about: dict,
    keep: int = 2,
) -> Path:
    """Write a checkpoint atomically to folder/step-00000100, from all ranks; delete all but the newest `keep`; return
    its path.

    step: number of steps taken. about: JSON-serialisable metadata, which the function `about` reads back."""
    path, partial_path = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    if ranks.rank == 0:
        shutil.rmtree(partial_path, ignore_errors=True)  # left by a process killed while writing
        partial_path.mkdir(parents=True)
    ranks.wait()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=partial_path)
    if ranks.rank == 0:
        metadata = json.dumps(about | {"step": step}, indent=1).encode()
        write_whole(partial_path / ABOUT, lambda file: file.write(metadata))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial_path, path)
        _sync(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    ranks.wait()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*"))


def about(path: Path) -> dict:
    """Return the metadata of a checkpoint: the argument `about` of `save`, and "step"."""
    return json.loads((path / ABOUT).read_text())


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimizer, by DDP or FSDP2 over any number of ranks; clear the
    gradients."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    optimizer.zero_grad(set_to_none=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights on the CPU of rank 0, by the names of the unwrapped model. Every rank must call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def write_whole(path: Path, write: Callable) -> None:
    """Write a file atomically: write(file) fills a temporary one, which then replaces `path`. If the process is killed,
    the earlier file stays."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    with suppress(OSError):  # not supported on Windows, nor by every file system
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
