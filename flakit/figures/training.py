"""Training runs: loss by step for several models, and the share of steps lost to the gates that cause a fault."""

from collections.abc import Mapping, Sequence

import numpy as np
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


def lost_steps(
    columns: Mapping[str, Mapping[str, Sequence[float]]],
    gates: Mapping[str, Sequence[Sequence[float]]],
    *,
    window: int,
    limit: float,
) -> Picture:
    """Draw two plots per name: the share of lost training steps, and below it one run's exponents with their limit.

    columns: by name, then by the curve's label, the share lost in each window of `window` steps. gates: by the same
    names (else ValueError is raised), the 0, 10, 50, 90 and 100% quantiles of the exponents that the gates cause, at
    each step, [steps, 5]. limit: the exponent beyond which a step's gradient is NaN, so that the step is lost."""
    if list(columns) != list(gates):
        raise ValueError(f"gates: expected the names {', '.join(columns)}, got {', '.join(gates)}")
    words = [f"{name}: lost steps of {', '.join(lines)}" for name, lines in columns.items()]
    picture = Picture(
        4.6, f"{'; '.join(words)}; below, the exponents that the gates make, against the limit {limit:.2f}"
    )
    wide = 0.9 / len(columns)
    with style.context():
        for n, (name, lines) in enumerate(columns.items()):
            left = 0.085 + n * wide
            above = picture.figure.add_axes((left, 0.62, wide - 0.075, 0.25))
            for (label, share), look in zip(lines.items(), style.LINES[1::-1] + style.LINES[2:], strict=False):
                at = (np.arange(len(share)) + 0.5) * window
                above.plot(at, share, **look, label=label, zorder=3 - n)
            above.set(title=name, ylim=(-0.04, 1.04))
            above.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
            above.tick_params(labelbottom=False)
            below = picture.figure.add_axes((left, 0.12, wide - 0.075, 0.44), sharex=above)
            low, tenth, middle, ninth, high = np.asarray(gates[name], dtype=np.float64).T
            steps = np.arange(len(low))
            below.fill_between(steps, low, high, color=style.SKY, alpha=0.35, linewidth=0, label="all exponents")
            below.fill_between(steps, tenth, ninth, color=style.BLUE, alpha=0.45, linewidth=0, label="80% of them")
            below.plot(steps, middle, color=style.BLACK, linewidth=1.2, label="median")
            below.axhline(limit, **style.LAW, label=f"law: lost above {limit:.2f}")
            bad = high > limit
            below.plot(steps[bad], high[bad], "x", color=style.BROKEN, markersize=3.5, label="a lost step's largest")
            below.set(xlabel="training step", xlim=(0, len(low)), ylim=(0, 1.18 * max(limit, np.nanmax(high))))
            if n == 0:
                above.set_ylabel("lost steps")
                below.set_ylabel("largest exponent")
                handles = above.get_legend_handles_labels()
                picture.figure.legend(*handles, loc="upper right", ncols=len(lines), bbox_to_anchor=(0.99, 1.0))
                below.legend(loc="lower right", handlelength=2.2, borderaxespad=0.1, labelspacing=0.25)
    return picture
