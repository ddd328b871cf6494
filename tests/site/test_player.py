"""Panels played without a kernel, beside the live ones: pages opened from files, in a browser without a network."""

import base64
import html
import io
import re
import shutil

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image, ImageChops

from docs.frames import WORDS
from flakit.figures.canvas import Cell
from flakit.panels import base
from flakit.panels.base import MILLISECONDS
from flakit.panels.knobs import stops_of
from tests.browser.lab import WATCH
from tests.site.players import PAINTED, STATIC, faults, live, recorded, write_page

pytestmark = [pytest.mark.browser, pytest.mark.full]

PANELS = {
    "decay-explorer": ('decay_explorer(decay=-1.33, scheme="none", show=["decay"])', "decay", r"\bbroken\b"),
    "state-stepper": ('state_stepper("rwkv6", T=8, t=2, show=("t",))', "time t", "token 5"),
    "infinity": ("infinity(decay=-10.5, step=8)", "decay", "rows of dr are lost"),
    "gradient-comparer": (
        'gradient_comparer(source="recorded", profile="constant", decay=-4.0, T=256, show=["decay"])',
        "decay",
        r"running sums \d\.\de\+0[2-9]",
    ),
    "phase-diagram": ('phase_diagram(scheme="none", against="T", show=["scheme"])', "anchor", "settings"),
    "masking": ('case("masking", w=-2.7, mask="where", show=["w", "mask"])', "decay w", "is NaN"),
    "padding": ('case("padding", ["T", "gate"], T=120, gate=-1.86)', "length T", "."),
    "decay-gradient": ('case("decay_gradient", profile="logsigmoid", show=["decay"])', "decay", "."),
    "sketch-broken": ('sketch("broken", decay=-1.3)', "decay", "NaN|lost|broken"),
}
"""A panel of each kind, its slider (of one its list), and what the readout says past the onset."""

SHARP = "sketch-broken", "masking"
"""Those whose pictures have two dots for each of the page's pixels, as on the site; they take twice as long."""


@pytest.fixture(scope="module")
def folder(folder_of_the_run):
    """A site for pages of players."""
    folder = folder_of_the_run / "players"
    with FileLock(folder_of_the_run / "players.lock"):
        if not folder.exists():
            shutil.copytree(STATIC, folder / "_static")
    return folder


def page_of(folder, *names):
    """The address of a page with these players, recorded where they are not yet; fewer frames than a real one has."""
    page = folder / f"{'-and-'.join(names)}.html"
    write_page(page, [player_of(folder, name) for name in names], ["player"])
    return page.as_uri()


def player_of(folder, name):
    """The HTML of a panel's player."""
    part = folder / f"{name}.part"
    with FileLock(folder / f"{name}.lock"):
        if not part.exists():
            most = 48 if name == "gradient-comparer" else 16  # whose onset lies far from where it starts
            limits = {"FRAMES": most, "STOPS": 24, "SECOND": 3, "PRESET": 4, "SHARP": 2 if name in SHARP else 1}
            html, _ = recorded(live(PANELS[name][0]), folder / "_static" / "frames", f"lesson-{name}", **limits)
            part.write_text(html, encoding="utf-8")
    return part.read_text(encoding="utf-8")


@pytest.fixture
def open_player(open_offline, folder):
    """open_player("masking") -> Played, the first of several.

    held: the page's clock stands still, and goes on by `later` alone, however slow the machine is.
    """

    def open_page(*names, held=False, **options):
        def prepare(page):
            page.add_init_script(WATCH)
            if held:
                page.clock.install(time=0)
                page.clock.pause_at(1000)

        options = {"viewport": {"width": 1024, "height": 900}} | options
        page = open_offline(page_of(folder, *names), prepare, **options)
        return Played(page, page.locator(".flakit-player").first)

    return open_page


class Played:
    """A player by what a person has."""

    def __init__(self, page, root):
        self.page, self.root = page, root

    def knob(self, label):
        return self.root.get_by_label(label, exact=True)

    def press(self, key, times=1):
        for _ in range(times):
            self.page.keyboard.press(key)
            self.settle()

    def settle(self):
        """Wait until the frame that was asked for is the one that is seen."""
        self.page.wait_for_function("root => root.player.frame == root.dataset.frame", arg=self.root.element_handle())
        self.page.wait_for_timeout(30)

    def later(self, milliseconds):
        """Let a clock that is held go on."""
        self.page.clock.run_for(milliseconds)
        self.settle()

    def button(self, name):
        self.root.get_by_role("button", name=name, exact=True).click()
        self.settle()

    @property
    def image(self):
        return self.root.locator(".flakit-picture-box img[role=img]")  # of a picture in pieces, not the copies

    @property
    def readout(self):
        return self.root.locator(".flakit-readout").inner_text()

    @property
    def strip(self):
        return self.root.locator(".flakit-strip").inner_text()

    @property
    def frame(self):
        return int(self.root.get_attribute("data-frame"))

    def picture(self, folder):
        """The file that is shown, decoded."""
        assert self.image.evaluate("image => image.complete && image.naturalWidth > 0")
        source = self.image.evaluate("image => image.currentSrc")
        if source.startswith("data:image/webp;base64,"):  # the first one, which comes with the page
            return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB")
        assert source.startswith(folder.as_uri()) and source.endswith(".webp")
        return Image.open(folder / source.removeprefix(f"{folder.as_uri()}/")).convert("RGB")

    def setting(self, panel):
        """What the knobs on view say, as values of the live panel's."""
        found = {}
        for name in panel.named_on_view:
            knob, shown = panel.knobs[name], self.root.get_by_label(panel.knobs[name].description, exact=True)
            if shown.get_attribute("type") == "range":
                labels = {str(option): value for option, value in self.options(knob)}
                found[name] = labels[shown.get_attribute("aria-valuetext")]
            else:
                labels = dict(self.options(knob))
                found[name] = labels[shown.evaluate("list => list.selectedOptions[0].label")]
        return found

    @staticmethod
    def options(knob):
        if not hasattr(knob, "options"):
            return [(str(value), value) for value in stops_of(knob)]
        return [each if isinstance(each, tuple) else (str(each), each) for each in knob.options]

    def same_as(self, panel, folder):
        """Words, alt text and picture are those of the live panel."""
        same = "(readout, html) => {const made = document.createElement('div'); made.innerHTML = html; "
        same += "return made.textContent === readout.textContent}"
        assert self.root.locator(".flakit-readout").evaluate(same, panel.readout.value), (self.readout, panel.text)
        assert self.image.get_attribute("alt") == self.image.get_attribute("aria-label") == panel.picture.alt
        shown = self.picture(folder)
        wide, high = (int(self.image.get_attribute(each)) for each in ("width", "height"))
        assert (wide, high) == panel.canvas.pixels and shown.size in ((wide, high), (2 * wide, 2 * high))
        drawn = Image.open(io.BytesIO(panel.canvas.png(shown.width // wide))).convert("RGB")
        assert max(most for _, most in ImageChops.difference(shown, drawn).getextrema()) <= 4


def moved(panel, setting):
    """The live panel, moved to a setting as a person does."""
    for name, value in setting.items():
        if panel.knobs[name].value != value:
            panel.move(name, value)
    return panel


@pytest.mark.parametrize("name", PANELS)
def test_a_slider_moved_past_its_onset_shows_what_the_live_panel_shows(name, open_player, folder, record_property):
    code, label, past = PANELS[name]
    player, panel = open_player(name), live(code)
    assert panel.text.split("\n")[-1] in html.unescape(player.root.locator(".flakit-readout").text_content())
    knob, first = player.knob(label), player.readout
    knob.focus()
    seen = {player.frame}
    for _ in range(30):
        player.press("ArrowDown" if name == "phase-diagram" else "ArrowRight")
        seen.add(player.frame)
        if re.search(past, player.readout) and player.readout != first and len(seen) > 3:
            break
    assert re.search(past, player.readout) and player.readout != first
    player.same_as(moved(panel, player.setting(panel)), folder)
    if name != "phase-diagram":
        player.page.evaluate("() => {window.flakit.keys = []; window.flakit.painted = []}")
        for key in ["ArrowLeft", "ArrowRight"] * 5:
            player.page.keyboard.press(key)
            player.page.wait_for_timeout(120)
        keys, painted = player.page.evaluate("() => [window.flakit.keys, window.flakit.painted]")
        times = [min((t - key for t in painted if t > key), default=1e9) for key in keys]
        record_property(f"{name}, from key to paint, median ms", round(sorted(times)[len(times) // 2], 1))
    for end in ("Home", "End"):
        player.press(end)
        player.same_as(moved(live(code), player.setting(panel)), folder)


@pytest.mark.parametrize("name", PANELS)
def test_arrow_keys_walk_the_cells_and_their_words_are_those_of_the_live_panel(name, open_player):
    player, panel = open_player(name), live(PANELS[name][0])
    assert player.strip == panel.picture.strip
    player.image.focus()
    maps, words = list(panel.canvas.maps), set()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"):
        player.page.keyboard.press(key)
        player.page.wait_for_timeout(60)
        cell = player.root.evaluate("root => root.player.picked")
        player.page.wait_for_function(
            "root => root.querySelector('.flakit-lit-cell') && !root.querySelector('.flakit-strip').dataset.waiting",
            arg=player.root.element_handle(),
        )
        panel.picture.pick(Cell(maps[cell["map"]], cell["row"], cell["column"]))
        assert player.strip == panel.picture.strip.strip()
        words.add(player.strip)
        places = """root => Array.from(root.querySelectorAll('.flakit-lit')).map(lit => [
          lit.className.match(/flakit-lit-(\\w+)/)[1],
          ...['left', 'top', 'width', 'height'].map(each => parseFloat(lit.style[each]) / 100)])"""
        lit = player.root.evaluate(places)
        assert [look for look, *_ in lit] == [look for look, *_ in panel.picture.lit]
        for (_, *box), (_, *expected) in zip(lit, panel.picture.lit, strict=True):
            assert box == pytest.approx(expected, abs=2e-4)
    assert len(words) > 1
    player.page.keyboard.press("Escape")
    assert player.strip == base.WORDS["point"] and player.root.locator(".flakit-lit").count() == 0


@pytest.mark.parametrize("name", ["masking", "state-stepper", "infinity"])
def test_a_cell_under_the_mouse_is_the_one_that_the_live_panel_finds(name, open_player):
    player, panel = open_player(name), live(PANELS[name][0])
    player.image.scroll_into_view_if_needed()
    box, found = player.image.bounding_box(), 0
    for x, y in ((0.2, 0.3), (0.35, 0.4), (0.5, 0.5), (0.6, 0.3), (0.8, 0.4), (0.3, 0.7), (0.99, 0.99)):
        player.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        player.page.wait_for_timeout(60)
        cell, there = player.root.evaluate("root => root.player.pointed"), panel.canvas.cell(x, y)
        assert (cell is None) == (there is None)
        if there is not None:
            found += 1
            rows, columns = panel.canvas.maps[there.map]
            assert list(panel.canvas.maps)[cell["map"]] == there.map
            assert abs(cell["row"] - there.row) <= rows / 8 and abs(cell["column"] - there.column) <= columns / 8
    assert found


@pytest.mark.parametrize("name", ["decay-explorer", "state-stepper", "infinity", "masking", "sketch-broken"])
def test_presets_and_reset(name, open_player, folder):
    code, *_ = PANELS[name]
    player, panel = open_player(name), live(code)
    for label, setting in panel.presets.items():
        player.button(label)
        player.same_as(live(code).set(**setting), folder)
    player.button("reset")
    assert player.frame == 0 and player.image.get_attribute("alt") == live(code).picture.alt


def test_a_fine_screen_gets_finer_pictures(open_player):
    player = open_player("sketch-broken", device_scale_factor=2)
    sharpness = "image => image.decode().then(() => image.naturalWidth / image.width)"
    assert player.image.evaluate(sharpness) == 2
    for n in range(player.root.evaluate("root => root.player.data.frames.length")):
        player.root.evaluate("(root, n) => root.player.show(n)", n)
        assert player.image.evaluate(sharpness) == 2


def test_play_goes_through_both_passes_and_stops_at_the_end_of_each(open_player):
    player = open_player("state-stepper", held=True)
    player.knob("time t").focus()
    player.press("End")
    player.press("ArrowLeft", 2)
    assert "Forward, token 5 of 0 to 7" in player.readout
    player.root.get_by_role("button", name="play", exact=True).click()
    for token in (6, 7):
        player.later(MILLISECONDS)
        assert f"Forward, token {token}" in player.readout
    player.later(MILLISECONDS)
    player.root.get_by_role("button", name="play", exact=True).wait_for()  # it says "pause" until it ends
    assert "Forward, token 7" in player.readout
    player.button("one step on")
    assert "Backward, token 7" in player.readout
    player.button("one step on")
    assert "Backward, token 6" in player.readout
    player.button("one step back")
    player.button("one step back")
    assert "Forward, token 7" in player.readout


def test_play_moves_a_slider_and_pause_stops_it(open_player):
    player = open_player("masking", held=True)
    first = player.frame
    player.root.get_by_role("button", name="play", exact=True).click()
    player.later(MILLISECONDS)
    stopped = player.frame
    player.button("pause")
    player.later(10 * MILLISECONDS)
    assert player.frame == stopped != first


def test_less_motion_plays_slower(open_player):
    player = open_player("masking", held=True, reduced_motion="reduce")
    first = player.frame
    player.root.get_by_role("button", name="play", exact=True).click()
    player.later(1499)
    assert player.frame == first
    player.later(1)
    assert player.frame != first


def test_a_pinned_picture_stays_beside_the_next(open_player):
    player = open_player("masking")
    before, words = player.image.evaluate("image => image.src"), player.readout
    player.button("pin")
    pinned = player.root.locator(".flakit-pinned img")
    player.button("repaired")
    assert pinned.evaluate("image => image.src") == before != player.image.evaluate("image => image.src")
    assert player.root.locator("figcaption").inner_text() == f"Pinned: {words}" and player.readout != words
    player.button("unpin")
    assert pinned.count() == 0


def test_copy_as_python_gives_the_script_of_the_present_setting(open_player):
    player = open_player("sketch-broken")
    player.button("broken")
    player.button("copy as Python")
    script = player.root.locator("textarea")
    script.wait_for()
    assert script.input_value() == live(PANELS["sketch-broken"][0]).set(decay=-1.39).as_python()


def test_a_picture_can_be_saved(open_player):
    player = open_player("masking")
    shown = player.root.locator("img[role=img]").evaluate("image => image.src")
    with player.page.expect_popup() as opened:  # a server's picture is downloaded; a browser opens one of its files
        player.button("save picture")
    assert opened.value.url == shown


def test_the_address_leads_back_to_where_a_panel_stood(open_player):
    player = open_player("decay-gradient", "sketch-broken")
    page, second = player.page, player.page.locator(".flakit-player").nth(1)
    broken = Played(page, second)
    second.scroll_into_view_if_needed()
    broken.button("broken")
    page.wait_for_function("() => location.hash.startsWith('#panel=lesson-sketch-broken&')")
    address, readout = page.url, broken.readout
    broken.button("copy link")
    assert second.locator("textarea").input_value() == address and second.locator("textarea").is_visible()
    broken.button("reset")
    page.wait_for_function("address => location.href != address", arg=address)
    assert broken.readout != readout
    page.evaluate("address => { location.href = address }", address)  # as a link within the page does
    page.wait_for_function("words => document.querySelectorAll('.flakit-readout')[1].innerText == words", arg=readout)
    page.goto("about:blank")
    page.goto(address)
    second.scroll_into_view_if_needed()
    second.locator(".flakit-readout").wait_for()
    broken.settle()
    assert broken.readout == readout and player.root.locator(".flakit-elsewhere").is_hidden()
    first = player.root.evaluate("root => [root.player.frame, root.player.data.start]")
    assert first[0] == first[1]


@pytest.mark.parametrize("asked", ["decay=-1234", "no-such-knob=1"])
def test_an_address_whose_setting_was_not_recorded_says_so(open_player, asked):
    player = open_player("sketch-broken")
    page, begun, told = player.page, player.readout, player.root.locator(".flakit-elsewhere")
    assert told.is_hidden()
    page.evaluate("asked => { location.hash = asked }", f"panel=lesson-sketch-broken&{asked}")
    told.wait_for()
    assert told.inner_text() == WORDS["elsewhere"] and player.readout == begun
    player.button("broken")
    assert told.is_hidden()


def test_knobs_that_were_not_recorded_are_shown_with_their_value_and_say_so(open_player):
    player = open_player("decay-explorer")
    player.button("more")
    chunk, length = player.knob("chunk"), player.knob("length T")
    assert chunk.is_disabled() and length.is_disabled() and chunk.input_value() and player.knob("decay").is_enabled()
    assert chunk.evaluate("list => list.selectedOptions[0].label") == "64"
    assert length.get_attribute("aria-valuetext") == "128"
    assert chunk.locator("xpath=..").get_attribute("title") == WORDS["locally"]
    assert "run it locally" in player.root.locator(".flakit-more").inner_text()
    assert "make lab" in player.root.locator(".flakit-note").inner_text()
    assert "lesson.ipynb" in player.root.locator(".flakit-note").inner_text()


def test_two_players_on_a_page_do_not_disturb_each_other(open_player):
    player = open_player("decay-gradient", "sketch-broken")
    roots = player.page.locator(".flakit-player")
    assert roots.count() == 2
    roots.nth(1).scroll_into_view_if_needed()
    roots.nth(1).locator("input[type=range]").first.wait_for()
    ids = player.page.evaluate("Array.from(document.querySelectorAll('[id]')).map(each => each.id)")
    assert len(ids) == len(set(ids))
    readouts = roots.locator(".flakit-readout")
    first, second = readouts.nth(0).inner_text(), readouts.nth(1).inner_text()
    roots.nth(1).locator("input[type=range]").first.focus()
    player.page.keyboard.press("End")
    player.page.wait_for_function(
        "seen => document.querySelectorAll('.flakit-readout')[1].innerText != seen", arg=second
    )
    assert readouts.nth(0).inner_text() == first


def test_without_scripts_picture_readout_and_knobs_are_there(chromium, folder):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_of(folder, "masking"))
    said = page.locator(".flakit-player").inner_text()
    assert live(PANELS["masking"][0]).text.split("\n")[0] in said and "decay w -2.7" in said and "make lab" in said
    assert page.locator("img.flakit-picture").bounding_box()["height"] > 200
    context.close()


PIECES = """root => Array.from(root.querySelectorAll('.flakit-picture-box .flakit-piece')).map(piece => {
  const {left, right, top, width, height} = piece.getBoundingClientRect(), image = piece.querySelector('img');
  const all = image.getBoundingClientRect(), scale = all.width / root.player.still.getAttribute('width');
  const shown = [(left - all.left) / all.width, (top - all.top) / all.height, width / all.width, height / all.height];
  return {left, right, width, scale, shown};
})"""
CENTRE = """(image, [x, y]) => {
  scrollBy(0, image.getBoundingClientRect().y + y * image.getBoundingClientRect().height - 300);
  const {left, top, width, height} = image.getBoundingClientRect();
  return [left + x * width, top + y * height];
}"""


@pytest.mark.parametrize("name", ["decay-explorer", "masking", "sketch-broken", "state-stepper"])
def test_on_a_phone_the_maps_of_a_picture_stand_one_below_the_other(name, open_player, folder):
    player, panel = open_player(name, viewport={"width": 390, "height": 844}, has_touch=True), live(PANELS[name][0])
    pieces = player.root.evaluate(PIECES)
    assert len(pieces) > 2 and all(0 <= each["left"] and each["right"] <= 390 for each in pieces)
    ink = np.asarray(player.picture(folder)).min(-1) < 250
    high, wide = ink.shape
    for left, top, width, height in (each["shown"] for each in pieces):
        ink[round(top * high) : round((top + height) * high), round(left * wide) : round((left + width) * wide)] = False
    assert not ink.any()  # nothing is left out
    for n, (name, (rows, columns)) in enumerate(panel.canvas.maps.items()):
        left, top, width, height = box = panel.canvas.box(name)
        (own,) = (each for each in pieces if holds(each["shown"], box))
        assert own["scale"] > 0.95 or own["width"] > 300
        image = player.root.locator(".flakit-piece img").nth(pieces.index(own))
        player.page.touchscreen.tap(*image.evaluate(CENTRE, [left + width / 2, top + height / 2]))
        picked = player.root.evaluate("root => root.player.picked")
        assert picked["map"] == n and 0 <= picked["row"] < rows and 0 <= picked["column"] < columns
        waiting = "root => !root.querySelector('.flakit-strip').dataset.waiting"
        player.page.wait_for_function(waiting, arg=player.root.element_handle())
        strip = player.root.locator(".flakit-strip").bounding_box()
        assert strip["y"] >= 0 and strip["y"] + strip["height"] <= 845  # in view, however long the picture is


def holds(outer, inner):
    (left, top, width, height), (x, y, across, down) = outer, inner
    return left <= x and top <= y and x + across <= left + width and y + down <= top + height


def test_on_a_phone_a_picture_can_be_seen_whole_and_pinned(open_player):
    player = open_player("masking", viewport={"width": 390, "height": 844})
    pieces = player.root.locator(".flakit-picture-box .flakit-piece")
    cut, button = pieces.count(), player.root.locator(".flakit-enlarge")
    player.button("pin")
    assert player.root.locator(".flakit-pinned .flakit-piece").count() == cut > 2
    button.click()
    assert pieces.count() == 1 and pieces.bounding_box()["width"] == 590 and button.inner_text() == "fit"
    button.click()
    assert pieces.count() == cut and button.inner_text() == "enlarge"
    player.button("unpin")
    player.page.set_viewport_size({"width": 1024, "height": 844})
    player.page.evaluate(PAINTED)
    assert pieces.count() == 1 and pieces.bounding_box()["width"] == 590


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["decay-explorer", "infinity", "masking"])
def test_fits_the_page_and_axe_finds_nothing_serious(name, scheme, open_player, tmp_path):
    player = open_player(name, color_scheme=scheme)
    player.button("more")
    assert faults(player.page, tmp_path / f"{name}-{scheme}") == {}
