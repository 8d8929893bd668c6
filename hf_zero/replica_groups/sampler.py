"""Sample a data set for replica groups: a sampler whose batches are numbered over all groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.utils.data import Sampler

from hf_zero.errors import ConfigError, StateError
from hf_zero.replica_groups.quorum import number_of_groups


class Numbers(Protocol):
    """Source of the numbers of a group's batches."""

    def number(self, position: int, ahead: int) -> int:
        """Return the number of the batch at ``position`` among the batches that this process reads; collective at the first call."""


_source: list[Numbers] = []  # the replica groups of this process' engine


def serve_numbers(source: Numbers) -> None:
    """Let the samplers of this process ask ``source`` for numbers."""
    _source[:] = [source]


class ReplicaSampler(Sampler[int]):
    """Sampler of the indices of one replica group's samples, for ``DataLoader(dataset, batch_size, sampler=...)``.

    All groups together pass through the data set: batch number b has the samples b * B to (b + 1) * B of a pass, B being ``batch_size``
    times the ranks of a group. The numbers come from the engine, so the first iteration must come after ``initialize`` or ``prepare``. The
    order of each pass is drawn from ``seed`` and the number of the pass. The last samples of a pass that fill no batch are left out.

    An iteration yields this group's part of a pass, if no group dies; the next one goes on.

    Args:
        size: Number of samples of the data set.
        batch_size: Samples of a micro-batch of one rank; that of the loader.
        ranks: Ranks of a replica group.
        rank: This process' rank in its group, whose samples alone are yielded; None yields those of all ranks, for a loader that Accelerate
            or Trainer divides.
        shuffle: Draw an order for each pass; otherwise the order is that of the data set.
        seed: Seed of the orders, the same for all groups.
        groups: Number of groups of the whole run, for the length of an iteration; by default from ``NUM_REPLICA_GROUPS``.
        ahead: Batches that the loader reads in advance: workers times ``prefetch_factor``, and 2 for Accelerate and Trainer.

    Raises:
        ConfigError: The data set has not even one batch for each group, or the number of groups is not known.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        ranks: int = 1,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        groups: int | None = None,
        ahead: int = 2,
    ) -> None:
        groups = groups or number_of_groups()
        self._batch, self._ranks, self._rank = batch_size, ranks, rank
        self._shuffle, self._seed, self._size, self._ahead = shuffle, seed, size, ahead
        self._of_pass = size // (batch_size * ranks)  # batches of a pass
        self._count = self._of_pass // groups  # of one group
        self._position = 0
        if not self._count:
            raise ConfigError(
                f"ReplicaSampler: {size} samples are no batch of {batch_size} samples on {ranks} rank(s) for each of {groups} replica "
                "group(s)"
            )
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        return self._count * self._batch * (self._ranks if self._rank is None else 1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._count):
            if not _source:
                raise StateError(
                    'ReplicaSampler has no engine to ask for the numbers of batches: set "hf_zero": {"replicas": "torchft"}, and iterate '
                    "over the loader after hf_zero.initialize or accelerator.prepare"
                )
            number = _source[0].number(self._position, self._ahead)
            self._position += 1
            yield from self.samples(number)

    def samples(self, number: int) -> list[int]:
        """Return the indices of the samples of batch ``number``: of this rank, or of all ranks of the group."""
        within, start = divmod(number, self._of_pass)[0], number % self._of_pass * self._batch * self._ranks
        if self._rank is not None:
            start += self._rank * self._batch
        stop = start + self._batch * (self._ranks if self._rank is None else 1)
        if not self._shuffle:
            return list(range(start, stop))
        if self._order[0] != within:
            generator = torch.Generator().manual_seed(self._seed + within)
            self._order = within, torch.randperm(self._size, generator=generator)
        return [int(index) for index in self._order[1][start:stop].tolist()]
