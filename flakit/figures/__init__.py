"""Pictures with matplotlib: a function or class takes arrays and draws a figure. Nothing here computes or imports
widgets.

`style` holds the shared look, `canvas` redraws a figure fast, `heatmap` draws a matrix with its non-finite cells
hatched, `maps` a row of matrices, `marks` what lies over them; `drawing` is the base class of a picture with knobs.
Every other module is one picture.
"""
