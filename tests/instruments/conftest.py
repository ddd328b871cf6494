"""What the tests of the instruments share."""

import pytest

from flakit.instruments import checks


@pytest.fixture(autouse=True, scope="session")
def called_again_for_a_moment():
    """The probe `repeat` calls a kernel up to fifty times, a fifth of an audit. Those here that give other bits do so
    at their third call, and the others never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "REPEATING", 0.1)
        yield
