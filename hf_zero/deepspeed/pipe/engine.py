"""Define the engine of a ``PipelineModule``, which trains complete batches instead of separate forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine_parts import EngineParts
from hf_zero.core.step.precision import cast_floating
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.pipe.module import PipelineModule
from hf_zero.deepspeed.pipe.work import BatchWork, Borders, Feed, MicroBatch, agree, share_buffers
from hf_zero.deepspeed.served.helpers import RepeatingLoader
from hf_zero.errors import ConfigError, StateError
from hf_zero.pipeline.apply import refuse_sharded_parameters, schedule_of
from hf_zero.pipeline.plan import Placement
from hf_zero.pipeline.schedules import Scheduler
from hf_zero.pipeline.train import whole_step

if TYPE_CHECKING:
    from hf_zero.config.resolve import ResolvedConfig
    from hf_zero.sequence_parallel.state import SequenceParallel


class PipelineError(StateError):
    """Error for calling forward, backward or step of a pipeline engine, which runs complete batches only."""


def _refused(call: str) -> Callable[..., Any]:
    def refuse(self: PipelineEngine, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call that a pipeline engine does not support.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            f"PipelineEngine.{call} is not available: the stages of a pipeline work on several micro-batches at a time, so an engine runs "
            "whole batches. engine.train_batch(data_iter) runs forward, backward and step of gradient_accumulation_steps micro-batches, "
            "engine.eval_batch(data_iter) runs the forward alone"
        )

    return refuse


class PipelineEngine(Engine):
    """The engine that trains a ``PipelineModule``; ``deepspeed.initialize`` returns it for such a module.

    Attributes:
        grid: Position of this rank, and the groups of ranks; also available as ``mpu``.
        num_stages: Number of stages.
        stage_id: Stage of this rank.
        feed: Source of micro-batches.

    Args:
        module: The model.
        resolved: The configuration.
        parts: Parts of the engine.
        sequence_parallel: Must be None.

    Raises:
        UnsupportedError: The ZeRO stage is 3.
    """

    training_route = "eval"  # keep the order of the data set, as DeepSpeed does
    _micro_batches: int | None = None

    def __init__(
        self, module: nn.Module, resolved: ResolvedConfig, parts: EngineParts, sequence_parallel: SequenceParallel | None = None
    ) -> None:
        refuse_sharded_parameters(resolved.config)
        super().__init__(module, resolved, parts, sequence_parallel)
        assert isinstance(module, PipelineModule)
        self.grid = self.mpu = module.mpu()
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.feed = Feed()
        self._additional_losses: dict[str, torch.Tensor] | None = None
        self._pipe = open_collectives(self.grid.pipe)
        interval = self.settings.pipeline.activation_checkpoint_interval
        if interval > 0:
            module.set_checkpoint_interval(interval)
        self._scheduler = Scheduler(Placement(self.num_stages, self.num_stages), self._pipe, schedule_of(self.settings.pipeline))
        self._borders = Borders(module, self._pipe, self.autocast)

    # -- batches ----------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train one batch: forward and backward of ``gradient_accumulation_steps`` micro-batches, and an optimizer step; collective.

        Args:
            data_iter: Iterator over (inputs, labels) of micro-batches. It is read on the first and the last stage, which must get the same
                data. None reads ``training_data``, or the argument of ``set_dataloader`` or ``set_dataiterator``.

        Returns:
            The mean loss of all micro-batches and data-parallel ranks, a scalar, on every rank.

        Raises:
            StateError: The engine has no optimizer, there is no iterator to read, or ``micro_batches`` was set to another number.
            ConfigError: An entry of the iterator is not (inputs, labels).
            StopIteration: The data has ended before the batch was complete.
        """
        self._require_optimizer("train_batch")
        if self.micro_batches != self.accumulation.steps:
            raise StateError(
                f"train_batch() with engine.micro_batches {self.micro_batches}: a training batch has gradient_accumulation_steps "
                f"{self.accumulation.steps} micro-batches, by which each loss is divided. Set micro_batches back after eval_batch(), or "
                "call engine.set_train_batch_size(samples)"
            )
        self.module.train()
        work = self._work(data_iter, self.accumulation.steps, computes_loss=True, together=True)
        with whole_step(self):
            self._scheduler.train({self.stage_id: work}, len(work.parts), self.scaler.scale)
        loss = self._everywhere(work.losses)
        self._report(work.additional)
        self.spikes.loss.add(loss)
        super().step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run the forward of one batch in evaluation mode, without gradients; collective.

        Args:
            data_iter: Iterator over (inputs, labels), as in ``train_batch``.
            return_logits: Whether to return ``(result, outputs)``, where ``outputs`` are the concatenated outputs of all micro-batches on
                the last stage, and None on other stages.
            compute_loss: Whether the result is computed from losses; otherwise from the outputs of the last layer.
            reduce_output: "avg" for the mean over micro-batches and data-parallel ranks; None for a list by micro-batch.
            bcast_loss: Whether all stages get a mean loss; otherwise only the last stage does. Other results are never sent.
            num_micro_batches: Number of micro-batches to read; None is ``micro_batches``.

        Returns:
            The result; None on stages that do not get it.

        Raises:
            ConfigError: ``reduce_output`` has another value, or an entry of the iterator is not (inputs, labels).
            StateError: There is no iterator to read.
            StopIteration: The data has ended before the batch was complete.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f"eval_batch(reduce_output={reduce_output!r}): 'avg' or None is allowed")
        training = self.module.training
        self.module.eval()
        try:
            work = self._work(data_iter, num_micro_batches or self.micro_batches, compute_loss, reduce_output is not None)
            work.trains, work.keeps_outputs = False, return_logits
            with torch.no_grad():
                self._scheduler.look({self.stage_id: work}, len(work.parts))
        finally:
            self.module.train(training)
        result = self._result(work, reduce_output, bcast_loss)
        return (result, _joined(work.outputs)) if return_logits else result

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches that ``eval_batch`` reads; ``gradient_accumulation_steps``, unless a script sets it."""
        return self._micro_batches or self.accumulation.steps

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        if index(count) < 1:
            raise ConfigError(f"engine.micro_batches was set to {count!r}; a number of at least 1 is allowed")
        self._micro_batches = None if count == self.accumulation.steps else int(count)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the number of samples per optimizer step, like ``Engine.set_train_batch_size``, and ``micro_batches`` to fit it."""
        super().set_train_batch_size(train_batch_size)
        self._micro_batches = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let ``train_batch()`` read ``iterator`` from now on."""
        self.feed.batches = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Let ``train_batch()`` read ``loader`` from now on; the loader restarts when it ends."""
        self.training_dataloader = loader
        self.feed.batches = iter(RepeatingLoader(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set ``fn`` as the function that converts each entry of an iterator to (inputs, labels)."""
        self.feed.convert = fn

    def is_first_stage(self) -> bool:
        """Return whether this rank's stage is the first, which reads the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank's stage is the last, which computes the loss."""
        return self.stage_id == self.num_stages - 1

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return the additional losses that the module reported for the last batch, averaged like the loss; None if it reports none."""
        return self._additional_losses

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may change from one micro-batch to the next."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: a mask is sent between stages like any other tensor, whatever its type."""

    # -- saving -----------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Save a checkpoint like ``Engine.save_checkpoint``, with the running statistics of all stages."""
        share_buffers(self.module, self._pipe)
        return super().save_checkpoint(*args, **kwargs)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Save 16-bit weights like ``Engine.save_16bit_model``, with the running statistics of all pipeline stages."""
        share_buffers(self.module, self._pipe)
        return super().save_16bit_model(*args, **kwargs)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        share_buffers(self.module, self._pipe)
        return super()._consolidated_16bit_state_dict(exclude_frozen_parameters)

    # -- methods that a pipeline engine refuses ---------------------------------------------------------------------------

    forward = _refused("forward()")
    backward = _refused("backward()")
    step = _refused("step()")

    # -- parts ------------------------------------------------------------------------------------------------------------

    def _work(self, data_iter: Iterator[Any] | None, count: int, computes_loss: bool, together: bool) -> BatchWork:
        """Read the next ``count`` micro-batches and return this stage's work on them; collective over the stages, with ``together`` also
        over data-parallel ranks.
        """
        module, device = self.module, self.collectives.topology.device
        assert isinstance(module, PipelineModule)
        reads = self.is_first_stage() or self.is_last_stage()
        if data_iter is None and self.feed.batches is None and self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
        networks = [self._pipe, self.collectives.data] if together else [self._pipe]
        parts, kinds = agree(networks, lambda: self.feed.take(data_iter, count, device) if reads else [MicroBatch()] * count)
        if self.precision.casts_inputs and self.precision.param_dtype is not None:
            parts = [MicroBatch(cast_floating(part.inputs, self.precision.param_dtype), part.labels) for part in parts]
        return BatchWork(module, self.stage_id, parts, self._borders.of(parts, kinds), self.autocast, computes_loss)

    def _everywhere(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean of the last stage's ``losses`` and over data-parallel ranks, on every rank; collective."""
        mean = _mean(losses, self.collectives.data) if self.is_last_stage() else torch.zeros((), device=self.collectives.topology.device)
        self._pipe.broadcast(mean, self.num_stages - 1, "mean loss")
        return mean

    def _report(self, found: list[dict[str, torch.Tensor]]) -> None:
        """Store the means of the additional losses that the last stage ``found``, on every rank; collective if the model reports some."""
        if getattr(type(self.module), "get_additional_losses", None) is PipelineModule.get_additional_losses:
            return  # the class decides this, equally on all stages, so no message is needed
        names = self._pipe.broadcast_object(list(found[0]) if found else [], self.num_stages - 1, "names of losses")
        self._additional_losses = {name: self._everywhere([losses[name] for losses in found]) for name in names} or None

    def _result(self, work: BatchWork, reduce: str | None, everywhere: bool) -> Any:
        if reduce is not None and work.computes_loss and everywhere:
            self._report(work.additional)
            return self._everywhere(work.losses)
        if not self.is_last_stage():
            return None
        values = work.losses if work.computes_loss else work.outputs
        return values if reduce is None else _mean(values, self.collectives.data)


def _mean(values: list[torch.Tensor], data: Collectives) -> torch.Tensor:
    """Return the mean of a list of tensors and over the ranks of ``data``, in fp32; collective over these ranks.

    Raises:
        ConfigError: The entries are not tensors of one shape.
    """
    if not all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
        raise ConfigError(
            "eval_batch(reduce_output='avg'): the model does not return tensors of one shape; reduce_output=None returns a list"
        )
    mean = torch.stack([value.float() for value in values]).mean(0)
    data.all_reduce(mean, "mean over micro-batches").wait()
    return mean / data.world


def _joined(outputs: list[Any]) -> Any:
    """Concatenate the outputs of micro-batches to one batch; None if there are none."""
    if not outputs:
        return None
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs)
    return tuple(_joined(list(column)) for column in zip(*outputs, strict=True))
