"""A call that runs all of a transformers model, made up from its configuration and what its ``forward`` takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError

_READ = {"input_ids", "pixel_values"}  # what models are known to read


def example_inputs(model: nn.Module, length: int = 16, values: bool = False) -> dict[str, torch.Tensor]:
    """A call that runs a transformers model: on tensors without values, or (``values``) with tokens on the host.

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
    if not inputs:
        raise ConfigError(f"{type(model).__name__}.forward takes neither input_ids nor pixel_values, so no call that runs it is known")
    return inputs


def labelled(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The call with its tokens as labels."""
    return {**inputs, "labels": inputs["input_ids"].clone()} if "input_ids" in inputs else inputs


def padded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The call with a mask that takes half of the second row for padding; without values, which would show it, one of queries and keys."""
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
    """The first token that the configuration gives no meaning to."""
    special = {_first(value) for name, value in vars(config).items() if name.endswith(("token_id", "token_index"))} if config else set()
    return next(token for token in range(len(special) + 1) if token not in special)


def argument_names(model: nn.Module) -> list[str]:
    """What ``model.forward`` takes by name; of a wrapper that hands on all keywords (PEFT's), what the model in it takes."""
    return [item.name for item in _arguments(model)]


def required_arguments(model: nn.Module) -> list[str]:
    """Those of ``argument_names`` without a default."""
    return [item.name for item in _arguments(model) if item.default is item.empty]


def _arguments(model: nn.Module) -> list[inspect.Parameter]:
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        if any(item.name in _READ for item in named) or not any(item.kind is item.VAR_KEYWORD for item in parameters):
            return named
    return []
