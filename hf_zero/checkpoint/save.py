"""Saving: every rank writes its shards into a hidden folder, rank 0 adds the rest and the index and gives the folder its name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_zero.checkpoint import agreement, folders, optimizer_state
from hf_zero.checkpoint.element_types import dtype_name
from hf_zero.checkpoint.format import (
    CHUNK_BYTES,
    LATEST_FILE,
    MASTER,
    MODULE_FILE,
    VALUES_FILE,
    WEIGHTS,
    FileRecord,
    Index,
    OptimizerRecord,
    ParamRecord,
    UnitRecord,
    shard_file,
    state_kind,
)
from hf_zero.checkpoint.rank_state import rank_state_files
from hf_zero.checkpoint.state import TrainingState
from hf_zero.checkpoint.tensor_file import Entry, whole, write_tensor_file
from hf_zero.checkpoint.values import Encoder
from hf_zero.errors import CheckpointError
from hf_zero.observe import span
from hf_zero.sharding.unit import Unit


@dataclass(frozen=True)
class SaveRequest:
    """What the caller wants saved; rank 0's counts.

    Attributes:
        save_dir: Folder of all checkpoints of a run.
        tag: Name of this one.
        client_state: The caller's values.
        latest: Point ``latest`` at it.
        exclude_frozen: Leave frozen parameters out.
    """

    save_dir: str
    tag: str
    client_state: Mapping[str, Any]
    latest: bool = True
    exclude_frozen: bool = False


def save_checkpoint(state: TrainingState, request: SaveRequest) -> Path:
    """Writes ``<save_dir>/<tag>/``, complete or not at all; collective.

    Nothing is written when a value cannot be saved. When a rank fails, all raise and what was there before stays.

    Args:
        state: What to save.
        request: Where, and what besides.

    Returns:
        The folder.

    Raises:
        CheckpointError: On every rank, with the same text, naming path and cause.
    """
    net = state.collectives
    with span("save_checkpoint", request.tag):
        what = f"saving checkpoint {request.tag!r} to {request.save_dir}"
        agreement.on_all(net, what, lambda: _check(state))
        encoded = _Encoded()
        save_dir, tag, part, exclude_frozen = agreement.on_first(net, what, lambda: _begin(state, request, encoded))
        what = f"saving checkpoint {tag!r} to {save_dir}"
        try:
            written = agreement.on_all(net, what, lambda: _write(state, Path(part), exclude_frozen, encoded))
            final = agreement.on_first(net, what, lambda: _commit(state, request, encoded, written, Path(part)))
        except CheckpointError:
            if net.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise
    return Path(final)


class _Encoded:
    """Values as JSON, on rank 0; their tensors go to ``values.safetensors``."""

    def __init__(self) -> None:
        self.encoder = Encoder()
        self.fields: dict[str, Any] = {}

    def take(self, state: TrainingState, request: SaveRequest) -> None:
        """Encodes everything that is no shard.

        Raises:
            CheckpointError: A value cannot be saved; names it.
        """
        encode = self.encoder.encode
        optimizer = state.optimizer
        self.fields = {
            "client_state": encode(dict(request.client_state), "client_state"),
            "scheduler": encode(state.scheduler.state_dict(), "lr_scheduler") if state.scheduler is not None else None,
            "scaler": encode(state.scaler.state_dict(), "loss_scaler"),
            "extra_state": {
                name: encode(module.get_extra_state(), f"extra state of module {name!r}")
                for name, module in state.modules_with_extra_state()
            },
            "groups": optimizer_state.group_records(optimizer, self.encoder) if optimizer is not None else (),
        }


# -- phases -----------------------------------------------------------------------------------------------------------


def _check(state: TrainingState) -> None:
    """Refuses, before a byte is written, optimizer state of a kind that cannot be saved, and units that share a name."""
    names = [unit.name for unit in state.units]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(f"several units are named {', '.join(twice)}")
    if state.optimizer is not None:
        optimizer_state.scalars(state.optimizer)
        for name in optimizer_state.flat_states(state.optimizer):
            state_kind(name)
            optimizer_state.state_entries(state.optimizer, name)


def _begin(state: TrainingState, request: SaveRequest, encoded: _Encoded) -> tuple[str, str, str, bool]:
    encoded.take(state, request)
    save_dir, tag = Path(request.save_dir), folders.check_tag(request.tag)
    return str(save_dir), tag, str(folders.begin(save_dir, tag)), request.exclude_frozen


@dataclass(frozen=True)
class _Written:
    """What one rank wrote."""

    files: dict[str, FileRecord]
    scalars: list[dict[str, Any]]
    states: list[str]


def _write(state: TrainingState, part: Path, exclude_frozen: bool, encoded: _Encoded) -> _Written:
    """Writes this rank's files; the shards of units that every rank holds whole are rank 0's."""
    rank = state.collectives.rank
    files: dict[str, list[Entry]] = {}
    units = [unit for unit in state.units if unit.layout.world > 1 or rank == 0]
    for unit in units:
        if unit.master is not None:
            files.setdefault(_file_of(unit, MASTER), []).append(whole(unit.name, unit.master))
        elif not exclude_frozen:
            files.setdefault(_file_of(unit, WEIGHTS), []).append(whole(unit.name, unit.shard))
    optimizer = state.optimizer
    states = optimizer_state.flat_states(optimizer) if optimizer is not None else []
    if optimizer is not None:
        worlds = {unit.name: unit.layout.world for unit in units}
        for name in states:
            for entry in optimizer_state.state_entries(optimizer, name):
                if entry.name in worlds:
                    files.setdefault(_shard_name(state_kind(name), rank, worlds[entry.name]), []).append(entry)
        files.update(rank_state_files(optimizer, rank, state.collectives.world))
    if rank == 0:
        files[MODULE_FILE] = _module_entries(state, exclude_frozen)
        files[VALUES_FILE] = [whole(name, tensor) for name, tensor in encoded.encoder.tensors.items()]
    records = {name: write_tensor_file(part / name, entries) for name, entries in files.items() if entries}
    return _Written(records, optimizer_state.scalars(optimizer) if optimizer is not None else [], states)


def _file_of(unit: Unit, kind: str) -> str:
    return _shard_name(kind, unit.rank, unit.layout.world)


def _shard_name(kind: str, rank: int, world: int) -> str:
    return shard_file(kind, rank if world > 1 else 0, world)


def _module_entries(state: TrainingState, exclude_frozen: bool) -> list[Entry]:
    params = [] if exclude_frozen else list(state.loose_params())
    return [whole(name, tensor) for name, tensor in (*params, *state.buffers().items())]


def _commit(state: TrainingState, request: SaveRequest, encoded: _Encoded, written: list[_Written], part: Path) -> str:
    """Index, marker, name, and last of all ``latest``."""
    save_dir = Path(request.save_dir)
    folders.seal(part, _index(state, request, encoded, written).to_json())
    final = folders.publish(part, save_dir, request.tag)
    script = Path(__file__).with_name(folders.SCRIPT_FILE).read_text(encoding="utf-8")
    folders.write_text(save_dir / folders.SCRIPT_FILE, script)
    if request.latest:
        folders.write_text(save_dir / LATEST_FILE, request.tag)
    return str(final)


# -- index ------------------------------------------------------------------------------------------------------------


def _index(state: TrainingState, request: SaveRequest, encoded: _Encoded, written: list[_Written]) -> Index:
    kept = [unit for unit in state.units if unit.master is not None or not request.exclude_frozen]
    loose = [name for name, _ in state.loose_params()]
    fields = dict(encoded.fields)
    groups = fields.pop("groups")
    optimizer = None
    if state.optimizer is not None:
        states = sorted({name for rank in written for name in rank.states})
        numbers = optimizer_state.merge_scalars([rank.scalars for rank in written])
        optimizer = OptimizerRecord(type(state.optimizer.inner).__name__, tuple(states), groups, numbers)
    dropped = [slot.name for unit in state.units if unit not in kept for slot in unit.layout.slots]
    return Index(
        library=_version(),
        tag=request.tag,
        world=state.collectives.world,
        stage=state.stage,
        chunk_bytes=CHUNK_BYTES,
        units=tuple(_unit_record(unit) for unit in kept),
        module_params=() if request.exclude_frozen else tuple(loose),
        buffers=tuple(state.buffers()),
        aliases=state.aliases(),
        excluded=tuple(dropped + loose) if request.exclude_frozen else (),
        optimizer=optimizer,
        counters=dict(state.counters),
        files={name: record for rank in written for name, record in rank.files.items()},
        **fields,
    )


def _unit_record(unit: Unit) -> UnitRecord:
    layout = unit.layout
    params = tuple(ParamRecord(slot.name, tuple(slot.shape), slot.offset, slot.group) for slot in layout.slots)
    kind = MASTER if unit.master is not None else WEIGHTS
    return UnitRecord(unit.name, kind, dtype_name(layout.dtype, unit.name), layout.world, layout.padded_numel, params)


def _version() -> str:
    try:
        return metadata.version("hf_zero")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0"
