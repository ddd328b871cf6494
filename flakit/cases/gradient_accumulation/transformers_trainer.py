"""`gradient_accumulation` in the real Transformers Trainer, where it is installed: `pip install "flakit[trainer]"`.

`run` trains a model of `gradient_accumulation` for a few optimizer steps and returns what the trainer logged. The data,
its order and the weights are those of `gradient_accumulation.step`, so that the first step is the same.
data/record_transformers.py runs it with two releases of transformers; notebook 13 shows that recording, or runs it.
"""

import tempfile
from importlib.metadata import PackageNotFoundError, version

import torch

from ...numerics.arguments import one_of
from .. import gradient_accumulation as case

ACCUMULATIONS = (1, 2, 4, 8)
STEPS = 4
LEARNING_RATE = 1e-3


class NamesTheLoss(case.KeepsTheContract):
    """A model that also names Transformers' causal loss as its own, so that the trainer counts shifted labels."""

    loss_type = "ForCausalLM"


NAMES_THE_LOSS = "uses num_items_in_batch, loss_type = 'ForCausalLM'"
CONTRACTS = case.CONTRACTS | {NAMES_THE_LOSS: NamesTheLoss}
RUNS = [(contract, "rwkv7") for contract in CONTRACTS] + [
    ("plain forward", "attention"),
    ("takes **kwargs", "attention"),
]
"""The contracts and models of the recording: every contract with RWKV7, and softmax attention as the control."""


def installed() -> dict[str, str] | None:
    """Return the versions of transformers and accelerate by name; None if either is missing."""
    try:
        return {name: version(name) for name in ("transformers", "accelerate")}
    except PackageNotFoundError:
        return None


def run(
    contract: str = "takes **kwargs", mixer: str = "rwkv7", accumulation: int = 4, *, steps: int = STEPS
) -> list[dict]:
    """Train with the real Trainer: a row for each optimizer step, with the loss and gradient norm that it logged.

    contract: of `CONTRACTS`. Every step sees the same 16 sequences at any accumulation. The trainer clips the gradient
        norm to 1, and logs it before. Raises ImportError without transformers, ValueError for other settings.
    """
    one_of("contract", contract, CONTRACTS)
    if accumulation not in (1, 2, 4, 8, 16):
        raise ValueError(f"accumulation: expected a divisor of {case.SEQUENCES}, got {accumulation!r}")
    if installed() is None:
        raise ImportError('transformers and accelerate: expected both installed, pip install "flakit[trainer]"')
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = CONTRACTS[contract](case.model("plain forward", mixer).model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.SEQUENCES // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        data = [{"input_ids": row, "labels": row} for row in case.sequences(steps)]
        trainer = InOrder(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        if contract == case.ON_THE_TRAINER:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    setting = {"contract": contract, "model": mixer, "accumulation": accumulation}
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [
        setting | {"step": n, "loss": float(entry["loss"]), "grad_norm": float(entry["grad_norm"])}
        for n, entry in enumerate(logged)
    ]
