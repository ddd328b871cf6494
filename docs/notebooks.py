"""Notebooks for the site: each lesson is run in a kernel, stored until something that it depends on changes, and made a
page.

A panel is recorded by `docs.frames` in the kernel that shows it. Solutions, which have no panels, and translations are
shown with their stored outputs. Pictures become files of their own.
"""

import ast
import base64
import hashlib
import html
import io
import json
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import nbformat
from PIL import Image

from docs.claims import broken, claims, values, with_probes
from docs.execute import without_live_parts
from docs.lessons import LESSONS, NOTEBOOKS, SOLUTIONS, TRANSLATIONS, code_cells, prose_cells, read, run, starting_with

ROOT = Path(__file__).parents[1]
STANDS_ON = ("flakit/**/*.py", "flakit/**/*.js", "data/*.json", "docs/frames.py", "docs/pieces.py")
CELL_TIMEOUT = 600  # seconds: a cell draws every frame of its panel
AT_A_TIME = 2

RECORD = """
import sys
sys.path.insert(0, {root!r})
from docs import frames
frames.install({folder!r}, {stem!r})
"""


def executed(build, prefixes=()):
    """Return {path: notebook with outputs} of every lesson, solution and translation.

    Lessons with up-to-date stored outputs are not run again. prefixes: run only those whose name starts so; the others
    have the outputs in build/, however old, or those stored in the repository. Raises nbclient's CellExecutionError,
    and `Untrue` if a sentence states what its lesson did not compute."""
    base = _base()
    chosen = starting_with(prefixes, LESSONS)
    stale = [path for path in chosen if _note(build, path).get("key") != _key(base, path)]
    print(f"lessons: {len(stale)} to run, {len(chosen) - len(stale)} are up to date", flush=True)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        longest_first = sorted(stale, key=lambda path: -_note(build, path).get("seconds", path.stat().st_size / 1e4))
        running = {pool.submit(_run, build, path, base): path for path in longest_first}
        try:
            for number, done in enumerate(as_completed(running), 1):
                seconds = done.result()
                print(f"  {number}/{len(stale)} {running[done].stem}, {seconds:.0f} s", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    untrue = [f"{path.stem}: {x}" for path in chosen for x in broken(read(path), _note(build, path)["claims"])]
    if untrue:
        raise Untrue("\n".join(untrue))
    lessons = {path: _with_outputs(read(path), _kept(build, path)) for path in LESSONS}
    return lessons | {path: read(path) for path in SOLUTIONS + TRANSLATIONS}


class Untrue(ValueError):
    """Raised for numbers of the prose that are not what the lesson computed, one per line."""


def _with_outputs(notebook, kept):
    """Return the notebook with the outputs of a stored one that has the same code; words may differ."""
    ran = code_cells(read(kept)) if kept.exists() else []
    code = code_cells(notebook)
    if [cell.source for cell in ran] == [cell.source for cell in code]:
        for cell, done in zip(code, ran, strict=True):
            cell.outputs = done.outputs
    return notebook


def _run(build, path, base):
    start = time.monotonic()
    frames = build / "frames" / path.stem
    shutil.rmtree(frames, ignore_errors=True)
    frames.mkdir(parents=True)
    first = nbformat.v4.new_code_cell(RECORD.format(root=str(ROOT), folder=str(frames), stem=path.stem))

    def recording(notebook):
        notebook = with_probes(notebook)
        notebook.cells.insert(0, first)
        return notebook

    done = run(path, change=recording, timeout=CELL_TIMEOUT)
    claimed = values(done)
    done.cells = [cell for cell in done.cells[1:] if "probe_of" not in cell.metadata]
    seconds = time.monotonic() - start
    kept = _kept(build, path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(without_live_parts(done), kept)
    kept.with_suffix(".json").write_text(json.dumps({"key": _key(base, path), "seconds": seconds, "claims": claimed}))
    return seconds


def _kept(build, path):
    return build / "executed" / path.name


def _note(build, path):
    note = _kept(build, path).with_suffix(".json")
    return json.loads(note.read_text()) if note.exists() else {}


def _base():
    """Return a hash of everything that all notebooks depend on."""
    digest = hashlib.sha256(f"{sys.version} {version('torch')} {version('ipykernel')} {RECORD}".encode())
    for path in sorted(path for pattern in STANDS_ON for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _key(base, path):
    """Return a hash of what a run of the lesson depends on: its code, and the expressions in its claims."""
    cells = [
        cell.source if cell.cell_type == "code" else [claim.expression for claim in claims(cell.source)]
        for cell in read(path).cells
    ]
    return hashlib.sha256((base + repr(cells)).encode()).hexdigest()


# --- a notebook as a page -------------------------------------------------------------------------------------------

CLAIM = re.compile(r"<!--=.*?-->", re.S)  # a check for the tests; see docs/claims.py
STILL = (
    "本页的图是静止的。会动的滑块在[英文页](../{lesson})上；"
    "也可以在 JupyterLab 里打开这一课，那里的滑块会动，文字也是中文的。"
)
OF_THE_SOURCE = re.compile(r"\]\((\.\./)+(?P<file>flakit/[\w/]+\.py)\)")


def page(notebook, path, pictures):
    """Return the notebook as MyST-NB is to read it. pictures: the folder for its pictures, which the site has as
    _images."""
    up = "../" * len(path.relative_to(NOTEBOOKS).parts)
    for cell in prose_cells(notebook):
        cell.source = CLAIM.sub("", cell.source)
        cell.source = OF_THE_SOURCE.sub(lambda link: f"]({up}source/{link['file']}.md)", cell.source)
        cell.source = re.sub(r"\]\((\.\./)+data/README\.md\)", f"]({up}results/index.md)", cell.source)
        cell.source = re.sub(r"\]\((\.\./)+data/tuning\.md\)", f"]({up}results/h200_steps.md)", cell.source)
    if path in TRANSLATIONS:
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(STILL.format(lesson=path.name)))
        notebook.metadata["mystnb"] = {"code_prompt_show": "代码", "code_prompt_hide": "代码"}
    seen = 0
    for cell in code_cells(notebook):
        if folded(cell):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
        outputs = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                picture = _picture(data["image/png"], _words(data, cell), path, pictures, up, first=not seen)
                seen += 1
                output = nbformat.v4.new_output("display_data", {"text/html": picture})
            elif "text/html" in data:
                if not re.sub(r"<[^>]*>", "", data["text/html"]).strip():
                    continue  # rich shows an empty box where nothing was printed
                output["data"] = {"text/html": data["text/html"]}
            outputs.append(output)
        cell.outputs = outputs
    return notebook


def folded(cell):
    """Return whether a cell's code is folded: it is so in JupyterLab, or does nothing but call what draws a picture."""
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        return True
    shown = [output.get("data", {}) for output in cell.outputs]
    draws = any("image/png" in data or "flakit-player" in data.get("text/html", "") for data in shown)
    try:
        *before, last = ast.parse(cell.source).body or [None]
    except SyntaxError:
        return False
    return draws and isinstance(last, ast.Expr) and all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in before)


def _words(data, cell):
    """Return a picture's description; for one whose description is an address in memory, the line that draws it."""
    words = data.get("text/plain", "")
    return f"picture drawn by {cell.source.splitlines()[-1]}" if re.search(r"\bat 0x", words) else words


def _picture(png, words, path, pictures, up, first):
    """Return the HTML of a picture, which is written to a file named by a hash of its content."""
    content = base64.b64decode(png)
    file = Path(path.stem) / f"{hashlib.sha256(content).hexdigest()[:16]}.png"
    if not (pictures / file).exists():
        (pictures / file).parent.mkdir(parents=True, exist_ok=True)
        (pictures / file).write_bytes(content)
    width, height = Image.open(io.BytesIO(content)).size
    lazily = "" if first else ' loading="lazy"'
    return (
        f'<img class="picture" src="{up}_images/{file.as_posix()}" alt="{html.escape(words)}" '
        f'width="{width}" height="{height}" style="--width: {width}px"{lazily} decoding="async">'
    )


def panel_html(pages, lesson, call):
    """Return what the first cell of a lesson's page shows whose code contains that call; for the front page."""
    (path,) = (path for path in LESSONS if path.stem == lesson)
    cell = next(cell for cell in code_cells(pages[path]) if f"{call}(" in cell.source)
    (shown,) = (output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {}))
    return shown.replace('src="../', 'src="')


def anchor(heading):
    """Return JupyterLab's anchor of a heading, so that links within a notebook work in both."""
    return heading.replace(" ", "-")


def title(notebook):
    return re.match(r"# (.+)", notebook.cells[0].source)[1]


def sources(notebooks):
    """Return the files of flakit that notebooks link to, sorted."""
    text = "\n".join(cell.source for notebook in notebooks for cell in prose_cells(notebook))
    return sorted({link["file"] for link in OF_THE_SOURCE.finditer(text)})
