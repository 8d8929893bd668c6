"""Memory of a step on a CPU. Needs only torch, because ranks of peers import it, too."""

from __future__ import annotations

from collections.abc import Callable


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes of tensors that ``call`` adds at its peak, from torch's record of allocations."""
    return memory_of(call)[0]


def memory_of(call: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes of tensors that ``call`` adds at its peak, and the part of them that is left after it has returned."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    found = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    present = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        present += event.nbytes()
        peak = max(peak, present)
    return peak, present
