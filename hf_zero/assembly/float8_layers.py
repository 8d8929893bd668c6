"""Take models whose linear layers torchao has converted to products in float8 (``torchao.float8.convert_to_float8_training``).

A converted layer keeps its weight in the model's own type and casts it in each forward, so units need not know about it. Only
``enable_fsdp_float8_all_gather``, which accelerate turns on, puts each weight into a tensor class for FSDP2, [Note: weights for FSDP2].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.marks import mark_float8
from hf_zero.errors import UnsupportedError

_WRAPPER = "WeightWithDynamicFloat8CastTensor"
_LAYER = "Float8Linear"
_ENGINE = "transformer_engine"


def take_float8(model: nn.Module, optimizer: Any, params: Iterable[Any] | None) -> list[Any] | None:
    """Replace torchao's tensors for FSDP2 by the parameters inside them, in the model and in the optimizer's groups; local.

    [Note: weights for FSDP2] torchao's tensor around a weight answers FSDP2's questions before and after an all-gather, and computes like
    the weight itself. The parameter that the layer had before its conversion is inside, so an optimizer from before the conversion has it.
    The parameter is marked if only its layer reads it: units at stage 3 gather it as float8 ([Note: gathers of float8]).

    Args:
        model: The user's module.
        optimizer: The user's torch optimizer over parameters of ``model``; anything else is ignored.
        params: Parameters or groups that another optimizer shall train, or None.

    Returns:
        ``params`` with the same replacements; None for None.

    Raises:
        UnsupportedError: The model has layers of Transformer Engine.
    """
    _refuse_engine(model)
    replaced: dict[int, nn.Parameter] = {}
    plain: dict[int, nn.Parameter] = {}
    owners = Counter(id(getattr(param, "_tensor", param)) for module in model.modules() for param in module._parameters.values())
    for module in model.modules():
        held: dict[str, Any] = dict(module._parameters)
        for name, param in held.items():
            if type(param).__name__ == _WRAPPER:
                inner = param._tensor
                if id(inner) not in plain:  # a tied weight is in one wrapper for each layer
                    found = inner if isinstance(inner, nn.Parameter) else nn.Parameter(inner, requires_grad=param.requires_grad)
                    found.requires_grad_(param.requires_grad)
                    plain[id(inner)] = found
                replaced[id(param)] = plain[id(inner)]
                if _one_scale(module) and owners[id(inner)] == 1:
                    mark_float8(plain[id(inner)], param._dtype)
                module._parameters[name] = plain[id(inner)]
    if replaced and isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(param), param) for param in group["params"]]
    return None if params is None else [_replaced(item, replaced) for item in params]


def refuse_float8(model: nn.Module) -> None:
    """Raise if tensor parallelism would divide a layer that computes in float8.

    Raises:
        UnsupportedError: There is such a layer: one scale belongs to a whole weight, and each rank would compute one from its part.
    """
    found = next((name for name, module in model.named_modules() if type(module).__name__ == _LAYER), None)
    if found is not None:
        raise UnsupportedError(
            f"{found} is a {_LAYER} of torchao: its scales belong to a whole weight, but each rank of tensor parallelism would compute "
            "them from its part. Use fp8 without tensor_parallel.autotp_size, or tensor parallelism with bf16"
        )


def _one_scale(layer: Any) -> bool:
    """Return whether a layer casts its weight in both products with one scale, which [Note: gathers of float8] has."""
    config: Any = getattr(layer, "config", None)
    casts = getattr(config, "cast_config_weight", None), getattr(config, "cast_config_weight_for_grad_input", None)
    kinds = {getattr(getattr(cast, name, None), "value", None) for cast in casts for name in ("scaling_type", "scaling_granularity")}
    return kinds == {"dynamic", "tensorwise"} and not config.round_scales_to_power_of_2


def _replaced(item: Any, replaced: dict[int, nn.Parameter]) -> Any:
    if isinstance(item, dict):
        members = item["params"] if not isinstance(item["params"], torch.Tensor) else [item["params"]]
        return {**item, "params": [_replaced(member, replaced) for member in members]}
    if isinstance(item, tuple):  # (name, parameter)
        return tuple(_replaced(member, replaced) for member in item)
    return replaced.get(id(item), item)


def _refuse_engine(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == _ENGINE:
            raise UnsupportedError(
                f"{name or 'the model'} is a {type(module).__name__} of Transformer Engine, which keeps scales and casts of weights beside "
                "its parameters: sharding does not see them. Use torchao's recipes: fp8_backend AO in the file of accelerate config, or "
                "Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()])"
            )
