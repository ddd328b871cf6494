"""Finds the expression, the operands and the user's frame of a computation, as far as Python knows them."""

import ast
import linecache
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType


@lru_cache(maxsize=4096)
def expression_at(code: CodeType, instruction: int, dedented: bool = False) -> tuple[int, str]:
    """The line and the text of the expression that an instruction computes, "" if this Python does not know it.

    dedented: the code was compiled from dedented source, as Triton's interpreter does.
    """
    if not hasattr(code, "co_positions"):
        return 0, ""
    line, last, start, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return line or 0, ""
    lines = linecache.getlines(code.co_filename)[line - 1 : last]
    if not lines:
        return line, ""
    own = linecache.getline(code.co_filename, code.co_firstlineno)
    shift = len(own) - len(own.lstrip()) if dedented else 0
    raw = [text.encode() for text in lines]
    raw[-1] = raw[-1][: end + shift]
    raw[0] = raw[0][start + shift :]
    text = b"".join(raw).decode(errors="ignore").strip()
    return line, text if _parsed(text) is not None else ""


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
    """The source of each of an operation's `count` operands; "" for all if the text does not tell."""
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
    """The innermost frame whose file is in none of the folders."""
    while frame is not None and frame.f_code.co_filename.startswith(tuple(folders)):
        frame = frame.f_back
    return frame
