"""Run work on every rank, or on rank 0 alone, with the same outcome on all ranks: results, or one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointArgumentError, CheckpointError, CollectiveError

T = TypeVar("T")


def on_all(collectives: Collectives, what: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and gather the results; collective.

    Args:
        collectives: Collectives of the ranks that run ``work``.
        what: Description of the work for messages, with its path ("saving /data/step-100").
        work: Function that returns built-in containers and scalars.

    Returns:
        The results of all ranks in rank order, on every rank.

    Raises:
        CheckpointError: ``work`` failed on some rank; the message is the same on all ranks.
    """
    result, text, cause = _attempt(work)
    outcomes = _exchange(what, lambda: collectives.gather_objects((text, result), f"checkpoint: {what}"))
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure}
    if failures:
        raise CheckpointError(_message(what, failures, collectives.world)) from cause
    return [value for _, value in outcomes]


def quickly(collectives: Collectives, what: str, work: Callable[[], T]) -> T:
    """Run ``work`` like ``on_all``, but return only this rank's result; costs one small all-reduce if no rank fails. Collective.

    Raises:
        CheckpointArgumentError: ``work`` raised this error on each rank on which it failed.
        CheckpointError: It failed in another way.
    """
    result, text, cause = _attempt(work)
    label = f"checkpoint: {what}"
    if _exchange(what, lambda: collectives.any_rank(bool(text), label)):
        mistaken = isinstance(cause, CheckpointArgumentError)
        told = _exchange(what, lambda: collectives.gather_objects((text, mistaken), label))
        failures = {rank: failure for rank, (failure, _) in enumerate(told) if failure}
        kind = CheckpointArgumentError if all(told[rank][1] for rank in failures) else CheckpointError
        raise kind(_message(what, failures, collectives.world)) from cause
    return result  # type: ignore[return-value]


def on_first(collectives: Collectives, what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank; collective. Arguments and errors as in ``on_all``."""
    result, text, cause = _attempt(work) if collectives.rank == 0 else (None, "", None)
    text, result = _exchange(what, lambda: collectives.broadcast_object((text, result), 0, f"checkpoint: {what}"))
    if text:
        raise CheckpointError(_message(what, {0: text}, collectives.world)) from cause
    return result  # type: ignore[no-any-return]


def _attempt(work: Callable[[], Any]) -> tuple[Any, str, Exception | None]:
    try:
        return work(), "", None
    except CollectiveError:
        raise  # collectives no longer work, so the other ranks cannot be notified
    except CheckpointError as error:
        return None, str(error), error
    except Exception as error:  # any error must reach the other ranks, which would wait forever
        return None, f"{type(error).__name__}: {error}", error


def _exchange(what: str, exchange: Callable[[], Any]) -> Any:
    try:
        return exchange()
    except CollectiveError as error:
        # The message is the same on all ranks; the cause is the error of this rank.
        raise CheckpointError(f"{what}: another rank died, or did not answer within the timeout of the process group") from error


def _message(what: str, failures: dict[int, str], world: int) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in by_text.items():
        where = "" if len(ranks) == world else f" (rank {', '.join(map(str, ranks))})"
        parts.append(f"{text}{where}")
    return f"{what}: " + "; ".join(parts)
