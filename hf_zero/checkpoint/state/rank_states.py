"""Save and load error vectors that differ on every rank: 1-bit Adam's, which are divided anew for other numbers of ranks, and LoCo's."""

from __future__ import annotations

import torch

from hf_zero.checkpoint.files.catalog import Catalog, Located
from hf_zero.checkpoint.files.rows import Entry, whole
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.format.names import DTYPES, shard_file
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradient_sums import GRADIENT_ERROR
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import CheckpointError
from hf_zero.onebit.sharded import SERVER_ERROR, WORKER_ERROR
from hf_zero.onebit.unit import part_numel
from hf_zero.system.reading import shown


def rank_states(optimizer: ShardedOptimizer) -> dict[str, list[Entry]]:
    """Return entries with this rank's error vectors, by kind of file."""
    return {kind: [whole(name, vector) for name, vector in vectors.items()] for kind, vectors in optimizer.rank_states().items()}


def restore_rank_states(optimizer: ShardedOptimizer, catalog: Catalog, reader: RangeReader, rank: int, world: int) -> None:
    """Load this rank's error vectors into ``optimizer``; without any in the checkpoint they start from zero. Local.

    [Note: errors at another number of ranks] In 1-bit Adam the server adds its own rounding error and the mean of the workers' errors to
    the next average. At another number of ranks, the server error is divided anew, and each worker starts with the mean of the saved
    worker errors, so that the mean error stays the same. LoCo's errors are codes with the length of a shard; at another number of ranks
    they start from zero.

    Args:
        optimizer: Optimizer whose state is restored.
        catalog: Contents of the checkpoint.
        reader: Reader of the checkpoint's files.
        rank: Position of this rank among the ranks that average gradients.
        world: Number of ranks that average gradients.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    saved_world = catalog.index.world
    if shard_file(WORKER_ERROR, 0, saved_world) in catalog.index.files:
        sources = [rank] if saved_world == world else list(range(saved_world))
        states[WORKER_ERROR] = {unit.name: _mean_error(unit, catalog, reader, sources) for unit in optimizer.units}
        states[SERVER_ERROR] = {unit.name: _server_error(unit, catalog, reader, rank, world) for unit in optimizer.units}
    file = shard_file(GRADIENT_ERROR, rank, saved_world)
    if saved_world == world and file in catalog.index.files:
        states[GRADIENT_ERROR] = _whole_vectors(catalog, reader, file)
    optimizer.load_rank_states(states)


def _whole_vectors(catalog: Catalog, reader: RangeReader, file: str) -> dict[str, torch.Tensor]:
    """Read all tensors of ``file`` and return them by name; raise CheckpointError if one is not 1-dim."""
    tensors = catalog.index.files[file].tensors
    vectors = {name: torch.empty(record.shape, dtype=DTYPES[record.dtype]) for name, record in tensors.items()}
    for name, vector in vectors.items():
        if vector.dim() != 1:
            raise CheckpointError(f"{file}: {shown(name)} has the shape {tuple(vector.shape)}, expected a vector")
    reader.read([Copy(file, name, 0, vector) for name, vector in vectors.items()])
    return vectors


def _mean_error(unit: Unit, catalog: Catalog, reader: RangeReader, sources: list[int]) -> torch.Tensor:
    """Return the mean of the worker errors of the saved ranks ``sources``, fp32 of shape (padded_numel,)."""
    total = torch.zeros(unit.layout.padded_numel)
    for number, source in enumerate(sources):
        one = total if number == 0 else torch.zeros_like(total)
        copies = []
        for slot in unit.layout.slots:
            found = catalog.find(slot.name)
            if found is not None and found.unit is not None and slot.numel:
                file = shard_file(WORKER_ERROR, source, catalog.index.world)
                copies.append(Copy(file, found.unit.name, found.parts[0].offset, one[slot.range.start : slot.range.stop]))
        reader.read([copy for copy in copies if _has(catalog, copy)])
        if number:
            total.add_(one)
    return total.div_(len(sources)) if len(sources) > 1 else total


def _server_error(unit: Unit, catalog: Catalog, reader: RangeReader, rank: int, world: int) -> torch.Tensor:
    """Return the server error of this rank's part of ``unit``, fp32 of shape (``part_numel(padded_numel, world)``,)."""
    numel = part_numel(unit.layout.padded_numel, world)
    own = Range(rank * numel, (rank + 1) * numel)
    part = torch.zeros(numel)
    copies: list[Copy] = []
    for slot in unit.layout.slots:
        wanted, found = slot.range.intersect(own), catalog.find(slot.name)
        if wanted.numel and found is not None and found.unit is not None:
            copies += _server_copies(found, wanted.start - slot.offset, part[wanted.start - own.start : wanted.stop - own.start], catalog)
    reader.read([copy for copy in copies if _has(catalog, copy)])
    return part


def _server_copies(param: Located, start: int, target: torch.Tensor, catalog: Catalog) -> list[Copy]:
    """Return the reads that fill ``target`` with the server error of ``param`` from its element ``start`` on."""
    if param.unit is None:
        return []
    world = catalog.index.world
    first = catalog.index.files.get(shard_file(SERVER_ERROR, 0, world))
    if first is None or param.unit.name not in first.tensors:
        return []
    numel = first.tensors[param.unit.name].shape[0]  # all ranks have parts of this length
    wanted = Range(param.parts[0].offset + start, param.parts[0].offset + start + target.numel())
    copies = []
    for rank in range(world):
        part = wanted.intersect(Range(rank * numel, (rank + 1) * numel))
        if part.numel:
            place = target[part.start - wanted.start : part.stop - wanted.start]
            copies.append(Copy(shard_file(SERVER_ERROR, rank, world), param.unit.name, part.start - rank * numel, place))
    return copies


def _has(catalog: Catalog, copy: Copy) -> bool:
    """Return whether the checkpoint has the tensor of ``copy``; an error vector of a unit that was frozen at the save is zero."""
    file = catalog.index.files.get(copy.file)
    return file is not None and copy.tensor in file.tensors
