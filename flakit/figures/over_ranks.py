"""Efficiency against the number of ranks: one sequence over many GPUs, predicted by `bench.simulate` and measured."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import PercentFormatter

from . import style
from .plots import Picture


def over_ranks(
    title: str,
    ranks: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    measured: Mapping[str, Sequence[tuple[int, float, bool]]],
    *,
    height: float = 3.1,
) -> Picture:
    """Draw panels side by side, a line per name: the efficiency, from 0 to 1, over the number of ranks (GPUs).

    measured: points (ranks, efficiency, whether the dot is filled) of the first panel, by the name of their line.
    Raises ValueError for more than seven lines or a line of another length than ranks."""
    for name, lines in panels.items():
        if len(lines) > len(style.LINES):
            raise ValueError(f"panels[{name!r}]: expected at most {len(style.LINES)} lines, got {len(lines)}")
        if any(len(line) != len(ranks) for line in lines.values()):
            raise ValueError(f"panels[{name!r}]: expected {len(ranks)} efficiencies like ranks for every line")
    summaries = [f"{name}: {', '.join(lines)}" for name, lines in panels.items()]
    picture = Picture(height, f"{title}: efficiency against ranks. {'; '.join(summaries)}".replace("$", ""), width=9.4)
    with style.context():
        picture.figure.text(0.01, 0.985, title, va="top", fontsize=10)
        axes = picture.figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        picture.figure.subplots_adjust(left=0.085, right=0.99, bottom=0.155, top=0.83, wspace=0.07)
        for ax, (name, lines) in zip(axes, panels.items(), strict=True):
            for look, (words, line) in zip(style.LINES, lines.items(), strict=False):
                ax.plot(ranks, line, **look, label=words)
                for at, efficiency, filled in measured.get(words, ()) if ax is axes[0] else ():
                    face, size = (look["color"], 5) if filled else ("white", 9)  # a filled dot may lie in a hollow one
                    dot = {"markerfacecolor": face, "markeredgecolor": look["color"], "markersize": size}
                    ax.plot(at, efficiency, "o", **dot, zorder=5 if filled else 4)
            ax.set_title(name, fontsize=9.5)
            ax.set(xlabel="ranks (log scale)", xscale="log", ylim=(0, 1.03))
            ax.set_xticks([r for n, r in enumerate(ranks) if n % 2 == 0])
            ax.minorticks_off()
            ax.xaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_major_formatter(PercentFormatter(1))
            ax.legend(loc="lower left", handlelength=2.6)
        axes[0].set_ylabel("efficiency")
    return picture
