"""The picture of a panel in the browser: its bytes, its words, and cells that can be pointed at."""

from collections.abc import Callable
from pathlib import Path

import anywidget
import traitlets

from ..figures import style
from ..figures.canvas import DARK, Canvas, Cell


def _letters() -> str:
    """The style by which formulas around a panel have the letters' colours, with nothing written in their source.

    JupyterLab's MathJax names the element of a letter by its code point: 1D45F is the italic r. In dr the r alone is
    blue. A letter that is upright, as K and V in "K rows", is a number of channels and stays as it is.
    """
    rules = []
    for name in "rqkvwgD":
        italic = ord(name) - ord("a") + 0x1D44E if name.islower() else ord(name) - ord("A") + 0x1D434
        letter, colour = f".jp-RenderedMarkdown mjx-c.mjx-c{italic:X}.TEX-I", style.letter(name)
        rules.append(f"{letter} {{color: {colour}}}")
        rules.append(f'[data-jp-theme-light="false"] {letter} {{color: color-mix(in srgb, {colour} 55%, white)}}')
    return "\n".join(rules)


class Picture(anywidget.AnyWidget):
    """A canvas's picture. Mouse, click and arrow keys choose a cell of the canvas's maps.

    found(cell) is called whenever another cell is pointed at, with None where there is none; what it returns is the
    strip of words below the picture. room(width, density) is called with the pixels that a panel has for pictures, and
    with how many dots the screen has for each of them, when the browser shows it and whenever the width changes.
    """

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
    """What the player's buttons are called, by their icons."""

    def __init__(self, found: Callable[[Cell | None], str], room: Callable[[int, float], None], **traits):
        super().__init__(**traits)
        self._found, self._room = found, room
        self._canvas: Canvas | None = None
        self.picked: Cell | None = None
        self.pointed: Cell | None = None
        self.on_msg(lambda _, content, __: self._told(content))

    @property
    def cell(self) -> Cell | None:
        """The cell under the pointer, else the one that was picked."""
        return self.pointed or self.picked

    def show(self, canvas: Canvas, alt: str, *, points: bool) -> None:
        """Show a canvas as it is drawn now; a picked cell that is no longer there is dropped."""
        self._canvas = canvas
        with self.hold_sync():
            self.width, self.height = canvas.pixels
            self.png, self.alt = canvas.png(), alt
            self.points = points and bool(canvas.maps)
            self.pointed = self._still_there(self.pointed)
            self.picked = self._still_there(self.picked)
            self._say()

    def pick(self, cell: Cell | None) -> None:
        """Choose a cell, as a click does; None drops the one that was chosen."""
        self.picked, self.pointed = cell, None
        with self.hold_sync():
            self._say()

    def _still_there(self, cell: Cell | None) -> Cell | None:
        rows, columns = self._canvas.maps.get(cell.map, (0, 0)) if cell else (0, 0)
        return cell if cell and cell.row < rows and cell.column < columns else None

    def _told(self, content: dict) -> None:
        kind, x, y = content["kind"], content["x"], content["y"]
        if kind == "room":
            self._room(int(x), float(y))
        elif kind == "point":
            cell = self._canvas.cell(x, y)
            if cell != self.pointed:
                self.pointed = cell
                with self.hold_sync():
                    self._say()
        elif kind == "leave":
            self.pick(self.picked)
        elif kind == "pick":
            self.pick(self._canvas.cell(x, y))
        elif kind == "drop":
            self.pick(None)
        elif kind == "step":
            self.pick(self._beside(int(x), int(y)))

    def _beside(self, right: int, down: int) -> Cell | None:
        """The next cell in a direction, staying on the map; the first cell of the first map where none was picked."""
        if self.picked is None:
            name = next(iter(self._canvas.maps), None)
            return None if name is None else Cell(name, 0, 0)
        rows, columns = self._canvas.maps[self.picked.map]
        row, column = self.picked.row + down, self.picked.column + right
        return Cell(self.picked.map, min(max(row, 0), rows - 1), min(max(column, 0), columns - 1))

    def _say(self) -> None:
        self.strip = self._found(self.cell) if self.points else ""
        self.lit = self._places() if self.points else []

    def _places(self) -> list[tuple]:
        """The chosen cell, its row and its column, and the same token's in the other maps the panel names."""
        cell = self.cell
        if cell is None:
            return []
        box = self._canvas.box
        lines = [("line", *box(cell.map, row=cell.row)), ("line", *box(cell.map, column=cell.column))]
        others = [("same", *box(*each)) for each in self.beside(cell)]
        return [*lines, *others, ("cell", *box(cell.map, cell.row, cell.column))]

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Map, row and column (None: all of it) of further places that light up with a cell; a panel puts its own."""
        return []
