"""The command line, `flakit`: lab, progress, doctor, cases, diagnose, headroom, audit, trace, sweep, bench, tune."""

from typing import Annotated

import typer

from .. import __version__
from . import casebook, kernels, lessons, speed

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


# In the order of `flakit --help`. What a command does not know is JupyterLab's, or a knob of a case.
_OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=_OTHERS)(lessons.lab)
app.command("progress")(lessons.show_progress)
app.command()(lessons.doctor)
app.command(context_settings=_OTHERS)(casebook.cases)
app.command()(casebook.diagnose)
app.command()(casebook.headroom)
app.command()(kernels.audit)
app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(kernels.trace)
app.command()(kernels.sweep)
app.command()(speed.bench)
app.command()(speed.tune)
