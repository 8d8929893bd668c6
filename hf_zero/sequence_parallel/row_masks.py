"""Attention masks of the rows that a rank computes, made by transformers' own functions under context parallelism.

[Note: own rows] As in [Note: whole masks] the model's mask functions get whole sequences. They describe a mask by a function of the numbers
of query and key, which a function of transformers' table (by attention implementation) evaluates on a rectangle of them. During the
forward this table's function is called for the two runs of tokens that a place holds ([Note: head and tail]) in place of all, so that a
mask takes length / places x length elements, and its rows are those of one rank for any kind of mask.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.sequence_parallel.gathered import causal_rows
from hf_zero.sequence_parallel.layout import Layout
from hf_zero.sequence_parallel.masks import WholeMasks

_BEYOND = ("or_mask_function", "block_sequence_ids")  # arguments that let tokens see later ones


class RowMasks(WholeMasks):
    """The mask functions that the modules of a model call; meanwhile they make the rows of this rank's place.

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
        make, signature = super()._whole(name, function), inspect.signature(function)

        def rows(*args: Any, **kwargs: Any) -> Any:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as table

            given = signature.bind(*args, **kwargs).arguments
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

    def _rows(
        self, function: Callable[..., Any], causal: bool, *, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any
    ) -> Any:
        """Return what ``function`` of the table gives for the rows of this place; None where causality says it all."""
        local, padding = kwargs.get("local_size"), kwargs.get("attention_mask")
        is_full = padding is None or bool(padding.all())
        if allow_is_causal_skip and causal and is_full and (local is None or kv_length < local) and function.__name__ == "sdpa_mask":
            return None
        start = kwargs.pop("q_offset", 0)
        parts = [
            function(q_length=end - first, kv_length=kv_length, q_offset=start + first, allow_is_causal_skip=False, **kwargs)
            for first, end in self.layout.parts(q_length)
        ]
        if any(part is None for part in parts):
            return None
        mask = torch.cat(parts, dim=-2)
        # Eager attention gives a row that sees nothing (padding on the left) the mean of all values: later keys count there.
        if causal and (is_full or mask.dtype == torch.bool):
            causal_rows[mask] = True
        return mask
