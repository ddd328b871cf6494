"""`make notebooks`: run the notebooks and store their outputs, small and free of what only a live session can use.

python -m tests.notebooks.execute            every notebook and solution
python -m tests.notebooks.execute 04 05      those whose name starts so
"""

import sys
import time

import nbformat

from tests.notebooks.running import LESSONS, MAX_BYTES, SOLUTIONS, WIDGET_VIEW, name, read, run


def without_live_parts(notebook):
    """Keep what shows without a kernel: a panel's picture instead of its view, no widget state, no local metadata."""
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
            if output.get("data", {}).pop(WIDGET_VIEW, None) and "image/png" not in output.data:
                output.data.clear()  # a widget without a picture leaves its repr, which tells a reader nothing
        cell.outputs = [output for output in cell.outputs if output.get("data", True)]
    return notebook


def main(prefixes):
    paths = [p for p in LESSONS + SOLUTIONS if not prefixes or p.name.startswith(tuple(prefixes))]
    if not paths:
        sys.exit(f"no notebook starts with {' or '.join(prefixes)}")
    for number, path in enumerate(paths, 1):
        print(f"{number}/{len(paths)} {name(path)} ... ", end="", flush=True)
        start = time.monotonic()
        nbformat.write(without_live_parts(run(read(path), path)), path)
        size = path.stat().st_size
        print(f"{time.monotonic() - start:.0f} s, {size // 1000} KB{' TOO LARGE' * (size >= MAX_BYTES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
