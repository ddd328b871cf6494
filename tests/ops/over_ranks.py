"""Runs of operators over several processes of a group, each with its slice of T, for tests."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flakit.numerics.operators import operator
from flakit.ops.common.dispatch import interpreted
from tests.interpreter import hurry
from tests.ops.settings import Setting, make

TIMEOUT = timedelta(seconds=300)  # one rank may compile what another does not


@dataclass(frozen=True)
class Case:
    """A setting over ranks with so many tokens each."""

    setting: Setting
    lengths: tuple[int, ...]
    form: str = "chunk"
    backend: str | None = None
    device: str = "cpu"

    def make(self):
        """As `settings.make`; weights, of whose gradients each rank rounds its own, are float32."""
        op, (made, arriving) = operator(self.setting.op), make(self.setting, self.device)
        weights = set(op.tensors) - set(op.sequences)
        wide = {n: x.to(torch.promote_types(x.dtype, torch.float32)) for n, x in made.items() if n in weights}
        return made | wide, arriving

    def __str__(self) -> str:
        more = [x for x in (self.form if self.form != "chunk" else None, self.backend) if x]
        return "-".join([self.setting.op, str(self.setting), "over", *map(str, self.lengths), *more])


def run(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """What `case` gives on this rank, by the names of `numerics.evaluate`; and "messages", the bytes of each sent."""
    op = operator(case.setting.op)
    made, (do, dstate) = case.make()
    end = list(accumulate(case.lengths))[rank]
    own = slice(end - case.lengths[rank], end)
    leaves = {n: x[:, own] if n in op.sequences else x for n, x in op.leaves(made).items()}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    with counted() as sent:
        more = {} if case.setting.chunk_size == "default" else {"chunk_size": int(case.setting.chunk_size)}
        given = op.arguments(leaves, made) | more
        o, states = op.forms[case.form](**given, output_final_state=True, backend=case.backend, group=dist.group.WORLD)
        found, arrives = (o, *op.parts(states)), (do[:, own], *op.parts(dstate))
        reached = found[: len(arrives)]
        grads = torch.autograd.grad(reached, list(leaves.values()), arrives, materialize_grads=True)
    found = dict(zip(op.outputs, (x.detach() for x in found), strict=True))
    found |= {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}
    return {n: x.cpu() for n, x in found.items()} | {"messages": torch.tensor(sent)}


def joined(case: Case, found: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What one process would give: slices end to end; of a state and of a weight's gradient the sum, which is exact
    for states, since all ranks but one have zeros."""
    op = operator(case.setting.op)
    sliced = {"o", *(f"d{n}" for n in op.sequences)}
    names = [n for n in found[0] if n != "messages"]
    return {n: (torch.cat if n in sliced else sum_exact)([x[n] for x in found], *[1] * (n in sliced)) for n in names}


def sum_exact(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.double() for x in parts]).sum(0).to(parts[0].dtype)


class counted:
    """While it lasts, every message that this rank sends: a list of their bytes."""

    def __enter__(self) -> list[int]:
        sent, self.gather = [], dist.all_gather

        def counting(found, x, **more):
            sent.append(x.numel() * x.element_size())
            return self.gather(found, x, **more)

        dist.all_gather = counting
        return sent

    def __exit__(self, *_):
        dist.all_gather = self.gather


def fla_context(cu_seqlens: Sequence[int], rank: int, ranks: int, group) -> SimpleNamespace:
    """What flash-linear-attention's `build_cp_context` makes of offsets that go through all ranks, as far as it says
    where sequences lie. T is a multiple of ranks."""
    part = cu_seqlens[-1] // ranks
    begin, end = part * rank, part * (rank + 1)
    here = [(low, high) for low, high in pairwise(cu_seqlens) if low < end and high > begin and low < high]
    local = torch.tensor([max(low, begin) - begin for low, _ in here] + [part], dtype=torch.int32)
    before, behind = rank - here[0][0] // part, (here[-1][1] - 1) // part - rank
    return SimpleNamespace(
        group=group,
        cu_seqlens=local,
        cu_seqlens_cpu=local,
        pre_num_ranks=before,
        post_num_ranks=behind,
        is_first_rank=before == 0,
        is_last_rank=behind == 0,
        pre_num_ranks_dev=None,
        layout="contiguous",
    )


def over_ranks(ranks: int, work: Callable, *given, backend: str = "gloo", timeout: timedelta = TIMEOUT) -> list:
    """`work(rank, *given)` in so many processes of one group; what each returned, or the exception that it raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (ranks, folder, backend, timeout, work, given), ranks)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]


def _worker(rank, ranks, folder, backend, timeout, work, given):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where a machine's own name has no address
    torch.set_num_threads(1)
    if interpreted():
        hurry()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        found = work(rank, *given)
    except Exception as error:
        traceback.print_exc()  # at once: the others may be ended before they can tell
        found = error
    torch.save(found, f"{folder}/{rank}.pt")
    if not isinstance(found, Exception):
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as flakit.models.distributed.leave, without what it imports


def run_each(rank: int, cases: Sequence[Case], *then: Callable) -> list:
    """What this rank gives of each case, and what each of `then` returns."""
    return [[run(rank, case) for case in cases], *(work(rank) for work in then)]
