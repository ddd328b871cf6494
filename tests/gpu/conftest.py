import pytest

from tests.ops.conftest import poisoned_memory  # noqa: F401


@pytest.fixture
def report(request):
    """Call it with rows, one a tensor measured; `tests.gpu.report` sums them up where FLAKIT_REPORT names a file."""
    return request.node.stash.setdefault(REPORTED, []).extend


REPORTED = pytest.StashKey[list]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    if call.when == "call":
        result.measured = item.stash.get(REPORTED, [])
    return result
