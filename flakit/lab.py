"""`flakit lab`: copies the notebooks to a folder of the user's and opens JupyterLab there.

The learner's own file, mine.py, is made there once and not touched again.

A copy remembers the files as flakit delivered them: `.flakit.json` in the folder holds a fingerprint of each. A file
that still has its fingerprint was not changed and follows the next version; any other is the learner's and stays. Of a
notebook only the cells and their text count, not the outputs: running it, or saving it in JupyterLab, is no change.
"""

import hashlib
import importlib.util
import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePosixPath

from . import __version__
from .course import mine, record
from .numerics import carried

FIRST = "00_start_here.ipynb"
SETTINGS = "jupyterlab"  # of JupyterLab, beside the notebooks; not copied
RECORD = ".flakit.json"
OWN = {mine.FILE, mine.OLD, record.FILE}  # the learner's, made here: of a checkout's, nothing is copied
SOURCE = "source"  # in a copy: the files of flakit/ and data/ that the notebooks link to


# --- a folder of one's own ------------------------------------------------------------------------------------------


@dataclass
class Copied:
    """The result of `copy`: paths in the folder, by what happened to each file; unchanged ones are in no list."""

    new: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # changed by the learner, and this version has nothing new
    beside: dict[str, str] = field(default_factory=dict)  # changed by both: where this version's lies
    gone: list[str] = field(default_factory=list)  # no longer among flakit's, left where they are

    def __str__(self) -> str:
        counts = [(self.new, "new"), (self.updated, "updated"), ([*self.kept, *self.beside], "changed by you and kept")]
        lines = [", ".join(f"{len(names)} {word}" for names, word in counts if names) or "up to date"]
        lines += [f"  {name} stays yours; flakit {__version__}'s is {new}" for name, new in self.beside.items()]
        lines += [f"  {name} is no longer part of flakit; your copy stays" for name in self.gone]
        return "\n".join(lines)


def copy(folder: Path) -> Copied:
    """Copy this version's notebooks, solutions, glossary and pictures into `folder`, over no file that was changed.

    A file that was deleted comes back. If the learner and flakit both changed a file, the new one is put beside theirs,
    with a name that ends in "(flakit VERSION)"."""
    # Without a readable record, every file counts as the learner's.
    copied, now, result = record.entries(folder / RECORD, "files"), {}, Copied()
    for name, content in contents().items():
        place = folder / name
        now[name] = fingerprint(name, content)
        there = fingerprint(name, place.read_bytes()) if place.exists() else None
        if there is None:
            record.write(place, content)
            result.new.append(name)
        elif there == now[name]:
            pass
        elif there == copied.get(name):
            record.write(place, content)
            result.updated.append(name)
        elif copied.get(name) == now[name]:
            result.kept.append(name)
        else:
            result.beside[name] = _put_beside(place, content).relative_to(folder).as_posix()
    result.gone = [name for name in copied if name not in now and (folder / name).exists()]
    record.write(folder / RECORD, json.dumps({"version": __version__, "files": now}, indent=1))
    return result


def contents() -> dict[str, bytes]:
    """Return the content of every file that a copy has, by its path in the folder. Raise FileNotFoundError if flakit's
    own notebooks are missing."""
    notebooks = carried.folder("notebooks")
    if not (notebooks / FIRST).is_file():
        raise FileNotFoundError(f"the notebooks: expected them in {notebooks}, found none; is flakit installed whole?")
    files, linked = {}, set()
    for path in sorted(notebooks.rglob("*")):
        inside = PurePosixPath(path.relative_to(notebooks).as_posix())
        if str(inside) in OWN:
            continue
        if path.is_file() and inside.parts[0] != SETTINGS and not any(part.startswith(".") for part in inside.parts):
            content = path.read_bytes()
            if path.suffix in (".ipynb", ".md"):
                content, links = _with_links_inside(content, depth=len(inside.parts) - 1)
                linked |= links
            files[str(inside)] = content
    while linked:
        name = linked.pop()
        room, _, rest = name.partition("/")
        content = (carried.PACKAGE if room == "flakit" else carried.folder(room)).joinpath(rest).read_bytes()
        files[f"{SOURCE}/{name}"] = content
        if name.endswith(".md"):
            links = re.findall(r"\]\(([\w./-]+)\)", content.decode())
            beside = {posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in links}
            linked |= {link for link in beside if f"{SOURCE}/{link}" not in files}
    return files


def _with_links_inside(content: bytes, depth: int) -> tuple[bytes, set[str]]:
    """Return a text with its links to flakit/ and data/ changed to source/, and their targets. depth: of the text's
    folder."""
    up = "../" * depth
    links = re.compile(rf"\]\({re.escape('../' + up)}((?:flakit|data)/[\w./-]+)")
    text = content.decode()
    return links.sub(lambda link: f"]({up}{SOURCE}/{link[1]}", text).encode(), set(links.findall(text))


def fingerprint(name: str, content: bytes) -> str:
    """Return a hash of what a person would call the content: for a notebook, the kinds and texts of its cells."""
    if name.endswith(".ipynb"):
        try:
            cells = json.loads(content)["cells"]
            content = json.dumps([[cell["cell_type"], "".join(cell["source"])] for cell in cells]).encode()
        except (ValueError, KeyError, TypeError):  # no notebook any more: all of it counts
            pass
    return hashlib.sha256(content).hexdigest()


def _put_beside(place: Path, content: bytes) -> Path:
    """Write `content` beside `place` under an unused name, unless such a copy is there already; return its path."""
    numbers = chain([""], (f" {number}" for number in count(2)))
    names = (place.with_name(f"{place.stem} (flakit {__version__}){number}{place.suffix}") for number in numbers)
    beside = next(path for path in names if not path.exists() or path.read_bytes() == content)
    record.write(beside, content)
    return beside


# --- JupyterLab -----------------------------------------------------------------------------------------------------


def is_own(folder: Path) -> bool:
    """Return whether `folder` is where flakit reads its notebooks from, as in a checkout, so that nothing needs
    copying."""
    return folder.resolve() == carried.folder("notebooks").resolve()


def has_jupyterlab() -> bool:
    return importlib.util.find_spec("jupyterlab") is not None


def environment() -> dict[str, str]:
    """Return environment variables with which a process that runs notebooks must start; those already set keep their
    value."""
    import torch

    return {
        # Without a GPU, kernels run in Triton's interpreter, which must be chosen before their process starts.
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET") or str(int(not torch.cuda.is_available())),
        # A kernel shares the cores with a browser: OpenMP threads that spin while they wait make small tensors ten
        # times slower.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY") or "PASSIVE",
    }


def jupyterlab(root: Path, page: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command that serves `root` to this machine alone and opens `page`, a path in it. flags: for
    JupyterLab."""
    settings = carried.folder("notebooks") / SETTINGS
    as_root = ["--allow-root"] if getattr(os, "geteuid", lambda: None)() == 0 else []  # often so in a container
    return [
        *(sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={root.resolve()}"),
        f"--LabApp.default_url=/lab/tree/{page}",
        f"--LabApp.app_settings_dir={settings}",
        f"--LabApp.extra_labextensions_path={settings / 'labextensions'}",
        *as_root,
        *flags,
    ]


def start(folder: Path, flags: Sequence[str] = ()) -> int:
    """Open JupyterLab at the first notebook of `folder`, in place of this process; on Windows, wait for it and return
    its exit status. A checkout's own notebooks link to its other folders, so the whole checkout is served."""
    here = folder.resolve()
    root, page = (here.parent, f"{here.name}/{FIRST}") if is_own(here) else (here, FIRST)
    command = jupyterlab(root, page, flags)
    sys.stdout.flush()
    if sys.platform == "win32":
        return subprocess.call(command)
    os.execv(command[0], command)
