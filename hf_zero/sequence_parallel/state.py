"""The sequence-parallel groups of a run, as the ``mpu`` object that scripts hand from one call to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_zero.comm.mpu import model_parallel_group
from hf_zero.comm.recorded import open_collectives
from hf_zero.comm.topology import SequenceAxes, join_sequence, sequence_axes
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sequence_parallel.forward import SlicedForwards, SliceSettings, is_bound


class SequenceParallel:
    """Groups of ranks that hold slices of the same sequences; what ``register_with_transformers`` returns and ``initialize`` takes.

    The methods have the names of DeepSpeed's module ``parallel_state_sp``.

    Attributes:
        axes: The groups.
        settings: What to do with transformers models; None for scripts that place ``DistributedAttention`` themselves.
    """

    def __init__(self, axes: SequenceAxes, settings: SliceSettings | None = None) -> None:
        self.axes = axes
        self.settings = settings

    def bind(self, model: nn.Module) -> None:
        """Makes the forwards of ``model`` forwards over slices, if it is for this object to do."""
        if self.settings is not None and not is_bound(model, self.settings):
            SlicedForwards(model, open_collectives(self.axes.sequence), self.settings)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's samples."""
        return self.axes.sequence.group

    def get_sequence_parallel_world_size(self) -> int:
        """How many they are."""
        return self.axes.sequence.world

    def get_sequence_parallel_rank(self) -> int:
        """Which slice is this rank's."""
        return self.axes.sequence.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """All groups together: what ZeRO shards over."""
        return self.axes.joint.group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Number of ranks of all groups."""
        return self.axes.joint.world

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.axes.joint.rank

    def get_data_parallel_world_size(self) -> int:
        """Number of groups: how many samples are trained on at a time."""
        return self.axes.groups

    def get_data_parallel_rank(self) -> int:
        """Which of them is this rank's."""
        return self.axes.place


def sequence_parallel_of(config: Mapping[str, Any], mpu: Any, mesh: Any = None) -> SequenceParallel | None:
    """The sequence-parallel groups that an engine is asked to have; None for none. Collective.

    Args:
        config: The configuration as the user gave it: ``sequence_parallel_size`` and ``data_parallel_size``.
        mpu: The object given to ``initialize``, which wins, or None.
        mesh: (data-parallel size, sequence-parallel size), DeepSpeed's ``mesh_param``, or None.

    Raises:
        ConfigError: What they say does not agree, or does not fit the ranks.
        UnsupportedError: Tensor parallelism is asked for too.
    """
    size, data = requested_slices(config), _number(config.get("data_parallel_size"))
    if mesh is not None:
        data, size = _mesh_sizes(mesh, size)
    found = _from_mpu(mpu)
    if found is None and size > 1:
        found = SequenceParallel(sequence_axes(size))
    if found is None:
        return None
    axes = found.axes
    if size not in (1, axes.sequence.world):
        raise ConfigError(
            f"sequence_parallel_size is {size}, and the sequence-parallel group of the mpu object has {axes.sequence.world} ranks"
        )
    if size > 1 and data is not None and data != axes.groups:
        raise ConfigError(
            f"data_parallel_size is {data} and sequence_parallel_size {axes.sequence.world}, which makes {data * axes.sequence.world} "
            f"ranks; there are {axes.joint.world}. Set data_parallel_size to {axes.groups}, or leave it out"
        )
    section = config.get("tensor_parallel")
    tensor = section.get("autotp_size") if isinstance(section, Mapping) else None
    if tensor not in (None, 0, 1, "0", "1"):
        raise UnsupportedError(
            f"tensor_parallel.autotp_size is {tensor} and sequences are divided over {axes.sequence.world} ranks: the two cannot be "
            "combined; zero_optimization.stage 3 shards the parameters over all ranks of both axes"
        )
    return found


def requested_slices(config: Mapping[str, Any]) -> int:
    """``sequence_parallel_size`` of a configuration as the user gave it; 1 where it asks for none."""
    return max(1, _number(config.get("sequence_parallel_size")) or 1)


def _number(value: Any) -> int | None:
    """``value`` of a configuration as a whole number; None for what is none: the schema says what is wrong with it."""
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


def _mesh_sizes(mesh: Any, size: int) -> tuple[int, int]:
    try:
        data, sequence = (int(part) for part in mesh)
    except (TypeError, ValueError):
        raise ConfigError(f"mesh_param is {mesh!r}; (data-parallel size, sequence-parallel size) is allowed") from None
    if size not in (1, sequence):
        raise ConfigError(f"mesh_param is {mesh!r} and sequence_parallel_size {size}; make them equal")
    return data, sequence


def _from_mpu(mpu: Any) -> SequenceParallel | None:
    if isinstance(mpu, SequenceParallel):
        return mpu
    if not hasattr(mpu, "get_sequence_parallel_group") or mpu.get_sequence_parallel_world_size() <= 1:
        return None
    sequence = mpu.get_sequence_parallel_group()
    joint: Any = mpu.get_sequence_data_parallel_group() if hasattr(mpu, "get_sequence_data_parallel_group") else dist.group.WORLD
    model = model_parallel_group(mpu)
    # DeepSpeed's own object names one group twice.
    if model is not None and model.size() > 1 and dist.get_process_group_ranks(model) != dist.get_process_group_ranks(sequence):
        raise UnsupportedError("the mpu object has model-parallel and sequence-parallel groups: the two cannot be combined")
    return SequenceParallel(join_sequence(sequence, joint))


def count_slices_once(config: dict[str, Any], axes: SequenceAxes) -> dict[str, Any]:
    """``config`` with ``train_batch_size`` counted over groups where it was counted over ranks, or over one group.

    accelerate multiplies with the data-parallel sizes of its ParallelismConfig, which are 1 where a script has left them out.
    """
    total, micro, steps = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if not (isinstance(total, int) and isinstance(micro, int) and isinstance(steps, int)):
        return config  # two of the three say what the third is
    one = micro * steps
    if total != one * axes.groups and total in (one, one * axes.joint.world):
        return {**config, "train_batch_size": one * axes.groups}
    return config
