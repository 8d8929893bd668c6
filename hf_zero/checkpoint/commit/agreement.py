"""Work that every rank does, or rank 0 alone, ending the same way everywhere: with its results or with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError, CollectiveError

T = TypeVar("T")


def on_all(collectives: Collectives, what: str, work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank; collective.

    Args:
        collectives: The ranks.
        what: For messages: what is being done, and with which path.
        work: Returns built-in containers and scalars.

    Returns:
        Every rank's result, in rank order, on every rank.

    Raises:
        CheckpointError: It failed on some rank; the same text on all of them.
    """
    result, text, cause = _attempt(work)
    outcomes = _exchange(what, lambda: collectives.gather_objects((text, result), f"checkpoint: {what}"))
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure}
    if failures:
        raise CheckpointError(_message(what, failures, collectives.world)) from cause
    return [value for _, value in outcomes]


def quickly(collectives: Collectives, what: str, work: Callable[[], T]) -> T:
    """Do the same as ``on_all``, where a rank needs only its own result: one small sum over ranks if no rank fails; collective."""
    result, text, cause = _attempt(work)
    label = f"checkpoint: {what}"
    if _exchange(what, lambda: collectives.any_rank(bool(text), label)):
        texts = _exchange(what, lambda: collectives.gather_objects(text, label))
        failures = {rank: failure for rank, failure in enumerate(texts) if failure}
        raise CheckpointError(_message(what, failures, collectives.world)) from cause
    return result  # type: ignore[return-value]


def on_first(collectives: Collectives, what: str, work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 and gives its result to all; collective. Arguments and errors as in ``on_all``."""
    result, text, cause = _attempt(work) if collectives.rank == 0 else (None, "", None)
    text, result = _exchange(what, lambda: collectives.broadcast_object((text, result), 0, f"checkpoint: {what}"))
    if text:
        raise CheckpointError(_message(what, {0: text}, collectives.world)) from cause
    return result  # type: ignore[no-any-return]


def _attempt(work: Callable[[], Any]) -> tuple[Any, str, Exception | None]:
    try:
        return work(), "", None
    except CollectiveError:
        raise  # the network is broken: no other rank can be reached
    except CheckpointError as error:
        return None, str(error), error
    except Exception as error:  # whatever it is, the other ranks must hear of it, or they wait for ever
        return None, f"{type(error).__name__}: {error}", error


def _exchange(what: str, exchange: Callable[[], Any]) -> Any:
    try:
        return exchange()
    except CollectiveError as error:
        # The same text everywhere; the cause says what this rank saw of it.
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
