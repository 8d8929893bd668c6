"""Yield the unsharded weights of a model in buckets of bounded size, gathering each unit once, for code that sends them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.model.export import joined, joined_experts
from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.gathered_parameters import units_of
from hf_zero.core.units.marks import TpShard, tp_shard_of
from hf_zero.core.units.unit import Unit, find_unit


@dataclass(frozen=True)
class Piece:
    """One or more tensors of a stream that are computed together.

    Attributes:
        names: Names of the tensors, in order.
        params: The parameter that each tensor is a value of, in the same order.
        reads: All parameters that must be unsharded while the tensors are computed.
        make: Function that returns this rank's tensor-parallel shard of each tensor, in the same order.
        whole: ``make`` returns whole tensors, and is collective over the model axis.
    """

    names: tuple[str, ...]
    params: tuple[torch.Tensor, ...]
    reads: tuple[torch.Tensor, ...]
    make: Callable[[], Sequence[torch.Tensor]]
    whole: bool = False

    @classmethod
    def of_param(cls, name: str, param: torch.Tensor) -> Piece:
        """Return a piece whose only tensor is the value of ``param``."""
        return cls((name,), (param,), (param,), lambda: (param.detach(),))


class WeightStream:
    """An iterator over buckets of unsharded weights that starts the next bucket's all-gathers before it yields a bucket; collective.

    A unit is gathered for its first piece and stays unsharded until its last; the unit of a model's first and last layers stays unsharded
    during the whole iteration. Views that the caller keeps remain valid ([Note: tensors taken out of a gather]).

    Args:
        pieces: Pieces in the order in which they are yielded.
        model: Collectives of the model axis; None without tensor parallelism.
        bucket_bytes: Largest total size of the units that one bucket gathers; a larger unit gets a bucket of its own.
        check: Function that is called before each bucket and raises an error if the iteration must not continue.
        expert: Collectives of the ranks that together hold all experts; None if each rank holds all.
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
        self._started: dict[int, Unit] = {}  # units whose all-gather this stream has started, not pinned yet
        self._held: dict[int, tuple[Unit, bool]] = {}  # pinned units, and whether each was sharded before

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield buckets, lists of (name, whole tensor). Every rank must iterate to the end."""
        try:
            for index, bucket in enumerate(self._buckets):
                self._check()
                self._hold(bucket)
                if index + 1 < len(self._buckets):
                    self._start(self._buckets[index + 1])
                yield [pair for piece in bucket for pair in self._values(piece)]
                self._free(index)
        finally:
            self._free(len(self._buckets))
            for unit in self._started.values():
                unit.reshard()

    def _values(self, piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            for name, param, value in zip(piece.names, piece.params, piece.make(), strict=True):
                yield name, value if piece.whole else self._joined(value, tp_shard_of(param))

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

    def _free(self, index: int) -> None:
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
