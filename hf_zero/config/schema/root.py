"""The root of the configuration schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hf_zero.config.schema import unread
from hf_zero.config.schema.fields import (
    ANY_CASE,
    Bool,
    Bound,
    Count,
    Dtype,
    Int,
    Positive,
    Section,
    Steps,
    accepted,
    refused,
    section,
    used,
)
from hf_zero.config.schema.monitoring import Comet, CommsLogger, CsvMonitor, FlopsProfiler, Tensorboard, Timers, Trackio, Wandb
from hf_zero.config.schema.own import OwnSettings
from hf_zero.config.schema.parallel import Elasticity, ExpertParallel, Pipeline, TensorParallel
from hf_zero.config.schema.storage import ActivationCheckpointing, Aio, Checkpoint, Compile, DataStates
from hf_zero.config.schema.training import Bf16, DataTypes, Fp16, Optimizer, Scheduler, TorchAutocast
from hf_zero.config.schema.zero import ZeroOptimization


class ZeroConfig(Section):
    """The whole configuration file, with DeepSpeed's key names."""

    train_batch_size: Count | None = used(
        None, "Global samples per optimizer step; must equal micro batch x accumulation x data-parallel world size"
    )
    train_micro_batch_size_per_gpu: Count | None = used(None, "Samples per rank in one forward/backward")
    gradient_accumulation_steps: Count | None = used(None, "Micro batches accumulated before one optimizer step")
    managed_gradient_accumulation: Bool = used(
        True, "true: engine counts micro steps; false: every step() applies an update and boundary setters are refused"
    )
    sequence_parallel_size: Count | None = used(
        None, "Adjacent ranks that share their samples, each with a slice of every sequence; 1 is off. Batch sizes count such groups once"
    )
    data_parallel_size: Count | None = used(
        None,
        "Number of ranks, or groups of ranks that share samples, that train on samples of their own; checked against the number of ranks",
    )
    dataloader_drop_last: Bool = used(False, "Drop the last incomplete batch of the loader the engine builds from training_data")
    optimizer: Optimizer | None = section(
        None, "Optimizer the engine builds itself from model_parameters; absent means a client optimizer or none"
    )
    zero_allow_untested_optimizer: Bool = used(
        False,
        "Accept a client optimizer that cannot be tried; an explicit false refuses unknown ones",
    )
    zero_force_ds_cpu_optimizer: Bool = used(
        True,
        "An explicit true refuses a client optimizer that is not a DeepSpeed CPU optimizer when the optimizer is offloaded; accelerate "
        "reads the key, and with false leaves the client's optimizer in place",
    )
    scheduler: Scheduler | None = section(None, "Scheduler the engine builds on engine.optimizer and advances inside step()")
    communication_data_type: Dtype | None = used(
        None, "Element type of gradient reduction: fp16, bf16 or fp32; unset follows the precision"
    )
    seq_parallel_communication_data_type: Dtype = used(
        "fp32", "Element type of gradient reduction where sequences are divided over ranks; replaces communication_data_type there"
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], ANY_CASE] = used(
        "mean", "mean averages over data-parallel ranks, sum leaves the sum"
    )
    prescale_gradients: Bool = used(False, "Divide before instead of after the reduction")
    gradient_predivide_factor: Positive = used(1.0, "Extra division before a mean reduction")
    sparse_gradients: Bool = accepted(
        False,
        "Reduce embedding gradients in sparse form; only in the engine reduction used when ZeRO is off",
        "embedding gradients are reduced dense as part of their unit; the sums are the same",
    )
    disable_allgather: Bool = refused(
        False,
        "Legacy switch that turns the update all-gather off",
        "remove it: without the all-gather after the step the ranks would train on old parameters",
    )
    allgather_size: Int = accepted(
        500000000, "Elements per weight all-gather (old name)", "a unit of any size is gathered by one collective"
    )
    use_data_before_expert_parallelism: Bool = accepted(
        False, "Order of data and expert axes when expert groups are made", "ranks that hold all experts together are always adjacent"
    )
    vocabulary_size: Int | None = accepted(
        None, "Vocabulary size, checked for alignment", "only used for a warning about alignment; units are padded independently of it"
    )
    graph_harvesting: Bool = accepted(
        False,
        "Replay ZeRO work through captured graphs where supported",
        "no part of the step is captured as a graph; the numbers are the same",
    )
    fp16: Fp16 = section(Fp16, "fp16 weights with loss scaling; exclusive with bf16 and amp")
    bf16: Bf16 = section(Bf16, "bf16 weights without loss scaling; exclusive with fp16 and amp", also=("bfloat16",))
    amp: dict[str, Any] | None = section(None, "NVIDIA apex mixed precision", model=unread.AMP)
    torch_autocast: TorchAutocast = section(TorchAutocast, "Run the engine forward under torch.autocast")
    gradient_clipping: Bound = used(1.0, "Clip the global gradient norm to this value; 0 disables")
    zero_optimization: ZeroOptimization = section(
        ZeroOptimization, "What ZeRO shards, offloads and gathers; true is the old form of stage 1", bool_ok=True
    )
    steps_per_print: Steps = used(None, "Progress line every N steps; null and infinity are silent")
    wall_clock_breakdown: Bool = used(False, "Time forward, backward and step")
    memory_breakdown: Bool = used(False, "Log memory use per phase")
    disable_python_gc: Bool = used(False, "Switch Python's garbage collector off in initialize, for good")
    dump_state: Bool = used(False, "Print the parsed configuration")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], ANY_CASE] | None = used(
        None, "Level of the hf_zero logger"
    )
    timers: Timers = accepted(Timers, "Timer section", "samples per second are measured when steps_per_print is set")
    autotuning: dict[str, Any] | None = section(
        None, "Search for stage, micro batch and related settings from the launcher", model=unread.AUTOTUNING
    )
    flops_profiler: FlopsProfiler | None = section(None, "Count operations and time of one training step")
    activation_checkpointing: ActivationCheckpointing | None = section(None, "Settings of deepspeed.checkpointing")
    sparse_attention: dict[str, Any] | None = refused(
        None,
        "Layout of block-sparse attention",
        "not supported: choose attn_implementation when the model is made",
        model=unread.SPARSE_ATTENTION,
    )
    pipeline: Pipeline = section(Pipeline, "Layers divided over the stages of a pipeline")
    data_efficiency: dict[str, Any] | None = section(None, "Curriculum sampling and token dropping", model=unread.DATA_EFFICIENCY)
    curriculum_learning: dict[str, Any] | None = section(None, "Older curriculum on sequence length", model=unread.CURRICULUM_LEARNING)
    tensorboard: Tensorboard = section(Tensorboard, "TensorBoard monitor")
    wandb: Wandb = section(Wandb, "Weights & Biases monitor")
    comet: Comet = section(Comet, "Comet monitor")
    csv_monitor: CsvMonitor = section(CsvMonitor, "csv monitor")
    trackio: Trackio = section(Trackio, "Trackio monitor")
    elasticity: Elasticity | None = section(None, "Batch size computed for a range of world sizes")
    comms_logger: CommsLogger | None = section(None, "Recorder of collectives")
    compression_training: dict[str, Any] | None = section(None, "Compression techniques", model=unread.COMPRESSION_TRAINING)
    quantize_training: dict[str, Any] | None = section(None, "Old quantization section", model=unread.QUANTIZE_TRAINING)
    weight_quantization: dict[str, Any] | None = section(None, "Quantized weights with stage 3", model=unread.WEIGHT_QUANTIZATION)
    progressive_layer_drop: dict[str, Any] | None = section(None, "Stochastic depth schedule", model=unread.PROGRESSIVE_LAYER_DROP)
    checkpoint: Checkpoint = section(Checkpoint, "Options of save and load")
    nebula: dict[str, Any] | None = section(None, "Azure checkpoint service", model=unread.NEBULA)
    datastates_ckpt: DataStates | None = used(
        None, "Write checkpoints in the background, as checkpoint.writer.decoupled does", bool_ok=True
    )
    data_types: DataTypes = section(DataTypes, "Element types outside the fp16 and bf16 sections")
    tensor_parallel: TensorParallel | None = section(None, "AutoTP training")
    expert_parallel: ExpertParallel | None = section(None, "Expert parallelism (AutoEP)")
    hybrid_engine: dict[str, Any] | None = section(None, "Training and generation in one engine", model=unread.HYBRID_ENGINE)
    aio: Aio = section(Aio, "How swap files of NVMe offload are accessed")
    compile: Compile | None = section(None, "DeepCompile")
    msamp: dict[str, Any] | None = section(None, "Written by accelerate for MS-AMP", model=unread.MSAMP)
    hf_zero: OwnSettings = section(OwnSettings, "Settings that DeepSpeed does not have; it ignores the section")
    inference: dict[str, Any] | None = section(None, "Inference settings that transformers reads", model=unread.INFERENCE)
