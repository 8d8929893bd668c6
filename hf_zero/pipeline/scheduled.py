"""A stage as the schedules of ``torch.distributed.pipelining`` want it: they say when, this says what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from hf_zero.comm.process_groups import serving_backend
from hf_zero.comm.topology import Topology


class StageWork(Protocol):
    """What one stage does with the parts of a batch."""

    def expected(self, part: int) -> Sequence[torch.Tensor]:
        """What the stage before sends of ``part``, as shapes and types; nothing on the first stage."""

    def forward(self, part: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the stage; returns what it sends to the next one, or on the last stage the loss alone."""


def run_schedule(work: StageWork, pipe: Topology, parts: int, name: str | None, scale: float = 1.0) -> None:
    """Runs forward of all ``parts`` of a batch and, in the order of a schedule, their backward; collective over the pipeline.

    With 1F1B (arXiv 2104.04473) a stage keeps activations of no more parts than there are stages behind it; with fewer parts than stages,
    which it does not take, GPipe runs. Gradients are added up in the order of the parts in both.

    Args:
        work: What this stage does.
        pipe: The stages.
        parts: How many.
        name: 1F1B or GPipe; None runs no backward.
        scale: Factor of the gradient of each part's loss.
    """
    stage = ScheduledStage(work, pipe, scale)
    kind = Schedule1F1B if name == "1F1B" and parts >= pipe.world else ScheduleGPipe
    # The loss is the work's own; torch computes one of the output where it is given a function, and wants a target for it.
    schedule = kind(stage, parts, loss_fn=lambda output, target: output, scale_grads=False)  # type: ignore[arg-type]
    (schedule.step if name is not None else schedule.eval)(target=torch.arange(parts))


class ScheduledStage:
    """One stage in the hands of a schedule; its attributes and methods are those that torch's schedules ask of a stage.

    Tensors go over borders in the order in which the work returns them. Of those with floating-point values a gradient comes back, of
    zeros where a stage did not use it. Where the pipeline's back end serves a device from the host, copies on the host travel.

    Args:
        work: What it does.
        pipe: The stages.
        scale: Factor of the gradient of each part's loss.
    """

    def __init__(self, work: StageWork, pipe: Topology, scale: float) -> None:
        self.stage_index, self.num_stages = pipe.rank, pipe.world
        self.is_first, self.is_last = pipe.rank == 0, pipe.rank == pipe.world - 1
        self.device = pipe.device
        self.group = pipe.group
        self.has_backward = True
        self.output_chunks: list[torch.Tensor] = []
        self._work = work
        self._scale = scale
        by_host = pipe.device.type != "cpu" and serving_backend(pipe.group, pipe.device) == "gloo"
        self._transport = torch.device("cpu") if by_host else pipe.device
        self._arriving: dict[int, list[torch.Tensor]] = {}  # by part
        self._received: dict[int, list[torch.Tensor]] = {}
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._returned: dict[int, list[torch.Tensor]] = {}

    # -- forward --------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        """What is received before ``part`` can run."""
        if self.is_first:
            return []
        self._arriving[part] = [self._place(meta) for meta in self._work.expected(part)]
        return [self._operation(dist.irecv, place, self.stage_index - 1) for place in self._arriving[part]]

    def forward_one_chunk(self, part: int, *_args: Any, **_kwargs: Any) -> torch.Tensor | None:
        """Runs ``part``; on the last stage returns its loss."""
        received = [tensor.to(self.device) for tensor in self._arriving.pop(part, ())]
        for tensor in received:
            tensor.requires_grad_(self.has_backward and tensor.is_floating_point())
        sent = list(self._work.forward(part, received))
        self.output_chunks.append(torch.zeros(1))  # which schedules join at the end; the work keeps its results itself
        self._sent[part] = sent
        if self.has_backward:
            self._received[part] = received
        return sent[0] if self.is_last and sent else None

    def get_fwd_send_ops(self, part: int) -> list[dist.P2POp]:
        """What goes on when ``part`` has run."""
        if self.is_last:
            return []
        tensors = self._sent[part] if self.has_backward else self._sent.pop(part)
        return [self._operation(dist.isend, self._carried(tensor), self.stage_index + 1) for tensor in tensors]

    # -- backward -------------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        """What is received before the backward of ``part``."""
        if self.is_last or not self.has_backward:  # of which GPipe's schedule takes no notice
            return []
        self._gradients[part] = [self._place(tensor) for tensor in self._sent[part] if tensor.is_floating_point()]
        return [self._operation(dist.irecv, place, self.stage_index + 1) for place in self._gradients[part]]

    def backward_one_chunk(self, part: int, loss: torch.Tensor | None = None, **_kwargs: Any) -> None:
        """Backward of ``part``, on the last stage of its ``loss``."""
        sent = self._sent.pop(part, [])
        if not self.has_backward:
            return
        if self.is_last:
            assert loss is not None
            torch.autograd.backward(loss if self._scale == 1.0 else loss.float() * self._scale)
        else:
            floating = [tensor for tensor in sent if tensor.is_floating_point()]
            arrived = [gradient.to(self.device) for gradient in self._gradients.pop(part)]
            pairs = [(tensor, gradient) for tensor, gradient in zip(floating, arrived, strict=True) if tensor.requires_grad]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        received = [tensor for tensor in self._received.pop(part) if tensor.is_floating_point()]
        self._returned[part] = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in received]

    def get_bwd_send_ops(self, part: int) -> list[dist.P2POp]:
        """What goes back after the backward of ``part``."""
        return [self._operation(dist.isend, self._carried(gradient), self.stage_index - 1) for gradient in self._returned.pop(part, ())]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces."""

    # -- what else schedules call -----------------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Nothing: a stage lives for one batch."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *_args: Any, **_kwargs: Any) -> tuple[()]:
        return ()

    def _prepare_backward_infra(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def _operation(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self._transport)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._transport).contiguous()
