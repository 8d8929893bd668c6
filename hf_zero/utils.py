"""The public helpers that ``deepspeed.utils`` has, and our own."""

from hf_zero.checkpoint.commit.trainer_folders import newest_trainer_checkpoint
from hf_zero.core.averages import AveragedWeights
from hf_zero.deepspeed.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from hf_zero.deepspeed.safe_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from hf_zero.integrations.preemption import end_preempted, preempted
from hf_zero.integrations.weight_stream import iter_full_params
from hf_zero.observe import logger
from hf_zero.replica_groups.sampler import ReplicaSampler

__all__ = [
    "AveragedWeights",
    "ReplicaSampler",
    "end_preempted",
    "get_z3_leaf_modules",
    "iter_full_params",
    "logger",
    "newest_trainer_checkpoint",
    "preempted",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
