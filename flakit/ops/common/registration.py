"""How an operator is made known to PyTorch: two custom operators (forward, backward), their fakes, and autograd.

The three operators differ in their tensors, in the parts of their state and in what their kernels keep for the
backward; everything else about registering one stands here. An operator's `api.py` checks what a user gives, makes a
`Registered` once and calls it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from . import plain, ranks
from . import validation as check
from .dispatch import fits_fused, kernels


class Registered:
    """An operator as PyTorch knows it: `torch.ops.flakit.<name>` and `torch.ops.flakit.<name>_backward`.

    package: the operator's own, with `chunk_triton`, `recurrent_triton`, `chunk_torch` and `reference`.
    sequences: arguments with a time axis, [B, T, ...]; weights: the others with a gradient. In their order, sequences
    first, implementations take them. decay: which of them is the log decay.
    states: the parts of the state; one is a tensor wherever states go in or out, several are a tuple.
    kept: how many tensors the kernels' forward keeps for their backward.
    fused: whether the package has `fused_chunk_triton` for the heads that `fits_fused`.
    shapes: from the sequences, weights and the number of packed sequences N to (o's shape, the state parts' shapes).
    passing: what of a state is left after some tokens, for sequences over several processes.

    Of the Triton modules, which are given contiguous tensors only:
        forward(*tensors, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep)
            -> o, the final state or None, the tensors kept or None; behind them the `Packing`, if there are cu_seqlens
        backward(*tensors, scale, initial_state, cu_seqlens, chunk_size, kept, do, dfinal_state)
            -> gradients of the tensors, of the initial state; the `Packing` may stand for cu_seqlens
        kept_shapes(*tensors, cu_seqlens, chunk_size)  -> a shape for each tensor kept
    """

    def __init__(
        self,
        name: str,
        package: str,
        *,
        sequences: Sequence[str],
        weights: Sequence[str] = (),
        decay: str,
        states: Sequence[str] = ("initial_state",),
        kept: int = 1,
        fused: bool = False,
        shapes: Callable,
        passing: ranks.Passing,
    ):
        self.name, self.package, self.shapes, self.passing = name, package, shapes, passing
        self.sequences, self.tensors, self.states, self.kept = len(sequences), (*sequences, *weights), states, kept
        self.decay, self.fused = (decay, self.tensors.index(decay)), fused

        given = [f"Tensor {x}" for x in self.tensors] + [f"Tensor? {x}" for x in (*states, "cu_seqlens")]
        settings = ["float scale", "str form", "str backend", "int chunk_size"]
        arriving = [f"Tensor kept_{i}" for i in range(kept)] + ["Tensor do"] + [f"Tensor? d{x}" for x in states]
        self.forward = self._operator(
            name,
            self.run_forward,
            [*given, "Tensor? cu_seqlens_cpu", *settings, "bool output_final_state", "bool keep"],
            1 + len(states) + kept,
        )
        self.backward = self._operator(
            f"{name}_backward", self.run_backward, [*given, *arriving, *settings], len(self.tensors) + len(states)
        )
        self.forward.register_fake(self._fake_forward)
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)
        self.backward.register_autograd(self._refuse_double_backward)
        self.transformed = _function(name, self.forward, self._save, self._differentiate_transformed)
        self.transformed_backward = _function(name, self.backward, _save_nothing, self._refuse_double_backward)
        # Without `setup_context`, for which PyTorch looks up a signature at each call.
        members = dict(forward=staticmethod(self._run_directly), backward=staticmethod(self._differentiate_directly))
        self.direct = type(f"Function_{name}", (torch.autograd.Function,), members)

    @staticmethod
    def _operator(name, run, arguments, results):
        schema = f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"
        found = torch.library.custom_op(f"flakit::{name}", run, mutates_args=(), schema=schema)
        found.register_vmap(_one_by_one(found))
        return found

    def __call__(
        self, tensors, states, cu_seqlens, cu_seqlens_cpu, scale, form, backend, chunk_size, output_final_state, over
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """o, and the parts of the final state, None unless asked for.

        over: None, or the ranks that hold these sequences together.
        """
        if over is not None:
            settings = scale, form, backend, chunk_size, output_final_state
            return ranks.run(self, over, tensors, states, cu_seqlens, cu_seqlens_cpu, *settings)
        given = [x for x in (*tensors, *states) if x is not None]
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        offsets, settings = (cu_seqlens, cu_seqlens_cpu), (scale, form, backend, chunk_size, output_final_state, keep)
        alone = unseen(given)
        if alone and not keep:
            o, final, _ = self._compute(tensors, self.whole(states), *offsets, *settings)
        else:
            run = self.direct.apply if alone else self.forward
            if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
                run = self.transformed.apply
            o, *final = run(*tensors, *states, *offsets, *settings)
        return o, tuple(final[: len(self.states)]) if output_final_state else (None,) * len(self.states)

    def _apart(self, given):
        """Of an operator's leading arguments: the tensors, the state (a tensor, a tuple or None), cu_seqlens."""
        n, m = len(self.tensors), len(self.states)
        return given[:n], self.whole(given[n : n + m]), given[n + m], given[n + m + 1 :]

    def whole(self, parts):
        """A state of its parts; None if they are None, and a function that gives them if that is the first."""
        alone = parts[0] is None or callable(parts[0]) or len(self.states) == 1
        return parts[0] if alone else tuple(parts)

    def _parts(self, state):
        """The parts of a state, none of one that is not known yet."""
        if callable(state):
            return ()
        return (state,) if len(self.states) == 1 else tuple(state)

    def run_forward(self, *given):
        """o, the final state's parts (empty unless asked for), what the kernels keep (empty unless kept)."""
        tensors, state, cu_seqlens, rest = self._apart(given)
        o, final, kept = self._compute(tensors, state, cu_seqlens, *rest)
        final = final or [o.new_empty(0) for _ in self.states]
        kept = kept or [o.new_empty(0) for _ in range(self.kept)]
        wide = torch.promote_types(o.dtype, torch.float32)
        return o, *final, *(check.in_dtype(x, wide).contiguous() for x in kept[: self.kept])

    def _compute(
        self,
        tensors,
        state,
        cu_seqlens,
        cu_seqlens_cpu,
        scale,
        form,
        backend,
        chunk_size,
        output_final_state,
        keep,
    ):
        """o; the final state's parts, None unless asked for; what the kernels keep, None unless kept, and behind it the
        `Packing` of packed sequences."""
        first, T = tensors[0], tensors[0].shape[1]
        if cu_seqlens is not None:
            check.check_offsets(cu_seqlens, cu_seqlens_cpu, T, reads_values=backend != "triton")
        self.check_values(tensors, () if state is None else self._parts(state), cu_seqlens)
        kept = None
        if backend == "triton":
            tensors, state, cu_seqlens = _contiguous(tensors), _contiguous(state), _contiguous(cu_seqlens)
            o, final, kept = self._kernels(form, tensors).forward(
                *tensors, scale, state, output_final_state, cu_seqlens, chunk_size, keep
            )
        else:
            rows, rest = tensors[: self.sequences], (*tensors[self.sequences :], scale, state)
            o, final = plain.forward(self.package, form, backend, chunk_size, rows, rest, cu_seqlens)
        o = _own(o, first.dtype)
        if not output_final_state:
            return o, None, kept if keep else None
        wide = torch.promote_types(first.dtype, torch.float32)
        final = [_own(x, wide) for x in self._parts(final)]
        return o, final, kept if keep else None

    def _kernels(self, form: str, tensors):
        """The Triton code for these tensors."""
        if self.fused and form == "chunk" and fits_fused(tensors[0], tensors[self.tensors.index("v")]):
            form = "fused_chunk"
        return kernels(self.package, form)

    def meets(self, form: str, backend: str, tensors) -> bool:
        """Whether a state, or a gradient of one, may come as a function (`ahead_triton.Kernels.meets`)."""
        return backend == "triton" and self._kernels(form, tensors).meets(*tensors)

    def check_values(self, tensors, states, cu_seqlens):
        """The decays and, under `checked()`, that all is finite; states: the parts of the initial one."""
        name, at = self.decay
        check.check_decay(name, tensors[at], cu_seqlens)
        if not check.is_checked():
            return
        for n, (name, x) in enumerate(zip(self.tensors, tensors, strict=True)):
            if name != self.decay[0]:
                check.check_finite(name, check.without_padding(x, cu_seqlens) if n < self.sequences else x)
        for i, x in enumerate(states):
            if x is not None:
                check.check_finite("initial_state" if len(states) == 1 else f"initial_state[{i}]", x)

    def run_backward(self, *given):
        """The gradients of the tensors and of the state's parts (empty without a state), each in its input's dtype."""
        found = self._gradients(*given)
        missing = len(self.tensors) + len(self.states) - len(found)
        wide = torch.promote_types(found[0].dtype, torch.float32)
        return (*found, *(found[0].new_empty(0, dtype=wide) for _ in range(missing)))

    def _gradients(self, *given):
        """As of `run_backward`, and none of the state's parts without a state."""
        tensors, state, cu_seqlens, rest = self._apart(given)
        kept, do, rest = rest[: self.kept], rest[self.kept], rest[self.kept + 1 :]
        dfinal, (scale, form, backend, chunk_size) = self.whole(rest[: len(self.states)]), rest[len(self.states) :]
        if backend == "triton":
            tensors, state, cu_seqlens = _contiguous(tensors), _contiguous(state), _contiguous(cu_seqlens)
            *grads, dstate = self._kernels(form, tensors).backward(
                *tensors, scale, state, cu_seqlens, chunk_size, kept, do.contiguous(), _contiguous(dfinal)
            )
        else:
            rows, rest = tensors[: self.sequences], (*tensors[self.sequences :], scale, state)
            *grads, dstate = plain.backward(self.package, form, backend, chunk_size, rows, rest, cu_seqlens, do, dfinal)
        found = [_own(dx, x.dtype) for dx, x in zip(grads, tensors, strict=True)]
        if state is not None:
            wide = torch.promote_types(do.dtype, torch.float32)
            found += [_own(dx, wide) for dx in self._parts(dstate)]
        return found

    def _shapes(self, tensors, cu_seqlens):
        return self.shapes(*tensors, tensors[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    def _fake_forward(self, *given):
        tensors, _, cu_seqlens, rest = self._apart(given)
        _, _, form, backend, chunk_size, output_final_state, keep = rest
        first, (o, states) = tensors[0], self._shapes(tensors, cu_seqlens)
        kept = ((0,),) * self.kept
        if backend == "triton" and keep:
            kept = self._kernels(form, tensors).kept_shapes(*tensors, cu_seqlens, chunk_size)
        states = states if output_final_state else ((0,),) * len(self.states)
        wide = torch.promote_types(first.dtype, torch.float32)
        return first.new_empty(o), *(first.new_empty(shape, dtype=wide) for shape in (*states, *kept))

    def _fake_backward(self, *given):
        tensors, state, cu_seqlens, _ = self._apart(given)
        _, states = self._shapes(tensors, cu_seqlens)
        states = ((0,),) * len(self.states) if state is None else states
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
        return *grads, *(tensors[0].new_empty(shape, dtype=wide) for shape in states)

    def _save(self, ctx, inputs, output):
        n = len(self.tensors) + len(self.states) + 1
        ctx.save_for_backward(*inputs[:n], *output[1 + len(self.states) :])
        ctx.set_materialize_grads(False)  # half a gigabyte of zeros for checkpoints that nobody differentiates
        *ctx.settings, ctx.asked_for_state, _ = inputs[n + 1 :]

    def _run_directly(self, ctx, *given):
        """o and the final state's parts, if asked for; keeps for the backward what `_save` does."""
        tensors, state, cu_seqlens, rest = self._apart(given)
        o, final, kept = self._compute(tensors, state, cu_seqlens, *rest)
        kept, ctx.packing = (kept[: self.kept], kept[self.kept :]) if kept else ((None,) * self.kept, ())
        ctx.save_for_backward(*tensors, *given[len(tensors) : -len(rest)], *kept)
        ctx.set_materialize_grads(False)
        _, *ctx.settings, ctx.asked_for_state, _ = rest
        return (o, *final) if final else (o,)

    def _differentiate(self, ctx, do, *rest, run=None, packing=()):
        saved = ctx.saved_tensors  # activation checkpointing allows one look
        tensors, state, cu_seqlens, kept = self._apart(saved)
        if do is None:
            do = tensors[0].new_zeros(self._shapes(tensors, cu_seqlens)[0])
        dfinal = rest[: len(self.states)] if ctx.asked_for_state else [None]
        if all(x is None for x in dfinal):
            dfinal = [None] * len(self.states)
        else:
            wide, states = torch.promote_types(do.dtype, torch.float32), self._shapes(tensors, cu_seqlens)[1]
            pairs = zip(dfinal, states, strict=True)
            dfinal = [do.new_zeros(shape, dtype=wide) if x is None else x for x, shape in pairs]
        n = len(self.tensors)
        if packing:  # where the forward found the pieces, they are
            saved = *saved[: n + len(self.states)], *packing, *kept
        grads = (run or self.backward)(*saved, do, *dfinal, *ctx.settings)
        dstates = [None] * len(self.states) if state is None else grads[n:]
        return *grads[:n], *dstates, *[None] * 8

    def _differentiate_transformed(self, ctx, *arriving):
        return self._differentiate(ctx, *arriving, run=self.transformed_backward.apply)

    def _differentiate_directly(self, ctx, *arriving):
        # As the operator where that is followed, and where a graph of the gradients is asked for: it refuses that.
        followed = torch.is_grad_enabled() or not unseen([x for x in arriving if x is not None])
        if followed:
            return self._differentiate(ctx, *arriving)
        return self._differentiate(ctx, *arriving, run=self._gradients, packing=ctx.packing)

    def _refuse_double_backward(self, ctx, *_):
        raise RuntimeError(
            f"flakit::{self.name}: double backward is not supported; its gradient is not differentiable again"
        )


def unseen(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing follows what PyTorch calls: no compiler or tracer, no transform, no mode, no tensor of another
    kind. Then an operator need not be one: to be one takes longer than a token of a decode, and with gradients, the
    first time, some seconds of imports."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor  # of autograd.grad(..., is_grads_batched=True)
    for x in tensors:  # a loop, as in `check.check_tensor`
        if type(x) not in (Tensor, Parameter) or not (x.is_cuda or x.is_cpu) or batched(x):
            return False
    return True


def _contiguous(x):
    """A tensor, or each of several; what is neither stays as it is."""
    if isinstance(x, (tuple, list)):
        return tuple([y.contiguous() if isinstance(y, Tensor) else y for y in x])
    return x.contiguous() if isinstance(x, Tensor) else x


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, contiguous, and no view: who gets it may change it in place, which autograd refuses of views."""
    if x.dtype == dtype and x.is_contiguous() and not x._is_view():
        return x
    x = check.in_dtype(x, dtype).contiguous()
    return x.clone() if x._is_view() else x


def _save_nothing(ctx, inputs, output):
    pass


def _function(name, run, save, differentiate):
    """What runs an operator as an autograd.Function, which torch.func can transform: those of custom operators refuse
    it."""
    members = dict(
        generate_vmap_rule=True,
        forward=staticmethod(lambda *given: run(*given)),
        setup_context=staticmethod(save),
        backward=staticmethod(differentiate),
    )
    return type(f"Function_{name}", (torch.autograd.Function,), members)


def _one_by_one(operator):
    """torch.func.vmap of an operator: one call for each element of the mapped axis."""

    def rule(info, in_dims, *given):
        runs = []
        for i in range(info.batch_size):
            given_i = (x if d is None else x.select(d, i) for x, d in zip(given, in_dims, strict=True))
            runs.append(operator(*given_i))
        found = tuple(torch.stack(x) for x in zip(*runs, strict=True))
        return found, (0,) * len(found)

    return rule
