"""Sections that change what is trained on or which layers run: curricula, token dropping, layer dropping."""

from __future__ import annotations

from typing import ClassVar

from hf_zero.config.schema.fields import Bool, Float, Int, Section, part, refused, section

OWN_SAMPLER = "not supported: pass a sampler to your DataLoader"


class MetricPacing(Section):
    """Pacing of one curriculum metric."""

    total_curriculum_step: Int | None = part(None, "Steps to reach the end (linear, root)")
    difficulty_step: Int | None = part(None, "Difficulty granularity (linear, root)")
    root_degree: Int | None = part(None, "Root degree (root)")
    difficulty: list[Int] | None = part(None, "Difficulties (discrete)")
    max_step: list[Int] | None = part(None, "Steps at which they end (discrete)")


class Metric(Section):
    """One curriculum metric."""

    index_to_sample_path: str | None = part(None, "Index file of samples")
    index_to_metric_path: str | None = part(None, "Index file of metric values")
    difficulty_type: str | None = part(None, "value or percentile")
    clustering_type: str | None = part(None, "schedule_based or single_cluster")
    min_difficulty: Int | None = part(None, "Difficulty at the start")
    max_difficulty: Int | None = part(None, "Difficulty at the end")
    schedule_type: str | None = part(None, "fixed_linear fixed_root fixed_discrete or custom")
    schedule_config: MetricPacing | None = section(None, "Parameters of the pacing function")


class CurriculumLearning(Section):
    """`data_efficiency.data_sampling.curriculum_learning`. Curriculum over precomputed metrics."""

    enabled: Bool = part(False, "Turn the curriculum on")
    data_cluster_path: str | None = part(None, "Folder for difficulty clusters")
    curriculum_metrics: dict[str, Metric] | None = section(None, "One entry per metric", each="<metric>")


class DynamicBatching(Section):
    """`data_efficiency.data_sampling.dynamic_batching`. Batches sized by token count."""

    enabled: Bool = part(False, "Batch by token count")
    metrics_path: str | None = part(None, "Folder with sequence lengths")
    lr_scaling_method: str = part("linear", "linear sqrt or none")
    min_batch_size: Int = part(1, "Smallest batch")
    max_batch_size: Int | None = part(None, "Largest batch")
    sequence_picking_order: str = part("dataloader", "random seqlen or dataloader")
    max_tokens: Int | None = part(None, "Tokens per batch")
    verbose: Bool = part(False, "Print statistics")


class DataSampling(Section):
    """`data_efficiency.data_sampling`. Sampling part."""

    enabled: Bool = part(False, "Turn sampling on")
    num_epochs: Int = part(1000, "Most epochs over the data")
    num_workers: Int = part(0, "Loader workers")
    pin_memory: Bool = part(False, "Pin loader memory")
    curriculum_learning: CurriculumLearning | None = section(None, "Curriculum over precomputed metrics")
    dynamic_batching: DynamicBatching | None = section(None, "Batches sized by token count")


class LtdPacing(Section):
    """Pacing of random layer token dropping."""

    require_steps: Int | None = part(None, "Steps to reach the end")
    seq_per_step: Int | None = part(None, "Length granularity")


class RandomLtdSchedule(Section):
    """`data_efficiency.data_routing.random_ltd.random_ltd_schedule`. Schedule of the kept length."""

    min_value: Int | None = part(None, "First kept length")
    max_value: Int | None = part(None, "Last kept length")
    schedule_type: str | None = part(None, "fixed_linear")
    schedule_config: LtdPacing | None = section(None, "Parameters of the pacing function")


class LayerTokenLrSchedule(Section):
    """`data_efficiency.data_routing.random_ltd.layer_token_lr_schedule`. Learning rate by consumed layer tokens."""

    enabled: Bool = part(False, "Schedule the rate by tokens per layer")
    total_layer_tokens: Int | None = part(None, "Tokens of the whole schedule")
    warmup_type: str | None = part(None, "Warm-up curve")
    warmup_layer_tokens: Int | None = part(None, "Warm-up tokens")


class RandomLtd(Section):
    """`data_efficiency.data_routing.random_ltd`. Random layer token dropping."""

    enabled: Bool = part(False, "Turn random layer token dropping on")
    total_layer_num: Int | None = part(None, "Layers in the model")
    random_ltd_layer_num: Int | None = part(None, "Layers that drop tokens")
    random_ltd_layer_id: list[Int] | None = part(None, "Their indices")
    model_mask_name: str | None = part(None, "Keyword of the attention mask; may be null")
    model_type: str | None = part(None, "encoder or decoder")
    hidden_state_order: str | None = part(None, "batch_seq_dim or seq_batch_dim")
    random_ltd_schedule: RandomLtdSchedule | None = section(None, "Schedule of the kept length")
    layer_token_lr_schedule: LayerTokenLrSchedule | None = section(None, "Learning rate by consumed layer tokens")
    micro_batch_size: Int | None = part(None, "Internal copy of the micro batch size")
    global_batch_size: Int | None = part(None, "Internal copy of the global batch size")


class DataRouting(Section):
    """`data_efficiency.data_routing`. Token routing part."""

    enabled: Bool = part(False, "Turn routing on")
    random_ltd: RandomLtd | None = section(None, "Random layer token dropping")


class DataEfficiency(Section):
    """`data_efficiency`. Curriculum sampling and token dropping."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Turn the library on", OWN_SAMPLER)
    seed: Int = part(1234, "Seed of the sampler")
    data_sampling: DataSampling | None = section(None, "Sampling part")
    data_routing: DataRouting | None = section(None, "Token routing part")


class CurriculumPacing(Section):
    """`curriculum_learning.schedule_config`. Parameters of the pacing function."""

    total_curriculum_step: Int | None = part(None, "Steps to reach the end (linear, root)")
    difficulty_step: Int | None = part(None, "Difficulty granularity (linear, root)")
    root_degree: Int | None = part(None, "Root degree (root)")
    difficulty: list[Int] | None = part(None, "Difficulties (discrete)")
    max_step: list[Int] | None = part(None, "Steps at which they end (discrete)")


class LegacyCurriculum(Section):
    """`curriculum_learning`. Older curriculum on sequence length."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Turn the legacy curriculum on", OWN_SAMPLER)
    curriculum_type: str | None = part(None, "seqlen")
    min_difficulty: Int | None = part(None, "Difficulty at the start")
    max_difficulty: Int | None = part(None, "Difficulty at the end")
    schedule_type: str | None = part(None, "fixed_linear fixed_root fixed_discrete or custom")
    schedule_config: CurriculumPacing | None = section(None, "Parameters of the pacing function")


class ProgressiveLayerDrop(Section):
    """`progressive_layer_drop`. Stochastic depth schedule."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Bool = refused(False, "Turn progressive layer drop on", "not supported: use the layerdrop option of the model")
    theta: Float = part(1.0, "Lowest keep ratio")
    gamma: Float = part(0.001, "Schedule speed")
