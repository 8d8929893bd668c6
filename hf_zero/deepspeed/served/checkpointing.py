"""Implement `deepspeed.checkpointing` with ``hf_zero.activation_checkpointing``, under DeepSpeed's names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero import activation_checkpointing
from hf_zero.activation_checkpointing import RandomStates as CudaRNGStatesTracker
from hf_zero.activation_checkpointing import checkpoint, is_configured, random_states, reset, seed_model_parallel
from hf_zero.comm.axes import model_parallel_group
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import build_topology
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.storage import ActivationCheckpointing
from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_settings = ActivationCheckpointing()
_model_axis: Collectives | None = None
_layers: int | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set the options of ``checkpoint``; arguments take precedence over the configuration's ``activation_checkpointing`` section.

    Args:
        mpu_: Object whose ``get_model_parallel_group()`` returns the ranks to divide activations over.
        deepspeed_config: Path, dict, JSON or base64 text; only its ``activation_checkpointing`` section is read.
        partition_activations: Whether saved inputs are divided over these ranks; without ``mpu_`` nothing is divided.
        contiguous_checkpointing: Has no effect, because PyTorch's allocator reuses the memory of checkpoints of equal size.
        num_checkpoints: Has no effect. If ``contiguous_checkpointing`` is true, it must be given here, in the section or with
            ``set_num_layers``, as in DeepSpeed.
        checkpoint_in_cpu: Whether saved inputs are kept in page-locked host memory; backward prefetches them.
        synchronize: Whether to synchronise the device before and after each checkpointed function.
        profile: Whether to log the time of each checkpointed function.

    Raises:
        ConfigError: ``contiguous_checkpointing`` without a number of checkpoints.
    """
    global _settings, _model_axis
    settings, known = ActivationCheckpointing(), num_checkpoints if num_checkpoints is not None else _layers
    if deepspeed_config is not None:
        section = resolve(_section_only(deepspeed_config), world_size=1).config.activation_checkpointing
        settings = section if section is not None else settings
        known = section.number_checkpoints if known is None and section is not None else known
    if contiguous_checkpointing and known is None:
        raise ConfigError(
            "checkpointing.configure(contiguous_checkpointing=True): the number of layers is not known; give num_checkpoints, "
            "activation_checkpointing.number_checkpoints or set_num_layers(), or leave contiguous_checkpointing out, which has no effect"
        )
    given = {
        "partition_activations": partition_activations,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    _settings = settings.model_copy(update={name: bool(value) for name, value in given.items() if value is not None})
    for name, value in (("contiguous_checkpointing", contiguous_checkpointing), ("num_checkpoints", num_checkpoints)):
        if value:
            warn_once(f"checkpointing.configure({name}={value!r}) has no effect: PyTorch's allocator places the checkpoints")
    group = model_parallel_group(mpu_)
    _model_axis = open_collectives(build_topology(group)) if group is not None else None
    activation_checkpointing.configure(_settings, _model_axis)


def _section_only(source: Any) -> dict[str, Any]:
    section = read_config(source).get("activation_checkpointing")
    return {"train_micro_batch_size_per_gpu": 1, **({"activation_checkpointing": section} if section else {})}


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn the division of saved inputs over ranks on or off; it needs the argument ``mpu_`` of ``configure``."""
    global _settings
    _settings = _settings.model_copy(update={"partition_activations": bool(partition_activation)})
    activation_checkpointing.configure(_settings, _model_axis)


def set_num_layers(nlayers: int) -> None:
    """Set ``num_checkpoints`` of ``configure``, the size of DeepSpeed's contiguous buffer, which hf_zero does not need."""
    global _layers
    _layers = nlayers


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` like ``checkpoint``, which is not reentrant either."""
    return checkpoint(function, *args)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the named random states of this process; those of its CPU generator without an accelerator."""
    return random_states()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with the same seed on all ranks, and the state ``model-parallel-rng`` with another one on each model
    rank.
    """
    seed_model_parallel(seed, _model_axis.rank if _model_axis is not None else 0)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Restart the random state ``model-parallel-rng`` from ``seed``; the default generator does not change."""
    states = random_states()
    states.reset()
    states.add("model-parallel-rng", seed + 2718 + (_model_axis.rank if _model_axis is not None else 0))
