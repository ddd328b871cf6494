"""The commands flakit lab, progress and doctor: the notebooks, the learner's progress, and a check of this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .casebook import faults_table
from .common import as_json, failure


def lab(
    context: typer.Context,
    folder: Annotated[
        str, typer.Argument(help="Where your notebooks are, or are to be. Before JupyterLab's options.")
    ] = "flakit-notebooks",
    open: Annotated[bool, typer.Option("--open/--no-open", help="Open JupyterLab, or copy only.")] = True,
):
    """Copy the notebooks to a folder of yours and open JupyterLab there, at the first of them.

    What you changed stays as it is; what you did not change follows a new version of flakit.

    Where both changed, the new file is put beside yours. A file that you deleted comes back.

    flakit lab                         copies to ./flakit-notebooks

    flakit lab mine --port=8899        a folder of another name; other options go to JupyterLab
    """
    from .. import lab as own
    from ..course import mine

    console = Console(soft_wrap=True)
    flags = list(context.args)
    if folder.startswith("-"):  # no folder: an option of JupyterLab's
        folder, flags = "flakit-notebooks", [folder, *flags]
    place = Path(folder).expanduser()
    try:
        if open and not own.has_jupyterlab():
            raise ModuleNotFoundError('JupyterLab is not installed here: pip install "flakit[lab]"')
        if not own.is_own(place):
            console.print(f"== the notebooks, in {place.resolve()}\n{own.copy(place)}", markup=False, highlight=False)
        console.print(f"== your kernel: {mine.create(place).resolve()}", markup=False, highlight=False)
    except (ModuleNotFoundError, OSError) as error:
        raise failure("lab", error, code=1) from None
    if not open:
        return
    os.environ.update(own.environment())
    console.print("== flakit doctor")
    if not _diagnosed().works:
        raise typer.Exit(1)
    console.print("== JupyterLab: open the address with the token below if no browser opens; stop with Ctrl-C")
    raise typer.Exit(own.start(place, flags))


def show_progress(
    folder: Annotated[
        Path | None, typer.Argument(help="Where your mine.json is. Default: here, or the notebooks' folder in here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Print which checks of the lessons were answered correctly, which comes next, and the faults that these lessons
    explain.

    It reads mine.json, where the notebooks record it on this machine.

    flakit progress

    flakit progress flakit-notebooks

    Exits with 2 if there is no such folder."""
    from ..cases import fingerprint as fingerprints
    from ..course import progress, record

    console = Console(soft_wrap=True)
    if folder is not None and not folder.is_dir():
        raise failure("progress", f"folder: expected an existing one, got {str(folder)!r}")
    places = [record.folder(), Path("flakit-notebooks"), Path("notebooks")] if folder is None else [folder]
    place = next((each for each in places if (each / record.FILE).is_file()), places[0])
    state = progress(place)
    rows = fingerprints.fingerprint(state.faults) if state.faults else {}
    if json:
        after = state.next and {"lesson": state.next[0].name, "check": state.next[1]}
        lessons = {lesson.name: lesson.checks for lesson in state.lessons}
        faults = {name: {tensor: cell._asdict() for tensor, cell in row.cells.items()} for name, row in rows.items()}
        typer.echo(as_json({"folder": str(place.resolve()), "lessons": lessons, "next": after, "faults": faults}))
        return
    console.print(f"== {(place / record.FILE).resolve()}\n{state}", markup=False, highlight=False)
    if rows:
        table = faults_table()
        for name, cause in fingerprints.CAUSES.items():
            known = rows[name].cells.values() if name in rows else ()
            cells = [cell.kind for cell in known] or ["·"] * len(fingerprints.TENSORS)
            table.add_row(cause.name, cause.lesson, *cells, style=None if name in rows else "dim")
        Console().print(table)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print everything found as JSON.")] = False):
    """Print what works here, and how to repair what does not. Exits with 1 if something essential is broken."""
    from ..doctor import examine

    if json:
        diagnosis = examine()
        typer.echo(diagnosis.as_json())
    else:
        diagnosis = _diagnosed()
    raise typer.Exit(not diagnosis.works)


def _diagnosed():
    """Examine this machine, print the diagnosis and return it."""
    from ..doctor import examine

    console = Console()
    with console.status("looking around and running every operator ..."):
        diagnosis = examine()
    console.print(diagnosis)
    return diagnosis
