"""The words of a picture: large enough, inside it, none over another."""

from matplotlib.text import Text


def assert_legible(canvas, least=8.5):
    """Every word that can be seen, as drawn now."""
    canvas.png()
    width, height = canvas.pixels
    renderer, boxes, beyond = canvas._agg.get_renderer(), [], _beyond(canvas.figure)
    beyond |= {text for ax in canvas.figure.axes if not ax.get_visible() for text in ax.findobj(Text)}
    for text in canvas.figure.findobj(Text):
        words, box = text.get_text(), text.get_window_extent(renderer)
        seen = text.get_visible() and (text.axes is None or text.axes.get_visible())
        if not (words and seen and text not in beyond):
            continue
        assert text.get_fontsize() >= least, f"{words} is small"
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, f"{words} is cut off"
        (left, bottom), (right, top) = box.min.tolist(), box.max.tolist()
        for other, (left_of, bottom_of, right_of, top_of) in boxes:
            # Some of the empty space around letters may be shared.
            x, y = min(right, right_of) - max(left, left_of), min(top, top_of) - max(bottom, bottom_of)
            assert x <= 1 or y <= 3, f"{words} lies over {other}"
        boxes.append((words, (left, bottom, right, top)))


def _beyond(figure):
    """The words of ticks beyond the ends of an axis, which are made but not drawn."""
    found = set()
    for ax in figure.axes:
        for axis, n in ((ax.xaxis, 0), (ax.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                labels = tick.label1, tick.label2
                found |= {x for x in labels if not (axis.get_visible() and low <= x.get_position()[n] <= high)}
    return found
