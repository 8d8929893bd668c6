"""Choose the trained parameters of a planned model."""

from __future__ import annotations

import re

import torch
from torch import nn

from hf_zero.errors import ConfigError, UnsupportedError

_ALLOWED = "all, lora:r=16 (optional: alpha=32, targets=q_proj+v_proj) or match:REGEX is allowed"


def choose_trainable(module: nn.Module, wish: str) -> nn.Module:
    """Return ``module`` with the other parameters frozen, or with LoRA adapters.

    Args:
        module: The model, on the meta device.
        wish: Value of ``--trainable``: ``all``, ``lora:r=16,alpha=32,targets=q_proj+v_proj``, or ``match:REGEX`` of parameter names.

    Raises:
        ConfigError: ``wish`` has another form, or matches no parameter.
        UnsupportedError: ``wish`` asks for LoRA, and PEFT is not installed.
    """
    kind, _, rest = wish.partition(":")
    if wish == "all":
        return module
    if kind == "lora":
        return _with_adapters(module, wish, rest)
    if kind == "match" and rest:
        return _matching(module, rest)
    raise ConfigError(f"--trainable is {wish!r}; {_ALLOWED}")


def _matching(module: nn.Module, pattern: str) -> nn.Module:
    try:
        chosen = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--trainable match:{pattern} is not a regular expression: {error}") from None
    names = [name for name, param in module.named_parameters() if chosen.search(name)]
    if not names:
        raise ConfigError(f"--trainable match:{pattern} matches no parameter of {type(module).__name__}")
    for name, param in module.named_parameters():
        param.requires_grad_(name in set(names))
    return module


def _with_adapters(module: nn.Module, wish: str, rest: str) -> nn.Module:
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        name, found, value = part.partition("=")
        if not found or name not in ("r", "alpha", "targets"):
            raise ConfigError(f"--trainable is {wish!r}, and its part {part!r} is unknown; {_ALLOWED}")
        values[name] = value
    numbers = [values.get("r", "8"), values.get("alpha", "16")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--trainable is {wish!r}: r and alpha must be whole numbers of at least 1")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UnsupportedError(f"--trainable {wish} needs the peft library: pip install peft") from None
    targets = values["targets"].split("+") if "targets" in values else "all-linear"
    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(module, LoraConfig(r=int(numbers[0]), lora_alpha=int(numbers[1]), target_modules=targets))
    except ValueError as error:
        raise ConfigError(f"--trainable {wish}: {str(error).splitlines()[0][:200]}") from error
    return adapted
