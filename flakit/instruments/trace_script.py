"""Run a script under `flakit.trace`, as `flakit trace` does in a process of its own."""

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


def start(script: Path, arguments: Sequence[str], *options: str, interpret: bool = False) -> int:
    """Start a process for `main`, with Triton's interpreter where there is no GPU or it is asked for; its status."""
    import torch

    # The interpreter is numpy, and warns of the infinities that are looked for.
    env = {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::RuntimeWarning")}
    if interpret or not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", __name__, *options, "--", str(script), *arguments]
    return subprocess.call(command, env=env)


def main(words: Sequence[str] | None = None) -> int:
    """0: all finite; 1: something was found; 2: the script could not run to its end, what was found until then said."""
    parser = argparse.ArgumentParser(prog="flakit trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)

    from rich.console import Console

    from .trace import trace

    sys.argv = [str(asked.script), *asked.arguments]
    sys.path[0] = str(asked.script.resolve().parent)
    ended = None
    with trace() as found:
        try:
            runpy.run_path(str(asked.script), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                ended = f"it left with {leaving.code!r}"
        except BaseException as error:
            kept = error.__traceback__
            while kept is not None and kept.tb_frame.f_code.co_filename != str(asked.script):
                kept = kept.tb_next
            traceback.print_exception(type(error), error, kept or error.__traceback__)
            ended = f"{type(error).__name__}"
    Console().print(found)
    if asked.json:
        asked.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    if asked.picture and found.first is not None:
        asked.picture.write_bytes(found.picture().png())
    if ended is not None:
        print(f"flakit trace: {asked.script} did not come to its end: {ended}", file=sys.stderr)
        return COULD_NOT_RUN
    return FINITE if found.finite else FOUND


if __name__ == "__main__":
    sys.exit(main())
