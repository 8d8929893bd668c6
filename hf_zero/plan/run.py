"""Run one optimizer step of one rank with the real engine on fake tensors, and record its memory, traffic and work."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

from hf_zero import observe
from hf_zero.checkpoint.contents import contents_of
from hf_zero.checkpoint.format.names import MODULE
from hf_zero.checkpoint.state.training_state import Holders, TrainingState
from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.link import Link
from hf_zero.comm.topology import Topology
from hf_zero.config.mesh import requested_context, requested_slices
from hf_zero.core.holdings import holdings, loose_tensors
from hf_zero.core.units.marks import is_expert, is_of_library, is_wrapped
from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError
from hf_zero.expert_parallel.apply import shares_of
from hf_zero.integrations.attach import initialize
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.pipeline.apply import Pipeline, pipeline_of
from hf_zero.pipeline.forward import pipelined
from hf_zero.plan.inputs import Cluster, Load
from hf_zero.plan.models import PlannedModel, give_memory, loss_of
from hf_zero.plan.pretended import Choices, device_attention, masks_by_values, pretended_world
from hf_zero.plan.recorder import NOWHERE, Change, StorageRecorder, Work
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter
from hf_zero.sequence_parallel.state import SequenceParallel
from hf_zero.system.planning import Told, placed


def checkpoint_bytes(state: TrainingState) -> int:
    """Return the bytes of tensors in the checkpoint files of all ranks, without names and index; with a pipeline, of this rank's stage.

    Assumes that optimizer states of unsharded parameters are divided evenly over the ranks.
    """
    together, of_experts = state.holders, {unit.name for unit in state.units if unit.collectives.topology.of_experts}
    total = _whole_bytes(state)
    for file, entries in contents_of(state, exclude_frozen=False).files.items():
        if file.startswith(MODULE):  # divided by size, so other ranks' parts differ from this rank's
            continue
        for entry in entries:
            experts = entry.name in of_experts
            holders = state.holders_of_experts if experts else together
            ranks = holders.world * _parts(state, holders)
            total += entry.nbytes * ranks
    return total


def _parts(state: TrainingState, holders: Holders) -> int:
    """Return the number of ranks over which the tensors of one pipeline stage are divided by tensor and expert parallelism."""
    pipe = state.collectives.topology.pipe
    return holders.parts // (pipe.world if pipe is not None else 1)


def _whole_bytes(state: TrainingState) -> int:
    """Return the bytes of parameters outside of units and of buffers: split parameters on all their ranks, others once."""
    first, total = state.holders.part == 0, 0
    for name, param in state.loose_params():
        if is_of_library(param) or is_wrapped(param):
            continue
        if state.tensor.tp_shard_of(name, param.shape).dim is not None:
            total += param.nbytes * _parts(state, state.holders_of_experts if is_expert(param) else state.holders)
        elif first:
            total += param.nbytes
    return total + (sum(buffer.nbytes for buffer in state.buffers().values()) if first else 0)


_MOST_MICRO_STEPS = 3  # the first, one of the equal ones between, and the last
_COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "all_reduce_in_order", "exchange", "exchange_parts", "broadcast", "begin_vote",
)  # fmt: skip
_DIRECT = ("exchange", "exchange_parts")  # each rank sends to each other rank directly, with every back end
_EVEN = "assumed: tokens are spread evenly over experts; a rank whose experts receive more tokens holds, sends and computes more"
_MICRO_BATCHES = (
    "assumed: the loss of a batch can be computed from the losses of its micro-batches, so that pipeline stages overlap; otherwise a line "
    "of the log says so in training"
)


@dataclass
class Traffic:
    """Bytes that a rank sends, by link.

    Attributes:
        node: Bytes sent to ranks of the same node.
        network: Bytes sent to other nodes.
        calls: Number of collectives that send.
        node_alone: Bytes of ``node`` whose collectives overlap with no computation.
        network_alone: Bytes of ``network`` whose collectives overlap with no computation.
        calls_alone: Number of collectives that overlap with no computation.
    """

    node: float = 0.0
    network: float = 0.0
    calls: float = 0.0
    node_alone: float = 0.0
    network_alone: float = 0.0
    calls_alone: float = 0.0

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        """Return the sum of this traffic and ``times`` times ``other``."""
        mine, theirs = astuple(self), astuple(other)
        return Traffic(*(one + times * two for one, two in zip(mine, theirs, strict=True)))

    def add(self, nbytes: float, share: float) -> None:
        """Add one collective that sends ``nbytes``, the part ``share`` (0 to 1) of them to other nodes."""
        self.node += nbytes * (1 - share)
        self.network += nbytes * share
        self.calls += float(nbytes > 0)

    def add_exposed(self, nbytes: float, share: float) -> None:
        """Mark a collective that was added before as one that overlapped with no computation."""
        self.node_alone += nbytes * (1 - share)
        self.network_alone += nbytes * share
        self.calls_alone += float(nbytes > 0)


@dataclass(frozen=True)
class MicroStep:
    """Traffic and work of one micro-step, or of the update after the last one.

    Attributes:
        sent: Bytes sent, by link.
        work: Operations, and bytes read and written on the device.
    """

    sent: Traffic
    work: Work


@dataclass(frozen=True)
class Observation:
    """Recording of one rank's planned steps.

    Attributes:
        changes: Allocations and releases of storages, from the first tensor of the model on.
        measured: Number of changes before the measured step.
        micro_steps: The first micro-step, one of those between, and the last; fewer if the step has fewer.
        update: Traffic and work of the update.
        accumulation: Micro-steps per optimizer step.
        checkpoint_bytes: Bytes of a checkpoint from all ranks; with a pipeline, from the ranks of this stage.
        parameters: Number of parameters of the model, and number of trained ones.
        sharded: Whether parameters are gathered for use (stage 3).
        whole_bytes: Bytes that a gather of the whole model would allocate.
        largest_unit_bytes: Bytes of the largest gathered unit.
        parts: Number of micro-batches into which a pipeline divides a batch.
        pipeline: Division of the model over pipeline stages; None without a pipeline.
        assumptions: Assumptions behind the numbers, and warnings that a run logs, as sentences.
    """

    changes: list[Change]
    measured: int
    micro_steps: list[MicroStep]
    update: MicroStep
    accumulation: int
    checkpoint_bytes: int
    parameters: tuple[int, int]
    sharded: bool
    whole_bytes: int
    largest_unit_bytes: int
    parts: int = 1
    pipeline: Pipeline | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def bubble(self) -> float:
        """Return the time that a stage waits for other stages as a share of its work, for the schedule of GPipe (arXiv 1811.06965)."""
        return (len(self.pipeline.ranks) - 1) / self.parts if self.pipeline is not None else 0.0

    def per_step(self) -> MicroStep:
        """Return traffic and work of one optimizer step."""
        together = self.accumulated()
        return MicroStep(together.sent.plus(self.update.sent), together.work.plus(self.update.work))

    def accumulated(self) -> MicroStep:
        """Return traffic and work of all micro-steps of one optimizer step."""
        sent, work = Traffic(), Work()
        for index, one in enumerate(self.micro_steps):
            times = self.accumulation - 2 if index == 1 and len(self.micro_steps) == _MOST_MICRO_STEPS else 1
            sent, work = sent.plus(one.sent, times), work.plus(one.work, times)
        return MicroStep(sent, work)


def observe_step(
    model: PlannedModel,
    config: Mapping[str, Any],
    cluster: Cluster,
    load: Load,
    attention: str = "sdpa",
    rank: int = 0,
    messages: Told | None = None,
) -> Observation:
    """Run the engine of one rank for two optimizer steps, and return the recording of the second one.

    The first step creates the moments and records the order of blocks. At most three micro-steps of an accumulation run.

    Args:
        model: The model, on the meta device; the engine changes it.
        config: The DeepSpeed configuration.
        cluster: Number and place of the ranks.
        load: Shape of the batch of one rank.
        attention: sdpa, flash or eager; "reference" is torch's choice for an unknown device.
        rank: Number of the rank to run.
        messages: Messages that ranks observed before have sent; receives this rank's.

    Raises:
        ConfigError: The engine refuses the configuration.
        UnsupportedError: The model's forward depends on values of tensors, or runs an operation that fake tensors do not support.
    """
    _require_plannable(config, cluster, load)
    with pretended_world(cluster, rank, messages) as device:
        recorder = StorageRecorder(device, model.vocabulary)
        kernels = nullcontext() if attention in ("eager", "reference") or cluster.on_host else device_attention(attention == "flash")
        with (
            recorder.active(),
            masks_by_values(),
            kernels,
            observe.messages_suppressed() as warnings,
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                found = _Run(model, dict(config), cluster, load, device, recorder).observation()
                return replace(found, assumptions=(*found.assumptions, *(f"a run warns: {text}" for text in dict.fromkeys(warnings))))
            except HfZeroError:
                raise
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{type(model.module).__name__} cannot be planned: fake tensors do not support an operation of it: {str(error)[:200]}"
                ) from error
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                raise UnsupportedError(
                    f"{type(model.module).__name__} cannot be planned: shapes in its forward depend on values of tensors, and a plan's "
                    f"tensors have no values ({str(error).splitlines()[0]})"
                ) from error


def _require_plannable(config: Mapping[str, Any], cluster: Cluster, load: Load) -> None:
    """Raise for configurations that a plan would predict wrongly."""
    slices = requested_slices(config)
    if load.sequence % slices:
        raise ConfigError(f"--sequence {load.sequence} is not divisible by the {slices} slices of sequence_parallel_size")
    section = config.get("torch_autocast")
    if isinstance(section, Mapping) and section.get("enabled") and not cluster.on_host:
        raise UnsupportedError("torch_autocast can be planned only with --device cpu: the pretended device has no autocast rules")


@dataclass
class _Run:
    """One run of an engine whose storages, collectives and operations are recorded."""

    model: PlannedModel
    config: dict[str, Any]
    cluster: Cluster
    load: Load
    device: torch.device
    recorder: StorageRecorder
    sent: Traffic = field(default_factory=Traffic)
    choices: Choices = field(init=False)
    sliced: SequenceParallel | None = None

    def __post_init__(self) -> None:
        self.choices = Choices(self.model.module)

    def observation(self) -> Observation:
        """Train two steps, and return the recording."""
        counts = [(param.numel(), param.requires_grad) for param in self.model.module.parameters()]  # before ranks divide the parameters
        with placed(NOWHERE):
            give_memory(self.model.module, self.device)
        for param in self.model.module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda param: self.recorder.mark([param.grad], "gradients"))
        with mock.patch.object(Collectives, "__init__", lambda network, topology: self._patch_collectives(network, topology)):
            self.sliced = self._sequence_groups()
            engine = initialize(model=self.model.module, config=self.config, mpu=self.sliced)[0]
        with mock.patch.object(Link, "send", self._counting_send(Link.send)):
            with self.choices if self.choices.any else nullcontext():
                return self._run_steps(engine, counts)

    def _sequence_groups(self) -> SequenceParallel | None:
        """Bind a model of transformers to its sequence-parallel groups, like accelerate, and return them; None without such groups.

        Other models contain ``DistributedAttention`` already, and the engine derives their groups from the configuration.
        """
        slices, settings = requested_slices(self.config), getattr(self.model.module, "config", None)
        if slices == 1 or requested_context(self.config) > 1 or not hasattr(settings, "_attn_implementation"):
            return None
        return UlyssesSPAttentionHF.register_with_transformers(self.model.module, None, slices, self.load.micro_batch)

    def _batch(self) -> dict[str, Any]:
        """Return the batch of a rank; under sequence parallelism, its slice of the sequences."""
        bound, samples, length = self.sliced, self.load.micro_batch, self.load.sequence
        if bound is None:
            own = length if requested_context(self.config) > 1 else length // requested_slices(self.config)
            return {name: value.to(self.device) for name, value in self.model.batch(samples, own).items()}
        loader = [self.model.batch(samples, length)]
        slices = next(UlyssesSPDataLoaderAdapter(loader, bound.axis.rank, bound.axis.group, bound.axis.world, self.device))
        return {**slices, "labels": slices["shift_labels"]} if "shift_labels" in slices else slices

    def _run_steps(self, engine: Any, counts: list[tuple[int, bool]]) -> Observation:
        if engine.stepper is None:
            raise ConfigError("the configuration has no optimizer, so nothing is trained: add an optimizer section")
        self._mark_gradient_pools(engine)
        accumulation = engine.accumulation.steps
        engine.accumulation.steps = 1
        self._train(engine, 1)
        gc.collect()
        measured = len(self.recorder.changes)
        count = min(accumulation, _MOST_MICRO_STEPS)
        engine.accumulation.steps = count
        *micro_steps, update = self._train(engine, count)
        self._mark_owned(engine)
        parameters = (sum(numel for numel, _ in counts), sum(numel for numel, trained in counts if trained))
        observation = self._observation(engine, measured, micro_steps, update, accumulation, parameters)
        engine.destroy()
        return observation

    def _train(self, engine: Any, count: int) -> list[MicroStep]:
        found: list[MicroStep] = []
        for left in reversed(range(count)):
            with self._measured(found):
                with self.recorder.allocating("other"):
                    batch = self._batch()
                with torch.autograd.graph.save_on_cpu() if self.model.moves else nullcontext():
                    engine.backward(loss_of(engine(**batch)))
                self._mark_gradients(engine)
                if left:
                    engine.step()  # the engine counts calls of step(), and the last one updates
        with self._measured(found):
            engine.step()
            self._mark_owned(engine)
        return found

    @contextmanager
    def _measured(self, found: list[MicroStep]) -> Iterator[None]:
        sent, work = copy.copy(self.sent), copy.copy(self.recorder.work)
        yield
        found.append(MicroStep(self.sent.plus(sent, -1), self.recorder.work.plus(work, -1)))

    # -- purposes of storages, and traffic ---------------------------------------------------------------------------------

    def _mark_gradient_pools(self, engine: Any) -> None:
        """Give storages that gradient pools allocate the kind "gradients", and mark the states of ``engine``."""
        for pool in {id(entry.collected.pool): entry.collected.pool for entry in engine.stepper.reducer.gradients}.values():
            setattr(pool, "take", self.recorder.wrapped("gradients", pool.take))  # noqa: B010
        self._mark_owned(engine)

    def _patch_collectives(self, network: Collectives, topology: Topology) -> None:
        """Replace ``Collectives.__init__``: initialise ``network`` so that its collectives record bytes sent and allocations."""
        network.topology, network.sent_bytes = topology, 0
        for name in _COLLECTIVES:
            share = _share_of_network(network, self.cluster.ranks_per_node, network.blocks_host or name in _DIRECT)
            setattr(network, name, self._counting(network, getattr(network, name), share))

    def _counting_send(self, send: Any) -> Any:
        """Return a replacement of ``Link.send`` that records the bytes sent."""

        def run(link: Link, tensors: Any, target: int, label: str) -> None:
            ranks = [rank // self.cluster.ranks_per_node for rank in link.axis.topology.ranks]
            far = ranks[target] != ranks[link.axis.rank]
            self._counting(link.axis, send, float(far), waits=False)(link, tensors, target, label)

        return run

    def _counting(self, network: Collectives, call: Any, share: float, waits: bool = True) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.recorder.current_kind == "communication":  # called by another collective, which is counted
                return call(*args, **kwargs)
            before = network.sent_bytes
            with self.recorder.allocating("communication"):
                result = call(*args, **kwargs)
            nbytes = network.sent_bytes - before
            self.sent.add(nbytes, share)
            if isinstance(result, Pending) and not result.done:
                self._measure_wait(result, nbytes, share)
            elif waits:
                self.sent.add_exposed(nbytes, share)
            return result

        return run

    def _measure_wait(self, pending: Pending, nbytes: float, share: float) -> None:
        """Record whether any operation runs before the wait for ``pending``, and the storages that its end allocates."""
        issued, finish = self.recorder.work.operations, pending.finish

        def run() -> Any:
            if self.recorder.work.operations == issued:
                self.sent.add_exposed(nbytes, share)
            with self.recorder.allocating("communication"):
                return finish() if finish is not None else pending.result

        pending.finish = run

    def _mark_gradients(self, engine: Any) -> None:
        self.recorder.mark((entry.shard for entry in engine.stepper.reducer.gradients), "gradients")

    def _mark_owned(self, engine: Any) -> None:
        """Set kind and tier of the storages that the engine keeps between steps."""
        for held in holdings(engine.units, engine.optimizer):
            self.recorder.mark([held.tensor], held.kind)
        known = {id(entry) for unit in engine.units if (entry := self.recorder.storage_of(unit.whole.flat)) is not None}
        for held in loose_tensors(engine.module):
            entry = self.recorder.storage_of(held.tensor)
            if entry is not None and id(entry) not in known:
                entry.kind, entry.tier = held.kind, "device"

    # -- result ------------------------------------------------------------------------------------------------------------

    def _observation(
        self,
        engine: Any,
        measured: int,
        micro_steps: list[MicroStep],
        update: MicroStep,
        accumulation: int,
        parameters: tuple[int, int],
    ) -> Observation:
        forward = pipelined(engine.module)
        reshards = [unit.whole.nbytes for unit in engine.units if unit.reshards]
        return Observation(
            changes=self.recorder.changes,
            measured=measured,
            micro_steps=micro_steps,
            update=update,
            accumulation=accumulation,
            checkpoint_bytes=checkpoint_bytes(engine.checkpoints.state_of(engine)),
            parameters=parameters,
            sharded=bool(reshards),
            whole_bytes=sum(reshards),
            largest_unit_bytes=max(reshards, default=0),
            parts=forward.parts if forward is not None else 1,
            pipeline=pipeline_of(engine.module),
            assumptions=(
                *([_EVEN] if self.choices.any or shares_of(engine.module) else []),
                *([_MICRO_BATCHES] if forward is not None and forward.parts > 1 else []),
            ),
        )


def _share_of_network(network: Collectives, ranks_per_node: int, direct: bool) -> float:
    """Return the share of a rank's sent bytes that leaves its node, from 0 to 1.

    With direct sends from each rank to each other rank it is the share of peers on other nodes. In a ring, one of the hops of a node's
    ranks leaves the node; NCCL's other algorithms send the same bytes.

    Args:
        network: The collectives of one group of ranks.
        ranks_per_node: Ranks of one node.
        direct: Whether each rank sends to each other rank directly.
    """
    ranks, own = network.topology.ranks, network.topology.ranks[network.rank]
    near = sum(rank // ranks_per_node == own // ranks_per_node for rank in ranks)
    if near == len(ranks):
        return 0.0
    return (len(ranks) - near) / (len(ranks) - 1) if direct else 1.0 / near
