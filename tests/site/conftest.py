"""The site, built once for all of a run's tests, and a browser that opens its files without any network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.browser.conftest import chromium  # noqa: F401

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "sparse" / "site"


@pytest.fixture(scope="session")
def site():
    """The folder of the site, with few frames of each panel. Processes take turns: the first one builds."""
    pytest.importorskip("sphinx", reason="the extra `site` is not installed: make test-all installs it")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    stamp = ROOT / "build" / "tested"
    stamp.parent.mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "site.lock"):
        if not stamp.exists() or stamp.read_text() != run:
            done = subprocess.run(
                [sys.executable, "-m", "docs.build"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                env={name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | {"FLAKIT_SPARSE": "1"},
            )
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
            print(done.stdout)
            stamp.write_text(run)
    return SITE


@pytest.fixture(scope="module")
def offline(chromium):  # noqa: F811
    """A browser that has no network; each request but for a file is noted in `offline.asked`, and refused."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_offline(True)
    context.asked = []

    def refuse(route):
        context.asked.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith(("file:", "data:", "blob:")), refuse)
    yield context
    context.close()
