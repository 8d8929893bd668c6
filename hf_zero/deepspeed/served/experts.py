"""What scripts ask of `deepspeed.moe.utils` about any model: whether it has DeepSpeed's own layers of experts. None has, here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_zero.errors import UnsupportedError


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is marked (``param.allreduce = False``) as one of DeepSpeed's own layers of experts."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and how many experts; those that ``expert_parallel`` divides are of another kind."""
    return any(map(is_moe_param, m.parameters())), 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """Param groups as they are, in a list: there are no experts to give groups of their own.

    Args:
        param_groups: One group or several.
        max_group_size: Has no effect: groups need not be divided.

    Raises:
        UnsupportedError: A parameter is marked as one of DeepSpeed's own layers of experts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    groups = [{**group, "params": list(group["params"])} for group in groups]
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise UnsupportedError(
            "a parameter is marked as one of DeepSpeed's own layers of experts (param.allreduce is False), which are not provided; set "
            "expert_parallel in the configuration, which divides the experts of models of transformers (docs/experts.md)"
        )
    return groups
