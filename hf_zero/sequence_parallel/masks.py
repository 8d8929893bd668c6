"""Make the attention masks of whole sequences, or of the rows that a rank computes, with transformers' own functions.

[Note: whole masks] A model's forward makes its masks (causal, sliding, chunked, packed, padded) with functions of
``transformers.masking_utils`` from the shapes and masks it was given. During a forward over slices these names of its modules refer to
functions that first join the slices of their arguments; so the mask is the one the model would make on one process, whatever its
kind, and every rank has all of it. At the end of the forward the names refer to the library's functions again.

[Note: own rows] As in [Note: whole masks] the model's mask functions get whole sequences under context parallelism. They describe a mask by
a function of the numbers of query and key, which a function of transformers' table (by attention implementation) evaluates on a rectangle
of them. During the forward this table's function is called for the two runs of tokens that a place holds ([Note: head and tail]) in place
of all, so that a mask takes length / places x length elements, and its rows are those of one rank for any kind of mask.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.batches import cache_in
from hf_zero.sequence_parallel.exchange import join_slices
from hf_zero.sequence_parallel.gathered import causal_rows
from hf_zero.sequence_parallel.joining import Layout

_LIBRARY = "transformers.masking_utils"
_JOINED = ("attention_mask", "position_ids", "block_sequence_ids")
_BEYOND = ("or_mask_function", "block_sequence_ids")  # arguments that let tokens see later ones


class WholeMasks:
    """Replacement of the mask functions that a model's modules call, during a forward over slices.

    Attributes:
        collectives: The sequence-parallel group.
        length: Tokens of this rank's slice in the running forward.
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
        """End the forward, and restore the mask functions."""
        for module, name, function in self._found:
            setattr(module, name, function)
        self._joined.clear()

    def _whole(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)

        def make(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}  # an older name of an argument stays: the function renames it
            _require_plain(name, given)
            return function(**{key: self._argument(name, key, value) for key, value in given.items()})

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
    cache = cache_in(arguments)
    if cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0:
        raise UnsupportedError("sequence parallelism: a forward over slices cannot continue from a cache (past_key_values); leave it out")
    for key in ("or_mask_function", "and_mask_function"):
        cells = getattr(arguments.get(key), "__closure__", None) or ()
        if any(isinstance(cell.cell_contents, torch.Tensor) for cell in cells):
            raise UnsupportedError(f"sequence parallelism: {name} got an {key} over a tensor of this slice, which cannot be made whole")


def modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the classes of ``model`` and its parts."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules and name.split(".")[0] not in ("torch", "builtins")]


class RowMasks(WholeMasks):
    """Replacement of the mask functions that a model's modules call; it returns only the mask rows of this rank's tokens.

    Attributes:
        layout: The division of sequences.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(model, layout.collectives)
        self.layout = layout

    def _join(self, value: torch.Tensor, key: str) -> torch.Tensor:
        return self.layout.join(value, -1, key)

    def _argument(self, name: str, key: str, value: Any) -> Any:
        if key == "attention_mask" and isinstance(value, torch.Tensor) and value.dim() == 4:
            return value  # rows of this place already, which the library returns as they are
        return super()._argument(name, key, value)

    def _whole(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        make, names = super()._whole(name, function), list(inspect.signature(function).parameters)

        def rows(*args: Any, **kwargs: Any) -> Any:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as table

            given = {**dict(zip(names, args, strict=False)), **kwargs}
            config: Any = given["config"]
            causal = "causal" in name and getattr(config, "is_causal", True) and all(given.get(key) is None for key in _BEYOND)
            implementation = config._attn_implementation
            present = table[implementation]
            table[implementation] = functools.partial(self._rows, present, causal)
            try:
                return make(*args, **kwargs)
            finally:
                table[implementation] = present

        return rows

    def _rows(self, function: Callable[..., Any], causal: bool, *, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
        """Return the result of the table's ``function`` for the rows of this place; None where causality alone defines the mask."""
        local, padding = kwargs.get("local_size"), kwargs.get("attention_mask")
        is_full = padding is None or bool(padding.all())
        if (
            allow_is_causal_skip
            and causal
            and is_full
            and (local is None or kv_length < local)
            and function.__name__.startswith("sdpa_mask")
        ):
            return None
        rows = self._arguments_of_rows(kwargs)
        parts = [function(kv_length=kv_length, allow_is_causal_skip=False, **kwargs, **chosen) for chosen in rows]
        if any(part is None for part in parts):
            return None
        mask = torch.cat(parts, dim=-2)
        # Eager attention gives a row that sees nothing (padding on the left) the mean of all values: later keys count there.
        if causal and (is_full or mask.dtype == torch.bool):
            causal_rows[mask] = True
        return mask

    def _arguments_of_rows(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Remove from ``given`` the arguments of a mask function that choose its rows, and return those for each part of this place's rows.

        transformers before 5.4 takes the positions of the rows, later versions a length and an offset.
        """
        if (positions := given.pop("cache_position", None)) is not None:
            return [{"cache_position": positions[first:end]} for first, end in self.layout.parts(len(positions))]
        length, start = given.pop("q_length"), given.pop("q_offset", 0)
        return [{"q_length": end - first, "q_offset": start + first} for first, end in self.layout.parts(length)]
