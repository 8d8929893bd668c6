"""Table of the library methods that hf_zero wraps, those of Lightning apart (``lightning_table.py``).

Imports none of the libraries. ``integrations/callers.py`` wraps the methods when their modules are imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A function or method of a library that hf_zero wraps.

    Attributes:
        module: Module of the library that defines it.
        name: Name in the module, "Class.method" or "function".
        loss: Clause for the warning: the feature that no longer works if the library lacks the method.
        around: "module:function" that is called instead, with the original method followed by its arguments; "" if the wrapper only records
            that the method runs.
        seen: Whether a method with ``around`` is recorded as running too.
        since: First version of the library that has the method.
    """

    module: str
    name: str
    loss: str
    around: str = ""
    seen: bool = False
    since: tuple[int, ...] = ()


_COUNTED = "each sample would be counted once per rank that shares it (tensor_parallel.autotp_size)"
DELETED = "the last complete checkpoint could be deleted while the next is written in the background"

STATE = Method(
    "accelerate.state",
    "PartialState.__init__",
    "ranks that mpirun or srun started are not recognised (start with torchrun or hf-zero launch)",
    around="hf_zero.launch.rank:start_state",
)
ACCELERATOR_STATE = Method(
    "accelerate.state",
    "AcceleratorState.__init__",
    "a ParallelismConfig would be ignored",
    around="hf_zero.integrations.parallelism:start_accelerator_state",
)
ACCELERATOR = Method(
    "accelerate.accelerator",
    "Accelerator.__init__",
    "gradient_accumulation_steps of accelerate's configuration file silently replaces the number of the script",
    around="hf_zero.integrations.script_values:start_accelerator",
)
PARALLELISM = Method(
    "accelerate.parallelism_config",
    "ParallelismConfig.__post_init__",
    "ParallelismConfig refuses cp_size together with sp_size (give sequence_parallel_size in the configuration instead of sp_size)",
    around="hf_zero.integrations.parallelism:make_parallelism_config",
    since=(1, 12),
)
RECURRENT = Method(
    "accelerate.accelerator",
    "_refuse_recurrent_layers_under_sequence_parallelism",
    "accelerate refuses models with linear attention under sp_size",
    around="hf_zero.integrations.parallelism:allow_layers",
    since=(1, 15),
)
INIT_SWITCH = Method(
    "accelerate.utils.dataclasses",
    "DeepSpeedPlugin.zero3_init_context_manager",
    "from_pretrained shards models under zero3_init_context_manager(enable=False) too",
    around="hf_zero.integrations.loading:zero3_init_context_manager",
)
PLUGIN = Method(
    "accelerate.utils.dataclasses",
    "DeepSpeedPlugin.__post_init__",
    "there is no warning that ACCELERATE_USE_CPU turns ZeRO off",
    around="hf_zero.integrations.parallelism:make_plugin",
)
CONFIGURATION = Method(
    "accelerate.utils.deepspeed",
    "HfDeepSpeedConfig.__init__",
    "a configuration that cannot be read gives three chained errors, and comments in it are refused",
    around="hf_zero.integrations.early_checks:read_source",
)
ARGUMENTS = Method(
    "transformers.training_args",
    "TrainingArguments.__post_init__",
    "mistakes in a configuration are reported after data and models have been loaded",
    around="hf_zero.integrations.early_checks:make_arguments",
)
AGENT = Method(
    "torch.distributed.launcher.api",
    "launch_agent",
    "a launcher ends with its own traceback instead of the cause",
    around="hf_zero.system.launcher_report:launch_agent",
)
PREPARE_TP = Method(
    "accelerate.accelerator",
    "Accelerator._prepare_tp",
    "ParallelismConfig(tp_size=...) fails with an error of accelerate",
    around="hf_zero.integrations.parallelism:prepare_tensor_parallel",
    since=(1, 10),
)
CPU_OPTIMIZER = Method(
    "accelerate.accelerator",
    "map_pytorch_optim_to_deepspeed",
    "with offload_optimizer a scheduler warns that it was stepped before the optimizer, although it was not",
    around="hf_zero.integrations.accumulate:map_optimizer",
)
LAUNCH = Method(
    "accelerate.commands.launch",
    "_validate_launch_command",
    "accelerate launch --use_deepspeed refuses --use_parallelism_config",
    around="hf_zero.integrations.parallelism:validate_launch",
)
NO_SYNC = Method(
    "accelerate.accelerator",
    "Accelerator.no_sync",
    "Accelerator.accumulate() fails in versions of accelerate that step inside it (1.6)",
    around="hf_zero.integrations.accumulate:no_sync",
)
_STEPS = "a loop that accumulates outside of Accelerator.accumulate() updates in every backward"
SAYS = Method("accelerate.state", "GradientState._set_sync_gradients", _STEPS, around="hf_zero.integrations.accumulate:set_sync_gradients")
BACKWARD = Method(
    "accelerate.utils.deepspeed", "DeepSpeedEngineWrapper.backward", _STEPS, around="hf_zero.integrations.accumulate:backward"
)
BACKWARD_OF_SEVERAL = Method(
    "accelerate.accelerator",
    "Accelerator.backward",
    "an Accelerator with several prepared models passes each loss to the first engine only",
    around="hf_zero.integrations.accumulate:backward_of_several",
)
PREPARE_ONE = Method(
    "accelerate.accelerator",
    "Accelerator._prepare_deepspeed",
    "of several optimizers for one model accelerate keeps the last",
    around="hf_zero.integrations.accumulate:prepare",
)
PREPARE_MODEL = Method(
    "accelerate.accelerator",
    "Accelerator.prepare_model",
    "accelerator.prepare_model(model) makes no engine, so each rank trains by itself (use accelerator.prepare)",
    around="hf_zero.integrations.accumulate:prepare_model",
)
STEP = Method("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper.step", _STEPS, around="hf_zero.integrations.accumulate:step")
ZERO_GRAD = Method(
    "accelerate.utils.deepspeed",
    "DeepSpeedOptimizerWrapper.zero_grad",
    "zero_grad() does not drop gradients in a loop that accumulates outside of Accelerator.accumulate()",
    around="hf_zero.integrations.accumulate:zero_grad",
)
NORM = Method(
    "accelerate.utils.deepspeed",
    "DeepSpeedEngineWrapper.get_global_grad_norm",
    "clip_grad_norm_ returns the norm of the previous step in a loop that accumulates outside of Accelerator.accumulate()",
    around="hf_zero.integrations.clipping:get_global_grad_norm",
    since=(1, 15),
)
CLIP = Method(
    "accelerate.accelerator",
    "Accelerator.clip_grad_norm_",
    "gradients are clipped at the configuration's gradient_clipping, whatever max_norm a script passes to clip_grad_norm_",
    around="hf_zero.integrations.clipping:clip_grad_norm_",
)
CLIP_VALUE = Method(
    "accelerate.accelerator",
    "Accelerator.clip_grad_value_",
    "accelerate refuses clip_grad_value_ (use torch.nn.utils.clip_grad_value_)",
    around="hf_zero.integrations.clipping:clip_grad_value_",
)
FILL = Method(
    "accelerate.utils.dataclasses",
    "DeepSpeedPlugin.fill_match",
    'values of a script that contradict the configuration are ignored, and accelerate refuses "auto" where it has no value for it',
    around="hf_zero.integrations.script_values:fill_match",
)
PROCESS = Method(
    "accelerate.utils.dataclasses",
    "DeepSpeedPlugin.deepspeed_config_process",
    "values of DummyOptim and DummyScheduler are ignored where the configuration lacks their keys",
    around="hf_zero.integrations.script_values:process_config",
)
PREPARE = Method("accelerate.accelerator", "Accelerator.prepare", _COUNTED)
GATHER = Method("accelerate.accelerator", "Accelerator.gather", _COUNTED, around="hf_zero.integrations.metrics:gather")
METRICS = Method(
    "accelerate.accelerator", "Accelerator.gather_for_metrics", _COUNTED, around="hf_zero.integrations.metrics:gather_for_metrics"
)
LOADER = Method(
    "accelerate.accelerator",
    "prepare_data_loader",
    "the stages of a pipeline would get different samples (pipeline.stages)",
    around="hf_zero.integrations.pipelines:prepare_data_loader",
)
SAME_SAMPLES = Method(
    "transformers.trainer",
    "Trainer.get_tp_size",
    "Trainer would count the tokens of each stage of a pipeline (pipeline.stages)",
    around="hf_zero.integrations.pipelines:get_tp_size",
    since=(5,),
)
CONTEXT_SIZE = Method(
    "transformers.trainer",
    "Trainer.get_cp_size",
    "Trainer would count the tokens of each rank of context parallelism (hf_zero.context_parallel_size)",
    around="hf_zero.integrations.pipelines:get_cp_size",
    since=(5,),
)
_CUT = "under context parallelism accelerate cuts batches for torch's attention itself, and drops masks"
PREPARE_CP = Method("accelerate.accelerator", "Accelerator._prepare_cp", _CUT, around="hf_zero.integrations.context:prepare", since=(1, 12))
CONTEXT = Method(
    "accelerate.accelerator",
    "Accelerator.maybe_context_parallel",
    _CUT,
    around="hf_zero.integrations.context:maybe_context_parallel",
    since=(1, 12),
)
CONTEXT_INPUTS = Method(
    "transformers.trainer",
    "Trainer._prepare_context_parallel_inputs",
    "under context parallelism Trainer refuses attention other than sdpa, and cuts batches that it evaluates",
    around="hf_zero.integrations.context:prepare_inputs",
    since=(5,),
)
LABELS = Method(
    "transformers.trainer",
    "Trainer._get_num_items_in_batch",
    "under sequence parallelism (sp_size) Trainer weighs micro-steps with few labels too much, and ignores label smoothing",
    around="hf_zero.integrations.token_weights:count_labels",
    since=(5,),
)
LOSS = Method(
    "transformers.trainer",
    "Trainer.compute_loss",
    "under sequence parallelism (sp_size) Trainer weighs micro-steps with few labels too much",
    around="hf_zero.integrations.token_weights:compute_loss",
    since=(5,),
)
INPUTS = Method(
    "transformers.trainer",
    "Trainer._prepare_inputs",
    "where Trainer copies batches to a device, models that count positions by images or masks are given positions of plain text under "
    "sequence parallelism",
    around="hf_zero.integrations.context:keep_marks",
)
TOKENS = Method(
    "transformers.trainer",
    "Trainer._track_num_input_tokens",
    "Trainer's num_input_tokens_seen counts the tokens of a sample once per rank that shares it",
    around="hf_zero.integrations.metrics:track_num_input_tokens",
    since=(5, 3),
)
STATE_DICT = Method(
    "accelerate.accelerator",
    "Accelerator.get_state_dict",
    "with expert_parallel at stages 0 to 2, or where a stage-3 model was prepared later, save_model fails (use engine.save_16bit_model)",
    around="hf_zero.integrations.expert_saves:get_state_dict",
    seen=True,
)
LOAD = Method(
    "transformers.modeling_utils",
    "PreTrainedModel.from_pretrained",
    "from_pretrained(distributed_config=DistributedConfig(ep_size=...)) divides the model itself, and initialize refuses it",
    around="hf_zero.integrations.pretrained:from_pretrained",
    since=(5, 20),
)
LOAD_WEIGHTS = Method(
    "transformers.modeling_utils",
    "PreTrainedModel._load_pretrained_model",
    "from_pretrained with expert_parallel reads the experts of all ranks",
    around="hf_zero.integrations.pretrained:load_weights",
    since=(5, 20),
)
BUILD = Method(
    "transformers.modeling_utils",
    "PreTrainedModel._from_config",
    "from_config at stage 3 draws other weights than at stages 0 to 2 from the same seed",
    around="hf_zero.integrations.loading:build",
    since=(5,),
)
BUILD_FOR_LOAD = Method(
    "transformers.modeling_utils",
    "PreTrainedModel.get_init_context",
    "from_pretrained at stage 3 leaves random generators in another state than at stages 0 to 2",
    around="hf_zero.integrations.loading:contexts_of_load",
    since=(5,),
)
SAVE_STATE = Method(
    "accelerate.accelerator",
    "Accelerator.save_state",
    f"a loop that never calls optimizer.step() saves the weights before its first update, and {DELETED}",
    around="hf_zero.integrations.expert_saves:save_state",
    seen=True,
)
TRAIN = Method(
    "transformers.trainer",
    "Trainer.train",
    f"a Trainer cannot train twice, and {DELETED}",
    around="hf_zero.integrations.preemption:train",
    seen=True,
)
UNSAVED = "a signal to one rank (preemption) ends the run without a checkpoint"
OPTIMIZERS = Method(
    "transformers.integrations.deepspeed",
    "deepspeed_init",
    "Trainer ignores its optimizers= argument and makes an optimizer from its training arguments",
    around="hf_zero.integrations.trainer_optimizers:with_own_optimizer",
)
STEP_END = Method(
    "transformers.trainer",
    "Trainer._maybe_log_save_evaluate",
    UNSAVED,
    around="hf_zero.integrations.preemption:log_save_evaluate",
)
SAVE_CHECKPOINT = Method(
    "transformers.trainer",
    "Trainer._save_checkpoint",
    "Trainer's own files of a checkpoint stay in output_dir, whatever hf_zero.checkpoint_url says",
    around="hf_zero.integrations.trainer_snapshots:save_checkpoint",
)
JIT = Method(
    "transformers.trainer_jit_checkpoint",
    "JITCheckpointCallback.set_trainer",
    "with enable_jit_checkpoint each rank decides by its own timer when to save, and a rank that saves alone waits forever",
    around="hf_zero.integrations.preemption:set_trainer",
    since=(5,),
)
LOG = Method(
    "transformers.trainer",
    "Trainer.log",
    "hf_zero.step_metrics appears in the log and in monitors, but not in Trainer's logs",
    around="hf_zero.integrations.metrics:log",
)
OPERATIONS = Method("transformers.trainer", "Trainer.store_flos", _COUNTED, around="hf_zero.integrations.metrics:store_flos")
MESHES = Method(
    "transformers.trainer",
    "Trainer._has_mixed_mesh_grads",
    "Trainer reads the gradient of every parameter in its first step, which gives a warning at stages 1 to 3",
    around="hf_zero.integrations.metrics:has_mixed_mesh_grads",
    since=(5, 23),
)
EVALUATE = Method("transformers.trainer", "Trainer.evaluation_loop", _COUNTED, around="hf_zero.integrations.metrics:evaluation_loop")
SAVE_MODEL = Method(
    "transformers.trainer",
    "Trainer.save_model",
    "a trainer with its own _save method (sentence-transformers) fails to save at stage 3",
)
FILES = tuple(
    Method(
        "safetensors.torch",
        name,
        f"{name} refuses modules that an engine holds (sentence-transformers saves its own layers with it)",
        around="hf_zero.integrations.saves:with_own_tensors",
    )
    for name in ("save_model", "load_model")
)
BEST = Method(
    "sentence_transformers.base.trainer",
    "BaseTrainer._load_best_model",
    "load_best_model_at_end of sentence-transformers keeps the last weights at stage 3, and only logs the error",
    around="hf_zero.integrations.best_model:load_best_model",
)
BEST_ADAPTERS = Method(
    "adapters.trainer",
    "AdapterTrainer._load_best_model",
    "load_best_model_at_end of adapters is an error at stage 3",
    around="hf_zero.integrations.best_model:load_best_model",
)
MISSING_KEYS = Method(
    "transformers.modeling_utils",
    "PreTrainedModel._initialize_missing_keys",
    "from_pretrained at stage 3 does not raise if most weights are missing, and may hang if several are missing",
)
TIE = Method(
    "transformers.modeling_utils",
    "PreTrainedModel.tie_weights",
    "from_pretrained at stage 3 cannot compare weights that a checkpoint has under both of their names",
    around="hf_zero.integrations.loading:tie_weights",
)
RESIZE = Method(
    "transformers.modeling_utils",
    "PreTrainedModel.resize_token_embeddings",
    "at stage 3 resize_token_embeddings draws random numbers if the size stays, and frozen embeddings train afterwards",
    around="hf_zero.integrations.loading:resize_token_embeddings",
)
FILL_SHARDED = Method(
    "transformers.modeling_utils",
    "_load_state_dict_into_zero3_model",
    "from_pretrained at stage 3 may hang if a checkpoint lacks num_batches_tracked of a batch norm",
    around="hf_zero.integrations.loading:fill_sharded",
)
CONVERSIONS = Method(
    "transformers.integrations.deepspeed",
    "_apply_weight_conversions_to_state_dict",
    "from_pretrained at stage 3 does not convert names if tensor_parallel.autotp_size is more than 1",
    since=(5,),
)
COUNTS = tuple(
    Method(f"{module}.modeling_utils", name, f"{name} counts no sharded or divided parameter", "hf_zero.integrations.metrics:count_whole")
    for module, name in (
        ("transformers", "ModuleUtilsMixin.num_parameters"),
        ("transformers", "PreTrainedModel.get_memory_footprint"),
        ("diffusers.models", "ModelMixin.num_parameters"),
        ("diffusers.models", "ModelMixin.get_memory_footprint"),
    )
)
# In the modules that use it: they may be imported before hf_zero wraps anything.
HASHES = tuple(
    Method(
        f"trl.trainer.{kind}_trainer",
        "hash_module",
        "TRL's precompute_ref_log_probs reads sharded parameters at stage 3, which is an error",
        around="hf_zero.integrations.hashes:hash_module",
        since=(1, 16),
    )
    for kind in ("dpo", "kto")
)

INJECT = Method(
    "peft.tuners.tuners_utils",
    "BaseTuner.inject_adapter",
    "kinds of adapters that read the weights of their layers cannot be made at stage 3",
    around="hf_zero.integrations.adapters:inject_adapter",
)
DECOMPOSE = Method(
    "peft.tuners.frod.model",
    "FrodModel._init_frod_projections",
    "FRoD decomposes layers that are empty at stage 3, which fails",
    around="hf_zero.integrations.adapters:decompose_layers",
    since=(0, 21),
)

METHODS = (
    NO_SYNC, STATE, ACCELERATOR_STATE, PLUGIN, INIT_SWITCH, LAUNCH, PREPARE, PREPARE_TP, GATHER, METRICS, STATE_DICT, SAVE_STATE, TRAIN,
    LOG, EVALUATE, BUILD, BUILD_FOR_LOAD, MISSING_KEYS, TIE, SAVE_MODEL, LOAD, LOAD_WEIGHTS, CONVERSIONS, LOADER, SAME_SAMPLES, TOKENS,
    STEP_END, SAVE_CHECKPOINT, JIT, SAYS, BACKWARD, BACKWARD_OF_SEVERAL, PREPARE_ONE, PREPARE_MODEL, STEP, ZERO_GRAD, NORM, CLIP,
    CLIP_VALUE, OPERATIONS, MESHES, FILL, PROCESS, OPTIMIZERS, FILL_SHARDED, CONFIGURATION, ARGUMENTS, AGENT, CONTEXT_SIZE, PREPARE_CP,
    CONTEXT, CONTEXT_INPUTS, PARALLELISM, RECURRENT, ACCELERATOR, CPU_OPTIMIZER, INPUTS, LABELS, LOSS, RESIZE, BEST, *HASHES, *COUNTS,
    BEST_ADAPTERS, *FILES, INJECT, DECOMPOSE,
)  # fmt: skip
