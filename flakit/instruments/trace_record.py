"""The result of `flakit.trace`: the places where values stopped being finite, how they are related, and the report.

A `Site` is one operation at one place of the source. Many tiles may turn bad there, in many programs of a grid and many
rounds of a loop: the site stores the first and counts the others. A site's parents are the sites of its operands, so
that sites form a family tree, from the origin of an infinity to the stores that it reaches.

Masks use -inf: an operand that is an infinite constant, or -inf from memory, is no fault, nor is a value that is
infinite only because of one. A NaN is a fault, and so is an infinity computed from finite numbers.
"""

import linecache
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..language import ENGLISH, Words, say, speaking
from ..numerics.words import number

if TYPE_CHECKING:
    from ..figures.canvas import Canvas
    from .digits import Digits


class How:
    """How the first bad tile of a site arose; `WORDS["how"]` describes each. GIVEN: it came from outside the trace."""

    BORN, BECAME_NAN, CARRIED, READ, BEYOND, GIVEN, STORED = (
        "born", "became NaN", "carried", "read", "out of bounds", "given", "stored",
    )  # fmt: skip


DIGITS = str(Path(__file__).with_name("digits"))
"""Prefix of the files that compute shadows, whose lines are not the user's."""

DTYPES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}
"""PyTorch's names of Triton's dtypes."""

LN_BASE = {"exp": 1.0, "exp2": math.log(2), "expm1": 1.0}
"""The natural logarithm of each exponential's base."""

WORDS = Words() | {
    "how": {
        How.BORN: "{what} born of finite numbers",
        How.BECAME_NAN: "NaN made of infinities",
        How.CARRIED: "{what} carried on",
        How.READ: "{what} read from memory",
        How.BEYOND: "{what} where nothing was to be read",
        How.GIVEN: "{what} given from outside",
        How.STORED: "{what} stored",
    },
    "first": "First non-finite tile: {what}",
    "finite": "Every value is finite",
    "nearest": "nearest to its end: {line}",
    "tile": "tile {shape} · largest at {index}",
    "bad tile": "{dtype} {shape} · first {index}",
    "programs": "programs of {kernel} · at {program}",
    "bad programs": "programs of {kernel} · first {program}",
    "into": "{what} into {name}",
    "lanes": "{what}: {bad} of {size} lanes",
    "tiles": "{what}: {bad} of {size} lanes, {tiles} tiles",
}
"""Words of a trace's picture. Printed reports are English in every language."""


@dataclass(frozen=True)
class Place:
    """A place in the source of the traced program.

    expression: the part of the line that was computed, if Python knows it (from 3.11 on), else "".
    kernel: the Triton kernel, "" for PyTorch code. backward: the autograd node, for the gradient of this line.
    via: (function, line) of the callers between the kernel and a helper, the kernel's own first.
    text: the text of the line, if it cannot be read from the file. `statement` is either.
    """

    file: str
    line: int
    expression: str = ""
    kernel: str = ""
    backward: str = ""
    via: tuple[tuple[str, int], ...] = ()
    text: str = field(default="", compare=False)

    @property
    def statement(self) -> str:
        return self.text or linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """The file's name and the line, file.py:12; with the folder for a package's __init__.py."""
        path = Path(self.file)
        return f"{path.parent.name + '/' if path.name == '__init__.py' else ''}{path.name}:{self.line}"

    def code(self, most: float = math.inf) -> str:
        """Return the expression, or the source line, on one line of at most `most` characters."""
        text = " ".join((self.expression or self.statement).split())
        return text if len(text) <= most else text[: int(most) - 1] + "…"


@dataclass(frozen=True)
class Operand:
    """An operand of a bad operation: the range `low` … `high` of its finite values, and counts of NaN and infinities.
    at: its value in the first bad lane of the result, None if the shapes differ."""

    name: str
    low: float
    high: float
    nan: int
    inf: int
    at: float | None = None

    def __str__(self) -> str:
        words = f"{number(self.low)} … {number(self.high)}" if self.low <= self.high else "nothing finite"
        others = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        words += f", {' and '.join(others)}" if others else ""
        return words if self.at is None else f"{words}; {_value(self.at)} there"


@dataclass(frozen=True)
class Tile:
    """A tile with non-finite values: a block of a Triton program, or a whole tensor of PyTorch (program None). index:
    the first bad lane. lanes: 0 for finite, 1 for infinite, 2 for NaN, in the tile's shape; None if unknown."""

    program: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: str
    index: tuple[int, ...]
    nan: int
    inf: int
    operands: tuple[Operand, ...] = ()
    lanes: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bad(self) -> int:
        """How many lanes are not finite."""
        return self.nan + self.inf

    @property
    def cells(self) -> np.ndarray:
        """A number for each lane: 0, infinity or NaN. If `lanes` is None, only the first bad lane is set."""
        lanes = self.lanes
        if lanes is None:
            lanes = np.zeros(self.shape, np.int8)
            lanes[self.index] = 2 if self.nan else 1
        return np.array([0.0, np.inf, np.nan])[lanes]

    @property
    def what(self) -> str:
        """A word for the bad values: "inf", "NaN" or both."""
        return say(" and ").join(word for word, n in (("inf", self.inf), ("NaN", self.nan)) if n)


@dataclass(eq=False)
class Site:
    """An operation at one place whose results are not finite: its first such tile, and counts over all tiles.

    order: its rank in time among all sites. into: the argument that a store writes or a load reads, "" for others.
    masked: the places at which bad lanes of this site were dropped (by `tl.where`, by the mask of a store, by a minimum
        …), and how many. parents, children: the sites that its bad values come from and reach.
    """

    place: Place
    operation: str
    how: str
    first: Tile
    into: str = ""
    parents: list["Site"] = field(default_factory=list, repr=False)
    children: list["Site"] = field(default_factory=list, repr=False)
    order: int = 0
    tiles: int = 0
    nan: int = 0
    inf: int = 0
    programs: set = field(default_factory=set, repr=False)
    masked: Counter[tuple[Place, str]] = field(default_factory=Counter, repr=False)

    def descends_from(self, parent: "Site") -> None:
        if parent is not self and parent not in self.parents:
            self.parents.append(parent)
            parent.children.append(self)

    def count(self, nan: int, inf: int, program: tuple[int, ...] | None = None) -> None:
        """Record another bad tile: its counts of NaN and infinite lanes, and the Triton program that computed it."""
        self.tiles += 1
        self.nan += nan
        self.inf += inf
        if program is not None:
            self.programs.add(program)

    def family(self) -> list["Site"]:
        """Return this site and all its descendants, each once."""
        seen, waiting = [], [self]
        while waiting:
            site = waiting.pop(0)
            if site not in seen:
                seen.append(site)
                waiting += site.children
        return seen

    @property
    def stores(self) -> list["Site"]:
        """The sites of stores that this site's bad values reach."""
        return [site for site in self.family() if site.how == How.STORED]

    @property
    def dropped(self) -> dict[tuple[Place, str], int]:
        """The number of lanes of this site and its descendants that were masked, by (place, operation)."""
        counts: Counter[tuple[Place, str]] = Counter()
        for site in self.family():
            counts.update(site.masked)
        return counts

    @property
    def fate(self) -> str:
        """A sentence on the stores that the site's bad values reach, and on the places where they are masked."""
        reached = [f"{site.into or 'memory'} ({site.place.short})" for site in self.stores]
        gone = [f"{place.short} ({by}, {lanes} lanes)" for (place, by), lanes in self.dropped.items()]
        if reached:
            also = f"; masked away in part at {', '.join(gone)}" if gone else ""
            return f"It reaches {', '.join(dict.fromkeys(reached))}{also}."
        if not self.place.kernel:
            family = self.family()
            ends = [x for x in family if not x.masked and all(child.order <= x.order for child in x.children)]
            still = [f"{site.place.short} ({site.operation})" for site in ends[-3:]]
            also = f"; masked away in part at {', '.join(gone)}" if gone and still else ""
            return f"It is still there at {', '.join(still)}{also}." if still else f"Masked away at {', '.join(gone)}."
        if gone:
            return f"Masked away later, at {', '.join(gone)}: no store was reached."
        return "No store was reached."

    @property
    def words(self) -> str:
        return WORDS["how"][self.how].format(what=self.first.what)


@dataclass(frozen=True)
class Headroom:
    """How far the exponentials of one source line are from overflow.

    largest: the largest exponent of all runs. room: ln of the dtype's largest number less that exponent (as a natural
        logarithm), negative beyond overflow. program, index: the Triton program and the lane with that exponent.
    """

    place: Place
    operation: str
    largest: float
    room: float
    program: tuple[int, ...] | None
    index: tuple[int, ...]
    shape: tuple[int, ...] = ()


@dataclass
class Access:
    """Loads or stores of one line outside the tensor to which they belong.

    into: the kernel's argument that is accessed, of this shape. lanes: how many accesses were outside, in `programs`.
    program, index: the first program with one, and the lane in its tile.
    beyond: the largest distance outside, in elements: from the tensor's end, negative if before its start.
    within: inside the tensor's storage all the same (it is a view of a larger one), so that a trace performs it;
        otherwise a load gives NaN (0 for integers) and a store does nothing.
    """

    place: Place
    operation: str
    into: str
    shape: tuple[int, ...]
    beyond: int
    within: bool
    program: tuple[int, ...] | None
    index: tuple[int, ...]
    lanes: int
    programs: set = field(default_factory=set, repr=False)


class Report:
    """Base class of printed reports, with notes: text of 120 columns without colours."""

    def __init__(self):
        self.notes: list[str] = []

    def note(self, words: str) -> None:
        """Add a note to the report, unless it has the same one already."""
        if words not in self.notes:
            self.notes.append(words)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    __repr__ = __str__


def grid(rows: Iterable[Sequence[str | Text]], bold: str = "") -> Table:
    """Return rows of cells in indented columns, without rules. bold: the first cell of rows to set in bold."""
    table = Table.grid(padding=(0, 2))
    for first, *others in rows:
        style = "bold" if bold and first == bold else ""
        table.add_row(Text(f"  {first}"), *(x if isinstance(x, Text) else Text(x, style) for x in others))
    return table


def section(title: str, rows: Sequence[Sequence[str | Text]], more: str, most: int = 8) -> Iterator[RenderableType]:
    """Yield a title, the first `most` rows, and how many `more` there are; yield nothing without rows."""
    if rows:
        yield Text(f"\n{title}", style="bold")
        yield grid(rows[:most])
    if len(rows) > most:
        yield Text(f"  … and {len(rows) - most} {more}", style="dim")


def place_rows(place: Place, where: str, expression: bool = True) -> list[tuple[str, str]]:
    """Return the rows that name a place: its location, its callers, its line and, if `expression`, what it computes."""
    rows = [("where", where), *(("", f"called from {function}, line {line}") for function, line in place.via)]
    rows += [("line", place.statement)]
    if expression and place.expression and place.expression != place.statement:
        rows += [("in it", " ".join(place.expression.split()))]
    return rows


class Trace(Report):
    """The result of `flakit.trace`; rich, `print` and the command line print the same report.

    first: the site of the first non-finite tile, None if all were finite. sites: every site, in the order in which they
    turned bad. headroom: one entry a line, the tightest first. accesses: loads and stores out of bounds. notes: limits
    of the trace itself. grids: the grid of each kernel. operations: how many operations of PyTorch returned
    floating-point numbers. digits: which lines lost digits, None if not requested.
    """

    def __init__(self):
        super().__init__()
        self.sites: list[Site] = []
        self.accesses: list[Access] = []
        self.grids: dict[str, tuple[int, ...]] = {}
        self.operations = 0
        self.digits: Digits | None = None
        self._headroom: dict = {}

    def add(self, site: Site) -> Site:
        site.order = len(self.sites)
        self.sites.append(site)
        return site

    @property
    def first(self) -> Site | None:
        return self.sites[0] if self.sites else None

    def first_in(self, kernel: str) -> Site | None:
        """Return the site of a kernel's first non-finite tile, None if all were finite."""
        return next((site for site in self.sites if site.place.kernel == kernel), None)

    @property
    def ran(self) -> bool:
        """Whether anything ran: a kernel, or an operation of PyTorch."""
        return bool(self.grids or self.operations or self.sites)

    @property
    def finite(self) -> bool:
        """Whether every value is finite and no access is out of bounds."""
        return not self.sites and not self.accesses

    @property
    def headroom(self) -> list[Headroom]:
        return sorted(self._headroom.values(), key=lambda line: line.room)

    @property
    def roots(self) -> list[Site]:
        """The sites without parents, at which non-finite values originate."""
        return [site for site in self.sites if not site.parents]

    def to_dict(self) -> dict:
        """Return plain lists, numbers and strings, such as "inf" and "nan"; a site is referred to by its position.

        lanes: of the first tile, row after row, as runs of [0 finite, 1 infinite or 2 NaN, how many].
        """
        at = {site: i for i, site in enumerate(self.sites)}
        data = {
            "sites": [
                _line(site.place)
                | {"operation": site.operation, "how": site.how, "into": site.into}
                | {"program": site.first.program, "index": site.first.index}
                | {"shape": site.first.shape, "dtype": site.first.dtype}
                | {"nan": site.first.nan, "inf": site.first.inf, "operands": [asdict(x) for x in site.first.operands]}
                | {"tiles": site.tiles, "programs": len(site.programs), "fate": site.fate}
                | {"parents": [at[parent] for parent in site.parents if parent in at]}
                | {"lanes": _runs(site.first.lanes), "in_programs": sorted(site.programs)}
                | {"all_nan": site.nan, "all_inf": site.inf}
                | {"masked": [[_line(place), by, lanes] for (place, by), lanes in site.masked.items()]}
                for site in self.sites
            ],
            "headroom": [asdict(line) | {"place": _line(line.place)} for line in self.headroom],
            "accesses": [
                {**vars(access), "place": asdict(access.place), "programs": len(access.programs)}
                for access in self.accesses
            ],
            "notes": self.notes,
            "grids": self.grids,
            "operations": self.operations,
        }
        if self.digits is not None:
            data["digits"] = self.digits.to_dict()
        return _plain(data)

    @classmethod
    def from_dict(cls, data: Mapping) -> "Trace":
        """Restore the result of `to_dict`, without accesses out of bounds."""
        trace = cls()
        trace.notes, trace.grids = list(data["notes"]), {name: tuple(grid) for name, grid in data["grids"].items()}
        trace.operations = data.get("operations", 0)
        if "digits" in data:
            from .digits import Digits

            trace.digits = Digits.from_dict(data["digits"])
        for x in data["sites"]:
            operands = tuple(
                Operand(**y | {name: y[name] if y[name] is None else float(y[name]) for name in ("low", "high", "at")})
                for y in x["operands"]
            )
            shape = tuple(x["shape"])
            lanes = None if x["lanes"] is None else np.repeat(*np.array(x["lanes"], np.int64).T).astype(np.int8)
            tile = Tile(
                _tuple(x["program"]), shape, x["dtype"], tuple(x["index"]), x["nan"], x["inf"], operands,
                None if lanes is None else lanes.reshape(shape),
            )  # fmt: skip
            site = trace.add(Site(restored_place(x), x["operation"], x["how"], tile, x["into"]))
            site.tiles, site.nan, site.inf = x["tiles"], x["all_nan"], x["all_inf"]
            site.programs = {tuple(program) for program in x["in_programs"]}
            site.masked = Counter({(restored_place(place), by): lanes for place, by, lanes in x["masked"]})
        for site, x in zip(trace.sites, data["sites"], strict=True):
            for parent in x["parents"]:
                site.descends_from(trace.sites[parent])
        for n, x in enumerate(data["headroom"]):
            trace._headroom[n] = Headroom(
                restored_place(x["place"]), x["operation"], float(x["largest"]), float(x["room"]), _tuple(x["program"]),
                tuple(x["index"]), tuple(x["shape"]),
            )  # fmt: skip
        return trace

    def picture(self) -> "Canvas":
        """Draw the first bad tile, the programs of its grid, the family tree, and the headroom of each exponential. If
        all was finite, draw the tile of the exponential with the least headroom; raises ValueError without one."""
        from ..figures.trace import TraceFigure

        if not self.sites and not self._headroom:
            raise ValueError("picture: expected a value that is not finite or an exponential, found neither")
        figure = TraceFigure()
        figure.update(**self.drawn())
        return figure.canvas

    def drawn(self) -> dict:
        """Return the arguments of `figures.trace.TraceFigure.update`, by name, for `picture`."""
        from ..figures.trace import Branch, Room

        rooms = [Room(f"{line.place.line}  {line.place.code(60)}", line.largest, line.room) for line in self.headroom]
        site = self.first
        tile: Tile | Headroom
        if site is None:
            tile = self.headroom[0]
            place, values, family, bad = tile.place, np.zeros(tile.shape), [], ""
            title, subtitle = WORDS["finite"], WORDS["nearest"].format(line=f"{place.short}  {place.code(70)}")
            tile_name = WORDS["tile"].format(shape=list(tile.shape), index=list(tile.index))
        else:
            tile = site.first
            place, values, family, bad = site.place, tile.cells, self.tree(site), "bad "
            title, subtitle = WORDS["first"].format(what=site.words), f"{place.short}  {place.code(88)}"
            tile_name = WORDS["bad tile"].format(dtype=tile.dtype, shape=list(tile.shape), index=list(tile.index))
        cells, lane = _flat(values, tile.index)
        programs, program, empty = self._programs(place.kernel, tile.program)
        return dict(
            title=title, subtitle=subtitle, tile=cells, lane=lane, tile_name=tile_name,
            programs=programs, program=program, empty=empty,
            programs_name=WORDS[f"{bad}programs"].format(kernel=place.kernel, program=tile.program),
            tree=[Branch(n, f"{x.place.line}  {x.place.code(60)}", _short(x), bool(x.nan)) for n, x in family],
            rooms=rooms,
        )  # fmt: skip

    def tree(self, site: Site) -> list[tuple[int, Site]]:
        """Return a site and its descendants, each once with its generation, parents before children."""
        generations, seen = [], set()

        def grow(site: Site, depth: int) -> None:
            seen.add(site)
            generations.append((depth, site))
            for child in site.children:
                if child not in seen:
                    grow(child, depth + 1)

        grow(site, 0)
        return generations

    def _programs(
        self, kernel: str, first: tuple[int, ...] | None, wide: int = 32
    ) -> tuple[np.ndarray | None, tuple[int, int], np.ndarray | None]:
        """Return a kernel's grid as a matrix of cells, the cell of program `first`, and the cells without a program."""
        if first is None:
            return None, (0, 0), None
        shape = self.grids.get(kernel, tuple(i + 1 for i in first))
        cells = np.zeros(shape)
        for other in self.sites:
            if other.place.kernel == kernel:
                for program in other.programs:
                    cells[program] = np.nan if other.nan or np.isnan(cells[program]) else np.inf
        flat = cells.reshape(shape[0], -1)
        at = int(np.ravel_multi_index(first, shape))
        if flat.shape[1] == 1:  # one axis: in rows, as one reads
            columns = min(len(flat), wide)
            rows = -(-len(flat) // columns)
            padded = np.zeros(rows * columns)
            padded[: len(flat)] = flat[:, 0]
            empty = np.arange(rows * columns).reshape(rows, columns) >= len(flat)
            return padded.reshape(rows, columns), divmod(at, columns), empty
        return flat, divmod(at, flat.shape[1]), None

    def _repr_png_(self) -> bytes | None:
        return self.picture().png() if self.sites else None

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        from ..figures.canvas import FOR_LIGHT

        return {}, dict(FOR_LIGHT)

    def __rich__(self) -> Group:
        with speaking(ENGLISH):
            parts = [*self._first(), *self._families(), *self._bounds(), *self._rooms()]
        if self.digits is not None and self.ran:
            parts += [Text(""), self.digits]
        return Group(*parts, *(Text(words, style="dim") for words in self.notes))

    def _first(self) -> Iterator:
        site = self.first
        if not self.ran:
            words = "Nothing ran: no kernel was launched, and no operation of PyTorch made floating-point numbers."
            yield Text(words, style="bold red")
            return
        if site is None:
            # A note says what limits the trace.
            measured = "Every value that was measured" if self.notes else "Every value"
            yield Text(f"{measured} was finite.", style="green")
            return
        tile = site.first
        yield Text(f"First non-finite tile: {site.words}", style="bold red")
        rows = place_rows(site.place, _where(site))
        index = f", first at {list(tile.index)}" if tile.index else ""
        lanes = f"{tile.bad} of {tile.size} of {tile.dtype} {list(tile.shape)}{index}"
        rows += [("operation", site.operation + (f" of {site.into}" if site.into else "")), ("lanes", lanes)]
        rows += [("operand", f"{x.name}: {x}") for x in tile.operands]
        rows += [("later", site.fate)] if site.fate else []
        yield grid(rows, bold="line")

    def _families(self, most: int = 40) -> Iterator:
        if len(self.sites) < 2:
            return
        yield Text("\nFamily tree", style="bold")
        seen: set[Site] = set()

        def grow(tree: Tree, site: Site) -> None:
            if site in seen:
                tree.add(Text(f"{site.place.short}  {site.operation}: as above", style="dim"))
            elif len(seen) < most:
                seen.add(site)
                branch = tree.add(Text(_node(site)))
                for (place, by), lanes in site.masked.items():
                    branch.add(Text(f"{place.short}  {by} drops {lanes} lanes", style="dim"))
                for child in site.children:
                    grow(branch, child)

        for root in self.roots:
            hidden = Tree("", hide_root=True)
            grow(hidden, root)
            yield Padding(hidden, (0, 0, 0, 2))
        if len(self.sites) > len(seen):
            yield Text(f"  … and {len(self.sites) - len(seen)} more", style="dim")

    def _bounds(self) -> Iterator:
        if not self.accesses:
            return
        yield Text("\nOut of bounds", style="bold red")
        rows: list[Sequence[str | Text]] = []
        for access in self.accesses:
            ends = f"{abs(access.beyond)} elements {'past its end' if access.beyond > 0 else 'before its start'}"
            kind = " (inside its memory)" if access.within else ""
            what = f"{access.operation} of {access.into or 'memory'} {list(access.shape)}: up to {ends}{kind}"
            where = f"program {access.program}, first at {list(access.index)}, {access.lanes} lanes in all"
            rows += [(access.place.short, what, where), ("", Text(access.place.statement, style="dim"), "")]
        yield grid(rows)

    def _rooms(self) -> Iterator:
        rows = []
        for line in self.headroom:
            room = f"{line.room:.2f}" if math.isfinite(line.room) else "never"
            colour = "red" if line.room <= 0 else "yellow" if line.room < 10 else "green"
            at = f"largest exponent {_value(line.largest)}" + (f", program {line.program}" if line.program else "")
            rows.append((line.place.short, Text(room, colour), at, line.place.code(60)))
        yield from section("Headroom of each exponential, in e-folds to overflow", rows, "with more room")


def _flat(cells: np.ndarray, index: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the lanes as a matrix (of more than two axes the last two at `index`), and the cell of lane `index`."""
    if cells.ndim == 0:
        return cells.reshape(1, 1), (0, 0)
    if cells.ndim == 1:
        return cells[None], (0, index[0])
    *others, row, column = index
    return cells[tuple(others)], (row, column)


def _line(place: Place) -> dict:
    return {name: x for name, x in asdict(place).items() if name != "text"} | {"statement": place.statement}


def restored_place(x: Mapping) -> Place:
    """Restore a place from a mapping with its fields; "text" may be called "statement"."""
    via = tuple((function, line) for function, line in x["via"])
    text = x["statement"] if "statement" in x else x["text"]
    return Place(x["file"], x["line"], x["expression"], x["kernel"], x["backward"], via, text)


def _tuple(x: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x)


def _runs(lanes: np.ndarray | None) -> list[list[int]] | None:
    """Return the runs of equal lanes, [value, length] each; None without lanes."""
    if lanes is None:
        return None
    flat = lanes.reshape(-1)
    starts = np.flatnonzero(np.diff(flat, prepend=-1))
    return [[int(flat[at]), int(n)] for at, n in zip(starts, np.diff(starts, append=flat.size), strict=True)]


def _plain(x):
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _value(x: float) -> str:
    return "-inf" if x == -math.inf else number(x)


def _where(site: Site) -> str:
    place, tile = site.place, site.first
    if place.kernel:
        return f"kernel {place.kernel}, program {tile.program}, {place.short}"
    return f"{place.short}" + (f", in its backward pass ({place.backward})" if place.backward else "")


def _short(site: Site) -> str:
    tile, what = site.first, site.words
    if site.how == How.STORED and site.into:
        what = WORDS["into"].format(what=what, name=site.into)
    words = WORDS["tiles" if site.tiles > 1 else "lanes"]
    return words.format(what=what, bad=tile.bad, size=tile.size, tiles=site.tiles)


def _node(site: Site) -> str:
    tile = site.first
    text = f"{site.place.short}  {site.place.code(60)}"
    often = f" in {site.tiles} tiles" if site.tiles > 1 else ""
    programs = f" of {len(site.programs)} programs" if len(site.programs) > 1 else ""
    into = f" into {site.into}" if site.how == How.STORED and site.into else ""
    node = f" [{site.place.backward}]" if site.place.backward else ""
    return (
        f"{text}{node}  {site.words}{into}: {tile.bad} of {tile.size} lanes, first {list(tile.index)}{often}{programs}"
    )


def operand(name: str, x: np.ndarray, index: tuple[int, ...], shape: tuple[int, ...]) -> Operand:
    """Describe an operand, the values x, of a tile of this shape whose first bad lane is `index`."""
    finite = np.isfinite(x)
    nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    values = x[finite]
    low, high = (float(values.min()), float(values.max())) if values.size else (math.inf, -math.inf)
    at = float(x[index]) if x.shape == shape and shape and x.size > 1 else None
    return Operand(name, low, high, nan, inf, at)
