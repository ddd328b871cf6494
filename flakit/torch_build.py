"""Report which build of PyTorch pip will install, before the download: `python flakit/torch_build.py`.

On an ordinary Linux machine pip installs the CUDA build with NVIDIA's packages, several times the size of the build for
CPUs. The version names the build, 2.13.0+cpu or 2.13.0+cu130; on Linux a version without a suffix is a CUDA build. This
module imports only the standard library, because nothing else is installed yet.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SMALL, LARGE = "2 to 3 GB", "7 to 8 GB"
"""Disk space of what `make lab` installs and of pip's cache, with PyTorch's CPU build and with a CUDA build.

Measured with torch 2.13.0: 2.2 and 5.1 GB in .venv, 0.6 and 2.8 GB of downloads.
"""

CPU_INDEX = "PIP_EXTRA_INDEX_URL set to the CPU index that PyTorch's installation page names"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def wanted() -> str:
    """Return the version of PyTorch pinned in constraints.txt."""
    return re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.M).group(1)


def here() -> str | None:
    """Return the installed version with its suffix, or None if PyTorch is missing or is not the pinned version."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    return installed if installed.partition("+")[0] == wanted() else None


def coming(seconds: float = 60) -> str | None:
    """Return the pinned version as pip would install it, with its suffix, or None if pip does not list it in `seconds`.

    A dry run of pip would report more, but if an index serves no metadata, it downloads gigabytes."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=True
        )
    except subprocess.SubprocessError:
        return None
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.M)  # pip lists its preferred build first
    builds = [v for v in listed.group(1).split(", ") if v.partition("+")[0] == wanted()] if listed else []
    return builds[0] if builds else None


def announcement(torch: str | None, system: str = sys.platform) -> str:
    """Return the message before the download: the build, its size, and how to install the small build instead.

    torch: the version with its suffix, None if unknown. system: as `sys.platform`."""
    build = "" if torch is None else torch.partition("+")[2]
    if build == "cpu" or (torch and not build and system != "linux"):
        return f"PyTorch {torch} is coming, a build without CUDA: {SMALL} on disk in all"
    if torch and re.fullmatch(r"(cu\d+)?", build):
        which = (
            f"PyTorch {torch} is coming, the CUDA build with some twenty packages of NVIDIA's: {LARGE} on disk in all"
        )
    else:
        which = (
            f"on disk: {SMALL} with PyTorch's build for CPUs, {LARGE} with the CUDA build that Linux gets by default"
        )
    return (
        f"{which}\n   Without an NVIDIA GPU the build for CPUs does all that the other does, in {SMALL}.\n"
        f"   To get it, stop with Ctrl-C and start again with {CPU_INDEX}"
    )


if __name__ == "__main__":
    print(f"   PyTorch {here()} is here already" if here() else f"   {announcement(coming())}")
