"""Gradients that autograd adds to a unit's flat buffer by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hf_zero.core.units.memory_uses import is_only_view


class InPlace:
    """Parameters whose ``grad`` is their place in the flat buffer, until the backward that runs ends.

    [Note: added in place] Where a parameter gets several gradients in one backward (the micro-batches of a pipeline), the first one is
    copied ([Note: stolen gradients]). Autograd adds the others to it, while they are in the cache, and no hook has anything to do: the same
    sums in the same order, where gradient and buffer are of one type and nothing is scaled.

    Attributes:
        indices: Their positions; the same set for good.

    Args:
        params: Of the unit; None for one that is gone.
    """

    def __init__(self, params: Sequence[nn.Parameter | None]) -> None:
        self._params = params
        self.indices: set[int] = set()

    def begin(self, places: Mapping[int, torch.Tensor]) -> None:
        """What comes for these parameters from now on is added to their places, which are written."""
        for index, place in places.items():
            param = self._params[index]
            if param is not None:
                param.grad = place
                self.indices.add(index)

    def end(self) -> None:
        """Nothing more is added in place."""
        for index in self.indices:
            param = self._params[index]
            if param is not None:
                param.grad = None
        self.indices.clear()


def memory_to_keep(total: torch.Tensor | None, numel: int) -> torch.Tensor | None:
    """A unit's gradient after the step, (numel,) if this rank has it whole, where the next step's may take up its memory.

    [Note: kept memory] Fresh memory of a host costs more than what is written to it. In a backward of several gradients each (of a
    pipeline) the memory is in use from the first part's backward on, when most activations are there: giving it back gains
    nothing. Scripts may have kept a view of it that they were shown.
    """
    return total if total is not None and total.numel() == numel and is_only_view(total) else None
