"""Implement ``deepspeed.tp_model_init``, which splits a model before ``initialize``; other divisions of the model are made later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.assembly.kept_types import cast_unnamed
from hf_zero.assembly.mesh import CLAIMS, claims_of_model, pipeline_ranks
from hf_zero.assembly.policies import precision_policy
from hf_zero.config.mesh import EXPERT, Claim, requested_experts
from hf_zero.config.read import read_config
from hf_zero.errors import ConfigError
from hf_zero.expert_parallel.find import modules_of_experts
from hf_zero.observe import log_rank0
from hf_zero.tensor_parallel import split
from hf_zero.tensor_parallel.planner import UnknownFlowError

if TYPE_CHECKING:
    from hf_zero.config.schema.root import ZeroConfig


_ASKED = "_hf_zero_tp_asked"


def require_consistent(model: nn.Module, config: ZeroConfig, mpu: Any) -> None:
    """Raise if the arguments of ``tp_model_init`` contradict those of ``initialize``.

    Raises:
        ConfigError: The element types differ, or ``tp_group`` was given to ``tp_model_init`` and ``mpu`` to ``initialize``.
    """
    dtype, has_group = getattr(model, _ASKED, (None, False))
    trained = precision_policy(config).param_dtype
    if dtype is not None and trained is not None and trained != dtype:
        raise ConfigError(
            f"Conflicting dtype: tp_model_init has dtype {dtype}, but the configuration trains in {trained}; set both to one dtype"
        )
    if has_group and mpu is not None:
        raise ConfigError(
            "tp_model_init provided tp_group, and initialize got mpu; both name the ranks that hold the model, so leave one out"
        )


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Split ``model`` with ``hf_zero.tensor_parallel.split.tp_model_init``; collective.

    If ``config`` has a pipeline, this function does nothing: stages are found from unsplit layers, so ``initialize`` finds the stages and
    then splits. It also does nothing for a model that cannot be traced if no ``config`` is given, because the configuration of
    ``initialize`` may name its layers.

    Args:
        model: Any model, the same on every rank.
        tp_size: Number of ranks that hold one model together.
        dtype: Dtype that parameters are cast to, except those that the model keeps in fp32; None does not cast. With ``config``,
            ``initialize`` casts.
        config: Configuration, or its ``tensor_parallel`` section.
        **kwargs: Further arguments of ``hf_zero.tensor_parallel.split.tp_model_init``.

    Returns:
        The same model.

    Raises:
        ConfigError: ``tp_size`` does not fit the ranks, or the model's sizes are not divisible by it.
        UnsupportedError: Another library has divided the model over ranks, or expert parallelism is on and the experts cannot be divided.
    """
    if config is None:
        setattr(model, _ASKED, (dtype, kwargs.get("tp_group") is not None))
    if tp_size == 1:
        return model if dtype is None or config is not None else cast_unnamed(model, dtype)
    source = read_config(config) if config is not None else {}
    if pipeline_ranks(source, claims_of_model(model))[0] > 1:
        return model
    wanted = requested_experts(source) > 1
    divides = wanted or any(claim.axis == EXPERT for claim in claims_of_model(model))
    try:
        model = split.tp_model_init(model, tp_size, None, config, keeps=modules_of_experts(model) if divides else (), **kwargs)
    except UnknownFlowError as error:
        if config is not None or kwargs.get("tp_group") is not None:
            raise
        log_rank0(
            "tp_model_init leaves %s whole until initialize(), whose configuration may name its layers: %s", type(model).__name__, error
        )
        model.__dict__[CLAIMS] = (*model.__dict__.get(CLAIMS, ()), Claim("tp", tp_size, "tp_model_init"))
        return model if dtype is None else cast_unnamed(model, dtype)
    return model if dtype is None or config is not None else cast_unnamed(model, dtype)
