"""Run the layers of one stage one after the other, and recompute them in backward if configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Recomputation:
    """The settings that select the layers to recompute in backward.

    Attributes:
        interval: Number of layers that are recomputed together; 0 keeps all activations.
        function: Function ``f(function, *args)`` that recomputes.
        classes: Class names of the layers that may be recomputed; None is all layers with parameters.
    """

    interval: int
    function: Callable[..., Any]
    classes: Sequence[str] | None = None

    def fits(self, layers: Sequence[LayerCall]) -> bool:
        """Return whether ``layers`` may be recomputed together: all are of ``classes``; or, if that is None, one has parameters."""
        modules = [layer.module for layer in layers]
        if self.classes is not None:
            return all(type(module).__name__ in self.classes for module in modules)
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)


@dataclass(frozen=True)
class LayerCall:
    """One entry in the list of layers.

    Attributes:
        module: The layer; None for a function.
        run: Function that runs the entry on the result of the previous entry.
    """

    module: nn.Module | None
    run: Callable[[Any], Any]


class RunOfLayers(nn.Module):
    """A module that runs the layers of one stage without registering them, because their names are those of the complete list.

    Args:
        calls: Entries of the layers.
        recomputation: Layers to recompute; may be changed while the model trains.
    """

    def __init__(self, calls: Sequence[LayerCall], recomputation: Recomputation) -> None:
        super().__init__()
        self.calls = tuple(calls)
        self.recomputation = recomputation

    def forward(self, inputs: Any) -> Any:
        """Return the output of the last layer for the input of the first: a tensor or a tuple of tensors."""
        interval = self.recomputation.interval if torch.is_grad_enabled() else 0
        for start in range(0, len(self.calls), interval or len(self.calls)):
            layers = self.calls[start : start + interval] if interval else self.calls
            if interval and self.recomputation.fits(layers):
                inputs = self.recomputation.function(_Chain(layers), *(inputs if isinstance(inputs, tuple) else (inputs,)))
            else:
                inputs = _run(layers, inputs)
        return inputs


class _Chain:
    """A function that runs consecutive layers on the elements of their input as separate arguments, as recomputation requires."""

    __name__ = __qualname__ = "layers of a pipeline"

    def __init__(self, layers: Sequence[LayerCall]) -> None:
        self._layers = layers

    def __call__(self, *parts: Any) -> Any:
        return _run(self._layers, parts[0] if len(parts) == 1 else parts)


def _run(layers: Sequence[LayerCall], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer.run(inputs)
    return inputs
