"""The commands flakit cases, diagnose and headroom: the faults of the casebook, and which decays would cause them."""

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from .common import as_json, cell, failure, progress_bar


def cases(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help='A case, or "all". Default: list them.', show_default=False)] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Run a case of the casebook, a reproduced fault, and print what its law predicts beside what is measured here.

    flakit cases                       lists the cases and their knobs

    flakit cases anchor                runs a case at its recorded settings

    flakit cases anchor --w -88.8      runs it at one setting of its knobs

    flakit cases all                   runs every case; exits with 1 if a law fails
    """
    from ..cases import registry

    warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter: infinities are what the cases are about
    console, errors = Console(), Console(stderr=True)
    try:
        knobs = _knobs(context.args)
        if not name or name == "all":
            if knobs:
                raise ValueError(f"{', '.join(knobs)}: expected the name of one case before its knobs")
            chosen = list(registry.CASES.values())
        else:
            chosen = [registry.find(name)]
            knobs = chosen[0].parse(knobs)
        if not name:
            _list_cases(chosen, console, json)
            return
        stories = {}
        for case in track(chosen, "measuring", console=errors, transient=True, disable=not errors.is_terminal):
            stories[case.name] = case.at(**knobs) if knobs else case.reproduce()
            if not json:
                console.print(_story(case, stories[case.name], knobs))
    except ValueError as error:
        raise failure("cases", error) from None
    if json:
        tables = {name: [row._asdict() | {"agrees": row.agrees} for row in rows] for name, rows in stories.items()}
        typer.echo(as_json({"knobs": knobs, "cases": tables}))
    failed = [f"{name}: {row.what}" for name, rows in stories.items() for row in rows if row.agrees is False]
    if failed and not json:
        console.print(f"{len(failed)} not as predicted", style="bold red")
    raise typer.Exit(bool(failed))


def _knobs(words: list[str]) -> dict[str, str]:
    """Parse knobs: {"w": "-88.8"} from ["--w", "-88.8"] or ["--w=-88.8"]. Raise ValueError for a missing name or
    value."""
    values, words = {}, list(words)
    while words:
        word = words.pop(0)
        knob, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not knob:
            raise ValueError(f"expected knobs like --w -88.8, got {word!r}")
        if not has_value:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{knob}: expected a value, got none")
            value = words.pop(0)
        values[knob.replace("-", "_")] = value
    return values


def _list_cases(listed, console: Console, json: bool) -> None:
    if json:
        fields = ("name", "title", "reported", "measured", "threads", "notebook")
        entries = [
            {field: getattr(case, field) for field in fields}
            | {"knobs": {name: {"default": knob.default, "expects": knob.expects} for name, knob in case.knobs.items()}}
            for case in listed
        ]
        typer.echo(as_json(entries))
        return
    table = Table.grid(padding=(0, 2))
    for case in listed:
        _add_head(table, case)
        defaults = {name: cell(knob.default) for name, knob in case.knobs.items()}
        knobs = " ".join(f'--{name} "{x}"' if " " in x else f"--{name} {x}" for name, x in defaults.items())
        table.add_row("  [dim]knobs[/]", f"[dim]{escape(knobs)}[/]")
        table.add_row()
    console.print(table, highlight=False)
    console.print(
        "flakit cases NAME runs one, flakit cases NAME --KNOB VALUE at one setting, flakit cases all runs all."
    )


def _add_head(table: Table, case) -> None:
    """Add a case's title to a table, and what was reported of its fault and what was measured."""
    reported = f"{escape(case.reported)} [dim]({', '.join(case.threads)})[/]" if case.threads else escape(case.reported)
    table.add_row(f"[bold]{case.name}[/]", escape(case.title))
    table.add_row("  [dim]reported[/]", reported)
    table.add_row("  [dim]measured[/]", f"{escape(case.measured)} [dim](notebooks/{case.notebook}.ipynb)[/]")


def _story(case, rows: list, knobs: dict) -> Group:
    """Return a case as it is printed: its title, what was reported and measured, then a table of its rows."""
    setting = ", ".join(f"{name} = {value}" for name, value in knobs.items()) or "the story's numbers"
    numbers = (Column(heading, justify="right") for heading in ("recorded", "law", "measured", "agree"))
    table = Table(setting, *numbers, box=box.SIMPLE_HEAD)
    marks = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: ""}
    for row in rows:
        cells = (escape(cell(x)) for x in (row.what, row.recorded, row.law, row.measured))
        table.add_row(*cells, marks[row.agrees])
    story = Table.grid(padding=(0, 2))
    _add_head(story, case)
    return Group(story, table)


def faults_table() -> Table:
    """Return an empty table of faults with the columns fault, lesson and one per tensor."""
    from ..cases.fingerprint import SHORT, TENSORS

    tensors = (Column(SHORT.get(name, name), justify="center") for name in TENSORS)
    # Without padding, a terminal of 80 columns has room for the faults' names.
    return Table("fault", "lesson", *tensors, box=box.SIMPLE_HEAD, padding=0)


def diagnose(
    seen: Annotated[list[str], typer.Argument(help="TENSOR=ok, wrong, inf or nan, such as dr=nan.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Print the faults of the casebook that make these tensors of an RWKV6 call wrong, those that agree best first.

    Tensors: o, dr, dk, dv, dw, du, S_T (the final state) and dS_0 (the initial state's gradient).

    flakit diagnose o=ok dr=nan du=ok

    Exits with 1 if no fault agrees, 2 if it could not run."""
    from ..cases import fingerprint as fingerprints

    console = Console()
    try:
        pairs = [text.partition("=") for text in seen]
        if odd := [text for text, (_, equals, _) in zip(seen, pairs, strict=True) if not equals]:
            raise ValueError(f"expected what was seen as dr=nan, got {odd[0]!r}")
        fits = fingerprints.diagnose({name: kind for name, _, kind in pairs})
    except ValueError as error:
        raise failure("diagnose", error) from None
    good = [fit for fit in fits if fit.good]
    shown = good or fits[:3]
    if json:
        typer.echo(as_json([_fit(fit) for fit in shown]))
        raise typer.Exit(not good)
    if not good:
        console.print("No fault of the casebook does that. Nearest:", style="bold red")
    table = faults_table()
    table.add_column("agree", justify="right")
    for fit in shown:
        cells = (
            f"[bold red]{cell.kind}[/]" if name in fit.against else cell.kind for name, cell in fit.row.cells.items()
        )
        table.add_row(fit.row.cause.name, fit.row.cause.lesson, *cells, f"{fit.agree:g} of {fit.given}")
    console.print(table)
    for fit in shown[:3]:
        cause = fit.row.cause
        console.print(f"{cause.name}: {cause.what}. {cause.test} (flakit cases {cause.case})", markup=False)
    raise typer.Exit(not good)


def _fit(fit) -> dict:
    cause, cells = fit.row.cause, {name: cell._asdict() for name, cell in fit.row.cells.items()}
    words = {"fault": cause.key, "lesson": cause.lesson, "case": cause.case, "what": cause.what, "test": cause.test}
    return words | {"agree": fit.agree, "given": fit.given, "against": list(fit.against), "tensors": cells}


def headroom(
    file: Annotated[
        Path,
        typer.Argument(help="Decays [B, T, H, K], or several by name: .pt, .safetensors, .npy; or a checkpoint."),
    ],
    op: Annotated[
        str | None,
        typer.Option(help="What they are for: rwkv6, kda, …, file.py:naive. Default: a checkpoint's, else rwkv6."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="What a checkpoint runs on, [T] or [B, T]: .pt, .npy. Default: 1024 random tokens."),
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="A tensor of the file; may be repeated. Default: all.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A kernel, as the table names it; may be repeated.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16 or float16; may be repeated. Default: all.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens a chunk, a power of two.")] = 64,
    block: Annotated[int, typer.Option(help="Rows a block, a power of two.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print the margins of every layer as JSON.")] = False,
):
    """Print which kernels would make NaN of a model's decays, at which token, and how far the others are from that.

    No kernel is run, and nothing in the file is executed: the exponents that each kernel takes are compared with its
    law. Decays of -inf are counted, because a gate w = -exp(x) has no gradient there. A checkpoint of RWKV6 or RWKV7,
    by the names of RWKV-LM or flash-linear-attention, runs in float32 on tokens, and each layer's decays are measured.

    flakit headroom decays.safetensors --op gsa --layer blocks.3

    flakit headroom decays.pt --only first-row --dtype bfloat16

    flakit headroom RWKV-x060.pth --tokens text.npy

    Exits with 0 if no kernel shown breaks in a number format shown, 1 if one does, 2 if it could not run."""
    from ..cases import decay_checkpoint, decay_files
    from ..cases.headroom import headroom as measure
    from ..cases.laws import LN_MAX

    console, errors = Console(), Console(stderr=True)
    try:
        formats = {str(x).removeprefix("torch."): x for x in LN_MAX}
        if odd := [name for name in dtype or () if name not in formats]:
            raise ValueError(f"--dtype: expected one of {', '.join(formats)}, got {odd[0]!r}")
        formats = {name: x for name, x in formats.items() if not dtype or name in dtype}
        with progress_bar(errors, f"reading {file.name}") as progress:
            layers, op = _decays(file, op, tokens, decay_files, decay_checkpoint)
            if odd := [name for name in layer or () if name not in layers]:
                known = ", ".join(filter(None, layers))
                expected = f"one of {known}" if known else f"none, since {file.name} holds one tensor without a name"
                raise ValueError(f"--layer: expected {expected}, got {odd[0]!r}")
            layers = {name: layers[name] for name in layer} if layer else layers
            result = measure(layers, op, chunk, block=block, only=only or None, progress=progress)
    except (ValueError, TypeError, OSError) as error:
        raise failure("headroom", error) from None
    breaks = any(m.breaks for m in result.margins if m.dtype in formats.values())
    if json:
        of_margin = "kernel dtype exponent limit factor breaks batch token head channel tokens"
        shown = {name: [m for m in of if m.dtype in formats.values()] for name, of in result.layers.items()}
        margins = {name: [_fields(m, of_margin) for m in of] for name, of in shown.items()}
        gates = {name: _fields(gate, "dtype infinite largest margin") for name, gate in result.gates.items()}
        sizes = {"op": op, "chunk": chunk, "block": block}
        typer.echo(as_json({**sizes, "breaks": breaks, "layers": margins, "gates": gates}))
    else:
        console.print(_headroom(result, formats))
    raise typer.Exit(breaks)


def _decays(file: Path, op: str | None, tokens: Path | None, decay_files, decay_checkpoint) -> tuple[dict, str]:
    """Return the decays of a file or of a checkpoint's run on tokens, by layer, and the operator that they belong to.
    Raise ValueError for tokens without a checkpoint, and for another operator than the checkpoint's."""
    weights = decay_checkpoint.load(file)
    if weights is None:
        if tokens is not None:
            raise ValueError(f"--tokens: expected none, since {file.name} holds decays, no checkpoint")
        return decay_files.layers(file), op or "rwkv6"
    trained, layers = decay_checkpoint.decays(weights, tokens)
    if op not in (None, trained):
        raise ValueError(f"--op: expected {trained}, since {file.name} is a checkpoint of it, got {op!r}")
    return layers, trained


def _fields(x, names: str) -> dict:
    """Return the named fields of a margin or a gate for JSON."""
    return {name: getattr(x, name) for name in names.split()} | {"dtype": str(x.dtype).removeprefix("torch.")}


def _headroom(result, formats: dict) -> Group:
    from ..numerics.words import number

    numbers = (Column(head, justify="right") for head in ("exponent", *formats))
    table = Table("kernel", *numbers, "where the exponent is largest", box=box.SIMPLE_HEAD)
    for kernel in dict.fromkeys(m.kernel for m in result.margins):
        of = [result.margin(kernel, dtype) for dtype in formats.values()]
        factors = (f"[bold red]{m.factor:.3g}[/]" if m.breaks else number(m.factor, 3, inf="any") for m in of)
        table.add_row(escape(kernel), f"{of[0].exponent:.4g}", *factors, escape(of[0].place))
    head = f"{result.op}, chunks of {result.chunk}, blocks of {result.block}. By number format: what all decays can be"
    head += " multiplied by until it breaks; below 1, red: it breaks on these decays; any: never"
    return Group(head, table, escape(str(result.gate)))
