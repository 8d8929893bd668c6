"""Run a model's layers on slices, and the code around them on whole sequences: hooks at the places that ``token_flow`` has found.

[Note: cut layers] Every rank gives the model whole sequences (tokens are small), so that embeddings, positions, masks and towers are the
same as on one process. Each layer's arguments are cut where it begins: the residual stream from the first layer on is this rank's slice
only. Modules that mix tokens in a way of their own get whole sequences (one all-gather, its gradient a reduce-scatter), compute with all of
them, and keep their slice: each rank does the work of the group there. Gradients need no further care: every rank's loss is of its slice,
so the gradients that whole computations leave at parameters are summands, as the gradients of slices are.

[Note: between layers] The loop over the layers may give a method, such as one that adds image features, the slice of the residual stream
together with a value that was made for whole sequences before (a mask of image tokens), which do not fit. Such a call gets whole sequences,
and its result is cut. The methods are the ones that the forward around the layers names. The class is wrapped once; instances that are not
sliced behave as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel import sequence_functions
from hf_zero.sequence_parallel.attention import SlicedAttention
from hf_zero.sequence_parallel.joining import cut, join
from hf_zero.sequence_parallel.masks import modules_of
from hf_zero.sequence_parallel.sequence_functions import exchange_heads_in_functions
from hf_zero.sequence_parallel.token_flow import Boundary, Places, TokenFlow
from hf_zero.system.trees import argument_names, convert_arguments, convert_inside, named_arguments

_LIBRARY = "transformers.models."


class Layers(Protocol):
    """The part of ``CutLayers`` that this file uses."""

    @property
    def length(self) -> int:
        """Return the tokens of whole sequences."""

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


def forget_methods(container: nn.Module, layers: Layers) -> None:
    """Leave the methods of ``container`` as they are, unless other layers than ``layers`` watch them since."""
    if _watched.get(container) is layers:
        _watched.pop(container)


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


class CutLayers:
    """Hooks on the layers of one model and on operations in them that mix tokens.

    Attributes:
        attention: State of the model's forwards over slices.
    """

    def __init__(self, model: nn.Module, attention: SlicedAttention, flow: TokenFlow, whole_tail: bool) -> None:
        self.attention = attention
        self._collectives = attention.collectives
        self._hooks: list[Any] = []
        modules = dict(model.named_modules())
        self._around = {modules[path.rpartition(".")[0].rpartition(".")[0]] for path in flow.items}
        for container in self._around:
            watch_methods(container, self)
        for path, boundary in flow.items.items():
            self._before(modules[path], self._cut_arguments, boundary)
        for path, boundary in flow.mixers.items():
            self._before(modules[path], self._join_arguments, boundary)
            self._hooks.append(modules[path].register_forward_hook(partial(self._cut_results, boundary.outputs), always_call=True))
        if flow.functions:
            exchange_heads_in_functions(modules_of(model))
        for path in flow.functions:
            self._hooks.append(modules[path].register_forward_pre_hook(self._enter_functions))
            self._hooks.append(modules[path].register_forward_hook(self._leave_functions, always_call=True))
        if whole_tail:
            last = flow.items[flow.last]
            self._hooks.append(modules[flow.last].register_forward_hook(partial(self._join_results, last.outputs)))

    @property
    def length(self) -> int:
        """Return the tokens of whole sequences in the forward under way, and in its backward."""
        return self.attention.length

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        for container in self._around:
            forget_methods(container, self)

    def under_way(self, module: nn.Module) -> bool:
        """Return whether slices are under way in ``module``, one of the model's."""
        return not self.attention.inside_whole and self.attention.exchanges_heads(module)

    def slice_length(self) -> int:
        """Return the tokens of a slice."""
        return self.length // self._collectives.world

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a slice (batch, tokens, ...); collective."""
        return join(self._collectives, tensor, 1)

    def cut_again(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a whole (batch, tokens, ...)."""
        return cut(self._collectives, tensor, 1) if tensor.dim() == 3 and tensor.shape[1] == self.length else tensor

    def _before(self, module: nn.Module, work: Callable[..., Any], boundary: Boundary) -> None:
        names = argument_names(module)
        self._hooks.append(module.register_forward_pre_hook(partial(work, boundary, names), with_kwargs=True))

    def _cut_arguments(self, boundary: Boundary, names: list[str], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.attention.inside_whole or not self.attention.exchanges_heads(module):
            return None
        self._require_known(boundary, module, args, kwargs)
        return convert_arguments(args, kwargs, names, boundary.inputs, partial(self._cut, module))

    def _join_arguments(self, boundary: Boundary, names: list[str], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.attention.exchanges_heads(module):
            return None
        self.attention.inside_whole += 1
        if self.attention.inside_whole > 1:
            return None
        self._require_known(boundary, module, args, kwargs)
        return convert_arguments(args, kwargs, names, boundary.inputs, partial(self._join, module))

    def _require_known(self, boundary: Boundary, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse tensors of whole sequences that were not there when tokens were followed: nobody knows where their tokens are."""
        for key, tensor in named_arguments(module, args, kwargs):
            if key in boundary.inputs or key in boundary.whole or tensor.shape[-2:] == (self.length, self.length):
                continue
            if self.length in tensor.shape:
                raise UnsupportedError(
                    f"sequence parallelism: {type(module).__name__} got {key} of shape {tuple(tensor.shape)}, which it does not get in a "
                    f"plain call of the model; sequences have {self.length} tokens, and how to cut {key} is not known"
                )

    def _cut_results(self, places: Places, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.attention.exchanges_heads(module) or not self.attention.inside_whole:
            return None
        self.attention.inside_whole -= 1
        return None if self.attention.inside_whole or output is None else self._results(output, places, partial(self._cut, module))

    def _enter_functions(self, module: nn.Module, args: Any) -> None:
        if self.under_way(module):
            sequence_functions.enter(self._collectives)

    def _leave_functions(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.under_way(module):
            sequence_functions.leave()

    def _join_results(self, places: Places, module: nn.Module, args: Any, output: Any) -> Any:
        return self._results(output, places, partial(self._join, module)) if self.attention.exchanges_heads(module) else None

    @staticmethod
    def _results(output: Any, places: Places, convert: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
        for key, dim in places.items():
            output = convert_inside(output, key, dim, convert)
        return output

    def _cut(self, module: nn.Module, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return cut(self._collectives, tensor, dim) if self._is_whole(module, tensor, dim) else tensor

    def _join(self, module: nn.Module, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor if self._is_whole(module, tensor, dim) else join(self._collectives, tensor, dim)

    def _is_whole(self, module: nn.Module, tensor: torch.Tensor, dim: int) -> bool:
        size, ranks = tensor.shape[dim], self._collectives.world
        if size not in (self.length, self.length // ranks):
            raise UnsupportedError(
                f"sequence parallelism: {type(module).__name__} has to do with {size} tokens, where sequences have {self.length} and the "
                f"slices of {ranks} ranks {self.length // ranks}; only models that keep one hidden state per token are supported"
            )
        return size == self.length
