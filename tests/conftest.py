"""What every test directory shares: the markers, and which of them can run in this process."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

WHY_NOT_HERE = {
    "gpu": None if torch.cuda.is_available() and not INTERPRETED else "needs a CUDA device and no TRITON_INTERPRET",
    "interpret": None if INTERPRETED else "needs TRITON_INTERPRET=1 pytest -m interpret (make test runs both kinds)",
}


def pytest_addoption(parser):
    parser.addoption("--all-notebooks", action="store_true", help="run each notebook twice, and the solutions too")


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, reason in WHY_NOT_HERE.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
