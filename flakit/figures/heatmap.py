"""A matrix as coloured cells, redrawn in place. NaN and inf cells are hatched, so that colour alone carries no
meaning."""

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize, to_rgba_array
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from . import style
from .canvas import Canvas

LEAST = 4
"""Pixels: cells that are NaN or inf are drawn no thinner than this."""


class _Cells(Artist):
    """An artist that fills its axes with RGBA bytes [rows, columns, 4], a rectangle per cell; ten times as fast as
    `imshow`."""

    picture = np.zeros((1, 1, 4), np.uint8)

    def draw(self, renderer) -> None:
        left, bottom, right, top = np.round(self.axes.bbox.extents).astype(int)
        rows, columns = self.picture.shape[:2]
        # Pixels count from below, rows from above.
        row = (np.arange(top - bottom)[::-1] + 0.5) * rows / (top - bottom)
        column = (np.arange(right - left) + 0.5) * columns / (right - left)
        pixels = self.picture[row.astype(int)[:, None], column.astype(int)]
        renderer.draw_image(renderer.new_gc(), left, bottom, pixels)


class HeatMap:
    """A matrix drawn into `ax`, row 0 on top, one unit per cell with its index at the centre.

    `update` colours values between vmin and vmax; finite values beyond them take the colour of that end.
    rows_vary: whether a new number of rows redraws only the row axis, not the whole figure.
    name: the map under which its cells can be pointed at (`Canvas.cell`), None for none.
    NaN and infinities are drawn at least `LEAST` pixels wide and high, over their neighbours where cells are
    smaller."""

    def __init__(
        self,
        canvas: Canvas,
        ax: Axes,
        *,
        cmap: str = style.MAGNITUDE,
        vmin: float = 0.0,
        vmax: float = 1.0,
        rows_vary: bool = False,
        name: str | None = None,
    ):
        self.canvas, self.ax, self.rows_vary, self.name = canvas, ax, rows_vary, name
        self.colours = ScalarMappable(Normalize(vmin, vmax), colormaps[cmap])
        self._cells = ax.add_artist(_Cells())
        # The image is drawn over the inner half of its frame: what remains is a line of the usual width.
        ax.spines[:].set(visible=True, linewidth=2 * ax.spines["left"].get_linewidth())
        self._hatched = {}
        for kind, look in (("nan", style.NAN), ("inf", style.INF)):
            patch = PathPatch(Path(np.empty((0, 2))), zorder=1.5, linewidth=0, **look)
            self._hatched[kind] = ax.add_patch(patch)
        self._shape = 0, 0
        canvas.moving(self._cells, *self._hatched.values())
        if rows_vary:
            canvas.labels(ax.yaxis)

    def colorbar(self, cax: Axes, label: str, **kwargs) -> Colorbar:
        """Draw the scale of the colours into the axes `cax`; kwargs: of `Figure.colorbar`."""
        return self.canvas.figure.colorbar(self.colours, cax=cax, label=label, **kwargs)

    def update(self, values: np.ndarray, empty: np.ndarray | None = None, finite: np.ndarray | None = None) -> None:
        """Show values [rows, columns]. Cells where `empty` is true have no value, where `finite` is true an unknown
        finite one.

        A matrix with more cells than pixels is pooled: each pixel shows the largest value under it, and is hatched if
        any cell under it is non-finite, so that a single bad row cannot be lost."""
        values = np.asarray(values)
        rows, columns = values.shape
        empty, finite = (np.zeros(values.shape, bool) if mask is None else np.asarray(mask) for mask in (empty, finite))
        nan, inf = (kind(values) & ~empty & ~finite for kind in (np.isnan, np.isinf))
        shown = np.where(nan | inf | empty | finite, self.colours.norm.vmin, values)
        box = self.ax.get_window_extent()
        for axis, pixels in enumerate((box.height, box.width)):
            most = max(1, int(pixels / 1.5))
            shown, nan, inf, finite = (_pool(x, axis, most) for x in (shown, nan, inf, finite))
            empty = ~_pool(~empty, axis, most)

        picture = self._coloured(shown)
        for mask, colour in (
            (empty, style.EMPTY),
            (finite, style.FINITE),
            (inf, style.INF["facecolor"]),
            (nan, style.NAN["facecolor"]),
        ):
            if mask.any():
                picture[mask] = to_rgba_array(colour)[0] * 255 + 0.5
        self._cells.picture = picture
        if self._shape != (rows, columns):
            if self._shape[1] != columns or not self.rows_vary:
                self.canvas.stale()
            self.ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
            self._shape = rows, columns
            if self.name is not None:
                self.canvas.pointable(self.name, self.ax, rows, columns)
        scale = np.array([columns / shown.shape[1], rows / shown.shape[0]])
        for kind, mask in (("nan", nan), ("inf", inf & ~nan)):
            self._hatched[kind].set_visible(bool(mask.any()))
            if mask.any():
                self._hatched[kind].set_path(outline(mask, scale, thinnest(self.ax)))

    def _coloured(self, values: np.ndarray) -> np.ndarray:
        """Return the colours of finite values [rows, columns] as bytes [rows, columns, 4]."""
        low, high = self.colours.get_clim()
        with np.errstate(over="ignore"):  # of a value far beyond the scale
            place = (values - low) / (high - low)
        return self.colours.cmap(np.clip(256 * place, 0, 255).astype(np.int16), bytes=True)


def _pool(x: np.ndarray, axis: int, most: int) -> np.ndarray:
    """Return the largest value of each run of cells along `axis`; runs are so long that at most `most` remain."""
    if x.shape[axis] <= most:
        return x
    starts = np.unique(np.linspace(0, x.shape[axis], most, endpoint=False).astype(int))
    return np.maximum.reduceat(x, starts, axis=axis)


def thinnest(ax: Axes) -> np.ndarray:
    """Return the width and height of `LEAST` pixels in units of the axes, [2]."""
    (left, bottom), (right, top) = ax.transData.inverted().transform([(0, 0), (LEAST, LEAST)])
    return np.abs([right - left, top - bottom])


def outline(mask: np.ndarray, scale: np.ndarray, least: np.ndarray) -> Path:
    """Return one path around the true cells of a boolean matrix, as a rectangle for each run along a row.

    Areas thinner than `least` are widened to it about their middle; larger ones keep their corners. scale: width and
    height of a cell; least: of the thinnest area; both [2], in units of the axes."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, start = np.nonzero(edges == 1)
    _, stop = np.nonzero(edges == -1)
    low, high = np.stack((start, row)) * scale[:, None], np.stack((stop, row + 1)) * scale[:, None]
    more = np.maximum(least[:, None] - _extent(mask) * scale[:, None], 0) / 2
    end = np.array(mask.shape[::-1])[:, None] * scale[:, None]
    (left, top), (right, bottom) = np.maximum(low - more, 0) - 0.5, np.minimum(high + more, end) - 0.5
    return boxes(left, right, top, bottom)


def boxes(left: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> Path:
    """Return rectangles as one path, from the positions of their edges: [N] each, or a number for all."""
    left, right, low, high = np.broadcast_arrays(left, right, low, high)
    corners = np.array([(left, low), (right, low), (right, high), (left, high)])
    return Path.make_compound_path_from_polys(corners.transpose(2, 0, 1))


def _extent(mask: np.ndarray) -> np.ndarray:
    """Return, for each run of true cells along a row, the width and height [2, runs] in cells of the area around it:
    the largest that its cells reach by going down or up and then along a row."""
    along, down = _runs(mask), _runs(mask.T).T
    cells = along[mask] - 1, down[mask] - 1
    widths, heights = (np.bincount(runs) for runs in cells)
    widest = np.zeros_like(heights)
    np.maximum.at(widest, cells[1], widths[cells[0]])
    extent = np.zeros((2, len(widths)), int)
    np.maximum.at(extent[0], cells[0], widest[cells[1]])
    np.maximum.at(extent[1], cells[0], heights[cells[1]])
    return extent


def _runs(mask: np.ndarray) -> np.ndarray:
    """Number the runs of true cells along rows from 1, row by row; 0 where a cell is false."""
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return begins.ravel().cumsum().reshape(mask.shape) * mask
