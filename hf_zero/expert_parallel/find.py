"""Find the experts of a model from its structure, without a list of architectures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.marks import whole_shape
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import ConfigError, UnsupportedError

_COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WORD = "expert"


@dataclass(frozen=True)
class StackedExperts:
    """A layer of experts whose weights are stacked along the first dimension of a few parameters.

    Attributes:
        path: Dotted name of the module.
        module: The module; its forward takes tokens, the indices of their experts, and weights.
        count: Number of experts.
        params: The module's own parameters with one entry per expert, by name.
        adapters: Wrappers around the module that each adapt one of its parameters, outermost first.
    """

    path: str
    module: nn.Module
    count: int
    params: dict[str, nn.Parameter]
    adapters: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class ListedExperts:
    """A layer of experts that are modules in a list or a dict.

    Attributes:
        path: Dotted name of ``module``.
        module: The module whose forward calls the experts: the container itself if it has a forward, otherwise its parent.
        experts: The modules of the experts, in order.
    """

    path: str
    module: nn.Module
    experts: tuple[nn.Module, ...]

    @property
    def count(self) -> int:
        """Return the number of experts."""
        return len(self.experts)


ExpertLayer = StackedExperts | ListedExperts


def find_experts(model: nn.Module) -> list[ExpertLayer]:
    """Return every layer of experts in ``model``, in the model's order.

    Raises:
        ConfigError: The model has no experts.
        UnsupportedError: The experts have a form that cannot be divided; the message names the module.
    """
    found = present_experts(model)
    if not found:
        _refuse_hidden(model)
        raise ConfigError(
            f"expert_parallel is on, but {type(model).__name__} has no experts: no module with a number of experts and weights for each, "
            'and no list of modules named "experts". Remove expert_parallel; zero_optimization shards every model'
        )
    return found


def present_experts(model: nn.Module) -> list[ExpertLayer]:
    """Return the layers of experts like ``find_experts``, but an empty list for a model without experts."""
    found: list[ExpertLayer] = [*_stacked(model), *listed_experts(model)]
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=lambda layer: order[layer.path])


def modules_of_experts(model: nn.Module) -> set[str]:
    """Return the dotted names of all modules that belong to experts or to their adapters."""
    inside: set[int] = set()
    for layer in present_experts(model):
        roots = layer.experts if isinstance(layer, ListedExperts) else (layer.module, *layer.adapters)
        inside.update(id(module) for root in roots for module in root.modules())
    return {path for path, module in model.named_modules() if id(module) in inside}


def _refuse_hidden(model: nn.Module) -> None:
    """Refuse a model with experts of an unknown form; a model without experts passes."""
    for path, module in model.named_modules():
        named = _WORD in type(module).__name__.lower() and next(module.parameters(), None) is not None
        if path and (named or _count_of(module)):
            raise UnsupportedError(
                f"expert_parallel: {path} ({type(module).__name__}) has experts in a form that cannot be divided. Supported are "
                "weights with one entry per expert and a forward that takes tokens, expert indices and expert weights, and lists "
                "of modules of one class. Remove expert_parallel for this model; zero_optimization.stage 3 shards its experts "
                "with all other parameters"
            )


# -- stacked ------------------------------------------------------------------------------------------------------------


def _stacked(model: nn.Module) -> Iterator[StackedExperts]:
    wrappers = wrappers_of(model)
    for path, module in model.named_modules():
        count = _count_of(module)
        params = {name: param for name, param in module._parameters.items() if param is not None and _has_entry_each(param, count)}
        if not any(len(shape_of_all(param)) >= 3 for param in params.values()):
            _refuse_parametrized(path, module)
            continue
        if not chooses_implementation(module):
            raise UnsupportedError(
                f"expert_parallel: {path} ({type(module).__name__}) has weights of {count} experts in one tensor, but its forward does not "
                "take tokens, indices of experts and weights, so tokens cannot be sent to their experts. Remove expert_parallel for this "
                "model; zero_optimization.stage 3 shards its experts with all other parameters"
            )
        yield StackedExperts(path, module, count, params, tuple(wrappers.get(id(module), ())))


def chooses_implementation(module: nn.Module) -> bool:
    """Return whether the module's forward looks up its implementation in a table whose functions take (tokens, indices, weights)."""
    return hasattr(module, "is_transposed") and hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")


def _count_of(module: nn.Module) -> int:
    for name in _COUNTS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return value
    return 0


def _has_entry_each(param: nn.Parameter, count: int) -> bool:
    shape = shape_of_all(param)
    return count > 1 and len(shape) > 0 and shape[0] == count


def shape_of_all(param: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter with all experts, even if this rank has loaded only its own."""
    return whole_shape(param) or full_shape(param)


def wrappers_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the wrappers that adapt one parameter of an inner module, outermost first, by the id of the innermost module."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "base_layer"):
            inner: Any = module
            while hasattr(inner, "base_layer"):
                inner = inner.base_layer
            found.setdefault(id(inner), []).append(module)
    return found


def _refuse_parametrized(path: str, module: nn.Module) -> None:
    """Refuse weights of experts that are computed from other tensors, because they cannot be cut."""
    computed = getattr(module, "parametrizations", None)
    names = list(computed.keys()) if isinstance(computed, nn.ModuleDict) and _count_of(module) else []
    if names:
        raise UnsupportedError(
            f"expert_parallel: {names[0]} of the experts at {path} is computed from other tensors (torch.nn.utils.parametrize) for all "
            "experts together. Remove the parametrization before initialize, or remove expert_parallel"
        )


# -- listed -------------------------------------------------------------------------------------------------------------


def listed_experts(model: nn.Module) -> Iterator[ListedExperts]:
    """Yield layers whose experts are modules of a list or a dict, in the model's order."""
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if _WORD not in leaf or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        experts = tuple(child for child in module.children() if next(child.parameters(), None) is not None)
        if len(experts) < 2 or not _alike(experts):
            continue
        holder = path if type(module).forward not in _NO_FORWARD else path.rpartition(".")[0]
        yield ListedExperts(holder, model.get_submodule(holder), experts)


_NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _alike(experts: tuple[nn.Module, ...]) -> bool:
    """Return whether all ``experts`` have the same class, and at least one parameter, with the same names and shapes."""
    shapes = [{name: tuple(shape_of_all(param)) for name, param in expert.named_parameters()} for expert in experts]
    return bool(shapes[0]) and all(type(expert) is type(experts[0]) for expert in experts) and all(found == shapes[0] for found in shapes)
