"""Format version 3 of a checkpoint folder: file names, and the JSON index as dataclasses that check what they read.

The byte-for-byte description is in ``docs/checkpoint-format.md``; version 1 is turned into version 2 when it is read. Version 3 adds
states of whole parameters; a checkpoint without any says version 2, so that older releases read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from hf_zero.checkpoint.element_types import ITEM_BYTES
from hf_zero.checkpoint.slices import Slice
from hf_zero.errors import CheckpointError

FORMAT = "hf_zero-checkpoint"
VERSION = 3
READABLE = (1, 2, 3)

INDEX_FILE = "index.json"
MARKER_FILE = "complete"  # sha256 of the index in hex; written last inside the folder
LATEST_FILE = "latest"
VALUES_FILE = "values.safetensors"  # tensors of rank 0's client state, of the scheduler and of the param groups
CONVERTED = "convert"  # in place of a version of hf_zero: `hf-zero convert` wrote it
MODULE = "module"  # kind of the files with what no unit holds
PARAM_STATES = "optimizer_params"  # kind of the files with optimizer states of whole parameters

# One checksum covers this many bytes: a rank that reads a range verifies it by reading at most one chunk too much at each end.
CHUNK_BYTES = 1 << 16

MASTER = "master"
WEIGHTS = "weights"
_STATE_PREFIX = "optimizer."
_STATE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")

T = TypeVar("T")


def state_kind(state: str) -> str:
    """The kind of file that holds the optimizer state ``state``.

    Raises:
        CheckpointError: The name cannot be part of a file name.
    """
    if not _STATE_NAME.fullmatch(state):
        raise CheckpointError(f"the optimizer state {state!r} cannot be saved: its name must be letters, digits and underscores")
    return _STATE_PREFIX + state


def shard_file(kind: str, rank: int, world: int, tensor_rank: int = 0, tensor_world: int = 1) -> str:
    """Name of the file with shard ``rank`` of ``world`` of every unit, of one of ``tensor_world`` tensor-parallel ranks."""
    part = f".tensor-{tensor_rank:05d}-of-{tensor_world:05d}" if tensor_world > 1 else ""
    return f"{kind}-{rank:05d}-of-{world:05d}{part}.safetensors"


def values_file(rank: int) -> str:
    """Name of the file with the tensors of ``rank``'s client state."""
    return VALUES_FILE if rank == 0 else f"values-{rank:05d}.safetensors"


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
        if any(size < 0 for size in self.shape) or math.prod(self.shape) * ITEM_BYTES[self.dtype] != self.nbytes:
            raise CheckpointError(f"{where}: {self.nbytes} bytes do not fit shape {list(self.shape)} of {self.dtype}")
        if self.offset < 8 or self.offset + self.nbytes > file_nbytes:
            raise CheckpointError(f"{where}: bytes {self.offset} to {self.offset + self.nbytes} lie outside a file of {file_nbytes}")
        if len(self.crc32) != 8 * math.ceil(self.nbytes / CHUNK_BYTES) or re.search("[^0-9a-f]", self.crc32):
            raise CheckpointError(f"{where}: {len(self.crc32)} digits of checksums do not fit {self.nbytes} bytes")


@dataclass(frozen=True)
class FileRecord:
    """One safetensors file of the folder.

    Attributes:
        nbytes: Its size.
        header_nbytes: Length prefix and header: where the data begins.
        header_crc32: CRC-32 of those bytes, 8 hex digits.
        tensors: What it holds.
    """

    nbytes: int
    header_nbytes: int
    header_crc32: str
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class ParamRecord:
    """One parameter, or a tensor-parallel rank's slice of one, inside a unit.

    Attributes:
        name: Its dotted name.
        shape: Its full shape.
        offset: First element inside the unit.
        group: Param group; -1 when frozen.
        dim: Dimension along which it is sliced; None when the unit holds all of it.
        ranges: [start, stop) along ``dim``, in the order in which they lie in the unit.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    dim: int | None = None
    ranges: tuple[tuple[int, ...], ...] = ()

    @property
    def slice(self) -> Slice:
        """The part of the parameter that the unit holds."""
        return Slice(self.shape, self.dim, tuple((pair[0], pair[1]) for pair in self.ranges))


@dataclass(frozen=True)
class LooseRecord:
    """A parameter, or a slice of one, that no unit holds: a tensor of its own in ``file``."""

    name: str
    file: str
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, ...], ...] = ()

    @property
    def slice(self) -> Slice:
        """The part of the parameter that the file holds."""
        return Slice(self.shape, self.dim, tuple((pair[0], pair[1]) for pair in self.ranges))


@dataclass(frozen=True)
class UnitRecord:
    """One unit: its flat buffer of ``padded_numel`` elements is cut into ``world`` shards of equal length.

    Attributes:
        name: Its tensor's name in every file.
        kind: ``master`` when it was trained, else ``weights``: the files with its values.
        dtype: Type of the parameters in training, as safetensors names it.
        world: Number of shards.
        padded_numel: Elements of the whole buffer.
        tensor_rank: Which tensor-parallel rank's; each has units of the same names with its slices.
        params: What lies in it.
    """

    name: str
    kind: str
    dtype: str
    world: int
    padded_numel: int
    tensor_rank: int
    params: tuple[ParamRecord, ...]

    def check(self) -> None:
        """Refuses units whose parameters do not fit their buffer."""
        where = f"unit {self.name!r}"
        if self.kind not in (MASTER, WEIGHTS):
            raise CheckpointError(f"{where}: kind is {self.kind!r}, allowed are {[MASTER, WEIGHTS]}")
        if self.world < 1 or self.padded_numel < 0 or self.padded_numel % self.world:
            raise CheckpointError(f"{where}: {self.padded_numel} elements cannot be cut into {self.world} equal shards")
        for param in self.params:
            check_slice(f"{where}: parameter {param.name}", param)
            if param.offset < 0 or param.offset + param.slice.numel > self.padded_numel:
                raise CheckpointError(f"{where}: parameter {param.name} lies outside its {self.padded_numel} elements")


def check_slice(where: str, record: ParamRecord | LooseRecord) -> None:
    """Refuses shapes and ranges that contradict each other."""
    if any(size < 0 for size in record.shape):
        raise CheckpointError(f"{where} has shape {list(record.shape)}")
    if record.dim is None:
        if record.ranges:
            raise CheckpointError(f"{where} has ranges {_shown(record.ranges)} and no dim")
        return
    if not 0 <= record.dim < len(record.shape):
        raise CheckpointError(f"{where}: dim {record.dim} of shape {list(record.shape)} does not exist")
    if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= record.shape[record.dim] for pair in record.ranges):
        raise CheckpointError(f"{where}: ranges {_shown(record.ranges)} do not lie inside dimension {record.dim} of {list(record.shape)}")


@dataclass(frozen=True)
class GroupRecord:
    """A param group: the names of its parameters, and its hyper-parameters as ``values.encode`` gave them."""

    params: tuple[str, ...]
    values: Any


@dataclass(frozen=True)
class ScalarRecord:
    """States of one number each (``step``), for the parameters of one group in one unit."""

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


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint but the bytes of its tensors.

    Attributes:
        library: Version of hf_zero that wrote it, or ``CONVERTED``.
        tag: Name under which it was saved.
        world: Number of ranks that wrote it.
        tensor_world: Number of tensor-parallel slices among them.
        stage: ZeRO stage that wrote it.
        chunk_bytes: Bytes per checksum.
        units: The flat buffers.
        loose: Parameters that no unit holds.
        buffers: Buffer -> the file that holds it.
        extra_state: What modules return from ``get_extra_state``, encoded.
        aliases: Further names of tied parameters -> the name they are stored under.
        excluded: Frozen parameters left out on request.
        optimizer: None when the engine had none.
        scheduler: Encoded state of the engine's scheduler; None when it had none.
        scaler: State of the loss scaler.
        counters: Counters of the engine.
        client_state: Rank 0's dict of the caller, encoded.
        client_states: Those of other ranks, where they differ from rank 0's, by rank.
        files: All safetensors files, by name.
    """

    library: str
    tag: str
    world: int
    tensor_world: int
    stage: int
    chunk_bytes: int
    units: tuple[UnitRecord, ...]
    loose: tuple[LooseRecord, ...]
    buffers: dict[str, str]
    extra_state: dict[str, Any]
    aliases: dict[str, str]
    excluded: tuple[str, ...]
    optimizer: OptimizerRecord | None
    scheduler: Any
    scaler: dict[str, Any]
    counters: dict[str, int]
    client_state: Any
    client_states: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of ``index.json``."""
        data = dataclasses.asdict(self)
        version = VERSION
        if self.optimizer is None or not self.optimizer.params:
            version = 2
            if self.optimizer is not None:
                del data["optimizer"]["params"]
        return json.dumps({"format": FORMAT, "version": version, **data}, allow_nan=False, indent=None) + "\n"

    @staticmethod
    def from_json(text: str, path: str) -> Index:
        """Reads and checks the text of ``index.json``.

        Raises:
            CheckpointError: It is no index, of another version, or contradicts itself; names ``path`` and the key.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f'{path} is not the index of a checkpoint of ours: "format" must be "{FORMAT}"')
        if data.get("version") not in READABLE:
            raise CheckpointError(
                f"{path} has format version {data.get('version')!r}, written by hf_zero {data.get('library')!r}; this one reads versions "
                f"{', '.join(map(str, READABLE))}. Install a newer hf_zero"
            )
        if data["version"] == 1:
            data = _from_version_1(data, path)
        index: Index = _read(Index, data, path)
        index._check(path)
        return index

    def _check(self, path: str) -> None:
        if self.chunk_bytes != CHUNK_BYTES:
            raise CheckpointError(f"{path}: chunk_bytes is {self.chunk_bytes}, version {VERSION} has {CHUNK_BYTES}")
        try:
            for unit in self.units:
                unit.check()
                if not 0 <= unit.tensor_rank < self.tensor_world:
                    raise CheckpointError(f"unit {unit.name!r}: tensor rank {unit.tensor_rank} of {self.tensor_world} does not exist")
            for loose in self.loose:
                check_slice(f"parameter {loose.name}", loose)
            for name, file in self.files.items():
                if "/" in name or "\\" in name or name.startswith("."):
                    raise CheckpointError(f"{name!r} is not a plain file name")
                for tensor, record in file.tensors.items():
                    record.check(f"{name}: tensor {tensor!r}", file.nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def read_file_record(data: Any, where: str) -> FileRecord:
    """A ``FileRecord`` of its JSON form.

    Raises:
        CheckpointError: A key is missing or of another type; names ``where``.
    """
    record: FileRecord = _read(FileRecord, data, where)
    return record


def _from_version_1(data: Any, path: str) -> Any:
    """The same index as version 2 has it: one file for what no unit holds, no slices, one client state."""
    try:
        tensors = data["files"]["module.safetensors"]["tensors"] if "module.safetensors" in data["files"] else {}
        missing = sorted({*data["module_params"], *data["buffers"]} - set(tensors))
        if missing:
            raise CheckpointError(f"{path}: the index lists {missing[0]} in module.safetensors, which has no such tensor")
        loose = [{"name": name, "file": "module.safetensors", "shape": tensors[name]["shape"]} for name in data["module_params"]]
        return {
            **data,
            "tensor_world": 1,
            "units": [{**unit, "tensor_rank": 0} for unit in data["units"]],
            "loose": loose,
            "buffers": dict.fromkeys(data["buffers"], "module.safetensors"),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of version 1: {error!r}") from error


# -- JSON to dataclasses ----------------------------------------------------------------------------------------------

_HINTS: dict[type, dict[str, Any]] = {}
_RECORDS = {
    "TensorRecord",
    "FileRecord",
    "ParamRecord",
    "LooseRecord",
    "UnitRecord",
    "GroupRecord",
    "ScalarRecord",
    "ParamStateRecord",
    "OptimizerRecord",
}


def _read(kind: type[T], data: Any, where: str) -> T:
    """Makes a record of a JSON object, checking presence and type of every key."""
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{where} is {_shown(data)}, expected an object")
    hints = _HINTS.setdefault(kind, get_type_hints(kind))
    values = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        if entry.name not in data:
            if entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING:
                continue
            raise CheckpointError(f"{where}: key {entry.name!r} is missing")
        values[entry.name] = _value(hints[entry.name], data[entry.name], f"{where}: {entry.name}")
    return kind(**values)


def _value(hint: Any, data: Any, where: str) -> Any:
    name = str(getattr(hint, "__name__", hint))
    arguments: tuple[Any, ...] = getattr(hint, "__args__", ())
    if hint is Any:
        return data
    if name in _RECORDS:
        return _read(hint, data, where)
    if type(None) in arguments:
        return None if data is None else _value(arguments[0], data, where)
    if name == "tuple":
        if not isinstance(data, list):
            raise CheckpointError(f"{where} is {_shown(data)}, expected a list")
        return tuple(_value(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(data))
    if name == "dict":
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} is {_shown(data)}, expected an object")
        return {key: _value(arguments[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if not isinstance(data, hint) or isinstance(data, bool):
        raise CheckpointError(f"{where} is {_shown(data)}, expected {hint.__name__}")
    return data


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 80 else text[:77] + "..."
