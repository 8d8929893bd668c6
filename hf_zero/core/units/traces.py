"""Let torch.compile trace a read of a sharded parameter again once the engine has unsharded it.

[Note: reads that a trace finds] A block unshards its own parameters before its graph runs, and those of other blocks that it is known to
read. torch.compile traces an attribute lookup without running it, so an unknown outside read calls no guard (``GuardedParameters``): the
trace meets the empty parameter itself, whose class reports the first question about it. The engine then unshards the block as it does for
the same read in an uncompiled forward, by the same collectives at the same place, and records the reader. The trace is begun again and
meets an ordinary parameter; no code of the model has run in between. Later forwards unshard the block before the graph runs, so one graph
serves the first forward and all later ones. A graph compares shape and class of the parameters that it reads: if a later forward runs while
the block is sharded, as in an evaluation that frees blocks earlier, the trace that follows finds the read.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._guards import TracingContext, tracing


def tracing_now() -> bool:
    """Return whether torch.compile traces code in this thread."""
    return TracingContext.try_get() is not None


def unshard_in_trace(bring: Callable[[], bool]) -> None:
    """Begin the running trace again if ``bring`` unshards the parameter that it has met, [Note: reads that a trace finds].

    Args:
        bring: Unshards the parameter if code of the model computes with it now, and returns whether it did; collective if it does.
    """
    with tracing(None):  # the engine's own questions about parameters are not the trace's
        brought = bring()
    if brought:
        from torch._dynamo.exc import RestartAnalysis

        raise RestartAnalysis(restart_reason="a parameter of another block was unsharded")
