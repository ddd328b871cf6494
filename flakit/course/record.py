"""Which checks were right: kept in `mine.json` beside the notebooks, and nowhere else.

    {"right": {"the last state": "2026-11-26"}}

`flakit progress` prints it in a terminal. A check that was right once stays so, whatever is tried after it.
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
    """Where the learner's files are: beside the notebook that runs, or, of a translated one, beside the English ones.

    here: the folder of the notebook, where it is not that of the process. The environment variable FLAKIT_MINE names
    another folder for all.
    """
    if named := os.environ.get("FLAKIT_MINE"):
        return Path(named)
    here = here or Path.cwd()
    return here.parent if here.name in LANGUAGES else here


def note(name: str) -> None:
    """Write down that the check of this name was right; in a notebook only, and not in one of the solutions."""
    place = folder()
    if place.name == SOLUTIONS or not (os.environ.get("FLAKIT_MINE") or in_a_notebook()):
        return
    found = right()
    if name not in found:
        found[name] = datetime.date.today().isoformat()
        write(place / FILE, json.dumps({"right": found}, ensure_ascii=False, indent=1) + "\n")


def right(place: Path | None = None) -> dict[str, str]:
    """The checks that were right, and the day of each; none where there is no record or it cannot be read.

    place: the folder of the record; default: that of the learner's files.
    """
    try:
        return dict(json.loads(((place or folder()) / FILE).read_text(encoding="utf-8"))["right"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def in_a_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


@dataclass(frozen=True)
class Lesson:
    """A lesson by its file's name, its title, and its checks: what each is called, and whether it was right."""

    name: str
    title: str
    checks: dict[str, bool]

    @property
    def done(self) -> bool:
        return all(self.checks.values())


@dataclass(frozen=True)
class Progress:
    """What `progress` returns: a table in a notebook, lines of text elsewhere."""

    lessons: tuple[Lesson, ...]

    @property
    def next(self) -> tuple[Lesson, str] | None:
        """The check to go on with, and its lesson: the first open one behind the last that was right, so that lessons
        that were left out do not hold anybody up; then the first that is open. None where all were right."""
        checks = [(lesson, name, done) for lesson in self.lessons for name, done in lesson.checks.items()]
        last = max((n for n, (*_, done) in enumerate(checks) if done), default=-1)
        return next(((lesson, name) for lesson, name, done in checks[last + 1 :] + checks if not done), None)

    @property
    def faults(self) -> tuple[str, ...]:
        """The rows of the fingerprint that are filled in: faults of the lessons of which every check was right."""
        from ..cases.fingerprint import CAUSES  # `flakit lab` needs none of the casebook

        done = {lesson.name[:2] for lesson in self.lessons if lesson.done}
        return tuple(name for name, cause in CAUSES.items() if cause.lesson in done)

    def fingerprint(self) -> "Picture":
        """The table of faults and tensors with these rows; show it as the last line of a cell."""
        from ..panels import fingerprint  # which brings matplotlib

        return fingerprint(causes=self.faults)

    def _counts(self) -> dict[str, int]:
        checks = [done for lesson in self.lessons for done in lesson.checks.values()]
        return {"right": sum(checks), "all": len(checks)}

    def _says_next(self) -> str:
        if self.next is None:
            return WORDS["finished"]
        lesson, check = self.next
        return WORDS.say("next", check=check, lesson=lesson.name)

    def _says_faults(self) -> str:
        from ..cases.fingerprint import CAUSES

        return WORDS.say("faults", n=len(self.faults), all=len(CAUSES)) if self.faults else WORDS["no faults"]

    def __repr__(self) -> str:
        lines = [WORDS.say("progress", **self._counts(), file=FILE)]
        width = 2 + max((len(lesson.checks) for lesson in self.lessons), default=0)
        for lesson in self.lessons:
            marks = "".join("●" if done else "○" for done in lesson.checks.values())
            lines.append(f"  {lesson.name[:2]}  {marks:<{width}}{lesson.title}")
        lines += [self._says_next(), self._says_faults()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for lesson in self.lessons:
            marks = " &nbsp;".join(
                f'<span style="white-space: nowrap{"" if done else "; opacity: 0.6"}">'
                f"{'●' if done else '○'} {html.escape(name)}</span>"
                for name, done in lesson.checks.items()
            )
            said = WORDS.say("lesson", right=sum(lesson.checks.values()), all=len(lesson.checks))
            count = f'<span style="white-space: nowrap">{said}</span>'
            cells = (f"{lesson.name[:2]} {html.escape(lesson.title)}", marks, count)
            rows.append("<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells) + "</tr>")
        said = WORDS.say("progress", **self._counts(), file=FILE)
        after = f"<p>{html.escape(self._says_next())}</p>"
        return f"<p>{said}</p><table><tbody>{''.join(rows)}</tbody></table>{after}"


def progress(place: Path | None = None) -> Progress:
    """Which checks of which lessons were right so far, and what comes next; show it as the last line of a cell.

    place: the folder with the record, mine.json; default: that of the learner's files.

    The checks are those that the lessons as they came with flakit print, so a copy that was changed counts them, too.
    """
    done, lessons = right(place), []
    notebooks = carried.folder("notebooks")
    for path in sorted(notebooks.glob("[0-9]*.ipynb")):
        title, names = _checks(path, ENGLISH)
        if not names:  # a page to look things up, not a lesson
            continue
        said, others = names, [names]
        for language in LANGUAGES[1:]:
            if (other := notebooks / language / path.name).is_file():
                other_title, translated = _checks(other, language)
                others.append(translated)
                title, said = (other_title, translated) if language == current() else (title, said)
        found = {name: any(each[n] in done for each in others if n < len(each)) for n, name in enumerate(said)}
        lessons.append(Lesson(path.stem, title, found))
    return Progress(tuple(lessons))


def _checks(path: Path, language: str) -> tuple[str, list[str]]:
    """The title of a lesson, and the names of its checks as its stored outputs have them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    said = "".join("".join(output.get("text", ())) for output in outputs)
    with speaking(language):
        verdicts = [re.escape(WORDS[each]).replace(r"\{name\}", r"(\S.*?)") for each in ("right", "wrong")]
    names = [next(filter(None, found)) for found in re.findall(f"^(?:{'|'.join(verdicts)})$", said, re.M)]
    return "".join(cells[0]["source"]).partition("\n")[0].lstrip("# "), list(dict.fromkeys(names))
