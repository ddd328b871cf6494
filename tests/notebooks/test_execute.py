"""What `make notebooks` leaves of an output."""

import base64
import io

import nbformat.v4
import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from docs.execute import smaller, without_live_parts
from docs.lessons import WIDGET_VIEW

pytestmark = pytest.mark.notebook


def encoded(picture):
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return base64.b64encode(out.getvalue()).decode()


def decoded(png):
    return Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")


def test_live_parts_go_and_pictures_stay():
    view, picture = {WIDGET_VIEW: {"model_id": "1"}}, encoded(Image.new("RGB", (8, 8), "red"))
    cell = nbformat.v4.new_code_cell("panel", metadata={"execution": {"iopub.status.busy": "now"}, "tags": ["kept"]})
    cell.outputs = [
        nbformat.v4.new_output("display_data", {**view, "text/plain": "panel: finite", "image/png": picture}),
        nbformat.v4.new_output("display_data", {**view, "text/plain": "VBox(children=())"}),
        nbformat.v4.new_output("stream", text="printed"),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    without_live_parts(notebook)
    assert (set(notebook.metadata), cell.metadata) == ({"kernelspec", "language_info"}, {"tags": ["kept"]})
    shown, printed = cell.outputs
    assert (shown.data["text/plain"], printed.text) == ("panel: finite", "printed")
    assert decoded(shown.data["image/png"]).getpixel((3, 3)) == (255, 0, 0)


def test_smaller_keeps_the_picture():
    busy = Image.radial_gradient("L").convert("RGB")
    png = encoded(busy)
    assert len(smaller(png)) < len(png)
    worst = max(abs(a - b) for a, b in zip(decoded(smaller(png)).tobytes(), busy.tobytes(), strict=True))
    assert worst <= 2  # of 255


def test_smaller_puts_transparent_pictures_on_white():
    assert decoded(smaller(encoded(Image.new("RGBA", (900, 900), (0, 0, 0, 0))))).getpixel((0, 0)) == (255, 255, 255)


def test_smaller_never_grows():
    tiny = encoded(Image.new("RGB", (1, 1)))
    assert len(smaller(tiny)) <= len(tiny)


def test_a_rare_colour_stays():
    """A dot on a map: median cut makes it green."""
    blue, ramp = (0, 114, 178), colormaps["PRGn"](np.linspace(0, 1, 300))[:, :3] * 255
    pixels = (ramp + np.arange(200)[:, None, None] % 4).clip(0, 255).astype(np.uint8)
    pixels[5:9, 5:9] = blue
    kept = decoded(smaller(encoded(Image.fromarray(pixels))))
    assert np.abs(np.subtract(kept.getpixel((7, 7)), blue)).max() < 8
    assert np.abs(np.subtract(np.asarray(kept, int), pixels)).max() < 8
