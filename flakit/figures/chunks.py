"""How a sequence is cut into chunks, and a chunk into dyadic levels: which pairs of tokens meet where."""

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from . import style
from .plots import Picture

_INTRA, _INTER, _SELF = style.SKY, style.YELLOW, style.VERMILLION


def paths(T: int = 16, chunk: int = 4) -> Picture:
    """Left: every pair (output i, key j) by the way it is computed. Right: the chunks and the state between them."""
    if T % chunk:
        raise ValueError(f"chunk: expected a divisor of T = {T}, got {chunk}")
    i, j = np.indices((T, T))
    kinds = np.select([i == j, i < j, i // chunk == j // chunk], [2, 3, 0], 1)
    colours = np.array([to_rgb(c) for c in (_INTRA, _INTER, _SELF, style.EMPTY)])
    picture = Picture(3.5, f"Pairs of {T} tokens in chunks of {chunk}: inside a chunk, or through the state")
    with style.context():
        figure = picture.figure
        ax = figure.add_axes((0.075, 0.14, 0.335, 0.8))
        ax.imshow(colours[kinds], interpolation="nearest")
        for n in range(T):
            for m in range(n):
                if kinds[n, m] == 1:  # colour alone does not tell the two kinds apart
                    ax.plot(m, n, ".", color=style.BLACK, markersize=2)
        for edge in np.arange(chunk, T, chunk) - 0.5:
            ax.axhline(edge, color="white", linewidth=2)
            ax.axvline(edge, color="white", linewidth=2)
        ax.set(xlabel="key and value of token j", ylabel="output of token i")
        ax.set_xticks(range(0, T, chunk))
        ax.set_yticks(range(0, T, chunk))
        _flow(figure.add_axes((0.44, 0.4, 0.555, 0.56)), T // chunk, chunk)
        dot = Patch(facecolor=_INTER, hatch="..", linewidth=0)
        handles = [Patch(facecolor=_SELF), Patch(facecolor=_INTRA), dot, Patch(facecolor=style.EMPTY)]
        words = (
            "the token itself, through the bonus u",
            "intra: inside one chunk, a masked matrix product",
            "inter: through the state that enters the chunk",
            "the future: nothing",
        )
        figure.legend(handles, words, loc="upper left", bbox_to_anchor=(0.45, 0.4), labelspacing=0.35)
    return picture


def _flow(ax, chunks: int, chunk: int) -> None:
    ax.set(xlim=(-0.3, chunks + 0.42), ylim=(-0.75, 1.15))
    ax.axis("off")
    for n in range(chunks):
        box = FancyBboxPatch((n + 0.12, 0), 0.56, 0.62, boxstyle="round,pad=0.03", facecolor=_INTRA, edgecolor="none")
        ax.add_patch(box)
        ax.text(n + 0.4, 0.31, f"tokens\n{n * chunk} … {(n + 1) * chunk - 1}", ha="center", va="center", fontsize=8)
        ax.add_patch(
            FancyArrowPatch((n + 0.4, 0.66), (n + 0.4, 1.0), arrowstyle="-|>", mutation_scale=9, color="black")
        )
        ax.text(n + 0.4, 1.03, "o", ha="center", va="bottom", fontsize=9)
    for n in range(chunks + 1):
        arrow = FancyArrowPatch(
            (n - 0.26, 0.31), (n + 0.08, 0.31), arrowstyle="-|>", mutation_scale=9, color=style.BLACK, linewidth=1.6
        )
        ax.add_patch(arrow)
        ax.text(n - 0.1, 0.4, f"$S_{{{n * chunk}}}$", ha="center", va="bottom", fontsize=8.5)
    ax.text(-0.3, -0.2, "Chunks work side by side; only the state S goes from one to the next.", fontsize=8.5, va="top")


def pair_levels(chunk: int = 16) -> np.ndarray:
    """The size s of the halves in which the pair (i, j) meets, [chunk, chunk]; 0 where i <= j.

    Tokens i > j are in one block of 2s rows, aligned to 2s, but in different halves of it: s is the highest bit in
    which their indices differ.
    """
    if chunk < 2 or chunk & (chunk - 1):
        raise ValueError(f"chunk: expected a power of two from 2, got {chunk}")
    i, j = np.indices((chunk, chunk))
    return np.where(i > j, 1 << np.floor(np.log2(np.maximum(i ^ j, 1))).astype(int), 0)


def levels(chunk: int = 16) -> Picture:
    """Left: the dyadic level of every pair i > j. Right: the halves of each level, and the boundary between them."""
    size = pair_levels(chunk)
    sizes = [1 << n for n in range(chunk.bit_length() - 1)]
    palette = ListedColormap([style.EMPTY, *_shades(len(sizes))])
    picture = Picture(3.4, f"The dyadic level of every pair of a chunk of {chunk} tokens")
    with style.context():
        ax = picture.figure.add_axes((0.07, 0.135, 0.33, 0.78))
        shade = np.where(size > 0, np.log2(np.maximum(size, 1)) + 1, 0).astype(int)
        ax.imshow(shade, cmap=palette, vmin=-0.5, vmax=len(sizes) + 0.5, interpolation="nearest")
        for i, j in zip(*np.nonzero(size), strict=True):
            ink = _ink(palette(shade[i, j]))
            ax.text(j, i, size[i, j], ha="center", va="center", fontsize=6.5, color=ink)
        ax.set(xlabel="key of token j", ylabel="output of token i", title="level s of the pair (i, j)")
        ax.set_xticks(range(0, chunk, 4))
        ax.set_yticks(range(0, chunk, 4))

        ax = picture.figure.add_axes((0.47, 0.135, 0.5, 0.78))
        for row, s in enumerate(reversed(sizes)):
            for start in range(0, chunk, 2 * s):
                for at, hatch in ((start, "////"), (start + s, "")):
                    colour = palette(sizes.index(s) + 1)
                    ax.add_patch(
                        Rectangle(
                            (at + 0.04, row - 0.3), s - 0.08, 0.6, facecolor=colour if not hatch else "white",
                            hatch=hatch, edgecolor=colour, linewidth=1,
                        )
                    )  # fmt: skip
                ax.plot([start + s] * 2, [row - 0.42, row + 0.42], color=style.BLACK, linewidth=1.4)
        ax.set(xlim=(0, chunk), ylim=(len(sizes) - 0.5, -0.7), xlabel="token of the chunk")
        ax.set_title("hatched: keys; full: reads; black: where they meet")
        ax.set_yticks(range(len(sizes)), [f"s = {s}" for s in reversed(sizes)])
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    return picture


def _shades(n: int) -> list:
    return [colormaps[style.MAGNITUDE](x) for x in np.linspace(0.15, 0.95, n)]


def _ink(colour: tuple[float, ...]) -> str:
    red, green, blue, _ = colour
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
