"""Define ``index.json``, which describes a checkpoint completely except for the data of its tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.checkpoint.format import consistency
from hf_zero.checkpoint.format.names import CHUNK_BYTES, FORMAT, VERSION
from hf_zero.checkpoint.format.plausible import check_counters, check_group, check_numbers, check_scaler, check_spikes, check_values
from hf_zero.checkpoint.format.records import FileRecord, LooseRecord, OptimizerRecord, UnitRecord, read_record
from hf_zero.checkpoint.format.values import Decoder
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import parse_json, reading, shown


@dataclass(frozen=True)
class Index:
    """The contents of ``index.json``: everything about a checkpoint except the data of its tensors.

    Attributes:
        library: Version of hf_zero that wrote the checkpoint, or ``CONVERTED``.
        tag: Name of the checkpoint.
        world: Number of ranks that wrote the checkpoint.
        tensor_world: Number of tensor-parallel ranks that hold one copy of each layer together.
        stage: ZeRO stage of the run.
        chunk_bytes: Bytes per checksum.
        units: Records of the units.
        loose: Records of the parameters outside of units.
        buffers: File of each buffer, by buffer name.
        extra_state: Results of the modules' ``get_extra_state``, encoded.
        entries: Further entries that modules add to their state dicts, encoded, by name in the state dict.
        aliases: Name under which a tied parameter or a buffer is stored, by each of its further names.
        excluded: Names of the parameters that are left out: frozen ones on request, and packed weights.
        optimizer: Record of the optimizer; None if the engine had none.
        scheduler: Encoded state of the engine's scheduler; None if it had none.
        scaler: State of the loss scaler; empty without a loss scaler.
        spikes: Gradient norms of the last steps (``core.step.spikes``); None if the engine did not record them.
        counters: Counters of the engine (steps, skipped steps, samples, micro-steps).
        client_state: Encoded ``client_state`` that the script passed to ``save_checkpoint`` on rank 0.
        client_states: Encoded ``client_state`` of each other rank whose value differs from rank 0's, by rank.
        files: Records of all safetensors files, by file name.
        own_classes: Which of "optimizer" and "scheduler" the script defines; their values are not checked.
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
    spikes: Any = None
    entries: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    own_classes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the index as the text of ``index.json``."""
        fields = dataclasses.asdict(self)
        if fields["optimizer"] is not None and not fields["optimizer"]["common"]:
            del fields["optimizer"]["common"]  # nearly all optimizers have none, and earlier versions do not know the key
        if not self.own_classes:
            del fields["own_classes"]  # likewise
        if not fields["entries"]:
            del fields["entries"]  # likewise for modules
        return json.dumps({"format": FORMAT, "version": VERSION, **fields}, allow_nan=False, indent=None) + "\n"

    @staticmethod
    def from_json(text: str, path: str) -> Index:
        """Parse and check the text of ``index.json``.

        Raises:
            CheckpointError: The text is not an index, has another version, or contradicts itself; the message names ``path`` and key.
        """
        with reading(path, CheckpointError):
            data = parse_json(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise CheckpointError(f'{path} is not the index of an hf_zero checkpoint: "format" must be "{FORMAT}"')
        version = data.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"{path} has format version {shown(version)}, written by hf_zero {shown(data.get('library'))}; this installation reads "
                f"version {VERSION}. Install the version of hf_zero that wrote it"
            )
        data.setdefault("spikes", None)  # checkpoints from before it was saved lack it
        data.setdefault("own_classes", [])
        data.setdefault("entries", {})
        if isinstance(data.get("optimizer"), dict):
            data["optimizer"].setdefault("common", {})
        index = read_record(Index, data, path)
        index.check(path)
        return index

    def check(self, path: str) -> None:
        """Check that the index does not contradict itself and that its values are possible.

        Raises:
            CheckpointError: A check failed; the message names ``path`` and the part.
        """
        with _named(path):
            optimizer = self.optimizer
            consistency.check_files(self.files, self.world, self.tensor_world, optimizer.states if optimizer is not None else ())
            consistency.check_units(self.units, self.files, self.world, self.tensor_world)
            consistency.check_names(self.units, self.loose, self.buffers, self.files)
        self.check_meaning(path)

    def check_meaning(self, path: str) -> None:
        """Check an index that is about to be written, like ``check`` but without the files."""
        with _named(path):
            if self.chunk_bytes != CHUNK_BYTES:
                raise CheckpointError(f"chunk_bytes is {self.chunk_bytes}, allowed is {CHUNK_BYTES}")
            if not 0 <= self.stage <= 3:
                raise CheckpointError(f"stage is {self.stage}, allowed are 0 to 3")
            names = {param.name for unit in self.units for param in unit.params} | {loose.name for loose in self.loose}
            consistency.check_aliases(self.aliases, self.excluded, names | self.buffers.keys())
            if self.optimizer is not None:
                consistency.check_optimizer(self.optimizer, self.units, names)
            unknown = [rank for rank in self.client_states if not (rank.isdecimal() and str(int(rank)) == rank and int(rank) < self.world)]
            if unknown:
                raise CheckpointError(f"client_states: {shown(unknown[0])} is not one of the {self.world} ranks")
            self._check_values(Decoder(_no_tensor, "the index"))

    def _check_values(self, decoder: Decoder) -> None:
        check_counters(self.counters)
        check_scaler(decoder.decode(self.scaler))
        if not isinstance(self.scheduler, (dict, type(None))):
            raise CheckpointError(f"scheduler is {shown(self.scheduler)}, expected an object or null")
        if "scheduler" not in self.own_classes:
            check_values(decoder.decode(self.scheduler), "scheduler")
        check_spikes(decoder.decode(self.spikes))
        if self.optimizer is not None:
            ranges = "optimizer" not in self.own_classes
            groups = [decoder.decode(group.values) for group in self.optimizer.groups]
            for number, values in enumerate(groups):
                check_group(values, f"optimizer.groups[{number}]", ranges)
                if not values and any(groups):
                    raise CheckpointError(f"optimizer.groups[{number}] has no hyper-parameters, but other groups have some")
            if ranges:
                check_values(decoder.decode(self.optimizer.common), "optimizer.common")
            states = [record for record in self.optimizer.scalars if record.values is not None]
            check_numbers(
                [(record.group, f"optimizer.scalars of unit {record.unit!r}", decoder.decode(record.values)) for record in states], ranges
            )


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _no_tensor(name: str) -> torch.Tensor:
    """Return a placeholder for a tensor of the values file; the reader of that file checks the tensor."""
    return torch.zeros(())
