"""Define the records of an index and parse them from JSON, which must have exactly the keys of the class, each with its type."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hf_zero.checkpoint.format.names import CHUNK_BYTES, ITEM_BYTES, MASTER, WEIGHTS
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import ALIGNMENT, round_up
from hf_zero.core.units.names import has_left
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

T = TypeVar("T")
_HINTS: dict[Any, dict[str, Any]] = {}


def read_record(kind: type[T], data: Any, where: str) -> T:
    """Return a record of class ``kind`` parsed from a JSON object.

    Raises:
        CheckpointError: A key is missing, unknown or of another type; the message names ``where`` and the key.
    """
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} is {shown(data)}, expected an object")
    hints = _HINTS.get(kind) or _HINTS.setdefault(kind, get_type_hints(kind))
    for name in hints:
        if name not in data:
            raise CheckpointError(f"{where}: key {name!r} is missing")
    if len(data) != len(hints):
        unknown = sorted(set(data) - set(hints))
        raise CheckpointError(f"{where}: key {shown(unknown[0])} is unknown, allowed are {list(hints)}")
    return kind(**{name: _value(hint, data[name], f"{where}: {name}") for name, hint in hints.items()})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if dataclasses.is_dataclass(hint):
        return read_record(hint, data, where)  # type: ignore[arg-type]
    if type(None) in arguments:
        return None if data is None else _value(arguments[0], data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise CheckpointError(f"{where} is {shown(data)}, expected a list")
        return tuple(_value(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} is {shown(data)}, expected an object")
        return {key: _value(arguments[1], item, f"{where}[{shown(key)}]") for key, item in data.items()}
    if type(data) is not hint:
        raise CheckpointError(f"{where} is {shown(data)}, expected {hint.__name__}")
    return data


_MOST_DIMS = 64
_TOO_LONG = 1 << 62
_MOST_EMPTY = 64  # limit of ranges without elements, because each costs time for every row


@dataclass(frozen=True)
class TensorRecord:
    """One tensor inside a file.

    Attributes:
        dtype: Dtype, as safetensors names it.
        shape: Shape of the tensor; () for a single element.
        offset: Offset of the tensor's data from the start of the file, in bytes.
        nbytes: Size of the tensor's data in bytes.
        crc32: CRC-32 of each chunk of ``CHUNK_BYTES`` bytes, 8 hex digits each, concatenated.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: str

    def check(self, where: str, file_nbytes: int) -> None:
        """Raise CheckpointError if the record contradicts itself or reaches outside of a file of ``file_nbytes`` bytes."""
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: dtype {self.dtype!r} is unknown, allowed are {sorted(ITEM_BYTES)}")
        if not _is_shape(self.shape) or math.prod(self.shape) * ITEM_BYTES[self.dtype] != self.nbytes:
            raise CheckpointError(f"{where}: {self.nbytes} bytes do not fit shape {shown(list(self.shape))} of {self.dtype}")
        if self.offset < 8 or self.offset + self.nbytes > file_nbytes:
            raise CheckpointError(f"{where}: bytes {self.offset} to {self.offset + self.nbytes} lie outside a file of {file_nbytes}")
        if len(self.crc32) != 8 * -(-self.nbytes // CHUNK_BYTES) or re.search("[^0-9a-f]", self.crc32):
            raise CheckpointError(f"{where}: {len(self.crc32)} digits of checksums do not fit {self.nbytes} bytes")


@dataclass(frozen=True)
class FileRecord:
    """One safetensors file of the folder.

    Attributes:
        nbytes: Size of the file in bytes.
        header_nbytes: Size of length prefix and header in bytes, which is the offset of the data.
        header_crc32: CRC-32 of length prefix and header, 8 hex digits.
        tensors: Records of the file's tensors, by name.
    """

    nbytes: int
    header_nbytes: int
    header_crc32: str
    tensors: dict[str, TensorRecord]

    def check(self, name: str) -> None:
        """Raise CheckpointError if the tensors leave a gap, overlap, or do not end at the end of the file."""
        if not re.fullmatch("[0-9a-f]{8}", self.header_crc32):
            raise CheckpointError(f"{name}: header_crc32 is {shown(self.header_crc32)}, expected 8 hex digits")
        for tensor, record in self.tensors.items():
            record.check(f"{name}: tensor {tensor!r}", self.nbytes)
        end = self.header_nbytes
        if not 8 <= end <= self.nbytes:
            raise CheckpointError(f"{name}: a header of {end} bytes does not fit a file of {self.nbytes}")
        for tensor, record in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if record.offset != end:
                raise CheckpointError(f"{name}: tensor {tensor!r} begins at byte {record.offset}, but the data before it end at byte {end}")
            end += record.nbytes
        if end != self.nbytes:
            raise CheckpointError(f"{name}: its tensors end at byte {end}, but the file ends at byte {self.nbytes}")


@dataclass(frozen=True)
class ParamRecord:
    """A parameter, or a tensor-parallel shard of one, inside a unit.

    Attributes:
        name: Dotted name of the parameter.
        shape: Full shape of the parameter.
        offset: Position of the first element inside the unit.
        group: Index of the param group; -1 for a frozen parameter.
        dim: Dimension along which the parameter is divided; None if the unit holds all of it.
        ranges: Ranges [start, stop) along ``dim`` that the unit holds, in their order in the unit.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    dim: int | None = None
    ranges: tuple[tuple[int, ...], ...] = ()

    @property
    def tp_shard(self) -> SavedTpShard:
        """Return the part of the parameter that the unit holds."""
        return SavedTpShard(self.shape, self.dim, tuple((pair[0], pair[1]) for pair in self.ranges))


@dataclass(frozen=True)
class LooseRecord:
    """A parameter, or a tensor-parallel shard of one, that is stored outside of units as a separate tensor in ``file``."""

    name: str
    file: str
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, ...], ...] = ()

    @property
    def tp_shard(self) -> SavedTpShard:
        """Return the part of the parameter that the file holds."""
        return SavedTpShard(self.shape, self.dim, tuple((pair[0], pair[1]) for pair in self.ranges))


@dataclass(frozen=True)
class UnitRecord:
    """One unit: a flat buffer of ``padded_numel`` elements that is divided into ``world`` shards of equal length.

    Attributes:
        name: Name of the unit, and of its tensor in each file.
        kind: Kind of the files with the unit's values: ``master`` if it was trained, else ``weights``.
        dtype: Dtype of the parameters in training, as safetensors names it.
        world: Number of shards.
        padded_numel: Number of elements of the whole buffer, with padding.
        tensor_rank: Tensor-parallel rank that the unit belongs to; each such rank has units of the same names.
        params: Records of the parameters in the unit.
    """

    name: str
    kind: str
    dtype: str
    world: int
    padded_numel: int
    tensor_rank: int
    params: tuple[ParamRecord, ...]

    @property
    def shard_numel(self) -> int:
        """Return the number of elements of one shard."""
        return self.padded_numel // self.world

    def check(self) -> None:
        """Raise CheckpointError if parameters exceed the buffer, overlap, or leave larger gaps than alignment explains."""
        where = f"unit {self.name!r}"
        if self.kind not in (MASTER, WEIGHTS):
            raise CheckpointError(f"{where}: kind is {self.kind!r}, allowed are {[MASTER, WEIGHTS]}")
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: dtype is {shown(self.dtype)}, allowed are {sorted(ITEM_BYTES)}")
        if self.world < 1 or self.padded_numel < 0 or self.padded_numel % self.world:
            raise CheckpointError(f"{where}: {self.padded_numel} elements cannot be divided into {self.world} equal shards")
        for param in self.params:
            check_tp_shard(f"{where}: parameter {param.name}", param)
            if param.offset < 0 or param.offset + param.tp_shard.numel > self.padded_numel:
                raise CheckpointError(f"{where}: parameter {param.name} lies outside its {self.padded_numel} elements")
        end, last = 0, ""
        for param in sorted(self.params, key=lambda param: (param.offset, param.tp_shard.numel)):
            if param.offset < end:
                raise CheckpointError(
                    f"{where}: the parameters {last} and {param.name} overlap: {last} ends at {end}, {param.name} begins at {param.offset}"
                )
            if param.offset != round_up(end, ALIGNMENT):
                raise CheckpointError(f"{where}: there is a gap between element {end} and parameter {param.name} at element {param.offset}")
            end, last = param.offset + param.tp_shard.numel, param.name
        if self.padded_numel - round_up(end, ALIGNMENT) > self.world * ALIGNMENT:
            raise CheckpointError(f"{where}: there is a gap between element {end} and the end of the unit at {self.padded_numel}")


def present_params(units: Iterable[UnitRecord]) -> Iterator[tuple[UnitRecord, ParamRecord]]:
    """Yield units and their parameters, without places whose parameters have left (``has_left``)."""
    for unit in units:
        yield from ((unit, param) for param in unit.params if not has_left(param.name))


def _is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= _MOST_DIMS and all(0 <= size < _TOO_LONG for size in shape)


def check_tp_shard(where: str, record: ParamRecord | LooseRecord) -> None:
    """Raise CheckpointError if shape, dim and ranges of a record contradict each other."""
    if not _is_shape(record.shape):
        raise CheckpointError(f"{where} has shape {shown(list(record.shape))}")
    if record.dim is None:
        if record.ranges:
            raise CheckpointError(f"{where} has ranges {shown(record.ranges)}, but dim is null")
        return
    if not 0 <= record.dim < len(record.shape):
        raise CheckpointError(f"{where}: dim {record.dim} of shape {list(record.shape)} does not exist")
    if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= record.shape[record.dim] for pair in record.ranges):
        raise CheckpointError(f"{where}: ranges {shown(record.ranges)} do not lie inside dimension {record.dim} of {list(record.shape)}")
    ordered = sorted((pair[0], pair[1]) for pair in record.ranges if pair[0] < pair[1])
    if any(after[0] < before[1] for before, after in pairwise(ordered)) or len(record.ranges) > len(ordered) + _MOST_EMPTY:
        raise CheckpointError(f"{where}: ranges {shown(record.ranges)} overlap, or more than {_MOST_EMPTY} of them are empty")


@dataclass(frozen=True)
class GroupRecord:
    """A param group: the names of its parameters, and its hyper-parameters encoded by ``values.Encoder``."""

    params: tuple[str, ...]
    values: Any


@dataclass(frozen=True)
class ScalarRecord:
    """Optimizer states that are single numbers (``step``), for the parameters of one param group in one unit.

    If the numbers differ between parameters of the unit (some were frozen for a while), each has its own record, whose ``unit`` is the
    name of the parameter. Its ``values`` are None if no step has updated the parameter, so that it has no states at all.
    """

    unit: str
    group: int
    values: Any


@dataclass(frozen=True)
class ParamStateRecord:
    """The states of one parameter that the optimizer updates as a whole, encoded by ``values.Encoder``; their tensors are in ``file``."""

    param: str
    file: str
    values: Any


@dataclass(frozen=True)
class OptimizerRecord:
    """The optimizer: class name, names of states per element, param groups, single-number states, states of whole parameters, and states
    under keys that are no parameters.
    """

    name: str
    states: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    scalars: tuple[ScalarRecord, ...]
    params: tuple[ParamStateRecord, ...] = ()
    common: dict[str, Any] = field(default_factory=dict)

    def numbers(self) -> Callable[[str, int, str], Any]:
        """Return a function of (unit, param group, parameter name) that returns a parameter's single-number states, or None without any."""
        known = {(entry.unit, entry.group): entry.values for entry in self.scalars}

        def find(unit: str, group: int, param: str) -> Any:
            own = known.get((param, group))
            return known.get((unit, group)) if own is None else own

        return find


def read_file_record(data: Any, where: str) -> FileRecord:
    """Return a ``FileRecord`` parsed from its JSON form.

    Raises:
        CheckpointError: A key is missing or of another type; the message names ``where``.
    """
    return read_record(FileRecord, data, where)
