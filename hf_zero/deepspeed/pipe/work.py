"""Work of a stage of a ``PipelineModule`` on the parts of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.deepspeed.pipe.batches import MicroBatch
from hf_zero.deepspeed.pipe.module import PipelineModule
from hf_zero.errors import ConfigError
from hf_zero.system.trees import map_tensors, tensors_in


class Borders:
    """Shapes and types of the tensors that cross each border, by the kind of the inputs.

    [Note: what crosses a border] Only layers themselves know what they return. So for inputs of shapes that have not been seen the first
    part goes through the stages once before the schedule, without gradients and with dropout and running statistics off, and each stage
    tells the others what its result is made of.

    Args:
        module: The model.
        pipe: The stages.
        around: Context of each forward.
    """

    def __init__(self, module: PipelineModule, pipe: Collectives, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._pipe = pipe
        self._around = around
        self._known: dict[str, list[Any]] = {}

    def of(self, parts: Sequence[MicroBatch], kinds: Sequence[str]) -> list[list[Any]]:
        """Return for each part, of these ``kinds``, the results of all stages but the last, as shapes; collective over the stages."""
        for part, kind in zip(parts, kinds, strict=True):
            if kind not in self._known:
                self._known[kind] = self._found(part.inputs)
        return [self._known[kind] for kind in kinds]

    def _found(self, inputs: Any) -> list[Any]:
        found, training = [], self._module.training
        self._module.eval()
        try:
            for stage in range(self._pipe.world - 1):
                outputs = None
                if stage == self._pipe.rank:
                    with torch.no_grad(), self._around():
                        outputs = require_tensors(self._module.stages[stage](inputs), stage)
                told = self._pipe.broadcast_object(_described(outputs), stage, "what crosses a border")
                found.append(_as_shapes(*told))
                inputs = self._sent(outputs, found[-1], stage)
        finally:
            self._module.train(training)
        return found

    def _sent(self, outputs: Any, shape: Any, stage: int) -> Any:
        """Return the result of ``stage`` on every one."""
        device = self._pipe.topology.device
        if stage != self._pipe.rank:
            outputs = map_tensors(shape, lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))
        for _, tensor in tensors_in(outputs):
            self._pipe.broadcast(tensor.contiguous(), stage, "what crosses a border")
        return outputs


def _described(outputs: Any) -> tuple[bool, list[tuple[torch.Size, torch.dtype]]]:
    """Return whether they are a tuple, and shapes and types."""
    return isinstance(outputs, tuple), [(tensor.shape, tensor.dtype) for _, tensor in tensors_in(outputs)]


def _as_shapes(is_tuple: bool, described: Sequence[tuple[torch.Size, torch.dtype]]) -> Any:
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in described]
    return tuple(metas) if is_tuple else metas[0]


def require_tensors(outputs: Any, stage: int) -> Any:
    """Return ``outputs`` of ``stage`` if they can be sent over a border; else raise an error.

    Raises:
        ConfigError: They are no tensor and no tuple of tensors.
    """
    if isinstance(outputs, torch.Tensor) or (isinstance(outputs, tuple) and all(isinstance(part, torch.Tensor) for part in outputs)):
        return outputs
    raise ConfigError(
        f"the last layer of stage {stage} of the pipeline returns {type(outputs).__name__}; a tensor or a tuple of tensors can go to the "
        "next stage. Return that, or choose another partition_method"
    )


def share_buffers(module: nn.Module, pipe: Collectives) -> None:
    """Gives every stage the buffers (running statistics) of all layers as the stage has them that runs a layer first; collective."""
    assert isinstance(module, PipelineModule)
    shared: set[int] = set()
    for stage, run in enumerate(module.stages):
        layers = [call.module for call in run.calls if call.module is not None]  # type: ignore[union-attr]
        for buffer in (buffer for layer in layers for buffer in layer.buffers()):
            if id(buffer) not in shared:
                shared.add(id(buffer))
                values = buffer.to(pipe.topology.device).contiguous()
                pipe.broadcast(values, stage, "buffers")
                buffer.copy_(values)


@dataclass
class BatchWork:
    """One batch on this rank's stage.

    Attributes:
        module: The model.
        stage: Which stage.
        parts: Its parts.
        borders: For each part the results of all stages but the last, as shapes.
        around: Context of each forward.
        computes_loss: Whether the loss is wanted.
        trains: Whether gradients are wanted.
        losses: Of each part so far, on the last stage.
        additional: Likewise the losses that the model reports beside, by name; none of a model that has none.
        outputs: Results of the last layer, where they are wanted: without a loss, or ``keeps_outputs``.
        keeps_outputs: Whether they are wanted beside the loss.
    """

    module: PipelineModule
    stage: int
    parts: Sequence[MicroBatch]
    borders: Sequence[Sequence[Any]]
    around: Callable[[], AbstractContextManager[Any]]
    computes_loss: bool = True
    trains: bool = True
    keeps_outputs: bool = False
    losses: list[torch.Tensor] = field(default_factory=list)
    additional: list[dict[str, torch.Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def expected(self, part: int) -> list[torch.Tensor]:
        """Return the tensors that the previous stage sends of ``part``."""
        return [meta for _, meta in tensors_in(self.borders[part][self.stage - 1])]

    def forward(self, part: int, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs ``part``; on the last stage the loss, divided by the number of parts."""
        inputs = self.parts[part].inputs
        if self.stage > 0:
            arrived = iter(received)
            inputs = map_tensors(self.borders[part][self.stage - 1], lambda _: next(arrived))
        last = self.stage == self.module.num_stages - 1
        with torch.set_grad_enabled(self.trains), self.around():
            outputs = self.module.stages[self.stage](inputs)
            if not last:
                return [tensor for _, tensor in tensors_in(require_tensors(outputs, self.stage))]
            return self._end(part, outputs)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the whole model; those of other stages are empty."""
        return self.module.parameters()

    def _end(self, part: int, outputs: Any) -> list[torch.Tensor]:
        if self.keeps_outputs or not self.computes_loss:
            self.outputs.append(map_tensors(outputs, torch.Tensor.detach))
        if not self.computes_loss:
            return []
        loss = self.module.loss_of(outputs, self.parts[part].labels)
        self.losses.append(loss.detach())
        more = self.module.get_additional_losses()
        if more is not None:
            self.additional.append({name: value.detach() for name, value in more.items()})
        return [loss / len(self.parts)]
