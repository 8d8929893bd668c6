"""Format version 1 of a checkpoint folder: file names, and the JSON index as dataclasses that check what they read.

The byte-for-byte description is in ``docs/checkpoint-format.md``.
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
from hf_zero.errors import CheckpointError

FORMAT = "hf_zero-checkpoint"
VERSION = 1

INDEX_FILE = "index.json"
MARKER_FILE = "complete"  # sha256 of the index in hex; written last inside the folder
LATEST_FILE = "latest"
MODULE_FILE = "module.safetensors"  # what no unit holds, written by rank 0
VALUES_FILE = "values.safetensors"  # tensors of the client state, the scheduler and the param groups

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


def shard_file(kind: str, rank: int, world: int) -> str:
    """Name of the file with shard ``rank`` of ``world`` of every unit."""
    return f"{kind}-{rank:05d}-of-{world:05d}.safetensors"


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
    """One parameter inside a unit: name, full shape, first element, and param group (-1: frozen)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitRecord:
    """One unit: its flat buffer of ``padded_numel`` elements is cut into ``world`` shards of equal length.

    Attributes:
        name: Its tensor's name in every file.
        kind: ``master`` when it was trained, else ``weights``: the files with its values.
        dtype: Type of the parameters in training, as safetensors names it.
        world: Number of shards.
        padded_numel: Elements of the whole buffer.
        params: What lies in it.
    """

    name: str
    kind: str
    dtype: str
    world: int
    padded_numel: int
    params: tuple[ParamRecord, ...]

    def check(self) -> None:
        """Refuses units whose parameters do not fit their buffer."""
        where = f"unit {self.name!r}"
        if self.kind not in (MASTER, WEIGHTS):
            raise CheckpointError(f"{where}: kind is {self.kind!r}, allowed are {[MASTER, WEIGHTS]}")
        if self.world < 1 or self.padded_numel < 0 or self.padded_numel % self.world:
            raise CheckpointError(f"{where}: {self.padded_numel} elements cannot be cut into {self.world} equal shards")
        for param in self.params:
            if param.offset < 0 or any(size < 0 for size in param.shape) or param.offset + param.numel > self.padded_numel:
                raise CheckpointError(f"{where}: parameter {param.name} lies outside its {self.padded_numel} elements")


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
class OptimizerRecord:
    """The optimizer: class name, names of its flat states, param groups, states that are single numbers."""

    name: str
    states: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    scalars: tuple[ScalarRecord, ...]


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint but the bytes of its tensors.

    Attributes:
        library: Version of hf_zero that wrote it.
        tag: Name under which it was saved.
        world: Number of ranks that wrote it.
        stage: ZeRO stage that wrote it.
        chunk_bytes: Bytes per checksum.
        units: The flat buffers.
        module_params: Parameters in ``module.safetensors``: whole, in no unit.
        buffers: Buffers in ``module.safetensors``.
        extra_state: What modules return from ``get_extra_state``, encoded.
        aliases: Further names of tied parameters -> the name they are stored under.
        excluded: Frozen parameters left out on request.
        optimizer: None when the engine had none.
        scheduler: Encoded state of the engine's scheduler; None when it had none.
        scaler: State of the loss scaler.
        counters: Counters of the engine.
        client_state: The caller's dict, encoded.
        files: All safetensors files, by name.
    """

    library: str
    tag: str
    world: int
    stage: int
    chunk_bytes: int
    units: tuple[UnitRecord, ...]
    module_params: tuple[str, ...]
    buffers: tuple[str, ...]
    extra_state: dict[str, Any]
    aliases: dict[str, str]
    excluded: tuple[str, ...]
    optimizer: OptimizerRecord | None
    scheduler: Any
    scaler: dict[str, Any]
    counters: dict[str, int]
    client_state: Any
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of ``index.json``."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, allow_nan=False, indent=None) + "\n"

    @staticmethod
    def from_json(text: str, path: str) -> Index:
        """Reads and checks the text of ``index.json``.

        Raises:
            CheckpointError: It is no index, of another version, or contradicts itself; names ``path`` and the key.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f'{path} is not the index of a checkpoint of ours: "format" must be "{FORMAT}"')
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {data.get('version')!r}, written by hf_zero {data.get('library')!r}; this one reads version "
                f"{VERSION}. Install a newer hf_zero"
            )
        index: Index = _read(Index, data, path)
        index._check(path)
        return index

    def _check(self, path: str) -> None:
        if self.chunk_bytes != CHUNK_BYTES:
            raise CheckpointError(f"{path}: chunk_bytes is {self.chunk_bytes}, version {VERSION} has {CHUNK_BYTES}")
        try:
            for unit in self.units:
                unit.check()
            for name, file in self.files.items():
                if "/" in name or "\\" in name or name.startswith("."):
                    raise CheckpointError(f"{name!r} is not a plain file name")
                for tensor, record in file.tensors.items():
                    record.check(f"{name}: tensor {tensor!r}", file.nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


# -- JSON to dataclasses ----------------------------------------------------------------------------------------------

_HINTS: dict[type, dict[str, Any]] = {}
_RECORDS = {"TensorRecord", "FileRecord", "ParamRecord", "UnitRecord", "GroupRecord", "ScalarRecord", "OptimizerRecord"}


def _read(kind: type[T], data: Any, where: str) -> T:
    """Makes a record of a JSON object, checking presence and type of every key."""
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{where} is {_shown(data)}, expected an object")
    hints = _HINTS.setdefault(kind, get_type_hints(kind))
    values = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        if entry.name not in data:
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
