"""`make notebooks`: run the notebooks and store their outputs, small and free of what only a live session can use.

python -m docs.execute            every notebook, solution and translation
python -m docs.execute 04 zh/01   those whose name starts so
"""

import base64
import io
import sys
import time

import nbformat
from PIL import Image

from docs.lessons import LESSONS, MAX_BYTES, SOLUTIONS, TRANSLATIONS, WIDGET_VIEW, name, run, starting_with


def without_live_parts(notebook):
    """Reduce a notebook to what shows without a kernel: a panel's picture instead of its view, no widget state, no
    local metadata; return it."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            is_widget = data.pop(WIDGET_VIEW, None) is not None
            if "image/png" in data:
                data["image/png"] = smaller(data["image/png"])
            elif is_widget:
                data.clear()  # the widget's repr, which tells a reader nothing
        cell.outputs = [output for output in cell.outputs if output.get("data", True)]
    return notebook


def smaller(png):
    """Return a base64 PNG with at most 256 colours, which is what figures need and about a third of the bytes.

    By maximum coverage, since median cut gives rare colours to frequent ones: a blue dot turned green."""
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    paper = Image.new("RGB", picture.size, "white")
    paper.paste(picture, mask=picture.getchannel("A") if picture.mode == "RGBA" else None)
    out = io.BytesIO()
    paper.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return min(png, base64.b64encode(out.getvalue()).decode(), key=len)


def main(prefixes):
    paths = starting_with(prefixes, LESSONS + SOLUTIONS + TRANSLATIONS)
    if not paths:
        sys.exit(f"no notebook starts with {' or '.join(prefixes)}")
    for number, path in enumerate(paths, 1):
        print(f"{number}/{len(paths)} {name(path)} ...", flush=True)
        start = time.monotonic()
        mine = path.parent if path in SOLUTIONS else None  # solutions/mine.py has what a learner has not written yet
        nbformat.write(without_live_parts(run(path, mine=mine)), path)
        size = path.stat().st_size
        print(f"    {time.monotonic() - start:.0f} s, {size // 1000} KB{' TOO LARGE' * (size >= MAX_BYTES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
