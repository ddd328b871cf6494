"""The commands flakit bench and tune: how long the operators take on this machine's GPU, and faster settings for it."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from .common import failure, progress_bar, writable


def bench(
    json: Annotated[Path | None, typer.Option("--json", help="Also write the rows as a recording, a .json.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the times against the floor, a .png.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time each kernel instead of each call.")] = False,
    recorded: Annotated[
        Path | None, typer.Option(help="Show what --json wrote instead of timing; needs no GPU.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            help="Time flash-linear-attention and wind_rwkv too, if installed, and name the kernels they ran."
        ),
    ] = True,
    first_calls: Annotated[
        bool, typer.Option("--first-calls", help="Time first calls too, in fresh processes.")
    ] = False,
    only: Annotated[str, typer.Option(help='Cases that these words are in: "rwkv6 chunk", "decode", "T=32768".')] = "",
    gates: Annotated[
        Path | None,
        typer.Option(
            help="Log decays <= 0 of a model's own, tensors [B, T, H, K] in a .pt, .safetensors or .npy: chunks with "
            "decays drawn from these."
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

    from ..bench import speed
    from ..bench.meter import Meter
    from ..numerics import recorded as recordings

    console, errors = Console(), Console(stderr=True)
    try:
        writable("--json", json, ".json")
        writable("--picture", picture, ".png")
        if profile and (picture or recorded):
            raise ValueError("--profile: expected without --picture and --recorded: kernels have no floor of their own")
        if recorded is not None:
            if json or only or first_calls or gates:
                raise ValueError("--recorded: expected alone or with --picture: nothing is timed")
            table = recordings.read(recorded, needs=("op", "who", "forward_ms", "both_ms"))
            _shown(console, table.rows, table.meta, table.label, picture)
            return
        drawn = {} if gates is None else {"cases": _of_gates(gates, first_calls)}
        cases = _chosen(partial(speed.chosen, **drawn), only)
        if not torch.cuda.is_available():
            raise RuntimeError(
                "expected a CUDA GPU, found none; --recorded data/h200_speed.json shows recorded figures"
            )
        meter, run = Meter(), speed.profile if profile else speed.rows
        options = [("--profile", profile), ("--no-peers", not peers), ("--first-calls", first_calls)]
        words = ["flakit bench", *(name for name, chosen in options if chosen)]
        words += [f"--gates {gates}"] * (gates is not None) + [f'--only "{only}"'] * bool(only)
        words += [f"--json {json}"] * (json is not None)
        meta = recordings.provenance(" ".join(words), **speed.peer_version())
        meta |= {} if profile else {name: float(f"{x:.3g}") for name, x in meter.ceilings().items()}
        if "fla" in meta:  # which takes TileLang's kernels for some calls where it finds TileLang and nvcc
            meta["tilelang"] = recordings.version_of("tilelang") or "none"
        rows, messages, theirs = [], {}, {}

        def store() -> None:
            if json is not None:
                recordings.write(json, meta, rows)

        with progress_bar(errors) as progress:
            arguments = {"peers": peers, "meter": meter, "say": lambda text: messages.setdefault(text)}
            for done, case in enumerate(cases):
                arguments["progress"] = partial(progress, done=done, of=len(cases))
                for row in run([case], **arguments, **({} if profile else {"first_calls": first_calls})):
                    rows.append(row)
                    if not profile:
                        row["kernels"] = None
                        if row["who"] != speed.OURS:
                            theirs.setdefault(case, {})[row["who"]] = row
                    store()  # after every row: a table cut short is still a table
            for done, (case, timed) in enumerate(theirs.items()):  # once all is timed: a profiler may slow later calls
                _name_kernels(case, timed, meter, partial(progress, done=done, of=len(theirs)), messages)
                store()
        for text in messages:
            errors.print(text, style="yellow", markup=False, highlight=False)
        if profile:
            console.print(_kernels(rows))
        else:
            _shown(console, rows, meta, recordings.Recording(meta, (), ()).label.removeprefix("recorded "), picture)
    except (ValueError, RuntimeError, OSError) as error:
        raise failure("bench", error) from None


def _chosen(choose: Callable, only: str) -> list:
    """Return what these words of --only choose. Raise ValueError, with the option's name, for nothing."""
    try:
        return choose(only)
    except ValueError as error:  # "only: expected …"
        raise ValueError(f"--{error}") from None


_LEAST_SHARE = 0.05
"""A kernel with a smaller share of the time is named only if it is the slowest."""


def _name_kernels(case, rows: dict[str, dict], meter, progress: Callable, messages: dict[str, None]) -> None:
    """Profile a case, and put into its peers' rows, by `who`, the names of the kernels that took their time, the
    slowest first. A failure adds a message, and leaves the row as it is."""
    from ..bench import speed

    def say(text: str) -> None:
        if text not in messages:
            messages[f"kernels are not named: {text}"] = None

    what = "forward" if case.decode else "both"
    profiled = speed.profile([case], meter=meter, progress=lambda step: progress(f"kernels of {step}"), say=say)
    try:
        for kernel in profiled:
            row = rows.get(kernel["who"])
            if row is not None and kernel["what"] == what:
                named = row["kernels"] or []
                if not named or kernel["share"] >= _LEAST_SHARE:
                    row["kernels"] = [*named, kernel["kernel"]]
    except Exception as error:  # ours, or the profiler itself: the times are there all the same
        say(f"{case}: {type(error).__name__}: {error}")


def _of_gates(path: Path, first_calls: bool) -> list:
    """Return benchmark cases with decays drawn from a file's. Raise ValueError for another file, or with first
    calls."""
    import torch

    from ..bench.speed import of_gates
    from ..cases import decay_files

    if first_calls:
        raise ValueError("--gates: expected without --first-calls, whose fresh processes do not read the file")
    try:
        layers = decay_files.layers(decay_files.read(path))
        values = [decay_files.checked(name, x).flatten() for name, x in layers.items()]
    except (ValueError, TypeError, FileNotFoundError) as error:  # "w: expected …" or, of a layer, "w['name']: …"
        raise ValueError(f"--gates{str(error).removeprefix('w')}") from None
    return of_gates(torch.cat([x.float() for x in values]), path.name)


def _shown(console: Console, rows, meta, label: str, picture: Path | None) -> None:
    """Print rows of `flakit bench` as a table, and write the picture if requested. Raise ValueError if the picture
    needs the device's peak rates and `meta` has none."""
    ceilings = {name: meta[name] for name in ("copy_tb_s", "tflops") if name in meta}
    known = len(ceilings) == 2
    if picture is not None and not known:
        raise ValueError("--picture: expected copy_tb_s and tflops in the recording's meta, which the floor is made of")
    console.print(_times(rows, ceilings if known else None, label), highlight=False)
    if picture is not None:
        from ..figures.roofline import speed

        picture.write_bytes(speed(rows, title=label, **ceilings).png())


def _times(rows, ceilings, title: str) -> Group:
    """Return the printed times: a line for each case, and below it one for each implementation. A name that is longer
    than its column has a line of its own."""
    from ..numerics.work import in_short, work

    heads = {"": 8, "forward ms": 7, "both ms": 6, "20–80%": 15, "× floor": 5, "host ms": 6, "GiB": 6, "error": 7}
    if any(row.get("first_forward_s") is not None for row in rows):
        heads["first s"] = 11  # 79 characters in all, so that 80 hold them

    def line(*cells: str) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))
        for n, width in enumerate(heads.values()):
            grid.add_column(width=width, justify="right" if n else "left")
        grid.add_row(*map(escape, cells))
        return grid

    def value(row, name, shown=_short):
        return "" if row.get(name) is None else shown(row[name])

    lines, case = [escape(title), line(*heads)], None
    for row in rows:
        if in_short(row) != case:
            lines.append(f"[bold]{escape(case := in_short(row))}[/]")
        what = "forward" if row["both_ms"] is None else "both"
        floor = work(row, what).floor_ms(**ceilings) if ceilings else None
        spread = [value(row, f"{what}_ms_{part}") for part in (20, 80)]
        if len(name := f"  {row['who']}") > heads[""]:
            lines.append(escape(name))
            name = ""
        cells = [name, value(row, "forward_ms"), value(row, "both_ms")]
        cells += ["–".join(filter(None, spread)), "" if floor is None else _short(row[f"{what}_ms"] / floor)]
        cells += [value(row, f"host_{what}_ms"), value(row, "extra_gib", lambda x: "<0.01" if x < 0.01 else _short(x))]
        cells.append(value(row, "error", "{:.1e}".format))
        if "first s" in heads:
            seconds = (value(row, f"first_{part}_s", _seconds) for part in ("forward", "backward"))
            cells.append(" + ".join(filter(None, seconds)))
        lines.append(line(*cells))
        if row.get("kernels"):
            names = ", ".join(dict.fromkeys(map(_kernel, row["kernels"])))
            lines.append(Padding.indent(Text(f"kernels: {names}", style="dim"), 4))
    return Group(*lines)


def _short(x: float) -> str:
    return f"{x:.3g}" if x < 999.5 else f"{x:.0f}"


def _seconds(x: float) -> str:
    return f"{x:.1f}" if x < 99.95 else f"{x:.0f}"


def _kernel(name: str) -> str:
    """Return a kernel's name without the type, template and arguments that C++ adds."""
    return re.split("[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0].strip()


def _kernels(rows) -> Group:
    """Return the printed rows of `flakit bench --profile`: a table of kernels for each call."""
    from ..numerics.work import in_short

    calls: dict = {}
    for row in rows:
        calls.setdefault((in_short(row), row["who"], row["what"]), []).append(row)
    tables = []
    for (case, who, what), kernels in calls.items():
        kernel = Column("kernel", overflow="ellipsis", no_wrap=True)
        numbers = (Column(head, justify="right") for head in ("calls", "ms", "share"))
        table = Table(kernel, *numbers, box=box.SIMPLE_HEAD, title=f"{case}: {who}, {what}", title_justify="left")
        for row in kernels:
            table.add_row(escape(row["kernel"]), f"{row['calls']:g}", f"{row['ms']:.4g}", f"{row['share']:.1%}")
        table.add_row("all", f"{sum(r['calls'] for r in kernels):g}", f"{sum(r['ms'] for r in kernels):.4g}", "")
        tables.append(table)
    return Group(*tables)


def tune(
    only: Annotated[str, typer.Option(help='Rows that these words are in: "rwkv6 16-bit", "gsa.stream".')] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write; default: where flakit finds it.")] = None,
):
    """Find launch parameters for this machine's GPU, and write them where flakit takes them from on GPUs like it.

    Run it once: all rows take an hour or two, and each is written when it is found. Needs a GPU that does nothing else.

    A candidate is timed only if its results match those of the row in use. Exits with 2 if it could not run.

    flakit tune --only "rwkv6 16-bit"
    """
    from ..bench import tune as own
    from ..ops.common.launch import rows_file

    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    rows, left_out, path = [], [], out
    try:
        writable("--out", out, ".json")
        keys = _chosen(own.chosen, only)
        device, trial = own.here()
        path = out or rows_file(device.capability)
        own.check(path, device)
        command = f'flakit tune --only "{only}"' if only else "flakit tune"
        with progress_bar(errors) as bar:

            def progress(what: str) -> None:
                bar(what, len(rows) + len(left_out), len(keys))

            for row in own.tune(keys, device, trial, progress, left_out.append):
                rows.append(row)
                own.write(path, device, rows, command)
    except (ValueError, RuntimeError, OSError) as error:
        note = f"\n{len(rows)} rows found before stand in {path}; --only goes on with others" if rows else ""
        raise failure("tune", f"{error}{note}", soft_wrap=True) from None
    except KeyboardInterrupt:
        errors.print(f"stopped; {len(rows)} rows stand in {path}" if rows else "stopped; no row was found yet")
        raise typer.Exit(130) from None
    for text in left_out:
        errors.print(text, style="yellow", markup=False, highlight=False)
    if not rows:
        raise typer.Exit(2)
    console.print(_tuned(rows))
    where = "" if out is None else f"; flakit takes it from {rows_file(device.capability)}"
    console.print(f"wrote {path}, for GPUs of compute capability {device.capability / 10}{where}", highlight=False)


def _tuned(rows) -> Table:
    from ..bench.tune import in_short
    from ..ops.common.launch import Launch

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("row", "blocks, warps, stages", "ms before", "ms"):
        table.add_column(head, justify="right" if "ms" in head else "left")
    for row in rows:
        best = in_short(Launch(*(row[name] for name in Launch._fields)))
        table.add_row(f"{row['kernel']} {row['width']}", best, f"{row['ms_before']:.4g}", f"{row['ms']:.4g}")
    return table
