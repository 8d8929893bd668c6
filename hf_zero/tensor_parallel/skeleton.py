"""A copy of a model without values, which runs by itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_zero.system.planning import planning


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers have shapes and no values; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty(full_shape(param), dtype=param.dtype, device="meta"), param.requires_grad)
    others = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*model.buffers(), *(others if planning() else ())):  # in a plan nothing has values
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    made = copy.deepcopy(model, memo)
    copies = {id(original): memo[id(original)] for original in model.modules()}
    for module in made.modules():
        if "forward" in module.__dict__:
            module.__dict__["forward"] = _of_copy(module.__dict__["forward"], copies, {})
    return made


def full_shape(param: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also while ``zero.Init`` keeps it sharded."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def _of_copy(value: Any, copies: Mapping[int, nn.Module], done: dict[int, Any]) -> Any:
    """A function that a library has put in the place of ``forward``, for the copied modules: it often calls the one that was there.

    A deep copy takes functions as they are, with what they have closed over: the forward of the original.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_of_copy(value.__func__, copies, done), _of_copy(value.__self__, copies, done))
    if isinstance(value, functools.partial):
        named = {key: _of_copy(item, copies, done) for key, item in value.keywords.items()}
        return functools.partial(_of_copy(value.func, copies, done), *(_of_copy(item, copies, done) for item in value.args), **named)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    if id(value) not in done:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        done[id(value)] = functools.update_wrapper(made, value)
        made.__kwdefaults__, made.__dict__ = value.__kwdefaults__, dict(value.__dict__)
        for cell, original in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # not filled yet
                cell.cell_contents = _of_copy(original.cell_contents, copies, done)
    return done[id(value)]
