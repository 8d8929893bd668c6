"""Steps a torch optimizer over a few segments at a time, with the result of one step over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.core.optimizer.clones import clone
from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.native.passes import LOW_TYPES
from hf_zero.ops.host_optimizer import HostOptimizer


class SubGroupStepper:
    """One step of ``optimizer``, taken sub-group by sub-group.

    [Note: stepping by sub-groups] Each sub-group is stepped by a clone: an object of the same class with the same attributes and the same
    state dict, whose groups hold the sub-group's segments and the values that the groups had when the step began. So a counter that an
    optimizer keeps in its groups (schedule-free ones do) is seen by every sub-group as one common step would see it, a
    learning rate that changes meanwhile has no effect, and a sub-group costs no look at the segments of the others.

    Args:
        optimizer: The inner optimizer.
        accumulation_dtype: Type in which gradients are multiplied.
        threads: The most threads that a native pass uses; None is torch's number.

    Attributes:
        optimizer: As given.
        values: What the groups said at construction.
        threads: As given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation_dtype: torch.dtype, threads: int | None = None) -> None:
        self.optimizer = optimizer
        self._accumulation_dtype = accumulation_dtype
        self.threads = threads or torch.get_num_threads()
        self.values = [_values(group) for group in optimizer.param_groups]
        self._after: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(
        self,
        segments: Sequence[OwnedSegment],
        grads: Sequence[torch.Tensor],
        factor: float = 1.0,
        lows: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Updates ``segments``.

        Args:
            segments: Of one sub-group.
            grads: A gradient of each, of the type it arrived in; may be overwritten.
            factor: What gradients are multiplied with first.
            lows: For each where its new value goes as well, in another type; None for nowhere.
        """
        groups = [{**values, "params": []} for values in self.values]
        for segment in segments:
            groups[segment.group]["params"].append(segment.tensor)
        other = clone(self.optimizer, groups)
        targets = list(lows or [None] * len(segments))
        if isinstance(other, HostOptimizer):
            update_with_lows(other, [segment.tensor for segment in segments], grads, targets, factor, self.threads)
        else:
            self._step(other, segments, grads, factor)
            _copy_to([segment.tensor for segment in segments], targets)
        self._after = groups

    def _step(self, other: torch.optim.Optimizer, segments: Sequence[OwnedSegment], grads: Sequence[torch.Tensor], factor: float) -> None:
        """A torch optimizer: gradients brought to the accumulation type, scaled there, then cast to the master's, as without offload."""
        for segment, grad in zip(segments, grads, strict=True):
            wide = grad.to(torch.promote_types(self._accumulation_dtype, segment.tensor.dtype))
            segment.tensor.grad = (wide.mul_(factor) if factor != 1.0 else wide).to(segment.tensor.dtype)
        try:
            other.step()
        finally:
            for segment in segments:
                segment.tensor.grad = None

    def finish(self) -> None:
        """Gives the optimizer's groups the values that its own step has changed."""
        for group, before, after in zip(self.optimizer.param_groups, self.values, self._after, strict=False):
            group.update({key: value for key, value in _values(after).items() if value is not before.get(key)})


def update_with_lows(
    optimizer: HostOptimizer,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor | None],
    factor: float,
    threads: int,
) -> None:
    """``optimizer.update`` that writes to ``lows`` of any type: 16-bit ones in the same pass, others after it."""
    fused = [low if low is not None and low.dtype in LOW_TYPES else None for low in lows]
    optimizer.update(params, grads, fused, factor, threads)
    _copy_to(params, [None if done is not None else low for done, low in zip(fused, lows, strict=True)])


def _copy_to(params: Sequence[torch.Tensor], lows: Sequence[torch.Tensor | None]) -> None:
    for param, low in zip(params, lows, strict=True):
        if low is not None:
            low.copy_(param)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
