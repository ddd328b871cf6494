"""Text as bytes: any file, or, without a download, the source of the running Python's standard library.

corpus = standard_library()  # or text("book.txt")
tokens, targets = corpus.batch(8, T=128, generator=torch.Generator().manual_seed(0))
"""

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from .layers import whole


@dataclass(frozen=True)
class Corpus:
    """A byte-level corpus. text: all bytes, [n], uint8. A token is a byte; its target is the next byte."""

    text: Tensor
    vocab = 256

    def batch(self, size: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw `size` windows at random positions; return tokens and targets, each [size, T] int64. Raises ValueError
        if T is not between 1 and the number of bytes less one."""
        if not 1 <= T < len(self.text):
            raise ValueError(f"T: expected 1 to {len(self.text) - 1}, the bytes of the corpus less one, got {T}")
        start = torch.randint(len(self.text) - T, (size, 1), generator=generator, device="cpu")
        pieces = self.text[start + torch.arange(T + 1, device="cpu")].long()
        return pieces[:, :-1], pieces[:, 1:]

    def split(self, share: float = 0.1) -> tuple["Corpus", "Corpus"]:
        """Return the text without its last `share`, for training, and that share. ValueError unless 0 < share < 1."""
        if not 0 < share < 1:
            raise ValueError(f"share: expected a number above 0 and below 1, got {share!r}")
        at = round(len(self.text) * (1 - share))
        return Corpus(self.text[:at]), Corpus(self.text[at:])


def text(path: Path | str) -> Corpus:
    """Return a file as a corpus, mapped into memory: a batch reads only the bytes it needs.

    Raises FileNotFoundError if the file does not exist, ValueError if it is empty."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a file, {path} is none")
    size = path.stat().st_size
    if not size:
        raise ValueError(f"path: expected a file with text in it, {path} is empty")
    return Corpus(torch.from_file(str(path), size=size, dtype=torch.uint8))


@lru_cache
def standard_library(modules: int | None = None) -> Corpus:
    """Return the source of the standard library's modules in alphabetical order, without packages: some 5 MB.

    modules: take only this many. The text depends on the version of Python. Raises FileNotFoundError if this Python has
    no source files, ValueError for fewer than one module."""
    if modules is not None:
        whole("modules", modules)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]
    if not files:
        raise FileNotFoundError(f"no *.py in {sysconfig.get_paths()['stdlib']}: this Python came without its source")
    return Corpus(torch.from_numpy(np.frombuffer(b"".join(f.read_bytes() for f in files), dtype=np.uint8).copy()))
