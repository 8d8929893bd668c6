"""Low-rank adapters of stacked experts (PEFT's ``target_parameters``): each rank has those of its own experts.

[Note: adapters of stacked experts] A wrapper around the module adds a product of two small matrices to the weights of every expert while
its forward runs: A (experts x r, in), where the r rows of one expert lie together, and B (out, r x experts), where every column in
``experts`` is one expert's. With the rows and columns of this rank's experts, and their number, the wrapper's own code computes what this
rank's weights need, and nothing else has to be known of it. A weight with one row per expert (a bias) has one product for all: rows of its
B are an expert's, its A is everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hf_zero.core.units.guards import guard_state_dict
from hf_zero.core.units.layout import Range
from hf_zero.core.units.registration import unregister
from hf_zero.core.units.tp_shard import TpShard, cut, is_elsewhere, is_expert, mark_tp_shard
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.find import StackedExperts, shape_of_all, wrappers_of


def keep(param: nn.Parameter, part: TpShard) -> None:
    """Replace the values of ``param`` by those of ``part``, and record the part; collective after ``zero.Init``.

    A parameter that was loaded so stays as it is ([Note: held experts]), and one of another stage of a pipeline as empty as it is.
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
        UnsupportedError: They are no pairs of low-rank matrices.
        StateError: They are not those of all experts.
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
    """Refuses adapters that ranks with the same tokens would have to add up gradients for.

    Raises:
        UnsupportedError: There is one of a bias, a part of which belongs to all experts.
    """
    for adapter in layer.adapters:
        wrapper: Any = adapter
        if any(True for _ in _pairs(layer, wrapper)) and not _is_stacked(layer, wrapper):
            raise UnsupportedError(
                f"expert_parallel: the adapter of {wrapper.parameter_name} at {layer.path}, a bias, is not provided together with "
                "tensor_parallel: leave it out of target_parameters, or leave tensor_parallel out"
            )


def require_divided(model: nn.Module) -> None:
    """Refuses adapters around experts that were divided before there were adapters.

    Raises:
        StateError: There are such.
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
                keep(a, TpShard(shape_of_all(a), 0, (Range(own.start * rank, own.stop * rank),), expert=True))
                keep(b, TpShard(shape_of_all(b), 1, tuple(own.shift(start) for start in range(0, rows, layer.count)), expert=True))
            else:
                keep(b, TpShard(shape_of_all(b), 0, (own,), expert=True))
        for matrix in (found for name in _MATRICES for found in getattr(wrapper, name).values()):
            guard_state_dict(matrix)
        if stacked:
            wrapper.num_experts = own.numel if own.numel > 1 else _StackOfOne(1)


class _StackOfOne(int):
    """1, and more than 1: a wrapper takes weights for those of one layer, which have another product, unless there are several experts."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __gt__(self, other: int) -> bool:
        return other <= 1


def _pairs(layer: StackedExperts, wrapper: Any) -> Iterator[_Pair]:
    """Yield A and B of every adapter of a parameter that has an entry per expert."""
    if wrapper.parameter_name in layer.params:
        first, second = (getattr(wrapper, name) for name in _MATRICES)
        yield from ((first[name].weight, second[name].weight) for name in first)


def _is_stacked(layer: StackedExperts, wrapper: Any) -> bool:
    """Return whether the adapter has a product for each expert, not one for all."""
    param = layer.params.get(wrapper.parameter_name)
    return param is not None and len(shape_of_all(param)) == 3
