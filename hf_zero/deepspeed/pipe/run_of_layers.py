"""Layers that one stage runs one after the other, with or without keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Recomputation:
    """Which layers are run again in backward in place of keeping their activations.

    Attributes:
        interval: So many layers are one recomputation; 0 keeps all activations.
        function: ``f(function, *args)`` that recomputes.
        classes: Names of classes: a recomputation holds only such layers. None is all with parameters.
    """

    interval: int
    function: Callable[..., Any]
    classes: Sequence[str] | None = None

    def fits(self, layers: Sequence[LayerCall]) -> bool:
        """Return whether ``layers`` together may be recomputed: all of the named classes, or any with parameters."""
        modules = [layer.module for layer in layers]
        if self.classes is not None:
            return all(type(module).__name__ in self.classes for module in modules)
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)


@dataclass(frozen=True)
class LayerCall:
    """One place in the list of layers.

    Attributes:
        module: The layer; None for a function.
        run: Called with what the layer before returned.
    """

    module: nn.Module | None
    run: Callable[[Any], Any]


class RunOfLayers(nn.Module):
    """The layers of one stage as one module, which calls and does not register them: their names are those of the whole list.

    Args:
        calls: The layers.
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
    """Layers as a function of the parts of their input, which is how recomputation wants it."""

    __name__ = __qualname__ = "layers of a pipeline"

    def __init__(self, layers: Sequence[LayerCall]) -> None:
        self._layers = layers

    def __call__(self, *parts: Any) -> Any:
        return _run(self._layers, parts[0] if len(parts) == 1 else parts)


def _run(layers: Sequence[LayerCall], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer.run(inputs)
    return inputs
