"""Cut the font that writes Chinese in pictures out of Noto Sans CJK; needs fonttools, which comes with matplotlib.

    python -m flakit.figures.fonts.build NotoSansCJK-Regular.ttc [page.json page.ipynb …]

The subset has the 3,755 characters of GB 2312's first level, which is nearly all of modern text, Chinese punctuation,
every Chinese character of the named files, such as the translated words and notebooks, and ASCII.
"""

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTCollection

from . import FAMILY, FILE

_SOURCE = "Noto Sans CJK SC"
_SIGNS = {*range(0x20, 0x7F), *map(ord, "·×—‘’“”…→−≤￥"), *range(0x3001, 0x3018), *range(0xFF01, 0xFF5F)}


def characters(texts: Iterable[str] = ()) -> set[int]:
    """Return the code points of the font: GB 2312's first level, signs, and further Chinese characters of the texts."""
    level = [bytes((row, cell)) for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF)][:3755]
    points = _SIGNS | {ord(each.decode("gb2312")) for each in level}
    return points | {ord(x) for text in texts for x in text if 0x2E80 <= ord(x) < 0xFB00}


def build(source: Path, texts: Iterable[str] = (), target: Path = FILE) -> int:
    """Write the subset of the collection's simplified Chinese font to `target`; return the file's size in bytes."""
    (font,) = (each for each in TTCollection(source) if each["name"].getDebugName(1) == _SOURCE)
    logging.getLogger("fontTools.subset").setLevel(logging.ERROR)
    options = subset.Options(hinting=False, desubroutinize=False, layout_features=[], name_IDs=["*"])
    cut = subset.Subsetter(options)
    cut.populate(unicodes=characters(texts))
    cut.subset(font)
    # Nobody's installed font is called like this, so that none is taken in its place.
    for name, words in ((1, FAMILY), (4, FAMILY), (6, FAMILY.replace(" ", "-")), (16, FAMILY)):
        font["name"].removeNames(nameID=name)
        font["name"].setName(words, name, 3, 1, 0x409)
    font["head"].modified = font["head"].created  # the same input gives the same file
    font.recalcTimestamp = False
    font.save(target)
    return target.stat().st_size


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    source, *pages = map(Path, sys.argv[1:])
    print(f"{FILE.name}: {build(source, [page.read_text() for page in pages]):,} bytes")
