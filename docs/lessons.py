"""Where the notebooks are, and running one in its own kernel: for tests, `make notebooks` and `make site`."""

import os
import tempfile
from pathlib import Path
from pkgutil import resolve_name

import nbformat
import torch
from nbclient import NotebookClient
from traitlets.config import Config

from flakit import lab

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
TRANSLATIONS = sorted((NOTEBOOKS / "zh").glob("*.ipynb"))
WITH_EXERCISES = [path for path in LESSONS if path.stem != "00_training_is_broken"]  # where one looks something up
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
CELL_TIMEOUT = 120  # seconds; a whole notebook is meant to take 20
MAX_BYTES = 400_000
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def name(path):
    return path.relative_to(NOTEBOOKS).with_suffix("").as_posix()


def starting_with(prefixes, paths):
    """Return the notebooks whose file name, such as 04… or zh/04…, starts with a prefix; without any, all."""
    prefixes = tuple(prefixes) or ("",)
    return [
        path for path in paths if any(x.startswith(prefixes) for x in (path.name, f"{path.parent.name}/{path.name}"))
    ]


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def kernel_environment():
    """Return a kernel's environment as `make lab` sets it, with Triton's interpreter if there is no GPU."""
    return {**os.environ, **lab.environment(), "TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}


def run(path, change=lambda notebook: notebook, timeout=CELL_TIMEOUT, mine=None):
    """Run all cells of the notebook at `path` from top to bottom; return a copy with their outputs.

    change: applied to the notebook before it runs. timeout: of a cell, in seconds. mine: the folder for the functions
    that building exercises store; None: a temporary one. FLAKIT_KERNELS names another kernel manager, "module:class":
    the tests' kernels start at once. Raises nbclient's CellExecutionError, which shows the cell and its traceback."""
    done = change(read(path))
    with tempfile.TemporaryDirectory() as folder:
        # Files for sockets: of two kernels that start at once, one may find the port taken that it was promised.
        sockets = {} if os.name == "nt" else {"transport": "ipc", "ip": os.path.join(folder, "kernel")}
        client = NotebookClient(
            done,
            timeout=timeout,
            kernel_name="python3",
            kernel_manager_class=resolve_name(os.environ.get("FLAKIT_KERNELS", "jupyter_client:AsyncKernelManager")),
            record_timing=False,
            shutdown_kernel="immediate",  # one that goes by itself takes two seconds more
            config=Config({"KernelManager": sockets}),
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute(env={**kernel_environment(), "FLAKIT_MINE": str(mine or os.path.join(folder, "mine"))})
    return done
