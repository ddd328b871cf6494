"""Compares two implementations of a model on the same tokens: at which layer and token they first differ.

    comparison = flakit.compare(mine, theirs, tokens)
    print(comparison)       # the first layer and token that differ, and a line for every layer
    comparison.picture()    # layers and tokens, orange where they differ

Equal logits at the last token say little about a model, and different logits do not say where the fault is. So the
outputs of every layer that both models have under one name are compared token by token.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.arguments import shown
from ..numerics.table import Table
from ..numerics.words import number
from .budget import budget

LOGITS = "logits"
LAYERS_ADD_UP = 4
"""By how many error budgets of one operator a whole model may differ."""


@dataclass(frozen=True)
class Part:
    """A place where two models differ: layer, token (None for outputs without tokens, such as states), error."""

    layer: str
    token: int | None
    error: float

    def __str__(self) -> str:
        where = "" if self.token is None else f" at token {self.token}"
        return f"{self.layer}{where}, by {_size(self.error)}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Errors are relative L2 over a token: |a - b| over the larger of |a| and |b|.

    errors: of each layer, float64 [T], in the order in which model_a finishes them, the logits last; inf if only one of
        the two is finite. whole: one error for each output without tokens, such as a final state.
    chosen: bool [T], whether both models predict the same next token in every sequence.
    tolerance: the error up to which a token counts as equal. dtype: of both models, None if they differ.
    skipped: names of layers that were not compared, and why.
    """

    errors: Mapping[str, Tensor]
    whole: Mapping[str, float]
    chosen: Tensor
    tolerance: float
    dtype: torch.dtype | None
    skipped: Mapping[str, str] = field(repr=False)

    @property
    def logits(self) -> Tensor:
        """The errors of the logits, float64 [T]."""
        return self.errors[LOGITS]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every layer that differs, in the order of execution, with the first token at which it does; then `whole`."""
        tokens = {name: (x > self.tolerance).nonzero().flatten().tolist() for name, x in self.errors.items()}
        differing = [Part(name, at[0], self.errors[name][at[0]].item()) for name, at in tokens.items() if at]
        return (*differing, *(Part(name, None, x) for name, x in self.whole.items() if x > self.tolerance))

    @property
    def first(self) -> Part | None:
        """The first layer that differs, at its first token; None if the models agree."""
        return next(iter(self.parts), None)

    @property
    def table(self) -> Table:
        """A row for every layer: its largest error, at which token, and the first token beyond the tolerance."""
        begins = {p.layer: p.token for p in self.parts}
        rows: list[dict] = []
        for name, x in self.errors.items():
            at = int(x.argmax())
            rows.append({"layer": name, "largest": x[at].item(), "at token": at, "parts at": begins.get(name, "-")})
        for name, largest in self.whole.items():
            parts_at = "end" if name in begins else "-"
            rows.append({"layer": name, "largest": largest, "at token": "end", "parts at": parts_at})
        return Table(rows, caption="largest relative difference of each layer, in the order of execution")

    def picture(self):
        """Draw the errors, a row for each layer and a column for each token; orange where the models differ."""
        from ..figures.compare_models import draw

        return draw(self.errors, self.tolerance)

    @property
    def words(self) -> str:
        """The result in sentences: which layer and token differ first, and how many predictions differ."""
        count, tokens = len(self.errors) - 1 + len(self.whole), len(self.logits)
        judged = f"tolerance {_size(self.tolerance)}" + (f", for {number(self.dtype)}" if self.dtype else "")
        of = f"{count} layer{'s' * (count != 1)} and the logits at {tokens} token{'s' * (tokens != 1)} ({judged})"
        if self.first is None:
            worst, error = max(((n, float(x.max())) for n, x in self.errors.items()), key=lambda each: each[1])
            sentences = f"The models agree in {of}. The largest difference is {_size(error)}, in {worst}."
        else:
            sentences = f"Of {of}, {len(self.parts)} part. The first is {self.first}."
            before = 0 if self.first.token is None else list(self.errors).index(self.first.layer)
            sentences += f" The {before} before it agree." if before > 1 else ""
            late = (self.logits > self.tolerance).nonzero().flatten()
            sentences += f" The logits part from token {int(late[0])} on." if len(late) else " The logits do not part."
        differ = int((~self.chosen).sum())
        sentences += f" At {differ} of {tokens} tokens another next token is likeliest." if differ else ""
        sentences += f" {len(self.skipped)} outputs were not compared, see `skipped`." if self.skipped else ""
        return sentences

    def __str__(self) -> str:
        return f"{self.words}\n{self.table}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.words)}</p>{self.table._repr_html_()}"


def _size(x: float) -> str:
    return f"{x:.1e}" if math.isfinite(x) else "not finite in one of them"


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    tokens: Tensor,
    *,
    tolerance: float | None = None,
    layers: Mapping[str, str] | None = None,
) -> Comparison:
    """Run two implementations of a model on the same tokens and find the first layer and token at which they differ.

    Both run in evaluation mode and without gradients, and get their mode back. For every submodule that both have under
    one name, compares all floating-point tensors that it returns: those of shape [B, T, …] token by token, others, such
    as returned states, as a whole. A layer of `flakit.models` is also compared in its state after each token.

    Args:
        model_a: called with tokens, it returns logits [B, T, vocab], a tuple that begins with them, or an object or
            mapping with `logits`, as Transformers' models do.
        model_b: the same, of the same vocabulary and on the same device.
        tokens: integers [T] or [B, T], on that device.
        tolerance: the relative L2 error of a token that is still accepted. Default: four error budgets of one operator
            in the models' dtype (`instruments.budget`, for sums over T and the largest width). Required if the models
            have different dtypes: only you know how much rounding may cost.
        layers: names in model_a by names in model_b if they are not the same; {} compares the logits alone.

    Returns:
        Comparison: `first`, `parts`, `words`, `table`, `picture()`, `errors` by layer.

    Raises:
        TypeError: a model is no module, tokens are no integers, or a result has no logits.
        ValueError: different vocabularies, devices, or dtypes without a tolerance; no layer in common.

    >>> print(flakit.compare(model, rewritten, tokens).first)
    blocks.1.time.norm at token 0, by 2.1e-02
    """
    models = {"model_a": _module("model_a", model_a), "model_b": _module("model_b", model_b)}
    tokens = _tokens(tokens)
    dtype = _alike(models, tokens, tolerance)
    names = _common(models, layers)

    with _evaluating(models):
        outputs: dict[str, list[Tensor]] = {}
        seen: Counter[str] = Counter()
        skipped: dict[str, str] = {}
        results: dict[str, Tensor] = {}

        def collect(name: str, a: Tensor) -> None:
            outputs.setdefault(name, []).append(a)

        def label(name: str, call: int) -> str:
            return name if len(outputs[name]) == 1 else f"{name}, call {call + 1}"

        def meet(name: str, b: Tensor) -> None:
            calls, n = outputs.get(name, []), seen[name]
            seen[name] += 1
            if n >= len(calls):
                skipped[name] = "model_b returns it more often"
            elif (a := calls[n]).shape != b.shape:
                skipped[label(name, n)] = f"shapes {list(a.shape)} and {list(b.shape)}"
            else:
                timed = a.shape[:2] == tokens.shape
                results[label(name, n)] = _by_token(a, b) if timed else _relative(a.flatten(), b.flatten())

        logits_a = _run("model_a", models["model_a"], tokens, {a: a for a in names}, collect)
        logits_b = _run("model_b", models["model_b"], tokens, {b: a for a, b in names.items()}, meet)

    if logits_a.shape[-1] != logits_b.shape[-1]:
        raise ValueError(
            f"model_b: expected logits over {logits_a.shape[-1]} tokens like model_a, got {logits_b.shape[-1]}"
        )
    for name in (name for name, calls in outputs.items() if seen[name] < len(calls)):
        skipped.setdefault(name, "model_a returns it more often")
    labels = (label(name, n) for name, calls in outputs.items() for n in range(len(calls)))
    compared = {name: results[name] for name in labels if name in results}  # in the order of model_a
    errors = {name: x for name, x in compared.items() if x.ndim} | {LOGITS: _by_token(logits_a, logits_b)}
    whole = {name: x.item() for name, x in compared.items() if not x.ndim}
    chosen = (logits_a.argmax(-1) == logits_b.argmax(-1)).all(0)
    if tolerance is None:
        assert dtype is not None  # `_alike` guarantees it
        widest = max(x.shape[-1] for calls in (*outputs.values(), [logits_a]) for x in calls if x.ndim)
        tolerance = LAYERS_ADD_UP * budget(dtype, tokens.shape[1] + widest, 0.0)
    return Comparison(errors, whole, chosen.cpu(), float(tolerance), dtype, skipped)


def _module(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {shown(model)}")
    return getattr(model, "_orig_mod", model)  # torch.compile's code has no hooks


def _tokens(tokens: object) -> Tensor:
    fractions = isinstance(tokens, Tensor) and (tokens.is_floating_point() or tokens.is_complex())
    if not isinstance(tokens, Tensor) or fractions or tokens.dtype == torch.bool:
        raise TypeError(f"tokens: expected a tensor of integers [T] or [B, T], got {shown(tokens)}")
    if tokens.ndim not in (1, 2) or not tokens.numel():
        raise ValueError(f"tokens: expected [T] or [B, T], at least one, got {list(tokens.shape)}")
    return tokens if tokens.ndim == 2 else tokens[None]


def _alike(models: Mapping[str, nn.Module], tokens: Tensor, tolerance: float | None) -> torch.dtype | None:
    """Return the dtype of both models, that of most of their weights; None if the two differ and a tolerance is set.

    Raises ValueError if a model has no weights, is on another device than the tokens, or has another dtype without a
    tolerance, and for a tolerance that is no number >= 0.
    """
    of = {}
    for name, model in models.items():
        weights = [p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()]
        if not weights:
            raise ValueError(f"{name}: expected a model with weights, got {type(model).__name__} without any")
        devices = {p.device for p in weights}
        if len(devices) > 1 or tokens.device not in devices:
            got = " and ".join(sorted(map(str, devices)))
            raise ValueError(f"{name}: expected device {tokens.device} like tokens, got {got}")
        # The dtype of most parameters: norms often stay in float32.
        sizes: Counter[torch.dtype] = Counter()
        for p in weights:
            sizes[p.dtype] += p.numel()
        ((of[name], _),) = sizes.most_common(1)
    a, b = of.values()
    if tolerance is not None:
        if not isinstance(tolerance, (int, float)) or isinstance(tolerance, bool) or not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance: expected a relative error of 0 or more, got {shown(tolerance)}")
        return a if a == b else None
    if a != b:
        raise ValueError(
            f"model_b: expected {number(a)} like model_a, got {number(b)}; convert one of them, or say with "
            f"`tolerance` what the rounding of the other may cost"
        )
    return a


def _common(models: Mapping[str, nn.Module], layers: Mapping[str, str] | None) -> dict[str, str]:
    """Return {name in model_a: name in model_b} of the layers to compare, from `layers` or the names that both have.
    Raises TypeError if `layers` is no mapping, ValueError if a name is unknown or no name is common."""
    a, b = ([name for name, _ in model.named_modules() if name] for model in models.values())
    if layers is None:
        names_b = set(b)
        names = {name: name for name in a if name in names_b}
        if not names:
            raise ValueError(
                f"layers: expected names that both models have, got none; model_a has {_few(a)}, model_b {_few(b)}. "
                f"layers={{name in model_a: name in model_b}} says which belong together, {{}} compares logits alone"
            )
        return names
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers: expected {{name in model_a: name in model_b}}, got {shown(layers)}")
    for which, known, requested in (("model_a", a, layers.keys()), ("model_b", b, layers.values())):
        for name in requested:
            if name not in known:
                raise ValueError(f"layers: expected names in {which}, such as {_few(known)}, got {name!r}")
    return dict(layers)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "no layers"


@contextmanager
def _evaluating(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Set evaluation mode and disable gradients for the `with` block, then restore every module's mode."""
    modes = [(module, module.training) for model in models.values() for module in model.modules()]
    try:
        for model in models.values():
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _run(which: str, model: nn.Module, tokens: Tensor, names: Mapping[str, str], tell: Callable) -> Tensor:
    """Run a model and return its logits. names: by submodule, the name to report. tell: called with (name, tensor) for
    every floating-point output of these submodules. which: the argument's name, for errors."""
    handles, operators = [], []

    def look(name: str, module: nn.Module, _, out: object) -> None:
        for path, x in _tensors(out):
            tell(f"{name}{path}", x)
        if module in asked:
            parts = list(_states(*asked.pop(module)))
            for n, x in enumerate(parts, 1):
                tell(f"{name}: state" + (f" {n}" if len(parts) > 1 else ""), x)

    asked: dict[nn.Module, tuple] = {}
    try:
        for name, module in model.named_modules():
            if name in names:
                if _hands_on(module):
                    operators.append((module, module.operator))
                    module.operator = _listening(module, asked)
                handles.append(module.register_forward_hook(functools.partial(look, names[name])))
        return _logits(which, model(tokens), tokens)
    finally:
        for handle in handles:
            handle.remove()
        for module, operator in operators:
            module.operator = operator


def _hands_on(module: nn.Module) -> bool:
    """Whether a module is a layer of flakit.models whose operator can return states."""
    models = f"{__package__.partition('.')[0]}.models."
    ours = any(kind.__module__.startswith(models) for kind in type(module).__mro__)
    return ours and callable(getattr(module, "operator", None))


def _listening(module: nn.Module, asked: dict) -> Callable:
    operator: Any = module.operator

    @functools.wraps(operator)
    def listens(*rows, **options):
        asked[module] = operator, rows, options
        return operator(*rows, **options)

    return listens


def _states(operator: Callable, rows: tuple, options: dict) -> Iterator[Tensor]:
    """Yield the states after every token, [B, T, H, K, V] for each part, by running the operator token by token. Yield
    nothing without a state or for packed sequences. rows, options: the operator's positional and keyword arguments."""
    if options.get("cu_seqlens") is not None:
        return
    states, state = [], options.get("initial_state")
    for t in range(rows[0].shape[1]):
        now = [x[:, t : t + 1] if x.ndim == 4 else x for x in rows]
        try:
            _, state = operator(*now, **options | {"initial_state": state, "output_final_state": True})
        except TypeError:
            return
        states.append(state if isinstance(state, tuple) else (state,))
    yield from (torch.stack(part, 1) for part in zip(*states, strict=True))


def _tensors(out: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every floating-point tensor in a module's result, with its place: "" if alone or first, "[1]", ".state"."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield path, out
    elif isinstance(out, Mapping):
        for n, (name, x) in enumerate(out.items()):
            yield from _tensors(x, path if n == 0 and not path else f"{path}.{name}")
    elif isinstance(out, (tuple, list)):
        for n, x in enumerate(out):
            yield from _tensors(x, path if n == 0 and not path else f"{path}[{n}]")


def _logits(which: str, out: object, tokens: Tensor) -> Tensor:
    logits = out
    if isinstance(out, Mapping) and "logits" in out:
        logits = out["logits"]
    elif hasattr(out, "logits"):
        logits = out.logits
    elif isinstance(out, (tuple, list)) and out:
        logits = out[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"{which}: expected logits, a tuple that begins with them or .logits, got {shown(out)}")
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"{which}: expected logits [{', '.join(map(str, tokens.shape))}, vocab], got {list(logits.shape)}"
        )
    return logits


def _by_token(a: Tensor, b: Tensor) -> Tensor:
    """Return the relative error of each token, float64 [T], between two tensors [B, T, …]."""
    return _relative(*(x.transpose(0, 1).flatten(1) for x in (a, b)))


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| over the larger of the two norms, along the last axis, float64; equal non-finite values agree."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    lost = (~same & ~(a.isfinite() & b.isfinite())).any(-1)
    a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))
    off = torch.where(same, 0.0, a - b).norm(dim=-1)
    size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
    return torch.where(lost, math.inf, torch.where(off == 0, 0.0, off / size))
