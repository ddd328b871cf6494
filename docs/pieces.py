"""The pieces of a picture, which the player shows one below the other where a screen is narrow.

    cuts = Cuts()
    look = cuts.add(canvas.figure, png)  # of every frame
    cuts.pieces()[look]

A panel's picture is as wide as a page's column: on a phone a row of maps shrinks until nobody can read it. Cut between
its maps, where nothing is drawn, the same picture needs no second recording. A map, its title, its ticks and its colour
bar are one piece; so are maps that an arrow joins.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from flakit.figures import style

# All in pixels of the picture.
FITS = 340  # what is no wider is not cut: a phone shows it at about its own size, or larger
NARROW = 45  # axes no wider belong to those nearest beside them, as a colour bar does
ABOVE, BELOW = 30, 8  # words so near to axes, and no wider, are theirs
BESIDE = 10  # and words so near to their left or right
TOUCH = 2  # boxes that overlap less may be cut apart: letters are narrower than their boxes
EDGE = 4  # of the ground around a piece
ENLARGED, LETTERS = 2.0, 1.25  # how many times its own size a phone shows a piece at most: one with axes, words alone

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels from the picture's upper left corner."""

Pixels = tuple[int, int, int, int]
"""A box in whole pixels."""

Piece = tuple[int, int, int, int, int]
"""Left, top, width and height in pixels; and how many pixels of the picture fill the screen's width where it is
shown."""


@dataclass(frozen=True)
class Block:
    """A part of a picture that is not cut, such as axes with their labels, or a text.

    frame: of axes, what lies within their own lines. parts: of a legend, the boxes of its entries, between which it may
    be cut if it is too wide."""

    box: Box
    frame: Box | None = None
    parts: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Group:
    """Blocks that stay together, by the box around them. axes: whether any block is axes."""

    box: Box
    axes: bool = False

    @property
    def width(self) -> float:
        return self.box[2] - self.box[0]


Run = list[Group]
"""Neighbouring groups, down or across, between which the picture is not cut."""


@dataclass(frozen=True)
class Leaf:
    """The groups of one piece, the part of the picture that is its own, and the width in pixels at which it is as large
    as the pieces beside it."""

    group: Group
    within: Pixels
    room: float


@dataclass
class Look:
    """Pictures that are cut alike, at the edges of `leaves`. blocks, ink [height, width]: of any of the pictures."""

    blocks: set[Block]
    ink: np.ndarray

    def __post_init__(self):
        self.leaves = _leaves(self.blocks, self.ink)

    @property
    def widest(self) -> float:
        return max(leaf.group.width for leaf in self.leaves)

    def fits(self, ink: np.ndarray) -> bool:
        """Return whether none of this ink is where these pictures are cut: at the left and the upper end of a leaf."""
        for left, top, right, bottom in (leaf.within for leaf in self.leaves):
            if (left and ink[top:bottom, left].any()) or (top and ink[top, left:right].any()):
                return False
        return True


@dataclass
class Cuts:
    """Pictures of one panel, each cut like those before it where possible, so that pieces stay in place from frame to
    frame."""

    looks: list[tuple[tuple, Look]] = field(default_factory=list)

    def add(self, figure: Figure, png: bytes) -> int:
        """Add a picture, as the figure was drawn last; return the index of its pieces in `pieces()`."""
        ink = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) != 255).any(-1)
        key = ink.shape, *(tuple(ax.bbox.extents.round()) for ax in figure.axes if ax.get_visible())
        alike = [n for n, (other, _) in enumerate(self.looks) if other == key]
        for n in alike:
            look = self.looks[n][1]
            if look.fits(ink):
                look.ink |= ink
                return n
        own = Look(set(blocks(figure)), ink)
        for n in alike:
            look = self.looks[n][1]
            both = Look(look.blocks | own.blocks, look.ink | ink)
            if both.widest <= min(look.widest, own.widest):
                self.looks[n] = key, both
                return n
        self.looks.append((key, own))
        return len(self.looks) - 1

    def pieces(self) -> list[list[Piece]]:
        return [pieces(look.leaves, look.ink) for _, look in self.looks]


def blocks(figure: Figure) -> list[Block]:
    """Return the blocks of everything that a figure shows, as it was drawn last."""
    renderer, height, shown = figure.canvas.get_renderer(), figure.bbox.height, []

    def flipped(box: Bbox) -> Box:
        return tuple(round(float(x), 1) for x in (box.x0, height - box.y1, box.x1, height - box.y0))

    def block(box: Bbox | None, **more) -> None:
        box = box and Bbox.intersection(box, figure.bbox)
        if box and min(box.width, box.height) > TOUCH:
            shown.append(Block(flipped(box), **more))

    def entries(legend: Legend) -> tuple[Box, ...]:
        pairs = zip(legend.legend_handles, legend.get_texts(), strict=True)
        return tuple(flipped(Bbox.union([each.get_window_extent(renderer) for each in pair])) for pair in pairs)

    with style.context():  # ticks made here take their look from it
        axes = [ax for ax in figure.axes if ax.get_visible()]
        for ax in axes:
            extra = [x for x in ax.get_default_bbox_extra_artists() if _drawn(x) and not isinstance(x, Legend)]
            block(ax.get_tightbbox(renderer, bbox_extra_artists=extra), frame=flipped(ax.bbox))
        for legend in (*(ax.get_legend() for ax in axes), *figure.legends):
            if legend and legend.get_visible():
                block(legend.get_window_extent(renderer), parts=entries(legend))
        for artist in (*figure.texts, *figure.lines, *figure.patches, *figure.artists):
            if _drawn(artist):
                block(artist.get_tightbbox(renderer))
    return shown


def _drawn(artist: Artist) -> bool:
    """Return whether an artist draws anything: matplotlib has boxes of empty texts and lines, too."""
    if isinstance(artist, Line2D):
        return artist.get_visible() and bool(np.isfinite(artist.get_xydata()).all(-1).any())
    return artist.get_visible() and not (isinstance(artist, Text) and not artist.get_text().strip())


def pieces(leaves: list[Leaf], ink: np.ndarray) -> list[Piece]:
    """Return leaves without the ground around them; a picture that cannot be cut is one piece, as it is."""
    height, width = ink.shape
    cut = [piece for leaf in leaves if (piece := _piece(leaf, ink))]
    return cut if len(cut) > 1 else [(0, 0, width, height, width)]


def _leaves(blocks: Iterable[Block], ink: np.ndarray) -> list[Leaf]:
    """Cut a picture between its blocks; return the leaves in reading order.

    ink: [height, width] booleans, false on the ground. No cut goes through ink, and every pixel is in one leaf."""
    height, width = ink.shape
    within = (0, 0, width, height)
    groups = _grouped([each for each in sorted(blocks, key=lambda each: each.box) if _inside(each.box, ink).any()])
    return _cut(groups, within, ink) if groups else [Leaf(Group(within), within, width)]


def _inside(box: Box, ink: np.ndarray) -> np.ndarray:
    left, top, right, bottom = (max(0, int(x)) for x in box)
    return ink[top : bottom + 1, left : right + 1]


def _grouped(blocks: list[Block]) -> list[Group]:
    framed = [each for each in blocks if each.frame]
    wide = [each for each in framed if each.frame[2] - each.frame[0] > NARROW]
    groups = [Group(each.box, axes=True) for each in wide]
    for each in framed:
        if each not in wide:
            beside = [n for n, other in enumerate(wide) if _overlap(other.frame, each.frame, 1) > 0]
            nearest = sorted(beside, key=lambda n: -_overlap(wide[n].frame, each.frame, 0))
            _add(groups, Group(each.box, axes=True), nearest)
    groups = _joined(groups)
    for each in blocks:
        if not each.frame:
            near = [n for n, group in enumerate(groups) if group.axes and _near(group.box, each.box)]
            beside = [n for n, group in enumerate(groups) if group.axes and _beside(group.box, each.box)]
            if beside:
                _add(groups, Group(each.box), sorted(beside, key=lambda n: -_overlap(groups[n].box, each.box, 0)))
            elif len(near) == 1 and _owns(groups[near[0]], each, blocks):
                _add(groups, Group(each.box), near)
            else:
                groups += [Group(box) for box in each.parts or (each.box,)]
    return _joined(groups)


def _owns(axes: Group, words: Block, blocks: list[Block]) -> bool:
    """Return whether words are no wider than the axes near to them, and nothing else lies partly between the two."""
    both = _union([axes, Group(words.box)]).box
    over = [each for each in blocks if _touch(both, each.box) and not _touch(axes.box, each.box)]
    wide = words.box[2] - words.box[0] - _overlap(axes.box, words.box, 0)
    return wide <= TOUCH and all(_overlap(both, each.box, 0) >= each.box[2] - each.box[0] - TOUCH for each in over)


def _add(groups: list[Group], group: Group, nearest: list[int]) -> None:
    if nearest:
        groups[nearest[0]] = _union([groups[nearest[0]], group])
    else:
        groups.append(group)


def _near(axes: Box, words: Box) -> bool:
    return _overlap(axes, words, 0) > TOUCH and axes[1] - words[3] < ABOVE and words[1] - axes[3] < BELOW


def _beside(axes: Box, words: Box) -> bool:
    return 0 <= -_overlap(axes, words, 0) < BESIDE and 2 * _overlap(axes, words, 1) > words[3] - words[1]


def _overlap(one: Box, other: Box, axis: int) -> float:
    """Return by how much two boxes overlap across (0) or down (1); negative: how far apart they are."""
    return min(one[axis + 2], other[axis + 2]) - max(one[axis], other[axis])


def _touch(one: Box, other: Box) -> bool:
    return min(_overlap(one, other, axis) for axis in (0, 1)) > TOUCH


def _union(groups: list[Group]) -> Group:
    left, top, right, bottom = zip(*(group.box for group in groups), strict=True)
    return Group((min(left), min(top), max(right), max(bottom)), any(group.axes for group in groups))


def _joined(groups: list[Group]) -> list[Group]:
    """Return the groups with those that overlap joined into one."""
    done: list[Group] = []
    for group in groups:
        while True:
            touching = [each for each in done if _touch(each.box, group.box)]
            if not touching:
                break
            done = [x for x in done if x not in touching]
            group = _union([group, *touching])
        done.append(group)
    return done


def _cut(groups: list[Group], within: Pixels, ink: np.ndarray) -> list[Leaf]:
    """Cut groups into rows, and each row into as many columns as are needed; return the leaves."""
    whole = _union(groups)
    alone = [Leaf(whole, within, whole.width)]
    if whole.width <= FITS:
        return alone
    rows = _entitled(_runs(groups, within, ink, 1), within, ink)
    if len(rows) > 1:
        return _together([_cut(row, part, ink) for row, part in zip(rows, _parts(rows, within, ink, 1), strict=True)])
    columns = _few(_led(_runs(groups, within, ink, 0)))
    if len(columns) == 1:
        return alone
    parts = _parts(columns, within, ink, 0)
    leaves = [leaf for column, part in zip(columns, parts, strict=True) for leaf in _cut(column, part, ink)]
    widest = min(FITS, max(leaf.room for leaf in leaves))  # letters are as large in all columns
    return [replace(leaf, room=max(leaf.room, widest)) for leaf in leaves]


def _merged(runs: Iterable[Run], together: Callable[[Run, Run], bool]) -> list[Run]:
    """Return runs of groups, each joined to the one before it where together(before, run) is true."""
    merged: list[Run] = []
    for run in runs:
        if merged and together(merged[-1], run):
            merged[-1] = merged[-1] + run
        else:
            merged.append(run)
    return merged


def _entitled(rows: list[Run], within: Pixels, ink: np.ndarray) -> list[Run]:
    """Join a row of words that has some for every column of axes below it to these axes; return the rows."""

    def entitles(words: Run, row: Run) -> bool:
        if _union(words).axes or not _union(row).axes:
            return False
        _, top, _, bottom = _union(words + row).box
        columns = _runs(words + row, (within[0], int(top), within[2], int(bottom) + 1), ink, 0)
        return len(columns) > 1 and all({group.axes for group in column} == {True, False} for column in columns)

    return _merged(rows, entitles)


def _runs(groups: list[Group], within: Pixels, ink: np.ndarray, axis: int) -> list[Run]:
    """Return groups in order, down (1) or across (0), in runs between which the picture can be cut."""
    ordered = ([group] for group in sorted(groups, key=lambda group: group.box[axis]))
    return _merged(ordered, lambda run, group: _line(_union(run), group[0], within, ink, axis) is None)


def _line(before: Group, after: Group, within: Pixels, ink: np.ndarray, axis: int) -> int | None:
    """Return the line of pixels without ink that is nearest to the middle between two groups; None if there is none."""
    end, start = before.box[axis + 2], after.box[axis]
    if start < end - TOUCH:
        return None
    left, top, right, bottom = within
    inked = ink[top:bottom, left:right].any(axis)
    first, last = int(min(end, start)) - TOUCH, int(max(end, start)) + TOUCH
    free = [
        n
        for n in range(max(first, within[axis] + 1), min(last, within[axis + 2] - 1) + 1)
        if not inked[n - within[axis]]
    ]
    return min(free, key=lambda n: abs(n + 0.5 - (end + start) / 2), default=None)


def _parts(runs: list[Run], within: Pixels, ink: np.ndarray, axis: int) -> list[tuple]:
    """Return the part of `within` that belongs to each run."""
    lines = [_line(_union(a), _union(b), within, ink, axis) for a, b in pairwise(runs)]
    edges = [within[axis], *lines, within[axis + 2]]
    left, top, right, bottom = within
    return [(left, low, right, high) if axis else (low, top, high, bottom) for low, high in pairwise(edges)]


def _together(rows: list[list[Leaf]]) -> list[Leaf]:
    """Return the leaves of all rows. Axes below each other that are too wide and cannot be cut stay one piece: they may
    have ticks in common."""
    leaves: list[Leaf] = []
    for row in rows:
        last = leaves[-1] if leaves else None
        if last and len(row) == 1 and all(leaf.room > FITS and leaf.group.axes for leaf in (last, *row)):
            group = _union([last.group, row[0].group])
            leaves[-1] = Leaf(group, (*last.within[:2], *row[0].within[2:]), group.width)
        else:
            leaves += row
    return leaves


def _led(columns: list[Run]) -> list[Run]:
    """Join words beside axes to the axes before them or behind them; return the columns."""
    if not any(group.axes for column in columns for group in column):
        return columns
    return _merged(columns, lambda before, column: not (_union(before).axes and _union(column).axes))


def _few(runs: list[Run]) -> list[Run]:
    """Join neighbours while they fit: into as few columns as possible, and these as even as possible."""

    def filled(most: float) -> list[Run]:
        return _merged(runs, lambda column, run: _union(column + run).width <= most)

    fewest = len(filled(FITS))
    ends = [(_union(run).box[0], _union(run).box[2]) for run in runs]
    widths = sorted(right - left for n, (left, _) in enumerate(ends) for _, right in ends[n:])
    return next(columns for most in widths if len(columns := filled(most)) <= fewest)


def _piece(leaf: Leaf, ink: np.ndarray) -> Piece | None:
    left, top, right, bottom = leaf.within
    inked = ink[top:bottom, left:right]
    across, down = (np.flatnonzero(inked.any(axis)) for axis in (0, 1))
    if not across.size:
        return None
    left, right = max(left, left + across[0] - EDGE), min(right, left + across[-1] + 1 + EDGE)
    top, bottom = max(top, top + down[0] - EDGE), min(bottom, top + down[-1] + 1 + EDGE)
    room = max(leaf.room + 2 * EDGE, FITS / (ENLARGED if leaf.group.axes else LETTERS), right - left)
    return int(left), int(top), int(right - left), int(bottom - top), int(np.ceil(room))
