"""A pre-pass over ranks that reads another head's decay, or forgets a message: laws, and what does not see it."""

import pytest
import torch

import flakit
from flakit.cases import over_ranks as case
from flakit.ops.common.ranks import decay_map

SETTING = {"ranks": 4, "w": -0.05, "spread": 0.2}


@pytest.mark.parametrize("fault", case.FAULTS)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("w", [0.0, -0.05, -0.3, -1.0])
def test_law_says_how_far_off_every_head_is_on_every_rank(fault, ranks, w):
    shown = case.show(ranks=ranks, w=w, spread=0.7, fault=fault)
    torch.testing.assert_close(shown.entering, shown.predicted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(shown.tokens, shown.law, rtol=1e-5, atol=1e-6, check_dtype=False)
    assert all(row.agrees for row in shown.rows)


WRONG_LAWS = {
    "of the neighbouring slice alone": lambda w, behind, walked, read: case.law(w, min(behind, 16), walked, read=read),
    "fades as if it had not come back": lambda w, behind, walked, read: case.law(w, behind, 0, read=read),
    "of the last decay": lambda w, behind, walked, read: abs(1 - read / w),
}


@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_other_laws_fail(wrong):
    shown = case.show(**SETTING, fault=case.FAULTS[0])
    w, read = shown.decays[-1].item(), shown.decays[0].item()
    guess = [WRONG_LAWS[wrong](w, 48 - 16 * (t // 16), 15 - t % 16, read) for t in range(48)]
    assert not torch.allclose(shown.tokens[-1, :48].float(), torch.tensor(guess), rtol=1e-2)


def test_what_does_not_see_it():
    gate, first, none = (case.show(**SETTING, fault=fault) for fault in case.FAULTS)
    for shown in (gate, first, none):
        assert shown.outputs < 1e-12  # a test of the outputs
        assert shown.tokens[:, -shown.slice :].max() < 1e-12  # of the last rank
    assert gate.entering[0].max() < 1e-12  # of one head
    assert not case.show(**SETTING | {"spread": 0.0}, fault=case.FAULTS[0]).entering.any()
    assert first.tokens.max() < 1e-12 and first.initial == 1  # of tokens, without an initial state
    assert gate.entering[1:, :-1].min() > 0.05 and none.initial < 1e-12


def test_the_pre_pass_is_the_operators():
    """Its factor is what `group=` sends, and dN the gradient of an initial state."""
    x = flakit.inputs("rwkv6", T=9, H=3, K=8, dtype=torch.float64, decay="rwkv6-wide")
    do, state = torch.randn_like(x["v"]), torch.zeros(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    o = flakit.chunk_rwkv6(**x, scale=1.0, initial_state=state).o
    factor, dN = case.pre_pass(x["r"], x["w"], do, wrong=False)
    torch.testing.assert_close(dN, torch.autograd.grad(o, state, do)[0])
    sent = decay_map(3, -2).compute(None, [x[name] for name in "rkvw"], None)
    torch.testing.assert_close(factor[..., 0], sent)
