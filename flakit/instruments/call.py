"""One forward and backward call of a subject on prepared arguments; `Runner` and the processes of a group use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics.evaluate import Arriving
from .setting import Setting
from .subject import BackwardBroken, Broken, Refused, Subject, words_of


@dataclass
class Ran:
    """The result of a run. values: outputs and gradients by name ("o", "dk"), None for a missing gradient.

    cut_off: outputs in the loss that do not require a gradient. missing_state: a requested final state is missing.
    """

    values: dict[str, Tensor | None]
    cut_off: tuple[str, ...] = ()
    missing_state: bool = False


def forward_backward(
    subject: Subject, setting: Setting, x: Mapping, arriving: Arriving, *, backward: bool = True
) -> Ran:
    """Call the subject with arguments x by the operator's names, then run its backward pass if `backward`.

    arriving: the gradients at o and the final state. Raises Refused if the subject does not take the arguments, Broken
    if it crashes or an output has a wrong shape or type, BackwardBroken if its backward pass raises an error.
    """
    op = subject.op
    wanted = [name for name in op.leaves(x) if setting.wanted is None or name in setting.wanted]
    if setting.no_decay:
        wanted = [name for name in wanted if name != op.decay]
    leaves = {name: y.detach().requires_grad_(backward and name in wanted) for name, y in op.leaves(x).items()}
    arguments = op.arguments(leaves, x) | ({op.decay: None} if setting.no_decay else {})
    with torch.set_grad_enabled(backward):
        o, parts = _forward(subject, setting, arguments)
    outputs = {"o": o} | (dict(zip(op.outputs[1:], parts, strict=False)) if setting.final_state else {})
    shapes = op.size(leaves, x.get("cu_seqlens"))
    for name, y in outputs.items():
        expected = [shapes[axis] for axis in op.axes[name].split()]
        if list(y.shape) != expected:
            turned = name != "o" and list(y.mT.shape) == expected
            words = ", transposed: its rows belong to the last axis, and its columns to the one before"
            raise Broken(f"{name}: expected {expected}, got {list(y.shape)}{words if turned else ''}")
        if not y.is_floating_point():
            raise Broken(f"{name}: expected floating-point numbers, got {y.dtype}")
    ran = Ran({name: y.detach() for name, y in outputs.items()})
    ran.missing_state = setting.final_state and not parts
    if backward:
        _gradients(subject, setting, ran, outputs, {name: leaves[name] for name in wanted}, arriving)
    return ran


def _forward(subject: Subject, setting: Setting, arguments: dict) -> tuple[Tensor, tuple[Tensor, ...]]:
    if setting.cut is None:
        return subject(arguments)
    pieces, state, rows = [], arguments.get("initial_state"), subject.op.sequences
    for part in (slice(0, setting.cut), slice(setting.cut, None)):
        piece = arguments | {name: arguments[name][:, part].contiguous() for name in rows}
        o, parts = subject(piece | {"initial_state": state, "output_final_state": True})
        if not parts:
            raise Refused("it returns no final state")
        state = subject.op.state(parts)
        pieces.append(o)
    return torch.cat(pieces, 1), parts


def _gradients(subject: Subject, setting: Setting, ran: Ran, outputs: dict, leaves: dict, arriving: Arriving) -> None:
    op, (do, dstate) = subject.op, arriving
    into = dict(zip(op.outputs, (do, *op.parts(dstate)), strict=True))
    wanted = {"o": ["o"], "both": list(outputs), "state": list(outputs)[1:]}[setting.loss]
    ran.cut_off = tuple(name for name in wanted if not outputs[name].requires_grad)
    able = [name for name in wanted if outputs[name].requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if able:
        roots, inputs = [outputs[name] for name in able], list(leaves.values())
        arrive = [into[name].to(outputs[name].dtype) for name in able]
        try:
            for last in (False, True) if setting.again else (True,):
                grads = torch.autograd.grad(roots, inputs, arrive, retain_graph=not last, allow_unused=True)
        except NotImplementedError as error:
            raise Refused(words_of(error)) from error
        except (Exception, SystemExit) as error:
            raise BackwardBroken(f"its backward pass raised {words_of(error)}") from error
    ran.values |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
