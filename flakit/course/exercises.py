"""What a lesson asks: checks that say where an answer is wrong, and questions whose answer shows after choosing.

    check("one step of the state", my_step(S, k, v, w), step.state, hint="Which of the two terms decays?")

prints "right", or the worst index with yours and the reference; of a single number, whether yours is too high or too
low, since the number itself would be the answer. Hints are folded, and there are none before an attempt.
An answer that is still the `...`, or the None of a function without return, is no error: the notebook goes on. What was
right is written down for `progress`.

    predict("How much is left after one token?", ["1%", "10%"], answer=lambda: measured())

shows the question and its choices; whether one is right, and why, unfolds under it when it is chosen.

    o, S = returning(my_step, o="v", S="S")(S, r, k, v, w, u)

calls a function of which a check needs more than one value, or calls it again with what it has returned: where that has
another shape than v and S have, is of another type or is not there at all, the cell ends with a sentence that says so.
"""

import functools
import hashlib
import html
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from ..language import Words
from ..numerics.arguments import plain, shown
from ..numerics.errors import compare
from ..numerics.words import number, padded
from . import record

_EMPTY = (None, ...)

WORDS = Words() | {
    "hint": "hint",
    "yours": "yours",
    "reference": "reference",
    "at": "at",
    "nothing": "nothing so far: put your answer where the ... is and run the cell again",
    "no return": "None: does your function end with return?",
    "no numbers": "{yours}, a {type}; expected numbers",
    "expected": "expected",
    "has shape": "{part} has the shape {shape}",
    "as": "the shape {shape}, that of the argument {other}",
    "shape wanted": "the shape {shape}",
    "holds": "{part} holds {dtype}",
    "is": "{part} is {got}, a {type}",
    "tensor": "a tensor of shape {shape}",
    "number": "a number",
    "values": {1: "one value", 2: "{n} values"},
    "shape": "shape {shape}",
    "too high": "{yours}, too high",
    "too low": "{yours}, too low",
    "worst": "{index}, the worst of {count} values",
    "predict": "Predict.",
    "Right": "Right.",
    "No": "No: {right}.",
    "measured": "Measured: {measured}.",
    "chosen": " (your choice)",
}


@dataclass(frozen=True)
class Verdict:
    """What a check found: true where the answer is right. Printed by then, so a notebook does not show it again."""

    right: bool
    text: str = field(repr=False)
    hints: tuple[str, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return self.right

    def _ipython_display_(self) -> None:
        pass


def check(name: str, yours, reference, hint: str | Sequence[str] = (), *, tolerance: float = 1e-5) -> Verdict:
    """Compare an answer with its reference, print the verdict and return it.

    yours, reference: tensors, arrays, numbers or nested lists of numbers of one shape; anything else is compared by ==.
    hint: one, or several from the faintest to the plainest. In a notebook each unfolds below a wrong answer.
    tolerance: how far an element may be off, relative to the reference's root mean square. The same infinity is right;
    a reference must not hold NaN.
    """
    hints = tuple(filter(None, (hint,) if isinstance(hint, str) else hint))
    _share("tolerance", tolerance)
    wrong = _difference(yours, reference, tolerance)
    text = "\n".join([record.WORDS["wrong" if wrong else "right"].format(name=name), *wrong])
    print(text)
    if not wrong:
        record.note(name)
    verdict = Verdict(not wrong, text, hints if wrong and not _is_empty(yours) else ())
    if verdict.hints:
        _display("".join(_folded(WORDS["hint"], html.escape(each)) for each in hints))
    return verdict


def predict(
    question: str, choices: Sequence | Mapping[str, object], *, answer, why: str = "", tolerance: float = 0.05
) -> "Prediction":
    """A question to be answered before the result is seen; show it as the last line of a cell.

    choices: strings or numbers, or what they mean by what they say: {"only du": {"du"}, "none": set()}.
    answer: what is true, measured: a value, or a function without arguments that returns it. It is the choice that it
    equals, or, where it is a number, the one it is within `tolerance` of (relative). Anything else is a ValueError:
    then the question is wrong.
    why: the reason, shown with the answer; "{answer}" in it becomes the measured value.

    What it shows needs no kernel and no script: every choice is a line that unfolds, by mouse or with Tab and Enter.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question: expected words, got {shown(question)}")
    if not isinstance(why, str):
        raise TypeError(f"why: expected words, got {shown(why)}")
    if isinstance(choices, str) or not isinstance(choices, (Sequence, Mapping)):
        raise TypeError(f"choices: expected a list, or values by their words, got {shown(choices)}")
    meant = dict(choices) if isinstance(choices, Mapping) else {_label(choice): choice for choice in choices}
    if len(meant) < 2 or len(meant) != len(choices):
        raise ValueError(f"choices: expected at least two, all different, got {shown(choices)}")
    _share("tolerance", tolerance)

    true = plain(answer() if callable(answer) else answer)
    right = [label for label, choice in meant.items() if _same(plain(choice), true, tolerance)]
    if len(right) != 1:
        among = f"one of the choices {', '.join(meant)}"
        raise ValueError(
            f"answer: expected {among}, got {shown(true)}, which is {'more than one' if right else 'none'}"
        )
    measured = number(true) if isinstance(true, Real) and not isinstance(true, bool) else right[0]
    return Prediction(question, tuple(meant), right[0], measured, why.replace("{answer}", measured))


class Unfit(ValueError):
    """What a function returned cannot be checked. A notebook shows these words alone, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def returning(function: Callable, *, dtype: torch.dtype | None = None, **parts) -> Callable:
    """The function, whose every result is looked at before it is used; an `Unfit` says what was expected and what came.

    parts: what it returns, in this order: the shape of each, or the name of the argument that it is shaped like. A
    shape without axes is that of a number.
    dtype: of all tensors returned; default: that of the function's floating-point arguments, where they have one, and
    any for a number.
    A `...` is an answer that is still open, and comes back as it is, once for each part. It does so, too, where it is
    among the arguments: of a step that returns it for the state, the next one is not asked.
    """

    @functools.wraps(function)
    def asked(*given, **named):
        found = ... if any(x is ... for x in (*given, *named.values())) else function(*given, **named)
        if found is ...:
            return found if len(parts) == 1 else (found,) * len(parts)
        if isinstance(found, (tuple, list)) and any(x is ... for x in found):
            return found
        arguments = inspect.signature(function).bind(*given, **named).arguments
        floats = {x.dtype for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()}
        wanted = dtype or (floats.pop() if len(floats) == 1 else None)
        shapes = {part: list(arguments[x].shape if isinstance(x, str) else x) for part, x in parts.items()}
        words = {part: WORDS.say("tensor" if x or dtype else "number", shape=x) for part, x in shapes.items()}
        several = isinstance(found, tuple) or isinstance(found, list) and len(parts) > 1  # one part may be a list
        values = found if several else (found,)
        if found is None or len(values) != len(parts):
            said = WORDS["no return"] if found is None else WORDS.say("values", min(len(values), 2), n=len(values))
            raise _unfit(function.__name__, said, ", ".join(parts) if len(parts) > 1 else next(iter(words.values())))
        for (part, like), x in zip(parts.items(), values, strict=True):
            shape = shapes[part]
            if not isinstance(x, Tensor):
                if shape or dtype or isinstance(x, bool) or not isinstance(x, Real):
                    raise _unfit(
                        function.__name__, WORDS.say("is", part=part, got=shown(x), type=type(x).__name__), words[part]
                    )
            elif list(x.shape) != shape:
                right = WORDS.say("as" if isinstance(like, str) else "shape wanted", shape=shape, other=like)
                right = right if shape else words[part]
                raise _unfit(function.__name__, WORDS.say("has shape", part=part, shape=list(x.shape)), right)
            elif x.dtype != (wanted if shape else dtype) is not None:
                raise _unfit(
                    function.__name__, WORDS.say("holds", part=part, dtype=_type(x.dtype)), _type(dtype or wanted)
                )
        return found

    return asked


def fitting(name: str, value, shape: Sequence[int]) -> Tensor:
    """An answer that is no function, as a tensor of this shape, before anything is computed with it; else an `Unfit`.

    name: of the variable that holds it. A `...` comes back as it is, and of a shape without axes a number will do.
    """
    if value is ...:
        return value
    x, shape = _numbers(value), list(shape)
    if x is None:
        said = WORDS.say("is", part=name, got=shown(value), type=type(value).__name__)
        raise _unfit(name, said, WORDS.say("tensor" if shape else "number", shape=shape))
    if list(x.shape) != shape:
        wanted = WORDS.say("shape wanted" if shape else "number", shape=shape)
        raise _unfit(name, WORDS.say("has shape", part=name, shape=list(x.shape)), wanted)
    return value if isinstance(value, Tensor) else x.float()


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unfit(name: str, got: str, expected: str) -> Unfit:
    wrong = record.WORDS["wrong"].format(name=name)
    return Unfit("\n".join([wrong, _line("yours", got), _line("expected", expected)]))


@dataclass
class Prediction:
    """A question with its choices. `choose` tells what unfolds under one; `chosen` is the first that was chosen so."""

    question: str
    choices: tuple[str, ...]
    _right: str = field(repr=False)
    _measured: str = field(repr=False)
    _why: str = field(repr=False)
    chosen: str | None = None

    def choose(self, choice) -> str:
        """Whether this choice is right, what was measured, and why."""
        label = _label(choice)
        if label not in self.choices:
            raise ValueError(f"choice: expected one of {', '.join(self.choices)}, got {shown(choice)}")
        self.chosen = self.chosen or label
        return self._said(label)

    def _said(self, label: str) -> str:
        verdict = WORDS["Right"] if label == self._right else WORDS["No"].format(right=self._right)
        measured = "" if self._measured == self._right else WORDS["measured"].format(measured=self._measured)
        return " ".join(part for part in (verdict, measured, self._why) if part)

    def __repr__(self) -> str:
        return "\n".join([self.question, *(f"  - {choice}" for choice in self.choices)])

    def _repr_html_(self) -> str:
        question = html.escape(self.question)
        group = "predict-" + hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        record = _RECORD.replace("CHOSEN", WORDS["chosen"])
        lines = [
            _folded(html.escape(label) + "<i></i>", html.escape(self._said(label)), f'name="{group}"', record)
            for label in self.choices
        ]
        return (
            f'<div role="group" aria-label="{question}" style="max-width: 46em; line-height: 1.5">'
            f"<p><b>{WORDS['predict']}</b> {question}</p>{''.join(lines)}</div>"
        )


# Where scripts may run, the first choice is marked and stays so when others are looked at; without, all else works.
# The click is what is recorded, not the toggle, which comes later and only once for an opening that closed again.
_RECORD = (
    "const d = this.closest('[role=group]').dataset; "
    "if (!d.first) {d.first = 1; this.querySelector('i').textContent = 'CHOSEN'}"
)


def _folded(line: str, body: str, attributes: str = "", clicked: str = "") -> str:
    """HTML that unfolds in any page, without a kernel and without a script."""
    onclick = f' onclick="{clicked}"' if clicked else ""
    return (
        f'<details {attributes}><summary style="cursor: pointer"{onclick}>{line}</summary>'
        f'<p style="margin: 0.2em 0 0.6em 1.2em">{body}</p></details>'
    )


def _display(page: str) -> None:
    """Show HTML where there is a notebook to show it in."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        sys.modules["IPython"].display.display({"text/html": page, "text/plain": ""}, raw=True)


def _label(choice) -> str:
    return choice if isinstance(choice, str) else number(plain(choice))


def _same(choice, true, tolerance: float) -> bool:
    if all(isinstance(x, Real) and not isinstance(x, bool) for x in (choice, true)):
        return math.isclose(choice, true, rel_tol=tolerance)
    return type(choice) is type(true) and choice == true


def _share(name: str, x) -> None:
    if isinstance(x, bool) or not isinstance(x, Real) or not 0 <= x < math.inf:
        raise ValueError(f"{name}: expected a number of at least 0, got {shown(x)}")


def _is_empty(yours) -> bool:
    return any(yours is empty for empty in _EMPTY)


def _difference(yours, reference, tolerance: float) -> list[str]:
    """What is wrong, in lines; none if nothing is."""
    if _is_empty(yours):
        return [_line("yours", WORDS["no return" if yours is None else "nothing"])]
    true = _numbers(reference)
    if true is None:
        return [] if yours == reference else [_line("yours", repr(yours))]
    if true.isnan().any():
        raise ValueError("reference: expected numbers to compare with, got NaN among them")
    got = _numbers(yours)
    if got is None:
        return [_line("yours", WORDS["no numbers"].format(yours=shown(yours), type=type(yours).__name__))]
    if got.shape != true.shape:
        shapes = {"yours": got.shape, "reference": true.shape}
        return [_line(name, WORDS["shape"].format(shape=list(shape))) for name, shape in shapes.items()]

    errors = compare(got, true)
    if errors.worst <= tolerance:
        return []
    at = errors.worst_index
    if not at:
        said = WORDS["too high"] if got > true else WORDS["too low"] if got < true else "{yours}"
        return [_line("yours", said.format(yours=number(got.item(), 6)))]
    values = {"yours": (yours, got), "reference": (reference, true)}
    where = _line("at", WORDS["worst"].format(index=list(at), count=true.numel()))
    return [where, *(_line(name, _value(given, x[at].item())) for name, (given, x) in values.items())]


def _value(given, x: float) -> str:
    """A number as it is told; of an answer that holds truths, True or False."""
    return str(bool(x)) if torch.as_tensor(given).dtype == torch.bool else number(x, 6)


def _numbers(x) -> Tensor | None:
    """x as a float64 tensor, None where it holds anything but numbers."""
    if isinstance(x, (bool, str)):
        return None
    try:
        return torch.as_tensor(x, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        return None


def _line(what: str, says: str) -> str:
    return f"  {padded(WORDS[what], 11)}{says}"
