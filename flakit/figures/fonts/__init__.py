"""The font for Chinese in pictures, used where matplotlib's own font has no glyph: its family name and its file."""

from pathlib import Path

FAMILY = "flakit Sans SC"
FILE = Path(__file__).parent / "flakit-sans-sc.otf"
