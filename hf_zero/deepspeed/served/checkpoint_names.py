"""Provide names of files and keys in DeepSpeed's own checkpoints, for scripts that read them; checkpoints of hf_zero do not use them."""

from __future__ import annotations

import os
from typing import Final

BASE_OPTIMIZER_STATE: Final = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP: Final = "base_optimizer_state_step"
BUFFER_NAMES: Final = "buffer_names"
CAT_DIM: Final = "cat_dim"
CLIP_GRAD: Final = "clip_grad"
DS_VERSION: Final = "ds_version"
FP32_FLAT_GROUPS: Final = "fp32_flat_groups"
FROZEN_PARAM_FRAGMENTS: Final = "frozen_param_fragments"
FROZEN_PARAM_SHAPES: Final = "frozen_param_shapes"
GROUP_PADDINGS: Final = "group_paddings"
LOSS_SCALER: Final = "loss_scaler"
OPTIMIZER_STATE_DICT: Final = "optimizer_state_dict"
ORIGINAL_VOCAB_SIZE: Final = "original_vocab_size"
PADDED_VOCAB_SIZE: Final = "padded_vocab_size"
PARAM: Final = "param"
PARAMETER_TO_AVERAGE_PATTERNS: Final = "parameter_to_average_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: Final = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: Final = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_SUB_PARAMS: Final = "parameter_with_sub_params"
PARAM_GROUPS: Final = "param_groups"
PARAM_N_SUB_PARAMS: Final = "param_n_sub_params"
PARAM_SHAPES: Final = "param_shapes"
PARAM_SLICE_MAPPINGS: Final = "param_slice_mappings"
PARTITION_COUNT: Final = "partition_count"
PIPELINE_REPLICATED_PARAMETER_PATTERNS: Final = "pipeline_replicated_parameter_patterns"
SINGLE_PARTITION_OF_FP32_GROUPS: Final = "single_partition_of_fp32_groups"
SUB_PARAM_SHAPE: Final = "sub_param_shape"
TP_REPLICATED_PARAMETER_PATTERNS: Final = "tp_replicated_parameter_patterns"
UNIVERSAL_CHECKPOINT_INFO: Final = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY: Final = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE: Final = 0.2
VOCABULARY_PARAMETER_PATTERNS: Final = "vocabulary_parameter_patterns"
ZERO_STAGE: Final = "zero_stage"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Return the path of the file with the module of a model-parallel rank ("00", ...)."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """Return the path of the file with the optimizer state of a data-parallel rank."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """Return the path of the file with a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")
