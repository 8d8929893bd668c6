"""Shard weights of a library's own tensor class, torchao's: their inner tensors are sharded, see [Note: inner tensors]."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from hf_zero.core.units.packed import inner_tensors, is_wrapped, mark_inner
from hf_zero.core.units.unit import find_unit, full_shape
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.observe import log_rank0
from hf_zero.system.sizes import size_text

_WITHOUT_GRADIENT = "Int4"  # torchao's classes of 4-bit weights: torch has no derivative of their products


def prepare_wrapped(model: nn.Module, sharded: bool, world: int) -> set[int]:
    """Mark the weights that units will hold, and log how many bytes they take; local.

    Args:
        model: The user's module.
        sharded: Whether parameters are sharded (stage 3).
        world: Number of ranks that share them.

    Returns:
        The ids of parameters that belong in units: at stage 3 those that can be sharded, otherwise those that are sharded already.

    Raises:
        StateError: A weight is trainable.
        UnsupportedError: A parameter is trained beside a weight whose products have no gradient.
    """
    found = [(name, param) for name, param in model.named_parameters() if is_wrapped(param)]
    trains = any(param.requires_grad for param in model.parameters())
    for name, param in found:
        if param.requires_grad:
            raise StateError(
                f"{name} is a {type(param).__name__} and requires a gradient: quantized weights are not trained here. Freeze it "
                "(model.requires_grad_(False) before get_peft_model), and train adapters on it"
            )
        if trains and type(param).__name__.startswith(_WITHOUT_GRADIENT):
            raise UnsupportedError(
                f"{name} is a {type(param).__name__}: torchao's products with 4-bit weights have no gradient, so no adapter before one can "
                "train. Quantize with BitsAndBytesConfig(load_in_4bit=True), or with TorchAoConfig(Int8WeightOnlyConfig()): both train and "
                "are sharded at stage 3"
            )
    divided = [param for _, param in found if find_unit(param) is not None or (sharded and mark_inner(param))]
    _log([param for param in divided if sharded], f"sharded over {world} rank(s) and gathered packed")
    taken = {id(param) for param in divided}
    for module in model.modules():
        if any(id(param) in taken for param in module._parameters.values()):
            keep_divided(module)
    _log(
        [param for _, param in found if sharded and id(param) not in taken],
        ("whole on every rank, because tensors of this kind cannot be sharded"),
    )
    return taken


def keep_divided(module: nn.Module) -> None:
    """Let ``module.to`` and similar methods skip sharded weights: torch would replace them by new ones without values."""
    module.__dict__["_apply"] = MethodType(_apply, module)


def _apply(module: Any, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    divided = {name: param for name, param in module._parameters.items() if param is not None and is_wrapped(param) and find_unit(param)}
    module._parameters.update(dict.fromkeys(divided))
    try:
        return type(module)._apply(module, fn, recurse)  # type: ignore[no-any-return]
    finally:
        module._parameters.update(divided)


def _log(params: list[nn.Parameter], where: str) -> None:
    if params:
        kinds = sorted({type(param).__name__ for param in params})
        inner = [tensor for param in params for tensor in inner_tensors(param).values()]
        nbytes = sum(full_shape(tensor).numel() * tensor.element_size() for tensor in inner)
        log_rank0("%d weights are %s: %s, %s", len(params), " and ".join(kinds), size_text(nbytes, ".1f", "MiB"), where)
