"""Sphinx's settings for `make site`. `docs.build` assembles the pages, runs Sphinx on them and checks what came out."""

import sphinxcontrib.katex
from docutils import nodes
from sphinx.util import logging

import flakit

project = "flakit"
author = "flakit contributors"
copyright = "flakit contributors, MIT licence"  # noqa: A001
version = release = flakit.__version__

extensions = ["myst_nb", "sphinxcontrib.katex"]

nb_execution_mode = "off"  # docs.build has run them
nb_code_prompt_show = nb_code_prompt_hide = "code"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "docs.notebooks.anchor"

katex_prerender = True
katex_css_path = "katex/katex.min.css"
sphinxcontrib.katex.KATEX_DEFAULT_OPTIONS |= {"throwOnError": True, "strict": "ignore"}

html_theme = "furo"
html_title = "flakit"
smartquotes = False  # quotes and dashes are as they were written
html_static_path = ["_static", "../build/katex"]
html_css_files = ["player.css", "site.css"]
html_js_files = ["site.js", "player.js"]
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


def formulas_can_be_read(app, doctree):
    """A formula that KaTeX cannot parse is a warning at its place, and warnings fail the build."""
    for node in doctree.findall(lambda node: isinstance(node, (nodes.math, nodes.math_block))):
        try:
            sphinxcontrib.katex.render_latex(node.astext())
        except sphinxcontrib.katex.KaTeXError as error:
            logging.getLogger(__name__).warning("%s", error, location=node)


def setup(app):
    app.connect("doctree-read", formulas_can_be_read)
