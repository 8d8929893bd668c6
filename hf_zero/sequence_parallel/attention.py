"""Compute attention over slices of sequences, as functions in transformers' table of attention functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.exchange import heads_for_sequences, join_slices, sequences_for_heads
from hf_zero.sequence_parallel.joining import whole_of

_EAGER = "eager_attention_forward"  # the name each modeling file gives it
_replaced: dict[str, Core] = {}  # our functions in transformers' table, by implementation
Core = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_PER_HEAD = ("s_aux", "sinks")  # arguments with one value per query head
_OF_SLICES = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "block_table")  # made of slices; meaningless for the whole
_GROUPS = "num_key_value_groups"

_SLICED = "_hf_zero_sliced"  # attribute of a module


def exchange_heads_in_attention(implementation: str) -> None:
    """Replace ``implementation``'s function by one that exchanges heads for modules of sliced models, and calls the original for others."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    present = functions.get(implementation)
    if present is not None and present is _replaced.get(implementation):
        return
    if implementation == "eager" and not hasattr(functions, "get_interface"):
        raise UnsupportedError(
            "sequence parallelism: with transformers 4 eager attention is not called through the table of attention functions; make the "
            "model with attn_implementation='sdpa', or install transformers 5"
        )
    if present is None and implementation != "eager":
        raise UnsupportedError(f"sequence parallelism: transformers has no attention function {implementation!r}: {sorted(functions)}")
    own = dispatching((lambda module: present) if present is not None else eager_function)
    functions[implementation] = _replaced[implementation] = own


@contextmanager
def attention_replaced(implementation: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Register ``attend`` in transformers' table in place of ``implementation``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    before = functions.get(implementation)
    functions[implementation] = attend
    try:
        yield
    finally:
        if before is not None:
            functions[implementation] = before
        else:
            del functions[implementation]


def eager_function(module: nn.Module) -> Core:
    """Return the eager attention of the file that defines ``module``."""
    for base in type(module).__mro__:
        found: Core | None = getattr(sys.modules.get(base.__module__), _EAGER, None)
        if found is not None:
            return found
    raise UnsupportedError(f"{type(module).__module__} defines no {_EAGER}; make the model with attn_implementation='sdpa'")


class _Mark:
    """Names the attention of a module's slices; a copy of the module has none.

    An attribute, because torch.compile takes a module that it finds in a table for that one module: the graph of a layer, which serves
    all equal layers, would then have the weights of one.
    """

    def __init__(self, attention: SlicedAttention | None = None) -> None:
        self.attention = attention

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


class SlicedAttention:
    """Attention of one model's modules: all of them, or those at some paths.

    Attributes:
        collectives: The sequence-parallel group.
        reads_positions: The core function wants positions (flash attention finds packed sequences by them).
        sliced: Whether the forward under way is over slices, or the one whose backward is; else the last one.
        called: Whether the forward under way has called it.
        inside_whole: Modules under way, one in the other, that have whole sequences: attention in them is as ever.
        alone: Number of calls under way, one in the other, of a part of the model by itself, over whole sequences.
        outside: Whether no forward of the model is under way, nor the backward of one.
        length: Tokens of whole sequences in the forward under way, and in its backward; of models whose layers are cut.
    """

    def __init__(self, model: nn.Module, collectives: Collectives, reads_positions: bool, modules: Sequence[str] | None = None) -> None:
        self.collectives = collectives
        self.reads_positions = reads_positions
        self.sliced = False
        self.called = False
        self.inside_whole = 0
        self.alone = 0
        self.outside = True
        self.length = 0
        for module in model.modules() if modules is None else map(model.get_submodule, modules):
            module.__dict__[_SLICED] = _Mark(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedAttention:
        """Return the attention of a copy of the model, which has whole sequences always."""
        copied = copy(self)
        copied.alone = 1
        return copied

    @property
    def run(self) -> Callable[..., tuple[torch.Tensor, None]]:
        """Return ``attend``, as ``dispatching`` calls it."""
        return self.attend

    def exchanges_heads(self, module: nn.Module) -> bool:
        """Return whether ``module``, one of the model's, is called with slices of sequences now.

        Activation checkpointing calls it again in backward, maybe after an evaluation: [Note: forward of a backward]. Only for a call that
        belongs to no forward of the model the training mode of ``module`` decides.
        """
        return not self.alone and (self.sliced or (self.outside and module.training and torch.is_grad_enabled()))

    def attend(
        self,
        core: Core,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Run ``core`` on this rank's heads of whole sequences; collective.

        Args:
            core: The function of transformers that would have been called.
            module: The attention module.
            query: (batch, heads, slice, width); rotated by its positions already.
            key: (batch, key heads, slice, width).
            value: As ``key``, maybe of another width.
            attention_mask: Of whole sequences, as [Note: whole masks] has it made; or None.
            **kwargs: For ``core``.

        Returns:
            (batch, slice, heads, width), and None for the weights.
        """
        self.called = True
        given = [name for name in _OF_SLICES if kwargs.get(name) is not None]
        if given:
            raise UnsupportedError(
                f"sequence parallelism: attention cannot use {', '.join(given)}: it needs whole sequences, and this rank has a slice"
            )
        mask = _whole_mask(attention_mask, query.shape[2] * self.collectives.world, key.shape[2] * self.collectives.world)
        positions = kwargs.pop("position_ids", None)
        if positions is not None and self.reads_positions:
            whole = whole_of(positions)
            kwargs["position_ids"] = join_slices(self.collectives, positions, -1, "position_ids") if whole is None else whole
        return with_own_heads(self.collectives, partial(_output_of, core), module, query, key, value, mask, **kwargs), None


def _output_of(core: Core, *args: Any, **kwargs: Any) -> torch.Tensor:
    return core(*args, **kwargs)[0]


def with_own_heads(
    collectives: Collectives,
    run: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the attention of slices, (batch, slice, heads, width), that ``run`` computes for this rank's heads; collective.

    Args:
        collectives: The ranks that exchange heads for tokens.
        run: Called as a function of transformers' table, with tensors of this rank's heads; (batch, tokens, heads, width).
        module: The attention module.
        query: (batch, heads, slice, width).
        key: (batch, key heads, slice, width).
        value: As ``key``, maybe of another width.
        mask: Of the tokens of all ranks, or None.
        **kwargs: For ``run``.
    """
    heads, ranks = query.shape[1], collectives.world
    own = slice(collectives.rank * (heads // ranks), (collectives.rank + 1) * (heads // ranks))
    for name in _PER_HEAD:
        if isinstance(kwargs.get(name), torch.Tensor):
            kwargs[name] = kwargs[name][own]
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask[:, own]
    query, key, value, groups = heads_for_sequences(collectives, query, key, value)
    return sequences_for_heads(collectives, run(_own_heads(module, heads, own, groups), query, key, value, mask, **kwargs))


def _whole_mask(mask: Any, queries: int, keys: int) -> Any:
    """Return ``mask`` for whole sequences; refuse masks that cover only the slice."""
    if not isinstance(mask, torch.Tensor):
        return mask
    whole = whole_of(mask)
    mask = mask if whole is None else whole
    if mask.shape[-1] != keys or (mask.dim() == 4 and mask.shape[-2] not in (1, queries)):
        raise UnsupportedError(
            f"sequence parallelism: the model made an attention mask of shape {tuple(mask.shape)} by itself, where whole sequences of "
            f"{keys} tokens need one of {keys}; only models that make masks with transformers.masking_utils are supported"
        )
    return mask


class _OwnHeads:
    """An attention module as a core function reads it, with this rank's part of values per head."""

    def __init__(self, module: nn.Module, changed: dict[str, Any]) -> None:
        self._module = module
        self._changed = changed

    def __getattr__(self, name: str) -> Any:
        changed = self.__dict__["_changed"]
        return changed[name] if name in changed else getattr(self.__dict__["_module"], name)


def _own_heads(module: nn.Module, heads: int, own: slice, groups: int) -> Any:
    """Return ``module``, or a view of it if its number of query heads per key head or its sinks differ for ``own`` heads."""
    changed: dict[str, Any] = {}
    if getattr(module, _GROUPS, groups) != groups:
        changed[_GROUPS] = groups
    for name, param in module.named_parameters(recurse=False):
        if "sink" in name and param.shape == (heads,):
            changed[name] = param[own]
    return _OwnHeads(module, changed) if changed else module


def sliced_attention(module: nn.Module) -> SlicedAttention | None:
    """Return the attention over slices that serves ``module``; None for a module of a model with whole sequences."""
    mark: _Mark | None = getattr(module, _SLICED, None)
    return None if mark is None else mark.attention


def dispatching(core_of: Callable[[nn.Module], Core]) -> Core:
    """Return an attention function for all models: modules of a sliced model exchange heads, and others use the function from
    ``core_of``.
    """

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sliced, core = sliced_attention(module), core_of(module)
        if sliced is None or sliced.inside_whole or not sliced.exchanges_heads(module):
            return core(module, query, key, value, attention_mask, **kwargs)
        return sliced.run(core, module, query, key, value, attention_mask, **kwargs)

    return attend
