"""Read the parts that all layouts of a DeepSpeed checkpoint share: the model file, counters, loss scaler, tied and frozen parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert import source
from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.source import FROZEN, Source, SourceParam, SourceTensor, joined, tensor_source
from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

_KNOWN = {  # keys of the model file that the engine writes; other keys are the script's client_state
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "ds_config", "ds_version", "autoep_layers", "checkpoint_parallel_dimensions", "checkpoint_version",
}  # fmt: skip
# State of DeepSpeed's dynamic loss scaler, with its initial values.
_SCALER = {"cur_iter": 0, "last_overflow_iter": -1, "scale_window": 0, "cur_hysteresis": 1}
_EXECUTION_KEYS = ("params", "fused", "foreach", "capturable")


def plain_value(part: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return ``part[key]``, or the value of an enum member whose class is not loaded."""
    value = part.get(key, default)
    return value.arguments[0] if isinstance(value, Inert) and value.arguments else value


class Reader:
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

    def frozen_whole(self, taken: set[str]) -> list[SourceParam]:
        """Return the frozen parameters of stages 1 and 2, which the model file has whole."""
        buffers = set(self.model.get("buffer_names") or [])
        left = {name: value for name, value in self.module.items() if name not in taken | buffers and isinstance(value, torch.Tensor)}
        fragments = self.model.get("frozen_param_fragments") or {}
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            left[name] = source.tensor(fragments[name], name).reshape(source.sizes(shape, f"the shape of {name}"))
        return [SourceParam(tensor_source(name, value), value.dtype) for name, value in left.items()]

    def frozen_parts(self) -> list[SourceParam]:
        """Return the frozen parameters of stage 3, of which each rank's model file has an equal part."""
        found = []
        for name, sizes in (self.model.get("frozen_param_shapes") or {}).items():
            pieces = [source.tensor(model["frozen_param_fragments"][name], name).reshape(-1) for model in self.models]
            shape = source.sizes(sizes, f"the shape of {name}")
            row = self.checked(pieces, name, math.prod(shape), len(self.models))
            found.append(SourceParam(SourceTensor(str(name), shape, row), row.dtype, FROZEN))
        return found

    def _dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        value = self.module.get(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
        for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if self._config(key).get("enabled"):
                return dtype
        return master

    def checked(self, pieces: Sequence[torch.Tensor], name: str, numel: int, padding: int = 0) -> Elsewhere:
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
