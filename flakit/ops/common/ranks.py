"""One sequence over several processes: each holds a slice of T, in rank order, and calls the operator.

A slice maps the state S entering it to M S + N. M is a decay for each row of the state (for GSA for each slot, of both
memories), for RWKV7 a matrix [K, K]. N is the result for S = 0. So

    forward   every rank computes its M and N; one all-gather; every rank composes the maps of the ranks before it,
              which yields the state entering its slice, and runs the operator with it
    backward  the gradient D of the state leaving a slice becomes M^T D + dN at the state entering it, where dN comes
              from the slice's own outputs; one all-gather of dN, since every M is known; every rank composes the maps
              of the ranks after it and runs the operator's backward with the gradient leaving its slice

GSA needs no further exchange. Both memories are written from k, v, s and g, none of which depends on the softmax; and
when the backward computes the gradients of the scores, which need hv, the entering hv is known.

The operator itself computes N and dN, started from zeros: they are its final state and the gradient of its initial
state. Kernels that cut a sequence into parts compute them along with M, and request the entering state when they need
it. Beyond that, ranks communicate only to compare their calls.
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
"""Bytes of the message in which a rank describes its call to the others."""


# --- the sequences on each rank --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The sequences on one rank, whose slice of T may begin and end inside a sequence."""

    first: int  # index of the first packed sequence here
    offsets: list[int] | None  # of the sequences here, within the slice; None for a batch
    enters: bool  # whether the first of them (of a batch: each) begins on an earlier rank
    leaves: bool  # whether the last of them (of a batch: each) continues on a later rank

    @property
    def sequences(self) -> int | None:
        return None if self.offsets is None else len(self.offsets) - 1

    @property
    def passes(self) -> bool:
        """Whether the sequence that enters also leaves."""
        return self.enters and self.leaves and self.sequences in (None, 1)

    @property
    def entering(self) -> slice:
        """The states here that an earlier rank determines."""
        return slice(0, None if self.offsets is None else 1) if self.enters else slice(0, 0)

    @property
    def leaving(self) -> slice:
        """The states here that continue on a later rank."""
        return slice(0 if self.offsets is None else self.sequences - 1, None) if self.leaves else slice(0, 0)


def batch_pieces(ranks: int) -> list[Piece]:
    """Return the pieces of a batch whose sequences span all slices."""
    return [Piece(0, None, enters=r > 0, leaves=r < ranks - 1) for r in range(ranks)]


def packed_pieces(lengths: Sequence[int], cu_seqlens: Sequence[int]) -> list[Piece]:
    """Return the pieces of packed sequences, cu_seqlens [N + 1], cut into slices of these lengths.

    An empty sequence belongs to the rank of the token at its offset, and to the last rank if there is none.
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


def local_pieces(slices: Sequence[tuple[int, bool, bool]]) -> list[Piece]:
    """Return the pieces from what each rank knows of its slice: the number of sequences, whether the first begins on an
    earlier rank, and whether the last continues on a later one. Raises `Disagreement` if neighbours contradict.

    Offsets are zeros, since each rank knows those of its own sequences only.
    """
    pieces = [Piece(0, [0] * (sequences + 1), enters, leaves) for sequences, enters, leaves in slices]
    inner = ((a.leaves, b.enters) for a, b in pairwise(pieces))
    ends = [(False, pieces[0].enters), *inner, (pieces[-1].leaves, False)]
    for rank, (leaves, enters) in enumerate(ends):
        if leaves != enters:
            raise Disagreement(
                f"cp_context: expected the sequence that goes on behind rank {rank - 1} to enter rank {rank}, got "
                f"{leaves} and {enters}; a context is of one group and its ranks"
            )
    return pieces


# --- the linear map of a slice ---------------------------------------------------------------------------------------


class LinearMap(NamedTuple):
    """How to compute and apply M, an operator's linear map of a slice on the state that enters it."""

    shape: Callable  # (tensors) -> the shape of M, [B, H, ...]
    compute: Callable  # (operator, tensors, settings) -> M
    apply: Callable  # (M, parts of a state, transposed) -> the parts of M S, or of M^T S if transposed


def decay_map(at: int, *axes: int) -> LinearMap:
    """Return the `LinearMap` of a decay [B, T, H, rows]: M = e^{sum over T}, a factor for each row of the state.

    at: the index of the decay among the tensors. axes: for each part of the state, the axis of its rows, -2 or -1.
    """

    def shape(tensors):
        B, _, H, rows = tensors[at].shape
        return B, H, rows

    def compute(operator, tensors, settings):
        w = tensors[at]
        return w.sum(1, dtype=torch.promote_types(w.dtype, torch.float32)).exp()

    def apply(M, parts, transposed):
        return [x * M.unsqueeze(-1 if axis == -2 else -2) for x, axis in zip(parts, axes, strict=True)]

    return LinearMap(shape, compute, apply)


def _next(
    linear_map: LinearMap, piece: Piece, M: Tensor, S: list[Tensor], N: list[Tensor], transposed: bool
) -> list[Tensor]:
    """Return the state after a piece: M S + N, or N if its sequence begins there. transposed: the gradient before the
    piece, from S, the gradient after it."""
    if piece.sequences == 0:
        return S
    return _sums(linear_map.apply(M, S, transposed), N) if piece.passes else N


# --- communication ---------------------------------------------------------------------------------------------------


def gathering(x: Tensor, group) -> Callable[[], Tensor]:
    """Start an all-gather of x; return a function that waits for the result, [ranks, ...]."""
    received = x.new_empty(dist.get_world_size(group), *x.shape)
    work = dist.all_gather(list(received), x, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def gathered(x: Tensor, group) -> Tensor:
    """All-gather x, [ranks, ...]."""
    return gathering(x, group)()


def _gathering(group, *parts: Tensor) -> Callable[[], list[Tensor]]:
    """Start an all-gather of several tensors in one message. Return a function that waits for them and returns each,
    [ranks, ...] in float64, in which the maps of ranks are composed."""
    wait = gathering(torch.cat([x.flatten() for x in parts]), group)

    def split() -> list[Tensor]:
        each = wait().double().split([x.numel() for x in parts], 1)
        return [x.unflatten(1, y.shape) for x, y in zip(each, parts, strict=True)]

    return split


class Disagreement(ValueError):
    """The ranks of a group were called with inconsistent arguments. Raised on all ranks."""


_compared = WeakKeyDictionary()
"""For each group, the calls that were equal on all its ranks: (operator, all arguments as text)."""


def _always_compares(x: Tensor, packed: bool) -> bool:
    """Whether ranks compare every call, not only the first of its kind: where that adds no wait for a GPU."""
    return packed or check.looks_at_values(x)


def _exchange(group, device: torch.device, shared: dict, **own) -> list[dict]:
    """Gather every rank's description of its call; return them. Raises `Disagreement` on all ranks if `shared` differs,
    or if one rank refused its arguments."""
    note = bytearray(json.dumps(shared | own).encode().ljust(NOTE))
    every = gathered(torch.frombuffer(note, dtype=torch.uint8).to(device), group)
    notes = [json.loads(bytes(x)) for x in every.tolist()]
    for rank, other in enumerate(notes):
        if "refused" in other:
            raise Disagreement(f"group: no rank runs, since rank {rank} was refused its arguments: {other['refused']}")
    for name in shared:
        for rank, other in enumerate(notes):
            if other.get(name) != notes[0].get(name):
                raise Disagreement(
                    f"{name}: expected the same on every rank of the group, got {notes[0].get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}"
                )
    return notes


def compared(group, x: Tensor, packed: bool, shared: dict, **own) -> list[dict] | None:
    """Compare a call over all ranks of a group; return every rank's description of it.

    Return None, without communication, where a call on a GPU equals one that was compared before. shared: what must be
    equal on all ranks, shared["call"] the operator's name; own: what may differ, such as T. Raises `Disagreement`.
    """
    known, call = _compared.setdefault(group, set()), (shared["call"], str(shared))
    if not _always_compares(x, packed) and call in known:
        return None
    notes = _exchange(group, x.device, shared, **own)
    known.add(call)
    return notes


@contextmanager
def refusals(call: str, group, tensors: Sequence[object], packed: bool) -> Iterator[None]:
    """In the `with` block, report an error in this rank's arguments to the group's other ranks, if they compare this
    call.

    They do where `_always_compares` holds, and at the operator's first call in the group. Later, on a GPU, no rank
    listens: the others then wait until the group's timeout, as if this rank had died. Raises TypeError or ValueError
    for a wrong group.
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
        candidates = [x for x in tensors if isinstance(x, Tensor)] or [torch.empty(0)]
        x = next((x for x in candidates if x.device.type != "cpu"), candidates[0])
        known = any(name == call for name, _ in _compared.get(group, ()))
        if _always_compares(x, packed) or not known:
            with suppress(Disagreement, RuntimeError):  # the error raised below is the informative one
                _exchange(group, x.device, {}, refused=f"{type(error).__name__}: {error}"[: NOTE // 8])
        raise


# --- the operator over ranks -----------------------------------------------------------------------------------------


class Over(NamedTuple):
    """The context of a call over ranks, beside its arguments: the group, and this rank's slice."""

    group: object
    empty: bool
    """Whether the slice has no tokens; a row of zeros replaces it, which leaves every state unchanged."""
    straddles: tuple[bool, bool] | None
    """For cu_seqlens of this slice alone: whether its first sequence begins on an earlier rank, and whether its last
    one continues on a later rank."""


def called(operator, run, form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend, group):
    """Call `run`, an operator's checks and computation, in one process or over the ranks of a group.

    run: a function (form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend, over).
    tensors: first the `operator.sequences` tensors with T tokens. group: a process group, a `cp_context` or None.
    """
    context, straddles, passed_offsets = None, None, offsets
    if is_context(group):
        context, group = group, group.group
        offsets = context.cu_seqlens, context.cu_seqlens_cpu
    if group is None:
        return run(form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend)
    with refusals(operator.name, group, tensors, offsets[0] is not None):
        if context is not None:
            straddles = _straddles(context, passed_offsets, initial_state, output_final_state)
        empty = _has_no_tokens(tensors[0])
        rows = [F.pad(x, (0, 0, 0, 0, 0, 1)) if _has_no_tokens(x) else x for x in tensors[: operator.sequences]]
        tensors, over = (*rows, *tensors[operator.sequences :]), Over(group, empty, straddles)
        return run(form, tensors, scale, initial_state, output_final_state, offsets, chunk_size, backend, over)


def _has_no_tokens(x: object) -> bool:
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] == 0


def is_context(x: object) -> bool:
    """Whether x is a `cp_context` of flash-linear-attention's fla.ops.cp, by its attributes."""
    return x is not None and all(hasattr(x, n) for n in ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks"))


def chosen(group, cp_context):
    """Return the group to pass on, for functions with a separate keyword for a `cp_context`. Raises TypeError if
    `cp_context` is no such object, ValueError if both are set."""
    if cp_context is None:
        return group
    if not is_context(cp_context):
        raise TypeError(f"cp_context: expected one of flash-linear-attention's, got {type(cp_context).__name__}")
    if group is not None:
        raise ValueError(f"group: expected None beside cp_context, which has its own, got {type(group).__name__}")
    return cp_context


def _straddles(context, offsets, initial_state, output_final_state) -> tuple[bool, bool]:
    """Return whether a `cp_context`'s slice continues an earlier sequence, and whether its last one continues; raise
    ValueError for what is not supported."""
    layout = getattr(context, "layout", "contiguous")
    if layout != "contiguous":
        raise ValueError(f"cp_context: expected layout 'contiguous', a slice of T on each rank, got {layout!r}")
    if getattr(context, "pre_num_ranks_dev", None) is not None or context.pre_num_ranks is None:
        raise ValueError("cp_context: expected pre_num_ranks and post_num_ranks as numbers, got them on a device")
    if context.cu_seqlens is None:
        raise ValueError("cp_context: expected cu_seqlens, the offsets of this rank's slice, got None")
    for name, x in zip(("cu_seqlens", "cu_seqlens_cpu"), offsets, strict=True):
        if x is not None and x is not getattr(context, name):
            raise ValueError(f"{name}: expected None beside a cp_context, which has its own, got {type(x).__name__}")
    if initial_state is not None:
        raise ValueError("initial_state: expected None beside a cp_context, as flash-linear-attention does; give group")
    if check.check_flag("output_final_state", output_final_state):
        raise ValueError("output_final_state: expected False beside a cp_context, as initial_state; give group")
    return context.pre_num_ranks > 0, context.post_num_ranks > 0


class Call(NamedTuple):
    """The constants of a call over ranks, which its forward and its backward share."""

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

    def accepts_functions(self, tensors: Sequence[Tensor]) -> bool:
        _, form, backend, _ = self.settings
        return self.piece.offsets is None and self.operator.accepts_functions(form, backend, tensors)


def run(operator, over: Over, tensors, states, cu_seqlens, cu_seqlens_cpu, *settings):
    """Run an operator over ranks: return o and the final state's parts for this rank's slice, as `Registered.__call__`.

    states: of all sequences; those of sequences that begin here are read. The final states are those of sequences that
    end here, zeros for all others. Raises ValueError or `Disagreement` if ranks' arguments do not fit together.
    """
    group, empty, straddles = over
    first, packed = tensors[0], cu_seqlens is not None
    *settings, output_final_state = settings
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *states))
    ends = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist() if packed else None
    if not packed:
        operator.check_values(tensors, states, None)

    shared = {"call": operator.name}
    for name, x in zip(operator.tensors, tensors, strict=True):
        axes = list(x.shape) if x.ndim < 4 else [x.shape[0], "T", *x.shape[2:]]
        shared[name] = f"{str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, axes))}]"
    shared["cu_seqlens"] = None
    if packed:
        shared["cu_seqlens"] = f"{len(ends)} offsets, CRC {crc32(str(ends).encode())}" if straddles is None else "local"
    shared |= zip(("scale", "form", "backend", "chunk_size"), settings, strict=True)
    shared |= {"output_final_state": output_final_state, "requires_grad of any input": keep}
    own = {"T": 0 if empty else first.shape[1]}
    if straddles is not None:
        if ends[-1] != own["T"]:
            raise ValueError(f"cp_context: expected a slice of {ends[-1]} tokens, as its offsets, got {own['T']}")
        own["straddles"] = len(ends) - 1, *straddles
    notes = compared(group, first, packed, shared, **own)

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
        # A slice without sequences gets one without tokens.
        offsets = torch.tensor(piece.offsets if piece.sequences else [0, 0], device=first.device)
        own = slice(piece.first, piece.first + piece.sequences)
        states = [x[own] if x is not None and piece.sequences else None for x in states]
        if check.looks_at_values(first):
            operator.check_values(tensors, states, offsets)
            _exchange(group, first.device, {})  # raises if a rank refused its values
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


def _with(states, rows: slice, values: list[Tensor], shapes) -> list[Tensor]:
    """Return copies of a state's parts with `values` in these rows. None counts as zeros of the part's shape."""
    copies = []
    for x, y, shape in zip(states, values, shapes, strict=True):
        x = y.new_zeros(shape) if x is None else x.to(y.dtype, copy=True)
        x[rows] = y[: len(x[rows])]
        copies.append(x)
    return copies


def _exchange_states(
    call: Call, M: Tensor, N: list[Tensor], states, shapes
) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    """Send M and N of the sequence that leaves; return a function that waits for all ranks and returns every M, and the
    initial states here, including the entering one."""
    receive = _gathering(call.group, M, *N)

    def wait():
        Ms, *Ns = receive()
        S = [torch.zeros_like(x[0]) for x in Ns]
        for r in range(call.rank):
            S = _next(call.operator.linear_map, call.pieces[r], Ms[r], S, [x[r] for x in Ns], transposed=False)
        return Ms, _with(states, call.piece.entering, [x.to(M.dtype) for x in S], shapes)

    return wait


def _exchange_grads(call: Call, Ms: Tensor, dN: list[Tensor], dstates, shapes) -> Callable[[], list[Tensor]]:
    """Send dN of the sequence that entered; return a function that waits for all ranks and returns the final states'
    gradients here, including that of the state that leaves."""
    receive = _gathering(call.group, *dN)

    def wait():
        dNs = receive()
        D = [torch.zeros_like(x[0]) for x in dNs]
        for r in reversed(range(call.rank + 1, len(call.pieces))):
            D = _next(call.operator.linear_map, call.pieces[r], Ms[r], D, [x[r] for x in dNs], transposed=True)
        return _with(dstates, call.piece.leaving, [x.to(y.dtype) for x, y in zip(D, dN, strict=True)], shapes)

    return wait


class _Ranks(torch.autograd.Function):
    """The autograd function of an operator over ranks: the initial states come from earlier ranks. Kernels that compute
    M and N of a whole slice themselves receive the states as functions of both (`ahead_triton.Kernels`)."""

    @staticmethod
    def forward(ctx, call, offsets, *inputs):
        operator, piece, linear_map = call.operator, call.piece, call.operator.linear_map
        n, settings = len(operator.tensors), (*call.settings, call.output_final_state, call.keep)
        tensors, states = inputs[:n], inputs[n:]
        first, wide = tensors[0], torch.promote_types(tensors[0].dtype, torch.float32)
        _, shapes = operator.shapes(*tensors, first.shape[0] if offsets is None else len(offsets) - 1)

        def send(M, N):
            if states[0] is not None and not piece.enters:
                N = _sums(linear_map.apply(M, states, False), N)
            entering = _exchange_states(call, M, N, states, shapes)

            def wait():
                nonlocal Ms, states
                Ms, states = entering()
                return states

            return wait

        with torch.autocast(first.device.type, enabled=False):
            Ms, initial = None, (send, *[None] * (len(states) - 1))
            if not call.accepts_functions(tensors):
                M = first.new_zeros(linear_map.shape(tensors), dtype=wide)
                N = [first.new_zeros(M.shape[0], *shape[1:], dtype=wide) for shape in shapes]
                if piece.leaves:
                    zeros = _with(states, piece.entering, N, shapes)
                    _, *results = operator.run_forward(*tensors, *zeros, offsets, None, *call.settings, True, False)
                    N = [x[piece.leaving] for x in results[: len(states)]]
                if piece.passes:
                    M = linear_map.compute(operator, tensors, call.settings)
                Ms, states = _exchange_states(call, M, N, states, shapes)()
                initial = states
            o, *rest = operator.run_forward(*tensors, *initial, offsets, None, *settings)
        final, saved = rest[: len(states)], rest[len(states) :]
        ctx.call, ctx.shapes, ctx.initial = call, shapes, [x is not None for x in inputs[n:]]
        if call.keep:
            ctx.save_for_backward(*tensors, *states, offsets, *saved, Ms)
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
        operator, piece, linear_map = call.operator, call.piece, call.operator.linear_map
        n, first = len(operator.tensors), saved[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        do = first.new_zeros(operator.shapes(*saved[:n], 1)[0]) if do is None else do
        dfinal = dfinal or (None,) * len(shapes)

        def send(_, dN):
            grads = dfinal
            if not piece.leaves and any(x is not None for x in dfinal):
                grads = _with(dfinal, piece.leaving, dN, shapes)
                dN = _sums(linear_map.apply(Ms[call.rank], grads, True), dN)
            return _exchange_grads(call, Ms, dN, grads, shapes)

        with torch.autocast(first.device.type, enabled=False):
            dstates = send, *[None] * (len(shapes) - 1)
            if not call.accepts_functions(saved[:n]):
                dN = [first.new_zeros(Ms.shape[1], *shape[1:], dtype=wide) for shape in shapes]
                if piece.enters:
                    zeros = _with(dfinal, piece.leaving, dN, shapes)
                    grads = operator.run_backward(*saved, do, *zeros, *call.settings)
                    dN = [x[piece.entering] for x in grads[n:]]
                dstates = _exchange_grads(call, Ms, dN, dfinal, shapes)()
            grads = operator.run_backward(*saved, do, *dstates, *call.settings)
        dstates = [x if has_initial else None for x, has_initial in zip(grads[n:], ctx.initial, strict=True)]
        for x in dstates:
            if x is not None:
                x[piece.entering] = 0
        return None, None, *grads[:n], *dstates


def _sums(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
    """Return x + y for each pair, in the dtype of y."""
    return [(a + b).to(b.dtype) for a, b in zip(x, y, strict=True)]
