"""Make the optimizer and the scheduler of an engine: the caller's own, or those of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.assembly.policies import moment_type
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import Topology
from hf_zero.config.resolve import ResolvedConfig
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.optimizer.clones import state_types
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.optimizer.state_store import StateStore
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.stages import StagePolicy
from hf_zero.core.units.unit import Unit
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.onebit.sharded import OneBitSharded
from hf_zero.onebit.step import check_topology
from hf_zero.ops.host_optimizers import HostOptimizer
from hf_zero.optim.elementwise import check_whole_tensors, needs_whole_tensors, require_tested
from hf_zero.optim.factory import build_optimizer, build_scheduler
from hf_zero.optim.muon import muon_parameters
from hf_zero.optim.onebit_adam import OneBitAdam
from hf_zero.optim.own_settings import keep_settings
from hf_zero.optim.schedules import VALID_LR_SCHEDULES
from hf_zero.optim.step_reads import require_own_reads


def require_parameters(given: Any) -> None:
    """Raise if ``given``, the argument ``model_parameters``, is a text.

    Raises:
        ConfigError: It is.
    """
    if isinstance(given, str):
        raise ConfigError(f"model_parameters is {given!r}; parameters or param groups are allowed, such as model.parameters()")


def inner_optimizer(
    module: nn.Module, resolved: ResolvedConfig, client: Any, model_parameters: Iterable[Any] | None, device: torch.device
) -> torch.optim.Optimizer | None:
    """Return the torch optimizer over the model's own parameters, or None for an engine that only runs forward.

    Args:
        module: The user's module.
        resolved: The configuration.
        client: The caller's optimizer, a function that makes one for the parameters, or None for the configuration's.
        model_parameters: Parameters for the function or the configuration's optimizer; None is all that require grad.
        device: Device of the engine.

    Raises:
        ConfigError: ``client`` is of another type, the configuration refuses it, or the configuration's optimizer cannot be made.
        UnsupportedError: The configuration requires fp32 moments with bf16 masters, but the optimizer keeps moments of another dtype.
    """
    trainable = [param for param in module.parameters() if param.requires_grad]
    params = list(model_parameters) if model_parameters is not None else trainable
    section = resolved.config.optimizer
    if callable(client) and not isinstance(client, torch.optim.Optimizer):
        client = client(params)
    if isinstance(client, torch.optim.Optimizer):
        _require_host_optimizer(client, resolved)
        _require_fp32_moments(client, resolved.config)
        return client
    if client is not None:
        raise ConfigError(f"optimizer is a {type(client).__name__}; a torch.optim.Optimizer or a function that makes one is allowed")
    if section is None or not section.type or not params:
        return None
    arguments = (resolved.resolved.get("optimizer") or {}).get("params")
    offloaded = resolved.config.zero_optimization.offload_optimizer.device != "none"
    matrices = partial(muon_parameters, module)
    moments = moment_type(resolved.config)
    built = build_optimizer(
        section.type, arguments, params, device_type=device.type, offloaded=offloaded, moment_dtype=moments, matrices=matrices
    )
    _require_fp32_moments(built, resolved.config)
    return built


def _require_host_optimizer(client: torch.optim.Optimizer, resolved: ResolvedConfig) -> None:
    """Raise if the configuration sets ``zero_force_ds_cpu_optimizer`` to true explicitly and the optimizer does not fit; the default
    refuses nothing.

    Raises:
        ConfigError: The state is offloaded, and ``client`` is not an optimizer that updates on the host.
    """
    config = resolved.config
    forced = "zero_force_ds_cpu_optimizer" in config.model_fields_set and config.zero_force_ds_cpu_optimizer
    if forced and config.zero_optimization.offload_optimizer.device != "none" and not isinstance(client, HostOptimizer):
        raise ConfigError(
            f"optimizer {type(client).__name__} with zero_optimization.offload_optimizer, and zero_force_ds_cpu_optimizer is true: leave "
            "that key out or set it to false, and the optimizer is offloaded as it is; or use deepspeed.ops.adam.DeepSpeedCPUAdam"
        )


def _require_fp32_moments(inner: torch.optim.Optimizer, config: ZeroConfig) -> None:
    """Raise if the configuration requires fp32 moments with bf16 masters, but the optimizer makes moments of another dtype.

    Raises:
        UnsupportedError: The optimizer makes its states in the dtype of its parameters, as the classes of ``torch.optim`` do.
    """
    if moment_type(config) != torch.float32:
        return
    types = state_types(inner, torch.bfloat16, torch.device("cpu"))
    narrow = sorted(name for name, dtype in types.items() if dtype.is_floating_point and dtype.itemsize < 4)
    if narrow:
        raise UnsupportedError(
            "bf16.bf16_master_weights_and_grads is true and bf16.bf16_optimizer_states is false, and optimizer "
            f"{type(inner).__name__} keeps {', '.join(narrow)} in {types[narrow[0]]} beside masters in bf16: leave the optimizer to the "
            "configuration (`optimizer.type` Adam or AdamW, without `torch_adam`), pass deepspeed.ops.adam.DeepSpeedCPUAdam, or set both "
            "keys to true"
        )


def sharded_optimizer(
    inner: torch.optim.Optimizer,
    units: list[Unit],
    stage: StagePolicy,
    collectives: Collectives,
    state_store: StateStore | None,
    whole: bool,
    experts: Collectives | None = None,
) -> ShardedOptimizer:
    """Return the optimizer object that the engine exposes to users: a wrapper of ``inner`` over units.

    Args:
        inner: The torch optimizer that does the arithmetic.
        units: Trainable units.
        stage: The ZeRO stage.
        collectives: The data-parallel axis.
        state_store: Store of masters and moments; None keeps them on the device.
        whole: Whether ``inner`` needs parameters in their own shapes.
        experts: The ranks that together hold all experts; None if each rank has all experts.

    Raises:
        UnsupportedError: 1-bit Adam cannot be combined with one of the other settings.
    """
    if whole:
        return WholeTensorOptimizer(inner, units, collectives, state_store, experts, keep_settings(inner))
    if not isinstance(inner, OneBitAdam):
        return ShardedOptimizer(inner, units, state_store)
    check_topology(stage, collectives.topology)
    if state_store is not None:
        raise UnsupportedError("OneBitAdam with offload_optimizer is not supported: set offload_optimizer.device to none, or use Adam")
    return OneBitSharded(inner, units, collectives)


def steps_whole_tensors(inner: torch.optim.Optimizer, config: ZeroConfig, topology: Topology, stage: StagePolicy) -> bool:
    """Return whether ``inner`` must step over whole tensors instead of segments of shards ([Note: whole tensors]).

    Raises:
        ConfigError: The configuration allows tested optimizers only, and ``inner`` is not one.
        UnsupportedError: ``inner`` needs whole tensors, which tensor parallelism or offload to NVMe rules out, or it reads parameters of
            the model that do not have what it reads.
    """
    experts = topology.expert is not None  # no rank has all experts of a layer
    all_here = not experts and (not stage.optimizer_sharded or topology.world == 1)
    split, device = topology.layers.model is not None, config.zero_optimization.offload_optimizer.device
    if stage.stage > 0 and "zero_allow_untested_optimizer" in config.model_fields_set:
        require_tested(inner, config.zero_allow_untested_optimizer)
    # At stage 0 the update reads the gradients in the model's own param.grad; with offload a step is made in several calls.
    require_own_reads(inner, not stage.optimizer_sharded and device == "none", stage.parameters_sharded)
    whole = needs_whole_tensors(inner, config.zero_allow_untested_optimizer, all_here, split or device == "nvme")
    if whole:
        check_whole_tensors(inner, split, device)
    return whole


def scheduler_of(resolved: ResolvedConfig, client: Any, optimizer: ShardedOptimizer | None) -> Any:
    """Return the scheduler that the engine steps; None if there is no scheduler, or no optimizer.

    Args:
        resolved: The configuration.
        client: The caller's scheduler, a function that makes one for the torch optimizer, or None for the configuration's.
        optimizer: The engine's optimizer.

    Raises:
        ConfigError: ``client`` is no scheduler, or one of another optimizer.
    """
    if optimizer is None:
        return None
    if client is not None:
        is_factory = callable(client) and not hasattr(client, "step")
        scheduler = client(optimizer.inner) if is_factory else client
        if not hasattr(scheduler, "step"):
            raise ConfigError(
                f"lr_scheduler is a {type(scheduler).__name__}; a scheduler of torch.optim.lr_scheduler, another object with step(), or a "
                "function that takes the optimizer and returns one is allowed"
            )
        _require_same_groups(scheduler, optimizer)
        return scheduler
    section = resolved.config.scheduler
    if section is None or not section.type:
        return None
    # DeepSpeed's schedules hold the torch optimizer, whose class appears in logs; torch's own count the steps of the optimizer that is
    # stepped.
    holds = optimizer.inner if section.type in VALID_LR_SCHEDULES else optimizer
    return build_scheduler(section.type, (resolved.resolved.get("scheduler") or {}).get("params"), holds)


def _require_same_groups(scheduler: Any, optimizer: ShardedOptimizer) -> None:
    """Raise if the scheduler belongs to another optimizer, whose learning rates no step would use."""
    scheduled = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    trained = {id(group) for group in optimizer.param_groups}
    if scheduled and not any(id(group) in trained for group in scheduled):
        raise ConfigError(
            f"lr_scheduler is a {type(scheduler).__name__} that belongs to another optimizer than the one in use, so no "
            "learning rate would change. Pass the scheduler's own optimizer as optimizer=, or pass a function that takes the "
            "optimizer and returns the scheduler"
        )
