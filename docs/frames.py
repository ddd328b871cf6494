"""Frames of panels, recorded by the panels' own code, for pages that play them without a kernel.

    frames.install(folder, "05_one_infinity")

From then on displaying a panel yields, in place of a widget, the HTML that `_static/player.js` makes live, and writes
to the folder, under the id that this HTML names:

    <id>.js          knobs, and for every recorded setting the picture, the readout and the alt text;
                     where a picture can be cut for a narrow screen (docs/pieces.py)
    <id>/<n>.webp    the pictures, each one once, with two dots for each of the page's pixels
    <id>/more-<k>.js the arithmetic of cells and the scripts of "copy as Python", packed; read when they are asked for

What moves when a knob is moved is determined by moving it. Nothing here computes, draws or words anything.
"""

import base64
import html
import io
import json
import os
import shutil
import zlib
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from unittest.mock import patch

import comm
import ipywidgets as widgets
import numpy as np
from PIL import Image

from docs.pieces import Cuts
from flakit.figures.canvas import Canvas, Cell
from flakit.language import speaking
from flakit.panels import base
from flakit.panels.base import NARROW, Panel
from flakit.panels.knobs import NumberKnob, stops_of

SPARSE = bool(os.environ.get("FLAKIT_SPARSE"))
"""Set by the tests of the site: every panel, knob and preset, but few stops, and coarser pictures in larger files."""

FRAMES = 12 if SPARSE else 80
"""The approximate number of frames of a panel: stops of the first knob times stops of the second, and those of
presets."""

STOPS, SECOND, SLOW, PRESET = (6, 2, 3, 3) if SPARSE else (40, 6, 12, 9)
"""The largest number of stops of a first knob, of a second one, of a first one where each setting runs a kernel, and of
the first one at a preset that lies beside the grid."""

EVERY = 10 if SPARSE else 1
"""Of a player with positions of its own, which would all be frames, only every so many-th is recorded."""

SLOW_PANELS = ("kernel-trace", "wrong-head-anchor", "strided-offsets")

CELLS, FEW = 400, 300
"""The number of cells of a frame up to which each one's arithmetic is recorded, and about how many are if there are
more."""

PACK = 600_000
"""The characters of arithmetic and scripts, before compression, that are read at once."""

SHARP = 1 if SPARSE else 2
"""The dots of a picture for each of the page's pixels. A picture of more than one is drawn from the ground up, which
takes most of a recording's time."""

_WEBP = {"lossless": True, "method": 0 if SPARSE else 1, "quality": 30}  # here: effort, not loss

WORDS = {
    "play": "play",
    "pause": "pause",
    "presets": "settings to try",
    "enlarge": "enlarge",
    "enlarge tip": "the picture at its full size, to be scrolled",
    "fit": "fit",
    "fit tip": "the whole picture, as wide as the page",
    "link": "copy link",
    "link tip": "the address of this page with the panel as it stands",
    "elsewhere": "The address asks for a setting that was not recorded: run it locally. Here the panel begins.",
    "copied": "copied",
    "locally": "not recorded: run it locally",
    "folded": "Grey knobs were not recorded: run it locally to move them.",
    "stops": "{some} of {all} stops of {knob}",
    "cells": "the arithmetic of {some} of {all} cells",
    "recorded": "Recorded: {what}. ",
    "all knobs": "Everything is live in JupyterLab: {commands}.",
    "commands": "<code>make lab</code>, then <code>{notebook}</code>",
    "missing": "This frame could not be read.",
    "old": "This browser cannot unpack the arithmetic of cells.",
}
"""What the player says that the panel does not."""

PANELS_WORDS = ("reset", "copy", "save", "more", "pin", "unpin", "pinned", "back", "on", "point")
PANELS_WORDS += ("reset tip", "copy tip", "save tip", "more tip", "pin tip", "unpin tip")

Setting = tuple[Hashable, ...]
"""The value of every knob, in the panel's order."""


def install(folder: str | Path, stem: str) -> None:
    """Make displaying a panel record it from now on: the first one as `<stem>-1`, the second as `<stem>-2`."""
    numbers = count(1)

    def bundle(panel: Panel, **_) -> dict[str, str]:
        text = f"{panel.name}: {panel.text}"
        page = record(panel, Path(folder), f"{stem}-{next(numbers)}", f"{stem}.ipynb")
        return {"text/html": page, "text/plain": text}

    Panel._repr_mimebundle_ = bundle
    comm.create_comm = comm.DummyComm  # there is no browser to tell what moves


def record(panel: Panel, folder: Path, name: str, notebook: str) -> str:
    """Write the panel's frames to `folder` under `name` and return its HTML. The panel is left as it was.

    notebook: the name of the file in which a reader finds the panel."""
    before, width = panel.setting, panel.width
    panel.width = NARROW  # fits a page's column as it is, and a phone's
    try:
        with speaking(panel.language):
            recording = Recording(panel)
            with patch.object(panel, "redraw", recording.redraw):
                recording.record()
            return recording.write(folder, name, notebook)
    finally:
        panel.width = width
        panel.set(**before)


@dataclass
class Frame:
    """What a panel shows at one setting."""

    offered: list[tuple]  # by knob, the values that it stops at
    shown: dict[str, int]  # the picture, the layout of its maps, the readout, alt and text: indices of the tables
    words: list[str]  # of the recorded cells, map by map, row by row
    beside: list[list[int]]  # of each, the places that light up with it: map, row, column; -1 for all of a line
    script: str
    dense: dict[str, frozenset]  # by number knob, the stops that the numbers of this setting give it


@dataclass
class Recording:
    """All frames of one panel. `record` takes them, `write` stores them; `panel` shows them while they are taken."""

    panel: Panel
    frames: dict[Setting, Frame] = field(default_factory=dict)
    pictures: dict[bytes, int] = field(default_factory=dict)
    webp: list[bytes] = field(default_factory=list)
    first: bytes = b""  # the picture that the panel begins with, as it comes with the page: one dot a pixel
    pixels: list[tuple[int, int]] = field(default_factory=list)
    cuts: Cuts = field(default_factory=Cuts)
    looks: list[int] = field(default_factory=list)  # of each picture, the place of its pieces
    cells: tuple[int, int] = (0, 0)  # recorded and there, of the frame that has most

    def __post_init__(self):
        self.names, self._maps, self._drawn = list(self.panel.knobs), {}, None
        self.texts, self.layouts = _Table(), _Table()
        self.walks = self.panel.player is not None and not self.panel.main
        self.ways: list[tuple[list[Setting], list[int]]] = []  # that a player of its own goes, and its passes

    # Which settings.

    def record(self) -> None:
        panel = self.panel
        panel.redraw()
        start = self._now()
        self.start = start
        first, second = self._axes()
        contexts, dense = [start], set()
        self._take()
        self.first = _webp(panel.png)
        for value in self._stops(second, FRAMES // panel.player.passes[-1] if self.walks else SECOND) if second else ():
            self._go(start, draw=False)
            panel.move(second, value)
            contexts.append(self._take())
        contexts = list(dict.fromkeys(contexts))
        if first and isinstance(panel.knobs[first], NumberKnob):
            dense = set().union(*(self.frames[context].dense[first] for context in contexts))
        most = SLOW if panel.name in SLOW_PANELS else STOPS
        each = max(min(most, FRAMES // len(contexts)), PRESET)
        for context in contexts:
            self._go(context)
            self._walk(first, each, dense)
        for preset in panel.presets.values():
            for context in contexts:
                self._go(context, draw=False)
                panel.set(**preset)
                self._take()
                if context == start:
                    self._walk(first, min(each, PRESET), ())
        self._find_moves()
        self._go(start)

    def _axes(self) -> tuple[str | None, str | None]:
        """Return the knob that is moved from stop to stop, None if the player has positions of its own, and a second
        knob or None."""
        panel = self.panel
        shown = [name for name in panel.named_on_view if name != "seed" and self._values(name)]
        if self.walks:
            panel.player.step(-1 if panel.player.place else 1)
            played = {name for name, x, y in zip(self.names, self._now(), self.start, strict=True) if x != y}
            self._go(self.start)
            return None, next((name for name in shown if name not in played), None)
        first = panel.main if panel.main in shown else next(iter(shown), None)
        others = [name for name in shown if name != first]
        return first, min(others, key=lambda name: len(self._values(name)), default=None)

    def _values(self, name: str) -> list:
        knob = self.panel.knobs[name]
        if isinstance(knob, widgets.Checkbox):
            return [False, True]
        return stops_of(knob) if isinstance(knob, widgets.IntSlider) or hasattr(knob, "options") else []

    def _stops(self, name: str, count: int, dense: Iterable = ()) -> list:
        """Return some of a knob's stops: both ends, its value, what presets choose, those around a law's onset, the
        ones beside these, and others in even steps."""
        values = self._values(name)
        if len(values) <= count:
            return values
        matter = [
            self.panel.knobs[name].value,
            *(preset[name] for preset in self.panel.presets.values() if name in preset),
        ]
        near = sorted({values.index(x) for x in (*matter, *dense) if x in values})
        chosen = {*near} if len(near) > count - 2 else {0, len(values) - 1, *near}
        for away in (1, 2, 3):
            beside = {n + by for n in near for by in (-away, away) if 0 <= n + by < len(values)}
            if len(chosen | beside) <= 2 * count // 3 + 1:
                chosen |= beside
        while 1 < len(chosen) < count:
            low, high = max(pairwise(sorted(chosen)), key=lambda gap: gap[1] - gap[0])
            if high - low < 2:
                break
            chosen.add((low + high) // 2)
        return [values[n] for n in sorted(chosen)]

    def _walk(self, first: str | None, count: int, dense: Iterable) -> None:
        """Record from the present setting on: the player, or else knob `first` at `count` stops and at the values
        `dense`."""
        here = self._take()
        if self.walks:
            player, way = self.panel.player, []
            passes = player.passes
            for place in range(0, passes[-1], EVERY):
                player.step(place - player.place)
                way.append(self._take())
            self.ways.append((way, [-(-place // EVERY) for place in passes]))
        elif first:
            # `dense` has stops of another setting of the second knob, too, where it can be moved to from there.
            for value in (*self._stops(first, count, dense), *dense):
                if self._with(here, first, value) not in self.frames:
                    self.panel.move(first, value) if value in self._values(first) else self.panel.set(**{first: value})
                    self._take()

    def _now(self) -> Setting:
        return tuple(self.panel.setting.values())

    def _with(self, setting: Setting, name: str, value) -> Setting:
        n = self.names.index(name)
        return (*setting[:n], value, *setting[n + 1 :])

    def _go(self, setting: Setting, *, draw: bool = True) -> None:
        if self._now() != setting:
            with nullcontext() if draw else self._undrawn():
                self.panel.set(**dict(zip(self.names, setting, strict=True)))

    def _undrawn(self) -> AbstractContextManager:
        """Return a context in which knobs move, and what follows moves with them, but nothing is computed."""
        return patch.object(self.panel, "redraw", lambda: None)

    def redraw(self) -> None:
        """Draw the panel, unless the frame of its setting is recorded: then only give the knobs their stops."""
        setting = self._now()
        if setting not in self.frames or self.walks:  # a player of its own is told by drawing where it stands
            self._draw()
        else:
            was_held, self.panel._held = self.panel._held, True
            for name, stops in self.frames[setting].dense.items():
                if self.panel.knobs[name]._dense != stops:
                    self.panel.knobs[name].dense(stops)
            self.panel._held = was_held

    def _draw(self) -> None:
        type(self.panel).redraw(self.panel)
        self._drawn = self._now()

    # One frame.

    def _take(self) -> Setting:
        """Record what the panel shows now; return the setting."""
        panel, setting = self.panel, self._now()
        if setting in self.frames:
            return setting
        if self._drawn != setting:
            self._draw()
        maps, words, beside = self._arithmetic()
        try:
            script = panel.as_python()
        except Exception:
            script = ""
        self.frames[setting] = Frame(
            [tuple(self._values(name)) for name in self.names],
            {
                "picture": self._picture(),
                "layout": self.layouts(maps),
                "readout": self.texts(panel.readout.value),
                "alt": self.texts(panel.picture.alt),
                "text": self.texts(panel.text),
            },
            words,
            beside,
            script,
            {name: knob._dense for name, knob in panel.knobs.items() if isinstance(knob, NumberKnob)},
        )
        return setting

    def _picture(self) -> int:
        png = self.panel.png
        if png not in self.pictures:
            self.pictures[png] = len(self.webp)
            self.looks.append(self.cuts.add(self.panel.canvas.figure, png))
            self.webp.append(_webp(png if SHARP == 1 else self.panel.canvas.png(SHARP)))
            self.pixels.append(Image.open(io.BytesIO(png)).size)
        return self.pictures[png]

    def _arithmetic(self) -> tuple[list[dict], list[str], list[list[int]]]:
        panel, canvas, setting = self.panel, self.panel.canvas, self.panel.setting
        if not panel.picture.points:
            return [], [], []
        names, there = list(canvas.maps), sum(rows * columns for rows, columns in canvas.maps.values())
        maps, words, beside = [], [], []
        most = _share([rows * columns for rows, columns in canvas.maps.values()], FEW)
        for name, (rows, columns) in canvas.maps.items():
            some = _lattice(rows, columns, most if there > CELLS else rows * columns)
            maps.append(self._map(name, *some))
            for row in some[0]:
                for column in some[1]:
                    cell = Cell(name, int(row), int(column))
                    try:
                        words.append(panel.arithmetic(panel.result, cell, **setting) or base.WORDS["point"])
                    except Exception as error:
                        words.append(f"{type(error).__name__}: {error}")
                    beside.append([])
                    for at, *line in panel.beside(cell):
                        beside[-1] += [names.index(at), *(-1 if n is None else int(n) for n in line)]
        self.cells = max(self.cells, (len(words), there))
        return maps, words, beside

    def _map(self, name: str, *some: list[int]) -> dict:
        canvas = self.panel.canvas
        rows, columns = canvas.maps[name]
        places = canvas.box(name), canvas.box(name, column=columns // 2), canvas.box(name, row=rows // 2)
        key = name, rows, columns, places
        if key not in self._maps:
            self._maps[key] = _map(canvas, name, *some)
        return self._maps[key]

    # What follows when a knob is moved.

    def _find_moves(self) -> None:
        """Find where moving one knob moves others, too: by frame, knob and value, the frame that it leads to."""
        self.moves: dict[Setting, dict[str, dict[Hashable, Setting]]] = {}
        moved = [name for name, *values in zip(self.names, *self.frames, strict=True) if len(set(values)) > 1]
        sliders = [n for n, name in enumerate(self.names) if self._kind(name) == "slider"]
        others: dict[tuple, dict] = {}  # that a move from a context to a value moves
        with self._undrawn():
            for setting, frame in self.frames.items():
                # What follows depends on the lists and boxes, not on where a slider stands.
                context = tuple(None if n in sliders else x for n, x in enumerate(setting))
                for name in moved:
                    n = self.names.index(name)
                    had = {at[n] for at in self.frames}
                    for value in had.intersection(frame.offered[n]) - {setting[n]}:
                        key = context, name, None if n in sliders else value
                        if key not in others:
                            others[key] = self._follows(setting, name, value)
                        if others[key]:
                            target = dict(zip(self.names, self._with(setting, name, value), strict=True)) | others[key]
                            self.moves.setdefault(setting, {}).setdefault(name, {})[value] = tuple(target.values())

    def _follows(self, setting: Setting, name: str, value) -> dict:
        """Return the other knobs that moving one to a value moves, with their new values."""
        self._go(setting)
        if value not in self._values(name):
            return {}
        self.panel.move(name, value)
        expected = self._with(setting, name, value)
        return {knob: x for knob, x, y in zip(self.names, self._now(), expected, strict=True) if x != y}

    # Files.

    def write(self, folder: Path, name: str, notebook: str) -> str:
        own = folder / name
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        for n, webp in enumerate(self.webp):
            (own / f"{n}.webp").write_bytes(webp)
        packs = self._packs()
        for n, (_, packed) in enumerate(packs):
            (own / f"more-{n}.js").write_text(f'flakitMore({json.dumps(name)}, {n}, "{packed}");\n')
        data = self._data(notebook, [frames for frames, _ in packs])
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.js").write_text(f"flakitFrames({json.dumps(name)}, {text});\n", encoding="utf-8")
        return self._html(name, notebook)

    def _data(self, notebook: str, packs: list[int]) -> dict:
        """Return everything that the player reads first, for JSON."""
        panel, place = self.panel, {setting: n for n, setting in enumerate(self.frames)}
        offers = _Table()
        knobs = [self._knob(n) for n in range(len(self.names))]
        values = [knob.pop("order") for knob in knobs]
        frames = []
        for setting, frame in self.frames.items():
            offered = {
                n: [i for i, x in enumerate(values[n]) if x in frame.offered[n]]
                for n in range(len(self.names))
                if any(x not in frame.offered[n] for x in values[n]) and frame.offered[n]
            }
            moved = {self.names.index(knob): by for knob, by in self.moves.get(setting, {}).items()}
            moves = {n: {values[n].index(x): place.get(to, -1) for x, to in by.items()} for n, by in moved.items()}
            each = {"at": [values[n].index(x) for n, x in enumerate(setting)], **frame.shown}
            frames.append(each | ({"offers": offers(offered)} if offered else {}) | ({"moves": moves} if moves else {}))
        presets = []
        for label, setting in panel.presets.items():
            with self._undrawn():
                self._go(self.start)
                panel.set(**setting)
            moved = {n: values[n].index(panel.setting[x]) for n, x in enumerate(self.names) if x in setting}
            button = panel._preset(label, setting)
            presets.append(
                {"label": button.description, "tip": button.tooltip, "moved": moved, "frame": place[self._now()]}
            )
        return {
            "name": panel.name,
            "words": WORDS | {name: base.WORDS[name] for name in PANELS_WORDS},
            "start": place[self.start],
            "knobs": knobs,
            "play": self._play(place),
            "presets": presets,
            "runs": [run.button.description for run in panel.runs],
            "frames": frames,
            "pixels": [list(size) for size in self.pixels],
            "pieces": self.cuts.pieces(),
            "looks": self.looks,
            "texts": self.texts.rows,
            "layouts": self.layouts.rows,
            "offers": offers.rows,
            "packs": packs,
            "note": self._note(knobs, notebook),
        }

    def _knob(self, n: int) -> dict:
        """Return a knob's data with every value that it has in a frame, or, for a list, that it offers in one."""
        name, knob = self.names[n], self.panel.knobs[self.names[n]]
        kind = self._kind(name)
        had = {setting[n] for setting in self.frames}
        offered = {value: None for frame in self.frames.values() for value in frame.offered[n]}
        if isinstance(knob, NumberKnob):  # in the order of the slider, whatever its stops are in a frame
            stops, numbers = list(offered), [x for x in offered if not isinstance(x, str)]
            down = numbers[0] > numbers[-1]
            offered = [*(x for x in stops if isinstance(x, str)), *sorted(numbers, reverse=down)]
        order = [x for x in offered if kind == "list" or x in had] or sorted(had)
        labels = {} if kind in ("box", "number") or isinstance(knob, widgets.IntSlider) else self._labels(knob)
        return {
            "name": name,
            "label": knob.description or name,
            "kind": kind,
            "shown": name in self.panel.named_on_view,
            "hidden": knob.layout.display == "none",
            "values": [labels.get(x) or _label(x) for x in order],
            "stops": len(offered),
            "places": [list(offered).index(x) for x in order] if kind == "slider" else [],
            "order": order,
        }

    def _kind(self, name: str) -> str:
        """Return how a page shows a knob: as "slider", "box", "list" or "number"."""
        kinds = {widgets.IntSlider: "slider", widgets.SelectionSlider: "slider", widgets.Checkbox: "box"}
        other = "list" if self._values(name) else "number"
        return next((kind for widget, kind in kinds.items() if isinstance(self.panel.knobs[name], widget)), other)

    def _labels(self, knob: widgets.Widget) -> dict[Hashable, str]:
        options = getattr(knob, "options", ())
        return {each[1]: str(each[0]) for each in options if isinstance(each, tuple)}

    def _play(self, place: dict[Setting, int]) -> dict | None:
        """Return what play moves: one knob, or the frames of the player's own positions one after another; None without
        a player."""
        panel = self.panel
        if not panel.player:
            return None
        how = {"milliseconds": panel.player.play.interval}
        if not self.walks:
            return how | {"knob": self.names.index(panel.main)}
        return how | {"ways": [{"frames": [place[x] for x in way], "passes": passes} for way, passes in self.ways]}

    def _note(self, knobs: list[dict], notebook: str) -> str:
        """Return HTML on what was left out, and how to have it."""
        left = [
            WORDS["stops"].format(knob=html.escape(knob["label"]), some=len(knob["values"]), all=knob["stops"])
            for knob in knobs
            if knob["shown"] and knob["kind"] == "slider" and len(knob["values"]) < knob["stops"]
        ]
        some, there = self.cells
        left += [WORDS["cells"].format(some=some, all=there)] if some < there else []
        commands = WORDS["commands"].format(notebook=html.escape(notebook))
        omitted = WORDS["recorded"].format(what=", ".join(left)) if left else ""
        return omitted + WORDS["all knobs"].format(commands=commands)

    def _packs(self) -> list[tuple[int, str]]:
        """Return, for each packed file, how many of the next frames it holds, and their cells and scripts."""
        packs, waiting, size = [], [], 0
        for n, frame in enumerate(self.frames.values(), 1):
            waiting.append(frame)
            size += sum(map(len, frame.words)) + 8 * sum(map(len, frame.beside)) + len(frame.script)
            if size > PACK or n == len(self.frames):
                packs.append((len(waiting), _packed(waiting)))
                waiting, size = [], 0
        return packs

    def _html(self, name: str, notebook: str) -> str:
        """Return the HTML of the panel at its first setting, which readers without scripts see, too."""
        panel, frame = self.panel, self.frames[self.start]
        stands = " · ".join(
            f"{panel.knobs[knob].description or knob} {self._labels(panel.knobs[knob]).get(x, x)}"
            for knob, x in zip(self.names, self.start, strict=True)
            if knob in panel.named_on_view
        )
        width, height = self.pixels[frame.shown["picture"]]
        readout, alt = (self.texts.rows[frame.shown[name]] for name in ("readout", "alt"))
        source = f"data:image/webp;base64,{base64.b64encode(self.first).decode()}"
        commands = WORDS["commands"].format(notebook=html.escape(notebook))
        return (
            f'<div class="flakit-player flakit-panel flakit-{panel.name}" data-frames="{name}">'
            f'<p class="flakit-still">{html.escape(stands)}</p>'
            f'<div class="flakit-readout">{readout}</div>'
            f'<div class="flakit-frame"><img class="flakit-picture" width="{width}" height="{height}" '
            f'alt="{html.escape(alt)}" src="{source}"></div>'
            f'<p class="flakit-note">{WORDS["all knobs"].format(commands=commands)}</p>'
            "</div>"
        )


def _webp(png: bytes) -> bytes:
    """Convert a PNG to WebP with every eighth value of a colour, which nobody sees and which takes a third less."""
    colours = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.uint16)
    packed = io.BytesIO()
    Image.fromarray(((colours + 4) // 8 * 8).clip(max=255).astype(np.uint8)).save(packed, "WEBP", **_WEBP)
    return packed.getvalue()


def _label(value: Hashable) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class _Table:
    """A list of distinct JSON values; calling it with a value returns its index."""

    def __init__(self):
        self.rows, self._places = [], {}

    def __call__(self, row) -> int:
        key = json.dumps(row)
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        return self._places[key]


def _packed(frames: list[Frame]) -> str:
    words, beside = _Table(), _Table()
    each = [[[words(x) for x in frame.words], beside(frame.beside), frame.script] for frame in frames]
    text = json.dumps({"frames": each, "words": words.rows, "beside": beside.rows}, separators=(",", ":"))
    squeezed = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(squeezed.compress(text.encode()) + squeezed.flush()).decode()


def _share(sizes: list[int], total: int) -> float:
    """Return how many cells of each map may be recorded, all of the smaller ones, so that about `total` are."""
    left = len(sizes)
    for size in sorted(sizes):
        if size > total / left:
            return total / left
        total, left = total - size, left - 1
    return max(sizes, default=0)


def _lattice(rows: int, columns: int, cells: float) -> tuple[list[int], list[int]]:
    """Return rows and columns, all or as many as make about so many cells, the first and the last among them."""
    if rows * columns <= cells:
        return list(range(rows)), list(range(columns))
    across = min(columns, max(2, round((cells * columns / rows) ** 0.5)))
    down = min(rows, max(2, round(cells / across)))
    across = min(columns, max(2, round(cells / down)))
    return _even(rows, down), _even(columns, across)


def _even(n: int, count: int) -> list[int]:
    return sorted({round(x) for x in np.linspace(0, n - 1, min(n, count))})


def _map(canvas: Canvas, name: str, some_rows: list[int], some_columns: list[int]) -> dict:
    """Return where a map's rows and columns lie in the picture, as fractions, and which have cells with arithmetic."""
    rows, columns = canvas.maps[name]

    def edges(count: int, at: int, **which) -> list[float]:
        """Where each line begins and the last one ends; where all are even, the first and the last of these."""
        boxes = [canvas.box(name, **{key: n for key in which}) for n in range(count)]
        forward = count == 1 or boxes[0][at] < boxes[-1][at]
        begin = [box[at] + (0 if forward else box[at + 2]) for box in boxes]
        last = boxes[-1][at] + (boxes[-1][at + 2] if forward else 0)
        lines = [*begin, last]
        even = np.allclose(lines, np.linspace(begin[0], last, count + 1), atol=1e-5)
        return [round(x, 5) for x in ([begin[0], last] if even else lines)]

    place = {"rows": rows, "columns": columns, "x": edges(columns, 0, column=True), "y": edges(rows, 1, row=True)}
    place |= {"some_rows": some_rows} if len(some_rows) < rows else {}
    place |= {"some_columns": some_columns} if len(some_columns) < columns else {}
    return place
