"""flakit's English texts, as they stand in its source: what translations are made from."""

import ast
import importlib
from pathlib import Path

import flakit
from flakit.cases.knobs import knobs_of
from flakit.language import Words, needs_translation

PACKAGE = Path(flakit.__file__).parent
SOURCES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def leaves(table):
    """Every text of a table, however deep."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, (dict, Words)):
        for each in (table.english if isinstance(table, Words) else table).values():
            yield from leaves(each)
    elif isinstance(table, (tuple, list)):
        for each in table:
            yield from leaves(each)


def _tree(name):
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"))


def may_say(name):
    """Whether a module may have anything to say: soon found out, for what it is takes seconds over all modules."""
    text = SOURCES[name].read_text(encoding="utf-8")
    return "WORDS" in text or "say(" in text


def translatable(name):
    """What a module says that needs a translation: its table WORDS, and what it hands to `say` as it stands."""
    spoken, tree = [], _tree(name)
    if any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WORDS" for node in tree.body):
        module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        spoken += leaves(module.WORDS)
        if "knobs" in module.WORDS:  # a case's picture: other knobs are labelled by their names
            knobs = knobs_of(importlib.import_module(module.__package__).show)
            spoken += [knob for knob in knobs if knob not in module.WORDS["knobs"] and knob != "seed"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say":
            spoken += [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
    return [text for text in dict.fromkeys(spoken) if needs_translation(text)]


def texts(name):
    """Every text of a module; of f-strings the template, with the names of what is filled in."""
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            )
