"""The public names of stage 3, as ``deepspeed.zero`` has them."""

from hf_zero.core.schedule.gathered_parameters import GatheredParameters, register_external_parameter, unregister_external_parameter
from hf_zero.deepspeed.param_attributes import ZeroParamStatus, ZeroParamType
from hf_zero.deepspeed.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]
