"""Methods that a model calls between its layers with slices and whole sequences at once: image features that are added in.

[Note: between layers] The loop over the layers may hand a method the slice of the residual stream and what was made for whole sequences
before (a mask of image tokens, say), which do not fit. Such a call gets whole sequences, and its result is cut. The methods are those that
the forward around the layers names; what is wrapped is the class, once, and instances that are not sliced are as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

_LIBRARY = "transformers.models."


class Layers(Protocol):
    """What this file needs of ``CutLayers``."""

    length: int

    def under_way(self, module: nn.Module) -> bool:
        """Return whether slices are under way in ``module``, one of the model's."""

    def slice_length(self) -> int:
        """Return the tokens of a slice."""

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a slice (batch, tokens, ...)."""

    def cut_again(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a whole."""


_watched: WeakKeyDictionary[nn.Module, Layers] = WeakKeyDictionary()
_MARK = "_hf_zero_between_layers"


def watch_methods(container: nn.Module, layers: Layers) -> None:
    """Give whole sequences to the methods of ``container``, the module around the layers, where they get both."""
    _watched[container] = layers
    kind = type(container)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    for name in code.co_names if code is not None else ():
        method = getattr(kind, name, None)
        if inspect.isfunction(method) and method.__module__.startswith(_LIBRARY) and not hasattr(method, _MARK):
            setattr(kind, name, _dispatching(method))


def forget_methods(container: nn.Module) -> None:
    """Leave the methods of ``container`` as they are."""
    _watched.pop(container, None)


def _dispatching(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = _watched.get(self)
        if layers is None or not layers.under_way(self):
            return method(self, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        sliced = [tensor for tensor in tensors if _is_slice(tensor, layers)]
        if not sliced or not any(tensor.shape[1] == layers.length for tensor in tensors):
            return method(self, *args, **kwargs)
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: layers.joined(tensor) if _is_slice(tensor, layers) else tensor, (args, kwargs)
        )
        return tree_map_only(torch.Tensor, layers.cut_again, method(self, *args, **kwargs))

    setattr(call, _MARK, True)
    return call


def _is_slice(tensor: torch.Tensor, layers: Layers) -> bool:
    return tensor.dim() == 3 and tensor.shape[1] == layers.slice_length()
