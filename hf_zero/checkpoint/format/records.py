"""Define the records that an index is made of, and read them from JSON: exactly the keys of the class, each of its type."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hf_zero.checkpoint.format.names import CHUNK_BYTES, ITEM_BYTES, MASTER, WEIGHTS
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.core.units.layout import ALIGNMENT, round_up
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

T = TypeVar("T")
_HINTS: dict[Any, dict[str, Any]] = {}


def read_record(kind: type[T], data: Any, where: str) -> T:
    """Makes a record of a JSON object.

    Raises:
        CheckpointError: A key is missing, unknown or of another type; names ``where`` and the key.
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
_MOST_EMPTY = 64  # ranges without elements: each costs time for every row


@dataclass(frozen=True)
class TensorRecord:
    """One tensor inside a file.

    Attributes:
        dtype: Its name in safetensors.
        shape: Its shape; () for one element.
        offset: First byte, counted from the start of the file.
        nbytes: Its bytes.
        crc32: CRC-32 of each chunk of ``CHUNK_BYTES``, 8 hex digits each, joined.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: str

    def check(self, where: str, file_nbytes: int) -> None:
        """Refuses records that contradict themselves or reach outside the file."""
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: element type {self.dtype!r} is unknown, allowed are {sorted(ITEM_BYTES)}")
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
        nbytes: Its size.
        header_nbytes: Length prefix and header: where the data begins.
        header_crc32: CRC-32 of those bytes, 8 hex digits.
        tensors: Its tensors.
    """

    nbytes: int
    header_nbytes: int
    header_crc32: str
    tensors: dict[str, TensorRecord]

    def check(self, name: str) -> None:
        """Refuses tensors that leave a gap, share bytes, or do not end where the file does."""
        if not re.fullmatch("[0-9a-f]{8}", self.header_crc32):
            raise CheckpointError(f"{name}: header_crc32 is {shown(self.header_crc32)}, expected 8 hex digits")
        for tensor, record in self.tensors.items():
            record.check(f"{name}: tensor {tensor!r}", self.nbytes)
        end = self.header_nbytes
        if not 8 <= end <= self.nbytes:
            raise CheckpointError(f"{name}: a header of {end} bytes does not fit a file of {self.nbytes}")
        for tensor, record in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if record.offset != end:
                raise CheckpointError(f"{name}: tensor {tensor!r} begins at byte {record.offset}, what lies before it ends at {end}")
            end += record.nbytes
        if end != self.nbytes:
            raise CheckpointError(f"{name}: its tensors end at byte {end}, the file at {self.nbytes}")


@dataclass(frozen=True)
class ParamRecord:
    """One parameter, or a tensor-parallel shard of one, inside a unit.

    Attributes:
        name: Its dotted name.
        shape: Its full shape.
        offset: First element inside the unit.
        group: Param group; -1 when frozen.
        dim: Dimension along which it is divided; None when the unit holds all of it.
        ranges: [start, stop) along ``dim``, in the order in which they lie in the unit.
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
    """A parameter, or a tensor-parallel shard of one, that no unit holds: a tensor of its own in ``file``."""

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
    """One unit: its flat buffer of ``padded_numel`` elements is cut into ``world`` shards of equal length.

    Attributes:
        name: Its tensor's name in every file.
        kind: ``master`` when it was trained, else ``weights``: the files with its values.
        dtype: Type of the parameters in training, as safetensors names it.
        world: Number of shards.
        padded_numel: Elements of the whole buffer.
        tensor_rank: Which tensor-parallel rank's; each has units of the same names with its shards.
        params: Parameters in it.
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
        """Refuses units whose parameters do not fit their buffer, share elements of it, or leave more room than alignment does."""
        where = f"unit {self.name!r}"
        if self.kind not in (MASTER, WEIGHTS):
            raise CheckpointError(f"{where}: kind is {self.kind!r}, allowed are {[MASTER, WEIGHTS]}")
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: dtype is {shown(self.dtype)}, allowed are {sorted(ITEM_BYTES)}")
        if self.world < 1 or self.padded_numel < 0 or self.padded_numel % self.world:
            raise CheckpointError(f"{where}: {self.padded_numel} elements cannot be cut into {self.world} equal shards")
        for param in self.params:
            check_tp_shard(f"{where}: parameter {param.name}", param)
            if param.offset < 0 or param.offset + param.tp_shard.numel > self.padded_numel:
                raise CheckpointError(f"{where}: parameter {param.name} lies outside its {self.padded_numel} elements")
        end, last = 0, ""
        for param in sorted(self.params, key=lambda param: (param.offset, param.tp_shard.numel)):
            if param.offset < end:
                raise CheckpointError(
                    f"{where}: the parameters {last} and {param.name} overlap: one ends at {end}, one is at {param.offset}"
                )
            if param.offset != round_up(end, ALIGNMENT):
                raise CheckpointError(f"{where}: nothing lies between element {end} and parameter {param.name} at {param.offset}")
            end, last = param.offset + param.tp_shard.numel, param.name
        if self.padded_numel - round_up(end, ALIGNMENT) > self.world * ALIGNMENT:
            raise CheckpointError(f"{where}: nothing lies between element {end} and its end at {self.padded_numel}")


def _is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= _MOST_DIMS and all(0 <= size < _TOO_LONG for size in shape)


def check_tp_shard(where: str, record: ParamRecord | LooseRecord) -> None:
    """Refuses shapes and ranges that contradict each other."""
    if not _is_shape(record.shape):
        raise CheckpointError(f"{where} has shape {shown(list(record.shape))}")
    if record.dim is None:
        if record.ranges:
            raise CheckpointError(f"{where} has ranges {shown(record.ranges)} and no dim")
        return
    if not 0 <= record.dim < len(record.shape):
        raise CheckpointError(f"{where}: dim {record.dim} of shape {list(record.shape)} does not exist")
    if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= record.shape[record.dim] for pair in record.ranges):
        raise CheckpointError(f"{where}: ranges {shown(record.ranges)} do not lie inside dimension {record.dim} of {list(record.shape)}")
    ordered = sorted((pair[0], pair[1]) for pair in record.ranges if pair[0] < pair[1])
    if any(after[0] < before[1] for before, after in pairwise(ordered)) or len(record.ranges) > len(ordered) + _MOST_EMPTY:
        raise CheckpointError(f"{where}: ranges {shown(record.ranges)} overlap, or too many are empty")


@dataclass(frozen=True)
class GroupRecord:
    """A param group: the names of its parameters, and its hyper-parameters as ``values.encode`` gave them."""

    params: tuple[str, ...]
    values: Any


@dataclass(frozen=True)
class ScalarRecord:
    """States of one number each (``step``), for the parameters of one group in one unit.

    Where parameters of a unit count differently (some were frozen for a while), ``unit`` is the name of a parameter, and the record is
    of that parameter alone.
    """

    unit: str
    group: int
    values: Any


@dataclass(frozen=True)
class ParamStateRecord:
    """All that an optimizer keeps for one parameter it updates whole: as ``values.encode`` gave it, with its tensors in ``file``."""

    param: str
    file: str
    values: Any


@dataclass(frozen=True)
class OptimizerRecord:
    """The optimizer: class name, names of its flat states, param groups, states that are single numbers, states of whole parameters."""

    name: str
    states: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    scalars: tuple[ScalarRecord, ...]
    params: tuple[ParamStateRecord, ...] = ()

    def numbers(self) -> Callable[[str, int, str], Any]:
        """Return a function that finds the values of a parameter, by its unit, its group and its name; None where there are none."""
        known = {(entry.unit, entry.group): entry.values for entry in self.scalars}

        def find(unit: str, group: int, param: str) -> Any:
            own = known.get((param, group))
            return known.get((unit, group)) if own is None else own

        return find


def read_file_record(data: Any, where: str) -> FileRecord:
    """Return a ``FileRecord`` of its JSON form.

    Raises:
        CheckpointError: A key is missing or of another type; names ``where``.
    """
    return read_record(FileRecord, data, where)
