"""Loss by training step for several models: a panel per initialization and a line per seed."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullFormatter

from . import style
from .plots import Picture

Lines = Mapping[str, Mapping[int, Sequence[float]]]
"""Losses, one per training step, by model and seed."""


def loss_curves(
    steps: Sequence[float],
    panels: Mapping[str, Lines],
    *,
    ylabel: str = "loss",
    levels: Mapping[str, float] | None = None,
    height: float = 3.0,
) -> Picture:
    """Draw panels side by side with the same logarithmic axes. All seeds of a model share colour and dash.

    steps: the training step of each loss, the same for all. levels: horizontal lines by name. Raises ValueError without
    panels, for more than seven models, or for losses that do not match steps."""
    if not panels:
        raise ValueError("panels: expected at least one, got none")
    for name, lines in panels.items():
        if len(lines) > len(style.LINES):
            raise ValueError(f"panels[{name!r}]: expected at most {len(style.LINES)} lines, got {len(lines)}")
        for line, seeds in lines.items():
            if any(len(losses) != len(steps) for losses in seeds.values()):
                raise ValueError(f"panels[{name!r}][{line!r}]: expected {len(steps)} losses like steps for every seed")
    names = dict.fromkeys(line for lines in panels.values() for line in lines)
    picture = Picture(height, f"{ylabel} of {', '.join(names)} over training steps: {'; '.join(panels)}")
    with style.context():
        axes = picture.figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        picture.figure.subplots_adjust(left=0.085, right=0.86, bottom=0.17, top=0.9, wspace=0.06)
        look = dict(zip(names, style.LINES, strict=False))
        for ax, (name, lines) in zip(axes, panels.items(), strict=True):
            for line, seeds in lines.items():
                for n, losses in enumerate(seeds.values()):
                    ax.plot(steps, losses, **look[line] | {"linewidth": 1.3}, label=None if n else line)
            for words, at in (levels or {}).items():
                ax.axhline(at, color=style.GREY, linewidth=1, zorder=0)
                ax.text(steps[-1], at, words, color=style.GREY, fontsize=8, ha="right", va="bottom")
            ax.set(title=name, xlabel="training step (log scale)", xscale="log", yscale="log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set_yticks([0.5, 1, 2, 5])
            ax.yaxis.set_minor_formatter(NullFormatter())
        low = min(min(losses) for lines in panels.values() for seeds in lines.values() for losses in seeds.values())
        high = max(max(losses) for lines in panels.values() for seeds in lines.values() for losses in seeds.values())
        axes[0].set(ylim=(0.9 * low, 1.15 * max(high, *(levels or {}).values(), 0)), ylabel=style.logarithmic(ylabel))
        picture.figure.legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.865, 0.9))
    return picture
