"""The stepper's picture: the reference's own arrays, colours that keep their limits, bad cells hatched."""

import numpy as np
import pytest
import torch

from flakit.figures.canvas import Cell
from flakit.figures.scenes import SCENES
from flakit.figures.stepper import DECAYS, Stepper, frames
from flakit.numerics.inputs import inputs
from flakit.numerics.operators import OPERATORS
from tests.figures.words import assert_legible

SCENE = SCENES["rwkv6"]
SIZES = {"K": 4, "V": 3, "M": 5}
every_operator = pytest.mark.parametrize("op", SCENES)
both_passes = pytest.mark.parametrize("which", ["forward", "backward"])


def run(op="rwkv6", *, decay="logsigmoid", T=6, grow=False, do=True, **sizes):
    of, sizes = OPERATORS[op], SIZES | sizes
    x = inputs(op, T=T, H=1, decay=decay, **{name: size for name, size in sizes.items() if name in of.sizes})
    x[of.decay] = -x[of.decay] if grow else x[of.decay]
    do = torch.randn(1, T, 1, sizes["V"], generator=torch.Generator().manual_seed(1)) if do else None
    still = {name: x[name] for name in of.tensors if name not in of.sequences}
    return frames(SCENES[op], of.reference.steps(**x, do=do), scale=of.scale(x), **still)


def stepper_at(t, op="rwkv6", which="forward", width=9.4, **how):
    """A stepper that shows token t of a run."""
    stepper = Stepper(SCENES[op], which, width)
    stepper.load(run(op, **how)[which])
    stepper.show(t)
    return stepper


def equal(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_every_operator_with_steps_has_a_scene():
    assert {name for name, op in OPERATORS.items() if hasattr(op.reference, "steps")} == set(SCENES)


CHAINS = {"rwkv6": ["state"], "rwkv7": ["state"], "gsa": ["hk", "hv"]}


@every_operator
def test_every_step_begins_with_the_state_of_the_one_before(op):
    found = run(op)
    assert len(found["forward"]) == len(found["backward"]) == 6
    for earlier, later in zip(found["forward"], found["forward"][1:], strict=False):
        for name in CHAINS[op]:
            np.testing.assert_array_equal(earlier[name], later[f"{name}_before"])


@pytest.mark.parametrize("op, name, read", [("rwkv6", "dstate", None), ("rwkv7", "dstate", "r"), ("gsa", "dhv", "p")])
def test_what_is_handed_on_arrives_one_step_earlier(op, name, read):
    found = run(op)["backward"]
    for earlier, later in zip(found, found[1:], strict=False):
        at_t = (
            0.0 if read is None else (1 if op == "gsa" else earlier["scale"]) * np.outer(earlier[read], earlier["do"])
        )
        equal(later[f"{name}_before"] + at_t, earlier[name])


def test_without_a_backward_pass_there_are_no_backward_frames():
    found = run(do=False)
    assert len(found["forward"]) == 6 and found["backward"] == []


@every_operator
@both_passes
def test_every_array_of_a_scene_exists_and_is_drawn(op, which):
    scene, frame = SCENES[op], run(op)[which][0]
    assert {row.words for row in scene.forward}.isdisjoint(row.words for row in scene.backward)
    for row in getattr(scene, which):
        for block in row.blocks:
            rows, columns = frame[block.matrix].shape
            assert all(frame[name].shape == (rows,) for name in (block.left, block.right) if name)
            assert all(frame[name].shape == (columns,) for name in (block.top, block.bottom) if name)
            assert sum(block.matrix in names for names in scene.groups.values()) == 1


@every_operator
def test_every_gradient_comes_out_of_the_backward_pass(op):
    gradients = {f"d{name}" for name in OPERATORS[op].sequences}
    assert gradients <= set(SCENES[op].outputs("backward"))
    assert "o" in SCENES[op].outputs("forward")


def cells(stepper, name):
    """The colours of a matrix, [rows, columns, 3]."""
    return stepper._matrices[name][0]._cells.picture[..., :3]


@every_operator
@both_passes
def test_a_step_changes_the_picture_and_back_restores_it(op, which):
    stepper, pictures = stepper_at(0, op, which), []
    for t in (1, 4, 1):
        stepper.show(t)
        pictures.append(stepper.canvas.png())
    assert pictures[0] == pictures[2] != pictures[1]


def test_colours_mean_the_same_at_every_step():
    stepper = stepper_at(2)
    after = cells(stepper, "state").copy()
    stepper.show(3)
    np.testing.assert_array_equal(cells(stepper, "state_before"), after)


def test_sizes_of_the_run_can_change():
    stepper = stepper_at(0, which="backward")
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


@every_operator
@both_passes
@pytest.mark.parametrize("width", [9.4, 5.9])
def test_all_words_are_inside_and_apart(op, which, width):
    """Also with the longest numbers that a scale can have."""
    stepper = stepper_at(3, op, which, width, decay=-30.0, grow=True, T=16, K=8, V=8, M=8)
    assert stepper.canvas.pixels[1] <= (430 if width > 9 else 390)
    assert_legible(stepper.canvas)


def made_of(scene, frame, name):
    """An array by the terms of its scene."""
    total = 0
    for term in map(str.split, scene.terms[name].split(" + ")):
        sign, factors = (-1, term[1:]) if term[0] == "-" else (1, term)
        axes = [scene.axes.get(x, "") for x in factors]
        arrays = [np.float64(frame[x]) for x in factors]
        total = total + sign * np.einsum(f"{','.join(axes)}->{scene.axes[name]}", *arrays)
    return total


@every_operator
@both_passes
def test_the_terms_of_every_array_make_it(op, which):
    scene = SCENES[op]
    for frame in run(op)[which]:
        for name, terms in scene.terms.items():
            if name in frame and not callable(terms):
                equal(made_of(scene, frame, name), frame[name])
    shown = {name for name in frame if name in scene.axes}
    for name in shown:
        assert frame[name].ndim == len(scene.axes[name])


def test_what_is_no_sum_of_products_is_the_formula_that_is_said():
    """All other equations of a scene are those of its terms, above."""
    assert {name for scene in SCENES.values() for name, terms in scene.terms.items() if callable(terms)} == {
        "p", "dscores", "passed",
    }  # fmt: skip
    for frame in run("gsa")["backward"]:
        equal(np.exp(frame["scores"]) / np.exp(frame["scores"]).sum(), frame["p"])
        equal(frame["p"] * (frame["dp"] - frame["p"] @ frame["dp"]), frame["dscores"])
        equal(frame["passed"].sum(1), frame["dg"])


@every_operator
@both_passes
def test_every_result_of_a_step_has_terms(op, which):
    """What comes from outside: the inputs, the gradient of the output, and what another token has handed over."""
    stepper = stepper_at(2, op, which)
    names = {stepper.entry(Cell(name, 0, 0))[0] for name in stepper.canvas.maps}
    without = {name for name in names if name not in SCENES[op].terms}
    of = OPERATORS[op]
    handed = {"state_before", "dstate", "dhk", "dhv"}
    assert without <= {*of.sequences, "do", "decay", *handed}


@every_operator
@both_passes
@pytest.mark.parametrize("width", [9.4, 5.9])
def test_the_same_row_and_column_light_up_everywhere(op, which, width):
    scene, stepper = SCENES[op], stepper_at(2, op, which, width)
    for name, (rows, columns) in stepper.canvas.maps.items():
        cell = Cell(name, rows - 1, columns - 1)
        array, place = stepper.entry(cell)
        here = dict(zip(scene.axes[array], place, strict=True))
        for other, row, column in stepper.beside(cell, 2):
            assert other != name and stepper.canvas.box(other, row, column)
            if other == DECAYS:
                assert column == 2 and row == here.get(scene.axes[scene.decay])
                continue
            corner = Cell(other, row or 0, column or 0)
            axes = scene.axes[stepper.entry(corner)[0]]
            lit = {axis: at for axis, at in zip(axes, stepper.entry(corner)[1], strict=True) if axis in here}
            assert lit and lit.items() <= here.items()
