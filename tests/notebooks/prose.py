"""What tests ask of a lesson's prose beside its claims: numbers that nothing holds, letters of formulas, minutes."""

import math
import re

from docs.claims import CLAIM
from docs.lessons import code_cells, prose_cells, read

NO_CLAIMS = [
    r"^```.*?^```",  # code
    r"`[^`]*`",
    r"\$\$.*?\$\$",  # formulas
    r"\$[^$]*\$",
    r"\]\([^)]*\)",  # where a link leads to
    r"\b(?:[Nn]otebook|[Ll]esson)s? \d\d(?:(?:, | and | to )\d\d)*",
    r"\[\d\d_\w+",  # their names
    r"\babout\s+\d+\s+minutes",
    r"约?需要 \d+ 分钟",
    r"\bExercise \d+",
    r"练习 \d+",
    r"第 \d\d 课",
    r"^\s*\d+\. ",  # lists
    r"^\| \d+ \||\| \d+ \| \d+ \|$",
]


def not_held(prose):
    """The numbers that claim something and are held to nothing."""
    for pattern in NO_CLAIMS:
        # What a formula holds stays held by the comment after it.
        prose = re.sub(pattern, " ", prose, flags=re.M | re.S)
    prose = CLAIM.sub(" ", prose)
    prose = re.sub(r"<!--.*?-->", " ", prose, flags=re.S)
    return re.findall(r"(?<![\w.,])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?\s?%?(?![\w])", prose)


def letters(prose):
    """The letters of its formulas: gi and j of gi_j, i and j of A_ij. Words that are set upright are none."""
    prose = re.sub(r"<!--.*?-->|^```.*?^```|`[^`]*`", " ", prose, flags=re.M | re.S)
    names = set()
    for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", prose, re.S):
        formula = re.sub(r"\\(?:text|operatorname|mathrm|begin|end|mathrel)\{[^}]*\}", " ", block or inline)
        formula = formula.replace(r"\kappa", "κ").replace(r"\alpha", "α")
        for word in re.findall(r"_\{?[A-Za-z]+|[A-Za-zκασ]+", re.sub(r"\\[a-zA-Z]+", " ", formula)):
            names |= set(word.lstrip("_{")) if word[0] == "_" else {word}
    return names


def minutes(path):
    """About how long a lesson takes: prose at 130 words a minute, half a minute a cell of code, in steps of five."""
    lesson = read(path)
    prose = " ".join(re.sub(r"<!--.*?-->", "", cell.source, flags=re.S) for cell in prose_cells(lesson))
    return 5 * math.ceil((len(prose.split()) / 130 + len(code_cells(lesson)) / 2) / 5)
