"""Divide the low-rank adapters of stacked experts (PEFT's ``target_parameters``): each rank keeps the parts for its own experts.

[Note: adapters of stacked experts] A wrapper around the module adds a product of two small matrices to the weights of every expert while
its forward runs: A (experts x r, in), where the r rows of one expert are contiguous, and B (out, r x experts), where column i belongs to
expert i modulo ``experts``. If A and B have only the rows and columns of this rank's experts, and the wrapper has their number, the
wrapper's own code computes the right product for this rank's weights. A weight with one row per expert (a bias) has one product for all
experts: each row of its B belongs to an expert, and all experts share its A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hf_zero.core.units.guards import guard_state_dict
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, cut, is_elsewhere, is_expert, mark_tp_shard
from hf_zero.core.units.registration import unregister
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.find import StackedExperts, shape_of_all, wrappers_of


def keep_part(param: nn.Parameter, part: TpShard) -> None:
    """Replace the values of ``param`` by those of ``part``, and record the part; collective after ``zero.Init``.

    A parameter that was loaded with this part already does not change ([Note: held experts]); a parameter of another pipeline stage stays
    empty and is only marked.
    """
    if is_expert(param):
        return
    if is_elsewhere(param):
        mark_tp_shard(param, replace(part, ranges=(), elsewhere=True))
        return
    owner = find_unit(param)
    if owner is None:
        values = cut(param.data, part)
    else:  # made by zero.Init, over all ranks
        with owner[0].unsharded():
            values = cut(param.detach(), part)
        unregister(param)
    param.data = values
    mark_tp_shard(param, part)


_MATRICES = ("lora_A", "lora_B")
_Pair = tuple[nn.Parameter, nn.Parameter]


def check_adapters(layer: StackedExperts) -> None:
    """Refuse adapters around ``layer`` that cannot be divided.

    Raises:
        UnsupportedError: An adapter is not a pair of low-rank matrices.
        StateError: An adapter does not cover all experts.
    """
    for wrapper in layer.adapters:
        if not all(isinstance(getattr(wrapper, name, None), nn.ModuleDict) for name in _MATRICES):
            raise UnsupportedError(
                f"expert_parallel: the experts at {layer.path} carry an adapter ({type(wrapper).__name__}) that computes with all of them "
                "together. LoRA (target_parameters) is divided; leave the experts out of this adapter, or leave expert_parallel out"
            )
        stacked = _is_stacked(layer, wrapper)
        for a, b in _pairs(layer, wrapper):
            rows, columns = shape_of_all(a)[0], shape_of_all(b)[1]
            whole = wrapper.num_experts == layer.count and rows == columns and rows % layer.count == 0
            if not (whole if stacked else shape_of_all(b)[0] == layer.count):
                raise _made_late(layer.path, wrapper)


def check_adapters_beside_split_layers(layer: StackedExperts) -> None:
    """Refuse adapters whose gradients would have to be summed over the ranks that have the same tokens.

    Raises:
        UnsupportedError: There is an adapter of a bias, whose matrix A belongs to all experts.
    """
    for adapter in layer.adapters:
        wrapper: Any = adapter
        if any(True for _ in _pairs(layer, wrapper)) and not _is_stacked(layer, wrapper):
            raise UnsupportedError(
                f"expert_parallel: the adapter of {wrapper.parameter_name} at {layer.path}, a bias, is not supported together with "
                "tensor_parallel: remove it from target_parameters, or remove tensor_parallel"
            )


def require_divided(model: nn.Module) -> None:
    """Refuse adapters that were added to experts after the experts had been divided.

    Raises:
        StateError: ``model`` has such an adapter; the message names it.
    """
    for path, module in model.named_modules():
        for wrapper in wrappers_of(model).get(id(module), ()):
            names = [name for name, param in module.named_parameters(recurse=False) if is_expert(param)]
            made = getattr(wrapper, _MATRICES[1], {})
            if wrapper.parameter_name in names and not all(is_expert(matrix.weight) for matrix in made.values()):
                raise _made_late(path, wrapper)


def _made_late(path: str, wrapper: Any) -> StateError:
    return StateError(
        f"expert_parallel: the adapter of {wrapper.parameter_name} at {path} does not cover all experts: it was created "
        "when this rank held only its own experts. Add adapters before initialize. If your peft version does not support "
        "experts that from_pretrained has divided, load the model before you create the configuration with "
        "expert_parallel"
    )


def divide_adapters(layer: StackedExperts, own: Range) -> None:
    """Keep the part of every adapter around ``layer`` that belongs to this rank's experts ``own``; collective after ``zero.Init``."""
    for adapter in layer.adapters:
        wrapper: Any = adapter
        stacked = _is_stacked(layer, wrapper)
        for a, b in _pairs(layer, wrapper):
            if stacked:
                rows = shape_of_all(a)[0]
                rank = rows // layer.count
                keep_part(a, TpShard(shape_of_all(a), 0, (Range(own.start * rank, own.stop * rank),), expert=True))
                keep_part(b, TpShard(shape_of_all(b), 1, tuple(own.shift(start) for start in range(0, rows, layer.count)), expert=True))
            else:
                keep_part(b, TpShard(shape_of_all(b), 0, (own,), expert=True))
        for matrix in (found for name in _MATRICES for found in getattr(wrapper, name).values()):
            guard_state_dict(matrix)
        if stacked:
            wrapper.num_experts = own.numel if own.numel > 1 else _StackOfOne(1)


class _StackOfOne(int):
    """The number 1 that also compares as greater than 1: PEFT's wrapper computes another product for layers without several experts."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __gt__(self, other: int) -> bool:
        return other <= 1


def _pairs(layer: StackedExperts, wrapper: Any) -> Iterator[_Pair]:
    """Yield the matrices A and B of every adapter in ``wrapper``, if it adapts a parameter with one entry per expert."""
    if wrapper.parameter_name in layer.params:
        first, second = (getattr(wrapper, name) for name in _MATRICES)
        yield from ((first[name].weight, second[name].weight) for name in first)


def _is_stacked(layer: StackedExperts, wrapper: Any) -> bool:
    """Return whether the adapter has one product per expert, instead of one product for all experts."""
    param = layer.params.get(wrapper.parameter_name)
    return param is not None and len(shape_of_all(param)) == 3
