"""A figure that is redrawn fast: what never changes is stored as pixels, and what moves is drawn over it.

    canvas = Canvas(9, 3)
    (line,) = canvas.moving(*ax.plot(x, y))
    line.set_ydata(…); canvas.png()

Axes, ticks and labels take most of the time of a redraw. Without them it takes a few milliseconds.
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from ..language import say
from . import style

Box = tuple[float, float, float, float]
"""Left, top, width and height of a part of a picture, as fractions of the picture's width and height."""

WIDE = 9.0
"""The smallest width of a picture's wide layout, in inches."""

FOR_LIGHT = {"needs_background": "light"}
"""Output metadata of a picture drawn for a light page; JupyterLab in a dark theme then applies `DARK` to it."""

DARK = """[data-jp-theme-light="false"] :is(img.jp-needs-light-background, .flakit-stored img) {
  filter: invert(0.89) hue-rotate(180deg); background: none
}"""
"""CSS that inverts brightness and keeps hues in a dark theme; panels and `flakit lab` bring it."""


@dataclass(frozen=True)
class Cell:
    """A cell that can be pointed at: the name of its map, the row from above and the column from the left."""

    map: str
    row: int
    column: int


class Canvas:
    """A figure of width x height inches that is redrawn in place, with the artists that move.

    Build axes on `.figure` inside `style.context()`. `png()` draws the artists passed to `moving` each time and those
    passed to `labels` when they have changed. It draws all others only after `stale()`: call that when one changes."""

    def __init__(self, width: float, height: float, *, dpi: int = 100):
        with style.context():
            self.figure = Figure(figsize=(width, height), dpi=dpi)
        self._agg = FigureCanvasAgg(self.figure)
        self._moving: list[Artist] = []
        self._labels: dict[Artist, object] = {}  # with the pixels each one covers, None before it is drawn
        self._background = None
        self._maps: dict[str, tuple[Axes, int, int]] = {}
        self._edges: dict[str, np.ndarray] = {}

    @property
    def pixels(self) -> tuple[int, int]:
        """The width and height of the picture in pixels."""
        return self._agg.get_width_height()

    def axes(
        self, left: float, top: float, width: float, height: float, *, title: str = "", size: float = 9.5,
        pad: float | None = None, framed: bool = False, **how,
    ) -> Axes:  # fmt: skip
        """Add and return axes whose position and size are in inches from the picture's upper left corner.

        title: with its font's size and the distance `pad`, both in points. framed: whether they have a line on all
        sides. how: other properties, as of `Axes.set`."""
        across, down = self.figure.get_size_inches()
        ax = self.figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down), **how)
        if title:
            ax.set_title(title, fontsize=size, pad=pad)
        if framed:
            ax.spines[:].set_visible(True)
        return ax

    def text(self, x: float, y: float, words: str = "", **look) -> Text:
        """Add and return a text at a place in inches from the picture's upper left corner. look: its properties."""
        across, down = self.figure.get_size_inches()
        return self.figure.text(x / across, 1 - y / down, words, **look)

    def moving(self, *artists: Artist) -> tuple[Artist, ...]:
        """Redraw these artists at every `png()`, in the order of their zorder; return them."""
        for artist in artists:
            artist.set_animated(True)
            self._moving.append(artist)
        self._moving.sort(key=lambda artist: artist.get_zorder())
        self.stale()
        return artists

    def line(self, ax: Axes, *form: str, **look) -> Line2D:
        """Add a line without points to axes and return it, one of the `moving` artists. form, look: of `Axes.plot`."""
        (line,) = self.moving(*ax.plot([], [], *form, **look))
        return line

    def legend(self, *handles: Artist, at: tuple[float, float] | None = None, **look) -> Legend:
        """Add a legend of these handles and return it: at the lower right, in one row, unless `look` says otherwise.

        at: the place of its corner `loc`, in inches from the picture's upper left corner. look: of `Figure.legend`."""
        width, height = self.figure.get_size_inches()
        look = {"loc": "lower right", "ncols": len(handles), "borderaxespad": 0.2} | look
        if at is not None:
            look["bbox_to_anchor"] = at[0] / width, 1 - at[1] / height
        return self.figure.legend(handles=handles, **look)

    def labels(self, *artists: Artist) -> tuple[Artist, ...]:
        """Redraw these texts and axes (`ax.xaxis`, `ax.yaxis`) only when they have changed; return them.

        Text is the slowest thing to draw: one that has not changed is restored as pixels. An axis is twice as fast with
        `set_label_coords`, which spares matplotlib placing its label behind the ticks."""
        for artist in artists:
            artist.set_animated(True)
            self._labels[artist] = None
        self.stale()
        return artists

    def stale(self) -> None:
        """Draw everything at the next `png()`. Call it when something that does not move has changed."""
        self._background = None

    # Cells that can be pointed at.

    def pointable(self, name: str, ax: Axes, rows: int, columns: int, edges: np.ndarray | None = None) -> None:
        """Make axes a map named `name`: a cell lies around every whole number, x from 0 to columns - 1, y from 0 to
        rows - 1.

        edges: where columns begin and end, [columns + 1] increasing values of x; default: they are one unit wide.
        `cell` ignores a map whose axes are not visible, or that has no cells."""
        self._maps[name] = ax, rows, columns
        self._edges[name] = np.arange(columns + 1) - 0.5 if edges is None else np.asarray(edges)

    @property
    def maps(self) -> Mapping[str, tuple[int, int]]:
        """(rows, columns) of every visible map, by name."""
        return {name: (rows, columns) for name, (ax, rows, columns) in self._maps.items() if ax.get_visible()}

    def cell(self, x: float, y: float) -> Cell | None:
        """Return the cell at a place in fractions of the picture's width and height from its upper left corner; None
        outside."""
        width, height = self.pixels
        for name, (rows, columns) in self.maps.items():
            ax, *_ = self._maps[name]
            at = x * width, (1 - y) * height
            if ax.bbox.contains(*at):
                x_there, y_there = ax.transData.inverted().transform(at)
                row, column = np.floor(y_there + 0.5), np.searchsorted(self._edges[name], x_there, side="right") - 1
                if 0 <= row < rows and 0 <= column < columns:
                    return Cell(name, int(row), int(column))
        return None

    def box(self, name: str, row: int | None = None, column: int | None = None) -> Box:
        """Return the place of a cell of a map; without column or row that of the whole row or column, without both of
        the map."""
        ax, rows, columns = self._maps[name]
        edges = self._edges[name]
        first = edges[0 if column is None else column], (0 if row is None else row) - 0.5
        last = edges[columns if column is None else column + 1], (rows if row is None else row + 1) - 0.5
        corners = ax.transData.transform([first, last])
        (left, bottom), (right, top) = corners.min(0), corners.max(0)
        width, height = self.pixels
        box = left / width, 1 - top / height, (right - left) / width, (top - bottom) / height
        return tuple(float(x) for x in box)

    def rgba(self) -> np.ndarray:
        """Draw and return the picture as bytes [height, width, 4], which are valid until the next call."""
        with style.context():  # ticks made while drawing take their look from it
            if self._background is None:
                for text in self.figure.findobj(Text):
                    style.readable(text)
                self._agg.draw()
                self._background = self._agg.copy_from_bbox(self.figure.bbox)
                self._labels = dict.fromkeys(self._labels)
            self._agg.restore_region(self._background)
            for artist, pixels in self._labels.items():
                if pixels is not None and not artist.stale:
                    self._agg.restore_region(pixels)
                else:
                    self._labels[artist] = self._drawn(artist)
            for artist in self._moving:
                self.figure.draw_artist(artist)
        return np.asarray(self._agg.buffer_rgba())

    def _drawn(self, artist: Artist):
        """Draw a label and return the pixels that it covers, None if it covers none."""
        if isinstance(artist, Text):
            style.readable(artist)
        self.figure.draw_artist(artist)
        box = artist.get_tightbbox(self._agg.get_renderer())
        # The box of an axis leaves out its ticks.
        across, along = {"x": (2, 12), "y": (12, 2)}.get(getattr(artist, "axis_name", None), (2, 2))
        box = box and Bbox.intersection(box.padded(across, along), self.figure.bbox)
        return box and self._agg.copy_from_bbox(box)

    def png(self, density: int = 1) -> bytes:
        """Draw and return the picture as PNG, encoded for speed rather than size.

        density: dots for each of `pixels`, across and down. More than one, for a high-density screen, redraws
        everything, which takes several times as long."""
        if density == 1:
            return _png(self.rgba())
        background, dpi = self._background, self.figure.dpi
        self.stale()
        self.figure.set_dpi(density * dpi)
        try:
            return _png(self.rgba())
        finally:
            self.figure.set_dpi(dpi)
            # Labels that have changed since the last plain picture no longer say so: all are drawn again in the next.
            self._background, self._labels = background, dict.fromkeys(self._labels)

    def _repr_png_(self) -> bytes:
        return self.png()

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        """Return no further data beside the PNG, and the metadata of the PNG."""
        return {}, dict(FOR_LIGHT)

    def __repr__(self) -> str:
        """Describe the picture by its titles, axes and legends, for readers who cannot see it."""
        parts = []
        for ax in self.figure.axes:
            titles = (ax.get_title(loc=place) for place in ("left", "center", "right"))
            axes = say(" against ").join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
            legend = ax.get_legend()
            lines = ", ".join(text.get_text() for text in legend.get_texts()) if legend else ""
            parts.append(": ".join(filter(None, (*titles, axes, lines))))
        words = "; ".join(dict.fromkeys(filter(None, parts))).replace("$", "").replace("\n", " ")
        return say("picture of {what}").format(what=words) if words else say("picture")


def _png(rgba: np.ndarray) -> bytes:
    """Encode bytes [height, width, 4] as PNG, without alpha and with unfiltered rows.

    Libraries choose a filter for every row. That takes three times as long, to write and to read, and gains nothing for
    figures, in which most pixels have the colour of their neighbours."""
    height, width, _ = rgba.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    for channel in range(3):
        rows[:, 1 + channel :: 3] = rgba[..., channel]

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows, 1)) + part(b"IEND", b"")
