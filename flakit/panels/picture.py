"""The picture of a panel in the browser, as a widget: PNG bytes, alternative text, and cells that can be pointed at."""

from collections.abc import Callable
from pathlib import Path

import anywidget
import traitlets

from ..figures import style
from ..figures.canvas import DARK, Canvas, Cell


def _letters() -> str:
    """Return CSS that colours letters in the formulas of the Markdown cells around a panel, as in its picture.

    JupyterLab's MathJax names a letter's element by its code point: 1D45F is the italic r. In dr only the r is blue. An
    upright letter, as K and V in "K rows", is a number of channels and stays black.
    """
    rules = []
    for name in "rqkvwgD":
        italic = ord(name) - ord("a") + 0x1D44E if name.islower() else ord(name) - ord("A") + 0x1D434
        letter, colour = f".jp-RenderedMarkdown mjx-c.mjx-c{italic:X}.TEX-I", style.letter(name)
        rules.append(f"{letter} {{color: {colour}}}")
        rules.append(f'[data-jp-theme-light="false"] {letter} {{color: color-mix(in srgb, {colour} 55%, white)}}')
    return "\n".join(rules)


class Picture(anywidget.AnyWidget):
    """A widget that shows a `Canvas`. Mouse, click and arrow keys choose a cell of the canvas's maps.

    describe(cell) returns the line under the picture for the chosen cell, or for None. resized(width, density) is
    called when the browser shows the panel and whenever its width changes: the pixels available for pictures, and the
    dots of the screen per pixel. beside(cell) returns further places to highlight: map, row and column (None: all)."""

    _esm = Path(__file__).with_suffix(".js").read_text()
    _css = f"{_letters()}\n{DARK}"

    png = traitlets.Bytes(b"").tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    width = traitlets.Int(1).tag(sync=True)
    height = traitlets.Int(1).tag(sync=True)
    lit = traitlets.List([]).tag(sync=True)
    strip = traitlets.Unicode("").tag(sync=True)
    points = traitlets.Bool(False).tag(sync=True)
    names = traitlets.Dict().tag(sync=True)
    """The accessible names of the player's buttons, by their icons."""

    def __init__(
        self,
        describe: Callable[[Cell | None], str] = lambda _: "",
        resized: Callable[[int, float], None] = lambda *_: None,
        beside: Callable[[Cell], list[tuple[str, int | None, int | None]]] = lambda _: [],
        **traits,
    ):
        super().__init__(**traits)
        self._describe, self._resized, self._beside = describe, resized, beside
        self._canvas: Canvas | None = None
        self.picked: Cell | None = None
        self.pointed: Cell | None = None
        self.on_msg(lambda _, content, __: self._received(content))

    @property
    def cell(self) -> Cell | None:
        """The chosen cell: the one under the pointer, else the picked one."""
        return self.pointed or self.picked

    def show(self, canvas: Canvas, alt: str, *, points: bool) -> None:
        """Show a canvas as drawn now; drop a chosen cell that no longer exists. points: cells can be pointed at."""
        self._canvas = canvas
        with self.hold_sync():
            self.width, self.height = canvas.pixels
            self.png, self.alt = canvas.png(), alt
            self.points = points and bool(canvas.maps)
            self.pointed = self._existing(self.pointed)
            self.picked = self._existing(self.picked)
            self._update()

    def pick(self, cell: Cell | None) -> None:
        """Pick a cell as a click does; None clears the choice."""
        self.picked, self.pointed = cell, None
        with self.hold_sync():
            self._update()

    def _existing(self, cell: Cell | None) -> Cell | None:
        rows, columns = self._canvas.maps.get(cell.map, (0, 0)) if cell else (0, 0)
        return cell if cell and cell.row < rows and cell.column < columns else None

    def _received(self, content: dict) -> None:
        kind, x, y = content["kind"], content["x"], content["y"]
        if kind == "room":
            self._resized(int(x), float(y))
        elif kind == "point":
            cell = self._canvas.cell(x, y)
            if cell != self.pointed:
                self.pointed = cell
                with self.hold_sync():
                    self._update()
        elif kind == "leave":
            self.pick(self.picked)
        elif kind == "pick":
            self.pick(self._canvas.cell(x, y))
        elif kind == "drop":
            self.pick(None)
        elif kind == "step":
            self.pick(self._next(int(x), int(y)))

    def _next(self, right: int, down: int) -> Cell | None:
        """Return the picked cell's neighbour within its map; with none picked, the first cell of the first map."""
        if self.picked is None:
            name = next(iter(self._canvas.maps), None)
            return None if name is None else Cell(name, 0, 0)
        rows, columns = self._canvas.maps[self.picked.map]
        row, column = self.picked.row + down, self.picked.column + right
        return Cell(self.picked.map, min(max(row, 0), rows - 1), min(max(column, 0), columns - 1))

    def _update(self) -> None:
        self.strip = self._describe(self.cell) if self.points else ""
        self.lit = self._highlights() if self.points else []

    def _highlights(self) -> list[tuple]:
        """Return the boxes to draw: kind and `Box` for the chosen cell, its row, its column and places beside it."""
        cell = self.cell
        if cell is None:
            return []
        box = self._canvas.box
        lines = [("line", *box(cell.map, row=cell.row)), ("line", *box(cell.map, column=cell.column))]
        others = [("same", *box(*each)) for each in self._beside(cell)]
        return [*lines, *others, ("cell", *box(cell.map, cell.row, cell.column))]
