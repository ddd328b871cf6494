"""How much memory a call holds at once."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak(call: Callable[[], object]) -> int:
    """Most bytes of tensors on the CPU that `call` has allocated and not yet freed, counted by PyTorch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [x for x in profiler.profiler.kineto_results.events() if x.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
