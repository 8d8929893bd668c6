"""Reads a checkpoint folder that DeepSpeed wrote at ZeRO stage 1, 2 or 3, without importing DeepSpeed.

Stages 1 and 2: each rank's file holds, per param group, its part of one flat fp32 array in which the group's parameters lie one behind
the other, each followed by its alignment padding. Stage 3: each rank's file holds flat arrays of sub-groups; of every parameter, each
rank has one part of equal length, the last one padded. Layout as produced by DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert.pickles import Inert, load_pickle, require_trust
from hf_zero.checkpoint.convert.source import FROZEN, Source, SourceParam, SourceTensor, joined, tensor_source
from hf_zero.checkpoint.tensor_file import Elsewhere
from hf_zero.errors import CheckpointError

_OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_KNOWN = {  # of the model file: what the engine keeps for itself
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "ds_config", "ds_version", "autoep_layers", "checkpoint_parallel_dimensions", "checkpoint_version",
}  # fmt: skip
_EXECUTION_KEYS = ("params", "fused", "foreach", "capturable")


def is_deepspeed(folder: Path) -> bool:
    """Whether ``folder`` is the folder of one tag of such a checkpoint."""
    return any(folder.glob("*_optim_states.pt")) or any(folder.glob("*mp_rank_*_model_states.pt"))


def read_deepspeed(folder: Path, trust_pickle: bool) -> Source:
    """Opens a checkpoint of DeepSpeed; tensors stay mapped files.

    Args:
        folder: The folder of the tag (``global_step100``).
        trust_pickle: The user allows pickles.

    Raises:
        CheckpointError: Pickles are not allowed, a rank's file is missing, or the layout is not understood; names the file.
    """
    files = sorted(folder.glob(_OPTIMIZER_FILES), key=_rank_of)
    models = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=_rank_of)
    if list(folder.glob("*mp_rank_01*")):
        raise CheckpointError(f"{folder} was written with model parallelism (mp_rank_01 is there), which is not converted")
    if not models:
        raise CheckpointError(f"{folder} has no *mp_rank_00_model_states.pt")
    require_trust(trust_pickle, models[0])
    if not files:
        raise CheckpointError(f"{folder} has no *_optim_states.pt: it was written at ZeRO stage 0, which is not converted")
    ranks = [_optimizer_part(load_pickle(path), path) for path in files]
    stage = _integer(ranks[0].get("zero_stage", 1))
    world = ranks[0].get("partition_count")
    world = max(world) if isinstance(world, (list, tuple)) else _integer(world)
    if world != len(files):
        raise CheckpointError(f"{folder} was written by {world} ranks, but has {len(files)} files *_optim_states.pt: some are missing")
    model_files = [load_pickle(path) for path in (models if stage == 3 else models[:1])]
    if stage == 3 and len(model_files) != world:
        raise CheckpointError(f"{folder} was written by {world} ranks, but has {len(model_files)} files *_model_states.pt")
    reader = _Stage3(folder, ranks, model_files) if stage == 3 else _Stage12(folder, ranks, model_files)
    return reader.source(stage).require_any()


def _rank_of(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _optimizer_part(data: Any, path: Path) -> Mapping[str, Any]:
    part = data.get("optimizer_state_dict") if isinstance(data, Mapping) else None
    # Stage 1 in bf16 with grad_accum_dtype fp32 has a class of its own, which writes the same arrays and no stage.
    if not isinstance(part, Mapping) or not {"zero_stage", "single_partition_of_fp32_groups"} & part.keys():
        raise CheckpointError(f"{path} is no optimizer file of ZeRO: it lacks optimizer_state_dict.zero_stage")
    return part


def _integer(value: Any) -> int:
    """A number, also of an enumeration whose class is not loaded."""
    if isinstance(value, Inert):
        value = value.arguments[0] if value.arguments else None
    if not isinstance(value, int):
        raise CheckpointError(f"a checkpoint of DeepSpeed has {value!r} where a whole number is expected")
    return int(value)


class _Reader:
    """What all stages have in common; a subclass finds the flat pieces of a parameter."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.models = models
        self.model = models[0]
        self.shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in self.model["param_shapes"]
        ]

    def source(self, stage: int) -> Source:
        """All of it."""
        aliases = {str(alias): str(name) for alias, name in dict(self.model.get("shared_params") or {}).items()}
        params = [param for group in range(len(self.shapes)) for param in self.trained(group)]
        names = {param.name for param in params}
        params += self.frozen(names | set(aliases))
        buffers = self.model.get("buffer_names") or []
        module = self.model.get("module") or {}
        found = [tensor_source(name, module[name]) for name in buffers if name in module]
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
            counters={name: int(self.model.get(name) or 0) for name in ("global_steps", "skipped_steps", "global_samples")},
            stage=stage,
        )

    def _optimizer_name(self) -> str:
        """As the configuration named it; DeepSpeed does not write the class of a client's optimizer."""
        section = (self.model.get("ds_config") or {}).get("optimizer") or {}
        return str(section.get("type") or "")

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """Hyper-parameters as rank 0 has them."""
        raise NotImplementedError

    def _scaler(self) -> Any:
        """The state of a dynamic loss scale, under the names of ours; None for a fixed one."""
        scaler = self.ranks[0].get("loss_scaler")
        state = scaler.state if isinstance(scaler, Inert) else {}
        if not state or "cur_hysteresis" not in state:
            return None
        good = int(state.get("cur_iter", 0)) - int(state.get("last_overflow_iter", -1)) - 1
        window = int(state.get("scale_window", 0)) or good + 1
        return {"scale": float(state["cur_scale"]), "dynamic": True, "good_steps": good % window, "tolerance": int(state["cur_hysteresis"])}

    def trained(self, group: int) -> list[SourceParam]:
        """The parameters of a group, with master and states."""
        found = []
        for name, shape in self.shapes[group].items():
            master, states, numbers = self.arrays(group, name, math.prod(shape))
            dtype = self._dtype(name, master.dtype)
            found.append(SourceParam(SourceTensor(name, shape, master), dtype, group, states, numbers))
        return found

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        """Master, flat states and single numbers of a parameter."""
        raise NotImplementedError

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        """Parameters that no optimizer trains."""
        raise NotImplementedError

    def _dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        value = (self.model.get("module") or {}).get(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
        config = self.model.get("ds_config") or {}
        for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if (config.get(key) or {}).get("enabled"):
                return dtype
        return master

    def _check(self, pieces: Sequence[torch.Tensor], name: str, numel: int) -> Elsewhere:
        row = joined(pieces, pieces[0].dtype if pieces else torch.float32)
        if row.numel() < numel:
            raise CheckpointError(f"{self.folder}: the ranks' files hold {row.numel()} of the {numel} elements of {name}")
        return row[:numel]


class _Stage12(_Reader):
    """Per group one flat array, divided over the ranks as it lies."""

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        base = self.ranks[0].get("base_optimizer_state")
        if not isinstance(base, Mapping) or "param_groups" not in base:
            raise CheckpointError(f"{self.folder} was written with zero_optimization.elastic_checkpoint true; save it again without")
        return list(base["param_groups"])

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        places = [self._place(rank, group, name, numel) for rank in range(len(self.ranks))]
        masters = [part["single_partition_of_fp32_groups"][group] for part in self.ranks]
        master = self._check(_cut(masters, places), name, numel)
        states: dict[str, Elsewhere] = {}
        numbers: dict[str, Any] = {}
        by_rank = [part["base_optimizer_state"]["state"].get(group, {}) for part in self.ranks]
        for key, value in by_rank[0].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                states[str(key)] = self._check(_cut([state[key] for state in by_rank], places), name, numel)
            else:
                numbers[str(key)] = value
        return master, states, numbers

    def _place(self, rank: int, group: int, name: str, numel: int) -> tuple[int, int]:
        """First element and length of a parameter's part in a rank's flat array."""
        mappings = self.ranks[rank].get("param_slice_mappings")
        if mappings:
            address = mappings[group].get(name)
            if address is None:
                return 0, 0
            count, start = _address(address)
            return start, count
        start = self._offsets(group)[name] - rank * self._partition(group)
        low, high = max(0, start), min(self._partition(group), start + numel)
        return low, max(0, high - low)

    def _partition(self, group: int) -> int:
        return int(self.ranks[0]["single_partition_of_fp32_groups"][group].numel())

    def _offsets(self, group: int) -> dict[str, int]:
        paddings = self.ranks[0].get("param_alignment_paddings")
        offsets, end = {}, 0
        for position, (name, shape) in enumerate(self.shapes[group].items()):
            offsets[name] = end
            end += math.prod(shape) + (int(paddings[group][position]) if paddings else 0)
        return offsets

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        module, buffers = self.model.get("module") or {}, set(self.model.get("buffer_names") or [])
        left = {name: value for name, value in module.items() if name not in taken | buffers and isinstance(value, torch.Tensor)}
        fragments = self.model.get("frozen_param_fragments") or {}
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            left[name] = fragments[name].reshape(tuple(shape))
        return [SourceParam(tensor_source(name, value), value.dtype) for name, value in left.items()]


def _address(address: Any) -> tuple[int, int]:
    """(numel, start) of a ``fragment_address``, a named tuple or data class that is not loaded."""
    if isinstance(address, Inert):
        if len(address.arguments) >= 2:
            return int(address.arguments[0]), int(address.arguments[1])
        return int(address.state["numel"]), int(address.state["start"])
    return int(address[0]), int(address[1])


def _cut(flats: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [flat[start : start + count] for flat, (start, count) in zip(flats, places, strict=True) if count]


class _Stage3(_Reader):
    """Of every parameter each rank has a part of equal length; the parts of a rank lie in sub-groups, one behind the other."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(folder, ranks, models)
        self._starts: dict[str, int] = {}  # first element of a parameter's part, over all sub-groups
        end = 0
        for group in self.shapes:
            for name, shape in group.items():
                self._starts[name] = end
                end += self._part_numel(math.prod(shape))
        self._lengths = [int(flat.numel()) for flat in ranks[0]["fp32_flat_groups"]]
        if sum(self._lengths) < end:
            raise CheckpointError(f"{folder}: the sub-groups hold {sum(self._lengths)} elements per rank, the parameters need {end}")

    def _part_numel(self, numel: int) -> int:
        return math.ceil(numel / len(self.ranks))

    def _state(self, rank: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.ranks[rank]["optimizer_state_dict"]
        return found

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return list(self._state(0)["param_groups"])[: len(self.shapes)]

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        start, count = self._starts[name], self._part_numel(numel)
        masters = [part["fp32_flat_groups"] for part in self.ranks]
        master = self._check([piece for flats in masters for piece in self._pieces(flats, start, count)], name, numel)
        states: dict[str, Elsewhere] = {}
        numbers: dict[str, Any] = {}
        by_rank = [self._sub_groups(rank) for rank in range(len(self.ranks))]
        first = self._sub_group_of(start)
        for key, value in by_rank[0][first].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                flats_of = [[state[key] for state in sub_groups] for sub_groups in by_rank]
                states[str(key)] = self._check([piece for flats in flats_of for piece in self._pieces(flats, start, count)], name, numel)
            else:
                numbers[str(key)] = value
        return master, states, numbers

    def _sub_groups(self, rank: int) -> list[Mapping[str, Any]]:
        """States by sub-group; the base optimizer counts one parameter per sub-group."""
        state = self._state(rank)["state"]
        return [state.get(number, {}) for number in range(len(self._lengths))]

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
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
            row = self._check(pieces, name, math.prod(shape))
            found.append(SourceParam(SourceTensor(name, tuple(shape), row), row.dtype, FROZEN))
        return found
