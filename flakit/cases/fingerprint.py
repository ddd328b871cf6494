"""The fingerprint of a fault: which tensors stay correct, and which become wrong, infinite or NaN.

    fingerprint()["start anchor"].cells["dr"]       Cell(kind='NaN', everywhere=True, error=inf)
    diagnose({"o": "ok", "dr": "nan"})              the causes, the best fit first

Every cell is computed: RWKV6 with a fault of the casebook, compared with float64. Its setting is just beyond the
fault's onset; beyond it, more tensors are lost. Rows are cached.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..language import Words, say
from ..numerics.errors import relative_l2
from ..numerics.evaluate import cotangents, evaluate, recurrence, truth
from ..numerics.inputs import inputs as make_inputs
from ..ops.common.decay import sum_before
from . import (
    aliasing,
    anchor,
    backstepping,
    decay_gradient,
    log_space,
    masking,
    padding,
    strided_offsets,
    transposed_mask,
    unwritten_rows,
)
from .anchor.schemes import Products, Scheme
from .clamping import BOUND
from .final_state_gradient import ignored
from .laws import on_cpu

WORDS = Words() | {
    "what": {
        "scale": "two scales: K^-0.5 here, 1 there",
        "state overflows": "a decay that is no logarithm: w above 0",
        "start anchor": "factors from the chunk's start: keys of e^(64 |w|)",
        "end anchor": "factors from the chunk's end: reads of e^(64 |w|)",
        "late mask": "masked after exp: e^(64 |w|) under the mask",
        "bug A": "the anchor is the block's first row, one token too late",
        "bad repair": "the row before the block, read across the chunk's border",
        "clamp": "exponents cut off at a bound",
        "overwritten input": "an earlier call wrote into w",
        "precision": "dw from rounded dr and dk, by two running sums",
        "backstepping": "states rebuilt backwards, divided by the decay",
        "padding": "rows behind the end forget nothing",
        "strided offsets": "offsets read without their stride",
        "unwritten rows": "padding behind the last offset, which nobody writes",
        "transposed mask": "a mask [BK, BV] over a tile [BV, BK]",
        "no gradient from S_T": "the gradient of the final state is dropped",
        "wrong head's anchor": "a stride that is too short: another head's row",
        "zero decay forbidden": "a guard d < 0 where d = 0 is allowed",
        "loss not divided": "four parts of a batch are added up",
    },
    "test": {
        "scale": "Divide one output by the other: the ratio is one constant.",
        "state overflows": "Look at the largest w: it has to be at most 0.",
        "start anchor": "Halve the chunk: it breaks at twice the decay. All of dr is lost, of dk one key a chunk.",
        "end anchor": "Halve the chunk: it breaks at twice the decay. All of dk is lost, of dr one token a chunk.",
        "late mask": "Only dw is lost: the mask's 0 meets inf in the gradient of exp.",
        "bug A": "One strong decay at token 16 breaks it, the same at token 17 does not.",
        "bad repair": "Up to 64 tokens all is finite, from the second chunk on it breaks.",
        "clamp": "Without the clamp the same call gives NaN. The error grows with the decay.",
        "overwritten input": "Compare clones of every input before and after one call.",
        "precision": "In float32 the error shrinks by thousands, and only dw ever had it.",
        "backstepping": "Of every 16 tokens the first are worst, and a decay near 0 is fine.",
        "padding": "Lengths that are multiples of 64 are fine.",
        "strided offsets": "Make cu_seqlens contiguous.",
        "unwritten rows": "Every row of the sequences is right: look behind cu_seqlens[-1].",
        "transposed mask": "K = V = 64 is fine; without an initial state everything is.",
        "no gradient from S_T": "A loss on the output alone is fine.",
        "wrong head's anchor": "One head is fine.",
        "zero decay forbidden": "Random decays are fine; set some to exactly 0.",
        "loss not divided": "Divide one gradient by the other: the ratio is the number of parts.",
    },
}
"""What each fault is, by the name of its cause, and the test that confirms it."""

TENSORS = ("o", "dr", "dk", "dv", "dw", "du", "final_state", "dinitial_state")
"""RWKV6's outputs and the gradients of its inputs; the last two belong to the state."""

SHORT = {"final_state": "S_T", "dinitial_state": "dS_0"}
"""Short names of the state's tensors; `diagnose` accepts both."""

KINDS = ("ok", "wrong", "inf", "NaN")
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""The relative L2 error up to which a tensor is ok: some ten times the rounding error."""


class Cell(NamedTuple):
    """What a fault does to one tensor: one of `KINDS`, whether at every token, and the relative L2 error."""

    kind: str
    everywhere: bool
    error: float


@dataclass(frozen=True)
class Cause:
    """A fault, and lesson ("05") and case on it. run() returns RWKV6's tensors with the fault, and those in float64."""

    key: str
    """The fault's English name, its key in `CAUSES`."""
    lesson: str
    case: str
    run: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]

    @property
    def name(self) -> str:
        return say(self.key)

    @property
    def what(self) -> str:
        return WORDS.say("what", self.key)

    @property
    def test(self) -> str:
        """A sentence with the check that confirms this cause."""
        return WORDS.say("test", self.key)


@dataclass(frozen=True)
class Row:
    cause: Cause
    cells: Mapping[str, Cell]


def _inputs(T: int = 128, decay: float | str = -0.3, **options) -> dict[str, Tensor]:
    return make_inputs("rwkv6", T=T, H=2, K=16, V=16, decay=decay, initial_state=True, **options)


def _anchored(scheme: str | Scheme, decay: float, spike: int | None = None, **options):
    """Return RWKV6's tensors by name, computed with an anchor scheme, and those in float64. spike: the only token with
    this decay, -0.01 elsewhere; None: all have it."""
    x = _inputs(decay=decay if spike is None else -0.01)
    if spike is not None:
        x["w"][:, spike] = decay
    return anchor.run(x, scheme, **options).tensors, truth("rwkv6", x)


def _scale():
    x = _inputs()
    return evaluate("rwkv6", {**x, "scale": 1.0}), truth("rwkv6", x)


def _positive():
    x = _inputs(192) | {"w": log_space.inputs("sigmoid", B=1, T=192, H=2, K=16)["w"]}
    return recurrence("rwkv6", x), truth("rwkv6", x)


def _clamped(gi: Tensor, seen: Tensor) -> Tensor:
    bound = BOUND / 2  # two factors of that size can still be multiplied
    weights = seen.clamp(min=-bound).exp()[..., :, None, :] * (-gi).clamp(max=bound).exp()[..., None, :, :]
    return torch.where(torch.ones(weights.shape[-3:-1], dtype=torch.bool).tril(-1)[..., None], weights, 0.0)


def _late(gi: Tensor, seen: Tensor) -> Tensor:
    return masking.weights(gi.diff(dim=-2, prepend=torch.zeros_like(gi[..., :1, :])), "where", exclusive=True)


def _guarded(gi: Tensor, seen: Tensor) -> Tensor:
    d = seen[..., :, None, :] - gi[..., None, :, :]
    past = torch.ones(d.shape[-3:-1], dtype=torch.bool).tril(-1)[..., None]
    return torch.where(past & (d < 0), d, -torch.inf).exp()


def _one_chunk(weights: Callable[[Tensor, Tensor], Tensor], decay: float | Tensor):
    """Return RWKV6's tensors by name, from one chunk of 64 tokens and automatic differentiation, and those in float64.
    decay broadcasts to [B, 64, H, K]. weights(gi, ge): the pairs' decays [B, H, 64, 64, K], from inclusive and
    exclusive sums [B, H, 64, K]."""
    x = _inputs(64)
    x["w"] = torch.as_tensor(decay, dtype=torch.float32).expand_as(x["w"]).clone()
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    r, k, v, w = (leaves[name].transpose(1, 2) for name in "rkvw")
    gi, seen, S, scale = w.cumsum(-2), sum_before(w), leaves["initial_state"], x["r"].shape[-1] ** -0.5
    A = torch.einsum("bhik,bhjk,bhijk->bhij", r, k, weights(gi, seen))
    own = (r * leaves["u"][:, None] * k).sum(-1, keepdim=True) * v
    o = scale * (A @ v + own + (r * seen.exp()) @ S)
    last = gi[..., -1:, :].mT.exp() * S + (k * (gi[..., -1:, :] - gi).exp()).mT @ v
    do, _ = cotangents("rwkv6", x)
    grads = torch.autograd.grad(o.transpose(1, 2), tuple(leaves.values()), do)
    outputs = {"o": o.detach().transpose(1, 2), "final_state": last.detach()}
    return outputs | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}, truth("rwkv6", x)


def _some_zero() -> Tensor:
    """Return log decays [1, 64, 1, 1]: 0 at every third of 64 tokens, -0.1 at the others."""
    return torch.where(torch.arange(64) % 3 == 0, 0.0, -0.1)[None, :, None, None]


def _overwritten():
    x = _inputs()
    overwritten = {name: y.clone() for name, y in x.items()}
    aliasing.overwrite(overwritten["w"], backend="torch")
    return evaluate("rwkv6", overwritten), truth("rwkv6", x)


def _rounded():
    x = _inputs(512, -2.5, dtype=torch.bfloat16)
    do, _ = cotangents("rwkv6", x)
    return evaluate("rwkv6", x) | decay_gradient.running_sums(x, do), truth("rwkv6", x)


def _backstepped():
    x = _inputs(decay=-0.75)
    return backstepping.run(x, "rwkv6"), truth("rwkv6", x)


def _padded():
    x, padded = _inputs(120, -2.0), padding.products(120)
    run = anchor.run(x, padding.SCHEME, products=lambda w, _, *, inclusive, **options: padded(w, inclusive=inclusive))
    return run.tensors, truth("rwkv6", x)


class _WrongHead(Products):
    """`anchor.schemes.Products` whose anchor is read at a stride too short by the factor H: another head's row."""

    def exponents(self, tile):
        query, key = super().exponents(tile)
        B, H, N, C, K = self.gi.shape
        rows = self.gi.permute(0, 2, 3, 1, 4).reshape(B, N, C * H, K)[:, :, tile.anchor : tile.anchor + H]
        n, meant = rows.transpose(1, 2)[..., None, :], self.gi[..., tile.anchor : tile.anchor + 1, :]
        return query + (meant - n), key - (meant - n)


def _short_stride():
    x = _inputs(decay=-4.0)
    return anchor.run(x, "previous-row", products=_WrongHead).tensors, truth("rwkv6", x)


def _offsets():
    """Return RWKV6's tensors if the kernel reads a strided cu_seqlens as contiguous, with NaN in rows that it leaves
    unwritten, and those in float64."""
    ends = strided_offsets.offsets(6, 12)
    x = _inputs(int(ends[-1]), -0.1)
    x["initial_state"] = x["initial_state"].expand(len(ends) - 1, -1, -1, -1).contiguous()
    packed = {**x, "cu_seqlens": ends}
    exact = truth("rwkv6", packed)
    results = {name: torch.full_like(y, torch.nan, dtype=torch.float32) for name, y in exact.items()}
    read = strided_offsets.in_memory(ends.tolist(), "column of (begin, end)")
    do, du = cotangents("rwkv6", packed)[0], 0.0
    for n, (begin, end) in enumerate(zip(read, read[1:], strict=False)):
        piece = {name: y if name == "u" else y[:, begin:end] for name, y in x.items() if name != "initial_state"}
        piece["initial_state"] = state = x["initial_state"][n : n + 1]
        if begin == end:
            results["final_state"][n], results["dinitial_state"][n] = state[0], 0.0
            continue
        part = evaluate("rwkv6", piece, arriving=(do[:, begin:end], None))
        du = du + part.pop("du")
        for name, y in part.items():
            place = (n,) if name.endswith("_state") else (slice(None), slice(begin, end))
            results[name][place] = y[0] if name.endswith("_state") else y
    return results | {"du": du}, exact


def _unwritten():
    """Return RWKV6's tensors with 28 unwritten rows of padding, in memory that held NaN, and those in float64."""
    x = make_inputs("rwkv6", T=100, H=1, K=16, V=16, decay=-0.3, initial_state=True, cu_seqlens=[0, 60, 100])
    results, exact = evaluate("rwkv6", x), truth("rwkv6", x)
    for name in ("o", "dr", "dk", "dv", "dw"):
        results[name] = unwritten_rows.run(results[name][0, :, 0], 28)[None, :, None]
        exact[name] = torch.nn.functional.pad(exact[name], (0, 0, 0, 0, 0, 28))
    return results, exact


def _mirrored():
    """Return RWKV6's tensors with a transposed mask on the initial state in the backward, and those in float64."""
    x = transposed_mask.inputs(40, 64, T=32)
    results, exact = evaluate("rwkv6", x), truth("rwkv6", x)
    results["dr"] = transposed_mask.run(x, backend="torch").dr
    return results | {"dw": decay_gradient.identity(x["r"], x["k"], results["dr"], results["dk"])}, exact


def _without_final():
    x = _inputs()
    arriving = cotangents("rwkv6", x, dfinal_state=True)
    return evaluate(ignored(), x, arriving=arriving), truth("rwkv6", x, arriving=arriving)


def _undivided():
    """Return RWKV6's tensors with gradients of the sum, not the mean, of four micro-batches, and those in float64."""
    x = _inputs()
    do, _ = cotangents("rwkv6", x)
    return evaluate("rwkv6", x, arriving=(4 * do, None)), truth("rwkv6", x)


_END = Scheme("end", "end: the chunk's end", whole=True, diagonal=63)

CAUSES: dict[str, Cause] = {
    name: Cause(name, *rest)
    for name, *rest in (
        ("scale", "01", "chunk_vs_recurrent", _scale),
        ("state overflows", "02", "log_space", _positive),
        ("start anchor", "05", "anchor", functools.partial(_anchored, "none", -1.39)),
        ("end anchor", "05", "anchor", functools.partial(_anchored, _END, -1.39)),
        ("late mask", "05", "masking", functools.partial(_one_chunk, _late, -1.4)),
        ("bug A", "06", "anchor", functools.partial(_anchored, "first-row", -88.8, 16)),
        ("bad repair", "06", "anchor", functools.partial(_anchored, "previous-row-across", -1.4)),
        ("clamp", "06", "clamping", functools.partial(_one_chunk, _clamped, -2.0)),
        ("overwritten input", "07", "aliasing", _overwritten),
        ("precision", "07", "decay_gradient", _rounded),
        ("backstepping", "09", "backstepping", _backstepped),
        ("padding", "11", "padding", _padded),
        ("strided offsets", "12", "strided_offsets", _offsets),
        ("unwritten rows", "12", "unwritten_rows", _unwritten),
        ("transposed mask", "12", "transposed_mask", _mirrored),
        ("no gradient from S_T", "12", "final_state_gradient", _without_final),
        ("wrong head's anchor", "12", "wrong_head_anchor", _short_stride),
        ("zero decay forbidden", "12", "nan_guard", lambda: _one_chunk(_guarded, _some_zero())),
        ("loss not divided", "13", "gradient_accumulation", _undivided),
    )
}
"""Every cause by its name, in the order of the lessons."""


def known(upto: str | None = None) -> tuple[str, ...]:
    """Return the names of the causes that the lessons up to one, such as "05", explain; None: all of them. Raises
    ValueError unless `upto` has two digits."""
    if upto is None:
        return tuple(CAUSES)
    if not (isinstance(upto, str) and upto.isdigit() and len(upto) == 2):
        raise ValueError(f'upto: expected the number of a lesson such as "05", got {upto!r}')
    return tuple(name for name, cause in CAUSES.items() if cause.lesson <= upto)


def fingerprint(causes: Iterable[str] | None = None) -> dict[str, Row]:
    """Return each cause's row: the `Cell` of each of `TENSORS`. causes: names of `CAUSES`, default all. Raises
    ValueError for an unknown name."""
    names = tuple(CAUSES) if causes is None else tuple(causes)
    for name in names:
        if name not in CAUSES:
            raise ValueError(f"causes: expected names among {', '.join(CAUSES)}, got {name!r}")
    return {name: _row(name) for name in names}


@functools.cache
def _row(name: str) -> Row:
    with on_cpu():
        results, exact = CAUSES[name].run()
    allowed = _ALLOWED[results["o"].dtype]
    return Row(CAUSES[name], {tensor: _cell(tensor, results[tensor], exact[tensor], allowed) for tensor in TENSORS})


def _cell(tensor: str, got: Tensor, exact: Tensor, allowed: float) -> Cell:
    tokens = got.transpose(0, 1) if tensor not in ("du", "final_state", "dinitial_state") else got[None]
    bad = (~tokens.isfinite()).flatten(1).any(1)
    if bad.any():
        return Cell("NaN" if got.isnan().any() else "inf", bool(bad.all()), float("inf"))
    error = relative_l2(got, exact)
    return Cell("ok" if error <= allowed else "wrong", True, error)


class Fit(NamedTuple):
    """How well a cause explains observations: of `given` observed tensors, `agree` match (half for inf against NaN).

    row: the cause's `Cell` by tensor. against: the tensors that do not match. good: whether at least three quarters
        match of the tensors that are not ok in the observation or in the cause's row.
    """

    row: Row
    agree: float
    given: int
    against: tuple[str, ...]
    good: bool


def diagnose(seen: Mapping[str, str], causes: Iterable[str] | None = None) -> list[Fit]:
    """Return how well each cause fits the observed tensors, the best fit first. causes: as in `fingerprint`.

    seen: "ok", "wrong", "inf" or "nan" by tensor; names of `TENSORS`, or the short S_T and dS_0. Leave out tensors that
        were not observed. inf and NaN match by half: which of them appears depends on the distance from the onset.
        Raises ValueError for an unknown tensor or kind, and for no observation.
    """
    observed = {_tensor(name): _kind(name, kind) for name, kind in seen.items()}
    if not observed:
        raise ValueError(f"seen: expected what became of some of {', '.join(TENSORS)}, got nothing")
    fits = [_fit(row, observed) for row in fingerprint(causes).values()]
    return sorted(fits, key=lambda fit: (not fit.good, -fit.agree))


def _fit(row: Row, observed: Mapping[str, str]) -> Fit:
    points = {name: _agreement(row.cells[name].kind, kind) for name, kind in observed.items()}
    broken = [points[name] for name, kind in observed.items() if {kind, row.cells[name].kind} != {"ok"}]
    against = tuple(name for name, point in points.items() if point < 0.5)
    return Fit(row, sum(points.values()), len(observed), against, 4 * sum(broken) >= 3 * len(broken))


def _agreement(one: str, other: str) -> float:
    return 1.0 if one == other else 0.5 if {one, other} == {"inf", "NaN"} else 0.0


def _tensor(name: str) -> str:
    tensor = {short: name for name, short in SHORT.items()}.get(name, name)
    if tensor not in TENSORS:
        raise ValueError(f"seen: expected tensors among {', '.join(TENSORS)}, got {name!r}")
    return tensor


def _kind(name: str, kind: str) -> str:
    exact = {known.lower(): known for known in KINDS}.get(str(kind).lower())
    if exact is None:
        raise ValueError(f"{name}: expected one of {', '.join(KINDS).lower()}, got {kind!r}")
    return exact
