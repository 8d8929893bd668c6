"""``index.json``: everything about a checkpoint but the bytes of its tensors."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from hf_zero.checkpoint.format import CHUNK_BYTES, FORMAT, VERSION
from hf_zero.checkpoint.json_records import read_record, shown
from hf_zero.checkpoint.records import FileRecord, LooseRecord, OptimizerRecord, UnitRecord, check_slice
from hf_zero.errors import CheckpointError


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
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, allow_nan=False, indent=None) + "\n"

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
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise CheckpointError(f'{path} is not the index of a checkpoint of ours: "format" must be "{FORMAT}"')
        version = data.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"{path} has format version {shown(version)}, written by hf_zero {shown(data.get('library'))}; this one reads version "
                f"{VERSION}. Install the hf_zero that wrote it"
            )
        index = read_record(Index, data, path)
        index._check(path)
        return index

    def _check(self, path: str) -> None:
        if self.chunk_bytes != CHUNK_BYTES:
            raise CheckpointError(f"{path}: chunk_bytes is {self.chunk_bytes}, allowed is {CHUNK_BYTES}")
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
