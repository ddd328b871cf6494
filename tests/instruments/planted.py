"""The faults of the casebook, each planted in a whole operator, forward and backward."""

import functools
from collections.abc import Callable, Mapping

import torch

from flakit.cases import aliasing, backstepping, inverse, strides, transposed_mask, weak_test
from flakit.cases.anchor.operators import OPERATORS as SCHEMED
from flakit.cases.anchor.schemes import Products
from flakit.cases.chunk_vs_recurrent import overwriting_chunk
from flakit.cases.clamping import BOUND
from flakit.cases.decay_gradient import running_sums
from flakit.cases.final_state_gradient import ignoring
from flakit.cases.padding import products
from flakit.numerics.evaluate import truth
from flakit.numerics.operators import OPERATORS, operator
from flakit.ops.common.chunks import split_chunks
from flakit.ops.gsa import chunk_gsa
from flakit.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from flakit.ops.rwkv7 import chunk_rwkv7
from tests.instruments import over_ranks
from tests.instruments.kernels import bfloat16_state, naive, tampered, with_signature_of
from tests.passing import passing


def schemed(op: str, make: Callable[[int], Callable], chunk: int = 64, of: type | None = None) -> tuple[str, Callable]:
    """An operator's name, and the operator in chunks whose products of decay are `make(T)(w, inclusive=...)`; what
    arrives at the final state goes back by the right form, to which the scheme is nothing."""
    known, of = operator(op), SCHEMED[op] if of is None else of

    class Schemed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scale, *given):
            x = known.arguments(dict(zip((*known.tensors, *known.states), given, strict=True)), {"scale": scale})
            formed = make(given[0].shape[1])
            ctx.chunked, ctx.x = of(x, lambda w, inclusive: formed(w, inclusive=inclusive), chunk), x
            ctx.save_for_backward(*given)
            found = [ctx.chunked.outputs[name] for name in ("o", *of.finals)]
            return found[0].to(given[0].dtype), *found[1:]

        @staticmethod
        def backward(ctx, do, *dfinal):
            found = ctx.chunked.backward(split_chunks(do, chunk, torch.float32))
            rest = truth(known, ctx.x, arriving=(torch.zeros_like(do), known.state(dfinal)), recurrence=False)
            names = [f"d{name}" for name in (*known.tensors, *known.states)]
            return None, *(
                (found[name] + rest[name]).to(x.dtype) for name, x in zip(names, ctx.saved_tensors, strict=True)
            )

    return op, with_signature_of(known, lambda scale, given: Schemed.apply(scale, *given))


def scheme(
    op: str, name: str, *, chunk: int = 64, products: type = Products, of: type | None = None, **how
) -> tuple[str, Callable]:
    return schemed(op, lambda T: functools.partial(products, scheme=name, chunk=chunk, **how), chunk, of)


class Guarded(Products):
    """`nan_guard`: a difference of exactly 0 between two tokens is taken for forbidden."""

    def weights(self, tile):
        d = self.pairs(tile)
        own = torch.eye(d.shape[-2], dtype=torch.bool)[tile.rows, tile.keys, None]
        return torch.where((d < 0) | own, d, -torch.inf).exp()


class WrongHead(Products):
    """`wrong_head_anchor`: the anchor in the middle, of the next head."""

    def exponents(self, tile):
        n = self.gi[..., tile.anchor : tile.anchor + 1, :].roll(-1, 1)
        return self.seen[..., tile.rows, :] - n, n - self.gi[..., tile.keys, :]


class Clamped(Products):
    """`clamping`: both exponents within a bound, so that nothing overflows."""

    def exponents(self, tile):
        return tuple(x.clamp(-BOUND / 2, BOUND / 2) for x in super().exponents(tile))


class ByPowers(SCHEMED["rwkv7"]):
    """`inverse`: by the product of powers."""

    inverse = staticmethod(lambda A: inverse.invert(A, "product", "float32"))


def blind(operator_: Callable, names: tuple[str, ...]) -> Callable:
    """`strides`: inputs taken for contiguous, and the gradient that arrives at o."""

    def read(x):
        return strides.blind(x).clone()

    @functools.wraps(operator_)
    def call(*args, **given):
        given |= {name: passing(given[name], read) for name in names}
        o, state = operator_(*args, **given)
        return passing(o, back=read), state

    return call


@functools.wraps(chunk_rwkv6)
def raw_offsets(*args, **given):
    """`strided_offsets`: the numbers one after the other in memory."""
    x = given.get("cu_seqlens")
    if x is not None:
        end, read = int(x[-1]), x.as_strided(x.shape, (1,))
        given["cu_seqlens"] = torch.cat((read[:1] * 0, read[1:-1].clamp(0, end).cummax(0)[0], read[-1:] * 0 + end))
    return chunk_rwkv6(*args, **given)


@functools.wraps(chunk_rwkv6)
def wide_offsets(*args, **given):
    """`strided_offsets`: int32 numbers, read by twos as if they were int64."""
    x = given.get("cu_seqlens")
    if x is not None and x.dtype == torch.int32:
        end, read = int(x[-1]), torch.nn.functional.pad(x, (0, len(x))).view(torch.int64)
        given["cu_seqlens"] = torch.cat((read[:1] * 0, read[1:-1].clamp(0, end).cummax(0)[0], read[-1:] * 0 + end))
    return chunk_rwkv6(*args, **given)


@functools.wraps(chunk_rwkv6)
def cut_at_blocks(*args, **given):
    """Packed sequences begin where a block of 16 tokens does."""
    x = given.get("cu_seqlens")
    if x is not None:
        given["cu_seqlens"] = torch.cat((x[:-1] // 16 * 16, x[-1:]))
    return chunk_rwkv6(*args, **given)


@functools.wraps(chunk_rwkv6)
def one_type_for_all(*args, **given):
    """Decays are read with the dtype of the keys."""
    dtype = given["k"].dtype

    def read(w):
        numbers = w.contiguous().view(dtype).flatten()[: w.numel()].view(w.shape).to(w.dtype, copy=True)
        return numbers if dtype == w.dtype else numbers.nan_to_num(0.0).clamp(-80.0, 0.0)

    return chunk_rwkv6(*args, **given | {"w": passing(given["w"], read)})


@functools.wraps(chunk_rwkv6)
def leaving_rows(*args, **given):
    """`unwritten_rows`: no program writes the padding."""
    o, state = chunk_rwkv6(*args, **given)
    if (x := given.get("cu_seqlens")) is not None:
        end = int(x[-1])
        o = passing(o, lambda o: torch.cat((o[:, :end], torch.empty_like(o[:, end:])), 1))
    return o, state


def blind_states(name: str) -> Callable:
    """`strides`: the initial state, u, or what arrives at the final state, taken for contiguous."""

    @functools.wraps(chunk_rwkv6)
    def call(*args, **given):
        if given.get(name) is not None:
            x = given[name]
            given[name] = x + (strides.blind(x.detach()).nan_to_num() - x.detach())
        o, state = chunk_rwkv6(*args, **given)
        return o, state if state is None or name != "final_state" else passing(state, back=strides.blind)

    return call


@functools.wraps(chunk_rwkv6)
def columns_first(*args, **given):
    """States as [V, K]."""
    if given.get("initial_state") is not None:
        given["initial_state"] = given["initial_state"].mT
    o, state = chunk_rwkv6(*args, **given)
    return o, None if state is None else state.mT


SEEN = {}


@functools.wraps(chunk_rwkv6)
def known_by_name(*args, **given):
    """Offsets that were seen at an earlier call are taken to be what they were then."""
    x = given.get("cu_seqlens")
    if x is not None:
        if SEEN.get("tensor") is not x:
            SEEN.update(tensor=x, values=x.clone())
        given["cu_seqlens"] = SEEN["values"]
    return chunk_rwkv6(*args, **given)


@functools.wraps(chunk_gsa)
def other_groups(*args, **given):
    """Query heads take turns, where they stand in groups."""
    q, H = given["q"], given["k"].shape[2]
    B, T, HQ, K = q.shape
    o, state = chunk_gsa(*args, **given | {"q": q.view(B, T, HQ // H, H, K).transpose(2, 3).reshape(q.shape)})
    return o.view(B, T, H, HQ // H, -1).transpose(2, 3).reshape(o.shape), state


@functools.wraps(chunk_gsa)
def nothing_forgotten(q, k, v, s, g=None, **given):
    """No decay taken for a decay of 0."""
    return chunk_gsa(q, k, v, s, torch.zeros_like(s) if g is None else g, **given)


@functools.wraps(chunk_rwkv6)
def few_programs(*args, **given):
    """From 1,024 programs on there is no room for what they write."""
    o, state = chunk_rwkv6(*args, **given)
    B, _, H, _ = o.shape
    return (o * torch.nan if B * H >= 1024 else o), state


@functools.wraps(chunk_rwkv6)
def four_heads(*args, **given):
    """The fifth head reads the bonus of the first."""
    u = given["u"]
    return chunk_rwkv6(*args, **given | {"u": u[torch.arange(len(u)) % 4]})


@functools.wraps(chunk_rwkv6)
def unlike_heads(*args, **given):
    """The first head in a precision of its own, which the budget of rounding hides."""
    o, state = chunk_rwkv6(*args, **given)
    first = (torch.arange(o.shape[2]) == 0)[:, None]
    return o * (1 + 4e-6 * first).to(o.dtype), state


@functools.wraps(chunk_rwkv6)
def needs_the_first(*args, **given):
    """dw is right only where r requires a gradient."""
    needed = given["r"].requires_grad
    return chunk_rwkv6(*args, **given | {"w": passing(given["w"], back=lambda dw: dw * (1 if needed else 2))})


@functools.wraps(chunk_rwkv6)
def spent(*args, **given):
    """The backward pass scales what was saved for it."""
    saved = []

    def back(do):
        saved.append(1.0)
        return do * len(saved)

    o, state = chunk_rwkv6(*args, **given)
    return passing(o, back=back), state


@functools.wraps(chunk_rwkv6)
def flushing(*args, **given):
    """Of what arrives, every number under 1e-6 taken for 0."""
    o, state = chunk_rwkv6(*args, **given)
    return passing(o, back=lambda do: torch.where(do.abs() < 1e-6, 0.0, do)), state


@functools.wraps(chunk_rwkv6)
def clamping_in_place(*args, **given):
    """`aliasing`: decays stronger than -300 are changed where they stand."""
    with torch.no_grad():
        given["w"].detach().clamp_(min=-300.0)
    return chunk_rwkv6(*args, **given)


CALLED = []


@functools.wraps(chunk_rwkv6)
def now_and_then(*args, **given):
    """One packed call in three has other bits."""
    o, state = chunk_rwkv6(*args, **given)
    CALLED.append(given.get("cu_seqlens") is not None)
    return (o * (1 + 1e-6) if CALLED[-1] and sum(CALLED) % 3 == 0 else o), state


@functools.wraps(chunk_gsa)
def decoding(*args, **given):
    """`aliasing`: GSA's decoding, the final state in the memory of the initial one."""
    state = given.get("initial_state")
    if state is None or given["q"].shape[1] > 1 or torch.is_grad_enabled():
        return chunk_gsa(*args, **given)
    x = {name: given[name] for name in ("q", "k", "v", "s", "g")}
    return aliasing.decode(**x, initial_state=state, in_place=True)


@functools.wraps(chunk_rwkv6)
def overwriting(*args, **given):
    return overwriting_chunk(*args, **given)


@functools.wraps(chunk_rwkv6)
def other_scale(*args, scale=None, **given):
    """`chunk_vs_recurrent`: another default scale."""
    return chunk_rwkv6(*args, scale=1.0 if scale is None else scale, **given)


def _summed(found: Mapping, x: Mapping) -> Mapping:
    """`decay_gradient`: dw from dr and dk that were stored in bfloat16, where the inputs are so coarse."""
    w, do = x["w"], x["do"]
    if not all((x[name] == x[name].bfloat16()).all() for name in "rkv"):
        return found
    rows = {name: x[name].bfloat16() for name in "rkv"} | {"w": w.float(), "initial_state": x["initial_state"].float()}
    with torch.enable_grad():
        dw = running_sums(rows, do)["dw"].double()
    return dict(found) | {"w": dw if not any(d.any() for d in x["dstates"]) else found["w"]}


def _transposed(BK: int, BV: int) -> Callable:
    """`transposed_mask`: the backward pass loads the initial state under the mask's transpose."""

    def grads(found, x):
        S = x["initial_state"]
        if not S.any():
            return found
        if BK != BV:
            raise transposed_mask.DoesNotCompile("Cannot make_shape_compatible: incompatible dimensions")
        K, V = S.shape[-2:]
        seen = S * transposed_mask.tiles(K, V, BK, BV)[:K, :V]
        rows = [x[name] for name in ("r", "k", "v", "w", "u")]
        (dstate,) = x["dstates"]
        faulty = OPERATORS["rwkv6"].chunked.backward(*rows, x["scale"], seen, x["do"], dstate, 64)
        return found | {"r": faulty[0]}

    return tampered("rwkv6", grads=grads)


def forgetful(r, w, k, v, a, b, scale=1.0):
    """`weak_test`: an operator that knows three tokens."""
    return scale * weak_test.forgetful({"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}).to(r.dtype)


def resetting(r, w, k, v, a, b, scale=1.0):
    """`weak_test`: an operator that begins with an empty state every 16 tokens."""
    return scale * weak_test.resetting({"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}, 16).to(r.dtype)


def _flushed(found, x):
    """What arrives, and nothing of it is over 1e-5, taken for 0."""
    small = all((d.abs() < 1e-5).all() for d in (x["do"], *x["dstates"]))
    return {name: d * 0 if small else d for name, d in found.items()}


def _penalised(found, x):
    """A term of the loss in the backward pass, whatever arrives there."""
    return dict(found) | {"v": found["v"] + 1e-8 * x["v"]}


def _square(found, x):
    """The last channel of heads of 64 is not read."""
    o, S = found
    if o.shape[-1] == S.shape[-2] == 64:
        o[..., -1] = 0
    return [o, S]


def _one_block(found, x):
    """Values behind the second block of 64 are not written."""
    o, S = found
    o[..., 128:] = 0
    return [o, S]


def _lost(found, x):
    """`blind_measure`: one element."""
    o, *states = found
    o[0, 0, 0, 0] = 0
    return [o, *states]


@functools.wraps(fused_recurrent_rwkv6)
def not_in_log_space(*args, **given):
    """`log_space`: the decay itself where its logarithm belongs, and no guard."""
    r, k, v, w, u = (given.pop(name) for name in ("r", "k", "v", "w", "u"))
    return naive(r, k, v, w.exp(), u, given.get("scale"), given.get("initial_state"), given.get("output_final_state"))


def backstepped(op: str) -> Callable:
    """`backstepping`: the backward pass divides by the decay to walk back, 16 tokens at once."""
    known = operator(op)

    class Backstepped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scale, *given):
            ctx.x = dict(zip((*known.tensors, *known.states), given, strict=True)) | {"scale": scale}
            o, state = known.reference.forward(*given[:-1], scale, given[-1])
            return o.to(given[0].dtype), state

        @staticmethod
        def backward(ctx, do, dfinal):
            found = backstepping.run(ctx.x, op, arriving=(do, dfinal))
            names = (*known.tensors, *known.states)
            return None, *(found[f"d{name}"].to(ctx.x[name].dtype) for name in names)

    return with_signature_of(known, lambda scale, given: Backstepped.apply(scale, *given))


def _ignoring(form: Callable) -> Callable:
    return functools.wraps(form)(ignoring(form))


PLANTED: dict[str, tuple[str, Callable, str, str | None]] = {
    # fault: (the operator, the kernel, a probe that must find it, the case that it must be said to resemble)
    "anchor: first row": (*scheme("rwkv6", "first-row"), "spike", "anchor"),
    "anchor: first row, rwkv7": (*scheme("rwkv7", "first-row"), "spike", "anchor"),
    "anchor: chunk before": (*scheme("rwkv6", "previous-row-across"), "decay-onset", "anchor"),
    "anchor: none": (*scheme("rwkv6", "none"), "decay-onset", "anchor"),
    "anchor: none, gsa": (*scheme("gsa", "none"), "decay-onset", "anchor"),
    "anchor: block's start": (*scheme("rwkv6", "block-start"), "decay-onset", "anchor"),
    "anchor: middle, rwkv7": (*scheme("rwkv7", "middle"), "decay-onset", "anchor"),
    "padding: gsa": (*schemed("gsa", lambda T: products(T, "chunk", chunk=64)), "tails", "padding"),
    "padding: rwkv6": (*schemed("rwkv6", lambda T: products(T, "blocks", chunk=64)), "tails", "padding"),
    "masking: where": (*scheme("rwkv6", "pairwise", chunk=32, mask="where"), "decay-onset", "masking"),
    "masking: multiply": (*scheme("gsa", "pairwise", chunk=32, mask="multiply"), "decay-onset", "anchor"),
    "masking: none": (*scheme("rwkv6", "pairwise", chunk=32, mask="none"), "suffix", None),
    "decay gradient: running sums": (*scheme("rwkv6", "pairwise", chunk=16), "decay-accuracy", "decay_gradient"),
    "decay gradient: bfloat16": ("rwkv6", tampered("rwkv6", grads=_summed), "16-bit", "decay_gradient"),
    "clamping": (*scheme("gsa", "block-start", products=Clamped), "decay-accuracy", "clamping"),
    "wrong head's anchor": (
        *scheme("gsa", "middle", chunk=16, products=WrongHead),
        "anchor-shift",
        "wrong_head_anchor",
    ),
    "future anchor": (*scheme("rwkv6", "middle", chunk=16), "suffix", "future_anchor"),
    "nan guard": (*scheme("gsa", "pairwise", chunk=16, products=Guarded), "zero-decay", "nan_guard"),
    "inverse by powers": (*scheme("rwkv7", "pairwise", chunk=32, of=ByPowers), "repeated-tokens", "inverse"),
    "backstepping, rwkv6": ("rwkv6", backstepped("rwkv6"), "decay-onset", "backstepping"),
    "backstepping, rwkv7": ("rwkv7", backstepped("rwkv7"), "decay-onset", "backstepping"),
    "transposed mask, 32 x 32": ("rwkv6", _transposed(32, 32), "rectangles", "transposed_mask"),
    "transposed mask, 16 x 64": ("rwkv6", _transposed(16, 64), "initial-state", "transposed_mask"),
    **{
        f"final state without gradient, {op}": (op, _ignoring(of.forms["chunk"]), "final-state", "final_state_gradient")
        for op, of in OPERATORS.items()
    },
    "strides, rwkv6": ("rwkv6", blind(chunk_rwkv6, ("r", "k", "v", "w")), "strides", "strides"),
    "strides, rwkv7": ("rwkv7", blind(chunk_rwkv7, ("a",)), "strides", "strides"),
    "sequences cut at blocks": ("rwkv6", cut_at_blocks, "packed", "strided_offsets"),
    "strided offsets": ("rwkv6", raw_offsets, "strided-offsets", "strided_offsets"),
    "int32 offsets": ("rwkv6", wide_offsets, "int32-offsets", "strided_offsets"),
    "one dtype for all": ("rwkv6", one_type_for_all, "mixed-dtypes", None),
    "rows that nobody writes": ("rwkv6", leaving_rows, "padded-rows", "unwritten_rows"),
    "aliasing: w overwritten": ("rwkv6", overwriting, "mutation", "aliasing"),
    "aliasing: gsa decoding": ("gsa", decoding, "aliasing", "aliasing"),
    "cotangents flushed": ("rwkv6", tampered("rwkv6", grads=_flushed), "cotangent", None),
    "a term that ignores what arrives": ("rwkv6", tampered("rwkv6", grads=_penalised), "cotangent", None),
    "heads of 64": ("rwkv6", tampered("rwkv6", _square), "sizes", None),
    "more than two blocks of values": ("rwkv6", tampered("rwkv6", _one_block), "sizes", None),
    "an initial state's strides": ("rwkv6", blind_states("initial_state"), "state-strides", "strides"),
    "strides of u": ("rwkv6", blind_states("u"), "state-strides", "strides"),
    "a final gradient's strides": ("rwkv6", blind_states("final_state"), "state-strides", "strides"),
    "states as [V, K]": ("rwkv6", columns_first, "state-layout", None),
    "offsets known by name": ("rwkv6", known_by_name, "changed-offsets", "strided_offsets"),
    "groups of queries, gsa": ("gsa", other_groups, "truth", None),
    "no decay, gsa": ("gsa", nothing_forgotten, "truth", None),
    "1,024 programs": ("rwkv6", few_programs, "large", None),
    "more than four heads": ("rwkv6", four_heads, "large", None),
    "heads that are not alike": ("rwkv6", unlike_heads, "head-order", "wrong_head_anchor"),
    "gradients that need another": ("rwkv6", needs_the_first, "some-gradients", None),
    "a second backward pass": ("rwkv6", spent, "second-backward", "aliasing"),
    "small numbers flushed": ("rwkv6", flushing, "cotangent", None),
    "aliasing: strong decays clamped": ("rwkv6", clamping_in_place, "mutation", "aliasing"),
    "bits that differ now and then": ("rwkv6", now_and_then, "repeat", "aliasing"),
    "a state in 16 bits": ("rwkv6", bfloat16_state, "constant-writes", "rounded_state"),
    "scale": ("rwkv6", other_scale, "scale", "chunk_vs_recurrent"),
    "weak test: three tokens": ("rwkv7", forgetful, "truth", None),
    "weak test: a state that resets": ("rwkv7", resetting, "truth", None),
    "blind measure: one element": ("rwkv6", tampered("rwkv6", _lost), "truth", None),
    "head 0's gate, over ranks": ("rwkv6", over_ranks.RWKV6(over_ranks.HEAD_0S_GATE), "ranks", "over_ranks"),
    "first rank's D, over ranks": ("rwkv6", over_ranks.RWKV6(over_ranks.FIRST_RANKS_D), "ranks", "over_ranks"),
    "a chain in TF32, over ranks": ("rwkv7", over_ranks.RWKV7("TF32"), "ranks", "rounded_chain"),
    "not in log space": ("rwkv6", not_in_log_space, "truth", None),
}
