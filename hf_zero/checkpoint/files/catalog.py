"""Places of the parameters in a checkpoint: from names and element ranges to ranges of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.checkpoint.files.rows import Row
from hf_zero.checkpoint.files.tensor_reader import Copy
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import MASTER, shard_file
from hf_zero.checkpoint.format.records import UnitRecord
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import Range
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """One place of a saved parameter, or of a tensor-parallel shard of it.

    Attributes:
        tp_shard: Part of the parameter that is stored there.
        unit: The unit that holds it; None when it is a tensor of its own.
        offset: First element inside the unit.
        file: The file of a tensor of its own, else empty.
    """

    tp_shard: SavedTpShard
    unit: UnitRecord | None
    offset: int = 0
    file: str = ""


@dataclass(frozen=True)
class Located:
    """A saved parameter.

    Attributes:
        name: The name it is stored under.
        shape: Its full shape.
        group: Its param group; -1 when frozen.
        parts: Its places: one, or one per tensor-parallel shard.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    parts: tuple[Part, ...]

    @property
    def whole(self) -> SavedTpShard:
        """Return the whole tensor as a shard."""
        return SavedTpShard(self.shape)

    @property
    def unit(self) -> UnitRecord | None:
        """Return the unit that holds it (the first shard of it); None when no unit does."""
        return self.parts[0].unit

    @property
    def trained(self) -> bool:
        """Return whether an optimizer updated it."""
        return self.unit is not None and self.unit.kind == MASTER


class Catalog:
    """Finds parameters of a checkpoint by name.

    Attributes:
        index: The checkpoint's index, which has been checked.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._params: dict[str, Located] = {}
        for loose in index.loose:
            self._add(loose.name, -1, Part(loose.tp_shard, None, 0, loose.file))
        for unit in index.units:
            for param in unit.params:
                self._add(param.name, param.group, Part(param.tp_shard, unit, param.offset))

    def _add(self, name: str, group: int, part: Part) -> None:
        known = self._params.get(name)
        if known is None:
            self._params[name] = Located(name, part.tp_shard.shape, group, (part,))
            return
        if known.parts[0].tp_shard.dim is not None:  # else one copy of a parameter that every tensor-parallel rank holds is enough
            self._params[name] = Located(name, known.shape, known.group, (*known.parts, part))

    @property
    def names(self) -> set[str]:
        """Return all parameters it holds, under the names they are stored under."""
        return set(self._params)

    def canonical(self, name: str) -> str:
        """Return the name a parameter is stored under, for any of its names."""
        return name if name in self._params else self.index.aliases.get(name, name)

    def find(self, name: str) -> Located | None:
        """Return the saved parameter that goes by ``name``, tied names included; None when there is none."""
        return self._params.get(self.canonical(name))

    def dtype(self, param: Located, kind: str | None = None) -> str | None:
        """Return type of the stored elements of ``param`` in files of ``kind`` (None: its values); None when there are none."""
        for part in param.parts:
            if part.unit is None:
                return self.index.files[part.file].tensors[param.name].dtype if kind is None else None
            for rank in range(part.unit.world):
                file = self.index.files.get(self._file(part.unit, kind, rank))
                if file is not None and part.unit.name in file.tensors:
                    return file.tensors[part.unit.name].dtype
        return None

    def copies(self, param: Located, kind: str | None, wanted: SavedTpShard, start: int, target: Row) -> Iterator[Copy]:
        """Reads that fill ``target`` with the elements of a tensor-parallel shard of ``param`` from ``start`` on.

        Args:
            param: From ``find``.
            kind: ``optimizer.exp_avg`` and the like; None for the values, whichever kind of file has them.
            wanted: Part of the parameter that this rank holds.
            start: First element inside ``wanted``.
            target: (n,), of any dtype, in any place.

        Raises:
            CheckpointError: The file of a shard is not in the index, or has no such unit; or no shard holds an element.
        """
        for run in wanted.runs(start, start + target.numel()):
            missing = [Range(run.whole, run.whole + run.numel)]
            for part in param.parts:
                # Ranks that share a key/value head hold the same elements: those of the first are read.
                pieces = sorted(
                    (piece for gap in missing for piece in part.tp_shard.find(gap.start, gap.stop)), key=lambda piece: piece.whole
                )
                for piece in pieces:
                    begin = run.local - start + piece.whole - run.whole
                    yield from self._copies_of(param.name, part, kind, piece.local, target[begin : begin + piece.numel])
                missing = _without(missing, [Range(piece.whole, piece.whole + piece.numel) for piece in pieces])
            if missing:
                raise CheckpointError(
                    f"parameter {param.name}: no shard in the index holds its elements {missing[0].start} to {missing[0].stop}"
                )

    def _copies_of(self, name: str, place: Part, kind: str | None, first: int, target: Row) -> Iterator[Copy]:
        """Reads of consecutive elements of one place."""
        unit = place.unit
        if unit is None:
            yield Copy(place.file, name, first, target)
            return
        shard_numel = unit.padded_numel // unit.world
        wanted = Range(place.offset + first, place.offset + first + target.numel())
        for rank in range(wanted.start // shard_numel, (wanted.stop - 1) // shard_numel + 1):
            part = wanted.intersect(Range(rank * shard_numel, (rank + 1) * shard_numel))
            file = self._file(unit, kind, rank)
            if file not in self.index.files or unit.name not in self.index.files[file].tensors:
                raise CheckpointError(f"parameter {name}: the checkpoint lacks {file} with its part of unit {unit.name}")
            yield Copy(file, unit.name, part.start - rank * shard_numel, target[part.start - wanted.start : part.stop - wanted.start])

    def _file(self, unit: UnitRecord, kind: str | None, rank: int) -> str:
        return shard_file(kind or unit.kind, rank, unit.world, unit.tensor_rank, self.index.world // unit.world)


def _without(ranges: list[Range], taken: list[Range]) -> list[Range]:
    """Return ``ranges`` without ``taken``, which is sorted; each taken range is inside one of ``ranges``."""
    left = []
    for whole in ranges:
        start = whole.start
        for piece in taken:
            if whole.start <= piece.start < whole.stop:
                left.append(Range(start, piece.start))
                start = piece.stop
        left.append(Range(start, whole.stop))
    return [rest for rest in left if rest.numel]
