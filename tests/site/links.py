"""Where the links of a page lead, read from its HTML."""

from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """path; links: every href of it; anchors: what a link's # may name."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.anchors = path, [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}

    def target(self, link):
        """(file, anchor), or None where it leads to another host."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        file = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path.resolve()
        return file, unquote(parts.fragment)
