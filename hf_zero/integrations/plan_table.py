"""The tensor-parallel plan of a model that is known by name only: for ``hf-zero explain --model X --tp N``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.config.sources import require_bounded_config
from hf_zero.errors import ConfigError
from hf_zero.system.reading import shown
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan


def plan_of_named_model(name: str, ranks: int) -> TpPlan:
    """Return the plan for a local folder, ``config.json`` or ID on the Hub; no weights are loaded.

    Raises:
        ConfigError: The name cannot be loaded, or the model does not divide.
    """
    return make_plan(_empty_model(name), ranks)


def _empty_model(name: str) -> nn.Module:
    import transformers

    require_bounded_config(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # whatever a broken config.json makes transformers raise
        raise ConfigError(f"the model {name!r} is no local config and no ID that could be loaded: {_first_line(error)}") from error
    kind = class_of(config)
    with torch.device("meta"):
        try:
            return kind._from_config(config)
        except Exception as error:  # a configuration may say anything
            raise ConfigError(f"{kind.__name__} cannot be built of this configuration: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    told = lines[0] if lines else ""
    return told if isinstance(error, (OSError, ValueError)) and told else f"{type(error).__name__}: {told}"


def class_of(config: Any) -> Any:
    """Return the class of model that a transformers configuration names, or the one with a head that it has.

    Raises:
        ConfigError: transformers has none.
    """
    import transformers

    named = getattr(config, "architectures", None) or ()
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"architectures of the configuration is {shown(named)}; a list of names of models is allowed")
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
    raise ConfigError(f"transformers has no model for {type(config).__name__}")
