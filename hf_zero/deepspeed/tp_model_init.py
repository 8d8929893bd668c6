"""``deepspeed.tp_model_init``: splits a model before ``initialize``; what is divided in another way too is left to that."""

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
    """Compare the arguments of ``tp_model_init`` with those of ``initialize``.

    Raises:
        ConfigError: Another element type, or ``tp_group`` there and ``mpu`` here.
    """
    dtype, has_group = getattr(model, _ASKED, (None, False))
    trained = precision_policy(config).param_dtype
    if dtype is not None and trained is not None and trained != dtype:
        raise ConfigError(f"Conflicting dtype: tp_model_init was given {dtype}, and the configuration trains in {trained}; make them agree")
    if has_group and mpu is not None:
        raise ConfigError(
            "tp_model_init provided tp_group, and initialize is given mpu: both name the ranks that hold the model; leave one out"
        )


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Split ``model`` with ``hf_zero.tensor_parallel.split.tp_model_init``; collective.

    Where ``config`` has a pipeline nothing is done: stages are found from whole layers, so ``initialize`` finds them and splits then. So it
    does with a model that cannot be traced where no ``config`` is given: that of ``initialize`` may name its layers.

    Args:
        model: Any model, the same on every rank.
        tp_size: Ranks that hold one model together.
        dtype: Cast the parameters to this, but for those that the model keeps in fp32; None leaves them. With ``config`` it is left to
            ``initialize``.
        config: Configuration, or its ``tensor_parallel`` section.
        **kwargs: As there.

    Returns:
        The same model.

    Raises:
        ConfigError: ``tp_size`` does not fit the ranks, or the model does not divide.
        UnsupportedError: Another library has divided the model over ranks, or its experts cannot be divided, and shall be.
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
