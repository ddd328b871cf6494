"""What must not become a site: cells that raise, formulas and links that lead nowhere, pages that are too large."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

from docs import notebooks
from flakit.figures import style as looks

build = pytest.importorskip("docs.build", reason="the extra `site` is not installed")
conf = pytest.importorskip("docs.conf", reason="the extra `site` is not installed")

pytestmark = pytest.mark.full


@pytest.fixture
def site_of(tmp_path):
    """site_of(text) -> the folder of a site of one page."""

    def site_of(text):
        (tmp_path / "pages").mkdir()
        (tmp_path / "pages" / "index.md").write_text(f"# A page\n\n{text}\n")
        build.katex(build.KATEX)
        build.write(tmp_path / "pages", tmp_path / "site")
        return tmp_path / "site"

    return site_of


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """lesson(*cells) writes the only lesson, of which the site is built in `tmp_path`."""
    path = tmp_path / "99_lesson.ipynb"
    monkeypatch.setattr(notebooks, "LESSONS", [path])
    monkeypatch.setattr(build, "BUILD", tmp_path)
    return lambda *cells: nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"All is well: $\frac{1}{2}$, $$e^{w_t}$$ [here](index.md).", None),
        (r"Broken: $\frac{1}{2$.", "KaTeX parse error"),
        (r"Broken: $$\nosuchthing$$", "KaTeX parse error"),
        (r"Broken: [there](nowhere.md).", "nowhere.md"),
        (r"Broken: [there](#nowhere).", "nowhere"),
    ],
    ids=["whole", "formula", "displayed formula", "page", "anchor"],
)
def test_faults_of_a_page_fail_the_build_and_are_named(site_of, capfd, text, said):
    if said is None:
        assert (site_of(text) / "index.html").read_text().count('class="katex"') == 2
    else:
        with pytest.raises(SystemExit, match="not whole"):
            site_of(text)
        errors = capfd.readouterr().err
        assert "index.md" in errors and said in errors


def test_letters_of_formulas_have_the_colours_of_pictures(site_of):
    site = site_of("$dr_i = w K$, $$D_{t} q k v g r$$")
    text = (site / "index.html").read_text()
    found = re.findall(r'<span class="letter" style="--letter:(#\w+)">(\w)</span>', text)
    assert found == [(looks.letter(name), name) for name in "rwDqkvgr"]  # not d, K and the subscripts
    assert "--letter" in (site / "_static" / "site.css").read_text()


def test_formulas_need_no_node_but_the_one_that_pip_brings(site_of, tmp_path, monkeypatch):
    monkeypatch.setattr("sphinxcontrib.katex.KaTeXServer.katex_server", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    site_of("$e^w$")
    build.katex(tmp_path / "katex")
    assert len(list((tmp_path / "katex" / "katex" / "fonts").iterdir())) >= 15
    style = (tmp_path / "katex" / "katex" / "katex.min.css").read_text()
    assert style.count(".woff2") >= 15 and ".ttf" not in style and "http" not in style


SLOW_TO_LISTEN = """
import socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
time.sleep(0.3)
server.listen()
server.accept()[0].sendall(b"here")
"""


@pytest.mark.skipif(os.name != "posix", reason="KaTeX's server has a socket with a file only there")
def test_a_server_of_formulas_is_waited_for_until_it_listens(monkeypatch):
    server = conf.sphinxcontrib.katex.KaTeXServer
    monkeypatch.setattr(server, "build_command", lambda socket: [sys.executable, "-c", SLOW_TO_LISTEN, str(socket)])
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        process, client = server.start_server_process(Path(folder), 10)
        with process, client:
            assert client.recv(4) == b"here"


def test_a_cell_that_raises_fails_the_build_with_its_traceback(lesson, tmp_path):
    lesson(nbformat.v4.new_code_cell("far = 3\nprint(far / 0)"))
    with pytest.raises(SystemExit) as stopped:
        build.main([])
    assert "print(far / 0)" in str(stopped.value) and "ZeroDivisionError" in str(stopped.value)
    assert not (tmp_path / "executed" / "99_lesson.ipynb").exists()


def test_a_sentence_that_says_what_was_not_computed_fails_the_build(lesson, tmp_path):
    def execute(number):
        prose.source = f"It is {number}<!--= far --> steps away."
        lesson(nbformat.v4.new_code_cell("far = 3"), prose)
        return notebooks.executed(tmp_path)

    prose = nbformat.v4.new_markdown_cell()
    (notebook,) = (x for path, x in execute(3).items() if path.stem == "99_lesson")
    assert [cell.cell_type for cell in notebook.cells] == ["code", "markdown"]
    ran = (tmp_path / "executed" / "99_lesson.ipynb").stat().st_mtime_ns
    with pytest.raises(notebooks.Untrue, match="99_lesson: 'It is 4': far is 3"):
        execute(4)  # other words alone: it does not run again
    assert (tmp_path / "executed" / "99_lesson.ipynb").stat().st_mtime_ns == ran
    with pytest.raises(SystemExit, match="far is 3\nA lesson says what it did not compute"):
        build.main([])


def test_a_name_that_no_lesson_has_is_said():
    with pytest.raises(SystemExit, match="no lesson starts with 99"):
        build.main(["none", "99"])


def test_a_page_that_loads_too_much_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "SITE", tmp_path)
    (tmp_path / "big.png").write_bytes(b"0" * 1_600_000)
    (tmp_path / "good.html").write_text('<img loading="lazy" src="big.png">')
    assert not build.sizes()
    (tmp_path / "bad.html").write_text('<img src="big.png">')
    assert build.sizes()
    assert "TOO LARGE: opening bad.html loads 1.60 MB" in capsys.readouterr().out


def test_a_site_that_is_too_large_is_named(tmp_path, monkeypatch, capsys):
    """The one of the tests has few frames: of the one that is published, `make site` itself says so, and fails."""
    monkeypatch.setattr(build, "SITE", tmp_path)
    monkeypatch.setattr(build, "MAX_SITE", 1e6)
    (tmp_path / "0.webp").write_bytes(b"0" * 900_000)
    assert not build.sizes()
    (tmp_path / "1.webp").write_bytes(b"0" * 200_000)
    assert build.sizes()
    assert "TOO LARGE: the site has 1.1 MB" in capsys.readouterr().out
