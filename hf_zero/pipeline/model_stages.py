"""Work of one stage of a divided model on the calls of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_zero.errors import StateError, UnsupportedError
from hf_zero.pipeline.micro_batches import loss_of
from hf_zero.pipeline.own_stages import OwnStages
from hf_zero.pipeline.passes import BorderTypes
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.system.trees import without_values

Border = tuple[torch.Tensor, ...]


@dataclass
class ModelStage:
    """One stage of the pipeline during one optimizer step.

    Attributes:
        own: The stages of this rank.
        index: Number of this stage.
        plan: Plan for calls of this kind.
        forward_of_model: The model's own forward.
        calls: Arguments of each part.
        types: Element types at the borders.
        around: Context of each forward.
        borders: Tensors of the known borders, by kind of call; new kinds are added.
        losses: Loss of each part, on the rank of the last stage.
    """

    own: OwnStages
    index: int
    plan: PipelinePlan
    forward_of_model: Callable[..., Any]
    calls: Sequence[Mapping[str, Any]]
    types: BorderTypes
    around: Callable[[], AbstractContextManager[Any]]
    borders: dict[Any, Border]
    losses: list[torch.Tensor] = field(default_factory=list)

    def expected(self, part: int) -> Border:
        """Return the tensors, without values, that the previous stage sends; a forward that runs no item finds them once per kind of
        call.
        """
        key = (id(self.plan), self.index, _kind_of(self.calls[part]))
        if key not in self.borders:
            self.borders[key] = self._border(part)
        return self.borders[key]

    def forward(self, part: int, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the stage; return the tensors for the next one, or the loss.

        Raises:
            UnsupportedError: The model returns no loss.
        """
        waiting = iter(received)
        with self.around():
            run = self.own.run(self.plan, self.index, lambda metas: [next(waiting) for _ in metas], self.forward_of_model, self.calls[part])
        if self.index < self.plan.stages - 1:
            return run.sent
        loss = loss_of(run.result)
        if loss is None:
            raise UnsupportedError("pipeline: train_batch needs a model that returns its loss: give it labels, or a loss_fn")
        self.losses.append(loss.detach())
        return [loss]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this stage may read: schedules that divide the backward examine each of them in every part."""
        return iter(self._parameters)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        named, holders = self.own.model.named_parameters(), self.plan.holders
        return [param for name, param in named if param.requires_grad and self.index in holders.get(name, (self.index,))]

    def _border(self, part: int) -> Border:
        found: list[torch.Tensor] = []

        def note(metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            found.extend(map(without_values, metas))
            return [torch.zeros(meta.shape, dtype=meta.dtype, device=self.own.device) for meta in metas]

        with torch.no_grad(), self.around():
            self.own.look(self.plan, self.index, note, self.forward_of_model, self.calls[part])
        wanted = len(self.plan.crossings[self.index - 1])
        if len(found) != wanted:
            raise StateError(f"pipeline: the forward used {len(found)} of the {wanted} tensors that cross the border of a stage")
        return tuple(self.types.of(self.index - 1, found))


def _kind_of(call: Mapping[str, Any]) -> Hashable:
    """Return a key of the arguments that shapes and types at the borders depend on, beside the plan."""
    return frozenset((name, value.shape, value.dtype) for name, value in call.items() if isinstance(value, torch.Tensor))
