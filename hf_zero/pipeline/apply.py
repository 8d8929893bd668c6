"""Divide the layers of a model over the stages of a pipeline, in place, and refuse features that cannot be combined with a pipeline.

A model may define its own stages (a PipelineModule); each rank has then built only its own layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import Topology
from hf_zero.config.schema.parallel import Pipeline as Settings
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.units.guards import guard_state_dict
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, is_elsewhere, mark_on_all_stages, mark_tp_shard, tp_shard_of, whole_shape
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import ConfigError, HfZeroError, StateError, UnsupportedError
from hf_zero.observe import log_rank0
from hf_zero.pipeline.forward import PipelinedForward, pipelined
from hf_zero.pipeline.held import Held, clear_held, is_held
from hf_zero.pipeline.own_stages import OwnStages
from hf_zero.pipeline.partition import make_plan, replan
from hf_zero.pipeline.plan import PipelinePlan, Placement
from hf_zero.pipeline.schedules import FOLDED, SINGLE, check_schedule
from hf_zero.pipeline.templates import Templates
from hf_zero.system.planning import plan_ignored, with_values
from hf_zero.tensor_parallel.same_data import SameData, equal_random_state
from hf_zero.tensor_parallel.skeleton import skeleton
from hf_zero.tensor_parallel.split import equal_weights

_PIPELINE = "_hf_zero_pipeline"  # attribute of a divided model


def require_served(config: ZeroConfig) -> None:
    """Refuse options that cannot be combined with the stages of a pipeline.

    Raises:
        UnsupportedError: Stage 3, quantized collectives, or parameters off the device.
    """
    refuse_sharded_parameters(config)
    zero = config.zero_optimization
    if zero.zero_quantized_gradients or zero.zero_quantized_weights:
        raise UnsupportedError(
            "pipeline.stages and ZeRO++ (zero_quantized_weights, zero_quantized_gradients) cannot be combined: leave one out"
        )


def refuse_sharded_parameters(config: ZeroConfig) -> None:
    """Refuse ZeRO stage 3 beside a pipeline.

    Raises:
        UnsupportedError: The configuration has stage 3.
    """
    if config.zero_optimization.stage == 3:
        raise UnsupportedError(
            "a pipeline (pipeline.stages, PipelineModule) and zero_optimization.stage 3 exclude each other: at stage 3 a "
            "stage of the pipeline would gather its layers again for each part of a batch, and so send the whole model once "
            "per part. Set zero_optimization.stage to 1 or 2, or leave the pipeline out and let stage 3 shard all layers"
        )


@dataclass(frozen=True)
class Pipeline:
    """A model divided over the stages of a pipeline.

    Attributes:
        plan: The stage of each call, and the holders of each parameter.
        placement: The rank of the pipeline that runs each stage.
        skeleton: The whole model without values.
        ranks: The ranks of the pipeline, numbered as in the default group.
        micro_batches: Number of parts per batch; None chooses a divisor of the batch.
        schedule: Name of the schedule of ``train_batch``.
        by_stage: The model was loaded by stages: each rank has loaded only the layers that it holds.
    """

    plan: PipelinePlan
    placement: Placement
    skeleton: nn.Module
    ranks: tuple[int, ...]
    micro_batches: int | None
    schedule: str
    by_stage: bool = False

    @property
    def held_by(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each parameter, by its name; all ranks for a trainable 0-dim parameter, which cannot be left empty."""
        single = {name for name, param in self.skeleton.named_parameters() if param.dim() == 0 and param.requires_grad}
        every = tuple(range(self.placement.ranks))
        return {name: every if name in single else self.placement.ranks_of(stages) for name, stages in self.plan.holders.items()}

    @property
    def tied(self) -> list[tuple[int, ...]]:
        """Return the distinct sets of ranks that share a parameter, in the same order on every rank."""
        return sorted({ranks for ranks in self.held_by.values() if len(ranks) > 1})


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline of a divided model; None for any other model."""
    found = model.__dict__.get(_PIPELINE)
    return found if isinstance(found, Pipeline) else None


def plan_pipeline(model: nn.Module, section: Mapping[str, Any], topology: Topology) -> Pipeline | None:
    """Decide which parts of ``model`` each stage gets, before ``model`` is divided in any way; collective over the pipeline. Return None
    without a pipeline.

    Args:
        model: A whole model, the same on every rank; a model that is already divided keeps its division.
        section: The configuration's ``pipeline``.
        topology: The engine's axes.

    Raises:
        ConfigError: There are more stages than blocks, or ``partition_method`` is unknown.
        UnsupportedError: The model's forward cannot be cut, or a model of layers in a list would also have experts divided.
        StateError: The model is already divided over other ranks, was loaded for other stages, or was loaded differently on some rank.
    """
    present, pipe = pipeline_of(model), topology.pipe
    if present is not None:
        if pipe is None or present.ranks != pipe.ranks:
            raise StateError(
                f"an earlier engine divided the layers of this model over {present.placement.ranks} ranks, and this engine needs them over "
                f"{pipe.world if pipe is not None else 1}: load the model again"
            )
        return present
    if pipe is None:
        if is_held(model):
            raise StateError(
                f"{type(model).__name__} was loaded for a pipeline, and this engine has none. Set pipeline.stages to the value "
                "that it had at from_pretrained, or load the model before that configuration is created"
            )
        return None
    if any(find_unit(param) is not None for param in model.parameters()):
        raise UnsupportedError(
            "pipeline.stages beside parameters that zero.Init has sharded: zero_optimization.stage 3 and a pipeline exclude each other. "
            "Build the model outside of zero.Init"
        )
    settings = Settings.model_validate(section)
    if isinstance(model, DividesItself):
        if topology.expert is not None:
            raise UnsupportedError(
                "expert_parallel and a PipelineModule cannot be combined: each stage builds only its own layers and does not "
                "know whether other stages have experts. Pass the model itself to initialize, with pipeline.stages, or leave "
                "expert_parallel out"
            )
        return Pipeline(model.pipeline_plan(), Placement(pipe.world, pipe.world), model, pipe.ranks, None, schedule_of(settings))
    collectives = open_collectives(topology.model or pipe)
    with plan_ignored():
        whole = skeleton(model)
    placement, held = placement_of(settings, pipe.world), clear_held(whole)
    starts = held.starts if held is not None else None
    if any(other != starts for other in collectives.gather_objects(starts, "loaded by stages")):
        raise StateError(
            f"the ranks of a pipeline loaded {type(model).__name__} in different ways: for other stages, or whole on some "
            "ranks. Call from_pretrained on every rank, under the same configuration"
        )
    plan = _agree(collectives, whole, placement.stages, settings.partition_method, starts)
    wanted = settings.micro_batches
    found = Pipeline(plan, placement, whole, pipe.ranks, None if wanted == "auto" else wanted, settings.schedule, held is not None)
    if held is not None:
        _require_values(type(model).__name__, held, found, pipe.rank, collectives)
        clear_held(model)
    return found


def placement_of(settings: Settings, ranks: int) -> Placement:
    """Return which rank of a pipeline runs which stage.

    Raises:
        ConfigError: The schedule is unknown, or needs another number of stages on each rank.
    """
    check_schedule(settings.schedule, settings.stages_per_rank)
    return Placement(settings.stages_per_rank * ranks, ranks, settings.schedule in FOLDED)


def _require_values(model: str, held: Held, pipeline: Pipeline, rank: int, collectives: Collectives) -> None:
    """Refuse a plan that gives a rank layers it has not loaded, because the model has changed since; collective."""
    here = [name for name, ranks in pipeline.held_by.items() if name in held.missing and rank in ranks]
    wanted = next((names[0] for names in collectives.gather_objects(here, "parameters without values") if names), None)
    if wanted is not None:
        raise StateError(
            f"{model} needs {wanted} on a stage that has not loaded it: the model was changed after from_pretrained, which "
            "loads only the layers of a stage. Load the model before you create the configuration; then every rank loads all "
            "layers"
        )


def _agree(collectives: Collectives, model: nn.Module, stages: int, method: str, starts: Sequence[tuple[str, int]] | None) -> PipelinePlan:
    """Return the plan that the first rank makes, on every rank; an error of the first rank is raised on every rank."""
    made: tuple[str, Any] = ("", None)
    if collectives.rank == 0 or collectives.pretended:
        try:
            with plan_ignored():
                made = ("plan", make_plan(model, stages, method, starts=starts).to_dict())
        except (ConfigError, UnsupportedError) as error:
            made = (type(error).__name__, str(error))
    kind, content = collectives.broadcast_object(made, 0, "pipeline plan")
    if kind == "plan":
        return PipelinePlan.from_dict(content)
    refusal: HfZeroError = ConfigError(content) if kind == "ConfigError" else UnsupportedError(content)
    raise refusal


def divide_layers(model: nn.Module, pipeline: Pipeline, topology: Topology) -> None:
    """Keep only this rank's stage of ``model``; collective.

    Args:
        model: The module that ``pipeline`` was planned for; tensor parallelism may have split it since.
        pipeline: The result of ``plan_pipeline``.
        topology: The engine's axes.
    """
    pipe, everyone = topology.pipe, topology.model
    if pipe is None or everyone is None or pipeline_of(model) is not None:
        return
    collectives = open_collectives(everyone)
    held_by = pipeline.held_by
    if isinstance(model, DividesItself) or pipeline.by_stage:
        equal_where_shared(model, held_by, open_collectives(pipe))
    elif topology.tensor is None:
        equal_weights(model, collectives, "a pipeline")
    tensor_ranks = topology.tensor.world if topology.tensor is not None else 1
    for name, param in model.named_parameters():
        _keep(param, held_by[name], pipe, tensor_ranks)
    for module in model.modules():
        guard_state_dict(module)
    setattr(model, _PIPELINE, pipeline)


def put_forward(model: nn.Module, pipeline: Pipeline, topology: Topology) -> None:
    """Replace ``model.forward`` by the pipeline, after every other division of ``model``; collective."""
    pipe, everyone = topology.pipe, topology.model
    if pipe is None or everyone is None or isinstance(model, DividesItself) or pipelined(model) is not None:
        return
    collectives = open_collectives(everyone)
    beside = open_collectives(topology.expert) if topology.expert is not None else None
    paths = list(dict.fromkeys(call.path for call in pipeline.plan.calls))
    apart = [name for name, ranks in pipeline.held_by.items() if len(ranks) < pipeline.placement.ranks]
    divided = [path for path in paths if any(name.startswith(f"{path}.") for name in apart)]
    own = OwnStages(model, pipeline.placement, pipe.rank, paths, divided, Templates(pipeline.skeleton), topology.device)
    planned = partial(_plan_for, pipeline)
    settings = pipeline.micro_batches, pipeline.schedule, planned, beside
    model.forward = PipelinedForward(own, open_collectives(pipe), collectives, *settings)
    equal_random_state(collectives)
    SameData(model, collectives)
    log_rank0("%s", summary(pipeline.plan, model))


def _plan_for(pipeline: Pipeline, given: Mapping[str, Any]) -> PipelinePlan:
    """Return the plan for a call with other arguments than the call that the model was divided by."""
    with plan_ignored():
        return replan(pipeline.skeleton, pipeline.plan, with_values(dict(given)))


def _keep(param: nn.Parameter, holders: tuple[int, ...], pipe: Topology, tensor_ranks: int) -> None:
    """Mark the part of ``param`` that this rank of the pipeline holds if it is one of ``holders``; else empty the parameter."""
    if param.dim() == 0:  # cannot be left empty: every stage has it
        if param.requires_grad:
            mark_on_all_stages(param, holders)
        return
    part = tp_shard_of(param) or TpShard(param.shape, 0, (Range(0, param.shape[0]),), ((Range(0, param.shape[0]), tensor_ranks),))
    if pipe.rank not in holders:
        param.data = param.data[:0].clone(memory_format=torch.contiguous_format) if part.dim == 0 else _emptied(param, part.dim)
        mark_tp_shard(param, replace(part, ranges=(), copies=(), elsewhere=True))
        return
    several = len(holders) > 1
    copies = _counted(part, param.shape[part.dim], len(holders))
    mark_tp_shard(param, replace(part, copies=copies, stages=holders if several else ()))


def _emptied(param: nn.Parameter, dim: int) -> torch.Tensor:
    return param.data.narrow(dim, 0, 0).clone(memory_format=torch.contiguous_format)


def _counted(part: TpShard, size: int, holders: int) -> tuple[tuple[Range, int], ...]:
    """Return the ranges along the divided dimension that several ranks hold, each with their number, for ``holders`` stages."""
    found, at = [], 0
    for run, count in (*part.copies, (Range(size, size), 1)):
        found += [(Range(at, run.start), holders), (run, count * holders)]
        at = run.stop
    return tuple((run, count) for run, count in found if run.numel and count > 1)


def summary(plan: PipelinePlan, model: nn.Module) -> str:
    """Return one line with the first and last call of each stage, and the weights that several stages share."""
    spans = [plan.span(stage) for stage in range(plan.stages)]
    told = "; ".join(
        f"stage {stage} from {plan.calls[span.start].path} to {plan.calls[span.stop - 1].path}" for stage, span in enumerate(spans)
    )
    tied = sorted({holders for holders in plan.holders.values() if len(holders) > 1})
    shared = f"; weights held by several stages: {', '.join(' and '.join(map(str, stages)) for stages in tied)}" if tied else ""
    return f"pipeline of {plan.stages} stages for {type(model).__name__}: {told}{shared}"


@runtime_checkable
class DividesItself(Protocol):
    """A model that knows its stages, one on each rank, and runs them itself."""

    def pipeline_plan(self) -> PipelinePlan:
        """Return the plan that assigns calls and parameters to stages."""


def schedule_of(settings: Settings) -> str:
    """Return the schedule that the configuration's ``pipeline`` names.

    Raises:
        ConfigError: The schedule, or ``stages_per_rank``, needs several stages on each rank.
    """
    name, each = settings.schedule, settings.stages_per_rank
    if name not in SINGLE or each != 1:
        raise ConfigError(
            f"pipeline.schedule {name} with pipeline.stages_per_rank {each}: a PipelineModule has one stage on each rank; "
            f"{' and '.join(SINGLE)} with 1 are allowed"
        )
    return name


def equal_where_shared(model: nn.Module, held_by: Mapping[str, tuple[int, ...]], pipe: Collectives) -> None:
    """Give parameters that several ranks of a pipeline hold the values of the first of these ranks; collective over the pipeline.

    Args:
        model: A model whose parameters are whole on the ranks that hold them.
        held_by: Name of each parameter -> the ranks that hold it, ascending.
        pipe: The ranks of the pipeline.
    """
    for name, param in model.named_parameters():
        holders = held_by[name]
        if len(holders) == 1:
            continue
        whole = (whole_shape(param) if is_elsewhere(param) else None) or param.shape
        values = param.data if pipe.rank in holders else torch.empty(whole, dtype=param.dtype)
        values = values.to(pipe.topology.device).contiguous()
        pipe.broadcast(values, holders[0], name)
        if pipe.rank in holders:
            param.data.copy_(values)
