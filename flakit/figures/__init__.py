"""Pictures with matplotlib: arrays in, figure out. Nothing here computes or imports widgets.

`style` is the look everything shares, `canvas` draws a figure again and again quickly, `heatmap` shows a matrix with
its non-finite cells hatched; every other module is one picture.
"""
