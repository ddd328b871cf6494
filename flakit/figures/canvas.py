"""A figure that is drawn again and again: what never changes is kept as pixels, what moves is drawn over it.

    canvas = Canvas(9, 3)
    (line,) = canvas.moving(*ax.plot(x, y))
    line.set_ydata(…); canvas.png()

Drawing axes, ticks and labels costs most of a redraw; blitting leaves them out and a redraw takes a few milliseconds.
"""

import io

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image

from . import style


class Canvas:
    """A persistent figure of width x height inches with its moving artists.

    Build axes on `.figure` inside `style.context()`. Artists given to `moving` are drawn at every `png()`; all others
    only after `stale()`, which must be called when one of them changed (a tick, a label, a limit of an axis).
    """

    def __init__(self, width: float, height: float, *, dpi: int = 100):
        with style.context():
            self.figure = Figure(figsize=(width, height), dpi=dpi)
        self._agg = FigureCanvasAgg(self.figure)
        self._moving: list[Artist] = []
        self._background = None

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height of the picture in pixels."""
        return self._agg.get_width_height()

    def moving(self, *artists: Artist) -> tuple[Artist, ...]:
        """Redraw these at every `png()`, in the order of their zorder; returns them."""
        for artist in artists:
            artist.set_animated(True)
            self._moving.append(artist)
            if isinstance(artist, AxesImage):
                # Drawn later than the background, an image would cover half of its own frame.
                self.moving(*(s for s in artist.axes.spines.values() if s not in self._moving))
        self._moving.sort(key=lambda artist: artist.get_zorder())
        self.stale()
        return artists

    def stale(self) -> None:
        """Something that does not move has changed: draw everything at the next `png()`."""
        self._background = None

    def rgba(self) -> np.ndarray:
        """The picture as [height, width, 4] bytes, valid until the next call."""
        if self._background is None:
            with style.context():  # ticks made while drawing take their look from it
                self._agg.draw()
            self._background = self._agg.copy_from_bbox(self.figure.bbox)
        self._agg.restore_region(self._background)
        for artist in self._moving:
            self.figure.draw_artist(artist)
        return np.asarray(self._agg.buffer_rgba())

    def png(self) -> bytes:
        """The picture as PNG; quick rather than small."""
        out = io.BytesIO()
        Image.fromarray(self.rgba()[..., :3]).save(out, "PNG", compress_level=1)
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()
