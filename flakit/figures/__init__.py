"""Pictures with matplotlib: a function or class takes arrays and draws a figure. Nothing here computes or imports
widgets.

`style` holds the shared look, `canvas` redraws a figure fast, `heatmap` draws a matrix with its non-finite cells
hatched, `maps` a row of matrices, `marks` what lies over them; `drawing` is the base class of a picture with knobs.
What pictures are made of is imported from here; every other module is one picture.
"""

from . import style
from .canvas import Canvas, Cell
from .drawing import Drawing
from .heatmap import HeatMap
from .maps import FUTURE, ITSELF, Map, Maps, powers, signed
from .marks import Bars, CellGrid, Marked, Ring, Strip, name_rows, whole_ticks

__all__ = [
    "FUTURE", "ITSELF", "Bars", "Canvas", "Cell", "CellGrid", "Drawing", "HeatMap", "Map", "Maps", "Marked", "Ring",
    "Strip", "name_rows", "powers", "signed", "style", "whole_ticks",
]  # fmt: skip
