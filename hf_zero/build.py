"""``initialize``: the only reader of the resolved configuration; makes all parts of an engine and puts them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.activation_checkpointing import configure
from hf_zero.activation_checkpointing.settings import checkpoint_settings
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.comms_log import TrafficSettings, start_log
from hf_zero.comm.own_groups import borrow, give_back, own_topology
from hf_zero.comm.recorded import open_collectives
from hf_zero.comm.topology import Topology, build_topology, init_distributed, join_topologies
from hf_zero.config.read import read_config
from hf_zero.config.resolve import ResolvedConfig, resolve
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.config.sources import hidden_size_of
from hf_zero.core import hooks
from hf_zero.core.engine import Engine, EngineParts
from hf_zero.core.generation import Generation
from hf_zero.core.model_init import warn_if_built_whole
from hf_zero.core.optimizer.sharded import ShardedOptimizer, group_of_params
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.gradients import BufferPool, GradientExchange, GradientPolicy, UnitGradients
from hf_zero.core.schedule.leaf_modules import leaf_module_names, mark_configured
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.schedule.unshard_pass import UnshardLimits
from hf_zero.core.stages import StagePolicy, stage_policy
from hf_zero.core.step.loss_scale import LossScaler, NullScaler
from hf_zero.core.step.precision import PrecisionPolicy, cast_and_move, cast_param
from hf_zero.core.step.same_model import require_same_model
from hf_zero.core.step.step import Stepper, StepSettings
from hf_zero.core.units.construct import NamedParam, build_unit
from hf_zero.core.units.grouping import BlockSpec, build_blocks, lone_modules
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.listener import ParamListener
from hf_zero.core.units.shard_storage import ShardStorage
from hf_zero.core.units.unit import Unit, UnitSpec, find_unit, full_shape
from hf_zero.deepspeed.safe_values import Training, register_training
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.memory import heap
from hf_zero.metrics import build_sinks
from hf_zero.observe import log_rank0, logger, warn_once
from hf_zero.offload.policy import Offloading, describe_offload
from hf_zero.onebit.exchange import OneBitExchange
from hf_zero.onebit.sharded import OneBitSharded
from hf_zero.onebit.step import OneBitStepper, check_topology, max_norm_of
from hf_zero.optim.elementwise import needs_whole_tensors
from hf_zero.optim.factory import build_optimizer
from hf_zero.optim.muon import muon_parameters
from hf_zero.optim.onebit_adam import OneBitAdam
from hf_zero.optim.schedules import build_scheduler
from hf_zero.optim.whole_tensor_limits import check_whole_tensors
from hf_zero.sequence_parallel.state import SequenceParallel, count_slices_once, sequence_parallel_of
from hf_zero.tensor_parallel.split import count_groups_once, is_split, model_topology, requested_ranks, split_model

_MODEL_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")  # as the field's mpu objects name it

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Makes an engine of ``model``; collective. The arguments are those of DeepSpeed's function.

    Args:
        args: Namespace whose ``deepspeed_config`` names the configuration when ``config`` is not given.
        model: The module to train; its parameters may come from ``zero.Init``.
        optimizer: A torch optimizer over the model's parameters that updates each by itself, or a function that makes one of
            ``model_parameters``; wins over the configuration's.
        model_parameters: What the configuration's optimizer trains, parameters or groups; None is all that require grad.
        training_data: A dataset to make a distributed loader of.
        lr_scheduler: A scheduler the engine steps, or a function that makes one of the torch optimizer.
        distributed_port: Port of rank 0 when the environment names none.
        mpu: Object whose ``get_data_parallel_group()`` names the axis to shard over, or that has sequence-parallel groups, as
            ``UlyssesSPAttentionHF.register_with_transformers`` returns.
        dist_init_required: As in ``init_distributed``.
        collate_fn: For the loader.
        config: Path, dict, JSON or base64 text.
        mesh_param: (data-parallel size, sequence-parallel size), as the two keys of the configuration.
        config_params: As ``config``, which wins.

    Returns:
        The engine, its optimizer or None, the loader or None, and the scheduler the engine steps or None.

    Raises:
        ConfigError: Something in the configuration or the arguments is wrong.
        UnsupportedError: Something asked for is not provided.
    """
    if model is None:
        raise ConfigError("initialize() needs model=, a torch.nn.Module")
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if source is None:
        raise ConfigError("initialize() needs config= (a path, a dict or JSON text), or args.deepspeed_config")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    source = read_config(source)
    slices = sequence_parallel_of(source, mpu, mesh_param)
    topology, source, groups = _axes(source, mpu, model, slices)
    hidden_size = hidden_size_of(model)
    sources = {"hidden_size": hidden_size} if hidden_size else None
    resolved = resolve(source, world_size=groups, sources=sources)
    _announce(resolved)
    _record_traffic(resolved.config)
    if requested_ranks(source) > 1 or is_split(model):
        model = split_model(model, source.get("tensor_parallel") or {}, topology)
    if slices is not None:
        slices.bind(model)
    builder = EngineBuilder(model, resolved, topology, slices)
    inner = builder.inner_optimizer(optimizer, list(model_parameters) if model_parameters is not None else None)
    engine = builder.build(inner, lr_scheduler)
    loader = None
    if training_data is not None:
        engine.collate_fn = collate_fn
        engine.training_dataloader = loader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer if inner is not None else None, loader, engine.lr_scheduler


def _axes(source: dict[str, Any], mpu: Any, model: nn.Module, slices: SequenceParallel | None) -> tuple[Topology, dict[str, Any], int]:
    """The axis to shard over, the configuration with its batch counted over data-parallel ranks, and how many those are."""
    if slices is not None:
        return slices.axes.joint, count_slices_once(source, slices.axes), slices.axes.groups
    topology = _topology(mpu, model, requested_ranks(source))
    together = topology.model.world if topology.model is not None else 1
    return topology, count_groups_once(source, topology.world, together), topology.world


def _topology(mpu: Any, model: nn.Module, model_parallel: int) -> Topology:
    """The axes: those of the ``mpu`` object if one is given, else ``model_parallel`` adjacent ranks hold one model together.

    Raises:
        ConfigError: The ``mpu`` object and the configuration disagree.
    """
    if mpu is None:
        return model_topology(model, model_parallel)
    found = next((getattr(mpu, name)() for name in _MODEL_GROUPS if hasattr(mpu, name)), None)
    size = found.size() if found is not None else 1
    if model_parallel not in (1, size):
        names = " or ".join(f"{name}()" for name in _MODEL_GROUPS)
        raise ConfigError(
            f"tensor_parallel.autotp_size is {model_parallel}, and the model-parallel group of the mpu object has {size} rank(s) "
            f"({names}); make them equal, or leave mpu out: {model_parallel} adjacent ranks then hold one model together"
        )
    data = mpu.get_data_parallel_group()
    return build_topology(data) if found is None or size == 1 else join_topologies(data, found)


def _announce(resolved: ResolvedConfig) -> None:
    for warning in resolved.warnings:
        warn_once(warning)
    if resolved.config.log_level is not None:
        logger.setLevel(resolved.config.log_level.upper())
    if resolved.config.dump_state:
        for row in resolved.table():
            log_rank0("%s = %s (%s)", row.key, row.value, row.source)


def _record_traffic(config: ZeroConfig) -> None:
    """Turns the process' log of collectives on, if ``comms_logger`` asks for it."""
    section = config.comms_logger
    if section is not None and section.enabled:
        start_log(TrafficSettings.of(section))


class EngineBuilder:
    """Assembles one engine.

    Attributes:
        module: The user's module.
        resolved: The configuration.
        policy: The ZeRO stage.
        precision: Element types.
        collectives: Network of the data-parallel axis.
        model_collectives: Network of the model axis; None without one.
        lone: Modules, by name, that must stay whole.
        slices: The sequence-parallel groups; None where sequences are whole.
    """

    def __init__(self, module: nn.Module, resolved: ResolvedConfig, topology: Topology, slices: SequenceParallel | None = None) -> None:
        self.module = module
        self.resolved = resolved
        self.config: ZeroConfig = resolved.config
        self.policy: StagePolicy = stage_policy(self.config.zero_optimization.stage)
        self.precision = precision_policy(self.config, sliced=slices is not None)
        self.slices = slices
        self.collectives: Collectives = open_collectives(own_topology(topology))
        self.collectives.connect()
        self.model_collectives = open_collectives(topology.model) if topology.model is not None else None
        self.topology = topology
        self.give_back: Callable[[], None] | None = None  # lets go of the group for reductions
        self.whole_tensors = False  # the optimizer needs parameters in their own shapes; `inner_optimizer` says
        self.names = {id(param): name for name, param in module.named_parameters()}
        self.lone = lone_modules(module)
        self.offloading = Offloading(self.config, self.precision, self.collectives, self.policy.shards_parameters)

    def inner_optimizer(self, client: Any, model_parameters: list[Any] | None) -> torch.optim.Optimizer | None:
        """The torch optimizer over the model's own parameters, or None for an engine that only runs forward."""
        trainable = [param for param in self.module.parameters() if param.requires_grad]
        params = model_parameters if model_parameters is not None else trainable
        if isinstance(client, torch.optim.Optimizer):
            inner = client
        elif callable(client):
            inner = client(params)
        elif client is not None:
            raise ConfigError(f"optimizer is a {type(client).__name__}; a torch.optim.Optimizer or a function that makes one is allowed")
        elif self.config.optimizer is not None and self.config.optimizer.type and params:
            section = self.resolved.resolved.get("optimizer") or {}
            offloaded = self.config.zero_optimization.offload_optimizer.device != "none"
            kind, device_type = self.config.optimizer.type, self.topology.device.type
            matrices = partial(muon_parameters, self.module)
            inner = build_optimizer(kind, section.get("params"), params, device_type=device_type, offloaded=offloaded, matrices=matrices)
        else:
            return None
        all_here = not self.policy.shards_optimizer or self.topology.world == 1
        sliced, device = self.topology.model is not None, self.config.zero_optimization.offload_optimizer.device
        shards_only = sliced or device == "nvme"
        self.whole_tensors = needs_whole_tensors(inner, self.config.zero_allow_untested_optimizer, all_here, shards_only)
        if self.whole_tensors:
            check_whole_tensors(inner, sliced, device)
        return inner

    def build(self, inner: torch.optim.Optimizer | None, lr_scheduler: Any) -> Engine:
        """Makes units of the model's parameters, the step over them, and the engine."""
        if self.policy.shards_parameters and self.topology.world > 1:
            warn_if_built_whole(self.module)
        root, blocks = self._blocks(inner)
        units = [unit for block in (root, *blocks) for unit in block.units]
        schedule = self._schedule(root, blocks)
        trained = [unit for unit in units if unit.trainable]
        reducer = self._reducer(trained, isinstance(inner, OneBitAdam)) if inner is not None else None
        runtime = Runtime(self.module, root, blocks, schedule, reducer)
        scaler = loss_scaler(self.config) if inner is not None else NullScaler()
        optimizer = self._sharded_optimizer(inner, trained) if inner is not None else None
        stepper = None
        if optimizer is not None and reducer is not None:
            clipping = max_norm_of(inner, self.config.gradient_clipping)
            everything = not self.config.zero_optimization.ignore_unused_parameters
            settings = StepSettings(clipping, self.policy, self.precision.skips_overflow, everything)
            optimizer.scaler = scaler
            kind = OneBitStepper if isinstance(inner, OneBitAdam) else Stepper
            stepper = kind(runtime, reducer, optimizer, scaler, self.collectives, settings, self.model_collectives)
            stepper.training = [Training(gradients, optimizer, scaler) for gradients in reducer.gradients]
            for training in stepper.training:
                register_training(training.gradients.unit, training)
        if self.config.activation_checkpointing is not None:
            configure(checkpoint_settings(self.config.activation_checkpointing), self.model_collectives, by_script=False)
        scheduler = self._scheduler(lr_scheduler, optimizer)
        sinks = build_sinks(self.config) if self.collectives.rank == 0 and optimizer is not None else []
        self._persist_and_reshard(units, {id(unit) for block in blocks if block.name in self.lone for unit in block.units})
        runtime.attach()
        heap.keep_large_blocks(on_host=self.topology.device.type == "cpu")
        if schedule is not None:
            generation = Generation(runtime, units, self.collectives, self.config.hf_zero.gather_for_generation)
            generation.attach()
            runtime.keep(generation)
        parts = EngineParts(runtime, units, self.collectives, self.policy, self.precision, scaler, optimizer, stepper, scheduler, sinks)
        parts = replace(parts, slices=self.slices, give_back=self.give_back)
        engine = Engine(self.module, self.resolved, parts)
        compiling = self.config.compile
        if compiling is not None and compiling.enabled and not compiling.disable:
            engine.compile(compiling.backend, compiling.kwargs)
        for hook in hooks.on_build:
            hook(engine)
        log_rank0("%s", describe(engine))
        return engine

    def _sharded_optimizer(self, inner: torch.optim.Optimizer, units: list[Unit]) -> ShardedOptimizer:
        if self.whole_tensors:
            return WholeTensorOptimizer(inner, units, self.collectives, self.offloading.state_store)
        if not isinstance(inner, OneBitAdam):
            return ShardedOptimizer(inner, units, self.offloading.state_store)
        check_topology(self.policy, self.topology)
        if self.offloading.state_store is not None:
            raise UnsupportedError("OneBitAdam with offload_optimizer is not provided: set its device to none, or use Adam")
        return OneBitSharded(inner, units, self.collectives)

    # -- units --------------------------------------------------------------------------------------------------------

    def _blocks(self, inner: torch.optim.Optimizer | None) -> tuple[Block, list[Block]]:
        groups = group_of_params(inner, self.names) if inner is not None else {}
        members = [NamedParam(name, param, groups.get(id(param), FROZEN)) for name, param in self.module.named_parameters()]
        extent = "whole tensors" if self.whole_tensors else "flat shards"
        notes = [f"an optimizer that updates {extent}"] if inner is not None else ["no optimizer"]
        require_same_model(self.module, members, self.collectives, notes)
        in_units = [member for member in members if self._belongs_in_unit(member)]
        specs = build_blocks(self.module, in_units, self._leaves())
        sizes = [sum(full_shape(member.param).numel() for member in spec.members) for spec in specs]
        trained = sum(full_shape(member.param).numel() for member in in_units if member.group != FROZEN)
        self.offloading.prepare(inner, trained, sum(sizes) - trained, max(sizes, default=0), _passing_bytes(in_units))
        root, *blocks = [self._block(spec) for spec in specs]
        taken = {id(member.param) for member in in_units}
        for member in members:
            if id(member.param) not in taken and find_unit(member.param) is None:
                cast_param(member.param, self.precision, self.topology.device)
        cast_and_move(self.module, self.precision, self.topology.device)
        if self.policy.shards_parameters:
            for param in self.module.parameters():
                if find_unit(param) is None:
                    hooks.param_listener.registered(param, param.shape, param.detach().reshape(-1), self.collectives)
        self._sync_buffers()
        return root, blocks

    def _belongs_in_unit(self, member: NamedParam) -> bool:
        """Trainable parameters always; frozen ones where parameters are sharded, or when they come sharded from ``zero.Init``."""
        if not member.param.is_floating_point():
            return False
        return member.group != FROZEN or self.policy.shards_parameters or find_unit(member.param) is not None

    def _leaves(self) -> set[str]:
        section = self.config.zero_optimization.leaf_module
        mark_configured(self.module, section.classes, section.names, section.name_suffixes)
        return {*leaf_module_names(self.module), *self.lone}

    def _block(self, spec: BlockSpec) -> Block:
        """One unit per element type and kind; the block's own name when there is just one."""
        kinds: dict[tuple[bool, torch.dtype], list[NamedParam]] = {}
        for member in spec.members:
            kinds.setdefault((member.group == FROZEN, self.precision.unit_dtype(member.param)), []).append(member)
        units = []
        for (frozen, dtype), members in kinds.items():
            suffix = "" if len(kinds) == 1 else f" [{'frozen ' if frozen else ''}{str(dtype).removeprefix('torch.')}]"
            shard_storage = self.offloading.shard_storage(sum(full_shape(member.param).numel() for member in members), not frozen)
            units.append(build_unit(spec.name + suffix, members, dtype, self._unit_spec(dtype, shard_storage)))
            self.offloading.take(units[-1])
        return Block(spec.name, spec.module, units, spec.read_in_backward)

    def _unit_spec(self, dtype: torch.dtype, shard_storage: ShardStorage) -> UnitSpec:
        master = self.precision.master_dtype
        if master is None or (self.precision.param_dtype is None and dtype == torch.float64):
            master = dtype
        return UnitSpec(
            self.collectives,
            shards=self.policy.shards_optimizer,
            reshards=self.policy.shards_parameters and (self.topology.world > 1 or shard_storage.reshards),
            master_dtype=master,
            shard_storage=shard_storage,
            listener=hooks.param_listener if self.policy.shards_parameters else ParamListener(),
        )

    def _sync_buffers(self) -> None:
        """Takes rank 0's buffers, once."""
        for name, buffer in self.module.named_buffers():
            if buffer.numel() and not buffer.is_meta:
                contiguous = buffer.data.contiguous()
                self.collectives.broadcast(contiguous, 0, f"buffer {name}")
                if contiguous.data_ptr() != buffer.data_ptr():
                    buffer.data.copy_(contiguous)

    def _persist_and_reshard(self, units: list[Unit], lone: set[int]) -> None:
        """Reshards what was built whole, except units small enough to stay and those (by id) that one rank may want alone."""
        zero = self.config.zero_optimization
        budget = zero.stage3_model_persistence_threshold
        for unit in units:
            numel = unit.layout.numel
            small = numel <= zero.stage3_param_persistence_threshold and numel <= budget
            if unit.reshards and (small or id(unit) in lone):
                budget -= numel if small else 0
                unit.pin()
                unit.listener.stays_unsharded(unit.params, True)
            unit.reshard()

    # -- gradients and gathers ------------------------------------------------------------------------------------------

    def _reducer(self, units: list[Unit], one_bit: bool) -> Reducer:
        collectives = self.collectives
        if self.policy.shards_parameters and self.topology.world > 1:
            collectives = open_collectives(own_topology(self.topology, "reductions"))
            collectives.connect()
            borrow(collectives.topology)
            self.give_back = partial(give_back, collectives.topology)
        sharers = self.slices.axes.sequence.world if self.slices is not None else 1
        policy = gradient_policy(self.config, self.precision, self.policy, self.topology.world, sharers)
        exchange = GradientExchange(collectives, policy)
        if one_bit:
            exchange = OneBitExchange(collectives, policy, averages=self.config.gradient_allreduce_op != "sum")
        overlap = self.config.zero_optimization.overlap_comm is not False
        pool = BufferPool()
        place = self.offloading.gradient_place
        entries = [UnitGradients(unit, exchange, pool, place(unit)) for unit in units]
        return Reducer(entries, exchange, overlap, partial(self.collectives.any_of, unit="late gradients"))

    def _schedule(self, root: Block, blocks: list[Block]) -> UnshardSchedule | None:
        if not any(unit.reshards for block in (root, *blocks) for unit in block.units):
            return None
        zero = self.config.zero_optimization
        limits = UnshardLimits(
            zero.stage3_prefetch_bucket_size,
            zero.stage3_max_live_parameters,
            zero.stage3_max_reuse_distance,
            updates_overlap=self.offloading.updates_overlap,
        )
        return UnshardSchedule(root, blocks, limits, self.collectives)

    def _scheduler(self, client: Any, optimizer: ShardedOptimizer | None) -> Any:
        if optimizer is None:
            return None
        if client is not None:
            is_factory = callable(client) and not hasattr(client, "step")
            scheduler = client(optimizer.inner) if is_factory else client
            _require_same_groups(scheduler, optimizer)
            return scheduler
        section = self.config.scheduler
        if section is None or not section.type:
            return None
        params = (self.resolved.resolved.get("scheduler") or {}).get("params")
        return build_scheduler(section.type, params, optimizer)


def _passing_bytes(members: Iterable[NamedParam]) -> int:
    """Host memory of this rank's shards that go when their parameters get a new unit."""
    units = {id(owner[0]): owner[0] for member in members if (owner := find_unit(member.param)) is not None}
    return sum(unit.shard.nbytes for unit in units.values() if unit.shard_storage.passing)


def _require_same_groups(scheduler: Any, optimizer: ShardedOptimizer) -> None:
    """Refuses a scheduler over another optimizer, whose rates nobody trains with."""
    scheduled = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    trained = {id(group) for group in optimizer.param_groups}
    if scheduled and not any(id(group) in trained for group in scheduled):
        raise ConfigError(
            f"lr_scheduler is a {type(scheduler).__name__} of another optimizer than the one that trains: no learning rate would change. "
            "Pass the scheduler's optimizer as optimizer=, or pass a function that makes the scheduler of the optimizer it is given"
        )


# -- configuration to policies --------------------------------------------------------------------------------------------


def precision_policy(config: ZeroConfig, sliced: bool = False) -> PrecisionPolicy:
    """Element types that the sections fp16, bf16, data_types, torch_autocast and communication_data_type ask for.

    Args:
        config: The configuration.
        sliced: Sequences are divided over ranks, which have a type of communication of their own.
    """
    message = config.seq_parallel_communication_data_type if sliced else config.communication_data_type
    low = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    types = config.data_types
    param_dtype = low or (_DTYPES[types.param_dtype] if types.param_dtype else None)
    low_masters = config.fp16.fp16_master_weights_and_grads if config.fp16.enabled else config.bf16.bf16_master_weights_and_grads
    if config.bf16.enabled and low_masters != config.bf16.bf16_optimizer_states:
        raise UnsupportedError(
            f"bf16.bf16_master_weights_and_grads is {low_masters} and bf16.bf16_optimizer_states is {config.bf16.bf16_optimizer_states}: "
            "masters and moments have one element type here; set both to the same value"
        )
    autocast = config.torch_autocast
    autocast_dtype = _DTYPES[autocast.dtype or "bf16"] if autocast.enabled else None
    reduced = param_dtype in (torch.float16, torch.bfloat16)
    accumulation = param_dtype if low_masters and param_dtype else torch.float32
    if types.grad_accum_dtype:
        accumulation = _DTYPES[types.grad_accum_dtype]
    return PrecisionPolicy(
        param_dtype=param_dtype,
        master_dtype=(param_dtype if low_masters else torch.float32) if reduced else None,
        accumulation_dtype=accumulation,
        message_dtype=_DTYPES[message] if message else None,
        buffer_dtype=_DTYPES[types.buffer_dtype] if types.buffer_dtype else None,
        autocast_dtype=autocast_dtype,
        casts_inputs=config.fp16.enabled and config.fp16.auto_cast,
        skips_overflow=config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow) or autocast_dtype == torch.float16,
    )


def gradient_policy(config: ZeroConfig, precision: PrecisionPolicy, stage: StagePolicy, world: int, sharers: int = 1) -> GradientPolicy:
    """Scaling and element types of the reduction.

    The mean is taken before the sum in fp32, where it costs nothing (the copy into the flat buffer scales on the way), and after it
    in bf16, where dividing by a number of ranks that is no power of two would round every element of the message. fp16 has a
    largest number, 65504, that a sum over many ranks soon reaches: about the square root of the ranks is divided by before the sum,
    and the rest after it, so that neither the sum nor small gradients come near fp16's ends. ``prescale_gradients`` divides
    before in any case, ``gradient_predivide_factor`` splits the division. ``sharers`` ranks share the sequences of their samples: a "sum"
    over samples is their mean.
    """
    total = 1.0 / sharers if config.gradient_allreduce_op == "sum" else 1.0 / world
    message = precision.message_dtype or precision.param_dtype or torch.float32
    if total == 1.0:
        pre = 1.0
    elif config.gradient_predivide_factor != 1.0 and not config.prescale_gradients:
        pre = 1.0 / config.gradient_predivide_factor
    elif message.itemsize >= 4 or config.prescale_gradients:
        pre = total
    else:
        pre = 1.0 / _headroom(world) if message is torch.float16 else 1.0
    return GradientPolicy(
        message_dtype=precision.message_dtype,
        accumulation_dtype=precision.accumulation_dtype,
        pre_scale=pre,
        post_scale=total / pre,
        sharded=stage.shards_optimizer,
    )


def _headroom(world: int) -> int:
    """The smallest power of two from the square root of ``world`` on: dividing by it rounds no element but subnormal ones."""
    return 1 << math.ceil(math.log2(world) / 2)


def loss_scaler(config: ZeroConfig) -> LossScaler | NullScaler:
    """The loss scale of fp16 (weights or autocast); 1 otherwise."""
    autocast_fp16 = config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16"
    if not (config.fp16.enabled or autocast_fp16):
        return NullScaler()
    fp16 = config.fp16
    return LossScaler(
        loss_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
    )


def describe(engine: Engine) -> str:
    """One line: stage, ranks, precision, units, bytes of model state on this rank. Logs are searched for its first two words."""
    states = sum(unit.shard.nbytes for unit in engine.units)
    masters = sum(unit.master.nbytes for unit in engine.units if unit.master is not None and unit.master is not unit.shard)
    dtypes = sorted({str(unit.layout.dtype).removeprefix("torch.") for unit in engine.units}) or ["no units"]
    return (
        f"DeepSpeed info: ZeRO stage {engine.policy.stage} of hf_zero on {engine.collectives.world} rank(s), {', '.join(dtypes)}, "
        f"{len(engine.units)} units, "
        f"{sum(unit.layout.numel for unit in engine.units):,} parameters, {(states + masters) / 2**20:.1f} MiB of shards and masters here"
        f"{describe_offload(engine.settings.zero_optimization)}"
    )
