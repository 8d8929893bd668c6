"""Make the tensor-parallel plan of a model that is given by name, for ``hf-zero explain --model X --tp N``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.config.auto import require_bounded_config
from hf_zero.errors import ConfigError
from hf_zero.system.reading import shown
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan


def plan_of_named_model(name: str, ranks: int) -> TpPlan:
    """Return the plan for a local folder, ``config.json`` or ID on the Hub; no weights are loaded.

    Raises:
        ConfigError: The name cannot be loaded, or the model's sizes are not divisible by ``ranks``.
    """
    return make_plan(_empty_model(name), ranks)


def _empty_model(name: str) -> nn.Module:
    import transformers

    require_bounded_config(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # a broken config.json may make transformers raise any error
        raise ConfigError(
            f"the model {name!r} cannot be loaded as a local folder, a config.json or an ID on the Hub: {_first_line(error)}"
        ) from error
    kind = class_of(config)
    with torch.device("meta"):
        try:
            return kind._from_config(config)
        except Exception as error:  # wrong values may raise any error
            raise ConfigError(f"{kind.__name__} cannot be built from this configuration: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    told = lines[0] if lines else ""
    return told if isinstance(error, (OSError, ValueError)) and told else f"{type(error).__name__}: {told}"


def class_of(config: Any) -> Any:
    """Return the model class that a transformers configuration names; otherwise the one of its auto classes, preferably with a head.

    Raises:
        ConfigError: transformers has no model class for the configuration.
    """
    import transformers

    named = getattr(config, "architectures", None) or ()
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"architectures of the configuration is {shown(named)}; a list of class names is allowed")
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    autos = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    mappings = [getattr(transformers, auto)._model_mapping for auto in autos]
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ConfigError(f"transformers has no model class for {type(config).__name__}")
