"""Pages made from flakit itself: its functions, its casebook, its recorded measurements, its sources."""

import fnmatch
import html
import inspect
import json
import re
from importlib import import_module
from itertools import starmap
from pkgutil import resolve_name

import typer

from docs.docstrings import entry, escaped
from flakit import cli
from flakit.bench import simulate
from flakit.bench.messages import SIZES, fit
from flakit.cases.fingerprint import SHORT, TENSORS, fingerprint
from flakit.cases.registry import CASES
from flakit.figures.over_ranks import over_ranks
from flakit.figures.roofline import speed
from flakit.numerics import recorded
from flakit.numerics.words import number
from flakit.numerics.work import in_short

ENTRIES = re.compile(r"^\{\{([\w.]+): (.+)\}\}$", re.M)
"""On a page of docs/api, {{module: names or patterns of its names}}: the functions and classes that it describes."""


def documented(page):
    """Return the functions and classes that a page of the API describes, by full name."""
    things = {}
    for module, patterns in ENTRIES.findall(page):
        public = getattr(import_module(module), "__all__", ())
        names = [name for pattern in patterns.split() for name in fnmatch.filter(public, pattern) or [pattern]]
        things |= {f"{module}.{name}": resolve_name(f"{module}:{name}") for name in names}
    return things


def api(root):
    """Return the markdown of every page of the API, by the page's name."""

    def entries(match):
        return "\n".join(starmap(entry, documented(match[0]).items()))

    return {f"api/{path.name}": ENTRIES.sub(entries, path.read_text()) for path in (root / "docs" / "api").glob("*.md")}


def casebook(head):
    """Return the page of the casebook: a table of all cases, then each with its knobs. head: the words before it."""
    rows, stories = [], []
    for case in CASES.values():
        name, title, lesson = escaped(case.name), escaped(_title(case)), f"notebooks/{case.notebook}.ipynb"
        threads = ", ".join(f"[{x}](https://github.com/{x.replace('#', '/issues/')})" for x in case.threads)
        rows.append((f"[{name}](#{case.name})", title, f"[{case.notebook[:2]}]({lesson})"))
        stories.append(
            f"## {name}\n\n{title}.\n\n"
            f"reported\n: {escaped(case.reported)}{f' ({threads})' if threads else ''}\n\n"
            f"measured\n: {escaped(case.measured)}\n\n"
            f"lesson\n: [{case.notebook}]({lesson})\n\n"
            f"knobs\n: {', '.join(f'`--{name} {number(knob.default)}`' for name, knob in case.knobs.items())}\n"
        )
    head = head.replace("{{fingerprint}}", fingerprints())
    return f"{head}\n\n{_lines(('case', 'what it is', 'lesson'), rows)}\n\n" + "\n".join(stories)


def fingerprints():
    """Return a table of every fault and its effect on every tensor, as markdown."""
    names = [f"${SHORT[name]}$" if name in SHORT else name for name in TENSORS]
    rows = (
        (f"[{row.cause.name}](#{row.cause.case})", *map(_kind, row.cells.values()), row.cause.lesson)
        for row in fingerprint().values()
    )
    return _lines(("fault", *names, "lesson"), rows)


def _kind(cell):
    if cell.kind in ("inf", "NaN"):
        return f"**{cell.kind}**" if cell.everywhere else f"some **{cell.kind}**"
    return f"*{cell.kind}*" if cell.kind == "wrong" else cell.kind


def _title(case):
    """Return a case's title without the number that some have in the collection of reports that they come from."""
    title = re.sub(r"^Casebook \w+: ", "", case.title)
    return title[:1].upper() + title[1:]


def commands(head):
    """Return the page of the commands, as `flakit COMMAND --help` describes them. head: the words before it."""
    group, parts = typer.main.get_command(cli.app), [head]
    for name, command in group.commands.items():
        options = [option for option in command.params if not getattr(option, "hidden", False)]
        words = re.sub(r"^flakit .*(\n\nflakit .*)*", _as_code, inspect.cleandoc(command.help), flags=re.M)
        listed = "\n\n".join(f"`{', '.join(_spelt(option))}`\n: {escaped(option.help or '')}" for option in options)
        parts.append(f"## flakit {name}\n\n{words}\n\n{listed}\n")
    return "\n\n".join(parts)


def _spelt(option):
    return [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else [option.name.upper()]


def _as_code(lines):
    return "```bash\n" + lines[0].replace("\n\n", "\n") + "\n```"


# --- recorded measurements ------------------------------------------------------------------------------------------

NOT_SHOWN = ("o", "trace")  # of workbench.json: whole outputs and traces
FIRST = ("device", "date", "torch", "triton", "flakit", "command")


def results(root):
    """Return a page for every file in data/, and one that lists them, by the page's name."""
    words = _sections((root / "data" / "README.md").read_text())
    pages, listed = {}, []
    for path in sorted((root / "data").glob("*.json"), key=lambda path: (not path.stem.startswith("h200"), path.stem)):
        stored = json.loads(path.read_text())
        meta, columns, rows = stored["meta"], stored["columns"], stored["rows"]
        about, what = words[path.name]
        shown = [n for n, column in enumerate(columns) if path.stem != "workbench" or column not in NOT_SHOWN]
        keys = sorted(meta, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
        provenance = [(key, f"`{meta[key]}`" if key == "command" else escaped(str(meta[key]))) for key in keys]
        pages[f"results/{path.stem}.md"] = (
            f"# {path.stem}\n\n{about}\n\n"
            f"## Where it comes from\n\n{_lines(('', ''), [*provenance, ('file', f'`data/{path.name}`')])}\n\n"
            f"## The table\n\n```{{raw}} html\n{sortable(path.stem, columns, rows, shown)}\n```\n\n"
            f"## What the columns say\n\n{what}\n"
        )
        device, day = escaped(meta["device"]), f"[{meta['date']}]{{.nowrap}}"
        sentence = re.split(r"(?<=[.:])\s", " ".join(about.split()))[0].rstrip(".:")
        listed.append((f"[{path.stem}]({path.stem}.md)", sentence, device, day, len(rows)))
    table = _lines(("file", "what it is", "measured on", "day", "rows"), listed)
    names = "\n".join(name.removeprefix("results/").removesuffix(".md") for name in pages)
    page = (root / "docs" / "results" / "index.md").read_text()
    pages["results/index.md"] = page.replace("{{table}}", table).replace("{{names}}", names)
    return pages


def _sections(readme):
    """Return {file: (what it is, what its columns mean)} from the README of data/."""
    sections = {}
    for section in re.split(r"^## ", readme, flags=re.M)[1:]:
        head, _, body = section.partition("\n")
        about, table, after = re.match(r"(.*?)(^\|.*?)((?:^[^|]|\Z).*)", body, re.M | re.S).groups()
        for file in re.findall(r"\w+\.json", head):
            sections[file] = about.strip(), f"{table.strip()}\n\n{after.strip()}"
    return sections


def sortable(name, columns, rows, shown):
    """Return an HTML table that site.js makes sortable and searchable; it is complete and readable without that."""
    numeric = {n for n in shown if all(isinstance(row[n], (int, float, type(None))) or row[n] in _ODD for row in rows)}
    head = "".join(
        f'<th scope="col"{" class=number" if n in numeric else ""}>{html.escape(columns[n])}</th>' for n in shown
    )
    body = "\n".join(
        "<tr>" + "".join(f"<td{' class=number' if n in numeric else ''}>{_cell(row[n])}" for n in shown) for row in rows
    )
    return (
        f'<div class="scrolls tall"><table class="sortable" aria-label="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


_ODD = ("inf", "-inf", "nan")


def _cell(value):
    if isinstance(value, dict | list):
        value = json.dumps(value, ensure_ascii=False)
    return "" if value is None else html.escape(number(value) if isinstance(value, float) else str(value))


# --- sources --------------------------------------------------------------------------------------------------------


def sources(root, files):
    """Return a page for each file that a lesson links to, by the page's name."""
    return {
        f"source/{file}.md": f"---\norphan: true\nnosearch: true\n---\n\n# {escaped(file)}\n\n"
        f"~~~~~~python\n{(root / file).read_text()}~~~~~~\n"
        for file in files
    }


TIMED = {"RWKV6": "B1 T32768", "RWKV7": "B1 T32768", "GSA": "B8 T4096 K512"}
"""For each operator, the last of the three cases that the speed page begins with. Before it come 8 sequences with the
decays of a trained gate, and with a fresh model's; all are in chunks."""


def times():
    """Return the picture that the speed page begins with, drawn from the recording."""
    run = recorded.read("h200_speed")
    cases = [f"{op} chunk {case}" for op, last in TIMED.items() for case in ("B8 T4096 trained", "B8 T4096", last)]
    rows = [row for row in run.rows if in_short(row) in cases]
    rates = {name: run.meta[name] for name in ("copy_tb_s", "tflops")}
    return speed(rows, title=run.label, roofline=False, **rates)


def _overlap():
    table = recorded.read("h200_ranks")
    (row,) = table.select(operator="rwkv6")
    card = table.meta["device"].removeprefix("NVIDIA ").split()[0]
    return (
        f"On two {card}s RWKV6's {row['T']:,} tokens take "
        f"{row['together_ms']:.2f} ms ({row['alone_ms'] / row['together_ms']:.2f} times as fast as one). The last "
        f"rank's messages are in flight for {row['under_way_ms']:.2f} ms of that, including the wait for the other "
        f"rank, and {row['overlapped']:.0%} of this time overlaps with its kernels "
        "([h200_ranks](results/h200_ranks.md)). All-gathers as large and nothing else, both ranks at once, take "
        f"{row['gather_ms']:.2f} ms with all that their host does."
    )


def _accuracy():
    table = recorded.read("cpu_ranks_accuracy")
    counts = table.values("ranks")

    def cells(op, dtype, column):
        return (f"{max(r[column] for r in table.select(operator=op, dtype=dtype, ranks=n)):.2g}" for n in counts)

    return _lines(
        ("", "", *(f"{n} rank{'s' * (n > 1)}" for n in counts)),
        (
            (f"{op.upper()}, {dtype}", column, *cells(op, dtype, column))
            for op in table.values("operator")
            for dtype in table.values("dtype")
            for column in ("o", "gradients")
        ),
    )


def ranks(page):
    """Return the page on many ranks with its placeholders filled in from the simulation, and its picture."""
    net, tokens = simulate.network(), 2**20
    *_, off = fit(recorded.read("h200_messages").rows)
    case = simulate.sized("rwkv7", tokens)
    ways = list(simulate.WAYS)
    picture = over_ranks(*simulate.drawn("rwkv7"))
    forward, backward = simulate.messages(case)
    rows, small = simulate.table(case), (forward.apply + backward.apply) * net.small_us / 1e3
    places = {
        "picture": picture.alt,
        "tokens": f"{tokens:,}",
        "network": (
            f"{net.start_us + net.hop_us:.1f} µs and {net.gb_s:.0f} GB/s, at most {off:.0%} off for messages from "
            f"{SIZES[0] >> 10} KiB to {SIZES[-1] >> 20} MiB"
        ),
        "declared": (
            f"{net.gpus_a_host} GPUs a host, {net.hop_us:g} µs of a message's for each step from one GPU to the next, "
            f"between hosts {net.hop_us_between_hosts:g} µs and {net.gb_s_between_hosts:g} GB/s (a card of 400 Gbit/s "
            f"for each GPU), and {net.small_us:g} µs for a small kernel"
        ),
        "foretold": _lines(
            ("", "GPU", "tokens", "one GPU", "ranks", "measured", "foretold", "off", "without h"),
            (
                (
                    row["operator"].upper(),
                    row["card"].upper(),
                    f"{row['T']:,}",
                    f"{row['alone_ms']:.3g}",
                    row["ranks"],
                    f"{row['together_ms']:.3g}",
                    f"{row['simulated_ms']:.3g}",
                    *(f"{row[off]:+.1%}".replace("-", "−") for off in ("off", "off_without_fixed")),
                )
                for row in simulate.foretold()
            ),
        ),  # fmt: skip
        "table": _lines(
            ("ranks", "tokens a rank", *(f"{way}, ms" for way in ways), *(f"{way}, efficiency" for way in ways)),
            (
                (row["ranks"], f"{row['tokens']:,.0f}", *(f"{row[f'{way}_ms']:.3g}" for way in ways))
                + tuple(f"{row[way]:.0%}" for way in ways)
                for row in rows
                if row["ranks"].bit_length() % 2
            ),
        ),
        "overlap": _overlap(),
        "accuracy": _accuracy(),
        "fastest": "; ".join(_fastest(op, tokens) for op in ("rwkv6", "rwkv7", "gsa")),
        "chain": "; ".join(_fastest(op, tokens, ("gather", "chain")) for op in ("rwkv6", "rwkv7", "gsa")),
        "wide": _fastest("rwkv7", tokens, ("gather", "chain"), 256),
        "small": f"{forward.apply} small kernels",
        "small_wait": f"{1023 * small:.0f}",
        "pays": next(r for r in simulate.counts() if (r - 1) * small > 0.02 * simulate.together_ms(case, r)),
        "received": f"{rows[-1]['received'] / 2**20:,.0f}",
        "message_wait": f"{sum(simulate.gather(1024, sent, net) for sent in (forward, backward)) - 1023 * small:.0f}",
        "fixed": f"{simulate.own(case).fixed_ms:.1f}",
        "enough": ", ".join(
            f"{need:,} tokens a rank for 90% over {r:,}"
            for r in (64, 1024)
            for need in [simulate.tokens_a_rank("rwkv7", r, "levels", 0.9)]
        ),
    }
    for name, text in places.items():
        page = page.replace(f"{{{{{name}}}}}", str(text))
    return page, picture


def _fastest(op, tokens, ways=tuple(simulate.WAYS), head_size=None):
    (first, _), *others = simulate.fastest(simulate.sized(op, tokens, head_size), ways)
    return f"{op.upper()} {', '.join([first, *(f'{way} from {r:,} ranks on' for way, r in others)])}"


def _lines(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
