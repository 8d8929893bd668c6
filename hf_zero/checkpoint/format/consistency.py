"""Check that the parts of an index agree: nothing occurs twice, nothing is unused, and nothing is missing.

Loading goes from parameters to files and would silently ignore or misread entries that do not fit. So each name, number of ranks and
file must agree with the rest of the index. All loops are bounded by the number of entries in the index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hf_zero.checkpoint.format.names import (
    AVERAGE,
    AVERAGE_TENSORS,
    MASTER,
    MODULE,
    PARAM_STATES,
    STATE_PREFIX,
    VALUES_FILE,
    WEIGHTS,
    shard_file,
    state_kind,
    values_file,
)
from hf_zero.checkpoint.format.records import (
    FileRecord,
    GroupRecord,
    LooseRecord,
    OptimizerRecord,
    ParamRecord,
    UnitRecord,
    check_tp_shard,
    present_params,
)
from hf_zero.core.schedule.gradient_sums import GRADIENT_ERROR
from hf_zero.core.units.layout import FROZEN
from hf_zero.errors import CheckpointError
from hf_zero.onebit.sharded import SERVER_ERROR, WORKER_ERROR
from hf_zero.system.reading import shown

_FILE_NAME = re.compile(r"([^-]+)-(\d{5,9})-of-(\d{5,9})(?:\.tensor-(\d{5,9})-of-\d{5,9})?\.safetensors")
_VALUES_NAME = re.compile(r"values-(\d{5,9})\.safetensors")


def _is_state(kind: str) -> bool:
    return kind.startswith(STATE_PREFIX)


def _is_average(kind: str) -> bool:
    return AVERAGE.fullmatch(kind) is not None


def check_files(files: Mapping[str, FileRecord], world: int, tensor_world: int, states: tuple[str, ...]) -> None:
    """Check the record of each file, and that its name is one that a save would choose.

    Args:
        files: Records of all files in the index, by file name.
        world: Number of ranks that wrote the checkpoint.
        tensor_world: Number of tensor-parallel ranks that hold one copy of each layer together.
        states: Names of the optimizer states with one element per parameter element.

    Raises:
        CheckpointError: A check failed; the message names the file.
    """
    if world < 1 or tensor_world < 1 or world % tensor_world:
        raise CheckpointError(
            f"world is {world} and tensor_world is {tensor_world}: both must be 1 or more, and tensor_world must divide world"
        )
    known = {MASTER, WEIGHTS, MODULE, PARAM_STATES, WORKER_ERROR, SERVER_ERROR, GRADIENT_ERROR, *map(state_kind, states)}
    kinds = set()
    for name, file in files.items():
        kind = _kind_of(name, world, tensor_world)
        if kind is None or not (kind in known or _is_average(kind) or AVERAGE_TENSORS.fullmatch(kind)):
            raise CheckpointError(f"{shown(name)} is not a file name of a checkpoint of {world} ranks with the states {list(states)}")
        kinds.add(kind)
        file.check(name)
    for state in states:
        if state_kind(state) not in kinds:
            raise CheckpointError(f"no file holds the optimizer state {state!r}")
    both = {WORKER_ERROR, SERVER_ERROR}
    for kind in (both if kinds & both else set()) | (kinds & {GRADIENT_ERROR}):
        present = sum(name.startswith(f"{kind}-") for name in files)
        if present != world:
            raise CheckpointError(f"{present} of {world} ranks have a file of kind {kind}, expected all")


def _kind_of(name: str, world: int, tensor_world: int) -> str | None:
    """Return the kind in the file name ``name``; None if no save chooses this name."""
    values = _VALUES_NAME.fullmatch(name)
    if name == VALUES_FILE or (values and 0 < int(values[1]) < world and name == values_file(int(values[1]))):
        return MODULE  # these files hold tensors that encoded values refer to by name
    found = _FILE_NAME.fullmatch(name)
    if found is None:
        return None
    rank, ranks, tensor_rank = int(found[2]), int(found[3]), int(found[4] or 0)
    parts = world // ranks if _may_share(ranks, world, tensor_world) else 0
    fits = rank < ranks and tensor_rank < parts
    return found[1] if fits and shard_file(found[1], rank, ranks, tensor_rank, parts) == name else None


def _may_share(ranks: int, world: int, tensor_world: int) -> bool:
    """Return whether ``ranks`` can be the number of ranks over which a unit is sharded.

    These ranks hold the same tensor-parallel shard. So the number of tensor-parallel shards, ``world // ranks``, divides ``tensor_world``;
    it is smaller for layers that are divided over fewer ranks than experts.
    """
    return ranks > 0 and world % ranks == 0 and tensor_world % (world // ranks) == 0


def check_units(units: Iterable[UnitRecord], files: Mapping[str, FileRecord], world: int, tensor_world: int) -> None:
    """Check the record of each unit, its shards in the files, and its optimizer states.

    Raises:
        CheckpointError: A check failed; the message names unit and file.
    """
    by_key = {}
    for unit in units:
        if not 0 <= unit.tensor_rank < tensor_world:
            raise CheckpointError(f"unit {unit.name!r}: tensor_rank is {unit.tensor_rank}, allowed are 0 to {tensor_world - 1}")
        if (unit.name, unit.tensor_rank) in by_key:
            raise CheckpointError(f"unit {unit.name!r} occurs twice")
        unit.check()
        by_key[unit.name, unit.tensor_rank] = unit
        if not _may_share(unit.world, world, tensor_world) or unit.tensor_rank >= world // unit.world:
            raise CheckpointError(f"unit {unit.name!r}: {unit.world} shards, but {world // tensor_world} data-parallel ranks")
        _check_shards(unit, files, world // unit.world)
    for name, file in files.items():
        found = _FILE_NAME.fullmatch(name)
        if found is not None and (found[1] in (MASTER, WEIGHTS) or _is_state(found[1]) or _is_average(found[1])):
            for tensor, record in file.tensors.items():
                holder = by_key.get((tensor, int(found[4] or 0)))
                beside = _is_average(found[1]) or (holder is not None and holder.kind == MASTER and _is_state(found[1]))
                fits = holder is not None and (found[1] == holder.kind or beside)
                if holder is None or not fits or record.shape != (holder.shard_numel,):
                    raise CheckpointError(f"{name}: tensor {tensor!r} of shape {list(record.shape)} is not a shard of a unit in the index")


def _check_shards(unit: UnitRecord, files: Mapping[str, FileRecord], tensor_world: int) -> None:
    dtypes = set()
    for rank in range(unit.world):  # the loop ends at the first missing file, so it is bounded by the index
        name = shard_file(unit.kind, rank, unit.world, unit.tensor_rank, tensor_world)
        if name not in files or unit.name not in files[name].tensors:
            raise CheckpointError(f"the checkpoint lacks {name} with unit {unit.name!r}")
        dtypes.add(files[name].tensors[unit.name].dtype)
    if len(dtypes) != 1:
        raise CheckpointError(f"unit {unit.name!r}: its shards have the types {sorted(dtypes)}, expected one")


def check_names(
    units: Iterable[UnitRecord], loose: Iterable[LooseRecord], buffers: Mapping[str, str], files: Mapping[str, FileRecord]
) -> None:
    """Check that each parameter and buffer occurs once per tensor-parallel rank, has equal records there, and has its tensor.

    Raises:
        CheckpointError: A check failed; the message names the parameter or buffer, and the file.
    """
    places: dict[str, dict[tuple[str, int], tuple[ParamRecord | LooseRecord, int]]] = {}
    for unit, param in present_params(units):
        _add_place(places, (unit.kind, unit.tensor_rank), param, param.group)
    wanted: dict[str, set[str]] = {name: set() for name in files}
    for record in loose:
        found = _FILE_NAME.fullmatch(record.file)
        tensor = files[record.file].tensors.get(record.name) if record.file in files else None
        if found is None or found[1] != MODULE or tensor is None:
            raise CheckpointError(f"the index lists parameter {record.name} in {shown(record.file)}, which has no such tensor")
        check_tp_shard(f"parameter {record.name}", record)
        if record.tp_shard.local_shape != tensor.shape:
            raise CheckpointError(
                f"parameter {record.name} has another shape in {record.file}, {tuple(tensor.shape)}, than the index says, "
                f"{tuple(record.tp_shard.local_shape)}"
            )
        wanted[record.file].add(record.name)
        _add_place(places, ("loose", int(found[4] or 0)), record, FROZEN)
    for name, file in buffers.items():
        if name in places or file not in files or not file.startswith(f"{MODULE}-") or name not in files[file].tensors:
            raise CheckpointError(f"the index lists buffer {name} in {shown(file)}, which has no such tensor, or it is a parameter too")
        wanted[file].add(name)
    for file, names in wanted.items():
        spare = set(files[file].tensors) - names if file.startswith(f"{MODULE}-") else set()
        if spare:
            raise CheckpointError(f"{file} holds {min(spare)!r}, which the index lists neither as parameter nor as buffer")


def _add_place(
    places: dict[str, dict[tuple[str, int], tuple[ParamRecord | LooseRecord, int]]],
    place: tuple[str, int],
    record: ParamRecord | LooseRecord,
    group: int,
) -> None:
    known = places.setdefault(record.name, {})
    if any(tensor_rank == place[1] for _, tensor_rank in known):
        raise CheckpointError(f"parameter {record.name} occurs twice")
    for (kind, _), (other, other_group) in known.items():
        if (kind, other.shape, other.dim, other_group) != (place[0], record.shape, record.dim, group):
            raise CheckpointError(f"parameter {record.name} has different kinds, shapes, dims or groups in two entries of the index")
    known[place] = (record, group)


def check_aliases(aliases: Mapping[str, str], excluded: Iterable[str], names: set[str]) -> None:
    """Check that each alias refers to a stored or excluded parameter or a buffer, that it is no stored name, and no excluded one is stored.

    Raises:
        CheckpointError: A check failed; the message names the alias or parameter.
    """
    left_out = set(excluded)
    for alias, name in aliases.items():
        if alias in names or name not in names | left_out:
            raise CheckpointError(f"the alias {alias!r} of {name!r} refers to no parameter or buffer, or has the name of a stored one")
    if left_out & names:
        raise CheckpointError(f"parameter {min(left_out & names)} is stored, but listed as excluded")


def check_optimizer(optimizer: OptimizerRecord, units: Iterable[UnitRecord], names: set[str]) -> None:
    """Check that param groups and states name existing parameters, each once.

    Raises:
        CheckpointError: A check failed; the message names parameter, param group or unit.
    """
    group_of = _groups(optimizer.groups)
    trained = {param.name: param.group for unit, param in present_params(units) if unit.kind == MASTER}
    for name in sorted(group_of.keys() | trained.keys()):
        if group_of.get(name) != trained.get(name):
            raise CheckpointError(f"parameter {name} is in param group {group_of.get(name)}, but its unit says {trained.get(name)}")
    known = {(name, param.group) for unit in units if unit.kind == MASTER for param in unit.params for name in (unit.name, param.name)}
    seen, single = set(), {param.name for _, param in present_params(units)}
    for record in optimizer.scalars:
        if record.values is None and record.unit not in single:
            raise CheckpointError(f"optimizer.scalars of unit {shown(record.unit)} is null, which is allowed for single parameters only")
        key = (record.unit, record.group)
        if key not in known or key in seen:
            raise CheckpointError(f"optimizer.scalars: group {record.group} of unit {shown(record.unit)} is unknown or occurs twice")
        seen.add(key)
    if len(set(optimizer.states)) != len(optimizer.states):
        raise CheckpointError(f"optimizer.states {shown(optimizer.states)} lists a name twice")
    params = set()
    for state in optimizer.params:
        if state.param not in names or state.param in params or not state.file.startswith(f"{PARAM_STATES}-"):
            raise CheckpointError(f"optimizer.params: {shown(state.param)} in {shown(state.file)} is unknown or occurs twice")
        params.add(state.param)


def _groups(groups: Iterable[GroupRecord]) -> dict[str, int]:
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in group.params:
            if name in group_of:
                raise CheckpointError(f"parameter {shown(name)} is in param groups {group_of[name]} and {number}")
            group_of[name] = number
    return group_of
