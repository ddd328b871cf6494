"""Registers an operator with PyTorch: two custom operators (forward, backward), their fake kernels, and autograd.

An operator's `api.py` checks the arguments of users, creates one `Registered`, with the few things in which operators
differ, and calls it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from . import plain, ranks
from . import validation as check
from .dispatch import fits_fused, kernels


class Registered:
    """An operator registered as `torch.ops.flakit.<name>` and `torch.ops.flakit.<name>_backward`.

    package: the operator's package, with `chunk_triton`, `recurrent_triton`, `chunk_torch` and `reference`.
    sequences: arguments with a time axis, [B, T, ...]; weights: the others with a gradient. Implementations take them
    in this order, sequences first. decay: the name of the one that is the natural-log decay, <= 0.
    states: the parts of the state; a single part is passed as a tensor, several as a tuple.
    saved: the number of tensors that the kernels' forward saves for their backward.
    fused: whether the package has `fused_chunk_triton` for the heads that `fits_fused` accepts.
    shapes: function of the sequences, weights and the number of sequences N that returns (o's shape, the state parts').
    linear_map: how `ranks` computes and applies M, where a slice of a sequence takes the state S to M S + N.

    Functions of the Triton modules, which receive contiguous tensors only (keep: save for a backward; do, dfinal_state:
    gradients of o and of the final state, which may be None):
        forward(*tensors, scale, initial_state, output_final_state, cu_seqlens, chunk_size, keep)
            -> o, the final state or None, the saved tensors or None, followed by the `Packing` of packed sequences
        backward(*tensors, scale, initial_state, cu_seqlens, chunk_size, saved, do, dfinal_state)
            -> gradients of the tensors, of the initial state; the `Packing` may replace cu_seqlens
        saved_shapes(*tensors, cu_seqlens, chunk_size)  -> a shape for each saved tensor
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
        saved: int = 1,
        fused: bool = False,
        shapes: Callable,
        linear_map: ranks.LinearMap,
    ):
        self.name, self.package, self.shapes, self.linear_map = name, package, shapes, linear_map
        self.sequences, self.tensors, self.states, self.n_saved = len(sequences), (*sequences, *weights), states, saved
        self.decay, self.fused = (decay, self.tensors.index(decay)), fused

        inputs = [f"Tensor {x}" for x in self.tensors] + [f"Tensor? {x}" for x in (*states, "cu_seqlens")]
        settings = ["float scale", "str form", "str backend", "int chunk_size"]
        arriving = [f"Tensor saved_{i}" for i in range(saved)] + ["Tensor do"] + [f"Tensor? d{x}" for x in states]
        self.forward = self._operator(
            name,
            self.run_forward,
            [*inputs, "Tensor? cu_seqlens_cpu", *settings, "bool output_final_state", "bool keep"],
            1 + len(states) + saved,
        )
        self.backward = self._operator(
            f"{name}_backward", self.run_backward, [*inputs, *arriving, *settings], len(self.tensors) + len(states)
        )
        self.forward.register_fake(self._fake_forward)
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)
        self.backward.register_autograd(self._refuse_double_backward)
        self.transformed = _function(name, self.forward, self._save, self._differentiate_transformed)
        self.transformed_backward = _function(name, self.backward, _save_nothing, self._refuse_double_backward)
        # No `setup_context`: PyTorch would look up its signature at each call.
        members = dict(forward=staticmethod(self._run_directly), backward=staticmethod(self._differentiate_directly))
        self.direct = type(f"Function_{name}", (torch.autograd.Function,), members)

    @staticmethod
    def _operator(name, run, arguments, results):
        schema = f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"
        operator = torch.library.custom_op(f"flakit::{name}", run, mutates_args=(), schema=schema)
        operator.register_vmap(_one_by_one(operator))
        return operator

    def __call__(
        self, tensors, states, cu_seqlens, cu_seqlens_cpu, scale, form, backend, chunk_size, output_final_state, over
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Run the operator; return o and the parts of the final state, None unless requested. tensors: sequences, then
        weights. states: parts of the initial state, or None for each. form: "chunk" or "recurrent". chunk_size: 0 for
        the backend's choice. over: the process group and slice of a call over several ranks (`ranks`), or None."""
        if over is not None:
            settings = scale, form, backend, chunk_size, output_final_state
            return ranks.run(self, over, tensors, states, cu_seqlens, cu_seqlens_cpu, *settings)
        inputs = [x for x in (*tensors, *states) if x is not None]
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        offsets, settings = (cu_seqlens, cu_seqlens_cpu), (scale, form, backend, chunk_size, output_final_state, keep)
        eager = plain_eager(inputs)
        if eager and not keep:
            o, final, _ = self._compute(tensors, self.whole(states), *offsets, *settings)
        else:
            run = self.direct.apply if eager else self.forward
            if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
                run = self.transformed.apply
            o, *final = run(*tensors, *states, *offsets, *settings)
        return o, tuple(final[: len(self.states)]) if output_final_state else (None,) * len(self.states)

    def _split(self, args):
        """Split an operator's arguments into tensors, the state (a tensor, a tuple or None), cu_seqlens, the rest."""
        n, m = len(self.tensors), len(self.states)
        return args[:n], self.whole(args[n : n + m]), args[n + m], args[n + m + 1 :]

    def whole(self, parts):
        """Return the state with these parts, a tuple or the only part; parts[0] if that is None or a function."""
        single = parts[0] is None or callable(parts[0]) or len(self.states) == 1
        return parts[0] if single else tuple(parts)

    def _parts(self, state):
        """Return the parts of a state as a tuple, empty for a function."""
        if callable(state):
            return ()
        return (state,) if len(self.states) == 1 else tuple(state)

    def run_forward(self, *args):
        """Return the forward operator's results: o, the final state's parts, saved tensors; [0] where not requested."""
        tensors, state, cu_seqlens, rest = self._split(args)
        o, final, saved = self._compute(tensors, state, cu_seqlens, *rest, returned=True)
        final = final or [o.new_empty(0) for _ in self.states]
        saved = saved or [o.new_empty(0) for _ in range(self.n_saved)]
        wide = torch.promote_types(o.dtype, torch.float32)
        return o, *final, *(check.in_dtype(x, wide).contiguous() for x in saved[: self.n_saved])

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
        returned=False,
    ):
        """Check offsets and values, run the backend. Return o, the final state's parts (None unless requested)
        and the list of saved tensors (None unless `keep`), on Triton followed by a `Packing` if cu_seqlens is given.
        returned: whether the saved tensors are an operator's results (`Packing.returned`)."""
        first = tensors[0]
        if cu_seqlens is not None:
            check.check_offsets(cu_seqlens, cu_seqlens_cpu, first.shape[1], reads_values=backend != "triton")
        if check.looks_at_values(first):
            self.check_values(tensors, () if state is None else self._parts(state), cu_seqlens)
        saved = None
        if backend == "triton":
            tensors, state, cu_seqlens = [x.contiguous() for x in tensors], _contiguous(state), _contiguous(cu_seqlens)
            run = self._kernels(form, tensors)
            if returned and cu_seqlens is not None:
                cu_seqlens = run.packing(tensors, cu_seqlens)
            o, final, saved = run.forward(*tensors, scale, state, output_final_state, cu_seqlens, chunk_size, keep)
        else:
            rows, rest = tensors[: self.sequences], (*tensors[self.sequences :], scale, state)
            o, final = plain.run("forward", self.package, form, backend, chunk_size, rows, rest, cu_seqlens)
        o = _own(o, first.dtype)
        if not output_final_state:
            return o, None, saved if keep else None
        wide = torch.promote_types(first.dtype, torch.float32)
        final = [_own(x, wide) for x in self._parts(final)]
        return o, final, saved if keep else None

    def _kernels(self, form: str, tensors):
        """Return the `ahead_triton.Kernels` for a form and these tensors: fused ones where they fit."""
        if self.fused and form == "chunk" and fits_fused(tensors[0], tensors[self.tensors.index("v")]):
            form = "fused_chunk"
        return kernels(self.package, form)

    def accepts_functions(self, form: str, backend: str, tensors) -> bool:
        """Whether a state, or the gradient of one, may be a function (`ahead_triton.Kernels.accepts_functions`)."""
        return backend == "triton" and self._kernels(form, tensors).accepts_functions

    def check_values(self, tensors, states, cu_seqlens):
        """Raise ValueError unless decays are <= 0 and, under `checked()`, all else is finite. states: initial parts."""
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

    def run_backward(self, *args):
        """Return the backward operator's results: gradients of tensors and of the state's parts ([0] without one)."""
        grads = self._gradients(*args)
        missing = len(self.tensors) + len(self.states) - len(grads)
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return (*grads, *(grads[0].new_empty(0, dtype=wide) for _ in range(missing)))

    def _gradients(self, *args):
        """Return the gradients of `run_backward`, without the state's parts if there is no state."""
        tensors, state, cu_seqlens, rest = self._split(args)
        saved, do, rest = rest[: self.n_saved], rest[self.n_saved], rest[self.n_saved + 1 :]
        dfinal, (scale, form, backend, chunk_size) = self.whole(rest[: len(self.states)]), rest[len(self.states) :]
        if backend == "triton":
            tensors, state, cu_seqlens = [x.contiguous() for x in tensors], _contiguous(state), _contiguous(cu_seqlens)
            *grads, dstate = self._kernels(form, tensors).backward(
                *tensors, scale, state, cu_seqlens, chunk_size, saved, do.contiguous(), _contiguous(dfinal)
            )
        else:
            rows, rest = tensors[: self.sequences], (*tensors[self.sequences :], scale, state)
            call = self.package, form, backend, chunk_size, rows, rest, cu_seqlens
            *grads, dstate = plain.run("backward", *call, do, dfinal)
        grads = [_own(dx, x.dtype) for dx, x in zip(grads, tensors, strict=True)]
        if state is not None:
            wide = torch.promote_types(do.dtype, torch.float32)
            grads += [_own(dx, wide) for dx in self._parts(dstate)]
        return grads

    def _shapes(self, tensors, cu_seqlens):
        return self.shapes(*tensors, tensors[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    def _fake_forward(self, *args):
        tensors, _, cu_seqlens, rest = self._split(args)
        _, _, form, backend, chunk_size, output_final_state, keep = rest
        first, (o, states) = tensors[0], self._shapes(tensors, cu_seqlens)
        saved = ((0,),) * self.n_saved
        if backend == "triton" and keep:
            saved = self._kernels(form, tensors).saved_shapes(*tensors, cu_seqlens, chunk_size)
        states = states if output_final_state else ((0,),) * len(self.states)
        wide = torch.promote_types(first.dtype, torch.float32)
        return first.new_empty(o), *(first.new_empty(shape, dtype=wide) for shape in (*states, *saved))

    def _fake_backward(self, *args):
        tensors, state, cu_seqlens, _ = self._split(args)
        _, states = self._shapes(tensors, cu_seqlens)
        states = ((0,),) * len(self.states) if state is None else states
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
        return *grads, *(tensors[0].new_empty(shape, dtype=wide) for shape in states)

    def _save(self, ctx, inputs, output):
        n = len(self.tensors) + len(self.states) + 1
        ctx.save_for_backward(*inputs[:n], *output[1 + len(self.states) :])
        ctx.set_materialize_grads(False)  # saves half a gigabyte of zeros for undifferentiated checkpoints
        *ctx.settings, ctx.wants_final, _ = inputs[n + 1 :]

    def _run_directly(self, ctx, *args):
        """Run without the custom operator: return o, and final parts if requested; save in ctx for the backward."""
        tensors, state, cu_seqlens, rest = self._split(args)
        o, final, saved = self._compute(tensors, state, cu_seqlens, *rest)
        saved, ctx.packing = (saved[: self.n_saved], saved[self.n_saved :]) if saved else ((None,) * self.n_saved, ())
        ctx.save_for_backward(*tensors, *args[len(tensors) : -len(rest)], *saved)
        ctx.set_materialize_grads(False)
        _, *ctx.settings, ctx.wants_final, _ = rest
        return (o, *final) if final else (o,)

    def _differentiate(self, ctx, do, *rest, run=None, packing=()):
        args = ctx.saved_tensors  # activation checkpointing allows one access
        tensors, state, cu_seqlens, saved = self._split(args)
        if do is None:
            do = tensors[0].new_zeros(self._shapes(tensors, cu_seqlens)[0])
        dfinal = rest[: len(self.states)] if ctx.wants_final else [None]
        if all(x is None for x in dfinal):
            dfinal = [None] * len(self.states)
        else:
            wide, states = torch.promote_types(do.dtype, torch.float32), self._shapes(tensors, cu_seqlens)[1]
            pairs = zip(dfinal, states, strict=True)
            dfinal = [do.new_zeros(shape, dtype=wide) if x is None else x for x, shape in pairs]
        n = len(self.tensors)
        if packing:  # reuse the forward's layout of packed sequences
            args = *args[: n + len(self.states)], *packing, *saved
        grads = (run or self.backward)(*args, do, *dfinal, *ctx.settings)
        dstates = [None] * len(self.states) if state is None else grads[n:]
        return *grads[:n], *dstates, *[None] * 8

    def _differentiate_transformed(self, ctx, *grads):
        return self._differentiate(ctx, *grads, run=self.transformed_backward.apply)

    def _differentiate_directly(self, ctx, *grads):
        # With create_graph the operator is called, which refuses a double backward.
        if torch.is_grad_enabled() or not plain_eager([x for x in grads if x is not None]):
            return self._differentiate(ctx, *grads)
        return self._differentiate(ctx, *grads, run=self._gradients, packing=ctx.packing)

    def _refuse_double_backward(self, ctx, *_):
        raise RuntimeError(
            f"flakit::{self.name}: double backward is not supported; its gradient is not differentiable again"
        )


def plain_eager(tensors: Sequence[Tensor]) -> bool:
    """Whether no compiler, tracer, transform, dispatch mode or tensor subclass is active. Then the custom operator can
    be bypassed: calling it takes longer than a decode step, and its first call with gradients seconds of imports."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor  # of autograd.grad(..., is_grads_batched=True)
    for x in tensors:  # a loop, as in `check.check_tensor`
        of = type(x)
        if not (of is Tensor or of is Parameter) or not (x.is_cuda or x.is_cpu) or batched(x):
            return False
    return True


def _contiguous(x):
    """Return a tensor, or each of several, contiguous; return anything else unchanged."""
    if isinstance(x, (tuple, list)):
        return tuple([y.contiguous() if isinstance(y, Tensor) else y for y in x])
    return x.contiguous() if isinstance(x, Tensor) else x


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype, contiguous, and not as a view: autograd refuses in-place changes of returned views."""
    if x.dtype == dtype and x.is_contiguous() and not x._is_view():
        return x
    x = check.in_dtype(x, dtype).contiguous()
    return x.clone() if x._is_view() else x


def _save_nothing(ctx, inputs, output):
    pass


def _function(name, run, save, differentiate):
    """Return an autograd.Function of an operator that torch.func can transform, unlike the custom operator's own. run,
    save, differentiate: its forward, setup_context and backward."""
    members = dict(
        generate_vmap_rule=True,
        forward=staticmethod(lambda *args: run(*args)),
        setup_context=staticmethod(save),
        backward=staticmethod(differentiate),
    )
    return type(f"Function_{name}", (torch.autograd.Function,), members)


def _one_by_one(operator):
    """Return the torch.func.vmap rule of an operator: one call for each element of the mapped axis."""

    def rule(info, in_dims, *args):
        runs = []
        for i in range(info.batch_size):
            args_i = (x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
            runs.append(operator(*args_i))
        results = tuple(torch.stack(x) for x in zip(*runs, strict=True))
        return results, (0,) * len(results)

    return rule
