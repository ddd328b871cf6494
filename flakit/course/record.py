"""The record of the checks that were answered correctly, in `mine.json` beside the notebooks and nowhere else.

    {"right": {"the last state": "2026-11-26"}}

`flakit progress` prints it in a terminal. Later wrong answers do not remove an entry.
"""

import datetime
import html
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..language import ENGLISH, LANGUAGES, Words, current, speaking
from ..numerics import carried

if TYPE_CHECKING:
    from ..figures.plots import Picture

FILE = "mine.json"
SOLUTIONS = "solutions"

WORDS = Words() | {
    "right": "{name}: right",
    "wrong": "{name}: not yet",
    "progress": "{right} of {all} checks were right. Kept in {file}, on this machine only.",
    "lesson": "{right} of {all}",
    "next": "Next: {check}, in {lesson}.",
    "finished": "Every check was right.",
    "faults": {1: "1 of {all} faults has its fingerprint.", 2: "{n} of {all} faults have their fingerprints."},
    "no faults": "A fault of the fingerprint comes in when all checks of the lesson that explains it are right.",
}


def folder(here: Path | None = None) -> Path:
    """Return the folder of the learner's files: the notebook's, or the English notebooks' for a translated one.

    here: the notebook's folder, default the process's. The environment variable FLAKIT_MINE overrides both."""
    if named := os.environ.get("FLAKIT_MINE"):
        return Path(named)
    here = here or Path.cwd()
    return here.parent if here.name in LANGUAGES else here


def note(name: str) -> None:
    """Record today as the date of a correct answer to the named check, unless it has one. Does nothing outside a
    notebook or in a solutions notebook."""
    place = folder()
    if place.name == SOLUTIONS or not (os.environ.get("FLAKIT_MINE") or hasattr(shell(), "kernel")):
        return
    dates = right()
    if name not in dates:
        dates[name] = datetime.date.today().isoformat()
        write(place / FILE, json.dumps({"right": dates}, ensure_ascii=False, indent=1) + "\n")


def right(place: Path | None = None) -> dict[str, str]:
    """Return the date, as ISO text, of each check answered correctly, by name; {} if the record is missing or
    unreadable.

    place: the folder of the record, default the learner's."""
    return entries((place or folder()) / FILE, "right")


def entries(path: Path, name: str) -> dict[str, str]:
    """Return the mapping that a JSON file has under `name`; {} if it is missing or unreadable."""
    try:
        return dict(json.loads(path.read_bytes())[name])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically, text in UTF-8. A half-written file would look like a change by the learner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def shell() -> object:
    """Return the IPython shell that runs this process, None without one."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


@dataclass(frozen=True)
class Lesson:
    """A lesson. name: its file's, without suffix. checks: whether each was answered correctly, by name."""

    name: str
    title: str
    checks: dict[str, bool]

    @property
    def done(self) -> bool:
        return all(self.checks.values())


@dataclass(frozen=True)
class Progress:
    """The result of `progress`, shown as a table in a notebook and as lines of text elsewhere."""

    lessons: tuple[Lesson, ...]

    @property
    def next(self) -> tuple[Lesson, str] | None:
        """The next check and its lesson: the first open check after the last correct one, so that skipped lessons do
        not come back at once; without one the first open check. None if all are correct."""
        checks = [(lesson, name, done) for lesson in self.lessons for name, done in lesson.checks.items()]
        last = max((n for n, (*_, done) in enumerate(checks) if done), default=-1)
        return next(((lesson, name) for lesson, name, done in checks[last + 1 :] + checks if not done), None)

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of the faults that completed lessons explain: the rows that `fingerprint` fills in."""
        from ..cases.fingerprint import CAUSES  # `flakit lab` needs none of the casebook

        done = {lesson.name[:2] for lesson in self.lessons if lesson.done}
        return tuple(name for name, cause in CAUSES.items() if cause.lesson in done)

    def fingerprint(self) -> "Picture":
        """Draw the table of faults and tensors with the rows of `faults` filled in, for the last line of a cell."""
        from ..panels import fingerprint  # which brings matplotlib

        return fingerprint(causes=self.faults)

    def _counts(self) -> dict[str, int]:
        checks = [done for lesson in self.lessons for done in lesson.checks.values()]
        return {"right": sum(checks), "all": len(checks)}

    def _next_line(self) -> str:
        if self.next is None:
            return WORDS["finished"]
        lesson, check = self.next
        return WORDS.say("next", check=check, lesson=lesson.name)

    def __repr__(self) -> str:
        from ..cases.fingerprint import CAUSES

        lines = [WORDS.say("progress", **self._counts(), file=FILE)]
        width = 2 + max((len(lesson.checks) for lesson in self.lessons), default=0)
        for lesson in self.lessons:
            marks = "".join("●" if done else "○" for done in lesson.checks.values())
            lines.append(f"  {lesson.name[:2]}  {marks:<{width}}{lesson.title}")
        faults = WORDS.say("faults", n=len(self.faults), all=len(CAUSES)) if self.faults else WORDS["no faults"]
        return "\n".join([*lines, self._next_line(), faults])

    def _repr_html_(self) -> str:
        rows = []
        for lesson in self.lessons:
            marks = " &nbsp;".join(
                f'<span style="white-space: nowrap{"" if done else "; opacity: 0.6"}">'
                f"{'●' if done else '○'} {html.escape(name)}</span>"
                for name, done in lesson.checks.items()
            )
            count = WORDS.say("lesson", right=sum(lesson.checks.values()), all=len(lesson.checks))
            count = f'<span style="white-space: nowrap">{count}</span>'
            cells = (f"{lesson.name[:2]} {html.escape(lesson.title)}", marks, count)
            rows.append("<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells) + "</tr>")
        summary = WORDS.say("progress", **self._counts(), file=FILE)
        after = f"<p>{html.escape(self._next_line())}</p>"
        return f"<p>{summary}</p><table><tbody>{''.join(rows)}</tbody></table>{after}"


def progress(place: Path | None = None) -> Progress:
    """Return the checks answered correctly so far, by lesson, and the next one; put it on the last line of a cell.

    place: the folder of the record, mine.json; default the learner's.

    The lessons shipped with flakit define the checks, so an edited copy of a lesson does not change them."""
    done, lessons = right(place), []
    notebooks = carried.folder("notebooks")
    for path in sorted(notebooks.glob("[0-9]*.ipynb")):
        title, names = _checks(path, ENGLISH)
        if not names:  # a reference page, not a lesson
            continue
        shown, by_language = names, [names]
        for language in LANGUAGES[1:]:
            if (other := notebooks / language / path.name).is_file():
                other_title, translated = _checks(other, language)
                by_language.append(translated)
                title, shown = (other_title, translated) if language == current() else (title, shown)
        checks = {name: any(each[n] in done for each in by_language if n < len(each)) for n, name in enumerate(shown)}
        lessons.append(Lesson(path.stem, title, checks))
    return Progress(tuple(lessons))


def _checks(path: Path, language: str) -> tuple[str, list[str]]:
    """Return a lesson's title, and the names of its checks as its stored outputs print them in this language."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    with speaking(language):
        verdicts = [re.escape(WORDS[each]).replace(r"\{name\}", r"(\S.*?)") for each in ("right", "wrong")]
    names = [next(filter(None, groups)) for groups in re.findall(f"^(?:{'|'.join(verdicts)})$", printed, re.M)]
    return "".join(cells[0]["source"]).partition("\n")[0].lstrip("# "), list(dict.fromkeys(names))
