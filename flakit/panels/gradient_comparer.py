"""Chunk against recurrent against float64: how far every output and gradient is off, and where."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..cases.decay_gradient import running_sums
from ..figures.gradients import Curves, GradientFigure
from ..numerics import recorded
from ..numerics.gradients import MEASURES, gradient_rows, rounding_error
from ..numerics.on_gpu import RECORDINGS
from ..numerics.operators import OPERATORS
from ..numerics.words import error, number
from ..ops.common.dispatch import choose_backend
from . import knobs
from .base import ButtonRun, Panel
from .shared import chosen, decay_knobs, literal, only_for, own_default, own_options

HERE, RECORDED = "here", "recorded"

SUMS = "running sums"
OTHERS = {"rwkv6": {SUMS: running_sums}}
"""By operator: further ways to make some of its tensors that are worth comparing."""
_PROFILES = {name: {"rwkv6": "logsigmoid"}.get(name, op.profile) for name, op in OPERATORS.items()}
_DECAYS = {name: f"d{op.decay}" for name, op in OPERATORS.items()}
_LABELS = {SUMS: "dw from running sums, as widely done"}

_COLUMNS = ("op", "form", "dtype", "T", "decay", "tensor", *MEASURES, "non_finite", "rms")
_DTYPES = ("float32", "float16", "bfloat16")
_LENGTHS = (16, 32, 64, 128, 256, 512)
_LONG = (1024, 2048, 4096)  # more than a slider should ask of a CPU
_ALONG = {
    "T": (64, 128, 256, 512, *_LONG),
    "decay": (-0.01, -0.03, -0.1, -0.3, -1.0, -2.0, -4.0, -8.0, -12.0, -20.0, -35.0, -50.0),
    "dtype": _DTYPES,
}
_WORDS = {"T": "length", "decay": "constant decay", "dtype": "dtype"}
_XLABELS = {"T": "length T", "decay": "|log decay| of every token", "dtype": ""}


class GradientComparer(Panel):
    """Errors against float64 at one setting, measured here or recorded on a GPU; below, along time and a knob."""

    name = "gradient-comparer"
    readout_lines = 4

    def __init__(self, op: str = "rwkv6", **settings):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.recordings = {name: found for name in OPERATORS if (found := _recording(name)) is not None}
        self._figures: dict[str, GradientFigure] = {}
        self._measured: tuple[tuple, list[Mapping]] | None = None
        self._swept: dict | None = None
        sources = {f"measured here, {self.device}": HERE}
        if self.recordings:
            sources["recorded on a GPU"] = RECORDED
        first = next(iter(OPERATORS))
        made = {
            "op": knobs.operator_choice(first),
            "source": knobs.choice(HERE, sources, "numbers"),
            "dtype": knobs.choice("bfloat16", _DTYPES, "dtype"),
            **decay_knobs(self, _PROFILES[first], -8.0),
            "T": knobs.steps(64, _LENGTHS + (_LONG if self.device == "cuda" else ()), "length T"),
            "K": knobs.steps(32, (16, 32, 64), "K = V"),
            "M": knobs.steps(32, (16, 32, 64), "slots M"),
            "HQ": knobs.steps(1, (1, 2, 4), "query heads"),
            "tensor": knobs.choice(_DECAYS[first], _tensors(first), "below"),
            "measure": knobs.choice("l2", {words: name for name, words in MEASURES.items()}, "its"),
            "along": knobs.choice("T", {words: name for name, words in _WORDS.items()}, "along"),
        }
        own_default(self, made["op"], made["profile"], _PROFILES)
        own_options(self, made["op"], made["tensor"], _tensors, _DECAYS)
        for name in ("M", "HQ"):
            only_for(self, made["op"], made[name], [op for op, each in OPERATORS.items() if name in each.sizes])
        sweep = ButtonRun("measure along", self._sweep, done=self._keep, failed=self.fail)
        self.sweep = sweep
        super().__init__(
            made,
            {"op": op, **settings},
            alt="Errors of the output and every gradient against float64, chunk and recurrent: relative L2, worst "
            "element and worst row; below, one tensor's error along time and along length, decay or dtype",
            runs=(sweep,),
        )

    def _figure(self, op: str) -> GradientFigure:
        if op not in self._figures:
            labels = {name: _LABELS.get(name, name) for name in (*OPERATORS[op].forms, *OTHERS.get(op, ()))}
            self._figures[op] = GradientFigure(labels, _tensors(op), MEASURES)
        return self._figures[op]

    # Numbers.

    def compute(self, op, source, dtype, profile, decay, T, seed, **setting) -> list[Mapping]:
        """The rows of `gradient_rows` at the knobs' setting, or the nearest recorded ones."""
        decay = chosen(profile, decay)
        if source == RECORDED:
            return _nearest(self._recording(op), op=op, dtype=dtype, T=T, decay=decay)
        setting = {"op": op, "dtype": dtype, "T": T, "decay": decay, **_sizes(op, setting), "seed": seed}
        wanted = tuple(setting.values())
        if self._measured is None or self._measured[0] != wanted:
            self._measured = (wanted, self._measure(**setting, over_time=True))
        return self._measured[1]

    def _measure(self, *, op: str, dtype: str, **setting) -> list[Mapping]:
        where = {"device": self.device, "recurrence": False}  # chunks in float64: quick enough for a slider
        return gradient_rows(op, others=OTHERS.get(op), H=1, dtype=getattr(torch, dtype), **where, **setting)

    def _recording(self, op: str) -> recorded.Recording:
        if op not in self.recordings:
            raise ValueError(f"numbers: expected an operator with a recording in data/, got {OPERATORS[op].label}")
        return self.recordings[op]

    def _sweep(self, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> dict:
        """Everything as the knobs say, but for the one that is run through."""
        at = self.setting
        along, decay = at["along"], chosen(at["profile"], at["decay"])
        setting = {name: at[name] for name in ("op", "dtype", "T", "seed")} | {"decay": decay, **_sizes(at["op"], at)}
        rows, values = [], _ALONG[along]
        for n, value in enumerate(values):
            progress(n, len(values))
            if cancelled():
                break
            rows += self._measure(**{**setting, along: value})
        else:
            progress(len(values), len(values))
        return {"along": along, "setting": setting, "rows": rows}

    def _keep(self, swept: dict) -> None:
        if swept["rows"]:
            self._swept = swept
            self.redraw()

    # The picture.

    def draw(self, rows, *, op, source, tensor, measure, along, **_) -> None:
        figure = self._figure(op)
        self.canvas = figure.canvas
        at = rows[0]
        setting = f"{at['dtype']}, T = {at['T']}, decay {number(at['decay'], 5)}"
        where = self.recordings[op].label if source == RECORDED else f"measured here on {self.device}"
        now = {"T": at["T"], "decay": _size(at["decay"]), "dtype": None}
        if source == RECORDED:
            curves = [self._recorded_curve(axis, at, tensor, measure, now[axis]) for axis in ("T", "decay")]
        else:
            curves = [self._along_time(rows, tensor), self._along_knob(at, along, tensor, measure, now[along])]
        figure.update(
            title=f"{OPERATORS[op].label} against float64: {setting}",
            where=where,
            errors={(m, row["form"], row["tensor"]): row[m] for row in rows for m in MEASURES},
            rounding=rounding_error(getattr(torch, at["dtype"])),
            curves=curves,
        )

    def _along_time(self, rows: Sequence[Mapping], tensor: str) -> Curves:
        title = f"{tensor}: error of each time step / RMS of {tensor}"
        errors = {row["form"]: row["along_time"] for row in rows if row["tensor"] == tensor and row["along_time"]}
        if not errors:
            return Curves(title, "", [], {}, note=f"{tensor} has no time axis")
        return Curves(title, "time t", range(len(next(iter(errors.values())))), errors)

    def _along_knob(self, at: Mapping, along: str, tensor: str, measure: str, now: float | None) -> Curves:
        swept = self._swept
        if swept is not None and (swept["along"], swept["setting"]["op"]) == (along, at["op"]):
            fixed = {name: x for name, x in swept["setting"].items() if name != along}
            return _curve(swept["rows"], along, fixed, tensor, measure, now, f"measured here on {self.device}")
        if self.device == "cpu" and at["op"] in self.recordings:
            return self._recorded_curve(along, at, tensor, measure, now)
        return Curves(f"{tensor} along {_WORDS[along]}", "", [], {}, note="press “measure along”")

    def _recorded_curve(self, along: str, at: Mapping, tensor: str, measure: str, now: float | None) -> Curves:
        recording = self.recordings[at["op"]]
        near = _nearest(recording, **{name: at[name] for name in ("op", "dtype", "T", "decay")})[0]
        fixed = {name: near[name] for name in ("op", "dtype", "T", "decay") if name != along}
        rows = recording.select(**fixed)
        return _curve(rows, along, fixed, tensor, measure, now, f"recorded, {recording.meta['device']}")

    # Words.

    def describe(self, rows, *, op, source, dtype, T, profile, decay, tensor, measure, **_) -> str:
        at = rows[0]
        if source == RECORDED:
            words = f"R{self.recordings[op].label[1:]}."
            if (at["T"], at["decay"]) != (T, chosen(profile, decay)):
                words += f" Nearest recorded setting: T = {at['T']}, decay {number(at['decay'], 5)}."
        else:
            kernels = choose_backend(None, torch.empty(0, device=self.device)) == "triton"
            how = "Triton kernels" if kernels else "chunk in PyTorch, recurrent step by step"
            words = f"Ran here on {self.device}: {how}, torch {torch.__version__}. Truth: the same inputs in float64."
        lines = [words]
        shown = ", ".join(f"{row['form']} {_said(row, measure)}" for row in rows if row["tensor"] == tensor)
        size = next(row["rms"] for row in rows if row["tensor"] == tensor)
        words = f"{tensor}, {MEASURES[measure]}: {shown}"
        limits = torch.finfo(getattr(torch, at["dtype"]))
        if 0 < size < limits.smallest_normal:
            words += (
                f"; its true size, {size:.1e}, is below what {at['dtype']} holds in full ({limits.smallest_normal:.1e})"
            )
        lines.append(f"{words}.")
        bad = [f"{row['tensor']} ({row['form']}, {row['non_finite']} values)" for row in rows if row["non_finite"]]
        worst = max((row for row in rows if row["form"] in OPERATORS[op].forms), key=lambda row: row[measure])
        lines.append(
            f"Not finite: {', '.join(bad)}."
            if bad
            else f"All finite; largest of the operator's own: {worst['tensor']} ({worst['form']}), "
            f"{_said(worst, measure)}."
        )
        return "\n".join(lines)

    def script(self, *, op, source, dtype, profile, decay, T, seed, **setting) -> str:
        decay = chosen(profile, decay)
        show = """for row in rows:
    errors = "  ".join(f"{name} {row[name]:.3e}" for name in ("l2", "worst_element", "worst_row"))
    print(f"{row['tensor']:12} {row['form']:13} {errors}  non-finite {row['non_finite']}")
"""
        if source == RECORDED:
            at = _nearest(self._recording(op), op=op, dtype=dtype, T=T, decay=decay)[0]
            return f"""from flakit.numerics import recorded

run = recorded.read({RECORDINGS[op]!r})
print(run.label)
print("remade by:", run.meta["command"])
rows = run.select(op={op!r}, dtype={dtype!r}, T={at["T"]}, decay={literal(at["decay"])})
{show}"""
        sizes = ", ".join(f"{name}={size}" for name, size in _sizes(op, setting).items())
        others = OTHERS.get(op, {})
        imports = "".join(f"from {make.__module__} import {make.__name__}\n" for make in others.values())
        given = f"{{{', '.join(f'{name!r}: {make.__name__}' for name, make in others.items())}}}"
        return f"""import torch
{imports}from flakit.numerics.gradients import gradient_rows

rows = gradient_rows(
    {op!r}, others={given},
    T={T}, H=1, {sizes}, decay={literal(decay)}, dtype=torch.{dtype}, device={self.device!r}, seed={seed},
    recurrence=False,  # the float64 truth in chunks, as the panel does
)
{show}"""


def _tensors(op: str) -> tuple[str, ...]:
    return OPERATORS[op].outputs + tuple(f"d{name}" for name in OPERATORS[op].tensors)


def _sizes(op: str, setting: Mapping[str, object]) -> dict[str, int]:
    """The knobs of sizes that the operator has, as `flakit.inputs` takes them."""
    return {name: setting[name] for name in ("K", "M", "HQ") if name in OPERATORS[op].sizes}


def _recording(op: str) -> recorded.Recording | None:
    """None where there is none; a recording that cannot be read is an error to see."""
    if op not in RECORDINGS or not (recorded.data_folder() / f"{RECORDINGS[op]}.json").is_file():
        return None
    return recorded.read(RECORDINGS[op], needs=_COLUMNS)


def _nearest(recording: recorded.Recording, *, op: str, dtype: str, T: int, decay: str | float) -> list[Mapping]:
    """The rows of the recorded setting nearest to the one asked for, of the same dtype."""
    rows = recording.select(op=op, dtype=dtype)
    if not rows:
        raise ValueError(f"dtype: expected one of {', '.join(recording.values('dtype'))} in the recording, got {dtype}")
    decay = _closest(decay, {row["decay"] for row in rows})
    rows = [row for row in rows if row["decay"] == decay]
    T = _closest(T, {row["T"] for row in rows})
    return [row for row in rows if row["T"] == T]


def _closest(wanted: str | float, recorded_values: Iterable[str | float]) -> str | float:
    """The value itself, else the nearest by ratio; a name that was not recorded gives the first by alphabet."""
    values = set(recorded_values)
    if wanted in values:
        return wanted
    names, numbers = sorted(x for x in values if isinstance(x, str)), [x for x in values if not isinstance(x, str)]
    if isinstance(wanted, str) or not numbers:
        return names[0] if names else max(numbers)

    def size(x: float) -> float:
        return math.log(min(max(abs(x), 1e-9), 1e9))

    return min(numbers, key=lambda x: abs(size(x) - size(wanted)))


def _curve(rows, along, fixed, tensor, measure, now, where) -> Curves:
    """One tensor's error along a knob."""
    of_tensor = [row for row in rows if row["tensor"] == tensor]
    values = dict.fromkeys(row[along] for row in of_tensor)
    if along == "decay":
        values = [value for value in values if _size(value) is not None]
    values = sorted(values, key=_DTYPES.index if along == "dtype" else abs)
    errors = {}
    for form in dict.fromkeys(row["form"] for row in of_tensor):
        found = {row[along]: row[measure] for row in of_tensor if row["form"] == form}
        errors[form] = [found.get(value, math.nan) for value in values]
    setting = [
        fixed.get("dtype"),
        f"T = {fixed['T']}" if "T" in fixed else None,
        f"decay {number(fixed['decay'], 5)}" if "decay" in fixed else None,
    ]
    title = f"{tensor} along {_WORDS[along]} ({', '.join(filter(None, setting))})\n{where}"
    x = values if along == "dtype" else [abs(value) for value in values]
    return Curves(title, _XLABELS[along], x, errors, log=along != "dtype", now=now)


def _size(decay: str | float) -> float | None:
    """|decay| where a logarithmic axis has a place for it."""
    return None if isinstance(decay, str) or decay in (0, -math.inf) else -decay


def _said(row: Mapping, measure: str) -> str:
    if math.isfinite(row[measure]) or row["non_finite"]:
        return error(row[measure])
    return "infinite (not 0 where the truth is)"


def gradient_comparer(op: str = "rwkv6", **settings) -> GradientComparer:
    """A panel that compares an operator's forms, and the widely used dw, with float64.

    op: an operator of `flakit.numerics.operators.OPERATORS`.
    settings: any of its knobs: source ("here" or "recorded"), dtype, profile ("constant" or one of
    `flakit.numerics.inputs.DECAYS`), decay (the natural-log decay of "constant"), T, K, of GSA M (slots) and HQ (query
    heads of the one memory), tensor and measure (of the lower plots), along ("T", "decay" or "dtype": what the button
    runs through), seed.

    >>> gradient_comparer(dtype="float32", profile="constant", decay=-20)
    """
    return GradientComparer(op, **settings)
