"""The language of flakit's panels, pictures and exercises: English, or one with a table of translations.

    panel = decay_explorer(language="zh")   one panel
    use("zh")                               the default from here on

English texts stand in the code, most of them in a module's table WORDS, and are their own keys: `zh/*.json` holds the
Chinese of each. When an English text changes, its key is missing and a test names it. A text without a translation
raises an error; English never appears among Chinese. Texts without words, such as "{n} · {m}", need no translation.
"""

import functools
import json
import math
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from pathlib import Path

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")

_spoken: ContextVar[str | None] = ContextVar("language", default=None)
_default = ENGLISH
_NAMES = re.compile(r"\$[^$]*\$|\{[^}]*\}")  # formulas and placeholders
_AFTER_A_STOP = re.compile(r"(?<=[，。；：！？）]) +")
_PLACEHOLDER = re.compile(r"\{([A-Za-z]\w*)\}")


def check_language(language: str) -> str:
    """Return the language. Raise ValueError if it is not one of `LANGUAGES`."""
    if language not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(LANGUAGES)}, got {language!r}")
    return language


def use(language: str) -> None:
    """Set the default language of this process; existing panels keep theirs. Raises ValueError for an unknown one."""
    global _default
    _default = check_language(language)


def current() -> str:
    """Return the current language: that of the innermost `speaking` in this thread, else the default."""
    return _spoken.get() or _default


@contextmanager
def speaking(language: str | None) -> Iterator[None]:
    """Set the language within the context and this thread; None leaves it unchanged. Raises ValueError if unknown."""
    token = _spoken.set(current() if language is None else check_language(language))
    try:
        yield
    finally:
        _spoken.reset(token)


@functools.cache
def table(language: str) -> dict[str, str]:
    """Return all translations of a language by their English texts."""
    texts: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / language).glob("*.json")):
        texts |= json.loads(path.read_text(encoding="utf-8"))
    return texts


def needs_translation(text: str) -> bool:
    """Return whether a text has words beside formulas and placeholders: two letters in a row, since one is a symbol."""
    return re.search(r"[A-Za-z]{2}", _NAMES.sub("", text)) is not None


def say(text: str) -> str:
    """Return an English text in the current language. Raise ValueError if it has words and no translation."""
    language = current()
    if language == ENGLISH:
        return text
    if text not in table(language) and needs_translation(text):
        raise ValueError(f"language: expected {ENGLISH!r} where {text!r} is said, got {language!r}")
    return table(language).get(text, text)


def label(text: str) -> str:
    """Return a text in the current language, unchanged if it has no translation: it may be a name in code."""
    return text if current() == ENGLISH else table(current()).get(text, text)


def tight(text: str) -> str:
    """Return joined Chinese sentences without the spaces after punctuation, which contains its own space."""
    return _AFTER_A_STOP.sub("", text)


def rephrase(text: str) -> str:
    """Translate a text whose placeholders are already filled in; without a translation return it unchanged."""
    if current() == ENGLISH or text in table(current()):
        return label(text)
    for pattern, translation in _patterns(current()):
        if match := pattern.fullmatch(text):
            return translation.format(**{name: rephrase(part) for name, part in match.groupdict().items()})
    return text


@functools.cache
def _patterns(language: str) -> list[tuple[re.Pattern, str]]:
    """Return, for each text with plain placeholders, a pattern that matches it filled in, and its translation; the
    longest text first."""
    templates = [
        (text, other) for text, other in table(language).items() if "$" not in text and _PLACEHOLDER.search(text)
    ]
    templates.sort(key=lambda each: -len(_PLACEHOLDER.sub("", each[0])))
    patterns = []
    for text, other in templates:
        fixed, *rest = _PLACEHOLDER.split(text)
        pattern = re.escape(fixed)
        for name, fixed in zip(rest[::2], rest[1::2], strict=True):
            pattern += f"(?P={name})" if f"(?P<{name}>" in pattern else f"(?P<{name}>[^:]+?)"  # a value has no colon
            pattern += re.escape(fixed)
        patterns.append((re.compile(pattern), other))
    return patterns


def number(x: object, digits: int = 4, *, nan: str = "NaN", inf: str = "inf") -> str:
    """Format x in a few characters: a whole number in full, others with `digits` digits, yes or no, a dtype's name.

    A tensor or array of one element counts as its number; anything else becomes `str(x)`. nan, inf: texts of NaN and of
    infinity, such as "never".

    >>> number(1 / 3), number(-88.7228, 3), number(math.inf, inf="never"), number(True), number(torch.float16)
    ('0.3333', '-88.7', 'never', 'yes', 'float16')
    """
    if type(x) is not float:  # most are floats, and the checks take longer than the formatting
        x = x.item() if hasattr(x, "item") else x
        if isinstance(x, bool):
            return say("yes") if x else say("no")
        if type(x).__name__ == "dtype":  # torch, which this module does not import
            return str(x).removeprefix("torch.")
        if not isinstance(x, Real) or isinstance(x, Integral):
            return str(x)
    if x != x:
        return nan
    return inf if x == math.inf else f"{x:.{digits}g}"


def percent(share: float) -> str:
    """Format a share of 1 in percent, rounded neither to nothing nor to everything.

    >>> percent(0.004), percent(0.5), percent(0.999), percent(1.0)
    ('<1%', '50%', '>99%', '100%')
    """
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


class _Numbers(string.Formatter):
    """A formatter that writes fields by `number` and `percent`; a tensor or array of one element is its number."""

    def format_field(self, value, spec: str) -> str:
        value = value.item() if hasattr(value, "item") else value
        if spec == "%":
            return percent(value)
        finite = not isinstance(value, float) or math.isfinite(value)
        return format(value, spec) if spec and finite else number(value)


_FORMATTER = _Numbers()


class Words(Mapping):
    """A nested table of English texts. Indexing returns a text in the current language, or a table below.

        WORDS = Words() | {"lost": {1: "One row is lost, {share:%} of all.", 2: "{n} rows are lost, {share:%} of all."}}
        WORDS.say("lost", n=rows, share=lost.mean())

    `say` fills in a text. `english` is the table itself, for texts that a module reads on import and translates
    later."""

    def __init__(self, english: Mapping | None = None):
        self.english = {} if english is None else english

    def __getitem__(self, name):
        return _spoken_of(self.english[name])

    def __iter__(self):
        return iter(self.english)

    def __len__(self) -> int:
        return len(self.english)

    def __or__(self, other: Mapping) -> "Words":
        return Words({**self.english, **other})

    def __repr__(self) -> str:
        return f"Words({dict(self.english)!r})"

    def say(self, *path, **values) -> str:
        """Return the text at a path, a name per level of the table, with values filled in.

        Numbers, and tensors of one element, are formatted by `number`, "{x:%}" by `percent`, and any other format, such
        as "{x:.2f}", by Python. For texts by a whole number, {0: …, 1: …, 2: …}, the first value is the count: it
        selects its own text or, beyond them, the last. Raises KeyError for an unknown name, ValueError for a path that
        ends at a table."""
        text = self.english
        for name in path:
            text = text[name]
        if isinstance(text, (Mapping, Words)):
            if not values or any(isinstance(count, bool) or not isinstance(count, int) for count in text):
                raise ValueError(f"path: expected the names of a text, got a table: {', '.join(map(str, path))}")
            count = int(next(iter(values.values())))
            text = text[max((n for n in text if n <= count), default=min(text))]
        return _FORMATTER.vformat(say(text), (), values)


def _spoken_of(value):
    if isinstance(value, str):
        return say(value)
    if isinstance(value, Words) or not isinstance(value, (Mapping, tuple, list)):
        return value
    return Words(value) if isinstance(value, Mapping) else tuple(map(_spoken_of, value))
