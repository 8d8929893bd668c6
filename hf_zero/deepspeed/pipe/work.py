"""Run one stage of a ``PipelineModule`` on the micro-batches of one batch, which only the stages that need them read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.comm.collectives import Collectives
from hf_zero.deepspeed.pipe.module import PipelineModule
from hf_zero.errors import ConfigError, StateError
from hf_zero.pipeline.train import read_together, require_iterator
from hf_zero.system.trees import map_tensors, tensors_in, without_values


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        inputs: A tensor or a tuple of tensors; None on stages that read no data.
        labels: Labels for the loss function; None on stages that read no data.
    """

    inputs: Any = None
    labels: Any = None


class Feed:
    """The source of an engine's micro-batches.

    Attributes:
        batches: The iterator that ``train_batch`` reads if it gets none as argument.
        convert: Function of the script that converts an entry of an iterator to (inputs, labels); None uses the entry unchanged.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.convert: Callable[[Any], Any] | None = None

    def take(self, given: Iterator[Any] | None, count: int, device: torch.device) -> list[MicroBatch]:
        """Return the next ``count`` micro-batches of ``given``, or of ``batches``, on ``device``.

        Raises:
            ConfigError: ``given`` is not an iterator, or an entry is not (inputs, labels).
            StateError: There is no iterator to read.
            StopIteration: The iterator has fewer entries.
        """
        source = given if given is not None else self.batches
        if source is None:
            raise StateError(
                "this stage of the pipeline reads data, but there is no iterator: call train_batch(data_iter=...), pass training_data= "
                "to initialize(), or call set_dataloader() or set_dataiterator() first"
            )
        batches = require_iterator(source)
        return [self._micro_batch(next(batches), device) for _ in range(count)]

    def _micro_batch(self, entry: Any, device: torch.device) -> MicroBatch:
        entry = self.convert(entry) if self.convert is not None else entry
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            shown = f"{type(entry).__name__} of {len(entry)}" if isinstance(entry, (tuple, list, dict)) else type(entry).__name__
            raise ConfigError(
                f"data_iter gave a {shown}; allowed is (inputs, labels), each a tensor or a tuple of tensors. Otherwise pass a "
                "function that converts an entry of your loader to that form to engine.set_batch_fn(function)"
            )
        inputs, labels = (tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), item) for item in entry)
        return MicroBatch(tuple(inputs) if isinstance(inputs, list) else inputs, labels)


def agree(networks: Sequence[Collectives], read: Callable[[], list[MicroBatch]]) -> tuple[list[MicroBatch], list[str]]:
    """Read this stage's micro-batches; return them and the kinds (shapes and types) of the first stage's inputs; collective.

    Args:
        networks: Collectives of the ranks that must all succeed, the network of the stages first.
        read: Function that reads this stage's micro-batches.

    Raises:
        StopIteration: On every rank, if the data of one rank ended.
        StateError: On the other ranks, if one rank failed to read for another reason; that rank raises its own error.
    """
    parts, kinds = read_together(networks, read, lambda parts: [kind_of(part.inputs) for part in parts])
    return parts, kinds[0]


def kind_of(inputs: Any) -> Any:
    """Return the shapes and types of ``inputs`` as a hashable value that can be sent and compared."""
    shape = map_tensors(inputs, without_values)
    return repr(tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), shape))


class Borders:
    """The shapes and types of the tensors that stages send to each other, by the kind (shapes and types) of the inputs.

    [Note: what crosses a border] The result of a layer is known only after it has run. So for inputs of new shapes, the first micro-batch
    runs through the stages once before the schedule, without gradients and with dropout and running statistics off, and each stage sends
    the shapes and types of its result to the others.

    Args:
        module: The model.
        pipe: Collectives of the stages.
        around: Context manager around each forward.
    """

    def __init__(self, module: PipelineModule, pipe: Collectives, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._pipe = pipe
        self._around = around
        self._known: dict[str, list[Any]] = {}

    def of(self, parts: Sequence[MicroBatch], kinds: Sequence[str]) -> list[list[Any]]:
        """Return, for micro-batches of ``kinds``, the results of all stages but the last, as meta tensors; collective over the stages."""
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
        """Send the description of the result of ``stage`` to all stages and return it; collective over the stages."""
        device = self._pipe.topology.device
        if stage != self._pipe.rank:
            outputs = map_tensors(shape, lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))
        for _, tensor in tensors_in(outputs):
            self._pipe.broadcast(tensor.contiguous(), stage, "what crosses a border")
        return outputs


def _described(outputs: Any) -> tuple[bool, list[tuple[torch.Size, torch.dtype]]]:
    """Return a description of a stage's result: whether it is a tuple, and the shapes and types of its tensors."""
    return isinstance(outputs, tuple), [(tensor.shape, tensor.dtype) for _, tensor in tensors_in(outputs)]


def _as_shapes(is_tuple: bool, described: Sequence[tuple[torch.Size, torch.dtype]]) -> Any:
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in described]
    return tuple(metas) if is_tuple else metas[0]


def require_tensors(outputs: Any, stage: int) -> Any:
    """Return ``outputs`` of ``stage`` if they can be sent to the next stage; otherwise raise.

    Raises:
        ConfigError: ``outputs`` are neither a tensor nor a tuple of tensors.
    """
    if isinstance(outputs, torch.Tensor) or (isinstance(outputs, tuple) and all(isinstance(part, torch.Tensor) for part in outputs)):
        return outputs
    raise ConfigError(
        f"the last layer of stage {stage} of the pipeline returns {type(outputs).__name__}; a tensor or a tuple of tensors can go to the "
        "next stage. Return that, or choose another partition_method"
    )


def share_buffers(module: nn.Module, pipe: Collectives) -> None:
    """Copy the buffers (running statistics) of all layers to every stage, from the first stage that runs the layer; collective."""
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
    """The work of this rank's stage on one batch.

    Attributes:
        module: The model.
        stage: Index of the stage.
        parts: Micro-batches of the batch.
        borders: Results of all stages but the last for each micro-batch, as meta tensors.
        around: Context manager around each forward.
        computes_loss: Whether the loss is computed.
        trains: Whether gradients are computed.
        losses: Losses of the micro-batches so far, on the last stage.
        additional: Additional losses that the model reports for each micro-batch so far, by name, on the last stage.
        outputs: Results of the last layer so far, if no loss is computed or ``keeps_outputs``.
        keeps_outputs: Whether outputs are kept besides the loss.
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
        """Return the tensors, without values, that the previous stage sends for micro-batch ``part``."""
        return [meta for _, meta in tensors_in(self.borders[part][self.stage - 1])]

    def forward(self, part: int, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run micro-batch ``part``; return the stage's result, on the last stage its loss divided by the number of micro-batches."""
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
        """Yield all parameters of the model; parameters of other stages are empty."""
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
