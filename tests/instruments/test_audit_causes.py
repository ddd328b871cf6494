"""What an audit says of failures that have one cause, of slow kernels, and of states that lie otherwise."""

import time

import pytest
import torch

import flakit
from flakit.instruments import audit as audit_module
from flakit.instruments.probes import PROBES
from flakit.instruments.setting import Setting
from tests.instruments import kernels
from tests.instruments.planted import PLANTED


def forgets_after_40(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
    """The second piece begins with an empty state."""
    parts = [[x[:, part] for x in (r, k, v, w)] for part in (slice(40), slice(40, None))]
    o, S = kernels.naive(*parts[0], u, scale, initial_state, output_final_state)
    if r.shape[1] > 40:
        more, S = kernels.naive(*parts[1], u, scale, None, output_final_state)
        o = torch.cat((o, more), 1)
    return o, S


@pytest.mark.full
def test_one_cause_is_one_sentence():
    only = ["truth", "zero-decay", "halves", "strides"]
    found = flakit.audit(forgets_after_40, "rwkv6", only=only, shrink=False, seconds=None)
    assert {v.probe.name for v in found.failed} == set(only), found
    for v in found.failed[1:]:
        assert (v.cause, v.case) == ("truth", None) and v.words.startswith("fails as `truth` does"), v.words
    for text in (str(found), found._repr_html_()):
        assert "Look at `truth` first: 3 other probes fail as it does" in text
        assert PROBES["strides"].meaning not in text


def test_a_control_that_fails_is_what_the_other_probe_has_found():
    """What truth's own settings do not reach."""

    def wrong_at_66(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
        v = v * (1.0 if r.shape[1] != 66 else 1.5)
        return kernels.naive(r, k, v, w, u, scale, initial_state, output_final_state)

    found = flakit.audit(wrong_at_66, "rwkv6", only=["gradients", "truth", "spike"], shrink=False, seconds=None)
    assert [(v.probe.name, v.cause) for v in found.failed] == [("truth", ""), ("spike", "truth")], found
    assert found["truth"].setting["T"] == 66 and "spike" not in found["truth"].setting


def test_a_slow_kernel_has_an_audit_that_ends_and_says_what_it_left_out(monkeypatch):
    spent, process_time = [0.0], time.process_time

    def slow(r, k, v, w, u, scale=None):
        spent[0] += 3.0
        return kernels.only_o(r, k, v, w, u, scale)

    monkeypatch.setattr(time, "process_time", lambda: process_time() + spent[0])
    found = flakit.audit(slow, "rwkv6", shrink=False)
    assert spent[0] < audit_module.OVERTIME * audit_module.SECONDS + 30, spent
    assert {v.verdict for v in found.verdicts} >= {"pass", "left out"} and found.left_out > 100
    assert f"{found.left_out} of " in str(found) and "settings left out, --full tries them all" in str(found)


def test_states_with_their_axes_the_other_way_round_are_named():
    op, kernel, *_ = PLANTED["states as [V, K]"]
    found = flakit.audit(kernel, op, only=["state-layout"], shrink=False)
    assert found["state-layout"].words.startswith("states are taken and returned as [V, K] in the place of [K, V]")


def test_a_final_state_of_the_other_shape_is_said_to_be_transposed():
    def kernel(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False):
        o, S = kernels.naive(r, k, v, w, u, scale, initial_state, True)
        return o, S.mT

    found = flakit.audit(kernel, "rwkv6", only=["rectangles"], shrink=False)
    assert "final_state: expected [1, 2, 40, 64], got [1, 2, 64, 40], transposed" in found["rectangles"].words, found


def computes_here(r, k, v, w, u, scale=None):
    """On the current GPU, wherever its arguments are."""
    on = torch.device("cuda", torch.cuda.current_device())
    return kernels.only_o(*(x.to(on) for x in (r, k, v, w, u)), scale) + torch.zeros(1, device=r.device)


@pytest.mark.gpu
def test_a_kernel_that_allocates_on_the_current_device_is_found_where_there_are_two():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    right = flakit.audit(kernels.only_o, "rwkv6", only="other-device", shrink=False)
    assert right["other-device"].verdict == "pass", right
    assert not flakit.audit(computes_here, "rwkv6", only="other-device", shrink=False).passed


def test_the_other_device_is_one_that_is_not_current_and_no_other_probe_stays_there(monkeypatch):
    """Two GPUs by name, whose tensors are on the CPU: what is asked of which, and who is told so."""
    asked, make = [], Setting.make
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(Setting, "make", lambda self, op, device="cpu": asked.append(device) or make(self, op))

    def current_alone(r, k, v, w, u, scale=None):
        return kernels.only_o(r, k, v, w, u, scale) * (asked[-1] != "cuda:0")

    def crashes_elsewhere(r, k, v, w, u, scale=None):
        if asked[-1] == "cuda:0":
            raise RuntimeError("expected all tensors to be on the same device")
        return kernels.only_o(r, k, v, w, u, scale)

    how = {"only": ["other-device", "truth"], "shrink": False, "device": "cuda"}
    assert flakit.audit(kernels.only_o, "rwkv6", **how).passed and "cuda:0" in asked
    for kernel, says in ((current_alone, "allowed"), (crashes_elsewhere, "on the same device")):
        (failed,) = flakit.audit(kernel, "rwkv6", **how).failed
        assert (failed.probe.name, failed.cause) == ("other-device", "") and says in failed.words, failed.words
    asked.clear()
    found = flakit.audit(current_alone, "rwkv6", only="other-device", shrink=False, device="cpu")
    assert found["other-device"].words == "it needs two GPUs" and set(asked) == {"cpu"}
