"""The base of every panel: knobs, a readout in sentences, a picture, presets, pin, reset and "copy as Python".

A panel derives from `Panel`, passes its knobs to `__init__`, and defines four methods:

    compute(**setting)          return the numbers, from numerics or cases
    draw(result, **setting)     update the persistent figure, `self.figure(make)`
    describe(result, **setting) return the readout: what the picture shows, in sentences
    script(**setting)           return Python code that recomputes the numbers with flakit alone

and, where cells of its picture can be pointed at, `arithmetic(result, cell, **setting)`. A setting is a dict of every
knob's value, so these methods take the knobs' names as arguments. The readout shows any error they raise. Work of more
than a moment belongs in a `ButtonRun`. A panel's texts stand in its module's table WORDS. The methods use the language
in which the panel was created, wherever they are called.
"""

import asyncio
import atexit
import base64
import functools
import html
import json
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ipywidgets as widgets

from ..cases.laws import on_cpu
from ..figures.canvas import FOR_LIGHT, Canvas, Cell
from ..language import Words, current, label, say, speaking, tight
from ..numerics.evaluate import one_thread
from .knobs import assign, stops_of
from .picture import Picture

WORDS = Words() | {
    "reset": "reset",
    "reset tip": "back to where the panel started",
    "copy": "copy as Python",
    "copy tip": "a script with this setting",
    "save": "save picture",
    "save tip": "the picture as it stands, as a file",
    "more": "more",
    "more tip": "show or hide the other knobs",
    "pin": "pin",
    "pin tip": "keep this picture beside the next",
    "unpin": "unpin",
    "unpin tip": "take the kept picture away",
    "pinned": "Pinned: {text}",
    "play": "play",
    "pause": "pause",
    "stop": "stop and go back to the start",
    "back": "one step back",
    "on": "one step on",
    "point": "Point at a cell to see its arithmetic; the arrow keys walk on from there.",
    "stale": "The picture shows the last setting that worked.",
    "gone": "The kernel that moves this panel has stopped. Run this cell again.",
    "progress": "{done} of {total}",
    "done": "done in {seconds:.1f} s",
}

DEBOUNCE = 0.06
"""Seconds between two redraws when redrawing is slow: a change waits this long after the last redraw."""

SETTLED = 0.25
"""Seconds without a redraw before a high-density screen gets the picture at twice the resolution, which is slower."""

WIDE, NARROW = 9.4, 5.9
"""The widths of a picture's two layouts in inches of 100 pixels: for a laptop's screen and for a small one."""

MILLISECONDS = 450
"""Milliseconds per step while playing."""

_CSS = Path(__file__).with_name("panel.css").read_text()


def _in_its_language(method: Callable) -> Callable:
    """Wrap a method: it runs in its object's language, with new tensors on the CPU despite
    `torch.set_default_device`."""

    @functools.wraps(method)
    def spoken(self, *args, **kwargs):
        with speaking(self.language), on_cpu():
            return method(self, *args, **kwargs)

    return spoken


class Player(widgets.HBox):
    """Buttons to play and to step through positions from 0 to `last`; each move calls go(position)."""

    def __init__(self, last: int, go: Callable[[int], None], milliseconds: int = MILLISECONDS):
        self.place, self._go = 0, go
        self.play = widgets.Play(0, 0, last, interval=milliseconds, show_repeat=False, layout={"width": "110px"})
        self.play.observe(lambda change: self._moved(change.new), "value")
        buttons = []
        for by, icon, words in ((-1, "step-backward", WORDS["back"]), (1, "step-forward", WORDS["on"])):
            button = widgets.Button(icon=icon, tooltip=words, layout={"width": "36px"})
            button.on_click(lambda _, by=by: self.step(by))
            buttons.append(button)
        super().__init__([self.play, *buttons])

    @property
    def passes(self) -> list[int]:
        """The positions at which a run of play begins, then the number of positions: here one run, [0, last + 1]."""
        return [0, self.play.max + 1]

    def step(self, by: int) -> None:
        """Move by a number of positions, stopping at both ends."""
        self._moved(min(max(self.place + by, 0), self.play.max))

    def show(self, place: int, last: int | None = None) -> None:
        """Set the position, and optionally the last one, without calling `go`."""
        self.place = place
        last = self.play.max if last is None else last
        self.play.max = max(last, self.play.max)  # a maximum below the value would move it, and the knob
        self.play.value = place
        self.play.max = last

    def _moved(self, place: int) -> None:
        if place != self.place:
            self.place = place
            self._go(place)


class Panel(widgets.VBox):
    """Knobs, a readout and a picture as one widget. `name` gives the CSS class `flakit-<name>`.

    on_view: names of the knobs shown by default, all if empty; the others are folded under "more".
    main: the knob that "play" moves from stop to stop, if it is on view.
    presets: settings by the labels of their buttons.
    random: whether the numbers depend on the seed; otherwise its knob is hidden."""

    name: str
    on_view: Sequence[str] = ()
    main: str | None = None
    presets: Mapping[str, Mapping] = {}
    random = True
    readout_lines = 3
    _held = True  # several knobs are moving: redraw afterwards
    _redrawing = threading.RLock()  # shared: panels draw one after the other
    language: str
    """The language in which the panel speaks: the current one at its creation, see `flakit.language.speaking`."""
    text: str
    """The readout as plain text."""
    canvas: Canvas
    """The drawn picture, which `figure` assigns."""
    result: object
    """What `compute` returned for the setting on view; a subclass that reads it declares its own type."""
    compute: Callable
    draw: Callable[..., None]
    describe: Callable[..., str]
    script: Callable[..., str]
    """The methods that every panel defines, as the module's docstring describes."""

    def __new__(cls, *args, **kwargs):
        panel = super().__new__(cls, *args, **kwargs)
        panel.language = current()
        return panel

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("__init__", "compute", "draw", "describe", "script", "arithmetic", "alt_text"):
            if name in vars(cls):
                setattr(cls, name, _in_its_language(vars(cls)[name]))

    def __init__(
        self,
        knobs: Mapping[str, widgets.Widget],
        settings: Mapping[str, object] | None = None,
        *,
        alt: str,
        show: Iterable[str] | None = None,
        player: Player | None = None,
        runs: tuple["ButtonRun", ...] = (),
    ):
        """knobs: by the name of their setting. settings: starting values in place of the knobs' own; a bad one raises
        ValueError, an unknown name TypeError. alt: alternative text of the picture. show: names of the knobs on view,
        checked. player: replaces the one for `main`. runs: rows with a button, progress and cancel."""
        look = {"style": {"description_width": "34px"}, "layout": {"width": "130px"}}
        seed = widgets.BoundedIntText(0, 0, 2**31 - 1, description="seed", **look)
        seed.layout.display = None if self.random else "none"
        self.knobs = {**knobs, "seed": seed}
        self.width, self._alt = WIDE, alt
        for knob in self.knobs.values():
            knob.description = label(knob.description)
        self._figures: dict[Hashable, object] = {}
        self._available = self._pinned_setting = None
        self._timer, self._cost, self._drawn = None, 0.0, 0.0
        self._density, self._loop, self._sharpening = 1, None, None

        names = {icon: WORDS[icon] for icon in ("play", "pause", "stop")}
        self.picture = Picture(self._strip, self._resized, self.beside, names=names)
        # A long text scrolls, so the keyboard must reach it.
        self.readout = widgets.HTML(layout={"width": "auto", "flex": "0 0 auto"}, tabbable=True)
        self.readout.add_class("flakit-readout")
        self._pinned = widgets.VBox([], layout={"display": "none"})
        self._pictures = _row("pictures", [self.picture, self._pinned])
        self._script = widgets.Textarea(layout={"width": "100%", "height": "190px", "display": "none"})
        self._script.add_class("flakit-script")
        self._clipboard = widgets.Output(layout={"display": "none"})

        self.runs, self.named_on_view = runs, self._named(show)
        on_view = self.named_on_view
        shown = _row("knobs", [self.knobs[name] for name in on_view])
        folded = [knob for name, knob in self.knobs.items() if name not in on_view]
        self._more = _row("more", folded, display="none")
        self.player = player or (self._play_main() if self.main in on_view else None)
        row = [*([self.player] if self.player else []), *(self._preset(*each) for each in self.presets.items())]
        presets = _row("presets", row, align_items="center")
        self._pin_button = _button("pin", "thumb-tack", self.pin)
        buttons = [
            _button("reset", "undo", self.reset),
            self._pin_button,
            _button("copy", "copy", self._copy),
            _button("save", "download", self._save),
            _button("more", "sliders", self._fold),
        ]

        super().__init__(
            [
                widgets.HTML(f"<style>{_CSS.replace('GONE', WORDS['gone'])}</style>", layout={"display": "none"}),
                shown,
                *([presets] if row else []),
                *runs,
                self.readout,
                self._pictures,
                _row("buttons", buttons, align_items="center"),
                self._more,
                self._script,
                self._clipboard,
            ]
        )
        self.add_class("flakit-panel")
        self.add_class(f"flakit-{self.name}")
        self._size_readout()
        self.set(**(settings or {}))
        self._start = self.setting
        for knob in self.knobs.values():
            knob.observe(self._changed, "value")
        self._held = False
        self._render()

    def _named(self, show: Iterable[str] | None) -> list[str]:
        """Return the knobs on view, in the panel's order. Raise ValueError if `show` is a string or names no knob."""
        names = list(show if show is not None else self.on_view or [name for name in self.knobs if name != "seed"])
        if isinstance(show, str) or any(name not in self.knobs for name in names):
            raise ValueError(f"show: expected names of knobs ({', '.join(self.knobs)}), got {show!r}")
        return [name for name in self.knobs if name in names]

    def _play_main(self) -> Player:
        knob = self.knobs[self.main]
        # The value is assigned as a reader moves it, so that what follows from that happens here, too.
        return Player(len(stops_of(knob)) - 1, lambda place: setattr(knob, "value", stops_of(knob)[place]))

    def _preset(self, words: str, setting: Mapping) -> widgets.Button:
        button = widgets.Button(description=label(words), layout={"width": "auto"})
        button.tooltip = ", ".join(f"{name} {value}" for name, value in setting.items())
        button.on_click(lambda _: self.set(**setting))
        return button

    def figure(self, make: Callable, *key: Hashable):
        """Return make(self.width), a figure that is made once for each key and width, and show its canvas."""
        if (key, self.width) not in self._figures:
            self._figures[key, self.width] = make(self.width)
        figure = self._figures[key, self.width]
        self.canvas = figure.canvas
        return figure

    def arithmetic(self, result, cell: Cell, **setting) -> str | None:
        """Return a line on how a cell's number is computed and what it should be; None if there is nothing to say."""

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Return the places to highlight with a cell: map, row and column (None: every row, every column)."""
        return []

    def alt_text(self, result, **setting) -> str:
        """Return the alternative text of the picture as it is now."""
        return say("{alt}. {text}").format(alt=self._alt, text=self.text)

    def when(self, knob: widgets.Widget, react: Callable[[object, object], None]) -> None:
        """Call react(old, new) when a knob has moved. Knobs that react moves cause no further redraw.

        Call it before `super().__init__` if react has to run before the redraw."""

        def changed(change) -> None:
            with self.held(), speaking(self.language):
                react(change.old, change.new)

        knob.observe(changed, "value")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Suppress redraws inside the context, whichever knobs move."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @property
    def setting(self) -> dict:
        """The value of every knob, by name."""
        return {name: knob.value for name, knob in self.knobs.items()}

    @property
    def png(self) -> bytes:
        """The picture on view as PNG."""
        return self.picture.png

    def set(self, **values) -> "Panel":
        """Move several knobs at once, in the panel's order, and redraw once; return the panel.

        Raise TypeError for an unknown name, ValueError for a bad value, which leaves every knob where it was."""
        unknown = [name for name in values if name not in self.knobs]
        if unknown:
            raise TypeError(f"{self.name}: no knob named {', '.join(unknown)}; expected {', '.join(self.knobs)}")
        before = self.setting
        with self.held():
            try:
                for name in filter(values.__contains__, self.knobs):
                    assign(self.knobs[name], name, values[name])
            except ValueError:
                for name, value in before.items():
                    assign(self.knobs[name], name, value)
                raise
        if not self._held:
            self.redraw()
        return self

    def move(self, name: str, value) -> "Panel":
        """Set one knob as by mouse, so that dependent knobs follow, and redraw at once; return the panel."""
        self._cost = 0.0  # or a slow last redraw may delay the next one
        self.knobs[name].value = value
        return self

    def reset(self) -> None:
        """Set every knob to its starting value, and hide the script."""
        self.set(**self._start)
        self._script.layout.display = "none"

    def as_python(self) -> str:
        """Return a script that recomputes the numbers of the current setting."""
        return self.script(**self.setting)

    def redraw(self) -> None:
        """Compute and draw the current setting; an error of either is shown in the readout."""
        try:
            self._render()
        except Exception as error:
            self.fail(error)

    @_in_its_language
    def _render(self) -> None:
        with self._redrawing:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            start = time.perf_counter()
            setting = self.setting
            with one_thread():
                self.result = self.compute(**setting)
            self.draw(self.result, **setting)
            self.say(self.describe(self.result, **setting))
            points = type(self).arithmetic is not Panel.arithmetic
            self.picture.show(self.canvas, self.alt_text(self.result, **setting), points=points)
            if self.player and self.main:
                stops = stops_of(self.knobs[self.main])
                self.player.show(stops.index(setting[self.main]), len(stops) - 1)
            self._drawn = time.perf_counter()
            self._cost = self._drawn - start
        self._settle()

    def _settle(self) -> None:
        """On a high-density screen, sharpen the picture once nothing has moved for `SETTLED` seconds."""
        if self._density > 1 and self._loop is not None:
            self._loop.call_soon_threadsafe(self._sharpen_later)

    def _sharpen_later(self) -> None:
        if self._sharpening is not None:
            self._sharpening.cancel()
        self._sharpening = self._loop.call_later(SETTLED, self._sharpen)

    @_in_its_language
    def _sharpen(self) -> None:
        with self._redrawing:
            self.picture.png = self.canvas.png(self._density)

    def say(self, text: str) -> None:
        """Show text in the readout."""
        self.text = tight(text)
        self.readout.value = html.escape(self.text)

    @_in_its_language
    def fail(self, error: Exception) -> None:
        """Show an error in the readout; the picture stays that of the last setting that worked."""
        self.text = f"{type(error).__name__}: {error}"
        shown = html.escape(self.text) + f"<br>{WORDS['stale']}"
        self.readout.value = f'<div class="flakit-error">{shown}</div>'

    # Messages of the browser: the available width, the cell that is pointed at.

    def _resized(self, width: int, density: float) -> None:
        """Choose the layout for the width in pixels of the panel in the browser. density: screen dots per pixel."""
        self._available, self._density, self._loop = width, 1 + (density > 1), _running_loop()
        if not self._lay_out():
            self._settle()

    def _lay_out(self) -> bool:
        """Switch to the layout that fits the width; return whether that is another one."""
        wide = self._available is None or self._available >= 100 * WIDE - 40
        layout = WIDE if wide and self._pinned_setting is None else NARROW
        if layout == self.width:
            return False
        self.width = layout
        self._size_readout()
        self.redraw()
        return True

    def _size_readout(self) -> None:
        lines = self.readout_lines + (self.width == NARROW)
        self.readout.layout.height = f"{1.4 * lines + 0.3:.2f}em"

    @_in_its_language
    def _strip(self, cell: Cell | None) -> str:
        """Return the line under the picture: the arithmetic of a cell, or for None an invitation to point at one."""
        if cell is None:
            return WORDS["point"]
        try:
            return tight(self.arithmetic(self.result, cell, **self.setting) or WORDS["point"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    # Pin and more.

    @_in_its_language
    def pin(self) -> None:
        """Keep the current picture and readout beside the panel's next ones; a second call removes them."""
        if self._pinned_setting is None:
            self._pinned_setting = self.setting
            self._lay_out()
            caption = widgets.HTML(html.escape(WORDS.say("pinned", text=self.text))).add_class("flakit-pinned")
            still = Picture()
            still.show(self.canvas, WORDS.say("pinned", text=self.picture.alt), points=False)
            still.png = self.canvas.png(self._density)
            self._pinned.children, self._pinned.layout.display = [still, caption], ""
            self.add_class("flakit-pinning")
        else:
            self._pinned_setting = None
            self._pinned.children, self._pinned.layout.display = [], "none"
            self.remove_class("flakit-pinning")
            self._lay_out()
        which = "pin" if self._pinned_setting is None else "unpin"
        self._pin_button.description, self._pin_button.tooltip = WORDS[which], WORDS[f"{which} tip"]

    def _save(self) -> None:
        self.picture.send({"file": f"flakit-{self.name}.png"})

    def _fold(self) -> None:
        self._more.layout.display = "none" if self._more.layout.display == "" else ""

    def _changed(self, _) -> None:
        if self._held:
            return
        loop = _running_loop()
        pause = time.perf_counter() - self._drawn
        if loop is None or self._cost <= DEBOUNCE or pause >= DEBOUNCE:
            self.redraw()
        elif self._timer is None:
            # Further changes do not restart the timer: a key that is held down must still redraw.
            self._timer = loop.call_later(DEBOUNCE - pause, self.redraw)

    def _copy(self) -> None:
        try:
            text = self.as_python()
        except Exception as error:
            self.fail(error)
            return
        self._script.value, self._script.layout.display = text, ""
        # The script stays visible, for browsers without access to the clipboard.
        self._clipboard.outputs = (
            {
                "output_type": "display_data",
                "metadata": {},
                "data": {"application/javascript": f"navigator.clipboard.writeText({json.dumps(text)})"},
            },
        )

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        bundle["text/plain"] = f"{self.name}: {self.text}"
        bundle["image/png"] = base64.b64encode(self.png).decode()
        return bundle, dict(FOR_LIGHT)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop; None in a script or a test, where no timer would fire."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _row(name: str, children: list[widgets.Widget], **layout: str) -> widgets.Box:
    """Return a box of the CSS class `flakit-<name>` that lays its children out in a row and wraps them."""
    return widgets.Box(children, layout={"flex_flow": "row wrap", **layout}).add_class(f"flakit-{name}")


def _button(name: str, icon: str, press: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=WORDS[name], icon=icon, tooltip=WORDS[f"{name} tip"], layout={"width": "auto"})
    button.on_click(lambda _: press())
    return button


class ButtonRun(widgets.HBox):
    """A button that starts long work in a background thread, with a progress bar and a button to cancel it.

    The thread calls work(progress, cancelled), which reports by progress(done, total) and stops early once cancelled()
    is true; then it calls done(result) with what work returned, or failed(error) with what it raised."""

    def __init__(
        self,
        label: str,
        work: Callable[[Callable[[int, int], None], Callable[[], bool]], object],
        *,
        done: Callable[[object], None],
        failed: Callable[[Exception], None],
    ):
        self.language, self._work, self._done, self._failed = current(), work, done, failed
        self._thread, self._stop = None, threading.Event()
        self.button = widgets.Button(description=label, icon="play", layout={"width": "auto"})
        self.cancel_button = widgets.Button(
            description=say("cancel"), icon="stop", disabled=True, layout={"width": "auto"}
        )
        self.bar = widgets.IntProgress(0, 0, 1, layout={"width": "220px"}).add_class("flakit-progress")
        self.status = widgets.Label("")
        self.button.on_click(lambda _: self.start())
        self.cancel_button.on_click(lambda _: self.cancel())
        super().__init__([self.button, self.cancel_button, self.bar, self.status])

    @_in_its_language
    def start(self) -> None:
        """Start the work, unless it is running already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self.button.disabled, self.cancel_button.disabled = True, False
        self.bar.value, self.status.value = 0, say("starting")
        self._thread = threading.Thread(target=self._run, daemon=True)
        atexit.register(self._leave)
        self._thread.start()

    @_in_its_language
    def cancel(self) -> None:
        """Ask the work to stop at its next step."""
        self._stop.set()
        self.status.value = say("stopping")

    def wait(self, seconds: float | None = None) -> None:
        """Block until the work is over, at most so many seconds; None: without a limit."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _leave(self) -> None:
        """Cancel at the end of the process and wait up to 30 seconds: PyTorch aborts if interrupted in a call."""
        self._stop.set()
        self.wait(30)

    def _progress(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total and now - self._reported < 0.1:  # a message costs as much as a small setting
            return
        self._reported = now
        self.bar.max, self.bar.value = total, done
        if not self._stop.is_set():
            self.status.value = WORDS.say("progress", done=done, total=total)

    @_in_its_language
    def _run(self) -> None:
        start = self._reported = time.perf_counter()
        try:
            result = self._work(self._progress, self._stop.is_set)
            self._done(result)
            done = WORDS.say("done", seconds=time.perf_counter() - start)
            self.status.value = say("cancelled") if self._stop.is_set() else done
        except Exception as error:
            self.status.value = say("failed")
            self._failed(error)
        finally:
            atexit.unregister(self._leave)
            self.button.disabled, self.cancel_button.disabled = False, True
