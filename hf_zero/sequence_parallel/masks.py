"""Attention masks of whole sequences, made by transformers' own functions while a model sees slices.

[Note: whole masks] A model's forward makes its masks (causal, sliding, chunked, packed, padded) with functions of
``transformers.masking_utils`` from the shapes and masks it was given. During a forward over slices these names of its modules stand for
functions that first join the slices of what they are given; so the mask is the one the model would make on one process, whatever its
kind, and every rank has all of it. Within the forward only: the names are the library's own again at its end.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.exchange import join_slices

_LIBRARY = "transformers.masking_utils"
_JOINED = ("attention_mask", "position_ids", "block_sequence_ids")


class WholeMasks:
    """The mask functions that the modules of a model call, and what stands for them meanwhile.

    Attributes:
        collectives: The sequence-parallel group.
        length: Tokens of this rank's slice in the forward under way.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self.collectives = collectives
        self.length = 0
        self._found = [
            (module, name, value)
            for module in modules_of(model)
            for name, value in vars(module).items()
            if name.startswith("create_") and callable(value) and getattr(value, "__module__", "") == _LIBRARY
        ]
        self._joined: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of this forward, by id; keeps the slice alive

    def enter(self, length: int) -> None:
        """Begin a forward over slices of ``length`` tokens."""
        self.length = length
        for module, name, function in self._found:
            setattr(module, name, self._whole(name, function))

    def leave(self) -> None:
        """End it."""
        for module, name, function in self._found:
            setattr(module, name, function)
        self._joined.clear()

    def _whole(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def make(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            _require_plain(name, given.arguments)
            for key, value in given.arguments.items():
                given.arguments[key] = self._argument(name, key, value)
            return function(*given.args, **given.kwargs)

        return make

    def _argument(self, name: str, key: str, value: Any) -> Any:
        """Return the argument ``key`` for whole sequences: shapes, positions and masks."""
        if not isinstance(value, torch.Tensor):
            return value
        whole = self.length * self.collectives.world
        if key in ("inputs_embeds", "input_embeds"):  # asked for shape, type and device only
            if value.shape[1] != self.length:
                raise UnsupportedError(
                    f"sequence parallelism: the model makes {value.shape[1]} tokens of the {self.length} of its slice (virtual tokens, "
                    "images); only models that keep one hidden state per token are supported"
                )
            return value.detach()[:, :1].expand(-1, whole, *value.shape[2:])
        if key == "cache_position":
            return torch.arange(whole, device=value.device)
        if key not in _JOINED:
            return value
        if value.dim() > 3 or value.shape[-1] != self.length:
            raise UnsupportedError(
                f"sequence parallelism: {name} got {key} of shape {tuple(value.shape)} for slices of {self.length} tokens. Give each rank "
                "its slice of a mask (batch, tokens); masks of four dimensions are not supported"
            )
        if id(value) not in self._joined:
            self._joined[id(value)] = (value, self._join(value, key))
        return self._joined[id(value)][1]

    def _join(self, value: torch.Tensor, key: str) -> torch.Tensor:
        return join_slices(self.collectives, value, -1, key)


def _require_plain(name: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments made from slices that cannot be joined to whole sequences."""
    if arguments.get("encoder_hidden_states") is not None:
        raise UnsupportedError("sequence parallelism: attention over an encoder's states is not supported")
    cache = arguments.get("past_key_values")
    if cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0:
        raise UnsupportedError("sequence parallelism: a forward over slices cannot continue from past_key_values; leave them out")
    for key in ("or_mask_function", "and_mask_function"):
        cells = getattr(arguments.get(key), "__closure__", None) or ()
        if any(isinstance(cell.cell_contents, torch.Tensor) for cell in cells):
            raise UnsupportedError(f"sequence parallelism: {name} got an {key} over a tensor of this slice, which cannot be made whole")


def modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the classes of ``model`` and its parts."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules and name.split(".")[0] not in ("torch", "builtins")]
