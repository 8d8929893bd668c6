"""Find parameters in a checkpoint: convert names and element ranges to ranges of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.checkpoint.files.rows import Row
from hf_zero.checkpoint.files.tensor_reader import Copy
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import MASTER, STATE_PREFIX, shard_file
from hf_zero.checkpoint.format.records import UnitRecord, present_params
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import Range
from hf_zero.core.units.names import bare_name
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """The place of a saved parameter, or of a tensor-parallel shard of it.

    Attributes:
        tp_shard: Part of the parameter that is stored in this place.
        unit: Unit that holds the part; None if the part is stored as a separate tensor.
        offset: Position of the part's first element inside the unit.
        file: File of the separate tensor; "" for a part in a unit.
    """

    tp_shard: SavedTpShard
    unit: UnitRecord | None
    offset: int = 0
    file: str = ""


@dataclass(frozen=True)
class Located:
    """A saved parameter and its places.

    Attributes:
        name: Name under which the parameter is stored.
        shape: Full shape of the parameter.
        group: Index of its param group; -1 for a frozen parameter.
        parts: Places of the parameter: one, or one per tensor-parallel shard.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    parts: tuple[Part, ...]

    @property
    def whole(self) -> SavedTpShard:
        """Return a shard that covers the whole parameter."""
        return SavedTpShard(self.shape)

    @property
    def unit(self) -> UnitRecord | None:
        """Return the unit that holds the parameter or its first tensor-parallel shard; None if no unit holds it."""
        return self.parts[0].unit

    @property
    def trained(self) -> bool:
        """Return whether an optimizer trained the parameter."""
        return self.unit is not None and self.unit.kind == MASTER


class Catalog:
    """The saved parameters of a checkpoint by name.

    Attributes:
        index: Checked index of the checkpoint.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        scalars = index.optimizer.scalars if index.optimizer is not None else ()
        self._stateless = {(record.unit, record.group) for record in scalars if record.values is None}
        self._params: dict[str, Located] = {}
        for loose in index.loose:
            self._add(loose.name, -1, Part(loose.tp_shard, None, 0, loose.file))
        for unit, param in present_params(index.units):
            self._add(param.name, param.group, Part(param.tp_shard, unit, param.offset))
        self._by_bare = {bare_name(alias): name for alias, name in index.aliases.items()} | {bare_name(name): name for name in self._params}

    def _add(self, name: str, group: int, part: Part) -> None:
        known = self._params.get(name)
        if known is None:
            self._params[name] = Located(name, part.tp_shard.shape, group, (part,))
            return
        if known.parts[0].tp_shard.dim is not None:  # of a parameter that all tensor-parallel ranks hold whole, the first copy is used
            self._params[name] = Located(name, known.shape, known.group, (*known.parts, part))

    @property
    def names(self) -> set[str]:
        """Return the names under which the parameters are stored, without further names of tied parameters."""
        return set(self._params)

    def canonical(self, name: str) -> str:
        """Return the name under which a parameter is stored, given any of its names; an unknown name is returned unchanged.

        Names of torch's wrappers make no difference, see [Note: names without wrappers].
        """
        return name if name in self._params else self._by_bare.get(bare_name(name), name)

    def find(self, name: str) -> Located | None:
        """Return the saved parameter with the name ``name``, which may be a tied name; None if there is none."""
        return self._params.get(self.canonical(name))

    def dtype(self, param: Located, kind: str | None = None) -> str | None:
        """Return the name of the dtype of ``param`` in files of ``kind`` (None for its values); None if no such file has the parameter, or
        not all of its elements: shards that have the unit for the states of other parameters alone.

        Parts without elements do not count: a rank that holds none of an expert writes no optimizer states of it.
        """
        found: str | None = None
        if kind is not None and kind.startswith(STATE_PREFIX) and (param.name, param.group) in self._stateless:
            return None
        for part in param.parts:
            if part.tp_shard.dim is not None and not part.tp_shard.numel:
                continue
            if part.unit is None:
                return self.index.files[part.file].tensors[param.name].dtype if kind is None else None
            shard = part.unit.padded_numel // part.unit.world
            last = max(part.offset, part.offset + part.tp_shard.numel - 1) // shard if shard else 0
            for rank in range(part.offset // shard if shard else 0, min(last + 1, part.unit.world)):
                file = self.index.files.get(self._file(part.unit, kind, rank))
                if file is None or part.unit.name not in file.tensors:
                    return None
                found = found or file.tensors[part.unit.name].dtype
        return found

    def copies(self, param: Located, kind: str | None, wanted: SavedTpShard, start: int, target: Row) -> Iterator[Copy]:
        """Yield the reads that fill ``target`` with elements of a tensor-parallel shard of ``param``, from the element ``start`` on.

        Args:
            param: A result of ``find``.
            kind: Kind of file, such as ``optimizer.exp_avg``; None for the values of the parameter.
            wanted: Part of the parameter that this rank holds.
            start: Index of the first element inside ``wanted``.
            target: Row of n elements to fill, of any dtype and on any device.

        Raises:
            CheckpointError: The index lacks a file, or the unit in a file, or no saved shard holds some of the elements.
        """
        for run in wanted.runs(start, start + target.numel()):
            missing = [Range(run.whole, run.whole + run.numel)]
            for part in param.parts:
                # Ranks that share a key/value head hold the same elements; read them from the first.
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
        """Yield the reads that fill ``target`` with consecutive elements of ``place``, from its element ``first`` on."""
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
                raise CheckpointError(f"parameter {name}: the checkpoint lacks {file} with unit {unit.name}")
            yield Copy(file, unit.name, part.start - rank * shard_numel, target[part.start - wanted.start : part.stop - wanted.start])

    def _file(self, unit: UnitRecord, kind: str | None, rank: int) -> str:
        return shard_file(kind or unit.kind, rank, unit.world, unit.tensor_rank, self.index.world // unit.world)


def _without(ranges: list[Range], taken: list[Range]) -> list[Range]:
    """Return ``ranges`` minus ``taken``; ``taken`` is sorted, and each of its ranges is inside one of ``ranges``."""
    left = []
    for whole in ranges:
        start = whole.start
        for piece in taken:
            if whole.start <= piece.start < whole.stop:
                left.append(Range(start, piece.start))
                start = piece.stop
        left.append(Range(start, whole.stop))
    return [rest for rest in left if rest.numel]
