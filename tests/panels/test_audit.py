"""The panel of an audit: it fills while it runs, stops when it is told to, and shows which elements are wrong."""

import re
import threading
from importlib import import_module

import pytest
import torch
from matplotlib.text import Text

import flakit
from flakit import chunk_rwkv6
from flakit.figures.canvas import Cell
from flakit.instruments.audit import elements
from flakit.instruments.probes import PROBES
from flakit.panels import audit
from flakit.panels.base import NARROW, WIDE
from tests.figures.words import assert_legible
from tests.instruments.kernels import WRONG, inclusive, naive

MODULE = import_module("flakit.panels.audit")
FEW = ("truth", "repeat", "rectangles")


@pytest.fixture(scope="module")
def wrong():
    """An audit of a kernel that is wrong in one element of one token, over."""
    panel = audit(WRONG["bonus dropped on one token"][1], "rwkv6", only=FEW)
    panel.run.wait(120)
    return panel


def test_the_table_fills_and_ends_as_the_audit_does(wrong):
    kernel = WRONG["bonus dropped on one token"][1]
    expected = flakit.audit(kernel, "rwkv6", only=FEW)
    assert {v.probe.name: v.verdict for v in wrong.audit.verdicts} == {
        v.probe.name: v.verdict for v in expected.verdicts
    }
    assert wrong.run.status.value.startswith("done")
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", wrong.table.value)
    assert len(rows) == len(FEW) and rows[0][1] == "✗ fail", "failures come first"
    assert f"{len(expected.failed)} failed" in wrong.text


def test_elements_of_the_smallest_setting_are_marked(wrong):
    """The kernel leaves the bonus out at token 29: nothing else is wrong."""
    verdict, found = wrong.result
    assert wrong.setting["failure"] == "truth" and verdict.setting["T"] == found.got.shape[1] == 30
    assert set(found.wrong.nonzero()[1]) == {29} and found.count == found.wrong.sum()
    assert f"truth: {found.count} of {found.total} elements of {found.tensor} are wrong at T = 30" in wrong.text
    panel = wrong.picture
    panel.pick(Cell("off", 0, 29))
    assert panel.strip.startswith(f"{found.tensor}, sequence 0, head 0, ") and panel.strip.endswith(", wrong")
    panel.pick(Cell("true", 0, 3))
    assert panel.strip.endswith("which rounding explains")
    for width in (WIDE, NARROW):
        wrong.width = width
        wrong.redraw()
        assert_legible(wrong.canvas)
        assert wrong.canvas.pixels == (round(100 * width), 295)
        assert wrong.canvas.figure.legends[0].get_visible()


def test_the_script_shows_the_failure(wrong):
    assert wrong.as_python() == wrong.audit["truth"].repro and "import torch" in wrong.as_python()
    assert "“copy as Python”" in wrong.text


def test_a_right_kernel_has_nothing_to_show():
    panel = audit(chunk_rwkv6, only=FEW)
    panel.run.wait(120)
    assert panel.audit.passed and panel.text.startswith("3 of 3 probes passed, 0 failed")
    assert "no probe failed" in [text.get_text() for text in panel.canvas.figure.findobj(Text)]
    script = panel.as_python()
    assert "as function" in script and "only=['truth', 'repeat', 'rectangles']" in script
    compile(script, "script", "exec")
    panel.reset()
    assert panel.setting["failure"] == "none"


def slow_after(calls):
    """A kernel that waits from so many calls on, and the events of that: it has begun to wait, it may go on."""
    waiting, go_on, count = threading.Event(), threading.Event(), []

    def slow(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
        count.append(1)
        if len(count) >= calls:
            waiting.set()
            go_on.wait(60)
        return naive(r, k, v, w, u, scale, initial_state, output_final_state)

    return slow, waiting, go_on, count


@pytest.mark.parametrize("calls", [3, 60], ids=["while it looks at the kernel", "between probes"])
def test_a_slow_kernel_can_be_stopped_at_its_next_call(calls):
    kernel, waiting, go_on, count = slow_after(calls)
    panel = audit(kernel, "rwkv6")
    assert waiting.wait(60)
    assert panel.audit is None and panel.png.startswith(b"\x89PNG")
    if calls == 3:
        assert panel.text == "Calling slow as RWKV6 is called, to see what it takes."
    panel.run.cancel()
    asked = len(count)
    go_on.set()
    panel.run.wait(60)
    assert len(count) == asked, "no further call"
    assert panel.run.status.value == "cancelled" and panel.text.startswith("Stopped after ")
    assert len(panel.audit.verdicts) == len(PROBES) and panel.audit.passed
    panel.run.start()  # and goes on from the beginning
    panel.run.cancel()
    panel.run.wait(60)
    assert panel.run.status.value == "cancelled"


def test_a_kernel_that_raises():
    def raises(r, k, v, w, u):
        raise RuntimeError("no kernel image is available")

    panel = audit(raises, "rwkv6", only=FEW)
    panel.run.wait(60)
    assert panel.run.status.value == "failed" and "no kernel image is available" in panel.text

    def fussy(r, k, v, w, u, scale=None):
        if r.shape[1] == 100:
            raise RuntimeError("misaligned address")
        return naive(r, k, v, w, u, scale)[0]

    panel = audit(fussy, "rwkv6", only=["truth"])
    panel.run.wait(60)
    assert "truth: the call raises an error, or returns what no such operator returns, at T = " in panel.text
    assert "this failure has no tensor to show" in [x.get_text() for x in panel.canvas.figure.findobj(Text)]
    assert panel.as_python() == panel.audit["truth"].repro


def test_what_is_no_kernel_is_refused_at_once():
    with pytest.raises(TypeError, match="subject: expected a function"):
        audit(3, "rwkv6")
    with pytest.raises(ValueError, match="like: expected one of"):
        audit(inclusive)


def test_who_has_chosen_a_failure_keeps_it():
    panel = audit(inclusive, "rwkv6", only=["truth", "initial-state", "repeat"])
    panel.run.wait(120)
    names = [v.probe.name for v in panel.audit.failed]
    assert len(names) > 1 and list(panel.knobs["failure"].options) == names
    first = panel.setting["failure"]
    other = next(name for name in names if name != first)
    panel.set(failure=other)
    assert f"\n{other}: " in panel.text
    panel.reset()
    assert panel.setting["failure"] == first


def test_it_speaks_chinese(monkeypatch):
    monkeypatch.setattr(MODULE, "PAUSE", 0.0)
    heard = []
    monkeypatch.setattr(MODULE.AuditPanel, "say", lambda self, text: heard.append(text) or setattr(self, "text", text))
    panel = audit(WRONG["bonus dropped on one token"][1], "rwkv6", only=FEW, language="zh")
    panel.run.wait(120)
    assert [text for text in heard if not re.search("[\u4e00-\u9fff]", text)] == [] and len(heard) > 6
    assert "结论" in panel.table.value and "失败" in panel.table.value
    panel.picture.pick(Cell("off", 0, 29))
    assert "算出" in panel.picture.strip


def test_elements_of_what_has_no_time_or_no_rows():
    """A state is drawn rows by columns; a tensor of one axis and heads, heads by channels."""
    found = flakit.audit(WRONG["du of the first batch alone"][1], "rwkv6", only=["truth"], shrink=False)
    (v,) = found.failed
    shown = elements(v, found.subject.op)
    assert (v.finding.tensor, shown.rows, shown.columns, shown.where) == ("du", "H", "K", {})
    assert shown.total == v.smallest[0].numel() and torch.equal(v.smallest[0], v.pair[0])
