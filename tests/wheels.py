"""Wheels with nothing in them, an index to find them in, and the build backend of a project without contents."""

import re
import zipfile
from pathlib import Path


def write(folder, name, version, requires=()):
    """An empty wheel in `folder`; returns its file name. A requirement may end in an extra's marker."""
    about = f"{re.sub('[-.]+', '_', name)}-{version}"
    extras = sorted(set(re.findall(r"extra == '(\w+)'", " ".join(requires))))
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {line}" for line in requires]
    info = f"{about}.dist-info"
    files = {
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = f"{about}-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def index(folder, packages):
    """An index as pip reads it from a folder, its address: {(name, version): requirements}."""
    for (name, version), requires in packages.items():
        page = Path(folder) / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        wheel = write(page.parent, name, version, requires)
        with page.open("a") as links:
            links.write(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>\n')
    return Path(folder).as_uri()


# --- what pip asks of a build backend; flakit's requirements stand in a file beside it -------------------------------


def build_editable(folder, config_settings=None, metadata_directory=None):
    return write(folder, "flakit", "0", Path("requires.txt").read_text().splitlines())
