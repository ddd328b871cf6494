"""The commands flakit audit, trace and sweep: instruments for an operator of flakit or for a user's own kernel."""

import os
import tempfile
import warnings
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .common import as_json, cell, failure, progress_bar, writable, writable_folder


def audit(
    subject: Annotated[str, typer.Argument(help="chunk_rwkv6, package.module:attribute or file.py:attribute.")],
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            "--reference",
            help="The operator: rwkv6, kda, …, or file.py:naive, a reference that is described in its docstring. "
            "Default: what the name says.",
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A function that translates, file.py:attribute.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A probe to run; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the verdicts, versions and device as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with figures.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that page in a browser.")] = False,
    repros: Annotated[Path | None, typer.Option(help="A folder for a script of its own for each failure.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.", min=0)] = 0,
    full: Annotated[bool, typer.Option("--full", help="Denser grids and long sequences, for GPUs.")] = False,
    shrink: Annotated[
        bool, typer.Option(help="Shrink failures to the smallest setting; needs the extra audit.")
    ] = True,
):
    """Compare a linear-attention kernel with the float64 truth, in probes that each look for a fault of a real kernel.

    flakit audit chunk_rwkv6

    flakit audit my_kernel.py:my_op --like rwkv6 --html report.html --open

    flakit audit my_kernel.py:my_op --reference my_kernel.py:naive

    Exits with 0 if no probe fails (what is not supported is no failure), 1 if one does, 2 if it could not run."""
    import torch

    from ..ops.common.dispatch import has_triton

    if has_triton() and not torch.cuda.is_available():  # before anything imports triton, and that is the subject
        os.environ.setdefault("TRITON_INTERPRET", "1")
        warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter
    from ..instruments.audit import audit as run
    from ..instruments.subject import load

    console, errors = Console(), Console(stderr=True)
    try:
        writable("--json", json)
        writable("--html", html)
        writable_folder("--repros", repros)
        with progress_bar(errors, "looking at the subject") as progress:
            options = {"only": only or None, "seed": seed, "full": full, "shrink": shrink, "progress": progress}
            report = run(load(subject, like, adapter), **options)
    except (Exception, SystemExit) as error:  # whatever the subject's own module raises: it could not run
        words = str(error) if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {error}"
        raise failure("audit", words) from None
    console.print(report)
    if show and html is None:
        html = Path(tempfile.mkdtemp()) / "audit.html"
    for path, write in ((json, report.write_json), (html, report.write_html), (repros, report.write_repros)):
        if path is not None:
            write(path)
    if show:
        opened = webbrowser.open(html.resolve().as_uri())
        errors.print(f"{'opened' if opened else 'no browser was found to open'} {html}", highlight=False)
    raise typer.Exit(not report.passed)


def trace(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script; what follows it is its own.")],
    module: Annotated[bool, typer.Option("-m", help="It is a module, as for `python -m`.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what was found as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also write the picture, a .png.")] = None,
    interpret: Annotated[bool, typer.Option(help="Interpret Triton kernels also where there is a GPU.")] = False,
    digits: Annotated[bool, typer.Option(help="Also say which line lost digits.")] = False,
    rounds: Annotated[
        int, typer.Option(min=0, help="With --digits: run so often more, interpreted, each time rounded at random.")
    ] = 0,
):
    """Run a script and print where its first NaN or infinity arises: kernel, line, tile and lane, or PyTorch operation.

    With --digits everything is also computed in float64, and the lines that lose digits are named. On a GPU each launch
    of a Triton kernel is interpreted as well, which takes seconds, and compared with what the compiled kernel stored.

    The script runs in a process of its own, its Triton kernels in Triton's interpreter where there is no GPU. Exits
    with 0 if all was finite, 1 if something was found, 2 if nothing ran or the script did not come to its end.

    flakit trace my_script.py --seed 3

    flakit trace -m pytest test_mine.py -k decay

    flakit trace --digits my_script.py
    """
    from ..instruments.trace_script import start

    try:
        writable("--json", json)
        writable("--picture", picture)
        if not module and not Path(script).is_file():
            raise ValueError(f"script: expected a file, {script} does not exist")
        if rounds and not digits:
            raise ValueError(f"--rounds: expected beside --digits, got {rounds} alone")
        if rounds == 1:
            raise ValueError("--rounds: expected two or more, which can differ, got 1")
    except ValueError as error:
        raise failure("trace", error) from None
    options = ["--module"] * module
    options += [f"--json={json}"] * (json is not None) + [f"--picture={picture}"] * (picture is not None)
    options += ["--digits"] * digits + [f"--rounds={rounds}"] * (rounds > 0)
    raise typer.Exit(start(script, context.args, *options, interpret=interpret or rounds > 0))


def sweep(
    subject: Annotated[str, typer.Argument(help="An operator's name, file.py:function or module:function.")],
    over: Annotated[list[str], typer.Option(help='An axis: "decay=-0.1,-1,-10", "decay=-0.1..-100:13", "T=16,64".')],
    like: Annotated[
        str,
        typer.Option(
            "--like",
            "--reference",
            help="The operator that a kernel of your own computes: rwkv6, kda, …, file.py:naive.",
        ),
    ] = "",
    fixed: Annotated[list[str] | None, typer.Option("--set", help='A setting that stays: "K=64".')] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    engine: Annotated[str, typer.Option(help="processes, or ray: a cluster, which needs the extra ray.")] = "processes",
    store: Annotated[Path | None, typer.Option(help="Keeps each measurement: run again, it goes on.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the table; needs pyarrow.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the grids.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw two axes as a phase diagram, a .png.")] = None,
    tensor: Annotated[str, typer.Option(help="What the picture shows; default: all.")] = "",
    law: Annotated[str, typer.Option(help="A function of the other axis: the largest |decay|; module:function.")] = "",
):
    """Measure an operator, or a kernel of your own, over a grid of settings: where it is finite, and its error there.

    flakit sweep rwkv6 --over decay=-0.1..-100:7 --over T=64,256 --set K=32 --workers 2 --store found.jsonl --csv a.csv

    flakit sweep my_kernel.py:chunk --like rwkv6 --over decay=-1,-10 --over T=64,100
    """
    import torch

    if ":" in subject and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before the subject imports Triton
    from ..numerics import sweep as module
    from ..numerics.arguments import named_function

    console, errors = Console(), Console(stderr=True)
    try:
        axes = _axes(over, "--over")
        stays = {name: values[0] for name, values in _axes(fixed or (), "--set").items()}
        for option, path in (("--csv", csv), ("--parquet", parquet), ("--json", json), ("--picture", picture)):
            writable(option, path)
        if store is not None and not store.is_dir() and store.suffix not in ("", ".jsonl"):
            raise ValueError(
                f"--store: expected a name ending in .jsonl, or a folder, got {store}; --csv writes a table"
            )
        if law and ":" not in law:
            raise ValueError(f"--law: expected module:function or file.py:function, got {law!r}")
        limit = named_function(law, "--law") if law else None
        result = module.sweep(
            subject, axes, like=like or None, workers=workers, engine=engine, store=store, progress=errors.is_terminal,
            **stays,
        )  # fmt: skip
        for path, write in ((csv, result.to_csv), (parquet, result.to_parquet)):
            if path is not None:
                write(path)
        if json is not None:
            json.write_text(as_json(result.to_dict()) + "\n", encoding="utf-8")
        if picture is not None:
            from ..figures.phase import phase

            picture.write_bytes(phase(result, tensor=tensor or None, law=limit).canvas.png())
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise failure("sweep", error) from None
    except KeyboardInterrupt:
        errors.print(f"stopped; {f'run it again to go on from {store}' if store else 'nothing was kept: --store'}")
        raise typer.Exit(130) from None
    console.print(_onsets(result))


def _axes(texts, option: str) -> dict[str, list]:
    axes: dict[str, list] = {}
    for text in texts:
        name, values = _axis(text, option)
        if name in axes:
            raise ValueError(f"{option}: expected {name} once, got it twice; values of one axis stand behind commas")
        axes[name] = values
    return axes


def _axis(text: str, option: str) -> tuple[str, list]:
    """Parse an axis: ("decay", [-0.1, -1.0]) from "decay=-0.1,-1"; a..b:n are n values evenly spaced in their
    logarithm. Raise ValueError, with the option's name, for other text."""
    import torch

    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise ValueError(f"{option}: expected name=value,value or name=first..last:count, got {text!r}")

    def value(word: str):
        if isinstance(getattr(torch, word, None), torch.dtype):
            return getattr(torch, word)
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                pass
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)

    if ".." in values:
        first, _, rest = values.partition("..")
        last, _, count = rest.partition(":")
        try:
            low, high, n = float(first), float(last), int(count)
        except ValueError:
            raise ValueError(f"{option}: expected name=first..last:count, got {text!r}") from None
        if low * high <= 0 or n < 2:
            raise ValueError(f"{option}: expected two numbers of one sign and a count of at least 2, got {text!r}")
        return name, [low * (high / low) ** (i / (n - 1)) for i in range(n)]
    return name, [value(word) for word in values.split(",")]


def _onsets(result) -> Group:
    """Return the printed summary of a sweep: for each tensor, where it is finite and how large its error is there."""
    import numpy as np

    def at(index) -> str:
        return ", ".join(f"{axis}={cell(of[i])}" for (axis, of), i in zip(result.axes.items(), index, strict=True))

    table = Table("tensor", "finite in", "first not finite at", "largest error where finite", "at")
    for name in result.tensors:
        share, error = result[f"{name}.finite"], result.grids.get(f"{name}.l2")
        whole, index = share == 1, next(zip(*(share < 1).nonzero(), strict=True), None)
        most, where = "", ""
        if error is not None and whole.any():
            place = max(zip(*whole.nonzero(), strict=True), key=lambda place: error[place])
            most, where = f"{error[place]:.1e}", at(place)
        table.add_row(name, f"{int(whole.sum())} of {share.size}", "" if index is None else at(index), most, where)
    for name in result.grids:
        if "." not in name:
            numbers = result[name][result[name] == result[name]]
            table.add_row(name, f"{numbers.min():.4g} … {numbers.max():.4g}" if numbers.size else "", "", "", "")
    raised = [place for place in np.ndindex(result.raised.shape) if result.raised[place]]
    if not raised:
        return Group(table)
    where = f"raised an error in {len(raised)} of {result.raised.size}, first at {at(raised[0])}"
    return Group(table, Text(f"{where}: {result.raised[raised[0]]}", style="bold"))
