"""What is said before PyTorch is downloaded, and the way to its small build: with pip itself and indexes of our own."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from flakit import torch_build
from tests import wheels
from tests.commands import ROOT, completed

WANTED = torch_build.wanted()
CUDA = {("torch", WANTED): ["nvidia-cudnn"], ("torch", "99.0"): [], ("nvidia-cudnn", "1.0"): []}
CPU = {("torch", f"{WANTED}+cpu"): [], ("torch", "99.0+cpu"): []}


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """The addresses of an index as Linux finds it, and of one for CPUs."""
    folder = tmp_path_factory.mktemp("indexes")
    return wheels.index(folder / "all", CUDA), wheels.index(folder / "cpu", CPU)


@pytest.fixture
def set_pip(monkeypatch):
    """set_pip(index, PIP_...=...): no settings for pip but these, and nothing of a `make` that runs the tests."""

    def set_pip(index, **more):
        for name in list(os.environ):
            if name.startswith(("PIP_", "MAKE", "MFLAGS")):
                monkeypatch.delenv(name)
        for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, **more}.items():
            monkeypatch.setenv(name, value)

    return set_pip


@pytest.mark.parametrize(
    ("torch", "system", "says", "unsaid"),
    [
        (f"{WANTED}+cpu", "linux", "a build without CUDA: 2 to 3 GB", "8 GB"),
        (WANTED, "darwin", "a build without CUDA: 2 to 3 GB", "8 GB"),
        (WANTED, "linux", "the CUDA build with some twenty packages of NVIDIA's: 7 to 8 GB", "without CUDA"),
        (f"{WANTED}+cu130", "linux", "the CUDA build", "without CUDA"),
        (f"{WANTED}+rocm7.0", "linux", "2 to 3 GB with PyTorch's build for CPUs, 7 to 8 GB with the CUDA", "coming"),
        (None, "linux", "2 to 3 GB with PyTorch's build for CPUs, 7 to 8 GB with the CUDA build", "coming"),
    ],
)
def test_each_build_has_its_announcement(torch, system, says, unsaid):
    said = torch_build.announcement(torch, system)
    assert says in said and unsaid not in said
    assert ("PIP_EXTRA_INDEX_URL set to the CPU index" in said) == ("8 GB" in said)
    assert torch is None or "coming" not in said or torch in said


def test_pip_tells_what_it_would_take_of_the_version_wanted(indexes, set_pip):
    main, cpu = indexes
    set_pip(main)
    assert torch_build.coming() == WANTED
    set_pip(main, PIP_EXTRA_INDEX_URL=cpu)
    assert torch_build.coming() == f"{WANTED}+cpu"


def test_without_the_version_wanted_or_an_index_it_cannot_tell(set_pip, tmp_path):
    set_pip(wheels.index(tmp_path, {("torch", "1.0"): []}))
    assert torch_build.coming() is None
    set_pip((tmp_path / "none").as_uri())
    assert torch_build.coming() is None


@pytest.mark.parametrize(("installed", "here"), [(f"{WANTED}+cpu", f"{WANTED}+cpu"), ("1.0", None), (None, None)])
def test_nothing_comes_where_the_version_wanted_is_installed(monkeypatch, installed, here):
    def version(package):
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(torch_build, "version", version)
    assert torch_build.here() == here


@pytest.mark.full
def test_make_says_which_build_is_coming_and_hands_the_index_on_to_pip(indexes, set_pip, tmp_path):
    """A project without contents that needs torch, in an environment that has pip alone."""
    (tmp_path / "flakit").mkdir()
    for name in ("Makefile", "constraints.txt", "flakit/torch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(wheels.__file__, tmp_path / "wheels.py")
    (tmp_path / "requires.txt").write_text("torch>=2.10; extra == 'lab'\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "wheels"\nbackend-path = ["."]\n'
    )
    (tmp_path / "pip").mkdir()
    # Found, not imported: below Python 3.12 setuptools cannot be imported after pip, and inductor imports it.
    (tmp_path / "pip" / "pip").symlink_to(distribution("pip").locate_file("pip"), target_is_directory=True)
    completed(sys.executable, "-m", "venv", "--without-pip", ".venv", cwd=tmp_path, check=True)
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "pip.pth").write_text(str(tmp_path / "pip"))

    def make_lab(*arguments, **variables):
        """What `make` says until all is installed, and the version of torch it has installed then."""
        (tmp_path / ".venv" / ".lab").unlink(missing_ok=True)
        for folder in packages.glob("*.dist-info"):
            shutil.rmtree(folder)
        set_pip(main, **variables)
        done = completed("make", ".venv/.lab", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, {folder.name.removesuffix(".dist-info") for folder in packages.glob("*.dist-info")}

    main, cpu = indexes
    said, installed = make_lab()
    assert installed == {"flakit-0", f"torch-{WANTED}", "nvidia_cudnn-1.0"}
    assert 0 < said.index("the CUDA build") < said.index("PIP_EXTRA_INDEX_URL set to") < said.index("pip install")
    for arguments, variables in (([f"PIP_EXTRA_INDEX_URL={cpu}"], {}), ([], {"PIP_EXTRA_INDEX_URL": cpu})):
        said, installed = make_lab(*arguments, **variables)
        assert installed == {"flakit-0", f"torch-{WANTED}+cpu"}
        assert 0 < said.index("a build without CUDA: 2 to 3 GB") < said.index("pip install")
    said = completed("make", "--dry-run", ".venv/.test", cwd=tmp_path).stdout
    assert 0 < said.index("flakit/torch_build.py") < said.index("pip install")
