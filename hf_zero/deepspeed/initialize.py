"""Implement ``initialize`` and ``tp_model_init`` with DeepSpeed's arguments: make an engine from a module and a configuration."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.assembly.axes import axes_of, divide
from hf_zero.assembly.float8_layers import take_float8
from hf_zero.assembly.kept_types import cast_unnamed
from hf_zero.assembly.mesh import CLAIMS, claims_of_model, pipeline_ranks
from hf_zero.assembly.optimizers import inner_optimizer, require_parameters
from hf_zero.assembly.parts import PartsBuilder
from hf_zero.assembly.policies import compile_options, precision_policy
from hf_zero.assembly.reports import announce, describe
from hf_zero.assembly.same_settings import require_same_settings
from hf_zero.comm.bootstrap import init_distributed
from hf_zero.config.auto import hidden_size_of
from hf_zero.config.mesh import EXPERT, Claim, requested_experts
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.core.engine import on_build
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.deepspeed.alias.finder import served_deepspeed
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.loss_scalers import EngineLossScaler
from hf_zero.deepspeed.moe.layer import require_known_experts
from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.deepspeed.param_attributes import PARAM_ATTRIBUTES
from hf_zero.deepspeed.pipe.engine import PipelineEngine
from hf_zero.deepspeed.pipe.module import PipelineModule, require_undivided
from hf_zero.deepspeed.replaced import Watched
from hf_zero.errors import ConfigError
from hf_zero.expert_parallel.find import modules_of_experts
from hf_zero.observe import announce as announce_line
from hf_zero.observe import log_rank0
from hf_zero.pipeline.apply import require_served
from hf_zero.replica_groups.groups import join
from hf_zero.tensor_parallel import split
from hf_zero.tensor_parallel.planner import UnknownFlowError

if TYPE_CHECKING:
    from hf_zero.config.schema.root import ZeroConfig

_ASKED = "_hf_zero_tp_asked"
_watched = Watched(Engine, PipelineEngine, DeepSpeedOptimizer)


def require_consistent(model: nn.Module, config: ZeroConfig, mpu: Any) -> None:
    """Raise if the arguments of ``tp_model_init`` contradict those of ``initialize``.

    Raises:
        ConfigError: The element types differ, or ``tp_group`` was given to ``tp_model_init`` and ``mpu`` to ``initialize``.
    """
    dtype, has_group = getattr(model, _ASKED, (None, False))
    trained = precision_policy(config).param_dtype
    if dtype is not None and trained is not None and trained != dtype:
        raise ConfigError(
            f"Conflicting dtype: tp_model_init has dtype {dtype}, but the configuration trains in {trained}; set both to one dtype"
        )
    if has_group and mpu is not None:
        raise ConfigError(
            "tp_model_init provided tp_group, and initialize got mpu; both name the ranks that hold the model, so leave one out"
        )


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Split ``model`` with ``hf_zero.tensor_parallel.split.tp_model_init``; collective.

    If ``config`` has a pipeline, this function does nothing: stages are found from unsplit layers, so ``initialize`` finds the stages and
    then splits. It also does nothing for a model that cannot be traced if no ``config`` is given, because the configuration of
    ``initialize`` may name its layers.

    Args:
        model: Any model, the same on every rank.
        tp_size: Number of ranks that hold one model together.
        dtype: Dtype that parameters are cast to, except those that the model keeps in fp32; None does not cast. With ``config``,
            ``initialize`` casts.
        config: Configuration, or its ``tensor_parallel`` section.
        **kwargs: Further arguments of ``hf_zero.tensor_parallel.split.tp_model_init``.

    Returns:
        The same model.

    Raises:
        ConfigError: ``tp_size`` does not fit the ranks, or the model's sizes are not divisible by it.
        UnsupportedError: Another library has divided the model over ranks, or expert parallelism is on and the experts cannot be divided.
    """
    if config is None:
        setattr(model, _ASKED, (dtype, kwargs.get("tp_group") is not None))
    if tp_size == 1:
        return model if dtype is None or config is not None else cast_unnamed(model, dtype)
    source = read_config(config) if config is not None else {}
    if pipeline_ranks(source, claims_of_model(model))[0] > 1:
        return model
    wanted = requested_experts(source) > 1
    divides = wanted or any(claim.axis == EXPERT for claim in claims_of_model(model))
    try:
        model = split.tp_model_init(model, tp_size, None, config, keeps=modules_of_experts(model) if divides else (), **kwargs)
    except UnknownFlowError as error:
        if config is not None or kwargs.get("tp_group") is not None:
            raise
        log_rank0(
            "tp_model_init leaves %s whole until initialize(), whose configuration may name its layers: %s", type(model).__name__, error
        )
        model.__dict__[CLAIMS] = (*model.__dict__.get(CLAIMS, ()), Claim("tp", tp_size, "tp_model_init"))
        return model if dtype is None else cast_unnamed(model, dtype)
    return model if dtype is None or config is not None else cast_unnamed(model, dtype)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[
    Engine, ShardedOptimizer | Any, DataLoader[Any] | Any, Any
]:  # Any instead of None, because a script knows which results it requested
    """Make an engine for ``model``; collective. The arguments are those of DeepSpeed's function.

    Args:
        args: Namespace whose ``deepspeed_config`` is the path of the configuration; ``config`` must be None then, or the same.
        model: The module to train; its parameters may come from ``zero.Init``.
        optimizer: A torch optimizer over the model's parameters, or a function that makes one from ``model_parameters``; it takes
            precedence over the configuration's. It must update each parameter independently of the others.
        model_parameters: Parameters or groups that the configuration's optimizer trains; None is all that require grad.
        training_data: A dataset from which a distributed loader is made.
        lr_scheduler: A scheduler that the engine steps, or a function that makes one from the torch optimizer.
        distributed_port: Port of rank 0 if the environment does not set one.
        mpu: Object whose ``get_data_parallel_group()`` returns the group to shard over, or that has sequence-parallel groups, such as the
            result of ``UlyssesSPAttentionHF.register_with_transformers``.
        dist_init_required: Whether to create the process group, as in ``init_distributed``.
        collate_fn: Collate function of the loader.
        config: Configuration: path, dict, JSON or base64 text.
        mesh_param: (data-parallel size, sequence-parallel size), like the two keys of the configuration.
        config_params: Older name of ``config``, which takes precedence.

    Returns:
        The engine, its optimizer or None, the loader or None, and the scheduler that the engine steps or None.

    Raises:
        ConfigError: The configuration or an argument is wrong.
        UnsupportedError: The configuration or an argument requests an unsupported feature.
        StateError: Ranks have different settings, models or optimizers; on every rank.
    """
    model = _begun(model, training_data)
    source = _source_of(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    require_parameters(model_parameters)
    model_parameters = take_float8(model, optimizer, model_parameters)
    require_same_settings(source, None if isinstance(model, PipelineModule) else mpu, mesh_param, model)
    # A PipelineModule defines the positions of ranks itself; scripts nevertheless pass its grid as mpu.
    axes, source = axes_of(read_config(source), None if isinstance(model, PipelineModule) else mpu, mesh_param, model)
    hidden_size = hidden_size_of(model)
    resolved = resolve(source, world_size=axes.topology.replicas, sources={"hidden_size": hidden_size} if hidden_size else None)
    announce(resolved)
    require_consistent(model, resolved.config, mpu)
    if axes.topology.pipe is not None and not isinstance(model, PipelineModule):
        require_served(resolved.config)
    model = divide(model, source, axes)
    require_known_experts(model, axes.topology.world)
    builder = PartsBuilder(model, resolved, axes, EngineLossScaler, PARAM_ATTRIBUTES)
    inner = inner_optimizer(model, resolved, optimizer, model_parameters, axes.topology.device)
    kind = PipelineEngine if isinstance(model, PipelineModule) else Engine
    engine = kind(model, resolved, builder.build(inner, lr_scheduler, optimizer is None and model_parameters is None), axes.sequence)
    engine.optimizer_given = optimizer is not None
    engine.mpu, compiling = engine.mpu if engine.mpu is not None else mpu, compile_options(resolved.config)  # a pipeline has its own
    if compiling is not None:
        engine.compile(**compiling)
    if resolved.config.disable_python_gc:
        gc.disable()
    if resolved.config.hf_zero.replicas != "none":
        join(engine)
    for hook in on_build:
        hook(engine)
    announce_line(describe(resolved, engine.units, engine.stage_policy, engine.collectives.topology, inner, served_deepspeed()))
    if training_data is not None:
        engine.collate_fn = collate_fn
        engine.training_dataloader = engine.deepspeed_io(training_data, route=engine.training_route)
    return engine, engine.optimizer if inner is not None else None, engine.training_dataloader, engine.lr_scheduler


def _begun(model: nn.Module | None, training_data: Any) -> nn.Module:
    """Return ``model`` after the checks that need neither ranks nor the configuration.

    Raises:
        ConfigError: There is no model, it is an engine already, or ``training_data`` is a text.
        StateError: A script has replaced a method of DeepSpeed's classes that nothing here calls.
        UnsupportedError: ``model`` is a PipelineModule that something else has divided.
    """
    if model is None:
        raise ConfigError("initialize() needs model=, a torch.nn.Module")
    if isinstance(model, Engine):
        raise ConfigError("initialize() was given an engine that it has made before; train with that engine, or give a model")
    if isinstance(training_data, str):
        raise ConfigError(f"training_data is {training_data!r}; a dataset is allowed, such as datasets.load_dataset(...)")
    if isinstance(model, PipelineModule):
        require_undivided(model)
    _watched.report()
    return model


def _source_of(args: Any, config: Any) -> Any:
    """Return the configuration that the arguments name.

    Raises:
        ConfigError: The arguments name no configuration, or two different ones.
    """
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and named is not None and config != named:
        raise ConfigError(
            f"initialize() was given two configurations that differ: args.deepspeed_config ({_kind(named)}) and config= ({_kind(config)}); "
            "leave one out"
        )
    config = config if config is not None else named
    if config is None:
        raise ConfigError("initialize() needs config= (a path, a dict or JSON text), or args.deepspeed_config")
    return config


def _kind(config: Any) -> str:
    """Return a description of a configuration for messages, without any of its values."""
    return repr(str(config)) if isinstance(config, (str, os.PathLike)) and len(str(config)) < 200 else f"a {type(config).__name__}"
