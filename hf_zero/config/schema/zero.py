"""The `zero_optimization` section: sharding, offloading and gathering, and their schedule."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hf_zero.config.schema import unread
from hf_zero.config.schema.fields import (
    Bool,
    Count,
    Device,
    Int,
    Section,
    Share,
    Size,
    Texts,
    accepted,
    mapped,
    part,
    refused,
    section,
    used,
)

_AHEAD = "the next block is always fetched ahead, and up to stage3_prefetch_bucket_size more elements"
NO_BUCKETS = "every unit is one flat buffer with one collective, so there are no buckets to size"


DEFAULT_LEAF_CLASSES: tuple[str, ...] = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Mixture-of-experts blocks whose experts run or not depending on the data."""


class LeafModule(Section):
    """`zero_optimization.leaf_module`. Modules fetched as one unit."""

    classes: Texts = used(lambda: list(DEFAULT_LEAF_CLASSES), "Class paths treated as leaves")
    names: Texts = used(list, "Module names treated as leaves")
    name_suffixes: Texts = used(list, "Module name endings treated as leaves")


class OffloadParam(Section, switch="device"):
    """`zero_optimization.offload_param`. Keep parameter shards on host or NVMe (stage 3)."""

    device: Device = used("none", "Where parameter shards are kept between uses; only at stage 3, other stages log a warning")
    nvme_path: str | None = part(None, "Directory for swap files")
    buffer_count: Annotated[Int, Field(ge=1)] = part(5, "nvme: number of buffers for the next shards, each as large as the largest shard")
    buffer_size: Int = accepted(
        100000000, "Elements per buffer", "a buffer is as large as the largest shard; use buffer_count for more or fewer"
    )
    max_in_cpu: Size = part(1000000000, "nvme: elements per rank that stay in host memory, from the first block on")
    pin_memory: Bool = part(True, "Use page-locked host memory; ordinary memory, with a warning, where locking fails")


class OffloadOptimizer(Section, switch="device"):
    """`zero_optimization.offload_optimizer`. Keep optimizer states on host or NVMe and update there."""

    device: Device = used("none", "Where masters and optimizer states are kept; the host updates them")
    nvme_path: str | None = part(None, "Directory for swap files")
    buffer_count: Annotated[Int, Field(ge=1)] = part(
        4,
        "nvme: number of buffers in memory, each as large as the largest shard; sub-groups are cut so that any optimizer fits into them",
    )
    pin_memory: Bool = part(True, "Use page-locked host memory; ordinary memory, with a warning, where locking fails")
    pipeline_read: Bool = part(False, "nvme: read the next sub-group while one is updated")
    pipeline_write: Bool = part(False, "nvme: write the previous sub-group while one is updated")
    fast_init: Bool = accepted(
        False, "Faster first creation of the swap files", "room for the files is reserved in one call; they are not written at start"
    )
    ratio: Share = part(1.0, "Fraction of parameters whose states are offloaded; the first units of the model stay on the device")
    super_offload: Bool = accepted(
        False,
        "Speculative host update in a separate process",
        "hf_zero.offload_overlap selects updates during backward, in a thread; by default they are on beside a device",
    )
    cpuadam_cores_perc: Share = part(
        0.8,
        "Fraction of the host's cores, divided by its ranks, for updates beside a device; at least OMP_NUM_THREADS, which alone counts "
        "where the host itself trains",
    )

    @property
    def pipeline(self) -> bool:
        """Return whether reading or writing overlaps updates; DeepSpeed's configuration class has it."""
        return self.pipeline_read or self.pipeline_write


class LocoParam(Section):
    """`zero_optimization.zeropp_loco_param`. The errors of gradient codes are added before the next coding."""

    err_beta: Share = used(
        0.8, "Weight of the old error when a new code's error is mixed in; 0 keeps only the last code's error, 1 keeps no error"
    )
    reset_T: Annotated[Int, Field(ge=1)] = used(1024, "Number of optimizer steps after which errors restart from zero")  # noqa: N815


class ZeroOptimization(Section):
    """`zero_optimization`. Sharding, offload and gathering."""

    stage: Annotated[Int, Field(ge=0, le=3)] = used(0, "0 off; 1 optimizer states; 2 plus gradients; 3 plus parameters")
    contiguous_gradients: Bool = accepted(
        True, "Copy gradients to a contiguous buffer as they are computed", "the gradients of a unit are always one flat buffer"
    )
    reduce_scatter: Bool = accepted(
        True, "Reduce to the owner instead of all-reduce", "a unit is always reduced to the rank that owns the shard; the sums are the same"
    )
    reduce_bucket_size: Annotated[Size, Field(ge=1)] = accepted(500000000, "Elements per gradient reduction", NO_BUCKETS)
    use_multi_rank_bucket_allreduce: Bool = accepted(
        True, "Merge the buckets of several ranks into one all-reduce", "every unit is one collective; there are no buckets to merge"
    )
    allgather_partitions: Bool = accepted(
        True, "All-gather updated weights instead of broadcasts", "updated shards are always all-gathered, one collective per unit"
    )
    allgather_bucket_size: Size = accepted(500000000, "Elements per weight all-gather; an even number at stages 1 and 2", NO_BUCKETS)
    overlap_comm: Bool | None = used(
        None, "Overlap gathers and reductions with computation; unset means true: overlapping changes no number"
    )
    load_from_fp32_weights: Bool = used(
        True, "If optimizer states are not loaded, restore masters from the checkpoint's masters instead of its 16-bit weights"
    )
    elastic_checkpoint: Bool = accepted(False, "Checkpoint independent of the rank count", "every checkpoint loads on any number of ranks")
    grad_hooks: Bool = accepted(True, "Collect gradients by hooks", "gradients are always collected by hooks")
    sub_group_size: Size = used(
        1000000000,
        "Maximum elements read, updated and written at a time with offload_optimizer on nvme; below 1048576 (also 0), that many are taken",
    )
    ignore_unused_parameters: Bool = used(
        True,
        "Skip a parameter without a gradient on any rank, as plain PyTorch does; if false, a step in which any rank had none raises an "
        "error that names it",
    )
    legacy_stage1: Bool = refused(False, "Old stage 1 implementation", "remove it: stage 1 has one implementation")
    round_robin_gradients: Bool = accepted(
        False, "Spread gradient copies to the host over ranks", "shards are already distributed evenly over ranks"
    )
    compute_grad_norm: Bool = accepted(
        True, "Compute the gradient norm of each step", "the norm is always computed, in one pass; updates do not depend on it"
    )
    parameter_alignment: Bool = accepted(
        False, "Let each parameter start at a multiple of 16 bytes", "each parameter starts at a multiple of 16 elements already"
    )
    cpu_offload: Bool | None = mapped(None, "Old form of offload_optimizer.device cpu", "zero_optimization.offload_optimizer.device: cpu")
    cpu_offload_param: Bool | None = mapped(None, "Old form of offload_param.device cpu", "zero_optimization.offload_param.device: cpu")
    cpu_offload_use_pin_memory: Bool | None = accepted(
        None, "Old form of pin_memory", "replaced by pin_memory inside offload_optimizer and offload_param; the value is not carried over"
    )
    stage3_prefetch_bucket_size: Size = used(50000000, "Elements fetched ahead of use")
    stage3_adaptive_prefetch_bucket_size: Bool = accepted(False, "Choose stage3_prefetch_bucket_size while training", _AHEAD)
    stage3_adaptive_prefetch_min_size: Size = accepted(10000000, "Minimum of the chosen number of elements", _AHEAD)
    stage3_adaptive_prefetch_max_size: Size = accepted(500000000, "Maximum of the chosen number of elements", _AHEAD)
    stage3_param_persistence_threshold: Size = used(100000, "Parameters smaller than this stay gathered")
    stage3_model_persistence_threshold: Size = used(9223372036854775807, "Maximum number of elements that stay gathered in total")
    stage3_max_live_parameters: Size = used(1000000000, "Maximum number of gathered elements per rank")
    stage3_max_reuse_distance: Size = used(1000000000, "Keep a parameter gathered when reused within this many elements")
    stage3_gather_16bit_weights_on_model_save: Bool = used(
        False,
        "Gather whole weights when a model is saved. They are gathered unit by unit in any case; a save with false logs a warning",
        also=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    )
    stage3_gather_fp16_weights_on_model_save: Bool = mapped(
        False, "Older name of stage3_gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
    stage3_module_granularity_threshold: Size = accepted(
        0,
        "Treat modules with fewer parameters per descendant than this as one unit",
        "parameters outside repeated blocks are grouped into one unit already",
    )
    stage3_use_all_reduce_for_fetch_params: Bool = accepted(
        False, "Gather parameters with all-reduce", "a unit is always gathered by one all-gather; the values are the same"
    )
    stage3_allgather_sequential: Bool = accepted(
        False, "Gather parameters one after another instead of coalesced", "a unit is one collective; gathers follow one fixed order"
    )
    zero_hpz_partition_size: Count = used(
        1,
        "Adjacent ranks (of a node) that together keep all parameters from the first gather to the update (stage 3); 1 is off",
    )
    zero_quantized_weights: Bool = used(
        False, "Stage 3: all-gather parameters as codes of 8 bits; shards, masters and saved weights stay exact"
    )
    zero_quantized_nontrainable_weights: Bool = used(False, "Stage 3: like zero_quantized_weights, but only for frozen parameters")
    zero_quantized_gradients: Bool = used(
        False,
        "Stages 1 to 3, 16-bit training: reduce gradients as codes of 4 bits, by an all-to-all (over several nodes by two: inside each "
        "node, then between nodes), summed in fp32 in rank order",
    )
    zeropp_loco_param: LocoParam | None = section(None, "Error feedback of quantized gradients (LoCo)")
    mics_shard_size: Int = used(-1, "Data-parallel ranks per shard group, each with a whole set of shards (stages 1 to 3); -1 is all ranks")
    mics_hierarchical_params_gather: Bool = accepted(
        False, "Gather inside and across nodes in two steps", "gathers never leave the shard group, which can be a node"
    )
    memory_efficient_linear: Bool = accepted(
        True,
        "Replace torch.nn.functional.linear with a version that saves memory",
        "linear layers are not replaced; released weights take no memory in saved activations",
    )
    pipeline_loading_checkpoint: Bool = accepted(
        False, "Load ranks one after another", "each rank reads only the byte ranges of its own shards"
    )
    override_module_apply: Bool = accepted(
        True, "Patch Module.apply so that it gathers", "inside zero.Init, apply() of a sharded layer gathers"
    )
    log_trace_cache_warnings: Bool = accepted(
        False,
        "Warn when the fetch order trace is invalidated",
        "the order of gathers is fixed at start; there is no trace that could become invalid",
    )
    enable_sanity_checks: Bool = accepted(False, "Run internal consistency checks", "the checks are always on; they cost no communication")
    save_muon_momentum_buffer_in_memory: Bool = accepted(
        False, "Keep Muon momentum in memory", "its rank keeps it on the training device or, with offload_optimizer, in host memory"
    )
    leaf_module: LeafModule = section(LeafModule, "Modules fetched as one unit")
    offload_param: OffloadParam = section(OffloadParam, "Keep parameter shards on host or NVMe")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "Keep optimizer states on host or NVMe and update there")
    zenflow: dict[str, Any] | None = refused(
        None,
        "Update the most important gradients on the device and the rest later on the host",
        "not supported: every gradient is applied in its own step",
        model=unread.ZENFLOW,
    )
