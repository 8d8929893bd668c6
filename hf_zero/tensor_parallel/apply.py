"""Split a model in place according to a plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_zero.core.units.layout import Range
from hf_zero.core.units.registration import unregister
from hf_zero.core.units.tp_shard import TpShard, mark_tp_shard, tp_shard_of
from hf_zero.core.units.unit import find_unit, full_shape
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.boundary_collectives import BoundaryCollectives
from hf_zero.tensor_parallel.functions import ModelGroup, Part
from hf_zero.tensor_parallel.plan import GATHERED, SCATTERED, VOCABULARY, SplitParameter, TpPlan, starred
from hf_zero.tensor_parallel.tracked_ints import set_attribute

_BY_THEMSELVES = (GATHERED, SCATTERED, VOCABULARY)  # splits of layers whose input and output are whole
_PLAN, _RANKS = "_hf_zero_tp_plan", "_hf_zero_tp_ranks"


def plan_of(model: nn.Module) -> TpPlan | None:
    """Return the plan that ``model`` was split with; None for a whole model."""
    found = getattr(model, _PLAN, None)
    return found if isinstance(found, TpPlan) else None


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks of the default group that hold ``model`` together, this rank included; empty for a whole model."""
    found: tuple[int, ...] = getattr(model, _RANKS, ())
    return found


def apply_plan(model: nn.Module, plan: TpPlan, group: ModelGroup) -> nn.Module:
    """Keep this rank's part of every parameter of ``model`` and install the collectives; in place.

    Raises:
        ConfigError: The plan is for another number of ranks or another model, or the model is already split.
    """
    if plan.ranks != group.world:
        raise ConfigError(
            f"the plan is for {plan.ranks} ranks, tensor_parallel.autotp_size is {group.world}; make a plan for {group.world}"
        )
    if plan_of(model) is not None:
        raise ConfigError("the model is split already")
    params, buffers, modules = dict(model.named_parameters()), dict(model.named_buffers()), dict(model.named_modules())
    _check_fits(plan, params, modules)
    for name, entry in plan.parameters.items():
        if tp_shard_of(params[name]) is None:
            cut_parameter(params[name], entry, group.rank)
    for name, entry in plan.buffers.items():
        buffers[name].data = _part(entry).take(buffers[name].data, group.rank).clone()
    for path, changes in plan.attributes.items():
        for name, value in changes.items():
            set_attribute(modules[path], name, value)
    _set_features(plan, modules, group.rank)
    _sum_gradients(plan, params, group)
    divided = {id(params[name]): entry for name, entry in plan.parameters.items()}
    for path in dict.fromkeys((*plan.borders, *plan.rows, *plan.random)):
        boundary = BoundaryCollectives(modules[path], path, plan, group)
        # Only heads and tables. Libraries read the types of layers in lists (PEFT, in every forward), which would gather these layers.
        if path in plan.modules and plan.modules[path].split in _BY_THEMSELVES and starred(path) == path:
            own = {name: divided[id(param)] for name, param in modules[path]._parameters.items() if id(param) in divided}
            boundary.read_whole(modules[path], own)
    setattr(model, _PLAN, plan)
    setattr(model, _RANKS, group.global_ranks)
    return model


def _check_fits(plan: TpPlan, params: dict[str, nn.Parameter], modules: dict[str, nn.Module]) -> None:
    missing = [name for name in plan.parameters if name not in params] + [path for path in plan.borders if path not in modules]
    if missing:
        raise ConfigError(f"the plan is for another model: it names {missing[0]}, which the model does not have")
    for name, entry in plan.parameters.items():
        cut = tp_shard_of(params[name])
        shape = tuple(cut.full_shape if cut is not None else full_shape(params[name]))
        if shape != tuple(entry.shape):
            raise ConfigError(f"the plan is for another model: {name} has shape {shape}, the plan says {tuple(entry.shape)}")


def _part(entry: SplitParameter) -> Part:
    return Part(entry.dim, entry.ranges, entry.shape[entry.dim])


def cut_parameter(param: nn.Parameter, entry: SplitParameter, rank: int) -> None:
    """Replace the values of ``param`` by the part of ``rank``, and mark the part; collective for parameters of ``zero.Init``."""
    owner = find_unit(param)
    if owner is None:
        values = _part(entry).take(param.data, rank)
        # A placeholder ([Note: held stages]) has strides of 0 and stays expanded.
        param.data = values.clone(memory_format=torch.contiguous_format) if any(values.stride()) else values
    else:  # sharded by zero.Init over all ranks
        with owner[0].unsharded():
            part = _part(entry).take(param.detach(), rank).clone(memory_format=torch.contiguous_format)
        unregister(param)
        param.data = part
    mark_tp_shard(param, tp_shard(entry, rank))


def tp_shard(entry: SplitParameter, rank: int) -> TpShard:
    """Return the part of ``rank`` as the mark that the engine reads from a parameter."""
    ranges = tuple(Range(start, stop) for start, stop in entry.ranges[rank])
    counts = _part(entry).holders(rank, torch.device("cpu"))
    copies = []
    if counts is not None:
        runs, lengths = torch.unique_consecutive(counts, return_counts=True)
        stops = lengths.cumsum(0).tolist()
        copies = [(Range(stop - length, stop), count) for count, length, stop in zip(runs.tolist(), lengths.tolist(), stops, strict=True)]
    return TpShard(torch.Size(entry.shape), entry.dim, ranges, tuple(copy for copy in copies if copy[1] > 1))


def _set_features(plan: TpPlan, modules: dict[str, nn.Module], rank: int) -> None:
    """Set ``in_features``, ``out_features`` and ``padding_idx`` to the values of this rank's weight."""
    for path, entry in plan.modules.items():
        module = modules[path]
        if isinstance(module, nn.Linear) and tp_shard_of(module.weight) is not None:
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding) and entry.split == VOCABULARY and module.padding_idx is not None:
            width = module.weight.shape[0]
            padding = module.padding_idx - rank * width
            module.padding_idx = padding if 0 <= padding < width else None  # type: ignore[assignment]


def _sum_gradients(plan: TpPlan, params: dict[str, nn.Parameter], group: ModelGroup) -> None:
    for name in plan.summed:
        if params[name].requires_grad:
            params[name].register_hook(_summing(group, name))
    for name, entry in plan.parameters.items():
        if params[name].requires_grad and (add := _summing_shared(group, name, entry)) is not None:
            params[name].register_hook(add)


def _summing(group: ModelGroup, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda grad: group.sum(grad, name)


def _summing_shared(group: ModelGroup, name: str, entry: SplitParameter) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a hook that sums the gradients of indices that several ranks hold; None where each index has one holder."""
    part = _part(entry)
    device = torch.device("cpu")
    holders = [part.holders(rank, device) for rank in range(group.world)]
    if holders[group.rank] is None:
        return None
    everyones = [mine[count > 1] for mine, count in zip(part.indices(device), holders, strict=True) if count is not None]
    union = torch.cat(everyones).unique()
    local = (holders[group.rank] > 1).nonzero().flatten()  # type: ignore[operator,union-attr]
    places = torch.searchsorted(union, everyones[group.rank])

    def add(grad: torch.Tensor) -> torch.Tensor:
        here, there = local.to(grad.device), places.to(grad.device)
        shape = list(grad.shape)
        shape[entry.dim] = union.numel()
        summands = grad.new_zeros(shape).index_copy_(entry.dim, there, grad.index_select(entry.dim, here))
        total = group.sum(summands, name)
        return grad.clone().index_copy_(entry.dim, here, total.index_select(entry.dim, there))

    return add
