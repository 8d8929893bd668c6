"""Define the alias table: every `deepspeed.*` name that hf_zero serves, and the names that it refuses, with alternatives.

A name is served if a public code base uses it, if DeepSpeed's pages recommend it to scripts, or in case of doubt. ``census.csv`` beside
this file lists for each name how many of 65 public code bases read it, and which ones (imports, attribute chains and strings with complete
names; copies of DeepSpeed itself do not count). A name that only DeepSpeed's own code and tests read is refused.

One row is ``"deepspeed.name": "module:attribute"``; the right side is imported when the name is first used. Modules are
not listed: each proper prefix of a row is one. A name in neither table does not exist.
"""

from __future__ import annotations

from typing import Final

from hf_zero.deepspeed.alias.helper_names import HELPERS

DEEPSPEED_VERSION: Final = "0.19.6"

_COMM_OWN = (
    "init_distributed",
    "is_available",
    "is_initialized",
    "get_rank",
    "get_local_rank",
    "get_world_size",
    "get_world_group",
    "get_global_rank",
    "barrier",
)
_COMM_TORCH = ("ReduceOp", "destroy_process_group", "get_backend", "ProcessGroup", "new_group", "batch_isend_irecv", "P2POp")
_COMM_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_OTHER_ONEBIT = ("OnebitLamb", "ZeroOneAdam", "lamb.OnebitLamb", "zoadam.ZeroOneAdam")  # imported by registries of optimizers
_UNIT_TEXTS = ("number_to_string", "flops_to_string", "macs_to_string", "params_to_string", "duration_to_string")
_GATHERED = "hf_zero.integrations.loading:GatheredParameters"
_INIT = "hf_zero.integrations.loading:Init"
_ZERO = ("register_external_parameter", "unregister_external_parameter", "ZeroParamStatus", "ZeroParamType")
_FULL_VALUES = (
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
)
_LEAF_MODULES = ("set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules")
_GROUPS = (
    "_get_broadcast_src_rank",
    "_get_data_parallel_group",
    "_get_data_parallel_group_ranks",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_model_parallel_group",
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
)
_SEQUENCE_STATE = (
    "initialize_sequence_parallel",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
)
_ULYSSES = "deepspeed.runtime.sequence_parallel"
_PROFILER = ("profiling.flops_profiler", "profiling.flops_profiler.profiler")
_PROFILING = {
    "FlopsProfiler": "hf_zero.profiling.flops_profiler:FlopsProfiler",
    "get_model_profile": "hf_zero.profiling.flops_profiler:get_model_profile",
    **{name: f"hf_zero.profiling.report:{name}" for name in _UNIT_TEXTS},
}
_NEEDS = ("model_states_mem_needs", "model_states_mem_needs_all_live", "model_states_mem_needs_all_cold")
_ELASTIC = ("compute_elastic_config", "elasticity_enabled")
_HOSTS = ("fetch_hostfile", "_parse_hostfile", "parse_resource_filter", "parse_inclusion_exclusion", "encode_world_info")
_TP_MODE = ("set_autotp_mode", "is_autotp_training_mode")
_SCHEDULES = ("VALID_LR_SCHEDULES", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_CHECKPOINTING = (
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
)

_PIPE = "hf_zero.deepspeed.pipe"
_PIPELINES = {
    **dict.fromkeys(("PipelineModule", "pipe.PipelineModule", "runtime.pipe.module.PipelineModule"), f"{_PIPE}.module:PipelineModule"),
    **dict.fromkeys(("PipelineEngine", "runtime.pipe.engine.PipelineEngine"), f"{_PIPE}.engine:PipelineEngine"),
    "runtime.pipe.engine.PipelineError": f"{_PIPE}.engine:PipelineError",
    "runtime.pipe.PipelineModule": f"{_PIPE}.module:PipelineModule",
    **{
        f"{path}.{name}": f"{_PIPE}.building:{name}"
        for path in ("pipe", "runtime.pipe", "runtime.pipe.module")
        for name in ("LayerSpec", "TiedLayerSpec")
    },
    **{
        f"runtime.pipe.topology.{name}": f"{_PIPE}.topology:{name}"
        for name in ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology")
    },
    "runtime.pipe.ProcessTopology": f"{_PIPE}.topology:ProcessTopology",
    "runtime.pipe.topology._prime_factors": f"{_PIPE}.topology:prime_factors",
    "runtime.pipe.topology.PipelineParallelGrid": f"{_PIPE}.grid:PipelineParallelGrid",
}

PROVIDED: Final[dict[str, str]] = {
    # Functions that every script calls.
    "deepspeed.initialize": "hf_zero:initialize",
    "deepspeed.tp_model_init": "hf_zero.deepspeed.initialize:tp_model_init",
    **{f"deepspeed.module_inject.layers.{name}": f"hf_zero.deepspeed.served.helpers:{name}" for name in _TP_MODE},
    **{
        f"deepspeed.module_inject.layers.{name}": f"hf_zero.deepspeed.served.tp_layers:{name}"
        for name in ("LinearLayer", "LinearAllreduce")
    },
    "deepspeed.DeepSpeedEngine": "hf_zero.deepspeed.engine:Engine",
    "deepspeed.runtime.engine.DeepSpeedEngine": "hf_zero.deepspeed.engine:Engine",
    "deepspeed.DeepSpeedOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.ZeROOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    # Classes for isinstance checks; one class is used for every stage.
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "hf_zero.deepspeed.optimizer:DeepSpeedOptimizer",
    "deepspeed.init_distributed": "hf_zero.deepspeed.served.comm:init_distributed",
    "deepspeed.add_config_arguments": "hf_zero.deepspeed.launcher:add_config_arguments",
    **{
        f"deepspeed.{path}": "hf_zero.deepspeed.served.construction:OnDevice"
        for path in ("OnDevice", "utils.OnDevice", "utils.init_on_device.OnDevice")
    },
    **{
        f"deepspeed.runtime.zero.stage3.estimate_zero3_{name}": f"hf_zero.deepspeed.served.memory_needs:estimate_zero3_{name}"
        for name in _NEEDS
    },
    **{
        f"deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_{name}": f"hf_zero.deepspeed.served.memory_needs:estimate_zero2_{name}"
        for name in _NEEDS
    },
    **{f"deepspeed.elasticity.{name}": f"hf_zero.config.elastic:{name}" for name in _ELASTIC},
    # Pipelines.
    **{f"deepspeed.{name}": target for name, target in _PIPELINES.items()},
    # Processes and devices.
    **{f"deepspeed.comm.{name}": f"hf_zero.deepspeed.served.comm:{name}" for name in _COMM_OWN},
    **{f"deepspeed.comm.{name}": f"torch.distributed:{name}" for name in _COMM_TORCH},
    **{f"deepspeed.comm.{name}": f"hf_zero.deepspeed.served.collectives:{name}" for name in _COMM_COLLECTIVES},
    **{f"deepspeed.comm.{name}": f"hf_zero.deepspeed.served.comm:{name}" for name in ("configure", "log_summary")},
    "deepspeed.accelerator.get_accelerator": "hf_zero.deepspeed.served.accelerator:get_accelerator",
    "deepspeed.accelerator.is_current_accelerator_supported": "hf_zero.deepspeed.served.accelerator:is_current_accelerator_supported",
    "deepspeed.get_accelerator": "hf_zero.deepspeed.served.accelerator:get_accelerator",
    "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": "hf_zero.deepspeed.launcher:DEEPSPEED_ENVIRONMENT_NAME",
    **{f"deepspeed.launcher.runner.{name}": f"hf_zero.deepspeed.served.hosts:{name}" for name in _HOSTS},
    **{f"deepspeed.utils.groups.{name}": f"hf_zero.deepspeed.served.groups:{name}" for name in _GROUPS},
    # ZeRO: construction and access to whole values.
    **{f"deepspeed.zero.{name}": f"hf_zero.zero:{name}" for name in _ZERO},
    **{f"deepspeed.runtime.zero.{name}": f"hf_zero.zero:{name}" for name in _ZERO},
    **{f"deepspeed.runtime.zero.partition_parameters.{name}": f"hf_zero.zero:{name}" for name in _ZERO},
    **{f"deepspeed.{path}.GatheredParameters": _GATHERED for path in ("zero", "runtime.zero", "runtime.zero.partition_parameters")},
    **{
        f"deepspeed.{path}.unwrap_model_for_generation": "hf_zero.integrations.loading:unwrap_model_for_generation"
        for path in ("zero", "runtime.zero", "runtime.zero.stage3")
    },
    **{f"deepspeed.{path}.Init": _INIT for path in ("zero", "runtime.zero", "runtime.zero.partition_parameters")},
    **{f"deepspeed.{path}.MiCS_Init": "hf_zero.integrations.loading:MiCSInit" for path in ("zero", "runtime.zero", "runtime.zero.mics")},
    "deepspeed.zero.partition_parameters": "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": (
        "hf_zero.deepspeed.served.construction:zero_wrapper_for_fp_tensor_constructor"
    ),
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange": "torch:arange",
    "deepspeed.runtime.zero.partition_parameters.partitioned_param_data_shape": (
        "hf_zero.deepspeed.served.construction:partitioned_param_data_shape"
    ),
    "deepspeed.runtime.zero.partition_parameters.get_accelerator": "hf_zero.deepspeed.served.accelerator:get_accelerator",
    **{f"deepspeed.utils.{name}": f"hf_zero.utils:{name}" for name in (*_FULL_VALUES, *_LEAF_MODULES)},
    **{f"deepspeed.utils.tensor_fragment.{name}": f"hf_zero.utils:{name}" for name in _FULL_VALUES},
    # A function and a module of the same name: `from deepspeed.utils import z3_leaf_module` means the function.
    "deepspeed.utils.z3_leaf_module": "hf_zero.utils:z3_leaf_module",
    **{f"deepspeed.utils.z3_leaf_module.{name}": f"hf_zero.utils:{name}" for name in (*_LEAF_MODULES, "z3_leaf_module")},
    # Loaders.
    "deepspeed.utils.RepeatingLoader": "hf_zero.deepspeed.served.helpers:RepeatingLoader",
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": "hf_zero.deepspeed.served.helpers:DeepSpeedDataLoader",
    "deepspeed.runtime.dataloader.RepeatingLoader": "hf_zero.deepspeed.served.helpers:RepeatingLoader",
    # Optimizers and schedules that are constructed by hand (or by accelerate, for an offloaded optimizer).
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "hf_zero.deepspeed.served.ops:DeepSpeedCPUAdam",
    "deepspeed.ops.adam.FusedAdam": "hf_zero.deepspeed.served.ops:FusedAdam",
    "deepspeed.ops.lamb.FusedLamb": "hf_zero.deepspeed.served.ops:FusedLamb",
    "deepspeed.ops.lamb.fused_lamb.FusedLamb": "hf_zero.deepspeed.served.ops:FusedLamb",
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": "hf_zero.deepspeed.served.ops:MuonWithAuxAdam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": "hf_zero.deepspeed.served.ops:DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam": "hf_zero.deepspeed.served.ops:FusedAdam",
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": "hf_zero.deepspeed.served.ops:DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion.DeepSpeedCPULion": "hf_zero.deepspeed.served.ops:DeepSpeedCPULion",
    "deepspeed.ops.lion.FusedLion": "hf_zero.deepspeed.served.ops:FusedLion",
    # What scripts ask before they offload to files.
    "deepspeed.ops.aio.AsyncIOBuilder": "hf_zero.deepspeed.served.builders:AsyncIOBuilder",
    "deepspeed.ops.__compatible_ops__": "hf_zero.deepspeed.served.builders:COMPATIBLE_OPS",
    "deepspeed.runtime.fp16.onebit.OnebitAdam": "hf_zero.deepspeed.served.ops:OnebitAdam",
    "deepspeed.runtime.fp16.onebit.adam.OnebitAdam": "hf_zero.deepspeed.served.ops:OnebitAdam",
    **{f"deepspeed.runtime.lr_schedules.{name}": f"hf_zero.optim.schedules:{name}" for name in _SCHEDULES},
    # Checkpoints: of the model, and of activations.
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save": "hf_zero.deepspeed.served.helpers:clone_tensors_for_torch_save",
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": (
        "hf_zero.checkpoint.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint"
    ),
    "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": (
        "hf_zero.checkpoint.zero_to_fp32:convert_zero_checkpoint_to_fp32_state_dict"
    ),
    "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_state_dict": (
        "hf_zero.deepspeed.served.state_files:convert_zero_checkpoint_to_state_dict"
    ),
    "deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": (
        "hf_zero.checkpoint.zero_to_fp32:load_state_dict_from_zero_checkpoint"
    ),
    "deepspeed.utils.zero_to_fp32.get_model_state_file": "hf_zero.deepspeed.served.state_files:get_model_state_file",
    "deepspeed.utils.zero_to_fp32.get_model_state_files": "hf_zero.deepspeed.served.state_files:get_model_state_files",
    "deepspeed.utils.zero_to_fp32.get_optim_files": "hf_zero.deepspeed.served.state_files:get_optim_files",
    **{f"deepspeed.checkpointing.{name}": f"hf_zero.deepspeed.served.checkpointing:{name}" for name in _CHECKPOINTING},
    **{
        f"deepspeed.runtime.activation_checkpointing.checkpointing.{name}": f"hf_zero.deepspeed.served.checkpointing:{name}"
        for name in _CHECKPOINTING
    },
    # Sequence parallelism.
    f"{_ULYSSES}.ulysses_sp.UlyssesSPAttentionHF": "hf_zero.integrations.ulysses:UlyssesSPAttentionHF",
    f"{_ULYSSES}.ulysses_sp.UlyssesSPDataLoaderAdapter": "hf_zero.sequence_parallel.batches:UlyssesSPDataLoaderAdapter",
    **{
        f"{_ULYSSES}.ulysses_sp.{name}": f"hf_zero.sequence_parallel.tiled:{name}"
        for name in ("TiledMLP", "TiledLoss", "TiledFusedLogitsLoss", "SequenceTiledCompute", "sequence_tiled_compute")
    },
    **{f"{_ULYSSES}.parallel_state_sp.{name}": f"hf_zero.deepspeed.served.sequence_state:{name}" for name in _SEQUENCE_STATE},
    "deepspeed.sequence.layer.DistributedAttention": "hf_zero.sequence_parallel.layer:DistributedAttention",
    "deepspeed.sequence.layer._SeqAllToAll": "hf_zero.sequence_parallel.layer:SeqAllToAll",
    # Profiling.
    **{f"deepspeed.{path}.{name}": target for path in _PROFILER for name, target in _PROFILING.items()},
    # Logging.
    "deepspeed.logger": "hf_zero.observe:logger",
    "deepspeed.log_dist": "hf_zero.deepspeed.served.logs:log_dist",
    "deepspeed.version.version": "hf_zero.deepspeed.alias.table:DEEPSPEED_VERSION",
    "deepspeed.version.__version__": "hf_zero.deepspeed.alias.table:DEEPSPEED_VERSION",
    "deepspeed.git_version_info.version": "hf_zero.deepspeed.alias.table:DEEPSPEED_VERSION",
    "deepspeed.dist": "deepspeed.comm",
    "deepspeed.utils.logger": "hf_zero.observe:logger",
    "deepspeed.utils.log_dist": "hf_zero.deepspeed.served.logs:log_dist",
    "deepspeed.utils.logging.logger": "hf_zero.observe:logger",
    "deepspeed.utils.logging.log_dist": "hf_zero.deepspeed.served.logs:log_dist",
    "deepspeed.runtime.utils.see_memory_usage": "hf_zero.deepspeed.served.logs:see_memory_usage",
    **HELPERS,
}
# The module that `deepspeed.comm` is made of; scripts import from both.
PROVIDED.update(
    {
        f"deepspeed.comm.comm.{row.removeprefix('deepspeed.comm.')}": to
        for row, to in PROVIDED.items()
        if row.startswith("deepspeed.comm.") and row.count(".") == 2 and ":" in to
    }
)

_SEQUENCE = (
    "of sequence parallelism there are DistributedAttention, UlyssesSPAttentionHF.register_with_transformers, "
    "UlyssesSPDataLoaderAdapter, parallel_state_sp and the tiled functions (docs/sequence-parallel.md)"
)
_PIPELINE = (
    "of pipelines there are PipelineModule, LayerSpec, TiedLayerSpec, PipelineEngine, PipelineParallelGrid and the topologies; schedules "
    "are those of torch.distributed.pipelining (docs/pipeline-module.md)"
)
_INFERENCE = "inference kernels are not implemented; serve the saved Hugging Face model with vLLM, TGI or transformers"
_HYBRID = "generation needs no engine of its own: engine.module.generate() of every engine runs the model's own code"
_MOE = "of DeepSpeed's layers of experts there are MoE, its gate and param groups; other models' experts: expert_parallel (docs/experts.md)"
_CONFIG = "hf_zero reads the configuration with hf_zero.config.resolve.resolve(source), which returns every value with its origin"
_BUILDER = "nothing is compiled at run time, so there are no op builders"
_ONEBIT = "of the 1-bit optimizers there is 1-bit Adam: hf_zero.optim.OneBitAdam, optimizer.type OneBitAdam"
_INNER = "an inner part of DeepSpeed that hf_zero has no counterpart of"

REFUSED: Final[dict[str, str]] = {
    # Names that the scanned libraries mention.
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.sequence": _SEQUENCE,
    "deepspeed.utils.is_initialized": "DeepSpeed has no such function either; use deepspeed.comm.is_initialized()",
    # The rest of DeepSpeed's public API.
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.InferenceEngine": _INFERENCE,
    "deepspeed.DeepSpeedInferenceConfig": _INFERENCE,
    "deepspeed.inference": _INFERENCE,
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": f"{_INFERENCE}; layers split for training are the model's own: tensor_parallel.autotp_size",
    "deepspeed.replace_transformer_layer": _INFERENCE,
    "deepspeed.revert_transformer_layer": _INFERENCE,
    "deepspeed.DeepSpeedHybridEngine": _HYBRID,
    "deepspeed.runtime.hybrid_engine": _HYBRID,
    "deepspeed.pipe": _PIPELINE,
    "deepspeed.DualPipeVModule": f"{_PIPELINE}; pipeline.schedule 'DualPipeV' is for models of transformers",
    "deepspeed.runtime.pipe": _PIPELINE,
    "deepspeed.moe": _MOE,
    "deepspeed.runtime.fp16.onebit": _ONEBIT,
    "deepspeed.utils.groups": "the data-, model- and sequence-parallel getters are provided; other process groups do not exist here",
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.config_utils": _CONFIG,
    # What else these modules of DeepSpeed have.
    **dict.fromkeys(
        (
            "deepspeed.accelerator",
            "deepspeed.comm",
            "deepspeed.runtime.engine",
            "deepspeed.runtime.utils",
            "deepspeed.runtime.zero",
            "deepspeed.utils.tensor_fragment",
            "deepspeed.utils.timer",
            "deepspeed.utils.torch",
            "deepspeed.utils.zero_to_fp32",
        ),
        f"{_INNER}, or no name of its; hf_zero/deepspeed/alias/table.py lists those that are served",
    ),
    "deepspeed.runtime.lr_schedules": (
        "the schedules, VALID_LR_SCHEDULES and add_tuning_arguments are provided; names and parameters of schedules are plain texts, which "
        "docs/config.md lists"
    ),
    "deepspeed.runtime.zero.leaf_module_config": "set zero_optimization.leaf_module in the configuration, or call set_z3_leaf_modules",
    "deepspeed.module_inject.tp_shard": "set tensor_parallel.autotp_size, which splits tensors by itself",
    "deepspeed.default_inference_config": _INFERENCE,
    "deepspeed.runtime.constants": "the keys of the configuration are plain texts; docs/config.md lists them",
    "deepspeed.runtime.zero.config": _CONFIG,
    "deepspeed.runtime.zero.linear": "linear layers are not replaced; torch.nn.Linear works on gathered weights as it is",
    "deepspeed.runtime.zero.tiling": "tiled layers are not implemented; ZeRO stage 3 shards a layer of any size",
    "deepspeed.runtime.zero.utils": "only is_zero_param and ZeRORuntimeException are provided",
    "deepspeed.runtime.zero.offload_states": _INNER,
    "deepspeed.runtime.checkpoint_engine": "checkpoint writers are not pluggable; see the checkpoint section of docs/config.md",
    "deepspeed.runtime.comm": f"{_INNER}; use torch.distributed",
    "deepspeed.runtime.eigenvalue": "eigenvalues are not computed; use torch.func.hvp with a power iteration",
    "deepspeed.runtime.precision_config": "read fp16 and bf16 of a configuration off deepspeed.runtime.config.DeepSpeedConfig",
    "deepspeed.runtime.quantize": "quantization is not implemented; use torchao or bitsandbytes",
    "deepspeed.runtime.rollout": "rollouts are not implemented; generate with vLLM or transformers",
    "deepspeed.runtime.sparse_tensor": "sparse gradients are reduced dense; torch.nn.Embedding(sparse=True) trains as it is",
    "deepspeed.runtime.state_dict_factory": _INFERENCE,
    "deepspeed.runtime.swap_tensor": f"{_INNER}; set offload_optimizer or offload_param with device nvme",
    "deepspeed.runtime.tensor_parallel": "set tensor_parallel.autotp_size in the configuration",
    "deepspeed.runtime.torch_autocast": "set the torch_autocast section of the configuration; functions about a parameter are provided",
    "deepspeed.runtime.weight_quantizer": "quantization is not implemented; use torchao or bitsandbytes",
    "deepspeed.compile": "use torch.compile or engine.compile()",
    "deepspeed.comm.backend": f"{_INNER}; use torch.distributed",
    "deepspeed.comm.config": "set the comms_logger section of the configuration, or call deepspeed.comm.configure()",
    "deepspeed.comm.torch": f"{_INNER}; use torch.distributed",
    "deepspeed.nvme": "I/O tuning is not implemented; the aio section of the configuration says how files are accessed",
    "deepspeed.datastates": "set the datastates_ckpt section of the configuration",
    "deepspeed.utils.bwc": _INNER,
    "deepspeed.utils.comms_logging": "read deepspeed.comm.log_summary(return_dict=True)",
    "deepspeed.utils.debug": f"{_INNER}; engine.param_names has the name of each parameter",
    "deepspeed.utils.numa": "bind ranks with numactl in your launcher's command",
    "deepspeed.utils.parallel_state": "the getters are in deepspeed.utils.groups and deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.DeepSpeedTransformerLayer": "fused transformer layers are not implemented; use attn_implementation='sdpa' or torch.compile",
    "deepspeed.DeepSpeedTransformerConfig": "fused transformer layers are not implemented; use attn_implementation='sdpa' or torch.compile",
    "deepspeed.ops.transformer": "fused transformer layers are not implemented; use attn_implementation='sdpa' or torch.compile",
    "deepspeed.ops.sparse_attention": "sparse attention is not implemented; use attn_implementation='sdpa' or flex_attention",
    "deepspeed.ops.op_builder": f"{_BUILDER} with functions; a builder returns whether hf_zero provides the feature of its operator",
    "deepspeed.op_builder": _BUILDER,
    "deepspeed.ops.lamb": "only FusedLamb is provided",
    "deepspeed.ops.muon": 'DeepSpeed has no such module either; write "type": "Muon" in the configuration, or use torch.optim.Muon',
    "deepspeed.runtime.zero.muon": "only muon_optimizer.MuonWithAuxAdam is provided; torch.optim.Muon works too",
    "deepspeed.ops.aio": "asynchronous file I/O is not a public interface of hf_zero",
    "deepspeed.runtime.fp16": "loss scaling lives in the engine; set the fp16 section of the configuration",
    "deepspeed.runtime.bf16_optimizer": "the engine keeps fp32 masters itself; set the bf16 section of the configuration",
    "deepspeed.runtime.zero.stage_1_and_2": "one engine serves every stage; use deepspeed.initialize(...) and engine.optimizer",
    "deepspeed.runtime.zero.stage3": "one engine serves every stage; use deepspeed.initialize(...) and engine.optimizer",
    "deepspeed.runtime.zero.parameter_offload": "one engine serves every stage; use deepspeed.initialize(...) and engine.optimizer",
    "deepspeed.zero.TiledLinear": "tiled layers are not implemented; ZeRO stage 3 shards a layer of any size",
    "deepspeed.runtime.zero.mics": "only MiCS_Init is provided; zero_optimization.mics_shard_size is all that deepspeed.initialize() needs",
    "deepspeed.runtime.dataloader": "pass training_data to deepspeed.initialize, or a torch DataLoader to accelerate",
    "deepspeed.runtime.data_pipeline": "of data efficiency there is CurriculumScheduler; do it in the dataset or the sampler",
    "deepspeed.runtime.progressive_layer_drop": "progressive layer drop is not implemented; use the model's own layerdrop",
    "deepspeed.runtime.compiler": "use torch.compile or engine.compile()",
    "deepspeed.linear": "use peft for LoRA and quantized base weights",
    "deepspeed.compression": "compression is not implemented; use torchao or bitsandbytes; helper has recursive_getattr and -setattr",
    "deepspeed.profiling": "only the flops profiler is provided; use torch.profiler, in which phases appear as hf_zero::...",
    "deepspeed.monitor": "only the monitors and their sections are provided; track more with accelerate or with callbacks",
    "deepspeed.autotuning": "the autotuner is not implemented; `hf-zero explain` shows what a configuration does",
    "deepspeed.utils.logging": "logger, log_dist and functions that set the level are provided; use Python's logging for the rest",
    "deepspeed.utils.module_utils": "recursive_getattr and recursive_setattr are in deepspeed.compression.helper",
    "deepspeed.elasticity": "only the computation of batch sizes is provided; a checkpoint loads on any number of ranks",
    "deepspeed.nebula": "Nebula is not implemented; checkpoints are written to a directory",
    "deepspeed.io": "checkpoint writers are not pluggable; checkpoints are written to a directory",
    "deepspeed.checkpoint": "a checkpoint loads on any number of ranks without conversion; DeepSpeed's own are read by `hf-zero convert`",
    "deepspeed.launcher": "start with `hf-zero launch`, which takes the same flags, `accelerate launch`, torchrun or mpirun",
    "deepspeed.env_report": "only main and cli_main are provided; `hf-zero report` is the same, made for bug reports",
    "deepspeed.ops.adam": "only DeepSpeedCPUAdam and FusedAdam are provided; torch.optim optimizers work as they are",
}

# Classes and functions that scripts import for an isinstance check, or for code that does not run; an import alone is no use of them.
UNUSED: Final = frozenset(
    {
        *(f"deepspeed.runtime.fp16.onebit.{name}" for name in _OTHER_ONEBIT),
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
        "deepspeed.runtime.utils.PartitionedTensor",
        "deepspeed.runtime.zero.partition_parameters.MultipleAllGatherHandles",
        "deepspeed.compression.compress.init_compression",
        "deepspeed.compression.compress.redundancy_clean",
        "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd",
        "deepspeed.sequence.fpdt_layer.FPDT_InputConstruct",
        "deepspeed.sequence.fpdt_layer._FPDTGPUOffloadingAttentionImpl_",
    }
)

MODULES: Final[frozenset[str]] = frozenset(
    ".".join(parts[:count]) for parts in (name.split(".") for name in (*PROVIDED, *UNUSED)) for count in range(1, len(parts))
)


def refusal(full_name: str) -> str | None:
    """Return the reason why ``full_name`` is refused, from its own row or the row of its nearest parent; None if it is not refused."""
    while full_name != "deepspeed":
        if full_name in REFUSED:
            return REFUSED[full_name]
        full_name = full_name.rpartition(".")[0]
    return None
