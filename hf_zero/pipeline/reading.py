"""Data of a batch, which is there for all ranks that train together, or for none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError, StateError

T = TypeVar("T")


def require_iterator(source: Any) -> Iterator[Any]:
    """``source`` itself.

    Raises:
        ConfigError: It is no iterator.
    """
    if not isinstance(source, Iterator):
        raise ConfigError(f"data_iter is a {type(source).__name__}; an iterator is allowed, iter(loader) for example")
    return source


def read_together(networks: Sequence[Collectives], read: Callable[[], T], tell: Callable[[T], Any] = lambda _: None) -> tuple[T, list[Any]]:
    """What ``read`` gives, and what the ranks of the first network tell of theirs; collective over all networks, one after the other.

    No rank goes on without the others: one that had no data would leave them waiting in the batch.

    Args:
        networks: Axes that lead to every rank of the batch.
        read: Gives this rank's data.
        tell: Something to send, made of it.

    Raises:
        StopIteration: On every rank, if data ended on one.
        StateError: On the others, if a rank failed to read for another reason, which is raised there.
    """
    found: T | None = None
    failure: Exception | None = None
    try:
        found = read()
    except Exception as error:  # also what a data set raises
        failure = error
    rank = dist.get_rank() if dist.is_initialized() else 0
    why = failure and (isinstance(failure, StopIteration), f"rank {rank} has no data for this batch: {type(failure).__name__}: {failure}")
    told: list[Any] = []
    for network in networks:
        answers = network.gather_objects((None if told or found is None else tell(found), why), "data of a batch")
        told = told or [answer for answer, _ in answers]
        why = next((other for _, other in answers if other), None)
    if failure is not None:
        raise failure
    if why:
        raise StopIteration(why[1]) if why[0] else StateError(why[1])
    assert found is not None
    return found, told
