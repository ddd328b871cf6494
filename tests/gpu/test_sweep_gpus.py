"""A sweep's workers share out the GPUs of one machine, and measure what one process does."""

import time

import pytest
import torch

import flakit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def where(T: int) -> dict[str, float]:
    """The GPU that a worker's tensors are on by default; slow, so that no worker takes all of them."""
    time.sleep(3)
    return {"gpu": float(torch.empty(1, device="cuda").get_device())}


def test_workers_take_the_gpus_in_turn():
    found = flakit.sweep(where, over={"T": [1, 2, 3, 4, 5, 6, 7, 8]}, workers=2, progress=False)
    assert {row["gpu"] for row in found.rows()} == {0.0, 1.0}


def test_they_measure_what_one_process_does():
    how = {"over": {"decay": [-0.1, -1.0, -8.0], "T": [33, 64]}, "progress": False, "device": "cuda"}
    assert flakit.sweep("rwkv6", **how).rows() == flakit.sweep("rwkv6", **how, workers=2).rows()
