"""Attach a new engine to its module: hooks of the schedule and of pipeline stages, ``generate``, and recomputation.

These are the parts that act from inside the user's model. Each is released with the engine (``Runtime.keep``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from hf_zero.activation_checkpointing import configure
from hf_zero.assembly.networks import Networks
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import Topology
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.generation import Generation, PlainGeneration, StandsBefore
from hf_zero.core.schedule.backward_phase import begin_inside
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.units.unit import Unit
from hf_zero.memory import heap
from hf_zero.pipeline.apply import pipelined
from hf_zero.pipeline.generation import WholeGeneration


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
    heap.keep_large_blocks(on_host=topology.device.type == "cpu")


def attach_generation(module: nn.Module, runtime: Runtime, units: Sequence[Unit], networks: Networks, config: ZeroConfig) -> None:
    """Wrap ``generate``: for sharded parameters, for experts that other ranks hold, or for compiled modules alone."""
    synced = networks.topology.expert is not None
    generation: StandsBefore = PlainGeneration()
    if runtime.schedule is not None or synced:
        generation = Generation(runtime, units, networks.collectives.data, config.hf_zero.gather_for_generation, synced)
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
