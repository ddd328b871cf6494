"""Every page of the site, opened from its file with the network off, as a reader's browser does."""

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import pytest

from docs.lessons import LESSONS, SOLUTIONS, TRANSLATIONS, name

pytestmark = [pytest.mark.browser, pytest.mark.full]

WIDTHS = (1440, 1024, 390)
MAX_FIRST_VIEW = 1.5e6  # bytes

WIDER = """() => {
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= room && document.body.scrollWidth <= room) return [];
  const all = [...document.querySelectorAll('article *')].filter(x => x.getBoundingClientRect().right > room + 1);
  return ['page'].concat(all.slice(0, 3).map(x => x.outerHTML.slice(0, 120)));
}"""
PICTURES = """async () => {
  const copy = image => image.closest('.flakit-piece') && image.getAttribute('role') !== 'img';
  const images = [...document.images].filter(image => !copy(image));  // a picture in pieces is described once
  for (const image of images) image.loading = 'eager';
  await Promise.all(images.map(image => image.decode().catch(() => 0)));
  return images.map(image => [image.getAttribute('src'), image.naturalWidth, image.alt]);
}"""


@pytest.fixture(scope="module")
def visited(site, offline):
    """What was found on each page by its name; every page is opened once."""
    page, found = offline.new_page(), {}
    log = defaultdict(list)
    page.on("console", lambda said: log["errors"].append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: log["errors"].append(str(error)))
    page.on("requestfailed", lambda request: log["errors"].append(f"failed: {request.url}"))
    page.on("request", lambda request: log["requests"].append(request.url))
    for path in sorted(site.rglob("*.html")):
        log.clear()
        page.goto(path.as_uri(), wait_until="load")
        loaded = {url.partition("#")[0].partition("?")[0] for url in log["requests"] if url.startswith("file:")}
        scheme = "dark" if len(found) % 2 else "light"
        page.emulate_media(color_scheme=scheme)
        wider = {}
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wider[width] = page.evaluate(WIDER)
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        pictures = page.evaluate(PICTURES)
        found[path.relative_to(site).as_posix()] = SimpleNamespace(
            loaded=loaded, wider=wider, pictures=pictures, errors=list(log["errors"])
        )
    page.close()
    return found


def test_no_page_has_errors_in_its_console_or_lacks_a_file(visited):
    assert {name: seen.errors for name, seen in visited.items() if seen.errors} == {}


def test_no_page_asks_another_host(visited, offline):
    assert offline.asked == []
    assert {name for name, seen in visited.items() if not any(url.endswith("site.css") for url in seen.loaded)} == set()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(visited, width):
    assert {name: seen.wider[width] for name, seen in visited.items() if seen.wider[width]} == {}


def test_every_picture_shows_and_is_described(visited):
    pictures = [(name, *picture) for name, seen in visited.items() for picture in seen.pictures]
    assert len(pictures) > 100
    assert [(name, src) for name, src, width, alt in pictures if width < 20] == []
    assert [(name, src, alt) for name, src, width, alt in pictures if len(alt) < 8 or " at 0x" in alt] == []


def test_the_first_view_of_each_page_is_within_its_budget(visited, record_property):
    def size(url):
        return Path(url2pathname(unquote(urlsplit(url).path))).stat().st_size

    weight = {name: sum(map(size, seen.loaded)) for name, seen in visited.items()}
    heaviest = max(weight, key=weight.get)
    record_property("heaviest first view", f"{heaviest}, {weight[heaviest] / 1e6:.2f} MB")
    assert {name: bytes for name, bytes in weight.items() if bytes > MAX_FIRST_VIEW} == {}


# --- links ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """path; links: every href of it; anchors: what a link's # may name."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.anchors = path, [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        if tag == "a" and own.get("href"):
            self.links.append(own["href"])
        self.anchors |= {own[name] for name in ("id", "name") if own.get(name)}

    def target(self, link):
        """(file, anchor), or None where it leads to another host."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        file = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path.resolve()
        return file, unquote(parts.fragment)


def test_every_link_within_the_site_leads_somewhere(site, record_property):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken, elsewhere = [], set()
    for page in pages.values():
        for link in page.links:
            target = page.target(link)
            if target is None:
                elsewhere.add(link)
                continue
            file, anchor = target
            if not file.exists() or (anchor and file in pages and anchor not in pages[file].anchors):
                broken.append((page.path.relative_to(site).as_posix(), link))
    assert broken == []
    assert len(pages) > 60
    for link in sorted(elsewhere):
        record_property("leads elsewhere", link)


def test_every_lesson_and_solution_has_its_page_and_they_follow_each_other(site):
    pages = {name(path): Page(site / "notebooks" / f"{name(path)}.html") for path in LESSONS + SOLUTIONS}
    for before, after in zip(LESSONS, LESSONS[1:], strict=False):
        assert f"{name(after)}.html" in pages[name(before)].links
        assert f"{name(before)}.html" in pages[name(after)].links
    for solution in SOLUTIONS:
        assert f"{name(solution)}.html" in {link.partition("#")[0] for link in pages[solution.stem].links}
    for translation in TRANSLATIONS:
        text = (site / "notebooks" / f"{name(translation)}.html").read_text()
        assert re.search(r'<html[^>]* lang="zh"', text)
        assert "本页内容" in text and "英文页" in text
        assert re.findall("Search|On this page|Previous|>Next<|Back to top|Skip to content", text) == []
    front = Page(site / "index.html")
    assert [link for link in front.links if link.startswith("notebooks/0")] != []
