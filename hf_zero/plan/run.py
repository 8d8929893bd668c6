"""One optimizer step of one rank: the real engine over tensors without values."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
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
from hf_zero.core.units.packed import is_packed, is_wrapped
from hf_zero.core.units.tp_shard import is_expert
from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError
from hf_zero.expert_parallel.apply import shares_of
from hf_zero.integrations.attach import initialize
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.pipeline.apply import Pipeline, pipeline_of
from hf_zero.pipeline.forward import pipelined
from hf_zero.plan.attention import device_attention, masks_by_values
from hf_zero.plan.books import NOWHERE, Books, Change, Work
from hf_zero.plan.choices import Choices
from hf_zero.plan.cluster import Cluster, Load
from hf_zero.plan.models import PlannedModel, give_memory, loss_of
from hf_zero.plan.pretended import pretended_world
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter
from hf_zero.sequence_parallel.state import SequenceParallel
from hf_zero.system.planning import Told, placed


def checkpoint_bytes(state: TrainingState) -> int:
    """Bytes of tensors in the files of all ranks; with a pipeline of those that have this rank's stage. Names and the index come on top.

    What an optimizer keeps of whole parameters is taken to be shared out evenly.
    """
    together, of_experts = state.holders, {unit.name for unit in state.units if unit.collectives.topology.of_experts}
    total = _whole_bytes(state)
    for file, entries in contents_of(state, exclude_frozen=False).files.items():
        if file.startswith(MODULE):  # shared out by size, so this rank's part says nothing of the others'
            continue
        for entry in entries:
            experts = entry.name in of_experts
            holders = state.holders_of_experts if experts else together
            ranks = holders.world * _parts(state, holders)
            total += entry.nbytes * ranks
    return total


def _parts(state: TrainingState, holders: Holders) -> int:
    """Ranks that hold one stage's tensors together."""
    pipe = state.collectives.topology.pipe
    return holders.parts // (pipe.world if pipe is not None else 1)


def _whole_bytes(state: TrainingState) -> int:
    """Parameters without unit, and buffers: once, or every part of what is divided."""
    first, total = state.holders.part == 0, 0
    for name, param in state.loose_params():
        if is_packed(param) or is_wrapped(param):
            continue
        if state.tensor.tp_shard_of(name, param.shape).dim is not None:
            total += param.nbytes * _parts(state, state.holders_of_experts if is_expert(param) else state.holders)
        elif first:
            total += param.nbytes
    return total + (sum(buffer.nbytes for buffer in state.buffers().values()) if first else 0)


_MOST_MICRO_STEPS = 3  # the first, those between, which are alike, and the last
_MOVING = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_in_order", "exchange", "exchange_parts", "broadcast", "largest_of")
_DIRECT = ("exchange", "exchange_parts")  # go from each rank to each, whatever carries them
_EVEN = "assumed: tokens spread evenly over experts; a rank whose experts get more holds, sends and computes more"
_PARTS = (
    "assumed: the losses of parts of a batch make up that of the batch, so that stages overlap; a line of the log says where they do not"
)


@dataclass
class Traffic:
    """Bytes that a rank sends, by the links they go over.

    Attributes:
        node: To ranks of its node.
        network: To other nodes.
        calls: In how many collectives.
        node_alone: Of ``node`` what is waited for before anything else is computed.
        network_alone: The same of ``network``.
        calls_alone: The same of ``calls``.
    """

    node: float = 0.0
    network: float = 0.0
    calls: float = 0.0
    node_alone: float = 0.0
    network_alone: float = 0.0
    calls_alone: float = 0.0

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        """Return the sum."""
        mine, theirs = astuple(self), astuple(other)
        return Traffic(*(one + times * two for one, two in zip(mine, theirs, strict=True)))

    def add(self, nbytes: float, share: float) -> None:
        """Books one collective, of whose ``nbytes`` a ``share`` goes to other nodes."""
        self.node += nbytes * (1 - share)
        self.network += nbytes * share
        self.calls += float(nbytes > 0)

    def stood_alone(self, nbytes: float, share: float) -> None:
        """Says of a collective that is booked that it was waited for before anything else was computed."""
        self.node_alone += nbytes * (1 - share)
        self.network_alone += nbytes * share
        self.calls_alone += float(nbytes > 0)


@dataclass(frozen=True)
class MicroStep:
    """What one micro-step, or the update behind the last one, computed and sent.

    Attributes:
        sent: Bytes sent.
        work: Operations, and bytes read and written on the device.
    """

    sent: Traffic
    work: Work


@dataclass(frozen=True)
class Observation:
    """What the engine did.

    Attributes:
        changes: Storages that came and went, from the model's first tensor on.
        measured: How many changes came before the step that is measured.
        micro_steps: Forwards with their backwards: the first, one of those between, the last; fewer where there are fewer.
        update: Bytes and operations of the update.
        accumulation: Micro-steps of an optimizer step.
        checkpoint_bytes: Of all ranks together, or of those of one stage of a pipeline.
        parameters: Elements of the model, and those that are trained.
        sharded: Parameters are gathered for use (stage 3).
        whole_bytes: Of parameters that a gather of the whole model would allocate.
        largest_unit_bytes: Of the largest unit.
        parts: Into how many a batch is divided on its way through a pipeline.
        pipeline: How the model is divided over stages; None where it is not.
        assumptions: What the numbers rest on and no run of this model has shown, in sentences.
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
        """How long a stage waits for others, as a share of its own time: all parts go forward, then all back (arXiv 1811.06965)."""
        return (len(self.pipeline.ranks) - 1) / self.parts if self.pipeline is not None else 0.0

    def per_step(self) -> MicroStep:
        """Return bytes and operations of one optimizer step."""
        together = self.accumulated()
        return MicroStep(together.sent.plus(self.update.sent), together.work.plus(self.update.work))

    def accumulated(self) -> MicroStep:
        """Return bytes and operations of all micro-steps of one optimizer step."""
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
    told: Told | None = None,
) -> Observation:
    """Runs the engine of one rank for two optimizer steps and writes the second one down.

    The first makes the moments and learns the order of blocks. Of an accumulation at most three micro-steps run.

    Args:
        model: On the meta device.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        load: What they train on.
        attention: sdpa, flash or eager; "reference" is torch's own choice for a device that it does not know.
        rank: Which.
        told: What the ranks of this world that were observed before have told.

    Raises:
        ConfigError: The engine refuses the configuration.
        UnsupportedError: The model does what needs values.
    """
    _require_plannable(config, cluster, load)
    with pretended_world(cluster, rank, told) as device:
        books = Books(device, model.vocabulary)
        kernels = nullcontext() if attention in ("eager", "reference") or cluster.on_host else device_attention(attention == "flash")
        with books.kept(), masks_by_values(), kernels, observe.hushed(), torch.autograd.set_multithreading_enabled(False):
            try:
                return _Run(model, dict(config), cluster, load, device, books).observation()
            except HfZeroError:
                raise
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{type(model.module).__name__} cannot be planned: an operation of it has no fake counterpart: {str(error)[:200]}"
                ) from error
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                raise UnsupportedError(
                    f"{type(model.module).__name__} cannot be planned: it makes shapes of values, which a plan has none of "
                    f"({str(error).splitlines()[0]})"
                ) from error


def _require_plannable(config: Mapping[str, Any], cluster: Cluster, load: Load) -> None:
    """Refuses what a plan would get wrong."""
    slices = requested_slices(config)
    if load.sequence % slices:
        raise ConfigError(f"--sequence {load.sequence} does not divide into the {slices} slices of sequence_parallel_size")
    section = config.get("torch_autocast")
    if isinstance(section, Mapping) and section.get("enabled") and not cluster.on_host:
        raise UnsupportedError("torch_autocast is planned with --device cpu only: a pretended device has no rules of autocast")


@dataclass
class _Run:
    """An engine under observation."""

    model: PlannedModel
    config: dict[str, Any]
    cluster: Cluster
    load: Load
    device: torch.device
    books: Books
    sent: Traffic = field(default_factory=Traffic)
    choices: Choices = field(init=False)
    sliced: SequenceParallel | None = None

    def __post_init__(self) -> None:
        self.choices = Choices(self.model.module)

    def observation(self) -> Observation:
        """Trains two steps."""
        counts = [(param.numel(), param.requires_grad) for param in self.model.module.parameters()]  # before ranks divide it
        with placed(NOWHERE):
            give_memory(self.model.module, self.device)
        for param in self.model.module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda param: self.books.mark([param.grad], "gradients"))
        with mock.patch.object(Collectives, "__init__", lambda network, topology: self.network(network, topology)):
            self.sliced = self._bound()
            engine = initialize(model=self.model.module, config=self.config, mpu=self.sliced)[0]
        with mock.patch.object(Link, "send", self._sending(Link.send)):
            with self.choices if self.choices.any else nullcontext():
                return self._watched(engine, counts)

    def _bound(self) -> SequenceParallel | None:
        """Return the groups under sequence parallelism, with the model bound to them as accelerate does it; None for none.

        A model of a script's own has its ``DistributedAttention`` already, and its groups come from the configuration.
        """
        slices, settings = requested_slices(self.config), getattr(self.model.module, "config", None)
        if slices == 1 or requested_context(self.config) > 1 or not hasattr(settings, "_attn_implementation"):
            return None
        return UlyssesSPAttentionHF.register_with_transformers(self.model.module, None, slices, self.load.micro_batch)

    def _batch(self) -> dict[str, Any]:
        """Return what a rank is given: a whole batch, or under sequence parallelism its slice of one."""
        bound, samples, length = self.sliced, self.load.micro_batch, self.load.sequence
        if bound is None:
            own = length if requested_context(self.config) > 1 else length // requested_slices(self.config)
            return {name: value.to(self.device) for name, value in self.model.batch(samples, own).items()}
        loader = [self.model.batch(samples, length)]
        slices = next(UlyssesSPDataLoaderAdapter(loader, bound.axis.rank, bound.axis.group, bound.axis.world, self.device))
        return {**slices, "labels": slices["shift_labels"]} if "shift_labels" in slices else slices

    def _watched(self, engine: Any, counts: list[tuple[int, bool]]) -> Observation:
        if engine.stepper is None:
            raise ConfigError("the configuration has no optimizer, so nothing is trained: give it an optimizer section")
        self._book(engine)
        accumulation = engine.accumulation.steps
        engine.accumulation.steps = 1
        self._train(engine, 1)
        gc.collect()
        measured = len(self.books.changes)
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
        for _ in range(count):
            with self._counted(found):
                with self.books.of_kind("other"):
                    batch = self._batch()
                with torch.autograd.graph.save_on_cpu() if self.model.moves else nullcontext():
                    engine.backward(loss_of(engine(**batch)))
                self._mark_gradients(engine)
        with self._counted(found):
            engine.step()
            self._mark_owned(engine)
        return found

    @contextmanager
    def _counted(self, found: list[MicroStep]) -> Iterator[None]:
        sent, work = copy.copy(self.sent), copy.copy(self.books.work)
        yield
        found.append(MicroStep(self.sent.plus(sent, -1), self.books.work.plus(work, -1)))

    # -- what is for what -------------------------------------------------------------------------------------------------

    def _book(self, engine: Any) -> None:
        """Lets the buffers of gradients say what they allocate."""
        for pool in {id(entry.collected.pool): entry.collected.pool for entry in engine.stepper.reducer.gradients}.values():
            setattr(pool, "take", self.books.booked("gradients", pool.take))  # noqa: B010
        self._mark_owned(engine)

    def network(self, network: Collectives, topology: Topology) -> None:
        """In place of ``Collectives.__init__``: lets a new network say what it sends and allocates."""
        network.topology, network.sent_bytes = topology, 0
        for name in _MOVING:
            share = _share_of_network(network, self.cluster.ranks_per_node, network.blocks_host or name in _DIRECT)
            setattr(network, name, self._counting(network, getattr(network, name), share))

    def _sending(self, send: Any) -> Any:
        """In place of ``Link.send``."""

        def run(link: Link, tensors: Any, target: int, label: str) -> None:
            ranks = [rank // self.cluster.ranks_per_node for rank in link.axis.topology.ranks]
            far = ranks[target] != ranks[link.axis.rank]
            self._counting(link.axis, send, float(far), waits=False)(link, tensors, target, label)

        return run

    def _counting(self, network: Collectives, call: Any, share: float, waits: bool = True) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.books.purpose == "communication":  # a part of another call, which counts
                return call(*args, **kwargs)
            before = network.sent_bytes
            with self.books.of_kind("communication"):
                result = call(*args, **kwargs)
            nbytes = network.sent_bytes - before
            self.sent.add(nbytes, share)
            if isinstance(result, Pending):
                self._watch(result, nbytes, share)
            elif waits:
                self.sent.stood_alone(nbytes, share)
            return result

        return run

    def _watch(self, pending: Pending, nbytes: float, share: float) -> None:
        """Sees whether anything is computed before ``pending`` is waited for, and books what its end allocates."""
        issued, finish = self.books.work.operations, pending.finish

        def run() -> Any:
            if self.books.work.operations == issued:
                self.sent.stood_alone(nbytes, share)
            with self.books.of_kind("communication"):
                return finish() if finish is not None else pending.result

        pending.finish = run

    def _mark_gradients(self, engine: Any) -> None:
        self.books.mark((entry.shard for entry in engine.stepper.reducer.gradients), "gradients")

    def _mark_owned(self, engine: Any) -> None:
        """Says what the tensors that stay are for, and where."""
        for held in holdings(engine.units, engine.optimizer):
            self.books.mark([held.tensor], held.kind)
        known = {id(entry) for unit in engine.units if (entry := self.books.of(unit.whole.flat)) is not None}
        for held in loose_tensors(engine.module):
            entry = self.books.of(held.tensor)
            if entry is not None and id(entry) not in known:
                entry.kind, entry.tier = held.kind, "device"

    # -- what comes of it -------------------------------------------------------------------------------------------------

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
            changes=self.books.changes,
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
                *([_PARTS] if forward is not None and forward.parts > 1 else []),
            ),
        )


def _share_of_network(network: Collectives, ranks_per_node: int, direct: bool) -> float:
    """Return which part of what a rank sends leaves its node.

    Where each rank sends to each peer directly: the peers elsewhere. In a ring, whose bytes nccl's other ways equal: one hop of those that
    pass through a node.
    """
    ranks, own = network.topology.ranks, network.topology.ranks[network.rank]
    near = sum(rank // ranks_per_node == own // ranks_per_node for rank in ranks)
    if near == len(ranks):
        return 0.0
    return (len(ranks) - near) / (len(ranks) - 1) if direct else 1.0 / near
