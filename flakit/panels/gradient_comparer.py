"""The panel that compares an operator's forms, or two kernels, with float64: every tensor's errors and their place."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..cases.decay_gradient import running_sums
from ..figures.canvas import Cell
from ..figures.gradients import ERRORS, PLOTS, Curves, GradientFigure
from ..instruments.subject import Broken, Refused, Subject, import_of, load
from ..language import Words, label, rephrase, say, speaking
from ..numerics import recorded
from ..numerics.errors import relative_l2
from ..numerics.evaluate import recurrence
from ..numerics.gradients import MEASURES, along_time, gradient_rows, rounding_error
from ..numerics.on_gpu import RECORDINGS
from ..numerics.operators import OPERATORS, Operator, known, operator
from ..numerics.words import error, number
from ..ops.common.dispatch import choose_backend
from . import knobs
from .base import ButtonRun, Panel
from .shared import CONSTANT, chosen, decay_knobs, literal, only_for, own_default, own_options

HERE, RECORDED = "here", "recorded"

SUMS = "running sums"
OTHERS = {"rwkv6": {SUMS: running_sums}}
"""By operator, further functions that compute some of its tensors, by name; they appear beside its own forms."""
_PROFILES = {"rwkv6": "logsigmoid"}  # its own default, a fresh model's, hardly decays

_COLUMNS = ("op", "form", "dtype", "T", "decay", "tensor", *MEASURES, "non_finite", "rms")
_DTYPES = ("float32", "float16", "bfloat16")
_LENGTHS = (16, 32, 64, 128, 256, 512)
_LONG = (1024, 2048, 4096)  # on a GPU; too slow for a slider on a CPU
_ODD = (1, 7, 17, 63, 65, 100)  # for user kernels, which may mishandle them
_ALONG = {
    "T": (64, 128, 256, 512, *_LONG),
    "decay": (-0.01, -0.03, -0.1, -0.3, -1.0, -2.0, -4.0, -8.0, -12.0, -20.0, -35.0, -50.0),
    "dtype": _DTYPES,
}
_STOPS = {-float(f"{10 ** (n / 10):.1g}") for n in range(-30, 31)}
_AXES = {"K": "channel", "V": "channel", "M": "slot", "HQ": "head"}

WORDS = Words() | {
    "here": "measured here, {device}",
    "recorded": "recorded on a GPU",
    "button": "measure along",
    "alongs": {"T": "length", "decay": "constant decay", "dtype": "dtype"},
    "xlabels": {"T": "length T", "decay": "|log decay| of every token", "dtype": ""},
    SUMS: "dw from running sums, as widely done",
    "alt": "Errors of the output and of every gradient against float64, chunk and recurrent, as dots on a logarithmic "
    "scale; beside them one tensor's error along time, and along length, decay or dtype",
    "title": "{op} against float64: {dtype}, T = {T}, decay {decay}",
    "title without": "{op} against float64: {dtype}, T = {T}",
    "where here": "measured here on {device}",
    "where recorded": "recorded, {device}",
    "decay": "decay {decay}",
    "along time": "{tensor}: error of each time step / RMS",
    "along rows": "{tensor}: error of each {axis} / RMS",
    "along knob": "{tensor} along {knob}",
    "time": "time t",
    "press": "press “measure along”",
    "errors": "{tensor}, {measure}: {errors}{size}.",
    "error": "{form} {error}",
    "small": "; its true size, {size:.1e}, is below what {dtype} holds in full ({least:.1e})",
    "bad": "Not finite: {bad}.",
    "bad tensor": "{tensor} ({form}, {count} values)",
    "fine": "All finite; largest of the two forms: {tensor} ({form}), {error}.",
    "fine alone": "All finite; largest: {tensor} ({form}), {error}.",
    "infinite": "infinite (not 0 where the truth is)",
    "triton": "Triton kernels",
    "torch": "chunk in PyTorch, recurrent token by token in float32",
    "naive": "naive token by token as its text says, gradients by autograd",
    "ran": "Ran here on {device}: {how}, torch {torch}. Truth: the same inputs in float64.",
    "nearest": " Nearest recorded setting: T = {T}, decay {decay}.",
    "dot": "{tensor}, {form}: L2 {l2}, worst row {worst_row}, worst element {worst_element}{place}",
    "place": ", {place}: {got} (true: {true})",
    "step": "{tensor}, {axis} {n}: {errors}{place}",
    "none": "{tensor}: {form} makes none of its own.",
    "mine": "mine",
    "other": "other",
    "called": "{both}, called as {op} is",
    "and": "{mine} and {other}",
    "apart": "All finite; between the two, {tensor} differs most, by {error}.",
    "failed": "{form}: {why}.",
    "without": " {form} makes no {tensors}.",
    "neither": "tensor: expected one that a kernel makes, got {tensor}",
    "slow": " {form} took {seconds:.1f} s.",
}

SLOW = 1.0
"""The seconds above which the readout reports how long a user's kernel took."""


class GradientComparer(Panel):
    """The panel of `gradient_comparer` and `compare`: errors against float64 at one setting, measured here or recorded
    on a GPU, along time and along one knob. device: "cuda" or "cpu", where it measures. own: user kernels by name."""

    name = "gradient-comparer"
    on_view = ("dtype", "decay", "tensor")
    main = "decay"
    presets = {
        "float32": {"source": HERE, "dtype": "float32", "profile": "constant", "decay": -1.0, "T": 64},
        "bfloat16": {"source": HERE, "dtype": "bfloat16", "profile": "constant", "decay": -1.0, "T": 64},
        "strong decay": {"source": HERE, "dtype": "float32", "profile": "constant", "decay": -20.0, "T": 256},
    }

    def __init__(self, op: str | Operator = "rwkv6", show=None, own=None, **settings):
        """Arguments as in `gradient_comparer`; own: user kernels by name, compared in place of the operator's forms."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.own: dict[str, Subject] = dict(own or {})
        self._refused: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self.operators = OPERATORS
        if own or isinstance(op, Operator) or op not in OPERATORS:  # one operator alone
            self.spec, of = op if isinstance(op, str) else op.name, operator(op)
            op, self.operators = of.name, {of.name: of}
            settings = ({} if own else {"T": 16}) | settings  # its truth walks token by token
        self.recordings = {name: x for name in self.operators if not own and (x := _recording(name)) is not None}
        self._measured = functools.lru_cache(maxsize=1)(functools.partial(self._measure, keep=True))
        self._swept: dict | None = None
        sources = {WORDS.say("here", device=self.device): HERE}
        if self.recordings:
            sources[WORDS["recorded"]] = RECORDED
        lengths = {*_LENGTHS, *(_LONG if self.device == "cuda" else ()), *(_ODD if self.own else ())}
        first = next(iter(self.operators))
        decays = {name: f"d{of.decay or of.value}" for name, of in self.operators.items()}
        profiles = {name: _PROFILES.get(name, of.profile) for name, of in self.operators.items()}
        own = {name: name for of in self.operators.values() for name in of.profiles}
        controls = {
            "op": knobs.choice(first, {of.label: name for name, of in self.operators.items()}, "operator"),
            "source": knobs.choice(HERE, sources, "numbers"),
            "dtype": knobs.choice("bfloat16", _DTYPES, "dtype"),
            **decay_knobs(self, profiles[first], -8.0, own, stops=_STOPS),
            "T": knobs.steps(64, sorted(lengths), "length T"),
            "K": knobs.steps(32, (16, 32, 64), "K = V"),
            "M": knobs.steps(32, (16, 32, 64), "slots M"),
            "HQ": knobs.steps(1, (1, 2, 4), "query heads"),
            "tensor": knobs.choice(decays[first], _tensors(self.operators[first]), "tensor"),
            "measure": knobs.choice("l2", {words: name for name, words in MEASURES.items()}, "its"),
            "along": knobs.choice("T", {words: name for name, words in WORDS["alongs"].items()}, "along"),
        }
        chosen_op = controls["op"]
        own_default(self, chosen_op, controls["profile"], profiles)
        own_options(self, chosen_op, controls["tensor"], lambda name: _tensors(self.operators[name]), decays)
        for name in ("M", "HQ"):
            only_for(self, chosen_op, controls[name], [op for op, of in self.operators.items() if name in of.sizes])
        for name in ("profile", "decay"):
            only_for(self, chosen_op, controls[name], [op for op, of in self.operators.items() if of.decay])
        self.sweep = ButtonRun(WORDS["button"], self._sweep, done=self._keep, failed=self.fail)
        super().__init__(controls, {"op": op, **settings}, alt=WORDS["alt"], show=show, runs=(self.sweep,))

    def _figure(self, op: str) -> GradientFigure:
        of = self.operators[op]
        forms = self.own or (*of.forms, *OTHERS.get(op, ()))
        lanes = {name: WORDS[SUMS] if name == SUMS else label(name) for name in forms}
        return self.figure(lambda width: GradientFigure(lanes, _tensors(of), width), op)

    # Numbers.

    def compute(self, op, source, dtype, profile, decay, T, tensor, seed, **setting) -> list[Mapping]:
        """Return the rows of `gradient_rows` at the setting, or the nearest recorded ones. Raise ValueError if no row
        has the selected tensor, or for an operator without a recording."""
        decay = self._decay(op, profile, decay)
        if source == RECORDED:
            return _nearest(self._recording(op), op=op, dtype=dtype, T=T, decay=decay)
        rows = self._measured(op=op, dtype=dtype, T=T, decay=decay, **self._sizes(op, setting), seed=seed)
        if not any(row["tensor"] == tensor for row in rows):
            raise ValueError(WORDS.say("neither", tensor=tensor))
        return rows

    def _decay(self, op: str, profile: str, decay: float) -> str | float | None:
        """Return the `decay` argument of `flakit.inputs`, None for an operator without a decay."""
        of = self.operators[op]
        if not of.decay:
            return None
        return profile if profile in of.profiles else chosen(profile, decay)

    def _sizes(self, op: str, setting: Mapping[str, object]) -> dict[str, int]:
        """Select from a setting the sizes that the operator has, as keyword arguments of `flakit.inputs`."""
        return {name: setting[name] for name in ("K", "M", "HQ") if name in self.operators[op].sizes}

    def _measure(self, *, op: str, dtype: str, **setting) -> list[Mapping]:
        setting |= {"device": self.device, "recurrence": False}  # the truth in chunks is fast enough
        of, forms, others = self.operators[op], None, dict(OTHERS.get(op, {}))
        if self.own:
            forms = ()
            others = {name: functools.partial(self._called_own, name, subject) for name, subject in self.own.items()}
        elif self.device == "cpu" and of.chunked is not None:
            # On a CPU the operator's recurrent form computes in float64 and rounds once, so take a float32 recurrence.
            forms = [name for name in of.forms if name != "recurrent"]
            others = {"recurrent": lambda x, do: recurrence(op, x, arriving=(do, None))} | others
        return gradient_rows(of, forms=forms, others=others, H=1, dtype=getattr(torch, dtype), **setting)

    def _called_own(self, name: str, subject: Subject, x: Mapping, do: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return a user kernel's outputs and gradients by name; {} if it refuses the setting or fails, after noting
        why. Raise RuntimeError if every kernel does."""
        self._refused.pop(name, None)
        start = time.perf_counter()
        try:
            return subject.made(x, do)
        except (Refused, Broken) as why:
            self._refused[name] = str(why)
            if len(self._refused) == len(self.own):
                raise RuntimeError("; ".join(f"{label(each)}: {why}" for each, why in self._refused.items())) from why
            return {}
        finally:
            self._seconds[name] = time.perf_counter() - start

    def _recording(self, op: str) -> recorded.Recording:
        if op not in self.recordings:
            raise ValueError(f"numbers: expected an operator with a recording in data/, got {self.operators[op].label}")
        return self.recordings[op]

    def _sweep(self, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> dict:
        """Measure along the knob "along", all others unchanged; return that knob, the setting and the rows. Raise
        ValueError along the decay of an operator without one."""
        at = self.setting
        along, op, decay = at["along"], at["op"], self._decay(at["op"], at["profile"], at["decay"])
        if along == "decay" and decay is None:
            raise ValueError(f"along: {self.operators[op].label} has no decay among its arguments")
        setting = {name: at[name] for name in ("op", "dtype", "T", "seed")}
        setting |= {"decay": decay, **self._sizes(op, at)}
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
        at = rows[0]
        where = (
            rephrase(self.recordings[op].label) if source == RECORDED else WORDS.say("where here", device=self.device)
        )
        now = {"T": at["T"], "decay": _size(at["decay"]), "dtype": None}
        if source == RECORDED:
            curves = [self._recorded_curve(axis, at, tensor, measure, now[axis]) for axis in ("T", "decay")]
        else:
            curves = [self._along_axis(rows, tensor), self._along_knob(at, along, tensor, measure, now[along])]
        of = self.operators[op]
        title = {"op": of.label, "dtype": at["dtype"], "T": at["T"], "decay": number(at["decay"], 5)}
        self._figure(op).update(
            title=WORDS.say("title" if of.decay else "title without", **title),
            where=where,
            measure=say(MEASURES[measure]),
            errors={(row["form"], row["tensor"]): row[measure] for row in rows},
            rounding=rounding_error(getattr(torch, at["dtype"])) if measure == "l2" else None,
            curves=curves,
        )

    def _along_axis(self, rows: Sequence[Mapping], tensor: str) -> Curves:
        """Return each form's errors of a tensor along time, else along its first axis other than batch and heads."""
        op = self.operators[rows[0]["op"]]
        axis = _first_axis(op, tensor)
        title = "along time" if axis == "T" else "along rows"
        title = WORDS.say(title, tensor=tensor, axis=label(_AXES.get(axis, axis)))
        of = [row for row in rows if row["tensor"] == tensor]
        errors = {row["form"]: _along(op, tensor, row["got"], row["true"]) for row in of}
        length = of[0]["true"].shape[_axes(op, tensor).index(axis)]
        return Curves(title, WORDS["time"] if axis == "T" else label(_AXES[axis]), range(length), errors)

    def _along_knob(self, at: Mapping, along: str, tensor: str, measure: str, now: float | None) -> Curves:
        swept = self._swept
        if swept is not None and (swept["along"], swept["setting"]["op"]) == (along, at["op"]):
            fixed = {name: x for name, x in swept["setting"].items() if name != along}
            where = WORDS.say("where here", device=self.device)
            return _curve(swept["rows"], along, fixed, tensor, measure, now, where)
        if self.device == "cpu" and at["op"] in self.recordings:
            return self._recorded_curve(along, at, tensor, measure, now)
        title = WORDS.say("along knob", tensor=tensor, knob=WORDS["alongs"][along])
        return Curves(title, "", [], {}, note=WORDS["press"])

    def _recorded_curve(self, along: str, at: Mapping, tensor: str, measure: str, now: float | None) -> Curves:
        recording = self.recordings[at["op"]]
        near = _nearest(recording, **{name: at[name] for name in ("op", "dtype", "T", "decay")})[0]
        fixed = {name: near[name] for name in ("op", "dtype", "T", "decay") if name != along}
        rows = recording.select(**fixed)
        where = WORDS.say("where recorded", device=recording.meta["device"])
        return _curve(rows, along, fixed, tensor, measure, now, where)

    # Words.

    def describe(self, rows, *, op, source, dtype, T, profile, decay, tensor, measure, **_) -> str:
        at = rows[0]
        of = [row for row in rows if row["tensor"] == tensor]
        limits = torch.finfo(getattr(torch, at["dtype"]))
        small = 0 < of[0]["rms"] < limits.smallest_normal
        size = WORDS.say("small", size=of[0]["rms"], dtype=at["dtype"], least=limits.smallest_normal)
        errors = ", ".join(WORDS.say("error", form=label(row["form"]), error=_error(row, measure)) for row in of)
        errors = WORDS.say(
            "errors", tensor=tensor, measure=say(MEASURES[measure]), errors=errors, size=size if small else ""
        )
        bad = [
            WORDS.say("bad tensor", tensor=row["tensor"], form=label(row["form"]), count=row["non_finite"])
            for row in rows
            if row["non_finite"]
        ]
        forms = self.own or self.operators[op].forms
        worst = max((row for row in rows if row["form"] in forms), key=lambda row: row[measure])
        worst = {"tensor": worst["tensor"], "form": label(worst["form"]), "error": _error(worst, measure)}
        if bad:
            finite = WORDS.say("bad", bad=", ".join(bad))
        elif self.own:
            finite = self._apart(rows)
        else:
            finite = WORDS.say("fine" if len(forms) == 2 else "fine alone", **worst)
        if source == RECORDED:
            ran = rephrase(self.recordings[op].label)
            ran = say("{said}.").format(said=ran[0].upper() + ran[1:])
            if (at["T"], at["decay"]) != (T, self._decay(op, profile, decay)):
                ran += WORDS.say("nearest", T=at["T"], decay=number(at["decay"], 5))
        else:
            kernels = choose_backend(None, torch.empty(0, device=self.device)) == "triton"
            how = WORDS["naive" if self.operators[op].chunked is None else "triton" if kernels else "torch"]
            if self.own:
                both = WORDS.say("and", **dict(zip(("mine", "other"), map(label, self.own), strict=True)))
                how = WORDS.say("called", both=both, op=self.operators[op].label)
            ran = WORDS.say("ran", device=self.device, how=how, torch=torch.__version__)
            slow = {name: seconds for name, seconds in self._seconds.items() if seconds > SLOW}
            ran += "".join(WORDS.say("slow", form=label(name), seconds=x) for name, x in slow.items())
        return "\n".join((errors, finite, ran))

    def _apart(self, rows: Sequence[Mapping]) -> str:
        """Return a sentence on which tensor of the two user kernels differs most, or why one of them failed."""
        if self._refused:
            return " ".join(WORDS.say("failed", form=label(name), why=why) for name, why in self._refused.items())
        mine, other = ({row["tensor"]: row["got"] for row in rows if row["form"] == name} for name in self.own)
        apart = {name: relative_l2(x, other[name].double()) for name, x in mine.items() if name in other}
        tensor = max(apart, key=apart.get)
        text = WORDS.say("apart", tensor=tensor, error=error(apart[tensor]))
        for name, results in zip(self.own, (mine, other), strict=True):
            if missing := [x for x in _tensors(self.operators[rows[0]["op"]]) if x not in results]:
                text += WORDS.say("without", form=label(name), tensors=", ".join(missing))
        return text

    # Cells that are pointed at.

    def arithmetic(self, rows, cell: Cell, *, op, tensor, **_) -> str | None:
        """Return a line about a dot's errors and worst element, or about all forms' errors at a point of a curve."""
        op = self.operators[op]
        if cell.map == ERRORS:
            tensor, form = self._figure(op.name).lane(cell.row)
            row = next((row for row in rows if (row["tensor"], row["form"]) == (tensor, form)), None)
            if row is None:
                return WORDS.say("none", tensor=tensor, form=label(form))
            errors = {measure: error(row[measure]) for measure in MEASURES}
            return WORDS.say("dot", tensor=tensor, form=label(form), place=_worst(op, row), **errors)
        if cell.map != PLOTS[0]:
            return None
        axis, of = _first_axis(op, tensor), [row for row in rows if row["tensor"] == tensor]
        here = {row["form"]: _along(op, tensor, row["got"], row["true"])[cell.column] for row in of}
        errors = ", ".join(WORDS.say("error", form=label(form), error=error(x)) for form, x in here.items())
        place = _worst(op, max(of, key=lambda row: here[row["form"]]), axis, cell.column)
        name = say("token") if axis == "T" else label(_AXES[axis])
        return WORDS.say("step", tensor=tensor, axis=name, n=cell.column, errors=errors, place=place)

    def beside(self, cell: Cell) -> list[tuple[str, int | None, int | None]]:
        """Highlight the dots of the tensor that the curves show."""
        at = self.setting
        figure = self._figure(at["op"])
        if cell.map == ERRORS:
            return []
        lanes = len(figure.series)
        first = figure.tensors.index(at["tensor"]) * lanes
        return [(ERRORS, first + n, None) for n in range(lanes)]

    def script(self, *, op, source, dtype, profile, decay, T, seed, **setting) -> str:
        decay, of = self._decay(op, profile, decay), self.operators[op]
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
        sizes = ", ".join(f"{name}={size}" for name, size in self._sizes(op, setting).items())
        others = OTHERS.get(op, {})
        imports = "".join(f"from {make.__module__} import {make.__name__}\n" for make in others.values())
        calls, forms, loop, subject = {name: make.__name__ for name, make in others.items()}, "", "", repr(op)
        if self.device == "cpu" and of.chunked is not None:
            imports += "from flakit.numerics.evaluate import recurrence\n"
            calls, forms = {"recurrent": "in_float32"} | calls, " forms='chunk',"
            loop = f"""

def in_float32(x, do):  # on a CPU the operator's own recurrent form computes in float64 and rounds once
    return recurrence({op!r}, x, arriving=(do, None))

"""
        if self.own:
            names = {name: f"kernel_{n}" for n, name in enumerate(self.own)}
            lines = [line for name, called in names.items() for line in import_of(self.own[name].original, called)]
            subject, forms, loop = repr(self.spec), " forms=(),", "\n".join(["", *dict.fromkeys(lines)])
            imports = "from flakit.instruments.subject import Subject\n"
            calls = {name: f"Subject({called}, {self.spec!r}).made" for name, called in names.items()}
        others = f" others={{{', '.join(f'{name!r}: {call}' for name, call in calls.items())}}}," if calls else ""
        at = "" if decay is None else f"decay={literal(decay)}, "
        return f"""import torch
{imports}from flakit.numerics.gradients import gradient_rows
{loop}
rows = gradient_rows(
    {subject},{forms}{others}
    T={T}, H=1, {sizes}, {at}dtype=torch.{dtype}, device={self.device!r}, seed={seed},
    recurrence=False,  # the float64 truth in chunks where there are any, as the panel does
)
{show}"""


def _tensors(op: Operator) -> tuple[str, ...]:
    return op.outputs + tuple(f"d{name}" for name in op.tensors)


def _recording(op: str) -> recorded.Recording | None:
    """Return an operator's recorded errors, None if there is no recording. An unreadable recording raises an error."""
    if op not in RECORDINGS or not (recorded.data_folder() / f"{RECORDINGS[op]}.json").is_file():
        return None
    return recorded.read(RECORDINGS[op], needs=_COLUMNS)


def _nearest(recording: recorded.Recording, *, op: str, dtype: str, T: int, decay: str | float) -> list[Mapping]:
    """Return the recorded rows of this dtype at the nearest decay and length. Raise ValueError if there are none."""
    rows = recording.select(op=op, dtype=dtype)
    if not rows:
        raise ValueError(f"dtype: expected one of {', '.join(recording.values('dtype'))} in the recording, got {dtype}")
    decay = _closest(decay, {row["decay"] for row in rows})
    rows = [row for row in rows if row["decay"] == decay]
    T = _closest(T, {row["T"] for row in rows})
    return [row for row in rows if row["T"] == T]


def _closest(wanted: str | float, recorded_values: Iterable[str | float]) -> str | float:
    """Return `wanted` if recorded, else the nearest number by ratio, or for a name the alphabet's first name."""
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
    """Return one tensor's errors by form along a knob. fixed: the other knobs' values, for the subtitle. now: the
    knob's present value, or None. where: what measured the rows, for the subtitle."""
    of_tensor = [row for row in rows if row["tensor"] == tensor]
    values = dict.fromkeys(row[along] for row in of_tensor)
    if along == "decay":
        values = [value for value in values if _size(value) is not None]
    values = sorted(values, key=_DTYPES.index if along == "dtype" else abs)
    errors = {}
    for form in dict.fromkeys(row["form"] for row in of_tensor):
        by_value = {row[along]: row[measure] for row in of_tensor if row["form"] == form}
        errors[form] = [by_value.get(value, math.nan) for value in values]
    setting = [fixed["dtype"]] if "dtype" in fixed else []
    setting += [f"T = {fixed['T']}"] if "T" in fixed else []
    setting += [WORDS.say("decay", decay=number(fixed["decay"], 5))] if "decay" in fixed else []
    title = WORDS.say("along knob", tensor=tensor, knob=WORDS["alongs"][along])
    x = values if along == "dtype" else [abs(value) for value in values]
    more = {"log": along != "dtype", "now": now, "setting": ", ".join(setting), "where": where}
    return Curves(title, WORDS["xlabels"][along], x, errors, **more)


def _axes(op: Operator, tensor: str) -> list[str]:
    """Return the names of the axes of an output or a gradient, such as ["B", "T", "H", "K"]."""
    return op.axes[tensor if tensor in op.axes else tensor[1:]].split()


def _first_axis(op: Operator, tensor: str) -> str:
    """Return "T" if the tensor has a time axis, else its first axis that is neither a batch nor a head."""
    axes = _axes(op, tensor)
    return "T" if "T" in axes else next(axis for axis in axes if axis not in ("B", "N", "H"))


def _along(op: Operator, tensor: str, got: torch.Tensor, true: torch.Tensor) -> list[float]:
    """Return the errors along the tensor's first axis (`_first_axis`), relative to the tensor's root mean square."""
    at = _axes(op, tensor).index(_first_axis(op, tensor))
    moved = (x.movedim(at, 0).reshape(1, x.shape[at], -1, 1) for x in (got, true))
    return along_time(*moved).tolist()


def _worst(op: Operator, row: Mapping, axis: str | None = None, at: int = 0) -> str:
    """Return where the largest error lies, over all elements or at `at` of an axis, and the value and truth there."""
    if "got" not in row:
        return ""
    axes, got, true = _axes(op, row["tensor"]), row["got"].double(), row["true"].double()
    off = torch.where(got == true, 0.0, (got - true).abs().nan_to_num(torch.inf, torch.inf))
    if axis is not None:
        only = torch.zeros(off.shape[axes.index(axis)], dtype=torch.bool, device=off.device)
        only[at] = True
        only = only.reshape([-1 if name == axis else 1 for name in axes])
        off = torch.where(only, off, -1.0)
    place = [int(n) for n in torch.unravel_index(off.argmax(), off.shape)]
    names = {"T": say("token"), **_AXES}
    parts = [f"{label(names[x])} {n}" for x, n in zip(axes, place, strict=True) if x in names and x != axis]
    return WORDS.say("place", place=", ".join(parts), got=got[tuple(place)], true=true[tuple(place)])


def _size(decay: str | float) -> float | None:
    """Return |log decay| of a constant decay; None for a profile, 0 and -inf, which a logarithmic axis cannot show."""
    return None if isinstance(decay, str) or decay in (0, -math.inf) else -decay


def _error(row: Mapping, measure: str) -> str:
    return error(row[measure]) if math.isfinite(row[measure]) or row["non_finite"] else WORDS["infinite"]


def gradient_comparer(
    op: str | Operator = "rwkv6", show=None, *, language: str | None = None, **settings
) -> GradientComparer:
    """Return a panel with the errors against float64 of an operator's forms, and for RWKV6 of the widely used dw.

    op: an operator of `flakit.numerics.operators.OPERATORS`, or any other that `like` of `flakit.audit` accepts, whose
        only form is the naive recurrence. `compare` is the same panel for your own kernels.
    show: names of the knobs on view, default dtype, decay and tensor; the others are folded under "more".
    settings: starting values of the knobs; an unknown name raises TypeError, a bad value ValueError. source ("here" or
        "recorded"), dtype, profile ("constant" or one of `flakit.numerics.inputs.DECAYS`), decay (natural-log, of
        "constant"), T, K, for GSA M (slots) and HQ (query heads of the one memory), tensor (of the curves), measure,
        along ("T", "decay" or "dtype": the axis that the button measures), seed.
    language: "en" or "zh"; default: the current language, see `flakit.language`.

    >>> gradient_comparer(dtype="float32", profile="constant", decay=-20)
    """
    with speaking(language):
        return GradientComparer(op, show, **settings)


def compare(
    mine: str | Callable | Subject,
    other: str | Callable | Subject | None = None,
    *,
    like: str | Operator | None = None,
    show=("dtype", "decay", "T", "tensor"),
    language: str | None = None,
    **settings,
) -> GradientComparer:
    """Return a panel that compares two kernels with float64 and with each other: output, state and every gradient.

    mine, other: kernels, as in `flakit.audit`; other defaults to flakit's own, in chunks if it has that form, else
    naive.
        A kernel that raises has no dots, and the readout gives its error.
    like: the operator that both compute, as in `flakit.audit`; default: inferred from the name of the first.
    show, settings, language: as in `gradient_comparer`.

    >>> compare(my_kernel, like="rwkv6", decay=-1.0)
    >>> compare(my_kda, "fla.ops.kda:chunk_kda", like="kda", dtype="bfloat16", T=100)
    """
    first = load(mine, like)
    op = first.op
    if other is not None:
        second = load(other, op)
    elif op.chunked is None:
        second = Subject(op.reference.function, op, name="naive")
    else:
        second = Subject(op.forms["chunk"], op, name="chunk")
    names = [x.name.rpartition(":")[2] for x in (first, second)]
    if names[0] == names[1] or "<" in "".join(names):
        names = [WORDS.english[name] for name in ("mine", "other")]
    if "decay" in settings:
        settings = {"profile": CONSTANT} | settings
    with speaking(language):
        own = dict(zip(names, (first, second), strict=True))
        like = like if isinstance(like, str) else op.name if op.name in known() else op
        panel = GradientComparer(like, show, own, **{"dtype": "float32"} | settings)
        panel.add_class("flakit-compare")  # beside a comparer of forms on the same page
        return panel
