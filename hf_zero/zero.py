"""The public names of stage 3, as ``deepspeed.zero`` has them."""

from hf_zero.engine.init import Init
from hf_zero.sharding.external import register_external_parameter, unregister_external_parameter
from hf_zero.sharding.gathered import GatheredParameters
from hf_zero.sharding.unit import ParamStatus as ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter", "unregister_external_parameter"]
