"""Read a checkpoint folder that DeepSpeed wrote at ZeRO stage 1, 2 or 3, without importing DeepSpeed.

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
from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.source import FROZEN, Source, SourceParam, SourceTensor, joined, tensor_source
from hf_zero.checkpoint.convert.torch_files import load_torch_file, require_trust
from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import reading, shown

_OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_KNOWN = {  # keys of the model file that the engine writes; other keys are the script's client_state
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "ds_config", "ds_version", "autoep_layers", "checkpoint_parallel_dimensions", "checkpoint_version",
}  # fmt: skip
# State of DeepSpeed's dynamic loss scaler, with its initial values.
_SCALER = {"cur_iter": 0, "last_overflow_iter": -1, "scale_window": 0, "cur_hysteresis": 1}
_EXECUTION_KEYS = ("params", "fused", "foreach", "capturable")


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
        raise CheckpointError(f"{folder} has no *_optim_states.pt: it was written at ZeRO stage 0, which is not converted")
    ranks = [_optimizer_part(load_torch_file(path), path) for path in files]
    for path, rank in zip(files, ranks, strict=True):
        if any(_value(rank, key) != _value(ranks[0], key) for key in ("zero_stage", "partition_count")):
            raise CheckpointError(f"{path} has another stage or number of ranks than {files[0].name}, so it belongs to another checkpoint")
    stage = source.integer(_value(ranks[0], "zero_stage", 1), "zero_stage", 1)
    counts = _value(ranks[0], "partition_count")
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


def _value(part: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return ``part[key]``, or the value of an enum member whose class is not loaded."""
    value = part.get(key, default)
    return value.arguments[0] if isinstance(value, Inert) and value.arguments else value


def _rank_of(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _optimizer_part(data: Any, path: Path) -> Mapping[str, Any]:
    part = data.get("optimizer_state_dict") if isinstance(data, Mapping) else None
    # DeepSpeed's optimizer for stage 1 in bf16 with grad_accum_dtype fp32 writes the same arrays, but no zero_stage.
    if not isinstance(part, Mapping) or not {"zero_stage", "single_partition_of_fp32_groups"} & part.keys():
        raise CheckpointError(f"{path} is not an optimizer file of ZeRO: it lacks optimizer_state_dict.zero_stage")
    return part


class _Reader:
    """A reader of a DeepSpeed checkpoint; each subclass finds the pieces of a parameter in the layout of its stages."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.models = models
        self.model = models[0]
        self.shapes: list[dict[str, tuple[int, ...]]] = [
            {str(name): source.sizes(shape, f"the shape of {name}") for name, shape in source.mapping(group, "param_shapes").items()}
            for group in source.sequence(self.model["param_shapes"], "param_shapes")
        ]
        self.module: Mapping[str, Any] = source.mapping(self.model.get("module") or {}, "module")
        for name, value in self.module.items():
            if not isinstance(value, torch.Tensor) and not str(name).endswith("_extra_state"):
                raise CheckpointError(f"{folder}: {name} is {shown(value)}, expected a tensor")
        if any(model.get("param_shapes") != self.model["param_shapes"] for model in models):
            raise CheckpointError(f"{folder}: the ranks' files *_model_states.pt have different param_shapes")

    def source(self, stage: int) -> Source:
        """Return the checkpoint as the source of a conversion."""
        shared = source.mapping(self.model.get("shared_params") or {}, "shared_params")
        aliases = {str(alias): str(name) for alias, name in shared.items()}
        lost = [alias for alias, name in aliases.items() if name in self.module and alias not in self.module]
        if lost:
            raise CheckpointError(
                f"{self.folder}: shared_params lists {lost[0]!r} as {aliases[lost[0]]!r}, but the module has no such tensor"
            )
        params = [param for group in range(len(self.shapes)) for param in self.trained(group)]
        names = {param.name for param in params}
        params += self.frozen(names | set(aliases))
        buffers = source.sequence(self.model.get("buffer_names") or [], "buffer_names")
        found = [tensor_source(name, source.tensor(self.module.get(name), f"the buffer {name}")) for name in buffers]
        return Source(
            what=f"the DeepSpeed checkpoint {self.folder}",
            params=tuple(params),
            buffers=tuple(found),
            aliases=aliases,
            optimizer=self._optimizer_name(),
            groups=tuple({key: value for key, value in group.items() if key not in _EXECUTION_KEYS} for group in self.param_groups()),
            values={
                "scheduler": self.model.get("lr_scheduler"),
                "scaler": self._scaler(),
                "client_state": {key: value for key, value in self.model.items() if key not in _KNOWN},
            },
            counters={
                name: source.integer(self.model.get(name) or 0, name) for name in ("global_steps", "skipped_steps", "global_samples")
            },
            stage=stage,
        )

    def _config(self, key: str) -> Mapping[str, Any]:
        """Return section ``key`` of the run's DeepSpeed configuration; empty if there is none."""
        return source.mapping(source.mapping(self.model.get("ds_config") or {}, "ds_config").get(key) or {}, f"ds_config.{key}")

    def _optimizer_name(self) -> str:
        """Return the optimizer's name in the configuration; "" if the script made the optimizer, because then DeepSpeed writes no name."""
        return str(self._config("optimizer").get("type") or "")

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """Return the hyper-parameters of each param group on rank 0."""
        raise NotImplementedError

    def _scaler(self) -> Any:
        """Return the state of a dynamic loss scaler with the keys of hf_zero's loss scaler; None for a constant scale."""
        scaler = self.ranks[0].get("loss_scaler")
        if isinstance(scaler, Inert) and scaler.kind.endswith(".LossScaler"):
            return None
        if not isinstance(scaler, Inert) or not {"cur_scale", "cur_hysteresis"} <= scaler.state.keys():
            if scaler is not None or self.ranks[0].get("dynamic_loss_scale"):
                raise CheckpointError(f"{self.folder}: loss_scaler is {shown(scaler)}, expected a LossScaler or DynamicLossScaler")
            return None
        state = scaler.state
        numbers = {key: source.integer(state.get(key, default), key, -1) for key, default in _SCALER.items()}
        good = numbers["cur_iter"] - numbers["last_overflow_iter"] - 1
        window = numbers["scale_window"] or good + 1
        scale = source.number(state["cur_scale"], "cur_scale")
        return {"scale": scale, "dynamic": True, "good_steps": good % window, "tolerance": numbers["cur_hysteresis"]}

    def param_group(self, index: int) -> int:
        """Return the param group of an entry of ``param_shapes``."""
        return index

    def trained(self, group: int) -> list[SourceParam]:
        """Return the parameters of an entry of ``param_shapes`` with masters and optimizer states."""
        found = []
        for name, shape in self.shapes[group].items():
            master, states, numbers = self.arrays(group, name, math.prod(shape))
            dtype = self._dtype(name, master.dtype)
            found.append(SourceParam(SourceTensor(name, shape, master), dtype, self.param_group(group), states, numbers))
        return found

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        """Return a parameter's master, its states with one element per parameter element, and its single-number states."""
        raise NotImplementedError

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        """Return the parameters that no optimizer trains; ``taken`` has the names of the others."""
        raise NotImplementedError

    def _dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        value = self.module.get(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
        for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if self._config(key).get("enabled"):
                return dtype
        return master

    def _check(self, pieces: Sequence[torch.Tensor], name: str, numel: int, padding: int = 0) -> Elsewhere:
        """Return the concatenated pieces as a row of ``numel`` elements; raise CheckpointError unless at most ``padding`` more follow."""
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) > 1 or not all(dtype.is_floating_point or dtype.itemsize == 1 for dtype in dtypes):
            raise CheckpointError(
                f"{self.folder}: the ranks' files hold {name} as {sorted(map(str, dtypes))}, expected one floating-point or 8-bit dtype"
            )
        row = joined(pieces, pieces[0].dtype if pieces else torch.float32)
        if not numel <= row.numel() <= numel + padding:
            raise CheckpointError(f"{self.folder}: the ranks' files hold {row.numel()} of the {numel} elements of {name}")
        return row[:numel]

    def _numbers(self, by_rank: Sequence[Mapping[Any, Any]], name: str) -> tuple[list[str], dict[str, Any]]:
        """Return the names of the states with one element per parameter element, and the single-number states, equal on all ranks."""
        flat, numbers = [], {}
        for state in by_rank:
            if state.keys() != by_rank[0].keys():
                raise CheckpointError(f"{self.folder}: the ranks keep different optimizer states for {name}")
        longest = max((value.numel() for value in by_rank[0].values() if isinstance(value, torch.Tensor)), default=0)
        for key, value in by_rank[0].items():
            # A step may be a tensor of shape (1,).
            if isinstance(value, torch.Tensor) and value.ndim and not (value.numel() == 1 < longest):
                flat.append(key)
                continue
            number = source.number(value, f"{key} of {name}")
            if any(source.number(state[key], f"{key} of {name}") != number for state in by_rank):
                raise CheckpointError(f"{self.folder}: the ranks have different values of {key} for {name}")
            numbers[str(key)] = value
        return flat, numbers


class _Stage12(_Reader):
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
        master = self._check(_cut([rows[group] for rows in self._masters], places), name, numel)
        by_rank = [source.mapping(part["base_optimizer_state"]["state"].get(group, {}), "state") for part in self.ranks]
        flat, numbers = self._numbers(by_rank, name)
        rows = {key: source.rows([state[key] for state in by_rank], f"{key} of {name}") for key in flat}
        return master, {str(key): self._check(_cut(found, places), name, numel) for key, found in rows.items()}, numbers

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
        buffers = set(self.model.get("buffer_names") or [])
        left = {name: value for name, value in self.module.items() if name not in taken | buffers and isinstance(value, torch.Tensor)}
        fragments = self.model.get("frozen_param_fragments") or {}
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            left[name] = source.tensor(fragments[name], name).reshape(source.sizes(shape, f"the shape of {name}"))
        return [SourceParam(tensor_source(name, value), value.dtype) for name, value in left.items()]


def _address(address: Any) -> tuple[int, int]:
    """Return (numel, start) of a ``fragment_address``, a named tuple or dataclass whose class is not loaded."""
    if isinstance(address, Inert):
        named = address.state
        address = address.arguments if len(address.arguments) >= 2 else (named["numel"], named["start"])
    return source.integer(address[0], "numel of a fragment"), source.integer(address[1], "start of a fragment")


def _cut(flats: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [flat[start : start + count] for flat, (start, count) in zip(flats, places, strict=True) if count]


class _Stage3(_Reader):
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
        master = self._check(
            [piece for flats in self._masters for piece in self._pieces(flats, start, count)], name, numel, len(self.ranks)
        )
        by_rank = [self._sub_groups(rank) for rank in range(len(self.ranks))]
        first = self._sub_group_of(start)
        flat, numbers = self._numbers([sub_groups[first] for sub_groups in by_rank], name)
        states: dict[str, Elsewhere] = {}
        for key in flat:
            flats_of = [source.rows([state[key] for state in sub_groups], f"{key} of {name}") for sub_groups in by_rank]
            pieces = [piece for flats in flats_of for piece in self._pieces(flats, start, count)]
            states[str(key)] = self._check(pieces, name, numel, len(self.ranks))
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
        found = []
        for name, sizes in (self.model.get("frozen_param_shapes") or {}).items():
            pieces = [source.tensor(model["frozen_param_fragments"][name], name).reshape(-1) for model in self.models]
            shape = source.sizes(sizes, f"the shape of {name}")
            row = self._check(pieces, name, math.prod(shape), len(self.ranks))
            found.append(SourceParam(SourceTensor(str(name), shape, row), row.dtype, FROZEN))
        return found
