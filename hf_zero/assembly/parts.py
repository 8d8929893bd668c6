"""Make the parts of one engine from a module and a resolved configuration, and attach the engine to its module.

Hooks, ``generate`` and recomputation act from inside the user's model. They are released with the engine (``Runtime.keep``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from hf_zero.activation_checkpointing import configure
from hf_zero.assembly import policies
from hf_zero.assembly.axes import Axes
from hf_zero.assembly.gradients import GradientsBuilder
from hf_zero.assembly.kept_types import explain_types
from hf_zero.assembly.networks import Networks
from hf_zero.assembly.optimizers import scheduler_of, sharded_optimizer, steps_whole_tensors
from hf_zero.assembly.out_of_memory import OutOfMemory
from hf_zero.assembly.reports import reports_of
from hf_zero.assembly.units import Joiner, UnitBuilder, persist_and_reshard
from hf_zero.checkpoint.engine_checkpoints import EngineCheckpoints
from hf_zero.checkpoint.state.plain_state import load_plain_state, resume_from, take_plain_state
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.hang_watch import LongWaits
from hf_zero.comm.topology import Topology
from hf_zero.config.resolve import ResolvedConfig
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.engine_parts import EngineParts, Preemption
from hf_zero.core.generation import Generation, PlainGeneration, WrappedGenerate
from hf_zero.core.holdings import holdings, loose_tensors
from hf_zero.core.model_init import warn_if_built_whole
from hf_zero.core.optimizer.own_object import refuse_steps_over
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.backward_phase import begin_inside
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.stages import stage_policy
from hf_zero.core.step.accumulation import Accumulation
from hf_zero.core.step.precision import LossScaler
from hf_zero.core.step.progress import Progress
from hf_zero.core.step.step import StepKind, Stepper
from hf_zero.core.step.trained_set import TrainedSet
from hf_zero.core.step.trained_units import TrainedUnits
from hf_zero.core.units.grouping import leaf_module_names, mark_configured, modules_kept_unsharded
from hf_zero.core.units.marks import ParamListener
from hf_zero.core.units.unit import Unit
from hf_zero.errors import ConfigError
from hf_zero.memory import host_memory
from hf_zero.offload.policy import Offloading
from hf_zero.onebit.step import step_kind
from hf_zero.pipeline.apply import pipelined
from hf_zero.pipeline.generation import WholeGeneration
from hf_zero.tensor_parallel.apply import inputs_of
from hf_zero.tensor_parallel.same_data import SameDraws, equal_random_state

Explain = Callable[[Any, BaseException, str], None]


class PartsBuilder:
    """Builder of the parts of one engine.

    Args:
        module: The user's module, divided by the axes.
        resolved: The configuration.
        axes: Axes of the ranks.
        scaler_kind: Class of the loss scale.
        listener: Object that is notified of changes to the parameters at stage 3.

    Attributes:
        stage: The ZeRO stage.
        precision: Element types.
        collectives: Network of the data-parallel axis.
        networks: Networks of all axes.
    """

    def __init__(
        self,
        module: nn.Module,
        resolved: ResolvedConfig,
        axes: Axes,
        scaler_kind: type[LossScaler] = LossScaler,
        listener: ParamListener | None = None,
    ) -> None:
        self.module = module
        self.resolved = resolved
        self.config = resolved.config
        self.axes = axes
        self.topology = axes.topology
        self.precision = policies.precision_policy(self.config, sequence_parallel=axes.sequence is not None)
        self._long_waits = LongWaits(self.config.hf_zero.hang_report_s)
        self.networks = Networks(axes, self.config)
        self.collectives = self.networks.collectives
        self.stage = stage_policy(
            self.config.zero_optimization.stage,
            self.config.hf_zero.param_shard_size is not None and self.networks.inside < self.topology.world,
        )
        self.offloading = Offloading(self.config, self.precision, self.collectives, self.stage)
        self._scaler_kind = scaler_kind
        self._listener = listener or ParamListener()

    def build(self, inner: torch.optim.Optimizer | None, lr_scheduler: Any, trains_all: bool = False) -> EngineParts:
        """Make the units of the model's parameters, the optimizer step and all other parts; collective.

        Args:
            inner: The optimizer over the model's parameters; None for an engine that only runs forward.
            lr_scheduler: The caller's scheduler, a function that makes one, or None.
            trains_all: Whether ``inner`` trains every parameter that requires a gradient, because the caller has named none.
        """
        self._trains_all = trains_all
        started = take_plain_state(inner) if inner is not None else None
        whole_tensors = inner is not None and steps_whole_tensors(inner, self.config, self.topology, self.stage)
        if self.stage.parameters_sharded and self.topology.world > 1:
            warn_if_built_whole(self.module)
        kept = modules_kept_unsharded(self.module)
        builder = self._unit_builder(kept)
        root, blocks = builder.build(inner, whole_tensors)
        units = [unit for block in (root, *blocks) for unit in block.units]
        trained = [unit for unit in units if unit.trainable]
        schedule = self._schedule(root, blocks)
        kind = step_kind(inner, averages=self.config.gradient_allreduce_op != "sum")
        gradients = self._gradients(kind) if inner is not None else None
        reducer = gradients.reducer(trained) if gradients is not None else None
        # In a pipeline blocks run many times per step, and never under reentrant checkpointing, whose gradients do not cross stages.
        runtime = Runtime(self.module, root, blocks, schedule, reducer, root_alone=self.topology.pipe is not None)
        scaler = policies.loss_scaler(self.config, self._scaler_kind) if inner is not None else self._scaler_kind(loss_scale=1.0)
        optimizer, stepper = None, None
        if inner is None:
            refuse_steps_over(self.collectives.data, runtime)
        if inner is not None and gradients is not None and reducer is not None:
            optimizer = self._optimizer(inner, trained, whole_tensors)
            if started is not None:
                resume_from(optimizer, started)
            gradients.add_errors_to_checkpoints_of(optimizer)
            joiner = self._joiner(builder, runtime, reducer, optimizer, units, gradients)
            trained_units = self._trained_units(optimizer, builder, reducer, joiner)
            stepper = self._stepper(runtime, reducer, optimizer, scaler, trained_units, kind)
        configure_checkpointing(self.networks, self.config)
        parts = self._parts(runtime, units, scaler, optimizer, stepper, scheduler_of(self.resolved, lr_scheduler, optimizer))
        zero = self.config.zero_optimization
        stays = {id(unit) for block in blocks if block.name in kept for unit in block.units}
        persist_and_reshard(units, stays, zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold)
        attach_hooks(self.module, runtime, self.topology)
        if self.topology.pipe is None:  # a pipeline brings a wrapper of its own
            attach_generation(self.module, runtime, units, self.networks, self.config)
        return parts

    def _unit_builder(self, kept: Iterable[str]) -> UnitBuilder:
        return UnitBuilder(
            self.module,
            self.stage,
            self.precision,
            self.collectives,
            self.offloading,
            self._leaves(kept),
            self._listener,
            policies.quantized_units(self.config),
            self.networks.node() if self.stage.parameters_sharded and self.networks.inside < self.topology.world else None,
            self.networks.experts,
            self.networks.everyone,
            policies.kept_patterns(self.config),
        )

    def _gradients(self, kind: StepKind) -> GradientsBuilder:
        return GradientsBuilder(self.module, self.config, self.axes, self.networks, self.precision, self.stage, self.offloading, kind)

    def _optimizer(self, inner: torch.optim.Optimizer, trained: list[Unit], whole_tensors: bool) -> ShardedOptimizer:
        together = open_collectives(self.topology.expert) if self.topology.expert is not None else None
        store = self.offloading.state_store
        optimizer = sharded_optimizer(inner, trained, self.stage, self.collectives, store, whole_tensors, together)
        optimizer.load_plain = load_plain_state
        return optimizer

    def _parts(
        self,
        runtime: Runtime,
        units: list[Unit],
        scaler: LossScaler,
        optimizer: ShardedOptimizer | None,
        stepper: Stepper | None,
        scheduler: Any,
    ) -> EngineParts:
        config, progress = self.config, Progress()
        reports = reports_of(config, self.module, self.networks, runtime, units, optimizer, progress)
        checkpoints = EngineCheckpoints(policies.checkpoint_settings(config, optimizer is not None), self.collectives)
        if checkpoints.rewinds is not None and self.topology.pipe is not None:
            raise ConfigError("hf_zero.spike_action is rewind, and a pipeline cannot restore snapshots; use skip")
        if config.hf_zero.show_gradients and self.topology.pipe is not None:
            raise ConfigError("hf_zero.show_gradients is true, and the stages of a pipeline have different parameters; remove it")
        spikes = policies.spikes_of(config)
        if spikes.compares:
            reports.measures = (*reports.measures, spikes.measure)
        if stepper is not None:
            stepper.equal.compare(spikes.loss, inputs_of(self.module))
        if checkpoints.snapshots is not None:
            reports.measures = (*reports.measures, checkpoints.remind_of_snapshots)
        held = chain(loose_tensors(self.module), holdings(units, optimizer))
        return EngineParts(
            runtime=runtime,
            units=units,
            collectives=self.collectives,
            policy=self.stage,
            precision=self.precision,
            scaler=scaler,
            accumulation=Accumulation(self.resolved.batch.accumulation, config.managed_gradient_accumulation),
            samples_per_step=self.resolved.batch.total,
            progress=progress,
            clock=reports.clock,
            reports=reports,
            checkpoints=checkpoints,
            optimizer=optimizer,
            stepper=stepper,
            scheduler=scheduler,
            give_back=self.networks.give_back,
            long_waits=self._long_waits,
            spikes=spikes,
            preemption=Preemption(policies.preemption_settings(config)),
            explain=_all_of(OutOfMemory(self.resolved, held, self.topology.device).explain, explain_types),
        )

    def _leaves(self, kept: Iterable[str]) -> set[str]:
        section = self.config.zero_optimization.leaf_module
        mark_configured(self.module, section.classes, section.names, section.name_suffixes)
        return {*leaf_module_names(self.module), *kept}

    def _schedule(self, root: Block, blocks: list[Block]) -> UnshardSchedule | None:
        if not any(unit.reshards for block in (root, *blocks) for unit in block.units):
            return None
        limits = policies.unshard_limits(self.config, self.offloading.updates_overlap)
        return UnshardSchedule(root, blocks, limits, self.collectives.data)

    def _trained_units(self, optimizer: ShardedOptimizer, builder: UnitBuilder, reducer: Reducer, joiner: Joiner) -> TrainedUnits:
        trains_all = self._trains_all and len(optimizer.param_groups) == 1
        trained = TrainedSet(self.module, optimizer, builder.groups, 0 if trains_all else None)
        return TrainedUnits(trained, reducer, optimizer, joiner.join, self.collectives.data, self.networks.everyone)

    def _joiner(
        self,
        builder: UnitBuilder,
        runtime: Runtime,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        units: list[Unit],
        gradients: GradientsBuilder,
    ) -> Joiner:
        stays = self.config.zero_optimization.stage3_param_persistence_threshold
        whole = self.topology.model is None
        # A pipeline has planned its gradients for the parameters that are trained now.
        known = () if self.topology.pipe is not None else self.module.parameters()
        undivided = None if whole else frozenset(id(param) for param in known)
        return Joiner(builder, runtime, reducer, optimizer, units, gradients.gradients_of, stays, undivided)

    def _stepper(
        self,
        runtime: Runtime,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        scaler: LossScaler,
        trained: TrainedUnits,
        kind: StepKind,
    ) -> Stepper:
        settings = policies.step_settings(self.config, self.precision, self.stage, kind.max_norm(self.config.gradient_clipping))
        # If units are not sharded, no rank has the squared norms of other ranks' experts.
        parts = self.topology.all_parts
        experts = open_collectives(parts) if parts is not None and not self.stage.optimizer_sharded else None
        everyone = self.networks.everyone
        model = self.networks.model
        return kind.stepper(runtime, reducer, optimizer, scaler, self.collectives, settings, trained, everyone, model, experts)


def _all_of(*explain: Explain) -> Explain:
    """Return a function that adds the explanations of all ``explain`` functions to an error."""

    def explain_all(engine: Any, error: BaseException, phase: str) -> None:
        for one in explain:
            one(engine, error, phase)

    return explain_all


def attach_hooks(module: nn.Module, runtime: Runtime, topology: Topology) -> None:
    """Put the hooks of pipeline stages and of the schedule on the module; collective with a pipeline.

    Args:
        module: The user's module.
        runtime: Runtime with the hooks of the schedule; it also releases the hooks of the stages.
        topology: Axes of the ranks.
    """
    stages = pipelined(module)
    if stages is not None:
        stages.attach()  # before a former engine of the module releases it
    runtime.attach()
    if stages is not None:
        stages.begin_backward = partial(begin_inside, runtime.backward)
        generates = WholeGeneration(stages, module, open_collectives(topology.pipe or topology), topology.expert is not None)
        generates.attach(module)
        runtime.keep(generates)
        runtime.keep(stages)
    if topology.layers.model is not None:
        runtime.draws = SameDraws(module, open_collectives(topology.layers.model))
    host_memory.keep_large_blocks(on_host=topology.device.type == "cpu")


def attach_generation(module: nn.Module, runtime: Runtime, units: Sequence[Unit], networks: Networks, config: ZeroConfig) -> None:
    """Wrap ``generate``: for sharded parameters, for experts that other ranks hold, or for compiled modules alone.

    Ranks that hold layers together must draw the same tokens, whatever seeds a script has set since.
    """
    synced = networks.topology.expert is not None
    generation: WrappedGenerate = PlainGeneration()
    if runtime.schedule is not None or synced:
        generation = Generation(runtime, units, networks.collectives.data, config.hf_zero.gather_for_generation, synced)
    if networks.topology.layers.model is not None:
        generation.before = partial(equal_random_state, open_collectives(networks.topology.layers.model))
    generation.attach(module)
    runtime.keep(generation)


def configure_checkpointing(networks: Networks, config: ZeroConfig) -> None:
    """Apply the configuration's settings of activation checkpointing to this process; collective if the ranks of a layer are not those of
    the model axis (with a pipeline).
    """
    if config.activation_checkpointing is None:
        return
    topology, layers = networks.topology, networks.topology.layers.model
    together = networks.model if layers is topology.model or layers is None else open_collectives(layers)
    configure(config.activation_checkpointing, together, by_script=False)
