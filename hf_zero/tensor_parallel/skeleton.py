"""Copy a model without values, and make up a call that runs it, from its configuration and the arguments of ``forward``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.system.planning import has_values


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose parameters and buffers have shapes but no values; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty(full_shape(param), dtype=param.dtype, device="meta"), param.requires_grad)
    others = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*model.buffers(), *(tensor for tensor in others if not has_values(tensor))):
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    made = copy.deepcopy(model, memo)
    copies = {id(original): memo[id(original)] for original in model.modules()}
    for module in made.modules():
        if "forward" in module.__dict__:
            module.__dict__["forward"] = _of_copy(module.__dict__["forward"], copies, {})
    return made


def full_shape(param: torch.Tensor) -> torch.Size:
    """Return the whole shape of a parameter, also while ``zero.Init`` keeps it sharded."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def _of_copy(value: Any, copies: Mapping[int, nn.Module], done: dict[int, Any]) -> Any:
    """Return ``value`` with the original modules replaced by their copies, for a function that replaces ``forward``.

    A deep copy keeps functions and their closures unchanged, so such a function would call the former forward of the original.
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
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = _of_copy(original.cell_contents, copies, done)
    return done[id(value)]


_READ = {"input_ids", "pixel_values"}  # arguments that models are known to read


def example_inputs(model: nn.Module, length: int = 16, values: bool = False) -> dict[str, torch.Tensor]:
    """Return the arguments of a call that runs a transformers model: without values, or with tokens on the host (``values``).

    Raises:
        ConfigError: The model's inputs are not known.
    """
    config: Any = getattr(model, "config", None)
    names = set(argument_names(model))
    inputs: dict[str, torch.Tensor] = {}
    device = "cpu" if values else "meta"
    if "input_ids" in names:
        rows = 2 * (getattr(config, "num_codebooks", 1) if values else 1)
        tokens = [_plain_token(config)] * (length - 1) + [_first(getattr(config, "eos_token_id", None)) or 0]
        inputs["input_ids"] = torch.tensor([tokens] * rows) if values else torch.zeros((rows, length), dtype=torch.long, device=device)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = inputs["input_ids"].clone()
    elif "pixel_values" in names and getattr(config, "image_size", None):
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        inputs["pixel_values"] = torch.zeros((2, getattr(config, "num_channels", 3), *size), device=device)
    if not inputs and "pixel_values" in names:
        raise ConfigError(
            f"{type(model).__name__}.forward takes pixel_values, and its config has no image_size (found: None), so no call that runs it "
            "is known. Set config.image_size to the number of pixels of a side, or leave tensor parallelism and pipelines out"
        )
    if not inputs:
        raise ConfigError(f"{type(model).__name__}.forward takes neither input_ids nor pixel_values, so no call that runs it is known")
    return inputs


def labelled(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the call with its tokens as labels; unchanged without tokens."""
    return {**inputs, "labels": inputs["input_ids"].clone()} if "input_ids" in inputs else inputs


def padded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the call with a mask that marks half of the second row as padding; without values, with a mask of shape (rows, 1, length,
    length).
    """
    tokens = inputs["input_ids"]
    if tokens.device.type == "meta":
        rows, length = tokens.shape
        return {**inputs, "attention_mask": torch.zeros((rows, 1, length, length), device="meta")}
    mask = torch.ones_like(tokens)
    mask[1, mask.shape[1] // 2 :] = 0
    return {**inputs, "attention_mask": mask}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _plain_token(config: Any) -> int:
    """Return the first token that is no special token of the configuration."""
    special = {_first(value) for name, value in vars(config).items() if name.endswith(("token_id", "token_index"))} if config else set()
    return next(token for token in range(len(special) + 1) if token not in special)


def argument_names(model: nn.Module) -> list[str]:
    """Return the argument names of ``model.forward``; for a wrapper that passes all keywords on (PEFT's), those of the inner model."""
    return [item.name for item in _arguments(model)]


def required_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments without a default, among ``argument_names``."""
    return [item.name for item in _arguments(model) if item.default is item.empty]


def _arguments(model: nn.Module) -> list[inspect.Parameter]:
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        if any(item.name in _READ for item in named) or not any(item.kind is item.VAR_KEYWORD for item in parameters):
            return named
    return []
