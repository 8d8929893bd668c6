"""Make the reduction of an engine's gradients: the exchange that configuration and optimizer require, and the gradients of each unit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hf_zero.assembly import policies
from hf_zero.assembly.axes import Axes
from hf_zero.assembly.networks import Networks
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.nodes import TwoHops
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradient_sums import GradientExchange, GradientSum, NodeExchange, QuantizedExchange, ReplicatedSum
from hf_zero.core.schedule.gradients import BufferPool, UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.core.step.step import StepKind
from hf_zero.core.units.marks import stages_of
from hf_zero.core.units.unit import Unit
from hf_zero.errors import UnsupportedError
from hf_zero.offload.policy import Offloading
from hf_zero.pipeline.apply import pipeline_of
from hf_zero.pipeline.train import collector_of


class GradientsBuilder:
    """Builder of an engine's gradients of units and of its reducer. The constructor is collective: it opens the groups for reductions.

    Args:
        module: The user's module, divided by the axes.
        config: The configuration.
        axes: Axes of the ranks.
        networks: Collectives of the axes.
        precision: Element types.
        stage: The ZeRO stage.
        offloading: Places of gradients whose optimizer states are offloaded; read after the units are made.
        kind: Parts of the optimizer step that the optimizer itself provides.

    Raises:
        UnsupportedError: ``zero_quantized_gradients`` is set, but the optimizer sends gradients in its own form.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        axes: Axes,
        networks: Networks,
        precision: PrecisionPolicy,
        stage: StagePolicy,
        offloading: Offloading,
        kind: StepKind,
    ) -> None:
        if config.zero_optimization.zero_quantized_gradients and kind.sends:
            raise UnsupportedError(
                f"zero_optimization.zero_quantized_gradients and {kind.sends}, which sends signs itself, exclude each other: use Adam, or "
                "set the key to false"
            )
        self._config, self._networks, self._offloading = config, networks, offloading
        topology, hops = axes.topology, networks.hops(in_node=stage.parameters_in_node)
        collectives = networks.collectives
        if stage.parameters_sharded and topology.world > 1 and hops is None:
            collectives = networks.borrow(topology)
        self._replicas = networks.borrow(topology.replicate) if topology.replicate is not None else None
        sharers = axes.sequence.axis.world if axes.sequence is not None else 1
        self._policy = policies.gradient_policy(config, precision, stage, topology.data.world, sharers)
        self._exchange = self._choose(collectives, hops, kind)
        self._of_experts = self._expert_exchange(stage)
        pipeline, self._collector, self._pool = pipeline_of(module), collector_of(module), BufferPool()
        self._tied = networks.stages(pipeline.tied if pipeline is not None else [])

    def _choose(self, collectives: Collectives, hops: TwoHops | None, kind: StepKind) -> GradientExchange:
        if self._config.zero_optimization.zero_quantized_gradients:
            return QuantizedExchange(collectives, self._policy, policies.error_feedback(self._config), hops)
        if hops is not None:
            return NodeExchange(collectives, self._policy, hops)
        return kind.exchange(collectives, self._policy)

    def _expert_exchange(self, stage: StagePolicy) -> GradientExchange | None:
        """Return the exchange of expert gradients: they contain tokens of all ranks, so the mean is over all ranks and the sum over the
        holders.
        """
        collectives, axis = self._networks.experts, self._networks.topology.expert_data
        if collectives is None or axis is None:
            return None
        if stage.parameters_sharded and axis.world > 1:
            collectives = self._networks.borrow(axis)
        return GradientExchange(collectives, self._policy)

    def gradients_of(self, unit: Unit) -> UnitGradients:
        """Return the gradients of a new unit; local."""
        own = self._of_experts if self._of_experts is not None and unit.collectives.topology.of_experts else self._exchange
        wide = torch.promote_types(self._policy.accumulation_dtype, unit.layout.dtype)
        if wide != self._policy.accumulation_dtype:  # float64
            own = copy.copy(own)
            own.policy = replace(self._policy, accumulation_dtype=wide)
        others = self._tied.get(_stages_of(unit)) or self._replicas  # the ranks of several stages include the replicas
        place = self._offloading.gradient_place(unit)
        sums = GradientSum(unit, own.policy, place) if others is None else ReplicatedSum(unit, own.policy, place, others)
        return UnitGradients(unit, own, self._collector(unit, own.policy, self._pool), sums)

    def reducer(self, units: list[Unit]) -> Reducer:
        """Return the reducer of the gradients of ``units``, all trained units of the engine; local."""
        entries = [self.gradients_of(unit) for unit in units]
        overlap = self._config.zero_optimization.overlap_comm is not False
        data = self._networks.collectives.data
        tell = partial(data.gather_objects, unit="a backward that broke off")

        def ask(late: list[bool]) -> Callable[[], list[bool]]:
            vote = data.begin_vote(late, "late gradients")
            return lambda: [bool(answer) for answer in data.wait_for_vote(vote, late)]

        return Reducer(entries, self._exchange, overlap, ask, tell, self._networks.topology.device)

    def add_errors_to_checkpoints_of(self, optimizer: ShardedOptimizer) -> None:
        """Let checkpoints of ``optimizer`` store the quantization errors of gradients, if gradients are sent quantized; local."""
        if isinstance(self._exchange, QuantizedExchange):
            optimizer.memory = self._exchange


def _stages_of(unit: Unit) -> tuple[int, ...]:
    return next((stages_of(param) for param in unit.params if param is not None), ())
