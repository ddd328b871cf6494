"""Runs a script under `flakit.trace`, in a process of its own, for the command `flakit trace`."""

import argparse
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

FINITE, FOUND, COULD_NOT_RUN = 0, 1, 2


def start(script: str, arguments: Sequence[str], *options: str, interpret: bool = False) -> int:
    """Run `main` in a new process, with Triton's interpreter on request or without a GPU, and return its exit status.
    script: a file or, with the option --module, the name of a module. arguments: its own. options: those of `main`."""
    import torch

    # The interpreter is numpy, which warns of the very infinities that a trace looks for.
    env = {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::RuntimeWarning")}
    if interpret or not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", __name__, *options, "--", script, *arguments]
    return subprocess.call(command, env=env)


def main(words: Sequence[str] | None = None) -> int:
    """Trace the script, print the report and return the exit status. words: the command line, default this process's.

    0: every value is finite and every access in bounds (and, with --digits, every result accurate). 1: not so. 2:
    nothing ran, or the script did not reach its end; the report covers what did run.
    """
    parser = argparse.ArgumentParser(prog="flakit trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)

    from rich.console import Console

    from .trace import trace

    sys.path[0] = os.getcwd() if args.module else str(Path(args.script).resolve().parent)
    with trace(digits=args.digits) as result:
        ended = _run(args)
    if args.rounds and ended is None and result.ran and result.digits is not None:
        from .digits_rounding import Rounds

        result.digits.rounds = Rounds.of(lambda: _run(args), args.rounds)
    Console().print(result)
    if args.json:
        args.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    if args.picture and result.digits is not None and result.first is None and result.digits.lines:
        args.picture.write_bytes(result.digits.picture().png())
    elif args.picture and result.first is not None:
        args.picture.write_bytes(result.picture().png())
    if ended is not None:
        print(f"flakit trace: {args.script} did not come to its end: {ended}", file=sys.stderr)
        return COULD_NOT_RUN
    if not result.ran:
        return COULD_NOT_RUN
    return FINITE if result.finite and (result.digits is None or result.digits.accurate) else FOUND


def _run(args: argparse.Namespace) -> str | None:
    """Run the script; return how it ended ("RuntimeError", for example), None if it reached its end."""
    sys.argv = [args.script, *args.arguments]
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return f"it left with {getattr(leaving.code, 'value', leaving.code)!r}"
    except BaseException as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != args.script:
            frame = frame.tb_next
        in_it = isinstance(error, SyntaxError) and error.filename == args.script
        traceback.print_exception(type(error), error, None if in_it else frame or error.__traceback__)
        return f"{type(error).__name__}"
    return None


if __name__ == "__main__":
    sys.exit(main())
