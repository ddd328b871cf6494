"""flash-linear-attention 0.6.0 in miniature: its names and signatures, who looks them up, how its layers call them.

The operators only say that they need a GPU. What calls them in the layers is reduced to the call itself.
"""

__version__ = "0.6.0"
