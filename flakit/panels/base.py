"""What every panel is: knobs, a readout in words, a picture, and presets, pin, reset and "copy as Python".

A panel derives from `Panel`, hands its knobs to `__init__`, and defines four methods:

    compute(**setting)          the numbers, from numerics or cases
    draw(result, **setting)     update the persistent figure and leave its canvas in `self.canvas`
    describe(result, **setting) the readout: what the picture shows, in sentences
    script(**setting)           Python that remakes the numbers with flakit alone

and, where cells of its picture can be pointed at, `arithmetic(result, cell, **setting)`. A setting is a dict of every
knob's value, so these take the knobs' names as arguments. Anything they raise is shown in the readout. Work of more
than a moment belongs in a `ButtonRun`. The words of a panel stand in one table of its module, WORDS, and come out in
the language that the panel was made in, whatever others speak: these methods may be called from anywhere.
"""

import asyncio
import atexit
import base64
import functools
import html
import json
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import ipywidgets as widgets

from ..cases.device import on_cpu
from ..figures.canvas import FOR_LIGHT, Cell
from ..language import Words, current, label, say, speaking, tight
from ..numerics.evaluate import one_thread
from .knobs import assign, stops_of
from .picture import Picture

WORDS = Words() | {
    "reset": "reset",
    "reset tip": "back to where the panel started",
    "copy": "copy as Python",
    "copy tip": "a script with this setting",
    "more": "more",
    "more tip": "show or hide the other knobs",
    "pin": "pin",
    "pin tip": "keep this picture beside the next",
    "unpin": "unpin",
    "unpin tip": "take the kept picture away",
    "pinned": "Pinned: {text}",
    "seed": "seed",
    "play": "play",
    "pause": "pause",
    "stop": "stop and go back to the start",
    "back": "one step back",
    "on": "one step on",
    "point": "Point at a cell to see its arithmetic; the arrow keys walk on from there.",
    "stale": "The picture shows the last setting that worked.",
    "gone": "The kernel that moves this panel has stopped. Run this cell again.",
    "starting": "starting",
    "stopping": "stopping",
    "cancel": "cancel",
    "cancelled": "cancelled",
    "failed": "failed",
    "progress": "{done} of {total}",
    "done": "done in {seconds:.1f} s",
}

DEBOUNCE = 0.06
"""Seconds. A redraw that takes longer waits this long after the one before it, then jumps to the newest value."""

SETTLED = 0.25
"""Seconds without a redraw after which a fine screen gets twice the dots, which take longer to draw."""

WIDE, NARROW = 9.4, 5.9
"""Inches at 100 pixels, the two widths that pictures are laid out for: a laptop's screen, and a small one's."""

MILLISECONDS = 450
"""A step while playing."""

_CSS = """<style>
.flakit-panel {max-width: 940px; padding: 2px 0}
.flakit-panel.flakit-pinning {max-width: 1240px}
.flakit-knobs, .flakit-presets {gap: 0 10px}
.flakit-knobs > .widget-inline-hbox, .flakit-more > .widget-inline-hbox {flex: 1 1 264px; max-width: 460px}
.flakit-presets button, .flakit-buttons button {width: auto; padding: 0 8px; height: 24px; line-height: 24px}
.flakit-knobs > *, .flakit-presets > *, .flakit-presets button, .flakit-buttons > * {margin: 1px 2px}
.flakit-readout {overflow-y: auto}
.flakit-readout.widget-html > .widget-html-content {white-space: pre-line; line-height: 1.4}
.flakit-readout sup, .flakit-readout sub {line-height: 0}
.flakit-readout .flakit-error {border-left: 4px solid #D55E00; padding-left: 8px}
.flakit-table.widget-html > .widget-html-content {line-height: 1.35}
.flakit-table td, .flakit-table th {padding: 0 12px 0 0; vertical-align: top; white-space: nowrap}
.flakit-table td:last-child {white-space: normal}
.flakit-script textarea {font-family: monospace; font-size: 12px}
.flakit-panel .jupyter-widgets-disconnected::before {display: none}
.flakit-panel.jupyter-widgets-disconnected::before {content: "GONE"; border-left: 4px solid #D55E00; padding-left: 8px}
.flakit-pictures {gap: 8px; align-items: flex-start}
.flakit-pictures > * {flex: 1 1 45%; min-width: 0}
.flakit-frame {position: relative; line-height: 0}
.flakit-frame img {width: 100%}
[data-jp-theme-light="false"] .flakit-frame {filter: invert(0.89) hue-rotate(180deg)}
.flakit-lit {position: absolute; box-sizing: border-box; pointer-events: none}
.flakit-lit-line {outline: 1px dashed rgba(0, 0, 0, 0.55)}
.flakit-lit-same {border: 2px solid #0072B2}
.flakit-lit-cell {border: 3px solid #000; outline: 1.5px solid #fff}
.flakit-strip {min-height: 20px; line-height: 20px; font-family: monospace; font-size: 12px; white-space: pre-wrap}
</style>"""


def _in_its_language(method: Callable) -> Callable:
    """A method of something that has a `language`, which is spoken inside; tensors are made on the CPU there, whatever
    `torch.set_default_device` says."""

    @functools.wraps(method)
    def spoken(self, *args, **kwargs):
        with speaking(self.language), on_cpu():
            return method(self, *args, **kwargs)

    return spoken


class Player(widgets.HBox):
    """Play, one step back, one step on: go(n) is called with a place from 0 to last."""

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
        """Where play begins and stops, the number of places last."""
        return [0, self.play.max + 1]

    def step(self, by: int) -> None:
        """On or back, stopping at both ends."""
        self._moved(min(max(self.place + by, 0), self.play.max))

    def show(self, place: int, last: int | None = None) -> None:
        """Where things stand now, which nobody has to be told of."""
        self.place = place
        last = self.play.max if last is None else last
        self.play.max = max(last, self.play.max)  # below its value it would move that, and the knob with it
        self.play.value = place
        self.play.max = last

    def _moved(self, place: int) -> None:
        if place != self.place:
            self.place = place
            self._go(place)


class Panel(widgets.VBox):
    """Knobs, a readout, a picture. `name` gives the CSS class `flakit-<name>`.

    on_view: the knobs that are shown where a call names none, all if empty; the others are folded under "more".
    main: the knob that "play" moves from stop to stop, where it is on view.
    presets: settings by the words of their buttons.
    """

    name: str
    on_view: Sequence[str] = ()
    main: str | None = None
    presets: Mapping[str, Mapping] = {}
    readout_lines = 3
    _held = True  # no redraw: several knobs are being moved
    _redrawing = threading.RLock()  # one for all panels, which draw one after the other
    language: str
    """What it was made in, by `flakit.language.speaking`."""

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
        """knobs: by the name of their setting. settings: values that differ from the knobs' own.
        alt: what the picture is, for those who cannot see it. show: names of the knobs on view.
        player: in place of the one for `main`. runs: rows of a button, progress and cancel.
        """
        self.knobs = dict(knobs)
        self.knobs.setdefault("seed", widgets.BoundedIntText(0, 0, 2**31 - 1))
        self.width, self.canvas, self.result, self._alt = WIDE, None, None, alt
        for knob in self.knobs.values():
            knob.description = label(knob.description)
        self._figures: dict[Hashable, object] = {}
        self._room = self._kept = None
        self._timer, self._cost, self._drawn = None, 0.0, 0.0
        self._density, self._loop, self._sharpening = 1, None, None

        seed = self.knobs["seed"]
        seed.description, seed.style, seed.layout = WORDS["seed"], {"description_width": "34px"}, {"width": "130px"}
        names = {icon: WORDS[icon] for icon in ("play", "pause", "stop")}
        self.picture = Picture(self._found, self._roomy, names=names)
        self.picture.beside = self.beside
        # It scrolls where there is more to say than room: so the keyboard must reach it.
        self.readout = widgets.HTML(layout={"width": "auto", "flex": "0 0 auto"}, tabbable=True)
        self.readout.add_class("flakit-readout")
        self._pinned = widgets.VBox([], layout={"display": "none"})
        self._pictures = widgets.Box([self.picture, self._pinned], layout={"flex_flow": "row wrap"})
        self._pictures.add_class("flakit-pictures")
        self._script = widgets.Textarea(layout={"width": "100%", "height": "190px", "display": "none"})
        self._script.add_class("flakit-script")
        self._clipboard = widgets.Output(layout={"display": "none"})

        self.runs, self.named_on_view = runs, self._named(show)
        on_view = self.named_on_view
        shown = widgets.Box([self.knobs[name] for name in on_view], layout={"flex_flow": "row wrap"})
        folded = [knob for name, knob in self.knobs.items() if name not in on_view]
        self._more = widgets.Box(folded, layout={"flex_flow": "row wrap", "display": "none"})
        shown.add_class("flakit-knobs")
        self._more.add_class("flakit-more")
        self.player = player or (self._play_main() if self.main in on_view else None)
        row = [*([self.player] if self.player else []), *(self._preset(*each) for each in self.presets.items())]
        presets = widgets.HBox(row, layout={"flex_flow": "row wrap", "align_items": "center"})
        presets.add_class("flakit-presets")
        self._pin_button = _button("pin", "thumb-tack", self.pin)
        buttons = widgets.HBox(
            [
                _button("reset", "undo", self.reset),
                self._pin_button,
                _button("copy", "copy", self._copy),
                _button("more", "sliders", self._fold),
            ],
            layout={"flex_flow": "row wrap", "align_items": "center"},
        )
        buttons.add_class("flakit-buttons")

        super().__init__(
            [
                widgets.HTML(_CSS.replace("GONE", WORDS["gone"]), layout={"display": "none"}),
                shown,
                *([presets] if row else []),
                *runs,
                self.readout,
                self._pictures,
                buttons,
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
        """The knobs on view, in the panel's order."""
        names = list(show if show is not None else self.on_view or [name for name in self.knobs if name != "seed"])
        if isinstance(show, str) or any(name not in self.knobs for name in names):
            raise ValueError(f"show: expected names of knobs ({', '.join(self.knobs)}), got {show!r}")
        return [name for name in self.knobs if name in names]

    def _play_main(self) -> Player:
        knob = self.knobs[self.main]
        # As a person moves it: what follows from that, such as a profile that gives way to a decay, follows here, too.
        return Player(len(stops_of(knob)) - 1, lambda place: setattr(knob, "value", stops_of(knob)[place]))

    def _preset(self, words: str, setting: Mapping) -> widgets.Button:
        button = widgets.Button(description=label(words), layout={"width": "auto"})
        button.tooltip = ", ".join(f"{name} {value}" for name, value in setting.items())
        button.on_click(lambda _: self.set(**setting))
        return button

    def figure(self, make: Callable, *key: Hashable):
        """make(*key, width=…) for the width there is now, made once each."""
        if (make, key, self.width) not in self._figures:
            self._figures[make, key, self.width] = make(*key, width=self.width)
        return self._figures[make, key, self.width]

    def compute(self, **setting):
        raise NotImplementedError

    def draw(self, result, **setting) -> None:
        raise NotImplementedError

    def describe(self, result, **setting) -> str:
        raise NotImplementedError

    def script(self, **setting) -> str:
        raise NotImplementedError

    def arithmetic(self, result, cell: Cell, **setting) -> str | None:
        """How a cell came about, as computed and as it is; None where there is nothing to say."""

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Places that light up with a cell: map, row and column (None: all of it)."""
        return []

    def alt_text(self, result, **setting) -> str:
        """What the picture shows now, for those who cannot see it."""
        return say("{alt}. {text}").format(alt=self._alt, text=self.text)

    def when(self, knob: widgets.Widget, react: Callable[[object, object], None]) -> None:
        """Call react(old, new) when a knob has moved; other knobs that it moves add no redraw of their own.

        For use before `super().__init__`, or it would come after the redraw.
        """

        def held(change) -> None:
            was_held, self._held = self._held, True
            try:
                with speaking(self.language):
                    react(change.old, change.new)
            finally:
                self._held = was_held

        knob.observe(held, "value")

    @property
    def setting(self) -> dict:
        """Every knob's value by name."""
        return {name: knob.value for name, knob in self.knobs.items()}

    @property
    def text(self) -> str:
        """The readout as plain text."""
        return self._text

    @property
    def png(self) -> bytes:
        """The picture as it is shown."""
        return self.picture.png

    def set(self, **values) -> "Panel":
        """Move several knobs at once, in the panel's order, and redraw once; returns the panel.

        An unknown name is a TypeError, a bad value a ValueError that leaves every knob where it was.
        """
        unknown = [name for name in values if name not in self.knobs]
        if unknown:
            raise TypeError(f"{self.name}: no knob named {', '.join(unknown)}; expected {', '.join(self.knobs)}")
        before, was_held, self._held = self.setting, self._held, True
        try:
            for name in filter(values.__contains__, self.knobs):
                assign(self.knobs[name], name, values[name])
        except ValueError:
            for name, value in before.items():
                assign(self.knobs[name], name, value)
            raise
        finally:
            self._held = was_held
        if not self._held:
            self.redraw()
        return self

    def move(self, name: str, value) -> "Panel":
        """Move one knob as a person does, with all that follows from that, and redraw at once; returns the panel."""
        self._cost = 0.0  # of the last redraw, which else may put the next one off
        self.knobs[name].value = value
        return self

    def reset(self) -> None:
        """Put every knob back to where the panel started."""
        self.set(**self._start)
        self._script.layout.display = "none"

    def as_python(self) -> str:
        """A script that remakes the present setting's numbers."""
        return self.script(**self.setting)

    def redraw(self) -> None:
        """Compute and draw the present setting; an error is shown in the readout."""
        try:
            self._render()
        except Exception as error:
            self.fail(error)

    @_in_its_language
    def _render(self) -> None:
        with self._redrawing:
            self._cancel_timer()
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
        """On a fine screen, sharpen the picture once nothing has moved for a moment."""
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
        self._text = tight(text)
        self.readout.value = html.escape(self._text)

    @_in_its_language
    def fail(self, error: Exception) -> None:
        """Show an error in the readout; the picture remains that of the last setting that worked."""
        self._text = f"{type(error).__name__}: {error}"
        shown = html.escape(self._text) + f"<br>{WORDS['stale']}"
        self.readout.value = f'<div class="flakit-error">{shown}</div>'

    # What the browser says: the room there is, the cell that is pointed at.

    def _roomy(self, width: int, density: float) -> None:
        """The browser shows the panel so wide: another layout of the picture where that is another one."""
        self._room, self._density, self._loop = width, 1 + (density > 1), _running_loop()
        if not self._lay_out():
            self._settle()

    def _lay_out(self) -> bool:
        """Take the layout that fits the room; whether that was another one."""
        wide = self._room is None or self._room >= 100 * WIDE - 40
        layout = WIDE if wide and self._kept is None else NARROW
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
    def _found(self, cell: Cell | None) -> str:
        if cell is None:
            return WORDS["point"]
        try:
            return tight(self.arithmetic(self.result, cell, **self.setting) or WORDS["point"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    # Pin and more.

    @_in_its_language
    def pin(self) -> None:
        """Keep the present picture and readout beside the next; a second call takes them away."""
        if self._kept is None:
            self._kept = self.setting
            self._lay_out()
            words = widgets.HTML(html.escape(WORDS.say("pinned", text=self.text)))
            words.add_class("flakit-pinned")
            still = Picture(lambda _: "", lambda *_: None)
            still.show(self.canvas, WORDS.say("pinned", text=self.picture.alt), points=False)
            still.png = self.canvas.png(self._density)
            self._pinned.children, self._pinned.layout.display = [still, words], ""
            self.add_class("flakit-pinning")
        else:
            self._kept = None
            self._pinned.children, self._pinned.layout.display = [], "none"
            self.remove_class("flakit-pinning")
            self._lay_out()
        which = "pin" if self._kept is None else "unpin"
        self._pin_button.description, self._pin_button.tooltip = WORDS[which], WORDS[f"{which} tip"]

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
            # Not restarted by further changes: a held key must still redraw, with the newest value at that time.
            self._timer = loop.call_later(DEBOUNCE - pause, self.redraw)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _copy(self) -> None:
        try:
            text = self.as_python()
        except Exception as error:
            self.fail(error)
            return
        self._script.value, self._script.layout.display = text, ""
        # The script stays visible, for browsers that let nobody write to the clipboard.
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
    """None in a script or a test, where nothing would ever fire a timer."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _button(words: str, icon: str, pressed: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=WORDS[words], icon=icon, tooltip=WORDS[f"{words} tip"])
    button.layout = {"width": "auto"}
    button.on_click(lambda _: pressed())
    return button


class ButtonRun(widgets.HBox):
    """A button that starts long work in the background, with progress and cancel.

    work(progress, cancelled) runs in a thread; it calls progress(done, total) as it goes and stops early when
    cancelled() is true. done(result) then gets what it returned, failed(error) what it raised.
    """

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
            description=WORDS["cancel"], icon="stop", disabled=True, layout={"width": "auto"}
        )
        self.bar = widgets.IntProgress(0, 0, 1, layout={"width": "220px"})
        self.bar.add_class("flakit-progress")
        self.status = widgets.Label("")
        self.button.on_click(lambda _: self.start())
        self.cancel_button.on_click(lambda _: self.cancel())
        super().__init__([self.button, self.cancel_button, self.bar, self.status])

    @_in_its_language
    def start(self) -> None:
        """Begin, unless a run is going on."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self.button.disabled, self.cancel_button.disabled = True, False
        self.bar.value, self.status.value = 0, WORDS["starting"]
        self._thread = threading.Thread(target=self._run, daemon=True)
        atexit.register(self._leave)
        self._thread.start()

    @_in_its_language
    def cancel(self) -> None:
        """Ask the run to stop at its next step."""
        self._stop.set()
        self.status.value = WORDS["stopping"]

    def wait(self, seconds: float | None = None) -> None:
        """Block until the run is over."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _leave(self) -> None:
        """Where the process ends, work in PyTorch must not be cut off within a call: that aborts."""
        self._stop.set()
        self.wait(30)

    def _progress(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total and now - self._told < 0.1:  # a message to the browser costs as much as a small setting
            return
        self._told = now
        self.bar.max, self.bar.value = total, done
        if not self._stop.is_set():
            self.status.value = WORDS.say("progress", done=done, total=total)

    @_in_its_language
    def _run(self) -> None:
        start = self._told = time.perf_counter()
        try:
            result = self._work(self._progress, self._stop.is_set)
            self._done(result)
            done = WORDS.say("done", seconds=time.perf_counter() - start)
            self.status.value = WORDS["cancelled"] if self._stop.is_set() else done
        except Exception as error:
            self.status.value = WORDS["failed"]
            self._failed(error)
        finally:
            atexit.unregister(self._leave)
            self.button.disabled, self.cancel_button.disabled = False, True
