"""The ledger of compiled kernels: a changed kernel has another key, one that moved has the same; a wrong file fails."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from flakit.ops.common.dispatch import has_triton, interpreted

if not has_triton() or interpreted():
    pytest.skip("needs Triton, in a process without TRITON_INTERPRET", allow_module_level=True)

import triton

from flakit.numerics import recorded
from tests.ops import ledger, record_compiled
from tests.ops.compiling import compile_for, launches

CONSTANTS = "import triton.language as tl\n\nOFTEN = tl.constexpr(3)\n"
KERNEL = '''import triton
import triton.language as tl

import constants

TWICE = tl.constexpr(2.0)


@triton.jit
def beside(x):
    return x - 1.0


@triton.jit
def inner(x):
    return x * TWICE


@triton.jit
def outer(x, MORE: tl.constexpr = 1.0):
    for _ in range(constants.OFTEN):
        x = inner(x)
    return x + MORE


@triton.jit
def kernel(x, y, n, N: tl.constexpr, FLAG: tl.constexpr = False):
    """Some words."""
    p = tl.arange(0, N)
    tl.store(y + p, outer(tl.load(x + p, mask=p < n)), mask=p < n)  # a word
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(text of a kernel's module, text of its constants' module) -> the module"""
    monkeypatch.syspath_prepend(tmp_path)

    def loaded(text, constants=CONSTANTS):
        for name, each in (("constants", constants), ("kernels", text)):
            file = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"  # lines of a file that was read are remembered
            file.write_text(each)
            spec = importlib.util.spec_from_file_location(name, file)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(importlib.sys.modules, name, module)
            spec.loader.exec_module(module)
        return module

    return loaded


def launched(module, dtype=torch.float32, n=17, first=0, **options):
    x = torch.zeros(64, dtype=dtype)[first:]
    (launch,) = launches(lambda: module.kernel[(1,)](x, x, n, **{"N": 32} | options))
    return launch


@pytest.fixture
def key(load):
    return lambda text=KERNEL, constants=CONSTANTS, **call: ledger.key(launched(load(text, constants), **call), 90)


@pytest.mark.parametrize(
    "before, after",
    [
        ("import constants\n", "import constants\n\n# a line above\nOTHER = 1\n"),
        ("# a word", "# another"),
        ('"""Some words."""', '"""Some other words,\n\n    more of them."""'),
        ("    for _", "\n    # why\n    for _"),
        ("return x - 1.0", "return x - 2.0"),
    ],
    ids=["a line above", "a comment", "what is said of a function", "a blank line", "a helper that is not called"],
)
def test_what_changes_no_code_changes_no_key(key, before, after):
    assert KERNEL.count(before) == 1 and key(KERNEL.replace(before, after)) == key()


def test_a_length_of_the_same_kind_and_another_folder_change_no_key(key):
    assert key(n=19) == key()


@pytest.mark.parametrize(
    "before, after",
    [
        ("return x * TWICE", "return TWICE * x + x"),
        ("return x + MORE", "return MORE - x"),
        ("tl.constexpr(2.0)", "tl.constexpr(2.5)"),
        ("MORE: tl.constexpr = 1.0", "MORE: tl.constexpr = 1.5"),
        ("@triton.jit\ndef inner", "@triton.jit(noinline=True)\ndef inner"),
        ("@triton.jit\ndef kernel", '@triton.jit(do_not_specialize=["n"])\ndef kernel'),
    ],
    ids=["a helper's helper", "a helper", "a constant", "a default", "inlining", "specialisation"],
)
def test_a_change_of_what_a_kernel_reaches_changes_its_key(key, before, after):
    assert KERNEL.count(before) == 1 and key(KERNEL.replace(before, after), n=16) != key(n=16)


def test_a_constant_of_another_module_changes_the_key(key):
    assert key(constants=CONSTANTS.replace("3", "4")) != key()


@pytest.mark.parametrize(
    "call",
    [
        {"dtype": torch.bfloat16},
        {"n": 16},
        {"n": 1},
        {"n": 2**40 + 1},
        {"first": 1},
        {"N": 16},
        {"FLAG": True},
        {"num_warps": 8},
        {"num_stages": 2},
        {"maxnreg": 64},
    ],
    ids=lambda call: " ".join(f"{name} {x}" for name, x in call.items()),
)
def test_what_a_launch_is_given_is_part_of_its_key(key, call):
    """A dtype, a length that is divisible by 16, is 1 or is long, memory that is not aligned, constants, options."""
    assert key(**call) != key()


def test_the_chip_and_the_versions_are_part_of_the_key(load, monkeypatch):
    launch = launched(load(KERNEL))
    keys = [ledger.key(launch, chip) for chip in (80, 86, 90, 120)]
    monkeypatch.setattr(triton, "__version__", "3.99")
    keys.append(ledger.key(launch, 90))
    monkeypatch.undo()
    monkeypatch.setattr(ledger, "make_backend", lambda target: Ptxas())
    keys.append(ledger.key(launch, 90))
    assert len({*keys}) == len(keys)


class Ptxas:
    def hash(self):
        return "another version of ptxas"


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "FILE", tmp_path / "compiled.json")
    return ledger.FILE


def test_what_the_file_has_is_not_compiled_again(file, load, monkeypatch, capsys):
    module = load(KERNEL)
    one, other = (replace(launched(module, N=N), row=("a row", "16-bit")) for N in (32, 64))
    with pytest.warns(UserWarning, match="compiled, since data/compiled.json has no such code: python -m tests.ops"):
        found = ledger.needs(one, 90)
    assert found == compile_for(one, 90) and found.registers > 0

    assert record_compiled.record([(one, 90), (one, 80)]) == [ledger.key(one, chip) for chip in (90, 80)]
    rows = recorded.read(file).rows
    assert [(row["row"], row["kernel"], row["chip"]) for row in rows] == [
        ("a row 16-bit", "kernel", x) for x in (80, 90)
    ]
    monkeypatch.setattr(ledger, "compile_for", lambda *_: pytest.fail("compiled"))
    assert ledger.needs(one, 90) == found

    # What nobody asks for any more leaves it, and what is in it is not compiled for it again.
    assert record_compiled.record([(one, 90), (other, 90)]) == [ledger.key(other, 90)]
    assert ledger.read().keys() == {ledger.key(one, 90), ledger.key(other, 90)}
    assert record_compiled.record([(one, 90)], anew=True) == [ledger.key(one, 90)]
    assert ledger.read() == {ledger.key(one, 90): found}


def test_another_triton_keeps_its_rows(file, load, monkeypatch):
    one = replace(launched(load(KERNEL)), row=("a row", "16-bit"))
    record_compiled.record([(one, 90)])
    monkeypatch.setattr(triton, "__version__", "3.99")
    assert ledger.read() == {} and record_compiled.record([(one, 90)]) == [ledger.key(one, 90)]
    assert len(ledger.read()) == 1 and record_compiled.record([(one, 90)]) == []
    table, tested = recorded.read(file), triton.__version__
    monkeypatch.undo()
    assert table.values("triton") == sorted({tested, triton.__version__}) == table.meta["triton"].split(", ")
    assert len({row["key"] for row in table.rows}) == len(table.rows) == 2
