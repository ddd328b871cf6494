"""The loss curve is wrong and the kernel is right: gradient accumulation that nobody divides by.

As reported (flash-linear-attention issue #218): RWKV7 trained with the Transformers Trainer 4.48.2 shows a loss that is
too high and rises, Qwen2 does not, and the same RWKV7 in another framework does not; the loss is not divided by the
accumulation steps and comes out 4 * 4 = 16 times too large; a newer Transformers cures it.
As measured: trainer and model read one contract differently. The loss of a step is the sum over all targets divided by
their number, which only the trainer knows. It passes `num_items_in_batch` to models whose forward takes `**kwargs`, and
leaves the division to them. A model that takes `**kwargs` for another reason ignores the number and returns its own
mean. Then neither divides by the accumulation: loss and gradient are `accumulation` times too large, 4 at an
accumulation of 4, for any batch size, since the mean averages over the batch. Newer releases have the same contract and
the same fault; data/transformers_accumulation.json has both. Cures: a forward without `**kwargs`, `accepts_loss_kwargs
= False` on the model, `trainer.model_accepts_loss_kwargs = False`, or a model that keeps the contract.

The contract itself has a second, smaller fault: the trainer counts the labels before the model shifts them by one, T
where T - 1 are predicted. A model that keeps the contract gets (T - 1) / T of the mean loss: 15/16 at T = 16. 5.23.0
counts correctly for models that name Transformers' own causal loss, and for no others.

Neither fault depends on the operator: softmax attention with the same forward fails likewise. Clipping the gradient
norm hides the factor instead of removing it, and does not cure NaN (`clipped`).
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.accumulation import Accumulated, accumulate, measure_accumulation, micro_batches
from ...models.language_model import IGNORED, MIXERS, LanguageModel, loss
from ...models.tasks import Copying
from ...numerics.arguments import one_of
from ..laws import Measured, Row

T, SEQUENCES, VOCAB = 16, 16, 64
"""The experiment's tokens per sequence, sequences per optimizer step, and vocabulary size."""


class CausalLM(nn.Module):
    """A language model as trainers call it: tokens and labels in, loss out. Labels are the tokens, not yet shifted."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return {"loss": the mean over labels that are not `IGNORED`, "logits"}. input_ids, labels: int64 [B, T]."""
        logits = self.model(input_ids)
        return {"loss": loss(logits[:, :-1], labels[:, 1:]), "logits": logits}


class TakesAnything(CausalLM):
    """The fault: `**kwargs` tells the trainer that the model uses `num_items_in_batch`, but forward ignores it."""

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


class SaysNo(TakesAnything):
    """A cure in the model: it takes `**kwargs` and tells the trainer by `accepts_loss_kwargs` that it ignores them."""

    accepts_loss_kwargs = False


class KeepsTheContract(CausalLM):
    """A cure in the model: it divides the summed loss by the number of targets that the trainer counted."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch=None, **kwargs) -> dict[str, Tensor]:
        if num_items_in_batch is None:
            return super().forward(input_ids, labels)
        logits = self.model(input_ids)
        targets = labels[:, 1:].flatten()
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


CONTRACTS = {
    "takes **kwargs": TakesAnything,
    "plain forward": CausalLM,
    "accepts_loss_kwargs = False": SaysNo,
    "trainer.model_accepts_loss_kwargs = False": TakesAnything,
    "uses num_items_in_batch": KeepsTheContract,
}
"""The faulty model, and each cure; the fourth is set on the trainer."""

ON_THE_TRAINER = "trainer.model_accepts_loss_kwargs = False"


def model(contract: str = "takes **kwargs", mixer: str = "rwkv7", *, seed: int = 0) -> CausalLM:
    """Return a small untrained language model with the forward of one of `CONTRACTS`; mixer: one of `MIXERS`."""
    inner = LanguageModel(VOCAB, dim=32, layers=2, mixer=mixer, head_size=16, initialisation="normal", seed=seed)
    return CONTRACTS[one_of("contract", contract, CONTRACTS)](inner)


def sequences(steps: int = 1, *, seed: int = 0) -> Tensor:
    """Draw the tokens of `steps` optimizer steps, [steps * SEQUENCES, T]: random symbols, then the same again."""
    return Copying(VOCAB - 1).batch(steps * SEQUENCES, T, torch.Generator().manual_seed(seed))[0]


def takes_kwargs(model: nn.Module) -> bool:
    """Return whether the trainer lets the model divide: its `accepts_loss_kwargs`, else if it takes `**kwargs`."""
    if hasattr(model, "accepts_loss_kwargs"):
        return model.accepts_loss_kwargs
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def trainer_step(
    model: nn.Module, tokens: Tensor, accumulation: int, *, accepts: bool | None = None, shifted: bool = False
) -> float:
    """Compute the gradients of one step under the trainer's contract, and return the loss that it reports.

    tokens: [B, T], split into `accumulation` micro-batches. accepts: `trainer.model_accepts_loss_kwargs`, default
        `takes_kwargs(model)`. shifted: count the targets after the shift; the trainer counts the labels before it.
    """
    accepts = takes_kwargs(model) if accepts is None else accepts
    counted = (tokens[:, 1:] if shifted else tokens).ne(IGNORED).sum()
    reported = 0.0
    for x, labels in micro_batches(tokens, tokens, accumulation):
        extra = {"num_items_in_batch": counted} if accepts else {}
        loss = model(input_ids=x, labels=labels, **extra)["loss"]
        loss = loss if accepts else loss / accumulation
        loss.backward()
        reported += loss.item()
    return reported


def plain_step(model: CausalLM, tokens: Tensor, accumulation: int) -> float:
    """Compute the gradients of one step with the plain PyTorch loop, the reference, and return its loss."""
    targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return accumulate(model.model, tokens, targets, accumulation).item()


def step(
    contract: str = "takes **kwargs",
    mixer: str = "rwkv7",
    *,
    loop: str = "trainer",
    seed: int = 0,
    returned: list[float] | None = None,
):
    """Return the first optimizer step on `sequences` as a function for `check_gradient_accumulation`: accumulation ->
    (loss, grads).

    loop: "trainer", the contract as in `trainer_step`, or "plain". returned: a list to which the loss that the model
        returns for each micro-batch is appended. Raises ValueError for another loop.
    """
    if loop not in ("trainer", "plain"):
        raise ValueError(f"loop: expected 'trainer' or 'plain', got {loop!r}")
    lm, tokens = model(contract, mixer, seed=seed), sequences(seed=seed)
    accepts = False if contract == ON_THE_TRAINER else None
    if returned is not None:
        lm.register_forward_hook(lambda _, __, out: returned.append(out["loss"].item()))

    def run(accumulation: int) -> tuple[float, list[Tensor]]:
        lm.zero_grad(set_to_none=True)
        if loop == "plain":
            reported = plain_step(lm, tokens, accumulation)
        else:
            reported = trainer_step(lm, tokens, accumulation, accepts=accepts)
        return reported, [p.grad for p in lm.parameters()]

    return run


class Trained(NamedTuple):
    """One optimizer step: the loss reported by the trainer, the mean loss of all targets, the norm before clipping."""

    reported: float
    loss: float
    grad_norm: float


OPTIMIZERS = {"SGD": (torch.optim.SGD, 1.0), "AdamW": (torch.optim.AdamW, 1e-2)}
"""Optimizers, each with the experiment's learning rate."""


def training(
    contract: str = "takes **kwargs", *, optimizer: str = "AdamW", clip: float | None = None, steps: int = 20
) -> list[Trained]:
    """Memorise the experiment's 16 sequences with the trainer's loop, each step in 4 micro-batches: one `Trained` each.

    optimizer: one of `OPTIMIZERS`. clip: largest gradient norm, None for no clipping. Stops at a non-finite step.
    """
    make, lr = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)]
    lm, tokens = model(contract), sequences()
    accepts, update, rows = False if contract == ON_THE_TRAINER else None, make(lm.parameters(), lr=lr), []
    for _ in range(steps):
        update.zero_grad()
        with torch.no_grad():
            loss = CausalLM.forward(lm, tokens, tokens)["loss"].item()
        reported = trainer_step(lm, tokens, 4, accepts=accepts)
        norm = nn.utils.clip_grad_norm_(lm.parameters(), math.inf if clip is None else clip).item()
        rows.append(Trained(reported, loss, norm))
        if not (math.isfinite(reported) and math.isfinite(norm)):
            break
        update.step()
    return rows


def law(accumulation: int, contract: str = "takes **kwargs", *, T: int = T) -> float:
    """Predict the factor on loss and gradient: `accumulation` if neither trainer nor model divides, (T - 1) / T if
    labels are counted that are not predicted, else 1. Raises ValueError for an unknown contract.

    >>> law(4), law(4, "plain forward"), law(4, "uses num_items_in_batch")
    (4, 1, 0.9375)
    """
    if one_of("contract", contract, CONTRACTS) == "takes **kwargs":
        return accumulation
    return (T - 1) / T if contract == "uses num_items_in_batch" else 1


def clipped(bad: float = torch.nan, max_norm: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the gradients of three parameters before and after `clip_grad_norm_`, [3, 3]; one element is `bad`.

    For a NaN or inf the norm is NaN or inf, and every gradient is multiplied by max_norm / norm: by NaN, or by 0 (and
    inf * 0 is NaN). A step that would have damaged one parameter now damages all of them, or loses their gradients.
    """
    before = torch.arange(1.0, 10.0).view(3, 3)
    before[1, 1] = bad
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad.clone()
    nn.utils.clip_grad_norm_(parameters, max_norm)
    return before, torch.stack([p.grad for p in parameters])


RECORDED = {1: (4.2132, 0.2438), 4: (16.8527, 0.9752)}
"""Recorded loss and gradient norm of the fault by accumulation, for another such model."""
REPORTED = 16.0
"""The reported factor on the loss, at a batch size of 4 and an accumulation of 4."""


class Cut(NamedTuple):
    """One optimizer step in micro-batches: its comparison with the plain loop, each loss, and the full gradient."""

    measured: Accumulated
    returned: list[float]
    """The loss that the model returned for each micro-batch."""
    gradient: Tensor
    """The gradient of all parameters, flat."""


@lru_cache(maxsize=128)
def cut(contract: str, accumulation: int, mixer: str = "rwkv7", *, seed: int = 0) -> Cut:
    """Compute the first step in `accumulation` micro-batches under the trainer's contract, beside the plain loop."""
    returned: list[float] = []
    result = step(contract, mixer, seed=seed, returned=returned)(accumulation)
    row = measure_accumulation(lambda _: result, [accumulation], reference=_plain(mixer, seed))[0]
    return Cut(row, returned, torch.cat([grad.flatten() for grad in result[1]]))


@lru_cache(maxsize=16)
def _plain(mixer: str, seed: int) -> tuple[float, list[Tensor]]:
    return step(mixer=mixer, loop="plain", seed=seed)(1)


def measured(contract: str = "takes **kwargs", accumulation: int = 4, mixer: str = "rwkv7") -> Accumulated:
    """Measure what `law` predicts: by what loss and gradient under the trainer's contract exceed the plain loop's."""
    return cut(contract, accumulation, mixer).measured


PARTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Shown(Measured):
    """The result of `show`: its rows, and one optimizer step on the same sequences in each number of micro-batches."""

    accumulation: int
    contract: str
    accepts: bool
    """Whether the trainer leaves the division to the model."""
    returned: list[float]
    """The loss that the model returned for each micro-batch."""
    added: list[float]
    """What the trainer adds to the reported loss for each micro-batch."""
    cuts: Mapping[int, Accumulated]
    """The comparison with the plain loop, by number of micro-batches."""
    laws: Mapping[int, float]
    plain: float
    """The plain loop's loss."""
    gradients: tuple[Tensor, Tensor]
    """A sample of the plain loop's gradient and the same elements of this step's, [400] each."""
    counted: int
    """Number of labels that the trainer counts; `predicted`: those of them that are predicted."""
    predicted: int


_ELEMENTS = 400


def show(
    *,
    accumulation: Annotated[int, PARTS] = 4,
    contract: Annotated[str, CONTRACTS] = "takes **kwargs",
    mixer: Annotated[str, MIXERS] = "rwkv7",
) -> Shown:
    """Return by what factors reported loss and gradient of one step differ from the plain loop's, beside the prediction
    of `law`. accumulation: micro-batches per step. contract: of `CONTRACTS`. mixer: of `models.MIXERS`."""
    cuts = {parts: cut(contract, parts, mixer) for parts in PARTS}
    plain, gradients = _plain(mixer, 0)
    now, gradient = cuts[accumulation], torch.cat([grad.flatten() for grad in gradients])
    sample = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(0))[:_ELEMENTS]
    accepts = contract != ON_THE_TRAINER and takes_kwargs(model(contract, mixer))
    laws = {parts: float(law(parts, contract)) for parts in PARTS}
    rows = [
        Row(f"{contract}, accumulation {accumulation}: {what}", math.nan, laws[accumulation], got)
        for what, got in (("loss", now.measured.loss_factor), ("gradient", now.measured.grad_factor))
    ]
    return Shown(
        rows, accumulation, contract, accepts, returned=now.returned,
        added=[loss if accepts else loss / accumulation for loss in now.returned],
        cuts={parts: each.measured for parts, each in cuts.items()}, laws=laws, plain=plain,
        gradients=(gradient[sample], now.gradient[sample]), counted=SEQUENCES * T, predicted=SEQUENCES * (T - 1),
    )  # fmt: skip


def reproduce() -> list[Row]:
    """Return recorded, predicted and measured factors of loss and gradient against the plain loop, by contract."""
    rows = []
    for n in (2, 4, 8):
        loss, gradient = show(accumulation=n).rows
        if n == 4:
            factors = [bad / good for good, bad in zip(RECORDED[1], RECORDED[4], strict=True)]
            rows.append(loss._replace(what=f"{loss.what}, as reported", recorded=REPORTED))
            loss, gradient = loss._replace(recorded=factors[0]), gradient._replace(recorded=factors[1])
        rows += [loss, gradient]
    for contract in list(CONTRACTS)[1:]:
        recorded = 15 / 16 if contract == "uses num_items_in_batch" else math.nan
        rows += [row._replace(recorded=recorded) for row in show(contract=contract).rows]
    return rows
