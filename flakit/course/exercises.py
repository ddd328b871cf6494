"""Exercises: checks that say where an answer is wrong, and questions that reveal their answer after a choice.

    check("one step of the state", my_step(S, k, v, w), step.state, hint="Which of the two terms decays?")

prints "right", or the index of the worst element with your value and the reference. For a single number it only says
whether yours is too high or too low, since the reference would give the answer away. Hints are folded, and appear only
after an attempt. An answer that is still `...`, or the None of a function without return, is not an error: the notebook
continues. Correct answers are recorded for `progress`.

    predict("How much is left after one token?", ["1%", "10%"], answer=lambda: measured())

shows a question and its choices. Each choice unfolds to say whether it is right, and why.

    o, S = returning(my_step, o="v", S="S")(S, r, k, v, w, u)

checks the results of a learner's function before they are used: when a check needs several of them, or passes them to
the next call. If one is missing, or has another type or shape than v or S, the cell ends with a sentence that says so.
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
    """The result of a check; true if the answer is right. It displays nothing in a notebook, since `check` prints its
    text."""

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
    hint: one, or several from the vaguest to the most explicit. In a notebook each unfolds below a wrong answer.
    tolerance: largest error of an element, relative to the reference's root mean square. Equal infinities are right.
    Raises ValueError for a reference with NaN.
    """
    hints = tuple(filter(None, (hint,) if isinstance(hint, str) else hint))
    _share("tolerance", tolerance)
    wrong = _difference(yours, reference, tolerance)
    text = "\n".join([record.WORDS["wrong" if wrong else "right"].format(name=name), *wrong])
    print(text)
    if not wrong:
        record.note(name)
    verdict = Verdict(not wrong, text, hints if wrong and not _is_empty(yours) else ())
    if verdict.hints and record.shell() is not None:
        page = "".join(_folded(WORDS["hint"], html.escape(each)) for each in hints)
        sys.modules["IPython"].display.display({"text/html": page, "text/plain": ""}, raw=True)
    return verdict


def predict(
    question: str, choices: Sequence | Mapping[str, object], *, answer, why: str = "", tolerance: float = 0.05
) -> "Prediction":
    """Return a question to answer before its result is shown; put it on the last line of a cell.

    choices: strings or numbers, or a mapping from labels to values: {"only du": {"du"}, "none": set()}.
    answer: the measured value, or a function without arguments that returns it. The right choice equals it, or, for a
    number, is within the relative `tolerance` of it. Raises ValueError unless exactly one choice is right.
    why: the reason, shown with the answer; "{answer}" in it becomes the measured value.

    The output needs neither kernel nor script: every choice unfolds by mouse, or with Tab and Enter."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question: expected words, got {shown(question)}")
    if not isinstance(why, str):
        raise TypeError(f"why: expected words, got {shown(why)}")
    if isinstance(choices, str) or not isinstance(choices, (Sequence, Mapping)):
        raise TypeError(f"choices: expected a list, or values by their words, got {shown(choices)}")
    values = dict(choices) if isinstance(choices, Mapping) else {_label(choice): choice for choice in choices}
    if len(values) < 2 or len(values) != len(choices):
        raise ValueError(f"choices: expected at least two, all different, got {shown(choices)}")
    _share("tolerance", tolerance)

    true = plain(answer() if callable(answer) else answer)
    right = [label for label, choice in values.items() if _same(plain(choice), true, tolerance)]
    if len(right) != 1:
        among = f"one of the choices {', '.join(values)}"
        raise ValueError(
            f"answer: expected {among}, got {shown(true)}, which is {'more than one' if right else 'none'}"
        )
    measured = number(true) if isinstance(true, Real) and not isinstance(true, bool) else right[0]
    return Prediction(question, tuple(values), right[0], measured, why.replace("{answer}", measured))


class Unfit(ValueError):
    """Raised for a learner's result that cannot be checked. A notebook shows only the message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def returning(function: Callable, *, dtype: torch.dtype | None = None, **parts) -> Callable:
    """Wrap a function so that its results are checked on return: it raises `Unfit` with the expected and actual result.

    parts: the results in order, each with its shape, or with the name of an argument of the same shape. () is a number.
    dtype: of all returned tensors; default: the common dtype of the floating-point arguments, and any for a number.
    A `...` is an unfinished answer: it is returned unchanged, once for each part. If an argument is `...`, the function
    is not called, and `...` is returned: a loop over steps stops at the first unfinished one."""

    @functools.wraps(function)
    def checked(*args, **named):
        results = ... if any(x is ... for x in (*args, *named.values())) else function(*args, **named)
        if results is ...:
            return results if len(parts) == 1 else (results,) * len(parts)
        if isinstance(results, (tuple, list)) and any(x is ... for x in results):
            return results
        arguments = inspect.signature(function).bind(*args, **named).arguments
        floats = {x.dtype for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()}
        wanted = dtype or (floats.pop() if len(floats) == 1 else None)
        shapes = {part: list(arguments[x].shape if isinstance(x, str) else x) for part, x in parts.items()}
        words = {part: WORDS.say("tensor" if x or dtype else "number", shape=x) for part, x in shapes.items()}
        several = isinstance(results, tuple) or isinstance(results, list) and len(parts) > 1  # one part may be a list
        values = results if several else (results,)
        if results is None or len(values) != len(parts):
            got = WORDS["no return"] if results is None else WORDS.say("values", min(len(values), 2), n=len(values))
            raise _unfit(function.__name__, got, ", ".join(parts) if len(parts) > 1 else next(iter(words.values())))
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
                raise _unfit(function.__name__, WORDS.say("holds", part=part, dtype=x.dtype), number(dtype or wanted))
        return results

    return checked


def fitting(name: str, value, shape: Sequence[int]) -> Tensor:
    """Return a value as a tensor of this shape, before it is used. Raises `Unfit` if it has another type or shape.

    name: the variable's name, for the message. A `...` is returned unchanged. For shape () a number fits."""
    if value is ...:
        return value
    x, shape = _numbers(value), list(shape)
    if x is None:
        got = WORDS.say("is", part=name, got=shown(value), type=type(value).__name__)
        raise _unfit(name, got, WORDS.say("tensor" if shape else "number", shape=shape))
    if list(x.shape) != shape:
        wanted = WORDS.say("shape wanted" if shape else "number", shape=shape)
        raise _unfit(name, WORDS.say("has shape", part=name, shape=list(x.shape)), wanted)
    return value if isinstance(value, Tensor) else x.float()


def _unfit(name: str, got: str, expected: str) -> Unfit:
    wrong = record.WORDS["wrong"].format(name=name)
    return Unfit("\n".join([wrong, _line("yours", got), _line("expected", expected)]))


@dataclass(frozen=True)
class Prediction:
    """A question with its choices, as `predict` returns it. `choose` returns the text that unfolds under a choice."""

    question: str
    choices: tuple[str, ...]
    _right: str = field(repr=False)
    _measured: str = field(repr=False)
    _why: str = field(repr=False)

    def choose(self, choice) -> str:
        """Return whether a choice is right, the measured value, and why. Raises ValueError for an unknown choice."""
        label = _label(choice)
        if label not in self.choices:
            raise ValueError(f"choice: expected one of {', '.join(self.choices)}, got {shown(choice)}")
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
            _folded(html.escape(label) + "<i></i>", html.escape(self.choose(label)), f'name="{group}"', record)
            for label in self.choices
        ]
        return (
            f'<div role="group" aria-label="{question}" style="max-width: 46em; line-height: 1.5">'
            f"<p><b>{WORDS['predict']}</b> {question}</p>{''.join(lines)}</div>"
        )


# If scripts may run, the first choice is marked, and stays marked when others are opened. All else works without them.
# It listens for the click, not for the toggle event, which comes later, and only once for quick changes.
_RECORD = (
    "const d = this.closest('[role=group]').dataset; "
    "if (!d.first) {d.first = 1; this.querySelector('i').textContent = 'CHOSEN'}"
)


def _folded(line: str, body: str, attributes: str = "", clicked: str = "") -> str:
    """Return HTML in which `line` unfolds `body` without a kernel or script. clicked: a script to run on a click."""
    onclick = f' onclick="{clicked}"' if clicked else ""
    return (
        f'<details {attributes}><summary style="cursor: pointer"{onclick}>{line}</summary>'
        f'<p style="margin: 0.2em 0 0.6em 1.2em">{body}</p></details>'
    )


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
    return yours is None or yours is ...


def _difference(yours, reference, tolerance: float) -> list[str]:
    """Return lines on how an answer differs, [] if it is right. Raise ValueError for NaN in the reference."""
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
        template = WORDS["too high"] if got > true else WORDS["too low"] if got < true else "{yours}"
        return [_line("yours", template.format(yours=number(got.item(), 6)))]
    values = {"yours": (yours, got), "reference": (reference, true)}
    where = _line("at", WORDS["worst"].format(index=list(at), count=true.numel()))
    return [where, *(_line(name, _value(original, x[at].item())) for name, (original, x) in values.items())]


def _value(original, x: float) -> str:
    """Format a number x of an answer, as True or False if the answer holds booleans."""
    return str(bool(x)) if torch.as_tensor(original).dtype == torch.bool else number(x, 6)


def _numbers(x) -> Tensor | None:
    """Return x as a float64 tensor; None for booleans, strings and whatever does not consist of numbers."""
    if isinstance(x, (bool, str)):
        return None
    try:
        return torch.as_tensor(x, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        return None


def _line(label: str, text: str) -> str:
    return f"  {padded(WORDS[label], 11)}{text}"
