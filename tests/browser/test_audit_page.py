"""The page of `flakit audit --html`, opened in a browser from its file: it is whole by itself, and its figures show."""

import pytest

import flakit
from tests.instruments.kernels import WRONG

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    op, kernel = WRONG["bonus dropped on one token"]
    path = tmp_path_factory.mktemp("audit") / "report.html"
    flakit.audit(kernel, op, only=["truth", "repeat", "packed"]).write_html(path)
    return path


def test_page_is_self_contained_and_shows_every_verdict(report, page, tmp_path):
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == [] and errors == []
    rows = page.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [
        ["truth", "fail"],
        ["repeat", "pass"],
        ["packed", "not supported"],
    ]
    images = page.evaluate("Array.from(document.images).map(x => [x.naturalWidth, x.alt])")
    assert len(images) == 2 and all(width > 300 and len(alt) > 20 for width, alt in images)
    page.locator("tbody a").first.click()
    page.locator("summary").first.click()
    assert "import torch" in page.locator("pre").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.screenshot(path=tmp_path / "page.png", full_page=True)
