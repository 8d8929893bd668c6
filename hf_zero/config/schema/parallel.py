"""Sections that divide the model in other ways than ZeRO: tensors, experts, pipeline stages; and elastic numbers of ranks."""

from __future__ import annotations

from typing import Any, Literal

from hf_zero.config.schema.fields import Bool, Count, Float, FreeSection, Int, Section, Size, accepted, part, refused, section, used

_FOUND = "found from the model's own data flow"
_STRUCTURE = "found from the model's structure"
_ROUTER = "the model's own router computes it"


class Elasticity(Section, switch="enabled"):
    """`elasticity`. Batch size computed for a range of world sizes; other batch keys then raise an error. Resuming needs no setting: any
    checkpoint loads on any number of ranks."""

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
    """`tensor_parallel.partition_config.layer_specs[]`. One rule for the split of a layer."""

    patterns: list[str] = part(list, "Regular expressions for parameter names (`layers.0.mlp.up_proj.weight`)")
    partition_type: str = part(
        "column",
        "column (over outputs), row (over inputs), vocabulary (a head whose logits are not gathered before the loss) or skip (whole)",
    )
    shape: list[Any] | None = accepted(None, "Logical shape of fused weights", _FOUND)
    partition_dim: Int | None = accepted(None, "Split dimension", _FOUND)
    model_types: list[str] | None = part(None, "Only for these model types")
    gather_output: Bool = accepted(False, "Gather column outputs on every rank", _FOUND)
    grad_allreduce: Bool = accepted(False, "Sum gradients of skipped parameters over the group", _FOUND)


class PartitionConfig(Section):
    """`tensor_parallel.partition_config`. Custom partitioning."""

    tp_size: Int | None = accepted(None, "Degree", "autotp_size sets it")
    use_default_specs: Bool = part(True, "Layers that no rule matches are split as the data flow allows; false keeps them whole")
    strict_mode: Bool = part(False, "Raise for linear layers no rule matches")
    embedding_partition_dim: Int = accepted(1, "Split dimension of embeddings", "embeddings are split over the vocabulary")
    lm_head_patterns: list[str] = part(lambda: ["lm_head", "embed_out"], "Names of output heads, for vocab_parallel_lm_head")
    layer_specs: list[LayerSpec] | None = section(None, "Ordered rules", each="[]")


class TpGroup(Section):
    """`tensor_parallel.tp`. Group options."""

    tp_size: Int = accepted(1, "Degree", "autotp_size sets it")
    tp_grain_size: Int = accepted(1, "Split granularity", "splits follow heads and never cut one")
    mpu: Any = accepted(None, "Topology object", "pass mpu= to initialize")
    tp_group: Any = accepted(None, "Process group", "pass mpu= to initialize")


class TensorParallel(Section, switch="autotp_size"):
    """`tensor_parallel`. AutoTP training."""

    autotp_size: Size = used(0, "Ranks that hold one model together; 0 and 1 are off", passes=(1,))
    dtype: str = accepted("float16", "Type the model is converted to", "the sections bf16 and fp16 set it")
    tp_overlap_comm: Bool = accepted(False, "Overlap the all-reduce", "the engine waits for a collective when its result is read")
    vocab_parallel_lm_head: Bool | None = part(
        None, "Compute the loss from each rank's part of the logits; the output head is found by its name"
    )
    vocab_parallel_ce_backend: str = accepted(
        "torch", "torch or liger", "the loss over parts of the logits has hf_zero's own implementation"
    )
    preset_model: str | None = accepted(None, "llama bloom chatglm mixtral deepseek_v2 qwen2 phi3", _FOUND)
    partition_config: PartitionConfig | None = section(None, "Custom partitioning")
    tp: TpGroup | None = section(None, "Group options", also=("tensor_parallel",))
    injection_policy_tuple: Any = accepted(None, "Explicit injection policy", _FOUND)
    keep_module_on_host: Bool = accepted(False, "Leave loaded weights on the host", "parameters are cut on the device they are on")
    replace_with_kernel_inject: Bool = accepted(False, "Use inference kernels", "the model's own code runs", also=("kernel_inject",))


class Pipeline(FreeSection):
    """`pipeline`. The layers of a model are divided over the stages of a pipeline."""

    stages: Count | Literal["auto"] = used(
        "auto",
        "Ranks that hold the layers of one model together; auto takes the number of a PipelineModule, else 1, which is off",
        auto_is_value=True,
    )
    partition_method: str = used(
        "parameters", "Quantity balanced over stages: parameters, uniform (blocks), operations, or type:REGEX (layers of matching classes)"
    )
    micro_batches: Count | Literal["auto"] = used(
        "auto", "Parts that a batch is divided into; auto takes the largest divisor, up to two parts per stage", auto_is_value=True
    )
    schedule: str = used(
        "1F1B",
        "Schedule of train_batch: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV, "
        "all of torch.distributed.pipelining",
    )
    stages_per_rank: Count = used(1, "Stages that each rank runs in turn (interleaved schedules)")
    partition: str = accepted("best", "Balance of stages", "partition_method sets it")
    seed_layers: Bool = accepted(False, "Seed before each layer is built", "PipelineModule(seed_layers=) sets it")
    activation_checkpoint_interval: Size = used(0, "Layers of a PipelineModule in one recomputation; from 1 on it overrides the argument")
    pipe_partitioned: Bool = accepted(
        True, "Divide sent activations over tensor-parallel ranks", "each rank sends the tensors that its peer in the next stage reads"
    )
    grad_partitioned: Bool = accepted(
        True, "Divide sent gradients over tensor-parallel ranks", "each rank sends the gradients that its peer in the previous stage reads"
    )
    use_reentrant: Bool = accepted(True, "Kind of recomputation", "the model's own checkpointing sets it")


class ExpertParallel(Section, switch="enabled"):
    """`expert_parallel`. Adjacent ranks hold all experts of a layer together, and tokens are sent to the ranks of their experts."""

    enabled: Bool = used(False, "Divide the experts over ranks")
    autoep_size: Count = used(1, "Ranks that hold all experts together; 1 is off")
    expert_tensor_parallel_size: Int = refused(
        1, "Ranks that share one expert", "not supported: experts are whole on their rank", passes=(1,)
    )
    validate_folding_routing: Bool = accepted(
        False, "Check at run time that ranks route tokens equally", "each rank routes its own samples"
    )
    preset_model: str | None = accepted(None, "mixtral qwen3_moe qwen3_5_moe deepseek_v2 deepseek_v3", _STRUCTURE)
    moe_layer_pattern: str | None = accepted(None, "Pattern of MoE modules", _STRUCTURE)
    expert_pattern: str | None = accepted(None, "Child name of the experts", _STRUCTURE)
    router_pattern: str | None = accepted(None, "Child name of the router", "the model's own code calls its router")
    use_grouped_mm: Bool = accepted(True, "Grouped matrix product", "the experts_implementation of the model decides")
    disable_triton_grouped_mm: Bool = accepted(False, "Avoid the Triton kernel", "the experts_implementation of the model decides")
    route_norm: Bool | None = accepted(None, "Normalise router scores", _ROUTER)
    route_scale: Float = accepted(1.0, "Scale router scores", _ROUTER)
    score_apply: str = accepted("auto", "pre, post or auto", "the experts_implementation of the model decides", auto_is_value=True)
    score_func: str = accepted("auto", "softmax, sigmoid or auto", _ROUTER, auto_is_value=True)
    combine_impl: str = accepted(
        "auto", "How expert outputs are combined", "results are summed on the rank that sent the token", auto_is_value=True
    )
    num_expert_groups: Int | None = accepted(None, "Groups for limited routing", _ROUTER)
    num_limited_groups: Int | None = accepted(None, "Groups chosen", _ROUTER)
    top_k: Int | str = accepted("auto", "Experts per token", _ROUTER, auto_is_value=True)
    load_balance_coeff: Any = refused(
        None, "Reserved", "not supported: the model's own auxiliary loss balances experts (router_aux_loss_coef)"
    )
    routed_scaling_factor: Float | str = accepted("auto", "Scale of routed output", _ROUTER, auto_is_value=True)
    expert_w1: str | None = accepted(None, "Name of the gate weight", _STRUCTURE)
    expert_w2: str | None = accepted(None, "Name of the down weight", _STRUCTURE)
    expert_w3: str | None = accepted(None, "Name of the up weight; null means fused", _STRUCTURE)
    num_experts_attr: str | None = accepted(None, "Config attribute with the expert count", _STRUCTURE)
    top_k_attr: str | None = accepted(None, "Config attribute with top-k", _ROUTER)
    has_shared_experts: Bool | None = accepted(None, "Layer has shared experts", _STRUCTURE)
    shared_experts_pattern: str | None = accepted(None, "Child name of shared experts", _STRUCTURE)
    shared_experts_gate_pattern: str | None = accepted(None, "Child name of their gate", _STRUCTURE)
