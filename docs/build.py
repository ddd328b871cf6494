"""`make site`: every lesson as a page whose sliders move without a kernel, and the reference beside them.

python -m docs.build             everything
python -m docs.build 00 04       of the lessons that have to run again, only those whose names start so
python -m docs.build none        none of them: words and styles alone

What is stored in build/ makes a second call quick: a notebook runs again only when it, flakit, data or the recorder has
changed, and a page is written again only when it has changed.

FLAKIT_SPARSE=1, which the tests set, builds the same pages with few frames of each panel, into build/sparse: less work,
and nothing to publish. The size of the site is checked with all frames, at the end of `make site`.
"""

import html
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError
from sphinx.cmd.build import main as sphinx
from sphinxcontrib.katex import katex_version

from docs import computed, notebooks, tables
from docs.lessons import LESSONS, NOTEBOOKS, SOLUTIONS, TRANSLATIONS, name, starting_with

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sparse" if os.environ.get("FLAKIT_SPARSE") else ROOT / "build"
KATEX = ROOT / "build" / "katex"
COMPUTED = ROOT / "build" / "computed"  # as in conf.py
PAGES, SITE, PICTURES = BUILD / "pages", BUILD / "site", BUILD / "pictures"
MAX_SITE, MAX_PAGE = 125e6, 1.5e6  # bytes: of all files (hosts take ten times that), and of what opening a page loads
MOST_SAID = 60_000  # characters of a page that the search quotes from


def main(prefixes):
    start = time.monotonic()
    unknown = [prefix for prefix in prefixes if prefix != "none" and not starting_with([prefix], LESSONS)]
    if unknown:
        sys.exit(f"no lesson starts with {' or '.join(unknown)}")
    try:
        executed = notebooks.executed(BUILD, prefixes)
    except CellExecutionError as error:
        sys.exit(f"{error}\nA notebook failed: the site was not built.")
    except notebooks.Untrue as error:
        sys.exit(f"{error}\nA lesson says what it did not compute: the site was not built.")
    katex(KATEX)
    if why := computed.build(COMPUTED / "computed"):
        shutil.rmtree(COMPUTED, ignore_errors=True)
        print(f"pages do not compute, their panels play frames alone: {why}", flush=True)
    print("pages", flush=True)
    assemble(executed)
    write(PAGES, SITE)
    tidy()
    excerpts(SITE)
    too_large = sizes()
    print(f"\nbuilt in {time.monotonic() - start:.0f} s. Open this file in a browser, no server is needed:")
    print(f"  {SITE / 'index.html'}")
    print(f"or put the folder {SITE} on any web server.")
    sys.exit(too_large)


def katex(folder):
    """Fetch KaTeX's style and fonts from npm, in the version that sphinxcontrib-katex writes for. Exit if it fails."""
    stamp = folder / "katex" / "VERSION"
    if stamp.exists() and stamp.read_text() == katex_version:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"KaTeX {katex_version} from npm", flush=True)
    package = folder / "npm" / "node_modules" / "katex"
    if not computed.npm("install", "--no-save", "--prefix", str(folder / "npm"), f"katex@{katex_version}"):
        sys.exit("npm could not fetch KaTeX, whose style and fonts the formulas need: see its message above.")
    (folder / "katex" / "fonts").mkdir(parents=True)
    for font in (package / "dist" / "fonts").glob("*.woff2"):
        shutil.copy(font, folder / "katex" / "fonts")
    style = (package / "dist" / "katex.min.css").read_text()
    style = re.sub(r",url\(fonts/[\w-]+\.(woff|ttf)\) format\(\"\w+\"\)", "", style)
    (folder / "katex" / "katex.min.css").write_text(style)
    shutil.copy(package / "LICENSE", folder / "katex")
    shutil.rmtree(folder / "npm")
    stamp.write_text(katex_version)


def assemble(executed):
    """Write every page's source into one folder, as Sphinx wants them; leave unchanged files alone."""
    wanted = {}
    titles = {path: notebooks.title(notebook) for path, notebook in executed.items()}
    files = notebooks.sources(executed.values())
    pages = {path: notebooks.page(notebook, path, PICTURES) for path, notebook in executed.items()}
    for path, notebook in pages.items():
        wanted[f"notebooks/{path.relative_to(NOTEBOOKS).as_posix()}"] = nbformat.writes(notebook)
    wanted["notebooks/glossary.md"] = (NOTEBOOKS / "glossary.md").read_text()
    wanted["notebooks/solutions/index.md"] = _solutions(titles)
    for path in (ROOT / "docs").glob("*.md"):
        wanted[path.name] = path.read_text()
    wanted["index.md"] = (
        wanted["index.md"]
        .replace("{{panel}}", notebooks.panel_html(pages, "00_start_here", "sketch"))
        .replace("{{lessons}}", _lines(titles, LESSONS))
        .replace("{{translations}}", _lines(titles, TRANSLATIONS))
    )
    picture = tables.times()
    wanted["speed.md"] = wanted["speed.md"].replace("{{times}}", picture.alt)
    _write(PAGES / "times.png", picture.png())
    wanted["ranks.md"], picture = tables.ranks(wanted["ranks.md"])
    _write(PAGES / "ranks.png", picture.png())
    wanted["casebook.md"] = tables.casebook(wanted["casebook.md"])
    wanted["commands.md"] = tables.commands(wanted["commands.md"])
    wanted |= tables.api(ROOT) | tables.results(ROOT) | tables.sources(ROOT, files)
    for file, text in wanted.items():
        _write(PAGES / file, text)
    for picture in (NOTEBOOKS / "images").iterdir():
        _write(PAGES / "notebooks" / "images" / picture.name, picture.read_bytes())
    for path in PAGES.rglob("*"):
        if path.suffix in (".md", ".ipynb") and path.relative_to(PAGES).as_posix() not in wanted:
            path.unlink()


def _lines(titles, paths):
    return "\n".join(f"{path.stem[:2]} {titles[path]} <notebooks/{name(path)}>" for path in paths)


def _solutions(titles):
    solved = {path: titles[path].removeprefix("Solutions: ") for path in SOLUTIONS}
    lines = "\n".join(f"- [{path.stem[:2]} {title}]({path.name})" for path, title in solved.items())
    tree = "\n".join(f"{path.stem[:2]} {title} <{path.stem}>" for path, title in solved.items())
    page = (ROOT / "docs" / "solutions" / "index.md").read_text()
    return page.replace("{{list}}", lines).replace("{{tree}}", tree)


def _write(path, content):
    """Write a file unless it has this content already: Sphinx looks at its time."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def write(pages, site):
    """Run Sphinx on a folder of pages. Exit at a link that leads nowhere or a formula that cannot be read."""
    options = ["-b", "html", "-c", str(ROOT / "docs"), "-d", str(site.parent / "doctrees"), "-q", "-W", "--keep-going"]
    if sphinx([*options, str(pages), str(site)]):
        sys.exit("Sphinx found faults in the pages, which are named above: the site is not whole.")


def tidy():
    """Copy pictures and frames of the pages into the site, and delete from it whatever no page uses any more."""
    texts = {path: path.read_text() for path in SITE.rglob("*.html")}
    for path in list(texts):
        page = path.relative_to(SITE).with_suffix("")
        sources = [PAGES / f"{page.as_posix()}{suffix}" for suffix in (".md", ".ipynb")]
        if page.as_posix() not in ("search", "genindex") and not any(source.exists() for source in sources):
            path.unlink()
            del texts[path]
    shown = {file for text in texts.values() for file in re.findall(r'_images/([\w/.-]+\.(?:png|webp))"', text)}
    wanted = {SITE / "_images" / file: PICTURES / file for file in shown}
    for lesson in (BUILD / "frames").glob("*"):
        wanted |= {SITE / "_static" / "frames" / path.relative_to(lesson): path for path in lesson.rglob("*.*")}
    for target, source in wanted.items():
        if source.exists():  # pictures of Sphinx's own are there already
            _write(target, source.read_bytes())
    if not COMPUTED.exists():
        shutil.rmtree(SITE / "_static" / "computed", ignore_errors=True)
    for path in [*(SITE / "_images").rglob("*.*"), *(SITE / "_static" / "frames").rglob("*.*")]:
        if path not in wanted:
            path.unlink()


ARTICLE = re.compile(r"<article.*?</article>", re.S)
UNSAID = re.compile(r'<(script|style|svg|annotation|textarea)\b.*?</\1>|<a class="headerlink".*?</a>', re.S)
WITHIN = re.compile(r"</?(?:a|b|code|em|i|span|strong)\b[^>]*>")
TAG = re.compile(r"<[^>]*>")


def excerpts(site):
    """Write each page's text for the search to quote, as a script, since a browser fetches no page under file://."""
    texts = {}
    for path in sorted(site.rglob("*.html")):
        if article := ARTICLE.search(path.read_text()):
            words = " ".join(html.unescape(TAG.sub(" ", WITHIN.sub("", UNSAID.sub(" ", article[0])))).split())
            texts[path.relative_to(site).as_posix()] = words[:MOST_SAID]
    script = f"window.flakitTexts = {json.dumps(texts, ensure_ascii=False)};\n"
    _write(site / "_static" / "excerpts.js", script.replace("</", "<\\/"))


def sizes():
    """Print the size of the site and of its largest pages; return whether one exceeds its limit."""
    files = {path: path.stat().st_size for path in SITE.rglob("*") if path.is_file()}
    total = sum(files.values())
    first = {path: first_view(path, files) for path in files if path.suffix == ".html"}
    print(f"\nsize: {total / 1e6:.1f} MB of at most {MAX_SITE / 1e6:.0f}, {len(first)} pages")
    for path in sorted(first, key=first.get, reverse=True)[:5]:
        print(f"  first view {first[path] / 1e6:.2f} MB of at most {MAX_PAGE / 1e6:.1f}  {path.relative_to(SITE)}")
    broken = [path for path in first if first[path] > MAX_PAGE]
    for path in broken:
        print(f"TOO LARGE: opening {path.relative_to(SITE)} loads {first[path] / 1e6:.2f} MB")
    if total > MAX_SITE:
        print(f"TOO LARGE: the site has {total / 1e6:.1f} MB")
    return bool(broken) or total > MAX_SITE


LOADED = re.compile(r'<(?:script[^>]* src|link rel="stylesheet"[^>]* href)="([^"?#]+)')
IMAGE = re.compile(r"<img(?![^>]*loading=\"lazy\")[^>]* src=\"([^\"?#:]+)\"")


def first_view(page, files):
    """Return the bytes that a browser loads on opening a page: itself, scripts, styles, fonts, non-lazy pictures."""
    text = page.read_text()
    parts = {(page.parent / url).resolve() for url in LOADED.findall(text) + IMAGE.findall(text)}
    if 'class="katex"' in text:
        parts |= {path for path in files if re.search(r"KaTeX_(Main|Math)-(Regular|Italic)\.woff2$", path.name)}
    return files[page] + sum(files.get(part, 0) for part in parts)


if __name__ == "__main__":
    main(sys.argv[1:])
