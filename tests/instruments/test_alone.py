"""Triton's interpreter keeps its state in globals: whatever launches interpreted kernels waits for another thread's
launch to end. (That operators do, and what goes wrong if they do not, is in tests/ops/test_threads.py.)"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flakit
from flakit.instruments import learn
from flakit.instruments.runner import Runner
from flakit.instruments.setting import Setting
from flakit.instruments.subject import Subject
from flakit.numerics.operators import OPERATORS
from flakit.ops.common.dispatch import interpreted_alone

pytestmark = pytest.mark.interpret
WAIT = 0.5
"""Seconds in which a thread that does not wait would have begun."""


def recurrence(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """In PyTorch alone: its call waits for nothing by itself."""
    began.set()
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S, o = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(r.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None]
        o.append((scale * r[:, t, :, None] @ (S + u[..., None] * kv)).squeeze(-2))
        S = w[:, t, :, :, None].exp() * S + kv
    return torch.stack(o, 1), S if output_final_state else None


began = threading.Event()


def call_a_subject():
    x = flakit.inputs("rwkv6", T=2, K=4, V=4, H=1)
    Subject(recurrence, OPERATORS["rwkv6"])(x | {"scale": 0.5})


def run_a_setting():
    def prepare(arguments, arriving):
        began.set()
        return arguments, arriving

    Runner(Subject(recurrence, OPERATORS["rwkv6"])).run(Setting(), backward=False, prepare=prepare)


def look_for_launches():
    learn._launches_interpreted(Runner(Subject(recurrence, OPERATORS["rwkv6"])), Setting())


def begin_a_trace():
    with flakit.trace():
        began.set()


@pytest.mark.parametrize("act", [call_a_subject, run_a_setting, look_for_launches, begin_a_trace])
def test_it_waits_for_another_threads_launch(act):
    from triton.runtime.interpreter import GridExecutor

    began.clear()
    launch = GridExecutor.__call__
    with ThreadPoolExecutor(1) as pool:
        with interpreted_alone():  # as a launch does in this thread
            other = pool.submit(act)
            assert not began.wait(WAIT) and GridExecutor.__call__ is launch
        assert began.wait(60)
        other.result()
    assert GridExecutor.__call__ is launch
