"""What language flakit's panels, pictures and exercises speak: English, or one of which there is a table.

    panel = decay_explorer(language="zh")   a panel, whatever the others speak
    use("zh")                               all from here on that are not told otherwise

English words stand in the code, most of them in a module's table WORDS, and are their own key: `zh/*.json` holds the
Chinese of each. When the English changes, its key is gone and a test says so. A word that has no translation is an
error, never English among Chinese. Words without letters to translate, such as "{n} · {m}", are the same everywhere.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")

_spoken: ContextVar[str | None] = ContextVar("language", default=None)
_default = ENGLISH
_NAMES = re.compile(r"\$[^$]*\$|\{[^}]*\}")  # formulas and placeholders
_AFTER_A_STOP = re.compile(r"(?<=[，。；：！？）]) +")
_PLACEHOLDER = re.compile(r"\{([A-Za-z]\w*)\}")


def check_language(language: str) -> str:
    """The language itself; a ValueError where there is none of this name."""
    if language not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(LANGUAGES)}, got {language!r}")
    return language


def use(language: str) -> None:
    """Speak it from here on, in all of this process; panels that exist keep theirs."""
    global _default
    _default = check_language(language)


def current() -> str:
    """What is spoken here."""
    return _spoken.get() or _default


@contextmanager
def speaking(language: str | None) -> Iterator[None]:
    """Speak it inside, in this thread; None: as it is."""
    token = _spoken.set(current() if language is None else check_language(language))
    try:
        yield
    finally:
        _spoken.reset(token)


@functools.cache
def table(language: str) -> dict[str, str]:
    """Every translation by its English."""
    found: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / language).glob("*.json")):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def needs_translation(text: str) -> bool:
    """Whether there are letters in it beside formulas and placeholders: two in a row, for one alone is a symbol."""
    return re.search(r"[A-Za-z]{2}", _NAMES.sub("", text)) is not None


def say(text: str) -> str:
    """An English text of flakit's in the language that is spoken; a ValueError where it has no translation."""
    language = current()
    if language == ENGLISH:
        return text
    if text not in table(language) and needs_translation(text):
        raise ValueError(f"language: expected {ENGLISH!r} where {text!r} is said, got {language!r}")
    return table(language).get(text, text)


def label(text: str) -> str:
    """The same of what may be a name in code, such as an option's: it stays as it is if it has no translation."""
    return text if current() == ENGLISH else table(current()).get(text, text)


def tight(text: str) -> str:
    """Sentences put together, without the spaces that Chinese has no need of: its full stops and commas have room."""
    return _AFTER_A_STOP.sub("", text)


def rephrase(text: str) -> str:
    """The same of a text whose placeholders are filled in by now; it stays as it is if it has no translation."""
    if current() == ENGLISH or text in table(current()):
        return label(text)
    for pattern, translation in _patterns(current()):
        if found := pattern.fullmatch(text):
            return translation.format(**{name: rephrase(part) for name, part in found.groupdict().items()})
    return text


@functools.cache
def _patterns(language: str) -> list[tuple[re.Pattern, str]]:
    """Templates with plain placeholders, those with most words of their own first; what is filled in has no colon."""
    templates = [
        (text, said) for text, said in table(language).items() if "$" not in text and _PLACEHOLDER.search(text)
    ]
    templates.sort(key=lambda each: -len(_PLACEHOLDER.sub("", each[0])))
    found = []
    for text, said in templates:
        parts, seen = [], set()
        for n, part in enumerate(_PLACEHOLDER.split(text)):
            parts.append(re.escape(part) if n % 2 == 0 else f"(?P={part})" if part in seen else f"(?P<{part}>[^:]+?)")
            seen |= {part} if n % 2 else set()
        found.append((re.compile("".join(parts)), said))
    return found


class Words(Mapping):
    """A table of English texts, nested as it likes, whose texts come out in the language that is spoken.

    `english` is the table itself, for what is read when a module is imported and said later.
    """

    def __init__(self, english: Mapping):
        self.english = english

    def __getitem__(self, name):
        return _spoken_of(self.english[name])

    def __iter__(self):
        return iter(self.english)

    def __len__(self) -> int:
        return len(self.english)

    def __or__(self, other: Mapping) -> dict:
        return {**self, **other}

    def __repr__(self) -> str:
        return f"Words({dict(self.english)!r})"


def _spoken_of(value):
    if isinstance(value, str):
        return say(value)
    if isinstance(value, Words) or not isinstance(value, (Mapping, tuple, list)):
        return value
    return Words(value) if isinstance(value, Mapping) else tuple(map(_spoken_of, value))
