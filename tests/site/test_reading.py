"""What a reader does on the pages: searches, unfolds, answers, sorts; with a mouse or without, in either scheme."""

import io
import re

import pytest
from PIL import Image

from tests.browser.axe import serious

pytestmark = [pytest.mark.browser, pytest.mark.full]

KINDS = (
    "index",
    "search",
    "notebooks/00_start_here",
    "notebooks/05_one_infinity",
    "notebooks/15_audit_your_kernel",
    "notebooks/solutions/05_one_infinity",
    "notebooks/solutions/index",
    "notebooks/zh/00_start_here",
    "notebooks/glossary",
    "operators",
    "commands",
    "casebook",
    "results/index",
    "results/h200_speed",
    "api/operators",
    "source/flakit/ops/rwkv6/reference.py",
)


@pytest.fixture(scope="module")
def page(offline):
    page = offline.new_page()
    yield page
    page.close()


@pytest.fixture
def opened(site, page):
    def open_page(name, width=1440, height=900):
        page.set_viewport_size({"width": width, "height": height})
        page.goto((site / f"{name}.html").as_uri())
        return page

    return open_page


@pytest.mark.parametrize("name", KINDS)
def test_axe_finds_nothing_serious(opened, name):
    page = opened(name)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) == (scheme == "dark")
        only = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
        assert serious(page, **only) == {}, scheme


@pytest.mark.parametrize("width", [1440, 390])
def test_search_finds_a_word(opened, width):
    page = opened("index", width)
    if width < 1000:
        page.locator(".mobile-header label[for='__navigation']").click()
    page.locator(".sidebar-search").fill("headroom")
    page.keyboard.press("Enter")
    page.locator("p.search-summary").filter(has_text="found").wait_for()
    hits = page.locator("#search-results li a").evaluate_all("links => links.map(x => x.getAttribute('href'))")
    assert any("06_the_anchor.html" in hit for hit in hits) and any("glossary.html" in hit for hit in hits)
    page.locator("#search-results p.context").first.wait_for()
    marked = "found => found.map(each => each.querySelector('mark')?.textContent)"
    quoted = page.locator("#search-results li").evaluate_all(marked)
    assert len(quoted) > 5 and all(word and word.lower() == "headroom" for word in quoted)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "notebooks/00_start_here", "speed"])
def test_pictures_have_the_ground_of_the_page(opened, name, scheme):
    """What most of a picture is: white on a light page, as dark as a card on a dark one."""
    page = opened(name)
    page.emulate_media(color_scheme=scheme)
    picture = page.locator("article img").first
    picture.scroll_into_view_if_needed()
    picture.evaluate("image => image.decode()")
    shown = Image.open(io.BytesIO(picture.screenshot())).convert("RGB")
    _, ground = max(shown.getcolors(shown.width * shown.height))
    assert max(ground) < 50 if scheme == "dark" else min(ground) > 240, ground


CUT = """() => {
  const all = selector => Array.from(document.querySelectorAll(selector)), place = each => each.getBoundingClientRect();
  const cut = all('article :is(pre, .output, img, .flakit-player)').filter(
    each => each.scrollWidth > each.clientWidth + 1 || place(each).right > innerWidth);
  const over = all('body *').filter(
    each => getComputedStyle(each).position === 'fixed' && place(each).width > 1 && place(each).bottom > 0);
  return [cut, over].map(found => found.map(each => each.outerHTML.slice(0, 100)));
}"""


def test_a_page_on_paper_covers_and_cuts_nothing(opened):
    page = opened("notebooks/00_start_here")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 794, "height": 1123})  # A4
    try:
        page.evaluate("scrollTo(0, 2000); scrollTo(0, 1500)")  # what stands over a page that is scrolled back
        assert page.evaluate(CUT) == [[], []]
    finally:
        page.emulate_media(media="screen")


def test_only_code_that_makes_a_picture_lies_folded(opened):
    page = opened("notebooks/05_one_infinity")
    folded = page.locator("div.cell details.hide")
    assert folded.count() >= 10 and folded.evaluate_all("all => all.every(x => !x.open)")
    drawn = folded.filter(has=page.locator("pre", has_text="sketch(")).first
    code = drawn.locator("pre")
    assert not code.is_visible()
    drawn.locator("summary").focus()
    page.keyboard.press("Enter")
    assert "sketch(" in code.inner_text() and code.is_visible()
    open_code = "\n".join(page.locator("div.cell > div.cell_input").all_inner_texts())
    assert "def both_ways(r, k, v, do, w, p=0):" in open_code and "sketch(" not in open_code


def test_a_prediction_is_revealed_when_it_is_chosen(opened):
    page = opened("notebooks/05_one_infinity")
    question = page.get_by_role("group").filter(has_text="Predict.").first
    choices = question.locator("details")
    assert not choices.nth(1).locator("p").is_visible()
    choices.nth(1).locator("summary").focus()
    page.keyboard.press("Enter")
    said = choices.nth(1).locator("p")
    assert said.is_visible() and re.match(r"Right\.|No: ", said.inner_text())
    assert "(your choice)" in choices.nth(1).locator("summary").inner_text()
    choices.nth(0).locator("summary").click()
    assert not said.is_visible() and "(your choice)" not in choices.nth(0).locator("summary").inner_text()


RESTING = """async (element, begun = () => true) => {
  let top = NaN, calm = 0;
  for (let n = 0; n < 100 && calm < 10; n++) {
    await new Promise(done => setTimeout(done, 50));
    const now = element.getBoundingClientRect().top;
    calm = begun() && Math.abs(now - top) < 1 ? calm + 1 : 0;
    top = now;
  }
  return Math.round(top);
}"""
"""How far from the top of the window an element is, once it moves no more."""

OFF_THE_TOP = f"""async () => {{
  const off = [], resting = {RESTING};
  for (const link of document.querySelectorAll('.toc-tree a[href^="#"]:not([href="#"])')) {{
    scrollTo({{top: 0, behavior: 'instant'}});
    link.click();
    const top = await resting(document.getElementById(decodeURIComponent(link.hash.slice(1))));
    const end = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
    if (top < -2 || (top > 140 && !end)) off.push([link.textContent, top]);
  }}
  return off;
}}"""


@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("lesson", ["02_rwkv6_backward", "05_one_infinity", "06_the_anchor"])
def test_a_link_within_a_page_leads_to_its_heading(opened, lesson, width):
    page = opened(f"notebooks/{lesson}", width)
    links = page.locator(".toc-tree a[href^='#']:not([href='#'])").count()
    assert links >= 5
    assert page.evaluate(OFF_THE_TOP) == []


MAPS = """root => root.player.maps.map(map => {
  const ends = edges => [Math.min(...edges), Math.max(...edges)];
  const [[left, right], [top, bottom]] = [ends(map.x), ends(map.y)];
  const within = Array.from(root.querySelectorAll('.flakit-piece')).filter(piece => {
    const box = piece.getBoundingClientRect(), whole = piece.querySelector('img').getBoundingClientRect();
    return box.left - 1 <= whole.left + left * whole.width && whole.left + right * whole.width <= box.right + 1
      && box.top - 1 <= whole.top + top * whole.height && whole.top + bottom * whole.height <= box.bottom + 1;
  });
  return [map.rows, within.map(piece => Math.round(piece.getBoundingClientRect().width))];
})"""


@pytest.mark.parametrize("lesson", ["00_start_here", "04_chunk_backward", "05_one_infinity"])
def test_on_a_phone_each_map_of_a_lessons_first_picture_has_its_width(opened, lesson):
    page = opened(f"notebooks/{lesson}", 390, 844)
    player = page.locator(".flakit-player").first
    player.scroll_into_view_if_needed()
    page.locator(".flakit-live[data-frame]").first.wait_for()
    found = player.evaluate(MAPS)
    assert found and all(len(width) == 1 and width[0] >= (285 if rows > 1 else 240) for rows, width in found), found
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1440, 390])
def test_the_address_of_a_panel_leads_to_it(opened, width):
    page = opened("notebooks/05_one_infinity", width)
    address, panel = page.url, page.locator(".flakit-player").nth(2)
    name = panel.get_attribute("data-frames")
    page.goto("about:blank")
    page.goto(f"{address}#panel={name}")
    panel = page.locator(f"[data-frames='{name}']").element_handle()
    live = "() => panel.matches('.flakit-live')"
    assert -2 <= page.evaluate(f"panel => ({RESTING})(panel, {live})", panel) <= 140


def test_recorded_tables_sort_and_can_be_searched_from_the_keyboard(opened):
    page = opened("results/h200_rwkv6_gradients")
    table = page.locator("table.sortable")
    heads = [text.split()[0] for text in table.locator("th").all_inner_texts()]
    column = heads.index("l2") + 1

    def shown():
        rows = table.locator(f"tbody tr:not([hidden]) td:nth-child({column})")
        return [float(text) for text in rows.all_inner_texts()]

    before = shown()
    table.get_by_role("button", name="l2", exact=True).focus()
    page.keyboard.press("Enter")
    assert shown() == sorted(before) != before
    page.keyboard.press("Enter")
    assert shown() == sorted(before, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    page.get_by_label("show rows with").fill("bfloat16 dw")
    texts = table.locator("tbody tr:not([hidden])").all_inner_texts()
    assert 0 < len(texts) < len(before) and all("bfloat16" in text and "dw" in text for text in texts)


def test_what_is_too_wide_scrolls_in_a_box_of_its_own(opened):
    page = opened("results/h200_speed", 390, 844)
    box = page.locator(".scrolls")
    page.wait_for_function("document.querySelector('.scrolls').tabIndex === 0")
    box.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.scrolls').scrollLeft > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_formulas_are_there_without_a_script(site):
    text = (site / "notebooks" / "01_rwkv6_forward.html").read_text()
    assert text.count('<span class="katex">') > 20 and "katex.min.js" not in text
    assert 'class="katex-display"' in (site / "notebooks" / "08_delta_rule.html").read_text()
    assert len(list((site / "_static" / "katex" / "fonts").glob("*.woff2"))) >= 15
