"""Record layers that were loaded with this rank's experts only, until an engine divides the model.

[Note: held experts] The code that reads a checkpoint knows from the configuration which experts this rank needs, before there are an engine
and its groups. The parameters get the shapes and marks that dividing the layer would give them. The record is stored on the module,
because a deep copy of a parameter loses its marks. Until ``divide_model``, a call of the layer raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.guards import called_before_engine, guard, release
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, is_elsewhere, mark_tp_shard
from hf_zero.core.units.registration import unregister
from hf_zero.core.units.unit import full_shape
from hf_zero.expert_parallel.find import ExpertLayer, StackedExperts

_HELD = "_hf_zero_held_experts"  # attribute of a module whose forward calls experts


@dataclass(frozen=True)
class Place:
    """The position of a rank among the ranks that together hold all experts.

    Attributes:
        ranks: Number of these ranks.
        index: Position of this rank among them, from 0.
    """

    ranks: int
    index: int

    def own(self, count: int) -> Range:
        """Return the contiguous range of this rank's experts among ``count``, which must be a multiple of ``ranks``."""
        here = count // self.ranks
        return Range(here * self.index, here * (self.index + 1))


@dataclass(frozen=True)
class Held:
    """The experts of one layer that a rank has loaded.

    Attributes:
        place: Position of the rank when the layer was loaded.
        parts: Part of the complete parameter that this rank has, by parameter name inside the module.
    """

    place: Place
    parts: dict[str, TpShard] = field(default_factory=dict)


def make_room(layer: ExpertLayer, place: Place) -> Held:
    """Replace the parameters of a layer by parameters for this rank's experts, on the meta device, and those of other experts by empty
    ones; local.

    Args:
        layer: A layer whose parameters have no values, or are sharded by ``zero.Init``.
        place: Position of this rank, which determines its experts.

    Returns:
        The record to pass to ``hold`` once the values have been read.
    """
    own, held = place.own(layer.count), Held(place)
    if isinstance(layer, StackedExperts):
        for name, param in layer.params.items():
            held.parts[name] = _replace(layer.module, name, param, own)
        return held
    names = {id(module): name for name, module in layer.module.named_modules()}
    for index, expert in enumerate(layer.experts):
        kept = own.start <= index < own.stop
        for path, module in expert.named_modules():
            for leaf, param in list(module._parameters.items()):
                if param is not None:
                    name = ".".join(part for part in (names[id(expert)], path, leaf) if part)
                    held.parts[name] = _replace(module, leaf, param, Range(0, full_shape(param)[0] if kept else 0))
    return held


def _replace(module: nn.Module, leaf: str, param: nn.Parameter, own: Range) -> TpShard:
    shape = torch.Size(full_shape(param))
    unregister(param)
    size = torch.Size((own.numel, *shape[1:]))
    room = nn.Parameter(torch.empty(size, dtype=param.dtype, device="meta" if own.numel else "cpu"), param.requires_grad)
    module._parameters[leaf] = room
    return TpShard(shape, 0, (own,) if own.numel else (), expert=True)


def hold(module: nn.Module, held: Held) -> None:
    """Store the record ``held`` on the module of a layer, mark its parameters, and refuse calls of it until an engine is made."""
    setattr(module, _HELD, held)
    guard(module, _refuse_held)
    _mark(module, held)


def held_of(module: nn.Module) -> Held | None:
    """Return the record on the module of a layer; None if the layer was loaded with all experts."""
    found = module.__dict__.get(_HELD)
    return found if isinstance(found, Held) else None


def held_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Held]]:
    """Yield dotted name, module and record of each layer loaded with only this rank's experts; mark parameters of copies again."""
    for path, module in model.named_modules():
        held = held_of(module)
        if held is not None:
            _mark(module, held)
            yield path, module, held


def mark_again(model: nn.Module) -> None:
    """Mark again the parameters of layers that were loaded with only this rank's experts, because ``model`` may be a copy."""
    for _ in held_layers(model):
        pass


def release_held(module: nn.Module) -> None:
    """Remove the record and the guard from a layer, because an engine divides it now."""
    module.__dict__.pop(_HELD, None)
    release(module, _refuse_held)


def _mark(module: nn.Module, held: Held) -> None:
    for name, part in held.parts.items():
        param = module.get_parameter(name)
        if not is_elsewhere(param):
            mark_tp_shard(param, part)


def _refuse_held(module: nn.Module, *_: Any) -> None:
    """Refuse a call of a layer that no engine has divided yet (a forward pre-hook); a copy on the meta device, which is used for planning
    tensor parallelism, may run.

    Raises:
        StateError: The layer has values.
    """
    held = held_of(module)
    if all(param.is_meta for param in module.parameters()):
        return
    ranks = held.place.ranks if held is not None else 0
    raise called_before_engine(module, f"its own experts (expert parallelism over {ranks} ranks)")
