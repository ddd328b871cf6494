"""The site, built once for all of a run's tests, and a browser that opens its files without any network."""

import os
import sys

import pytest
from filelock import FileLock

from tests.browser.conftest import chromium  # noqa: F401
from tests.commands import ROOT, completed

SITE = ROOT / "build" / "sparse" / "site"


@pytest.fixture(scope="session")
def folder_of_the_run(tmp_path_factory):
    """A folder that all processes of a run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def site():
    """The folder of the site, with few frames of each panel. Processes take turns: the first one builds."""
    pytest.importorskip("sphinx", reason="the extra `site` is not installed: make test-all installs it")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    stamp = ROOT / "build" / "tested"
    stamp.parent.mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "site.lock"):
        if not stamp.exists() or stamp.read_text() != run:
            env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | {"FLAKIT_SPARSE": "1"}
            done = completed(sys.executable, "-m", "docs.build", env=env)
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


@pytest.fixture
def open_offline(chromium):  # noqa: F811
    """open_offline(address) -> a page with a player; fails where it has an error or asks for more than files.

    prepare: is called with the page before it is opened. options: of the browser's context.
    """
    contexts, wrong = [], []

    def open_page(address, prepare=lambda page: None, **options):
        context = chromium.new_context(**options)
        context.set_offline(True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        local = ("file:", "data:", "blob:")
        page.on("request", lambda sent: sent.url.startswith(local) or wrong.append(f"asked for {sent.url}"))
        prepare(page)
        page.goto(address)
        page.locator(".flakit-live[data-frame]").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
