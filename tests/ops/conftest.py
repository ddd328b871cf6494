import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fill what torch.empty gives with NaN, so that a value that is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
