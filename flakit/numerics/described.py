"""An operator described by its user: a forward function and a description of its arguments.

    op = flakit.describe(
        "kda",
        naive,
        axes={"q k": "B T H K", "v": "B T HV V", "g": "B T HV K", "beta": "B T HV"},
        decay="g",
        draws={"q k": "unit", "beta": "sigmoid"},
    )

The description may also be TOML in the function's docstring or in a file beside the function's file:

    [flakit]
    decay = "g"
    axes = { "q k" = "B T H K", v = "B T HV V", g = "B T HV K", beta = "B T HV" }
    draws = { "q k" = "unit", beta = "sigmoid" }
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.common.packed import one_by_one
from .arguments import function, named_function, one_of, parameters_of, plain, shown, whole_number
from .draws import Draw, draw, recorded
from .operators import DESCRIBED, OPERATORS, Operator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOGS = {"natural": 1.0, "base 2": math.log(2)}
"""Logarithms of a decay, each with its unit in natural-log units."""
OPTIONS = ("scale", "initial_state", "output_final_state", "cu_seqlens")
NEEDED = ("B", "T", "H", "K", "V")
HEADS = ("H", "HQ", "HV")
STATES = ("initial_state", "final_state")
TABLE = "flakit"


class Output(NamedTuple):
    """The result of an operator: o, and the final state or its parts, None if there is none or it was not requested."""

    o: Tensor
    final_state: Tensor | tuple[Tensor, ...] | None


def output(returned: Any, whose: str = "") -> Output:
    """Return o and the final state (or None) of a function's result: o, a tuple that begins with o and the final state,
    or an object with these names. Raises TypeError for anything else. whose: the beginning of its message."""
    if isinstance(returned, Tensor):
        return Output(returned, None)
    if isinstance(getattr(returned, "o", None), Tensor):
        return Output(returned.o, getattr(returned, "final_state", None))
    if isinstance(returned, (tuple, list)) and returned and isinstance(returned[0], Tensor):
        return Output(returned[0], returned[1] if len(returned) > 1 else None)
    raise TypeError(f"{whose}expected o, a tuple that begins with o, or a result with o, got {shown(returned)}")


class Called:
    """A function called like an operator: with the tensors by name if its signature has these names, else in order.

    tensors, states: names of the tensors and of the initial state's parts. axes: by name, "B T H K". constants: further
    arguments by name, passed if the signature has them.
    """

    def __init__(
        self,
        function: Callable,
        tensors: tuple[str, ...],
        states: tuple[str, ...],
        axes: Mapping[str, str],
        constants: Mapping[str, Any],
    ):
        self.function, self.name = function, getattr(function, "__name__", "the function")
        self.tensors, self.states, self.axes, self.constants = tensors, states, axes, constants
        parameters = parameters_of(function).values()
        self.named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self.style = "tuple"  # of its last result: "tensor", "tuple" or "attributes"
        self.all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def on(self, tensors: Mapping[str, Tensor], scale: float | None, state: object) -> Output:
        """Call the function with a scale and a state, if it takes them; return o and the final state or None."""
        options = {"scale": scale, "initial_state": state, "output_final_state": True if self.states else None}
        options = {name: x for name, x in options.items() if x is not None and (name in self.named or self.all)}
        return self.call(tensors, options)

    def call(self, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Output:
        """Call the function with these options, which override the constants; return o and the final state or None."""
        options = {**{name: x for name, x in self.constants.items() if name in self.named}, **options}
        if set(self.tensors) <= self.named:
            returned = self.function(**tensors, **options)
        else:
            returned = self.function(*(tensors[name] for name in self.tensors), **options)
        result = output(returned)
        self.style = "tensor" if result.o is returned else "tuple" if isinstance(returned, tuple) else "attributes"
        return result

    def zeros(self, tensors: Mapping[str, Tensor], names: Iterable[str], sequences: int | None = None) -> list[Tensor]:
        """Return zeros of the named states or outputs, sized as `tensors`. sequences: N if packed; default B."""
        size: dict[str, int] = {}
        for name in self.tensors:
            size |= zip(self.axes[name].split(), tensors[name].shape, strict=True)
        size["N"] = size["B"] if sequences is None else sequences
        first = tensors[self.tensors[0]]
        return [first.new_zeros([size[axis] for axis in self.axes[name].split()]) for name in names]

    def parts(self, state: Any) -> list[Tensor]:
        """Return the parts of a state, a tensor or a sequence of tensors; none for None."""
        return [] if state is None else [state] if isinstance(state, Tensor) else list(state)

    def joined(self, parts: Iterable[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
        """Return a state of these parts, the inverse of `parts`: a tensor, a tuple of tensors, or None."""
        parts = tuple(parts)
        return None if not parts else parts[0] if len(parts) == 1 else parts


class Kernel(Called):
    """A user's kernel in `Operator.forms`, called by name with the arguments of flakit's own operators."""

    def __call__(self, *, output_final_state: bool = False, **args) -> Output:
        tensors = {name: args.pop(name) for name in self.tensors}
        options = {name: x for name, x in args.items() if x is not None}
        if unknown := [name for name in options if name not in self.named and not self.all]:
            raise TypeError(f"{self.name}: expected arguments among its own, got {', '.join(unknown)}")
        if self.states and ("output_final_state" in self.named or self.all):
            options["output_final_state"] = output_final_state
        return self.call(tensors, options)


class Naive(Called):
    """The user's reference function, callable as an operator is, for any dtype and for packed sequences."""

    def __call__(self, *, output_final_state: bool = False, **args) -> Output:
        """Compute in float64 for float64 inputs, else in float32; o has the dtype of the first tensor."""
        rows = {name: args.pop(name) for name in self.tensors}
        first = rows[self.tensors[0]]
        wide = torch.promote_types(first.dtype, torch.float32)
        scale, state, ends = (args.pop(name, None) for name in ("scale", "initial_state", "cu_seqlens"))
        if args:
            raise TypeError(f"expected arguments among {', '.join((*self.tensors, *OPTIONS))}, got {', '.join(args)}")
        rows = {name: x.to(wide) for name, x in rows.items()}
        shared = {name: x for name, x in rows.items() if "T" not in self.axes[name].split()}
        timed = {name: x for name, x in rows.items() if name not in shared}

        def run(timed, state):
            o, final = self.on(timed | shared, scale, state)
            return o, final if self.states else o[:, :0]

        def zeros():
            return self.joined(self.zeros(rows, self.states, 1))

        o, final = run(timed, state) if ends is None else one_by_one(run, timed, state, ends, zeros)
        return Output(o.to(first.dtype), final if output_final_state and self.states else None)


class ByAutograd(Called):
    """The `forward` and `backward` of an operator's reference, made from a function with a forward pass only. Gradients
    come from automatic differentiation, in the dtype of the tensors."""

    def forward(self, *args) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
        """Return o and the final state. args: the tensors in order, the scale and the initial state or None."""
        o, *parts = self._run(args)[0]
        return o.detach(), self.joined(part.detach() for part in parts)

    def backward(self, *args) -> tuple:
        """Return the gradients of the tensors and of the initial state. args: those of `forward`, then the gradients
        of o and of the final state."""
        return self.both(*args)[2]

    def both(self, *args) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None, tuple]:
        """Return o, the final state and the results of `backward`, from one run."""
        *inputs, do, dstate = args
        outputs, leaves = self._run(inputs)
        o, *parts = (x.detach() for x in outputs)
        return o, self.joined(parts), self._gradients(outputs, leaves, do, dstate)

    @torch.enable_grad()
    def _run(self, args) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and leaves (the tensors, then the initial state's parts) of `forward` with these arguments."""
        *rows, scale, state = args
        tensors = {name: x.detach().requires_grad_() for name, x in zip(self.tensors, rows, strict=True)}
        parts = [x.detach().requires_grad_() for x in (self.parts(state) or self.zeros(tensors, self.states))]
        if not next(x for name, x in tensors.items() if "T" in self.axes[name].split()).shape[1]:
            return [*self.zeros(tensors, ["o"]), *parts], [*tensors.values(), *parts]
        o, final = self.on(tensors, scale, self.joined(parts))
        return [o, *self.parts(final)][: 1 + len(self.states)], [*tensors.values(), *parts]

    def _gradients(self, outputs, leaves, do, dstate) -> tuple:
        pairs = list(zip(outputs, [do, *self.parts(dstate)], strict=False))
        pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
        if not pairs:
            grads = [torch.zeros_like(x) for x in leaves]
        else:
            outputs, cotangents = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)
        n = len(self.tensors)
        return *grads[:n], self.joined(grads[n:])


def describe(
    name: str,
    forward: Callable,
    axes: Mapping[str, str | list[str]],
    *,
    decay: str = "",
    log: str = "natural",
    profile: str | None = None,
    draws: Mapping[str, Any] | None = None,
    data: Mapping[str, Tensor] | str | Path | None = None,
    scale_exponent: float = -0.5,
    constants: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    kernels: Mapping[str, Callable] | None = None,
    label: str | None = None,
) -> Operator:
    """Describe an operator for the instruments: `flakit.audit(my_kernel, like=flakit.describe(…))`.

    name: its name, under which `like` and `flakit.inputs` find it from now on.
    forward: the naive recurrence in PyTorch, called with the tensors of `axes` by name, or in the order of `axes` if
        its signature has other names; with `scale`, `initial_state` and `output_final_state` if its signature names
        them (no `initial_state`: no state). It returns o, (o, final state) or an object with `o` and `final_state`, and
        computes in its inputs' dtype: its float64 results are the truth, its gradients those of autograd.
    axes: of every tensor, "B T H K" in memory order: B batch, T time, H heads (HQ of queries, HV of values, multiples
        of H), K keys, V values, M slots. Batch and time come first. A key may hold several names. o has the axes of the
        values and a state [N, heads of the values, K, V] unless "o", "initial_state" and "final_state" are specified; a
        state of several tensors is a list.
    decay: the tensor with the log decay <= 0, if any. log: "natural" or "base 2".
    profile: the decays of a model, from `flakit.numerics.inputs.DECAYS`; default "logsigmoid".
    draws: the other tensors of a model: "normal" (the default), "unit" (length 1 along the last axis), "sigmoid",
        "softmax", a pair (low, high) for uniform ones, or a function of (numpy generator, shape with time first).
    data: recorded tensors by name, as a mapping or a file .pt, .safetensors or .npz; override `draws` and `profile`.
    scale_exponent: the default scale is K to this power.
    constants: further arguments, passed to functions whose signature names them. sizes: of axes with other letters.
    kernels: further forms for `evaluate`, `sweep` and the gradient comparer, by name. label: its name in tables.

    Returns:
        Operator, for `like`. The function is run a few times, on 5 tokens in float64.

    Raises:
        ValueError, TypeError: with the argument's name, the expected value and the actual one; also if o or the state
            of `forward` has other axes, its arithmetic is not float64, it is not differentiable, or two halves of a
            sequence with the state passed on differ from the whole.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name: expected letters, digits and _, got {shown(name)}")
    from .family import FAMILY

    if name in OPERATORS or name in FAMILY:
        raise ValueError(f"name: expected one that is not built in, got {name!r}")
    function("forward", forward, optional=False)
    op = _described(
        name, forward, axes, decay=decay, log=log, profile=profile, draws=draws, data=data, label=label,
        scale_exponent=scale_exponent, constants=constants, sizes=sizes, kernels=kernels,
    )  # fmt: skip
    op = dataclasses.replace(op, heads_alike=_check(op))
    DESCRIBED[name] = op
    return op


def with_kernels(op: Operator, kernels: Mapping[str, Callable]) -> Operator:
    """Return the operator with further forms: functions that take its arguments by name or in its order."""
    signature = op.tensors, op.states, op.axes, op.constants
    for x, y in kernels.items():
        function(f"kernels[{x!r}]", y, optional=False)
    more = {x: Kernel(y, *signature) for x, y in kernels.items()}
    return dataclasses.replace(op, forms={**op.forms, **more})


def _described(
    name, forward, axes, *, decay="", log="natural", profile=None, draws=None, data=None, scale_exponent=-0.5,
    constants=None, sizes=None, kernels=None, label=None, **fields,
) -> Operator:  # fmt: skip
    signature = _signature(forward)
    known, state = _axes(axes)
    tensors = tuple(x for x in known if not x.startswith(("initial", "final")) and x != "o")
    if set(tensors) <= set(signature):
        tensors = tuple(x for x in signature if x in tensors)
    takes_all = signature is _ANY
    states, outputs = _states(known, state, tensors, takes_all or "initial_state" in signature)
    _check_axes(known, tensors, states, outputs)
    if decay and decay not in tensors:
        raise ValueError(f"decay: expected one of {', '.join(tensors)}, got {shown(decay)}")
    nats = LOGS[one_of("log", log, LOGS)]
    if data is not None and not isinstance(data, Mapping):
        data = _tensors_of(Path(data))
    drawn = {x: draw(f"draws[{x!r}]", y, known[x].split()) for x, y in _spread("draws", draws or {}, tensors).items()}
    profiles = {}
    for x, y in _spread("data", data or {}, tensors, strict=False).items():
        distribution = draw(f"data[{x!r}]", torch.as_tensor(y), known[x].split())
        if x != decay:
            drawn[x] = distribution
            continue
        if not (torch.as_tensor(y) <= 0).all():
            raise ValueError(f"data[{x!r}]: expected log decays <= 0, got {torch.as_tensor(y).max().item():g}")
        profiles["data"] = recorded(torch.as_tensor(y).double() * nats, known[x].split()).sample
    profile = profile or ("data" if profiles else "logsigmoid")
    own = {x: whole_number(f"sizes[{x!r}]", y) for x, y in (sizes or {}).items()}
    letters = {axis for x in (*tensors, "o", *states) for axis in known[x].split()}
    unknown = letters - {*NEEDED, "HQ", "HV", "M", "N", *own}
    if unknown:
        raise ValueError(f"sizes: expected the size of {', '.join(sorted(unknown))}, axes of no meaning here")
    constants = dict(constants or {})
    names = tensors, states, known, constants
    op = Operator(
        name=name, label=label or name, forms={"naive": Naive(forward, *names)}, reference=ByAutograd(forward, *names),
        chunked=None, chunk_sizes=(), axes=known, tensors=tensors, states=states, outputs=outputs, own_sizes=own,
        decay=decay, nats=nats, profile=profile, profiles=profiles, draws=drawn, constants=constants,
        scale_exponent=float(plain(scale_exponent)), has_scale=takes_all or "scale" in signature, **fields,
    )  # fmt: skip
    return with_kernels(op, kernels or {})


_ANY: tuple[str, ...] = ("anything",)


def _signature(forward: Callable) -> tuple[str, ...]:
    """Return the names of a function's keyword arguments, in order; `_ANY` if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _ANY
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _spread(called: str, values: object, tensors: Iterable[str], strict: bool = True) -> dict:
    """Return the values of a dict by tensor, where a key may hold several names separated by spaces. called: the dict's
    name in errors. strict: raise ValueError for a name that is no tensor, rather than ignore it."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{called}: expected a dict by the names of tensors, got {shown(values)}")
    by_name = {name: x for names, x in values.items() for name in str(names).split()}
    tensors = tuple(tensors)
    for name in by_name if strict else ():
        one_of(called, name, tensors)
    return {name: x for name, x in by_name.items() if name in tensors}


def _axes(axes: object) -> tuple[dict[str, str], list[str]]:
    """Return the axes of tensors and o by name, and of each part of a state. Raises ValueError or TypeError."""
    if not isinstance(axes, Mapping) or not axes:
        raise TypeError(f'axes: expected a dict like {{"q": "B T H K"}}, got {shown(axes)}')
    by_name: dict[str, str] = {}
    states: dict[str, list[str]] = {}
    for names, x in axes.items():
        for name in str(names).split():
            parts = list(x) if isinstance(x, (list, tuple)) and x and name in STATES else [x]
            for part in parts:
                if not isinstance(part, str) or not part.split() or len(set(part.split())) < len(part.split()):
                    raise ValueError(
                        f'axes: expected letters with spaces between, "B T H K", as {name}, got {shown(x)}'
                    )
            if name in STATES:
                states[name] = parts
            else:
                by_name[name] = parts[0]
    return by_name, states.get("initial_state", states.get("final_state", []))


def _states(
    known: dict[str, str], state: list[str], tensors: tuple[str, ...], has: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the initial state's parts and of the outputs; add their axes to the known ones. state: the
    described axes of each part. has: whether the function takes an initial state; without it there is none."""
    values = [name for name in tensors if {"T", "V"} <= set(known[name].split())]
    if not values:
        raise ValueError("axes: expected a tensor with the axes T and V, got none")
    value = "v" if "v" in values else values[0]
    known.setdefault("o", known[value])
    if not has:
        return (), ("o",)
    heads = next((axis for axis in known[value].split() if axis in HEADS), "H")
    parts = state or [f"N {heads} K V"]
    if len(parts) == 1:
        known |= {"initial_state": parts[0], "final_state": parts[0]}
        return ("initial_state",), ("o", "final_state")
    numbers = range(1, len(parts) + 1)
    known |= {f"{side}_{n}": parts[n - 1] for side in ("initial", "final") for n in numbers}
    return tuple(f"initial_{n}" for n in numbers), ("o", *(f"final_{n}" for n in numbers))


def _check_axes(known: Mapping[str, str], tensors: tuple[str, ...], states, outputs) -> None:
    letters = {axis for name in tensors for axis in known[name].split()}
    if missing := [axis for axis in NEEDED if axis not in letters]:
        raise ValueError(f"axes: expected {', '.join(NEEDED)} among those of the tensors, got none called {missing[0]}")
    for name in (*tensors, "o"):
        axes = known[name].split()
        if ("T" in axes or "B" in axes) and axes[:2] != ["B", "T"]:
            raise ValueError(
                f'axes: expected batch and time first, "B T …", got "{known[name]}" as {name}; '
                "let a small function around yours transpose it"
            )
    if known[tensors[0]].split()[-1] != "K":
        raise ValueError(f'axes: expected K as the last axis of the first tensor, got "{known[tensors[0]]}"')
    for name in (*states, *outputs[1:]):
        if known[name].split()[0] != "N":
            raise ValueError(f'axes: expected N, the sequences, first in a state, got "{known[name]}"')


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """Load tensors by name from a file .pt, .safetensors or .npz. Raises ValueError for any other."""
    if not path.is_file():
        raise ValueError(f"data: expected a file, {path} does not exist")
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path) as archive:
            return {name: torch.as_tensor(archive[name]) for name in archive.files}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".pt":
        content = torch.load(path, weights_only=True, map_location="cpu")
        if isinstance(content, Mapping):
            return dict(content)
        raise ValueError(f"data: expected tensors by name in {path}, got {shown(content)}")
    raise ValueError(f"data: expected a file .pt, .safetensors or .npz, got {path}")


TRIED: dict[str, Any] = {"B": 2, "T": 5, "H": 2, "K": 4, "V": 3}


def _check(op: Operator) -> bool:
    """Run the function in float64 and check its description; return whether heads are independent of their index.
    Raises ValueError if a shape, a dtype, a gradient or the sequence in two halves contradicts the description."""
    from .inputs import inputs

    x = inputs(op, **TRIED, dtype=torch.float64, initial_state=bool(op.states))
    leaves = {name: y.requires_grad_() for name, y in op.leaves(x).items()}
    run = _naive(op)
    tensors = {name: leaves[name] for name in op.tensors}
    state = op.state([leaves[name] for name in op.states])
    scale = op.scale(x) if op.has_scale else None
    try:
        result = run.on(tensors, scale, state)
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else "without a message"
        raise ValueError(f"forward: it raised {type(error).__name__}: {message}") from error
    parts = run.parts(result.final_state)
    if len(parts) != len(op.states):
        raise ValueError(f"forward: expected {len(op.states)} tensors as the final state, got {len(parts)}")
    size = op.size(leaves)
    for name, y in zip(op.outputs, (result.o, *parts), strict=True):
        expected = [size[axis] for axis in op.axes[name].split()]
        if list(y.shape) != expected:
            raise ValueError(f"forward: expected {name} [{op.axes[name]}] = {expected}, got {list(y.shape)}")
        if y.dtype != torch.float64:
            raise ValueError(f"forward: expected {name} in float64 for float64 inputs, got {y.dtype}")
        if not y.requires_grad:
            raise ValueError(f"forward: expected {name} to be differentiable, got one that is cut off from every input")
    with torch.no_grad():
        _check_float64(op, tensors, scale, state, result.o)
        _check_halves(op, tensors, scale, state, result)
        rolled = {name: _rolled(op, name, x) for name, x in leaves.items()}
        o = run.on({name: rolled[name] for name in op.tensors}, scale, op.state([rolled[x] for x in op.states])).o
        return torch.allclose(o, _rolled(op, "o", result.o), rtol=1e-9, atol=1e-12)


def _naive(op: Operator) -> ByAutograd:
    assert isinstance(op.reference, ByAutograd)  # as for all described operators
    return op.reference


def _rolled(op: Operator, name: str, x: Tensor) -> Tensor:
    """Return x with every head moved to the next index, the last one to the first."""
    axis = next((n for n, axis in enumerate(op.axes[name].split()) if axis in HEADS), None)
    return x if axis is None else x.roll(1, axis)


def _check_float64(op: Operator, tensors: Mapping[str, Tensor], scale, state, o: Tensor) -> None:
    """Raise ValueError unless o responds to a relative change of 1e-10, which float32 arithmetic would round away."""
    step = 1e-10
    moved = {name: x * (1 + step) for name, x in tensors.items()}
    further = {name: x * (1 + 1e4 * step) for name, x in tensors.items()}
    small, large = (_naive(op).on(x, scale, state).o - o for x in (moved, further))
    if (small * 1e4 - large).norm() > 0.01 * large.norm():
        raise ValueError("forward: expected float64 arithmetic for float64 inputs, got coarser one: a cast on the way?")


def _check_halves(op: Operator, tensors: Mapping[str, Tensor], scale, state, whole: Output) -> None:
    if not op.states:
        return
    from .pieces import in_pieces

    halves = in_pieces(op, [2]).forms["naive"](**tensors, scale=scale, initial_state=state)
    pairs = zip((halves.o, *op.parts(halves.final_state)), (whole.o, *op.parts(whole.final_state)), strict=True)
    for name, (y, z) in zip(op.outputs, pairs, strict=True):
        if (y - z).norm() > 1e-9 * z.norm():
            raise ValueError(
                f"forward: expected two halves with the state handed over to be the whole, got another {name}: is "
                "initial_state used, and of the same layout as the final state?"
            )


def from_reference(spec: str) -> Operator:
    """Return the operator of the function named by "file.py:function" or "package.module:function".

    Its description is TOML in its docstring after a line [flakit], or in file.toml beside file.py, in a table with the
    function's name. The keys are the arguments of `describe`; `name` defaults to the function's, and a `data` file is
    relative to the function's folder. Raises ValueError if there is no description, or a wrong one.
    """
    place = spec.rpartition(":")[0]
    modified = Path(place).stat().st_mtime_ns if place.endswith(".py") and Path(place).is_file() else 0
    return _from_reference(spec, modified)


@functools.lru_cache(maxsize=64)
def _from_reference(spec: str, modified: int) -> Operator:
    forward = named_function(spec, "reference")
    file = Path(inspect.getsourcefile(inspect.unwrap(forward)) or "")
    called = getattr(forward, "__name__", "reference")
    description, where = _description(forward, file, called)
    known = [name for name in inspect.signature(describe).parameters if name not in ("forward", "kernels")]
    fields = dict(description)
    for key in fields:
        if key not in known:
            raise ValueError(f"reference: expected keys among {', '.join(known)} in {where}, got {key}")
    if "axes" not in fields:
        raise ValueError(f"reference: expected axes in {where}, got none")
    if isinstance(fields.get("data"), str):
        fields["data"] = file.parent / fields["data"]
    name = fields.pop("name", called)
    return describe(name, forward, fields.pop("axes"), **fields)


def _description(forward: Callable, file: Path, called: str) -> tuple[dict, str]:
    """Return the description of a function as a dict, and its location in words, for errors."""
    _, header, text = dedent(inspect.getdoc(forward) or "").partition(f"[{TABLE}]\n")
    beside, where = file.with_suffix(".toml"), f"the docstring of {called}"
    try:
        if header:
            return tomllib.loads(text), where
        where = f"{beside.name}, table {called}"
        tables = tomllib.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"reference: expected TOML in {where}: {error}") from error
    if called not in tables:
        raise ValueError(
            f"reference: expected a description of {called}, in its docstring after a line [{TABLE}] or in {beside} "
            f"in a table [{called}]"
        )
    return tables[called], where


__all__ = ["ByAutograd", "Called", "Draw", "Output", "describe", "from_reference", "output"]
