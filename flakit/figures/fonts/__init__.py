"""The font that writes Chinese in pictures, where matplotlib's own has no glyph."""

from pathlib import Path

FAMILY = "flakit Sans SC"
FILE = Path(__file__).parent / "flakit-sans-sc.otf"
