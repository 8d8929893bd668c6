"""Collect gradients of parameters that get several in one backward: autograd adds the later ones to the flat buffer itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_zero.core.schedule.gradients import BufferPool, Collector
from hf_zero.core.schedule.hops import GradientPolicy
from hf_zero.core.units.memory_uses import is_only_view
from hf_zero.core.units.unit import Unit
from hf_zero.pipeline.apply import pipeline_of
from hf_zero.pipeline.self_divided import DividesItself


def collector_of(model: nn.Module) -> type[Collector]:
    """Return the class that collects the gradients of ``model``: another one if parts of a batch run through stages of it."""
    return InPlaceCollector if pipeline_of(model) is not None or isinstance(model, DividesItself) else Collector


class InPlaceCollector(Collector):
    """Gradients of one unit, to which autograd adds in place.

    [Note: added in place] Where a parameter gets several gradients in one backward (the micro-batches of a pipeline), the first one is
    copied ([Note: stolen gradients]). Autograd adds the others to it, while they are in the cache, without a hook: the same
    sums in the same order, where gradient and buffer are of one type and nothing is scaled. Until the backward ends, ``param.grad`` is the
    parameter's place in the flat buffer.
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
        """Let autograd add the following gradients of these parameters to their places, which hold the first ones."""
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

        [Note: kept memory] On a host, fresh memory costs more than writing to it. In a backward of several gradients each the memory is in
        use from the first part's backward on, when most activations exist: freeing it gains nothing. So the next step's gradients take
        it, if this rank has all of the sum. Scripts may have kept a view of the memory that was shown to them; then they do not.
        """
        super().clear(total)
        # On a device the sum may be the host's.
        whole = total is not None and total.numel() == self._unit.layout.padded_numel and total.device.type == "cpu"
        if total is not None and whole and self._several and self._unit.collectives.topology.device.type == "cpu" and is_only_view(total):
            self.pool.give(total)
        self._several = False
