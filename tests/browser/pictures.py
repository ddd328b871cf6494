"""Remake the README's pictures, panels as JupyterLab shows them: python -m tests.browser.pictures"""

import shutil
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import lab
from tests.notebooks.running import NOTEBOOKS, kernel_environment

FOLDER = NOTEBOOKS / "images"


def past_the_onset(panel):
    panel.focus("decay")
    while "broken" not in panel.readout():
        panel.press("ArrowRight", pause=50)
    panel.press("ArrowRight", times=2)


def in_the_middle(panel):
    panel.focus("time t")
    panel.press("ArrowRight", times=7)


PICTURES = {
    "decay_explorer.png": ("04_decay_blowup.ipynb", "decay-explorer", past_the_onset),
    "state_stepper.png": ("01_rwkv6_forward.ipynb", "state-stepper", in_the_middle),
}


def main():
    FOLDER.mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp())
    served = shutil.copytree(NOTEBOOKS, home / "notebooks")
    with lab.chromium() as browser, lab.jupyterlab(served, home, kernel_environment()) as url:
        for name, (notebook, panel, move) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1400, "height": 1200})
            opened = lab.Notebook(page, url, notebook, workspace=panel)
            opened.run_all()
            shown = opened.panel(panel)
            move(shown)
            page.mouse.click(5, 5)  # the slider lets go of its focus
            shown.root.screenshot(path=FOLDER / name)
            picture = Image.open(FOLDER / name).convert("RGB").quantize(256, dither=Image.Dither.NONE)
            picture.save(FOLDER / name, optimize=True)
            print(name, picture.size, f"{(FOLDER / name).stat().st_size // 1000} KB")
            page.close()


if __name__ == "__main__":
    main()
