"""Read a checkpoint folder that DeepSpeed wrote at ZeRO stage 1, 2 or 3, or its `ds_to_universal` made, without importing DeepSpeed.

Stages 1 and 2: the parameters of a param group are concatenated to one flat fp32 array, each followed by its alignment padding, and each
rank's file holds one part of this array. Stage 3: each parameter is divided into parts of equal length, one per rank, with padding after
the last; each rank's file holds its parts, concatenated to one flat array per sub-group. DeepSpeed 0.14 to 0.19 write these layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert import source
from hf_zero.checkpoint.convert.deepspeed_reader import Reader, plain_value
from hf_zero.checkpoint.convert.deepspeed_universal import is_universal, read_universal
from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.source import Source, SourceParam
from hf_zero.checkpoint.convert.torch_files import load_torch_file, require_trust
from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import reading

_OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"


def read_deepspeed(folder: Path, trust_pickle: bool) -> Source:
    """Open a DeepSpeed checkpoint as a conversion's source; its tensors are views of mapped files.

    Args:
        folder: The folder of the tag (``global_step100``).
        trust_pickle: Whether the user allows reading pickles.

    Raises:
        CheckpointError: Pickles are not allowed, a rank's file is missing, or the layout is unknown; the message names the file.
    """
    with reading(folder, CheckpointError):
        return _read(folder, trust_pickle).require_any()


def _read(folder: Path, trust_pickle: bool) -> Source:
    files = sorted(folder.glob(_OPTIMIZER_FILES), key=_rank_of)
    models = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=_rank_of)
    if list(folder.glob("*mp_rank_01*")):
        raise CheckpointError(f"{folder} was written with model parallelism (mp_rank_01 is there), which is not converted")
    if not models:
        raise CheckpointError(f"{folder} has no *mp_rank_00_model_states.pt")
    require_trust(trust_pickle, models[0])
    if not files:
        if is_universal(folder):
            return read_universal(folder, [source.mapping(load_torch_file(path), path.name) for path in models])
        raise CheckpointError(f"{folder} has no *_optim_states.pt: it was written at ZeRO stage 0, which is not converted")
    ranks = [_optimizer_part(load_torch_file(path), path) for path in files]
    for path, rank in zip(files, ranks, strict=True):
        if any(plain_value(rank, key) != plain_value(ranks[0], key) for key in ("zero_stage", "partition_count")):
            raise CheckpointError(f"{path} has another stage or number of ranks than {files[0].name}, so it belongs to another checkpoint")
    stage = source.integer(plain_value(ranks[0], "zero_stage", 1), "zero_stage", 1)
    counts = plain_value(ranks[0], "partition_count")
    world = (
        max(source.integers(counts, "partition_count"))
        if isinstance(counts, (list, tuple))
        else source.integer(counts, "partition_count", 1)
    )
    if world != len(files):
        raise CheckpointError(
            f"{folder} was written by {world} ranks, but has {len(files)} files *_optim_states.pt. Copy the complete folder"
        )
    if stage > 3 or [_rank_of(path) for path in files] != list(range(world)):
        raise CheckpointError(
            f"{folder} was written at stage {stage}, with files of the ranks {[_rank_of(path) for path in files]}; expected a "
            "stage from 1 to 3, and one file per rank"
        )
    model_files = [source.mapping(load_torch_file(path), path.name) for path in (models if stage == 3 else models[:1])]
    if stage == 3 and len(model_files) != world:
        raise CheckpointError(
            f"{folder} was written by {world} ranks, but has {len(model_files)} files *_model_states.pt, and stage 3 writes "
            "one per rank. Copy the complete folder"
        )
    reader = _Stage3(folder, ranks, model_files) if stage == 3 else _Stage12(folder, ranks, model_files)
    return reader.source(stage)


def _rank_of(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _optimizer_part(data: Any, path: Path) -> Mapping[str, Any]:
    part = data.get("optimizer_state_dict") if isinstance(data, Mapping) else None
    # DeepSpeed's optimizer for stage 1 in bf16 with grad_accum_dtype fp32 writes the same arrays, but no zero_stage.
    if not isinstance(part, Mapping) or not {"zero_stage", "single_partition_of_fp32_groups"} & part.keys():
        raise CheckpointError(f"{path} is not an optimizer file of ZeRO: it lacks optimizer_state_dict.zero_stage")
    return part


class _Stage12(Reader):
    """A reader of stages 1 and 2: one flat array per param group, of which each rank has a contiguous part."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(folder, ranks, models)
        self._masters = [source.rows(part["single_partition_of_fp32_groups"], "single_partition_of_fp32_groups") for part in ranks]
        for rows in self._masters:  # the last rank's array may lack the padding
            if any(row.numel() > first.numel() for row, first in zip(rows, self._masters[0], strict=True)):
                raise CheckpointError(f"{folder}: a rank's flat arrays are longer than those of rank 0")
        for rows in self._masters:
            if len(rows) != len(self.shapes):
                raise CheckpointError(f"{folder}: the ranks' files have {len(rows)} groups, param_shapes has {len(self.shapes)}")
        lost = [name for group in self.shapes for name in group if self.module and name not in self.module]
        if lost:
            raise CheckpointError(f"{folder}: param_shapes lists {lost[0]}, but module has no such parameter")
        self._check_mappings()
        self._starts = [self._offsets(group) for group in range(len(self.shapes))]  # of parameters in the whole flat arrays
        self._by_mappings = bool(ranks[0].get("param_slice_mappings")) and self._mappings_are_right()

    def _mappings_are_right(self) -> bool:
        """Return whether ``param_slice_mappings`` has the right places of parameters; otherwise they follow from ``param_shapes``.

        With ``round_robin_gradients`` DeepSpeed writes the former in the order of the model's parameters, and the arrays in another. Files
        of older versions lack the paddings without which the latter are wrong. The weights in ``module`` decide.

        Raises:
            CheckpointError: Neither gives the weights of the module.
        """
        named = [(group, name, math.prod(shape)) for group, shapes in enumerate(self.shapes) for name, shape in shapes.items()]
        if all(self._place(rank, *one, True) == self._place(rank, *one, False) for one in named for rank in range(len(self.ranks))):
            return True
        for by_mappings in (True, False):
            if all(self._is_of_module(*one, by_mappings) for one in named):
                return by_mappings
        raise CheckpointError(
            f"{self.folder}: param_slice_mappings and param_shapes give parameters different places (as with "
            "zero_optimization.round_robin_gradients), and the masters at neither of them are the weights in module. Save again with "
            "round_robin_gradients false"
        )

    def _is_of_module(self, group: int, name: str, numel: int, by_mappings: bool) -> bool:
        value, places = self.module.get(name), [self._place(rank, group, name, numel, by_mappings) for rank in range(len(self.ranks))]
        pieces = _cut([rows[group] for rows in self._masters], places)
        master = torch.cat(pieces) if pieces else torch.empty(0)
        return isinstance(value, torch.Tensor) and torch.equal(master.to(value.dtype), value.reshape(-1))

    def _check_mappings(self) -> None:
        """Check that each parameter has a place inside of the flat arrays and that no two places overlap."""
        named: list[set[Any]] = [set() for _ in self.shapes]
        for rank, part in enumerate(self.ranks):
            for group, addresses in enumerate(part.get("param_slice_mappings") or ()):
                self._check_addresses(rank, group, source.mapping(addresses, "param_slice_mappings"))
                named[group] |= addresses.keys()
        for group, names in enumerate(named):
            if names and names != self.shapes[group].keys():
                raise CheckpointError(f"{self.folder}: param_slice_mappings and param_shapes of group {group} list different parameters")

    def _check_addresses(self, rank: int, group: int, addresses: Mapping[Any, Any]) -> None:
        end = 0
        for start, count in sorted((start, count) for count, start in map(_address, addresses.values())):
            if start < end or count < 0 or start + count > self._masters[rank][group].numel():
                raise CheckpointError(
                    f"{self.folder}: param_slice_mappings of rank {rank} overlap, or exceed its flat array of group {group}"
                )
            end = start + count

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        base = self.ranks[0].get("base_optimizer_state")
        if not isinstance(base, Mapping) or "param_groups" not in base:
            raise CheckpointError(
                f"{self.folder} was written with zero_optimization.elastic_checkpoint true; set it to false and save again"
            )
        return [source.mapping(group, "param_groups") for group in source.sequence(base["param_groups"], "param_groups")]

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        places = [self._place(rank, group, name, numel, self._by_mappings) for rank in range(len(self.ranks))]
        master = self.checked(_cut([rows[group] for rows in self._masters], places), name, numel)
        by_rank = [source.mapping(part["base_optimizer_state"]["state"].get(group, {}), "state") for part in self.ranks]
        flat, numbers = self._numbers(by_rank, name)
        rows = {key: source.rows([state[key] for state in by_rank], f"{key} of {name}") for key in flat}
        return master, {str(key): self.checked(_cut(found, places), name, numel) for key, found in rows.items()}, numbers

    def _place(self, rank: int, group: int, name: str, numel: int, by_mappings: bool) -> tuple[int, int]:
        """Return (first element, number of elements) of a parameter's part in a rank's flat array; (0, 0) if it has no part."""
        if by_mappings:
            address = self.ranks[rank]["param_slice_mappings"][group].get(name)
            count, start = (0, 0) if address is None else _address(address)
            return start if count else 0, count
        start = self._starts[group][name] - rank * self._partition(group)
        low, high = max(0, start), min(self._partition(group), start + numel)
        return (low, high - low) if high > low else (0, 0)

    def _partition(self, group: int) -> int:
        return int(self._masters[0][group].numel())

    def _offsets(self, group: int) -> dict[str, int]:
        paddings = self.ranks[0].get("param_alignment_paddings")
        offsets, end = {}, 0
        for position, (name, shape) in enumerate(self.shapes[group].items()):
            offsets[name] = end
            end += math.prod(shape) + (source.integer(paddings[group][position], "param_alignment_paddings") if paddings else 0)
        return offsets

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        return self.frozen_whole(taken)


def _address(address: Any) -> tuple[int, int]:
    """Return (numel, start) of a ``fragment_address``, a named tuple or dataclass whose class is not loaded."""
    if isinstance(address, Inert):
        named = address.state
        address = address.arguments if len(address.arguments) >= 2 else (named["numel"], named["start"])
    return source.integer(address[0], "numel of a fragment"), source.integer(address[1], "start of a fragment")


def _cut(flats: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [flat[start : start + count] for flat, (start, count) in zip(flats, places, strict=True) if count]


class _Stage3(Reader):
    """A reader of stage 3: each rank has an equal part of each parameter; its parts are concatenated to one array per sub-group."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(folder, ranks, models)
        self._starts: dict[str, int] = {}  # first element of a parameter's part in a rank's concatenated sub-groups
        end = 0
        for group in self.shapes:
            for name, shape in group.items():
                self._starts[name] = end
                end += self._part_numel(math.prod(shape))
        self._masters = [source.rows(part["fp32_flat_groups"], "fp32_flat_groups") for part in ranks]
        self._lengths = [row.numel() for row in self._masters[0]]
        if any([row.numel() for row in rows] != self._lengths for rows in self._masters):
            raise CheckpointError(f"{folder}: the ranks' sub-groups differ in length")
        if sum(self._lengths) != end:
            raise CheckpointError(f"{folder}: the sub-groups hold {sum(self._lengths)} elements per rank, but the parameters need {end}")
        self._group_of = self._groups_of_sub_groups()

    def _groups_of_sub_groups(self) -> list[int]:
        """Return the param group of each sub-group: ``param_shapes`` has an entry for each of them (``sub_group_size``)."""
        lists = [source.sequence(group.get("params") or [], "params") for group in self.param_groups()]
        found = {number: index for index, numbers in enumerate(lists) for number in numbers}
        if found.keys() != set(range(len(self.shapes))):
            raise CheckpointError(
                f"{self.folder}: the param groups name the sub-groups {sorted(found)}, but param_shapes has {len(self.shapes)} of them"
            )
        return [found[number] for number in range(len(self.shapes))]

    def param_group(self, index: int) -> int:
        return self._group_of[index]

    def _part_numel(self, numel: int) -> int:
        return math.ceil(numel / len(self.ranks))

    def _state(self, rank: int) -> Mapping[str, Any]:
        return source.mapping(self.ranks[rank]["optimizer_state_dict"], "optimizer_state_dict")

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        groups = source.sequence(self._state(0)["param_groups"], "param_groups")
        return [source.mapping(group, "param_groups") for group in groups]

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        start, count = self._starts[name], self._part_numel(numel)
        master = self.checked(
            [piece for flats in self._masters for piece in self._pieces(flats, start, count)], name, numel, len(self.ranks)
        )
        by_rank = [self._sub_groups(rank) for rank in range(len(self.ranks))]
        first = self._sub_group_of(start)
        flat, numbers = self._numbers([sub_groups[first] for sub_groups in by_rank], name)
        states: dict[str, Elsewhere] = {}
        for key in flat:
            flats_of = [source.rows([state[key] for state in sub_groups], f"{key} of {name}") for sub_groups in by_rank]
            pieces = [piece for flats in flats_of for piece in self._pieces(flats, start, count)]
            states[str(key)] = self.checked(pieces, name, numel, len(self.ranks))
        return master, states, numbers

    def _sub_groups(self, rank: int) -> list[Mapping[str, Any]]:
        """Return a rank's optimizer states of each sub-group, which is one parameter of DeepSpeed's base optimizer."""
        state = source.mapping(self._state(rank)["state"], "state")
        return [source.mapping(state.get(number, {}), "state") for number in range(len(self._lengths))]

    def _sub_group_of(self, start: int) -> int:
        end = 0
        for number, length in enumerate(self._lengths):
            end += length
            if start < end:
                return number
        return len(self._lengths) - 1

    def _pieces(self, flats: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
        pieces, begin = [], 0
        for flat in flats:
            low, high = max(start, begin), min(start + count, begin + flat.numel())
            if low < high:
                pieces.append(flat[low - begin : high - begin])
            begin += flat.numel()
        return pieces

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        return self.frozen_parts()
