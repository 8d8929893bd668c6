"""Sections that hf_zero does not read, as data: one row each, with the key that enables the section, and DeepSpeed's names and defaults.

Their values are checked like all others, so that typing errors are found; the switch alone decides whether a section is refused. The root
of the schema includes each section with `section(..., model=...)` and keeps its content as a plain dictionary.
"""

from __future__ import annotations

from typing import Any

from pydantic import create_model
from pydantic.fields import FieldInfo

from hf_zero.config.schema.fields import (
    Bool,
    Float,
    FreeSection,
    Int,
    Section,
    SectionClass,
    Share,
    accepted,
    is_section_class,
    part,
    refused,
    section,
)

_TYPES: dict[type, Any] = {bool: Bool, int: Int, float: Float, str: str, dict: dict[str, Any], type(None): dict[str, Any] | None}


def _field(value: Any) -> tuple[Any, Any]:
    """Return annotation and pydantic field of one argument of `_block`."""
    if isinstance(value, FieldInfo):
        return _TYPES[type(value.default)], value
    if is_section_class(value):
        return value | None, section(None, "")
    if isinstance(value, dict) and value:
        ((each, model),) = value.items()
        return dict[str, model] | None, section(None, "", each=each)  # type: ignore[valid-type]
    if isinstance(value, list):
        return list[Int] if value else list[str], part(lambda: list(value), "")
    if isinstance(value, tuple):
        return value[1], part(value[0], "", auto_is_value=value[0] == "auto")
    if type(value) in _TYPES:
        return _TYPES[type(value)], part(dict if value == {} else value, "")
    return value | None, part(None, "")


def _block(switch: str | None = None, /, free: bool = False, **keys: Any) -> SectionClass:
    """Return a section class made from its keys.

    Args:
        switch: Key that switches the section on.
        free: The section accepts further keys.
        keys: Name -> default, which also gives the type; `(default, type)`; a type, for a default of null; a section; `{"<name>": section}`
            for sections under names that the user chooses; or a declared field.
    """
    fields: dict[str, Any] = {name: _field(value) for name, value in keys.items()}
    return create_model("Block", __base__=FreeSection if free else Section, __cls_kwargs__={"switch": switch}, **fields)


# fmt: off
_AFTERWARDS = "not supported: compress the trained model with torchao or optimum"
_OWN_SAMPLER = "not supported: pass a sampler to your DataLoader"

AMP = _block("enabled", free=True,
    enabled=refused(False, "Turn apex on", "apex is not supported: use fp16, bf16 or torch_autocast"), opt_level=str)
AMP.rest = part(None, "Argument of apex amp.initialize")

MSAMP = _block("enabled", free=True,
    enabled=refused(True, "Selects msamp.deepspeed.initialize in accelerate", "MS-AMP is not supported: use bf16"), opt_level="O1")

AUTOTUNING = _block("enabled",
    enabled=refused(False, "Run the tuner from the launcher", "not supported: remove the section and set the batch size yourself"),
    fast=True, results_dir="autotuning_results", exps_dir="autotuning_exps", overwrite=True, start_profile_step=3, end_profile_step=5,
    metric="throughput", metric_path=str, tuner_type="gridsearch", tuner_early_stopping=5, tuner_num_trials=50,
    arg_mappings=dict[str, Any], max_train_batch_size=Int, min_train_batch_size=1, max_train_micro_batch_size_per_gpu=1024,
    min_train_micro_batch_size_per_gpu=1, num_tuning_micro_batch_sizes=3, mp_size=1, model_info_path=str,
    model_info=_block(profile=False, num_params=Int, hidden_size=Int, num_layers=Int))

SPARSE_ATTENTION = _block(
    mode="fixed", block=16, different_layout_per_head=False, num_local_blocks=4, num_global_blocks=1, attention="bidirectional",
    horizontal_global_attention=False, num_different_global_patterns=1, num_random_blocks=0, local_window_blocks=[4],
    global_block_indices=[0], global_block_end_indices=list[Int], num_sliding_window_blocks=3)

_PACING = _block(
    total_curriculum_step=Int, difficulty_step=Int, root_degree=Int, difficulty=list[Int], max_step=list[Int])
_METRIC = _block(
    index_to_sample_path=str, index_to_metric_path=str, difficulty_type=str, clustering_type=str, min_difficulty=Int, max_difficulty=Int,
    schedule_type=str, schedule_config=_PACING)
_RANDOM_LTD = _block(
    enabled=False, total_layer_num=Int, random_ltd_layer_num=Int, random_ltd_layer_id=list[Int], model_mask_name=str, model_type=str,
    hidden_state_order=str,
    random_ltd_schedule=_block(min_value=Int, max_value=Int, schedule_type=str,
                               schedule_config=_block(require_steps=Int, seq_per_step=Int)),
    layer_token_lr_schedule=_block(enabled=False, total_layer_tokens=Int, warmup_type=str, warmup_layer_tokens=Int),
    micro_batch_size=Int, global_batch_size=Int)
DATA_EFFICIENCY = _block("enabled",
    enabled=refused(False, "Turn the library on", _OWN_SAMPLER), seed=1234,
    data_sampling=_block(
        enabled=False, num_epochs=1000, num_workers=0, pin_memory=False,
        curriculum_learning=_block(enabled=False, data_cluster_path=str, curriculum_metrics={"<metric>": _METRIC}),
        dynamic_batching=_block(
            enabled=False, metrics_path=str, lr_scaling_method="linear", min_batch_size=1, max_batch_size=Int,
            sequence_picking_order="dataloader", max_tokens=Int, verbose=False)),
    data_routing=_block(enabled=False, random_ltd=_RANDOM_LTD))

CURRICULUM_LEARNING = _block("enabled",
    enabled=refused(False, "Turn the legacy curriculum on", _OWN_SAMPLER),
    curriculum_type=str, min_difficulty=Int, max_difficulty=Int, schedule_type=str, schedule_config=_PACING)

PROGRESSIVE_LAYER_DROP = _block("enabled",
    enabled=refused(False, "Turn progressive layer drop on", "not supported: use the layerdrop option of the model"),
    theta=1.0, gamma=0.001)


def _technique(what: str, group: SectionClass, **shared: Any) -> SectionClass:
    """Return a block of `compression_training`: the keys that all groups of modules share, and the groups."""
    enabled = refused(False, f"Turn {what} on", _AFTERWARDS)
    return _block("shared_parameters.enabled",
        shared_parameters=_block(enabled=enabled, **shared), different_groups={"<group>": group})


def _group(**params: Any) -> SectionClass:
    return _block(params=_block(**params), modules=("*", list[str] | str), related_modules=list[Any])


_PRUNED = _group(dense_ratio=Float)
COMPRESSION_TRAINING = _block(
    layer_reduction=_block("enabled",
        enabled=refused(False, "Initialise a shallower student", "not supported: build the student model before training"),
        keep_number_layer=Int, module_name_prefix=str, teacher_layer=list[Int], other_module_name=list[str]),
    weight_quantization=_technique("weight quantization", _group(start_bits=Int, target_bits=Int, quantization_period=1),
        quantizer_kernel=False, schedule_offset=0, quantize_groups=1, quantize_verbose=False, quantization_type="symmetric",
        rounding="nearest", quantize_weight_in_forward=False,
        fp16_mixed_quantize=_block(enabled=False, quantize_change_ratio=0.001)),
    activation_quantization=_technique("activation quantization", _group(bits=Int),
        quantization_type="symmetric", range_calibration="dynamic", schedule_offset=1000),
    sparse_pruning=_technique("sparse pruning", _PRUNED,
        method="l1", schedule_offset=1000, schedule_offset_end=1000, schedule_offset_stride=1, block_pattern="4x1", dense_ratio=0.1,
        excluded_modules=[]),
    row_pruning=_technique("row pruning", _PRUNED, method="l1", schedule_offset=1000),
    head_pruning=_technique("head pruning", _PRUNED, method="topk", schedule_offset=1000, num_heads=Int),
    channel_pruning=_technique("channel pruning", _PRUNED, method="l1", schedule_offset=1000))

QUANTIZE_TRAINING = _block(
    eigenvalue=_block("enabled",
        enabled=refused(False, "Eigenvalue driven quantization", _AFTERWARDS), verbose=False, max_iter=100, tol=0.01, stability=1e-6,
        gas_boundary_resolution=1, layer_name="bert.encoder.layer", layer_num=0))

WEIGHT_QUANTIZATION = _block("enabled",
    enabled=refused(
        True, "Quantized weights (only when the section exists)",
        "not supported: load the model with a quantization_config of transformers"),
    num_bits=8, q_type="symmetric", q_groups=1, quantized_initialization={}, post_init_quant={})

NEBULA = _block("enabled",
    enabled=refused(False, "Use the Nebula service", "not supported: save to a folder of your storage"),
    enable_nebula_load=True, nebula_load_path=str, persistent_storage_path=str, persistent_time_interval=100,
    num_of_version_in_retention=2)

HYBRID_ENGINE = _block("enabled",
    enabled=accepted(False, "Train and generate with one engine", "engine.module.generate() of every engine runs the model's own code"),
    inference_tp_size=refused(1, "Tensor-parallel degree of generation",
        "not supported: tensor_parallel divides layers in training and generation alike"),
    max_out_tokens=512, release_inference_cache=False, pin_parameters=True, tp_gather_partition_size=8,
    enable_cuda_graph=False)

INFERENCE = _block(free=True,
    tensor_parallel=section(None, "Tensor parallelism as transformers reads it",
        model=_block(tp_size=accepted(1, "Tensor-parallel degree of inference", "read by transformers only"))))

ZENFLOW = _block(
    topk_ratio=(0.1, Share), select_strategy=("auto", str), select_interval=("auto", Int | str), update_interval=("auto", Int | str),
    overlap_step=False, offload=False, auto_ratio=(0.99, Share), full_warm_up_rounds=0, pt_reserved_cores_perc=(0.5, Share),
    steps_per_epoch=Int)
