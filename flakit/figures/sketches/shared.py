"""What several sketches draw and say alike."""

from matplotlib.axes import Axes

from ...language import say
from ...numerics.words import number
from ..canvas import Canvas


def pointable(canvas: Canvas, name: str, ax: Axes, rows: int, columns: int) -> None:
    """Cut axes into cells that can be pointed at, whatever they measure."""
    over = canvas.figure.add_axes(ax.get_position(), frameon=False, xticks=[], yticks=[])
    over.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    canvas.pointable(name, over, rows, columns)


def short(x: float) -> str:
    return number(round(float(x), 2) + 0.0, 3)


def percent(share: float) -> str:
    if 0 < share < 0.1:
        return f"{100 * share:.2g}%"
    return f"{share:.0%}" if share != 0 else say("nothing")


def verb(names: list[str]) -> str:
    return say("is") if len(names) == 1 else say("are")


def listed(names: list[str]) -> str:
    return say(" and ").join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
