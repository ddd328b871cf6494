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
    first_calls: Annotated[bool, typer.Option(help="Time first calls too, in fresh processes.")] = True,
):
    """Time the operators on this machine's GPU, beside flash-linear-attention where it is installed."""
    import torch

    from .bench.speed import CASES, provenance, rows
    from .numerics.recorded import write

    console = Console()
    if not torch.cuda.is_available():
        console.print(
            "flakit bench: expected a CUDA GPU, found none; data/h200_rwkv6_speed.json holds recorded figures"
        )
        raise typer.Exit(1)
    table = Table("operator", "form", "dtype", "B, T, H, K, V", "decay", "who", "forward ms", "both ms", "GiB", "error")
    found = []
    for case in track(CASES, "timing", console=console):
        for row in rows([case], first_calls=first_calls):
            found.append(row)
            sizes = ", ".join(str(row[axis]) for axis in "BTHKV")
            times = f"{row['forward_ms']:.2f}", f"{row['both_ms']:.2f}"
            what = row["op"], row["form"], row["dtype"], sizes, str(row["decay"]), row["who"]
            table.add_row(*what, *times, f"{row['extra_gib']:.2f}", f"{row['error']:.1e}")
    console.print(table)
    if out is not None:
        console.print(f"wrote {write(out, provenance('flakit bench --out data/h200_rwkv6_speed.json'), found)}")


if __name__ == "__main__":
    app()
