"""Positions of slices where a model makes more of them than one number per token."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.sequence_parallel.attention import SlicedAttention
from hf_zero.sequence_parallel.batches import counted_by_adapter
from hf_zero.sequence_parallel.exchange import join_slices

_OWN_COUNT = "create_position_ids_from_input_ids"  # what RoBERTa and its kin call it
_BY_LENGTH = ("longrope", "dynamic")


class OwnPositions:
    """[Note: own positions]

    Without ``position_ids`` most models count 0, 1, 2, ...; RoBERTa and its kin count tokens that are no padding, from behind the number of
    the padding token; OPT counts what its attention mask holds. An adapter cannot know the model, and writes 0, 1, 2, ...; so positions
    that come from an adapter, and that no batch had, are replaced by the model's own, of whole sequences. Positions that a script gives
    by hand are taken if they are the model's own, and refused otherwise: nobody can tell whether they were meant.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._name = type(model).__name__
        self._collectives = collectives
        self._by_tokens = next(filter(None, map(_count_of_tokens, model.modules())), None)
        self._by_mask = any(map(_counts_by_mask, model.modules()))

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the positions of this rank's slice in the model's own count; collective for models that have one.

        Raises:
            StateError: They were not made by an adapter, and the model would count otherwise.
        """
        given: torch.Tensor = kwargs["position_ids"]
        counted = counted_by_adapter(given)
        if counted is False or not (self._by_tokens or self._by_mask):
            return given
        own = self._own(args, kwargs, given)
        if counted:
            return own
        mask = kwargs.get("attention_mask")
        differs = own != given if mask is None or mask.dim() != 2 else (own != given) & mask.bool()
        if self._collectives.any_rank(bool(differs.any()), "position_ids"):
            raise StateError(
                f"sequence parallelism: {self._name} computes its own positions, and position_ids of this forward differ from them. Give "
                "the loader's batches without position_ids to UlyssesSPDataLoaderAdapter (accelerate does it in prepare) and pass its "
                "slices on as they are"
            )
        return given

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: torch.Tensor) -> torch.Tensor:
        if self._by_tokens is not None:
            count, padding = self._by_tokens
            tokens = args[0] if args else kwargs.get("input_ids")
            if tokens is None:  # embeddings: all of them count
                return given + padding + 1
            return self._slice(count(self._join(tokens, "input_ids"), padding))
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:  # of four dimensions: refused where masks are made
            return given
        whole = self._join(mask, "attention_mask").long()
        return self._slice(whole.cumsum(dim=1) * whole - 1)

    def _join(self, value: torch.Tensor, what: str) -> torch.Tensor:
        return join_slices(self._collectives, value, -1, what)

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self._collectives.world, dim=1)[self._collectives.rank]


def _count_of_tokens(module: nn.Module) -> tuple[Callable[[torch.Tensor, int], torch.Tensor], int] | None:
    """Return the function with which embeddings of RoBERTa's kin count, and the number of the padding token."""
    padding = getattr(module, "padding_idx", None)
    if not isinstance(padding, int) or isinstance(module, nn.Embedding):
        return None
    count = getattr(module, _OWN_COUNT, None) or getattr(sys.modules.get(type(module).__module__), _OWN_COUNT, None)
    return None if count is None else (count, padding)


def _counts_by_mask(module: nn.Module) -> bool:
    """Return whether the forward of a decoder with learned positions sums up the attention mask: OPT, BioGpt in some versions."""
    if not isinstance(getattr(module, "embed_positions", None), nn.Module):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "cumsum" in code.co_names


class WholeRotary:
    """[Note: frequencies of the longest]

    Rotary embeddings of the types "dynamic" and "longrope" choose their frequencies by the largest position they see, which on a slice is
    another on each rank. These get the positions of whole sequences, and what they give is cut.
    """

    def __init__(self, model: nn.Module, attention: SlicedAttention) -> None:
        self._attention = attention
        self._collectives = attention.collectives
        self._hooks = []
        for module in model.modules():
            if _depends_on_length(module):
                self._hooks.append(module.register_forward_pre_hook(self._join, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._cut))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._attention.exchanges_heads(module):
            return None
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        given.arguments["position_ids"] = join_slices(self._collectives, given.arguments["position_ids"], -1, "position_ids")
        return given.args, given.kwargs

    def _cut(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._attention.exchanges_heads(module):
            return None
        parts = output if isinstance(output, tuple) else (output,)  # cosines and sines: (batch, tokens, width)
        own = tuple(part.chunk(self._collectives.world, dim=-2)[self._collectives.rank] for part in parts)
        return own if isinstance(output, tuple) else own[0]


def _depends_on_length(module: nn.Module) -> bool:
    found = getattr(module, "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else [found]  # of each type of layers
    return any(isinstance(kind, str) and any(name in kind for name in _BY_LENGTH) for kind in kinds)


def require_even_temperature(model: nn.Module, length: int) -> None:
    """Refuse a model whose attention scales queries by their position and counts positions in a slice from 0 (Llama 4).

    The scale is 1 up to the position ``floor_scale``, so shorter sequences are allowed.

    Args:
        model: The model.
        length: Number of tokens of a whole sequence.

    Raises:
        UnsupportedError: ``length`` is at least ``floor_scale`` of a layer.
    """
    for module in model.modules():
        scale = getattr(module, "floor_scale", None)
        if scale is not None and getattr(module, "attn_temperature_tuning", False) and length >= scale:
            raise UnsupportedError(
                f"sequence parallelism: attn_temperature_tuning scales queries by the number of their token from {scale:g} tokens on "
                f"(floor_scale), which {type(module).__name__} counts from the start of the slice; sequences have {length} tokens. Shorter "
                "sequences, or attn_temperature_tuning=False, are supported"
            )
