"""Helpers of several commands: JSON, cells of tables, errors, and checks of files to write."""

import json as json_module
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress


def as_json(x: object) -> str:
    from ..numerics.words import for_json

    return json_module.dumps(for_json(x), indent=1)


def cell(x: object) -> str:
    from ..numerics.words import number

    return "none" if x is None else number(x, nan="", inf="never")


def failure(command: str, error: object, *, code: int = 2, soft_wrap: bool = False) -> typer.Exit:
    """Print why a command cannot run, and return the exception that ends it with this exit code."""
    message = f"flakit {command}: {error}"
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=soft_wrap)
    return typer.Exit(code)


@contextmanager
def progress_bar(errors: Console, what: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar where `errors` is a terminal; yield progress(what, done, of), which moves it."""
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, of: bar.update(task, description=what or None, completed=done, total=of)


def writable(option: str, path: Path | None, ending: str = "") -> None:
    """Raise ValueError unless an option's file can be written, before the command begins its work. ending: of its
    name."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: expected a file, {path} is a folder")
    if ending and path.suffix != ending:
        raise ValueError(f"{option}: expected a name ending in {ending}, got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: expected a folder that there is, got {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{option}: expected a file that can be written, got {path}")


def writable_folder(option: str, path: Path | None) -> None:
    """Make the folder of an option before the command begins its work. Raise ValueError if that fails."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: expected a folder that is there or can be made, got {path}") from error
