"""Run torch's pipeline schedules (``torch.distributed.pipelining``) over the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime, get_schedule_class

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.process_groups import serving_backend
from hf_zero.comm.topology import Topology
from hf_zero.errors import CollectiveError, ConfigError
from hf_zero.pipeline.plan import Placement

_NOTHING = torch.zeros(1)


class StageWork(Protocol):
    """Work of one stage on the parts of a batch."""

    def expected(self, part: int) -> Sequence[torch.Tensor]:
        """Return the tensors, as shapes and types, that the previous stage sends of ``part``; none on the first stage."""

    def forward(self, part: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the stage on ``part``; return the tensors for the next stage, or on the last stage the loss alone."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that gradients may be computed for."""


class ScheduledStage:
    """Adapter that torch's schedules drive as one pipeline stage, with the attributes and methods that they use.

    Tensors of any shapes cross a border in the order in which the work returns them. Each floating-point tensor gets a gradient back, zeros
    where the other stage did not use it. Where the back end serves a device from the host (gloo), copies on the host are sent.

    Args:
        index: Number of this stage.
        placement: The rank that runs each stage.
        pipe: The ranks of the pipeline.

    Attributes:
        work: Work of the stage in the current step.
        scale: Factor of the gradient of each part's loss.
        failed: Error that the work raised in this step; errors of the schedule or the network do not count.
    """

    submod = None  # torch checks whether it shards its parameters

    def __init__(self, index: int, placement: Placement, pipe: Topology) -> None:
        self.stage_index, self.num_stages = index, placement.stages
        self.is_first, self.is_last = index == 0, index == placement.stages - 1
        self.group, self.group_rank, self.group_size = pipe.group, pipe.rank, pipe.world
        self.stage_index_to_group_rank = {stage: placement.rank_of(stage) for stage in range(placement.stages)}
        self.device = pipe.device
        self.has_backward = True
        self.output_chunks: list[torch.Tensor] = []
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}  # stages send to their neighbours alone
        self.act_send_info: dict[int, list[int]] = {}
        self.work: StageWork | None = None
        self.scale = 1.0
        self.failed: Exception | None = None
        by_host = pipe.device.type != "cpu" and serving_backend(pipe.group, pipe.device) == "gloo"
        self._transport = torch.device("cpu") if by_host else pipe.device
        self._arriving: dict[int, list[torch.Tensor]] = {}  # this and the following ones: by part
        self._received: dict[int, list[torch.Tensor]] = {}
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._returned: dict[int, list[torch.Tensor]] = {}
        self._later: dict[int, Callable[[], Any]] = {}

    # -- forward --------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        """Return the receive operations before ``part`` can run."""
        if self.is_first:
            return []
        with self._own_errors() as work:
            self._arriving[part] = [_place(meta, self._transport) for meta in work.expected(part)]
        return [self._operation(dist.irecv, place, -1) for place in self._arriving[part]]

    def forward_one_chunk(self, part: int, *_args: Any, **_kwargs: Any) -> Any:
        """Run the forward of ``part``; return its output, on the last stage its loss."""
        received = [tensor.to(self.device) for tensor in self._arriving.pop(part, ())]
        for tensor in received:
            tensor.requires_grad_(self.has_backward and tensor.is_floating_point())
        with self._own_errors() as work:
            sent = list(work.forward(part, received))
        self.output_chunks.append(_NOTHING)  # schedules join these at the end; the work keeps its results itself
        self._sent[part] = sent
        if self.has_backward:
            self._received[part] = [tensor for tensor in received if tensor.is_floating_point()]
        return tuple(sent) if not self.is_last else sent[0] if sent else None

    def get_fwd_send_ops(self, part: int) -> list[dist.P2POp]:
        """Return the send operations after ``part`` has run."""
        if self.is_last:
            return []
        tensors = self._sent[part] if self.has_backward else self._sent.pop(part)
        return [self._operation(dist.isend, _carried(tensor, self._transport), 1) for tensor in tensors]

    def set_local_fwd_input(self, outputs: Sequence[torch.Tensor], part: int) -> None:
        """Set the input of ``part`` that another stage of this rank has computed."""
        self._arriving[part] = [tensor.detach() for tensor in outputs]

    # -- backward -------------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        """Return the receive operations before the backward of ``part``."""
        if self.is_last or not self.has_backward:  # GPipe's schedule calls this in evaluation, too
            return []
        self._gradients[part] = [_place(tensor, self._transport) for tensor in self._sent[part] if tensor.is_floating_point()]
        return [self._operation(dist.irecv, place, 1) for place in self._gradients[part]]

    def backward_one_chunk(self, part: int, loss: torch.Tensor | None = None, full_backward: bool = True, **_kwargs: Any) -> None:
        """Run the backward of ``part``, on the last stage from its ``loss``; without ``full_backward``, defer the gradients of weights to
        ``backward_weight_one_chunk``.
        """
        sent = self._sent.pop(part, [])
        if not self.has_backward:
            return
        outputs, gradients = self._ends(part, sent, loss)
        received = self._received.pop(part)
        with self._own_errors() as work:
            if full_backward:
                _backward(outputs, gradients)
            elif self.is_first:  # no gradient is sent back, so the whole backward can wait
                self._later[part] = lambda: _backward(outputs, gradients)
            else:
                _, groups = stage_backward_input(outputs, gradients, received, work.parameters())
                self._later[part] = lambda: stage_backward_weight(work.parameters(), groups)
        self._returned[part] = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in received]

    def backward_weight_one_chunk(self, part: int, **_kwargs: Any) -> None:
        """Compute the gradients of weights that ``backward_one_chunk`` deferred."""
        with self._own_errors():
            self._later.pop(part)()

    def _ends(self, part: int, sent: Sequence[torch.Tensor], loss: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors at which the backward begins, and their gradients."""
        if self.is_last:
            whole = loss.float()
            return [whole], [torch.full_like(whole, self.scale)]
        floating = [tensor for tensor in sent if tensor.is_floating_point()]
        arrived = [gradient.to(self.device) for gradient in self._gradients.pop(part)]
        pairs = [(tensor, gradient) for tensor, gradient in zip(floating, arrived, strict=True) if tensor.requires_grad]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def get_bwd_send_ops(self, part: int) -> list[dist.P2POp]:
        """Return the send operations after the backward of ``part``."""
        return [self._operation(dist.isend, _carried(gradient, self._transport), -1) for gradient in self._returned.pop(part, ())]

    def get_local_bwd_output(self, part: int) -> list[torch.Tensor]:
        """Return the gradients of ``part``'s inputs, for the previous stage on this rank."""
        return self._returned.pop(part)

    def set_local_bwd_input(self, gradients: list[torch.Tensor], part: int) -> None:
        """Set the gradients of ``part`` that another stage of this rank has computed."""
        self._gradients[part] = gradients

    # -- other methods that schedules call --------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Drop all tensors that a step has left."""
        self.output_chunks.clear()
        for kept in (self._arriving, self._received, self._sent, self._gradients, self._returned, self._later):
            kept.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the engine reduces gradients."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are scaled already."""

    def release_fwd_send_outputs(self, part: int) -> None:
        """Do nothing: the backward of ``part`` drops its outputs, or ``get_fwd_send_ops`` has dropped them."""

    def _clear_unlaunched_fwd_recv(self, part: int) -> None:
        self._arriving.pop(part, None)

    def _clear_unlaunched_bwd_recv(self, part: int) -> None:
        self._gradients.pop(part, None)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *_args: Any, **_kwargs: Any) -> tuple[()]:
        return ()

    def _prepare_backward_infra(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    # -- parts --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _own_errors(self) -> Iterator[StageWork]:
        """Yield the work of this stage; record an error that it raises in ``failed``."""
        assert self.work is not None
        try:
            yield self.work
        except Exception as error:
            self.failed = error
            raise

    def _operation(self, operation: Callable[..., Any], tensor: torch.Tensor, step: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[self.stage_index + step]
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)


def _place(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _carried(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).contiguous()


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients)


SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FOLDED = ("ZBVZeroBubble", "DualPipeV")
SINGLE = ("1F1B", "GPipe")
_WITH_FEW = "GPipe"  # runs with fewer parts than there are stages, too


def check_schedule(name: str, stages_each: int) -> None:
    """Refuse an unknown schedule, or one that needs another number of stages on each rank.

    Raises:
        ConfigError: The message lists the schedules, or numbers of stages, that are allowed.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule is {name!r}; {', '.join(SCHEDULES)} are allowed")
    if name in SINGLE and stages_each != 1:
        raise ConfigError(
            f"pipeline.schedule {name} has one stage on each rank, and pipeline.stages_per_rank is {stages_each}: set that to 1, or take "
            f"{', '.join(other for other in SCHEDULES if other not in SINGLE)}"
        )
    if name in FOLDED and stages_each != 2:
        raise ConfigError(f"pipeline.schedule {name} has two stages on each rank; set pipeline.stages_per_rank to 2, it is {stages_each}")
    if name in FOLDED and not passes_on_its_rank(name):
        raise ConfigError(
            f"pipeline.schedule {name} passes activations from one stage of a rank to the next, which the schedules of torch "
            f"{torch.__version__} cannot: install a newer torch, or set pipeline.schedule to InterleavedZeroBubble"
        )


def passes_on_its_rank(name: str) -> bool:
    """Return whether torch has this schedule, in the form that hands tensors to a stage on the same rank.

    The older form (torch 2.8) sends them from the rank to itself, which gloo has no connection for: the ranks waited for each other.
    """
    try:
        return issubclass(get_schedule_class(name), _PipelineScheduleRuntime)
    except ValueError:  # torch 2.8 has no DualPipeV
        return False


@dataclass(frozen=True)
class _Order:
    """A schedule of torch for one number of parts, with the stages that it runs."""

    schedule: Any
    stages: list[ScheduledStage]


class Scheduler:
    """Runner of the parts of a batch through the stages, in the order of a schedule; collective over the pipeline.

    With 1F1B (arXiv 2104.04473) a stage keeps activations of no more parts than there are stages behind it. It does not accept fewer parts
    than stages; GPipe runs then. Both sum gradients in the order of the parts.

    Args:
        placement: The rank that runs each stage.
        pipe: The ranks of the pipeline.
        name: One of ``SCHEDULES``.
    """

    def __init__(self, placement: Placement, pipe: Collectives, name: str) -> None:
        self._placement = placement
        self._pipe = pipe
        self._name = name
        self._orders: dict[tuple[str, int], _Order] = {}  # kept, because building one for many parts takes time

    def train(self, works: Mapping[int, StageWork], parts: int, scale: float = 1.0) -> None:
        """Run forward and backward of all ``parts``; gradients arrive in ``param.grad``, or in hooks of parameters.

        Args:
            works: Work of each stage of this rank.
            parts: Number of parts.
            scale: Factor of the gradient of each part's loss.

        Raises:
            ConfigError: The schedule needs more parts.
        """
        few = self._name == "1F1B" and parts < self._placement.stages
        self._run(_WITH_FEW if few else self._name, works, parts, True, scale)

    def look(self, works: Mapping[int, StageWork], parts: int) -> None:
        """Run only the forward of all ``parts``, one stage on each rank."""
        self._run(_WITH_FEW, works, parts, False, 1.0)

    def _run(self, name: str, works: Mapping[int, StageWork], parts: int, trains: bool, scale: float) -> None:
        order = self._orders.pop((name, parts), None) or self._order(name, parts)  # not kept after an error: its state is unknown
        for stage in order.stages:
            stage.work, stage.scale = works[stage.stage_index], scale
        numbers = torch.arange(parts)
        order.schedule._has_backward = trains  # as ``schedule.eval`` does, which torch 2.8 lacks
        try:
            self._pipe.launch(f"schedule {name}", lambda: order.schedule.step(target=numbers))
        except CollectiveError:
            failed = next((stage.failed for stage in order.stages if stage.failed is not None), None)
            if failed is not None:
                raise failed from None
            raise
        for stage in order.stages:
            stage.clear_runtime_states()
            stage.work = None
        self._orders[name, parts] = order

    def _order(self, name: str, parts: int) -> _Order:
        stages = [ScheduledStage(index, self._placement, self._pipe.topology) for index in self._placement.stages_of(self._pipe.rank)]
        kind: Any = get_schedule_class(name)
        # The work computes the loss itself. Given a function, torch takes the output as the loss, but wants a target.
        make = partial(kind, stages if issubclass(kind, PipelineScheduleMulti) else stages[0], loss_fn=_output, scale_grads=False)
        try:
            schedule = make(parts)
        except ValueError as error:  # too few parts for the order
            if name != _WITH_FEW:
                raise ConfigError(f"pipeline.schedule {name} of {parts} part(s), which are gradient_accumulation_steps: {error}") from None
            schedule = make(self._placement.stages)  # torch 2.8 accepts no fewer parts, but GPipe runs any number
            schedule._n_microbatches = parts
        # Newer versions of torch prepare connections and shapes here, which these stages do not need, from attributes of torch's own.
        schedule._initialize_pp_stages = lambda *_args, **_kwargs: (True, True)  # forward and backward are ready
        return _Order(schedule, stages)


def _output(output: Any, _target: Any) -> Any:
    return output
