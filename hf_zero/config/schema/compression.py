"""Sections for quantized, pruned or sparse models."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_zero.config.schema.fields import Bool, Float, Int, Section, part, refused, section

COMPRESS_AFTERWARDS = "not supported: compress the trained model with torchao or optimum"


class SparseAttention(Section):
    """`sparse_attention`. Layout of block-sparse attention."""

    mode: str = part("fixed", "dense fixed variable bigbird bslongformer")
    block: Int = part(16, "Block edge")
    different_layout_per_head: Bool = part(False, "One layout per head")
    num_local_blocks: Int = part(4, "Blocks in the local window")
    num_global_blocks: Int = part(1, "Blocks that attend globally")
    attention: str = part("bidirectional", "unidirectional or bidirectional")
    horizontal_global_attention: Bool = part(False, "Global blocks also attend along rows")
    num_different_global_patterns: Int = part(1, "Distinct global patterns over heads")
    num_random_blocks: Int = part(0, "Random blocks per row")
    local_window_blocks: list[Int] = part(lambda: [4], "Sizes of the local windows")
    global_block_indices: list[Int] = part(lambda: [0], "Indices of global blocks")
    global_block_end_indices: list[Int] | None = part(None, "Ends of global block ranges")
    num_sliding_window_blocks: Int = part(3, "Blocks in the sliding window")


class LayerReduction(Section):
    """`compression_training.layer_reduction`. Student from selected teacher layers."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Initialise a shallower student", "not supported: build the student model before training")
    keep_number_layer: Int | None = part(None, "Layers kept")
    module_name_prefix: str | None = part(None, "Prefix of the layer modules")
    teacher_layer: list[Int] | None = part(None, "Source layers")
    other_module_name: list[str] | None = part(None, "Other modules copied")


class Fp16MixedQuantize(Section):
    """`compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize`. Blend of quantized and fp16 values."""

    enabled: Bool = part(False, "Blend with the unquantized value")
    quantize_change_ratio: Float = part(0.001, "Blend speed")


class WeightShared(Section):
    """What all groups of quantized weights share."""

    enabled: Bool = refused(False, "Turn weight quantization on", COMPRESS_AFTERWARDS)
    quantizer_kernel: Bool = part(False, "Use the native kernel")
    schedule_offset: Int = part(0, "First active step")
    quantize_groups: Int = part(1, "Scaling groups")
    quantize_verbose: Bool = part(False, "Print progress")
    quantization_type: str = part("symmetric", "symmetric or asymmetric")
    rounding: str = part("nearest", "nearest or stochastic")
    quantize_weight_in_forward: Bool = part(False, "Quantize in forward instead of in the optimizer")
    fp16_mixed_quantize: Fp16MixedQuantize | None = section(None, "Blend of quantized and fp16 values")


class WeightBits(Section):
    """Bit widths of one group of quantized weights."""

    start_bits: Int | None = part(None, "First width")
    target_bits: Int | None = part(None, "Last width")
    quantization_period: Int = part(1, "Steps per bit")


class WeightGroup(Section):
    """One group of quantized weights."""

    params: WeightBits | None = section(None, "Values of the group")
    modules: list[str] | str = part("*", "Module patterns")
    related_modules: list[Any] | None = part(None, "Related module patterns")


class WeightCompression(Section):
    """`compression_training.weight_quantization`. Quantized weights."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: WeightShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, WeightGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class ActivationShared(Section):
    """What all groups of quantized activations share."""

    enabled: Bool = refused(False, "Turn activation quantization on", COMPRESS_AFTERWARDS)
    quantization_type: str = part("symmetric", "symmetric or asymmetric")
    range_calibration: str = part("dynamic", "dynamic or static")
    schedule_offset: Int = part(1000, "First active step")


class ActivationBits(Section):
    """Bit width of one group of quantized activations."""

    bits: Int | None = part(None, "Width")


class ActivationGroup(Section):
    """One group of quantized activations."""

    params: ActivationBits | None = section(None, "Values of the group")
    modules: list[str] | str = part("*", "Module patterns")
    related_modules: list[Any] | None = part(None, "Related module patterns")


class ActivationQuantization(Section):
    """`compression_training.activation_quantization`. Quantized activations."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: ActivationShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, ActivationGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class PrunedShare(Section):
    """How much of one pruned group is kept."""

    dense_ratio: Float | None = part(None, "Share kept")


class PrunedGroup(Section):
    """One group of pruned modules."""

    params: PrunedShare | None = section(None, "Values of the group")
    modules: list[str] | str = part("*", "Module patterns")
    related_modules: list[Any] | None = part(None, "Modules whose columns follow")


class SparsePruningShared(Section):
    """What all groups of sparse pruning share."""

    enabled: Bool = refused(False, "Turn sparse pruning on", COMPRESS_AFTERWARDS)
    method: str = part("l1", "l1 topk or snip_momentum")
    schedule_offset: Int = part(1000, "First active step")
    schedule_offset_end: Int = part(1000, "Last active step (snip_momentum)")
    schedule_offset_stride: Int = part(1, "Steps between prunings (snip_momentum)")
    block_pattern: str = part("4x1", "Pattern (snip_momentum)")
    dense_ratio: Float = part(0.1, "Target density (snip_momentum)")
    excluded_modules: list[str] = part(list, "Modules left alone (snip_momentum)")


class SparsePruning(Section):
    """`compression_training.sparse_pruning`. Pruned single weights."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: SparsePruningShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, PrunedGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class RowPruningShared(Section):
    """What all groups of row pruning share."""

    enabled: Bool = refused(False, "Turn row pruning on", COMPRESS_AFTERWARDS)
    method: str = part("l1", "l1 or topk")
    schedule_offset: Int = part(1000, "First active step")


class RowPruning(Section):
    """`compression_training.row_pruning`. Pruned rows."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: RowPruningShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, PrunedGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class HeadPruningShared(Section):
    """What all groups of head pruning share."""

    enabled: Bool = refused(False, "Turn head pruning on", COMPRESS_AFTERWARDS)
    method: str = part("topk", "l1 or topk")
    schedule_offset: Int = part(1000, "First active step")
    num_heads: Int | None = part(None, "Number of heads")


class HeadPruning(Section):
    """`compression_training.head_pruning`. Pruned attention heads."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: HeadPruningShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, PrunedGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class ChannelPruningShared(Section):
    """What all groups of channel pruning share."""

    enabled: Bool = refused(False, "Turn channel pruning on", COMPRESS_AFTERWARDS)
    method: str = part("l1", "l1 or topk")
    schedule_offset: Int = part(1000, "First active step")


class ChannelPruning(Section):
    """`compression_training.channel_pruning`. Pruned channels."""

    switch: ClassVar[str | None] = "shared_parameters.enabled"

    shared_parameters: ChannelPruningShared | None = section(None, "Settings of all groups")
    different_groups: dict[str, PrunedGroup] | None = section(None, "Groups of modules, by name", each="<group>")


class CompressionTraining(Section):
    """`compression_training`. Compression techniques."""

    layer_reduction: LayerReduction | None = section(None, "Student from selected teacher layers")
    weight_quantization: WeightCompression | None = section(None, "Quantize weights step by step")
    activation_quantization: ActivationQuantization | None = section(None, "Quantize activations")
    sparse_pruning: SparsePruning | None = section(None, "Prune single weights")
    row_pruning: RowPruning | None = section(None, "Prune rows")
    head_pruning: HeadPruning | None = section(None, "Prune attention heads")
    channel_pruning: ChannelPruning | None = section(None, "Prune channels")


class Eigenvalue(Section):
    """`quantize_training.eigenvalue`. Curvature-driven quantization schedule."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Eigenvalue driven quantization", COMPRESS_AFTERWARDS)
    verbose: Bool = part(False, "Print progress")
    max_iter: Int = part(100, "Power iterations")
    tol: Float = part(0.01, "Tolerance")
    stability: Float = part(1e-6, "Stability constant")
    gas_boundary_resolution: Int = part(1, "Boundaries between computations")
    layer_name: str = part("bert.encoder.layer", "Layer name")
    layer_num: Int = part(0, "Layer count")


class QuantizeTraining(Section):
    """`quantize_training`. Legacy section; only eigenvalue is read."""

    eigenvalue: Eigenvalue | None = section(None, "Curvature-driven quantization schedule")


class WeightQuantization(Section):
    """`weight_quantization`. Quantized weights with stage 3."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(
        True,
        "Quantized weights (only when the section exists)",
        "not supported: load the model with a quantization_config of transformers",
    )
    num_bits: Int = part(8, "Width")
    q_type: str = part("symmetric", "symmetric or asymmetric")
    q_groups: Int = part(1, "Scaling groups")
    quantized_initialization: dict[str, Any] = part(dict, "Options when weights are created quantized")
    post_init_quant: dict[str, Any] = part(dict, "Options when quantized after creation")
