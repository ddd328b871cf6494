"""Driving a real JupyterLab: a server with folders of its own, and a notebook as a person at the keyboard sees it."""

import base64
import contextlib
import io
import os
import shutil
import statistics
import time

from PIL import Image
from playwright.sync_api import sync_playwright

from flakit import lab as start
from tests.commands import ROOT
from tests.serving import serving

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

# Notes when a key goes down, and when a panel's new picture is decoded and then painted.
WATCH = """
window.flakit = {keys: [], redraws: [], painted: []};
const note = times => times.push(performance.now());
const seen = image => image.decode().then(() => {
  note(window.flakit.redraws);
  requestAnimationFrame(() => setTimeout(() => note(window.flakit.painted)));
}, () => {});
new MutationObserver(changes => {
  for (const change of changes) if (change.target.matches('img.flakit-picture')) seen(change.target);
}).observe(document, {subtree: true, attributes: true, attributeFilter: ['src']});
document.addEventListener('keydown', () => note(window.flakit.keys), true);
"""

# A notebook that is open has a kernel that answers, or, which may take a little, a dialog that asks for one.
ASKS_OR_ANSWERS = """() => {
  const session = window.jupyterapp.shell.currentWidget.sessionContext;
  if (!window.flakit.asked && session.session) {
    window.flakit.asked = true;
    session.session.kernel.info.then(() => {window.flakit.answered = true});
  }
  return document.querySelector('.jp-Dialog') ? 'asks' : window.flakit.answered ? 'answers' : false;
}"""

# Asked before the kernel has answered for the first time, JupyterLab may say that it has run all cells, and run none.
RUN_ALL = """() => {
  window.flakit.run = 'running';
  const session = window.jupyterapp.shell.currentWidget.sessionContext;
  session.ready.then(() => session.session.kernel.info)
    .then(() => window.jupyterapp.commands.execute('notebook:run-all-cells'))
    .then(() => {window.flakit.run = 'done'}, error => {window.flakit.run = String(error)});
}"""

LEFT_OUT = """() => Array.from(window.jupyterapp.shell.currentWidget.content.model.cells).filter(
  cell => cell.type === 'code' && cell.sharedModel.getSource().trim() && !cell.executionCount
).map(cell => cell.sharedModel.getSource())"""

ERRORS = """() => Array.from(window.jupyterapp.shell.currentWidget.content.model.cells).flatMap(
  cell => cell.type === 'code' ? cell.toJSON().outputs.filter(o => o.output_type === 'error') : []
).map(o => o.ename + ': ' + o.evalue)"""

STILL = """quiet => {
  const since = Math.max(0, window.flakit.since || 0, ...window.flakit.redraws);
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  return kernel.status === 'idle' && performance.now() - since > quiet;
}"""

BLOB = """async image => {
  const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer());
  return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(''));
}"""


@contextlib.contextmanager
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


# For a JupyterLab in which many notebooks run: kernels that start at once.
FORKS = ("--AsyncMappingKernelManager.kernel_manager_class=tests.browser.kernels.ForkedServerKernels",)


@contextlib.contextmanager
def jupyterlab(folder, home, env, more=()):
    """Serve `folder` as `make lab` does, but without a token (tests only); yield its address.

    more: flags that `make lab` does not give.
    """
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "IPYTHONDIR": home / "ipython",
        "MPLCONFIGDIR": home / "matplotlib",
    }
    env = env | {name: str(path) for name, path in folders.items()} | {"PYTHONPATH": str(ROOT)}
    flags = ("--no-browser", "--port=0", "--IdentityProvider.token=", "--expose-app-in-browser", *more)
    with serving(start.jupyterlab(folder, start.FIRST, flags), cwd=folder, env=env, home=home) as (url, *_):
        yield url


class Notebook:
    """One notebook, open in JupyterLab in a workspace of its own."""

    def __init__(self, page, url, name, workspace):
        self.page = page
        page.add_init_script(WATCH)
        page.goto(f"{url}/lab/workspaces/{workspace}/tree/{name}?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=90_000, state="attached")
        if page.wait_for_function(ASKS_OR_ANSWERS, timeout=90_000).json_value() == "asks":
            page.get_by_role("button", name="Select Kernel").click()

    def run_all(self, seconds=300):
        """Run all cells as the menu does and return self; fails with the errors that the cells show."""
        self.page.evaluate(RUN_ALL)
        self.page.wait_for_function("() => window.flakit.run !== 'running'", timeout=seconds * 1000, polling=200)
        assert self.page.evaluate("() => window.flakit.run") == "done"
        assert self.page.evaluate(ERRORS) == []
        assert self.page.evaluate(LEFT_OUT) == []
        return self

    def panel(self, name):
        """The first panel of class `flakit-<name>` ("panel": of any), in view, its picture drawn."""
        panel = Panel(self.page, self.page.locator(f".jp-OutputArea .flakit-{name}").first)
        panel.root.locator("img.flakit-picture").first.wait_for(timeout=30_000)
        panel.root.scroll_into_view_if_needed()
        panel.settle()
        return panel


class Panel:
    """A panel by what a person has: its sliders' names, its readout, its picture."""

    def __init__(self, page, root):
        self.page = page
        self.root = root

    def sliders(self):
        return self.root.locator(".widget-hslider")

    def focus(self, slider=None):
        """Put the keyboard on the slider with this name, or on the first one."""
        rows = self.sliders()
        if slider is not None:
            rows = rows.filter(has=self.page.get_by_text(slider, exact=True))
        assert rows.count(), f"no slider named {slider!r} among {self.sliders().all_inner_texts()}"
        rows.first.locator(".noUi-handle").focus()

    def choose(self, knob, option):
        """Pick an option from the drop-down list with this name, and wait for the redraw."""
        rows = self.root.locator(".widget-dropdown").filter(has=self.page.get_by_text(knob, exact=True))
        choice = rows.first.locator("select")
        if choice.evaluate("choice => choice.selectedOptions[0].label") == option:
            return  # it stands there already, and nothing would be drawn anew
        self.forget()
        choice.select_option(label=option)
        self.redrawn()

    def redrawn(self):
        """Wait until something has been drawn anew since `forget`, and the last redraw is over."""
        self.page.wait_for_function("() => window.flakit.redraws.length > 0", timeout=60_000)
        self.settle()

    def press(self, key, times=1, pause=450):
        """Press a key `times` times, `pause` ms apart, and wait until the last redraw is over."""
        for _ in range(times):
            self.page.keyboard.press(key)
            self.page.wait_for_timeout(pause)
        self.settle()

    def hold(self, key, seconds, repeat=33):
        """Hold a key down as a keyboard repeats it; returns the ms between its release and the last redraw."""
        self.forget()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.page.keyboard.down(key)
            self.page.wait_for_timeout(repeat)
        self.page.keyboard.up(key)
        self.settle()
        keys, redraws = self._times()
        assert redraws, f"holding {key} redrew nothing"
        return max(0.0, redraws[-1] - keys[-1])

    def settle(self, quiet=250, seconds=30):
        """Wait until the kernel has nothing to do and no redraw has come for `quiet` ms."""
        self.page.evaluate("() => {window.flakit.since = performance.now()}")
        self.page.wait_for_function(STILL, arg=quiet, timeout=seconds * 1000, polling=50)

    def readout(self):
        return self.root.locator(".flakit-readout").first.text_content()

    def picture(self):
        """The picture's PNG as a PIL image."""
        encoded = self.root.locator("img.flakit-picture").first.evaluate(BLOB)
        return Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")

    def forget(self):
        """Start counting keys and redraws anew."""
        self.page.evaluate("() => {window.flakit.keys = []; window.flakit.redraws = []}")

    def redraws(self):
        return len(self._times()[1])

    def latencies(self):
        """For each key press that redrew: ms from the key to the last redraw before the next key."""
        keys, redraws = self._times()
        between = [[t for t in redraws if key < t < later] for key, later in zip(keys, keys[1:] + [1e18], strict=True)]
        return [times[-1] - key for key, times in zip(keys, between, strict=True) if times]

    def _times(self):
        return self.page.evaluate("() => [window.flakit.keys, window.flakit.redraws]")


def summary(latencies):
    ordered = sorted(latencies)
    return {
        "steps": len(ordered),
        "median_ms": round(statistics.median(ordered), 1),
        "p90_ms": round(ordered[int(0.9 * (len(ordered) - 1))], 1),
    }
