"""Sections that split the model in other ways than ZeRO: tensors, experts, pipeline stages, elastic world sizes."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_zero.config.schema.fields import Bool, Float, FreeSection, Int, Section, Size, accepted, later, part, refused, section, used

_FOUND = "found from the model's own data flow"


class Pipeline(FreeSection):
    """`pipeline`. Options of PipelineModule training."""

    stages: Int | str = part("auto", "Number of stages; auto takes it from the module", auto_is_value=True)
    partition: str = part("best", "How layers are split")
    seed_layers: Bool = part(False, "Seed each layer separately")
    activation_checkpoint_interval: Int = part(0, "Layers between checkpoints")
    pipe_partitioned: Bool = part(True, "Split activations over model-parallel ranks")
    grad_partitioned: Bool = part(True, "Split activation gradients over model-parallel ranks")
    use_reentrant: Bool = part(True, "Use the reentrant checkpoint function")


class Elasticity(Section):
    """`elasticity`. Batch size computed for a range of world sizes; other batch keys then raise. Resuming needs no more: any checkpoint
    loads on any number of ranks."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = used(False, "Compute the three batch keys so that many numbers of ranks share one global batch")
    max_train_batch_size: Int = part(2000, "Largest global batch")
    micro_batch_sizes: list[Int] = part(lambda: [2, 4, 6], "Allowed micro batches")
    min_gpus: Int = part(1, "Fewest ranks")
    max_gpus: Int = part(10000, "Most ranks")
    min_time: Int = accepted(0, "Minutes between scaling events (v0.1)", "for schedulers of clusters; checked, not used in training")
    prefer_larger_batch: Bool = part(True, "Prefer batches near the maximum")
    version: Float = part(0.2, "Algorithm version")
    ignore_non_elastic_batch_info: Bool = part(False, "Ignore the other batch keys instead of raising")
    num_gpus_per_node: Int = part(1, "Ranks per node (v0.2)")
    model_parallel_size: Int = part(1, "Model parallel degree (v0.2)")
    prefer_large_batch: Bool = accepted(
        True, "Documented name of prefer_larger_batch", "DeepSpeed does not read it; write prefer_larger_batch"
    )


class LayerSpec(Section):
    """`tensor_parallel.partition_config.layer_specs[]`. One rule of how a layer is split."""

    patterns: list[str] = part(list, "Regular expressions for parameter names (`layers.0.mlp.up_proj.weight`)")
    partition_type: str = part(
        "column", "column (over outputs), row (over inputs), vocabulary (a head whose logits stay in parts until the loss) or skip (whole)"
    )
    shape: list[Any] | None = accepted(None, "Logical shape of fused weights", _FOUND)
    partition_dim: Int | None = accepted(None, "Split dimension", _FOUND)
    model_types: list[str] | None = part(None, "Only for these model types")
    gather_output: Bool = accepted(False, "Gather column outputs on every rank", _FOUND)
    grad_allreduce: Bool = accepted(False, "Sum gradients of skipped parameters over the group", _FOUND)


class PartitionConfig(Section):
    """`tensor_parallel.partition_config`. Custom partitioning."""

    tp_size: Int | None = accepted(None, "Degree", "autotp_size says it")
    use_default_specs: Bool = part(True, "Layers that no rule matches are split as the data flow allows; false keeps them whole")
    strict_mode: Bool = part(False, "Raise for linear layers no rule matches")
    embedding_partition_dim: Int = accepted(1, "Split dimension of embeddings", "embeddings are split over the vocabulary")
    lm_head_patterns: list[str] = part(lambda: ["lm_head", "embed_out"], "Names of output heads, for vocab_parallel_lm_head")
    layer_specs: list[LayerSpec] | None = section(None, "Ordered rules", each="[]")


class TpGroup(Section):
    """`tensor_parallel.tp`. Group options."""

    tp_size: Int = accepted(1, "Degree", "autotp_size says it")
    tp_grain_size: Int = accepted(1, "Split granularity", "splits follow heads and never cut one")
    mpu: Any = accepted(None, "Topology object", "pass mpu= to initialize")
    tp_group: Any = accepted(None, "Process group", "pass mpu= to initialize")


class TensorParallel(Section):
    """`tensor_parallel`. AutoTP training."""

    switch: ClassVar[str | None] = "autotp_size"

    autotp_size: Size = later(0, "Ranks that hold one model together; 0 and 1 are off", "tensor_parallel", passes=(1,))
    dtype: str = accepted("float16", "Type the model is converted to", "bf16 and fp16 say it")
    tp_overlap_comm: Bool = accepted(False, "Overlap the all-reduce", "collectives are waited for where their result is read")
    vocab_parallel_lm_head: Bool | None = part(
        None, "Compute the loss from each rank's part of the logits; the output head is found by its name"
    )
    vocab_parallel_ce_backend: str = accepted("torch", "torch or liger", "the loss from parts of the logits is hf_zero's own")
    preset_model: str | None = accepted(None, "llama bloom chatglm mixtral deepseek_v2 qwen2 phi3", _FOUND)
    partition_config: PartitionConfig | None = section(None, "Custom partitioning")
    tp: TpGroup | None = section(None, "Group options", also=("tensor_parallel",))
    injection_policy_tuple: Any = accepted(None, "Explicit injection policy", _FOUND)
    keep_module_on_host: Bool = accepted(False, "Leave loaded weights on the host", "parameters are cut where they are")
    replace_with_kernel_inject: Bool = accepted(False, "Use inference kernels", "the model's own code runs", also=("kernel_inject",))


class ExpertParallel(Section):
    """`expert_parallel`. Expert parallelism."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(
        False, "Turn AutoEP on", "not supported: experts are sharded by zero_optimization.stage 3 like every other parameter"
    )
    autoep_size: Int = part(1, "Expert-parallel degree")
    expert_tensor_parallel_size: Int = part(1, "Only 1 is accepted")
    validate_folding_routing: Bool = part(False, "Check routing agreement at run time")
    preset_model: str | None = part(None, "mixtral qwen3_moe qwen3_5_moe deepseek_v2 deepseek_v3")
    moe_layer_pattern: str | None = part(None, "Pattern of MoE modules")
    expert_pattern: str | None = part(None, "Child name of the experts")
    router_pattern: str | None = part(None, "Child name of the router")
    use_grouped_mm: Bool = part(True, "Grouped matrix product")
    disable_triton_grouped_mm: Bool = part(False, "Avoid the Triton kernel")
    route_norm: Bool | None = part(None, "Normalise router scores")
    route_scale: Float = part(1.0, "Scale router scores")
    score_apply: str = part("auto", "pre post or auto", auto_is_value=True)
    score_func: str = part("auto", "softmax sigmoid or auto", auto_is_value=True)
    combine_impl: str = part("auto", "How expert outputs are combined", auto_is_value=True)
    num_expert_groups: Int | None = part(None, "Groups for limited routing")
    num_limited_groups: Int | None = part(None, "Groups chosen")
    top_k: Int | str = part("auto", "Experts per token", auto_is_value=True)
    load_balance_coeff: Any = part(None, "Reserved")
    routed_scaling_factor: Float | str = part("auto", "Scale of routed output", auto_is_value=True)
    expert_w1: str | None = part(None, "Name of the gate weight")
    expert_w2: str | None = part(None, "Name of the down weight")
    expert_w3: str | None = part(None, "Name of the up weight; null means fused")
    num_experts_attr: str | None = part(None, "Config attribute with the expert count")
    top_k_attr: str | None = part(None, "Config attribute with top-k")
    has_shared_experts: Bool | None = part(None, "Layer has shared experts")
    shared_experts_pattern: str | None = part(None, "Child name of shared experts")
    shared_experts_gate_pattern: str | None = part(None, "Child name of their gate")


class HybridEngine(Section):
    """`hybrid_engine`. Training and generation in one engine."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(
        False,
        "Train and generate with one engine",
        "not supported: call generate() on the module, gathered units are released again afterwards",
    )
    max_out_tokens: Int = part(512, "Longest generation")
    inference_tp_size: Int = part(1, "Tensor-parallel degree of generation")
    release_inference_cache: Bool = part(False, "Free the cache after generation")
    pin_parameters: Bool = part(True, "Keep parameters in place")
    tp_gather_partition_size: Int = part(8, "Layers gathered at a time")
    enable_cuda_graph: Bool = part(False, "Replay generation from graphs")


class InferenceTensorParallel(Section):
    """`inference.tensor_parallel`. Tensor parallelism as transformers reads it."""

    tp_size: Int = accepted(1, "Tensor-parallel degree of inference", "read by transformers only")


class Inference(FreeSection):
    """`inference`. Inference settings that transformers reads."""

    tensor_parallel: InferenceTensorParallel | None = section(None, "Tensor parallelism as transformers reads it")
