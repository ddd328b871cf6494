"""Training that drifts into a fault: the share of steps lost to the gates that cause it."""

from collections.abc import Mapping, Sequence

import numpy as np

from . import style
from .plots import Picture


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
