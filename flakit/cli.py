"""The command line: `flakit doctor`."""

from typing import Annotated

import typer
from rich.console import Console

from . import __version__

app = typer.Typer(
    help="flakit: an interactive laboratory for the numerics of linear-attention kernels.", no_args_is_help=True
)


def _show_version(wanted: bool):
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
):
    pass


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print everything found as JSON.")] = False):
    """Say what works here, and how to repair what does not. Exits with 1 if something essential is broken."""
    from .doctor import examine

    if json:
        diagnosis = examine()
        typer.echo(diagnosis.as_json())
    else:
        console = Console()
        with console.status("looking around and running every operator ..."):
            diagnosis = examine()
        console.print(diagnosis)
    raise typer.Exit(not diagnosis.works)


if __name__ == "__main__":
    app()
