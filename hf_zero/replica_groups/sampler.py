"""Sample a data set for replica groups: batches are numbered over all groups, and none is lost or used twice when groups die and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from hf_zero.errors import ConfigError, StateError
from hf_zero.replica_groups.quorum import number_of_groups


class Shares:
    """The batches of a run by number: each is trained, assigned to one group, returned, or not assigned yet.

    Every group has the same object: it changes only when the groups agree (``give`` at the begin of a step, ``take`` at its end), and a
    group that receives the state of another one receives this too. A group is given batches some steps ahead, because loaders read ahead.

    Attributes:
        next: The first number that was never given.
        back: Numbers that were given to groups that have died, in order.
        held: For each group the numbers that it was given and that are not taken, in the order in which its loader reads them.
    """

    def __init__(self) -> None:
        self.next = 0
        self.back: list[int] = []
        self.held: dict[int, list[int]] = {}

    def give(self, members: Sequence[int], ahead: int) -> None:
        """Take back the numbers of groups that take no part any more, and give each member new ones until it has ``ahead``.

        A group that died and is a member again keeps its numbers: none of them was taken.

        Args:
            members: Numbers of the groups that take part in the coming step, the same on all of them.
            ahead: Batches that each group is given in advance.
        """
        for gone in [group for group in self.held if group not in members]:
            self.back += self.held.pop(gone)
        self.back.sort()
        for group in members:
            self.held.setdefault(group, [])
        while short := [group for group in sorted(members) if len(self.held[group]) < ahead]:
            for group in short:
                number = self.back.pop(0) if self.back else self.next
                self.held[group].append(number)
                self.next = max(self.next, number + 1)

    def take(self, members: Sequence[int], count: int) -> dict[int, list[int]]:
        """Count the first ``count`` numbers of each member as taken by an optimizer step; return them by group.

        Raises:
            StateError: A member was given fewer.
        """
        short = [group for group in members if len(self.held.get(group, ())) < count]
        if short:
            raise StateError(f"the optimizer step took {count} batches of replica group {short[0]}, which was given fewer")
        taken = {group: self.held[group][:count] for group in members}
        for group in members:
            del self.held[group][:count]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"next": self.next, "back": list(self.back), "held": {str(group): list(own) for group, own in self.held.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.next, self.back = state["next"], list(state["back"])
        self.held = {int(group): list(own) for group, own in state["held"].items()}


class Numbers(Protocol):
    """Source of the numbers of a group's batches."""

    def number(self, position: int, ahead: int) -> int:
        """Return the number of the batch at ``position`` among the batches that this process reads; collective at the first call."""


_source: list[Numbers] = []  # the replica groups of this process' engine


def serve_numbers(source: Numbers) -> None:
    """Make the samplers of this process get their batch numbers from ``source``."""
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
                    'ReplicaSampler has no engine to get the numbers of batches from: set "hf_zero": {"replicas": "torchft"}, and iterate '
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
