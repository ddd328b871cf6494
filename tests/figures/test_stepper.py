"""The stepper's picture: the reference's own arrays, colours that keep their limits, bad cells hatched."""

import numpy as np
import pytest
import torch

from flakit.figures.stepper import SCENES, Stepper, frames
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from flakit.ops.rwkv6 import reference

SCENE = SCENES["rwkv6"]


def run(decay="logsigmoid", T=6, K=4, V=3, grow=False, do=True):
    x = inputs("rwkv6", T=T, H=1, K=K, V=V, decay=decay)
    x["w"] = -x["w"] if grow else x["w"]
    do = torch.randn(1, T, 1, V, generator=torch.Generator().manual_seed(1)) if do else None
    return frames(SCENE, reference.steps(**x, do=do), u=x["u"], scale=K**-0.5)


def test_every_operator_with_steps_has_a_scene():
    assert {name for name, op in OPERATORS.items() if hasattr(op.reference, "steps")} == set(SCENES)


def test_the_equations_of_every_row_hold():
    found = run()
    assert len(found["forward"]) == len(found["backward"]) == 6
    for f in found["forward"]:
        np.testing.assert_allclose(f["state_before"] + f["bonus"], f["read"], rtol=1e-6)
        np.testing.assert_allclose(f["kept"] + f["kv"], f["state"], rtol=1e-6)
        np.testing.assert_allclose(f["scale"] * f["r"] @ f["read"], f["o"], rtol=1e-5, atol=1e-7)
    for b in found["backward"]:
        np.testing.assert_allclose(b["dkept"] + b["dread"], b["dstate_before"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(b["passed"].sum(1), b["dw"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(b["scale"] * b["read"] @ b["do"], b["dr"], rtol=1e-5, atol=1e-6)
    for earlier, later in zip(found["forward"], found["forward"][1:], strict=False):
        np.testing.assert_array_equal(earlier["state"], later["state_before"])
    for earlier, later in zip(found["backward"], found["backward"][1:], strict=False):
        np.testing.assert_array_equal(earlier["dstate"], later["dstate_before"])


def test_without_a_backward_pass_there_are_no_backward_frames():
    found = run(do=False)
    assert len(found["forward"]) == 6 and found["backward"] == []


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_every_array_of_a_scene_exists_and_is_drawn(which):
    frame = run(K=4, V=3)[which][0]
    for row in getattr(SCENE, which):
        for block in row.blocks:
            assert frame[block.matrix].shape == (4, 3)
            assert all(frame[name].shape == (4,) for name in (block.left, block.right) if name)
            assert all(frame[name].shape == (3,) for name in (block.top, block.bottom) if name)
            assert sum(block.matrix in names for names in SCENE.groups.values()) == 1


def cells(stepper, name):
    """The colours of a matrix, [rows, columns, 3]."""
    return stepper._matrices[name][0]._cells.picture[..., :3]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_step_changes_the_picture_and_back_restores_it(which):
    stepper = Stepper(SCENE, which)
    stepper.load(run()[which])
    pictures = []
    for t in (1, 4, 1):
        stepper.show(t)
        pictures.append(stepper.canvas.png())
    assert pictures[0] == pictures[2] != pictures[1]


def test_colours_mean_the_same_at_every_step():
    stepper = Stepper(SCENE, "forward")
    found = run()["forward"]
    stepper.load(found)
    stepper.show(2)
    after = cells(stepper, "state").copy()
    stepper.show(3)
    np.testing.assert_array_equal(cells(stepper, "state_before"), after)


def test_sizes_of_the_run_can_change():
    stepper = Stepper(SCENE, "backward")
    for K, V, T in ((4, 3, 6), (8, 2, 12), (2, 2, 3)):
        stepper.load(run(K=K, V=V, T=T)["backward"])
        stepper.show(T - 1)
        stepper.canvas.png()
        assert cells(stepper, "dstate").shape[:2] == (K, V)


@pytest.mark.parametrize("magnitude", [False, True], ids=["value", "size"])
def test_non_finite_cells_are_hatched(magnitude):
    stepper = Stepper(SCENE, "forward")
    found = run(decay=-30.0, grow=True, T=6)["forward"]
    stepper.load(found, magnitude=magnitude)
    hatched = []
    for t in range(6):
        stepper.show(t)
        hatched.append(stepper._matrices["state"][0]._hatched["inf"].get_visible())
    assert hatched == [not np.isfinite(frame["state"]).all() for frame in found]
    assert hatched == [False, False, False, True, True, True]
    assert stepper._gone["inf"].get_visible() and stepper._gone["inf"].get_x() == 2.5
    stepper.load(run()["forward"])
    stepper.show(0)
    assert not any(patch.get_visible() for patch in stepper._gone.values())


def test_zeros_and_emptied_states_are_finite_colours():
    stepper = Stepper(SCENE, "forward")
    for magnitude in (False, True):
        stepper.load(run(decay=-torch.inf)["forward"], magnitude=magnitude)
        stepper.show(0)  # S_{-1} is all zero
        stepper.canvas.png()
        assert not any(h.get_visible() for heats in stepper._matrices.values() for h in heats[0]._hatched.values())


def test_an_unknown_pass_is_refused():
    with pytest.raises(ValueError, match="which: expected 'forward' or 'backward', got 'sideways'"):
        Stepper(SCENE, "sideways")
