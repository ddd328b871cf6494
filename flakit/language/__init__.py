"""What language flakit's panels, pictures and exercises speak: English, or one of which there is a table.

    panel = decay_explorer(language="zh")   a panel, whatever the others speak
    use("zh")                               all from here on that are not told otherwise

English words stand in the code, most of them in a module's table WORDS, and are their own key: `zh/*.json` holds the
Chinese of each. When the English changes, its key is gone and a test says so. A word that has no translation is an
error, never English among Chinese. Words without letters to translate, such as "{n} · {m}", are the same everywhere.
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
    """Drop the spaces after Chinese punctuation, which has its own, from joined sentences."""
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


def number(x: object, digits: int = 4, *, nan: str = "NaN", inf: str = "inf") -> str:
    """x in a few characters: a whole number in full, any other with its significant digits, yes or no, a dtype's name.

    A tensor or array of one element is its number; what is no number is said as `str` says it. nan: what NaN means
    here; inf: what infinity does, such as "never".

    >>> number(1 / 3), number(-88.7228, 3), number(math.inf, inf="never"), number(True), number(torch.float16)
    ('0.3333', '-88.7', 'never', 'yes', 'float16')
    """
    if type(x) is not float:  # by far the most are, and asking what a number is takes longer than saying it
        x = x.item() if hasattr(x, "item") else x
        if isinstance(x, bool):
            return say("yes") if x else say("no")
        if type(x).__name__ == "dtype":  # torch's, which nothing else here needs
            return str(x).removeprefix("torch.")
        if not isinstance(x, Real) or isinstance(x, Integral):
            return str(x)
    if x != x:
        return nan
    return inf if x == math.inf else f"{x:.{digits}g}"


def percent(share: float) -> str:
    """A share that calls neither a little nothing nor nearly all everything.

    >>> percent(0.004), percent(0.5), percent(0.999), percent(1.0)
    ('<1%', '50%', '>99%', '100%')
    """
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


class _Numbers(string.Formatter):
    """Fills in numbers as `number` and `percent` say them; tensors and arrays of one element are their number."""

    def format_field(self, value, spec: str) -> str:
        value = value.item() if hasattr(value, "item") else value
        if spec == "%":
            return percent(value)
        return format(value, spec) if spec and not _not_finite(value) else number(value)


def _not_finite(x: object) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


_FORMATTER = _Numbers()


class Words(Mapping):
    """A table of English texts, nested as it likes, whose texts come out in the language that is spoken.

        WORDS = Words() | {"lost": {1: "One row is lost, {share:%} of all.", 2: "{n} rows are lost, {share:%} of all."}}
        WORDS.say("lost", n=rows, share=lost.mean())

    `say` fills in a text. `english` is the table itself, for what is read when a module is imported and said later.
    """

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
        """The text at these names, one for each level of the table, with values filled in.

        Numbers, and tensors of one element, are said as `number` says them; "{x:%}" says a share as `percent` does and
        any other format, "{x:.2f}", is Python's. Where texts are told apart by a whole number, {0: …, 1: …, 2: …}, the
        first value is the count: it takes its own text or, beyond them, the last.
        """
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
