"""Define the second part of the alias table: names of helpers that scripts import, apart from training itself."""

from __future__ import annotations

from typing import Final


def _rows(module: str, target: str, names: tuple[str, ...]) -> dict[str, str]:
    return {f"deepspeed.{module}.{name}": f"hf_zero.{target}:{name}" for name in names}


_OPTIMIZER_NAMES = (
    "ADAM_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAGRAD_OPTIMIZER",
    "LION_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "MUON_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "TORCH_ADAM_PARAM",
    "ADAM_W_MODE",
)
_MOE_PARAMS = (
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
)
_NORMS = (
    "CheckOverflow",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_weight_norm",
    "mask_nan_or_inf_with_val_inplace",
)
_SMALL = (
    "call_to_str",
    "empty_cache",
    "get_ma_status",
    "is_model_parallel_parameter",
    "move_to_device",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "required_torch_version",
    "set_random_seed",
)
_LOGS = (
    "LoggerFactory",
    "get_current_level",
    "get_log_level_from_string",
    "log_levels",
    "print_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
)
_TIMERS = ("SynchronizedWallClockTimer", "NoopTimer", "ThroughputTimer")
_SCALERS = (
    "LossScalerBase",
    "LossScaler",
    "DynamicLossScaler",
    "CreateLossScaler",
)
_AUTOCAST = (
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "is_autocast_initialized",
    "sort_dtypes",
)
_LAUNCHER = ("get_local_rank_from_launcher", "get_world_rank_from_launcher", "get_world_size_from_launcher")
_LEAVES = ("set_z3_leaf_module", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix")
_CKPT_FILES = ("get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank", "get_layer_ckpt_name_for_rank")
_CKPT_KEYS = (
    "BASE_OPTIMIZER_STATE",
    "BASE_OPTIMIZER_STATE_STEP",
    "BUFFER_NAMES",
    "CAT_DIM",
    "CLIP_GRAD",
    "DS_VERSION",
    "FP32_FLAT_GROUPS",
    "FROZEN_PARAM_FRAGMENTS",
    "FROZEN_PARAM_SHAPES",
    "GROUP_PADDINGS",
    "LOSS_SCALER",
    "OPTIMIZER_STATE_DICT",
    "ORIGINAL_VOCAB_SIZE",
    "PADDED_VOCAB_SIZE",
    "PARAM",
    "PARAMETER_TO_AVERAGE_PATTERNS",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PARAMETER_WITH_SUB_PARAMS",
    "PARAM_GROUPS",
    "PARAM_N_SUB_PARAMS",
    "PARAM_SHAPES",
    "PARAM_SLICE_MAPPINGS",
    "PARTITION_COUNT",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "SINGLE_PARTITION_OF_FP32_GROUPS",
    "SUB_PARAM_SHAPE",
    "TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    "VOCABULARY_PARAMETER_PATTERNS",
    "ZERO_STAGE",
)
_BUILDERS = (
    "OpBuilder",
    "ALL_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "EvoformerAttnBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "SparseAttnBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
)
_MONITORS = {
    "monitor": "MonitorMaster",
    "tensorboard": "TensorBoardMonitor",
    "wandb": "WandbMonitor",
    "csv_monitor": "csvMonitor",
    "comet": "CometMonitor",
    "trackio": "TrackioMonitor",
}
_SECTIONS = {"TensorBoardConfig": "Tensorboard", "WandbConfig": "Wandb", "CSVConfig": "CsvMonitor", "CometConfig": "Comet"}
HELPERS: Final[dict[str, str]] = {
    # Configuration.
    **{f"deepspeed.{path}DeepSpeedConfig": "hf_zero.deepspeed.served.settings:DeepSpeedConfig" for path in ("", "runtime.config.")},
    **{f"deepspeed.{path}DeepSpeedConfigError": "hf_zero.errors:ConfigError" for path in ("", "runtime.config.")},
    "deepspeed.runtime.config_utils.DeepSpeedConfigModel": "hf_zero.deepspeed.served.settings:DeepSpeedConfigModel",
    **_rows("runtime.config", "deepspeed.served.settings", _OPTIMIZER_NAMES),
    "deepspeed.ADAM_OPTIMIZER": "hf_zero.deepspeed.served.settings:ADAM_OPTIMIZER",
    "deepspeed.LAMB_OPTIMIZER": "hf_zero.deepspeed.served.settings:LAMB_OPTIMIZER",
    **_rows("runtime.zero.config", "deepspeed.served.settings", ("DeepSpeedZeroConfig", "ZeroStageEnum")),
    **_rows("runtime.zero.offload_config", "deepspeed.served.settings", ("OffloadDeviceEnum", "OffloadStateTypeEnum")),
    "deepspeed.runtime.zero.config.OffloadDeviceEnum": "hf_zero.deepspeed.served.settings:OffloadDeviceEnum",
    **{
        f"deepspeed.runtime.zero.{module}.DeepSpeedZeroOffload{part}Config": f"hf_zero.config.schema.zero:Offload{part}"
        for module in ("config", "offload_config")
        for part in ("Param", "Optimizer")
    },
    "deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT": "hf_zero.deepspeed.served.settings:TORCH_DISTRIBUTED_DEFAULT_PORT",
    "deepspeed.constants.default_pg_timeout": "hf_zero.deepspeed.served.settings:default_pg_timeout",
    # Names of files in DeepSpeed's own checkpoints, for scripts that read them.
    **_rows("checkpoint.utils", "deepspeed.served.state_files", _CKPT_FILES),
    **_rows("checkpoint.constants", "deepspeed.served.state_files", _CKPT_KEYS),
    **_rows("checkpoint", "deepspeed.served.state_files", (*_CKPT_FILES, *_CKPT_KEYS)),
    **_rows("checkpoint.ds_to_universal", "deepspeed.served.state_files", ("main",)),
    # DeepSpeed's mixture-of-experts layer.
    **_rows("moe.layer", "deepspeed.moe.layer", ("MoE",)),
    **_rows("moe.experts", "deepspeed.moe.layer", ("Experts",)),
    **_rows("moe.sharded_moe", "deepspeed.moe.layer", ("MOELayer",)),
    **_rows("moe.sharded_moe", "deepspeed.moe.gate", ("TopKGate", "top1gating", "top2gating", "topkgating")),
    **_rows("moe.utils", "deepspeed.moe.layer", _MOE_PARAMS),
    # Types in the signature of `initialize`.
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": "hf_zero.deepspeed.served.helpers:DeepSpeedOptimizerCallable",
    "deepspeed.runtime.engine.DeepSpeedSchedulerCallable": "hf_zero.deepspeed.served.helpers:DeepSpeedSchedulerCallable",
    # Schedules.
    **_rows("runtime.lr_schedules", "deepspeed.served.settings", ("add_tuning_arguments",)),
    "deepspeed.add_tuning_arguments": "hf_zero.deepspeed.served.settings:add_tuning_arguments",
    "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler": "hf_zero.deepspeed.served.curriculum:CurriculumScheduler",
    # Gradients, devices and numbers.
    **_rows("runtime.utils", "deepspeed.served.norms", _NORMS),
    **_rows("runtime.utils", "deepspeed.served.helpers", _SMALL),
    **_rows("utils.torch", "deepspeed.served.helpers", ("required_torch_version", "register_grad_hook")),
    **_rows("runtime.torch_autocast", "deepspeed.served.autocast", _AUTOCAST),
    **{
        f"deepspeed.runtime.zero.{module}.is_zero_param": "hf_zero.deepspeed.served.helpers:is_zero_param"
        for module in ("utils", "partition_parameters")
    },
    # DeepSpeed-Chat inserts its LoRA layers with these functions.
    **_rows("compression.helper", "deepspeed.served.helpers", ("recursive_getattr", "recursive_setattr")),
    **_rows("runtime.fp16.loss_scaler", "deepspeed.loss_scalers", _SCALERS),
    "deepspeed.runtime.zero.offload_states.get_state_devices": "hf_zero.deepspeed.served.helpers:get_state_devices",
    # Layers are not replaced, because torch's layers compute the same on gathered weights.
    "deepspeed.runtime.zero.linear.LinearModuleForZeroStage3": "torch.nn:Linear",
    "deepspeed.runtime.zero.linear.zero3_linear_wrap": "torch.nn.functional:linear",
    "deepspeed.runtime.compiler.is_compile_supported": "hf_zero.deepspeed.served.helpers:is_compile_supported",
    "deepspeed.runtime.zero.utils.ZeRORuntimeException": "hf_zero.errors:ConfigError",
    # One class is used for every precision and every stage.
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    # Logs, timers, monitors.
    **_rows("utils.logging", "deepspeed.served.logs", _LOGS),
    **_rows("utils", "deepspeed.served.logs", ("print_dist", "set_log_level_from_string")),
    **_rows("utils.timer", "deepspeed.timers", _TIMERS),
    **_rows("utils.nvtx", "deepspeed.timers", ("instrument_w_nvtx",)),
    **_rows("utils", "deepspeed.timers", ("instrument_w_nvtx",)),
    **{f"deepspeed.monitor.{module}.{name}": f"hf_zero.deepspeed.served.monitors:{name}" for module, name in _MONITORS.items()},
    **{f"deepspeed.monitor.config.{name}": f"hf_zero.config.schema.monitoring:{target}" for name, target in _SECTIONS.items()},
    "deepspeed.monitor.config.get_monitor_config": "hf_zero.deepspeed.served.settings:get_monitor_config",
    "deepspeed.monitor.config.DeepSpeedMonitorConfig": "hf_zero.deepspeed.served.settings:DeepSpeedMonitorConfig",
    # Processes and devices.
    **_rows(
        "comm",
        "deepspeed.served.comm",
        ("has_all_gather_into_tensor", "has_reduce_scatter_tensor", "get_all_ranks_from_group", "initialize_mesh_device"),
    ),
    "deepspeed.comm.allgather_fn": "hf_zero.deepspeed.served.collectives:all_gather_into_tensor",
    "deepspeed.comm.reduce_scatter_fn": "hf_zero.deepspeed.served.collectives:reduce_scatter_tensor",
    "deepspeed.comm.inference_all_reduce": "hf_zero.deepspeed.served.collectives:all_reduce",
    "deepspeed.comm.Work": "torch.distributed:Work",
    "deepspeed.comm.reduce_op.ReduceOp": "torch.distributed:ReduceOp",
    **_rows("comm.utils", "deepspeed.served.comm", _LAUNCHER),
    **_rows("accelerator.real_accelerator", "deepspeed.served.accelerator", ("get_accelerator", "is_current_accelerator_supported")),
    "deepspeed.accelerator.DeepSpeedAccelerator": "hf_zero.deepspeed.served.accelerator:TorchAccelerator",
    "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator": "hf_zero.deepspeed.served.accelerator:TorchAccelerator",
    # Operators.
    **_rows("ops.op_builder", "deepspeed.served.builders", _BUILDERS),
    "deepspeed.ops.op_builder.builder.OpBuilder": "hf_zero.deepspeed.served.builders:OpBuilder",
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": "hf_zero.deepspeed.served.ops:DeepSpeedCPULion",
    "deepspeed.ops.lion.fused_lion.FusedLion": "hf_zero.deepspeed.served.ops:FusedLion",
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": "hf_zero.deepspeed.served.ops:DeepSpeedCPUAdagrad",
    # Blocks.
    **{f"deepspeed.{path}.{name}": f"hf_zero.utils:{name}" for path in ("utils", "utils.z3_leaf_module") for name in _LEAVES},
    **_rows("elasticity.config", "config.elastic", ("ElasticityError", "ElasticityConfigError", "ElasticityIncompatibleWorldSize")),
    **_rows("env_report", "environment", ("main", "cli_main")),
    "deepspeed.ops.__installed_ops__": "hf_zero.deepspeed.served.builders:COMPATIBLE_OPS",
    # Versions.
    "deepspeed.version": "hf_zero.deepspeed.alias.table:DEEPSPEED_VERSION",
    "deepspeed.__git_hash__": "hf_zero.deepspeed.served.settings:NO_COMMIT",
    "deepspeed.__git_branch__": "hf_zero.deepspeed.served.settings:NO_COMMIT",
    "deepspeed.git_version_info.torch_info": "hf_zero.deepspeed.served.settings:TORCH_INFO",
    "deepspeed.git_version_info.git_hash": "hf_zero.deepspeed.served.settings:NO_COMMIT",
    "deepspeed.git_version_info.git_branch": "hf_zero.deepspeed.served.settings:NO_COMMIT",
    "deepspeed.git_version_info.compatible_ops": "hf_zero.deepspeed.served.builders:COMPATIBLE_OPS",
    "deepspeed.git_version_info.installed_ops": "hf_zero.deepspeed.served.builders:COMPATIBLE_OPS",
}
