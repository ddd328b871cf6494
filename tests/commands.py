"""Commands that a test runs to their end."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1].split()
"""What `make` can be asked for."""


def completed(*command, cwd=ROOT, **options):
    """Run a command that has no input; return its `CompletedProcess`, with what it printed as text."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
