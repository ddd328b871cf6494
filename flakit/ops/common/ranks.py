"""One sequence over several processes: each holds a slice of T, in the order of their ranks, and calls the operator.

What a slice makes of the state S that enters it is M S + N. M is what its tokens let pass: a decay for each row of the
state (for GSA for each slot, of both memories), for RWKV7 a matrix [K, K]. N is what it makes of zeros. So

    forward   every rank finds its M and N; one all-gather; every rank goes through the ranks before it, which gives the
              state that enters its slice, and with that the operator runs as it always does
    backward  of the gradient D of the state that leaves a slice, M^T D + dN reaches the one that entered it, dN being
              what the slice's own outputs ask for; one all-gather of dN, for every M is known by then; every rank goes
              through the ranks behind it and runs the operator's backward with the gradient that leaves its slice

GSA's ranks do not meet more often. Both memories are written from k, v, s and g, of which none needs the softmax; and
when the gradients of the scores, which need hv, are found in the backward, the hv that entered is known.

N and dN are found by the operator itself, begun from zeros: they are its final state and the gradient of its initial
one. Kernels that cut a sequence into parts find them on their way, and M as well, and ask for the state that enters
when they need it. Ranks meet nowhere else, but to compare what they were called with.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import validation as check

NOTE = 2048
"""Bytes of what a rank tells the others of its call."""


# --- which sequences lie where ---------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What of the sequences lies on a rank."""

    first: int  # which of the packed sequences is the first one here
    offsets: list[int] | None  # where each of those here begins in the slice, and where the last ends; of a batch None
    enters: bool  # whether the first of them (of a batch: each) began on a rank before
    leaves: bool  # whether the last of them (of a batch: each) goes on behind

    @property
    def sequences(self) -> int | None:
        return None if self.offsets is None else len(self.offsets) - 1

    @property
    def passes(self) -> bool:
        """Whether what enters leaves, too."""
        return self.enters and self.leaves and self.sequences in (None, 1)

    @property
    def entering(self) -> slice:
        """The states here that come from a rank before."""
        return slice(0, None if self.offsets is None else 1) if self.enters else slice(0, 0)

    @property
    def leaving(self) -> slice:
        """The states here that go on to a rank behind."""
        return slice(0 if self.offsets is None else self.sequences - 1, None) if self.leaves else slice(0, 0)


def batch_pieces(ranks: int) -> list[Piece]:
    """Those of sequences as long as all slices together."""
    return [Piece(0, None, enters=r > 0, leaves=r < ranks - 1) for r in range(ranks)]


def packed_pieces(lengths: Sequence[int], cu_seqlens: Sequence[int]) -> list[Piece]:
    """Those of packed sequences whose offsets go through slices of so many tokens.

    An empty sequence lies with the token at its offset, and on the last rank if there is none.
    """
    pieces, total = [], sum(lengths)
    for rank, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        begin, is_last = end - length, rank == len(lengths) - 1
        here = []
        for n, (low, high) in enumerate(pairwise(cu_seqlens)):
            at_end = is_last and low == total
            if max(low, begin) < min(high, end) or (low == high and (begin <= low < end or at_end)):
                here.append((n, low, high))
        offsets = [max(low, begin) - begin for _, low, _ in here] + [min(here[-1][2], end) - begin] if here else [0]
        first, low, _ = here[0] if here else (0, begin, end)
        pieces.append(Piece(first, offsets, enters=low < begin, leaves=bool(here) and here[-1][2] > end))
    return pieces


def local_pieces(told: Sequence[tuple[int, bool, bool]]) -> list[Piece]:
    """Those that each rank tells of itself: how many sequences, whether the first was begun before, and the last goes
    on. Which they are of all, and where they begin, each rank knows of its own alone."""
    found = [Piece(0, [0] * (sequences + 1), enters, leaves) for sequences, enters, leaves in told]
    ends = [(False, found[0].enters), *((a.leaves, b.enters) for a, b in pairwise(found)), (found[-1].leaves, False)]
    for rank, (leaves, enters) in enumerate(ends):
        if leaves != enters:
            raise Disagreement(
                f"cp_context: expected the sequence that goes on behind rank {rank - 1} to enter rank {rank}, got "
                f"{leaves} and {enters}; a context is of one group and its ranks"
            )
    return found


# --- what a slice lets pass ------------------------------------------------------------------------------------------


class Passing(NamedTuple):
    """M of an operator."""

    shape: Callable  # (tensors) -> its shape, [B, H, ...]
    found: Callable  # (operator, tensors, settings) -> M
    applied: Callable  # (M, parts of a state, whether transposed) -> the parts of M S


def decays(at: int, *axes: int) -> Passing:
    """M of a decay [B, T, H, rows]: the place of that tensor, and along which axis of each part of a state it is."""

    def shape(tensors):
        B, _, H, rows = tensors[at].shape
        return B, H, rows

    def found(operator, tensors, settings):
        w = tensors[at]
        return w.sum(1, dtype=torch.promote_types(w.dtype, torch.float32)).exp()

    def applied(M, parts, transposed):
        return [x * M.unsqueeze(-1 if axis == -2 else -2) for x, axis in zip(parts, axes, strict=True)]

    return Passing(shape, found, applied)


def _next(
    passing: Passing, piece: Piece, M: Tensor, S: list[Tensor], N: list[Tensor], transposed: bool
) -> list[Tensor]:
    """The state behind a piece (transposed: the gradient before it), of the one at its other end."""
    if piece.sequences == 0:
        return S
    return _sums(passing.applied(M, S, transposed), N) if piece.passes else N


# --- where ranks meet ------------------------------------------------------------------------------------------------


def gathering(x: Tensor, group) -> Callable[[], Tensor]:
    """Send x to every rank, and go on; what is returned waits for that of every rank, [ranks, ...]."""
    found = x.new_empty(dist.get_world_size(group), *x.shape)
    work = dist.all_gather(list(found), x, group=group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return found

    return arrived


def gathered(x: Tensor, group) -> Tensor:
    """x of every rank, [ranks, ...]."""
    return gathering(x, group)()


def _gathering(group, *parts: Tensor) -> Callable[[], list[Tensor]]:
    """Tensors of every rank, [ranks, ...] each, in one message; as float64, in which ranks are gone through."""
    arrived = gathering(torch.cat([x.flatten() for x in parts]), group)

    def apart() -> list[Tensor]:
        each = arrived().double().split([x.numel() for x in parts], 1)
        return [x.unflatten(1, y.shape) for x, y in zip(each, parts, strict=True)]

    return apart


class Disagreement(ValueError):
    """What the ranks of a group were called with does not fit together; raised on every one of them."""


_compared = WeakKeyDictionary()
"""Of each group the calls that were the same on all its ranks: what is called and all else of it, as text."""


def _always_compares(x: Tensor, packed: bool) -> bool:
    """Whether ranks tell each other of every call, and not only of the first of its kind: where that waits for no GPU,
    or where they wait for it anyway."""
    return packed or check.looks_at_values(x)


def _told(group, device: torch.device, said: dict, **own) -> list[dict]:
    """What every rank says of its call; a `Disagreement` on all of them if they differ in anything said but their own,
    or if one was refused its arguments."""
    note = bytearray(json.dumps(said | own).encode().ljust(NOTE))
    every = gathered(torch.frombuffer(note, dtype=torch.uint8).to(device), group)
    notes = [json.loads(bytes(x)) for x in every.tolist()]
    for rank, other in enumerate(notes):
        if "refused" in other:
            raise Disagreement(f"group: no rank runs, since rank {rank} was refused its arguments: {other['refused']}")
    for name in said:
        for rank, other in enumerate(notes):
            if other.get(name) != notes[0].get(name):
                raise Disagreement(
                    f"{name}: expected the same on every rank of the group, got {notes[0].get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}"
                )
    return notes


def compared(group, x: Tensor, packed: bool, said: dict, **own) -> list[dict] | None:
    """What every rank says of its call, and its own T or the like, which need not be the same; None where a call on a
    GPU is as one that was compared before. said["call"]: what is called."""
    known, call = _compared.setdefault(group, set()), (said["call"], str(said))
    if not _always_compares(x, packed) and call in known:
        return None
    notes = _told(group, x.device, said, **own)
    known.add(call)
    return notes


@contextmanager
def refusals(call: str, group, tensors: Sequence[object], packed: bool) -> Iterator[None]:
    """Check a group, and tell its other ranks of an error in the arguments here, where they are sure to compare theirs.

    They are where `_always_compares` says so, and when that is called for the first time in the group. Later, on a GPU,
    nobody listens: a rank that is refused then leaves the others waiting, as one that dies does, until the group's
    timeout.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "group: a sequence over several ranks cannot be compiled; call it outside, as under torch.compiler.disable"
        )
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group of torch.distributed or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected one that this process belongs to")
    try:
        yield
    except Disagreement:
        raise
    except (TypeError, ValueError) as error:
        given = [x for x in tensors if isinstance(x, Tensor)] or [torch.empty(0)]
        x = next((x for x in given if x.device.type != "cpu"), given[0])
        known = any(name == call for name, _ in _compared.get(group, ()))
        if _always_compares(x, packed) or not known:
            with suppress(Disagreement, RuntimeError):  # the error here is what is to be read
                _told(group, x.device, {}, refused=f"{type(error).__name__}: {error}"[: NOTE // 8])
        raise


# --- the operator over ranks -----------------------------------------------------------------------------------------


class Over(NamedTuple):
    """What a call over ranks has beside its arguments."""

    group: object
    empty: bool
    """Whether the slice is of no tokens; a row of zeros stands for it, which lets any state pass and writes nothing."""
    straddles: tuple[bool, bool] | None
    """Where cu_seqlens are of this slice alone: whether its first sequence began on a rank before, and whether its last
    one goes on behind."""


def called(operator, run, form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend, group):
    """`run`, the rest of an operator's call, in one process, or over the ranks of a group or of a `cp_context`.

    tensors: those of T tokens, `operator.sequences` in number, come first.
    """
    context, straddles, asked = None, None, offsets
    if is_context(group):
        context, group = group, group.group
        offsets = context.cu_seqlens, context.cu_seqlens_cpu
    if group is None:
        return run(form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend)
    with refusals(operator.name, group, tensors, offsets[0] is not None):
        if context is not None:
            straddles = _straddles(context, asked, initial_state, output_final_state)
        empty = _has_no_tokens(tensors[0])
        rows = [F.pad(x, (0, 0, 0, 0, 0, 1)) if _has_no_tokens(x) else x for x in tensors[: operator.sequences]]
        tensors, over = (*rows, *tensors[operator.sequences :]), Over(group, empty, straddles)
        return run(form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend, over)


def _has_no_tokens(x: object) -> bool:
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] == 0


def is_context(x: object) -> bool:
    """Whether that is flash-linear-attention's `cp_context`, of fla.ops.cp: by its attributes."""
    return x is not None and all(hasattr(x, n) for n in ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks"))


def chosen(group, cp_context):
    """What to pass as group where there is a keyword of its own for a `cp_context`."""
    if cp_context is None:
        return group
    if not is_context(cp_context):
        raise TypeError(f"cp_context: expected one of flash-linear-attention's, got {type(cp_context).__name__}")
    if group is not None:
        raise ValueError(f"group: expected None beside cp_context, which has its own, got {type(group).__name__}")
    return cp_context


def _straddles(context, asked, initial_state, output_final_state) -> tuple[bool, bool]:
    """What a `cp_context` says of its slice's ends; a ValueError where it means what is not computed here."""
    layout = getattr(context, "layout", "contiguous")
    if layout != "contiguous":
        raise ValueError(f"cp_context: expected layout 'contiguous', a slice of T on each rank, got {layout!r}")
    if getattr(context, "pre_num_ranks_dev", None) is not None or context.pre_num_ranks is None:
        raise ValueError("cp_context: expected pre_num_ranks and post_num_ranks as numbers, got them on a device")
    if context.cu_seqlens is None:
        raise ValueError("cp_context: expected cu_seqlens, the offsets of this rank's slice, got None")
    for name, x in zip(("cu_seqlens", "cu_seqlens_cpu"), asked, strict=True):
        if x is not None and x is not getattr(context, name):
            raise ValueError(f"{name}: expected None beside a cp_context, which has its own, got {type(x).__name__}")
    if initial_state is not None:
        raise ValueError("initial_state: expected None beside a cp_context, as flash-linear-attention does; give group")
    if check.check_flag("output_final_state", output_final_state):
        raise ValueError("output_final_state: expected False beside a cp_context, as initial_state; give group")
    return context.pre_num_ranks > 0, context.post_num_ranks > 0


class Call(NamedTuple):
    """What a forward and its backward share."""

    operator: object  # a `registration.Registered`
    group: object
    rank: int
    pieces: list[Piece]
    settings: tuple  # scale, form, backend, chunk_size
    output_final_state: bool
    keep: bool

    @property
    def piece(self) -> Piece:
        return self.pieces[self.rank]

    def meets(self, tensors: Sequence[Tensor]) -> bool:
        _, form, backend, _ = self.settings
        return self.piece.offsets is None and self.operator.meets(form, backend, tensors)


def run(operator, over: Over, tensors, states, cu_seqlens, cu_seqlens_cpu, *settings):
    """What `Registered.__call__` returns, of this rank's slice.

    states: of all sequences; read are the initial ones of those that begin here. The final ones are of those that end
    here, and zero for all others.
    """
    group, empty, straddles = over
    first, packed = tensors[0], cu_seqlens is not None
    *settings, output_final_state = settings
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *states))
    ends = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist() if packed else None
    if not packed:
        operator.check_values(tensors, states, None)

    said = {"call": operator.name}
    for name, x in zip(operator.tensors, tensors, strict=True):
        axes = list(x.shape) if x.ndim < 4 else [x.shape[0], "T", *x.shape[2:]]
        said[name] = f"{str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, axes))}]"
    said["cu_seqlens"] = None
    if packed:
        said["cu_seqlens"] = f"{len(ends)} offsets, CRC {crc32(str(ends).encode())}" if straddles is None else "local"
    said |= zip(("scale", "form", "backend", "chunk_size"), settings, strict=True)
    said |= {"output_final_state": output_final_state, "requires_grad of any input": keep}
    own = {"T": 0 if empty else first.shape[1]}
    if straddles is not None:
        if ends[-1] != own["T"]:
            raise ValueError(f"cp_context: expected a slice of {ends[-1]} tokens, as its offsets, got {own['T']}")
        own["straddles"] = len(ends) - 1, *straddles
    notes = compared(group, first, packed, said, **own)

    rank, pieces = dist.get_rank(group), batch_pieces(dist.get_world_size(group))
    offsets, own = None, slice(None)
    if packed:
        if straddles is None:
            lengths = [x["T"] for x in notes]
            check.check_offsets(torch.tensor(ends), None, sum(lengths), reads_values=True)
            pieces = packed_pieces(lengths, ends)
        else:
            pieces = local_pieces([x["straddles"] for x in notes])
            pieces[rank] = pieces[rank]._replace(offsets=ends)
        piece = pieces[rank]
        # Where there is no sequence, one of no tokens stands for it.
        offsets = torch.tensor(piece.offsets if piece.sequences else [0, 0], device=first.device)
        own = slice(piece.first, piece.first + piece.sequences)
        states = [x[own] if x is not None and piece.sequences else None for x in states]
        if check.looks_at_values(first):
            operator.check_values(tensors, states, offsets)
            _told(group, first.device, {})  # that no rank has refused any
    call = Call(operator, group, rank, pieces, tuple(settings), output_final_state, keep)
    o, *final = _Ranks.apply(call, offsets, *tensors, *states)
    if empty:
        o = o[:, :0]
    if not output_final_state:
        return o, (None,) * len(states)
    if packed:
        around = (0, 0) * 3 + (own.start, len(ends) - 1 - own.stop)
        final = [F.pad(x[: piece.sequences], around) for x in final]
    return o, tuple(final)


def _with(states, rows: slice, found: list[Tensor], shapes) -> list[Tensor]:
    """The parts of states with some rows found elsewhere; None are zeros."""
    changed = []
    for x, y, shape in zip(states, found, shapes, strict=True):
        x = y.new_zeros(shape) if x is None else x.to(y.dtype, copy=True)
        x[rows] = y[: len(x[rows])]
        changed.append(x)
    return changed


def _entering(call: Call, M: Tensor, N: list[Tensor], states, shapes) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    """M of every rank, and the initial states here with those that enter; M and N: of what goes on behind."""
    told = _gathering(call.group, M, *N)

    def entered():
        Ms, *Ns = told()
        S = [torch.zeros_like(x[0]) for x in Ns]
        for r in range(call.rank):
            S = _next(call.operator.passing, call.pieces[r], Ms[r], S, [x[r] for x in Ns], transposed=False)
        return Ms, _with(states, call.piece.entering, [x.to(M.dtype) for x in S], shapes)

    return entered


def _arriving(call: Call, Ms: Tensor, dN: list[Tensor], dstates, shapes) -> Callable[[], list[Tensor]]:
    """The final states' gradients here with those that arrive from behind; dN: of what came from before."""
    told = _gathering(call.group, *dN)

    def arrived():
        dNs = told()
        D = [torch.zeros_like(x[0]) for x in dNs]
        for r in reversed(range(call.rank + 1, len(call.pieces))):
            D = _next(call.operator.passing, call.pieces[r], Ms[r], D, [x[r] for x in dNs], transposed=True)
        return _with(dstates, call.piece.leaving, [x.to(y.dtype) for x, y in zip(D, dN, strict=True)], shapes)

    return arrived


class _Ranks(torch.autograd.Function):
    """An operator that begins with what the ranks before make of their initial states.

    Kernels that find M and N of a whole slice on their way are given the states as functions of them (`Kernels.meets`).
    """

    @staticmethod
    def forward(ctx, call, offsets, *given):
        operator, piece, passing = call.operator, call.piece, call.operator.passing
        n, settings = len(operator.tensors), (*call.settings, call.output_final_state, call.keep)
        tensors, states = given[:n], given[n:]
        first, wide = tensors[0], torch.promote_types(tensors[0].dtype, torch.float32)
        _, shapes = operator.shapes(*tensors, first.shape[0] if offsets is None else len(offsets) - 1)

        def known(M, N):
            if states[0] is not None and not piece.enters:
                N = _sums(passing.applied(M, states, False), N)
            told = _entering(call, M, N, states, shapes)

            def entered():
                nonlocal Ms, states
                Ms, states = told()
                return states

            return entered

        with torch.autocast(first.device.type, enabled=False):
            Ms, unknown = None, (known, *[None] * (len(states) - 1))
            if not call.meets(tensors):
                M = first.new_zeros(passing.shape(tensors), dtype=wide)
                N = [first.new_zeros(M.shape[0], *shape[1:], dtype=wide) for shape in shapes]
                if piece.leaves:
                    zeros = _with(states, piece.entering, N, shapes)
                    _, *found = operator.run_forward(*tensors, *zeros, offsets, None, *call.settings, True, False)
                    N = [x[piece.leaving] for x in found[: len(states)]]
                if piece.passes:
                    M = passing.found(operator, tensors, call.settings)
                Ms, states = _entering(call, M, N, states, shapes)()
                unknown = states
            o, *rest = operator.run_forward(*tensors, *unknown, offsets, None, *settings)
        final, kept = rest[: len(states)], rest[len(states) :]
        ctx.call, ctx.shapes, ctx.initial = call, shapes, [x is not None for x in given[n:]]
        if call.keep:
            ctx.save_for_backward(*tensors, *states, offsets, *kept, Ms)
        ctx.set_materialize_grads(False)
        if not call.output_final_state:
            return (o,)
        for x in final:
            x[piece.leaving] = 0
        return o, *final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, *dfinal):
        call, shapes, (*saved, Ms) = ctx.call, ctx.shapes, ctx.saved_tensors
        operator, piece, passing = call.operator, call.piece, call.operator.passing
        n, first = len(operator.tensors), saved[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        do = first.new_zeros(operator.shapes(*saved[:n], 1)[0]) if do is None else do
        dfinal = dfinal or (None,) * len(shapes)

        def known(_, dN):
            arriving = dfinal
            if not piece.leaves and any(x is not None for x in dfinal):
                arriving = _with(dfinal, piece.leaving, dN, shapes)
                dN = _sums(passing.applied(Ms[call.rank], arriving, True), dN)
            return _arriving(call, Ms, dN, arriving, shapes)

        with torch.autocast(first.device.type, enabled=False):
            unknown = known, *[None] * (len(shapes) - 1)
            if not call.meets(saved[:n]):
                dN = [first.new_zeros(Ms.shape[1], *shape[1:], dtype=wide) for shape in shapes]
                if piece.enters:
                    zeros = _with(dfinal, piece.leaving, dN, shapes)
                    grads = operator.run_backward(*saved, do, *zeros, *call.settings)
                    dN = [x[piece.entering] for x in grads[n:]]
                unknown = _arriving(call, Ms, dN, dfinal, shapes)()
            grads = operator.run_backward(*saved, do, *unknown, *call.settings)
        dstates = [x if given else None for x, given in zip(grads[n:], ctx.initial, strict=True)]
        for x in dstates:
            if x is not None:
                x[piece.entering] = 0
        return None, None, *grads[:n], *dstates


def _sums(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
    """In the dtype of y."""
    return [(a + b).to(b.dtype) for a, b in zip(x, y, strict=True)]
