"""A training over several processes: who they are, how a model lies on them, and its state in files.

    ranks = Ranks()                                  # as torchrun started them, or one process alone
    model = spread(model, ranks, shard=True)         # FSDP2; else DDP
    take(model, tokens, targets, optimizer, lr=1e-3, ranks=ranks)  # this rank's rows
    save(folder, 100, model, optimizer, ranks, {"seed": 0})

`flakit.train` is the command that is made of these.
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
"""How far gradient norms of ranks may be apart, relative: the gradient is the same on all of them."""


class Ranks(Alone):
    """The processes of one training. rank: this one's number; device: what it computes on.

    losses, norms: what each rank said of the last step: its share of the loss, and the norm of the whole gradient.
    """

    def __init__(self, device: str | None = None):
        """Of the process group that there is, or else of those that torchrun started, or of this process alone.

        device: "cuda" or "cpu"; None: "cuda" where there is one.
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
                found = torch.cuda.device_count()
                raise ValueError(f"device: expected a GPU for each of {here} processes, found {found}; cpu takes any")
            self.device = torch.device(kind, local)
            torch.cuda.set_device(local)
        elif sys.platform == "linux" and here == self.size:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where a machine's own name has no address
        if not there:
            alone = {} if "RANK" in env else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            own = {"device_id": self.device} if kind == "cuda" else {}
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", **alone, **own)

    def rows(self, x: Tensor) -> Tensor:
        """This rank's of a tensor whose first axis is all ranks', on its device."""
        return x.chunk(self.size)[self.rank].to(self.device)

    def total(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    def gather(self, *numbers: float | Tensor) -> list[list[float]]:
        """Some numbers of each rank."""
        own = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in numbers])
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return torch.stack(found).tolist()

    def objects(self, x: object) -> list:
        """An object of each rank, which has to be picklable."""
        found = [None] * self.size
        dist.all_gather_object(found, x)
        return found

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.losses, self.norms = map(list, zip(*self.gather(loss, whole), strict=True))
        least, most = min(self.norms), max(self.norms)
        if all(map(math.isfinite, self.norms)) and most - least > APART * most:
            raise RuntimeError(f"ranks: expected one gradient, got norms {self.norms}: they are out of step")
        lost = next((x for x in self.norms if not math.isfinite(x)), None)
        return sum(self.losses), self.norms[0] if lost is None else lost

    def sends(self, model: nn.Module, now: bool) -> AbstractContextManager:
        # FSDP2 sends after every part: kept until the last, the gradients of all parameters would lie on every rank.
        return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def wait(self) -> None:
        """Until all ranks are here."""
        self.gather(0.0)

    def close(self) -> None:
        """The group too, unless it was there before."""
        if self._own:
            dist.destroy_process_group()


def spread(
    model: nn.Module, ranks: Ranks, *, shard: bool = False, checkpointing: bool = False, compiled: bool = False
) -> nn.Module:
    """A `LanguageModel`, which is on the CPU and the same on every rank, made ready for training over them.

    shard: each rank keeps its share of every parameter, its gradient and what the optimizer knows of it, and gets a
    block's whole when its turn comes (FSDP2); otherwise each keeps all (DDP). checkpointing: a block's activations are
    computed again in the backward pass and not kept. compiled: torch.compile, block by block.
    """
    for block in model.blocks:
        if checkpointing:  # nothing in a block is drawn at random
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        if compiled:
            block.compile()
    if compiled:  # blocks share a program, but not layer 0, nor while a watch looks, of which each has its own name
        least = 8 + 4 * len(model.blocks)
        torch._dynamo.config.recompile_limit = max(least, torch._dynamo.config.recompile_limit)
    if shard:
        # Of what nobody does here: to write into what a block returns.
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
    """The model that `spread` was given."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def settle(model: nn.Module, tokens: Tensor, targets: Tensor, autocast: torch.dtype | None) -> None:
    """Give one backward pass away: after its first, DDP packs gradients anew for sending, so that a training that goes
    on would add in another order than one that was not interrupted."""
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
    """Write folder/step-00000100, all of it or nothing, by all ranks; and delete all but the newest `keep`.

    step: how many were taken. about: what JSON can hold; `load` gives it back.
    """
    path, made = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    if ranks.rank == 0:
        shutil.rmtree(made, ignore_errors=True)  # of one that was killed while it wrote
        made.mkdir(parents=True)
    ranks.wait()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=made)
    if ranks.rank == 0:
        write_whole(made / ABOUT, lambda file: file.write(json.dumps(about | {"step": step}, indent=1).encode()))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(made, path)
        _sync(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    ranks.wait()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Whole ones, the newest last."""
    return sorted(folder.glob("step-*"))


def about(path: Path) -> dict:
    """What `save` was given, and "step"."""
    return json.loads((path / ABOUT).read_text())


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Into a model that lies on any number of ranks, in either way, and its optimizer."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    optimizer.zero_grad(set_to_none=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All of them on the CPU of rank 0, by the names of the model that `spread` was given; called by all ranks."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def write_whole(path: Path, write: Callable) -> None:
    """write(file), and only then the name: whoever is killed leaves the file that was there before, or none."""
    made = path.with_name(f".{path.name}")
    with made.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    with suppress(OSError):  # not every file system, nor Windows, can
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
