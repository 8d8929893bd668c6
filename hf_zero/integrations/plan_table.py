"""The tensor-parallel plan of a model that is known by name only: for ``hf-zero explain --model X --tp N``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan


def plan_of_named_model(name: str, ranks: int) -> TpPlan:
    """The plan for a local folder, ``config.json`` or ID on the Hub; no weights are loaded.

    Raises:
        ConfigError: The name cannot be loaded, or the model does not divide.
    """
    return make_plan(_empty_model(name), ranks)


def _empty_model(name: str) -> nn.Module:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # whatever a broken config.json makes transformers raise
        raise ConfigError(f"the model {name!r} is no local config and no ID that could be loaded: {str(error).splitlines()[0]}") from error
    with torch.device("meta"):
        return class_of(config)._from_config(config)


def class_of(config: Any) -> Any:
    """The class of model that a transformers configuration names, or the one with a head that it has.

    Raises:
        ConfigError: transformers has none.
    """
    import transformers

    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    autos = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    mappings = [getattr(transformers, auto)._model_mapping for auto in autos]
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ConfigError(f"transformers has no model for {type(config).__name__}")
