"""Which checks were right: kept in `mine.json` beside the notebooks, and nowhere else.

    {"right": {"the last state": "2026-11-26"}}

A check that was right once stays so, whatever is tried after it.
"""

import datetime
import html
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..language import ENGLISH, LANGUAGES, Words, current, speaking
from ..numerics import carried

FILE = "mine.json"
SOLUTIONS = "solutions"

WORDS = Words() | {
    "right": "{name}: right",
    "wrong": "{name}: not yet",
    "progress": "{right} of {all} checks were right. Kept in {file}, on this machine only.",
    "lesson": "{right} of {all}",
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


def right() -> dict[str, str]:
    """The checks that were right, and the day of each; none where there is no record or it cannot be read."""
    try:
        return dict(json.loads((folder() / FILE).read_text(encoding="utf-8"))["right"])
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


@dataclass(frozen=True)
class Progress:
    """What `progress` returns: a table in a notebook, lines of text elsewhere."""

    lessons: tuple[Lesson, ...]

    def _counts(self) -> dict[str, int]:
        checks = [done for lesson in self.lessons for done in lesson.checks.values()]
        return {"right": sum(checks), "all": len(checks)}

    def __repr__(self) -> str:
        lines = [WORDS.say("progress", **self._counts(), file=FILE)]
        for lesson in self.lessons:
            marks = "".join("●" if done else "○" for done in lesson.checks.values())
            lines.append(f"  {lesson.name[:2]}  {marks:<8}{lesson.title}")
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
        return f"<p>{said}</p><table><tbody>{''.join(rows)}</tbody></table>"


def progress() -> Progress:
    """Which checks of which lessons were right so far; show it as the last line of a cell.

    The checks are those that the lessons as they came with flakit print, so a copy that was changed counts them, too.
    """
    done, lessons = right(), []
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
