"""Finds the source text of an operation, its operands and the user's stack frame, for the reports of `flakit.trace`."""

import ast
import linecache
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType


@lru_cache(maxsize=4096)
def expression_at(code: CodeType, instruction: int, dedented: bool = False) -> str:
    """Return the text of the expression that a bytecode instruction computes, "" if this Python stores no positions or
    the source is gone. instruction: its offset in bytes. dedented: the code was compiled from dedented source, as by
    Triton's interpreter."""
    if not hasattr(code, "co_positions"):
        return ""
    line, last, start, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return ""
    lines = linecache.getlines(code.co_filename)[line - 1 : last]
    if not lines:
        return ""
    own = linecache.getline(code.co_filename, code.co_firstlineno)
    shift = len(own) - len(own.lstrip()) if dedented else 0
    raw = [text.encode() for text in lines]
    raw[-1] = raw[-1][: end + shift]
    raw[0] = raw[0][start + shift :]
    text = b"".join(raw).decode(errors="ignore").strip()
    return text if _parsed(text) is not None else ""


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.AST | None:
    for attempt in (f"({text}\n)", text):
        try:
            (statement,) = ast.parse(attempt).body
        except (SyntaxError, ValueError):
            continue
        return statement.value if isinstance(statement, ast.Expr) else statement
    return None


@lru_cache(maxsize=4096)
def operand_names(text: str, operation: str, count: int) -> tuple[str, ...]:
    """Return the source text of each of an operation's `count` operands, "" for those that cannot be told from `text`.
    text: source of the expression. operation: the name of the called function or method, "add" for example."""
    node = _parsed(text) if text else None
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        parts = [node.target, node.value]
    elif isinstance(node, ast.UnaryOp):
        parts = [None] * (count - 1) + [node.operand]
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.rstrip("_") == operation:
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if not (isinstance(owner, ast.Name) and owner.id in ("tl", "torch", "F")):
                    parts = [owner, *parts]
    names = [" ".join(ast.unparse(part).split()) if part is not None else "" for part in parts[:count]]
    return (*names, *[""] * (count - len(names)))


def outside(frame: FrameType | None, folders: Sequence[str]) -> FrameType | None:
    """Return the innermost frame, from `frame` outwards, whose file lies in none of the folders; None if all do."""
    while frame is not None and frame.f_code.co_filename.startswith(tuple(folders)):
        frame = frame.f_back
    return frame
