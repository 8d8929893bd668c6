"""Plan the files that one rank writes, and the records of the places of parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.files.rows import Entry, cut, whole
from hf_zero.checkpoint.format.names import MASTER, MODULE, PARAM_STATES, WEIGHTS, average_kind, dtype_name, shard_file, state_kind
from hf_zero.checkpoint.format.records import LooseRecord, ParamRecord, ParamStateRecord, UnitRecord
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.checkpoint.state import optimizer_state
from hf_zero.checkpoint.state.averages import average_files, row_entries
from hf_zero.checkpoint.state.module_entries import savers
from hf_zero.checkpoint.state.param_states import param_states
from hf_zero.checkpoint.state.rank_states import rank_states
from hf_zero.checkpoint.state.training_state import Holders, TrainingState, values_of
from hf_zero.core.optimizer.owners import share_out
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.units.layout import ALIGNMENT, round_up
from hf_zero.core.units.marks import is_expert, is_of_library, is_wrapped, with_outer
from hf_zero.core.units.unit import Unit


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint.

    Attributes:
            files: Entries of each file that this rank writes, by file name; the list of a file may be empty.
            units: Records of all units of this tensor-parallel rank.
            loose: Records of the parameters outside of units that this rank writes.
            buffers: File of each buffer that this rank writes, by buffer name.
            scalars: Optimizer states that are single numbers (``step``), see ``optimizer_state.scalars``.
            states: Names of the optimizer states with one element per parameter element.
            params: Records of optimizer states of whole parameters.
            dropped: Names of the frozen parameters that are left out.
    """

    files: dict[str, list[Entry]]
    units: tuple[UnitRecord, ...]
    loose: tuple[LooseRecord, ...]
    buffers: dict[str, str]
    scalars: list[dict[str, Any]]
    states: list[str]
    params: tuple[ParamStateRecord, ...]
    dropped: tuple[str, ...]


def contents_of(state: TrainingState, exclude_frozen: bool) -> Contents:
    """Plan the files that this rank writes; local, copies no tensor.

    Weights that a library has packed are left out, because nothing trains them and only that library can interpret their bytes. Each rank
    writes its shards. Tensors that several ranks hold (replicated shards, units of stage 0, parameters outside of units, buffers) are
    divided among these ranks, so that no rank writes more than its share.
    """
    files: dict[str, list[Entry]] = {}
    kept = [unit for unit in state.units if unit.master is not None or not (exclude_frozen or _is_packed_unit(unit))]
    for unit in kept:
        row = values_of(unit)
        _add(files, state, unit, _kind(unit), Entry(unit.name, row.dtype, (row.numel(),), (row,)))
    states, scalars = [], []
    params: tuple[ParamStateRecord, ...] = ()
    if state.optimizer is not None:
        by_name = {unit.name: unit for unit in kept}
        states = optimizer_state.flat_states(state.optimizer)
        scalars = optimizer_state.scalars(state.optimizer)
        for name in states:
            for entry in optimizer_state.state_entries(state.optimizer, name):
                _add(files, state, by_name[entry.name], state_kind(name), entry)
        for kind, entries in rank_states(state.optimizer).items():
            files[_own_file(state.holders, kind)] = entries
        if isinstance(state.optimizer, WholeTensorOptimizer):
            name, replicas = _own_file(state.holders, PARAM_STATES), state.holders.world // state.collectives.world
            params, files[name] = param_states(state.optimizer, name, state.holders.rank % replicas, replicas)
    frozen = list(state.loose_params())
    loose = [] if exclude_frozen else [(name, param) for name, param in frozen if not (is_of_library(param) or is_wrapped(param))]
    records, buffers = _add_loose(files, state, loose)
    for averages in state.averages:
        for unit, entry in row_entries(averages, kept):
            _add(files, state, unit, average_kind(averages.name), entry)
        files |= average_files(state, averages, buffers)
    left = (unit for unit in state.units if unit not in kept)
    members = (pair for unit in left for pair in zip(unit.layout.slots, unit.params, strict=True))
    dropped = [slot.name for slot, param in members if any(isinstance(shown, nn.Parameter) for shown in _shown(param))]
    dropped += [name for name, param in frozen if exclude_frozen or is_of_library(param) or is_wrapped(param)]
    units = tuple(_unit_record(state, unit) for unit in kept)
    return Contents(files, units, records, buffers, scalars, states, params, tuple(dropped))


def _own_file(holders: Holders, kind: str) -> str:
    return shard_file(kind, holders.rank, holders.world, holders.part, holders.parts)


def _shown(param: torch.Tensor | None) -> Iterable[torch.Tensor]:
    return () if param is None else with_outer(param)


def _is_packed_unit(unit: Unit) -> bool:
    return any(param is not None and is_of_library(param) for param in unit.params)


def _kind(unit: Unit) -> str:
    return MASTER if unit.master is not None else WEIGHTS


def _padded_numel(state: TrainingState, unit: Unit) -> int:
    """Return the number of elements of the written unit, padded to a multiple of the ranks that hold the unit."""
    layout = unit.layout
    return layout.padded_numel if layout.world > 1 else round_up(layout.padded_numel, state.holders_of(unit).world * ALIGNMENT)


def _add(files: dict[str, list[Entry]], state: TrainingState, unit: Unit, kind: str, entry: Entry) -> None:
    holders = state.holders_of(unit)
    alike = holders.world // unit.layout.world  # ranks that hold the same shard as this rank
    if alike > 1:
        numel, place = _padded_numel(state, unit) // holders.world, holders.rank % alike
        entry = Entry(entry.name, entry.dtype, (numel,), tuple(cut(entry.pieces, place * numel, (place + 1) * numel)))
    files.setdefault(_own_file(holders, kind), []).append(entry)


def _unit_record(state: TrainingState, unit: Unit) -> UnitRecord:
    layout, tensor, holders = unit.layout, state.tensor, state.holders_of(unit)
    params = []
    for slot in layout.slots:
        held = tensor.tp_shard_of(slot.name, slot.shape)
        params.append(ParamRecord(slot.name, held.shape, slot.offset, slot.group, held.dim, held.ranges))
    dtype = dtype_name(layout.dtype, unit.name)
    return UnitRecord(unit.name, _kind(unit), dtype, holders.world, _padded_numel(state, unit), holders.part, tuple(params))


def _add_loose(
    files: dict[str, list[Entry]], state: TrainingState, params: Iterable[tuple[str, torch.Tensor]]
) -> tuple[tuple[LooseRecord, ...], dict[str, str]]:
    """Divide the tensors outside of units among the ranks that hold them, and add this rank's share to ``files``.

    Returns:
        Records of the parameters and divided buffers, and the file of each whole buffer, that this rank writes.
    """
    named = list(params)
    experts = [(name, param) for name, param in named if is_expert(param)]
    others = [(name, param) for name, param in named if not is_expert(param)]
    whole_buffers = state.buffers()
    others += [(name, whole_buffers.pop(name)) for name in list(whole_buffers) if name in state.tensor.tp_shards]  # each rank has a part
    records, buffers = _share_out(files, state, others, state.holders, whole_buffers)
    own, _ = _share_out(files, state, experts, state.holders_of_experts, {})
    return (*records, *own), buffers


def _share_out(
    files: dict[str, list[Entry]],
    state: TrainingState,
    params: Iterable[tuple[str, torch.Tensor]],
    holders: Holders,
    buffers: dict[str, torch.Tensor],
) -> tuple[tuple[LooseRecord, ...], dict[str, str]]:
    """Add this rank's share of ``params`` and ``buffers``, which all ``holders`` have, to ``files``; return values as in ``_add_loose``."""
    shards = {name: state.tensor.tp_shard_of(name, param.shape) for name, param in params}
    mine = [(name, param) for name, param in params if shards[name].dim is not None or holders.part == 0]
    buffers = buffers if holders.part == 0 else {}
    portions = [[entry] for entry in mine] + _by_module(buffers)
    of_first = savers(state.module) if buffers else set[str]()

    def first(index: int, _: Sequence[int]) -> int | None:
        return 0 if index >= len(mine) and _module_of(portions[index][0][0]) in of_first else None

    owners = share_out([sum(value.nbytes for _, value in portion) for portion in portions], holders.world, first)
    held = [entry for portion, owner in zip(portions, owners, strict=True) if owner == holders.rank for entry in portion]
    file = _own_file(holders, MODULE)
    files.setdefault(file, []).extend(whole(name, value.detach()) for name, value in held)
    records = [_loose_record(name, file, shards[name]) for name, _ in held if name in shards]
    return tuple(records), {name: file for name, _ in held if name in buffers}


def _by_module(buffers: dict[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """Group buffers by module; one rank writes all buffers of a module.

    [Note: buffers of one module] Each rank updates buffers from its own batches, and the buffers of a module depend on each other (a mean
    and its variance, a queue and its pointer). One rank saves all buffers of a module, so that they are consistent: rank 0 where it also
    saves extra state or entries of the module.
    """
    modules: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, buffer in buffers.items():
        modules.setdefault(_module_of(name), []).append((name, buffer))
    return list(modules.values())


def _module_of(buffer: str) -> str:
    return buffer.rpartition(".")[0]


def _loose_record(name: str, file: str, held: SavedTpShard) -> LooseRecord:
    return LooseRecord(name, file, held.shape, held.dim, held.ranges)
