"""The command line, `flakit`: lab, progress, doctor, cases, diagnose, headroom, audit, bench, tune, trace, sweep."""

import json as json_module
import os
import tempfile
import warnings
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import Progress, track
from rich.table import Table
from rich.text import Text

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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    folder: Annotated[
        str, typer.Argument(help="Where your notebooks are, or are to be. Before JupyterLab's options.")
    ] = "flakit-notebooks",
    open: Annotated[bool, typer.Option("--open/--no-open", help="Open JupyterLab, or copy only.")] = True,
):
    """Copy the notebooks to a folder of yours and open JupyterLab there, at the first of them.

    What you changed stays as it is; what you did not change follows a new version of flakit.

    Where both changed, the new one is put beside yours. A file that you deleted comes back.

    flakit lab                         copies to ./flakit-notebooks

    flakit lab mine --port=8899        a folder of another name; other options go to JupyterLab
    """
    from . import lab as own
    from .course import mine

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
        Console(stderr=True).print(f"flakit lab: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if not open:
        return
    os.environ.update(own.environment())
    console.print("== flakit doctor")
    if not _diagnosed().works:
        raise typer.Exit(1)
    console.print("== JupyterLab: open the address with the token below if no browser opens; stop with Ctrl-C")
    raise typer.Exit(own.start(place, flags))


@app.command("progress")
def _progress(
    folder: Annotated[
        Path | None, typer.Argument(help="Where your mine.json is. Default: here, or the notebooks' folder in here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Print which checks of the lessons were right, what comes next, and the fingerprints of faults that go with them.

    It reads mine.json, where the notebooks write it down on this machine.

    flakit progress

    flakit progress flakit-notebooks

    Exits with 2 if there is no such folder.
    """
    from .cases import fingerprint as fingerprints
    from .course import progress, record

    console = Console(soft_wrap=True)
    if folder is not None and not folder.is_dir():
        said = f"flakit progress: folder: expected an existing one, got {str(folder)!r}"
        Console(stderr=True).print(said, style="red", markup=False, highlight=False)
        raise typer.Exit(2)
    places = [record.folder(), Path("flakit-notebooks"), Path("notebooks")] if folder is None else [folder]
    place = next((each for each in places if (each / record.FILE).is_file()), places[0])
    found = progress(place)
    rows = fingerprints.fingerprint(found.faults) if found.faults else {}
    if json:
        after = found.next and {"lesson": found.next[0].name, "check": found.next[1]}
        lessons = {lesson.name: lesson.checks for lesson in found.lessons}
        faults = {name: {tensor: cell._asdict() for tensor, cell in row.cells.items()} for name, row in rows.items()}
        typer.echo(_as_json({"folder": str(place.resolve()), "lessons": lessons, "next": after, "faults": faults}))
        return
    console.print(f"== {(place / record.FILE).resolve()}\n{found}", markup=False, highlight=False)
    if rows:
        table = _faults()
        for name, cause in fingerprints.CAUSES.items():
            known = rows[name].cells.values() if name in rows else ()
            cells = [cell.kind for cell in known] or ["·"] * len(fingerprints.TENSORS)
            table.add_row(cause.name, cause.lesson, *cells, style=None if name in rows else "dim")
        Console().print(table)


def _faults() -> Table:
    """The columns of a table of faults: the fault, its lesson and the tensors."""
    from .cases.fingerprint import SHORT, TENSORS

    table = Table(box=box.SIMPLE_HEAD, padding=0)  # so that a terminal of 80 columns has room for the faults' names
    table.add_column("fault")
    table.add_column("lesson")
    for name in TENSORS:
        table.add_column(SHORT.get(name, name), justify="center")
    return table


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print everything found as JSON.")] = False):
    """Say what works here, and how to repair what does not. Exits with 1 if something essential is broken."""
    from .doctor import examine

    if json:
        diagnosis = examine()
        typer.echo(diagnosis.as_json())
    else:
        diagnosis = _diagnosed()
    raise typer.Exit(not diagnosis.works)


def _diagnosed():
    """What the doctor finds, printed."""
    from .doctor import examine

    console = Console()
    with console.status("looking around and running every operator ..."):
        diagnosis = examine()
    console.print(diagnosis)
    return diagnosis


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def cases(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help='A case, or "all". Default: list them.', show_default=False)] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Run a case of the casebook and print what its law predicts beside what is measured here.

    flakit cases                       lists the cases and their knobs

    flakit cases anchor                the numbers of the story

    flakit cases anchor --w -88.8      one setting of the knobs

    flakit cases all                   every story; exits with 1 if a law fails
    """
    from .cases import registry

    warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter: infinities are what the cases are about
    console, errors = Console(), Console(stderr=True)
    try:
        given = _knobs(context.args)
        if not name or name == "all":
            if given:
                raise ValueError(f"{', '.join(given)}: expected the name of one case before its knobs")
            chosen = list(registry.CASES.values())
        else:
            chosen = [registry.find(name)]
            given = chosen[0].parse(given)
        if not name:
            _list_cases(chosen, console, json)
            return
        found = {}
        for case in track(chosen, "measuring", console=errors, transient=True, disable=not errors.is_terminal):
            found[case.name] = case.at(**given) if given else case.reproduce()
            if not json:
                console.print(_story(case, found[case.name], given))
    except ValueError as error:
        errors.print(f"flakit cases: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    if json:
        tables = {name: [row._asdict() | {"agrees": row.agrees} for row in rows] for name, rows in found.items()}
        typer.echo(_as_json({"knobs": given, "cases": tables}))
    failed = [f"{name}: {row.what}" for name, rows in found.items() for row in rows if row.agrees is False]
    if failed and not json:
        console.print(f"{len(failed)} not as predicted", style="bold red")
    raise typer.Exit(bool(failed))


def _knobs(words: list[str]) -> dict[str, str]:
    """{"w": "-88.8"} from ["--w", "-88.8"] or ["--w=-88.8"]."""
    found, words = {}, list(words)
    while words:
        word = words.pop(0)
        knob, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not knob:
            raise ValueError(f"expected knobs like --w -88.8, got {word!r}")
        if not has_value:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{knob}: expected a value, got none")
            value = words.pop(0)
        found[knob.replace("-", "_")] = value
    return found


def _list_cases(listed, console: Console, json: bool) -> None:
    if json:
        fields = ("name", "title", "told", "measured", "threads", "notebook")
        entries = [
            {field: getattr(case, field) for field in fields}
            | {"knobs": {name: {"default": knob.default, "expects": knob.expects} for name, knob in case.knobs.items()}}
            for case in listed
        ]
        typer.echo(_as_json(entries))
        return
    table = Table.grid(padding=(0, 2))
    for case in listed:
        table.add_row(f"[bold]{case.name}[/]", escape(case.title))
        for row in _told_and_measured(case):
            table.add_row(*row)
        knobs = " ".join(f"--{name} {_shell(knob.default)}" for name, knob in case.knobs.items())
        table.add_row("  [dim]knobs[/]", f"[dim]{escape(knobs)}[/]")
        table.add_row()
    console.print(table, highlight=False)
    console.print(
        "flakit cases NAME runs one, flakit cases NAME --KNOB VALUE at one setting, flakit cases all runs all."
    )


def _told_and_measured(case) -> list[tuple[str, str]]:
    told = f"{escape(case.told)} [dim]({', '.join(case.threads)})[/]" if case.threads else escape(case.told)
    return [
        ("  [dim]told[/]", told),
        ("  [dim]measured[/]", f"{escape(case.measured)} [dim](notebooks/{case.notebook}.ipynb)[/]"),
    ]


def _shell(value: object) -> str:
    text = _cell(value)
    return f'"{text}"' if " " in text else text


def _story(case, rows: list, given: dict) -> Group:
    """A case as it is printed: both stories, then the table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(", ".join(f"{name} = {value}" for name, value in given.items()) or "the story's numbers")
    for heading in ("recorded", "law", "measured", "agree"):
        table.add_column(heading, justify="right")
    marks = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: ""}
    for row in rows:
        cells = (escape(_cell(x)) for x in (row.what, row.recorded, row.law, row.measured))
        table.add_row(*cells, marks[row.agrees])
    story = Table.grid(padding=(0, 2))
    story.add_row(f"[bold]{case.name}[/]", escape(case.title))
    for row in _told_and_measured(case):
        story.add_row(*row)
    return Group(story, table)


@app.command()
def diagnose(
    seen: Annotated[list[str], typer.Argument(help="TENSOR=ok, wrong, inf or nan, such as dr=nan.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Which tensors of an RWKV6 call are wrong? Print the faults of the casebook that do that, the best fit first.

    Tensors: o, dr, dk, dv, dw, du, S_T (the final state) and dS_0 (the initial state's gradient).

    flakit diagnose o=ok dr=nan du=ok

    Exits with 1 if no fault fits, 2 if it could not run.
    """
    from .cases import fingerprint as fingerprints

    console, errors = Console(), Console(stderr=True)
    try:
        pairs = [text.partition("=") for text in seen]
        if odd := [text for text, (_, equals, _) in zip(seen, pairs, strict=True) if not equals]:
            raise ValueError(f"expected what was seen as dr=nan, got {odd[0]!r}")
        fits = fingerprints.diagnose({name: kind for name, _, kind in pairs})
    except ValueError as error:
        errors.print(f"flakit diagnose: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    good = [fit for fit in fits if fit.good]
    shown = good or fits[:3]
    if json:
        typer.echo(_as_json([_fit(fit) for fit in shown]))
        raise typer.Exit(not good)
    if not good:
        console.print("No fault of the casebook does that. Nearest:", style="bold red")
    table = _faults()
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


@app.command()
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
    """Which kernels would make NaN of a model's decays, at which token, and how far away are the others?

    No kernel is run, and nothing in the file is executed: the exponents that each kernel takes are held against its
    law. Decays of -inf are counted, for a gate w = -exp(x) has no gradient there. A checkpoint of RWKV6 or RWKV7, by
    the names of RWKV-LM or flash-linear-attention, runs in float32 on tokens, and each layer's decays are measured.

    flakit headroom decays.safetensors --op gsa --layer blocks.3

    flakit headroom decays.pt --only first-row --dtype bfloat16

    flakit headroom RWKV-x060.pth --tokens text.npy

    Exits with 0 if no kernel shown breaks in a number format shown, 1 if one does, 2 if it could not run.
    """
    from .cases import decay_checkpoint, decay_files
    from .cases.headroom import headroom as measure
    from .cases.laws import LN_MAX

    console, errors = Console(), Console(stderr=True)
    try:
        formats = {str(x).removeprefix("torch."): x for x in LN_MAX}
        if odd := [name for name in dtype or () if name not in formats]:
            raise ValueError(f"--dtype: expected one of {', '.join(formats)}, got {odd[0]!r}")
        formats = {name: x for name, x in formats.items() if not dtype or name in dtype}
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task(f"reading {file.name}", total=None)

            def progress(name: str, done: int, of: int) -> None:
                bar.update(task, description=name or file.name, completed=done, total=of)

            layers, op = _decays(file, op, tokens, decay_files, decay_checkpoint)
            if odd := [name for name in layer or () if name not in layers]:
                known = ", ".join(filter(None, layers))
                expected = f"one of {known}" if known else f"none, since {file.name} holds one tensor without a name"
                raise ValueError(f"--layer: expected {expected}, got {odd[0]!r}")
            layers = {name: layers[name] for name in layer} if layer else layers
            found = measure(layers, op, chunk, block=block, only=only or None, progress=progress)
    except (ValueError, TypeError, OSError) as error:
        errors.print(f"flakit headroom: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    breaks = any(m.breaks for m in found.margins if m.dtype in formats.values())
    if json:
        margins = {name: [_margin(m) for m in of if m.dtype in formats.values()] for name, of in found.layers.items()}
        sizes = {"op": op, "chunk": chunk, "block": block}
        gates = {name: _gate(gate) for name, gate in found.gates.items()}
        typer.echo(_as_json({**sizes, "breaks": breaks, "layers": margins, "gates": gates}))
    else:
        console.print(_headroom(found, formats))
    raise typer.Exit(breaks)


def _decays(file: Path, op: str | None, tokens: Path | None, decay_files, decay_checkpoint) -> tuple[dict, str]:
    """By layer, and what they are for."""
    weights = decay_checkpoint.load(file)
    if weights is None:
        if tokens is not None:
            raise ValueError(f"--tokens: expected none, since {file.name} holds decays, no checkpoint")
        return decay_files.layers(file), op or "rwkv6"
    found, layers = decay_checkpoint.decays(weights, tokens)
    if op not in (None, found):
        raise ValueError(f"--op: expected {found}, since {file.name} is a checkpoint of it, got {op!r}")
    return layers, found


def _margin(m) -> dict:
    place = {name: getattr(m, name) for name in ("batch", "token", "head", "channel", "tokens")}
    numbers = {name: getattr(m, name) for name in ("exponent", "limit", "factor", "breaks")}
    return {"kernel": m.kernel, "dtype": str(m.dtype).removeprefix("torch."), **numbers, **place}


def _gate(gate) -> dict:
    numbers = {name: getattr(gate, name) for name in ("infinite", "largest", "margin")}
    return {"dtype": str(gate.dtype).removeprefix("torch."), **numbers}


def _headroom(found, formats: dict) -> Group:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("kernel")
    for head in ("exponent", *formats):
        table.add_column(head, justify="right")
    table.add_column("where the exponent is largest")
    for kernel in dict.fromkeys(m.kernel for m in found.margins):
        of = [found.margin(kernel, dtype) for dtype in formats.values()]
        factors = (f"[bold red]{m.factor:.3g}[/]" if m.breaks else _factor(m.factor) for m in of)
        table.add_row(escape(kernel), f"{of[0].exponent:.4g}", *factors, escape(of[0].place))
    head = f"{found.op}, chunks of {found.chunk}, blocks of {found.block}. By number format: what all decays can be"
    head += " multiplied by until it breaks; below 1, red: it breaks on these decays; any: never"
    return Group(head, table, escape(str(found.gate)))


def _factor(x: float) -> str:
    from .numerics.words import number

    return number(x, 3, inf="any")


def _as_json(x: object) -> str:
    from .numerics.words import for_json

    return json_module.dumps(for_json(x), indent=1)


def _cell(x: object) -> str:
    from .numerics.words import number

    return "none" if x is None else number(x, nan="", inf="never")


@app.command()
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
    """Hold a linear-attention kernel to the float64 truth, with every probe that a real failure has taught.

    flakit audit chunk_rwkv6

    flakit audit my_kernel.py:my_op --like rwkv6 --html report.html --open

    flakit audit my_kernel.py:my_op --reference my_kernel.py:naive

    Exits with 0 if no probe fails (what is not supported is no failure), 1 if one does, 2 if it could not run.
    """
    import torch

    from .ops.common.dispatch import has_triton

    if has_triton() and not torch.cuda.is_available():  # before anything imports triton, and that is the subject
        os.environ.setdefault("TRITON_INTERPRET", "1")
        warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter
    from .instruments.audit import audit as run
    from .instruments.subject import load

    console, errors = Console(), Console(stderr=True)
    try:
        _writable("--json", json)
        _writable("--html", html)
        _folder("--repros", repros)
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("looking at the subject", total=None)

            def progress(name: str, done: int, of: int) -> None:
                bar.update(task, description=name, completed=done, total=of)

            how = {"only": only or None, "seed": seed, "full": full, "shrink": shrink, "progress": progress}
            found = run(load(subject, like, adapter), **how)
    except (Exception, SystemExit) as error:  # whatever the subject's own module raises: it could not run
        words = str(error) if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {error}"
        errors.print(f"flakit audit: {words}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    console.print(found)
    for path, write in ((json, found.write_json), (html, found.write_html), (repros, found.write_repros)):
        if path is not None:
            write(path)
    if show:
        if html is None:
            html = Path(tempfile.mkdtemp()) / "audit.html"
            found.write_html(html)
        opened = webbrowser.open(html.resolve().as_uri())
        errors.print(f"{'opened' if opened else 'no browser was found to open'} {html}", highlight=False)
    raise typer.Exit(not found.passed)


@app.command()
def bench(
    json: Annotated[Path | None, typer.Option("--json", help="Also write the rows as a recording, a .json.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the times against the floor, a .png.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time each kernel instead of each call.")] = False,
    recorded: Annotated[
        Path | None, typer.Option(help="Show what --json wrote instead of timing; needs no GPU.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Time flash-linear-attention and wind_rwkv too, if installed.")] = True,
    first_calls: Annotated[
        bool, typer.Option("--first-calls", help="Time first calls too, in fresh processes.")
    ] = False,
    only: Annotated[str, typer.Option(help='Cases that these words are in: "rwkv6 chunk", "decode", "T=32768".')] = "",
    gates: Annotated[
        Path | None,
        typer.Option(
            help="Log decays of a model's own, .pt, .safetensors or .npy: chunks with decays drawn from these."
        ),
    ] = None,
):
    """Time the operators on this machine's GPU: a forward, one with gradients, one token, and what the host needs.

    A peer that tunes itself at run time takes minutes per shape. Exits with 2 if it could not run.

    flakit bench --only "rwkv6 chunk" --json times.json --picture times.png

    flakit bench --gates gates.safetensors --no-peers

    flakit bench --recorded data/h200_speed.json --picture recorded.png
    """
    import torch

    from .bench import speed
    from .bench.meter import Meter
    from .numerics import recorded as recordings

    console, errors = Console(), Console(stderr=True)
    try:
        _writable("--json", json, ".json")
        _writable("--picture", picture, ".png")
        if profile and (picture or recorded):
            raise ValueError("--profile: expected without --picture and --recorded: kernels have no floor of their own")
        if recorded is not None:
            if json or only or first_calls or gates:
                raise ValueError("--recorded: expected alone or with --picture: nothing is timed")
            table = recordings.read(recorded, needs=("op", "who", "forward_ms", "both_ms"))
            _shown(console, table.rows, table.meta, table.label, picture)
            return
        cases = speed.chosen(only) if gates is None else speed.chosen(only, _of_gates(gates, first_calls))
        if not torch.cuda.is_available():
            raise RuntimeError(
                "expected a CUDA GPU, found none; --recorded data/h200_speed.json shows recorded figures"
            )
        meter, run = Meter(), speed.profile if profile else speed.rows
        options = [("--profile", profile), ("--no-peers", not peers), ("--first-calls", first_calls)]
        words = ["flakit bench", *(name for name, given in options if given)]
        words += (
            [f"--gates {gates}"] * (gates is not None)
            + [f'--only "{only}"'] * bool(only)
            + [f"--json {json}"] * (json is not None)
        )
        meta = recordings.provenance(" ".join(words), **speed.peer_version())
        meta |= {} if profile else {name: float(f"{x:.3g}") for name, x in meter.ceilings().items()}
        found, said = [], {}
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("", total=len(cases))
            how = {"peers": peers, "meter": meter, "say": lambda text: said.setdefault(text)}
            how |= {"progress": lambda what: bar.update(task, description=what)}
            for done, case in enumerate(cases, 1):
                for row in run([case], **how, **({} if profile else {"first_calls": first_calls})):
                    found.append(row)
                    if json is not None:  # after every row: a table cut short is still a table
                        recordings.write(json, meta, found)
                bar.update(task, completed=done)
        for text in said:
            errors.print(text, style="yellow", markup=False, highlight=False)
        if profile:
            console.print(_kernels(found))
        else:
            _shown(console, found, meta, recordings.Recording(meta, (), ()).label.removeprefix("recorded "), picture)
    except (ValueError, RuntimeError, OSError) as error:
        errors.print(f"flakit bench: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None


def _of_gates(path: Path, first_calls: bool) -> list:
    """Cases with the decays of a file."""
    import torch

    from .bench.speed import of_gates
    from .cases import decay_files

    if first_calls:
        raise ValueError("--gates: expected without --first-calls, whose fresh processes do not read the file")
    try:
        layers = decay_files.layers(decay_files.read(path))
        values = [decay_files.checked(name, x).flatten() for name, x in layers.items()]
        return of_gates(torch.cat([x.float() for x in values]), path.name)
    except ValueError as error:
        raise ValueError(f"--gates: {error}") from None


def _writable(option: str, path: Path | None, ending: str = "") -> None:
    """Said before anything takes long."""
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


def _folder(option: str, path: Path | None) -> None:
    """Made before anything takes long."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: expected a folder that is there or can be made, got {path}") from error


def _shown(console: Console, rows, meta, label: str, picture: Path | None) -> None:
    """Rows of `flakit bench` as a table, and as a picture where one is asked for."""
    ceilings = {name: meta[name] for name in ("copy_tb_s", "tflops") if name in meta}
    known = len(ceilings) == 2
    if picture is not None and not known:
        raise ValueError("--picture: expected copy_tb_s and tflops in the recording's meta, which the floor is made of")
    console.print(_times(rows, ceilings if known else None, label))
    if picture is not None:
        from .figures.roofline import speed

        picture.write_bytes(speed(rows, title=label, **ceilings).png())


def _times(rows, ceilings, title: str) -> Group:
    """A line for each case, and one below it for each that was timed."""
    from .numerics.work import in_short, work

    heads = {"": 17, "forward ms": 7, "both ms": 6, "20–80%": 11, "× floor": 5, "host ms": 6, "GiB": 5, "error": 7}
    if any(row.get("first_forward_s") is not None for row in rows):
        heads["first s"] = 7

    def line(*cells: str) -> Table:
        made = Table.grid(padding=(0, 1, 0, 0))
        for n, width in enumerate(heads.values()):
            made.add_column(width=width, justify="right" if n else "left")
        made.add_row(*map(escape, cells))
        return made

    def value(row, name, digits=".3g"):
        return "" if row.get(name) is None else f"{row[name]:{digits}}"

    lines, case = [escape(title), line(*heads)], None
    for row in rows:
        if in_short(row) != case:
            lines.append(f"[bold]{escape(case := in_short(row))}[/]")
        what = "forward" if row["both_ms"] is None else "both"
        floor = work(row, what).floor_ms(**ceilings) if ceilings else None
        spread = [value(row, f"{what}_ms_{part}") for part in (20, 80)]
        cells = [f"  {row['who']}", value(row, "forward_ms"), value(row, "both_ms")]
        cells += ["–".join(filter(None, spread)), "" if floor is None else f"{row[f'{what}_ms'] / floor:.3g}"]
        cells += [value(row, f"host_{what}_ms"), value(row, "extra_gib"), value(row, "error", ".1e")]
        if "first s" in heads:
            seconds = (value(row, f"first_{part}_s", ".0f") for part in ("forward", "backward"))
            cells.append(" + ".join(filter(None, seconds)))
        lines.append(line(*cells))
    return Group(*lines)


def _case(row) -> str:
    from .bench.speed import Case

    return str(Case(**{name: row[name] for name in Case.__dataclass_fields__ if name in row}))


def _kernels(rows) -> Group:
    """What `flakit bench --profile` found: a table for each call."""
    calls: dict = {}
    for row in rows:
        calls.setdefault((_case(row), row["who"], row["what"]), []).append(row)
    tables = []
    for (case, who, what), kernels in calls.items():
        table = Table(box=box.SIMPLE_HEAD, title=f"{case}: {who}, {what}", title_justify="left")
        table.add_column("kernel", overflow="ellipsis", no_wrap=True)
        for head in ("calls", "ms", "share"):
            table.add_column(head, justify="right")
        for row in kernels:
            table.add_row(escape(row["kernel"]), f"{row['calls']:g}", f"{row['ms']:.4g}", f"{row['share']:.1%}")
        table.add_row("all", f"{sum(r['calls'] for r in kernels):g}", f"{sum(r['ms'] for r in kernels):.4g}", "")
        tables.append(table)
    return Group(*tables)


@app.command()
def tune(
    only: Annotated[str, typer.Option(help='Rows that these words are in: "rwkv6 16-bit", "gsa.stream".')] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write; default: where flakit finds it.")] = None,
):
    """Find launch parameters for this machine's GPU, and write them where flakit takes them from on GPUs like it.

    Run once: all rows take an hour or two, and each is written when it is found. Needs a GPU that does nothing else.

    Each candidate is held to the result of the row in use before it is timed. Exits with 2 if it could not run.

    flakit tune --only "rwkv6 16-bit"
    """
    from .bench import tune as own
    from .ops.common.launch import rows_file

    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    found, left_out, path = [], [], out
    try:
        _writable("--out", out, ".json")
        keys = own.chosen(only)
        device, trial = own.here()
        path = out or rows_file(device.capability)
        own.check(path, device)
        command = f'flakit tune --only "{only}"' if only else "flakit tune"
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("", total=len(keys))
            for row in own.tune(keys, device, trial, lambda what: bar.update(task, description=what), left_out.append):
                found.append(row)
                own.write(path, device, found, command)
                bar.update(task, completed=len(found) + len(left_out))
    except (ValueError, RuntimeError, OSError) as error:
        kept = f"\n{len(found)} rows found before stand in {path}; --only goes on with others" if found else ""
        errors.print(f"flakit tune: {error}{kept}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print(f"stopped; {len(found)} rows stand in {path}" if found else "stopped; no row was found yet")
        raise typer.Exit(130) from None
    for text in left_out:
        errors.print(text, style="yellow", markup=False, highlight=False)
    if not found:
        raise typer.Exit(2)
    console.print(_tuned(found))
    where = "" if out is None else f"; flakit takes it from {rows_file(device.capability)}"
    console.print(f"wrote {path}, for GPUs of compute capability {device.capability / 10}{where}", highlight=False)


def _tuned(rows) -> Table:
    from .bench.tune import in_short
    from .ops.common.launch import Launch

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("row", "blocks, warps, stages", "ms before", "ms"):
        table.add_column(head, justify="right" if "ms" in head else "left")
    for row in rows:
        best = in_short(Launch(*(row[name] for name in Launch._fields)))
        table.add_row(f"{row['kernel']} {row['width']}", best, f"{row['ms_before']:.4g}", f"{row['ms']:.4g}")
    return table


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
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
    """Run a script and say where its first NaN or infinity is born: kernel, line, tile and lane, or PyTorch operation.

    With --digits everything is computed once more in float64, and the lines that lost digits are named. On a GPU each
    launch of a Triton kernel is interpreted besides, which takes seconds, and what the compiled one stored is compared.

    The script runs in a process of its own, its Triton kernels in Triton's interpreter where there is no GPU. Exits
    with 0 if all was finite, 1 if something was found, 2 if nothing ran or the script did not come to its end.

    flakit trace my_script.py --seed 3

    flakit trace -m pytest test_mine.py -k decay

    flakit trace --digits my_script.py
    """
    from .instruments.trace_script import start

    try:
        _writable("--json", json)
        _writable("--picture", picture)
        if not module and not Path(script).is_file():
            raise ValueError(f"script: expected a file, {script} does not exist")
        if rounds and not digits:
            raise ValueError(f"--rounds: expected beside --digits, got {rounds} alone")
        if rounds == 1:
            raise ValueError("--rounds: expected two or more, which can differ, got 1")
    except ValueError as error:
        Console(stderr=True).print(f"flakit trace: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    options = ["--module"] * module
    options += [f"--json={json}"] * (json is not None) + [f"--picture={picture}"] * (picture is not None)
    options += ["--digits"] * digits + [f"--rounds={rounds}"] * (rounds > 0)
    raise typer.Exit(start(script, context.args, *options, interpret=interpret or rounds > 0))


@app.command()
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
    """Measure an operator, or a kernel of your own, over a grid of settings: where it is finite, and how far off.

    flakit sweep rwkv6 --over decay=-0.1..-100:7 --over T=64,256 --set K=32 --workers 2 --store found.jsonl --csv a.csv

    flakit sweep my_kernel.py:chunk --like rwkv6 --over decay=-1,-10 --over T=64,100
    """
    import os

    import torch

    if ":" in subject and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before the subject imports Triton
    from .numerics import sweep as module
    from .numerics.arguments import named_function

    console, errors = Console(), Console(stderr=True)
    try:
        axes = _axes(over, "--over")
        stays = {name: values[0] for name, values in _axes(fixed or (), "--set").items()}
        for option, path in (("--csv", csv), ("--parquet", parquet), ("--json", json), ("--picture", picture)):
            _writable(option, path)
        if store is not None and not store.is_dir() and store.suffix not in ("", ".jsonl"):
            raise ValueError(
                f"--store: expected a name ending in .jsonl, or a folder, got {store}; --csv writes a table"
            )
        if law and ":" not in law:
            raise ValueError(f"--law: expected module:function or file.py:function, got {law!r}")
        limit = named_function(law, "--law") if law else None
        found = module.sweep(
            subject, axes, like=like or None, workers=workers, engine=engine, store=store, progress=errors.is_terminal,
            **stays,
        )  # fmt: skip
        for path, write in ((csv, found.to_csv), (parquet, found.to_parquet)):
            if path is not None:
                write(path)
        if json is not None:
            json.write_text(_as_json(found.to_dict()) + "\n", encoding="utf-8")
        if picture is not None:
            from .figures.phase import phase

            picture.write_bytes(phase(found, tensor=tensor or None, law=limit).canvas.png())
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        errors.print(f"flakit sweep: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print(f"stopped; {f'run it again to go on from {store}' if store else 'nothing was kept: --store'}")
        raise typer.Exit(130) from None
    console.print(_onsets(found))


def _axes(texts, option: str) -> dict[str, list]:
    found: dict[str, list] = {}
    for text in texts:
        name, values = _axis(text, option)
        if name in found:
            raise ValueError(f"{option}: expected {name} once, got it twice; values of one axis stand behind commas")
        found[name] = values
    return found


def _axis(text: str, option: str) -> tuple[str, list]:
    """("decay", [-0.1, -1.0]) from "decay=-0.1,-1"; a..b:n are n values evenly spaced in their logarithm."""
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


def _onsets(found) -> Group:
    """What a sweep says in a few lines: of each tensor, where it is finite and how wrong it is there."""
    import numpy as np

    def at(index) -> str:
        return ", ".join(f"{axis}={_cell(of[i])}" for (axis, of), i in zip(found.axes.items(), index, strict=True))

    table = Table("tensor", "finite in", "first not finite at", "largest error where finite", "at")
    for name in found.tensors:
        share, error = found[f"{name}.finite"], found.grids.get(f"{name}.l2")
        whole, index = share == 1, next(zip(*(share < 1).nonzero(), strict=True), None)
        most, where = "", ""
        if error is not None and whole.any():
            place = max(zip(*whole.nonzero(), strict=True), key=lambda place: error[place])
            most, where = f"{error[place]:.1e}", at(place)
        table.add_row(name, f"{int(whole.sum())} of {share.size}", "" if index is None else at(index), most, where)
    for name in found.grids:
        if "." not in name:
            numbers = found[name][found[name] == found[name]]
            table.add_row(name, f"{numbers.min():.4g} … {numbers.max():.4g}" if numbers.size else "", "", "", "")
    raised = [place for place in np.ndindex(found.raised.shape) if found.raised[place]]
    if not raised:
        return Group(table)
    where = f"raised an error in {len(raised)} of {found.raised.size}, first at {at(raised[0])}"
    return Group(table, Text(f"{where}: {found.raised[raised[0]]}", style="bold"))


if __name__ == "__main__":
    app()
