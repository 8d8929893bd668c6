"""Collect gradients of parameters that get several per backward: autograd adds the second and later ones to the flat buffer itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_zero.core.schedule.gradient_sums import GradientPolicy
from hf_zero.core.schedule.gradients import BufferPool, Collector
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.whole_buffer import is_only_view
from hf_zero.pipeline.apply import DividesItself, pipeline_of


def collector_of(model: nn.Module) -> type[Collector]:
    """Return the class that collects the gradients of ``model``: ``InPlaceCollector`` where batches run in parts through pipeline
    stages.
    """
    return InPlaceCollector if pipeline_of(model) is not None or isinstance(model, DividesItself) else Collector


class InPlaceCollector(Collector):
    """Gradients of one unit, to which autograd adds in place.

    [Note: added in place] Where a parameter gets several gradients in one backward (the micro-batches of a pipeline), the first one is
    copied into the flat buffer ([Note: stolen gradients]). Autograd adds the following gradients to that place, without a hook, while they
    are in the cache. The sums and their order stay the same, because this is done only where gradient and buffer have one dtype and nothing
    is scaled. Until the backward ends, ``param.grad`` is the parameter's place in the flat buffer.
    """

    def __init__(self, unit: Unit, policy: GradientPolicy, pool: BufferPool) -> None:
        super().__init__(unit, policy, pool)
        self._several = False  # gradients of the present step came in several pieces

    def _write(self, grads: Mapping[int, torch.Tensor]) -> None:
        super()._write(grads)
        self._several |= self.piecemeal
        flat = self.flat
        if flat is not None and self.piecemeal and self._scale == 1.0 and flat.dtype == self._unit.layout.dtype:
            self._begin_in_place({index: self.place(flat, index) for index in grads})

    def _begin_in_place(self, places: Mapping[int, torch.Tensor]) -> None:
        """Point ``param.grad`` at these places, which hold the first gradients, so that autograd adds the following ones there."""
        for index, place in places.items():
            param = self._unit.params[index]
            if param is not None:
                param.grad = place
                self.in_place.add(index)

    def _end_in_place(self) -> None:
        for index in self.in_place:
            param = self._unit.params[index]
            if param is not None:
                param.grad = None
        self.in_place.clear()

    def clear(self, total: torch.Tensor | None) -> None:
        """Discard all gradients; see ``Collector.clear``.

        [Note: kept memory] On a host, allocating memory costs more than writing to it. With several gradients per backward, the memory is
        in use from the first part's backward on, when most activations exist, so freeing it gains nothing. The next step's gradients
        therefore reuse it, if this rank holds the whole sum and no script has kept a view of it.
        """
        super().clear(total)
        # The sum may be on the host while the unit is on a device.
        whole = total is not None and total.numel() == self._unit.layout.padded_numel and total.device.type == "cpu"
        if total is not None and whole and self._several and self._unit.collectives.topology.device.type == "cpu" and is_only_view(total):
            self.pool.give(total)
        self._several = False
