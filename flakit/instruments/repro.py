"""Writes a failure of the audit as a standalone script: torch, the kernel and a float64 formula, without flakit."""

import ast
import contextlib
import inspect
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from textwrap import dedent, indent

import torch

from ..numerics.draws import NORMAL
from ..numerics.operators import Operator
from .checks import apart, causal, contained, fenced, heads_of, memoised, permuted, poisoned, repeatable, unchanged
from .examiner import Examiner
from .finding import Finding
from .pair import ranks_device
from .probes import Probe
from .setting import EXPANDED, INT32, MIXED_TOKENS, TRANSPOSED, Setting, has_channels, repeated
from .subject import Subject, import_of

DRAWN = {
    "logsigmoid": "torch.nn.functional.logsigmoid(torch.randn({shape}))",
    "rwkv6-init": "-torch.exp(torch.empty({shape}).uniform_(-6, -1))",
    "uniform": "-torch.exp(torch.empty({shape}).uniform_(-11.5, 2))",
    "gsa": "torch.nn.functional.logsigmoid(torch.randn({shape})) / 8",
    "none": "torch.zeros({shape})",
    "spikes": "torch.where(torch.rand({shape}) < 0.05, -1e4, -0.01)",
    "inf-spikes": "torch.where(torch.rand({shape}) < 0.05, -torch.inf, -0.01)",
    "forget": "torch.full(({shape},), -torch.inf)",
}
LAYOUTS = {
    "heads first, transposed": "y.transpose(1, 2).contiguous().transpose(1, 2)",
    "slice of a fused projection": "torch.cat((y, y, y), -1)[..., : y.shape[-1]]",
}
OFFSETS = {
    "column of (begin, end)": "torch.stack((ends, torch.cat((ends[1:], ends[-1:]))), 1)[:, 0]",
    "every second of the halves": "torch.stack((ends, torch.cat(((ends[:-1] + ends[1:]) // 2, ends[-1:]))), 1)"
    ".flatten()[::2]",
    INT32: "ends.int()",
}
SEEDS = 5


def short(op: Operator) -> tuple[str, ...]:
    """Return the names of the state's parts in formulas: "S" if it is one tensor."""
    return ("S",) if len(op.states) == 1 else tuple(name.removeprefix("initial_") for name in op.states)


def reference_source(op: Operator) -> tuple[str, ...]:
    """Return the lines that define `naive`, the float64 reference, for an operator without a `formula`: an import from
    the user's file, or the reference's own text, which needs PyTorch alone."""
    function = op.reference.function
    if function.__module__.split(".")[0] != __name__.split(".")[0]:
        return import_of(function, "naive")
    lines = dedent(inspect.getsource(inspect.unwrap(function))).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("def "))
    (definition,) = ast.parse("\n".join(lines[first:])).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    head = lines[first : first + body[0].lineno - 1]  # the lines before the docstring
    head[0] = re.sub(r"^def \w+", "def naive", head[0])
    return ("", *head, *lines[first + body[1].lineno - 1 :])


def repro(x: Examiner, probe: Probe, finding: Finding) -> str | None:
    """Return a script that fails with an error saying what is wrong; None if no script reproduces the failure."""
    error = Exception if finding.kind in ("raises", "no gradient") else AssertionError
    candidates = [finding]
    for name in finding.others:
        if name in x.op.outputs and finding.tensor not in x.op.outputs and finding.budget:
            # An output needs fewer lines than a gradient, if it exceeds its own budget.
            candidates = [replace(finding, tensor=name, allowed=finding.budget, measure="L2"), finding]
            break
    for finding, seed in itertools.product(candidates, range(SEEDS)):
        if x.late:
            return None
        over = finding.setting.slices is not None
        script = _script(x.subject, probe, finding, seed, ranks_device(x.device) if over else x.device)
        if shows(script, x, finding.setting, error):
            return script
    return None


def shows(script: str, x: Examiner, setting: Setting, error: type[Exception]) -> bool:
    """Whether a script ends with an error of this type. It runs in this process, with the subject in place of its
    import; a script over ranks runs in the processes of the pair."""
    if setting.slices is not None:
        return x.runner.pair is not None and x.runner.pair.shows(script, error)
    return isinstance(ending(script, x.subject), error)


def ending(script: str, subject: Subject) -> BaseException | None:
    """Return the error with which a script ends when run in this process, None for none."""
    namespace = {"function": subject.original, "adapter": subject.adapter}
    imported = {*subject.source, *map(_meeting, ("gloo", "nccl"))}
    if not subject.op.formula and reference_source(subject.op)[0]:
        imported |= {*reference_source(subject.op)}
        namespace["naive"] = subject.op.reference.function
    body = "\n".join(line for line in script.splitlines() if line not in imported)
    try:
        with _as_it_was(), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(body, "<repro>", "exec"), {"__name__": "repro"} | namespace)
    except (Exception, SystemExit) as raised:
        return raised
    return None


def _meeting(backend: str) -> str:
    """Return the line with which a script joins the process group. backend: "gloo" or "nccl"."""
    return f'dist.init_process_group("{backend}")'


_MAKERS = ((torch, ("empty", "empty_like", "zeros", "zeros_like")), (torch.Tensor, ("new_empty",)))
"""The functions that a script patches to put fences around memory."""


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore PyTorch at exit: a script sets seeds and deterministic algorithms, and patches memory allocation."""
    makers = [(owner, name, getattr(owner, name)) for owner, names in _MAKERS for name in names]
    deterministic = torch.get_deterministic_debug_mode()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for owner, name, maker in makers:
            setattr(owner, name, maker)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.use_deterministic_algorithms(deterministic > 0, warn_only=deterministic == 1)


def _script(subject: Subject, probe: Probe, finding: Finding, seed: int, device: str) -> str:
    s, op = finding.setting, subject.op
    reference: Sequence[str] = () if op.formula or probe.check in _ALONE else reference_source(op)
    if reference and reference[0]:  # imported, perhaps from where the kernel is
        reference = [line for line in reference if line not in subject.source]
    title, ranks = f"{subject.name}, {probe.name}: {probe.meaning}", len(s.slices or ())
    lines = [
        *([f'"""{title}', "", f"torchrun --nproc-per-node {ranks} FILE", '"""'] if ranks else [f'"""{title}"""']),
        "",
        "import torch",
        *(["import torch.distributed as dist"] if ranks else []),
        "",
        *subject.source,
        *reference,
        "",
        *(_slices(s, device) if ranks else ()),
    ]
    lines += [f"torch.manual_seed({seed})", *_inputs(op, s, device)]
    if probe.check in _ALONE:
        lines += [*_kernel(subject, s), *_ALONE[probe.check](op, s)]
    else:
        lines += _compared(subject, s, finding, probe.check, device)
    return "\n".join(lines) + "\n"


def _slices(s: Setting, device: str) -> Iterator[str]:
    """Yield lines that join the process group as a rank and take its slice's bounds."""
    yield _meeting("gloo" if device == "cpu" else "nccl")
    yield "rank = dist.get_rank()"
    if device != "cpu":
        yield "torch.cuda.set_device(rank)"
    ends = [0, *itertools.accumulate(s.slices or ())]
    yield f"begin, end = {list(itertools.pairwise(ends))}[rank]"
    yield ""


def _shape(op: Operator, name: str, s: Setting, N: str = "") -> str:
    """Return a tensor's shape as source text of the script, "B, T, H, K". N: the number of states, if it is not B."""
    N = N or ("B" if s.lengths is None else str(len(s.lengths)))
    groups = "H" if s.groups == 1 else f"{s.groups} * H"
    names = {"HQ": groups, "HV": groups, "N": N, "V": "K" if s.K == s.V else "V"}
    names |= {axis: str(size) for axis, size in op.own_sizes.items()}
    return ", ".join(names.get(axis, axis) for axis in op.axes[name].split())


def _initial(op: Operator, s: Setting) -> list[str]:
    """Return the names of the initial states in the script, if the setting has any."""
    return [f"{state}0" for state in short(op)] if s.initial_state else []


def _arguments(op: Operator, s: Setting) -> str:
    return ", ".join((*op.tensors, *_initial(op, s)))


def _inputs(op: Operator, s: Setting, device: str) -> Iterator[str]:
    """Yield lines that draw the inputs, on the CPU to be the same everywhere, and move them to the device."""
    to_device = "" if device == "cpu" else f'.to("{device}")'
    sizes = {"B": s.B, "T": s.tokens, "H": s.H, "K": s.K, "V": s.V}
    sizes |= {"M": s.M} if "M" in op.sizes else {}
    if s.K == s.V:
        del sizes["V"]
    yield f"{', '.join(sizes)} = {', '.join(map(str, sizes.values()))}"
    for draw, group in itertools.groupby(op.tensors, lambda name: _drawn(op, name, _shape(op, name, s), s)):
        names = list(group)
        together = draw.replace("torch.randn(", f"torch.randn({len(names)}, ") if len(names) > 1 else draw
        yield f"{', '.join(names)} = {together}"
    w = op.decay
    yield from _decays(op, s) if w else ()
    alike = (*repeated(op), *([op.value] if s.constant else [])) if s.repeated or s.constant else ()
    for name in alike:
        yield f"{name} = {name}[:, :1].expand_as({name}).contiguous()"
    if s.written != 1.0:
        yield f"{op.value} *= {s.written!r}"
    if s.bad is not None:
        yield f'{op.value}[:1, {s.bad[0]}, :1] = float("{s.bad[1]}")'
    if s.lengths is not None:
        yield f"ends = torch.tensor([0, {', '.join(map(str, s.lengths))}]).cumsum(0){to_device}"
    for name, short in zip(op.states, _initial(op, s), strict=False):
        yield f"{short} = torch.randn({_shape(op, name, s)}){to_device}"
    apart = s.decay_dtype is not None and w != ""  # drawn in float32, and not rounded
    if apart and to_device:
        yield f"{w} = {w}{to_device}"
    tensors = ", ".join(name for name in op.tensors if not (apart and name == w))
    to = [*([f'"{device}"'] if to_device else []), *([f"torch.{s.dtype}"] if s.dtype != "float32" else [])]
    if to:
        yield f"{tensors} = (y.to({', '.join(to)}) for y in ({tensors}))"
    if s.states != "contiguous":
        timeless = [(name, name) for name in op.tensors if name not in op.sequences]
        for name, called in (*timeless, *zip(op.states, _initial(op, s), strict=False)):
            yield f"{called} = {_stored(op, name, called, s)}"


def _stored(op: Operator, name: str, called: str, s: Setting) -> str:
    if s.states == TRANSPOSED and len(op.axes[name].split()) < 2:
        return f"torch.stack(({called}, {called}), -1)[..., 0]"
    return {TRANSPOSED: f"{called}.mT.contiguous().mT", EXPANDED: f"{called}[:1].expand_as({called})"}[s.states]


def _decays(op: Operator, s: Setting) -> Iterator[str]:
    """Yield lines that change the decays as `Setting.make` does."""
    w, axes = op.decay, op.axes[op.decay].split()
    if isinstance(s.decay, tuple):
        pair = [x / op.nats for x in s.decay]
        if has_channels(op):
            yield f"{w}[..., 0::2], {w}[..., 1::2] = {pair[0]}, {pair[1]}"
        else:
            yield f"{w}[:], {w}[:, ::{MIXED_TOKENS}] = {pair[1]}, {pair[0]}"
    heads = next((n for n, axis in enumerate(axes) if axis.startswith("H")), len(axes))
    each = f"torch.arange({w}.shape[{heads}])" if s.groups > 1 else "torch.arange(H)"
    each += "[:, None]" * (heads == len(axes) - 2)
    if s.per_head and heads < len(axes):
        yield f"{w} *= 1 + {s.per_head} * {each}"
    if s.first and heads < len(axes) and "T" in axes:
        yield f"{w}[:, 0] = {s.first / op.nats} * {each}"
    if s.spike is not None and "T" in axes:
        yield f"{w}[:, {s.spike[0]}] = {s.spike[1] / op.nats}"


def _drawn(op: Operator, name: str, shape: str, s: Setting) -> str:
    if name == op.decay:
        if isinstance(s.decay, str):
            line = DRAWN.get(s.decay, DRAWN["logsigmoid"]).format(shape=shape)
            return line if op.nats == 1 else f"({line}) / {op.nats}"
        return f"torch.full(({shape}), {(-1.0 if isinstance(s.decay, tuple) else s.decay) / op.nats})"
    return (op.draws.get(name, NORMAL).script or NORMAL.script).format(shape=shape)


_OUTPUTS = {
    "tensor": ("", None),
    "mapping": ('["o"]', '["final_state"]'),
    "attributes": (".o", ".final_state"),
    "flat": ("[0]", "[1:]"),
    "tuple": ("[0]", "[1]"),
}
"""How to get o and the state from the result of a call."""


def _call(subject: Subject, s: Setting, states: str = "") -> str:
    """Return the expression that calls the kernel. states: the expression of the initial state, "" for none."""
    op = subject.op
    options = [f"scale={s.scale!r}"] if s.scale is not None and "scale" in subject.named else []
    if states:
        options.append(f"initial_state={states}")
    if s.final_state and "output_final_state" in subject.named:
        options.append("output_final_state=True")
    if s.lengths is not None:
        options.append(f"cu_seqlens={OFFSETS.get(s.offsets, 'ends')}")
    options += [f"{name}={x!r}" for name, x in op.constants.items() if name in subject.taken]
    if s.slices is not None:
        options.append("group=dist.group.WORLD")
    arguments = [f"{name}={name}" if subject.by_name else name for name in op.tensors]
    return f"{'adapter(function, ' if subject.adapted else 'function('}{', '.join([*arguments, *options])})"


def _together(texts: Iterable[str], brackets: str = "()") -> str:
    """Return texts separated by commas, in brackets if there are several."""
    texts = list(texts)
    return f"{brackets[0]}{', '.join(texts)}{brackets[1]}" if len(texts) > 1 else "".join(texts)


def _kernel(subject: Subject, s: Setting) -> Iterator[str]:
    """Yield lines that define `kernel`, which returns the outputs as a list, and `given`, the list of its arguments."""
    op = subject.op
    o, state = _OUTPUTS[subject.style]
    yield f"given = [{_arguments(op, s)}]"
    yield ""
    yield f"def kernel({_arguments(op, s)}):"
    call = _call(subject, s, _together(_initial(op, s)))
    if not s.final_state and o:
        yield f"    return [{call}{o}]"
    else:
        yield f"    out = {call}"
        yield f"    return [{', '.join(_returned(op, s, o, state))}]"
    yield ""


def _returned(op: Operator, s: Setting, o: str, state: str | None) -> list[str]:
    """Return expressions for o and the states in the call's result, `out`. o, state: suffixes of `_OUTPUTS`."""
    states = [f"out{state}"] if len(op.states) == 1 else [f"out{state}[{n}]" for n in range(len(op.states))]
    return [f"out{o}", *(states if s.final_state else ())]


def _right(op: Operator, s: Setting, states: bool, on: str) -> Iterator[str]:
    """Yield lines of the float64 recurrence, for each packed sequence in turn. states: also store the final states."""
    scale = s.K**op.scale_exponent if s.scale is None else s.scale
    if not op.formula:
        yield from _by_reference(op, s, scale)
        return
    formula, names = op.formula.format(scale=repr(scale)), ", ".join(short(op))
    if s.lengths is None:
        yield f"{names}, o = {', '.join(_initial(op, s) or ['0'] * len(op.states))}, []"
        yield "for t in range(T):"
        yield indent(formula, 4 * " ")
        return
    yield "o, last = [], []" if states else "o = []"
    yield "for n in range(len(ends) - 1):"
    shapes = [f"torch.zeros({_shape(op, name, s, N='1')}{on})" for name in op.states]
    yield f"    {names} = {', '.join([f'{y}[n : n + 1]' for y in _initial(op, s)] or shapes)}"
    yield "    for t in range(ends[n], ends[n + 1]):"
    yield indent(formula, 8 * " ")
    if states:
        yield f"    last.append({_together(short(op))})"


def _by_reference(op: Operator, s: Setting, scale: float) -> Iterator[str]:
    """Yield lines that compute o [B, T, H, V] and the states by calling `naive`, for each packed sequence in turn."""
    reference = op.reference
    options = {"scale": repr(scale), "output_final_state": "True" if op.states else None}
    if s.initial_state:
        options["initial_state"] = _together(
            _initial(op, s) if s.lengths is None else map("{}[n : n + 1]".format, _initial(op, s))
        )
    options |= {name: repr(x) for name, x in op.constants.items()}
    options = {name: x for name, x in options.items() if x is not None and (name in reference.named or reference.all)}
    by_name = set(op.tensors) <= reference.named
    part = "[:, part]" if s.lengths is not None else ""
    rows = [f"{name}{part if name in op.sequences else ''}" for name in op.tensors]
    arguments = [f"{name}={row}" if by_name else row for name, row in zip(op.tensors, rows, strict=True)]
    call = f"naive({', '.join([*arguments, *(f'{name}={x}' for name, x in options.items())])})"
    names = _together(short(op))
    read = {"tensor": "o = {}", "tuple": "o, " + (names or "*_") + " = {}"}.get(reference.style)
    if read is None:
        read = f"out = {{}}\no, {names} = out.o, out.final_state" if names else "o = {}.o"
    if s.lengths is None:
        yield from read.format(call).splitlines()
        return
    yield "outputs, last = [], []"
    yield "for n in range(len(ends) - 1):"
    yield "    part = slice(ends[n], ends[n + 1])"
    yield from indent(read.format(call), 4 * " ").splitlines()
    yield "    outputs.append(o)"
    if names:
        yield f"    last.append({names})"
    yield "o = torch.cat(outputs, 1)"


def _compared(subject: Subject, s: Setting, finding: Finding, check: Callable, device: str) -> Iterator[str]:
    """Yield lines that compare the failing output or gradient of the kernel with float64. check: of `checks`."""
    on = "" if device == "cpu" else f', device="{device}"'
    op, arguments = subject.op, _arguments(subject.op, s)
    inputs, name = [*op.tensors, *(op.states if s.initial_state else ())], finding.tensor
    is_output = finding.kind in ("wrong", "non-finite") and name in op.outputs
    if check is poisoned:
        yield "torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty holds NaN"
    if check is fenced:
        yield from _FENCES.splitlines()
    y = "y" if s.layout == "contiguous" else f"({LAYOUTS[s.layout]} if y.ndim > 2 else y)"
    y = f"fenced({y})" if check is fenced else y
    y = y if is_output or s.wanted is not None else f"{y}.requires_grad_()"
    if y != "y":
        yield f"{arguments} = ({y} for y in ({arguments}))"
    if s.wanted is not None and not is_output:
        asked = [leaf for leaf, name in zip(arguments.split(", "), inputs, strict=True) if name in s.wanted]
        yield f"for y in ({', '.join(asked)},):"
        yield "    y.requires_grad_()"
    if is_output:
        at = list(op.outputs).index(name)
        wanted: Sequence[int] = [at]
    else:
        at = inputs.index(name[1:]) if name[1:] in inputs else 0
        name, leaf = f"d{inputs[at]}", arguments.split(", ")[at]
        wanted = {"o": [0], "both": range(1 + len(op.states)), "state": range(1, 1 + len(op.states))}[s.loss]
        arriving = _together((["do", *(f"d{state}" for state in short(op))][n] for n in wanted), "[]")
        yield from _arriving(op, s, on)
    if check is memoised:
        yield "now = ends.clone()"
        yield f"ends.copy_(torch.tensor([0, {', '.join(map(str, (s.lengths or ())[::-1]))}]).cumsum(0))"
        yield _call(subject, s, _together(_initial(op, s)))
        yield "ends.copy_(now)"
    if s.cut is None:
        o, state = _OUTPUTS[subject.style]
        call = _call(subject, s, _together(_initial(op, s)))
        if s.slices is not None:
            rows = ", ".join(op.sequences)
            yield f"whole = {rows}"
            yield f"{rows} = (y[:, begin:end].contiguous() for y in whole)"
        if len(wanted) > 1 or s.again or s.slices is not None:
            yield f"out = {call}"
            call = "out"
        returned = [call + each.removeprefix("out") for each in _returned(op, s, o, state)]
        if s.slices is not None:
            yield f"{rows} = whole"
            returned[0] = f"torch.nn.functional.pad({returned[0]}, (0, 0, 0, 0, begin, T - end))"
    else:
        yield from _pieces(subject, s)
        returned = ["o", *(["state"] if len(op.states) == 1 else [f"state[{n}]" for n in range(len(op.states))])]
    got = _together((returned[n] for n in wanted), "[]")
    unused = ", allow_unused=True" if finding.kind == "no gradient" else ""
    if s.again and not is_output:
        yield f"torch.autograd.grad({got}, {leaf}, {arriving}, retain_graph=True)"
    yield f"got = {got}" if is_output else f"got = torch.autograd.grad({got}, {leaf}, {arriving}{unused})[0]"
    if finding.kind == "no gradient":
        yield f'assert got is not None, "{name} is None"'
        return
    if s.slices is not None:
        yield "dist.all_reduce(got)  # what one process has is the sum over ranks"
    exact = "y.double()" if is_output else "y.detach().double().requires_grad_()"
    yield f"{arguments} = ({exact} for y in ({arguments}))"
    yield from _right(op, s, states=max(wanted) > 0, on=on)
    last: Sequence[str] = short(op)
    if s.lengths is not None:
        last = (
            ["torch.cat(last)"] if len(last) == 1 else [f"torch.cat([y[{n}] for y in last])" for n in range(len(last))]
        )
    read = "torch.stack(o, 1)" if op.formula else "o"
    if s.padding:
        read = f"torch.nn.functional.pad({read}, (0, 0, 0, 0, 0, {s.padding}))"
    true = _together(([read, *last][n] for n in wanted), "[]")
    if not is_output:
        true = f"torch.autograd.grad({true}, {leaf}, {arriving}, materialize_grads=True)[0]"
    yield f"true = {true}"
    allowed = finding.allowed if finding.kind == "wrong" else 0.01
    rms = "true.square().mean().sqrt().clamp(min=1e-300)"
    yield f"off = ({_MEASURES[finding.measure]} / {rms}).item()"
    yield f'assert off <= {allowed:.2e}, f"{name} is off by {{off:.1e}}, allowed is {allowed:.1e}"'
    if check is fenced:
        yield 'assert all(y.isnan().all() for y in guards), "memory beyond a tensor was written to"'


def _arriving(op: Operator, s: Setting, on: str) -> Iterator[str]:
    """Yield lines that draw the gradients at o and the state, rounded to the dtype, since autograd does not round."""
    shape, options = _shape(op, "o", s), ("" if s.dtype == "float32" else f", dtype=torch.{s.dtype}") + on
    if s.loss != "state":
        if s.arriving == EXPANDED:
            yield f"do = torch.ones(1{options}).expand({shape})"
        else:
            yield f"{'y' if s.arriving in LAYOUTS else 'do'} = torch.randn({shape}{options})"
            if s.arriving in LAYOUTS:
                yield f"do = {LAYOUTS[s.arriving]}"
    for name, called in zip(op.states, short(op), strict=True) if s.loss != "o" else ():
        yield f"d{called} = torch.randn({_shape(op, name, s)}{on})"
        if s.states != "contiguous":
            yield f"d{called} = {_stored(op, name, f'd{called}', s)}"
    arrive = [*(["do"] if s.loss != "state" else []), *(f"d{x}" for x in (short(op) if s.loss != "o" else ()))]
    for name in arrive if s.cotangent != 1.0 else ():
        yield f"{name} *= {s.cotangent!r}"


def _pieces(subject: Subject, s: Setting) -> Iterator[str]:
    """Yield lines for `o` and `state` of two calls, of which the second starts from the first one's state."""
    op = subject.op
    o, state = _OUTPUTS[subject.style]
    rows = ", ".join(op.sequences)
    yield f"state, parts, whole = {_together(_initial(op, s)) or None}, [], ({rows})"
    yield f"for part in (slice({s.cut}), slice({s.cut}, None)):"
    yield f"    {rows} = (y[:, part].contiguous() for y in whole)"
    yield f"    out = {_call(subject, s, 'state')}"
    yield f"    state = out{state}"
    yield f"    parts.append(out{o})"
    yield f"{rows}, o = *whole, torch.cat(parts, 1)"


_MEASURES = {
    "L2": "(got - true).square().mean().sqrt()",
    "worst element": "(got - true).abs().max()",
    "worst row": "(got - true).square().mean(-1).sqrt().max()",
}
_FENCES = """\
guards = []

def fenced(y):
    memory = torch.full((y.numel() + 512,), float("nan"), dtype=y.dtype, device=y.device)
    memory[256 : 256 + y.numel()] = y.detach().flatten()
    guards.extend((memory[:256], memory[256 + y.numel() :]))
    return memory[256 : 256 + y.numel()].view(y.shape)

for owner, names in ((torch, ("empty", "empty_like", "zeros", "zeros_like")), (torch.Tensor, ("new_empty",))):
    for name in names:
        def guarded(*args, original=getattr(owner, name), **how):
            y = original(*args, **how)
            return fenced(y) if y.is_floating_point() and y.is_contiguous() and not y.requires_grad else y

        setattr(owner, name, guarded)
"""


def _causal(op: Operator, s: Setting) -> Iterator[str]:
    P = s.changed
    rows = ", ".join(repr(name) for name in op.sequences)
    yield f"names, later = {list(op.tensors)!r}, [y.clone() for y in given]"
    yield "for name, y in zip(names, later):"
    yield f"    if name in ({rows}):"
    yield f"        y[:, {P}:] *= 1.37 if name == {op.decay!r} else -1"
    yield "with torch.no_grad():"
    yield f"    first, second = (kernel(*x)[0][:, :{P}] for x in (given, later))"
    yield "change = (first - second).abs().max().item()"
    yield f'assert change == 0, f"outputs before token {P} change by {{change:.1e}} with what comes after"'


def _unchanged(op: Operator, s: Setting) -> Iterator[str]:
    names = [*op.tensors, *(op.states if s.initial_state else ())]
    yield "x = [y.clone().requires_grad_() for y in given]"
    yield "made = [y for y in kernel(*x) if y.requires_grad]"
    yield "if made:"
    yield "    torch.autograd.grad(made, x, [torch.ones_like(y) for y in made], allow_unused=True)"
    yield f"changed = [n for n, y, z in zip({names!r}, x, given) if not torch.equal(y.detach(), z)]"
    yield 'assert not changed, f"written to: {changed}"'


def _apart(op: Operator, s: Setting) -> Iterator[str]:
    yield "with torch.no_grad():"
    yield "    outs = kernel(*given)"
    yield "    shared = [y.untyped_storage().data_ptr() for y in given]"
    yield "    apart = all(y.untyped_storage().data_ptr() not in shared for y in outs)"
    yield '    assert apart, "an output lies in the memory of an input"'
    yield "    kept = [y.clone() for y in outs]"
    yield f"    kernel(*(-y if y is {op.value} else y for y in given))"
    yield "    same = all(torch.equal(y, z) for y, z in zip(outs, kept))"
    yield '    assert same, "an output is overwritten by the next call"'


def _repeatable(op: Operator, s: Setting) -> Iterator[str]:
    yield "def run():"
    yield "    x = [y.clone().requires_grad_() for y in given]"
    yield "    outs = kernel(*x)"
    yield "    made = [y for y in outs if y.requires_grad]"
    yield "    ones = [torch.ones_like(y) for y in made]"
    yield "    grads = torch.autograd.grad(made, x, ones, allow_unused=True) if made else []"
    yield "    return [*outs, *(y for y in grads if y is not None)]"
    yield ""
    yield "same = all(torch.equal(y.nan_to_num(), z.nan_to_num()) for y, z in zip(run(), run()))"
    yield 'assert same, "the same call gave other bits"'


def _permuted(op: Operator, s: Setting) -> Iterator[str]:
    names = [*op.tensors, *(op.states if s.initial_state else ())]
    into, out = ([heads_of(op, n)[0] for n in of] for of in (names, op.outputs[: None if s.final_state else 1]))
    yield f"into, out = {into}, {out}  # the axes of heads"
    yield "with torch.no_grad():"
    yield "    first, second = kernel(*given), kernel(*(y.roll(1, axis) for y, axis in zip(given, into)))"
    yield "moved = max((z.roll(-1, axis) - y).norm() / y.norm() for y, z, axis in zip(first, second, out)).item()"
    yield 'assert moved < 1e-6, f"results move by {moved:.1e} where heads change places"'


def _contained(op: Operator, s: Setting) -> Iterator[str]:
    yield "with torch.no_grad():"
    yield "    o = kernel(*given)[0]"
    yield "o[0, :, :1] = 0"
    yield 'assert o.isfinite().all(), "a non-finite token reached another sequence or head"'


_ALONE = {causal: _causal, unchanged: _unchanged, apart: _apart, repeatable: _repeatable, contained: _contained}
_ALONE |= {permuted: _permuted}
"""Checks that need no formula."""
