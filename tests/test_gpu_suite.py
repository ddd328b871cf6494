"""`python -m tests.gpu`: what it runs and keeps, and that its hashes know what a test depends on. No GPU needed."""

import os
import signal
import subprocess
import sys
import time
from textwrap import dedent

import pytest

from flakit.numerics import recorded
from tests.commands import ROOT, completed
from tests.gpu import results, sources, summary

INI = "[pytest]\naddopts = --import-mode=importlib\nmarkers = gpu: a\n"
TESTS = {
    "tests/one/test_some.py": """
        import os, pytest
        from tests.one.helper import SEEN

        @pytest.mark.gpu
        @pytest.mark.parametrize("x", range(5))
        def test_each(x):
            open(SEEN, "a").write(f"{x}\\n")
            assert x != 3

        @pytest.mark.gpu
        def test_that_is_skipped():
            if not os.path.exists("second GPU"):
                pytest.skip("no second GPU")

        def test_that_needs_no_gpu():
            assert False
        """,
    "tests/one/helper.py": "SEEN = 'seen'\n",
    "tests/two/test_others.py": """
        import pytest

        pytestmark = pytest.mark.gpu

        def test_other():
            open("seen", "a").write("other\\n")
        """,
    "tests/two/test_without.py": "import missing_module\n",
}


@pytest.fixture
def project(tmp_path):
    """A project with GPU tests of its own: three files, of which one has none."""
    write(tmp_path, {"pytest.ini": INI, **TESTS})
    return tmp_path


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).strip() + "\n")


LIGHT = {
    "torch.py": '__version__ = "0"\n',
    "triton/__init__.py": "raise ImportError\n",
    "flakit/__init__.py": '__version__ = "0"\n',
}
"""What stands for packages that take seconds to import and of which no test of these projects has any use: every run
starts up to three processes."""


def command(root, *arguments, n=0, whole=False):
    """whole: with torch, Triton and all of flakit, instead of the `LIGHT` ones."""
    given = ["-n", str(n), "--file", str(root / "out.json"), "--commit", "abc", *arguments]
    code = (
        "import sys; from pathlib import Path; from tests.gpu.__main__ import main; "
        f"sys.exit(main({given!r}, Path({str(root)!r}), 'a card'))"
    )
    paths = [str(ROOT)]
    if not whole:
        write(root / "light", LIGHT)
        if not (numerics := root / "light/flakit/numerics").exists():
            numerics.symlink_to(ROOT / "flakit/numerics")
        paths.insert(0, str(root / "light"))
    return [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(root, *arguments, n=0, whole=False):
    """The exit code, and which tests ran."""
    seen = root / "seen"
    seen.unlink(missing_ok=True)
    words, env = command(root, *arguments, n=n, whole=whole)
    done = completed(*words, cwd=root, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, seen.read_text().split() if seen.exists() else []


def rows(root):
    return {row["file"].split("/")[1]: row for row in results.read(root / "out.json")}


@pytest.mark.full
@pytest.mark.parametrize("n", [0, 2])
def test_what_has_passed_runs_once_and_what_fails_again(project, n):
    code, seen = run(project, n=n)
    assert (code, sorted(seen)) == (1, [*"01234", "other"])
    one, two = rows(project)["one"], rows(project)["two"]
    assert one["each"] == "...F.s" and one["failing"] == ["test_each[3]"] and two["each"] == "."
    assert (one["passed"], one["failed"], one["skipped"], one["not_run"]) == (4, 1, 1, 0)
    assert (one["card"], one["commit"]) == ("a card", "abc") and not results.green(one) and results.green(two)

    assert run(project, n=n) == (1, ["3"])  # the one that failed, and what is skipped
    path = project / "tests/one/test_some.py"
    path.write_text(path.read_text().replace("x != 3", "x != 7"))
    code, seen = run(project, n=n)
    assert (code, sorted(seen)) == (0, [*"01234"])  # all of the file that has changed
    code, seen = run(project, "--again", n=n)
    assert (code, sorted(seen)) == (0, [*"01234", "other"]) and rows(project)["one"]["each"] == ".....s"


@pytest.mark.full
def test_only_some_leaves_the_others_not_run(project):
    assert run(project, "--only", "each and 1", whole=True) == (3, ["1"])
    assert rows(project)["one"]["each"] == "-.----" and rows(project)["two"]["each"] == "-"
    assert run(project, "--only", "1 or other", whole=True) == (3, ["other"])
    assert rows(project)["one"]["not_run"] == 5


SOME_TAKE_LONGER = """
    import os, pytest, time

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("x", [pytest.param(x, marks=pytest.mark.together(x % 3)) for x in range(6)])
    def test_each(x):
        open("seen", "a").write(f"{x}-{os.getpid()}\\n")
        time.sleep(0.3 * (x == 4))
        assert x != 5 or os.path.exists("repaired")
    """


@pytest.mark.full
@pytest.mark.parametrize("n", [0, 2])
def test_what_needs_it_most_runs_first_and_what_shares_kernels_in_one_process(project, n):
    def order():
        seen = [x.split("-") for x in run(project, "--again", "--only", "each", n=n)[1]]
        processes = {int(x) % 3: {p for y, p in seen if int(y) % 3 == int(x) % 3} for x, _ in seen}
        assert all(len(each) == 1 for each in processes.values())
        first = {process: x for x, process in reversed(seen)}
        return "".join(x for x, _ in seen) if n == 0 else set(first.values())

    write(project, {"pytest.ini": INI + " together: a\n", "tests/one/test_some.py": SOME_TAKE_LONGER})
    assert order() == ("031425" if n == 0 else {"0", "1"})  # nothing is known: as they stand there
    row = rows(project)["one"]
    assert row["each"] == ".....F" and len(row["seconds"]) == 6 and row["seconds"][4] >= 0.3 > row["seconds"][0]
    assert results.spent(row) == pytest.approx(sum(row["seconds"]))
    assert order() == ("251403" if n == 0 else {"2", "1"})  # with the one that failed, with the one that takes long
    (project / "repaired").touch()
    run(project, "--only", "each")
    assert [row["each"], rows(project)["one"]["each"]] == [".....F", "......"]
    write(project, {"tests/one/test_some.py": SOME_TAKE_LONGER + "    # of other code now\n"})
    longest = order()
    assert longest[:2] == "14" if n == 0 else "1" in longest  # as was measured for the code before


@pytest.mark.full
def test_what_has_passed_stays_so_until_it_has_run_again(project):
    run(project)
    before = rows(project)["one"]
    assert run(project, "--again", "--only", "each and 1")[1] == ["1"]
    after = rows(project)["one"]
    assert after["each"] == before["each"] == "...F.s" and rows(project)["two"]["each"] == "."
    assert [n for n, x in enumerate(after["seconds"]) if x != before["seconds"][n]] in ([], [1])


@pytest.mark.full
def test_what_has_passed_stays_so_where_it_is_skipped(project):
    (project / "second GPU").touch()
    run(project)
    assert rows(project)["one"]["each"] == "...F.."
    (project / "second GPU").unlink()
    run(project, "--again")
    assert rows(project)["one"]["each"] == "...F.." and rows(project)["one"]["skipped"] == 0


ENDS_ITS_PROCESS = """
    import os, pytest

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("x", range(6))
    def test_each(x):
        open("seen", "a").write(f"{x}\\n")
        if x == 1:
            os._exit(1)
    """


@pytest.mark.full
def test_one_in_which_a_process_ends_has_failed_and_the_others_run(project):
    write(project, {"tests/one/test_some.py": ENDS_ITS_PROCESS})
    code, seen = run(project, "--only", "each", n=2)
    assert (code, sorted(seen)) == (1, [*"012345"]) and rows(project)["one"]["each"] == ".F...."


COMPILES = """
    import pytest, triton
    from triton.compiler import compile

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("x", [pytest.param(x, marks=pytest.mark.together(x)) for x in range(2)])
    def test_each(x):
        class Source:
            def hash(self):
                return "a kernel"

        assert triton.compiler.compile(Source(), options={"num_warps": 4}) == "compiled"
    """
COMPILER = """
    import time

    def compile(src, target=None, options=None):
        with open("seen", "a") as seen:
            seen.write("begins\\n")
        time.sleep(1)
        with open("seen", "a") as seen:
            seen.write("ends\\n")
        return "compiled"
    """


@pytest.mark.full
def test_two_processes_do_not_compile_the_same_kernel_at_once(project):
    write(project, {"pytest.ini": INI + " together: a\n", "tests/one/test_some.py": COMPILES})
    write(project, {"stub/triton/__init__.py": "from . import compiler\n", "stub/triton/compiler.py": COMPILER})
    words, env = command(project, "--only", "each", n=2)
    words[2] = f"import sys; sys.path.insert(0, {str(project / 'stub')!r}); {words[2]}"
    env["PYTHONPATH"] = f"{project / 'stub'}:{env['PYTHONPATH']}"
    done = completed(*words, cwd=project, env=env)
    assert rows(project)["one"]["each"] == "..", done.stdout
    assert (project / "seen").read_text().split() == ["begins", "ends"] * 2


@pytest.mark.full
def test_what_a_helper_says_is_part_of_the_hash(project):
    run(project)
    write(project, {"tests/one/helper.py": "# of what was run\nSEEN = 'seen'\n"})
    assert run(project)[1] == ["3"]
    write(project, {"tests/one/helper.py": "SEEN = 'see' + 'n'\n"})
    assert run(project)[1] == [*"01234"]


@pytest.mark.full
def test_results_of_several_cards_and_tritons_stand_side_by_side(project):
    run(project)
    first = results.read(project / "out.json")
    others = [row | more for more in ({"card": "another"}, {"triton": "of later"}) for row in first]
    results.write(project / "out.json", dict.fromkeys(recorded.META, "x"), others)
    assert run(project)[1] == [*"01234", "other"]  # nothing is known of this card and Triton
    places = [results.place(row) for row in results.read(project / "out.json")]
    now = first[0]["triton"]
    assert places == [*[("a card", now)] * 2, *[("a card", "of later")] * 2, *[("another", now)] * 2]
    assert run(project)[1] == ["3"]


@pytest.mark.full
def test_a_file_that_cannot_be_collected_has_failed(project):
    write(project, {"tests/two/test_others.py": "import pytest, missing_module\n\npytestmark = pytest.mark.gpu\n"})
    for n in (0, 2):
        assert run(project, n=n)[0] == 1
        assert rows(project)["two"]["each"] == "F" and "cannot collect" in rows(project)["two"]["failing"][0]
        assert rows(project)["one"]["passed"] == 4


SLOW = """
    import os, pytest, time

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("x", range(8))
    def test_slow(x):
        open("seen", "a").write(f"{x}\\n")
        time.sleep(SECONDS if x and not os.path.exists("go") else 0)
    """


def passed(project):
    out = project / "out.json"
    return rows(project)["one"]["each"].count(".") if out.exists() else 0


@pytest.mark.full
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, "--limit-seconds"], ids=str)
def test_one_that_is_stopped_goes_on_where_it_was(project, ended_by):
    by_signal = isinstance(ended_by, signal.Signals)
    seconds = 2 if by_signal else 4  # of a test: beyond the limit only some of them are over
    write(project, {"tests/one/test_some.py": SLOW.replace("SECONDS", str(seconds))})
    words, env = command(project, *([] if by_signal else [ended_by, "16"]), n=2 if by_signal else 0)
    running = subprocess.Popen(words, cwd=project, env=env, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    until = time.monotonic() + 300
    if by_signal:
        while time.monotonic() < until and running.poll() is None and not passed(project):
            time.sleep(0.1)
        running.send_signal(ended_by)
    code = running.wait(120)
    assert code == (-signal.SIGKILL if ended_by == signal.SIGKILL else 3)
    known = rows(project)["one"]["each"]
    assert 0 < known.count(".") < 8 and known.strip(".-") == ""
    if by_signal:
        time.sleep(3)  # what still ran
    (project / "go").touch()
    left = [str(place) for place, letter in enumerate(known) if letter == "-"]
    code, seen = run(project, "--only", "slow")
    assert [x for x in seen if x != "other"] == left and rows(project)["one"]["each"] == "." * 8


def test_without_a_gpu_it_says_so():
    done = completed(sys.executable, "-m", "tests.gpu", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr) == (2, "python -m tests.gpu: expected a CUDA GPU, found none\n")


# --- what a test depends on ------------------------------------------------------------------------------------------


def test_comments_and_words_are_no_code():
    before = 'x = 1  # one\n\n\ndef f():\n    """Words,\n    more."""\n    return "# no comment"\n'
    assert sources.code(before) == 'x = 1\ndef f():\n    return "# no comment"'


def depends_on(file):
    return {path.relative_to(ROOT).as_posix() for path in sources.dependencies(file)}


def test_a_test_depends_on_the_kernels_its_helpers_and_its_own_room():
    found = depends_on("tests/gpu/test_covering_set.py")
    needed = {"flakit/ops/rwkv7/fused_chunk_triton.py", "flakit/numerics/evaluate.py", "tests/gpu/conftest.py"}
    needed |= {"tests/conftest.py", "tests/ops/checking.py", "tests/ops/oracle.py", "tests/ops/settings/full.csv"}
    assert needed <= found and "flakit/instruments/budget.py" in found
    assert not [x for x in found if x.startswith(("flakit/panels", "flakit/cases", "tests/panels", "notebooks"))]
    of_trace = {
        path.relative_to(ROOT).as_posix() for path in sources.dependencies("tests/instruments/test_trace_gpu.py")
    }
    assert {"flakit/instruments/trace_compiled_triton.py", "tests/instruments/faulty_triton.py"} <= of_trace


def test_versions_and_the_card_are_part_of_the_hash():
    (file, *_) = sources.test_files()
    assert (
        len({sources.key(file), sources.key(file, "3.6.0"), sources.key(file, "3.7.1"), sources.key(file, "H100")}) == 4
    )


COLLECT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
import pytest

class Seen:
    def pytest_collection_modifyitems(self, items):
        found = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("gpu")}
        print("FILES", *sorted(found))

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Seen()]))
"""
NOT_ON_A_GPUS_MACHINE = "ipywidgets anywidget jupyterlab nbformat nbclient playwright IPython ipykernel yaml"


def with_gpu_tests(*paths, without=""):
    """The files of those with tests that are marked `gpu`, in a process without some modules."""
    done = completed(sys.executable, "-c", COLLECT, without, *paths)
    assert done.returncode == 0, done.stdout[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FILES")]
    return set(line.split()[1:])


@pytest.mark.full
def test_its_files_have_all_gpu_tests_and_are_collected_without_jupyter():
    found = with_gpu_tests(*sources.test_files(), without=NOT_ON_A_GPUS_MACHINE)
    assert len(found) > 20 and found == with_gpu_tests("tests")


# --- its summary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", summary.TEXTS)
def test_the_texts_say_what_is_recorded(name):
    """Where they do not: python -m tests.gpu.summary"""
    assert summary.written(name, results.read()) == (ROOT / name).read_text(encoding="utf-8")


def some_rows(card, each="...s", root=ROOT, triton="3.6.0", **more):
    ran = {"card": card, "torch": "2.11.0", "triton": triton, "commit": "abc", "date": "2026-11-26"}
    files = sources.test_files(root)
    return [results.row(ran, file, results.key(file, ran, root), each, ()) | more for file in files]


def test_a_table_has_a_line_for_each_card_and_triton():
    rows = [*some_rows("one", "..s"), *some_rows("two", ".F-"), *some_rows("one", ".--", triton="3.7.1")]
    (one, two, newer), n = summary.totals(rows), len(sources.test_files())
    assert (newer["card"], newer["triton"], newer["passed"], newer["not_run"]) == ("one", "3.7.1", n, 2 * n)
    assert (one["passed"], one["skipped"], one["failed"]) == (2 * n, n, 0)
    assert (two["passed"], two["failed"], two["not_run"], two["triton"]) == (n, n, n, "3.6.0")
    table, words = summary.text("docs/speed.md", rows), summary.text("README.md", rows)
    assert f"| one | {2 * n} | 0 | {n} | 0 | 2026-11-26 | abc |" in table and "ran on Triton 3.6.0 and 3.7.1;" in table
    assert f"on one {2 * n} of {2 * n} passed (abc; " in words and f"on two {n} of {3 * n} passed" in words


def test_of_several_commits_it_says_how_many_passed_on_each():
    older, *newer = some_rows("one", "..")
    rows = [older | {"commit": "before"}, *newer]
    said = f"{2 * len(newer)} on abc, 2 on before"
    assert f"| {said} |" in summary.text("docs/speed.md", rows)
    assert f"passed ({said}; " in summary.text("README.md", rows)


def test_a_release_needs_every_file_green_for_todays_code_on_one_card_and_triton(project):
    def complaints(*rows):
        return summary.complaints([row for each in rows for row in each], project)

    green, red = some_rows("one", root=project), some_rows("two", ".F", root=project)
    assert not complaints(green) and not complaints(red, green)
    assert complaints(green[1:], some_rows("one", root=project, triton="3.7.1")[:1])  # each lacks a file
    assert complaints(red)[0].endswith("1 failed, 0 not run")
    assert complaints(some_rows("one", ".-", root=project))[0].endswith("0 failed, 1 not run")
    assert complaints(green[1:]) == ["one, Triton 3.6.0: tests/one/test_some.py: not run"]
    assert complaints(some_rows("one", root=project, key="of before"))[0].endswith("other code, abc of 2026-11-26")
    assert "no GPU test is recorded" in complaints([])[0]
    write(project, {"tests/one/helper.py": "SEEN = 'other'\n"})
    assert complaints(green)[0].startswith("one, Triton 3.6.0: tests/one/test_some.py: run on other code")
