"""Find the parameters of DeepSpeed's layers of experts, and make separate param groups for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.tp_shard import is_expert
from hf_zero.deepspeed.moe.layer import MoE
from hf_zero.errors import UnsupportedError

_EVERYWHERE = "ep_size_1"  # name of the expert group of layers whose experts every rank holds


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert of a ``MoE`` layer (marked ``param.allreduce = False``)."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a ``MoE`` layer, and the number of experts of the first one; experts of other classes, which
    ``expert_parallel`` finds, do not count.
    """
    count = next((module.num_experts for module in m.modules() if isinstance(module, MoE)), 0)
    return count > 0, count


def require_known_experts(model: nn.Module, ranks: int) -> None:
    """Refuse parameters that a script has marked as its own experts: DeepSpeed reduces them over the ranks of their group only.

    Args:
        model: The model, in which the experts of ``MoE`` layers are divided already.
        ranks: Number of data-parallel ranks.

    Raises:
        UnsupportedError: A parameter is marked ``allreduce = False`` and no layer of hf_zero holds it.
    """
    for name, param in model.named_parameters() if ranks > 1 else ():
        group = getattr(param, "group_name", None)
        if is_moe_param(param) and not is_expert(param) and group != _EVERYWHERE:
            raise UnsupportedError(
                f"parameter {name} is marked allreduce=False (group_name {group!r}): its values differ between ranks, "
                "but the engine would take rank 0's and average its gradient over all ranks. Use deepspeed.moe.layer.MoE or "
                "expert_parallel (docs/experts.md); if every rank holds the same values, delete the mark"
            )


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether a param group was made for parameters of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters outside of experts, and the parameters of experts."""
    listed = list(params)
    return [param for param in listed if not is_moe_param(param)], [param for param in listed if is_moe_param(param)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | float | None = 178956971
) -> list[dict[str, Any]]:
    """Return the param groups with separate groups for expert parameters at the end, named after the expert group and marked ``moe``.

    An engine of hf_zero does not need these groups; some scripts read them.

    Args:
        param_groups: One group or several.
        max_group_size: Has no effect, because groups need not be divided.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense, experts = [], []
    for group in groups:
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        dense.append({**group, "params": shared})
        for name in dict.fromkeys(str(getattr(param, "group_name", "")) for param in own):
            members = [param for param in own if str(getattr(param, "group_name", "")) == name]
            experts.append({**group, "name": name, "moe": True, "params": members})
    return [*dense, *experts]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return param groups for parameters or groups, with separate groups for experts; unchanged if there are such groups already."""
    if model_parameters and isinstance(model_parameters[0], dict):
        apart = any("moe" in group for group in model_parameters)
        return model_parameters if apart else split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
