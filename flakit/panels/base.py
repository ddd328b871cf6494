"""What every panel is: knobs, a picture, a readout in words, and reset, seed and "copy as Python".

A panel derives from `Panel`, hands its knobs and canvas to `__init__`, and defines four methods:

    compute(**setting)          the numbers, from numerics or cases
    draw(result, **setting)     update the persistent figure
    describe(result, **setting) the readout: what the picture shows, in words
    script(**setting)           Python that remakes the numbers with flakit alone

A setting is a dict of every knob's value, so these take the knobs' names as arguments. Anything they raise is shown in
the readout. Work of more than a moment belongs in a `ButtonRun`.
"""

import asyncio
import base64
import html
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ipywidgets as widgets
import torch
import traitlets

from ..figures.canvas import Canvas
from .knobs import assign

DEBOUNCE = 0.06
"""Seconds. A redraw that takes longer waits this long after the one before it, then jumps to the newest value."""

_CSS = """<style>
.flakit-panel {max-width: 940px; padding: 4px 0}
.flakit-knobs {gap: 2px 12px}
.flakit-readout {overflow-y: auto}
.flakit-readout.widget-html > .widget-html-content {white-space: pre-line; line-height: 1.45}
.flakit-readout .flakit-error {border-left: 4px solid #D55E00; padding-left: 8px}
.flakit-script textarea {font-family: monospace; font-size: 12px}
</style>"""


@contextmanager
def _one_thread() -> Iterator[None]:
    """A slider's tensors are small: a second thread brings them nothing and takes a core from the browser."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Picture(widgets.Image):
    # The browser's side of ipywidgets 8.1 asks a widget with a tooltip for its description, and fails on those without.
    description = traitlets.Unicode("").tag(sync=True)


class Panel(widgets.VBox):
    """Knobs above a picture above a readout. `name` gives the CSS class `flakit-<name>`."""

    name: str
    readout_lines = 3
    _held = True  # no redraw: several knobs are being moved
    _redrawing = threading.RLock()  # one for all panels: `_one_thread` is a setting of the process

    def __init__(
        self,
        knobs: Mapping[str, widgets.Widget],
        canvas: Canvas,
        settings: Mapping[str, object] | None = None,
        *,
        alt: str,
        runs: tuple["ButtonRun", ...] = (),
    ):
        """knobs: by the name of their setting; a knob "seed" goes beside the buttons.
        settings: values that differ from the knobs' own. alt: what the picture is, for those who cannot see it.
        runs: rows of a button, progress and cancel, above the picture.
        """
        self.knobs, self.canvas = dict(knobs), canvas
        self.knobs.setdefault("seed", widgets.BoundedIntText(0, 0, 2**31 - 1))
        self.result = None
        self._timer, self._cost, self._drawn = None, 0.0, 0.0

        seed = self.knobs["seed"]
        seed.description, seed.style, seed.layout = "seed", {"description_width": "34px"}, {"width": "130px"}
        reset = widgets.Button(description="reset", icon="undo", tooltip="back to where the panel started")
        copy = widgets.Button(description="copy as Python", icon="copy", tooltip="a script with this setting")
        for button in (reset, copy):
            button.layout = {"width": "auto"}
        reset.on_click(lambda _: self.reset())
        copy.on_click(lambda _: self._copy())

        width, height = canvas.pixels
        self._picture = _Picture(
            format="png", tooltip=alt, layout={"width": "100%", "max_width": f"{width}px", "height": f"{height}px"}
        )
        self._picture.layout.object_fit, self._picture.layout.object_position = "contain", "left top"
        self._picture.add_class("flakit-picture")
        self.readout = widgets.HTML(layout={"height": f"{1.45 * self.readout_lines + 0.3:.2f}em", "width": "100%"})
        self.readout.add_class("flakit-readout")
        self._script = widgets.Textarea(layout={"width": "100%", "height": "190px", "display": "none"})
        self._script.add_class("flakit-script")
        self._clipboard = widgets.Output(layout={"display": "none"})
        visible = [knob for name, knob in self.knobs.items() if name != "seed"]
        rows = widgets.Box(visible, layout={"flex_flow": "row wrap"})
        rows.add_class("flakit-knobs")
        buttons = widgets.HBox([reset, seed, copy], layout={"flex_flow": "row wrap", "align_items": "center"})

        super().__init__(
            [
                widgets.HTML(_CSS, layout={"display": "none"}),
                rows,
                *runs,
                self._picture,
                self.readout,
                buttons,
                self._script,
                self._clipboard,
            ]
        )
        self.add_class("flakit-panel")
        self.add_class(f"flakit-{self.name}")
        self.set(**(settings or {}))
        self._start = self.setting
        for knob in self.knobs.values():
            knob.observe(self._changed, "value")
        self._held = False
        self._render()

    def compute(self, **setting):
        raise NotImplementedError

    def draw(self, result, **setting) -> None:
        raise NotImplementedError

    def describe(self, result, **setting) -> str:
        raise NotImplementedError

    def script(self, **setting) -> str:
        raise NotImplementedError

    def when(self, knob: widgets.Widget, react: Callable[[object, object], None]) -> None:
        """Call react(old, new) when a knob has moved; other knobs that it moves add no redraw of their own.

        For use before `super().__init__`, or it would come after the redraw.
        """

        def held(change) -> None:
            was_held, self._held = self._held, True
            try:
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
        return bytes(self._picture.value)

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

    def _render(self) -> None:
        with self._redrawing:
            self._cancel_timer()
            start = time.perf_counter()
            setting = self.setting
            with _one_thread():
                self.result = self.compute(**setting)
            self.draw(self.result, **setting)
            self._picture.value = self.canvas.png()
            self.say(self.describe(self.result, **setting))
            self._drawn = time.perf_counter()
            self._cost = self._drawn - start

    def say(self, text: str) -> None:
        """Show text in the readout."""
        self._text = text
        self.readout.value = html.escape(text)

    def fail(self, error: Exception) -> None:
        """Show an error in the readout; the picture remains that of the last setting that worked."""
        self._text = f"{type(error).__name__}: {error}"
        shown = html.escape(self._text) + "<br>The picture shows the last setting that worked."
        self.readout.value = f'<div class="flakit-error">{shown}</div>'

    def _changed(self, _) -> None:
        if self._held:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a script or a test: nothing would ever fire the timer
            loop = None
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
        return bundle


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
        self._work, self._done, self._failed = work, done, failed
        self._thread, self._stop = None, threading.Event()
        self.button = widgets.Button(description=label, icon="play", layout={"width": "auto"})
        self.cancel_button = widgets.Button(description="cancel", icon="stop", disabled=True, layout={"width": "auto"})
        self.bar = widgets.IntProgress(0, 0, 1, layout={"width": "220px"})
        self.bar.add_class("flakit-progress")
        self.status = widgets.Label("")
        self.button.on_click(lambda _: self.start())
        self.cancel_button.on_click(lambda _: self.cancel())
        super().__init__([self.button, self.cancel_button, self.bar, self.status])

    def start(self) -> None:
        """Begin, unless a run is going on."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self.button.disabled, self.cancel_button.disabled = True, False
        self.bar.value, self.status.value = 0, "starting"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ask the run to stop at its next step."""
        self._stop.set()
        self.status.value = "stopping"

    def wait(self, seconds: float | None = None) -> None:
        """Block until the run is over."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _progress(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total and now - self._told < 0.1:  # a message to the browser costs as much as a small setting
            return
        self._told = now
        self.bar.max, self.bar.value = total, done
        if not self._stop.is_set():
            self.status.value = f"{done} of {total}"

    def _run(self) -> None:
        start = self._told = time.perf_counter()
        try:
            result = self._work(self._progress, self._stop.is_set)
            self._done(result)
            self.status.value = "cancelled" if self._stop.is_set() else f"done in {time.perf_counter() - start:.1f} s"
        except Exception as error:
            self.status.value = "failed"
            self._failed(error)
        finally:
            self.button.disabled, self.cancel_button.disabled = False, True
