"""Read a universal checkpoint: a folder that DeepSpeed's ``ds_to_universal`` made of a checkpoint of ZeRO stage 1, 2 or 3.

It has the model files of that checkpoint and a folder ``zero``. Each parameter has a folder there, with the master in ``fp32.pt`` and one
file for each optimizer state. Stages 1 and 2 write a dict with the tensor, and ``step.pt``; stage 3 writes flat tensors, and its steps are
in ``zero/optimizer_state.pt``, as the hyper-parameters and the loss scaler of all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.convert import source
from hf_zero.checkpoint.convert.deepspeed_reader import Reader, plain_value
from hf_zero.checkpoint.convert.source import Source, SourceParam
from hf_zero.checkpoint.convert.torch_files import load_torch_file
from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

_PARAMS = "zero"
_STATE_FILE = "optimizer_state.pt"
_MASTER, _STEP = "fp32", "step"
_COMPARED = 2**16  # elements at either end of a parameter


def is_universal(folder: Path) -> bool:
    """Return whether ``folder`` is a universal checkpoint."""
    return (folder / _PARAMS).is_dir()


def read_universal(folder: Path, models: Sequence[Mapping[str, Any]]) -> Source:
    """Open a universal checkpoint as a conversion's source; its tensors are views of mapped files.

    Args:
        folder: The folder that ``ds_to_universal`` wrote (``global_step100_universal``).
        models: Contents of its files ``*_model_states.pt``, in the order of ranks.

    Raises:
        CheckpointError: A file is missing, or its content is not what DeepSpeed writes; the message names the file.
    """
    path = folder / _PARAMS / _STATE_FILE
    state = source.mapping(load_torch_file(path), path.name)
    stage = source.integer(plain_value(state, "zero_stage", 1), "zero_stage", 1)
    if stage == 3 and len(models) != (world := source.integer(plain_value(state, "partition_count", 1), "partition_count", 1)):
        raise CheckpointError(
            f"{folder} is of a run on {world} ranks, but has {len(models)} files *_model_states.pt, and stage 3 writes one per rank. Copy "
            "the complete folder"
        )
    return _Universal(folder, [state], models if stage == 3 else models[:1], stage).source(stage)


class _Universal(Reader):
    """A reader of a universal checkpoint; ``ranks`` has the one file that describes the optimizer."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]], stage: int) -> None:
        super().__init__(folder, ranks, models)
        self._stage = stage

    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        groups = source.sequence(self.ranks[0].get("param_groups"), "param_groups")
        return [source.mapping(group, "param_groups") for group in groups]

    def param_group(self, index: int) -> int:
        """Return the param group of an entry of ``param_shapes``, which is one sub-group (``sub_group_size``) at stage 3."""
        if self._stage < 3:
            return index
        for position, group in enumerate(self.param_groups()):
            if index in source.sequence(group.get("params") or [], "params"):
                return position
        raise CheckpointError(f"{self.folder}: no param group of {_PARAMS}/{_STATE_FILE} names the sub-group {index} of param_shapes")

    def frozen(self, taken: set[str]) -> list[SourceParam]:
        return self.frozen_parts() if self._stage == 3 else self.frozen_whole(taken)

    def arrays(self, group: int, name: str, numel: int) -> tuple[Elsewhere, dict[str, Elsewhere], dict[str, Any]]:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{self.folder}: param_shapes has the parameter {name!r}, which is no name of a folder")
        folder = self.folder / _PARAMS / name
        master = self._row(folder / f"{_MASTER}.pt", name, numel)
        self._check_place(master, name, numel)
        files = [path for path in sorted(folder.glob("*.pt")) if path.stem not in (_MASTER, _STEP)]
        states = {path.stem: self._row(path, name, numel) for path in files}
        return master, states, {_STEP: self._step(group, folder)} if states else {}

    def _check_place(self, master: Elsewhere, name: str, numel: int) -> None:
        """Check that a master is the weight in the model file, which is whole at stages 1 and 2.

        ``ds_to_universal`` cuts parameters at the places in ``param_slice_mappings``, which are wrong with ``round_robin_gradients``.
        """
        value = self.module.get(name)
        if self._stage == 3 or not isinstance(value, torch.Tensor) or value.numel() != numel:
            return
        count = min(numel, _COMPARED)
        for first in {0, numel - count}:
            found = master[first : first + count].fetch()
            if not torch.equal(found.to(value.dtype), value.reshape(-1)[first : first + count]):
                raise CheckpointError(
                    f"{self.folder}: the master of {name} is not the weight in the model file, so ds_to_universal cut the parameters at "
                    "wrong places (as with zero_optimization.round_robin_gradients). Convert the checkpoint that ds_to_universal read"
                )

    def _row(self, path: Path, name: str, numel: int) -> Elsewhere:
        """Return the elements in a parameter's file; at stage 3 the padding of the parts may follow them."""
        value = load_torch_file(path)
        value = value.get("param") if isinstance(value, Mapping) else value
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path} holds {shown(value)}, expected a tensor")
        return self.checked([value.reshape(-1)], name, numel, len(self.models) if self._stage == 3 else 0)

    def _step(self, group: int, folder: Path) -> Any:
        """Return the number of steps behind a parameter's optimizer states."""
        path = folder / f"{_STEP}.pt"
        if path.is_file():
            found = load_torch_file(path)
        else:
            state = source.mapping(self.ranks[0].get("optimizer_state_dict") or {}, "optimizer_state_dict").get("state")
            found = source.mapping(source.mapping(state or {}, "state").get(group) or {}, "state").get(_STEP)
        if found is None:
            raise CheckpointError(
                f"{folder} has optimizer states, but their step is neither in {path.name} nor in {_PARAMS}/{_STATE_FILE}. Copy the "
                "complete folder, or convert the checkpoint that ds_to_universal read"
            )
        source.number(found, f"the step of {folder.name}")
        return found
