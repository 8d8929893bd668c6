"""Divide the experts of a model over a group of ranks, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import Topology
from hf_zero.core.schedule.torch_internals import leave_out_of_graphs
from hf_zero.core.units.guards import guard_state_dict
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, is_elsewhere, is_expert, is_part, mark_own_buffers, tp_shard_of
from hf_zero.core.units.parts import mark_join
from hf_zero.core.units.unit import find_unit, full_shape
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.expert_parallel import stacked
from hf_zero.expert_parallel.adapters import check_adapters, check_adapters_beside_split_layers, divide_adapters, keep_part, require_divided
from hf_zero.expert_parallel.dispatch import Shares
from hf_zero.expert_parallel.exchange import SharedTokens, join_experts
from hf_zero.expert_parallel.find import ExpertLayer, ListedExperts, StackedExperts, find_experts, shape_of_all
from hf_zero.expert_parallel.held import held_layers, held_of, release_held
from hf_zero.expert_parallel.listed import ListedLayer, join_listed
from hf_zero.observe import log_rank0
from hf_zero.tensor_parallel.apply import plan_of
from hf_zero.tensor_parallel.split import equal_weights

KEY = "expert_parallel.autoep_size"

tables: list[Callable[[Iterable[nn.Module]], None]] = []
"""Functions of packages above that install the dispatching of tokens in the tables in which modules look up their implementation."""


OWN = "each_rank_has_its_own"  # attribute of a module: its experts may differ between ranks before they are divided

_SHARES = "_hf_zero_expert_shares"  # attribute of a divided layer's module


def shares_of(model: nn.Module) -> dict[str, Shares]:
    """Return the experts that each rank holds, for each divided layer of ``model``, by dotted name."""
    return {path: module.__dict__[_SHARES] for path, module in model.named_modules() if _SHARES in module.__dict__}


def divide_model(model: nn.Module, topology: Topology) -> nn.Module:
    """Keep only this rank's experts of ``model``, and make its layers send tokens to the ranks of their experts; collective.

    A model that was divided for an earlier engine does not change.

    Args:
        model: Any model with experts, the same on every rank; its parameters may come from ``zero.Init``.
        topology: Axes of the ranks, with those of experts.

    Returns:
        The same model.

    Raises:
        ConfigError: The model has no experts, or their number is not a multiple of the ranks.
        UnsupportedError: The model's experts have a form that cannot be divided.
        StateError: The model is already divided over other ranks.
    """
    present = next((shares.collectives.topology.ranks for shares in shares_of(model).values()), ())
    wanted = topology.expert.ranks if topology.expert is not None else ()
    if present and present != wanted:
        raise StateError(
            f"the experts of this model were divided over {len(present)} ranks for an earlier engine, but this engine needs "
            f"{len(wanted) or 1}: set {KEY} to {len(present)}, or load the model again"
        )
    if present:
        require_divided(model)
        return model
    if topology.expert is None:
        _require_held(model, 1, 0)
        return model
    collectives = open_collectives(topology.expert)
    held = _require_held(model, collectives.world, collectives.rank)
    if len(set(map(tuple, collectives.gather_objects(held, "experts that were loaded")))) > 1:
        raise StateError(
            "some ranks have loaded their own experts only, others all experts: call from_pretrained on every rank with one configuration"
        )
    together = topology.layers.model
    tensor = open_collectives(together) if together is not None else None
    layers = find_experts(model)
    for layer in layers:
        _check(layer, collectives.world)
    if tensor is not None:
        _check_beside_split_layers(model, layers)
    _refuse_shared(layers)
    whole = [layer.module for layer in layers if held_of(layer.module) is None and not getattr(layer.module, OWN, False)]
    if whole and not any(find_unit(param) is not None for module in whole for param in module.parameters()):
        equal_weights(nn.ModuleList(whole), collectives, "an expert-parallel group")
    numbers = {layer.count for layer in layers}
    for layer in layers:
        shares = Shares(collectives, layer.count, SharedTokens(tensor, layer.path) if tensor is not None else None)
        _divide(layer, shares)
        _join_for_losses(layer, shares)
        setattr(layer.module, _SHARES, shares)
    for put_in in tables:
        put_in([layer.module for layer in layers if isinstance(layer, StackedExperts)])
    log_rank0(
        "expert parallelism over %d ranks: %d layers of %s experts, %s on each rank",
        collectives.world,
        len(layers),
        " and ".join(map(str, sorted(numbers))),
        " and ".join(str(number // collectives.world) for number in sorted(numbers)),
    )
    return model


def _require_held(model: nn.Module, ranks: int, rank: int) -> list[str]:
    """Return the layers that were loaded with only this rank's experts; refuse layers that were loaded for other ranks."""
    found = []
    for path, _, held in held_layers(model):
        place = held.place
        if (place.ranks, place.index) != (ranks, rank):
            here = f"this is rank {rank} of {ranks}" if ranks > 1 else "here experts are not divided"
            raise StateError(
                f"{path} was loaded with the experts of rank {place.index} of {place.ranks}, but {here}: set {KEY} to {place.ranks} "
                "here too, as in from_pretrained"
            )
        found.append(path)
    return found


def _divide(layer: ExpertLayer, shares: Shares) -> None:
    """Keep only this rank's experts of one layer, and make it dispatch tokens; collective after ``zero.Init``."""
    first, stop = shares.first, shares.first + shares.here
    release_held(layer.module)
    leave_out_of_graphs(layer.module)  # how many tokens travel depends on their values
    if isinstance(layer, StackedExperts):
        divide_adapters(layer, Range(first, stop))
        for param in layer.params.values():
            keep_part(param, _part(param, Range(first, stop)))
        guard_state_dict(layer.module)
        stacked.install(layer.module, layer.path, shares, tuple(layer.params))
        return
    for index, expert in enumerate(layer.experts):
        mark_own_buffers(expert)
        for module in expert.modules():
            guard_state_dict(module)
        for param in expert.parameters():
            keep_part(param, _part(param, Range(0, shape_of_all(param)[0] if first <= index < stop else 0)))
    ListedLayer(layer.module, layer.path, layer.experts, shares)


def _join_for_losses(layer: ExpertLayer, shares: Shares) -> None:
    """Show all experts of the parameters of ``layer`` to a loss."""
    counts = shares.shared is None or shares.shared.collectives.rank == 0
    voters = None if isinstance(layer, StackedExperts) else shares.collectives  # of a list, one rank holds all of a parameter
    adapted = chain.from_iterable(wrapper.named_parameters(recurse=True) for wrapper in getattr(layer, "adapters", ()))
    for name, param in chain(adapted, layer.module.named_parameters()):
        part = tp_shard_of(param)
        if part is not None and part.expert and not part.elsewhere:
            path = f"{layer.path}.{name}"
            joined = join_experts if isinstance(layer, StackedExperts) else join_listed
            join = partial(joined, part=part, collectives=shares.collectives, counts=counts, label=f"whole {path}")
            mark_join(param, join, path, voters)


def _part(param: nn.Parameter, own: Range) -> TpShard:
    """Return the description of the part of ``param`` with the entries ``own`` along its first dimension."""
    return TpShard(shape_of_all(param), 0, (own,) if own.numel else (), expert=True)


def _check(layer: ExpertLayer, ranks: int) -> None:
    if layer.count % ranks:
        fits = ", ".join(str(size) for size in range(1, layer.count + 1) if layer.count % size == 0)
        raise ConfigError(f"{KEY} is {ranks}, which does not divide the {layer.count} experts of {layer.path}; {fits} would")
    if isinstance(layer, ListedExperts):
        numbers = [name for name, param in layer.experts[0].named_parameters() if not full_shape(param)]
        if numbers:
            raise UnsupportedError(
                f"expert_parallel: the experts of {layer.path} have a scalar parameter ({numbers[0]}), which cannot be empty on other "
                "ranks. Remove expert_parallel for this model"
            )
        return
    check_adapters(layer)
    buffers = [name for name, buffer in layer.module.named_buffers() if buffer.dim() > 0 and buffer.shape[0] == layer.count]
    if buffers:
        raise UnsupportedError(
            f"expert_parallel: {layer.path} has a buffer with one entry per expert ({buffers[0]}), which cannot be divided. Remove "
            "expert_parallel for this model"
        )


def _check_beside_split_layers(model: nn.Module, layers: Iterable[ExpertLayer]) -> None:
    """Refuse experts that tensor parallelism has split, or whose gradients it would make partial."""
    plan, names = plan_of(model), {id(param): name for name, param in model.named_parameters()}
    for layer in layers:
        for param in _params(layer):
            if is_part(param) and not is_expert(param) and not is_elsewhere(param):
                raise StateError(
                    f"{names[id(param)]} was split by tensor parallelism before expert parallelism was configured: remove "
                    "tp_model_init and tp_plan (initialize splits both, as the configuration says), or pass this configuration to "
                    "deepspeed.tp_model_init"
                )
            if plan is not None and names[id(param)] in plan.summed:
                raise UnsupportedError(
                    f"expert_parallel: split layers process the results of the experts at {layer.path}, so each rank has only a part of "
                    "their gradients. Remove tensor_parallel for this model; zero_optimization.stage 3 shards its layers"
                )
        if isinstance(layer, StackedExperts):
            check_adapters_beside_split_layers(layer)


def _params(layer: ExpertLayer) -> Iterable[nn.Parameter]:
    if isinstance(layer, StackedExperts):
        return layer.params.values()
    return chain(*(expert.parameters() for expert in layer.experts))


def _refuse_shared(layers: Iterable[ExpertLayer]) -> None:
    """Refuse a parameter that several experts or layers share, because it would be cut several times."""
    seen: set[int] = set()
    for layer in layers:
        for param in _params(layer):
            if id(param) in seen:
                raise UnsupportedError(
                    f"expert_parallel: {layer.path} shares a parameter with other experts, so it cannot be divided. Remove "
                    "expert_parallel for this model"
                )
            seen.add(id(param))
