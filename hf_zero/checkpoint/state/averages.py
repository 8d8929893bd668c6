"""Save and load averages of weights: rows laid out like the masters, and whole tensors for parameters and buffers outside of units."""

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

_COUNTS = "(counts)"  # tensor name that no parameter or buffer can have


def row_entries(averages: AveragedWeights, units: Sequence[Unit]) -> list[tuple[Unit, Entry]]:
    """Return an entry with the average of each unit that has one, laid out like the unit's master; copies no tensor."""
    found = [(unit, row.flat) for unit, row in averages.rows.of(units)]
    return [(unit, Entry(unit.name, flat.dtype, (flat.numel(),), (flat,))) for unit, flat in found]


def average_files(state: TrainingState, averages: AveragedWeights, buffers: Iterable[str]) -> dict[str, list[Entry]]:
    """Return this rank's file of whole tensors: averages of its buffers, and on rank 0 also the counts and parameters outside of units.

    Averages of parameters outside of units that tensor parallelism divides are left out; after a load they start from the weights.

    Args:
        state: State to save.
        averages: Averages to save.
        buffers: Names of the buffers that this rank writes; it writes their averages too.
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
    """Load ``averages`` from the checkpoint, or start them from the current weights if the checkpoint has none. Local.

    Raises:
        CheckpointError: A file is damaged, or the shape of an average differs from its parameter's.
    """
    averages.start_over()
    saved = _saved_tensors(averages, catalog)
    if _COUNTS not in saved:
        log_rank0("%s holds no averages %r: these averages start from the loaded weights", reader.folder, averages.name)
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
        raise CheckpointError(f"{saved[_COUNTS]}: the counts of averages {averages.name!r} are not two whole numbers of at least 0")
    averages.updates, averages.calls = map(int, counts.tolist())


def _row_copies(state: TrainingState, averages: AveragedWeights, unit: Unit, catalog: Catalog) -> Iterable[Copy]:
    """Yield the reads that fill this rank's part of a unit's average, for the parameters whose average the checkpoint has."""
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
    """Return the file of each whole tensor of the average in the checkpoint, by tensor name."""
    kind = average_tensors_kind(averages.name)
    files = {name: file for name, file in catalog.index.files.items() if name.startswith(f"{kind}-")}
    return {tensor: name for name, file in files.items() for tensor in file.tensors}


def _take_tensors(state: TrainingState, averages: AveragedWeights, saved: dict[str, str], reader: RangeReader) -> None:
    """Load the averages of buffers, and of parameters that were outside of units when the checkpoint was saved."""
    rooms = {name: averages.buffer(name, buffer) for name, buffer in state.buffers().items() if name in saved}
    rooms |= {name: averages.rows.of_param(name, param) for name, param in state.loose_params() if name in saved}
    for name, room in rooms.items():
        room.copy_(_of_shape(reader.whole(saved[name], name), room.shape, name))
    for unit in state.units:
        for index, slot in enumerate(unit.layout.slots):
            if slot.name in saved:
                averages.rows.put(unit, index, _of_shape(reader.whole(saved[slot.name], slot.name), slot.shape, slot.name))


def _of_shape(value: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    if value.shape != shape:
        raise CheckpointError(f"the saved average of {name} has shape {tuple(value.shape)}, but in this model {name} has {tuple(shape)}")
    return value
