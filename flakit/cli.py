"""The command line: `flakit doctor`, `flakit bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

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


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option(help="Also write the table as a recording, a .json.")] = None,
    peers: Annotated[bool, typer.Option(help="Time flash-linear-attention too, where it is installed.")] = True,
    first_calls: Annotated[bool, typer.Option(help="Time first calls too, in fresh processes.")] = False,
    only: Annotated[str, typer.Option(help='Cases whose description holds this, e.g. "chunk" or "T=32768".')] = "",
):
    """Time the operators on this machine's GPU. A peer that tunes itself at run time takes minutes per shape."""
    import torch

    from .bench.speed import CASES, provenance, rows
    from .numerics.recorded import write

    console = Console()
    if not torch.cuda.is_available():
        console.print(
            "flakit bench: expected a CUDA GPU, found none; data/h200_speed.json holds recorded figures"
        )
        raise typer.Exit(1)
    table = Table("operator", "form", "dtype", "B, T, H, K, V", "decay", "who", "forward ms", "both ms", "GiB", "error")
    found = []
    for case in track([case for case in CASES if only in str(case)], "timing", console=console):
        for row in rows([case], peers=peers, first_calls=first_calls):
            found.append(row)
            if out is not None:  # after every row: a table cut short is still a table
                write(
                    out,
                    provenance("flakit bench --first-calls --out data/h200_speed.json") | {"flakit": __version__},
                    found,
                )
            sizes = ", ".join(str(row[axis]) for axis in "BTHKV")
            times = f"{row['forward_ms']:.2f}", f"{row['both_ms']:.2f}"
            what = row["op"], row["form"], row["dtype"], sizes, str(row["decay"]), row["who"]
            table.add_row(*what, *times, f"{row['extra_gib']:.2f}", f"{row['error']:.1e}")
    console.print(table)


if __name__ == "__main__":
    app()
