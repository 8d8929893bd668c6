"""Record when each part of a batch passes each stage of a pipeline, and how long stages wait. Needs only torch, because ranks import it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

UNITS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}  # relative durations that theory assumes


class Event(NamedTuple):
    """One pass of one part of a batch through one stage.

    Attributes:
        kind: ``forward`` or ``backward``; ``input`` or ``weight`` where the schedule divides the backward.
        stage: Number of the stage.
        part: Number of the part.
        begin: Start time in seconds of the machine's clock, the same for all ranks.
        end: End time of the same clock.
    """

    kind: str
    stage: int
    part: int
    begin: float
    end: float


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """Yield a list to which the computations of hf_zero's stages under torch's schedules on this rank are added, without waiting times."""
    from hf_zero.pipeline.schedules import ScheduledStage

    events: list[Event] = []

    def timed(name: str) -> Callable[..., Any]:
        original = getattr(ScheduledStage, name)

        def call(stage: Any, part: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(stage, part, *args, **kwargs)
            kind = {"forward_one_chunk": "forward", "backward_weight_one_chunk": "weight"}.get(name)
            kind = kind or ("backward" if kwargs.get("full_backward", True) else "input")
            events.append(Event(kind, stage.stage_index, part, begin, time.perf_counter()))
            return result

        return call

    with ExitStack() as stack:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            stack.enter_context(mock.patch.object(ScheduledStage, name, timed(name)))
        yield events


@contextmanager
def recorded_passes() -> Iterator[list[Event]]:
    """Yield a list like ``recorded``, for hf_zero's own forward and backward of a batch that a script calls."""
    from hf_zero.comm.link import Link
    from hf_zero.pipeline.own_stages import OwnStages
    from hf_zero.pipeline.passes import Passes

    events: list[Event] = []
    done: dict[int, int] = {}
    arrived = [0.0]
    receive, run, backward = Link.receive, OwnStages.run, Passes._backward_part

    def received(*args: Any) -> Any:
        result = receive(*args)
        arrived[0] = time.perf_counter()
        return result

    def ran(own: Any, plan: Any, index: int, *args: Any) -> Any:
        begin = time.perf_counter()
        result = run(own, plan, index, *args)
        events.append(Event("forward", index, done.get(index, 0), max(begin, arrived[0]), time.perf_counter()))
        done[index] = done.get(index, 0) + 1
        return result

    def backward_part(passes: Any, at: tuple[int, int], *args: Any) -> Any:
        begin = time.perf_counter()
        result = backward(passes, at, *args)
        events.append(Event("backward", *at, max(begin, arrived[0]), time.perf_counter()))
        return result

    with (
        mock.patch.object(Link, "receive", received),
        mock.patch.object(OwnStages, "run", ran),
        mock.patch.object(Passes, "_backward_part", backward_part),
    ):
        yield events


def waiting(ranks: Sequence[Sequence[Event]]) -> float:
    """Return the fraction of time, between first begin and last end, in which a rank computes nothing, averaged over ranks."""
    span = max(event.end for rank in ranks for event in rank) - min(event.begin for rank in ranks for event in rank)
    return 1.0 - sum(event.end - event.begin for rank in ranks for event in rank) / (span * len(ranks))


def theory(ranks: Sequence[Sequence[Event]], seconds: Callable[[Event], float]) -> float:
    """Return ``waiting`` for events of the durations ``seconds``, in the recorded order of each rank, with messages that take no time."""
    stages = 1 + max(event.stage for rank in ranks for event in rank)
    ends: dict[tuple[str, int, int], float] = {}
    free, left, ideal = [0.0] * len(ranks), [list(rank) for rank in ranks], [list[Event]() for _ in ranks]
    while any(left):
        moved = False
        for rank, queue in enumerate(left):
            while queue and all(need in ends for need in _needs(queue[0], stages)):
                event = queue.pop(0)
                begin = max([free[rank], *(ends[need] for need in _needs(event, stages))])
                free[rank] = begin + seconds(event)
                ends["back" if event.kind in ("backward", "input") else event.kind, event.stage, event.part] = free[rank]
                ideal[rank].append(Event(*event[:3], begin, free[rank]))
                moved = True
        if not moved:
            raise ValueError("parts wait for each other: what was recorded is no schedule")
    return waiting(ideal)


def _needs(event: Event, stages: int) -> list[tuple[str, int, int]]:
    if event.kind == "forward":
        return [("forward", event.stage - 1, event.part)] if event.stage else []
    if event.kind == "weight":
        return [("back", event.stage, event.part)]
    return [("back", event.stage + 1, event.part) if event.stage < stages - 1 else ("forward", event.stage, event.part)]


def own_seconds(ranks: Sequence[Sequence[Event]]) -> Callable[[Event], float]:
    """Return a function of an event: the median duration, in seconds, of the events of its kind and stage."""
    found: dict[tuple[str, int], list[float]] = {}
    for rank in ranks:
        for event in rank:
            found.setdefault((event.kind, event.stage), []).append(event.end - event.begin)
    medians = {key: statistics.median(values) for key, values in found.items()}
    return lambda event: medians[event.kind, event.stage]
