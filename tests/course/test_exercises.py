"""Right and wrong told apart, hints only after an attempt; questions that tell their answer only after a choice."""

import html.parser
import math
import re

import IPython
import IPython.display
import numpy as np
import pytest
import torch

from flakit.course import check, fitting, predict, returning

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("yours", "reference"),
    [
        (X.clone().requires_grad_(), X),
        (X.numpy() * (1 + 1e-7), X),
        (X.double().tolist(), X),
        (7, 7.0),
        (-math.inf, -math.inf),
        (torch.tensor([0.0, math.inf]), [0.0, math.inf]),
        (0.1, 0.1),
        (np.float64(0.25), torch.tensor(0.25)),
        (torch.zeros(3), torch.zeros(3)),
        (True, True),
        ("dw", "dw"),
        ({"r", "k"}, {"k", "r"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_right(yours, reference, capsys):
    verdict = check("name", yours, reference, "unused")
    assert verdict and capsys.readouterr().out == "name: right\n" == verdict.text + "\n"


def test_wrong_names_the_worst_place(capsys):
    yours = X.clone()
    yours[0, 1] += 0.1
    yours[1, 2] = 9
    assert not check("scores", yours, X, "look at the mask")
    assert capsys.readouterr().out.splitlines() == [
        "scores: not yet",
        "  at         [1, 2], the worst of 6 values",
        "  yours      9",
        "  reference  5",
    ]


@pytest.mark.parametrize(
    ("yours", "reference", "says"),
    [
        (None, X, "None: does your function end with return?"),
        (..., 1.0, "nothing so far"),
        (..., "dw", "nothing so far"),
        (X.T, X, "shape [3, 2]"),
        (X[0], X, "shape [3]"),
        (X + math.nan, X, "[0, 0]"),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), "[1]"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf]), "[1]"),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "[0]"),
        (1e-6 * torch.ones(3), torch.zeros(3), "[0]"),
        (8, 7.0, "yours      8"),
        (0.1001, 0.1, "yours      0.1001"),
        ("fast", 7.0, "'fast', a str; expected numbers"),
        (True, 1, "True, a bool; expected numbers"),
        ({"r"}, {"k", "r"}, "{'r'}"),
    ],
)
def test_wrong(yours, reference, says, capsys):
    verdict = check("name", yours, reference, "the hint")
    said = capsys.readouterr().out
    assert not verdict
    assert said.startswith("name: not yet\n") and says in said and "the hint" not in said
    attempted = yours is not None and yours is not ...
    assert verdict.hints == (("the hint",) if attempted else ())


@pytest.mark.parametrize(
    ("yours", "reference", "says"),
    [
        (60, 64.0, "60, too low"),
        (-1.3, -1.375, "-1.3, too high"),
        (math.inf, 64, "inf, too high"),
        (math.nan, 64, "NaN"),
        (False, True, "False"),
        ("du", "dw", "'du'"),
    ],
)
def test_a_wrong_answer_does_not_unfold_the_right_one(yours, reference, says, capsys):
    assert not check("name", yours, reference)
    assert capsys.readouterr().out.splitlines() == ["name: not yet", f"  yours      {says}"]


def test_tolerance_is_relative_to_the_size_of_the_reference():
    assert check("small", 1e-12 * X * (1 + 1e-7), 1e-12 * X)
    assert not check("small", 1e-12 * X * (1 + 1e-3), 1e-12 * X)
    assert check("coarse", X * (1 + 1e-3), X, tolerance=1e-2)


def test_of_yes_and_no_a_check_says_which(capsys):
    assert not check("lost", [False, True, False], torch.tensor([False, False, False]))
    assert capsys.readouterr().out.splitlines()[2:] == ["  yours      True", "  reference  False"]


def test_a_reference_with_nan_cannot_be_checked_against():
    with pytest.raises(ValueError, match="reference: expected numbers to compare with, got NaN"):
        check("name", X, X + math.nan)


def test_a_notebook_does_not_show_a_verdict_twice(capsys):
    verdict = check("name", 1, 1)
    capsys.readouterr()
    verdict._ipython_display_()
    assert capsys.readouterr().out == ""


S, V = torch.zeros(4, 6), torch.zeros(6)


@pytest.mark.parametrize(
    ("returned", "got", "expected"),
    [
        (None, "None: does your function end with return?", "o, S"),
        (V, "one value", "o, S"),
        ((V, S, S), "3 values", "o, S"),
        ((S, S), "o has the shape [4, 6]", "the shape [6], that of the argument v"),
        ((V, S.T), "S has the shape [6, 4]", "the shape [4, 6]"),
        ((V, S.long()), "S holds int64", "float32"),
        ((V, S.double()), "S holds float64", "float32"),
        ((V, 3.0), "S is 3.0, a float", "a tensor of shape [4, 6]"),
        ((V, None), "S is None, a NoneType", "a tensor of shape [4, 6]"),
    ],
)
def test_what_is_returned_is_told_in_a_sentence_where_it_cannot_be_used(returned, got, expected):
    def step(S, v):
        return returned

    with pytest.raises(ValueError) as error:
        returning(step, o="v", S=[4, 6])(S, V)
    lines = ["step: not yet", f"  yours      {got}", f"  expected   {expected}"]
    assert str(error.value).splitlines() == lines
    assert error.value._render_traceback_() == lines, "a notebook shows this alone"


def test_what_is_right_or_still_open_is_returned_as_it_is():
    ask = returning(lambda S, v: (2 * v, S), o="v", S="S")
    o, state = ask(S, v=V)
    assert torch.equal(o, V) and state is S
    assert returning(lambda: [..., V], o=[6], S=[6])() == [..., V]
    assert returning(lambda: ..., o=[6])() is ... and returning(lambda: ..., o=[6], S=[6])() == (..., ...)
    assert ask(..., V) == (..., ...), "a step whose state is still open is not asked again"
    assert returning(lambda: 0.5, share=[])() == 0.5 and returning(lambda: torch.tensor(2), n=[])() == 2
    assert torch.equal(returning(lambda x: x.bfloat16(), dtype=torch.bfloat16, y="x")(V), V.bfloat16())
    with pytest.raises(ValueError, match="function end with return.*\n  expected   a tensor of shape .6.$"):
        returning(lambda: None, o=[6])()
    with pytest.raises(ValueError, match="2 values\n  expected   a tensor of shape .6.$"):
        returning(lambda: S.max(0), growth=[6])()  # the values, and where they are
    for number in (True, "half", torch.ones(1)):
        with pytest.raises(ValueError, match="a number"):
            returning(lambda number=number: number, share=[])()
    with pytest.raises(ValueError, match="a tensor of shape \\[\\]"):
        returning(lambda: 0.5, dtype=torch.float32, loss=[])()


@pytest.mark.parametrize(
    ("value", "got", "expected"),
    [
        (None, "a is None, a NoneType", "a tensor of shape [3]"),
        ("b", "a is 'b', a str", "a tensor of shape [3]"),
        ([1, 0], "a has the shape [2]", "the shape [3]"),
    ],
)
def test_a_value_that_does_not_fit_is_told_in_a_sentence(value, got, expected):
    with pytest.raises(ValueError) as error:
        fitting("a", value, [3])
    assert str(error.value).splitlines() == ["a: not yet", f"  yours      {got}", f"  expected   {expected}"]


def test_a_value_that_fits_is_a_tensor():
    made = fitting("a", [1, 0, 2], [3])
    assert torch.equal(made, torch.tensor([1.0, 0, 2])) and made.dtype == torch.float32
    assert fitting("S", S, S.shape) is S and fitting("a", ..., [3]) is ... and fitting("x", 2, []) == 2
    with pytest.raises(ValueError, match="x has the shape .2.\n.*a number"):
        fitting("x", [1, 2], [])


class Page(html.parser.HTMLParser):
    """What a browser makes of HTML: the text that shows at once, and what each line unfolds."""

    def __init__(self, source):
        super().__init__()
        self.visible, self.folded, self._open, self.tags = "", {}, [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "summary":
            self._line = ""

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "summary":
            self.folded[self._line] = ""

    def handle_data(self, data):
        if "summary" in self._open:
            self._line += data
        elif "details" in self._open:
            self.folded[self._line] += data
        else:
            self.visible += data


@pytest.fixture
def displayed(monkeypatch):
    """The HTML that a notebook would have shown."""
    shown = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data["text/html"]))
    return shown


def test_hints_are_folded_one_by_one_and_escaped(displayed):
    check("name", 1.0, 2.0, ["a < b", "c"])
    (page,) = map(Page, displayed)
    assert (page.visible, page.folded) == ("", {"hint": "c"}) and "a &lt; b" in displayed[0]
    assert [attrs for tag, attrs in page.tags if tag == "details"] == [{}, {}], "no hint is open"


@pytest.mark.parametrize("yours", [..., None, 2.0], ids=["empty", "None", "right"])
def test_no_hint_without_a_wrong_attempt(yours, displayed):
    assert check("name", yours, 2.0, "the hint").hints == ()
    assert displayed == []


def test_the_answer_of_a_question_unfolds_under_each_choice():
    asked = predict(
        "How much is left & where?", [0.5, 0.0067], answer=lambda: math.exp(-5), why="Because e^-5 = {answer}."
    )
    page = Page(asked._repr_html_())
    assert page.visible == "Predict. How much is left & where?"
    assert page.folded == {
        "0.5": "No: 0.0067. Measured: 0.006738. Because e^-5 = 0.006738.",
        "0.0067": "Right. Measured: 0.006738. Because e^-5 = 0.006738.",
    }
    folds = [attrs for tag, attrs in page.tags if tag == "details"]
    assert all("open" not in attrs for attrs in folds) and len({attrs["name"] for attrs in folds}) == 1
    assert not {tag for tag, _ in page.tags} & {"script", "style", "input"}, (
        "a page that strips them must show the same"
    )


def test_a_question_tells_nothing_before_a_choice():
    asked = predict("Which?", {"only du": {"du"}, "none": set()}, answer=lambda: {"du"}, why="secret")
    assert repr(asked) == "Which?\n  - only du\n  - none"
    assert asked.choose("none") == "No: only du. secret"
    assert asked.choose("only du") == "Right. secret"


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        ([1, 5, 50], 1, "1"),
        ([1, 5, 50], torch.tensor(5.1), "5"),
        (["state", "pairs"], "pairs", "pairs"),
        ([True, False], np.bool_(False), "no"),
        ({"never": math.inf, "at 88": 88.0}, math.inf, "never"),
    ],
)
def test_the_choice_that_the_answer_is(choices, answer, right):
    asked = predict("Which?", choices, answer=answer)
    assert [choice for choice in asked.choices if asked.choose(choice).startswith("Right.")] == [right]


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"answer": 7}, ValueError, "answer: expected one of the choices 1, 5, got 7, which is none"),
        ({"answer": "1"}, ValueError, "answer: expected one of the choices 1, 5, got '1'"),
        ({"answer": True}, ValueError, "answer: expected one of the choices 1, 5, got True"),
        ({"answer": math.nan}, ValueError, "got nan, which is none"),
        ({"choices": [1, 1.01]}, ValueError, "got 1, which is more than one"),
        ({"choices": [1]}, ValueError, "choices: expected at least two, all different, got"),
        ({"choices": ["a", "a"]}, ValueError, "choices: expected at least two, all different, got"),
        ({"choices": "ab"}, TypeError, "choices: expected a list, or values by their words, got 'ab'"),
        ({"question": " "}, ValueError, "question: expected words, got ' '"),
        ({"why": 3}, TypeError, "why: expected words, got 3"),
        ({"tolerance": -1}, ValueError, "tolerance: expected a number of at least 0, got -1"),
    ],
)
def test_bad_questions(changed, error, says):
    with pytest.raises(error, match=re.escape(says)):
        predict(**{"question": "Which?", "choices": [1, 5], "answer": 1} | changed)


def test_a_bad_choice_names_the_good_ones():
    with pytest.raises(ValueError, match="choice: expected one of 1, 5, got 2"):
        predict("Which?", [1, 5], answer=1).choose(2)
