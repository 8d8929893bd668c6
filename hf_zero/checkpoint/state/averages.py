"""Averages of weights in a checkpoint: rows beside the masters, and whole tensors of what lies in no unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_zero.checkpoint.files.catalog import Catalog
from hf_zero.checkpoint.files.rows import Entry, whole
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.format.names import average_kind, average_tensors_kind, shard_file
from hf_zero.checkpoint.state.training_state import TrainingState
from hf_zero.core.averages import AveragedWeights
from hf_zero.core.units.unit import Unit
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0

_COUNTS = "(counts)"  # no parameter or buffer is named so


def row_entries(averages: AveragedWeights, units: Sequence[Unit]) -> list[tuple[Unit, Entry]]:
    """Return the average of each unit among ``units``, laid out like its master; copies nothing."""
    found = [(unit, row.flat) for unit, row in averages.rows.of(units)]
    return [(unit, Entry(unit.name, flat.dtype, (flat.numel(),), (flat,))) for unit, flat in found]


def average_files(state: TrainingState, averages: AveragedWeights, buffers: Iterable[str]) -> dict[str, list[Entry]]:
    """Return the file of this rank with whole tensors: counts and parameters that no unit holds on the first rank, and buffers.

    Parts of a parameter that tensor parallelism splits are left out: such an average begins anew.

    Args:
        state: State to save.
        averages: Averages to save.
        buffers: Buffers of the module that this rank writes: theirs of the average go with them.
    """
    entries = [whole(name, averages.buffers[name]) for name in buffers if name in averages.buffers]
    if state.everyone.rank == 0:
        entries.append(whole(_COUNTS, torch.tensor([averages.updates, averages.calls])))
        loose = averages.rows.loose.items()
        entries += [whole(name, average) for name, average in loose if name not in state.tensor.tp_shards]
    holders = state.holders
    file = shard_file(average_tensors_kind(averages.name), holders.rank, holders.world, holders.part, holders.parts)
    return {file: entries}


def restore_averages(state: TrainingState, averages: AveragedWeights, catalog: Catalog, reader: RangeReader) -> None:
    """Load into ``averages`` the averages that the checkpoint holds; without any, start them again from the present weights. Local.

    Raises:
        CheckpointError: A file is damaged, or a shape does not fit.
    """
    averages.start_over()
    saved = _saved_tensors(averages, catalog)
    if _COUNTS not in saved:
        log_rank0("%s holds no averages %r: they start from the loaded weights", reader.folder, averages.name)
        return
    copies = [copy for unit in state.units for copy in _row_copies(state, averages, unit, catalog)]
    for name, param in state.loose_params():
        found = catalog.find(name)
        if found is not None and catalog.dtype(found, average_kind(averages.name)) is not None:
            wanted = state.tensor.tp_shard_of(name, param.shape)
            copies += catalog.copies(found, average_kind(averages.name), wanted, 0, averages.rows.of_param(name, param).view(-1))
    reader.read(copies)
    _take_tensors(state, averages, saved, reader)
    counts = reader.whole(saved[_COUNTS], _COUNTS)
    if counts.shape != (2,) or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise CheckpointError(f"{saved[_COUNTS]}: the counts of averages {averages.name!r} are no two whole numbers from 0 on")
    averages.updates, averages.calls = map(int, counts.tolist())


def _row_copies(state: TrainingState, averages: AveragedWeights, unit: Unit, catalog: Catalog) -> Iterable[Copy]:
    """Reads of the average of one unit's part on this rank, where there is one for its parameters."""
    kind = average_kind(averages.name)
    for index, slot in enumerate(unit.layout.slots):
        found = catalog.find(slot.name)
        if found is None or catalog.dtype(found, kind) is None:
            continue
        wanted, row = state.tensor.tp_shard_of(slot.name, slot.shape), averages.rows.of_unit(unit)
        row.names.add(slot.name)
        part = row.shard_part(index, row.flat)
        if part.numel():
            start = max(0, unit.owned.start - slot.offset)
            yield from catalog.copies(found, kind, wanted, start, part)


def _saved_tensors(averages: AveragedWeights, catalog: Catalog) -> dict[str, str]:
    """Return the whole tensors of the average in the checkpoint -> the file that holds each."""
    kind = average_tensors_kind(averages.name)
    files = {name: file for name, file in catalog.index.files.items() if name.startswith(f"{kind}-")}
    return {tensor: name for name, file in files.items() for tensor in file.tensors}


def _take_tensors(state: TrainingState, averages: AveragedWeights, saved: dict[str, str], reader: RangeReader) -> None:
    """Load buffers, and averages of parameters that no unit held when they were saved."""
    rooms = {name: averages.buffer(name) for name in state.buffers() if name in saved}
    rooms |= {name: averages.rows.of_param(name, param) for name, param in state.loose_params() if name in saved}
    for name, room in rooms.items():
        room.copy_(_of_shape(reader.whole(saved[name], name), room.shape, name))
    for unit in state.units:
        for index, slot in enumerate(unit.layout.slots):
            if slot.name in saved:
                averages.rows.put(unit, index, _of_shape(reader.whole(saved[slot.name], slot.name), slot.shape, slot.name))


def _of_shape(value: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    if value.shape != shape:
        raise CheckpointError(f"the average of {name} has shape {tuple(value.shape)}, and it has {tuple(shape)} in this model")
    return value
