"""Whole weights in buckets: a bounded part of the model at a time, each unit gathered once, for code that moves them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.model.export import joined, joined_experts
from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.gathered_parameters import units_of
from hf_zero.core.units.tp_shard import TpShard, tp_shard_of
from hf_zero.core.units.unit import Unit, find_unit


@dataclass(frozen=True)
class Piece:
    """Tensors of a stream that are made together.

    Attributes:
        names: Theirs, in order.
        params: The parameters that they have the shape of, in the same order.
        reads: All parameters that must be whole while they are made.
        make: Gives their values, each of this rank's tensor-parallel shard.
    """

    names: tuple[str, ...]
    params: tuple[torch.Tensor, ...]
    reads: tuple[torch.Tensor, ...]
    make: Callable[[], Sequence[torch.Tensor]]

    @classmethod
    def of_param(cls, name: str, param: torch.Tensor) -> Piece:
        """Return one parameter as it is."""
        return cls((name,), (param,), (param,), lambda: (param.detach(),))


class WeightStream:
    """Goes through pieces bucket by bucket, and lets the next one's all-gathers run meanwhile; collective.

    A unit is gathered when its first piece comes and kept until its last: the root of a model, which holds its first and last layers, from
    start to end. Views of a unit that somebody keeps stay as they are ([Note: tensors taken out of a gather]).

    Args:
        pieces: In the order in which they come.
        model: The model axis; None where there is none.
        bucket_bytes: Of gathered units in a bucket; one that is larger is a bucket of its own.
        check: Called before each bucket; raises where going on would be wrong.
        expert: The ranks that hold all experts between them; None where each has all.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        model: Collectives | None,
        bucket_bytes: int,
        check: Callable[[], None],
        expert: Collectives | None = None,
    ) -> None:
        self._model = model
        self._expert = expert
        self._check = check
        self._buckets = _buckets(pieces, bucket_bytes)
        self._last_use = {id(unit): index for index, bucket in enumerate(self._buckets) for unit in _units_of(bucket)}
        self._started: dict[int, Unit] = {}  # sharded before we came, and not pinned yet
        self._held: dict[int, tuple[Unit, bool]] = {}  # pinned, and whether it was sharded before

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield buckets of (name, whole value). Every rank must take all of them."""
        try:
            for index, bucket in enumerate(self._buckets):
                self._check()
                self._hold(bucket)
                if index + 1 < len(self._buckets):
                    self._start(self._buckets[index + 1])
                yield [pair for piece in bucket for pair in self._values(piece)]
                self._let_go(index)
        finally:
            self._let_go(len(self._buckets))
            for unit in self._started.values():
                unit.reshard()

    def _values(self, piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            for name, param, value in zip(piece.names, piece.params, piece.make(), strict=True):
                yield name, self._joined(value, tp_shard_of(param))

    def _joined(self, value: torch.Tensor, part: TpShard | None) -> torch.Tensor:
        whole = None
        if self._expert is not None and part is not None and part.expert:
            whole = joined_experts(value, part, self._expert, everywhere=True)
        return joined(value, part, self._model) if whole is None else whole

    def _start(self, bucket: Sequence[Piece]) -> None:
        for unit in _units_of(bucket):
            if id(unit) not in self._held and unit.bytes_to_unshard:
                self._started[id(unit)] = unit
                unit.start_unshard(exact=True)

    def _hold(self, bucket: Sequence[Piece]) -> None:
        self._start(bucket)
        for unit in _units_of(bucket):
            if id(unit) not in self._held:
                self._held[id(unit)] = (unit, self._started.pop(id(unit), None) is not None)
                unit.pin()

    def _let_go(self, index: int) -> None:
        for key, (unit, was_sharded) in list(self._held.items()):
            if self._last_use[key] <= index:
                del self._held[key]
                unit.unpin(reshard=was_sharded)


def _units_of(pieces: Sequence[Piece]) -> list[Unit]:
    return units_of(param for piece in pieces for param in piece.reads)


def _buckets(pieces: Sequence[Piece], bucket_bytes: int) -> list[list[Piece]]:
    buckets: list[list[Piece]] = [[]]
    seen: set[int] = set()
    filled = 0
    for piece in pieces:
        fresh = [unit for unit in _units_of([piece]) if id(unit) not in seen]
        loose = sum(param.nbytes for param in piece.reads if find_unit(param) is None)
        size = loose + sum(unit.layout.padded_numel * unit.layout.dtype.itemsize for unit in fresh)
        if filled and size and filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(piece)
        filled += size
        seen.update(id(unit) for unit in fresh)
    return buckets
