"""``deepspeed.tp_model_init``: splits a model before ``initialize``; what is divided in another way too is left to that."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.build.mesh import claims_of_model, pipeline_ranks
from hf_zero.config.mesh import EXPERT, requested_experts
from hf_zero.config.read import read_config
from hf_zero.expert_parallel.find import modules_of_experts
from hf_zero.tensor_parallel import split


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """As ``hf_zero.tensor_parallel.split.tp_model_init``, which this calls; collective.

    Where ``config`` has a pipeline nothing is done: stages are found from whole layers, so ``initialize`` finds them and splits then.

    Args:
        model: Any model, the same on every rank.
        tp_size: Ranks that hold one model together.
        dtype: As there.
        config: Configuration, or its ``tensor_parallel`` section.
        **kwargs: As there.

    Returns:
        The same model.

    Raises:
        ConfigError: ``tp_size`` does not fit the ranks, or the model does not divide.
        UnsupportedError: Another library has divided the model over ranks, or its experts cannot be divided, and shall be.
    """
    source = read_config(config) if config is not None else {}
    if pipeline_ranks(source, claims_of_model(model))[0] > 1:
        return model
    wanted = requested_experts(source) > 1
    divides = wanted or any(claim.axis == EXPERT for claim in claims_of_model(model))
    return split.tp_model_init(model, tp_size, dtype, config, keeps=modules_of_experts(model) if divides else (), **kwargs)
