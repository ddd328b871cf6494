"""Pictures of RWKV7's transition: what they show against eigenvalues computed here, and what they refuse."""

import numpy as np
import pytest

from flakit.figures import eigenvalues

W, AB = np.linspace(-0.8, 0, 9), np.linspace(-2, 0, 11)


def test_the_map_marks_the_edge_of_growth_where_a_step_of_the_recurrence_grows():
    picture = eigenvalues.along_kappa(W, AB, np.exp(W) + AB[:, None])
    contours = picture.figure.axes[0].collections[1]
    (edge,) = (path for path, level in zip(contours.get_paths(), contours.levels, strict=True) if level == -1)
    assert len(edge.vertices) > 5
    for w, ab in edge.vertices:
        assert abs(np.exp(w) + ab) == pytest.approx(1, abs=0.01)
    assert picture.png()[:4] == b"\x89PNG" and "below -1" in picture.alt
