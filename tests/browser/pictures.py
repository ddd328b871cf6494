"""Remake the pictures of README and docs: python -m tests.browser.pictures [decay_slider.webp …]

Panels as JupyterLab shows them, and one as a page shows it that computes by itself.
"""

import base64
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageOps

from docs.execute import smaller
from docs.lessons import NOTEBOOKS, kernel_environment
from tests.browser import lab

FOLDER = NOTEBOOKS / "images"


def past_the_onset(panel):
    panel.focus("decay")
    while "broken" not in panel.readout():
        panel.press("ArrowRight", pause=50)
    panel.press("ArrowRight", times=2)


def in_the_middle(panel):
    panel.focus("time t")
    panel.press("ArrowRight", times=7)


def across_the_onset(panel):
    """One picture a stop: up to the first NaN, on to where all is broken, and back."""
    panel.focus("decay")
    panel.press("ArrowLeft", times=5)
    for key, times in (("ArrowRight", 10), ("ArrowLeft", 10)):
        for _ in range(times):
            yield panel.root.screenshot()
            panel.press(key)


PICTURES = {
    "decay_slider.webp": ("00_start_here.ipynb", "sketch-broken", across_the_onset),
    "decay_slider_dark.webp": ("00_start_here.ipynb", "sketch-broken", across_the_onset),
    "decay_explorer.png": ("05_one_infinity.ipynb", "decay-explorer", past_the_onset),
    "state_stepper.png": ("01_rwkv6_forward.ipynb", "state-stepper", in_the_middle),
}


DARK_THEME = "() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})"
PAGE = "computing_page.webp"


def in_a_page(browser, path):
    """The first panel on a page that was opened as a file: begun to compute, over the onset and back."""
    from docs import computed
    from tests.site.test_compute import Page, write

    with tempfile.TemporaryDirectory() as home:
        models, folder = Path(home) / "models", Path(home) / "site"
        if why := computed.build(models):
            sys.exit(f"pages do not compute: {why}")
        write(folder, models)
        tab = browser.new_page(viewport={"width": 900, "height": 1000})
        tab.goto((folder / "sketch.html").as_uri())
        tab.locator(".flakit-live[data-frame]").first.wait_for()
        page = Page(tab)
        film(computing(page), path)
        tab.close()


def computing(page):
    yield page.root.screenshot()
    page.here()
    slider = page.root.locator(".flakit-computed input[type=range]").first
    slider.focus()
    steps = 0
    while "is NaN" not in page.readout and steps < 60:
        yield page.root.screenshot()
        page.page.keyboard.press("ArrowRight")
        page.done()
        steps += 1
    for _ in range(steps):
        yield page.root.screenshot()
        page.page.keyboard.press("ArrowLeft")
        page.done()
    yield page.root.screenshot()


def film(shots, path):
    """Screenshots as one moving picture, which begins again at its end; it rests at both ends and where it breaks."""
    frames = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    turn = len(frames) // 2
    long = {0: 1500, turn: 3000}
    times = [long.get(n, 500 if n < turn else 150) for n in range(len(frames))]
    width, height = (max(sizes) for sizes in zip(*(frame.size for frame in frames), strict=True))
    frames = [ImageOps.expand(x, (0, 0, width - x.width, height - x.height), x.getpixel((0, 0))) for x in frames]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, lossless=True, method=6)


def main():
    FOLDER.mkdir(exist_ok=True)
    asked = set(sys.argv[1:] or (*PICTURES, PAGE))
    if PAGE in asked:
        with lab.chromium() as browser:
            in_a_page(browser, FOLDER / PAGE)
        print(PAGE, f"{(FOLDER / PAGE).stat().st_size // 1000} KB")
    if asked <= {PAGE}:
        return
    home = Path(tempfile.mkdtemp())
    served = shutil.copytree(NOTEBOOKS, home / "notebooks")
    with lab.chromium() as browser, lab.jupyterlab(served, home, kernel_environment()) as url:
        for name, (notebook, panel, move) in PICTURES.items():
            if name not in asked:
                continue
            page = browser.new_page(viewport={"width": 1400, "height": 1200})
            shown = lab.Notebook(page, url, notebook, workspace=panel).run_all().panel(panel)
            if "_dark" in name:
                page.evaluate(DARK_THEME)
                page.locator('[data-jp-theme-light="false"]').first.wait_for(state="attached")
                page.wait_for_timeout(1000)  # the style of a theme arrives after its name
            if name.endswith(".webp"):
                film(move(shown), FOLDER / name)
            else:
                move(shown)
                page.mouse.click(5, 5)  # the slider lets go of its focus
                png = smaller(base64.b64encode(shown.root.screenshot()).decode())
                (FOLDER / name).write_bytes(base64.b64decode(png))
            print(name, f"{(FOLDER / name).stat().st_size // 1000} KB")
            page.close()


if __name__ == "__main__":
    main()
