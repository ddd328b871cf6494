"""Training that drifts into a fault: the losses up to NaN, and the share of steps lost to the gates that cause it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..language import Words
from . import style
from .plots import Picture

WORDS = Words() | {
    "loss": "loss, nats a byte",
    "step": "training step",
    "died": "{name}: NaN from step {step}",
    "fatal": "The loss of each training step: {names}",
}


def fatal_run(
    runs: Mapping[str, tuple[int, Sequence[float]]],
    *,
    start: int = 0,
    end: int | None = None,
    window: int = 1,
) -> Picture:
    """Draw losses in nats per byte by training step. A run that becomes NaN ends in an orange cross; the legend gives
    the step.

    runs: by name, the index of the first step and the losses from there on. start, end: the range of steps.
    window: steps per mean; the last window may be shorter."""
    ends = {name: _first_nan(losses) for name, (_, losses) in runs.items()}
    died = {name: first + ends[name] for name, (first, _) in runs.items() if ends[name] is not None}
    labels = {name: WORDS.say("died", name=name, step=died[name]) if name in died else name for name in runs}
    end = max(first + len(losses) for first, losses in runs.values()) if end is None else end
    height = 2.6
    picture = Picture(height, WORDS.say("fatal", names="; ".join(labels.values())))
    with style.context():
        ax = picture.figure.add_axes((0.075, 1 - (height - 0.5) / height, 0.9, (height - 0.85) / height))
        for n, ((name, (first, values)), look) in enumerate(zip(runs.items(), style.LINES, strict=False)):
            x, y = _means(first, values[: ends[name]], window)
            shown = (x >= start) & (x <= end)
            ax.plot(x[shown], y[shown], **look | {"linewidth": 2.6 if n == 0 else 1.5}, label=labels[name])
            if died.get(name, math.inf) <= end and ends[name]:
                ax.plot(x[-1], y[-1], "x", color=style.BROKEN, markersize=11, markeredgewidth=3, zorder=9)
        ax.set(ylabel=WORDS["loss"], xlabel=WORDS["step"], xlim=(start, end))
        picture.figure.legend(
            *ax.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.065, 1.0), ncols=3, handlelength=3
        )
    return picture


def _means(first: int, values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle step and the mean loss of each window, [windows] each."""
    y = np.asarray(values, dtype=np.float64)
    parts = [y[n : n + window] for n in range(0, len(y), window)]
    x = [first + n * window + (len(part) - 1) / 2 for n, part in enumerate(parts)]
    return np.array(x), np.array([part.mean() for part in parts])


def _first_nan(losses: Sequence[float]) -> int | None:
    """Return the index of the first loss that is not finite, None if all are."""
    return next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)


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
